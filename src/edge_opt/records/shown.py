"""How a record shows itself: in one line, as a short table, and as HTML in a notebook."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass, make_dataclass
from typing import Any, ParamSpec, TypeVar, cast

from edge_opt.text import printable

LONGEST = 280
_LONGEST_VALUE = 60
_ITEMS = 12


class Record:
    """Base of every record: its `repr` is one short line, however much it holds."""

    __slots__ = ()

    def __init_subclass__(cls) -> None:
        # A dataclass writes a repr of everything, unless the class has one of its own.
        if "__repr__" not in vars(cls):
            cls.__repr__ = Record.__repr__  # type: ignore[method-assign]

    def __repr__(self) -> str:
        brief = printable(self._brief())
        return cut(f"<{type(self).__qualname__} {brief}>" if brief else _line(self, LONGEST), LONGEST)

    def _brief(self) -> str:
        """The record in a few words; empty: its fields say enough."""
        return ""


_Fields = ParamSpec("_Fields")
_Made = TypeVar("_Made", bound=Record)


def maker(cls: Callable[_Fields, _Made]) -> Callable[_Fields, _Made]:
    """What makes records of a frozen class with slots in less than half the time; a trace has thousands of them.

    A frozen class assigns each field by a call. Here a class that is not frozen is filled, and then becomes the record.

    Args:
        cls: The class. Every field is to be given, by its place.
    """
    record = cast(type[Record], cls)
    names = [field.name for field in fields(record)]  # type: ignore[arg-type]
    open_twin = make_dataclass(f"Open{record.__name__}", names, bases=record.__bases__, slots=True)

    def make(*values: Any) -> Any:
        made = open_twin(*values)
        made.__class__ = record
        return made

    return cast(Callable[_Fields, _Made], make)


class Shown(Record):
    """A record that people meet: printed as a short table, and drawn in notebooks."""

    __slots__ = ()

    def __str__(self) -> str:
        from edge_opt.report.sheets import record_text

        return record_text(self)

    def _repr_html_(self) -> str:
        from edge_opt.report.sheets import record_html

        return record_html(self)


def cut(text: str, longest: int) -> str:
    """The text in at most so many letters; what is left out stands in the middle.

    >>> cut("abcdefghij", 5)
    'abc…j'
    """
    if len(text) <= longest:
        return text
    behind = (longest - 1) // 4
    return f"{text[: longest - 1 - behind]}…{text[len(text) - behind :]}"


def _line(record: Any, longest: int) -> str:
    """`Name(field=value, …)` as a dataclass writes it, as far as it stays short."""
    name, parts = type(record).__qualname__, list[str]()
    room = longest - len(name) - len("(, …)")
    for field in fields(record):
        part = f"{field.name}={_value(getattr(record, field.name))}"
        if sum(map(len, parts)) + 2 * len(parts) + len(part) > room:
            return f"{name}({', '.join([*parts, '…'])})"
        parts.append(part)
    return f"{name}({', '.join(parts)})"


def _value(value: Any) -> str:
    """A value in a few letters: plain ones as they are, others by their kind and number."""
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return cut(repr(value), _LONGEST_VALUE)
    if is_dataclass(value) and not isinstance(value, type):
        found = _line(value, _LONGEST_VALUE)
        return f"{type(value).__qualname__}(…)" if found.endswith("…)") else found
    if isinstance(value, (tuple, list, dict, set, frozenset)):
        return _several(value)
    return f"<{type(value).__qualname__}>"


def _several(values: Any) -> str:
    if len(values) <= _ITEMS and all(_is_plain(item) for item in _flat(values)):
        shown = repr(values)
        if len(shown) <= _LONGEST_VALUE:
            return shown
    kinds = {type(item).__qualname__ for item in _flat(values)}
    return f"<{len(values)} {kinds.pop() if len(kinds) == 1 else 'items'}>"


def _flat(values: Any) -> Iterable[Any]:
    return [*values, *values.values()] if isinstance(values, dict) else values


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return len(value) <= _ITEMS and all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))
