"""Convert records to JSON values, and JSON values to records."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from edge_opt._support.files import check_regular
from edge_opt.errors import EdgeOptError, InvalidInput, UnreadableProfile, message_of
from edge_opt.records.costs import SparseInfo, TensorInfo

T = TypeVar("T")
_Convert = Callable[[Any], Any]

# Fields of files written by 0.2 that records no longer have, by class: today's name, or None where it is ignored.
OLD_FIELDS: dict[str, dict[str, str | None]] = {
    "ModuleCall": {"places": None},
    "PruneCheck": {"export_difference": None},
    "PruneRequest": {"global_ranking": None},
    "TrainingStep": {"torch_flops": None},
    "Trace": {"spelled": None, "resident": "moved_tensor_bytes"},
}

_PLAIN: dict[Any, str] = {int: "a whole number", str: "text", bool: "true or false", NoneType: "null"}


# More digits than any figure has; Python reads thousands, and then fails where it computes with them.
_MOST_DIGITS = 60


def loads(text: str) -> Any:
    """Return what a JSON text holds; raise ValueError where it is not JSON, is too deep, or has a number too long.

    >>> loads('{"macs": 12}')
    {'macs': 12}
    """

    def whole(digits: str) -> int:
        if len(digits) > _MOST_DIGITS:
            raise ValueError(f"a number has {len(digits):,} digits; at most {_MOST_DIGITS} are read")
        return int(digits)

    try:
        return json.loads(text, parse_int=whole)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def read_document(
    path: str | os.PathLike[str], refusal: type[EdgeOptError], cure: str, parse: Callable[[str], Any] = loads
) -> Any:
    """Return what a file of JSON, TOML or text holds; raise `refusal` with one sentence where it cannot be read.

    Args:
        path: The file.
        refusal: The error to raise.
        cure: What to do about it, as the end of the sentence.
        parse: Returns the content of a text.
    """
    file, problem = Path(path), f"cannot read {str(path)!r}"
    try:
        check_regular(file)
        content = file.read_bytes()
    except FileNotFoundError:
        raise refusal(f"no file {str(path)!r}; {cure}") from None
    except (OSError, ValueError) as error:  # a NUL in the path is a ValueError
        raise refusal(f"{problem}: {getattr(error, 'strerror', None) or error}; {cure}") from error
    try:
        return parse(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        language = "JSON" if parse in (loads, str) else "TOML"
        raise refusal(f"{problem}: it is not {language}, or is cut off: {message_of(error)}; {cure}") from error


def to_plain(record: Any) -> Any:
    """Return a record as dicts, lists, numbers, text and None: what standard JSON can hold.

    >>> to_plain(TensorInfo((2, 3), "float32", 24))
    {'shape': [2, 3], 'dtype': 'float32', 'nbytes': 24}
    """
    return _codec(cast(Any, type(record)))[0](record)


def from_plain(cls: type[T], data: Any) -> T:
    """Return the record that `to_plain` took apart; the error names the path of a value of another type.

    >>> from_plain(TensorInfo, {"shape": [2, 3], "dtype": "float32", "nbytes": 24})
    TensorInfo(shape=(2, 3), dtype='float32', nbytes=24)
    """
    try:
        return cast(T, _codec(cast(Any, cls))[1](data))
    except _FieldError as error:
        raise UnreadableProfile(error.sentence()) from None


def dumps_document(kind: str, version: int, plain: Mapping[str, Any]) -> str:
    """Return a JSON document: the name of its format, the version of that, then plain values."""
    return json.dumps({"format": kind, "schema_version": version, **plain}, indent=1, allow_nan=False) + "\n"


def dumps_rows(value: Any, indent: str = "") -> str:
    """Return JSON with one line per entry of the two outer levels, so that a table has one row per line.

    >>> print(dumps_rows({"name": "net", "rows": [{"a": 1}, {"a": 2}]}))
    {
     "name": "net",
     "rows": [
      {"a": 1},
      {"a": 2}
     ]
    }
    """
    inner = indent + " "
    if isinstance(value, dict) and len(indent) < 2 and value:
        lines = [f"{inner}{json.dumps(key)}: {dumps_rows(item, inner)}" for key, item in value.items()]
        return "{\n" + ",\n".join(lines) + f"\n{indent}}}"
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "[\n" + ",\n".join(inner + json.dumps(item, allow_nan=False) for item in value) + f"\n{indent}]"
    return json.dumps(value, allow_nan=False)


class _FieldError(Exception):
    """A value that is not what its type hint asks for; each level on the way out adds its step to `path`."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.problem = problem
        self.path: list[str] = []

    def sentence(self) -> str:
        return f"{''.join(reversed(self.path)).lstrip('.') or 'the document'} {self.problem}"


def _expected(wanted: str, data: Any) -> _FieldError:
    shown = repr(data)
    return _FieldError(f"is {shown if len(shown) <= 40 else shown[:37] + '...'}; expected {wanted}")


