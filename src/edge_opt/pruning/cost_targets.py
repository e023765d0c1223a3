"""The pruning ratio that meets a target of MACs or latency, and how latency is found."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from edge_opt.boards.estimate import predicted_seconds
from edge_opt.boards.targets import ResolvedTarget
from edge_opt.errors import InvalidInput, PruningFailed
from edge_opt.records.compression import PruneRequest, PruneResult
from edge_opt.records.profiles import ModelProfile

# The largest ratio that is tried, the steps of bisection, and the share of the target that is close enough to stop.
HIGHEST_RATIO = 0.98
STEPS = 12
CLOSE = 0.005
# Within this share of the target a search over single groups is not worth its time.
NEAR = 0.05
# How near to a target of MACs or latency the result must be to count as reached.
WITHIN = 0.1
LatencyOf = Callable[[nn.Module, ModelProfile], float]


def ratio_for(remaining: Callable[[float], float], target: float) -> float:
    """Return the ratio whose result is closest to the target, where `remaining` falls, in steps, as the ratio grows.

    >>> round(ratio_for(lambda ratio: (1 - ratio) ** 2, 0.25), 2)
    0.5
    """
    low, high = 0.0, HIGHEST_RATIO
    shares = {low: 1.0, high: remaining(high)}
    for _ in range(STEPS):
        if shares[high] > target or min(abs(share - target) for share in shares.values()) <= CLOSE * target:
            break
        middle = (low + high) / 2
        shares[middle] = remaining(middle)
        low, high = (middle, high) if shares[middle] > target else (low, middle)
    # Of equally close ratios the smallest. One that takes as long as the original, or longer, is not chosen.
    faster = [ratio for ratio, share in shares.items() if share < 1.0 or ratio == 0.0]
    return min(faster, key=lambda ratio: (abs(shares[ratio] - target), ratio))


def adjust_group_widths(
    remaining: Callable[[Mapping[int, int]], float], groups: Sequence[int], target: float
) -> Mapping[int, int]:
    """Let groups keep a step of rounding more or less, one after another while that comes closer to the target.

    One ratio for all moves many groups at once where their channels are rounded, and may jump over the target.

    >>> adjust_group_widths(lambda shifts: 0.4 + 0.03 * shifts.get(0, 0) + 0.11 * shifts.get(1, 0), (0, 1), 0.5)
    {1: 1}
    """
    shifts: dict[int, int] = {}
    now = remaining(shifts)
    while abs(now - target) > NEAR * target:
        step = 1 if now < target else -1
        trials = [{**shifts, number: shifts.get(number, 0) + step} for number in groups]
        # A step that makes it slower than the original is not taken.
        values = [share if (share := remaining(trial)) < 1 else math.inf for trial in trials]
        best = min(range(len(trials)), key=lambda number: abs(values[number] - target), default=None)
        if best is None or abs(values[best] - target) >= abs(now - target):
            break
        shifts, now = trials[best], values[best]
    return shifts


def latency_for(
    request: PruneRequest,
    latency_of: Callable[[nn.Module], float] | None,
    target: ResolvedTarget | None,
    options: Mapping[str, Any],
) -> LatencyOf | None:
    """Return how the latency of a variant is found: by the caller's function, or predicted for a target; or None.

    `options` are those of a prediction, by name: runtime and threads.
    """
    asked = next((name for name, value in options.items() if value is not None), None)
    if asked is not None and (target is None or request.latency_target is None):
        raise InvalidInput(f"{asked}= requires target= and latency_target=")
    if request.latency_target is None:
        if latency_of is not None or (target is not None and not request.is_round_auto):
            raise InvalidInput("latency_of= and target= say how latency is found; give latency_target= too")
        return None
    if (latency_of is None) == (target is None):
        what = "neither is given" if target is None else "both are given"
        raise InvalidInput(
            "latency_target needs to know the latency: latency_of= (a function of the model, in seconds) or "
            f"target= (a device, or a machine that was calibrated), and {what}; give one of them"
        )
    if latency_of is not None:
        return lambda model, _: latency_of(model)
    assert target is not None
    return lambda _, profiled: predicted_seconds(profiled, target, options["threads"])


def positive_seconds(seconds: float) -> float:
    if not isinstance(seconds, (int, float)) or not 0 < seconds < math.inf:
        raise InvalidInput(f"latency_of returned {seconds!r}; it must be seconds, above 0")
    return float(seconds)


def is_reached(request: PruneRequest, achieved: PruneResult) -> bool:
    """Return whether a target of MACs or latency is met within a tenth; False where there is none."""
    wanted = request.macs_target or request.latency_target
    got = achieved.macs_ratio if request.macs_target else achieved.latency_ratio
    return wanted is not None and got is not None and abs(got - wanted) <= WITHIN * wanted


def check_faster(request: PruneRequest, achieved: PruneResult) -> None:
    """Refuse to hand over, for a target of latency, what takes as long as the original or longer."""
    ratio = achieved.latency_ratio
    is_whole = achieved.channels == achieved.channels_before
    if ratio is None or ratio < 1 or (is_whole and is_reached(request, achieved)):
        return
    what = (
        "no pruned variant that was tried is faster than the original"
        if is_whole
        else (f"the variant closest to the target takes {ratio:.2f} times as long as the original")
    )
    raise PruningFailed(
        f"latency_target={request.latency_target:g}: {what}; round channels to wider steps (round_to=16), give "
        "macs_target= instead, or keep the original"
    )
