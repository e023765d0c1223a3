"""How long a battery lasts: the energy of a run, and the idle power of the device between runs."""

from __future__ import annotations

import re

from edge_opt.boards.targets import find_spec
from edge_opt.errors import InvalidInput
from edge_opt.records.microcontrollers import BatteryLife
from edge_opt.records.predictions import Prediction

_BATTERY = re.compile(r"\s*([\d.]+)\s*mAh\s*@\s*([\d.]+)\s*V\s*", re.IGNORECASE)
_DURATION = re.compile(r"\s*([\d.]+)\s*(ms|s|min|h)\s*")
_SECONDS = {"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
_NOT_IN_IT = "not in it: sensors, radio, regulators, self-discharge, and the capacity that a battery loses in the cold"


def battery_life(prediction: Prediction, battery: str, every: str, *, idle_w: float | None = None) -> BatteryLife:
    """Return how long a battery lasts if the model runs at regular times and the device sleeps in between.

    Args:
        prediction: The model on its target, with time and energy, such as `eo.profile(..., target=).prediction`.
        battery: Capacity and voltage, such as "220mAh@3V".
        every: Time from one run to the next, such as "10s", "500ms", "5min" or "1h".
        idle_w: Watts between two runs; default: the idle power of the device's data sheet.

    >>> import edge_opt as eo
    >>> from edge_opt.model import SmallCNN
    >>> there = eo.profile(SmallCNN(), (1, 1, 28, 28), target="nrf52840", precision="int8").prediction
    >>> life = battery_life(there, "220mAh@3V", "10s")
    >>> life.capacity_j == 0.220 * 3600 * 3, life.idle_w
    (True, 7.05e-06)
    """
    capacity_j, every_s = _capacity(battery), _duration(every)
    if prediction.seconds is None or not prediction.energies:
        raise InvalidInput(f"time or energy on {prediction.target} is not known, so a battery cannot be sized")
    if prediction.seconds > every_s:
        raise InvalidInput(f"one run takes {prediction.seconds:.3g} s, which is longer than every={every!r}")
    energy, source = prediction.energies[0], "as given"
    if idle_w is None:
        spec = find_spec(prediction.target)
        idle = next((power.figure for power in spec.powers if power.state == "idle"), None)
        if idle is None:
            raise InvalidInput(f"the idle power of {spec.name} is not known; pass idle_w= (--idle-uw) in addition")
        idle_w, source = idle.value, idle.source
    joules = energy.joules + idle_w * (every_s - prediction.seconds)
    notes = (f"run: {energy.note}", f"idle: {source}", _NOT_IN_IT)
    return BatteryLife(
        prediction.target, capacity_j, every_s, energy.joules, prediction.seconds, idle_w,
        capacity_j / joules * every_s, notes,
    )  # fmt: skip


def _capacity(text: str) -> float:
    match = _BATTERY.fullmatch(text)
    if match is None:
        raise InvalidInput(f"battery is {text!r}; write capacity and voltage, such as 220mAh@3V")
    return float(match[1]) / 1000 * 3600 * float(match[2])


def _duration(text: str) -> float:
    match = _DURATION.fullmatch(text)
    if match is None or not float(match[1]):
        raise InvalidInput(f"every is {text!r}; write a time with its unit (ms, s, min or h), such as 10s")
    return float(match[1]) * _SECONDS[match[2]]
