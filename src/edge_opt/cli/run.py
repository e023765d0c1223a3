"""`edge-opt run`: from a configuration to the model to ship."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from edge_opt.cli.shell import NOT_SATISFIED, Debug, talk

if TYPE_CHECKING:
    from edge_opt.config import RunConfig
    from edge_opt.pipeline.run import RunResult


class SeveralSeeds(TyperCommand):
    """A command whose `--seeds 1 2 3` is `--seeds 1 --seeds 2 --seeds 3`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, spread(args, "--seeds"))


def spread(arguments: Sequence[str], option: str) -> list[str]:
    """Repeat an option before each number that follows it.

    >>> spread(["a.yaml", "--seeds", "1", "2", "-o", "3"], "--seeds")
    ['a.yaml', '--seeds', '1', '--seeds', '2', '-o', '3']
    """
    found: list[str] = []
    is_open = False
    for word in arguments:
        if is_open and word.isdecimal() and found[-1] != option:
            found.append(option)
        is_open = word == option or (is_open and word.isdecimal())
        found.append(word)
    return found


def run(
    config: Annotated[
        Path | None, typer.Argument(metavar="[CONFIG]", help="A YAML file of `edge-opt init`; the default without.")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="One key: epochs=3, model.conv1_channels=8.")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", metavar="DIR", help="Instead of output_dir.")] = None,
    seeds: Annotated[
        list[int] | None, typer.Option("--seeds", metavar="N…", help="One run per seed, and means with intervals.")
    ] = None,
    workers: Annotated[int, typer.Option("--workers", metavar="N", help="Processes that build side by side.")] = 0,
    scheduler: Annotated[
        str | None, typer.Option("--scheduler", metavar="tcp://…", help="Build on the workers of a Dask scheduler.")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start over; the earlier table is kept aside.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON, progress as JSON lines.")] = False,
    debug: Debug = False,
) -> None:
    """Train, sweep, judge and write everything; run again to go on.

    \b
    edge-opt run
    edge-opt run configs/default.yaml --set epochs=3 -o out/
    edge-opt run configs/default.yaml --seeds 1 2 3

    Exit code 0: something is accepted; 1: nothing satisfies the constraints; 2: wrong use.
    """
    wanted = seeds or []
    loaded = _config(config, settings or [])
    root = output or Path(loaded.output_dir)
    # Whatever the user's own code prints goes to stderr, so that stdout holds results only.
    with redirect_stdout(sys.stderr):
        done = _all(loaded, root, wanted, {"workers": workers, "scheduler": scheduler, "fresh": fresh}, as_json)
    if as_json:
        typer.echo(json.dumps([dict(item.summary) for item in done] if wanted else dict(done[0].summary), indent=1))
    else:
        _conclude(done, root)
    if not all(item.result.accepted for item in done):
        raise typer.Exit(NOT_SATISFIED)


def _config(path: Path | None, settings: Sequence[str]) -> RunConfig:
    from edge_opt.config import read_config

    return read_config(path, settings)


def _all(config: RunConfig, root: Path, seeds: list[int], options: dict[str, Any], as_json: bool) -> list[RunResult]:
    from edge_opt.pipeline.run import run as run_once
    from edge_opt.pipeline.seeds import run_seeds
    from edge_opt.search.progress import progress

    def one(config: RunConfig, folder: Path) -> RunResult:
        with progress("json" if as_json else "auto") as listener:
            return run_once(config, folder, on_event=listener, **options)

    return list(run_seeds(config, seeds, root, one).values()) if seeds else [one(config, root)]


def _conclude(done: list[RunResult], root: Path) -> None:
    from edge_opt.pipeline.summary import conclusion

    for item in done:
        if len(done) > 1:
            typer.echo(f"{item.folder}:")
        for line in conclusion(item.result):
            typer.echo(line)
        typer.echo(f"report    {item.report}")
    if len(done) > 1:
        typer.echo(f"together  {root / 'aggregate.csv'}")
    if not all(item.result.accepted for item in done):
        talk("nothing satisfies the constraints; loosen one, or widen the space")
