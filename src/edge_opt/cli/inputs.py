"""Inputs as people type them, turned into the arguments of a model."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from edge_opt import units
from edge_opt.cli.shell import talk
from edge_opt.errors import InvalidInput
from edge_opt.loading.exported import Example

if TYPE_CHECKING:
    from edge_opt.trace.inputs import InputSpec

GRAMMAR = "[NAME:]DIMxDIMx...[:DTYPE], such as 1x3x224x224 or ids:1x128:int64"
_SEPARATOR = re.compile(f"[xX{units.TIMES}]")


class Arguments(NamedTuple):
    """The call's arguments: those in order, those by name, and whether a tensor is among them."""

    positional: list[InputSpec]
    named: dict[str, Any]
    has_inputs: bool


def read_arguments(inputs: Sequence[str], kwargs: Sequence[str], batch: int | None) -> Arguments:
    """The arguments of one call. `batch` replaces the first dimension of every input.

    >>> read_arguments(["1x3x8x8", "mask:1x8:bool"], ["scale=2"], batch=4).named
    {'mask': InputSpec(shape=(4, 8), dtype='bool'), 'scale': 2}
    """
    if batch is not None and batch < 1:
        raise InvalidInput(f"--batch is {batch}; it must be at least 1")
    if batch is not None and not inputs:
        raise InvalidInput("--batch replaces the first dimension of each --input, and there is none; add --input")
    positional: list[InputSpec] = []
    named: dict[str, Any] = {}
    for text in inputs:
        name, spec = _input(text, batch)
        if name is None:
            positional.append(spec)
        else:
            _add(named, name, spec)
    for text in kwargs:
        _add(named, *_keyword(text))
    return Arguments(positional, named, bool(inputs))


def with_example(arguments: Arguments, example: Example | None, name: str) -> tuple[list[Any], dict[str, Any]]:
    """The call's arguments; without any input, those that the program was exported with."""
    if arguments.has_inputs:
        return list(arguments.positional), arguments.named
    if example is None:
        raise InvalidInput(f"no --input given: {name} needs the shape of each of its inputs; write {GRAMMAR}")
    talk("no --input given: using the inputs that the program was exported with")
    return list(example[0]), {**example[1], **arguments.named}


def _add(named: dict[str, Any], name: str, value: Any) -> None:
    if name in named:
        raise InvalidInput(f"the argument {name!r} is given twice; keep one of them")
    named[name] = value


def _input(text: str, batch: int | None) -> tuple[str | None, InputSpec]:
    from edge_opt.trace.inputs import InputSpec

    name, dims, dtype = _parts(text)
    shape = () if dims == "scalar" else tuple(_dimension(dim, text) for dim in _SEPARATOR.split(dims))
    if batch is not None and shape:
        shape = (batch, *shape[1:])
    try:
        return name, InputSpec(shape, dtype)
    except InvalidInput as error:
        raise InvalidInput(f"--input {text!r}: {error}") from error


def _parts(text: str) -> tuple[str | None, str, str | None]:
    """Name, dimensions and dtype. A shape starts with a digit and a name does not, so two parts are never ambiguous."""
    parts = text.split(":")
    is_named = len(parts) == 3 or (len(parts) == 2 and parts[0].isidentifier() and parts[0] != "scalar")
    name, rest = (parts[0], parts[1:]) if is_named else (None, parts)
    if len(rest) > 2 or not all(parts) or (name is not None and not name.isidentifier()):
        raise InvalidInput(f"--input {text!r} cannot be read; write {GRAMMAR}")
    return name, rest[0], rest[1] if len(rest) == 2 else None


def _dimension(dim: str, text: str) -> int:
    try:
        size = int(dim)
    except ValueError:
        what = f"{dim!r} is not a number" if dim else "a dimension is missing"
        raise InvalidInput(f"--input {text!r}: {what}; write {GRAMMAR}") from None
    if size < 1:
        raise InvalidInput(f"--input {text!r}: the dimension {size} is not positive; all must be at least 1")
    return size


def _keyword(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise InvalidInput(f"--kwarg {text!r} cannot be read; write NAME=VALUE, such as use_cache=false or scale=0.5")
    found = _literal(value, text)
    if isinstance(found, (list, tuple)) and found and all(type(item) is int for item in found):
        raise InvalidInput(f"--kwarg {text!r}: a list of integers would be taken for the shape of a tensor; use Python")
    return name, found


def _literal(value: str, text: str) -> Any:
    try:
        return json.loads(value)
    except ValueError:
        pass
    try:
        return ast.literal_eval(value)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        raise InvalidInput(
            f"--kwarg {text!r}: {value!r} is neither JSON nor a Python literal; put quotes around text: "
            f"--kwarg \"{text.partition('=')[0]}='{value}'\""
        ) from None
