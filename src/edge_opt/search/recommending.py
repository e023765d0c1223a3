"""The recommendation: which candidate to ship, and why, in one sentence."""

from __future__ import annotations

import math
from collections.abc import Sequence

from edge_opt import units
from edge_opt.records import Trial, TrialMetrics, Violation


def recommend(trials: Sequence[Trial]) -> tuple[str | None, str]:
    """The key of the candidate to ship, or None, and the sentence that says why.

    The rule: of the accepted candidates whose accuracy interval reaches the best accepted accuracy, the fastest; of
    equally fast ones the smaller, then the first.
    """
    ran = [(trial, trial.metrics) for trial in trials if trial.metrics is not None and trial.status == "done"]
    accepted = [(trial, metrics) for trial, metrics in ran if trial.is_accepted]
    if accepted:
        return _best(accepted)
    if not trials:
        return None, "nothing was tried"
    if not ran:
        first = trials[0]
        return None, f"nothing ran: {_all(len(trials))} failed, {first.candidate.label} because {first.reason}"
    closest, _ = min(ran, key=lambda pair: _distance(pair[0].violations))
    beyond = ", ".join(map(_beyond, closest.violations))
    return None, f"nothing satisfies the constraints; closest is {closest.candidate.label}, {beyond}"


def _best(accepted: Sequence[tuple[Trial, TrialMetrics]]) -> tuple[str, str]:
    top, best = max(accepted, key=lambda pair: pair[1].accuracy)
    near = [pair for pair in accepted if pair[1].accuracy_high >= best.accuracy]
    chosen, metrics = min(near, key=lambda pair: (pair[1].latency_s, pair[1].size_bytes))
    latency = units.duration(metrics.latency_s)
    if len(accepted) == 1:
        figures = f"{latency}, accuracy {metrics.accuracy:.4f}"
        return chosen.candidate.key, f"{chosen.candidate.label}: the only accepted candidate ({figures})"
    interval = f"{metrics.accuracy_low:.4f} to {metrics.accuracy_high:.4f}"
    if chosen is top:
        why = f"its own is the best, {metrics.accuracy:.4f} ({interval})"
    else:
        why = f"its own is {metrics.accuracy:.4f} ({interval}), the best is {best.accuracy:.4f}"
    group = f"{len(near)} of {len(accepted)} accepted candidates whose accuracy is not significantly below the best"
    return chosen.candidate.key, f"{chosen.candidate.label}: the fastest ({latency}) among {group}; {why}"


def _distance(broken: Sequence[Violation]) -> float:
    """How far a candidate is from being accepted: the shares by which it is beyond its limits; unknown is farthest."""
    return sum(math.inf if item.excess is None else item.excess / (abs(item.limit) or 1.0) for item in broken)


def _beyond(violation: Violation) -> str:
    if violation.excess is None:
        return f"whose {violation.metric} is not known"
    return f"beyond {violation.metric} by {violation.excess:.3g}"


def _all(count: int) -> str:
    return "the only candidate" if count == 1 else f"all {count} candidates"
