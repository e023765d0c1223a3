"""The shell around every command: an error is one sentence on stderr and an exit code, never a traceback."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import signal
import sys
import sysconfig
import traceback
import warnings
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option
from typer.core import TyperCommand, TyperGroup

from edge_opt._support.deprecation import FormerNameWarning, current_words
from edge_opt._support.json import to_plain
from edge_opt._support.progress import console_width, show_progress
from edge_opt.errors import EdgeOptError, InvalidInput, SweepInterrupted, TraceFailed, first_line
from edge_opt.loading import TRUST
from edge_opt.text import lines, shorten

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from rich.console import Console

    from edge_opt.report.sheets import Sheet

NOT_SATISFIED = 1
_INTERRUPTED = SweepInterrupted.exit_code
_LONGEST_STATUS = 1_500
_PIPE_CLOSED = 141  # 128 + SIGPIPE, as shells say it


# What `ctx.meta` keeps of the options that every command takes.
_JSON, _DEBUG, _CONTEXT = "edge_opt.json", "edge_opt.debug", "edge_opt.context"
_meta: ContextVar[dict[str, Any]] = ContextVar("edge_opt_command_line")


def wants_json() -> bool:
    """Return whether the command that runs was given --json."""
    return bool(_meta.get({}).get(_JSON))


def _remember(key: str) -> Callable[[typer.Context, bool], None]:
    """Return the callback of a flag of every command: it may stand before or behind the command's name."""

    def remember(context: typer.Context, wanted: bool) -> None:
        context.meta[key] = wanted or context.meta.get(key, False)

    return remember


def _trust(context: typer.Context, wanted: bool) -> None:
    if wanted and TRUST not in os.environ:
        # Processes that build candidates open the file too; they inherit this.
        os.environ[TRUST] = "1"
        context.find_root().call_on_close(lambda: os.environ.pop(TRUST, None))


def _flag(name: str, text: str, callback: Callable[..., None]) -> Any:
    return Option(name, help=text, callback=callback, expose_value=False)


Json = Annotated[bool, _flag("--json", "Print the result as JSON (docs/json.md).", _remember(_JSON))]
Trust = Annotated[bool, _flag("--trust", "Open .pt2 files. They can execute code: check their origin.", _trust)]
Debug = Annotated[bool, _flag("--debug", "Show the traceback of an error.", _remember(_DEBUG))]


# Where the help of every command shows an option or argument, by the name of its parameter.
_GROUPS = {
    "Device": "name time like export",
    "Model": "model models subject sources host file inputs batch isolate mode weights data prompt context kv",
    "Budget": "budget baseline max_increase",
    "Target": "target no_host_timing no_skip precision runtime engine ram battery every idle_uw split no_flash core",
    "Run": "config folder root path force settings prune metric loss fair metric_direction seeds",
    "Pruning": "ratio macs_target latency_target importance ignore round_to seed",
    "Quantization": "scheme keep_float calibration calibration_batches",
    "Verification": "verify_on max_difference min_agreement",
    "Training": "optimizer frozen checkpoint autocast accumulate suggest largest_batch",
    "Measure": "measure min_time threads seconds runtime_profile",
    "Execution": "measure_on workers scheduler insecure retry_failed fresh",
    "Output": "level depth sort top everything convention tool title output strict",
    "Every command": "json trust debug help",
}


def _group(param: Any) -> str:
    return next(title for title, names in _GROUPS.items() if param.name in names.split())


_NEVER_TRUSTED = (".onnx", ".tflite", ".gguf", ".json")


def refuse_unused(reason: str, *names: str, when: bool = True) -> None:
    """Refuse options that were written on the command line and have no effect.

    Args:
        reason: Why, such as "without --measure".
        names: Parameters of the command.
        when: Whether the reason holds.
    """
    context = _meta.get()[_CONTEXT]
    for name in names if when else ():
        sources = [each.get_parameter_source(name) for each in (context, context.parent)]
        if any(source is not None and source.name == "COMMANDLINE" for source in sources):
            raise InvalidInput(f"--{name.replace('_', '-')} has no effect {reason}; drop it")


