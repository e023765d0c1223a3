"""Records of a trace and its costs: tensors, operators, layers, totals."""

from __future__ import annotations

from math import prod
from typing import Any, Literal

from edge_opt.records.fields import Record, Shown, field, record

Shape = tuple[int, ...]
Role = Literal["activation", "parameter", "buffer", "input"]
OUTSIDE = "outside torch"  # begins the name of the operator that stands for work in NumPy, another thread or C


@record
class TensorInfo(Record):
    """One tensor as an operator saw it."""

    shape: Shape = field("Its dimensions.")
    dtype: str = field('Its type by torch\'s name, such as "float32".')
    nbytes: int = field("Its size in bytes; an expanded dimension counts once.")

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def stored(self) -> int:
        """Elements in memory, which is where arithmetic happens: all of them, unless the tensor is sparse."""
        return self.elements


@record
class SparseInfo(TensorInfo):
    """A sparse tensor. `shape` is that of the dense tensor; `nbytes` are those of its values and indices."""

    stored_elements: int = field("Values that it stores.")

    @property
    def stored(self) -> int:
        return self.stored_elements


@record
class OpSignature(Record):
    """One operator on one set of shapes; calls that look alike share it."""

    op: str = field('The operator, such as "aten.convolution".')
    names: tuple[str, ...] = field("Names of its parameters.")
    args: tuple[Any, ...] = field("Its arguments in order, with tensors as `TensorInfo`.")
    kwargs: tuple[tuple[str, Any], ...] = field("Its arguments by name, with tensors as `TensorInfo`.")
    outputs: tuple[TensorInfo, ...] = field("The tensors that it returns.")
    is_view: bool = field("Whether it only looks at its input in another way and computes nothing.")
    scratch_bytes: int = field("Bytes that it allocates beside its outputs, and frees.", default=0)
    strides: tuple[Shape | None, ...] = field("Strides of each input, None: row-major; empty: all are.", default=())

    def argument(self, name: str, default: Any = None) -> Any:
        """Return the value that the call passed for a parameter.

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
    tensors: list[TensorInfo] = []
    for value in values:
        if isinstance(value, TensorInfo):
            tensors.append(value)
        elif isinstance(value, tuple):
            tensors.extend(_tensors(value))
    return tensors


@record
class OpCall(Record):
    """One operator in order of execution: which module ran it, which storages it touched, what was alive then."""

    index: int = field("Its place in `Trace.ops`.")
    module: int = field("Place in `Trace.modules` of the module call that ran it.")
    signature: int = field("Place in `Trace.signatures` of what it did.")
    reads: tuple[int, ...] = field("Places in `Trace.storages`, one per tensor in `OpSignature.inputs`, in that order.")
    creates: tuple[int, ...] = field("Places in `Trace.storages` of the storages that it made.")
    live_bytes: int = field("Bytes of activations alive while it ran, its outputs and scratch included.")


@record
class StorageInfo(Record):
    """Memory behind one or more tensors."""

    nbytes: int = field("Its size in bytes.")
    role: Role = field("What it holds: an activation, a parameter, a buffer or an input.")
    born: int | None = field("Index of the operator that made it; None where it was there before the run.")
    died: int | None = field("Index of the first operator that ran without it; None where it outlives the run.")


@record
class ModuleCall(Record):
    """One call of one module. Parameters stand with the first call of the module that owns them."""

    index: int = field("Its place in `Trace.modules`.")
    parent: int | None = field("Place of the module call that made this call; None for the model itself.")
    path: str = field('Path of the module, such as "layer1.0.conv1"; "" for the model itself.')
    kind: str = field('Class of the module, such as "Conv2d".')
    call_number: int = field("1 for the first call of this module, 2 for the second.")
    input_shapes: tuple[Shape, ...] = field("Shapes of the tensors that it was given.")
    output_shapes: tuple[Shape, ...] = field("Shapes of the tensors that it returned.")
    is_leaf: bool = field("Whether it called no other module.")
    params: int = field("Parameters of its own, children apart; a shared one counts once in the model.")
    param_bytes: int = field("Bytes of those parameters.")
    trainable_params: int = field("Those of the parameters that are trained.")
    defined_in: str = field('Python module of its class; "" in files that did not record it.', default="")


@record
class Trace(Record):
    """The operators that a model called, with their shapes, in order."""

    modules: tuple[ModuleCall, ...] = field("Module calls, in the order they began; the model itself is first.")
    signatures: tuple[OpSignature, ...] = field("Operators with their shapes; each distinct one once.")
    ops: tuple[OpCall, ...] = field("Operator calls, in order of execution.")
    storages: tuple[StorageInfo, ...] = field("Memory that the calls read and made.")
    params: int = field("Parameters of the model; shared ones count once.")
    param_bytes: int = field("Bytes of the parameters.")
    trainable_params: int = field("Parameters that are trained.")
    buffer_bytes: int = field("Bytes of the buffers, such as running means.")
    input_bytes: int = field("Bytes of the inputs.")
    used_real_tensors: bool = field("Whether the model really ran, because shapes alone were not enough.")
    notes: tuple[str, ...] = field("What a reader should know about how it was traced.", default=())
    moved_tensor_bytes: tuple[int, ...] = field("Bytes of each tensor, in the order of `model.to(device)`.", default=())


Status = Literal["priced", "free", "unpriced"]


@record
class OpCost(Record):
    """The cost of an operator."""

    macs: int = field("Multiplications with an addition, as in products and convolutions.", default=0)
    other_ops: int = field("All arithmetic outside MACs: element-wise, norms, reductions, bias.", default=0)
    bytes_read: int = field("Bytes of the tensors that it reads.", default=0)
    bytes_written: int = field("Bytes of the tensors that it writes.", default=0)

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


@record
class OpPrice(Record):
    """The cost of one signature, by its cost rule."""

    status: Status = field('"priced" by a rule, "free" because it does no work, "unpriced" where no rule exists.')
    kind: str = field('The class of work, such as "conv" or "norm".')
    cost: OpCost = field("What it costs; zero where it is free or unpriced.")


@record
class LayerCost(Record):
    """One module call with the work it does itself; its children have rows of their own."""

    call: ModuleCall = field("The module call.")
    cost: OpCost = field("Sum over the operators that it ran itself.")
    activation_bytes: int = field("Bytes of all tensors that these operators made.")
    peak_live_bytes: int = field("Most bytes of activations alive while it ran, of all layers.")
    operators: int = field("How many operators it ran itself.")
    unpriced: int = field("How many of them have no cost rule.")


@record
class Operator(Record):
    """One operator call with its price, as `ModelProfile.operators` lists them."""

    index: int = field("Its place in the order of execution.")
    op: str = field('The operator, such as "aten.convolution".')
    kind: str = field('The class of work, such as "conv" or "norm".')
    status: Status = field('"priced", "free" or "unpriced".')
    module: str = field("Path of the module that ran it.")
    inputs: tuple[TensorInfo, ...] = field("The tensors that it read.")
    outputs: tuple[TensorInfo, ...] = field("The tensors that it returned.")
    cost: OpCost = field("What it costs.")
    live_bytes: int = field("Bytes of activations alive while it ran.")


@record
class Unpriced(Record):
    """Operators without a rule: their cost is unknown, so every total is a lower bound."""

    op: str = field('The operator, such as "mylib.scan".')
    module: str = field("Path of the module that ran it.")
    count: int = field("How often it ran there.")


@record
class Totals(Shown):
    """The whole model."""

    macs: int = field("Multiplications with an addition.")
    flops: int = field("Every arithmetic operation, two per MAC.")
    other_ops: int = field("Arithmetic outside MACs.")
    params: int = field("Parameters; shared ones count once.")
    trainable_params: int = field("Parameters that are trained.")
    param_bytes: int = field("Bytes of the parameters.")
    buffer_bytes: int = field("Bytes of the buffers.")
    input_bytes: int = field("Bytes of the inputs.")
    activation_bytes: int = field("Bytes of all tensors made in one forward, freed ones included.")
    bytes_read: int = field("Bytes that operators read, all together.")
    bytes_written: int = field("Bytes that operators wrote, all together.")
    is_lower_bound: bool = field("Whether an operator had no rule, so that the true figures are higher.")

    @property
    def intensity(self) -> float | None:
        """FLOPs per byte moved; None where nothing is moved."""
        moved = self.bytes_read + self.bytes_written
        return self.flops / moved if moved else None


@record
class PeakMemory(Shown):
    """Most activation bytes alive at once in an eager run, and where."""

    live_bytes: int = field("The peak in bytes.")
    op_index: int | None = field("Index of the operator at the peak; None where the model ran no operators.")
    module: str = field("Path of the module that ran it.")
    planner_bytes: int = field("The peak in bytes where a memory planner drops each tensor after its last use.")


@record
class Cause(Record):
    """One reason why two ways of counting differ."""

    cause: str = field("The reason in words.")
    difference: int = field("By how much it makes them differ: theirs minus ours.")
    layers: tuple[str, ...] = field("Paths of the layers where it appears.")


@record
class Reconciliation(Shown):
    """Our count, another tool's count of the same trace, and the difference by cause; the causes add up exactly."""

    convention: str = field('The other tool, such as "fvcore", or the name of the file that was compared.')
    unit: str = field('What it counts: "macs" or "flops".')
    ours: int = field("Our count in that unit.")
    theirs: int = field("Its count.")
    causes: tuple[Cause, ...] = field("Where the difference comes from, the largest first.")
