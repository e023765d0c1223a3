"""The frontier of a sweep, and the candidate to ship."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from edge_opt import units
from edge_opt.budgets import trial_metrics
from edge_opt.errors import InvalidInput
from edge_opt.records import Trial, TrialMetrics, Violation

ALL_OBJECTIVES = ("accuracy", "latency_ms", "energy_j", "peak_memory_mb", "size_mb")
_MORE_IS_BETTER = {"accuracy", "test_accuracy", "throughput"}


class Span(NamedTuple):
    """A figure with the interval it lies in; the less, the better."""

    low: float
    value: float
    high: float


Point = tuple[Span, ...]


def dominates(one: Point, other: Point) -> bool:
    """Whether `one` is no worse in value and both ends on every objective, and on some wholly better.

    On some objective even the worse end of `one` is better than the better end of `other`. For exact figures this is
    the ordinary dominance. Equal points do not dominate each other, and nothing dominates or is dominated by NaN.

    >>> fast, slow = (Span(1.0, 1.0, 1.0),), (Span(2.0, 2.0, 2.0),)
    >>> dominates(fast, slow), dominates(slow, fast), dominates(fast, fast)
    (True, False, False)
    >>> dominates((Span(0.9, 1.0, 1.1),), (Span(1.0, 1.2, 1.4),))  # better, but not surely so
    False
    """
    pairs = list(zip(one, other, strict=True))
    return all(x <= y for a, b in pairs for x, y in zip(a, b, strict=True)) and any(a.high < b.low for a, b in pairs)


def frontier(points: Sequence[Point]) -> tuple[int, ...]:
    """The indices of the points that no other dominates, in their order; a point with NaN is never among them.

    >>> exact = lambda *values: tuple(Span(v, v, v) for v in values)
    >>> frontier([exact(1, 3), exact(2, 2), exact(3, 3), exact(2, 2), exact(math.nan, 0)])
    (0, 1, 3)
    """
    known = [index for index, point in enumerate(points) if not any(math.isnan(x) for span in point for x in span)]
    kept: list[int] = []
    # Whoever dominates has values that come earlier in this order, and dominance is transitive: what is kept suffices.
    for index in sorted(known, key=lambda index: [span.value for span in points[index]]):
        if not any(dominates(points[other], points[index]) for other in kept):
            kept.append(index)
    return tuple(sorted(kept))


def span(metrics: TrialMetrics, objective: str, use_ci: bool = False) -> Span | None:
    """A figure as the frontier sees it, turned so that less is better; None where it is not known."""
    metric = trial_metrics(metrics.metric).get(objective)
    if metric is None:
        return None
    value = metric.value(metrics)
    if value is None:
        return None
    bounds = metric.bounds(metrics) if use_ci else None
    low, high = (value, value) if bounds is None else (min(bounds.low, value), max(bounds.high, value))
    is_score = objective in (metrics.metric, f"test_{metrics.metric}")
    is_more_better = metrics.metric_direction == "higher" if is_score else objective in _MORE_IS_BETTER
    return Span(-high, -value, -low) if is_more_better else Span(low, value, high)


def trial_frontier(trials: Iterable[Trial], objectives: Sequence[str], *, use_ci: bool = False) -> tuple[str, ...]:
    """The keys of the trials on the frontier. One whose figure is not known for an objective is not on it."""
    found = list(trials)
    scored = [trial.metrics.metric for trial in found if trial.metrics is not None]
    check_objectives(objectives, scored[0] if scored else "accuracy")
    points = {}
    for trial in found:
        if trial.metrics is not None:
            spans = [span(trial.metrics, objective, use_ci) for objective in objectives]
            if None not in spans:
                points[trial.candidate.key] = tuple(item for item in spans if item is not None)
    keys = list(points)
    return tuple(keys[index] for index in frontier(list(points.values())))


def frontiers(trials: Sequence[Trial], *, use_ci: bool = False) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """The frontiers of accuracy against each cost, and of everything that is known at all, by their objectives.

    Names are the objectives with commas between: "accuracy,latency_ms", ..., "accuracy,latency_ms,energy_j,...".
    """
    found = [trial.metrics for trial in trials if trial.metrics is not None]
    score = found[0].metric if found else "accuracy"
    asked = [score if name == "accuracy" else name for name in ALL_OBJECTIVES]
    known = [name for name in asked if any(span(metrics, name) is not None for metrics in found)]
    pairs = [(score, cost) for cost in known if cost != score]
    wanted = [*pairs, tuple(known)] if len(known) > 2 else pairs
    return tuple((",".join(names), trial_frontier(trials, names, use_ci=use_ci)) for names in wanted)


def check_objectives(objectives: Sequence[str], metric: str = "accuracy") -> None:
    """Refuse names that are no metrics of a trial that scores `metric`."""
    for name in objectives:
        if name not in trial_metrics(metric):
            known = ", ".join([metric, *ALL_OBJECTIVES[1:]])
            raise InvalidInput(f"unknown objective {name!r}; objectives are {known}, ...")
    if len(objectives) < 2:
        raise InvalidInput(f"a frontier needs two objectives or more, not {list(objectives)}")


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
