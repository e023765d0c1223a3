"""Budgets judge the figures of a trial; a figure that is not known never passes for one that fits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edge_opt.budgets import TRIAL_METRICS, parse_budget, violations
from edge_opt.records.sweeps import Violation
from trial_metrics import METRICS


def broken(*texts: str) -> list[str]:
    return [found.constraint for found in violations(METRICS, [parse_budget(text, TRIAL_METRICS) for text in texts])]


def test_each_broken_budget_is_named() -> None:
    texts = ("latency_ms <= 15", "latency_ms < 15", "peak_memory_mb <= 47.9", "size_mb <= 2", "macs <= 600M")
    # 0.015 s is 15 ms; 48 MiB are more than 47.9.
    assert broken(*texts) == ["latency_ms < 15", "peak_memory_mb <= 47.9"]


def test_floors_are_broken_from_below() -> None:
    assert broken("accuracy >= 0.94", "accuracy >= 93%", "throughput >= 2k") == ["accuracy >= 0.94"]


def test_value_and_limit_are_in_the_unit_of_the_name() -> None:
    (found,) = violations(METRICS, [parse_budget("size_kb <= 1000")])
    assert found == Violation("size_kb <= 1000", "size_kb", 2048.0, 1000.0)
    assert found.excess == 1048.0


def test_an_unknown_figure_is_a_violation_without_a_value() -> None:
    (found,) = violations(METRICS, [parse_budget("energy_j <= 1")])
    assert found.value is None and found.excess is None
    assert violations(replace(METRICS, energy_j=0.5), [parse_budget("energy_mj <= 500")]) == ()


@pytest.mark.parametrize("name", TRIAL_METRICS)
def test_every_metric_reads_a_number_or_says_that_it_is_not_known(name: str) -> None:
    value = TRIAL_METRICS[name].value(METRICS)
    assert value is None or value >= 0
    assert (value is None) == (
        TRIAL_METRICS[name].family
        in (
            "energy",
            "test_accuracy",
            "single_latency",
            "deploy_latency",
            "measured_memory",
            "train_flops",
            "train_peak_memory",
            "target_latency",
            "target_ram",
            "target_flash",
            "target_energy",
        )
    )
