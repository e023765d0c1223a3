"""How a record shows itself: in one line, as a short table, and as HTML in a notebook."""

from __future__ import annotations

import reprlib
from collections.abc import Callable
from dataclasses import fields, make_dataclass
from typing import Any, ParamSpec, TypeVar, cast

from edge_opt.text import printable, shorten

LONGEST = 280

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 60
_short.maxlong = 30


class Record:
    """Base of every record: its `repr` is one short line, however much it holds."""

    __slots__ = ()

    def __init_subclass__(cls) -> None:
        # A dataclass writes a repr of everything, unless the class has one of its own.
        if "__repr__" not in vars(cls):
            cls.__repr__ = Record.__repr__  # type: ignore[method-assign]

    def __repr__(self) -> str:
        name, brief = type(self).__qualname__, printable(self._brief())
        if brief:
            return shorten(f"<{name} {brief}>", LONGEST)
        parts: list[str] = []
        for field in fields(cast(Any, self)):
            parts.append(f"{field.name}={_short.repr(getattr(self, field.name))}")
            # A record may hold thousands of others; what does not fit is not written first.
            if sum(map(len, parts)) > LONGEST:
                break
        return shorten(f"{name}({', '.join(parts)})", LONGEST)

    def _brief(self) -> str:
        """Return the record in a few words; empty where its fields say enough."""
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
