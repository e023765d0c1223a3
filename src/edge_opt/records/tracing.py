"""Records of a trace: tensors, operators, storages and module calls."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any, Literal

Shape = tuple[int, ...]
Role = Literal["activation", "parameter", "buffer", "input"]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor as an operator saw it; `nbytes` counts an expanded dimension once."""

    shape: Shape
    dtype: str
    nbytes: int

    @property
    def elements(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class OpSignature:
    """One operator on one set of shapes; calls that look alike share it.

    `args` and `kwargs` are the operator's own, with tensors as `TensorInfo`; `names` are its parameter names.
    `scratch_bytes` are of tensors that it makes beside its outputs and drops when it returns. `strides` has one entry
    per tensor in `inputs`, None for a row-major one; it is empty where all are.
    """

    op: str
    names: tuple[str, ...]
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    outputs: tuple[TensorInfo, ...]
    is_view: bool
    scratch_bytes: int = 0
    strides: tuple[Shape | None, ...] = ()

    def argument(self, name: str, default: Any = None) -> Any:
        """The value passed for parameter `name`, or `default` when the call left it out."""
        if name in self.names:
            position = self.names.index(name)
            if position < len(self.args):
                return self.args[position]
        return dict(self.kwargs).get(name, default)

    @property
    def inputs(self) -> tuple[TensorInfo, ...]:
        """Every tensor read, in order."""
        return tuple(_tensors(self.args)) + tuple(_tensors(tuple(value for _, value in self.kwargs)))


def _tensors(values: tuple[Any, ...]) -> list[TensorInfo]:
    found: list[TensorInfo] = []
    for value in values:
        if isinstance(value, TensorInfo):
            found.append(value)
        elif isinstance(value, tuple):
            found.extend(_tensors(value))
    return found


@dataclass(frozen=True, slots=True)
class OpCall:
    """One operator in order of execution: which module ran it, which storages it touched, what was alive then.

    `reads` has one storage per tensor in `OpSignature.inputs`, in that order.
    """

    index: int
    module: int
    signature: int
    reads: tuple[int, ...]
    creates: tuple[int, ...]
    live_bytes: int


@dataclass(frozen=True, slots=True)
class StorageInfo:
    """Memory behind one or more tensors. `born`, `died`: operator indices, None where that is outside the run."""

    nbytes: int
    role: Role
    born: int | None
    died: int | None


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """One call of one module. Parameters stand with the first call of the module that owns them."""

    index: int
    parent: int | None
    path: str
    kind: str
    call_number: int
    input_shapes: tuple[Shape, ...]
    output_shapes: tuple[Shape, ...]
    is_leaf: bool
    params: int
    param_bytes: int
    trainable_params: int


@dataclass(frozen=True, slots=True)
class Trace:
    """What a model called, on which shapes, in which order."""

    modules: tuple[ModuleCall, ...]
    signatures: tuple[OpSignature, ...]
    ops: tuple[OpCall, ...]
    storages: tuple[StorageInfo, ...]
    params: int
    param_bytes: int
    trainable_params: int
    buffer_bytes: int
    input_bytes: int
    used_real_tensors: bool
    notes: tuple[str, ...] = ()
