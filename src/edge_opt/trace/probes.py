"""Find numbers that Python or NumPy code computes from values of tensors and passes back to operators.

A number that forward reads (`item()`, `tolist()`, `numpy()`) may decide what to do next, be a size, be passed on as it
is, or be computed with. Only the last one is work that no operator does. To tell them apart, forward runs a second time
in which every value that leaves torch is changed a little. Where the same operators then get other numbers, and those
were not read as they are, something computed them.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from edge_opt.errors import TraceFailed
from edge_opt.trace.module_calls import Frame

# Values that models look at to decide what to do next are few; a loop over them is more. So few of the constants of a
# module are sizes, scales and the like.
FEW_VALUES = 8
# Values of one tensor that are compared; a difference is nearly always among the first.
_MOST_VALUES = 1 << 16
# Coordinates that a grid has, or a box.
_MOST_AXES = 4
_TRACERS = ("edge_opt.trace.tracer", "edge_opt.training_steps.step_trace")
# Their numbers are where a table begins and ends, so that they follow from sizes.
_RANGES = ("aten::arange", "aten::linspace", "aten::logspace", "aten::range")


class _NotedCall(NamedTuple):
    """An operator that was called after values had been read."""

    structure: tuple[Any, ...]
    numbers: list[float]
    module: int
    origin: str


class Probe:
    """The values that a trace has read, and the numbers that operators got afterwards."""

    def __init__(self, most_steps: int | None = None) -> None:
        self.is_watching = False
        self.steps: list[_NotedCall] = []
        self._numbers: set[float] = set()
        self._most_steps = most_steps  # of a trace that gets changed values
        self._constants_read: Counter[Frame | None] = Counter()
        self._origin = "python"

    def pass_on(self, values: torch.Tensor, frame: Frame | None, is_constant: bool, origin: str) -> torch.Tensor:
        """Note that values leave torch, and return them: changed where this is the second run."""
        self._constants_read[frame] += values.numel() * is_constant
        if values.dtype is torch.bool or (is_constant and self._constants_read[frame] <= FEW_VALUES):
            return values
        self.is_watching, self._origin = True, origin
        if self._most_steps is not None:
            values = _changed(values)
        self._numbers.update(_values_of(values))
        return values

    def watch(self, arrays: Iterable[Any]) -> None:
        """Note the values of NumPy arrays that forward can read, and change them where this is the second run."""
        for array in arrays:
            if array.dtype.kind in "iuf" and array.size <= _MOST_VALUES and array.flags.writeable:
                with suppress(TypeError, ValueError, RuntimeError):  # torch does not know its type or its strides
                    values = torch.from_numpy(array)
                    values.copy_(self.pass_on(values, None, True, "numpy"))
                    self._numbers.update(_values_of(values.float()))

    def note_call(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], frame: Frame | None) -> None:
        """Note the numbers among the arguments of an operator; sizes and positions are not among them."""
        schema = getattr(func, "_schema", None)
        types = {argument.name: str(argument.type) for argument in schema.arguments} if schema else {}
        structure: list[Any] = [func]
        numbers: list[Any] = []
        for name, value in (*zip(types, args, strict=False), *kwargs.items()):
            if isinstance(value, torch.Tensor):
                structure.append(tuple(value.shape))
            elif types.get(name) in ("number", "Optional[number]", "Tensor") and isinstance(value, (int, float)):
                numbers.append(value)
            else:
                structure += [
                    tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else leaf for leaf in tree_leaves(value)
                ]
        if func is torch.ops.aten.lift_fresh.default and not args[0].is_meta:
            numbers.append(args[0])
        is_range = schema is not None and schema.name in _RANGES
        self.note((*structure, *numbers) if is_range else tuple(structure), () if is_range else numbers, frame)

    def note(self, structure: tuple[Any, ...], numbers: Iterable[Any], frame: Frame | None) -> None:
        """Note numbers that reach an operator or leave forward."""
        if self._most_steps is not None and len(self.steps) >= self._most_steps:
            raise TraceFailed("forward takes another way with other values")
        values = [value for number in numbers for value in _values_of(number)]
        self.steps.append(_NotedCall(structure, values, frame.index if frame else 0, self._origin))

    def computed(self, second: Probe) -> list[tuple[int, str]]:
        """Return the modules that got a number which code outside torch had computed, and where it was computed."""
        modules: list[tuple[int, str]] = []
        for step, other in zip(self.steps, second.steps, strict=False):
            if step.structure != other.structure or len(step.numbers) != len(other.numbers):
                break  # the values decide what to do next
            changed = [
                (a, b) for a, b in zip(step.numbers, other.numbers, strict=True) if a != b and (a == a or b == b)
            ]
            if not all(a in self._numbers and b in second._numbers for a, b in changed):
                modules.append((step.module, step.origin))
        return list(dict.fromkeys(modules))

    def second(self) -> Probe:
        """Return the probe of a second run: it ends where it takes much longer than the first."""
        return Probe(2 * len(self.steps) + 1000)


def _values_of(number: Any) -> list[Any]:
    """Return the numbers of a tensor or an array, up to a limit."""
    is_one = isinstance(number, (int, float, complex))
    return [number] if is_one else number.reshape(-1)[:_MOST_VALUES].tolist()


def is_computed(tensor: torch.Tensor, arrays: Iterable[Any] | None) -> bool:
    """Return whether a new tensor of Python or NumPy has numbers that code must have computed.

    Those are more than a few, with uneven distances, and not all in constants. Without `arrays`, it is not to be known.
    """
    if arrays is None or not tensor.is_cpu or not (tensor.is_floating_point() or tensor.is_complex()):
        return False
    numbers = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    values = torch.unique(numbers[numbers.isfinite()])
    if len(values) <= FEW_VALUES or _is_even(numbers):
        return False
    if any(numbers.shape[dim] <= _MOST_AXES and all(map(_is_even, numbers.unbind(dim))) for dim in (0, -1)):
        return False  # the coordinates of a grid
    known = torch.tensor(_numbers_in_sight(arrays), dtype=torch.float64).to(values.dtype)
    return not torch.isin(values, known).all()


def _is_even(numbers: torch.Tensor) -> bool:
    """Return whether numbers have the same distances, as positions do, apart from rounding."""
    values = torch.unique(numbers).double()
    rounding = 4 * torch.finfo(numbers.dtype).eps * values.abs().amax()
    return bool((values.diff() - values.diff()[:1]).abs().le(rounding).all())


def _numbers_in_sight(arrays: Iterable[Any]) -> list[float]:
    """Return the numbers in `arrays`, and in constants and variables that the running code refers to by name."""
    constants: list[Any] = [array.ravel().tolist() for array in arrays]
    for frame, _ in traceback.walk_stack(None):
        if frame.f_globals.get("__name__") in _TRACERS:
            break
        code, owner = frame.f_code, frame.f_locals.get("self")
        tables = (frame.f_globals, vars(type(owner)), getattr(owner, "__dict__", {}))
        constants += [code.co_consts, *map(frame.f_locals.get, code.co_freevars)]
        constants += [table.get(name) for table in tables for name in code.co_names]
    return [leaf for leaf in tree_leaves(constants) if isinstance(leaf, (int, float)) and abs(leaf) < 2**63]


def _changed(values: torch.Tensor) -> torch.Tensor:
    """Return other values that are as likely: integers stay between the least and the largest where they differ."""
    if values.is_floating_point() or values.is_complex():
        return values * (1 + 2**-9) + 2**-7
    if values.numel() == 0 or values.min() == values.max():
        return values + 1
    return torch.where(values > values.min(), values - 1, values)
