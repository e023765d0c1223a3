"""Work that no operator on the tape does: in NumPy, in Python numbers, in another thread, in a C library.

Such work shows where its result comes back: as a tensor that is neither an input, nor a weight, nor a constant from
before the trace, nor the output of a recorded operator. It is recorded as an operator without a cost rule under the
module that met it, so that the totals are a lower bound and name the module.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from edge_opt.trace.module_calls import Frame

# Values that models look at to decide what to do next are few; a loop over them is more.
_FEW_VALUES = 8
# A tensor that Python code makes from a list of numbers is not larger, or rarely so.
_MOST_NUMBERS = 1024
# CPU time of other threads that is not a thread waking up to look at a clock.
_BUSY_S = 50e-6
_forks = [0]


def _note_fork() -> None:
    _forks[0] += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_parent=_note_fork)


class OutsideWork:
    """What a trace knows about values that left the tape, and about tensors that came from elsewhere."""

    def __init__(self, is_real: bool) -> None:
        self.origins: list[tuple[Frame | None, str]] = []  # the module that met a result, and where it was computed
        self.has_real_inputs = is_real
        self._is_real = is_real
        self._values_read = 0
        self._unknown: list[tuple[torch.Tensor, Frame | None]] = []
        self._forks = _forks[0]
        self._others_s = _seconds_of_other_threads()

    def read_values(self, count: int) -> None:
        """Note that Python code has seen values that depend on an input."""
        self._values_read += count

    def meet_python_tensor(self, tensor: torch.Tensor, frame: Frame | None) -> None:
        """Note a tensor that `torch.tensor`, `torch.from_numpy` or a relative of theirs just made."""
        is_numpy = not tensor.untyped_storage().resizable()
        if self._has_left() or (is_numpy and self.has_real_inputs and not self._is_real):
            self.add(frame, "numpy" if is_numpy else "python")

    def meet_unknown(self, tensor: torch.Tensor, frame: Frame | None) -> None:
        """Note an operand that the tape has not seen before, and find out where it came from: now, or in `conclude`."""
        self._unknown.append((tensor, frame))
        if gc.isenabled():
            self._judge()  # where the collector runs, what is young now is old later

    def add(self, frame: Frame | None, origin: str) -> None:
        """Note that a result was computed somewhere else, once per module call."""
        if (frame, origin) not in self.origins:
            self.origins.append((frame, origin))

    def _has_left(self) -> bool:
        return self._values_read > _FEW_VALUES or _forks[0] != self._forks

    def conclude(self, result: Any, root: Frame | None, is_known: Callable[[torch.Tensor], bool]) -> None:
        """Judge the unknown operands and what forward returned.

        `is_known` tells whether a tensor's storage was recorded.
        """
        leaves = tree_leaves(result)
        self._unknown += [(leaf, root) for leaf in leaves if isinstance(leaf, torch.Tensor) and not is_known(leaf)]
        if any(callable(leaf) and not isinstance(leaf, (type, nn.Module, torch.Tensor)) for leaf in leaves):
            self.add(root, "a function that forward returns")
        numpy = sys.modules.get("numpy")
        numbers = (float, complex) if numpy is None else (float, complex, numpy.ndarray, numpy.floating)
        if self._has_left() and any(isinstance(leaf, numbers) for leaf in leaves):
            self.add(root, "python")
        self._judge()

    def _judge(self) -> None:
        for tensor, frame in self._made_elsewhere():
            self.add(frame, "numpy" if not tensor.untyped_storage().resizable() else "another thread or C")
        self._unknown.clear()

    def _made_elsewhere(self) -> Iterable[tuple[torch.Tensor, Frame | None]]:
        """Return the unknown tensors that are younger than the trace and no views of older ones."""
        if not self._unknown:
            return []
        # The collector ran once before the trace and does not run since: what is new is in the two younger generations.
        young = {id(value) for generation in (0, 1) for value in gc.get_objects(generation)}
        candidates = [(tensor, frame) for tensor, frame in self._unknown if id(tensor) in young]
        if not self._is_real and candidates:
            # On the meta device `torch.tensor([1, 2], device=x.device)` makes a tensor that no mode sees. It looks like
            # the result of another thread, so there has to be more to it: a thread that worked, or a size that nobody
            # writes down in Python. A single number is not suspicious: models make one for each mask.
            is_busy = _seconds_of_other_threads() - self._others_s > _BUSY_S or self._has_left()
            least = 1 if is_busy else _MOST_NUMBERS
            candidates = [pair for pair in candidates if pair[0].numel() > least]
        if not candidates:
            return []
        storages = {_address(value) for value in gc.get_objects(2) if torch.Tensor in type(value).__mro__}
        return [(tensor, frame) for tensor, frame in candidates if _address(tensor) not in storages]

    def end(self) -> None:
        """Let go of every tensor and module."""
        self._unknown.clear()
        self.origins.clear()


def _address(tensor: torch.Tensor) -> int | None:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # sparse
        return None


def _seconds_of_other_threads() -> float:
    """Return the CPU time of all other threads of the process, ended ones included."""
    return time.process_time() - time.thread_time()


class ValueReads(TorchFunctionMode):
    """Notices calls that hand a tensor's values to NumPy, Python or C. They never reach a dispatch mode.

    Only for real tensors: it sees every call of a torch function, which takes as long again as the trace itself, and
    without values none of these calls works.
    """

    def __init__(self, outside: OutsideWork, is_constant: Callable[[torch.Tensor], bool]) -> None:
        super().__init__()
        self._outside = outside
        self._is_constant = is_constant

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READERS and not self._is_constant(args[0]):
            self._outside.read_values(args[0].numel() + _FEW_VALUES)
        result = func(*args, **(kwargs or {}))
        if func in _PYTHON_LOOPS:
            self._outside.add(None, "python")
        return result


_PYTHON_LOOPS = frozenset((torch.Tensor.apply_, torch.Tensor.map_, torch.Tensor.map2_))  # type: ignore[attr-defined]
_READERS = frozenset((
    torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.__array__, torch.Tensor.data_ptr, torch.Tensor.__dlpack__,
    torch.Tensor.__reduce_ex__, *_PYTHON_LOOPS,
))  # fmt: skip
