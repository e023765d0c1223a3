"""The events of a sweep, how far it is, and how long it will take."""

from __future__ import annotations

import json
import math
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal, TextIO

from edge_opt import units
from edge_opt._support.json import to_plain
from edge_opt._support.progress import console_width, progress_to
from edge_opt.budgets import parse_budget, trial_metrics, violations
from edge_opt.errors import InvalidInput
from edge_opt.records.sweeps import Candidate, SweepResult, SweepStatus, Trial, score_text
from edge_opt.search.choose import recommend, reject_slower_than_unpruned
from edge_opt.search.isolation import Phase
from edge_opt.search.locks import owner
from edge_opt.search.space import space_from
from edge_opt.search.store import Store

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclass(frozen=True, slots=True)
class StepStarted:
    """A step that is not a candidate's begins: training, screening, finals, the report.

    `left_s` is how many seconds the run is expected to take from here to its end; None where that is not known.
    """

    text: str
    left_s: float | None = None


@dataclass(frozen=True, slots=True)
class SweepStarted:
    """The sweep begins; `known` candidates were finished by earlier runs.

    `baseline` is the one that is measured although it is not of the space; `after_s` are the seconds that are expected
    after the last candidate.
    """

    name: str
    total: int
    known: tuple[Trial, ...]
    workers: int
    baseline: Candidate | None = None
    after_s: float = 0.0


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


