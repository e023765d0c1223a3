"""What a trace saw and what it costs: tensors, operators, layers, totals."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any, Literal

from edge_opt.records.shown import Record, Shown

Shape = tuple[int, ...]
Role = Literal["activation", "parameter", "buffer", "input"]


@dataclass(frozen=True, slots=True)
class TensorInfo(Record):
    """One tensor as an operator saw it.

    Attributes:
        shape: Its dimensions.
        dtype: Its type by torch's name, such as "float32".
        nbytes: Its size in bytes; an expanded dimension counts once.
    """

    shape: Shape
    dtype: str
    nbytes: int

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def stored(self) -> int:
        """Elements in memory, which is where arithmetic happens: all of them, unless the tensor is sparse."""
        return self.elements


@dataclass(frozen=True, slots=True)
class SparseInfo(TensorInfo):
    """A sparse tensor.

    Attributes:
        shape: Its dimensions, as if it were dense.
        dtype: Type of its values.
        nbytes: Bytes of its values and indices.
        stored_elements: Values that it stores.
    """

    stored_elements: int

    @property
    def stored(self) -> int:
        return self.stored_elements


@dataclass(frozen=True, slots=True)
class OpSignature(Record):
    """One operator on one set of shapes; calls that look alike share it.

    Attributes:
        op: The operator, such as "aten.convolution".
        names: Names of its parameters.
        args: Its arguments in order, with tensors as `TensorInfo`.
        kwargs: Its arguments by name, with tensors as `TensorInfo`.
        outputs: The tensors that it returns.
        is_view: Whether it only looks at its input in another way and computes nothing.
        scratch_bytes: Bytes of tensors that it makes beside its outputs and drops when it returns.
        strides: One entry per tensor in `inputs`, None for a row-major one; empty where all are.
    """

    op: str
    names: tuple[str, ...]
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    outputs: tuple[TensorInfo, ...]
    is_view: bool
    scratch_bytes: int = 0
    strides: tuple[Shape | None, ...] = ()

    def argument(self, name: str, default: Any = None) -> Any:
        """The value that the call passed for a parameter.

        Args:
            name: Name of the parameter.
            default: What to return when the call left it out.
        """
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
class OpCall(Record):
    """One operator in order of execution: which module ran it, which storages it touched, what was alive then.

    Attributes:
        index: Its place in `Trace.ops`.
        module: Place in `Trace.modules` of the module call that ran it.
        signature: Place in `Trace.signatures` of what it did.
        reads: Places in `Trace.storages`, one per tensor in `OpSignature.inputs`, in that order.
        creates: Places in `Trace.storages` of the storages that it made.
        live_bytes: Bytes of activations alive while it ran, its outputs and scratch included.
    """

    index: int
    module: int
    signature: int
    reads: tuple[int, ...]
    creates: tuple[int, ...]
    live_bytes: int


@dataclass(frozen=True, slots=True)
class StorageInfo(Record):
    """Memory behind one or more tensors.

    Attributes:
        nbytes: Its size in bytes.
        role: What it holds: an activation, a parameter, a buffer or an input.
        born: Index of the operator that made it; None where it was there before the run.
        died: Index of the first operator that ran without it; None where it outlives the run.
    """

    nbytes: int
    role: Role
    born: int | None
    died: int | None


@dataclass(frozen=True, slots=True)
class ModuleCall(Record):
    """One call of one module. Parameters stand with the first call of the module that owns them.

    Attributes:
        index: Its place in `Trace.modules`.
        parent: Place of the module call that made this call; None for the model itself.
        path: Path of the module, such as "layer1.0.conv1"; "" for the model itself.
        kind: Class of the module, such as "Conv2d".
        call_number: 1 for the first call of this module, 2 for the second.
        input_shapes: Shapes of the tensors that it was given.
        output_shapes: Shapes of the tensors that it returned.
        is_leaf: Whether it called no other module.
        params: Parameters of its own, children apart; a shared one counts once in the model.
        param_bytes: Bytes of those parameters.
        trainable_params: Those of the parameters that are trained.
        defined_in: Python module of its class; "" in files that did not record it.
        places: In how many places of the model it hangs.
    """

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
    defined_in: str = ""
    places: int = 1


@dataclass(frozen=True, slots=True)
class Trace(Record):
    """What a model called, on which shapes, in which order.

    Attributes:
        modules: Module calls, in the order they began; the model itself is first.
        signatures: Operators with their shapes; each distinct one once.
        ops: Operator calls, in order of execution.
        storages: Memory that the calls read and made.
        params: Parameters of the model; shared ones count once.
        param_bytes: Bytes of the parameters.
        trainable_params: Parameters that are trained.
        buffer_bytes: Bytes of the buffers, such as running means.
        input_bytes: Bytes of the inputs.
        used_real_tensors: Whether the model really ran, because shapes alone were not enough.
        notes: What a reader should know about how it was traced.
        resident: Bytes of each of the model's own tensors, read or not, in the order in which `model.to(device)` moves
            them; empty in files of versions that did not record it.
        spelled: (operator index, name) of operators that other tools count by the name of the function that was
            called: "sign" is `a @ b`, and "" a function that was kept under another name.
    """

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
    resident: tuple[int, ...] = ()
    spelled: tuple[tuple[int, str], ...] = ()


Status = Literal["priced", "free", "unpriced"]


@dataclass(frozen=True, slots=True)
class OpCost(Record):
    """What an operator costs.

    Attributes:
        macs: Multiplications with an addition, as in products and convolutions.
        other_ops: All arithmetic outside MACs: element-wise, norms, reductions, bias.
        bytes_read: Bytes of the tensors that it reads.
        bytes_written: Bytes of the tensors that it writes.
    """

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
class OpPrice(Record):
    """What the cost rules say about one signature.

    Attributes:
        status: "priced" by a rule, "free" because it does no work, "unpriced" where no rule exists.
        kind: The class of work, such as "conv" or "norm".
        cost: What it costs; zero where it is free or unpriced.
    """

    status: Status
    kind: str
    cost: OpCost


@dataclass(frozen=True, slots=True)
class LayerCost(Record):
    """One module call with the work it does itself; its children have rows of their own.

    Attributes:
        call: The module call.
        cost: Sum over the operators that it ran itself.
        activation_bytes: Bytes of all tensors that these operators made.
        peak_live_bytes: Most bytes of activations alive at once while it ran; those of other layers count too.
        operators: How many operators it ran itself.
        unpriced: How many of them have no price.
    """

    call: ModuleCall
    cost: OpCost
    activation_bytes: int
    peak_live_bytes: int
    operators: int
    unpriced: int


@dataclass(frozen=True, slots=True)
class Operator(Record):
    """One operator call with its price, as `ModelProfile.operators` lists them.

    Attributes:
        index: Its place in the order of execution.
        op: The operator, such as "aten.convolution".
        kind: The class of work, such as "conv" or "norm".
        status: "priced", "free" or "unpriced".
        module: Path of the module that ran it.
        inputs: The tensors that it read.
        outputs: The tensors that it returned.
        cost: What it costs.
        live_bytes: Bytes of activations alive while it ran.
    """

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
class Unpriced(Record):
    """Operators without a rule: their cost is unknown, so every total is a lower bound.

    Attributes:
        op: The operator, such as "mylib.scan".
        module: Path of the module that ran it.
        count: How often it ran there.
    """

    op: str
    module: str
    count: int


@dataclass(frozen=True, slots=True)
class Totals(Shown):
    """The whole model.

    Attributes:
        macs: Multiplications with an addition.
        flops: Every arithmetic operation, two per MAC.
        other_ops: Arithmetic outside MACs.
        params: Parameters; shared ones count once.
        trainable_params: Parameters that are trained.
        param_bytes: Bytes of the parameters.
        buffer_bytes: Bytes of the buffers.
        input_bytes: Bytes of the inputs.
        activation_bytes: Bytes of all tensors made in one forward, also of those that were dropped meanwhile.
        bytes_read: Bytes that operators read, all together.
        bytes_written: Bytes that operators wrote, all together.
        is_lower_bound: Whether an operator had no rule, so that the true figures are higher.
    """

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
class PeakMemory(Shown):
    """Most activation bytes alive at once in an eager run, and where.

    Attributes:
        live_bytes: The peak in bytes.
        op_index: Index of the operator at the peak; None where the model ran no operators.
        module: Path of the module that ran it.
        planner_bytes: The peak in bytes where a memory planner drops each tensor after its last use.
    """

    live_bytes: int
    op_index: int | None
    module: str
    planner_bytes: int


@dataclass(frozen=True, slots=True)
class Cause(Record):
    """One reason why two ways of counting differ.

    Attributes:
        cause: The reason in words.
        difference: By how much it makes them differ: theirs minus ours.
        layers: Paths of the layers where it appears.
    """

    cause: str
    difference: int
    layers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Reconciliation(Shown):
    """Our count, another tool's count of the same trace, and the difference by cause; the causes add up exactly.

    Attributes:
        convention: The other tool, such as "fvcore", or the name of the file that was compared.
        unit: What it counts: "macs" or "flops".
        ours: Our count in that unit.
        theirs: Its count.
        causes: Where the difference comes from, the largest first.
    """

    convention: str
    unit: str
    ours: int
    theirs: int
    causes: tuple[Cause, ...]
