"""The convention of rasp: what one module call costs, from the operators in it.

Work grows with the batch of N samples, and so does the reading of weights: each sample reads them again. Operators
outside the convention (attention, recurrent layers, other norms, element-wise arithmetic) keep edge_opt's own costs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import torch

from edge_opt import TensorInfo

if TYPE_CHECKING:
    from edge_opt.records import OpPrice, OpSignature


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


class PricedOp(NamedTuple):
    """An operator with the price edge_opt gave it."""

    signature: OpSignature
    price: OpPrice


_Rule = Callable[["OpSignature"], Count]
_rules: dict[str, _Rule] = {}


def count_call(operators: Sequence[PricedOp]) -> Count:
    """What a layer costs by the convention, or by edge_opt's own rules where it is not one operator of the convention.

    What only moves data around the operator, such as a circular padding, is added with the bytes it moves.
    """
    ruled = [(rule, op.signature) for op in operators if (rule := _rule(op)) is not None]
    rest = [op for op in operators if _rule(op) is None]
    if len(ruled) != 1 or any(op.price.cost.flops or op.price.status == "unpriced" for op in rest):
        return own_costs(operators)
    rule, signature = ruled[0]
    return rule(signature) + own_costs(rest)


def own_costs(operators: Sequence[PricedOp]) -> Count:
    """The operators by edge_opt's rules: a bias is no MAC, and bytes are read once for the whole batch."""
    costs = [op.price.cost for op in operators]
    return Count(
        sum(cost.macs for cost in costs),
        sum(cost.flops for cost in costs),
        sum(cost.bytes_read for cost in costs),
        sum(cost.bytes_written for cost in costs),
    )


def _rule(op: PricedOp) -> _Rule | None:
    name = op.signature.op.removeprefix("aten.").removesuffix("_")
    return _rules.get(name) or (_activation if op.price.kind == "activation" else None)


def _counts(*operators: str) -> Callable[[_Rule], _Rule]:
    def register(rule: _Rule) -> _Rule:
        _rules.update(dict.fromkeys(operators, rule))
        return rule

    return register


def _nbytes(*tensors: TensorInfo) -> int:
    """Bytes of all elements; unlike `TensorInfo.nbytes`, an expanded dimension counts in full."""
    return sum(tensor.elements * getattr(torch, tensor.dtype).itemsize for tensor in tensors)


def _parameters(signature: OpSignature) -> list[TensorInfo]:
    given = (signature.argument(name) for name in ("weight", "bias"))
    return [tensor for tensor in given if isinstance(tensor, TensorInfo)]


def _samples(x: TensorInfo, batched_dims: int) -> int:
    """N: the first dimension, or 1 where the input has no batch dimension."""
    return x.shape[0] if len(x.shape) >= batched_dims else 1


@_counts("conv1d", "conv2d", "conv3d", "_convolution_mode", "linear")
def _dense(signature: OpSignature) -> Count:
    """K products per output need K - 1 additions; a bias is one more addition, and one more MACC."""
    x, out, parameters = signature.inputs[0], signature.outputs[0], _parameters(signature)
    weight, bias = parameters[0], len(parameters) - 1
    taps = prod(weight.shape[1:])
    return Count(
        out.elements * (taps + bias),
        out.elements * (2 * taps - 1 + bias),
        _nbytes(x) + _samples(x, len(weight.shape)) * _nbytes(*parameters),
        _nbytes(out),
    )


@_counts("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def _transposed(signature: OpSignature) -> Count:
    """K products per input, each added to an output that starts at zero, so no addition is saved."""
    x, out, parameters = signature.inputs[0], signature.outputs[0], _parameters(signature)
    weight, bias = parameters[0], len(parameters) - 1
    products = x.elements * prod(weight.shape[1:])
    return Count(
        products + bias * out.elements,
        2 * products + bias * out.elements,
        _nbytes(x) + _samples(x, len(weight.shape)) * _nbytes(*parameters),
        _nbytes(out),
    )


@_counts("batch_norm")
def _batch_norm(signature: OpSignature) -> Count:
    """One MACC per element to normalise, one more where there is a scale and a shift."""
    x, parameters = signature.inputs[0], _parameters(signature)
    macc = (2 if parameters else 1) * x.elements
    return Count(macc, 2 * macc, _nbytes(x) + x.shape[0] * _nbytes(*parameters), _nbytes(x))


def _pool_rule(dims: int, is_average: bool, is_adaptive: bool) -> _Rule:
    def rule(signature: OpSignature) -> Count:
        """K taps per output; an average multiplies each, a maximum only compares."""
        x, out = signature.inputs[0], signature.outputs[0]
        kernel = _adaptive_kernel(x, out, dims) if is_adaptive else _kernel(signature.argument("kernel_size"), dims)
        taps = prod(kernel)
        flops = out.elements * (taps - 1 + (taps if is_average else 0))
        return Count(out.elements * taps, flops, _nbytes(x), _nbytes(out))

    return rule


def _kernel(size: int | tuple[int, ...], dims: int) -> tuple[int, ...]:
    """The kernel in every dimension; one number stands for all of them."""
    sizes = size if isinstance(size, tuple) else (size,)
    return sizes if len(sizes) == dims else sizes * dims


def _adaptive_kernel(x: TensorInfo, out: TensorInfo, dims: int) -> tuple[int, ...]:
    """The last window in each dimension: it starts at floor((out - 1) * in / out) and ends at the border."""
    pairs = zip(x.shape[-dims:], out.shape[-dims:], strict=True)
    return tuple(size - (windows - 1) * size // windows for size, windows in pairs)


for _dims in (1, 2, 3):
    _counts(f"avg_pool{_dims}d")(_pool_rule(_dims, is_average=True, is_adaptive=False))
    _counts(f"max_pool{_dims}d", f"max_pool{_dims}d_with_indices")(
        _pool_rule(_dims, is_average=False, is_adaptive=False)
    )
    _counts(f"adaptive_avg_pool{_dims}d")(_pool_rule(_dims, is_average=True, is_adaptive=True))
    _counts(f"adaptive_max_pool{_dims}d")(_pool_rule(_dims, is_average=False, is_adaptive=True))


def _activation(signature: OpSignature) -> Count:
    """One operation per element, whatever the function; learned slopes are read and written with it."""
    x = signature.inputs[0]
    moved = _nbytes(x) + _samples(x, 2) * _nbytes(*_parameters(signature))
    return Count(x.elements, x.elements, moved, moved)


@_counts("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")
def _nothing(signature: OpSignature) -> Count:
    """A dropout does nothing in inference."""
    return Count()
