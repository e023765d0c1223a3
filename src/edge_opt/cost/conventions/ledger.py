"""What a convention reads of a trace, and the counts it writes down."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Literal

from edge_opt.records.costs import ModuleCall, OpCall, OpPrice, OpSignature, Shape, TensorInfo, Trace
from edge_opt.records.profiles import ModelProfile

Unit = Literal["macs", "flops"]

CONVOLUTION = "convolutions"
LINEAR = "linear layers"
PRODUCT = "matrix products"
ATTENTION = "attention"
RECURRENT = "recurrent layers"
BIAS = "bias"
NORM = "normalization"
POOLING = "pooling"
ACTIVATION = "activation"
SOFTMAX = "softmax"
INTERPOLATION = "interpolation"
EMBEDDING = "embedding"
ELEMENTWISE = "element-wise arithmetic"
FIRST_ADDITION = "a sum of n terms as n - 1 additions"
AVERAGING = "averaged over the batch"

# Work that is made of multiply-accumulates.
DENSE = frozenset((CONVOLUTION, LINEAR, PRODUCT, ATTENTION, RECURRENT))

# The heading of an operator's MACs and that of its other work, by the kind its cost rule gives it.
_HEADINGS = {
    "conv": (CONVOLUTION, BIAS),
    "matmul": (PRODUCT, BIAS),
    "attention": (ATTENTION, SOFTMAX),
    "recurrent": (RECURRENT, RECURRENT),
    "norm": (NORM, NORM),
    "pooling": (POOLING, POOLING),
    "activation": (ACTIVATION, ACTIVATION),
    "softmax": (SOFTMAX, SOFTMAX),
    "interpolation": (INTERPOLATION, INTERPOLATION),
    "embedding": (EMBEDDING, EMBEDDING),
    "elementwise": (ELEMENTWISE, ELEMENTWISE),
}


@dataclass(frozen=True, slots=True)
class Entry:
    """So much counted for one layer (the index of its module call) under one heading."""

    layer: int
    subject: str
    amount: int


def subject_of(op: Op, layer: Layer) -> str:
    """The heading of an operator's MACs; the two products inside a MultiheadAttention are its attention."""
    if op.name == "aten.linear":
        return LINEAR
    if layer.kind == "MultiheadAttention" and op.name in ("aten.bmm", "aten.baddbmm"):
        return ATTENTION
    return _headings(op)[0]


def _headings(op: Op) -> tuple[str, str]:
    return _HEADINGS.get(op.price.kind, (op.price.kind, op.price.kind))


def our_entries(layers: Sequence[Layer], unit: Unit) -> Iterator[Entry]:
    """Our own count of the same layers: MACs alone, or every operation with two per MAC."""
    for layer in layers:
        for op in layer.ops:
            cost = op.price.cost
            if cost.macs:
                yield Entry(layer.call.index, subject_of(op, layer), cost.macs if unit == "macs" else 2 * cost.macs)
            if cost.other_ops and unit == "flops":
                yield Entry(layer.call.index, _headings(op)[1], cost.other_ops)


def by_layer(entries: Iterable[Entry], count: int) -> tuple[int, ...]:
    """What the entries come to for each of `count` layers."""
    sums = [0] * count
    for entry in entries:
        sums[entry.layer] += entry.amount
    return tuple(sums)


Written = Literal["as is", "matmul", "einsum"]

# What torch makes of `a @ b` and of `einsum` before it reaches the batched product.
_MATMUL = ("aten.expand", "aten.reshape", "aten.expand", "aten.reshape")
_EINSUM = ("aten.permute", "aten.reshape", "aten.permute", "aten.reshape")
_REACH = 32  # more views than an einsum of two operands makes


@dataclass(frozen=True, slots=True)
class Op:
    """One operator call; `is_used` is unset when the model's result does not depend on it.

    A batched product also tells how it was written, and into which order an einsum brought its axes first.
    """

    name: str
    signature: OpSignature
    price: OpPrice
    is_used: bool
    written: Written = "as is"
    operands: tuple[Shape, ...] = ()
    permutations: tuple[tuple[int, ...], ...] = ()

    @property
    def macs(self) -> int:
        return self.price.cost.macs

    @property
    def x(self) -> TensorInfo:
        """The first tensor read."""
        return self.signature.inputs[0]

    @property
    def out(self) -> TensorInfo:
        """The first tensor made."""
        return self.signature.outputs[0]

    def argument(self, name: str, default: Any = None) -> Any:
        return self.signature.argument(name, default)

    def has(self, name: str) -> bool:
        """Whether a tensor was passed for parameter `name`."""
        return isinstance(self.argument(name), TensorInfo)


@dataclass(frozen=True, slots=True)
class Layer:
    """One module call with its own operators; its children are layers of their own."""

    call: ModuleCall
    ops: tuple[Op, ...]
    reads_parameters: bool

    @property
    def kind(self) -> str:
        return self.call.kind

    def first(self, *names: str) -> Op | None:
        """The first of its operators that has one of these names."""
        return next((op for op in self.ops if op.name in names), None)

    def first_of(self, kind: str) -> Op | None:
        """The first of its operators that does this kind of work."""
        return next((op for op in self.ops if op.price.kind == kind), None)


