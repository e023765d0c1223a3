"""The tape of a training step: every operator with its phase, its layer and what was alive, autograd switched on."""

from __future__ import annotations

from bisect import bisect_right
from enum import IntEnum
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import _StopRecomputationError

from edge_opt.records.costs import OpSignature, Role
from edge_opt.trace.lifetimes import Lifetimes
from edge_opt.trace.module_calls import Frame, ModuleStack
from edge_opt.trace.operators import Behavior, facts_of
from edge_opt.trace.tape import Tape

_sequence_number = torch._C._autograd._get_sequence_nr
_current_node = torch._C._current_autograd_node
_META = torch.device("meta")
_ADD, _ADD_IN_PLACE = torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor
_INDEX_PUT, _INDEX_PUT_IN_PLACE = torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default
# References to a sum of gradients that nobody holds but the engine, counted while it hands the sum to this tape: four
# to the tensor (its buffer, the call's arguments and Python's own among them), two to its storage. Torch has no call
# that tells whether the engine will add in place. When a new torch counts otherwise, no sum is taken for in-place any
# more, peaks come out too high, and test_the_peak_is_that_of_a_real_step fails: print `holds` in `_adds_in_place` for a
# model whose layer is used twice, and put the new pair here.
_ENGINE_HOLDS = (4, 2)


class Phase(IntEnum):
    """What an operator is part of."""

    FORWARD = 0
    LOSS = 1
    BACKWARD = 2
    RECOMPUTATION = 3
    OPTIMIZER = 4


# Names of their own: the tape asks for them at every operator, and a member of an enum is slow to get at.
_FORWARD, _BACKWARD, _OPTIMIZER = Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER


class StepOp(NamedTuple):
    """One operator of a step.

    `module_call` is the one it belongs to, None outside of the model; `live_bytes` are those of everything born in
    the step, outputs and scratch included.
    """

    phase: Phase
    module_call: int | None
    signature: OpSignature
    reads: tuple[int, ...]
    creates: tuple[int, ...]
    live_bytes: int


class StepStack(ModuleStack):
    """A module stack that knows which module was running when autograd made a node, by the node's number."""

    def __init__(self, paths: dict[nn.Module, str]) -> None:
        super().__init__(paths)
        self.first: dict[nn.Module, Frame] = {}
        self._numbers: list[int] = [0]
        self._frames: list[Frame | None] = [None]

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Frame:
        frame = super().enter(module, args, kwargs)
        self.first.setdefault(module, frame)
        self._note(frame)
        return frame

    def leave(self, frame: Frame, result: Any) -> None:
        super().leave(frame, result)
        self._note(frame.parent)

    def fail(self, frame: Frame, error: BaseException) -> None:
        if isinstance(error, _StopRecomputationError):
            # A checkpoint has what it needs. The error would keep the tensors of its frames alive.
            self.current = frame.parent
        else:
            super().fail(frame, error)
        self._note(frame.parent)

    def _note(self, frame: Frame | None) -> None:
        self._numbers.append(_sequence_number())
        self._frames.append(frame)

    def frame_at(self, number: int) -> Frame | None:
        """Return the module that was running when the node with this number was made.

        Autograd numbers nodes in the order in which a thread makes them, and a trace runs in one thread. So it is
        enough to note the number at each entry and exit of a module; hooks on every node would keep tensors alive.
        """
        return self._frames[bisect_right(self._numbers, number) - 1]

    def end(self) -> None:
        super().end()
        self.first.clear()
        self._frames.clear()
        self._numbers.clear()


