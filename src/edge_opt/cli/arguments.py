"""Arguments that commands share: models, inputs, loaders, targets."""

from __future__ import annotations

import ast
import json as json_format
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from typer import Argument, Option

from edge_opt import units
from edge_opt._support.progress import report_progress, stderr_console
from edge_opt.cli.shell import print_status
from edge_opt.errors import InvalidInput, first_line
from edge_opt.loading import Loaded, find_object, load_model, parse_reference

if TYPE_CHECKING:
    from edge_opt.records.profiles import ModelProfile
    from edge_opt.trace.inputs import InputSpec


GRAMMAR = "[NAME:]DIMxDIMx...[:DTYPE], such as 1x3x224x224 or ids:1x128:int64"
FORM = "file.py:NAME or package.module:NAME, a loader, a list of batches, or a function that returns one"

MODEL_FORMS = (
    "torchvision:NAME, timm:NAME, hf:ORG/NAME, net.py:Net, 'net.py:Net(width=2)', pkg.module:factory, "
    "or a .onnx, .tflite, .pt2 file"
)


def option(default: Any, names: str, help: str) -> Any:  # noqa: A002  # as typer calls it
    """Return an option by its default, its names and its value as the help shows them, "-n, --top N", and its help.

    Without a name, `typer` takes that of the parameter; without a value it is a flag.
    """
    words = names.replace(", ", " ").split()
    flags = [word for word in words if word.startswith("-")]
    return Option(default, *flags, metavar=None if words == flags else words[-1], help=help)


def argument(metavar: str, help: str, default: Any = ...) -> Any:  # noqa: A002  # as typer calls it
    """Return an argument by its name and its text in the help, and its default; without one it is required."""
    return Argument(default, metavar=metavar, help=help)


ModelArgument = Annotated[str, Argument(metavar="MODEL", help=f"{MODEL_FORMS}.")]
Inputs = Annotated[
    list[str] | None,
    Option(
        "--inputs",
        "-i",
        metavar="INPUT",
        help="Shape 1x3x224x224 or ids:1x128:int64, a value such as scale=2, or file.py:NAME, the inputs or a "
        "function that returns them.",
    ),
]
Batch = Annotated[int | None, Option("--batch", "-b", metavar="N", help="First dimension of every input.")]
Runtime = Annotated[
    str | None, Option(metavar="NAME", help="Its runtime, such as ncnn. Default: that with the best data.")
]
_PRECISION = "fp32, fp16, bf16, int8, int4 or w8a16. Default: the file's, or fp32."
TargetPrecision = Annotated[str | None, Option(metavar="NAME", help=_PRECISION)]
_TARGET = "Predict for a device, platform, calibration file or host"
Target = Annotated[str | None, Option("--target", "-t", metavar="NAME", help=f"{_TARGET}.")]
Targets = Annotated[list[str] | None, Option("--target", "-t", metavar="NAME", help=f"{_TARGET}; repeatable.")]
Threads = Annotated[int | None, Option(metavar="N", help="Threads here, and of the runtime on the target.")]
MinTime = Annotated[float, Option(metavar="S", help="Shortest measurement in seconds.")]
RecordFiles = Annotated[
    list[Path] | None, Option("--output", "-o", metavar="FILE", help="Save as .json, .html, .md or .txt.")
]

# A shape starts with a digit and a name does not; the dimensions of a scalar are the word itself.
_INPUT = re.compile(r"(?:(?P<name>[^\W\d]\w*):)?(?P<dims>scalar|-?\d[^:]*)(?::(?P<dtype>[^:]+))?")
_VALUE = re.compile(r"[^\W\d]\w*\s*=.*", re.DOTALL)
_REFERENCE = re.compile(r"[^:]+:[^\W\d]\w*")
_DICT_REMEDY = (
    "for a model that takes a dict, write in a file\n  def inputs(): return [{'x': torch.zeros(1, 3, 32, 32)}]\n"
    "and pass --inputs file.py:inputs"
)
_SEPARATOR = re.compile(f"[xX{units.TIMES}]")


class Arguments(NamedTuple):
    """The arguments of a call: positional, by name, and whether a tensor is among them."""

    positional: list[Any]
    named: dict[str, Any]
    has_inputs: bool
    batch: int | None = None  # still to be applied, to the inputs of an exported program


def read_arguments(inputs: Sequence[str], batch: int | None = None) -> Arguments:
    """Read the arguments of one call; `batch` replaces the first dimension of every input.

    >>> read_arguments(["1x3x8x8", "mask:1x8:bool", "scale=2"], batch=4).named
    {'mask': InputSpec(shape=(4, 8), dtype='bool'), 'scale': 2}
    """
    if batch is not None and batch < 1:
        raise InvalidInput(f"--batch is {batch}; it must be at least 1")
    values = [text for text in inputs if _VALUE.fullmatch(text)]
    tensors = [text for text in inputs if text not in values]
    references = [text for text in tensors if not _INPUT.fullmatch(text) and _REFERENCE.fullmatch(text)]
    if references and (len(tensors) > 1 or batch is not None):
        raise InvalidInput(f"--inputs {references[0]} makes every input; drop --batch and the other --inputs")
    positional, named = _referenced_inputs(references[0]) if references else ([], {})
    for text in tensors if not references else ():
        name, spec = _input(text, batch)
        if name is None:
            positional.append(spec)
        else:
            _add(named, name, spec)
    for text in values:
        _add(named, *_keyword(text))
    return Arguments(positional, named, bool(tensors), None if tensors else batch)


