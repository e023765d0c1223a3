"""Progress is shown on a terminal, and nowhere else."""

from __future__ import annotations

import io

import pytest

from edge_opt._support.progress import console_width, report_progress, show_progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_one_line_that_goes_again() -> None:
    out = Terminal()
    with show_progress(out):
        report_progress("exporting")
        report_progress("comparing")
        assert "exporting" in out.getvalue() and "\n" not in out.getvalue()
    assert out.getvalue().endswith("comparing\r\x1b[2K")


def test_a_log_gets_nothing() -> None:
    out = io.StringIO()
    with show_progress(out):
        report_progress("exporting")
    assert out.getvalue() == ""


def test_a_line_that_was_never_written_is_not_cleared() -> None:
    out = Terminal()
    with show_progress(out):
        pass
    assert out.getvalue() == ""


def test_the_outer_display_keeps_showing() -> None:
    out, inner = Terminal(), Terminal()
    with show_progress(out), show_progress(inner):
        report_progress("exporting")
    assert "exporting" in out.getvalue() and inner.getvalue() == ""


@pytest.mark.parametrize(("columns", "width"), [("0", 80), ("", 80), ("wide", 80), ("132", 132), ("3", 20)])
def test_columns_are_believed_where_they_are_some(columns: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert console_width() == width
