"""How rasp counts: multiplications and additions apart, layer by layer, in the rows of its table.

`rasp.stat` takes its columns from here. Work grows with the batch of N samples, and so does the reading of weights:
each sample reads them again. Operators outside the convention (attention, recurrent layers, other norms, element-wise
arithmetic) keep our own costs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import prod
from typing import Literal, NamedTuple

import torch

from edge_opt.cost.conventions.counting import (
    Category,
    CountedModule,
    CountedOp,
    Entry,
    category_of,
    convention,
    counted_modules,
    our_entries,
    per_axis,
)
from edge_opt.records.costs import TensorInfo
from edge_opt.records.profiles import ModelProfile

Release = Literal["latest", "2020"]
RELEASES: tuple[Release, ...] = ("latest", "2020")


@dataclass(frozen=True, slots=True)
class Count:
    """Work in rasp's terms: `macc` and `flops` are counts of their own, neither is twice the other."""

    macc: int = 0
    flops: int = 0
    bytes_read: int = 0
    bytes_written: int = 0

    def __add__(self, other: Count) -> Count:
        return Count(
            self.macc + other.macc,
            self.flops + other.flops,
            self.bytes_read + other.bytes_read,
            self.bytes_written + other.bytes_written,
        )


class LayerCount(NamedTuple):
    """What one module call costs without its children, and the type of most of its arithmetic (None: it has none)."""

    own: Count
    dtype: str | None


def count_layers(profile: ModelProfile, release: Release = "latest") -> tuple[LayerCount, ...]:
    """Return each module call of the profile by rasp's convention, in the order of `profile.layers`.

    `release`: "2020" is the rule of its first release, which its published table of 34 models follows.
    """
    return tuple(LayerCount(_count(module, release), _main_dtype(module)) for module in counted_modules(profile))


# pJ at 45 nm. Every operation is priced as a multiplication; four words in five come from the cache.
MULTIPLY_PJ = {"float32": 4.5, "float16": 1.1, "int32": 3.1, "int16": 0.8}
SRAM_PJ = 5
DRAM_PJ = 640
WORD_PJ = 0.8 * SRAM_PJ + 0.2 * DRAM_PJ
WORD_BYTES = 4


def energy_pj(count: Count, dtype: str | None) -> float:
    """Return the energy of work in this type; NaN where it computes in a type that has no figure.

    >>> energy_pj(Count(flops=2, bytes_read=4), "float32") == 2 * 4.5 + 132
    True
    """
    words = (count.bytes_read + count.bytes_written) / WORD_BYTES
    operations = MULTIPLY_PJ.get(dtype or "", math.nan) * count.flops if count.flops else 0.0
    return operations + words * WORD_PJ


class _Counted(NamedTuple):
    """One operator by its rule; flops under headings, so that a difference can be explained."""

    macc: int
    flops: tuple[tuple[str, int], ...]
    bytes_read: int
    bytes_written: int


_Rule = Callable[[CountedModule, CountedOp, Release], _Counted]
_DIMS = ("1d", "2d", "3d")


def _nbytes(*tensors: TensorInfo) -> int:
    """Return the bytes of all elements; unlike `TensorInfo.nbytes`, an expanded dimension counts in full."""
    return sum(tensor.elements * _itemsize(tensor) for tensor in tensors)


def _itemsize(tensor: TensorInfo) -> int:
    return int(getattr(torch, tensor.dtype).itemsize)


def _parameters(op: CountedOp) -> list[TensorInfo]:
    return [op.argument(name) for name in ("weight", "bias") if op.has(name)]


def _samples(x: TensorInfo, batched_dims: int) -> int:
    """Return N: the first dimension, or 1 where the input has no batch dimension."""
    return x.shape[0] if len(x.shape) >= batched_dims else 1


def _read(op: CountedOp) -> int:
    """Return the bytes read: the input once, the weights once for each sample."""
    parameters = _parameters(op)
    return _nbytes(op.x) + _samples(op.x, len(parameters[0].shape)) * _nbytes(*parameters)


def _sums(module: CountedModule, op: CountedOp, release: Release) -> _Counted:
    """K products per output need K - 1 additions; a bias is one more addition, and one more MACC."""
    outputs, taps, bias = op.out.elements, prod(op.argument("weight").shape[1:]), int(op.has("bias"))
    macc = outputs * (taps + bias)
    if release == "2020":
        # One operation a product, less the first addition; a convolution's outputs are not rounded down.
        size = outputs if op.name == "aten.linear" else _unrounded(op)
        work = round(size * (taps - 1 + bias))
        return _Counted(macc, ((category_of(op, module), work),), _read(op), round(size * _itemsize(op.out)))
    parts = (
        (category_of(op, module), 2 * outputs * taps),
        (Category.FIRST_ADDITION, -outputs),
        (Category.BIAS, bias * outputs),
    )
    return _Counted(macc, parts, _read(op), _nbytes(op.out))


def _unrounded(op: CountedOp) -> Fraction:
    """Return the outputs of a convolution, where a stride that does not fit leaves a fraction of an output."""
    kernel = op.argument("weight").shape[2:]
    if isinstance(op.argument("padding"), str):
        return Fraction(op.out.elements)
    sizes = [
        Fraction(size + 2 * pad - spread * (taps - 1) - 1, step) + 1
        for size, taps, step, pad, spread in zip(
            op.x.shape[-len(kernel) :],
            kernel,
            per_axis(op.argument("stride", 1), len(kernel)),
            per_axis(op.argument("padding", 0), len(kernel)),
            per_axis(op.argument("dilation", 1), len(kernel)),
            strict=True,
        )
    ]
    return prod(op.out.shape[: -len(kernel)]) * prod(sizes, start=Fraction(1))


