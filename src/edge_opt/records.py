"""Every record of the house: frozen, made of plain values. Tables, files and plots are views of these."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from pathlib import Path

    import pandas as pd

Shape = tuple[int, ...]
Status = Literal["priced", "free", "unpriced"]
Role = Literal["activation", "parameter", "buffer", "input"]
Level = Literal["leaves", "modules", "operators", "root"]

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor as an operator saw it; `nbytes` counts an expanded dimension once."""

    shape: Shape
    dtype: str
    nbytes: int

    @property
    def elements(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class OpSignature:
    """One operator on one set of shapes; calls that look alike share it.

    `args` and `kwargs` are the operator's own, with tensors as `TensorInfo`; `names` are its parameter names.
    """

    op: str
    names: tuple[str, ...]
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    outputs: tuple[TensorInfo, ...]
    is_view: bool
    scratch_bytes: int = 0

    def argument(self, name: str, default: Any = None) -> Any:
        """The value passed for parameter `name`, or `default` when the call left it out."""
        if name in self.names:
            position = self.names.index(name)
            if position < len(self.args):
                return self.args[position]
        return dict(self.kwargs).get(name, default)

    @property
    def inputs(self) -> tuple[TensorInfo, ...]:
        """Every tensor read, in order."""
        return tuple(_tensors(self.args)) + tuple(_tensors(tuple(value for _, value in self.kwargs)))


def _tensors(values: tuple[Any, ...]) -> list[TensorInfo]:
    found: list[TensorInfo] = []
    for value in values:
        if isinstance(value, TensorInfo):
            found.append(value)
        elif isinstance(value, tuple):
            found.extend(_tensors(value))
    return found


@dataclass(frozen=True, slots=True)
class OpCall:
    """One operator in order of execution: which module ran it, which storages it touched, what was alive then.

    `reads` has one storage per tensor in `OpSignature.inputs`, in that order.
    """

    index: int
    module: int
    signature: int
    reads: tuple[int, ...]
    creates: tuple[int, ...]
    live_bytes: int


@dataclass(frozen=True, slots=True)
class StorageInfo:
    """Memory behind one or more tensors. `born`, `died`: operator indices, None where that is outside the run."""

    nbytes: int
    role: Role
    born: int | None
    died: int | None


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """One call of one module. Parameters stand with the first call of the module that owns them."""

    index: int
    parent: int | None
    path: str
    kind: str
    call_number: int
    input_shapes: tuple[Shape, ...]
    output_shapes: tuple[Shape, ...]
    is_leaf: bool
    params: int
    param_bytes: int
    trainable_params: int


@dataclass(frozen=True, slots=True)
class Trace:
    """What a model called, on which shapes, in which order."""

    modules: tuple[ModuleCall, ...]
    signatures: tuple[OpSignature, ...]
    ops: tuple[OpCall, ...]
    storages: tuple[StorageInfo, ...]
    params: int
    param_bytes: int
    trainable_params: int
    buffer_bytes: int
    input_bytes: int
    used_real_tensors: bool
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class OpCost:
    """What an operator costs. `other_ops` is all arithmetic outside MACs: element-wise, norms, reductions, bias."""

    macs: int = 0
    other_ops: int = 0
    bytes_read: int = 0
    bytes_written: int = 0

    @property
    def flops(self) -> int:
        """Every arithmetic operation, two per MAC."""
        return 2 * self.macs + self.other_ops

    @property
    def bytes_moved(self) -> int:
        return self.bytes_read + self.bytes_written

    @property
    def intensity(self) -> float | None:
        """FLOPs per byte moved; None where nothing is moved."""
        return self.flops / self.bytes_moved if self.bytes_moved else None

    def __add__(self, other: OpCost) -> OpCost:
        return OpCost(
            self.macs + other.macs,
            self.other_ops + other.other_ops,
            self.bytes_read + other.bytes_read,
            self.bytes_written + other.bytes_written,
        )


@dataclass(frozen=True, slots=True)
class OpPrice:
    """The verdict of the cost rules on one signature; `kind` is the class of work, such as "conv" or "norm"."""

    status: Status
    kind: str
    cost: OpCost


@dataclass(frozen=True, slots=True)
class LayerCost:
    """One module call with the work it does itself; its children have rows of their own."""

    call: ModuleCall
    cost: OpCost
    activation_bytes: int
    peak_live_bytes: int
    operators: int
    unpriced: int


@dataclass(frozen=True, slots=True)
class Operator:
    """One operator call with its price, as `ModelProfile.operators` lists them."""

    index: int
    op: str
    kind: str
    status: Status
    module: str
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    cost: OpCost
    live_bytes: int


@dataclass(frozen=True, slots=True)
class Unpriced:
    """Operators without a rule: their cost is unknown, so every total is a lower bound."""

    op: str
    module: str
    count: int


@dataclass(frozen=True, slots=True)
class Totals:
    """The whole model. `is_lower_bound` is set when an operator had no rule."""

    macs: int
    flops: int
    other_ops: int
    params: int
    trainable_params: int
    param_bytes: int
    buffer_bytes: int
    input_bytes: int
    activation_bytes: int
    bytes_read: int
    bytes_written: int
    is_lower_bound: bool

    @property
    def intensity(self) -> float | None:
        """FLOPs per byte moved; None where nothing is moved."""
        moved = self.bytes_read + self.bytes_written
        return self.flops / moved if moved else None


@dataclass(frozen=True, slots=True)
class PeakMemory:
    """Most activation bytes alive at once in an eager run, and where.

    `planner_bytes` is what a memory planner could reach by dropping each tensor after its last use.
    """

    live_bytes: int
    op_index: int | None
    module: str
    planner_bytes: int


@dataclass(frozen=True, slots=True)
class Cause:
    """One reason why two ways of counting differ, and by how much (theirs minus ours)."""

    cause: str
    difference: int
    layers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Reconciliation:
    """Our count, another tool's count of the same trace, and the difference by cause; the causes add up exactly."""

    convention: str
    unit: str
    ours: int
    theirs: int
    causes: tuple[Cause, ...]


@dataclass(frozen=True, slots=True)
class ModelProfile:
    """What a model costs: the trace, its prices, and the views people ask for."""

    name: str
    mode: Literal["eval", "train"]
    convention: str
    trace: Trace
    prices: tuple[OpPrice, ...]
    layers: tuple[LayerCost, ...]
    totals: Totals
    peak: PeakMemory
    unpriced: tuple[Unpriced, ...]
    schema_version: int = field(default=SCHEMA_VERSION)

    @property
    def peak_activation_bytes(self) -> int:
        """Most bytes of activations alive at once; weights and inputs are apart."""
        return self.peak.live_bytes

    @property
    def coverage(self) -> float:
        """Share of operator calls that are priced or free; 1.0 means that nothing was left out."""
        missing = sum(item.count for item in self.unpriced)
        return 1.0 - missing / len(self.trace.ops) if self.trace.ops else 1.0

    @property
    def operators(self) -> tuple[Operator, ...]:
        """Every operator call in order of execution, free ones included."""
        trace = self.trace
        return tuple(
            Operator(
                call.index,
                trace.signatures[call.signature].op,
                self.prices[call.signature].kind,
                self.prices[call.signature].status,
                trace.modules[call.module].path,
                trace.signatures[call.signature].inputs,
                trace.signatures[call.signature].outputs,
                self.prices[call.signature].cost,
                call.live_bytes,
            )
            for call in trace.ops
        )

    def to_dataframe(self, level: Level = "leaves") -> pd.DataFrame:
        """The profile as a table: one row per leaf call, module, operator, or one for the whole model."""
        from edge_opt.report.tables import dataframe

        return dataframe(self, level)

    def save(self, path: str | Path, level: Level = "leaves") -> Path:
        """Write the profile; the suffix chooses the format: .json (everything), .csv, .md or .txt (one table)."""
        from edge_opt.report.writers import save

        return save(self, path, level)

    def __str__(self) -> str:
        from edge_opt.report.terminal import render

        return render(self)
