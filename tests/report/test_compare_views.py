"""A comparison reads the same in every view, and what was measured is compared with allowance for noise."""

from __future__ import annotations

import csv
import io
from dataclasses import replace
from pathlib import Path

import pytest
from torch import nn

import edge_opt as eo
from edge_opt.errors import InvalidInput, UnreadableProfile
from edge_opt.records.profiles import ModelComparison, ModelProfile
from edge_opt.records.sweeps import Candidate, SweepResult, Trial, Violation
from edge_opt.report.comparison import as_csv, chosen_rows, load_comparison
from edge_opt.report.html import sheet_page
from edge_opt.report.sheets import record_text, sheet_markdown, sheet_of
from trial_metrics import METRICS

SHAPE = (1, 3, 8, 8)


def net(width: int, *more: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, width, 3, padding=1), *more, nn.Flatten(), nn.Linear(width * 64, 10))


@pytest.fixture(scope="module")
def comparison() -> ModelComparison:
    return eo.compare(net(8), net(4), net(8, nn.ReLU()), inputs=SHAPE, names=("wide", "narrow", "active"))


def test_csv_has_every_layer_with_exact_differences(comparison: ModelComparison) -> None:
    rows = list(csv.DictReader(io.StringIO(as_csv(comparison))))
    assert len(rows) == len(comparison.layers) == 4
    first = rows[0]
    # 8 x 8 outputs x 27 weights x channels
    assert (first["macs_A"], first["macs_B"], first["macs_difference_B"]) == ("13824", "6912", "-6912")
    assert [row["change_C"] for row in rows] == ["same", "added", "renamed", "renamed"]
    assert rows[1]["macs_A"] == "" and rows[1]["path_C"] == "1"


def test_markdown_is_short_and_folds_the_layers(comparison: ModelComparison) -> None:
    text = sheet_markdown(sheet_of(comparison))
    assert text.startswith("### A: wide → B: narrow → C: active")
    assert "| MACs | 18.9 k | 9.47 k | −9.47 k | −50.0% | 18.9 k | ±0 | ±0% |" in text
    assert text.index("<details>") > text.index("| Parameters |")
    assert "Layers that differ: 4 of 4" in text


def test_every_view_names_the_same_totals(comparison: ModelComparison) -> None:
    for view in (record_text(comparison), sheet_markdown(sheet_of(comparison)), sheet_page(sheet_of(comparison))):
        assert all(shown in view for shown in ("18.9 k", "9.47 k", "−50.0%"))


def test_json_reads_back(comparison: ModelComparison, tmp_path: Path) -> None:
    assert load_comparison(comparison.save(tmp_path / "c.json")) == comparison
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(UnreadableProfile, match='lacks "format": "edge_opt.comparison"'):
        load_comparison(tmp_path / "other.json")
    with pytest.raises(UnreadableProfile, match=r"gone\.json"):
        load_comparison(tmp_path / "gone.json")


def test_the_largest_difference_comes_first(comparison: ModelComparison) -> None:
    assert [row.any.kind for row in chosen_rows(comparison, sort="params", top=2)] == ["Linear", "Conv2d"]
    assert [row.any.kind for row in chosen_rows(comparison, sort="macs", top=1)] == ["Conv2d"]


@pytest.mark.parametrize("width", [40, 80, 120, 200])
def test_figures_of_all_models_stand_side_by_side_or_not_at_all(comparison: ModelComparison, width: int) -> None:
    header = next(line for line in record_text(comparison, width).splitlines() if line.startswith("Layer"))
    assert all(header.count(f" {letter}") == header.count(" A") for letter in "BC" if width >= 80)
    assert "MACs A" in header


@pytest.fixture(scope="module")
def measured() -> ModelProfile:
    return eo.profile(net(8), SHAPE, measure={"min_time_s": 0.02})


def test_measured_latencies_are_compared_with_their_noise(measured: ModelProfile) -> None:
    found = eo.compare(measured, measured)
    assert found.latencies[0] is not None and found.latencies[0].verdict == "equal"
    assert found.is_empty
    assert all(row.any.measured_s is not None for row in found.layers if row.any.macs)
    found = eo.compare(steady(measured, 0.001), steady(measured, 0.010))
    assert found.latencies[0] is not None and found.latencies[0].verdict == "slower"
    assert not found.is_empty
    assert "slower than the first" in str(found)


