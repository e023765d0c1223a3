"""The frontier of a sweep, the candidate to ship, and how far two candidates' scores differ."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from edge_opt import units
from edge_opt.budgets import trial_metrics
from edge_opt.errors import InvalidInput
from edge_opt.measuring.statistics import paired_ratio
from edge_opt.records.sweeps import Finals, Trial, TrialMetrics, Violation
from edge_opt.tasks.paired_scores import PairedDifference, paired_difference

ALL_OBJECTIVES = ("accuracy", "deploy_latency_ms", "latency_ms", "energy_j", "peak_memory_mb", "size_mb")
_MORE_IS_BETTER = {"accuracy", "test_accuracy", "throughput"}


class ObjectiveInterval(NamedTuple):
    """A figure with the interval it lies in; the less, the better."""

    low: float
    value: float
    high: float


Point = tuple[ObjectiveInterval, ...]


def dominates(one: Point, other: Point) -> bool:
    """Whether `one` is no worse in value and both ends on every objective, and on some wholly better.

    On some objective even the worse end of `one` is better than the better end of `other`. For exact figures this is
    the ordinary dominance. Equal points do not dominate each other, and nothing dominates or is dominated by NaN.

    >>> fast, slow = (ObjectiveInterval(1.0, 1.0, 1.0),), (ObjectiveInterval(2.0, 2.0, 2.0),)
    >>> dominates(fast, slow), dominates(slow, fast), dominates(fast, fast)
    (True, False, False)
    >>> dominates((ObjectiveInterval(0.9, 1.0, 1.1),), (ObjectiveInterval(1.0, 1.2, 1.4),))  # better, but not surely so
    False
    """
    pairs = list(zip(one, other, strict=True))
    return all(x <= y for a, b in pairs for x, y in zip(a, b, strict=True)) and any(a.high < b.low for a, b in pairs)


def frontier(points: Sequence[Point]) -> tuple[int, ...]:
    """The indices of the points that no other dominates, in their order; a point with NaN is never among them.

    >>> exact = lambda *values: tuple(ObjectiveInterval(v, v, v) for v in values)
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


def span(metrics: TrialMetrics, objective: str, use_ci: bool = False) -> ObjectiveInterval | None:
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
    return ObjectiveInterval(-high, -value, -low) if is_more_better else ObjectiveInterval(low, value, high)


def trial_frontier(trials: Iterable[Trial], objectives: Sequence[str], *, use_ci: bool = False) -> tuple[str, ...]:
    """The keys of the trials on the frontier. One whose figure is not known for an objective is not on it."""
    found = list(trials)
    check_objectives(objectives, _scored(found))
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

    Names are the objectives with commas between: "accuracy,latency_ms", ..., "accuracy,latency_ms,energy_j,...". Where
    the time of the batch that is deployed is known, it stands in for that of other batches.
    """
    found = [trial.metrics for trial in trials if trial.metrics is not None]
    score = _scored(trials)
    asked = [score if name == "accuracy" else name for name in ALL_OBJECTIVES]
    known = [name for name in asked if any(span(metrics, name) is not None for metrics in found)]
    if "deploy_latency_ms" in known:
        known.remove("latency_ms")
    pairs = [(score, cost) for cost in known if cost != score]
    wanted = [*pairs, tuple(known)] if len(known) > 2 else pairs
    return tuple((",".join(names), trial_frontier(trials, names, use_ci=use_ci)) for names in wanted)


def ranked_frontier(trials: Sequence[Trial]) -> tuple[str, ...]:
    """The keys on the frontier of the score and the time by which candidates are ranked."""
    ran = [trial.metrics for trial in trials if trial.metrics is not None]
    is_deployed = any(metrics.deploy_latency_s is not None for metrics in ran)
    return trial_frontier(trials, (_scored(trials), "deploy_latency_ms" if is_deployed else "latency_ms"))


def _scored(trials: Iterable[Trial]) -> str:
    """Name of what the trials score."""
    return next((trial.metrics.metric for trial in trials if trial.metrics is not None), "accuracy")


def check_objectives(objectives: Sequence[str], metric: str = "accuracy") -> None:
    """Refuse names that are no metrics of a trial that scores `metric`."""
    for name in objectives:
        if name not in trial_metrics(metric):
            known = ", ".join([metric, *ALL_OBJECTIVES[1:]])
            raise InvalidInput(f"unknown objective {name!r}; objectives are {known}, ...")
    if len(objectives) < 2:
        raise InvalidInput(f"a frontier needs two objectives or more, not {list(objectives)}")


def recommend(trials: Sequence[Trial], finals: Finals | None = None) -> tuple[str | None, str]:
    """The key of the candidate to ship, or None, and the sentence that says why.

    The rule: of the accepted candidates that are not shown to be less accurate than the most accurate one, sample by
    sample, the fastest; of those that are not shown to be slower, the smaller, then the faster.

    Args:
        trials: What became of the candidates.
        finals: Their last comparison. With it only finalists are chosen from, for only their times are comparable.
    """
    ran = [(trial, trial.metrics) for trial in trials if trial.metrics is not None and trial.status == "done"]
    accepted = [(trial, metrics) for trial, metrics in ran if trial.is_accepted]
    if accepted:
        return _best(accepted, finals)
    if not trials:
        return None, "nothing was tried"
    if not ran:
        first = trials[0]
        return None, f"nothing ran: {_all(len(trials))} failed, {first.candidate.label} because {first.reason}"
    closest, _ = min(ran, key=lambda pair: _distance(pair[0].violations))
    beyond = ", ".join(map(_beyond, closest.violations))
    return None, f"nothing satisfies the constraints; closest is {closest.candidate.label}, {beyond}"


Ran = tuple[Trial, TrialMetrics]


def not_worse(accepted: Sequence[Ran]) -> tuple[Ran, list[Ran]]:
    """The most accurate candidate, and those that are not shown to be less accurate than it, itself among them."""
    top = max(accepted, key=lambda pair: pair[1].comparable_score)
    return top, [pair for pair in accepted if pair is top or not _is_worse(pair[1], top[1])]


def _is_worse(metrics: TrialMetrics, best: TrialMetrics) -> bool:
    """Whether a score is shown to be worse: all of the difference's interval lies on the wrong side."""
    found = difference(metrics, best)
    return found.high < 0 if metrics.metric_direction == "higher" else found.low > 0


