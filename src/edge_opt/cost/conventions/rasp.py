"""How rasp counts: multiplications and additions apart, layer by layer, in the rows of its table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod

from edge_opt.cost.conventions.ledger import (
    ACTIVATION,
    BIAS,
    CONVOLUTION,
    FIRST_ADDITION,
    NORM,
    POOLING,
    Entry,
    our_entries,
    subject_of,
)
from edge_opt.cost.conventions.reading import Layer, Op
from edge_opt.cost.conventions.registry import convention
from edge_opt.cost.conventions.structures import per_axis

Counted = Iterator[tuple[str, int]]
Rule = Callable[[Layer, Op], Counted]

_DIMS = ("1d", "2d", "3d")


def _sums(layer: Layer, op: Op) -> Counted:
    """A sum of K products per output: K multiplications, K - 1 additions, and one for the bias."""
    yield subject_of(op, layer), 2 * op.macs
    yield FIRST_ADDITION, -op.out.elements
    yield BIAS, op.out.elements if op.has("bias") else 0


def _transposed(layer: Layer, op: Op) -> Counted:
    """Every product is added to an output that starts at zero."""
    yield CONVOLUTION, 2 * op.macs
    yield BIAS, op.out.elements if op.has("bias") else 0


def _batch_norm(layer: Layer, op: Op) -> Counted:
    yield NORM, op.x.elements * (4 if op.has("weight") else 2)


def _pool(layer: Layer, op: Op) -> Counted:
    """K - 1 additions or comparisons per output; an average multiplies each tap too. The last window stands for all."""
    dims = int(op.name.removesuffix("_with_indices")[-2])
    if "adaptive" in op.name:
        sizes = zip(op.x.shape[-dims:], op.out.shape[-dims:], strict=True)
        taps = prod(size - (windows - 1) * size // windows for size, windows in sizes)
    else:
        taps = prod(per_axis(op.argument("kernel_size"), dims))
    yield POOLING, op.out.elements * (taps - 1 + (taps if "avg" in op.name else 0))


def _activation(layer: Layer, op: Op) -> Counted:
    yield ACTIVATION, op.x.elements


def _nothing(layer: Layer, op: Op) -> Counted:
    yield from ()


_RULES: dict[str, Rule] = {
    **{f"aten.conv{dims}": _sums for dims in _DIMS},
    "aten._convolution_mode": _sums,
    "aten.linear": _sums,
    **{f"aten.conv_transpose{dims}": _transposed for dims in _DIMS},
    "aten.batch_norm": _batch_norm,
    **{
        f"aten.{name}_pool{dims}": _pool
        for name in ("max", "avg", "adaptive_max", "adaptive_avg")
        for dims in (*_DIMS, *(f"{dims}_with_indices" for dims in _DIMS))
    },
    **{f"aten.{name}dropout": _nothing for name in ("", "feature_", "alpha_", "feature_alpha_")},
}


def _rule(op: Op) -> Rule | None:
    return _RULES.get(op.name) or (_activation if op.price.kind == "activation" else None)


def _by_convention(layer: Layer) -> Counted | None:
    """The layer by rasp's own formulas, if it is one operator they know with nothing else that computes."""
    if not layer.call.is_leaf and not layer.kind.startswith("Parametrized"):
        return None
    ruled = [(rule, op) for op in layer.ops if (rule := _rule(op)) is not None]
    rest = [op.price for op in layer.ops if _rule(op) is None]
    if len(ruled) != 1 or any(price.cost.flops or price.status == "unpriced" for price in rest):
        return None
    rule, op = ruled[0]
    return rule(layer, op)


def _has_row(layer: Layer) -> bool:
    """Leaves, and what a module with children does itself, where that is MACs or uses parameters."""
    return layer.call.is_leaf or layer.reads_parameters or any(op.macs for op in layer.ops)


@convention(
    "rasp",
    unit="flops",
    description="the total of the flops column of rasp.stat: K multiplications and K - 1 additions for K products",
    by_module=True,
)
def entries(layers: Sequence[Layer]) -> Iterator[Entry]:
    """What its formulas do not cover (attention, recurrent layers, other norms) is counted as we count it.

    Element-wise work between layers, such as a residual add, has no row in its table.
    """
    for layer in layers:
        if not _has_row(layer):
            continue
        counted = _by_convention(layer)
        if counted is None:
            yield from our_entries((layer,), "flops")
        else:
            for subject, amount in counted:
                yield Entry(layer.call.index, subject, amount)