class StepTape(Tape):  # type: ignore[no-untyped-call]
    """Records a step. Nodes of autograd run on the same tape, and belong to the module that made them."""

    def __init__(
        self, stack: StepStack, lifetimes: Lifetimes, tensors: list[tuple[torch.Tensor, Role]], is_real: bool,
        owners: dict[int, nn.Module],
    ) -> None:  # fmt: skip
        super().__init__(stack, lifetimes, tensors, is_real)
        self.stack: StepStack = stack
        self.phase = Phase.FORWARD
        self.steps: list[StepOp] = []
        self.floats_on_meta = False
        self._owners = owners

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        phase = self.phase
        if phase is _OPTIMIZER and func.namespace == "profiler":
            return func(*args, **(kwargs or {}))  # a mark that torch's optimizers leave for a profiler
        is_inside_node = phase is _BACKWARD and self.stack.current is None
        if (is_inside_node or self.floats_on_meta) and not self.is_real and _makes_floats(func, kwargs):
            # A gradient must be on the device of what it is the gradient of, and that is on meta.
            kwargs = {**(kwargs or {}), "device": _META}
            result = func(*args, **kwargs)
            signature = self._entry(facts_of(func), args, kwargs, result, [result], []).signature
            self._record(signature, [result], [])
            return result
        if is_inside_node and func is _ADD and _adds_in_place(args):
            # Under a dispatch mode the engine makes a new tensor of each sum; without one it adds to the first.
            super().__torch_dispatch__(_ADD_IN_PLACE, types, args, kwargs)
            return args[0]
        if is_inside_node and func is _INDEX_PUT and _is_gradient_of_indexing():
            # Likewise: without a mode, the gradient is written into the zeros that were made for it.
            super().__torch_dispatch__(_INDEX_PUT_IN_PLACE, types, args, kwargs)
            return args[0]
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _record(self, signature: OpSignature, outputs: list[torch.Tensor], reads: list[int]) -> None:
        lifetimes = self.lifetimes
        creates: tuple[int, ...] = ()
        for tensor in outputs:
            number = lifetimes.born(tensor)
            if number is not None:
                creates += (number,)
        frame, phase = self.stack.current, self.phase
        if phase is _BACKWARD:
            if frame is None:
                frame = self._frame_of_node()
            else:
                phase = Phase.RECOMPUTATION
        elif phase is _FORWARD and frame is None:
            phase = Phase.LOSS
        module_call = None if frame is None else frame.index
        live = lifetimes.live_bytes + signature.scratch_bytes
        self.steps.append(StepOp(phase, module_call, signature, tuple(reads), creates, live))
        lifetimes.time = len(self.steps)

    def end(self) -> None:
        super().end()
        self._owners.clear()

    def _frame_of_node(self) -> Frame | None:
        node = _current_node()
        if node is None:
            return None
        variable = getattr(node, "variable", None)
        if variable is not None:
            return self.stack.first.get(self._owners[id(variable)]) if id(variable) in self._owners else None
        return self.stack.frame_at(node._sequence_nr())


def _makes_floats(func: Any, kwargs: Any) -> bool:
    """Return whether it makes a floating tensor on a device that is asked for, of nothing but numbers."""
    if facts_of(func).behavior is not Behavior.FACTORY or not _takes_device(func):
        return False
    dtype = (kwargs or {}).get("dtype") or torch.get_default_dtype()
    return bool(dtype.is_floating_point)


@cache
def _takes_device(func: Any) -> bool:
    """Return whether it makes tensors on a device that is asked for; what marks a stretch for a profiler makes none."""
    return any(argument.name == "device" for argument in func._schema.arguments)


def _is_gradient_of_indexing() -> bool:
    node = _current_node()
    return node is not None and node.name() == "IndexBackward0"


def _adds_in_place(args: Any) -> bool:
    """Return whether the engine, which adds up gradients that arrive at a node, would write into the first of them."""
    total, gradient = args[0], args[1]
    if total.__class__ is not torch.Tensor or gradient.__class__ is not torch.Tensor:
        return False
    holds = (
        total._use_count(),  # type: ignore[attr-defined]
        torch._C._storage_Use_Count(total.untyped_storage()._cdata),
    )
    return holds == _ENGINE_HOLDS and torch.ops.aten.is_non_overlapping_and_dense(total)
