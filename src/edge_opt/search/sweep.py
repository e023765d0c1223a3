"""Try every candidate of a space once, store each result at once, and choose the one to ship."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from edge_opt._support.json import from_plain
from edge_opt.budgets import parse_budget, trial_metrics, violations
from edge_opt.errors import InvalidInput, SweepInterrupted
from edge_opt.records.profiles import Budget
from edge_opt.records.sweeps import Candidate, Failure, Finals, SweepResult, Trial, TrialMetrics, TrialStatus
from edge_opt.search.builders import (
    Builders,
    JobSpec,
    Listener,
    LocalBuilders,
    Notice,
    PhaseEnded,
    PhaseStarted,
    SweepEnded,
    SweepStarted,
    TrialFinished,
)
from edge_opt.search.choose import check_objectives, frontiers, recommend
from edge_opt.search.finals import held_to_parents, retimed, speedup_of
from edge_opt.search.isolation import Isolation, Job, Limits, Outcome, pickle_job
from edge_opt.search.locks import folder_lock, measurement_lock
from edge_opt.search.sampling import Sampling
from edge_opt.search.space import SamplerName, Space, plain_space
from edge_opt.search.store import Built, Sources, Store

WAITING_TO_MEASURE = "waiting to measure: another sweep works on this machine"


class Measurer(Protocol):
    """Measures what was built on another machine, such as a board."""

    def measure(self, candidate: Candidate, folder: Path, built: Mapping[str, Any]) -> Outcome:
        """Measure one candidate; the value of the outcome is `TrialMetrics` as JSON values."""
        ...


Comparer = Callable[[SweepResult, Isolation, Store], Finals | None]


@dataclass(frozen=True, kw_only=True)
class SweepOptions:
    """How a space is searched.

    Attributes:
        name: Name of the sweep.
        metric: Name of the quality metric in the job's `TrialMetrics`; constraints use it.
        constraints: What a candidate must satisfy, such as "latency_ms <= 5".
        objectives: What nsga2 and tpe improve, two or more.
        sampler: How `trials` of a larger space are chosen: grid at random, nsga2 and tpe by earlier results.
        trials: Candidates to try; None is the whole space.
        seed: Seed of the sampler.
        use_ci: Whether one candidate dominates another only where their intervals do not overlap.
        workers: Processes that build side by side. Measuring is always done one at a time.
        scheduler: Address of a Dask scheduler whose workers build instead.
        insecure: Whether a scheduler may be used without encryption.
        memory_limit_bytes: Resident bytes of one phase; None is no limit.
        time_limit_s: Seconds of one phase; None is no limit.
        retries: How often a phase runs again after its process crashed.
        retry_failed: Whether candidates that failed in an earlier run are tried again.
        preload: Modules (or `module:function`) that processes start with, to be faster; `?name` is optional.
    """

    name: str = "sweep"
    metric: str = "accuracy"
    constraints: Sequence[str | Budget] = ()
    objectives: Sequence[str] = ("accuracy", "latency_ms")
    sampler: SamplerName = "grid"
    trials: int | None = None
    seed: int = 0
    use_ci: bool = False
    workers: int = 0
    scheduler: str | None = None
    insecure: bool = False
    memory_limit_bytes: int | None = None
    time_limit_s: float | None = None
    retries: int = 1
    retry_failed: bool = False
    preload: Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.workers < 0 or self.retries < 0:
            raise InvalidInput(f"workers is {self.workers} and retries is {self.retries}; expected 0 or more of each")
        check_objectives(self.named_objectives, self.metric)

    @property
    def named_objectives(self) -> tuple[str, ...]:
        """The objectives, with the name of the metric in place of accuracy."""
        return tuple(self.metric if name == "accuracy" else name for name in self.objectives)

    @property
    def budgets(self) -> tuple[Budget, ...]:
        """The constraints, parsed."""
        known = trial_metrics(self.metric)
        return tuple(parse_budget(item, known) if isinstance(item, str) else item for item in self.constraints)


def run_sweep(
    job: Job,
    space: Space,
    *,
    folder: str | Path,
    settings: Mapping[str, Any] | None = None,
    sources: Sources | None = None,
    baseline: Trial | Candidate | None = None,
    fresh: bool = False,
    on_event: Listener = lambda _: None,
    **options: Any,
) -> SweepResult:
    """Try every candidate of a space, or some, and choose one; finished candidates are stored and not run again.

    Args:
        job: How a candidate is built and measured. Each phase runs in a process of its own.
        space: The candidates.
        folder: Where everything is stored.
        settings: What results depend on; a folder with other settings is refused.
        sources: Code and data that results depend on, by name; where one has changed, what depends on it runs again.
        baseline: What others are compared with, or its trial; unpruned fp32 unless given. A row if it is of the space.
        fresh: Start over; the earlier table is kept under another name.
        on_event: Called with every event of the sweep.
        options: Fields of `SweepOptions`.
    """
    chosen, root = SweepOptions(**options), Path(folder)
    with folder_lock(root):
        store = Store.open(root, settings or {}, sources, fresh=fresh, on_notice=lambda text: on_event(Notice(text)))
        with closing(store):
            return Sweep(job, space, store, root, chosen, on_event).run(baseline)


class Sweep:
    """A sweep in its folder: what is known so far, and how the rest is found. The caller holds the folder's lock."""

    def __init__(
        self, job: Job, space: Space, store: Store, root: Path, options: SweepOptions, on_event: Listener
    ) -> None:
        # Child processes get paths that hold wherever they run.
        self._root = root.absolute()
        self._space = space
        self._store = store
        self._options = options
        self._tell = on_event
        self._budgets = options.budgets
        limits = Limits(options.memory_limit_bytes, options.time_limit_s)
        self._spec = JobSpec(pickle_job(job), limits, options.retries, (type(job).__module__, *options.preload))
        self._sampling = Sampling(
            space,
            options.sampler,
            options.trials,
            options.seed,
            options.named_objectives,
            partial(_excesses, budgets=self._budgets),
        )
        self._begun: set[str] = set()
        self._known: dict[str, Trial] = {}

    def run(
        self,
        baseline: Trial | Candidate | None = None,
        *,
        compare: Comparer | None = None,
        measurer: Measurer | None = None,
    ) -> SweepResult:
        """Search the space and return the result.

        Args:
            baseline: What others are compared with, or its trial; unpruned fp32 unless given.
            compare: Times the best candidates once more, interleaved, before the winner is chosen.
            measurer: Measures candidates instead of this machine.
        """
        options, store = self._options, self._store
        if options.retry_failed:
            store.forget_failed()
        self._known = {key: self._judged(trial) for key, trial in store.trials().items()}
        reference = _reference(self._space, baseline)
        store.keep_fact("plan", self._plan())
        store.keep_fact("verdict", None)
        store.keep_fact("stage", "")
        if isinstance(baseline, Trial):
            self._take(baseline)
        with Isolation(self._spec.preload) as isolation:
            self._tell(SweepStarted(options.name, self._sampling.count, self._done, options.workers))
            try:
                measure = partial(self._measure, isolation=isolation, measurer=measurer)
                # The baseline comes first and is built here: everything else is compared with it.
                self._run((reference,), LocalBuilders(self._spec, isolation, self._folder, self._tell), measure)
                rows = self._all_rounds(self._builders(isolation), measure)
                result = _result(options.name, self._known[reference.key], rows, self._budgets, options.use_ci)
                finals = None if compare is None else compare(result, isolation, store)
                result = self._settled(result, finals)
            except KeyboardInterrupt:
                raise SweepInterrupted(
                    f"stopped: {len(self._done)} of {self._sampling.count} candidates are finished and kept in "
                    f"{self._root}; run the same command again to continue"
                ) from None
            self._tell(SweepEnded(result))
        return result

    def _plan(self) -> dict[str, Any]:
        """Return what `edge-opt status` must know of the sweep."""
        return {
            "name": self._options.name,
            "total": self._sampling.count,
            "metric": self._options.metric,
            "constraints": [budget.text for budget in self._budgets],
            "space": plain_space(self._space),
        }

    def _builders(self, isolation: Isolation) -> Builders:
        options = self._options
        if options.scheduler is None:
            return LocalBuilders(self._spec, isolation, self._folder, self._tell, max(1, options.workers))
        from edge_opt.search.remote_workers import RemoteBuilders

        return RemoteBuilders(self._spec, self._folder, options.scheduler, self._tell, options.insecure)

    def _folder(self, candidate: Candidate) -> Path:
        return candidate_folder(self._root, candidate)

    def _judged(self, trial: Trial) -> Trial:
        """Return the trial with the violations of this run's constraints."""
        broken = () if trial.metrics is None else violations(trial.metrics, self._budgets)
        return replace(trial, violations=broken)

    def _take(self, baseline: Trial) -> None:
        """Use a trial that is given instead of running the baseline. A row of an earlier run stays as it was."""
        if baseline.candidate.key not in self._known:
            if baseline.candidate in self._space:
                self._store.save(baseline)
            self._known[baseline.candidate.key] = self._judged(baseline)

    @property
    def _done(self) -> tuple[Trial, ...]:
        """The finished candidates of the space."""
        trials = (trial for trial in self._known.values() if trial.candidate in self._space)
        return tuple(trials)[: self._sampling.count]

    def _all_rounds(self, builders: Builders, measure: Callable[[Candidate], None]) -> tuple[Trial, ...]:
        """Run round after round, as the sampler proposes them from the results so far."""
        rows: list[Trial] = []
        rounds = self._sampling.rounds()
        candidates = next(rounds)
        while True:
            finished = self._run(candidates, builders, measure)
            rows += finished
            try:
                candidates = rounds.send(finished)
            except StopIteration:
                return tuple(rows)

    def _run(
        self, candidates: Sequence[Candidate], builders: Builders, measure: Callable[[Candidate], None]
    ) -> list[Trial]:
        """Return the trials of these candidates; build and measure those that have none."""
        missing = [candidate for candidate in candidates if candidate.key not in self._known]
        for batch in builders.batches(missing):
            self._build([candidate for candidate in batch if not self._is_built(candidate)], builders)
            for candidate in batch:
                if candidate.key not in self._known:
                    measure(candidate)
        return [self._known[candidate.key] for candidate in candidates]

    def _is_built(self, candidate: Candidate) -> bool:
        return self._store.build_of(candidate) is not None and self._folder(candidate).is_dir()

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

    def _measure(self, candidate: Candidate, isolation: Isolation, measurer: Measurer | None) -> None:
        built = self._store.build_of(candidate)
        assert built is not None, f"{candidate.label} is measured before it is built"
        if candidate.key not in self._begun:
            self._store.begin(candidate)
        self._tell(PhaseStarted(candidate, "measure", self._store.attempts(candidate)))
        folder = self._folder(candidate)
        if measurer is not None:
            outcome = measurer.measure(candidate, folder, built.value)
        else:
            begin_again = partial(self._store.begin, candidate)
            with measurement_lock(lambda: self._tell(Notice(WAITING_TO_MEASURE))):
                outcome = self._spec.run(isolation, "measure", (candidate, folder, built.value), folder, begin_again)
        self._tell(PhaseEnded(candidate, "measure"))
        metrics, failure, reason = _metrics(outcome)
        self._finish(candidate, metrics, failure, reason, built.seconds + outcome.seconds)

    def _finish(
        self,
        candidate: Candidate,
        metrics: TrialMetrics | None,
        failure: Failure | None,
        reason: str,
        seconds: float,
    ) -> None:
        """Store the result of a candidate, and only then report it: a reported result survives a kill."""
        status: TrialStatus = "done" if failure is None else "failed"
        attempts = self._store.attempts(candidate)
        trial = Trial(candidate, status, metrics, failure, reason, (), seconds, attempts)
        self._store.save(trial)
        self._known[candidate.key] = self._judged(trial)
        self._tell(TrialFinished(self._known[candidate.key], len(self._done), self._sampling.count))

    def _settled(self, result: SweepResult, finals: Finals | None) -> SweepResult:
        """Judge all rows by the times of the finals, where there are any, and store the decision."""
        baseline, rows = result.baseline, list(result.trials)
        if finals is not None:
            baseline, *rows = (self._judged(retimed(trial, finals)) for trial in (baseline, *rows))
        kept = held_to_parents(rows, finals)
        settled = _result(result.name, baseline, kept, self._budgets, self._options.use_ci, finals)
        accepted = [trial.candidate.key for trial in settled.accepted]
        verdict = {"best": settled.best, "recommendation": settled.recommendation, "accepted": accepted}
        self._store.keep_fact("verdict", verdict)
        return settled


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
        # A rejected candidate is not offered, so it is on no frontier and dominates nobody.
        frontiers=frontiers([trial for trial in rows if trial.is_accepted], use_ci=use_ci),
        best=chosen,
        recommendation=sentence,
        finals=finals,
        speedup=speedup_of(finals, baseline.candidate, winner) if finals and winner else None,
    )


