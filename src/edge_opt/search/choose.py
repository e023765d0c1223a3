"""Find the Pareto fronts, pruned variants that are not faster than unpruned ones, and the candidate to ship."""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from edge_opt.budgets import trial_metrics
from edge_opt.measuring.statistics import paired_ratio
from edge_opt.records.pareto import ObjectiveInterval, frontier
from edge_opt.records.sweeps import (
    FASTER_THAN_UNPRUNED,
    SHARES,
    TRIAL_COLUMNS,
    Candidate,
    Finalist,
    Finals,
    Speedup,
    SpeedupRatio,
    Trial,
    TrialMetrics,
    Violation,
)
from edge_opt.tasks.paired_scores import PairedDifference, paired_difference

ALL_OBJECTIVES = ("accuracy", "deploy_latency_ms", "latency_ms", "energy_j", "peak_memory_mb", "size_mb")
# What replaces them where a target decides.
TARGET_OBJECTIVES = ("accuracy", "target_latency_ms", "target_energy_j", "target_ram_kib", "size_mb")
_MORE_IS_BETTER = {column.metric for column in TRIAL_COLUMNS if column.better == "higher"}


def span(metrics: TrialMetrics, objective: str, use_ci: bool = False) -> ObjectiveInterval | None:
    """Return a figure as the frontier sees it, turned so that less is better; None where it is not known."""
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


def trial_frontier(trials: Sequence[Trial], objectives: Sequence[str], *, use_ci: bool = False) -> tuple[str, ...]:
    """Return the keys of the trials on the frontier. One whose figure is not known for an objective is not on it."""
    points = {}
    for trial in trials:
        if trial.metrics is not None:
            spans = [span(trial.metrics, objective, use_ci) for objective in objectives]
            if None not in spans:
                points[trial.candidate.key] = tuple(item for item in spans if item is not None)
    keys = list(points)
    return tuple(keys[index] for index in frontier(list(points.values())))


