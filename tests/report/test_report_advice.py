"""What a page advises follows from what it says of the model."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch import nn

import edge_opt as eo
from edge_opt.model import SmallCNN
from edge_opt.records.sweeps import Speedup, SpeedupRatio
from edge_opt.report.figures import device_roofs
from edge_opt.report.page_data import advice, page_data, verdict
from sweeps import small_sweep


def test_the_advice_for_a_device_is_on_what_bounds_its_prediction() -> None:
    profile = eo.profile(SmallCNN(), (1, 1, 28, 28), target="raspberry-pi-4")
    [prediction] = profile.predictions
    roofs = device_roofs(profile)
    said = dict(advice(profile, None, roofs, None))["On Raspberry Pi 4 Model B"]
    assert f"is in {prediction.bound}-bound layers" in said
    assert f"bound by {prediction.bound}" in "".join(verdict(profile, None, roofs))
    # of the predicted time, by the layers that the prediction says are bound by it
    spent = sum(layer.seconds or 0.0 for layer in prediction.layers if layer.bound == prediction.bound)
    assert prediction.seconds is not None
    assert said.startswith(f"{100 * spent / prediction.seconds:.1f}% of the predicted time")


def test_where_nothing_is_predicted_the_advice_is_on_the_roofline() -> None:
    profile = eo.profile(SmallCNN(), (1, 1, 28, 28))
    roofs = device_roofs(profile, ["raspberry-pi-4"])
    said = dict(advice(profile, None, roofs, None))["On Raspberry Pi 4 Model B"]
    assert f"of the lower bound is in {roofs[0].main.total.bound}-bound layers" in said


def test_beside_a_fitted_prediction_no_other_time_of_the_same_precision_is_told() -> None:
    profile = eo.profile(SmallCNN(), (1, 1, 28, 28), target="raspberry-pi-4")
    assert profile.predictions[0].basis == "fitted"
    assert not [title for title, _ in advice(profile, None, device_roofs(profile), None) if title.startswith("Try ")]


def test_what_a_sweep_measured_is_not_recommended_from_shapes() -> None:
    profile = eo.profile(SmallCNN(), (1, 1, 28, 28))
    roofs = device_roofs(profile, ["raspberry-pi-4"])
    assert "Try int8" in dict(advice(profile, None, roofs, None))
    # The small sweep has int8 candidates.
    assert not {"Try int8", "Fuse"} & set(dict(advice(profile, small_sweep(), roofs, None)))


def test_a_page_names_no_board_that_the_user_did_not() -> None:
    data = page_data(profile=eo.profile(SmallCNN(), (1, 1, 28, 28)))
    assert data["profile"]["roofline"] is None
    assert "Raspberry" not in str([data["cards"], data["advice"], data["verdict"]])


def test_a_page_with_a_target_says_whether_the_model_fits() -> None:
    data = page_data(profile=eo.profile(SmallCNN(), (1, 1, 28, 28), target="raspberry-pi-4"))
    [card] = [card for card in data["cards"] if card["label"].startswith("Fits")]
    # 20 490 parameters of 4 bytes beside less than 1 MiB of activations, in a board with 1 GiB or more
    assert card["label"] == "Fits: yes" and 20_490 * 4 < card["value"] < 2**20
    assert "Fits: yes" in data["verdict"][0]


def test_the_first_sentence_of_a_sweep_is_the_answer() -> None:
    result = small_sweep()
    trials = tuple(
        replace(it, metrics=replace(it.metrics, test_accuracy=0.875)) if it.metrics and it.candidate.key == result.best
        else it for it in result.trials
    )  # fmt: skip
    speedup = Speedup(SpeedupRatio(10.42, 9.8, 11.2), None, None, None, 1, "wall", False)
    found = page_data(sweep=replace(result, trials=trials, speedup=speedup), file="best/model.onnx")["verdict"][0]
    # Unpruned int8: accuracy 0.9 - 0.01, and a quarter of 4 000 000 bytes with 2048 for the file: 978.6 KiB.
    assert found == (
        "Ship `best/model.onnx`: 10.4× faster (95 % CI 9.8–11.2), test accuracy 87.5 % (validation 89.0 %), 979 KiB."
    )


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
    assert found["Energy per sample"] == provenance
