"""Several `--target`s of `edge-opt profile`: side by side, one row each."""

from __future__ import annotations

import json as json_format
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, cast

import typer

from edge_opt.cli.inputs import Arguments, with_example
from edge_opt.cli.models import load_model
from edge_opt.cli.shell import result_console
from edge_opt.errors import InvalidInput

if TYPE_CHECKING:
    from edge_opt.records import Precision, TargetComparison

FORMAT = "edge_opt.targets"


def compare(
    model: str, arguments: Arguments, targets: Sequence[str], precision: str, options: Mapping[str, object], json: bool
) -> None:
    """Print the targets side by side. `options` are those that only the view of layers has; none may be set."""
    given = [name for name, value in options.items() if value]
    if given:
        raise InvalidInput(f"several --target stand side by side, without layers; drop {given[0]} or keep one target")
    import edge_opt as eo
    from edge_opt.report.codec import to_plain

    with redirect_stdout(sys.stderr):
        loaded = load_model(model)
        positional, named = with_example(arguments, loaded.example, loaded.name)
        found = eo.compare_targets(
            loaded.model,
            positional or None,
            list(targets),
            precision=cast("Precision", precision),
            kwargs=named,
            name=loaded.name,
        )
    if json:
        typer.echo(json_format.dumps({"format": FORMAT, **to_plain(found)}, indent=1, allow_nan=False))
    else:
        _show(found)


def _show(found: TargetComparison) -> None:
    from edge_opt.report.targets import show

    show(found, result_console())
