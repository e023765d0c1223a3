"""How long a battery lasts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import edge_opt as eo
from edge_opt.errors import InvalidInput
from edge_opt.model import SmallCNN
from edge_opt.records.measurements import Energy
from edge_opt.records.predictions import Prediction


@pytest.fixture(scope="module")
def prediction() -> Prediction:
    found = eo.profile(SmallCNN(), (1, 1, 28, 28), target="nrf52840", precision="int8").prediction
    assert found is not None
    return replace(found, seconds=0.5, energies=(Energy(2e-3, "proxy", "typed"),))


def test_a_coin_cell_lasts_its_energy_over_what_a_period_takes(prediction: Prediction) -> None:
    life = eo.battery_life(prediction, "220 mAh @ 3 V", "10s", idle_w=1e-5)
    # 220 mAh at 3 V are 2376 J; a period takes 2 mJ and 9.5 s of 10 µW.
    assert life.life_s == pytest.approx(2376 / (2e-3 + 9.5 * 1e-5) * 10)
    assert life.average_w == pytest.approx((2e-3 + 9.5e-5) / 10)


@given(st.floats(1, 3600), st.floats(1.01, 10))
def test_longer_pauses_make_it_last_longer(seconds: float, factor: float) -> None:
    there = Prediction("x", "fitted", "int8", 0.5, None, None, "compute", (), (), (Energy(1e-3, "proxy", ""),), ())
    often, seldom = (
        eo.battery_life(there, "100mAh@3V", f"{time}s", idle_w=1e-6).life_s for time in (seconds, seconds * factor)
    )
    assert often < seldom <= 100 * 3.6 * 3 / 1e-6


@pytest.mark.parametrize(
    ("battery", "every", "message"),
    [
        ("220mAh", "10s", "220mAh@3V"),
        ("1mAh@3V", "10", "unit"),
        ("1mAh@3V", "100ms", "longer than every"),
        ("1.2.3mAh@3V", "10s", "220mAh@3V"),
        ("0mAh@3V", "10s", "220mAh@3V"),
        ("1mAh@3V", "1" * 400 + "s", "unit"),
    ],
)
def test_what_cannot_be_meant_is_refused(prediction: Prediction, battery: str, every: str, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        eo.battery_life(prediction, battery, every)


@pytest.mark.parametrize("idle_w", [-1e-6, float("nan"), 1e300])
def test_an_idle_power_that_no_device_has_is_refused(prediction: Prediction, idle_w: float) -> None:
    with pytest.raises(InvalidInput, match="idle_w is"):
        eo.battery_life(prediction, "220mAh@3V", "10s", idle_w=idle_w)


def test_an_unknown_idle_power_is_asked_for(prediction: Prediction) -> None:
    with pytest.raises(InvalidInput, match="idle_w"):
        eo.battery_life(replace(prediction, target="rp2040"), "220mAh@3V", "10s")
