"""The sweep: every candidate tried once, kept at once, and judged."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from edge_opt._support.json import from_plain
from edge_opt.budgets import parse_budget, trial_metrics, violations
from edge_opt.errors import InvalidInput, SweepInterrupted
from edge_opt.records.profiles import Budget
from edge_opt.records.sweeps import Candidate, Failure, Finals, SweepResult, Trial, TrialMetrics, TrialStatus
from edge_opt.search.build import (
    Builders,
    Listener,
    LocalBuilder,
    Notice,
    Order,
    PhaseEnded,
    PhaseStarted,
    SweepEnded,
    SweepStarted,
    TrialFinished,
)
from edge_opt.search.choose import check_objectives, frontiers, recommend
from edge_opt.search.finals import held_to_parents, retimed, speedup_of
from edge_opt.search.locks import alone, folder_lock
from edge_opt.search.process import Isolation, Job, Limits, Outcome, packed
from edge_opt.search.sampling import Sampling
from edge_opt.search.space import SamplerName, Space, plain_space
from edge_opt.search.store import Built, Sources, Store


class Measurer(Protocol):
    """Who measures what was built, if it is not this machine."""

    def measure(
        self, candidate: Candidate, folder: Path, built: Mapping[str, Any], on_retry: Callable[[], object]
    ) -> Outcome:
        """What became of one candidate, its figures as JSON holds them; `on_retry` is called before another attempt."""
        ...


Comparer = Callable[[SweepResult, Isolation, Store], Finals | None]


def run_sweep(
    job: Job,
    space: Space,
    *,
    folder: str | Path,
    constraints: Sequence[str | Budget] = (),
    settings: Mapping[str, Any] | None = None,
    sources: Sources | None = None,
    baseline: Trial | Candidate | None = None,
    name: str = "sweep",
    metric: str = "accuracy",
    sampler: SamplerName = "grid",
    trials: int | None = None,
    seed: int = 0,
    objectives: Sequence[str] = ("accuracy", "latency_ms"),
    use_ci: bool = False,
    workers: int = 0,
    scheduler: str | None = None,
    tls_dir: str | Path | None = None,
    insecure: bool = False,
    memory_limit_bytes: int | None = None,
    time_limit_s: float | None = None,
    retries: int = 1,
    retry_failed: bool = False,
    fresh: bool = False,
    preload: Sequence[str] = (),
    on_event: Listener = lambda _: None,
    compare: Comparer | None = None,
    measurer: Measurer | None = None,
) -> SweepResult:
    """Try every candidate of a space, or some, and say which to ship; what is finished is kept, and not run again.

    Args:
        job: How a candidate is built and measured. Each half runs in a process of its own.
        space: The candidates.
        folder: Where everything is kept.
        constraints: What a candidate must keep, such as "latency_ms <= 5".
        settings: What results depend on; a folder with other settings is refused.
        sources: Code and data that results depend on, by name; where one has changed, what depends on it is run again.
        baseline: What others are compared with, or its trial; unpruned fp32 unless given. A row if it is of the space.
        name: Name of the sweep.
        metric: What the job's `TrialMetrics.metric` says that trials score; constraints speak in its name.
        sampler: Who chooses `trials` of a larger space: grid at random, nsga2 and tpe by what was found.
        trials: Candidates to try; None is the whole space.
        seed: Decides what the sampler chooses.
        objectives: What nsga2 and tpe improve, two figures or more.
        use_ci: Whether one candidate beats another only where their intervals do not overlap.
        workers: Processes that build side by side; 0 builds one after the other. Measuring is always done here, alone.
        scheduler: Address of a Dask scheduler whose workers build instead.
        tls_dir: Folder with ca.pem, cert.pem and key.pem, by which scheduler, workers and we know each other.
        insecure: Whether a scheduler on another machine may be spoken to without TLS.
        memory_limit_bytes: Resident bytes that one half of the job may take; None is no limit.
        time_limit_s: Seconds that one half of the job may take; None is no limit.
        retries: How often a half is tried again when its process crashes.
        retry_failed: Try candidates again that failed in an earlier run.
        fresh: Start over; the earlier table is kept aside.
        preload: Modules (or `module:function`) that processes start with, to be faster; `?name` may be missing.
        on_event: Called with everything that happens, as it happens.
        compare: Times the candidates worth having once more, in turns, before the winner is named.
        measurer: Who measures candidates instead of this machine: a board.
    """
    budgets, root = _checked(constraints, objectives, workers, retries, metric), Path(folder)
    order = Order(packed(job), Limits(memory_limit_bytes, time_limit_s), retries, (type(job).__module__, *preload))
    sampling = Sampling(space, sampler, trials, seed, _named(objectives, metric), partial(_excesses, budgets=budgets))
    reference = _reference(space, baseline)
    with ExitStack() as stack:
        store = stack.enter_context(_opened(root, settings or {}, sources, fresh, on_event))
        _begin(store, _plan(name, sampling.count, metric, budgets, space), retry_failed)
        isolation = stack.enter_context(Isolation(order.preload))
        sweep = _Sweep(root, order, store, isolation, space, budgets, sampling.count, on_event, measurer)
        sweep.take(baseline)
        on_event(SweepStarted(name, sampling.count, sweep.done, workers))
        try:
            builders = _elsewhere(order, sweep.folder_of, (workers, scheduler, root, tls_dir, insecure), on_event)
            rows = sweep.gone_through(reference, sampling, builders)
            result = sweep.settled(_result(name, sweep.known[reference.key], rows, budgets, use_ci), compare, use_ci)
        except KeyboardInterrupt:
            raise _interrupted(len(sweep.done), sampling.count, root) from None
        on_event(SweepEnded(result))
    return result


def _checked(
    constraints: Sequence[str | Budget], objectives: Sequence[str], workers: int, retries: int, metric: str
) -> tuple[Budget, ...]:
    """The constraints as budgets, once the other arguments make sense."""
    known = trial_metrics(metric)
    budgets = tuple(parse_budget(item, known) if isinstance(item, str) else item for item in constraints)
    check_objectives(_named(objectives, metric), metric)
    if workers < 0 or retries < 0:
        raise InvalidInput(f"workers is {workers} and retries is {retries}; expected 0 or more of each")
    return budgets


@contextmanager
def _opened(
    root: Path, settings: Mapping[str, Any], sources: Sources | None, fresh: bool, tell: Listener
) -> Iterator[Store]:
    """The store, for as long as nobody else works in the folder."""
    with folder_lock(root):
        opened = Store.open(root, settings, sources, fresh=fresh, on_notice=lambda text: tell(Notice(text)))
        with closing(opened) as store:
            yield store


def _begin(store: Store, plan: Mapping[str, Any], retry_failed: bool) -> None:
    if retry_failed:
        store.forget_failed()
    store.keep_fact("plan", plan)
    store.keep_fact("verdict", None)


def _plan(name: str, total: int, metric: str, budgets: Sequence[Budget], space: Space) -> dict[str, Any]:
    """What somebody who looks at the folder must know of the sweep."""
    constraints = [item.text for item in budgets]
    return {"name": name, "total": total, "metric": metric, "constraints": constraints, "space": plain_space(space)}


def _named(objectives: Sequence[str], metric: str) -> tuple[str, ...]:
    """The objectives, with the metric that is scored in place of accuracy."""
    return tuple(metric if name == "accuracy" else name for name in objectives)


def _interrupted(done: int, total: int, root: Path) -> SweepInterrupted:
    return SweepInterrupted(
        f"stopped: {done} of {total} candidates are finished and kept in {root}; run the same again to go on"
    )


def _result(
    name: str,
    baseline: Trial,
    rows: tuple[Trial, ...],
    budgets: tuple[Budget, ...],
    use_ci: bool,
    finals: Finals | None = None,
) -> SweepResult:
    chosen, sentence = recommend(rows, finals)
    winner = next((trial.candidate for trial in rows if trial.candidate.key == chosen), None)
    return SweepResult(
        name=name,
        baseline=baseline,
        trials=rows,
        constraints=tuple(item.text for item in budgets),
        # What is rejected is not offered, so it is on no frontier, and beats nobody there.
        frontiers=frontiers([trial for trial in rows if trial.is_accepted], use_ci=use_ci),
        best=chosen,
        recommendation=sentence,
        finals=finals,
        speedup=speedup_of(finals, baseline.candidate, winner) if finals and winner else None,
    )


def _reference(space: Space, baseline: Trial | Candidate | None) -> Candidate:
    """What the others are compared with; when no baseline is given: unpruned, in fp32."""
    if baseline is not None:
        return baseline.candidate if isinstance(baseline, Trial) else baseline
    layers = tuple((layer, 0.0) for layer in space.layer_pruning)
    for runtime in space.runtimes:
        candidate = Candidate(0.0, "fp32", runtime, layers)
        if candidate in space:
            return candidate
    raise InvalidInput("the space has no unpruned fp32 candidate to compare with; add it, or give a baseline")


def _elsewhere(
    order: Order,
    folder_of: Callable[[Candidate], Path],
    cluster: tuple[int, str | None, Path, str | Path | None, bool],
    on_event: Listener,
) -> Builders | None:
    workers, scheduler, root, tls_dir, insecure = cluster
    if not workers and scheduler is None:
        return None
    from edge_opt.search.workers import Cluster, DaskBuilders

    where = None if tls_dir is None else Path(tls_dir)
    return DaskBuilders(order, folder_of, Cluster(workers, scheduler, root.absolute(), where, insecure), on_event)


def _all_rounds(sampling: Sampling, run: Callable[[Sequence[Candidate]], list[Trial]]) -> tuple[Trial, ...]:
    rows: list[Trial] = []
    rounds = sampling.rounds()
    candidates = next(rounds)
    while True:
        finished = run(candidates)
        rows += finished
        try:
            candidates = rounds.send(finished)
        except StopIteration:
            return tuple(rows)


class _Sweep:
    """A sweep in its folder: what is known so far, and how more becomes known."""

    def __init__(
        self,
        root: Path,
        order: Order,
        store: Store,
        isolation: Isolation,
        space: Space,
        budgets: tuple[Budget, ...],
        total: int,
        tell: Listener,
        measurer: Measurer | None = None,
    ) -> None:
        # Children are given paths that hold wherever they run.
        self._root = root.absolute()
        self._order = order
        self._store = store
        self._isolation = isolation
        self._space = space
        self._budgets = budgets
        self._total = total
        self._tell = tell
        self._measurer = measurer
        self._begun: set[str] = set()
        self.known = {key: self.judged(trial) for key, trial in store.trials().items()}

    def folder_of(self, candidate: Candidate) -> Path:
        return candidate_folder(self._root, candidate)

    def judged(self, trial: Trial) -> Trial:
        """The trial with the constraints of this run."""
        broken = () if trial.metrics is None else violations(trial.metrics, self._budgets)
        return replace(trial, violations=broken)

    def settled(self, result: SweepResult, compare: Comparer | None, use_ci: bool) -> SweepResult:
        """The result by the times of the finals, where there are any; constraints are judged anew, and by parents."""
        finals = None if compare is None else compare(result, self._isolation, self._store)
        baseline, rows = result.baseline, list(result.trials)
        if finals is not None:
            baseline, *rows = (self.judged(retimed(trial, finals)) for trial in (baseline, *rows))
        kept = held_to_parents(rows, finals)
        found = _result(result.name, baseline, kept, self._budgets, use_ci, finals)
        accepted = [trial.candidate.key for trial in found.accepted]
        said = {"best": found.best, "recommendation": found.recommendation, "accepted": accepted}
        self._store.keep_fact("verdict", said)
        return found

    def take(self, baseline: Trial | Candidate | None) -> None:
        """Know the trial of a baseline, if one is given, without running it. An earlier run's row stays as it was."""
        if isinstance(baseline, Trial) and baseline.candidate.key not in self.known:
            if baseline.candidate in self._space:
                self._store.save(baseline)
            self.known[baseline.candidate.key] = self.judged(baseline)

    @property
    def done(self) -> tuple[Trial, ...]:
        """The candidates of the space that have their result."""
        return tuple(trial for trial in self.known.values() if trial.candidate in self._space)[: self._total]

    def gone_through(self, reference: Candidate, sampling: Sampling, builders: Builders | None) -> tuple[Trial, ...]:
        """The trials of what the sampler chooses; the reference comes first, and is built here."""
        local = LocalBuilder(self._order, self._isolation, self.folder_of, self._tell)
        self.run((reference,), local)
        return _all_rounds(sampling, lambda candidates: self.run(candidates, builders or local))

    def run(self, candidates: Sequence[Candidate], builders: Builders) -> list[Trial]:
        """The trials of these candidates; those that have none are tried now."""
        missing = [candidate for candidate in candidates if candidate.key not in self.known]
        for batch in builders.batches(missing):
            self._build([candidate for candidate in batch if not self._is_built(candidate)], builders)
            for candidate in batch:
                if candidate.key not in self.known:
                    self._measure(candidate)
        return [self.known[candidate.key] for candidate in candidates]

    def _is_built(self, candidate: Candidate) -> bool:
        return self._store.build_of(candidate) is not None and self.folder_of(candidate).is_dir()

    def _build(self, candidates: Sequence[Candidate], builders: Builders) -> None:
        # Closed at once, also after an error: nothing may be left building when this returns.
        with closing(builders.build(candidates, self._begin_build)) as results:
            for candidate, outcome in results:
                self._tell(PhaseEnded(candidate, "build"))
                if outcome.failure is None:
                    self._store.save_build(candidate, Built(outcome.value, outcome.seconds))
                else:
                    self._finish(candidate, None, outcome.failure, outcome.reason, outcome.seconds)

    def _begin_build(self, candidate: Candidate) -> None:
        self._begun.add(candidate.key)
        self._tell(PhaseStarted(candidate, "build", self._store.begin(candidate)))

    def _measure(self, candidate: Candidate) -> None:
        built = self._store.build_of(candidate)
        if built is None:
            raise AssertionError(f"{candidate.label} is measured before it is built")
        if candidate.key not in self._begun:
            self._store.begin(candidate)
        self._tell(PhaseStarted(candidate, "measure", self._store.attempts(candidate)))
        folder, again = self.folder_of(candidate), partial(self._store.begin, candidate)
        if self._measurer is not None:
            outcome = self._measurer.measure(candidate, folder, built.value, again)
        else:
            with alone(lambda: self._tell(Notice("waiting to measure: another sweep works on this machine"))):
                outcome = self._order.run(self._isolation, "measure", (candidate, folder, built.value), folder, again)
        self._tell(PhaseEnded(candidate, "measure"))
        metrics, failure, reason = _figures(outcome)
        self._finish(candidate, metrics, failure, reason, built.seconds + outcome.seconds)

    def _finish(
        self,
        candidate: Candidate,
        metrics: TrialMetrics | None,
        failure: Failure | None,
        reason: str,
        seconds: float,
    ) -> None:
        """Keep what became of a candidate, and only then tell it."""
        status: TrialStatus = "done" if failure is None else "failed"
        attempts = self._store.attempts(candidate)
        trial = Trial(candidate, status, metrics, failure, reason, (), seconds, attempts)
        self._store.save(trial)
        self.known[candidate.key] = self.judged(trial)
        self._tell(TrialFinished(self.known[candidate.key], len(self.done), self._total))


