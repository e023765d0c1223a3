"""People who wait are told what is going on, and nobody else is."""

from __future__ import annotations

import io
import threading

import pytest

from edge_opt._support import waiting
from edge_opt._support.waiting import console_width, doing, telling


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_one_line_that_goes_again() -> None:
    out = Terminal()
    with telling(out):
        doing("exporting")
        doing("comparing")
        assert "exporting" in out.getvalue() and "\n" not in out.getvalue()
    assert out.getvalue().endswith("comparing\r\x1b[2K")


def test_a_log_is_silent_unless_something_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    with telling(out, is_log_wanted=True):
        doing("a short step")
    assert out.getvalue() == ""
    monkeypatch.setattr(waiting, "_SILENT_S", 0.0)
    with telling(out, is_log_wanted=True):
        doing("a long step")
        for timer in [item for item in threading.enumerate() if isinstance(item, threading.Timer)]:
            timer.join()
    assert out.getvalue() == "a long step …\n"


def test_a_library_says_nothing_into_a_log() -> None:
    out = io.StringIO()
    with telling(out):
        doing("exporting")
    assert out.getvalue() == ""


def test_whoever_listens_goes_on_listening() -> None:
    out, inner = Terminal(), Terminal()
    with telling(out), telling(inner):
        doing("exporting")
    assert "exporting" in out.getvalue() and inner.getvalue() == ""


@pytest.mark.parametrize(("columns", "width"), [("0", 80), ("", 80), ("wide", 80), ("132", 132), ("3", 20)])
def test_columns_are_believed_where_they_are_some(columns: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert console_width() == width
