"""Tools that count operators: torch's FlopCounterMode and fvcore."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from edge_opt.cost.conventions import counting
from edge_opt.cost.conventions.counting import CountedModule, CountedOp, Entry, category_of, convention

_CONVOLUTIONS = frozenset(
    f"aten.{name}"
    for name in (
        "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution _convolution".split()
    )
)
_PRODUCTS_OF_TORCH = frozenset(
    f"aten.{name}" for name in "linear mm bmm addmm baddbmm _scaled_mm scaled_dot_product_attention".split()
)


@convention(
    "torch",
    unit="flops",
    description="torch.utils.flop_counter.FlopCounterMode on the meta device: two per MAC of every product",
    by_module=False,
)
def flop_counter_entries(modules: Sequence[CountedModule]) -> Iterator[Entry]:
    """Attention and recurrent layers are split into products on the meta device, so they are counted in full."""
    for module in modules:
        for op in module.ops:
            if op.name in _CONVOLUTIONS | _PRODUCTS_OF_TORCH | counting.RECURRENT_OPS:
                yield Entry(module.call.index, category_of(op, module), 2 * op.macs)


def _convolution(op: CountedOp) -> int:
    """Padding by name, such as "same", is another operator in a jit trace, one without a rule in fvcore."""
    return 0 if isinstance(op.argument("padding"), str) else op.macs


def _norm(op: CountedOp) -> int:
    return op.x.elements * (5 if op.has("weight") else 4)


def _batch_norm(op: CountedOp) -> int:
    """In inference no statistics are gathered: one scale and one shift."""
    if op.argument("training"):
        return _norm(op)
    return op.x.elements * (2 if op.has("weight") else 1)


# Category (None: by the kind of work) and count of each operator that fvcore knows.
_FVCORE_RULES: dict[str, tuple[str | None, Callable[[CountedOp], int]]] = {
    **dict.fromkeys(_CONVOLUTIONS, (None, _convolution)),
    **{f"aten.{name}": (None, lambda op: op.macs) for name in ("linear", "mm", "addmm", "bmm")},
    # Recurrent layers have no rule; a single cell is made of linear layers.
    **{
        f"aten.{name}_cell": (counting.RECURRENT, lambda op: op.macs)
        for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")
    },
    "aten.batch_norm": (counting.NORM, _batch_norm),
    **{f"aten.{name}": (counting.NORM, _norm) for name in ("group_norm", "layer_norm", "instance_norm")},
    "aten.adaptive_avg_pool2d": (counting.POOLING, lambda op: op.x.elements),
    "aten.upsample_nearest2d": (counting.INTERPOLATION, lambda op: op.out.elements),
    **{
        f"aten.{name}": (counting.INTERPOLATION, lambda op: 4 * op.out.elements)
        for name in ("upsample_bilinear2d", "grid_sampler_2d", "grid_sampler_3d")
    },
}


@convention(
    "fvcore",
    unit="macs",
    description="fvcore's FlopCountAnalysis: it prints 'flops', and means one per MAC",
    by_module=False,
)
def fvcore_entries(modules: Sequence[CountedModule]) -> Iterator[Entry]:
    """Attention, recurrent layers, `baddbmm`, biases, activations and most pooling count as nothing.

    Work whose result the model does not return is missing as well, because a jit trace has dropped it. fvcore rounds
    an einsum to four digits and ignores a batch that only the right operand of a matmul has; both are exact here.
    """
    for module in modules:
        for op in module.ops:
            if op.is_used and op.name in _FVCORE_RULES:
                category, rule = _FVCORE_RULES[op.name]
                yield Entry(module.call.index, category or category_of(op, module), rule(op))