def candidate_folder(root: Path, candidate: Candidate) -> Path:
    """Where the files of a candidate are, in the folder of its sweep."""
    return root / "candidates" / candidate.key


def _figures(outcome: Outcome) -> tuple[TrialMetrics | None, Failure | None, str]:
    """The figures of a measurement; one that is not a number is no result."""
    if outcome.failure is not None:
        return None, outcome.failure, outcome.reason
    metrics = from_plain(TrialMetrics, outcome.value)
    values = ((field.name, getattr(metrics, field.name)) for field in fields(metrics))
    odd = [f"{name} is {value}" for name, value in values if isinstance(value, float) and not math.isfinite(value)]
    return (None, "no result", ", ".join(odd)) if odd else (metrics, None, "")


def _excesses(trial: Trial, budgets: Sequence[Budget]) -> list[float]:
    """By what share of its limit each constraint is broken; 0 where it holds."""
    broken = {item.constraint: item for item in trial.violations}
    found = (broken.get(budget.text) for budget in budgets)
    return [
        0.0 if item is None else _UNKNOWN_EXCESS if item.excess is None else item.excess / (abs(item.limit) or 1.0)
        for item in found
    ]


# A figure that is not known counts as far beyond any limit.
_UNKNOWN_EXCESS = 1e6
