"""Records of the older APIs can be changed and taken apart; and the stream takes what the earlier tool took."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
import torch

import edge_opt as eo
from edge_opt.errors import InvalidInput
from edge_opt.hardware import LayerEstimate
from edge_opt.metrics import collect_metrics
from edge_opt.model import SmallCNN
from edge_opt.stream import FALLBACK_MS_PER_ROW, HardwareProfile


def metrics() -> Any:
    batch = torch.zeros(4, 1, 28, 28), torch.zeros(4, dtype=torch.int64)
    return collect_metrics(SmallCNN(), [batch], "cpu", 2.0, "fp32", benchmark_repeats=1, benchmark_trials=1)


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: LayerEstimate("conv1", 1, 2, 3, 4), "macs"),
        (lambda: HardwareProfile(memory_limit_mb=1.0, compute_budget=2.0), "compute_budget"),
        (metrics, "accuracy"),
    ],
    ids=["LayerEstimate", "HardwareProfile", "Metrics"],
)
def test_records_can_be_changed_and_taken_apart(make: Any, field: str) -> None:
    record = make()
    assert vars(record) == asdict(record)
    setattr(record, field, 0.5)
    assert getattr(record, field) == vars(record)[field] == asdict(record)[field] == 0.5
    record.remark = "mine"
    assert vars(record)["remark"] == "mine"


@pytest.mark.parametrize(
    ("features", "rows", "said"), [(0, 8, ["feature_count"]), (0, 0, ["feature_count", "batch_size"])]
)
def test_zero_rows_and_features_are_taken_as_one(features: int, rows: int, said: list[str]) -> None:
    found = eo.build_hardware_profile_table(features, rows, 10, latency_ms_per_row="published")
    clamped = eo.build_hardware_profile_table(max(features, 1), max(rows, 1), 10, latency_ms_per_row="published")
    assert [remark.split()[0] for remark in found.pop("remarks")] == said
    assert clamped.pop("remarks") == []
    assert found == clamped


def test_negative_counts_are_refused_still() -> None:
    with pytest.raises(InvalidInput, match="batch_size is -1"):
        eo.build_hardware_profile_table(8, -1, 10)


def test_the_published_constants_are_there_by_name() -> None:
    found = eo.build_hardware_profile_table(64, 32, 10, latency_ms_per_row="published")
    latencies = {row["operator"]: row["latency_ms"] for row in found["operator_profile"]}
    assert latencies == pytest.approx({name: 32 * ms for name, ms in FALLBACK_MS_PER_ROW.items()})
    assert "invented" in found["estimate_source"]
    with pytest.raises(InvalidInput, match="or be 'published'"):
        eo.build_hardware_profile_table(64, 32, 10, latency_ms_per_row="invented")  # type: ignore[arg-type]


def test_without_a_calibration_operators_are_timed_here() -> None:
    found = eo.build_hardware_profile_table(64, 32, 10)
    assert found["estimate_source"].startswith("timed here")
    assert all(row["latency_ms"] > 0 for row in found["operator_profile"])


def test_timing_leaves_random_numbers_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    eo.build_hardware_profile_table(16, 4, 10)
    assert torch.equal(torch.rand(4), expected)
