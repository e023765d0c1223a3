"""Predictions: what follows from samples, without running anything."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import edge_opt as eo
from calibrations import OVERHEADS, changed, formula, imaginary
from edge_opt.calibration.predict import BoostedTrees
from edge_opt.errors import InvalidInput
from edge_opt.records.profiles import ModelProfile


def small() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 64, 3, 2, 1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip


def profiled() -> ModelProfile:
    return eo.profile(small(), (4, 3, 56, 56))


def known_seconds(profile: ModelProfile) -> float:
    """The sum of the formula over every operator, and what lies between."""
    trace = profile.trace
    operators = sum(formula(trace.signatures[call.signature]) + OVERHEADS.operator_s for call in trace.ops)
    return operators + OVERHEADS.module_s * len(trace.modules)


def test_a_known_formula_is_recovered() -> None:
    profile = profiled()
    assert eo.predict(profile, imaginary()).seconds == pytest.approx(known_seconds(profile), rel=0.15)


def test_layers_add_up_to_the_whole() -> None:
    prediction = eo.predict(profiled(), imaginary())
    assert sum(layer.seconds for layer in prediction.layers) == pytest.approx(prediction.seconds, rel=1e-12)
    assert len(prediction.layers) == 9  # the model and its eight layers


def test_a_machine_twice_as_slow_takes_twice_as_long() -> None:
    calibration = imaginary()
    slower = replace(
        calibration,
        samples=tuple(replace(sample, seconds=2 * sample.seconds) for sample in calibration.samples),
        overhead_per_operator_s=2 * calibration.overhead_per_operator_s,
        overhead_per_module_s=2 * calibration.overhead_per_module_s,
    )
    profile = profiled()
    assert eo.predict(profile, slower).seconds == pytest.approx(2 * eo.predict(profile, calibration).seconds, rel=1e-3)


def test_the_interval_is_around_the_figure_and_grows_with_the_error() -> None:
    calibration, profile = imaginary(), profiled()
    sure, unsure = (eo.predict(profile, replace(calibration, whole_deviation=value)) for value in (0.02, 0.2))
    for found in (sure, unsure):
        assert 0 < found.low < found.seconds < found.high
        for layer in found.layers:
            assert 0 < layer.low <= layer.seconds <= layer.high
    assert sure.seconds == unsure.seconds
    assert unsure.low < sure.low and sure.high < unsure.high


def test_the_same_twice_is_the_same() -> None:
    assert eo.predict(profiled(), imaginary()) == eo.predict(profiled(), imaginary())


def test_the_model_is_never_run() -> None:
    with torch.device("meta"):
        model = nn.Linear(4096, 4096)  # weights without values: running it would fail
    prediction = eo.predict(eo.profile(model, (1, 4096)), imaginary())
    assert prediction.seconds > 4096 * 4096 * 4 / 40e9


def test_an_operator_that_was_never_sampled_is_named_and_widens_the_interval() -> None:
    class Sorting(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sort(x)[0]

    calibration = imaginary()
    known = eo.predict(eo.profile(nn.GELU(), (64, 4096)), calibration)
    unknown = eo.predict(eo.profile(Sorting(), (64, 4096)), calibration)
    assert known.outside == ()
    assert unknown.outside == ("aten.sort",)
    assert [layer.is_outside for layer in unknown.layers] == [True]
    assert unknown.high / unknown.seconds > known.high / known.seconds


def test_sizes_far_beyond_the_samples_are_outside() -> None:
    found = eo.predict(eo.profile(nn.GELU(), (4096, 65536)), imaginary())
    assert found.outside == ("aten.gelu",)


@pytest.mark.parametrize(
    ("machine", "message"),
    [({"cpu": "another"}, "another machine"), ({"torch": "1.0"}, "torch 1.0"), ({"threads": 97}, "97 thread")],
)
def test_what_differs_from_the_calibrated_machine_is_said(machine: dict[str, object], message: str) -> None:
    profile, calibration = profiled(), imaginary()
    assert eo.predict(profile, calibration).remarks == ()
    (remark,) = eo.predict(profile, changed(calibration, **machine)).remarks
    assert message in remark


def test_outputs_too_large_for_the_heap_are_remarked_upon() -> None:
    # 8 x 128 x 112 x 112 floats are 49 MiB; the machine takes 26 ms more for 64 MiB of fresh memory.
    (remark,) = eo.predict(eo.profile(nn.Conv2d(3, 128, 3, padding=1), (8, 3, 112, 112)), imaginary()).remarks
    assert "49.0 MiB" in remark and "19.9 ms" in remark


def test_other_precisions_are_refused_with_what_to_do() -> None:
    with pytest.raises(InvalidInput, match="was not calibrated for int8.*edge-opt calibrate --runtime"):
        eo.predict(profiled(), imaginary(), "int8")


def test_boosted_trees_learn_a_step_and_a_slope() -> None:
    random = np.random.default_rng(0)
    rows = random.uniform(0, 4, (600, 3))
    targets = rows[:, 0] + 2.0 * (rows[:, 1] > 2)
    found = BoostedTrees(rows[:500], targets[:500]).predict(rows[500:])
    assert np.abs(found - targets[500:]).mean() < 0.1


def test_boosted_trees_shift_with_their_targets() -> None:
    rows = np.random.default_rng(1).uniform(0, 1, (100, 2))
    low = BoostedTrees(rows, rows[:, 0], trees=20).predict(rows)
    high = BoostedTrees(rows, rows[:, 0] + 5, trees=20).predict(rows)
    assert np.allclose(high - low, 5)
