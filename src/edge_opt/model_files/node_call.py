"""One call of one ONNX node: its tensors, its attributes, and values that are known without running anything."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import prod
from types import MappingProxyType
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from edge_opt.errors import TraceFailed
from edge_opt.model_files.file_graph import FileNode, FileTensor

Result = torch.Tensor | None | list[Any] | tuple[Any, ...]
Handler = Callable[["NodeCall"], Result]

MOST_ELEMENTS = 1 << 50  # a tensor beyond a petabyte is a mistake in the file

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


class NodeCall:
    """One node with its inputs. Not a dataclass: it holds tensors that must go when the call is over."""

    __slots__ = ("attributes", "constant_values", "device", "inputs", "node", "opset")

    def __init__(
        self, node: FileNode, attributes: dict[str, Any], inputs: list[Any], constant_values: list[torch.Tensor | None],
        opset: int, device: str = "meta",
    ) -> None:  # fmt: skip
        self.node = node
        self.attributes = attributes
        self.inputs = inputs
        self.constant_values = constant_values
        self.opset = opset
        self.device = device

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

    def axis(self, default: int = 0, rank: int | None = None) -> int:
        """Return the attribute `axis`, counted from the front."""
        size = self.tensor().dim() if rank is None else rank
        value = int(self.get("axis", default))
        if not -size <= value < max(size, 1) + (rank is not None):
            raise self.error(f"its axis is {value}, and its input has {size} dimensions")
        return value + size if value < 0 else value

    def from_front(self, axis: Any, size: int) -> int:
        """Return an axis of so many, counted from the front."""
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

    def check_size(self, shape: Iterable[int]) -> None:
        """Refuse a result beyond all memory before torch works out its strides."""
        self.empty(tuple(shape), torch.uint8)

    def constant(self, name: str = "value") -> FileTensor | None:
        """Return a tensor among the attributes; None where there is none of that name."""
        value = self.get(name)
        return value if isinstance(value, FileTensor) else None


def numbers(known: torch.Tensor | None) -> list[Any]:
    """Return the values of a known constant, flat; looking at them is no part of a run."""
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
