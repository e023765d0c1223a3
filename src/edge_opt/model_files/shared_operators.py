"""Operators and parts of operators that `.onnx` and `.tflite` files have in common, as eager torch would write them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, reduce
from math import ceil, prod
from typing import Any, cast

import torch
from torch.utils._python_dispatch import _disable_current_modes

from edge_opt.cost.pointwise import SOFTMAX_OPS
from edge_opt.cost.products import LSTM_OPS, RNN_OPS
from edge_opt.cost.rules import Work, cost_rule
from edge_opt.model_files.node_call import NodeCall, operator
from edge_opt.records.costs import TensorInfo

TensorFunction = Callable[..., torch.Tensor]


@contextmanager
def unrecorded() -> Iterator[None]:
    """Run torch without recording: views that no kernel makes, and work that a runtime does when it loads a file."""
    with _disable_current_modes():
        yield


def viewed_as(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the same bytes as another type of the same width."""
    with unrecorded():
        return x.view(dtype)


# Arithmetic with one operand, or with two


def unary(function: TensorFunction, call: NodeCall) -> torch.Tensor:
    return function(call.tensor())


def subtract(a: Any, b: Any) -> torch.Tensor:
    return torch.sub(a, b) if isinstance(a, torch.Tensor) else torch.rsub(b, a)


def divide(a: Any, b: Any) -> torch.Tensor:
    if not isinstance(a, torch.Tensor):  # as eager torch does it: the reciprocal, times the number
        quotient: torch.Tensor = a / b
        return quotient if b.is_floating_point() else quotient.to(b.dtype)
    return torch.div(a, b) if a.is_floating_point() else torch.div(a, b, rounding_mode="trunc")


ARITHMETIC: dict[str, TensorFunction] = {"Add": torch.add, "Sub": subtract, "Mul": torch.mul, "Div": divide}


def can_broadcast(first: Sequence[int], second: Sequence[int]) -> bool:
    """Return whether tensors of two shapes can be added: from behind, sizes are equal or one of them is 1."""
    return all(a == b or 1 in (a, b) for a, b in zip(reversed(first), reversed(second), strict=False))


def binary(call: NodeCall, function: TensorFunction, takes_numbers: bool = True) -> torch.Tensor:
    """Apply a function of two operands; a constant of one element is passed as a number where the function takes it."""
    a, b = call.operands() if takes_numbers else (call.tensor(), call.tensor(1))
    if not isinstance(a, torch.Tensor) and function in (torch.add, torch.mul):
        a, b = b, a
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and not can_broadcast(a.shape, b.shape):
        # torch would import its compiler to say so, which takes seconds.
        raise call.error(f"its inputs of {tuple(a.shape)} and {tuple(b.shape)} do not fit each other")
    return function(a, b)


# Reductions, each of (tensor, axes, whether the reduced dimensions stay)


def _product(x: torch.Tensor, axes: Sequence[int], keep: bool) -> torch.Tensor:
    """Multiply along one axis after the other, the last first, so that the numbers of the others stay valid."""
    ordered = sorted((axis % x.dim() for axis in axes), reverse=True)
    multiply: Callable[[torch.Tensor, int], torch.Tensor] = partial(torch.prod, keepdim=keep, dtype=x.dtype)
    return reduce(multiply, ordered, x)


REDUCTIONS: dict[str, TensorFunction] = {
    "Sum": lambda x, axes, keep: x.sum(axes, keepdim=keep, dtype=x.dtype),
    "Max": lambda x, axes, keep: x.amax(axes, keepdim=keep),
    "Min": lambda x, axes, keep: x.amin(axes, keepdim=keep),
    "Prod": _product,
}


# Windows


