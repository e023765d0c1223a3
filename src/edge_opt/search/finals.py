"""The finals: who is compared last, and what the comparison says of the winner."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from edge_opt.measuring.statistics import mean_and_half_width, paired_ratio
from edge_opt.records.sweeps import (
    FASTER_THAN_UNPRUNED,
    Candidate,
    Finalist,
    Finals,
    Speedup,
    SpeedupRatio,
    SweepResult,
    Trial,
    TrialMetrics,
    Violation,
)
from edge_opt.search.choose import not_worse, ranked_frontier

# So many of the accepted candidates that may win, and of those on the frontier; the baseline and the steps between it
# and the winner come on top.
_CONTENDERS = 6
_ON_THE_FRONTIER = 6


# Processes whose fastest blocks took at most so much longer than those of the fastest process saw a quiet machine.
_NEAR = 1.03
# So few of them are enough to leave the others out.
_ENOUGH = 3


@dataclass(frozen=True, slots=True)
class Session:
    """One comparison, as its process told it. The samples of all variants lie side by side in time.

    Logarithms of seconds by the variant's key: of the fastest of each batch of samples in one process, or in whole
    processes.
    """

    wall: Mapping[str, tuple[float, ...]]
    cpu: Mapping[str, tuple[float, ...]]
    std_s: Mapping[str, float]
    p95_s: Mapping[str, float]
    is_contended: bool
    is_disturbed: bool
    lost: tuple[str, ...]
    remarks: tuple[str, ...]


def session_of(told: Mapping[str, Any]) -> Session:
    """A session from the plain values that its process left."""
    logs = {clock: {key: tuple(values) for key, values in told[clock].items()} for clock in ("wall", "cpu")}
    return Session(
        logs["wall"],
        logs["cpu"],
        told["std_s"],
        told["p95_s"],
        told["is_contended"],
        told["is_disturbed"],
        tuple(told["lost"]),
        tuple(told["remarks"]),
    )


def by_speed(sessions: Sequence[Session]) -> tuple[list[Session], int]:
    """The sessions, that of the fastest machine first, and how many of them saw it at its fastest or nearly so.

    How fast it was is the mean over the fastest blocks of all variants that every process timed.
    """
    shared = [key for key in sessions[0].cpu if all(session.cpu.get(key) for session in sessions)] if sessions else []
    levels = [sum(min(session.cpu[key]) for key in shared) / max(1, len(shared)) for session in sessions]
    order = sorted(range(len(sessions)), key=levels.__getitem__)
    near = sum(level <= min(levels) + math.log(_NEAR) for level in levels)
    return [sessions[index] for index in order], near


def merged(sessions: Sequence[Session]) -> Session:
    """What several processes say together: each is one sample, and those that saw a slower machine are left out.

    Samples of one process share where its memory lies, so that only processes are independent of each other. Who was
    not timed in all of them is left out. A single session stays as it is.

    Args:
        sessions: What the processes told; one or more.
    """
    if len(sessions) == 1:
        return sessions[0]
    ordered, near = by_speed(sessions)
    used = ordered[: max(near, _ENOUGH)]
    is_disturbed = near < min(_ENOUGH, len(sessions))
    keys = [key for key in used[0].wall if all(session.wall.get(key) for session in used)]
    return Session(
        {key: tuple(min(session.wall[key]) for session in used) for key in keys},
        {key: tuple(min(session.cpu[key]) for session in used if session.cpu[key]) for key in keys},
        {key: float(np.median([session.std_s[key] for session in used])) for key in keys},
        {key: float(np.median([session.p95_s[key] for session in used])) for key in keys},
        any(session.is_contended for session in used),
        is_disturbed,
        tuple(dict.fromkeys(remark for session in used for remark in session.lost)),
        tuple(dict.fromkeys(remark for session in used for remark in session.remarks))[:1] if is_disturbed else (),
    )


def steps_to(baseline: Candidate, winner: Candidate) -> tuple[Candidate, Candidate]:
    """What lies between: the baseline in the winner's runtime, and that in the winner's precision, too.

    >>> between = steps_to(Candidate(0.0, "fp32", "torch"), Candidate(0.5, "int8", "onnxruntime"))
    >>> [step.label for step in between]
    ['prune 0 fp32 onnxruntime', 'prune 0 int8 onnxruntime']
    """
    in_runtime = replace(baseline, runtime=winner.runtime)
    return in_runtime, replace(in_runtime, precision=winner.precision)


def entries_of(result: SweepResult) -> tuple[Candidate, ...]:
    """Who is compared: the baseline, candidates that may win, the frontier, and the steps to the likely winner."""
    ran = [(trial, trial.metrics) for trial in result.trials if trial.metrics is not None and trial.is_accepted]
    near = not_worse(ran)[1] if ran else []
    contenders = sorted(near, key=lambda pair: pair[1].ranked_latency_s)[:_CONTENDERS]
    frontier = ranked_frontier(result.trials)
    shown = [trial.candidate for trial in result.trials if trial.candidate.key in frontier][:_ON_THE_FRONTIER]
    winner = None if result.best is None else result.trial(result.best).candidate
    between = () if winner is None else steps_to(result.baseline.candidate, winner)
    chosen = [] if winner is None else [winner]
    listed = (result.baseline.candidate, *chosen, *(trial.candidate for trial, _ in contenders), *between, *shown)
    ran_too = (trial.candidate for trial in result.trials if trial.metrics is not None)
    parents = [one for one in ran_too if any(other.is_pruned and _is_parent(one, other) for other in listed)]
    return tuple(dict.fromkeys((*listed, *parents)))


def slower_than_parents(trials: Sequence[Trial], finals: Finals | None = None) -> dict[str, Violation]:
    """Pruned candidates that are not faster than their parents, by key: the unpruned model in their precision, runtime.

    In the finals the times themselves decide, for they were taken in turns; nothing is said of who was not there.
    Without finals, times that nothing disturbed must be apart by their intervals. A parent is one of the trials: where
    only pruned variants are asked for, there is nothing to offer instead.
    """
    ran = [trial.metrics for trial in trials if trial.metrics is not None]
    is_deployed = finals is not None or any(metrics.deploy_latency_s is not None for metrics in ran)
    name = "deploy_latency_ms" if is_deployed else "latency_ms"
    if finals is not None:
        tried = {trial.candidate for trial in trials}
        found_last = [item for item in finals.finalists if item.candidate in tried]
        timed = [(item.candidate, item.seconds, item.seconds, item.seconds) for item in found_last]
    else:
        timed = [
            (trial.candidate, trial.metrics.ranked_latency_s, *_ends(trial.metrics))
            for trial in trials
            if trial.metrics is not None and not trial.metrics.is_disturbed
        ]
    found: dict[str, Violation] = {}
    for candidate, seconds, low, _ in timed:
        parent = next((other for other in timed if _is_parent(other[0], candidate)), None)
        if candidate.is_pruned and parent is not None and low >= parent[3]:
            found[candidate.key] = Violation(FASTER_THAN_UNPRUNED, name, 1e3 * seconds, 1e3 * parent[1])
    return found


def held_to_parents(trials: Iterable[Trial], finals: Finals | None = None) -> tuple[Trial, ...]:
    """The trials, where pruned ones that are not faster than their parents are rejected; see `slower_than_parents`.

    Args:
        trials: What became of the candidates, by the times of the finals where there are any.
        finals: The last comparison.
    """
    rows = tuple(trials)
    slower = slower_than_parents(rows, finals)
    return tuple(
        replace(trial, violations=(*trial.violations, slower[trial.candidate.key]))
        if trial.candidate.key in slower
        else trial
        for trial in rows
    )


def _is_parent(one: Candidate, other: Candidate) -> bool:
    return not one.is_pruned and (one.precision, one.runtime) == (other.precision, other.runtime)


def _ends(metrics: TrialMetrics) -> tuple[float, float]:
    """The ends of the interval of the time by which candidates are ranked; the time itself where none is known."""
    low, high = metrics.latency_low_s, metrics.latency_high_s
    if metrics.deploy_latency_s is not None:
        low = metrics.deploy_latency_s if metrics.deploy_latency_low_s is None else metrics.deploy_latency_low_s
        high = metrics.deploy_latency_s if metrics.deploy_latency_high_s is None else metrics.deploy_latency_high_s
    return low, high


def finals_of(
    session: Session, entries: Sequence[Candidate], batch_size: int, threads: int, sessions: int
) -> Finals | None:
    """What a session says; None where the baseline, the first entry, could not be timed.

    CPU time is compared where other programs took the core away, unless several threads share the work: then it is no
    time that anybody waits for.
    """
    clock: Literal["wall", "cpu"] = "cpu" if session.is_contended and threads == 1 else "wall"
    logs = session.cpu if clock == "cpu" else session.wall
    first = logs.get(entries[0].key)
    if not first:
        return None
    found = [
        _finalist(candidate, logs[candidate.key], first, session)
        for candidate in entries
        if len(logs.get(candidate.key, ())) == len(first)
    ]
    return Finals(
        batch_size, threads, clock, sessions, session.is_disturbed, (*session.lost, *session.remarks), tuple(found)
    )


def _finalist(candidate: Candidate, logs: tuple[float, ...], first: tuple[float, ...], session: Session) -> Finalist:
    middle, half_width = mean_and_half_width(logs)
    half_width = min(half_width, 1.0)
    return Finalist(
        candidate=candidate,
        seconds=math.exp(middle),
        low=math.exp(middle - half_width),
        high=math.exp(middle + half_width),
        std_s=session.std_s[candidate.key],
        p95_s=session.p95_s[candidate.key],
        speedup=factor(first, logs),
        logs=logs,
    )


def factor(slow: Sequence[float], fast: Sequence[float]) -> SpeedupRatio:
    """How many times as fast the one is; what is compared with itself is exactly as fast."""
    if slow == fast:
        return SpeedupRatio(1.0, 1.0, 1.0)
    ratio, interval = paired_ratio(slow, fast)
    return SpeedupRatio(ratio, interval.low, interval.high)


def speedup_of(finals: Finals, baseline: Candidate, winner: Candidate) -> Speedup | None:
    """The winner against the baseline, and what its runtime, its precision and pruning bought of that."""
    first, last = finals.of(baseline), finals.of(winner)
    if first is None or last is None:
        return None
    in_runtime, in_precision = (finals.of(step) for step in steps_to(baseline, winner))
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
    """The trial of a finalist with the times of the finals; any other as it was.

    Where batches of that size were timed alone before, their times give way, too: one size has one time.
    """
    found = finals.of(trial.candidate)
    if found is None or trial.metrics is None:
        return trial
    metrics = replace(
        trial.metrics,
        deploy_batch=finals.batch_size,
        deploy_latency_s=found.seconds,
        deploy_latency_low_s=found.low,
        deploy_latency_high_s=found.high,
        is_disturbed=finals.is_disturbed,
        disturbed_times=_disturbed(trial.metrics, finals),
    )
    if finals.batch_size == 1:
        metrics = replace(metrics, single_latency_s=found.seconds)
    return replace(trial, metrics=_same_batch(metrics, found) if finals.batch_size == metrics.batch_size else metrics)


def _disturbed(metrics: TrialMetrics, finals: Finals) -> tuple[str, ...]:
    """The times that are disturbed once those of the finals stand in for others of the same batch."""
    sizes = {"latency_ms": metrics.batch_size, "deploy_latency_ms": finals.batch_size, "single_latency_ms": 1}
    return tuple(
        name
        for name, size in sizes.items()
        if (finals.is_disturbed if size == finals.batch_size else name in metrics.disturbed_times)
    )


def _same_batch(metrics: TrialMetrics, found: Finalist) -> TrialMetrics:
    is_proxy = metrics.energy_j is not None and metrics.energy_source.startswith("proxy")
    return replace(
        metrics,
        latency_s=found.seconds,
        latency_low_s=found.low,
        latency_high_s=found.high,
        latency_std_s=found.std_s,
        latency_p95_s=found.p95_s,
        throughput=metrics.batch_size / found.seconds,
        energy_j=(metrics.energy_j or 0.0) * found.seconds / metrics.latency_s if is_proxy else metrics.energy_j,
    )
