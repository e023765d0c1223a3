"""What `quantize` and `export` share: load, convert, print the verification."""

from __future__ import annotations

import json as json_text
import sys
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Any

import typer

from edge_opt.cli.inputs import read_arguments, with_example
from edge_opt.cli.loaders import load_batches
from edge_opt.cli.models import load_model
from edge_opt.cli.shell import NOT_SATISFIED, talk
from edge_opt.errors import InvalidInput
from edge_opt.units import percent

if TYPE_CHECKING:
    from edge_opt.records import Converted


def converted(
    model: str,
    inputs: list[str] | None,
    kwarg: list[str] | None,
    precision: str,
    runtime: str,
    *,
    verify: str | None,
    calibration: Any = None,
    **options: Any,
) -> Converted:
    """Convert the model that a reference names; whatever its own code prints goes to stderr."""
    from edge_opt.compress.converting import convert

    with redirect_stdout(sys.stderr):
        arguments = read_arguments(inputs or [], kwarg or [], None)
        loaded = load_model(model)
        positional, named = with_example(arguments, loaded.example, loaded.name)
        return convert(
            loaded.model,
            positional or None,
            precision,
            runtime,
            kwargs=named,
            calibration=calibration(positional, named) if callable(calibration) else calibration,
            verify_on=None if verify is None else load_batches(verify),
            **options,
        )


def check_share(value: float | None) -> None:
    """Refuse a share that is none."""
    if value is not None and not 0 <= value <= 1:
        raise InvalidInput(f"--min-agreement is {value}; it is a share from 0 to 1, such as 0.99")


def show(done: Converted, json: bool, min_agreement: float | None) -> None:
    """Print the verification, and exit with 1 where it is not good enough."""
    from edge_opt.report.conversions import conversion_document, conversion_text

    typer.echo(json_text.dumps(conversion_document(done), indent=1) if json else conversion_text(done))
    talk(f"saved to {done.path}")
    if min_agreement is None:
        return
    if done.agreement.top1 is None:
        raise InvalidInput("--min-agreement needs a model whose first output is one row of scores per sample")
    if done.agreement.top1 < min_agreement:
        talk(f"top-1 agreement is {percent(done.agreement.top1)}, below the {percent(min_agreement)} asked for")
        raise typer.Exit(NOT_SATISFIED)
