"""How far a sweep is, and how long it will take."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TextIO

from edge_opt import units
from edge_opt._support.json import to_plain
from edge_opt._support.progress import console_width
from edge_opt.budgets import parse_budget, trial_metrics, violations
from edge_opt.errors import InvalidInput
from edge_opt.records.sweeps import SweepStatus, Trial
from edge_opt.search.builders import (
    Event,
    Listener,
    Notice,
    PhaseEnded,
    PhaseStarted,
    SweepEnded,
    SweepStarted,
    TrialFinished,
)
from edge_opt.search.choose import recommend
from edge_opt.search.finals import held_to_parents
from edge_opt.search.isolation import Phase
from edge_opt.search.locks import owner
from edge_opt.search.space import space_from
from edge_opt.search.store import Store, plain_trial

if TYPE_CHECKING:
    from rich.console import RenderableType


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


def status(folder: str | Path) -> SweepStatus:
    """How far the sweep in a folder is, who runs it, and the best candidate so far; disturbs nobody."""
    root = Path(folder)
    with closing(Store.look(root)) as store:
        plan = store.fact("plan") or {"name": "", "total": None, "constraints": []}
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
        verdict, stage = store.fact("verdict"), store.fact("stage") or ""
    trials = held_to_parents(judged)
    best, sentence = recommend(trials) if verdict is None else (verdict["best"], verdict["recommendation"])
    accepted = {trial.candidate.key for trial in trials if trial.is_accepted}
    if verdict is not None:  # the last comparison may have rejected what was accepted by the times before it
        accepted = set(verdict.get("accepted", accepted))
    running = owner(root)
    return SweepStatus(
        folder=str(root),
        name=plan["name"],
        total=plan["total"],
        done=_count(trials, "done"),
        failed=_count(trials, "failed"),
        accepted=len(accepted),
        pid=None if running is None else running.pid,
        host=None if running is None else running.host,
        unfinished=unfinished,
        best=best,
        recommendation=sentence,
        stage=stage,
    )


def _count(trials: Iterable[Trial], wanted: str) -> int:
    return sum(trial.status == wanted for trial in trials)


View = Literal["auto", "live", "plain", "json", "none"]
Clock = Callable[[], float]


@contextmanager
def progress(view: View = "auto", stream: TextIO | None = None, clock: Clock = time.monotonic) -> Iterator[Listener]:
    """A listener for `run_sweep` that shows what happens; "auto" is live on a terminal and plain elsewhere."""
    out = sys.stderr if stream is None else stream
    chosen = ("live" if out.isatty() else "plain") if view == "auto" else view
    if chosen == "live":
        with _live(out, clock) as listener:
            yield listener
    elif chosen == "plain":
        yield _plain(out, clock)
    elif chosen == "json":
        yield lambda event: print(json.dumps(as_json(event)), file=out, flush=True)
    elif chosen == "none":
        yield lambda _: None
    else:
        raise InvalidInput(f"unknown view {view!r}; expected auto, live, plain, json or none")


def as_json(event: Event) -> dict[str, Any]:
    """An event as one JSON object; the key `event` says which.

    >>> as_json(Notice("waiting"))
    {'event': 'Notice', 'text': 'waiting'}
    """
    kind: dict[str, Any] = {"event": type(event).__name__}
    if isinstance(event, SweepStarted):
        return {**kind, "name": event.name, "total": event.total, "known": len(event.known), "workers": event.workers}
    if isinstance(event, TrialFinished):
        broken = [
            {"constraint": item.constraint, "metric": item.metric, "value": item.value, "limit": item.limit}
            for item in event.trial.violations
        ]
        trial = {**plain_trial(event.trial), "violations": broken, "key": event.trial.candidate.key}
        return {**kind, "done": event.done, "total": event.total, "trial": trial}
    if isinstance(event, SweepEnded):
        return {**kind, "best": event.result.best, "recommendation": event.result.recommendation}
    if isinstance(event, Notice):
        return {**kind, "text": event.text}
    return {
        **kind,
        "phase": event.phase,
        "key": event.candidate.key,
        "candidate": to_plain(event.candidate),
        **({"attempt": event.attempt} if isinstance(event, PhaseStarted) else {}),
    }


def fate(trial: Trial) -> str:
    """What became of a candidate, in a line."""
    if trial.metrics is None:
        return f"{trial.failure}: {trial.reason.replace('edge_opt.errors.', '')}"
    taken = units.per_call(trial.metrics.ranked_latency_s, trial.metrics.ranked_batch)
    figures = f"{trial.metrics.metric} {trial.metrics.accuracy:.4f}, {taken}"
    broken = ", ".join(map(str, trial.violations))
    return f"{figures}, {f'rejected by {broken}' if broken else 'accepted'}"


def time_left(seconds: float | None) -> str:
    """A rough time to wait.

    >>> time_left(None), time_left(42.2), time_left(170), time_left(4000)
    ('', 'about 42 s left', 'about 3 min left', 'about 1.1 h left')
    """
    if seconds is None:
        return ""
    if seconds < 100:
        return f"about {seconds:.0f} s left"
    return f"about {seconds / 60:.0f} min left" if seconds < 3600 else f"about {seconds / 3600:.1f} h left"


def _plain(out: TextIO, clock: Clock) -> Listener:
    tally = Tally()

    def listen(event: Event) -> None:
        nonlocal tally
        tally = tally.after(event, clock())
        for line in _lines(event, tally):
            print(line, file=out, flush=True)

    return listen


def _lines(event: Event, tally: Tally) -> Iterator[str]:
    if isinstance(event, SweepStarted):
        before = f", {len(event.known)} of them finished before" if event.known else ""
        yield f"{event.name}: {event.total} candidates{before}"
    elif isinstance(event, TrialFinished):
        left = time_left(tally.seconds_left) if event.done < event.total else ""
        line = f"[{event.done}/{event.total}] {event.trial.candidate.label}: {fate(event.trial)}"
        yield f"{line}; {left}" if left else line
    elif isinstance(event, Notice):
        yield event.text


@contextmanager
def _live(out: TextIO, clock: Clock) -> Iterator[Listener]:
    from rich.console import Console
    from rich.live import Live

    tally = Tally()
    console = Console(file=out, width=console_width())
    # Drawn at events only: a screen that refreshes itself would work beside a measurement.
    with Live(console=console, auto_refresh=False, transient=True) as live:

        def listen(event: Event) -> None:
            nonlocal tally
            tally = tally.after(event, clock())
            if isinstance(event, TrialFinished | Notice):
                for line in _lines(event, tally):
                    console.print(line, highlight=False, markup=False)
            live.update(_picture(tally), refresh=True)

        yield listen


def _picture(tally: Tally) -> RenderableType:
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    counts = f"{tally.done} of {tally.total} done, {tally.accepted} accepted, {tally.failed} failed"
    running = ", ".join(f"{item.phase} {item.label}" for item in tally.running)
    best = tally.best
    picture = Table.grid()
    picture.add_row(ProgressBar(total=max(1, tally.total), completed=tally.done, width=60))
    picture.add_row(Text("; ".join(filter(None, [counts, time_left(tally.seconds_left)]))))
    picture.add_row(Text(f"running: {running or 'nothing'}"))
    picture.add_row(Text(f"best so far: {'none' if best is None else f'{best.candidate.label}, {fate(best)}'}"))
    return picture
