"""edge-opt train-cost."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated, Any

import typer

from edge_opt.cli.arguments import Batch, Inputs, Keywords, Maker, ModelArgument, read_arguments, with_example
from edge_opt.cli.shell import NOT_SATISFIED, Debug, Legend, result_console, talk
from edge_opt.errors import InvalidInput
from edge_opt.loading import find_object, load_model, parse_reference


def train_cost(
    model: ModelArgument,
    inputs: Inputs = None,
    made_by: Maker = None,
    batch: Batch = None,
    kwarg: Keywords = None,
    loss: Annotated[
        str | None, typer.Option("--loss", metavar="REF", help="file.py:NAME, a function of the output; else its sum.")
    ] = None,
    optimizer: Annotated[
        str, typer.Option("--optimizer", metavar="NAME", help="sgd, momentum, adam, adamw, adafactor, adamw-8bit.")
    ] = "adamw",
    frozen: Annotated[
        str, typer.Option("--frozen", metavar="PATHS", help="Modules without gradients, by commas.")
    ] = "",
    checkpoint: Annotated[
        str, typer.Option("--checkpoint", metavar="PATHS", help="Modules to compute again in the backward, by commas.")
    ] = "",
    autocast: Annotated[str | None, typer.Option("--autocast", help="bf16 or fp16: products run in it.")] = None,
    accumulate: Annotated[int, typer.Option("--accumulate", metavar="N", help="Batches per optimizer step.")] = 1,
    target: Annotated[
        list[str] | None, typer.Option("--target", "-t", metavar="NAME", help="A device, its file, or host.")
    ] = None,
    help_me: Annotated[bool, typer.Option("--what-helps", help="Try what would make the step smaller.")] = False,
    budget: Annotated[
        float | None,
        typer.Option("--budget-mb", metavar="MIB", help="Exit with 1 above this peak; names layers to checkpoint."),
    ] = None,
    top: Annotated[int | None, typer.Option("--top", "-n", help="Only the N layers with most FLOPs.")] = None,
    output: Annotated[
        list[Path] | None, typer.Option("--output", "-o", metavar="FILE", help="Save as .json, .html, .md or .txt.")
    ] = None,
    legend: Legend = False,
    json: Annotated[bool, typer.Option("--json", help="Print the step as JSON.")] = False,
    debug: Debug = False,
) -> None:
    """What a training step costs before it is run: FLOPs, and memory by kind.

    \b
    edge-opt train-cost torchvision:resnet18 -i 8x3x224x224 --optimizer sgd
    edge-opt train-cost net.py:Net -i 32x3x32x32 --frozen stem,layer1 --checkpoint layer2,layer3
    edge-opt train-cost net.py:Net -i 32x3x32x32 --budget-mb 512 --what-helps
    """
    import edge_opt as eo
    from edge_opt.report.legends import TRAINING, print_legend
    from edge_opt.report.training_tables import show_training, training_document, training_writer

    for path in output or []:
        training_writer(path)
    # What the user's code prints goes to stderr: stdout holds results only.
    with redirect_stdout(sys.stderr):
        arguments = read_arguments(inputs or [], kwarg or [], batch, made_by)
        loaded = load_model(model)
        positional, named = with_example(arguments, loaded.example, loaded.name)
        options: dict[str, Any] = {
            "loss": _loss(loss), "optimizer": optimizer, "frozen": frozen, "autocast": autocast,
            "accumulate": accumulate,
        }  # fmt: skip
        step = eo.training_step(
            loaded.model, positional or None, kwargs=named, checkpoint=checkpoint, name=loaded.name,
            target=target or None, remedies=help_me, **options,
        )  # fmt: skip
    if json:
        typer.echo(training_document(step), nl=False)
    else:
        console = result_console()
        show_training(step, console, top)
        if legend:
            print_legend(console, TRAINING)
    for path in output or []:
        talk(f"saved to {step.save(path)}")
    if budget is not None and step.peak_bytes > budget * 2**20:
        found = eo.fewest_checkpoints(loaded.model, positional or None, kwargs=named, budget_mb=budget, **options)
        cure = f"--checkpoint {','.join(found.paths)} keeps it" if found.fits else "no set of checkpoints keeps it"
        talk(f"the peak is above {budget:g} MiB; {cure}")
        raise typer.Exit(NOT_SATISFIED)


def _loss(reference: str | None) -> Any:
    if reference is None:
        return None
    parsed = parse_reference(reference)
    found = None if parsed is None else find_object(parsed)
    if isinstance(found, type):
        found = found()
    if not callable(found):
        raise InvalidInput(f"--loss {reference!r} names no function; write file.py:NAME or package.module:NAME")
    return found
