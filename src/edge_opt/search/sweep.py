"""Try every candidate of a space once, store each result at once, and choose the one to ship."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from edge_opt._support.deprecation import current_keywords, former_names
from edge_opt._support.files import sync_folder
from edge_opt._support.json import from_plain
from edge_opt.budgets import judged, parse_budgets, trial_metrics
from edge_opt.errors import InvalidInput, SweepInterrupted
from edge_opt.records.fields import field, record
from edge_opt.records.profiles import Budget
from edge_opt.records.sweeps import Candidate, Failure, Finals, SweepResult, Trial, TrialMetrics, TrialStatus
from edge_opt.search.builders import Builders, JobSpec, LocalBuilders, RemoteBuilders, check_scheduler
from edge_opt.search.choose import frontiers, recommend, reject_slower_than_unpruned, retimed, speedup_of
from edge_opt.search.isolation import Isolation, Job, Limits, Outcome, pickle_job
from edge_opt.search.locks import folder_lock, measurement_lock
from edge_opt.search.space import Space, plain_space
from edge_opt.search.store import Built, Sources, Store
from edge_opt.search.sweep_progress import (
    Listener,
    Notice,
    PhaseEnded,
    PhaseStarted,
    SweepEnded,
    SweepStarted,
    TrialFinished,
)

# A space beyond this is a mistake, unless `trials` says how many of it to try.
LARGEST_GRID = 10_000

# Times the best candidates once more, interleaved; None where there is nothing to compare.
Comparer = Callable[[SweepResult, Isolation, Store], Finals | None]
# Returns a trial with what it takes on the target of the sweep.
Figures = Callable[[Trial], Trial]
# Measures a candidate in its folder, given what its build returned; the outcome's value is `TrialMetrics` as JSON.
Measurer = Callable[[Candidate, Path, Mapping[str, Any]], Outcome]


@record
class SweepOptions:
    """How a space is searched."""

    name: str = field("Name of the sweep.", default="sweep")
    metric: str = field("Name of the quality metric, which constraints use.", default="accuracy")
    constraints: Sequence[str | Budget] = field('What a candidate must satisfy, such as "latency_ms <= 5".', default=())
    trials: int | None = field("Candidates to try, drawn at random; None is the whole space.", default=None)
    seed: int = field("Seed of the draw.", default=0)
    use_ci: bool = field("Whether only intervals that do not overlap dominate.", default=False)
    workers: int = field("Processes that build side by side. Measuring is always done one at a time.", default=0)
    scheduler: str | None = field("Address of a Dask scheduler whose workers build instead.", default=None)
    insecure: bool = field("Whether a scheduler may be used without encryption.", default=False)
    memory_limit_bytes: int | None = field("Limit of the resident bytes of one phase; None: no limit.", default=None)
    time_limit_s: float | None = field("Time limit of one phase in seconds; None: no limit.", default=None)
    retries: int = field("How often a phase runs again after its process crashed.", default=1)
    retry_failed: bool = field("Whether candidates that failed in an earlier run are tried again.", default=False)
    preload: Sequence[str] = field("Modules to start processes with; `?name` is optional.", default=())
    after_s: float = field("Seconds that are expected after the last candidate, for the time left.", default=0.0)

    def __post_init__(self) -> None:
        if not 0 <= self.workers <= 1024 or self.retries < 0:
            raise InvalidInput(
                f"workers is {self.workers} and retries is {self.retries}; expected 0 or more of each, and at most "
                "1024 workers"
            )
        if self.trials is not None and self.trials < 1:
            raise InvalidInput(f"trials is {self.trials}; expected 1 or more, or none for the whole space")
        if self.scheduler is not None:
            check_scheduler(self.scheduler, self.insecure)

    @property
    def budgets(self) -> tuple[Budget, ...]:
        """The constraints, parsed."""
        return parse_budgets(self.constraints, trial_metrics(self.metric))

    def candidates(self, space: Space) -> tuple[Candidate, ...]:
        """Return the candidates to try: the whole space, or `trials` of it, the same for the same seed."""
        if self.trials is None and space.size > LARGEST_GRID:
            raise InvalidInput(f"the space holds {space.size} candidates; say how many to try with `trials`")
        return space.sample(space.size if self.trials is None else self.trials, self.seed)


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
        job: Builds and measures a candidate. Each phase runs in its own process.
        space: The candidates.
        folder: Where everything is stored.
        settings: Settings that results depend on; a folder with other settings is refused.
        sources: Code and data that results depend on, by name; where one has changed, what depends on it runs again.
        baseline: The candidate to compare with, or its trial; default: unpruned fp32.
        fresh: Start over; the earlier table is kept under another name.
        on_event: Called with every event of the sweep.
        options: Fields of `SweepOptions`.
    """
    former = former_names("parameter", "run_sweep")
    current = current_keywords(options, former)
    chosen = SweepOptions(**{name: value for name, value in current.items() if name not in former})
    root = Path(folder)
    with folder_lock(root):
        store = Store.open(root, settings or {}, sources, fresh=fresh, on_notice=lambda text: on_event(Notice(text)))
        with closing(store):
            return Sweep(job, space, store, root, chosen, on_event).run(baseline)