def frontiers(trials: Sequence[Trial], *, use_ci: bool = False) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Return the frontiers of accuracy vs each cost, and of everything that is known at all, by their objectives.

    Names are the objectives with commas between: "accuracy,latency_ms", ..., "accuracy,latency_ms,energy_j,...". Where
    the time of the deployed batch is known, it replaces that of other batches.
    """
    ran = [trial.metrics for trial in trials if trial.metrics is not None]
    score = _metric(trials)
    is_there = any(metrics.target is not None for metrics in ran)
    names = [score if name == "accuracy" else name for name in (TARGET_OBJECTIVES if is_there else ALL_OBJECTIVES)]
    known = [name for name in names if any(span(metrics, name) is not None for metrics in ran)]
    if "deploy_latency_ms" in known:
        known.remove("latency_ms")
    pairs = [(score, cost) for cost in known if cost != score]
    wanted = [*pairs, tuple(known)] if len(known) > 2 else pairs
    return tuple((",".join(group), trial_frontier(trials, group, use_ci=use_ci)) for group in wanted)


def ranked_frontier(trials: Sequence[Trial]) -> tuple[str, ...]:
    """Return the keys on the frontier of the score and the time by which candidates are ranked."""
    ran = [trial.metrics for trial in trials if trial.metrics is not None]
    return trial_frontier(trials, (_metric(trials), _ranked_name(ran)))


def _ranked_name(ran: Sequence[TrialMetrics]) -> str:
    """Return the column of the time by which candidates are ranked."""
    if any(metrics.target is not None for metrics in ran):
        return "target_latency_ms"
    return "deploy_latency_ms" if any(metrics.deploy_latency_s is not None for metrics in ran) else "latency_ms"


def _metric(trials: Sequence[Trial]) -> str:
    """Return the name of what the trials score."""
    return next((trial.metrics.metric for trial in trials if trial.metrics is not None), "accuracy")


def recommend(trials: Sequence[Trial], finals: Finals | None = None) -> tuple[str | None, str]:
    """Return the key of the candidate to ship, or None, and the sentence that says why.

    The rule: of the accepted candidates that are not significantly less accurate than the best (paired by sample), the
    fastest; of those that are not significantly slower, the smallest, then the fastest.

    Args:
        trials: All candidates with their results.
        finals: Their last comparison. With it, only finalists can win, because only their times are comparable.
    """
    ran = [(trial, trial.metrics) for trial in trials if trial.metrics is not None and trial.status == "done"]
    accepted = [(trial, metrics) for trial, metrics in ran if trial.is_accepted]
    if accepted:
        # A variant whose time is not known may not run on the target at all.
        timed = [pair for pair in accepted if math.isfinite(pair[1].ranked_latency_s)]
        best, why = _best(timed or accepted, finals)
        unknown = len(accepted) - len(timed) if timed else 0
        return best, f"{why}; {unknown} more without a known latency" if unknown else why
    undecided = [(trial, metrics) for trial, metrics in ran if trial.is_undecided]
    if undecided:
        return _likeliest(undecided)
    if not trials:
        return None, "no candidate was tried"
    if not ran:
        first = trials[0]
        everyone = "the only candidate" if len(trials) == 1 else f"all {len(trials)} candidates"
        return None, f"{everyone} failed, {first.candidate.title} because {first.reason}"
    closest, _ = min(ran, key=lambda pair: _distance(pair[0].violations))
    beyond = ", ".join(map(_beyond, closest.violations))
    return None, f"no candidate satisfies the constraints; closest is {closest.candidate.title}, {beyond}"


Ran = tuple[Trial, TrialMetrics]


def not_worse(accepted: Sequence[Ran]) -> tuple[Ran, list[Ran]]:
    """Return the most accurate candidate, and all that are not significantly less accurate, itself included."""
    top = max(accepted, key=lambda pair: pair[1].comparable_score)
    return top, [pair for pair in accepted if pair is top or not _is_worse(pair[1], top[1])]


def _is_worse(metrics: TrialMetrics, best: TrialMetrics) -> bool:
    """Return whether a score is significantly worse: the whole interval of the difference is on that side."""
    gap = difference(metrics, best)
    return gap.high < 0 if metrics.metric_direction == "higher" else gap.low > 0


def _best(accepted: Sequence[Ran], finals: Finals | None) -> tuple[str, str]:
    (top, best), near = not_worse(accepted)
    timed = [pair for pair in near if finals is not None and finals.of(pair[0].candidate) is not None] or near
    chosen, metrics = _cheapest(timed, finals)
    fastest, _ = min(timed, key=lambda pair: pair[1].ranked_latency_s)
    winner = chosen.candidate.title
    if len(accepted) == 1:
        return chosen.candidate.key, f"{winner} is the only accepted candidate"
    what = "fastest" if fastest is chosen else "smallest of the equally fast"
    clear = f" without a significant {metrics.metric} loss" if len(near) < len(accepted) else ""
    gap = f"its {metrics.metric} is the best" if chosen is top else _gap(metrics, best)
    return chosen.candidate.key, f"{winner} is the {what} of {len(near)} accepted candidates{clear}; {gap}"


def _likeliest(undecided: Sequence[Ran]) -> tuple[str, str]:
    """Return the candidate that most likely keeps the budgets, of equally likely ones the fastest."""
    trial, metrics = min(undecided, key=lambda pair: (-(pair[0].probability or 0.0), pair[1].ranked_latency_s))
    chance = "" if trial.probability is None else f" with a probability of {100 * trial.probability:.0f} %"
    typed = f"--set target_times.{trial.candidate.key}=MS"
    decide = f"time it on {metrics.target_name} to decide: --measure-on USER@HOST, or {typed}"
    return trial.candidate.key, (
        f"no candidate surely keeps the budgets; {trial.candidate.title} keeps them{chance}; {decide}"
    )


def _cheapest(near: Sequence[Ran], finals: Finals | None) -> Ran:
    """Return the fastest; where others were timed with it and are not significantly slower, the smallest of them."""
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


def _gap(metrics: TrialMetrics, best: TrialMetrics) -> str:
    """Return the difference between a score and the best one, with its interval; shares in points."""
    gap = difference(metrics, best)
    scale, unit = (100, " points") if metrics.metric in SHARES else (1, "")
    value, low, high = (f"{scale * it:+.2g}" for it in (gap.value, gap.low, gap.high))
    return f"{metrics.metric} difference from the best not significant: {value}{unit} (95 % CI {low} to {high})"


def _distance(broken: Sequence[Violation]) -> float:
    """Return how far a candidate exceeds its limits, as a sum of shares; infinite for an unknown value."""
    return sum(math.inf if item.excess is None else item.excess / (abs(item.limit) or 1.0) for item in broken)


def _beyond(violation: Violation) -> str:
    if violation.excess is None:
        return f"whose {violation.metric} is not known"
    return f"beyond {violation.metric} by {violation.excess:.3g}"


def packed_answers(is_right: Sequence[bool] | NDArray[np.bool_]) -> str:
    """Return which samples were answered right, as short text.

    >>> packed_answers([True, False, True]), unpacked_answers(packed_answers([True, False, True])).tolist()
    ('3:oA==', [True, False, True])
    """
    bits = np.asarray(is_right, dtype=bool)
    return f"{len(bits)}:{base64.b64encode(np.packbits(bits).tobytes()).decode()}"


def unpacked_answers(text: str) -> NDArray[np.bool_]:
    """Return what `packed_answers` packed; nothing where there is nothing."""
    count, _, content = text.partition(":")
    if not count:
        return np.zeros(0, dtype=bool)
    bits = np.frombuffer(base64.b64decode(content), dtype=np.uint8)
    return np.unpackbits(bits, count=int(count)).astype(bool)


class Answered(Protocol):
    """The data that pairs two scores by sample: packed answers, or scores of the same resamples."""

    @property
    def answers(self) -> str: ...
    @property
    def replicates(self) -> Sequence[float]: ...


def paired(value: float, one: Answered, other: Answered) -> PairedDifference | None:
    """Return the difference `value` of two scores with its interval; None where nothing pairs them."""
    answers = unpacked_answers(one.answers), unpacked_answers(other.answers)
    return paired_difference(value, answers, (one.replicates, other.replicates))


def difference(one: TrialMetrics, other: TrialMetrics) -> PairedDifference:
    """Return the score of one minus that of another; paired where both keep their answers, else from intervals."""
    value = one.accuracy - other.accuracy
    # Newcombe's square and add: what two intervals say of a difference when nothing is known of the pairs.
    return paired(value, one, other) or PairedDifference(
        value,
        value - math.hypot(one.accuracy - one.accuracy_low, other.accuracy_high - other.accuracy),
        value + math.hypot(one.accuracy_high - one.accuracy, other.accuracy - other.accuracy_low),
        "unpaired",
        0,
    )


def unpruned_steps(baseline: Candidate, winner: Candidate) -> tuple[Candidate, Candidate]:
    """Return the steps between: the baseline in the winner's runtime, then also in the winner's precision.

    >>> between = unpruned_steps(Candidate(0.0, "fp32", "torch"), Candidate(0.5, "int8", "onnxruntime"))
    >>> [step.label for step in between]
    ['prune 0 fp32 onnxruntime', 'prune 0 int8 onnxruntime']
    """
    in_runtime = replace(baseline, runtime=winner.runtime)
    return in_runtime, replace(in_runtime, precision=winner.precision)


def is_parent(one: Candidate, other: Candidate) -> bool:
    """Return whether one candidate is the other without pruning: the same precision in the same runtime."""
    return not one.is_pruned and (one.precision, one.runtime) == (other.precision, other.runtime)


def reject_slower_than_unpruned(trials: Sequence[Trial], finals: Finals | None = None) -> tuple[Trial, ...]:
    """Return the trials; pruned ones that are not faster than unpruned in their precision and runtime are rejected.

    Times of the finals decide, because they were interleaved; candidates outside the finals are not judged by them.
    Without finals, times that nothing disturbed must be apart by their intervals. Where only pruned variants are tried,
    there is nothing to offer instead.

    Args:
        trials: The candidates, by the times of the finals where there are any.
        finals: The last comparison.
    """
    ran = [(trial.candidate, trial.metrics) for trial in trials if trial.metrics is not None]
    # Each with its time in seconds, and the ends of its interval.
    timed: dict[Candidate, tuple[float, float, float]]
    if finals is None:
        known = ((each, metrics) for each, metrics in ran if math.isfinite(metrics.ranked_latency_s))
        timed = {each: _ranked_interval(metrics) for each, metrics in known if not metrics.is_disturbed}
    else:
        timed = {item.candidate: (item.seconds,) * 3 for item in finals.finalists}
    name = "deploy_latency_ms" if finals is not None else _ranked_name([metrics for _, metrics in ran])
    tried = [trial.candidate for trial in trials if trial.candidate in timed]

    def judged(trial: Trial) -> Trial:
        candidate = trial.candidate
        parent = next((each for each in tried if is_parent(each, candidate)), None)
        if parent is None or candidate not in timed or not candidate.is_pruned:
            return trial
        (seconds, low, _), (unpruned, _, high) = timed[candidate], timed[parent]
        broken = Violation(FASTER_THAN_UNPRUNED, name, 1e3 * seconds, 1e3 * unpruned)
        return replace(trial, violations=(*trial.violations, broken)) if low >= high else trial

    return tuple(judged(trial) for trial in trials)


def _ranked_interval(metrics: TrialMetrics) -> tuple[float, float, float]:
    """Return the time by which candidates are ranked, and its interval: the time itself where that is not known.

    The intervals of two predictions share their errors, so that the predicted times themselves are compared.
    """
    seconds, low, high = metrics.ranked_latency_s, metrics.ranked_low_s, metrics.ranked_high_s
    if metrics.target is not None:
        return seconds, seconds, seconds
    return seconds, seconds if low is None else low, seconds if high is None else high


def factor(slow: Sequence[float], fast: Sequence[float]) -> SpeedupRatio:
    """Return the speedup from the logarithms of times; of a variant over itself it is exactly 1."""
    if slow == fast:
        return SpeedupRatio(1.0, 1.0, 1.0)
    ratio, interval = paired_ratio(slow, fast)
    return SpeedupRatio(ratio, interval.low, interval.high)


def speedup_of(finals: Finals, baseline: Candidate, winner: Candidate) -> Speedup | None:
    """Return the winner's speedup over the baseline, and the parts of runtime, precision and pruning."""
    first, last = finals.of(baseline), finals.of(winner)
    if first is None or last is None:
        return None
    in_runtime, in_precision = (finals.of(step) for step in unpruned_steps(baseline, winner))
    return Speedup(
        whole=last.speedup,
        runtime=None if in_runtime is None else factor(first.logs, in_runtime.logs),
        precision=None if in_runtime is None or in_precision is None else factor(in_runtime.logs, in_precision.logs),
        pruning=None if in_precision is None else factor(in_precision.logs, last.logs),
        batch_size=finals.batch_size,
        clock=finals.clock,
        is_disturbed=finals.is_disturbed,
    )


