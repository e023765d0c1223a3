"""Charts as PNG files, and the figure data that pages and pictures share."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch import nn

import edge_opt as eo
from edge_opt.errors import InvalidInput, UnknownDevice
from edge_opt.model import SmallCNN
from edge_opt.records.sweeps import SweepResult
from edge_opt.report.figures import (
    bars,
    device_roofs,
    frontiers,
    is_wide,
    layer_bars,
    read_sensitivity,
    sensitivity_data,
    timeline,
)
from edge_opt.report.png import bar_chart, write_sweep_plots
from edge_opt.report.sweep_files import sweep_rows
from sweeps import done, failed, sensitivity_of, small_sweep, sweep

SWEEP_FILES = ["accuracy_vs_energy.png", "accuracy_vs_latency.png", "accuracy_vs_memory.png"]


def colors(path: Path) -> int:
    """How many colors a picture has; an empty one has one."""
    with Image.open(path) as image:
        assert round(image.info["dpi"][0]) == 180
        return len(image.convert("RGB").getcolors(1 << 24) or ())


@pytest.mark.parametrize(
    "result", [small_sweep(), sweep(), sweep(failed(0.25), failed(0.5)), sweep(done(0.0, "fp32", 1))]
)
def test_a_sweep_has_three_pictures_whatever_became_of_it(result: SweepResult, tmp_path: Path) -> None:
    written = write_sweep_plots(result, tmp_path / "new")
    assert sorted(path.name for path in written) == SWEEP_FILES
    assert all(colors(path) > 10 for path in written)


@pytest.mark.parametrize("layers", [0, 1, 300])
def test_a_bar_chart_has_bounded_height_and_says_in_words_where_there_is_nothing(layers: int, tmp_path: Path) -> None:
    path = tmp_path / "bars.png"
    path.write_bytes(bar_chart([f"layers.{index}" for index in range(layers)], range(1, layers + 1), "MACs"))
    assert colors(path) > 10
    with Image.open(path) as image:
        assert image.height < 3000


def test_names_are_drawn_as_they_are_and_without_talk(tmp_path: Path) -> None:
    path = tmp_path / "bars.png"
    names = ["$\\frac{", "🚀", "שכבה", "a\nb", "x" * 500]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        path.write_bytes(bar_chart(names, [1.0, 2.0, 3.0, 4.0, 5.0], "MACs"))
    assert colors(path) > 10


def test_a_device_that_nobody_knows_is_refused() -> None:
    with pytest.raises(UnknownDevice, match="'abacus'"):
        device_roofs(eo.profile(SmallCNN(), (1, 1, 28, 28)), ["abacus"])


@given(st.lists(st.integers(0, 10**6), max_size=60), st.integers(1, 30))
def test_bars_and_others_add_up_to_the_total(values: list[int], most: int) -> None:
    found = bars([str(index) for index in range(len(values))], values, most=most)
    assert sum(found.values) + found.others_value == found.total == sum(values)
    assert len(found.values) + found.others == len(values)
    if found.others:
        assert sorted(values, reverse=True)[:most] == list(found.values)


def test_the_frontier_of_a_sweep_is_its_own_where_it_has_one() -> None:
    result = small_sweep()
    rows = sweep_rows(result)
    labels = [(rows[i]["pruning"], rows[i]["precision"]) for i in frontiers(result)["accuracy|latency_ms"]]
    assert labels == [(0.5, "int8"), (0.0, "int8")]  # by latency: 2 ms, 4 ms
    # No frontier of sizes was recorded: int8 at 0.5 is smallest, int8 at 0 most accurate of the accepted.
    assert len(frontiers(result)["accuracy|size_mb"]) == 2


def test_a_rejected_candidate_is_on_no_frontier_that_is_drawn() -> None:
    result = small_sweep()
    rejected = next(trial.candidate.key for trial in result.trials if trial.metrics and not trial.is_accepted)
    older = replace(result, frontiers=tuple((name, (*keys, rejected)) for name, keys in result.frontiers))
    assert frontiers(older) == frontiers(result)


@pytest.mark.parametrize(
    ("name", "values", "needs_logarithm"),
    [
        ("latency_ms", [2.0, 10.0], False),  # a factor of 5, not more
        ("latency_ms", [2.0, 10.1, None], True),
        ("size_mb", [0.0, 10.0], False),  # zero has no logarithm
        ("accuracy", [0.1, 0.9], False),  # a score stays on a plain scale
        ("energy_j", [None], False),
    ],
)
def test_an_axis_is_logarithmic_beyond_a_factor_of_five(
    name: str, values: list[float | None], needs_logarithm: bool
) -> None:
    assert is_wide(name, [{name: value} for value in values]) == needs_logarithm


def test_the_timeline_keeps_its_peak_however_coarse() -> None:
    profile = eo.profile(nn.Sequential(*(nn.Linear(8, 8) for _ in range(50))), (2, 8))
    for most in (1, 7, 1000):
        line = timeline(profile, most)
        assert max(line["live_bytes"]) == profile.peak.live_bytes
        assert len(line["steps"]) <= most


def test_bars_of_a_profile_add_up_to_its_totals() -> None:
    profile = eo.profile(SmallCNN(), (1, 1, 28, 28))
    macs, moved, memory = layer_bars(profile)
    assert macs["total"] == profile.totals.macs
    assert moved["total"] == profile.totals.bytes_read + profile.totals.bytes_written
    assert memory["total"] == profile.totals.activation_bytes


def test_a_sensitivity_is_a_table_of_layers_and_changes() -> None:
    pruned, quantized = sensitivity_of({"a": 0.25}, "prune", "0.5"), sensitivity_of({"a": 0.125, "b": 0.5})
    data = sensitivity_data(replace(pruned, rows=pruned.rows + quantized.rows))
    assert (data["layers"], data["changes"]) == (["a", "b"], ["pruned 50 %", "int8"])
    assert data["losses"] == [[0.25, 0.125], [None, 0.5]]
    assert data["caption"] == "Accuracy drop is largest at b (0.5), a (0.25)."


@pytest.mark.parametrize("damage", [{"rows": [1]}, {"rows": [{"path": "a"}]}, {"samples": "many"}, {"metric": None}])
def test_what_is_no_sensitivity_is_refused(damage: dict[str, object]) -> None:
    with pytest.raises(InvalidInput, match="is not a sensitivity"):
        read_sensitivity({**sensitivity_of({"a": 0.25}).to_dict(), **damage})
