"""The options of a measurement on the command line, with a progress bar on stderr while it runs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

from edge_opt.errors import InvalidInput


@contextmanager
def measuring(
    is_wanted: bool, min_time_s: float, threads: int | None, power_watts: float | None
) -> Iterator[Literal[False] | dict[str, Any]]:
    """What to pass as `measure=`; the bar is drawn on a terminal only, and is gone when the result is printed."""
    if not is_wanted:
        if threads is not None or power_watts is not None:
            raise InvalidInput("--threads and --power-watts say how to measure; add --measure")
        yield False
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("measuring"), BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(file=sys.__stderr__), transient=True, disable=not _is_terminal()) as bar:
        task = bar.add_task("", total=1.0)

        def progress(share: float, what: str) -> None:
            bar.update(task, completed=share, description=what)

        yield {"min_time_s": min_time_s, "threads": threads, "power_watts": power_watts, "progress": progress}


def _is_terminal() -> bool:
    return sys.__stderr__ is not None and sys.__stderr__.isatty()
