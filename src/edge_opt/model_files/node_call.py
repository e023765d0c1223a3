"""The call of a node, and other parts that operators of `.onnx` and `.tflite` files share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, reduce
from math import ceil, prod
from types import MappingProxyType
from typing import Any, cast

import torch
from torch.utils._python_dispatch import _disable_current_modes

from edge_opt.cost.pointwise import SOFTMAX_OPS
from edge_opt.cost.products import LSTM_OPS, RNN_OPS
from edge_opt.cost.rules import Work, cost_rule
from edge_opt.errors import TraceFailed
from edge_opt.model_files.file_graph import FileNode, FileTensor
from edge_opt.records.costs import TensorInfo
from edge_opt.trace.inputs import MOST_ELEMENTS

Result = torch.Tensor | None | list[Any] | tuple[Any, ...]
Handler = Callable[["NodeCall"], Result]
TensorFunction = Callable[..., torch.Tensor]

_handlers: dict[str, Handler] = {}
_shapes_only: set[str] = set()
handlers: Mapping[str, Handler] = MappingProxyType(_handlers)


def operator(*names: str, has_values: bool = True) -> Callable[[Handler], Handler]:
    """Register how nodes of these types are written in torch; "domain:Type" for types that are not ONNX's own.

    Where `has_values` is False, the result has the shape, the type and the cost of the node, and not its values.
    """

    def register(handler: Handler) -> Handler:
        for name in names:
            _handlers[name] = handler
        if not has_values:
            _shapes_only.update(names)
        return handler

    return register


def operators(table: Mapping[str, Handler], prefix: str = "", has_values: bool = True) -> None:
    """Register operators that are one expression of torch, by type; `prefix` is their domain, such as "tflite:"."""
    for name, handler in table.items():
        operator(f"{prefix}{name}", has_values=has_values)(handler)


def handler_of(node: FileNode) -> Handler | None:
    return _handlers.get(_key(node))


def has_exact_values(node: FileNode) -> bool:
    """Return whether a node's handler returns the node's own values where those of its inputs are known."""
    return _key(node) in _handlers and _key(node) not in _shapes_only


def _key(node: FileNode) -> str:
    return f"{node.domain}:{node.op}" if node.domain else node.op


@dataclass(slots=True, eq=False)
class NodeCall:
    """One node with its inputs."""

    node: FileNode
    attributes: dict[str, Any]
    inputs: list[Any]
    constant_values: list[torch.Tensor | None]  # of each input, where its values are known
    opset: int
    device: str = "meta"

    def error(self, what: str) -> TraceFailed:
        """Return the error that names this node."""
        return TraceFailed(f"{self.node.label}: {what}")

    def has(self, index: int) -> bool:
        """Return whether an optional input is given."""
        return index < len(self.inputs) and self.inputs[index] is not None

    def tensor(self, index: int = 0) -> torch.Tensor:
        """Return an input that must be there."""
        if not self.has(index) or not isinstance(self.inputs[index], torch.Tensor):
            raise self.error(f"input {index} is missing")
        value: torch.Tensor = self.inputs[index]
        return value

    def optional(self, index: int) -> torch.Tensor | None:
        return self.tensor(index) if self.has(index) else None

    def get(self, name: str, default: Any = None) -> Any:
        """Return an attribute."""
        return self.attributes.get(name, default)

    def values(self, index: int) -> list[Any]:
        """Return the values of an input, flat; refuse where they are known only when the model runs."""
        value = self.constant_values[index] if index < len(self.constant_values) else None
        if value is None:
            raise self.error(f"what it makes of its input depends on the values of {self.node.inputs[index]!r}, "
                               "which are known only when the model runs")  # fmt: skip
        return numbers(value)

    def setting(self, name: str, index: int, default: Any = None) -> Any:
        """Return numbers that older opsets have as an attribute and newer ones as an input."""
        if name in self.attributes:
            return self.attributes[name]
        return self.values(index) if self.has(index) else default

    def number(self, name: str, index: int, default: Any = None) -> Any:
        """Return one number that is an attribute or an input."""
        value = self.setting(name, index, default)
        return value[0] if isinstance(value, (list, tuple)) and value else value

    def axis(self, default: int = 0) -> int:
        """Return the attribute `axis`, counted from the front."""
        return self.from_front(self.get("axis", default), self.tensor().dim())

    def from_front(self, axis: Any, size: int) -> int:
        """Return an axis, counted from the front."""
        if not -size <= int(axis) < max(size, 1):
            raise self.error(f"its axis is {int(axis)}, and its input has {size} dimensions")
        return int(axis) % size if size else 0

    def operands(self) -> list[Any]:
        """Return both inputs, with a number for a known constant of one element: eager code would write it as such."""
        first, second = self.tensor(), self.tensor(1)
        if _is_number(self.constant_values[1], first):
            return [first, numbers(self.constant_values[1])[0]]
        if _is_number(self.constant_values[0], second):
            return [numbers(self.constant_values[0])[0], second]
        return [first, second]

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor of that shape; one beyond all memory is a mistake in the file."""
        if prod(shape) > MOST_ELEMENTS or min(shape, default=0) < 0:
            raise self.error(f"its result would have the shape {shape}")
        return torch.empty(shape, dtype=dtype, device=self.device)


def numbers(known: torch.Tensor | None) -> list[Any]:
    """Return the values of a known constant, flat; reading them is not part of a run."""
    with _disable_current_modes():
        return [] if known is None else list(known.flatten().tolist())


def _is_number(known: torch.Tensor | None, other: torch.Tensor) -> bool:
    return known is not None and known.numel() == 1 and known.dim() <= min(other.dim(), 1)


def torch_dtype(name: str) -> torch.dtype:
    value: torch.dtype = getattr(torch, name)
    return value


def real_values(constant: FileTensor) -> torch.Tensor | None:
    """Return the values of a small constant as a tensor; None where they were not read."""
    if constant.values is None:
        return None
    return torch.from_numpy(constant.values.copy() if constant.values.ndim else constant.values.reshape(()).copy())


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
    classes = torch.arange(depth, dtype=index.dtype, device=call.device)
    shape = [-1 if dimension == axis else 1 for dimension in range(index.dim() + 1)]
    return torch.where(index.unsqueeze(axis) == classes.reshape(shape), on, off)


# Own operators for work that torch does not have on the meta device: integers that grow in a product, bytes
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


byte_softmax_op = define(
    "byte_softmax(Tensor x, ScalarType? dtype=None) -> Tensor", lambda x, dtype=None: torch.empty_like(x, dtype=dtype)
)


# As many steps as of floats: maximum, subtract, a table of exponents, sum, divide.
cost_rule("onnx_file::byte_softmax", kind="softmax")(lambda out, x, *_: Work(other_ops=SOFTMAX_OPS * out.elements))
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