def _best(accepted: Sequence[Ran], finals: Finals | None) -> tuple[str, str]:
    (top, best), near = not_worse(accepted)
    timed = [pair for pair in near if finals is not None and finals.of(pair[0].candidate) is not None] or near
    chosen, metrics = _cheapest(timed, finals)
    fastest, _ = min(timed, key=lambda pair: pair[1].ranked_latency_s)
    latency = units.per_call(metrics.ranked_latency_s, metrics.ranked_batch)
    if len(accepted) == 1:
        figures = f"{latency}, {metrics.metric} {metrics.accuracy:.4f}"
        return chosen.candidate.key, f"{chosen.candidate.label}: the only accepted candidate ({figures})"
    is_tied = fastest is not chosen
    what = f"as fast as any ({latency}), and the smallest of those," if is_tied else f"the fastest ({latency})"
    group = (
        f"{len(near)} of {len(accepted)} accepted candidates that are not shown to be {_worse(metrics)} than the best"
    )
    if chosen is top:
        low, high = metrics.accuracy_low, metrics.accuracy_high
        why = f"its own {metrics.metric} is the best, {metrics.accuracy:.4f} ({low:.4f} to {high:.4f})"
    else:
        why = _surety(metrics, best)
    return chosen.candidate.key, f"{chosen.candidate.label}: {what} among {group}; {why}"


def _cheapest(near: Sequence[Ran], finals: Finals | None) -> Ran:
    """The fastest; where others were timed with it and are not shown to be slower, the smallest of them."""
    fastest = min(near, key=lambda pair: (pair[1].ranked_latency_s, pair[1].size_bytes))
    first = None if finals is None else finals.of(fastest[0].candidate)
    if finals is None or first is None:
        return fastest
    tied = [fastest]
    for pair in near:
        other = finals.of(pair[0].candidate)
        if pair is not fastest and other is not None and paired_ratio(other.logs, first.logs)[1].low <= 1:
            tied.append(pair)
    return min(tied, key=lambda pair: (pair[1].size_bytes, pair[1].ranked_latency_s))


def _surety(metrics: TrialMetrics, best: TrialMetrics) -> str:
    """How sure it is that a candidate is not worse than the best."""
    found = difference(metrics, best)
    on = f" on {found.samples} samples" if found.samples else ""
    return (
        f"its {metrics.metric} is {metrics.accuracy:.4f}, the best is {best.accuracy:.4f}: a difference of "
        f"{found.value:+.4f}, in truth between {found.low:+.4f} and {found.high:+.4f} "
        f"(95 %, {found.method} interval{on})"
    )


def _worse(metrics: TrialMetrics) -> str:
    """What it means to score worse: a higher error is worse, too."""
    return "less accurate" if metrics.metric == "accuracy" else f"worse in {metrics.metric}"


def _distance(broken: Sequence[Violation]) -> float:
    """How far a candidate is from being accepted: the shares by which it is beyond its limits; unknown is farthest."""
    return sum(math.inf if item.excess is None else item.excess / (abs(item.limit) or 1.0) for item in broken)


def _beyond(violation: Violation) -> str:
    if violation.excess is None:
        return f"whose {violation.metric} is not known"
    return f"beyond {violation.metric} by {violation.excess:.3g}"


def _all(count: int) -> str:
    return "the only candidate" if count == 1 else f"all {count} candidates"


def packed_answers(is_right: Sequence[bool] | NDArray[np.bool_]) -> str:
    """Which samples were answered right, as short text.

    >>> packed_answers([True, False, True]), unpacked_answers(packed_answers([True, False, True])).tolist()
    ('3:oA==', [True, False, True])
    """
    bits = np.asarray(is_right, dtype=bool)
    return f"{len(bits)}:{base64.b64encode(np.packbits(bits).tobytes()).decode()}"


def unpacked_answers(text: str) -> NDArray[np.bool_]:
    """What `packed_answers` packed; nothing where there is nothing."""
    count, _, content = text.partition(":")
    if not count:
        return np.zeros(0, dtype=bool)
    bits = np.frombuffer(base64.b64decode(content), dtype=np.uint8)
    return np.unpackbits(bits, count=int(count)).astype(bool)


def difference(one: TrialMetrics, other: TrialMetrics) -> PairedDifference:
    """Return the score of one minus that of another; paired where both keep their answers, else from intervals."""
    value = one.accuracy - other.accuracy
    paired = paired_difference(
        value,
        (unpacked_answers(one.answers), unpacked_answers(other.answers)),
        (one.replicates, other.replicates),
    )
    if paired is not None:
        return paired
    # Newcombe's square and add: what two intervals say of a difference when nothing is known of the pairs.
    return PairedDifference(
        value,
        value - math.hypot(one.accuracy - one.accuracy_low, other.accuracy_high - other.accuracy),
        value + math.hypot(one.accuracy_high - one.accuracy, other.accuracy - other.accuracy_low),
        "unpaired",
        0,
    )
