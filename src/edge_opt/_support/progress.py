"""Progress of long steps on stderr, and consoles that fit the terminal."""

from __future__ import annotations

import io
import logging
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from contextvars import ContextVar
from typing import TYPE_CHECKING, TextIO

from edge_opt.text import printable

if TYPE_CHECKING:
    from rich.console import Console

# Shows a step, with the share of the work that is done where it is known.
Display = Callable[[str, float | None], None]
_show: ContextVar[Display | None] = ContextVar("edge_opt_progress", default=None)
_CLEAR_LINE = "\r\x1b[2K"


def report_progress(step: str, share: float | None = None) -> None:
    """Say in a few words which step begins, and the share of the work that is done; shown where a display is set."""
    show = _show.get()
    if show is not None:
        show(step, share)


@contextmanager
def progress_to(show: Display) -> Iterator[None]:
    """Send what `report_progress` says inside to a display."""
    token = _show.set(show)
    try:
        yield
    finally:
        _show.reset(token)


@contextmanager
def show_progress(stream: TextIO | None = None) -> Iterator[None]:
    """Show the current step in one line of the terminal, and clear that line at the end.

    Logs and pipes get nothing. Inside another `show_progress` the outer one keeps showing.
    """
    out = stream or sys.stderr
    # Without a console, as under pythonw, stderr is None.
    if _show.get() is not None or out is None or not out.isatty():
        yield
        return
    is_shown = False

    def show(step: str, share: float | None) -> None:
        nonlocal is_shown
        is_shown = True
        out.write(f"{_CLEAR_LINE}{printable(step)[: console_width() - 1]}")
        out.flush()

    try:
        with progress_to(show):
            yield
    finally:
        if is_shown:
            out.write(_CLEAR_LINE)
            out.flush()


def console_width(default: int = 80) -> int:
    """Return the columns to write in: COLUMNS if set, else the terminal's, and at least 20."""
    columns = os.environ.get("COLUMNS", "")
    requested = int(columns) if columns.isdecimal() else 0
    return max(requested or shutil.get_terminal_size((default, 24)).columns or default, 20)


def stderr_console() -> Console:
    """Return a console for progress bars on stderr, as wide as the terminal."""
    from rich.console import Console

    # The original stderr: bars stay visible while `quiet` redirects what exporters print.
    return Console(file=sys.__stderr__, width=console_width())


@contextmanager
def quiet() -> Iterator[None]:
    """Silence exporters and quantizers, which write to stdout, stderr, warnings and logs."""
    disabled = logging.root.manager.disable
    sink = io.StringIO()
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stdout(sink), redirect_stderr(sink):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
