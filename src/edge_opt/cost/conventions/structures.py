"""What a layer's operators tell of its structure: kernel sizes, recurrent cells, attention heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from edge_opt.cost.conventions.reading import Layer, Op
from edge_opt.records import TensorInfo


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