def _reference(space: Space, baseline: Trial | Candidate | None) -> Candidate:
    """Return what the others are compared with: unpruned fp32 unless a baseline is given."""
    if baseline is not None:
        return baseline.candidate if isinstance(baseline, Trial) else baseline
    layers = tuple((layer, 0.0) for layer in space.layer_pruning)
    for runtime in space.runtimes:
        candidate = Candidate(0.0, "fp32", runtime, layers)
        if candidate in space:
            return candidate
    raise InvalidInput("the space has no unpruned fp32 candidate to compare with; add it, or give a baseline")


def candidate_folder(root: Path, candidate: Candidate) -> Path:
    """Return the folder of a candidate's files, inside the folder of its sweep."""
    return root / "candidates" / candidate.key


def _metrics(outcome: Outcome) -> tuple[TrialMetrics | None, Failure | None, str]:
    """Return the metrics of a measurement, or its failure; a figure that is not finite is a failure."""
    if outcome.failure is not None:
        return None, outcome.failure, outcome.reason
    metrics = from_plain(TrialMetrics, outcome.value)
    values = ((field.name, getattr(metrics, field.name)) for field in fields(metrics))
    odd = [f"{name} is {value}" for name, value in values if isinstance(value, float) and not math.isfinite(value)]
    return (None, "no result", ", ".join(odd)) if odd else (metrics, None, "")


# A figure that is not known counts as far beyond any limit.
_UNKNOWN_EXCESS = 1e6


def _excesses(trial: Trial, budgets: Sequence[Budget]) -> list[float]:
    """Return by what share of its limit each constraint is violated; 0 where it holds."""
    broken = {item.constraint: item for item in trial.violations}
    matching = (broken.get(budget.text) for budget in budgets)
    return [
        0.0 if item is None else _UNKNOWN_EXCESS if item.excess is None else item.excess / (abs(item.limit) or 1.0)
        for item in matching
    ]
