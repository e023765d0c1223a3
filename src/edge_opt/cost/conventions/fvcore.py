"""How fvcore counts: the operators of a jit trace, one per MAC, with rates of its own for norms and interpolation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import floor, prod

from edge_opt.cost.conventions.ledger import INTERPOLATION, NORM, POOLING, RECURRENT, Entry, Layer, Op, subject_of
from edge_opt.cost.conventions.reconciliation import convention

# The two einsums fvcore knows itself, abc,abd->acd and abc,adc->adb, by the order torch brings their axes into.
_KNOWN_EINSUMS = (((0, 2, 3, 1), (0, 3, 2, 1)), ((0, 3, 1, 2), (0, 1, 3, 2)))


def _macs(op: Op) -> int:
    return op.macs


def _convolution(op: Op) -> int:
    """Padding by name, such as "same", is another operator in a jit trace, which it does not know."""
    return 0 if isinstance(op.argument("padding"), str) else op.macs


def _product(op: Op) -> int:
    """`a @ b` by the left operand as it was written, which leaves out a batch that only the right one has."""
    if op.written == "matmul":
        left, right = op.operands
        return prod(left) * right[-1]
    if op.written == "einsum" and op.permutations not in _KNOWN_EINSUMS:
        # Read from the text of numpy's einsum_path, which prints four digits.
        return floor(float(f"{2 * op.macs:.3e}") / 2)
    return op.macs


def _norm(op: Op) -> int:
    return op.x.elements * (5 if op.has("weight") else 4)


def _batch_norm(op: Op) -> int:
    """Without statistics to gather: one scale and one shift."""
    if op.argument("training"):
        return _norm(op)
    return op.x.elements * (2 if op.has("weight") else 1)


def _per_input(op: Op) -> int:
    return op.x.elements


def _per_output(op: Op) -> int:
    return op.out.elements


def _four_per_output(op: Op) -> int:
    return 4 * op.out.elements


_CONVOLUTIONS = "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution _convolution"
_RULES: dict[str, tuple[str | None, Callable[[Op], int]]] = {
    **{f"aten.{name}": (None, _convolution) for name in _CONVOLUTIONS.split()},
    **{f"aten.{name}": (None, _macs) for name in ("linear", "mm", "addmm")},
    "aten.bmm": (None, _product),
    # Recurrent layers are opaque to it; a single cell is made of linears.
    **{f"aten.{name}_cell": (RECURRENT, _macs) for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")},
    "aten.batch_norm": (NORM, _batch_norm),
    "aten.group_norm": (NORM, _norm),
    "aten.layer_norm": (NORM, _norm),
    "aten.instance_norm": (NORM, _norm),
    "aten.adaptive_avg_pool2d": (POOLING, _per_input),
    "aten.upsample_nearest2d": (INTERPOLATION, _per_output),
    "aten.upsample_bilinear2d": (INTERPOLATION, _four_per_output),
    "aten.grid_sampler_2d": (INTERPOLATION, _four_per_output),
    "aten.grid_sampler_3d": (INTERPOLATION, _four_per_output),
}


@convention(
    "fvcore",
    unit="macs",
    description="fvcore's FlopCountAnalysis: it prints 'flops', and means one per MAC",
    by_module=False,
)
def entries(layers: Sequence[Layer]) -> Iterator[Entry]:
    """Attention, recurrent layers, `baddbmm`, biases, activations and most pooling count as nothing.

    So does what the model computes and does not return: a jit trace has lost it.
    An einsum of three operands or more is rounded as a whole by fvcore, and pair by pair here.
    """
    for layer in layers:
        for op in layer.ops:
            if op.is_used and op.name in _RULES:
                subject, rule = _RULES[op.name]
                yield Entry(layer.call.index, subject or subject_of(op, layer), rule(op))
