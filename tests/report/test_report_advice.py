"""What a page advises follows from what it says of the model."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch import nn

import edge_opt as eo
from edge_opt.model import SmallCNN
from edge_opt.report.figures import device_roofs
from edge_opt.report.page_data import advice, page_data, verdict
from sweeps import small_sweep


def test_the_advice_for_a_device_is_on_what_bounds_its_prediction() -> None:
    profile = eo.profile(SmallCNN(), (1, 1, 28, 28), target="raspberry-pi-4")
    [prediction] = profile.predictions
    roofs = device_roofs(profile)
    said = dict(advice(profile, None, roofs, None))["On Raspberry Pi 4 Model B"]
    assert f"goes to {prediction.bound}-bound layers" in said
    assert f"bound by {prediction.bound}" in "".join(verdict(profile, None, roofs))
    # of the predicted time, by the layers that the prediction says are bound by it
    spent = sum(layer.seconds or 0.0 for layer in prediction.layers if layer.bound == prediction.bound)
    assert prediction.seconds is not None
    assert said.startswith(f"{100 * spent / prediction.seconds:.1f}% of the predicted time")


def test_where_nothing_is_predicted_the_advice_is_on_the_roofline() -> None:
    profile = eo.profile(SmallCNN(), (1, 1, 28, 28))
    roofs = device_roofs(profile, ["raspberry-pi-4"])
    said = dict(advice(profile, None, roofs, None))["On Raspberry Pi 4 Model B"]
    assert f"of the time at best goes to {roofs[0].main.total.bound}-bound layers" in said


def test_beside_a_fitted_prediction_no_other_time_of_the_same_precision_is_told() -> None:
    profile = eo.profile(SmallCNN(), (1, 1, 28, 28), target="raspberry-pi-4")
    assert profile.predictions[0].basis == "fitted"
    assert not [title for title, _ in advice(profile, None, device_roofs(profile), None) if title.startswith("Try ")]


def test_layers_that_are_all_alike_are_not_called_the_largest() -> None:
    profile = eo.profile(nn.Sequential(*(nn.Linear(4, 4) for _ in range(40))), (1, 4))
    said = dict(advice(profile, None, (), None))
    # three of forty equal layers: 3 / 40
    assert "7.5%" in said["No layer stands out"] and "Largest layers" not in said


@pytest.mark.parametrize(
    ("source", "provenance"),
    [
        ("proxy: 5 W times the latency", "proxy"),
        ("model: fitted to a board", "estimated"),
        ("rapl: package", "measured"),
    ],
)
def test_the_energy_of_the_best_candidate_says_what_kind_of_figure_it_is(source: str, provenance: str) -> None:
    result = small_sweep()
    trials = tuple(
        trial if trial.metrics is None else replace(trial, metrics=replace(trial.metrics, energy_source=source))
        for trial in result.trials
    )
    found = {card["label"]: card["provenance"] for card in page_data(sweep=replace(result, trials=trials))["cards"]}
    assert found["Best: energy"] == provenance
