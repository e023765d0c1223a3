"""The shell around every command: a user's mistake is one sentence on stderr and exit code 2."""

from __future__ import annotations

import os
import sys
import traceback
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from edge_opt.errors import EdgeOptError
from edge_opt.exported_file import TRUST

if TYPE_CHECKING:
    from rich.console import Console

NOT_SATISFIED = 1


def _remember_debug(context: typer.Context, wanted: bool) -> bool:
    if wanted:
        context.find_root().meta["edge_opt.debug"] = True
    return wanted


Debug = Annotated[
    bool, typer.Option("--debug", help="Show the traceback of an error.", callback=_remember_debug, is_eager=True)
]


def _remember_trust(context: typer.Context, wanted: bool) -> bool:
    if wanted and TRUST not in os.environ:
        # Processes that build candidates open the file too; they inherit this.
        os.environ[TRUST] = "1"
        context.find_root().call_on_close(lambda: os.environ.pop(TRUST, None))
    return wanted


Trust = Annotated[
    bool,
    typer.Option(
        "--trust", help="Open a .pt2 that could run code; only if you know its origin.", callback=_remember_trust
    ),
]


class Shell(TyperGroup):
    """The group of all commands; what edge_opt refuses becomes `error: ...` and its exit code, usually 2."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except EdgeOptError as error:
            if ctx.find_root().meta.get("edge_opt.debug"):
                traceback.print_exc()
            talk(f"error: {error}")
            raise typer.Exit(error.exit_code) from error
        except OSError as error:
            # A pipe that nobody reads is not an error of ours; the rest is a disk or a permission.
            if error.errno is None or isinstance(error, BrokenPipeError):
                raise
            if ctx.find_root().meta.get("edge_opt.debug"):
                traceback.print_exc()
            talk(f"error: {_refused(error)}")
            raise typer.Exit(EdgeOptError.exit_code) from error


def _refused(error: OSError) -> str:
    """A file or a disk that refuses, in one sentence."""
    where = f"use {error.filename}" if error.filename else "read or write"
    return (
        f"cannot {where}: {error.strerror}; free some space, allow reading and writing there, or choose another place, "
        "and run the same again"
    )


def result_console(**options: Any) -> Console:
    """Where a result is printed; a pipe has no width of its own, and 80 columns would hide half of a table."""
    from rich.console import Console

    is_fixed = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(width=None if is_fixed else 120, **options)


def talk(sentence: str) -> None:
    """Tell the user something that is not the result."""
    typer.echo(sentence, err=True)