def _referenced_inputs(reference: str) -> tuple[list[Any], dict[str, Any]]:
    """Return the inputs that a reference names: a dict by name, a list or tuple in order, anything else alone."""
    value = named_object(reference, f"--inputs {reference} cannot be read; write file.py:NAME or {GRAMMAR}")
    if callable(value):
        value = _called(value, f"--inputs {reference}")
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return [], dict(value)
    is_shape = isinstance(value, (list, tuple)) and all(type(item) is int for item in value)
    return (list(value) if isinstance(value, (list, tuple)) and not is_shape else [value]), {}


def named_object(reference: str, problem: str) -> Any:
    """Return the object that a reference without arguments names."""
    parsed = parse_reference(reference)
    if parsed is None or parsed.arguments:
        raise InvalidInput(problem)
    return find_object(parsed)


def _called(function: Any, name: str) -> Any:
    """Return what a function of the user returns."""
    try:
        return function()
    except Exception as error:
        raise InvalidInput(f"{name} raised {first_line(error)}") from error


class LoadedCall(NamedTuple):
    """A model, its name in tables, and the arguments that it is called with, as `eo.profile` takes them."""

    model: Any
    name: str
    inputs: list[Any] | None
    kwargs: dict[str, Any]


@contextmanager
def loaded_call(
    reference: str, inputs: Sequence[str] | None = None, batch: int | None = None, usual_input: str | None = None
) -> Iterator[LoadedCall]:
    """Load a model and read the arguments of its call. What the user's code prints inside goes to stderr.

    Without any input, a file's own inputs are used; a model that is not a file then takes `usual_input`.
    """
    with redirect_stdout(sys.stderr):
        arguments = read_arguments(inputs or [], batch)
        loaded = load_model(reference)
        if not arguments.has_inputs and loaded.example is None and usual_input is not None:
            arguments = read_arguments([usual_input, *(inputs or [])], batch)
        positional, named = _with_example(arguments, loaded)
        yield LoadedCall(loaded.model, loaded.name, positional or None, named)


def _with_example(arguments: Arguments, loaded: Loaded) -> tuple[list[Any], dict[str, Any]]:
    """Return the call's arguments; without any input, those that the program was exported with, and say so."""
    if arguments.has_inputs:
        return arguments.positional, arguments.named
    batch = arguments.batch
    if loaded.example is None and batch is not None:
        raise InvalidInput("--batch replaces the first dimension of each input, and there is none; add -i SHAPE")
    if loaded.example is None:
        raise InvalidInput(f"{loaded.name} needs the shape of each of its inputs; add -i {GRAMMAR}")
    print_status("no --inputs given: using those of the file")
    positional, named = list(loaded.example[0]), {**loaded.example[1], **arguments.named}
    return (
        [_rebatched(value, batch) for value in positional],
        {key: _rebatched(value, batch) for key, value in named.items()},
    )


def _rebatched(value: Any, batch: int | None) -> Any:
    """Return the spec of a tensor with another first dimension; anything else as it is, as without a batch."""
    if batch is None:
        return value
    import torch

    from edge_opt.trace.inputs import InputSpec

    if not isinstance(value, torch.Tensor) or not value.dim():
        return value
    return InputSpec((batch, *value.shape[1:]), str(value.dtype).removeprefix("torch."))


def _add(named: dict[str, Any], name: str, value: Any) -> None:
    if name in named:
        raise InvalidInput(f"the argument {name!r} is given twice; keep one of them")
    named[name] = value


def _input(text: str, batch: int | None) -> tuple[str | None, InputSpec]:
    from edge_opt.trace.inputs import InputSpec

    try:
        parts = _INPUT.fullmatch(text)
        if parts is None:
            raise ValueError(text)
        shape = () if parts["dims"] == "scalar" else tuple(map(int, _SEPARATOR.split(parts["dims"])))
    except ValueError:
        remedy = _DICT_REMEDY if text.lstrip().startswith("{") else f"write {GRAMMAR}, or file.py:NAME"
        raise InvalidInput(f"--inputs {text!r} cannot be read; {remedy}") from None
    try:
        spec = InputSpec(shape, parts["dtype"])
    except InvalidInput as error:
        raise InvalidInput(f"--inputs {text!r}: {error}") from error
    return parts["name"], spec if batch is None or not shape else replace(spec, shape=(batch, *shape[1:]))


