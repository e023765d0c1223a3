"""The shell around every command: what goes wrong is one sentence on stderr and an exit code, never a traceback."""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
import traceback
import warnings
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from edge_opt._support.deprecation import FormerNameWarning, current_options
from edge_opt._support.progress import console_width, show_progress
from edge_opt.errors import EdgeOptError, SweepInterrupted
from edge_opt.loading import TRUST

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.console import Console

NOT_SATISFIED = 1
_INTERRUPTED = SweepInterrupted.exit_code
_PIPE_CLOSED = 141  # 128 + SIGPIPE, as shells say it


def _remember_debug(context: typer.Context, wanted: bool) -> bool:
    if wanted:
        context.find_root().meta["edge_opt.debug"] = True
    return wanted


Debug = Annotated[
    bool, typer.Option("--debug", help="Show the traceback of an error.", callback=_remember_debug, is_eager=True)
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Every remark and source, too.")]


def _remember_trust(context: typer.Context, wanted: bool) -> bool:
    if wanted and TRUST not in os.environ:
        # Processes that build candidates open the file too; they inherit this.
        os.environ[TRUST] = "1"
        context.find_root().call_on_close(lambda: os.environ.pop(TRUST, None))
    return wanted


Trust = Annotated[
    bool,
    typer.Option(
        "--trust", help="Open a .pt2 file: it can execute code; only if you know its origin.", callback=_remember_trust
    ),
]


class Shell(TyperGroup):
    """The group of all commands; what edge_opt refuses becomes `error: ...` and its exit code, usually 2."""

    def invoke(self, ctx: Any) -> Any:
        try:
            with show_progress(), _former_names_told():
                return super().invoke(ctx)
        except EdgeOptError as error:
            raise self._ended(ctx, error, str(error), error.exit_code) from error
        except KeyboardInterrupt as error:
            raise self._ended(ctx, error, "interrupted; files that were finished are whole", _INTERRUPTED) from error
        except BrokenPipeError as error:
            # Whoever reads has seen enough: no error, and nothing to say.
            _give_up_stdout()
            raise typer.Exit(_PIPE_CLOSED) from error
        except OSError as error:
            if error.errno is None:
                raise
            raise self._ended(ctx, error, refused(error), EdgeOptError.exit_code) from error

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        return name, command, current_options(name or "", rest)

    def _ended(self, ctx: Any, error: BaseException, sentence: str, code: int) -> typer.Exit:
        if ctx.find_root().meta.get("edge_opt.debug"):
            traceback.print_exception(error)
        talk(sentence if isinstance(error, KeyboardInterrupt) else f"error: {sentence}")
        return typer.Exit(code)


@contextmanager
def _former_names_told() -> Iterator[None]:
    """Print a warning about a former name as one line; the place in our code where it arose is of no use here."""
    show = warnings.showwarning

    def show_plainly(message: Any, category: type[Warning], *where: Any, **options: Any) -> None:
        if issubclass(category, FormerNameWarning):
            talk(f"warning: {message}")
        else:
            show(message, category, *where, **options)

    warnings.showwarning = show_plainly
    try:
        yield
    finally:
        warnings.showwarning = show


def refused(error: OSError) -> str:
    """A file or a disk that refuses, in one sentence."""
    where = f"use {error.filename}" if error.filename else "read or write"
    return (
        f"cannot {where}: {error.strerror}; free some space, allow reading and writing there, or choose another place, "
        "and run the same again"
    )


def run_to_the_end(command: Callable[[], object]) -> None:
    """Run the command line; what is printed is really written, or a sentence says why it is not."""
    code: object = 0
    interrupts: list[int] = []

    def interrupt(number: int, frame: Any) -> None:
        interrupts.append(number)
        signal.default_int_handler(number, frame)

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)
    # A terminal without Unicode shows escapes instead of an error; a test may put another object in place of stdout.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        try:
            command()
        except SystemExit as ended:
            code = _INTERRUPTED if interrupts and ended.code else ended.code
        except Exception:
            # A package that is interrupted while it is imported may take the interrupt for itself, and fail later.
            if not interrupts:
                raise
            raise KeyboardInterrupt from None
        sys.stdout.flush()
    except KeyboardInterrupt:
        code = _INTERRUPTED
        talk("interrupted; files that were finished are whole")
    except OSError as error:
        if error.errno == errno.EPIPE:
            code = _PIPE_CLOSED
        elif not code:  # else the command has said so already
            code = EdgeOptError.exit_code
            talk(f"error: cannot print the result: {error.strerror}; send it to another place")
        _give_up_stdout()
    finally:
        if signal.getsignal(signal.SIGINT) is interrupt:
            signal.signal(signal.SIGINT, signal.default_int_handler)
    raise SystemExit(code)


def _give_up_stdout() -> None:
    """Let nothing be written at the interpreter's end: it would fail again, with a traceback."""
    with Path(os.devnull).open("w") as nowhere:
        os.dup2(nowhere.fileno(), 1)


def result_width() -> int:
    """Columns of the result; a pipe has no width of its own, and 80 columns would hide half of a table."""
    return console_width() if sys.stdout.isatty() else console_width(120) if _is_width_given() else 120


def _is_width_given() -> bool:
    columns = os.environ.get("COLUMNS", "")
    return columns.isdecimal() and int(columns) > 0


def result_console(**options: Any) -> Console:
    """Where a result is printed."""
    from rich.console import Console

    class Result(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

    return Result(width=result_width(), **options)


def say(text: str) -> None:
    """Print a result."""
    typer.echo(text)


def talk(sentence: str) -> None:
    """Tell the user something that is not the result."""
    try:
        typer.echo(sentence, err=True)
    except OSError:  # stderr is closed or full, too: the exit code is all that is left
        return