def same_padding(
    sizes: Sequence[int], kernel: Sequence[int], strides: Sequence[int], dilations: Sequence[int]
) -> list[int]:
    """Return how many elements "SAME" adds to each dimension, so that there are ceil(size / stride) windows."""
    windows = zip(sizes, kernel, strides, dilations, strict=True)
    return [
        max((-(-size // stride) - 1) * stride + (width - 1) * dilation + 1 - size, 0)
        for size, width, stride, dilation in windows
    ]


def pooled_as_int8(pool: Callable[[torch.Tensor], Any], x: torch.Tensor) -> Any:
    """Pool bytes as int8: torch has no average of uint8 on the meta device, and the cost of both is the same.

    A pool that returns positions as well returns them behind its values.
    """
    if x.dtype != torch.uint8:
        return pool(x)
    result = pool(viewed_as(x, torch.int8))
    if isinstance(result, tuple):
        return (viewed_as(result[0], torch.uint8), *result[1:])
    return viewed_as(result, torch.uint8)


# Tensors made from numbers


@operator("Range", "tflite:RANGE")
def number_range(call: NodeCall) -> torch.Tensor:
    start, limit, step = (call.values(index)[0] for index in range(3))
    count = max(ceil((limit - start) / step), 0) if step else 0
    if call.device == "meta":
        return call.empty((count,), call.tensor().dtype)
    return torch.add(torch.arange(count) * step, start).to(call.tensor().dtype)


def filled(call: NodeCall, sizes: Sequence[Any], dtype: torch.dtype, value: Callable[[], Any]) -> torch.Tensor:
    """Return a tensor of one value, which is asked for only where the values of the result are evaluated."""
    result = call.empty(tuple(int(size) for size in sizes), dtype)
    return result.fill_(value()) if call.device == "cpu" else result


def one_hot(call: NodeCall, index: torch.Tensor, on: torch.Tensor, off: torch.Tensor) -> torch.Tensor:
    """Compare each element with every class, then choose one of two values."""
    depth, axis = int(call.values(1)[0]), int(call.get("axis", -1)) % (index.dim() + 1)
    call.check_size((*index.shape, depth))
    classes = torch.arange(depth, dtype=index.dtype, device=call.device)
    shape = [-1 if dimension == axis else 1 for dimension in range(index.dim() + 1)]
    return torch.where(index.unsqueeze(axis) == classes.reshape(shape), on, off)


# Operators that torch has no word for


# Operators of their own, for what torch has no word for on the meta device: integers that grow in a product, bytes
# made from floats and back. Each is one operator of a trace, with a rule below.
_library = torch.library.Library("onnx_file", "DEF")  # type: ignore[no-untyped-call]


def define(schema: str, function: Callable[..., Any]) -> TensorFunction:
    """Define an operator with a name of its own, whose result is known on the meta device only.

    The library is torch's and lasts as long as the process, so each name is defined once, when its module is imported
    or a file first needs it. There is no kernel for the CPU on purpose: a call with real tensors is an error, not a
    wrong result. Compositions of torch's operators were rejected, because their intermediate tensors would count as
    traffic and memory that no runtime has.
    """
    name = schema.partition("(")[0]
    _library.define(schema)  # type: ignore[no-untyped-call]
    _library.impl(name, function, "Meta")  # type: ignore[no-untyped-call]
    return cast("TensorFunction", getattr(torch.ops.onnx_file, name))


byte_softmax_op = define("byte_softmax(Tensor x) -> Tensor", lambda x: torch.empty_like(x))


@cost_rule("onnx_file::byte_softmax", kind="softmax")
def byte_softmax_cost(out: TensorInfo, x: TensorInfo) -> Work:
    """As many steps as of floats: maximum, subtract, a table of exponents, sum, divide."""
    return Work(other_ops=SOFTMAX_OPS * out.elements)


recurrent_op = define(
    "recurrent(Tensor x, Tensor?[] weights, str cell, int[] shape) -> Tensor",
    lambda x, weights, cell, shape: torch.empty(shape, dtype=x.dtype, device="meta"),
)


@cost_rule("onnx_file::recurrent", kind="recurrent")
def recurrent_cost(out: TensorInfo, x: TensorInfo, weights: Any, cell: str, shape: Any) -> Work:
    """Every matrix once per row and step; sums of gates, biases and activations as in torch's own cells."""
    rows = prod(x.shape[:-1])
    tensors = [tensor for tensor in weights if isinstance(tensor, TensorInfo)]
    matrices = [tensor for tensor in tensors if len(tensor.shape) == 2]
    macs = rows * sum(tensor.elements for tensor in matrices)
    biases = sum(tensor.elements for tensor in tensors if len(tensor.shape) == 1)
    if cell == "SVDF" or not matrices:  # a filter over features, one over time, then their sum
        return Work(macs=macs, other_ops=rows * biases)
    units = matrices[0].shape[0]
    sums = sum(tensor.shape[0] for tensor in matrices if tensor.shape[0] == units) // 2 + biases
    cells = units * (2 if cell.startswith("BI") else 1)
    return Work(macs=macs, other_ops=rows * (sums + cells * (LSTM_OPS if cell.endswith("LSTM") else RNN_OPS)))
