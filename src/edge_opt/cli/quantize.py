"""`edge-opt quantize`: a model in int8, verified."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from edge_opt.cli.converting import check_share, converted, show
from edge_opt.cli.inputs import GRAMMAR
from edge_opt.cli.loaders import FORM, load_batches, random_batches
from edge_opt.cli.models import FORMS
from edge_opt.cli.shell import Debug, talk
from edge_opt.errors import InvalidInput


def quantize(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=f"{FORMS}; arguments as 'factory(width=2)'.")],
    inputs: Annotated[list[str] | None, typer.Option("--input", "-i", metavar="SHAPE", help=f"{GRAMMAR}.")] = None,
    kwarg: Annotated[
        list[str] | None, typer.Option("--kwarg", metavar="NAME=VALUE", help="An argument that is not a tensor.")
    ] = None,
    calibration: Annotated[
        str | None, typer.Option("--calibration", "-c", metavar="REF", help=f"Real inputs: {FORM}.")
    ] = None,
    random_calibration: Annotated[
        bool, typer.Option("--random-calibration", help="Noise instead of real inputs: accuracy then means nothing.")
    ] = False,
    batches: Annotated[int, typer.Option("--batches", help="Calibration batches to use at most.")] = 32,
    method: Annotated[str, typer.Option("--method", help="minmax, entropy or percentile.")] = "minmax",
    runtime: Annotated[str, typer.Option("--runtime", help="onnxruntime or openvino.")] = "onnxruntime",
    spare: Annotated[
        list[str] | None, typer.Option("--spare", metavar="LAYER", help="Keep a layer and all inside it in float.")
    ] = None,
    verify: Annotated[str | None, typer.Option("--verify", metavar="REF", help="Compare on these batches.")] = None,
    min_agreement: Annotated[
        float | None, typer.Option("--min-agreement", metavar="SHARE", help="Exit with 1 below this top-1 agreement.")
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="Where the file goes.")] = Path(),
    json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
    debug: Debug = False,
) -> None:
    """Quantise a model to int8 and say what came of it: what runs in int8, agreement, size.

    \b
    edge-opt quantize net.py:Net -i 1x1x28x28 --calibration data.py:loader -o out/
    edge-opt quantize torchvision:resnet18 -i 1x3x224x224 --random-calibration --spare conv1
    """
    check_share(min_agreement)
    if (calibration is None) != random_calibration:
        raise InvalidInput(
            "int8 needs real inputs: give --calibration file.py:loader, or --random-calibration to try without"
            if calibration is None
            else "--calibration and --random-calibration exclude each other; keep one of them"
        )

    def ranges(positional: list[Any], named: dict[str, Any]) -> Any:
        return random_batches(positional, named, min(batches, 4)) if calibration is None else load_batches(calibration)

    if random_calibration:
        talk("calibrated on noise: agreement and accuracy of this file say nothing about real inputs")
    done = converted(
        model, inputs, kwarg, "int8", runtime, verify=verify, calibration=ranges, calibration_batches=batches,
        method=method, spare=spare or (), folder=output,
    )  # fmt: skip
    show(done, json, min_agreement)