def retimed(trial: Trial, finals: Finals) -> Trial:
    """Return the trial of a finalist with the times of the finals; any other as it was.

    Times of batches of that size that were measured alone are replaced as well: one size has one time.
    """
    timing = finals.of(trial.candidate)
    if timing is None or trial.metrics is None:
        return trial
    # The disturbed times after those of the finals replaced others of the same batch.
    sizes = {"latency_ms": trial.metrics.batch_size, "deploy_latency_ms": finals.batch_size, "single_latency_ms": 1}
    disturbed = [
        name
        for name, size in sizes.items()
        if (finals.is_disturbed if size == finals.batch_size else name in trial.metrics.disturbed_times)
    ]
    metrics = replace(
        trial.metrics,
        deploy_batch=finals.batch_size,
        deploy_latency_s=timing.seconds,
        deploy_latency_low_s=timing.low,
        deploy_latency_high_s=timing.high,
        is_disturbed=finals.is_disturbed,
        disturbed_times=tuple(disturbed),
    )
    if finals.batch_size == 1:
        metrics = replace(metrics, single_latency_s=timing.seconds)
    return replace(trial, metrics=_same_batch(metrics, timing) if finals.batch_size == metrics.batch_size else metrics)


def _same_batch(metrics: TrialMetrics, timing: Finalist) -> TrialMetrics:
    energy_j = metrics.energy_j
    if metrics.energy_source.startswith("proxy") and energy_j is not None and metrics.latency_s:
        energy_j = energy_j * timing.seconds / metrics.latency_s
    return replace(
        metrics,
        latency_s=timing.seconds,
        latency_low_s=timing.low,
        latency_high_s=timing.high,
        latency_std_s=timing.std_s,
        latency_p95_s=timing.p95_s,
        throughput=metrics.batch_size / timing.seconds,
        energy_j=energy_j,
    )
