"""`edge-opt export`: a model as ONNX, verified against the original."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from edge_opt.cli.converting import check_share, converted, show
from edge_opt.cli.inputs import GRAMMAR
from edge_opt.cli.loaders import FORM
from edge_opt.cli.models import FORMS
from edge_opt.cli.shell import Debug
from edge_opt.errors import InvalidInput


def export(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=f"{FORMS}; arguments as 'factory(width=2)'.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The .onnx file to write.")],
    inputs: Annotated[list[str] | None, typer.Option("--input", "-i", metavar="SHAPE", help=f"{GRAMMAR}.")] = None,
    kwarg: Annotated[
        list[str] | None, typer.Option("--kwarg", metavar="NAME=VALUE", help="An argument that is not a tensor.")
    ] = None,
    precision: Annotated[
        str, typer.Option("--precision", help="fp32 or fp16; `edge-opt quantize` is for int8.")
    ] = "fp32",
    verify: Annotated[str | None, typer.Option("--verify", metavar="REF", help=f"Compare on: {FORM}.")] = None,
    min_agreement: Annotated[
        float | None, typer.Option("--min-agreement", metavar="SHARE", help="Exit with 1 below this top-1 agreement.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
    debug: Debug = False,
) -> None:
    """Write a model as ONNX for any batch size, run it, and say how far it agrees with the original.

    \b
    edge-opt export net.py:Net -i 1x3x32x32 -o net.onnx
    edge-opt export torchvision:resnet18 -i 1x3x224x224 -o resnet18.onnx --precision fp16
    """
    check_share(min_agreement)
    if output.suffix != ".onnx":
        raise InvalidInput(f"{str(output)!r} must end in .onnx")
    if precision == "int8":
        raise InvalidInput("int8 needs calibration; use `edge-opt quantize`")
    # The file may be for another machine; what it runs in on this one is said, not demanded.
    done = converted(
        model, inputs, kwarg, precision, "onnxruntime", verify=verify, folder=output.parent, filename=output.name,
        must_run=False,
    )  # fmt: skip
    show(done, json, min_agreement)
