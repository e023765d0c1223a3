"""The ledger: what is counted, for which layer, under which heading."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from edge_opt.cost.conventions.reading import Layer, Op

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
