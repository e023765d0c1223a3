"""The events of a sweep, how far it is, and how long it will take."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal, TextIO

from edge_opt import units
from edge_opt._support.json import to_plain
from edge_opt._support.progress import console_width
from edge_opt.budgets import parse_budget, trial_metrics, violations
from edge_opt.errors import InvalidInput
from edge_opt.records.sweeps import Candidate, SweepResult, SweepStatus, Trial
from edge_opt.search.choose import recommend, reject_slower_than_unpruned
from edge_opt.search.isolation import Phase
from edge_opt.search.locks import owner
from edge_opt.search.space import space_from
from edge_opt.search.store import Store

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclass(frozen=True, slots=True)
class SweepStarted:
    """The sweep begins; `known` candidates were finished by earlier runs."""

    name: str
    total: int
    known: tuple[Trial, ...]
    workers: int


@dataclass(frozen=True, slots=True)
class PhaseStarted:
    """A candidate is being built or measured; `attempt` counts from 1."""

    candidate: Candidate
    phase: Phase
    attempt: int


@dataclass(frozen=True, slots=True)
class PhaseEnded:
    """A candidate was built or measured, or failed."""

    candidate: Candidate
    phase: Phase


@dataclass(frozen=True, slots=True)
class TrialFinished:
    """A candidate has its result, which is stored already; `done` counts all finished candidates."""

    trial: Trial
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Notice:
    """A message for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class SweepEnded:
    """Every candidate has its result."""

    result: SweepResult


Event = SweepStarted | PhaseStarted | PhaseEnded | TrialFinished | Notice | SweepEnded
Listener = Callable[[Event], None]


@dataclass
class SweepProgress:
    """The sum of all events so far.

    Attributes:
        total: Candidates to try.
        workers: Processes that build side by side.
        trials: The finished candidates.
        running: Phases that are going on, by the candidate's key, and since when.
        built: Keys of candidates that are built and not yet measured.
        spent: Seconds of each phase that has ended in this run.
    """

    total: int = 0
    workers: int = 0
    trials: list[Trial] = field(default_factory=list)
    running: dict[str, tuple[PhaseStarted, float]] = field(default_factory=dict)
    built: set[str] = field(default_factory=set)
    spent: dict[Phase, list[float]] = field(default_factory=lambda: {"build": [], "measure": []})

    def add(self, event: Event, now_s: float) -> None:
        """Add an event that came at a moment of the clock."""
        if isinstance(event, SweepStarted):
            self.total, self.workers, self.trials = event.total, event.workers, list(event.known)
        elif isinstance(event, PhaseStarted):
            self.running[event.candidate.key] = event, now_s
        elif isinstance(event, PhaseEnded):
            started = self.running.pop(event.candidate.key, None)
            if started is not None:
                self.spent[event.phase].append(now_s - started[1])
            if event.phase == "build":
                self.built.add(event.candidate.key)
        elif isinstance(event, TrialFinished):
            self.trials.append(event.trial)
            self.built.discard(event.trial.candidate.key)

    @property
    def done(self) -> int:
        return min(len(self.trials), self.total)

    @property
    def seconds_left(self) -> float | None:
        """By the mean duration of each phase so far; None before both are known. Builds go side by side."""
        left = self.total - self.done
        if left == 0:
            return 0.0
        if not all(self.spent.values()):
            return None
        build_s, measure_s = fmean(self.spent["build"]), fmean(self.spent["measure"])
        return build_s * max(0, left - len(self.built)) / max(1, self.workers) + measure_s * left

    @property
    def best(self) -> Trial | None:
        """The candidate that would be recommended now."""
        key, _ = recommend(self.trials)
        return next((trial for trial in self.trials if trial.candidate.key == key), None)


def status(folder: str | Path) -> SweepStatus:
    """Return how far the sweep in a folder is, who runs it, and the best candidate so far, without disturbing it."""
    root = Path(folder)
    with closing(Store.open_readonly(root)) as store:
        plan = store.metadata("plan") or {"name": "", "total": None, "constraints": []}
        figures = trial_metrics(plan.get("metric", "accuracy"))
        budgets = [parse_budget(text, figures) for text in plan["constraints"]]
        unfinished = tuple(candidate.label for candidate in store.unfinished())
        # As a run that goes on counts: a baseline beside the space, or an earlier space's rows, are none of these.
        space = space_from(plan["space"]) if "space" in plan else None
        known = [trial for trial in store.trials().values() if space is None or trial.candidate in space]
        judged = [
            trial if trial.metrics is None else replace(trial, violations=violations(trial.metrics, budgets))
            for trial in known[: plan["total"]]
        ]
        verdict, stage = store.metadata("verdict"), store.metadata("stage") or ""
    trials = reject_slower_than_unpruned(judged)
    best, sentence = recommend(trials) if verdict is None else (verdict["best"], verdict["recommendation"])
    accepted = {trial.candidate.key for trial in trials if trial.is_accepted}
    if verdict is not None:  # the last comparison may have rejected what was accepted by the times before it
        accepted = set(verdict.get("accepted", accepted))
    running = owner(root)
    return SweepStatus(
        folder=str(root),
        name=plan["name"],
        total=plan["total"],
        done=sum(trial.status == "done" for trial in trials),
        failed=sum(trial.status == "failed" for trial in trials),
        accepted=len(accepted),
        pid=None if running is None else running.pid,
        host=None if running is None else running.host,
        unfinished=unfinished,
        best=best,
        recommendation=sentence,
        stage=stage,
    )