@cache
def _codec(hint: Any) -> tuple[_Convert, _Convert]:
    """Return the functions that turn a value of a type into JSON values, and back."""
    if hint in _PLAIN:
        return _as_it_is, _checked(lambda data: type(data) is hint, _PLAIN[hint])
    if hint is Any:
        return _encode_any, _decode_any
    if hint is float:
        return _encode_any, _decode_float
    arguments = get_args(hint)
    if get_origin(hint) is Literal:
        return _as_it_is, _checked(lambda data: data in arguments, f"one of {', '.join(map(repr, arguments))}")
    if get_origin(hint) is tuple:
        return _tuple_codec(arguments)
    if get_origin(hint) in (Union, UnionType) and len(arguments) == 2 and NoneType in arguments:
        encode, decode = _codec(arguments[0] if arguments[1] is NoneType else arguments[1])
        return (
            lambda value: None if value is None else encode(value),
            lambda data: None if data is None else decode(data),
        )
    if get_origin(hint) in (Union, UnionType) and NoneType not in arguments:
        return _encode_any, _first_fitting([_codec(argument)[1] for argument in arguments])
    if is_dataclass(hint):
        return _record_codec(hint)
    raise InvalidInput(f"no JSON form for the type {hint}; records hold numbers, text, tuples and other records")


def _as_it_is(value: Any) -> Any:
    return value


def _checked(is_right: Callable[[Any], bool], wanted: str) -> _Convert:
    def decode(data: Any) -> Any:
        if not is_right(data):
            raise _expected(wanted, data)
        return data

    return decode


def _first_fitting(decoders: list[_Convert]) -> _Convert:
    """Decode a value as the first type that it fits, such as a number or a list of numbers."""

    def decode(data: Any) -> Any:
        for decoder in decoders[:-1]:
            with suppress(_FieldError):
                return decoder(data)
        return decoders[-1](data)

    return decode


def _encode_any(value: Any) -> Any:
    """Return an operator's argument. JSON has no infinity and no NaN; they become {"float": "inf"}."""
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(float(value))}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, tuple):
        return [_encode_any(item) for item in value]
    if isinstance(value, TensorInfo):
        return to_plain(value)
    raise InvalidInput(f"no JSON form for {value!r}, a {type(value).__name__}; arguments are numbers, text and tensors")


def _decode_any(data: Any) -> Any:
    if isinstance(data, list):
        return tuple(_decode_any(item) for item in data)
    if not isinstance(data, dict):
        return data
    if data.keys() == {"float"} and data["float"] in ("inf", "-inf", "nan"):
        return float(data["float"])
    return _codec(SparseInfo if "stored_elements" in data else TensorInfo)[1](data)


def _decode_float(data: Any) -> float:
    value = _decode_any(data)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _expected("a number", data)
    return float(value)


def _tuple_codec(items: tuple[Any, ...]) -> tuple[_Convert, _Convert]:
    is_open = len(items) == 2 and items[1] is Ellipsis
    codecs = [_codec(item) for item in items if item is not Ellipsis]

    def encode(value: tuple[Any, ...]) -> list[Any]:
        if not is_open:
            return [encode_item(item) for (encode_item, _), item in zip(codecs, value, strict=True)]
        encode_item = codecs[0][0]
        return list(value) if encode_item is _as_it_is else [encode_item(item) for item in value]

    def decode(data: Any) -> tuple[Any, ...]:
        if not isinstance(data, list):
            raise _expected("a list", data)
        if not is_open and len(data) != len(codecs):
            raise _expected(f"a list of {len(codecs)}", data)
        values: list[Any] = []
        try:
            for position, item in enumerate(data):
                values.append(codecs[0 if is_open else position][1](item))
        except _FieldError as error:
            error.path.append(f"[{len(values)}]")
            raise
        return tuple(values)

    return encode, decode


def _record_codec(cls: Any) -> tuple[_Convert, _Convert]:
    hints = get_type_hints(cls)
    parts = [(field.name, *_codec(hints[field.name]), field.default) for field in fields(cls)]
    names = {name for name, *_ in parts}
    old_names = OLD_FIELDS.get(cls.__name__, {})

    def encode(record: Any) -> dict[str, Any]:
        return {name: encode_field(getattr(record, name)) for name, encode_field, _, _ in parts}

    def decode(data: Any) -> Any:
        if not isinstance(data, dict):
            raise _expected(f"a {cls.__name__}", data)
        unknown = data.keys() - names
        if not unknown <= old_names.keys():
            raise _FieldError(f"has the unknown field {min(unknown - old_names.keys())!r}")
        if unknown:
            data = data | {new: data[old] for old in unknown if (new := old_names[old]) is not None}
        values = []
        for name, _, decode_field, default in parts:
            if name not in data and default is MISSING:
                raise _FieldError(f"has no field {name!r}")
            try:
                values.append(decode_field(data[name]) if name in data else default)
            except _FieldError as error:
                error.path.append(f".{name}")
                raise
        return cls(*values)

    return encode, decode
