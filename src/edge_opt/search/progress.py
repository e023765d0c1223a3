"""Progress for people and for machines: a live view, plain lines, or JSON lines."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, TextIO

from edge_opt import units
from edge_opt.errors import InvalidInput
from edge_opt.records import Trial
from edge_opt.search.codec import plain_candidate, plain_trial
from edge_opt.search.events import Event, Listener, Notice, PhaseStarted, SweepEnded, SweepStarted, TrialFinished
from edge_opt.search.tally import Tally

if TYPE_CHECKING:
    from rich.console import RenderableType

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
        "candidate": plain_candidate(event.candidate),
        **({"attempt": event.attempt} if isinstance(event, PhaseStarted) else {}),
    }


def fate(trial: Trial) -> str:
    """What became of a candidate, in a line."""
    if trial.metrics is None:
        return f"{trial.failure}: {trial.reason}"
    figures = f"accuracy {trial.metrics.accuracy:.4f}, {units.duration(trial.metrics.latency_s)}"
    broken = ", ".join(item.constraint for item in trial.violations)
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
    elif isinstance(event, SweepEnded):
        yield event.result.recommendation


@contextmanager
def _live(out: TextIO, clock: Clock) -> Iterator[Listener]:
    from rich.console import Console
    from rich.live import Live

    tally = Tally()
    console = Console(file=out)
    # Drawn at events only: a screen that refreshes itself would work beside a measurement.
    with Live(console=console, auto_refresh=False, transient=True) as live:

        def listen(event: Event) -> None:
            nonlocal tally
            tally = tally.after(event, clock())
            if isinstance(event, TrialFinished | Notice | SweepEnded):
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
