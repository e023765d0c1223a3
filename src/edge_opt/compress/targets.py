"""The ratio that meets a target: what remains of MACs or latency, as a share."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence

from edge_opt.devices.roofline import roofline
from edge_opt.errors import InvalidInput
from edge_opt.records import DeviceSpec, ModelProfile

MOST = 0.98
STEPS = 12
CLOSE = 0.005
# Within this share of the target a search over single groups is not worth its time.
NEAR = 0.05


def ratio_for(remaining: Callable[[float], float], target: float) -> float:
    """The ratio whose result is closest to the target, where `remaining` falls, in steps, as the ratio grows.

    >>> round(ratio_for(lambda ratio: (1 - ratio) ** 2, 0.25), 2)
    0.5
    """
    tried = {0.0: 1.0, MOST: remaining(MOST)}
    low, high = 0.0, MOST
    for _ in range(STEPS):
        if tried[high] > target or min(abs(value - target) for value in tried.values()) <= CLOSE * target:
            break
        middle = (low + high) / 2
        tried[middle] = remaining(middle)
        low, high = (middle, high) if tried[middle] > target else (low, middle)
    # Of equally close ones the gentlest.
    return min(tried, key=lambda ratio: (abs(tried[ratio] - target), ratio))


def nudges(remaining: Callable[[Mapping[int, int]], float], groups: Sequence[int], target: float) -> Mapping[int, int]:
    """Groups that keep a step of rounding more or less, one after another while that comes closer to the target.

    One ratio for all moves many groups at once where their channels are rounded, and may jump over the target.

    >>> nudges(lambda shifts: 0.4 + 0.03 * shifts.get(0, 0) + 0.11 * shifts.get(1, 0), (0, 1), 0.5)
    {1: 1}
    """
    shifts: dict[int, int] = {}
    now = remaining(shifts)
    while abs(now - target) > NEAR * target:
        step = 1 if now < target else -1
        trials = [{**shifts, number: shifts.get(number, 0) + step} for number in groups]
        values = [remaining(trial) for trial in trials]
        best = min(range(len(trials)), key=lambda number: abs(values[number] - target), default=None)
        if best is None or abs(values[best] - target) >= abs(now - target):
            break
        shifts, now = trials[best], values[best]
    return shifts


def latency_by_roofline(profile: ModelProfile, target: str | os.PathLike[str] | DeviceSpec) -> float:
    """Seconds on a device, as its roofline has it."""
    roof = roofline(profile, target)
    if roof.total.seconds is None:
        raise InvalidInput(f"latency on {roof.device} cannot be predicted: {roof.remarks[0]}; pass latency_of= instead")
    return roof.total.seconds
