"""The tally of a sweep that is going on: what is done, what runs, how long the rest may take. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from edge_opt.records import Trial
from edge_opt.search.events import Event, PhaseEnded, PhaseStarted, SweepStarted, TrialFinished
from edge_opt.search.jobs import Phase
from edge_opt.search.recommending import recommend


@dataclass(frozen=True, slots=True)
class Running:
    """Half a job that is going on, since a moment of the clock."""

    key: str
    label: str
    phase: Phase
    since_s: float


@dataclass(frozen=True, slots=True)
class Tally:
    """The sum of all events so far. `spent` are the seconds of each half that has ended in this run."""

    name: str = ""
    total: int = 0
    workers: int = 0
    trials: tuple[Trial, ...] = ()
    running: tuple[Running, ...] = ()
    built: frozenset[str] = frozenset()
    spent: tuple[tuple[Phase, float], ...] = ()

    def after(self, event: Event, now_s: float) -> Tally:
        """The tally with one event more."""
        if isinstance(event, SweepStarted):
            return Tally(event.name, event.total, event.workers, event.known)
        if isinstance(event, PhaseStarted):
            key, label = event.candidate.key, event.candidate.label
            others = tuple(item for item in self.running if item.key != key)
            return replace(self, running=(*others, Running(key, label, event.phase, now_s)))
        if isinstance(event, PhaseEnded):
            key = event.candidate.key
            took = tuple((item.phase, now_s - item.since_s) for item in self.running if item.key == key)
            others = tuple(item for item in self.running if item.key != key)
            built = self.built | {key} if event.phase == "build" else self.built
            return replace(self, running=others, built=built, spent=(*self.spent, *took))
        if isinstance(event, TrialFinished):
            key = event.trial.candidate.key
            return replace(self, trials=(*self.trials, event.trial), built=self.built - {key})
        return self

    @property
    def done(self) -> int:
        return min(len(self.trials), self.total)

    @property
    def failed(self) -> int:
        return sum(trial.status == "failed" for trial in self.trials)

    @property
    def accepted(self) -> int:
        return sum(trial.is_accepted for trial in self.trials)

    @property
    def seconds_left(self) -> float | None:
        """By the mean duration of each half so far; None before both are known. Builds go side by side."""
        left = self.total - self.done
        means = {phase: _mean([s for kind, s in self.spent if kind == phase]) for phase in ("build", "measure")}
        build_s, measure_s = means["build"], means["measure"]
        if left == 0:
            return 0.0
        if build_s is None or measure_s is None:
            return None
        return build_s * max(0, left - len(self.built)) / max(1, self.workers) + measure_s * left

    @property
    def best(self) -> Trial | None:
        """The candidate that would be recommended now."""
        key, _ = recommend(self.trials)
        return next((trial for trial in self.trials if trial.candidate.key == key), None)


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
