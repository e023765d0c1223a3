"""`edge-opt report`: a run folder or a profile as one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from edge_opt.cli.shell import Debug


def report(
    source: Annotated[
        Path, typer.Argument(metavar="DIR", help="A run's folder, or a profile or a sweep saved as .json.")
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="DIR/report.html unless given."),
    ] = None,
    device: Annotated[
        list[str] | None, typer.Option("--device", "-d", metavar="NAME", help="A device to show rooflines of; several.")
    ] = None,
    title: Annotated[str | None, typer.Option("--title", help="The page's heading.")] = None,
    debug: Debug = False,
) -> None:
    """One HTML page of everything a run found out; it needs no network and no server.

    \b
    edge-opt report runs/mnist
    edge-opt report profile.json -o report.html --device raspberry-pi-5 --device jetson-nano
    """
    from edge_opt.report.page import write_report

    typer.echo(write_report(source, output, devices=device, title=title))
