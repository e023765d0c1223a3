"""Records to JSON values, and back."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from edge_opt.errors import InvalidInput, UnreadableProfile
from edge_opt.records.costs import SparseInfo, TensorInfo

T = TypeVar("T")
_Convert = Callable[[Any], Any]

_PLAIN: dict[Any, str] = {int: "a whole number", str: "text", bool: "true or false", NoneType: "null"}


def to_plain(record: Any) -> Any:
    """A record as dicts, lists, numbers, text and None: what standard JSON can hold.

    >>> to_plain(TensorInfo((2, 3), "float32", 24))
    {'shape': [2, 3], 'dtype': 'float32', 'nbytes': 24}
    """
    return _encoder(cast(Any, type(record)))(record)


def from_plain(cls: type[T], data: Any) -> T:
    """The record that `to_plain` took apart; a value that does not fit is named with its place.

    >>> from_plain(TensorInfo, {"shape": [2, 3], "dtype": "float32", "nbytes": 24})
    TensorInfo(shape=(2, 3), dtype='float32', nbytes=24)
    """
    try:
        return cast(T, _decoder(cast(Any, cls))(data))
    except _FieldError as error:
        raise UnreadableProfile(error.sentence()) from None


def laid_out(value: Any, indent: str = "") -> str:
    """JSON with one line per entry of the outer objects and lists; what lies deeper stays on its line.

    >>> print(laid_out({"name": "net", "rows": [{"a": 1}, {"a": 2}]}))
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
        lines = [f"{inner}{json.dumps(key)}: {laid_out(item, inner)}" for key, item in value.items()]
        return "{\n" + ",\n".join(lines) + f"\n{indent}}}"
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "[\n" + ",\n".join(inner + json.dumps(item, allow_nan=False) for item in value) + f"\n{indent}]"
    return json.dumps(value, allow_nan=False)


class _FieldError(Exception):
    """A value that is not what its type hint asks for; each level on the way out adds its step to `place`."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.problem = problem
        self.place: list[str] = []

    def sentence(self) -> str:
        place = "".join(reversed(self.place)).lstrip(".") or "the document"
        return f"{place} {self.problem}"


def _expected(wanted: str, found: Any) -> _FieldError:
    shown = repr(found)
    return _FieldError(f"is {shown if len(shown) <= 40 else shown[:37] + '...'}; expected {wanted}")


def _members(hint: Any) -> tuple[Any, ...] | None:
    """The members of a union, None otherwise."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else None


@cache
def _encoder(hint: Any) -> _Convert:
    if hint in _PLAIN or get_origin(hint) is Literal:
        return _as_it_is
    if hint is float or hint is Any:
        return _plain_value
    members = _members(hint)
    if members:
        some = [_encoder(member) for member in members if member is not NoneType]
        if len(some) == 1:
            return lambda value: None if value is None else some[0](value)
    if get_origin(hint) is tuple:
        return _tuple_encoder(get_args(hint))
    if is_dataclass(hint):
        hints = get_type_hints(hint)
        parts = [(field.name, _encoder(hints[field.name])) for field in fields(hint)]
        return lambda record: {name: encode(getattr(record, name)) for name, encode in parts}
    raise InvalidInput(f"no JSON form for the type {hint}; records hold numbers, text, tuples and other records")


def _as_it_is(value: Any) -> Any:
    return value


def _tuple_encoder(items: tuple[Any, ...]) -> _Convert:
    if len(items) == 2 and items[1] is Ellipsis:
        encode = _encoder(items[0])
        return list if encode is _as_it_is else lambda value: [encode(item) for item in value]
    encoders = [_encoder(item) for item in items]
    return lambda value: [encode(item) for encode, item in zip(encoders, value, strict=True)]


def _plain_value(value: Any) -> Any:
    """An operator's argument. JSON has no infinity and no NaN; they become {"float": "inf"}."""
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(float(value))}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, tuple):
        return [_plain_value(item) for item in value]
    if isinstance(value, TensorInfo):
        return to_plain(value)
    raise InvalidInput(f"no JSON form for {value!r}, a {type(value).__name__}; arguments are numbers, text and tensors")


@cache
def _decoder(hint: Any) -> _Convert:
    if hint in _PLAIN:
        return _plain_decoder(hint, _PLAIN[hint])
    if hint is Any:
        return _any_value
    if hint is float:
        return _float_value
    if get_origin(hint) is Literal:
        return _literal_decoder(get_args(hint))
    members = _members(hint)
    if members:
        some = [_decoder(member) for member in members if member is not NoneType]
        if len(some) == 1:
            return lambda data: None if data is None else some[0](data)
    if get_origin(hint) is tuple:
        return _tuple_decoder(get_args(hint))
    if is_dataclass(hint):
        return _record_decoder(cast(type, hint))
    raise InvalidInput(f"no JSON form for the type {hint}; records hold numbers, text, tuples and other records")


def _plain_decoder(wanted: type, name: str) -> _Convert:
    def decode(data: Any) -> Any:
        if type(data) is not wanted:
            raise _expected(name, data)
        return data

    return decode


def _literal_decoder(allowed: tuple[Any, ...]) -> _Convert:
    def decode(data: Any) -> Any:
        if data not in allowed:
            raise _expected(f"one of {', '.join(map(repr, allowed))}", data)
        return data

    return decode


def _float_value(data: Any) -> float:
    value = _any_value(data)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _expected("a number", data)
    return float(value)


def _any_value(data: Any) -> Any:
    if isinstance(data, list):
        return tuple(_any_value(item) for item in data)
    if not isinstance(data, dict):
        return data
    if data.keys() == {"float"} and data["float"] in ("inf", "-inf", "nan"):
        return float(data["float"])
    return _decoder(SparseInfo if "stored_elements" in data else TensorInfo)(data)


def _tuple_decoder(items: tuple[Any, ...]) -> _Convert:
    is_open = len(items) == 2 and items[1] is Ellipsis
    decoders = [_decoder(item) for item in items if item is not Ellipsis]

    def decode(data: Any) -> tuple[Any, ...]:
        if not isinstance(data, list):
            raise _expected("a list", data)
        if not is_open and len(data) != len(decoders):
            raise _expected(f"a list of {len(decoders)}", data)
        found: list[Any] = []
        try:
            for position, item in enumerate(data):
                found.append(decoders[0 if is_open else position](item))
        except _FieldError as error:
            error.place.append(f"[{len(found)}]")
            raise
        return tuple(found)

    return decode


def _record_decoder(cls: type) -> _Convert:
    hints = get_type_hints(cls)
    parts = [(field.name, _decoder(hints[field.name]), field.default) for field in fields(cls)]
    names = {name for name, _, _ in parts} | getattr(cls, "removed_fields", frozenset())

    def decode(data: Any) -> Any:
        if not isinstance(data, dict):
            raise _expected(f"a {cls.__name__}", data)
        if not data.keys() <= names:
            raise _FieldError(f"has the unknown field {min(data.keys() - names)!r}")
        values = []
        for name, convert, default in parts:
            if name not in data:
                if default is MISSING:
                    raise _FieldError(f"has no field {name!r}")
                values.append(default)
                continue
            try:
                values.append(convert(data[name]))
            except _FieldError as error:
                error.place.append(f".{name}")
                raise
        return cls(*values)

    return decode