Event = StepStarted | SweepStarted | PhaseStarted | PhaseEnded | TrialFinished | Notice | SweepEnded
Listener = Callable[[Event], None]
_DOING = {"build": "building", "measure": "measuring"}


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
        baseline: Key of a baseline that is not one of the candidates.
        after_s: Seconds that are expected after the last candidate.
        step: The step that goes on outside of candidates, and since when; None while candidates run.
        detail: What the running step says of itself, such as its epoch, and the share of it that is done.
        shares_since: When it first said a share, and which: what came before, such as loading data, has no share.
        begun_s: When the first event came.
        now_s: The moment that times refer to.
    """

    total: int = 0
    workers: int = 0
    trials: list[Trial] = field(default_factory=list)
    running: dict[str, tuple[PhaseStarted, float]] = field(default_factory=dict)
    built: set[str] = field(default_factory=set)
    spent: dict[Phase, list[float]] = field(default_factory=lambda: {"build": [], "measure": []})
    baseline: str | None = None
    after_s: float = 0.0
    step: tuple[StepStarted, float] | None = None
    detail: tuple[str, float | None] = ("", None)
    shares_since: tuple[float, float] | None = None
    begun_s: float | None = None
    now_s: float = 0.0

    def add(self, event: Event, now_s: float) -> None:
        """Add an event that came at a moment of the clock."""
        self.begun_s, self.now_s = now_s if self.begun_s is None else self.begun_s, now_s
        if not isinstance(event, Notice):
            self.detail, self.shares_since = ("", None), None
        if isinstance(event, StepStarted):
            self.step = event, now_s
        elif isinstance(event, SweepStarted):
            self.total, self.workers, self.trials = event.total, event.workers, list(event.known)
            self.baseline = None if event.baseline is None else event.baseline.key
            self.after_s, self.step = event.after_s, None
        elif isinstance(event, PhaseStarted):
            self.running[event.candidate.key] = event, now_s
        elif isinstance(event, PhaseEnded):
            started = self.running.pop(event.candidate.key, None)
            if started is not None:
                self.spent[event.phase].append(now_s - started[1])
            if event.phase == "build":
                self.built.add(event.candidate.key)
        elif isinstance(event, TrialFinished):
            if event.trial.candidate.key != self.baseline:
                self.trials.append(event.trial)
            self.built.discard(event.trial.candidate.key)

    def report(self, text: str, share: float | None, now_s: float) -> None:
        """Take over what the running step says of itself."""
        self.detail = text, share
        if share is not None and (self.shares_since is None or share < self.shares_since[1]):
            self.shares_since = now_s, share

    @property
    def done(self) -> int:
        return min(len(self.trials), self.total)

    @property
    def seconds_left(self) -> float | None:
        """Until the end of the run, with finals and report: by the mean duration of each phase of candidates so far.

        None before both phases are known. Builds go side by side.
        """
        if self.step is not None:
            started, since = self.step
            return None if started.left_s is None else max(0.0, since + started.left_s - self.now_s)
        left = self.total - self.done
        if not self.total or (left and not all(self.spent.values())):
            return None
        build_s, measure_s = (fmean(self.spent[phase] or [0.0]) for phase in ("build", "measure"))
        return build_s * max(0, left - len(self.built)) / max(1, self.workers) + measure_s * left + self.after_s

    @property
    def share(self) -> float | None:
        """The share of the run that is done; of the running step where nothing is known of the others."""
        left = self.seconds_left
        if left is None or self.begun_s is None:
            return self.detail[1]
        elapsed = self.now_s - self.begun_s
        return elapsed / (elapsed + left) if elapsed + left > 0 else None

    @property
    def left(self) -> str:
        """The time left in words: of the run, or of the running step where nothing more is known."""
        share, left_s = self.detail[1], self.seconds_left
        if left_s is not None or self.step is None or share is None or self.shares_since is None:
            return time_left(left_s)
        since, first = self.shares_since
        return (
            f"{time_left((self.now_s - since) * (1 - share) / (share - first))} in this step" if share > first else ""
        )

    @property
    def now(self) -> str:
        """What is running: the step, or the candidates in their phases; with what it says of itself."""
        names = [f"{_DOING[event.phase]} {self._name(event.candidate)}" for event, _ in self.running.values()]
        step = self.step[0].text if self.step is not None else ", ".join(names)
        return ": ".join(filter(None, [step, self.detail[0]])) or "preparing"

    def _name(self, candidate: Candidate) -> str:
        """Return a candidate with its number; the baseline outside of the space has none."""
        if candidate.key == self.baseline:
            return f"the baseline ({candidate.title})"
        number = self.done + 1 if len(self.running) == 1 else 0
        return f"candidate {number} of {self.total} ({candidate.title})" if number else candidate.title

    @property
    def running_for(self) -> str:
        """How long what is running has been going on."""
        since = [self.step[1]] if self.step is not None else [begun for _, begun in self.running.values()]
        return f"{self.now_s - min(since, default=self.begun_s or 0.0):.0f} s so far"


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
_LOG_WIDTH = 1000
# A log is never silent for 15 s: it is looked at every second.
_SILENT_S = 14.0
_TICK_S = 1.0
# Drawing takes a few milliseconds of CPU time, so it is rare in steps that report no details, as measurements.
_DRAW_BESIDE_MEASUREMENT_S = 5.0


@contextmanager
def progress(view: View = "auto", stream: TextIO | None = None, clock: Clock = time.monotonic) -> Iterator[Listener]:
    """Return a listener for `run_sweep` that shows what happens; "auto" is live on a terminal and plain elsewhere."""
    out = sys.stderr if stream is None else stream
    chosen = ("live" if out.isatty() else "plain") if view == "auto" else view
    if chosen in ("live", "plain"):
        with _shown(out, clock, chosen == "live") as listener:
            yield listener
    elif chosen == "json":
        yield lambda event: print(json.dumps(as_json(event)), file=out, flush=True)
    elif chosen == "none":
        yield lambda _: None
    else:
        raise InvalidInput(f"unknown view {view!r}; expected auto, live, plain, json or none")


@contextmanager
def _shown(out: TextIO, clock: Clock, is_live: bool) -> Iterator[Listener]:
    """Print a line per step; below them, on a terminal, draw a bar with what is running and the time left.

    A thread looks every second, because that of the sweep waits for processes and locks meanwhile.
    """
    from rich.console import Console
    from rich.live import Live

    sums, lock, stopped = SweepProgress(begun_s=clock()), threading.Lock(), threading.Event()
    console = Console(file=out, width=console_width() if is_live else _LOG_WIDTH)
    # It is drawn by us: a display that refreshes itself would compute beside a measurement.
    live = Live(console=console, auto_refresh=False, transient=True) if is_live else None
    shown_s = clock()

    def show(lines: Iterable[str], draws: bool) -> None:
        nonlocal shown_s
        for line in lines:
            shown_s = clock()
            console.print(line, highlight=False, markup=False, soft_wrap=True)
        if live is not None and draws:
            shown_s = clock()
            live.update(_picture(sums), refresh=True)

    def listen(event: Event) -> None:
        with lock:
            sums.add(event, clock())
            show(_lines(event, sums), True)

    def report(step: str, share: float | None) -> None:
        sums.report(step, share, clock())

    def look() -> None:
        while not stopped.wait(_TICK_S):
            with lock:
                sums.now_s = clock()
                silent_s = sums.now_s - shown_s
                if is_live:
                    show((), silent_s >= (0 if sums.detail[0] else _DRAW_BESIDE_MEASUREMENT_S))
                elif silent_s >= _SILENT_S:
                    show([f"  {sums.now} ({'; '.join(filter(None, [sums.running_for, sums.left]))})"], False)

    thread = threading.Thread(target=look, name="progress", daemon=True)
    with progress_to(report), live or nullcontext():
        thread.start()
        try:
            yield listen
        finally:
            stopped.set()
            thread.join()


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
    metrics = trial.metrics
    if metrics is None:
        return trial.verdict
    score = f"{metrics.metric} {score_text(metrics.accuracy, metrics.metric)}"
    seconds = metrics.ranked_latency_s
    latency = units.per_call(seconds, metrics.ranked_batch) if math.isfinite(seconds) else "latency not known"
    return f"{score}, {latency}, {trial.verdict}"


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
    left = f"; {sums.left}" if sums.left else ""
    if isinstance(event, StepStarted):
        yield event.text + left
    elif isinstance(event, SweepStarted):
        before = f", {len(event.known)} of them finished before" if event.known else ""
        yield f"{event.name}: {event.total} candidates{before}"
    elif isinstance(event, TrialFinished):
        candidate = event.trial.candidate
        number = "baseline" if candidate.key == sums.baseline else f"candidate {event.done} of {event.total}"
        yield f"{number}, {candidate.title}: {status_text(event.trial)}{left}"
    elif isinstance(event, Notice):
        yield event.text


def _picture(sums: SweepProgress) -> RenderableType:
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    failed = sum(trial.status == "failed" for trial in sums.trials)
    counts = f"{sums.done} of {sums.total} candidates done, {failed} failed" if sums.total else ""
    bar = ProgressBar(total=1.0, completed=sums.share or 0.0, width=30)
    head = Table.grid(padding=(0, 2))
    head.add_row(bar, Text("; ".join(filter(None, [sums.left, counts]))))
    picture = Table.grid()
    picture.add_row(head)
    picture.add_row(Text(sums.now, no_wrap=True, overflow="ellipsis"))
    return picture