def _transposed(module: CountedModule, op: CountedOp, release: Release) -> _Counted:
    """K products per input, each added to an output that starts at zero, so no addition is saved."""
    products, biases = op.macs, op.out.elements if op.has("bias") else 0
    parts = ((Category.CONVOLUTION, 2 * products), (Category.BIAS, biases))
    return _Counted(products + biases, parts, _read(op), _nbytes(op.out))


def _batch_norm(module: CountedModule, op: CountedOp, release: Release) -> _Counted:
    """One MACC per element to normalize, one more where there is a scale and a shift."""
    parameters = _parameters(op)
    macc = (2 if parameters else 1) * op.x.elements
    flops = (4 if parameters else 3) * op.x.elements if release == "2020" else 2 * macc
    read = _nbytes(op.x) + op.x.shape[0] * _nbytes(*parameters)
    return _Counted(macc, ((Category.NORM, flops),), read, _nbytes(op.x))


def _pool(module: CountedModule, op: CountedOp, release: Release) -> _Counted:
    """K - 1 additions or comparisons per output; an average multiplies each tap too. The last window stands for all."""
    dims = int(op.name.removesuffix("_with_indices")[-2])
    is_average = "avg" in op.name
    if "adaptive" in op.name:
        # The last window starts at floor((out - 1) * in / out) and ends at the border.
        sizes = zip(op.x.shape[-dims:], op.out.shape[-dims:], strict=True)
        kernel = tuple(size - (windows - 1) * size // windows for size, windows in sizes)
    else:
        kernel = per_axis(op.argument("kernel_size"), dims)
    taps = prod(kernel)
    if release == "2020":
        # A kernel given as one number was taken as that many taps; a trace sees a pair, so equal sides pass for it.
        counted = kernel[0] if "adaptive" not in op.name and len(set(kernel)) == 1 else taps
        flops = op.out.elements * (counted - 1 + is_average)
    else:
        flops = op.out.elements * (taps - 1 + (taps if is_average else 0))
    return _Counted(op.out.elements * taps, ((Category.POOLING, flops),), _nbytes(op.x), _nbytes(op.out))


def _activation(module: CountedModule, op: CountedOp, release: Release) -> _Counted:
    """One operation per element, whatever the function; learned slopes are read and written with it."""
    moved = _nbytes(op.x) + _samples(op.x, 2) * _nbytes(*_parameters(op))
    return _Counted(op.x.elements, ((Category.ACTIVATION, op.x.elements),), moved, moved)


_RULES: dict[str, _Rule] = {
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
    # A dropout does nothing in inference.
    **{
        f"aten.{name}dropout": lambda *_: _Counted(0, (), 0, 0) for name in ("", "feature_", "alpha_", "feature_alpha_")
    },
}


def _rule(op: CountedOp) -> _Rule | None:
    return _RULES.get(op.name) or (_activation if op.price.kind == "activation" else None)


def _by_convention(module: CountedModule, release: Release) -> tuple[_Counted, list[CountedOp]] | None:
    """Return the module by rasp's formulas, and its other operators; None where the formulas do not apply.

    They apply to a single operator that they know, with no other that computes. A module with a parametrized weight
    is not a leaf, and counts as the layer that it was.
    """
    if not module.call.is_leaf and not module.kind.startswith("Parametrized"):
        return None
    ruled = [(rule, op) for op in module.ops if (rule := _rule(op)) is not None]
    rest = [op for op in module.ops if _rule(op) is None]
    if len(ruled) != 1 or any(op.price.cost.flops or op.price.status == "unpriced" for op in rest):
        return None
    rule, op = ruled[0]
    return rule(module, op, release), rest


def _count(module: CountedModule, release: Release) -> Count:
    """Count a module. Operators that only move data, such as a circular padding, add the bytes they move."""
    by_formula = _by_convention(module, release)
    if by_formula is None:
        return _own_costs(module.ops)
    counted, rest = by_formula
    flops = sum(amount for _, amount in counted.flops)
    return Count(counted.macc, flops, counted.bytes_read, counted.bytes_written) + _own_costs(rest)


def _own_costs(ops: Sequence[CountedOp]) -> Count:
    """Count operators by our rules: a bias is not a MAC, and bytes are read once for the whole batch."""
    costs = (op.price.cost for op in ops)
    counts = (Count(cost.macs, cost.flops, cost.bytes_read, cost.bytes_written) for cost in costs)
    return sum(counts, start=Count())


def _main_dtype(module: CountedModule) -> str | None:
    computing = [op for op in module.ops if op.price.cost.flops and op.signature.inputs]
    return max(computing, key=lambda op: op.price.cost.flops).x.dtype if computing else None


@convention("rasp", unit="flops", by_module=True)
def rasp_entries(modules: Sequence[CountedModule]) -> Iterator[Entry]:
    """Count as the flops column of rasp.stat: K multiplications and K - 1 additions for K products.

    What its formulas do not cover (attention, recurrent layers, other norms) is counted as we count it.
    Element-wise work between layers, such as a residual add, has no row in its table.
    """
    for module in modules:
        # Its table has rows for leaves, and for modules that compute MACs or read parameters themselves.
        if not (module.call.is_leaf or module.reads_parameters or any(op.macs for op in module.ops)):
            continue
        by_formula = _by_convention(module, "latest")
        if by_formula is None:
            yield from our_entries((module,), "flops")
        else:
            for category, amount in by_formula[0].flops:
                yield Entry(module.call.index, category, amount)
