"""`edge-opt init`: a commented configuration to start from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from edge_opt.cli.shell import Debug
from edge_opt.errors import InvalidInput
from edge_opt.files import write_whole


def init(
    file: Annotated[Path, typer.Argument(metavar="[FILE]", help="Where to write it.")] = Path("edge-opt.yaml"),
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
    debug: Debug = False,
) -> None:
    """Write a configuration with every key, its default and what it is for.

    \b
    edge-opt init
    edge-opt init configs/mine.yaml
    """
    from edge_opt.config.template import template

    if file.exists() and not force:
        raise InvalidInput(f"{file} is there already; choose another name, or --force to replace it")
    typer.echo(write_whole(file, template()))