class Command(TyperCommand):
    """A command that also takes the flags of every command, and shows its options in groups."""

    def get_params(self, ctx: Any) -> list[Any]:
        *own, show_help = super().get_params(ctx)
        every = [] if ctx.parent is None else ctx.parent.command.params
        return [*own, *(param for param in every if param.name in ("json", "trust", "debug")), show_help]

    def invoke(self, ctx: Any) -> Any:
        ctx.meta[_CONTEXT] = ctx
        named = [str(ctx.params[param.name]) for param in self.params if param.name in ("model", "subject")]
        model = next(iter(named), "")
        is_data = model.lower().endswith(_NEVER_TRUSTED)
        refuse_unused(f"on {model}, which is read without executing code", "trust", when=is_data)
        return super().invoke(ctx)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [*(str(param.metavar) for param in self.params if param.param_type_name == "argument"), "[OPTIONS]"]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        # Typer's own panels are boxes, which cost two lines per group: the help of `profile` would not fit a screen.
        params = [param for param in self.get_params(ctx) if not getattr(param, "hidden", False)]
        names = {param: _names(param, ctx) for param in params}
        width = max(map(len, names.values()))
        formatter.write("\n")
        for title in [title for title in _GROUPS if title in map(_group, params)]:
            rows = [(names[param].ljust(width), described(param)) for param in params if _group(param) == title]
            formatter.write(f"{typer.style(title, bold=True)}\n")
            with formatter.indentation():
                formatter.write_dl(rows, col_max=width)


def _names(param: Any, ctx: Any) -> str:
    is_option = param.param_type_name == "option"
    return str(param.get_help_record(ctx)[0] if is_option else param.metavar or param.name.upper())


def described(param: Any) -> str:
    """Return the help of an option or argument, with its default where the help does not state it."""
    default, text = param.default, param.help or ""
    has_default = default is not None and default is not False and default not in ((), "") and not callable(default)
    return f"{text} Default: {default}." if has_default and "efault" not in text else text