def layers_of(profile: ModelProfile) -> tuple[Layer, ...]:
    """Every module call of the trace, in order; an operator stands with the module that ran it."""
    own: list[list[OpCall]] = [[] for _ in profile.trace.modules]
    for call in profile.trace.ops:
        own[call.module].append(call)
    used = _used_operators(profile.trace)
    return tuple(
        Layer(
            module,
            tuple(_op(profile, calls, position, used) for position in range(len(calls))),
            any(profile.trace.storages[number].role == "parameter" for call in calls for number in call.reads),
        )
        for module, calls in zip(profile.trace.modules, own, strict=True)
    )


def _used_operators(trace: Trace) -> frozenset[int]:
    """The operators that what is left after the run depends on; the others computed something and dropped it."""
    needed = {number for number, storage in enumerate(trace.storages) if storage.died is None}
    used = set()
    for call in reversed(trace.ops):
        writes = call.reads[:1] if trace.signatures[call.signature].op.endswith("_") else ()
        if not needed.isdisjoint((*call.creates, *writes)):
            used.add(call.index)
            needed.update(call.reads)
    return frozenset(used)


def _op(profile: ModelProfile, calls: Sequence[OpCall], position: int, used: frozenset[int]) -> Op:
    call = calls[position]
    signature = profile.trace.signatures[call.signature]
    # An operator that works in place does the same work as its twin.
    plain = Op(signature.op.removesuffix("_"), signature, profile.prices[call.signature], call.index in used)
    if plain.name != "aten.bmm":
        return plain
    before = [profile.trace.signatures[earlier.signature] for earlier in calls[max(position - _REACH, 0) : position]]
    names = tuple(earlier.op for earlier in before[-4:])
    if names == _MATMUL:
        return replace(plain, written="matmul", operands=(before[-4].inputs[0].shape, before[-2].inputs[0].shape))
    operands = tuple(tensor.shape for tensor in signature.inputs)
    if names == _EINSUM:
        return replace(plain, written="einsum", operands=operands, permutations=_permutations(before[:-4]))
    return replace(plain, operands=operands)


def _permutations(before: Sequence[OpSignature]) -> tuple[tuple[int, ...], ...]:
    """How einsum ordered the axes of its two operands: kept axes first, then the summed ones."""
    found: list[tuple[int, ...]] = []
    for signature in reversed(before):
        if signature.op not in ("aten.permute", "aten.unsqueeze") or len(found) == 2:
            break
        if signature.op == "aten.permute":
            found.append(signature.argument("dims"))
    return tuple(reversed(found))


def per_axis(value: int | Sequence[int], dims: int) -> tuple[int, ...]:
    """A size in each dimension; one number stands for all of them."""
    values = (value,) if isinstance(value, int) else tuple(value)
    return values if len(values) == dims else values * dims


@dataclass(frozen=True, slots=True)
class Cell:
    """One layer and direction of a recurrent operator."""

    inputs: int
    hidden: int
    recurrent: int
    projection: int
    gates: int
    has_bias: bool


_GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
RECURRENT_OPS = frozenset(f"aten.{name}{suffix}" for name in _GATES for suffix in ("", "_cell"))


def recurrent_cells(op: Op) -> tuple[Cell, ...]:
    """The cells of a recurrent operator: layer by layer, both directions of a layer side by side."""
    gates = _GATES[op.name.removeprefix("aten.").removesuffix("_cell")]
    if op.name.endswith("_cell"):
        return (_cell(op.argument("w_ih"), op.argument("w_hh"), gates, op.has("b_ih"), None),)
    weights = op.argument("params")
    has_bias = bool(op.argument("has_biases"))
    count = op.argument("num_layers") * (2 if op.argument("bidirectional") else 1)
    size = len(weights) // count
    plain = 4 if has_bias else 2
    groups = [weights[start : start + size] for start in range(0, len(weights), size)]
    return tuple(_cell(group[0], group[1], gates, has_bias, group[plain] if size > plain else None) for group in groups)


def _cell(w_ih: TensorInfo, w_hh: TensorInfo, gates: int, has_bias: bool, w_hr: TensorInfo | None) -> Cell:
    return Cell(
        inputs=w_ih.shape[1],
        hidden=w_ih.shape[0] // gates,
        recurrent=w_hh.shape[1],
        projection=w_hr.shape[0] if w_hr else 0,
        gates=gates,
        has_bias=has_bias,
    )


def recurrent_rows(op: Op) -> int:
    """How often each cell is evaluated: batch times steps; packed data are already flat."""
    return prod(op.x.shape[:-1])


@dataclass(frozen=True, slots=True)
class Attention:
    """The attention inside a layer: scores of `queries` against `keys` for every batch entry and head."""

    batch: int
    heads: int
    queries: int
    keys: int
    head_width: int


def attention_in(layer: Layer) -> Attention | None:
    """The attention a layer runs itself on its first input: fused, or as two products with a softmax between."""
    if not layer.call.input_shapes:
        return None
    rows = prod(layer.call.input_shapes[0][:-1])
    fused = layer.first("aten.scaled_dot_product_attention")
    if fused is not None:
        *lines, queries, head_width = fused.x.shape
        keys = fused.argument("key").shape[-2]
    else:
        scores = layer.first("aten.bmm", "aten.baddbmm")
        if scores is None:
            return None
        *lines, queries, keys = scores.out.shape
        head_width = scores.signature.inputs[-1].shape[-2]
    batch = max(rows // queries, 1)
    return Attention(batch, prod(lines) // batch, queries, keys, head_width)
