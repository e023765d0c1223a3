"""`edge-opt status`: how far a sweep is."""

from __future__ import annotations

import json as json_text
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edge_opt.cli.shell import Debug

if TYPE_CHECKING:
    from collections.abc import Iterator

    from edge_opt.records import SweepStatus


def status(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The output folder of `edge-opt run`.")],
    json: Annotated[bool, typer.Option("--json", help="Print the record as JSON.")] = False,
    debug: Debug = False,
) -> None:
    """How far the sweep in a folder is, who runs it, and the best candidate so far.

    \b
    edge-opt status outputs
    """
    from edge_opt.search.status import status as status_of

    found = status_of(folder)
    if json:
        typer.echo(json_text.dumps({**asdict(found), "left": found.left, "is_running": found.is_running}, indent=1))
        return
    for line in _lines(found):
        typer.echo(line)


def _lines(found: SweepStatus) -> Iterator[str]:
    left = "" if found.left is None else f", {found.left} left"
    yield f"{found.name}: {found.done} done ({found.accepted} accepted), {found.failed} failed{left}"
    if found.is_running:
        yield f"running as process {found.pid} on {found.host}: {', '.join(found.unfinished) or 'nothing just now'}"
    elif found.left:
        was = f"; {', '.join(found.unfinished)} was cut short" if found.unfinished else ""
        yield f"not running{was}; run the same again to go on"
    else:
        yield "not running"
    yield f"so far: {found.recommendation}" if found.left else found.recommendation
