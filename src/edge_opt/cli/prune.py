"""`edge-opt prune`: a smaller model, with the proof of it."""

from __future__ import annotations

import json as json_format
import os
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from edge_opt import units
from edge_opt.cli.inputs import GRAMMAR, read_arguments, with_example
from edge_opt.cli.models import FORMS, load_model
from edge_opt.cli.shell import NOT_SATISFIED, Debug, talk
from edge_opt.errors import InvalidInput
from edge_opt.report.grid import Cell, Strip, grid
from edge_opt.report.text import printable

if TYPE_CHECKING:
    from edge_opt.records import Importance, Pruned


def prune(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=f"{FORMS}; arguments as 'factory(width=2)'.")],
    inputs: Annotated[list[str] | None, typer.Option("--input", "-i", metavar="SHAPE", help=f"{GRAMMAR}.")] = None,
    ratio: Annotated[
        float | None, typer.Option("--ratio", "-r", help="Share of every layer's channels to remove.")
    ] = None,
    macs_target: Annotated[float | None, typer.Option("--macs-target", help="Share of the MACs to remain.")] = None,
    latency_target: Annotated[
        float | None, typer.Option("--latency-target", help="Share of the latency to remain, on --target.")
    ] = None,
    target: Annotated[
        str | None, typer.Option("--target", metavar="DEVICE", help="Device whose roofline gives the latency.")
    ] = None,
    layer: Annotated[
        list[str] | None, typer.Option("--layer", "-l", metavar="NAME=RATIO", help="A ratio for one layer or module.")
    ] = None,
    importance: Annotated[str, typer.Option("--importance", help="l1, l2 or random; taylor needs Python.")] = "l1",
    ignore: Annotated[
        list[str] | None, typer.Option("--ignore", metavar="NAME", help="A layer or module to leave alone.")
    ] = None,
    round_to: Annotated[int, typer.Option("--round-to", help="Kept channels are a multiple of this.")] = 8,
    global_ranking: Annotated[bool, typer.Option("--global", help="Channels of all layers compete.")] = False,
    weights: Annotated[
        Path | None, typer.Option("--weights", "-w", help="Weights to load: .safetensors, or .pt with tensors only.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="For --importance random.")] = 0,
    check_export: Annotated[bool, typer.Option("--check-export", help="Export it too, and run it as ONNX.")] = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", metavar="DIR", help="Save the pruned model.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    fail_on_shortfall: Annotated[
        bool, typer.Option("--fail-on-shortfall", help="Exit with 1 if a target is missed by more than a tenth.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Remove the least important channels and heads, prove the result, and save it without pickles.

    \b
    edge-opt prune torchvision:resnet18 -i 1x3x224x224 --ratio 0.5 -o pruned
    edge-opt prune net.py:Net -i 1x3x32x32 --macs-target 0.5 --ignore stem
    edge-opt prune net.py:Net -i 1x3x32x32 --layer block.conv1=0.3 --json
    """
    if importance == "taylor":
        raise InvalidInput(
            'importance "taylor" needs data, which the command line does not have; '
            "call edge_opt.compress.prune(..., importance='taylor', loader=...) in Python"
        )
    from edge_opt import compress

    # Whatever the user's own code prints goes to stderr, so that stdout holds results only.
    with redirect_stdout(sys.stderr):
        arguments = read_arguments(inputs or [], [], None)
        loaded = load_model(model)
        if weights is not None:
            compress.load_weights(loaded.model, weights)
        positional, named = with_example(arguments, loaded.example, loaded.name)
        pruned = compress.prune(
            loaded.model,
            positional or None,
            ratio,
            kwargs=named,
            layers=dict(_layer_ratio(text) for text in layer or []),
            macs_target=macs_target,
            latency_target=latency_target,
            target=target,
            importance=cast("Importance", importance),
            round_to=round_to,
            ignored=ignore or (),
            global_ranking=global_ranking,
            seed=seed,
            check_export=check_export,
        )
    saved = None if output is None else compress.save_pruned(pruned, output)
    if json:
        found = pruned.to_dict() | {"saved": None if saved is None else str(saved)}
        typer.echo(json_format.dumps(found, indent=1, allow_nan=False))
    else:
        for line in _lines(pruned):
            encoding = sys.stdout.encoding or "utf-8"
            typer.echo(line.encode(encoding, "replace").decode(encoding))
    if saved is not None:
        talk(f"saved to {saved}; compress.load_pruned({str(saved)!r}, factory) builds it again")
    if fail_on_shortfall and (macs_target or latency_target) and pruned.shortfalls:
        talk("the target is missed by more than a tenth")
        raise typer.Exit(NOT_SATISFIED)


def _layer_ratio(text: str) -> tuple[str, float]:
    name, equals, value = text.rpartition("=")
    try:
        return (name, float(value)) if equals and name else _unreadable(text)
    except ValueError:
        return _unreadable(text)


def _unreadable(text: str) -> tuple[str, float]:
    raise InvalidInput(f"--layer {text!r} cannot be read; write NAME=RATIO, such as layer1.0.conv1=0.3")


def _lines(pruned: Pruned) -> Iterator[str]:
    """Each layer asked and achieved, the totals, the proof, and where it falls short."""
    width = int(os.environ.get("COLUMNS", "120")) if not sys.stdout.isatty() else os.get_terminal_size().columns
    layers = pruned.achieved.layers

    def column(header: str, texts: list[str], rank: int = 0) -> Strip:
        return Strip(header, tuple(Cell(text) for text in texts), rank=rank)

    strips = [
        Strip("Layer", tuple(Cell(printable(each.path)) for each in layers), "left", floor=12),
        Strip("Kind", tuple(Cell(printable(each.kind)) for each in layers), "left", rank=1),
        column("Before", [str(each.before) for each in layers]),
        column("After", [str(each.after) for each in layers]),
        column("Asked", [units.percent(each.asked) for each in layers]),
        column("Removed", [units.percent(each.achieved) for each in layers]),
    ]
    for line in grid(strips, width):
        yield line.plain.rstrip()
    yield ""
    yield from str(pruned).splitlines()
    error = pruned.check.silenced_error
    silenced = "" if error is None else f"; equal to the original with those channels silenced, within {error:.1g}"
    difference = pruned.check.export_difference
    exported = "" if difference is None else f"; exported, and within {difference:.1g} in ONNX Runtime"
    yield f"proved: forward, backward ({pruned.check.gradients} gradients){silenced}{exported}"