def steady(profile: ModelProfile, seconds: float) -> ModelProfile:
    """The profile as a machine without noise would have measured it."""
    measurement = profile.measurement
    assert measurement is not None
    latency = replace(measurement.latency, samples_s=(seconds,) * 30, cpu_samples_s=(seconds,) * 30)
    return replace(profile, measurement=replace(measurement, latency=latency))


def trial(pruning: float, **changes: object) -> Trial:
    metrics = replace(METRICS, **changes)  # type: ignore[arg-type]
    return Trial(Candidate(pruning, "fp32", "torch"), "done", metrics, None, "", (), 1.0)


FAILED = Trial(Candidate(0.5, "int8", "onnxruntime"), "failed", None, "raised", "<no kernel>", (), 1.0)


def test_sweep_candidates_are_compared_by_their_totals() -> None:
    smaller = trial(0.5, macs=250_000_000, latency_s=0.010, latency_low_s=0.009, latency_high_s=0.011)
    found = eo.compare(trial(0.0), smaller)
    assert found.names == ("prune 0 fp32 torch", "prune 0.5 fp32 torch")
    assert found.figure("macs").relative() == -0.5
    # 0.009 / 0.016 to 0.011 / 0.014: below 1 at both ends
    assert found.latencies[0] is not None and found.latencies[0].verdict == "faster"
    assert found.layers == () and found.aligned_share() is None
    assert "align" not in str(found)
    assert eo.compare(trial(0.0), trial(0.0)).is_empty


def test_wrong_use_is_refused(measured: ModelProfile) -> None:
    with pytest.raises(InvalidInput, match="1 model cannot be compared"):
        eo.compare(measured)
    with pytest.raises(InvalidInput, match="candidates with candidates"):
        eo.compare(measured, trial(0.0))
    with pytest.raises(InvalidInput, match=r"has no figures: it raised \(<no kernel>\)"):
        eo.compare(trial(0.0), FAILED)
    with pytest.raises(InvalidInput, match="1 names for 2 models"):
        eo.compare(measured, measured, names=["one"])


def test_the_package_and_the_function_are_one() -> None:
    import edge_opt.model_comparison

    assert edge_opt.compare(nn.Linear(2, 2), nn.Linear(2, 2), inputs=(1, 2)).is_empty


def sweep(*trials: Trial) -> SweepResult:
    return SweepResult("<b>sweep</b>", trial(0.0), trials, ("macs <= 1",), (), None, "none fits & none ran")


def test_a_notebook_shows_every_candidate_of_a_sweep() -> None:
    rejected = replace(trial(0.25), violations=(Violation("latency_ms <= 1", "latency_ms", 15.0, 1.0),))
    page = sweep(trial(0.5), rejected, FAILED)._repr_html_()
    assert "1 accepted, 1 rejected, 1 failed" in page
    assert "latency_ms &lt;= 1" in page and "&lt;no kernel&gt;" in page and "<b>sweep" not in page
    assert page.index("pruned 50 % fp32") < page.index("pruned 25 % fp32") < page.index("pruned 50 % int8")


@pytest.mark.parametrize("trials", [(), (FAILED, FAILED)])
def test_a_notebook_shows_a_sweep_without_results(trials: tuple[Trial, ...]) -> None:
    page = sweep(*trials)._repr_html_()
    assert f"0 accepted, 0 rejected, {len(trials)} failed" in page


def test_a_notebook_shows_the_modules_of_a_profile(measured: ModelProfile) -> None:
    page = measured._repr_html_()
    assert page.index("Conv2d") < page.index("Linear")
    assert "measured here" in page and "Time" in page
    many = eo.profile(nn.Sequential(*(nn.Linear(2, 2) for _ in range(13))), (1, 2))._repr_html_()
    assert many.count("<tr data-depth") == 1 + 13


def test_a_notebook_shows_a_comparison(comparison: ModelComparison) -> None:
    assert "−50.0%" in comparison._repr_html_()
    assert "no differences" in eo.compare(net(8), net(8), inputs=SHAPE)._repr_html_()
