"""Sweeps as documents and tables."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace

import pytest

from edge_opt.errors import UnreadableSweep
from edge_opt.hardware import precision_tradeoff_table
from edge_opt.report.sweep_files import (
    frontier_keys,
    read_sweep,
    sweep_csv,
    sweep_dataframe,
    sweep_document,
    sweep_rows,
)
from sweeps import done, failed, metrics, small_sweep, sweep


def test_a_sweep_reads_back_equal() -> None:
    result = small_sweep()
    assert read_sweep(sweep_document(result)) == result


def test_an_empty_sweep_and_one_of_failures_read_back_equal() -> None:
    for result in (sweep(), sweep(failed(0.25), failed(0.5))):
        assert read_sweep(sweep_document(result)) == result


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda text: text[: len(text) // 2], "not JSON, or is cut off"),
        (lambda text: "[1, 2]", "not a sweep"),
        (lambda text: text.replace('"edge_opt.sweep"', '"edge_opt.profile"'), "not a sweep"),
        (lambda text: text.replace('"schema_version": 1', '"schema_version": 99'), "upgrade edge-opt"),
        (lambda text: text.replace('"schema_version": 1', '"schema_version": "x"'), "run the sweep again"),
        (lambda text: text.replace('"status": "done"', '"status": "lost"'), "status is 'lost'"),
    ],
)
def test_what_is_no_sweep_is_refused_in_one_sentence(damage: object, words: str) -> None:
    with pytest.raises(UnreadableSweep, match=words) as raised:
        read_sweep(damage(sweep_document(small_sweep())), "'out/sweep.json'")  # type: ignore[operator]
    assert str(raised.value).startswith("'out/sweep.json' ")


def test_rows_hold_milliseconds_and_mebibytes() -> None:
    row = sweep_rows(sweep(done(0.5, "int8")))[0]
    assert row["latency_ms"] == pytest.approx(8 * 0.5 * 0.5)
    assert row["memory_mb"] == row["model_memory_mb"] < row["peak_memory_mb"]
    assert row["peak_memory_mb"] == pytest.approx((4_000_000 * 0.5 * 0.25 + 1_000_000) / 2**20)
    assert row["size_mb"] == pytest.approx((4_000_000 * 0.5 * 0.25 + 2048) / 2**20)
    assert (row["accepted"], row["failure"], row["on_latency_frontier"]) == (True, None, True)


def test_a_failed_row_has_a_reason_and_no_figures() -> None:
    row = sweep_rows(sweep(failed(0.5, "out of luck")))[0]
    assert row["accuracy"] is None and row["macs"] is None and row["latency_ms"] is None
    assert (row["accepted"], row["failure"], row["reason"]) == (False, "raised", "out of luck")


def test_measured_energy_is_not_called_a_proxy() -> None:
    trial = replace(done(0.0), metrics=metrics(0.0, "fp32", energy_source="rapl"))
    row = sweep_rows(sweep(trial))[0]
    assert row["energy_j"] == pytest.approx(5 * 8e-3)
    assert row["energy_proxy_j"] is None and row["energy_source"] == "rapl"


def test_the_frontier_of_two_objectives_is_not_that_of_three() -> None:
    result = replace(small_sweep(), frontiers=(("accuracy, latency, energy", ("a",)), ("accuracy_latency_ms", ("b",))))
    assert frontier_keys(result, "latency") == {"b"}
    assert frontier_keys(result, "energy") == frozenset()


def test_the_published_table_of_precisions_reads_the_frame() -> None:
    found = precision_tradeoff_table(sweep_dataframe(small_sweep()))
    assert found["precision"].tolist() == ["int8", "fp32"]  # means 3 ms (the failed row has none) and 6 ms
    assert found["latency_ms_mean"].tolist() == pytest.approx([(4 + 2) / 2, (8 + 6 + 4) / 3])
    assert found["accepted_ratio"].tolist() == pytest.approx([2 / 3, 1 / 3])


def test_the_published_table_reads_a_sweep_without_proxies() -> None:
    trial = replace(done(0.0), metrics=metrics(0.0, "fp32", energy_source="rapl"))
    assert precision_tradeoff_table(sweep_dataframe(sweep(trial)))["energy_proxy_j_mean"].isna().all()


def test_an_empty_frame_has_its_columns() -> None:
    assert list(sweep_dataframe(sweep()).columns) == list(sweep_rows(small_sweep())[0])


def test_csv_runs_nothing_in_a_spreadsheet() -> None:
    rows = list(csv.DictReader(io.StringIO(sweep_csv(sweep(failed(0.5, "=cmd()"), done(0.0))))))
    assert rows[0]["reason"] == "'=cmd()" and rows[0]["accuracy"] == ""
    assert float(rows[1]["accuracy"]) == 0.9


def test_the_document_is_standard_json_with_one_line_per_trial() -> None:
    text = sweep_document(small_sweep())
    json.loads(text, parse_constant=lambda name: pytest.fail(name))
    assert sum(line.startswith('  {"candidate"') for line in text.splitlines()) == 6
