"""The shell around every command: an error is one sentence on stderr and an exit code, never a traceback."""

from __future__ import annotations

import errno
import io
import json
import os
import signal
import sys
import traceback
import warnings
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option
from typer.core import TyperGroup

from edge_opt._support.deprecation import FormerNameWarning, current_options
from edge_opt._support.json import to_plain
from edge_opt._support.progress import console_width, show_progress
from edge_opt.errors import EdgeOptError, SweepInterrupted
from edge_opt.loading import TRUST

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.console import Console

NOT_SATISFIED = 1
_INTERRUPTED = SweepInterrupted.exit_code
_PIPE_CLOSED = 141  # 128 + SIGPIPE, as shells say it


Verbose = Annotated[bool, Option("--verbose", "-v", help="Every remark and source, too.")]


def _remember_trust(context: typer.Context, wanted: bool) -> bool:
    if wanted and TRUST not in os.environ:
        # Processes that build candidates open the file too; they inherit this.
        os.environ[TRUST] = "1"
        context.find_root().call_on_close(lambda: os.environ.pop(TRUST, None))
    return wanted


Trust = Annotated[
    bool,
    Option(
        "--trust", help="Open a .pt2 file: it can execute code; only if you know its origin.", callback=_remember_trust
    ),
]


class Shell(TyperGroup):
    """The group of all commands; an EdgeOptError becomes `error: ...` and its exit code, usually 2."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        # Every command takes --debug, before or behind its name, so that none has to declare it.
        ctx.meta["edge_opt.debug"] = "--debug" in args
        return super().parse_args(ctx, [word for word in args if word != "--debug"])

    def invoke(self, ctx: Any) -> Any:
        try:
            with show_progress(), _plain_deprecation_warnings():
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
        if ctx.find_root().meta["edge_opt.debug"]:
            traceback.print_exception(error)
        print_status(sentence if isinstance(error, KeyboardInterrupt) else f"error: {sentence}")
        return typer.Exit(code)


@contextmanager
def _plain_deprecation_warnings() -> Iterator[None]:
    """Print a warning about a former name as one line: on the command line, the line of our code does not help."""
    show = warnings.showwarning

    def show_plainly(message: Any, category: type[Warning], *where: Any, **options: Any) -> None:
        if issubclass(category, FormerNameWarning):
            print_status(f"warning: {message}")
        else:
            show(message, category, *where, **options)

    warnings.showwarning = show_plainly
    try:
        yield
    finally:
        warnings.showwarning = show


def refused(error: OSError) -> str:
    """Describe an error of a file or a disk in one sentence."""
    where = f"use {error.filename}" if error.filename else "read or write"
    return (
        f"cannot {where}: {error.strerror}; free some space, allow reading and writing there, or choose another place, "
        "and run the same again"
    )


def run_to_the_end(command: Callable[[], object]) -> None:
    """Run the command line, and exit with its code after everything that was printed is written.

    Two things need care. An interrupt during imports may be swallowed: a package that catches everything while it is
    imported goes on, and fails later in its own way. So interrupts are noted by a handler of ours, and decide the exit
    code. And a closed pipe (`| head`) may show only when the interpreter flushes stdout at its end, where it prints a
    traceback that nothing can catch. So stdout is flushed here, and is replaced by /dev/null after an error.
    """
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
        print_status("interrupted; files that were finished are whole")
    except OSError as error:
        if error.errno == errno.EPIPE:
            code = _PIPE_CLOSED
        elif not code:  # else the command has said so already
            code = EdgeOptError.exit_code
            print_status(f"error: cannot print the result: {error.strerror}; send it to another place")
        _give_up_stdout()
    finally:
        if signal.getsignal(signal.SIGINT) is interrupt:
            signal.signal(signal.SIGINT, signal.default_int_handler)
    raise SystemExit(code)


def _give_up_stdout() -> None:
    """Send what is still buffered nowhere, because writing it at the end of the interpreter would fail again."""
    with Path(os.devnull).open("w") as nowhere:
        os.dup2(nowhere.fileno(), 1)


def result_width() -> int:
    """Return the columns of the result: a pipe has no width of its own, and 80 would hide half of a table."""
    return console_width(80 if sys.stdout.isatty() else 120)


def result_console(**options: Any) -> Console:
    """Return the console for results."""
    from rich.console import Console

    class Result(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

    return Result(width=result_width(), **options)


def print_json(plain: Any) -> None:
    """Print plain values as JSON."""
    typer.echo(json.dumps(plain, indent=1, allow_nan=False))


def print_record(record: Any, as_json: bool, plain: Callable[[Any], Any] = to_plain) -> None:
    """Print a record as its sheet, or as the JSON of its plain values."""
    from edge_opt.report.sheets import record_text

    if as_json:
        print_json(plain(record))
    else:
        typer.echo(record_text(record, result_width()))


def print_status(sentence: str) -> None:
    """Print something that is not the result, to stderr."""
    try:
        typer.echo(sentence, err=True)
    except OSError:  # stderr is closed or full, too: the exit code is all that is left
        return


def not_satisfied(sentence: str) -> typer.Exit:
    """Say which condition does not hold, and return the exit to raise."""
    print_status(sentence)
    return typer.Exit(NOT_SATISFIED)
