"""`edge-opt sweep`: variants of a trained model, under a budget."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated

import typer

from edge_opt.cli.inputs import GRAMMAR, read_arguments
from edge_opt.cli.models import FORMS
from edge_opt.cli.shell import NOT_SATISFIED, Debug, talk
from edge_opt.errors import InvalidInput


def sweep(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=f"{FORMS}; the factory loads the trained weights.")],
    data: Annotated[str, typer.Option("--data", metavar="FILE.py:LOADERS", help="A function that returns loaders.")],
    inputs: Annotated[
        list[str] | None, typer.Option("--input", "-i", metavar="SHAPE", help=f"Batch to time: {GRAMMAR}.")
    ] = None,
    prune: Annotated[str, typer.Option("--prune", metavar="A,B", help="Shares of channels to remove.")] = "0,0.25,0.5",
    precision: Annotated[str, typer.Option("--precision", metavar="A,B", help="fp32, fp16, bf16, int8.")] = "fp32,int8",
    runtime: Annotated[
        str, typer.Option("--runtime", metavar="A,B", help="torch, onnxruntime, openvino.")
    ] = "torch,onnxruntime",
    keep: Annotated[
        list[str] | None, typer.Option("--keep", metavar="BUDGET", help="A constraint: 'latency_ms <= 20'.")
    ] = None,
    fine_tune_epochs: Annotated[int, typer.Option("--fine-tune-epochs", help="Passes after pruning.")] = 1,
    seed: Annotated[int, typer.Option("--seed")] = 0,
    workers: Annotated[int, typer.Option("--workers", metavar="N", help="Processes that build side by side.")] = 0,
    scheduler: Annotated[
        str | None, typer.Option("--scheduler", metavar="tcp://…", help="Build on the workers of a Dask scheduler.")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start over; the earlier table is kept aside.")] = False,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="Where to write.")] = Path("sweep"),
    json: Annotated[bool, typer.Option("--json", help="Print the whole sweep as JSON.")] = False,
    debug: Debug = False,
) -> None:
    """Try pruning, precisions and runtimes on a trained model, and say which variant to ship.

    \b
    edge-opt sweep net.py:trained -i 32x1x28x28 --data net.py:loaders --keep "latency_ms <= 20" -o out/
    edge-opt sweep net.py:trained --data net.py:loaders --prune 0,0.5 --precision int8 --keep "accuracy_drop <= 1%"

    Exit code 0: something is accepted; 1: nothing satisfies the constraints; 2: wrong use.
    """
    from edge_opt.pipeline.summary import conclusion
    from edge_opt.pipeline.sweeping import sweep as run_sweep
    from edge_opt.report.sweeps import sweep_document
    from edge_opt.search.progress import progress

    with redirect_stdout(sys.stderr), progress("json" if json else "auto") as listener:
        result = run_sweep(
            model,
            data,
            folder=output,
            example_inputs=_shape(inputs or []),
            pruning=[_share(text) for text in _words(prune)],
            precisions=_words(precision),  # type: ignore[arg-type]  # checked by the space
            runtimes=_words(runtime),
            constraints=keep or (),
            fine_tune_epochs=fine_tune_epochs,
            seed=seed,
            workers=workers,
            scheduler=scheduler,
            fresh=fresh,
            on_event=listener,
        )
    if json:
        typer.echo(sweep_document(result), nl=False)
    else:
        for line in conclusion(result):
            typer.echo(line)
        typer.echo(f"tables    {output}")
    if not result.accepted:
        talk("nothing satisfies the constraints; loosen one, or widen the space")
        raise typer.Exit(NOT_SATISFIED)


def _shape(inputs: list[str]) -> tuple[int, ...] | None:
    arguments = read_arguments(inputs, [], None)
    if arguments.named or len(arguments.positional) > 1:
        raise InvalidInput("--input is the batch that is timed, one shape; further inputs follow from the data")
    return tuple(arguments.positional[0].shape) if arguments.positional else None


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _share(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InvalidInput(f"--prune: {text!r} is not a number; write shares such as 0,0.25,0.5") from None