def _keyword(text: str) -> tuple[str, Any]:
    name, _, value = (part.strip() for part in text.partition("="))
    for read in (json_format.loads, ast.literal_eval):
        with suppress(ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            literal = read(value)
            break
    else:
        raise InvalidInput(
            f"--inputs {text!r}: {value!r} is neither JSON nor a Python literal; put quotes around text: "
            f"--inputs \"{name}='{value}'\""
        )
    if isinstance(literal, dict) and any(isinstance(item, (str, list, tuple)) for item in literal.values()):
        raise InvalidInput(f"--inputs {text!r}: tensors in a dict cannot be written here; {_DICT_REMEDY}")
    if isinstance(literal, (list, tuple)) and literal and all(type(item) is int for item in literal):
        raise InvalidInput(f"--inputs {text!r}: a list of integers would be taken for a shape; use Python")
    return name, literal


def load_batches(reference: str) -> Iterable[Any]:
    """Return the batches that a reference names."""
    value = named_object(reference, f"{reference!r} names no batches; write {FORM}")
    if callable(value) and not hasattr(value, "__iter__"):
        value = _called(value, repr(reference))
    if isinstance(value, Mapping) and "train" in value:  # what a sweep takes as --data
        value = value.get("calibration", value["train"])
    elif isinstance(value, tuple) and value and hasattr(value[0], "dataset"):
        value = value[0]
    if not isinstance(value, Iterable):
        raise InvalidInput(f"{reference!r} is of type {type(value).__name__}; it must be {FORM}")
    return value


def random_batches(inputs: list[Any], named: dict[str, Any], count: int) -> list[Any]:
    """Return batches of noise in the shape of the inputs: they show that a model converts, not how accurate it is."""
    import torch

    from edge_opt.trace.inputs import InputSpec

    generator = torch.Generator().manual_seed(0)

    def drawn(spec: Any) -> Any:
        # A file describes its inputs by tensors without values; a tensor with values is kept.
        if not isinstance(spec, InputSpec) and not (isinstance(spec, torch.Tensor) and spec.is_meta):
            return spec
        kind = spec.dtype if isinstance(spec, torch.Tensor) else getattr(torch, spec.dtype or "float32")
        if not kind.is_floating_point:
            return torch.zeros(spec.shape, dtype=kind)
        return torch.randn(spec.shape, generator=generator).to(kind)

    specs = [*inputs, *(value for value in named.values() if isinstance(value, InputSpec))]
    return [tuple(map(drawn, specs)) for _ in range(count)]


@contextmanager
def measuring(
    is_wanted: bool, min_time_s: float, threads: int | None, needs: str = "--measure"
) -> Iterator[Literal[False] | dict[str, Any]]:
    """Yield what to pass as `measure=`, and show a progress bar on a terminal meanwhile."""
    if not is_wanted:
        if threads is not None:
            raise InvalidInput(f"--threads {threads} has no effect; add {needs}, or drop --threads")
        yield False
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("measuring"), BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    is_terminal = sys.__stderr__ is not None and sys.__stderr__.isatty()
    with Progress(*columns, console=stderr_console(), transient=True, disable=not is_terminal) as bar:
        task = bar.add_task("", total=1.0)

        def progress(share: float, what: str) -> None:
            bar.update(task, completed=share, description=what)

        yield {"min_time_s": min_time_s, "threads": threads, "progress": progress}


def split_threads(threads: int | None, is_measured: bool, target: str | None) -> tuple[int | None, int | None]:
    """Return the threads to measure with here, and those of the runtime on a target.

    A calibrated machine has its own threads, so with a measurement the option means the threads here.

    >>> split_threads(1, True, "raspberry-pi-4"), split_threads(1, True, "host"), split_threads(1, False, None)
    ((1, 1), (1, None), (1, None))
    """
    is_machine = target is not None and (target == "host" or target.endswith(".json"))
    here = threads if is_measured or target is None else None
    return here, None if target is None or (is_measured and is_machine) else threads


def is_candidate(reference: str) -> bool:
    """Return whether it names a candidate of a sweep, RUN#CANDIDATE; a file may have a # in its own name."""
    return "#" in reference and not Path(reference.partition(":")[0]).exists()


def is_profile(reference: str) -> bool:
    """Return whether it names a file that `edge-opt profile -o` wrote, rather than a model."""
    return reference.lower().endswith(".json")


def read_profile(reference: str, measure: bool | dict[str, Any], *call: Any) -> ModelProfile:
    """Return the profile that a reference names: a saved one, or that of a model with the inputs of `loaded_call`."""
    import edge_opt as eo

    if is_profile(reference):
        return eo.load(reference)
    with loaded_call(reference, *call) as loaded:
        report_progress(f"tracing {loaded.name}")
        return eo.profile(loaded.model, loaded.inputs, kwargs=loaded.kwargs, name=loaded.name, measure=measure)
