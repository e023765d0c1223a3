"""The one schema of tables: every column with its name, its header, its format and the levels it appears in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal, get_args

from edge_opt import units
from edge_opt.errors import InvalidInput
from edge_opt.records import Level, ModelProfile, OpCost, Shape
from edge_opt.report.predicted import Predicted
from edge_opt.report.rows import Row

Kind = Literal["text", "flag", "number", "count", "bytes", "ratio", "share", "time", "energy"]
LEVELS: tuple[Level, ...] = get_args(Level)

_FORMATS: dict[Kind, Callable[[Any], str]] = {
    "text": str,
    "flag": lambda value: "yes" if value else "no",
    "number": str,
    "count": units.count,
    "bytes": units.size,
    "ratio": units.ratio,
    "share": units.percent,
    "time": units.duration,
    "energy": units.energy,
}


@dataclass(frozen=True, slots=True)
class Column:
    """One column. `get` takes a row and its profile; None is a value that is not known or not defined.

    A column of predictions is left out of a profile that has none.
    """

    name: str
    header: str
    kind: Kind
    get: Callable[[Row, ModelProfile], Any]
    levels: Sequence[Level]
    is_predicted: bool = False

    @property
    def is_integer(self) -> bool:
        return self.kind in ("number", "count", "bytes")

    def text(self, value: Any) -> str:
        """The value for people: scaled, with its unit, a dash where there is none."""
        return units.DASH if value is None else _FORMATS[self.kind](value)


_columns: dict[str, Column] = {}


def register(*columns: Column) -> None:
    """Add columns to the schema, behind those that are there."""
    for column in columns:
        if column.name in _columns:
            raise InvalidInput(f"column {column.name!r} is registered twice; choose another name for the second")
        _columns[column.name] = column


def columns(level: str) -> tuple[Column, ...]:
    """The columns of one level, in order."""
    if level not in LEVELS:
        raise InvalidInput(f"unknown level {level!r}; it is one of {', '.join(LEVELS)}")
    return tuple(column for column in _columns.values() if level in column.levels)


def _shapes(shapes: Sequence[Shape]) -> str:
    return ", ".join(units.shape(shape, times="x") for shape in shapes)


def _cost(pick: Callable[[OpCost], int]) -> Callable[[Row, ModelProfile], Any]:
    return lambda row, _: None if row.cost is None else pick(row.cost)


def _share(part: int | None, whole: int) -> float | None:
    """A part of a whole; None where either is not known or the whole is nothing."""
    return None if part is None or not whole else part / whole


def _macs_share(row: Row, profile: ModelProfile) -> float | None:
    return _share(row.cost.macs if row.cost else None, profile.totals.macs)


def _intensity(row: Row, _: ModelProfile) -> float | None:
    """Not known where an operator has no price: the quotient of two lower bounds bounds nothing."""
    return None if row.cost is None or row.unpriced else row.cost.intensity


def _bytes_share(row: Row, profile: ModelProfile) -> float | None:
    return _share(row.cost.bytes_moved if row.cost else None, profile.totals.bytes_read + profile.totals.bytes_written)


def _predicted(pick: Callable[[Predicted], Any]) -> Callable[[Row, ModelProfile], Any]:
    return lambda row, _: None if row.predicted is None else pick(row.predicted)


_EVERY = LEVELS
_PARTS: tuple[Level, ...] = ("leaves", "modules", "operators")
_CALLS: tuple[Level, ...] = ("leaves", "modules")
_NOT_OPERATORS: tuple[Level, ...] = ("leaves", "modules", "root")

register(
    Column("name", "Model", "text", lambda row, profile: profile.name, ("root",)),
    Column("mode", "Mode", "text", lambda row, profile: profile.mode, ("root",)),
    Column("convention", "Convention", "text", lambda row, profile: profile.convention, ("root",)),
    Column("index", "#", "number", lambda row, _: row.index, ("operators",)),
    Column("op", "Operator", "text", lambda row, _: row.op, ("operators",)),
    Column("kind", "Kind", "text", lambda row, _: row.type, ("operators",)),
    Column("status", "Status", "text", lambda row, _: row.status, ("operators",)),
    Column("module", "Module", "text", lambda row, _: row.path, ("operators",)),
    Column("path", "Module", "text", lambda row, _: row.path, _NOT_OPERATORS),
    Column("type", "Type", "text", lambda row, _: row.type, _NOT_OPERATORS),
    Column("depth", "Depth", "number", lambda row, _: row.depth, ("modules",)),
    Column("is_leaf", "Leaf", "flag", lambda row, _: row.is_leaf, _CALLS),
    Column("call_number", "Call", "number", lambda row, _: row.call_number, ("leaves",)),
    Column("calls", "Calls", "number", lambda row, _: row.calls, ("modules",)),
    Column("in_shape", "Input", "text", lambda row, _: _shapes(row.inputs), _EVERY),
    Column("out_shape", "Output", "text", lambda row, _: _shapes(row.outputs), _EVERY),
    Column("output_elements", "Outputs", "count", lambda row, _: sum(map(prod, row.outputs)), _EVERY),
    Column("params", "Params", "count", lambda row, _: row.params, _NOT_OPERATORS),
    Column("trainable_params", "Trainable", "count", lambda row, _: row.trainable_params, _NOT_OPERATORS),
    Column("param_bytes", "Weights", "bytes", lambda row, _: row.param_bytes, _NOT_OPERATORS),
    Column("buffer_bytes", "Buffers", "bytes", lambda row, profile: profile.totals.buffer_bytes, ("root",)),
    Column("input_bytes", "Inputs", "bytes", lambda row, profile: profile.totals.input_bytes, ("root",)),
    Column("activation_bytes", "Activations", "bytes", lambda row, _: row.activation_bytes, _EVERY),
    Column("macs", "MACs", "count", _cost(lambda cost: cost.macs), _EVERY),
    Column("flops", "FLOPs", "count", _cost(lambda cost: cost.flops), _EVERY),
    Column("other_ops", "Other ops", "count", _cost(lambda cost: cost.other_ops), _EVERY),
    Column("bytes_read", "Read", "bytes", _cost(lambda cost: cost.bytes_read), _EVERY),
    Column("bytes_written", "Written", "bytes", _cost(lambda cost: cost.bytes_written), _EVERY),
    Column("intensity", "FLOPs/byte", "ratio", _intensity, _EVERY),
    Column("peak_live_bytes", "Peak live", "bytes", lambda row, _: row.peak_live_bytes, _NOT_OPERATORS),
    Column("live_bytes", "Live", "bytes", lambda row, _: row.peak_live_bytes, ("operators",)),
    Column("planner_bytes", "Planner bound", "bytes", lambda row, profile: profile.peak.planner_bytes, ("root",)),
    Column("measured_s", "Time", "time", lambda row, _: row.measured_s, _NOT_OPERATORS),
    Column("predicted_s", "Predicted", "time", _predicted(lambda found: found.seconds), _NOT_OPERATORS, True),
    Column("predicted_low_s", "At least", "time", _predicted(lambda found: found.low), _NOT_OPERATORS, True),
    Column("predicted_high_s", "At most", "time", _predicted(lambda found: found.high), _NOT_OPERATORS, True),
    Column("predicted_bound", "Bound by", "text", _predicted(lambda found: found.bound), _NOT_OPERATORS, True),
    Column("predicted_energy_j", "Energy", "energy", _predicted(lambda found: found.energy_j), _NOT_OPERATORS, True),
    Column("operators", "Operators", "number", lambda row, _: row.operators, _NOT_OPERATORS),
    Column("unpriced", "Unpriced", "number", lambda row, _: row.unpriced, _NOT_OPERATORS),
    Column("coverage", "Coverage", "share", lambda row, profile: profile.coverage, ("root",)),
    Column("macs_share", "MACs %", "share", _macs_share, _PARTS),
    Column("params_share", "Params %", "share", lambda row, p: _share(row.params, p.totals.params), _CALLS),
    Column("bytes_share", "Traffic %", "share", _bytes_share, _PARTS),
)