View = Literal["auto", "live", "plain", "json", "none"]
Clock = Callable[[], float]


@contextmanager
def progress(view: View = "auto", stream: TextIO | None = None, clock: Clock = time.monotonic) -> Iterator[Listener]:
    """Return a listener for `run_sweep` that shows what happens; "auto" is live on a terminal and plain elsewhere."""
    out = sys.stderr if stream is None else stream
    chosen = ("live" if out.isatty() else "plain") if view == "auto" else view
    if chosen == "live":
        with _live(out, clock) as listener:
            yield listener
    elif chosen == "plain":
        sums = SweepProgress()

        def listen(event: Event) -> None:
            sums.add(event, clock())
            for line in _lines(event, sums):
                print(line, file=out, flush=True)

        yield listen
    elif chosen == "json":
        yield lambda event: print(json.dumps(as_json(event)), file=out, flush=True)
    elif chosen == "none":
        yield lambda _: None
    else:
        raise InvalidInput(f"unknown view {view!r}; expected auto, live, plain, json or none")


def as_json(event: Event) -> dict[str, Any]:
    """Return an event as one JSON object; the key `event` says which.

    >>> as_json(Notice("waiting"))
    {'event': 'Notice', 'text': 'waiting'}
    """
    plain: dict[str, Any] = {"event": type(event).__name__, **to_plain(event)}
    if isinstance(event, SweepStarted):
        plain["known"] = len(event.known)
    elif isinstance(event, TrialFinished):
        plain["trial"]["key"] = event.trial.candidate.key
    elif isinstance(event, SweepEnded):
        del plain["result"]
        plain |= {"best": event.result.best, "recommendation": event.result.recommendation}
    elif isinstance(event, PhaseStarted | PhaseEnded):
        plain["key"] = event.candidate.key
    return plain


def status_text(trial: Trial) -> str:
    """Return the result of a candidate in a line."""
    if trial.metrics is None:
        return f"{trial.failure}: {trial.reason.replace('edge_opt.errors.', '')}"
    latency = units.per_call(trial.metrics.ranked_latency_s, trial.metrics.ranked_batch)
    broken = ", ".join(map(str, trial.violations))
    verdict = f"rejected by {broken}" if broken else "accepted"
    return f"{trial.metrics.metric} {trial.metrics.accuracy:.4f}, {latency}, {verdict}"


def time_left(seconds: float | None) -> str:
    """Return a rough time to wait in words.

    >>> time_left(None), time_left(42.2), time_left(170), time_left(4000)
    ('', 'about 42 s left', 'about 3 min left', 'about 1.1 h left')
    """
    if seconds is None:
        return ""
    if seconds < 100:
        return f"about {seconds:.0f} s left"
    return f"about {seconds / 60:.0f} min left" if seconds < 3600 else f"about {seconds / 3600:.1f} h left"


def _lines(event: Event, sums: SweepProgress) -> Iterator[str]:
    if isinstance(event, SweepStarted):
        before = f", {len(event.known)} of them finished before" if event.known else ""
        yield f"{event.name}: {event.total} candidates{before}"
    elif isinstance(event, TrialFinished):
        left = time_left(sums.seconds_left) if event.done < event.total else ""
        line = f"[{event.done}/{event.total}] {event.trial.candidate.label}: {status_text(event.trial)}"
        yield f"{line}; {left}" if left else line
    elif isinstance(event, Notice):
        yield event.text


@contextmanager
def _live(out: TextIO, clock: Clock) -> Iterator[Listener]:
    from rich.console import Console
    from rich.live import Live

    sums = SweepProgress()
    console = Console(file=out, width=console_width())
    # Drawn at events only: a screen that refreshes itself would work beside a measurement.
    with Live(console=console, auto_refresh=False, transient=True) as live:

        def listen(event: Event) -> None:
            sums.add(event, clock())
            if isinstance(event, TrialFinished | Notice):
                for line in _lines(event, sums):
                    console.print(line, highlight=False, markup=False)
            live.update(_picture(sums), refresh=True)

        yield listen


def _picture(sums: SweepProgress) -> RenderableType:
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    accepted = sum(trial.is_accepted for trial in sums.trials)
    failed = sum(trial.status == "failed" for trial in sums.trials)
    counts = f"{sums.done} of {sums.total} done, {accepted} accepted, {failed} failed"
    running = ", ".join(f"{event.phase} {event.candidate.label}" for event, _ in sums.running.values())
    best = sums.best
    picture = Table.grid()
    picture.add_row(ProgressBar(total=max(1, sums.total), completed=sums.done, width=60))
    picture.add_row(Text("; ".join(filter(None, [counts, time_left(sums.seconds_left)]))))
    picture.add_row(Text(f"running: {running or 'nothing'}"))
    picture.add_row(Text(f"best so far: {'none' if best is None else f'{best.candidate.label}, {status_text(best)}'}"))
    return picture
