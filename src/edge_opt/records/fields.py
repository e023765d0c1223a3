"""Declare a record: each field with its description; its name tells its title and unit.

A record shows itself in one line; one that people meet (`Shown`) also as a short table, and as HTML in a notebook.

    @record
    class HighestPoint(Shown):
        \"\"\"Highest sum of live activation bytes in an eager run.\"\"\"

        live_bytes: int = field("The peak in bytes.")
        op_index: int | None = field("Operator at the peak; None where no operator ran.", default=None)

The declaration is the only place that describes the field: `help()`, the API page, tables and notebooks read it.
Title and kind follow from the name (`weight_bytes`, `latency_s`).
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import re
import reprlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

from edge_opt.errors import InvalidInput
from edge_opt.text import printable, shorten

T = TypeVar("T")

# How a value is written: plain, or scaled with its unit.
Kind = Literal["", "count", "bytes", "ratio", "share", "time", "energy"]
_KINDS: tuple[tuple[Kind, str], ...] = (
    ("", r".*_per_.*"),
    ("bytes", r"(.*_)?n?bytes(_.*)?"),
    ("time", r"(.*_)?(s|seconds)(_(before|after))?"),
    ("energy", r"(.*_)?(j|joules)"),
    ("count", r"(.*_)?(macs|flops|params|ops)(_(before|after))?"),
    ("ratio", r"(.*_)?ratio"),
    ("share", r"(.*_)?share"),
)
LONGEST = 280

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 60
_short.maxlong = 30
_WORDS = {"macs": "MACs", "flops": "FLOPs", "cpu": "CPU", "ram": "RAM", "kv": "KV"}

if TYPE_CHECKING:
    import os
    from pathlib import Path

    from typing_extensions import dataclass_transform
else:
    # Type checkers alone need the marker, and `typing` has it from Python 3.11 on.
    def dataclass_transform(**_: Any) -> Any:
        return lambda decorator: decorator


def field(
    description: str, *, default: Any = dataclasses.MISSING, factory: Any = dataclasses.MISSING, compare: bool = True
) -> Any:
    """Declare one field of a record.

    Args:
        description: What the value is, in a sentence; with its unit unless the name has it, and with the meaning of
            None.
        default: The value of a record that was made without it, also of a file that was written before the field
            existed.
        factory: Makes the default where it is a value that can change, such as `dict`.
        compare: Whether two records that differ here are different.
    """
    metadata = {"description": description}
    return dataclasses.field(default=default, default_factory=factory, compare=compare, metadata=metadata)


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def record(cls: type[T]) -> type[T]:
    """Make a frozen dataclass with slots of a class, and list its fields in the docstring.

    Type checkers understand the decorator as `dataclass(frozen=True)`.

    Args:
        cls: The class; every field is declared with `field`.
    """
    return described(dataclasses.dataclass(frozen=True, slots=True)(cls))


def described(cls: type[T]) -> type[T]:
    """List the fields of a dataclass in its docstring; `record` does so itself."""
    lines = (f"    {item.name}: {item.metadata['description']}\n" for item in dataclasses.fields(cast(Any, cls)))
    cls.__doc__ = f"{inspect.cleandoc(cls.__doc__ or '')}\n\nAttributes:\n{''.join(lines)}"
    return cls


def title_of(item: dataclasses.Field[Any]) -> str:
    """Return what people read in front of a field's value: its name in words without `_s` and `_j`."""
    words = re.sub(r"_[sj]$", "", item.name).split("_")
    text = " ".join(_WORDS.get(word, word) for word in words)
    return text[:1].upper() + text[1:]


def kind_of(item: dataclasses.Field[Any]) -> Kind:
    """Return how a field's value is written: as the unit in its name says."""
    return next((kind for kind, names in _KINDS if re.fullmatch(names, item.name)), "")


def by_name(kind: str, name: str, items: Iterable[tuple[str, T]]) -> T:
    """Return the item of a name; an unknown name is refused with the closest ones.

    >>> by_name("figure", "mac", [("macs", 1), ("params", 2)])
    Traceback (most recent call last):
    edge_opt.errors.InvalidInput: no figure named 'mac'; closest: macs

    Args:
        kind: What the items are, for the error.
        name: The name.
        items: Names with their items.
    """
    known = dict(items)
    if name in known:
        return known[name]
    close = difflib.get_close_matches(name, known, n=3)
    others = f"closest: {', '.join(close)}" if close else f"there are {', '.join(known) or 'none'}"
    raise InvalidInput(f"no {kind} named {name!r}; {others}")


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
        for item in dataclasses.fields(cast(Any, self)):
            parts.append(f"{item.name}={_short.repr(getattr(self, item.name))}")
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


class Saved(Shown):
    """A record that people meet and keep in files."""

    __slots__ = ()

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the record to a file, and return its path.

        Args:
            path: The file; its suffix chooses the format: .json, .md, .txt or .html.
        """
        from edge_opt.report.save import save

        return save(self, path)