class Sweep:
    """A sweep in its folder: what is known so far, and how the rest is found. The caller holds the folder's lock.

    `order` names the candidates to build, first things first; without it they are those of the space.
    """

    def __init__(
        self, job: Job, space: Space, store: Store, root: Path, options: SweepOptions, on_event: Listener,
        order: Sequence[Candidate] | None = None,
    ) -> None:  # fmt: skip
        # Child processes get paths that hold wherever they run.
        self._root = root.absolute()
        self._folder = partial(candidate_folder, self._root)
        self._space = space
        self._store = store
        self._options = options
        self._tell = on_event
        self._budgets = options.budgets
        self._candidates = options.candidates(space) if order is None else tuple(order)
        limits = Limits(options.memory_limit_bytes, options.time_limit_s)
        self._spec = JobSpec(pickle_job(job), limits, options.retries, (type(job).__module__, *options.preload))
        self._figures: Figures = lambda trial: trial
        self._begun: set[str] = set()
        self._known: dict[str, Trial] = {}

    def run(
        self,
        baseline: Trial | Candidate | None = None,
        *,
        compare: Comparer | None = None,
        measurer: Measurer | None = None,
        figures: Figures | None = None,
    ) -> SweepResult:
        """Search the space and return the result.

        Args:
            baseline: What others are compared with, or its trial; default: unpruned fp32.
            compare: Times the best candidates once more, interleaved, before the winner is chosen.
            measurer: Measures candidates instead of this machine.
            figures: Adds what a trial takes on the target, which is not stored: another target needs no new build.
        """
        options, store = self._options, self._store
        self._figures = figures or self._figures
        if options.retry_failed:
            store.forget_failed()
        self._known = {key: self._judged(trial) for key, trial in store.trials().items()}
        reference = _reference(self._space, baseline)
        self._plan()
        if isinstance(baseline, Trial) and reference.key not in self._known:
            # A baseline that is passed is not run. A row of an earlier run is unchanged.
            if reference in self._space:
                store.save(baseline)
            self._known[reference.key] = self._judged(baseline)
        with Isolation(self._spec.preload) as isolation:
            outside = None if reference in self._candidates else reference
            total = len(self._candidates)
            self._tell(SweepStarted(options.name, total, self._done, options.workers, outside, options.after_s))
            try:
                measure = partial(self._measure_here, isolation) if measurer is None else measurer
                # The baseline comes first and is built here: everything else is compared with it.
                local = LocalBuilders(self._spec, isolation, self._folder, self._tell)
                [first] = self._run((reference,), local, measure)
                self._run(self._candidates, self._builders(isolation), measure)
                # Rows are in the order of the space, whatever was built first.
                known = {candidate.key: self._known[candidate.key] for candidate in self._candidates}
                chosen = self._options.candidates(self._space)
                rows = tuple(known[candidate.key] for candidate in chosen if candidate.key in known)
                result = self._result(first, rows)
                finals = None if compare is None else compare(result, isolation, store)
                result = self._settled(result, finals)
            except KeyboardInterrupt:
                count = f"{len(self._done)} of {len(self._candidates)} candidates"
                kept = f"stopped: {count} are finished and kept in {self._root}"
                raise SweepInterrupted(f"{kept}; run the same command again to continue") from None
            self._tell(SweepEnded(result))
        return result

    def _plan(self) -> None:
        """Store what `edge-opt status` must know of the sweep."""
        plan = {
            "name": self._options.name,
            "total": len(self._candidates),
            "metric": self._options.metric,
            "constraints": [budget.text for budget in self._budgets],
            "space": plain_space(self._space),
        }
        for name, value in (("plan", plan), ("verdict", None), ("stage", "")):
            self._store.save_metadata(name, value)

    def _builders(self, isolation: Isolation) -> Builders:
        options = self._options
        if options.scheduler is None:
            return LocalBuilders(self._spec, isolation, self._folder, self._tell, max(1, options.workers))
        return RemoteBuilders(self._spec, self._folder, options.scheduler, self._tell, options.insecure)

    def _judged(self, trial: Trial) -> Trial:
        """Return the trial with the violations of this run's constraints."""
        if trial.metrics is None:
            return replace(trial, violations=(), undecided=())
        trial = self._figures(trial)
        assert trial.metrics is not None
        broken, undecided = judged(trial.metrics, self._budgets)
        return replace(trial, violations=broken, undecided=undecided)

    @property
    def _done(self) -> tuple[Trial, ...]:
        """The trials of the candidates that are finished."""
        return tuple(self._known[each.key] for each in self._candidates if each.key in self._known)

    def _run(self, candidates: Sequence[Candidate], builders: Builders, measure: Measurer) -> tuple[Trial, ...]:
        """Return the trials of these candidates; build and measure those that have none."""
        missing = [candidate for candidate in candidates if candidate.key not in self._known]
        batches = [[candidate] for candidate in missing] if builders.is_sequential else [missing]
        for batch in batches:
            self._build([candidate for candidate in batch if not self._is_built(candidate)], builders)
            for candidate in batch:
                if candidate.key not in self._known:
                    self._measure(candidate, measure)
        return tuple(self._known[candidate.key] for candidate in candidates)

    def _is_built(self, candidate: Candidate) -> bool:
        return self._store.build_of(candidate) is not None and self._folder(candidate).is_dir()

    def _build(self, candidates: Sequence[Candidate], builders: Builders) -> None:
        # Closed at once, also after an error: nothing may be left building when this returns.
        with closing(builders.build(candidates, self._begin_build)) as results:
            for candidate, outcome in results:
                self._tell(PhaseEnded(candidate, "build"))
                if outcome.failure is None:
                    # The row survives a power failure, so the files that it speaks of must as well.
                    sync_folder(self._folder(candidate))
                    self._store.save_build(candidate, Built(outcome.value, outcome.seconds))
                else:
                    self._finish(candidate, outcome)

    def _begin_build(self, candidate: Candidate) -> None:
        self._begun.add(candidate.key)
        self._tell(PhaseStarted(candidate, "build", self._store.count_attempt(candidate)))

    def _measure(self, candidate: Candidate, measure: Measurer) -> None:
        built = self._store.build_of(candidate)
        assert built is not None, f"{candidate.label} is measured before it is built"
        if candidate.key not in self._begun:
            self._store.count_attempt(candidate)
        self._tell(PhaseStarted(candidate, "measure", self._store.attempts(candidate)))
        outcome = measure(candidate, self._folder(candidate), built.value)
        self._tell(PhaseEnded(candidate, "measure"))
        self._finish(candidate, replace(outcome, seconds=built.seconds + outcome.seconds))

    def _measure_here(
        self, isolation: Isolation, candidate: Candidate, folder: Path, built: Mapping[str, Any]
    ) -> Outcome:
        count_again = partial(self._store.count_attempt, candidate)
        with measurement_lock(lambda holder: self._tell(Notice(f"waiting to measure: {holder}"))):
            return self._spec.run(isolation, "measure", (candidate, folder, built), folder, count_again)

    def _finish(self, candidate: Candidate, outcome: Outcome) -> None:
        """Store the result of a candidate, and only then report it: a reported result survives a kill."""
        metrics, failure, reason = _metrics(outcome)
        status: TrialStatus = "failed" if failure else "done"
        attempts = self._store.attempts(candidate)
        trial = Trial(candidate, status, metrics, failure, reason, (), outcome.seconds, attempts)
        self._store.save(trial)
        self._known[candidate.key] = self._judged(trial)
        self._tell(TrialFinished(self._known[candidate.key], len(self._done), len(self._candidates)))

    def _settled(self, result: SweepResult, finals: Finals | None) -> SweepResult:
        """Judge all rows by the times of the finals, where there are any, and store the decision."""
        baseline, rows = result.baseline, list(result.trials)
        if finals is not None:
            baseline, *rows = (retimed(trial, finals) for trial in (baseline, *rows))
        # What was measured last may change what the target is known to take.
        baseline, *rows = (self._judged(trial) for trial in (baseline, *rows))
        kept = reject_slower_than_unpruned(rows, finals)
        settled = self._result(baseline, kept, finals)
        accepted = [trial.candidate.key for trial in settled.accepted]
        verdict = {"best": settled.best, "recommendation": settled.recommendation, "accepted": accepted}
        self._store.save_metadata("verdict", verdict)
        return settled

    def _result(self, baseline: Trial, rows: tuple[Trial, ...], finals: Finals | None = None) -> SweepResult:
        best, sentence = recommend(rows, finals)
        winner = next((trial.candidate for trial in rows if trial.candidate.key == best), None)
        # A rejected candidate is not offered, so it is on no Pareto front and dominates no other.
        offered = [trial for trial in rows if trial.is_accepted or trial.is_undecided]
        return SweepResult(
            name=self._options.name,
            baseline=baseline,
            trials=rows,
            constraints=tuple(item.text for item in self._budgets),
            frontiers=frontiers(offered, use_ci=self._options.use_ci),
            best=best,
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
