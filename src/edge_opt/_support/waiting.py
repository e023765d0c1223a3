"""What is going on, told to people who wait: on a terminal in one line that goes again, in a log now and then."""

from __future__ import annotations

import io
import logging
import os
import shutil
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from contextvars import ContextVar
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console

Listener = Callable[[str], None]
_listener: ContextVar[Listener | None] = ContextVar("edge_opt_listener", default=None)

# In a log: silent as long as nobody would wonder, then a line from time to time.
_SILENT_S = 2.0
_EVERY_S = 10.0


def doing(what: str) -> None:
    """Say what is going on now, in a few words; nobody hears it unless somebody listens."""
    listener = _listener.get()
    if listener is not None:
        listener(what)


@contextmanager
def telling(stream: TextIO | None = None, *, is_log_wanted: bool = False) -> Iterator[None]:
    """Show what is going on meanwhile: on a terminal always, elsewhere as lines of a log if that is wanted.

    Whoever listens already goes on listening.
    """
    out = stream or sys.stderr
    is_terminal = out is not None and out.isatty()
    if _listener.get() is not None or out is None or not (is_terminal or is_log_wanted):
        yield
        return
    voice = _Line(out) if is_terminal else _Log(out)
    token = _listener.set(voice.say)
    try:
        yield
    finally:
        _listener.reset(token)
        voice.end()


class _Line:
    """One line of a terminal, written over; it is gone when the work is done."""

    def __init__(self, out: TextIO) -> None:
        self._out, self._is_written = out, False

    def say(self, what: str) -> None:
        self._out.write(f"\r\x1b[2K{what[: console_width() - 1]}")
        self._out.flush()
        self._is_written = True

    def end(self) -> None:
        if self._is_written:
            self._out.write("\r\x1b[2K")
            self._out.flush()


class _Log:
    """Lines in a log. A timer speaks first, for a single long step says nothing by itself."""

    def __init__(self, out: TextIO) -> None:
        self._out, self._what, self._spoken_s = out, "", 0.0
        self._timer: threading.Timer | None = None

    def say(self, what: str) -> None:
        self._what = what
        if self._timer is None:
            self._timer = threading.Timer(_SILENT_S, self._speak)
            self._timer.daemon = True
            self._timer.start()
        elif self._spoken_s and time.monotonic() - self._spoken_s > _EVERY_S:
            self._speak()

    def _speak(self) -> None:
        self._spoken_s = time.monotonic()
        print(f"{self._what} …", file=self._out, flush=True)

    def end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


def console_width(otherwise: int = 80) -> int:
    """Columns to write in: what COLUMNS says, else the terminal's; never so few that nothing can be read."""
    columns = os.environ.get("COLUMNS", "")
    asked = int(columns) if columns.isdecimal() else 0
    return max(asked or shutil.get_terminal_size((otherwise, 24)).columns or otherwise, 20)


def stderr_console() -> Console:
    """A console for bars on stderr, as wide as the terminal, whatever COLUMNS says."""
    from rich.console import Console

    return Console(file=sys.__stderr__, width=console_width())


@contextmanager
def quiet() -> Iterator[None]:
    """Silence for exporters and quantisers, which talk to stdout, stderr, warnings and logs."""
    disabled = logging.root.manager.disable
    sink = io.StringIO()
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stdout(sink), redirect_stderr(sink):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