class Shell(TyperGroup):
    """The group of all commands; an EdgeOptError becomes `error: ...` and its exit code, usually 2."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        # Help in a pipe is as wide as on a usual terminal.
        ctx.terminal_width = min(console_width(80 if sys.stdout.isatty() else 100), 100)
        try:
            return super().parse_args(ctx, args)
        except _UsageError as error:
            if not args:  # which shows the help
                raise
            raise self._ended(ctx, error, _usage_sentence(error, ctx), EdgeOptError.exit_code) from error

    def invoke(self, ctx: Any) -> Any:
        token = _meta.set(ctx.meta)
        try:
            with show_progress(), _plain_deprecation_warnings():
                return super().invoke(ctx)
        except _UsageError as error:
            raise self._ended(ctx, error, _usage_sentence(error, ctx), EdgeOptError.exit_code) from error
        except EdgeOptError as error:
            params = self.commands[ctx.invoked_subcommand].params
            options = {param.name: max(param.opts, key=len) for param in params if param.param_type_name == "option"}
            sentence = with_options(str(error), options)
            if isinstance(error, TraceFailed) and "inputs" in options and "-i" not in sentence:
                sentence += "; check --inputs"
            raise self._ended(ctx, error, sentence, error.exit_code) from error
        except KeyboardInterrupt as error:
            raise self._ended(ctx, error, "interrupted; files that were finished are whole", _INTERRUPTED) from error
        except BrokenPipeError as error:
            # Whoever reads has seen enough: no error, and nothing to say.
            _give_up_stdout()
            raise typer.Exit(_PIPE_CLOSED) from error
        except OSError as error:
            raise self._ended(ctx, error, refused(error), EdgeOptError.exit_code) from error
        except SystemExit as error:  # no command of ours ends this way; taken as it is, `check` could end with 0
            sentence = f"the model's or the data's own code ended the program with SystemExit({error.code!r})"
            raise self._ended(ctx, error, sentence, EdgeOptError.exit_code) from error
        except Exception as error:
            if not _is_of_own_code(error):
                raise
            raise self._ended(ctx, error, f"{first_line(error)}; {_OWN_CODE}", EdgeOptError.exit_code) from error
        finally:
            _meta.reset(token)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, current_words(args))
        ctx.meta[_WORDS] = [*rest]  # the parser empties its own list
        return name, command, rest

    def _ended(self, ctx: Any, error: BaseException, sentence: str, code: int) -> typer.Exit:
        if ctx.meta.get(_DEBUG):
            traceback.print_exception(error)
        print_status(sentence if isinstance(error, KeyboardInterrupt) else f"error: {sentence}")
        return typer.Exit(code)


# Typer brings a copy of click, or uses the one that is installed, by its version; its errors come from the same one.
_UsageError: Any = typer.BadParameter.__base__
_WORDS = "edge_opt.words"


def _usage_sentence(error: Any, ctx: Any) -> str:
    """Describe a command or an option that does not exist, is missing or has an unusable value, in one sentence."""
    message = error.format_message().rstrip(".")
    names = [*getattr(getattr(error, "param", None), "opts", ())]
    words = ctx.meta.get(_WORDS, [])
    values = [value for name, value in pairwise(words) if name in names]
    values += [value for name, equals, value in (word.partition("=") for word in words) if equals and name in names]
    if values:
        # Typer does not repeat the value, and continues its reason behind a comma.
        message = f"{max(names, key=len)} is {values[-1]!r}; {message.partition(': ')[2].partition(',')[0]}"
    command = "edge-opt" if error.ctx is None or error.ctx.parent is None else f"edge-opt {error.ctx.info_name}"
    return f"{message[:1].lower()}{message[1:]}; `{command} -h` shows what is allowed"


# Parameters of Python functions and keys of a configuration whose options have other names.
_OPTIONS = {"kwargs": "inputs", "ignored": "ignore", "ram_gib": "ram", "remedies": "suggest", "min_time_s": "min_time"}
_OPTIONS |= {"precisions": "precision", "runtimes": "runtime", "budgets": "budget", "pruning_levels": "prune"}
# `name=`, with a literal behind it or alone, but not in a call such as `Net(width=2)`; and `name is` at the beginning.
_PARAMETER = re.compile(r"""(?<![\w.(-])([a-z]\w*)=(?:(['"])([^'"]*)\2|(\d[\d.]*\d|\d)|True\b|(?=[\s,;:.)]|$))""")
_SUBJECT = re.compile(r"^([a-z]\w*)(?:\[\d+\])?(?=: | (?:is|has|names|needs|must|cannot|requires) )")


def with_options(message: str, options: Mapping[str, str]) -> str:
    """Return the error of a Python function with options in place of its parameters.

    >>> with_options("threads= requires target='host'", {"threads": "--threads", "target": "--target"})
    '--threads requires --target host'
    >>> with_options("threads is 0; write Net(threads=2)", {"threads": "--threads"})
    '--threads is 0; write Net(threads=2)'
    """

    def option(match: re.Match[str]) -> str:
        name = options.get(_OPTIONS.get(match[1], match[1]))
        if name is None:
            return match[0]
        value = next((group for group in match.groups()[2:] if group), "")
        return f"{name} {value}".rstrip()

    return _PARAMETER.sub(option, _SUBJECT.sub(option, message))


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
    """Describe an error of a file or a disk in one sentence; one without a number is of the user's own code."""
    if error.errno is None:
        return f"{first_line(error)}; {_OWN_CODE}"
    where = f"use {error.filename}" if error.filename else "read or write"
    return f"cannot {where}: {error.strerror}; check its permissions and the space left, or choose another path"


_OWN_CODE = "the model's or the data's own code raised it"


def _is_of_own_code(error: Exception) -> bool:
    """Return whether the user's code raised an error, or called the library that did: not edge_opt itself."""
    package, libraries = str(Path(__file__).parents[1]), tuple(sysconfig.get_paths().values())
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    # Frames of compiled code have names such as "<frozen runpy>" or "numpy/random/mtrand.pyx".
    files = [file for file in files if Path(file).is_absolute()]
    files = [file for file in files if file.startswith(package) or not file.startswith(libraries)]
    return bool(files) and not files[-1].startswith(package)


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


def print_json(document: Any) -> None:
    """Print a document of `tagged`, or several, as JSON."""
    typer.echo(json.dumps(document, indent=1, allow_nan=False))


def tagged(kind: str, plain: Mapping[str, Any]) -> dict[str, Any]:
    """Return plain values with the name of their format, and the version of it, in front (docs/json.md).

    >>> tagged("status", {"left": 2})
    {'format': 'edge_opt.status', 'schema_version': 1, 'left': 2}
    """
    return {"format": f"edge_opt.{kind}", "schema_version": 1, **plain}


def print_record(record: Any, kind: str, plain: Callable[[Any], Any] = to_plain) -> None:
    """Print a record as its sheet, or with --json as the plain values of a format."""
    from edge_opt.report.sheets import record_text

    if wants_json():
        print_json(tagged(kind, plain(record)))
    else:
        typer.echo(record_text(record, result_width()))


def print_and_save(record: Any, shown: Sheet, output: Sequence[Path] | None) -> None:
    """Print a record as its JSON document or as a sheet, and save it to files."""
    from edge_opt.report.sheets import print_sheet, record_document

    if wants_json():
        typer.echo(record_document(record), nl=False)
    else:
        print_sheet(result_console(), shown)
    for path in output or []:
        print_status(f"saved to {record.save(path)}")


def print_status(sentence: str) -> None:
    """Print something that is not the result, to stderr; names of models and files are part of it."""
    try:
        typer.echo(shorten(lines(sentence), _LONGEST_STATUS), err=True)
    except OSError:  # stderr is closed or full, too: the exit code is all that is left
        return


def not_satisfied(sentence: str) -> typer.Exit:
    """Say which condition does not hold, and return the exit to raise."""
    print_status(sentence)
    return typer.Exit(NOT_SATISFIED)
