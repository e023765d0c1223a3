"""The columns of a report: one registry, which add-ons extend."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from edge_opt.errors import InvalidInput
from rasp.report import Row

Need = Literal["compute", "timing", "memory"]

# The published order; columns of add-ons follow.
_ORDER = (
    "name", "type", "in_shape", "out_shape", "params", "lat", "net_lat", "lat[%]", "flops", "FLOPS", "mem_r", "mem_w",
    "mem_rw", "macc", "net_dev_mem", "dev_mem_alloc", "dev_max_mem_alloc",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Column:
    """A column: how its value follows from a row, and which argument of `stat` it needs to be on."""

    name: str
    value: Callable[[Row], Any]
    needs: Need | None = None
    is_default: bool = True
    is_label: bool = False


_columns: dict[str, Column] = {}


def add_column(column: Column) -> None:
    """Make a column known. The same one again, as when its module is reloaded, takes its own place."""
    known = _columns.get(column.name)
    if known is not None and _origin(known) != _origin(column):
        raise InvalidInput(f"column {column.name!r} is defined twice: {_origin(known)} and {_origin(column)}")
    _columns[column.name] = column


def columns() -> Mapping[str, Column]:
    """Every known column by name; read-only."""
    return MappingProxyType(_columns)


def _origin(column: Column) -> str:
    return f"{column.value.__module__}.{column.value.__qualname__}"


def split_names(value: str | Iterable[str] | None) -> tuple[str, ...]:
    """Names as the caller wrote them: a sequence, or one comma-separated string.

    >>> split_names("data, sum"), split_names(["macc"]), split_names(None)
    (('data', 'sum'), ('macc',), ())
    """
    if value is None:
        return ()
    names = value.split(",") if isinstance(value, str) else list(value)
    if any(not isinstance(name, str) for name in names):
        raise InvalidInput(f"names must be strings, and these are {names!r}")
    return tuple(name.strip() for name in names)


def choose_columns(
    on: set[Need],
    report_fields: str | Iterable[str] | None = None,
    includes: str | Iterable[str] | None = None,
    excludes: str | Iterable[str] | None = None,
) -> tuple[Column, ...]:
    """The columns of one report: `report_fields` (else the defaults), then `includes`, without `excludes`."""
    asked = dict.fromkeys((*split_names(report_fields), *split_names(includes)))
    unwanted = {_known(name, "excludes").name for name in split_names(excludes)}
    for name in asked:
        column = _known(name, "report_fields and includes")
        if column.needs is not None and column.needs not in on:
            raise InvalidInput(f"column {name!r} needs {column.needs}=True; turn it on, or leave the column out")
    if report_fields is None:
        ranked = sorted(_columns.values(), key=_rank)
        defaults = [c.name for c in ranked if c.is_default and (c.needs is None or c.needs in on)]
        asked = dict.fromkeys((*defaults, *asked))
    chosen = tuple(_columns[name] for name in asked if name not in unwanted)
    if not chosen:
        raise InvalidInput("no column is left: report_fields and includes name none that excludes keeps")
    return chosen


def _rank(column: Column) -> int:
    return _ORDER.index(column.name) if column.name in _ORDER else len(_ORDER)


def _known(name: str, argument: str) -> Column:
    if name in _columns:
        return _columns[name]
    cure = "; `import rasp.addons.energy` adds it" if name == "energy" else ""
    raise InvalidInput(f"{argument} has the unknown column {name!r}{cure}; known are {', '.join(_columns)}")


def _params(row: Row) -> int:
    return sum(node.params for node in row.parts)


def _flops(row: Row) -> int:
    return sum(node.own.flops for node in row.parts)


def _macc(row: Row) -> int:
    return sum(node.own.macc for node in row.parts)


def _bytes_read(row: Row) -> int:
    return sum(node.own.bytes_read for node in row.parts)


def _bytes_written(row: Row) -> int:
    return sum(node.own.bytes_written for node in row.parts)


def _bytes_moved(row: Row) -> int:
    return _bytes_read(row) + _bytes_written(row)


def _milliseconds(row: Row) -> float:
    return row.seconds * 1e3


def _end_milliseconds(row: Row) -> float:
    return row.end_s * 1e3


def _percent(row: Row) -> float:
    return row.share * 100


def _flops_per_s(row: Row) -> float:
    return _flops(row) / row.seconds if row.seconds else math.nan


def _bytes_before(row: Row) -> int | None:
    return row.memory.before_bytes if row.memory is not None else None


def _bytes_allocated(row: Row) -> int | None:
    return row.memory.allocated_bytes if row.memory is not None else None


def _bytes_peak(row: Row) -> int | None:
    return row.memory.peak_bytes if row.memory is not None else None


for _column in (
    Column("name", lambda row: row.name, is_label=True),
    Column("type", lambda row: row.type, is_label=True),
    Column("in_shape", lambda row: row.in_shape, is_label=True),
    Column("out_shape", lambda row: row.out_shape, is_label=True),
    Column("params", _params),
    Column("lat", _milliseconds, "timing"),
    Column("net_lat", _end_milliseconds, "timing"),
    Column("lat[%]", _percent, "timing"),
    Column("FLOPS", _flops_per_s, "timing"),
    Column("net_dev_mem", _bytes_before, "memory"),
    Column("dev_mem_alloc", _bytes_allocated, "memory"),
    Column("dev_max_mem_alloc", _bytes_peak, "memory"),
    Column("flops", _flops, "compute"),
    Column("mem_r", _bytes_read, "compute"),
    Column("mem_w", _bytes_written, "compute"),
    Column("mem_rw", _bytes_moved, "compute"),
    Column("macc", _macc, "compute", is_default=False),
):
    add_column(_column)
