"""How thop counts (the maintained fork, ultralytics-thop): by the class of a module, and products between modules."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from math import prod

from edge_opt.cost.conventions.ledger import (
    ACTIVATION,
    INTERPOLATION,
    NORM,
    POOLING,
    RECURRENT,
    RECURRENT_OPS,
    SOFTMAX,
    Entry,
    Layer,
    Op,
    attention_in,
    per_axis,
    recurrent_cells,
    recurrent_rows,
    subject_of,
)
from edge_opt.cost.conventions.reconciliation import convention
from edge_opt.cost.pointwise import adaptive_taps

Counted = tuple[str, int]

# Products it sees outside its own layers. A bare mm may be `torch.mm`, which it does not see; `@` is likelier.
_FUNCTIONAL = frozenset(f"aten.{name}" for name in ("linear", "mm", "bmm", "mv", "dot", "scaled_dot_product_attention"))


def _dense(layer: Layer, op: Op) -> Iterator[Counted]:
    """The MACs of the layer's operator, as we count them."""
    yield subject_of(op, layer), op.macs


def _norm(layer: Layer, op: Op) -> Iterator[Counted]:
    yield NORM, op.x.elements * (4 if op.has("weight") else 2)


def _prelu(layer: Layer, op: Op) -> Iterator[Counted]:
    yield ACTIVATION, op.x.elements


def _softmax_ops(rows: int, width: int) -> int:
    """Exponentials, additions, divisions."""
    return rows * (width + max(width - 1, 0) + width)


def _softmax(layer: Layer, op: Op) -> Iterator[Counted]:
    width = op.x.shape[op.argument("dim")] if op.x.shape else 1
    rows = op.x.elements // width if width else 0
    extra = {"Softmin": op.x.elements, "LogSoftmax": rows}.get(layer.kind, 0)
    yield SOFTMAX, _softmax_ops(rows, width) + extra


def _average_pool(layer: Layer, op: Op) -> Iterator[Counted]:
    """One addition per tap, taps on counted padding included, and one division per output."""
    dims = int(op.name[-2])
    kernel = per_axis(op.argument("kernel_size"), dims)
    stride = per_axis(op.argument("stride") or kernel, dims)
    padding = per_axis(op.argument("padding", 0), dims)
    margins = padding if op.argument("count_include_pad", True) else (0,) * dims
    taps = 1
    for size, count, k, s, p, margin in zip(
        op.x.shape[-dims:], op.out.shape[-dims:], kernel, stride, padding, margins, strict=True
    ):
        starts = [index * s - p for index in range(count)]
        taps *= sum(max(min(start + k, size + margin) - max(start, -margin), 0) for start in starts)
    yield POOLING, prod(op.x.shape[:-dims]) * taps + op.out.elements


def _adaptive_pool(layer: Layer, op: Op) -> Iterator[Counted]:
    taps = prod(adaptive_taps(size, out) for size, out in zip(op.x.shape, op.out.shape, strict=True))
    yield POOLING, taps + op.out.elements


def _upsample(rate: int) -> Callable[[Layer, Op], Iterator[Counted]]:
    def rule(layer: Layer, op: Op) -> Iterator[Counted]:
        yield INTERPOLATION, rate * op.out.elements

    return rule


def _recurrent(layer: Layer, op: Op) -> Iterator[Counted]:
    """Gate sums, biases, products of gates and states; activations are free."""
    total = 0
    for cell in recurrent_cells(op):
        gate = cell.hidden * (cell.inputs + cell.recurrent + 1 + (2 if cell.has_bias else 0))
        # LSTM: c = f·c + i·g and o·tanh(c); GRU: r·(…) and h = (1 − z)·n + z·h.
        updates = 0 if cell.gates == 1 else 4
        total += cell.gates * gate + cell.hidden * (updates + cell.projection)
    yield RECURRENT, total * recurrent_rows(op)


def _attention(layer: Layer, op: Op) -> Iterator[Counted]:
    """Projections, both products, softmax."""
    for part in layer.ops:
        if part.macs:
            yield subject_of(part, layer), part.macs
    found = attention_in(layer)
    if found is not None:
        yield SOFTMAX, _softmax_ops(found.batch * found.heads * found.queries, found.keys)


Rule = Callable[[Layer, Op], Iterator[Counted]]
_UPSAMPLE_RATES = {"linear1d": 5, "bilinear2d": 11, "bicubic2d": 259, "trilinear3d": 31}

# A rule applies where the class name matches and the layer itself runs one of the operators.
_RULES: tuple[tuple[str, str, Rule], ...] = (
    (r"^MultiheadAttention$", "linear", _attention),
    (r"Conv(Transpose)?[123][dD]", "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d", _dense),
    (r"Linear$", "linear", _dense),
    (r"^Bilinear$", "bilinear", _dense),
    (r"(Batch|Instance|Layer|Group|RMS)Norm", "batch_norm instance_norm layer_norm group_norm rms_norm", _norm),
    (r"PReLU$", "prelu", _prelu),
    (r"^(Log)?Softmax|^Softmin$", "softmax log_softmax", _softmax),
    (r"^AvgPool[123]d", "avg_pool1d avg_pool2d avg_pool3d", _average_pool),
    (r"^AdaptiveAvgPool", "adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d", _adaptive_pool),
    *((r"^Upsampl", f"upsample_{name}", _upsample(rate)) for name, rate in _UPSAMPLE_RATES.items()),
    (r"(LSTM|GRU|RNN)(Cell)?$", " ".join(name.removeprefix("aten.") for name in sorted(RECURRENT_OPS)), _recurrent),
)


def _rule_for(layer: Layer) -> tuple[Rule, Op] | None:
    for pattern, names, rule in _RULES:
        op = layer.first(*(f"aten.{name}" for name in names.split()))
        if op is not None and re.search(pattern, layer.kind):
            return rule, op
    return None


@convention(
    "thop",
    unit="macs",
    description="ultralytics-thop's profile: MACs, with norms, pooling and softmax at rates of its own",
    by_module=True,
)
def entries(layers: Sequence[Layer]) -> Iterator[Entry]:
    """Layers of classes it has a rule for; outside them `@`, `bmm`, `einsum`, `F.linear` and fused attention.

    thop goes by inheritance, of which a trace knows only the class name: a class counts as a layer of torch's when
    its name says so (`StdConv2d`, `LayerNorm2d`) and it runs that operator itself.
    """
    is_covered: list[bool] = []  # by its own rule, or by that of a module around it
    for layer in layers:
        found = _rule_for(layer)
        parent = layer.call.parent
        is_covered.append(found is not None or (parent is not None and is_covered[parent]))
        if found is not None:
            rule, op = found
            for subject, amount in rule(layer, op):
                yield Entry(layer.call.index, subject, amount)
        elif not is_covered[-1]:
            for op in layer.ops:
                if op.name in _FUNCTIONAL:
                    yield Entry(layer.call.index, subject_of(op, layer), op.macs)
