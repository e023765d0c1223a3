"""Predictions in tables and sentences: the time on a target, how sure it is, and what it rests on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from edge_opt import units
from edge_opt.records import Bound, ModelProfile, Prediction
from edge_opt.report.measured import energy_sentence

BASES = {
    "calibrated": "from operators sampled there",
    "timed": "each of its operators timed there once",
    "roofline": "an uncalibrated estimate",
}


@dataclass(frozen=True, slots=True)
class Predicted:
    """What one row of a table would take; None is not known. `spent` is its time by what it goes to."""

    seconds: float | None
    low: float | None
    high: float | None
    energy_j: float | None
    spent: tuple[tuple[Bound, float], ...]

    @property
    def bound(self) -> Bound:
        return max(self.spent, key=lambda part: part[1])[0] if self.spent and self.seconds is not None else "unknown"


NO_WORK = Predicted(0.0, 0.0, 0.0, 0.0, ())


def predicted_by_call(profile: ModelProfile) -> dict[int, Predicted]:
    """What each module call would take itself on the first target, by its index; calls that do no work are absent."""
    if profile.prediction is None:
        return {}
    return {
        layer.module: Predicted(
            layer.seconds, layer.low, layer.high, layer.energy_j, ((layer.bound, layer.seconds or 0.0),)
        )
        for layer in profile.prediction.layers
    }


def predicted_whole(found: Prediction) -> Predicted:
    joules = found.energies[0].joules if found.energies else None
    return Predicted(found.seconds, found.low, found.high, joules, ((found.bound, found.seconds or 0.0),))


def together(parts: Sequence[Predicted | None]) -> Predicted | None:
    """Several rows as one; what is unknown in one of them is unknown. Ends add up: layers err in the same direction."""
    known = [part for part in parts if part is not None]
    if not known or len(known) < len(parts):
        return None
    spent: dict[Bound, float] = {}
    for part in known:
        for bound, seconds in part.spent:
            spent[bound] = spent.get(bound, 0.0) + seconds
    return Predicted(
        _sum([part.seconds for part in known]),
        _sum([part.low for part in known]),
        _sum([part.high for part in known]),
        _sum([part.energy_j for part in known]),
        tuple(spent.items()),
    )


def _sum(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) if len(known) == len(values) else None


def predicted_lines(predictions: Sequence[Prediction]) -> list[tuple[str, str]]:
    """Labels with one sentence each; with several targets each sentence names its own."""
    lines: list[tuple[str, str]] = []
    for found in predictions:
        of = f"{found.target}: " if len(predictions) > 1 else ""
        lines.append(("Predicted", prediction_sentence(found)))
        lines += [("Energy", f"{of}{energy_sentence(energy)}") for energy in found.energies]
        lines += [("Note", f"{of}{remark}") for remark in found.remarks]
    return lines


def prediction_sentence(found: Prediction) -> str:
    """The whole in one sentence: target, time with its interval, bound and basis."""
    what = f"on {found.target} in {found.precision}"
    if found.seconds is None:
        return f"not known {what}: a figure of the device is missing"
    beyond = "without a price" if found.basis == "roofline" else "outside what was sampled"
    outside = f"; {beyond}: {', '.join(found.outside)}" if found.outside else ""
    basis = BASES[found.basis] + outside
    return f"{units.duration(found.seconds)} {what} ({interval(found)}), bound by {found.bound}; {basis}"


def interval(found: Prediction) -> str:
    """The interval in words; an upper end that is not known is said to be open."""
    if found.low is None:
        return "no interval"
    if found.high is None:
        return f"90 % interval from {units.duration(found.low)}, open above"
    return f"90 % interval {units.duration(found.low)} to {units.duration(found.high)}"
