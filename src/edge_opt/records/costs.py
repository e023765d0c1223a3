"""Records of costs: prices of operators, layers, totals, and differences between ways of counting."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from edge_opt.records.tracing import ModuleCall, TensorInfo

Status = Literal["priced", "free", "unpriced"]


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
