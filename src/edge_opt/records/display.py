"""How a record shows itself: in one line, as a short table, and as HTML in a notebook."""

from __future__ import annotations

import reprlib
from dataclasses import fields
from typing import Any, cast

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


class Shown(Record):
    """A record that people meet: printed as a short table, and drawn in notebooks."""

    __slots__ = ()

    def __str__(self) -> str:
        from edge_opt.report.sheets import record_text

        return record_text(self)

    def _repr_html_(self) -> str:
        from edge_opt.report.sheets import record_html

        return record_html(self)
