"""The operator profile of a feature stream: its formulas, its workflow, its files."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import edge_opt as eo
from calibrations import imaginary
from edge_opt import stream
from edge_opt.calibration.calibration_file import host_file, save_calibration
from edge_opt.errors import InvalidInput

OPERATORS = ["input_normalization", "linear_projection", "activation", "decision_head"]
TABLE = eo.build_hardware_profile_table(
    feature_count=64, batch_size=32, stream_interval_ms=10, latency_ms_per_row="published"
)
KIB = 32 * (8 * 64 + 12 * 64 + 4 * 64 + 8) / 1024  # bytes per feature and per row


def test_each_operator_follows_its_formula() -> None:
    rows = TABLE["operator_profile"]
    assert [list(row) for row in rows] == [["operator", "latency_ms", "memory_kb"]] * 4
    assert [row["operator"] for row in rows] == OPERATORS
    assert [row["latency_ms"] for row in rows] == pytest.approx([32 * ms for ms in (0.01, 0.03, 0.008, 0.012)])
    assert [row["memory_kb"] for row in rows] == [
        32 * 64 * 8 / 1024,
        32 * 64 * 12 / 1024,
        32 * 64 * 4 / 1024,
        32 * 8 / 1024,
    ]


def test_totals_are_sums_and_their_quotient() -> None:
    totals = TABLE["totals"]
    assert list(totals) == ["latency_ms", "memory_kb", "estimated_bandwidth_mb_s", "stream_utilization"]
    assert totals["memory_kb"] == KIB
    assert totals["latency_ms"] == pytest.approx(32 * 0.06)
    assert totals["estimated_bandwidth_mb_s"] == pytest.approx((KIB / 1024) / (32 * 0.06 / 1000))
    assert totals["stream_utilization"] == pytest.approx(32 * 0.06 / 10)


def test_utilization_of_the_interval_stops_at_one() -> None:
    table = eo.build_hardware_profile_table(64, 32, 0.5, latency_ms_per_row="published")
    assert table["totals"]["stream_utilization"] == 1.0


def test_precisions_halve_and_quarter_the_memory() -> None:
    found = dict(TABLE["precision_tradeoffs"])
    assert "latency" in found.pop("note")
    assert found == {"fp32_memory_kb": KIB, "fp16_memory_kb": KIB / 2, "int8_memory_kb": KIB / 4}


def test_constraints_name_the_bottleneck_and_the_cache() -> None:
    constraints = TABLE["edge_constraints"]
    assert list(constraints) == ["cache_sensitivity", "bottleneck"]
    # 0.03 of 0.06 ms; 12 of 24.125 bytes per feature
    assert constraints["bottleneck"] == (
        "linear_projection takes 50 % of the latency; linear_projection moves 50 % of the memory"
    )
    assert constraints["cache_sensitivity"].startswith("moderate")
    small = eo.build_hardware_profile_table(64, 4, 10)
    assert small["edge_constraints"]["cache_sensitivity"].startswith("high: with a batch of 4")
    assert eo.find_bottleneck(TABLE) == constraints["bottleneck"]


def test_invented_latencies_say_so_and_given_ones_say_whose() -> None:
    assert "invented" in TABLE["estimate_source"]
    given_ms = dict.fromkeys(OPERATORS, 0.002)
    table = eo.build_hardware_profile_table(
        64, 32, 10, latency_ms_per_row=given_ms, latency_source="measured on board 7"
    )
    assert table["estimate_source"] == "measured on board 7"
    assert table["totals"]["latency_ms"] == pytest.approx(32 * 4 * 0.002)
    assert table["totals"]["memory_kb"] == KIB


@given(features=st.integers(1, 10_000), batch=st.integers(1, 10_000), interval=st.floats(0.01, 1e6))
def test_rows_add_up_and_twice_the_batch_is_twice_the_cost(features: int, batch: int, interval: float) -> None:
    once = eo.build_hardware_profile_table(features, batch, interval, latency_ms_per_row="published")
    twice = eo.build_hardware_profile_table(features, 2 * batch, interval, latency_ms_per_row="published")
    for column in ("latency_ms", "memory_kb"):
        assert once["totals"][column] == pytest.approx(sum(row[column] for row in once["operator_profile"]))
        assert twice["totals"][column] == pytest.approx(2 * once["totals"][column])
    assert 0 < once["totals"]["stream_utilization"] <= 1


@pytest.mark.parametrize("wrong", [-1, 1.5, True, False, "8", None])
def test_counts_must_be_whole_and_positive(wrong: Any) -> None:
    for arguments in ((wrong, 8, 10), (8, wrong, 10)):
        with pytest.raises(InvalidInput, match="(feature_count|batch_size) is"):
            eo.build_hardware_profile_table(*arguments)
    with pytest.raises(InvalidInput):
        eo.estimate_batch_memory_mb(8, wrong)
    with pytest.raises(InvalidInput):
        eo.auto_adjust_batch_size(wrong, 8, eo.HardwareProfile(1, 1))


@pytest.mark.parametrize("wrong", [0, -1, float("nan"), float("inf"), "10", None, True])
def test_limits_must_be_numbers_above_zero(wrong: Any) -> None:
    with pytest.raises(InvalidInput, match="stream_interval_ms"):
        eo.build_hardware_profile_table(8, 8, wrong)
    with pytest.raises(InvalidInput, match="memory_limit_kb"):
        eo.recommend_precision(TABLE, wrong)
    with pytest.raises(InvalidInput, match="memory_limit_mb"):
        eo.auto_adjust_batch_size(8, 8, eo.HardwareProfile(wrong, 1))
    with pytest.raises(InvalidInput, match="compute_budget"):
        eo.compute_utilization(1, eo.HardwareProfile(1, wrong))


@pytest.mark.parametrize(
    "wrong", [{}, {"linear_projection": 0.1}, dict.fromkeys([*OPERATORS, "pooling"], 0.1), dict.fromkeys(OPERATORS, 0)]
)
def test_latencies_must_be_given_for_each_operator(wrong: dict[str, float]) -> None:
    with pytest.raises(InvalidInput, match="latency_ms_per_row"):
        eo.build_hardware_profile_table(8, 8, 10, latency_ms_per_row=wrong)


@pytest.mark.parametrize(
    ("limit_kb", "precision"), [(KIB, "fp32"), (KIB - 1, "fp16"), (KIB / 2 - 1, "int8"), (KIB / 4 - 1, None)]
)
def test_the_widest_precision_that_fits_is_recommended_with_its_reason(limit_kb: float, precision: str | None) -> None:
    advice = eo.recommend_precision(TABLE, limit_kb)
    assert advice.precision == precision
    assert advice.memory_kb == ({"fp32": KIB, "fp16": KIB / 2, "int8": KIB / 4}[precision] if precision else None)
    assert f"{limit_kb:g} kB" in advice.reason
    if precision is None:
        assert "nothing fits" in advice.reason and "int8 is 1 kB too large" in advice.reason


def test_memory_of_a_batch_is_in_mib() -> None:
    # 1024 rows of 128 features of 8 bytes are exactly one MiB.
    assert eo.estimate_batch_memory_mb(1024, 128) == 1.0
    assert eo.estimate_batch_memory_mb(1024, 128, bytes_per_feature=4) == 0.5


@pytest.mark.parametrize(("limit_mb", "batch"), [(1.0, 1024), (0.99, 512), (0.25, 256), (1e-9, 1)])
def test_the_batch_is_halved_until_it_fits_and_never_below_one(limit_mb: float, batch: int) -> None:
    assert eo.auto_adjust_batch_size(1024, 128, eo.HardwareProfile(limit_mb, compute_budget=1)) == batch


@given(batch=st.integers(1, 10**6), features=st.integers(1, 10**4), limit_mb=st.floats(1e-6, 1e4))
def test_the_adjusted_batch_fits_or_is_one(batch: int, features: int, limit_mb: float) -> None:
    found = eo.auto_adjust_batch_size(batch, features, eo.HardwareProfile(limit_mb, 1))
    assert 1 <= found <= batch
    assert found == 1 or eo.estimate_batch_memory_mb(found, features) <= limit_mb


def test_compute_utilization_is_a_share_of_at_most_one() -> None:
    profile = eo.HardwareProfile(memory_limit_mb=64, compute_budget=1000)
    assert [eo.compute_utilization(operations, profile) for operations in (0, 250, 1000, 5000)] == [0, 0.25, 1.0, 1.0]
    with pytest.raises(InvalidInput, match="operations is -1"):
        eo.compute_utilization(-1, profile)


@pytest.mark.parametrize(
    ("share", "word"), [(0.1, "over-provisioned"), (0.5, "well matched"), (0.9, "close"), (1.0, "under-provisioned")]
)
def test_a_utilization_says_what_it_calls_for(share: float, word: str) -> None:
    assert word in eo.utilization_advice(share)


def test_a_utilization_below_zero_is_refused() -> None:
    with pytest.raises(InvalidInput, match="utilization is -0.1"):
        eo.utilization_advice(-0.1)


def test_the_advice_stands_next_to_its_figures() -> None:
    advice = eo.stream_advice(TABLE)
    assert [line.partition(":")[0] for line in advice] == ["batch", "precision", "cache", "bandwidth", "utilisation"]
    assert "1 to 4 samples" in advice[0] and f"{KIB:g} kB" in advice[0]
    assert f"int8 {KIB / 4:g} kB" in advice[1]
    assert f"{TABLE['totals']['estimated_bandwidth_mb_s']:.3g} MB/s" in advice[3]
    assert "19.2 % used" in advice[4]


def test_the_workflow_runs_from_the_public_api() -> None:
    table = eo.build_hardware_profile_table(feature_count=128, batch_size=64, stream_interval_ms=5.0)
    assert "linear_projection" in eo.find_bottleneck(table)
    device = eo.HardwareProfile(memory_limit_mb=0.05, compute_budget=1e6)
    assert eo.recommend_precision(table, device.memory_limit_mb * 1024).precision == "int8"
    batch = eo.auto_adjust_batch_size(64, 128, device)
    assert batch == 32  # 32 rows x 128 features x 8 bytes = 32 KiB of 51.2
    assert eo.utilization_advice(eo.compute_utilization(batch * 128 * 24, device)).startswith("9.8 %")


def test_two_files_are_written_and_their_paths_returned(tmp_path: Path) -> None:
    paths = eo.write_hardware_profile_artifacts(TABLE, tmp_path / "new" / "folder")
    assert {name: Path(path).name for name, path in paths.items()} == {
        "operator_profile_csv": "operator_profile.csv",
        "hardware_totals_csv": "hardware_totals.csv",
        "operator_profile": "operator_profile.csv",
        "hardware_totals": "hardware_totals.csv",
    }
    with paths["operator_profile"].open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["operator", "latency_ms", "memory_kb"]
    assert [float(row["memory_kb"]) for row in rows] == [row["memory_kb"] for row in TABLE["operator_profile"]]
    with paths["hardware_totals"].open(encoding="utf-8", newline="") as file:
        (totals,) = csv.DictReader(file)
    assert {name: float(value) for name, value in totals.items()} == TABLE["totals"]


def test_a_folder_that_cannot_be_made_and_a_foreign_profile_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidInput, match="cannot write to"):
        eo.write_hardware_profile_artifacts(TABLE, tmp_path / "file")
    for function in (eo.find_bottleneck, eo.stream_advice, lambda foreign: eo.recommend_precision(foreign, 1)):
        with pytest.raises(InvalidInput, match="build_hardware_profile_table"):
            function({"rows": []})


def test_the_public_api_has_every_name_of_the_module() -> None:
    public = [name for name, value in vars(stream).items() if getattr(value, "__module__", "") == stream.__name__]
    assert sorted(name for name in public if not name.startswith("_")) == sorted(
        name for name in public if hasattr(eo, name) and not name.startswith("_")
    )


def test_a_calibrated_host_gives_the_latencies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert eo.build_hardware_profile_table(64, 32, 10)["estimate_source"].startswith("timed here")
    save_calibration(imaginary(), host_file())
    table = eo.build_hardware_profile_table(64, 32, 10)
    assert "calibration of imaginary on 2026-01-01" in table["estimate_source"]
    assert all(row["latency_ms"] > 0 for row in table["operator_profile"])
    given = eo.build_hardware_profile_table(
        64, 32, 10, latency_ms_per_row=dict.fromkeys(stream.FALLBACK_MS_PER_ROW, 1.0)
    )
    assert given["estimate_source"] == "given by the caller"
