"""What a page advises follows from what it says of the model."""

from __future__ import annotations

import edge_opt as eo
from edge_opt.model import SmallCNN
from edge_opt.report.figures import device_roofs
from edge_opt.report.page.verdict import advice, verdict


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
