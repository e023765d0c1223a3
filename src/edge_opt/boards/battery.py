"""Battery life: the energy of a run, and the idle power of the device between runs."""

from __future__ import annotations

import re

from edge_opt.boards.targets import find_spec
from edge_opt.errors import InvalidInput
from edge_opt.records.microcontrollers import BatteryLife
from edge_opt.records.predictions import Prediction
from edge_opt.text import shorten

_NUMBER = r"(\d+\.?\d*|\.\d+)"
_BATTERY = re.compile(rf"\s*{_NUMBER}\s*mAh\s*@\s*{_NUMBER}\s*V\s*", re.IGNORECASE)
_DURATION = re.compile(rf"\s*{_NUMBER}\s*(ms|s|min|h)\s*")
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
    capacity_j, every_s = battery_joules(battery), interval_seconds(every)
    if idle_w is not None and not 0 <= idle_w < 1e6:
        raise InvalidInput(f"idle_w is {idle_w} W (--idle-uw); it must be a power of at least 0, below 1 MW")
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


def battery_joules(text: str) -> float:
    """Return the energy of a battery such as 220mAh@3V."""
    match = _BATTERY.fullmatch(text)
    joules = 0.0 if match is None else float(match[1]) / 1000 * 3600 * float(match[2])
    if not 0 < joules < 1e15:
        raise InvalidInput(f"battery is {shorten(text, 40)!r}; write capacity and voltage, such as 220mAh@3V")
    return joules


def interval_seconds(text: str) -> float:
    """Return the seconds of a time such as 10s."""
    match = _DURATION.fullmatch(text)
    seconds = 0.0 if match is None else float(match[1]) * _SECONDS[match[2]]
    if not 0 < seconds < 1e15:
        raise InvalidInput(f"every is {shorten(text, 40)!r}; write a time with its unit (ms, s, min or h), such as 10s")
    return seconds
