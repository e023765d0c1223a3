"""A training step traced: forward, loss, backward and optimizer on meta twins of the parameters.

The tape keeps every operator with its phase, its layer and what was alive, autograd switched on.
"""

from __future__ import annotations

import gc
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from enum import IntEnum
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import _StopRecomputationError, checkpoint

from edge_opt._support.unchanged import gc_paused, unchanged
from edge_opt.errors import EdgeOptError, InvalidInput, TraceFailed, message_of
from edge_opt.records.costs import ModuleCall, OpSignature, Role, StorageInfo
from edge_opt.trace.escapes import NeedsData, forget_frames, release_trace_tensors
from edge_opt.trace.inputs import CallArguments, InputSpec, map_arguments, meta_tensor, real_tensor, summed
from edge_opt.trace.lifetimes import Lifetimes, nbytes_of, storage_of
from edge_opt.trace.module_calls import Frame, ModuleStack, module_paths, owned_parameters
from edge_opt.trace.operators import Behavior, facts_of
from edge_opt.trace.tape import Tape
from edge_opt.trace.tracer import check_initialized, one_at_a_time
from edge_opt.training_steps.cpu_kernels import as_on_cpu, casting

Loss = Callable[[Any], torch.Tensor]
MakeOptimizer = Callable[[list[Any]], torch.optim.Optimizer]  # of parameters, or of groups of them


_sequence_number = torch._C._autograd._get_sequence_nr
_current_node = torch._C._current_autograd_node
_META = torch.device("meta")
_ADD, _ADD_IN_PLACE = torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor
_INDEX_PUT, _INDEX_PUT_IN_PLACE = torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default
# References to a sum of gradients that only the engine holds, counted while it hands the sum to this tape: four
# to the tensor (its buffer, the call's arguments and Python's own among them), two to its storage. Torch has no call
# that tells whether the engine will add in place. When a new torch counts otherwise, no sum is taken for in-place any
# more, peaks come out too high, and test_the_peak_is_that_of_a_real_step fails: print `holds` in `_adds_in_place` for a
# model whose layer is used twice, and put the new pair here.
_ENGINE_HOLDS = (4, 2)


class Phase(IntEnum):
    """The phase of the step that an operator belongs to."""

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
        can_move = (is_inside_node or self.floats_on_meta) and not self.is_real and _takes_device(func)
        if can_move and ((kwargs or {}).get("dtype") or torch.get_default_dtype()).is_floating_point:
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


@cache
def _takes_device(func: Any) -> bool:
    """Return whether it makes tensors of numbers on a device that is asked for; marks for a profiler make none."""
    is_factory = facts_of(func).behavior is Behavior.FACTORY
    return is_factory and any(argument.name == "device" for argument in func._schema.arguments)


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


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The settings of a step, beside the model and its inputs."""

    loss: Loss | None
    optimizer_name: str
    optimizer: MakeOptimizer
    trains: Mapping[int, bool]  # by id of the user's parameters
    checkpoint: tuple[str, ...] = ()
    autocast: torch.dtype | None = None
    accumulate: int = 1  # batches whose gradients are added up
    set_to_none: bool = True  # gradients are dropped between steps
    # Groups of an optimizer that was given: ids of the user's parameters, and settings of their own.
    groups: tuple[tuple[tuple[int, ...], Mapping[str, Any]], ...] = ()


@dataclass(frozen=True, slots=True)
class StepSegment:
    """A stretch of a traced step: [first, last) of its operators."""

    name: str
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class TracedStep:
    """A traced step. Numbers of storages are indices of `storages`."""

    modules: tuple[ModuleCall, ...]
    ops: tuple[StepOp, ...]
    storages: tuple[StorageInfo, ...]
    segments: tuple[StepSegment, ...]
    gradients: Mapping[int, str]  # storage of a gradient -> path of the parameter's module
    states: Mapping[int, str]  # storage of optimizer state -> the same
    param_bytes: int
    buffer_bytes: int
    input_bytes: int
    trained: Mapping[str, int]  # path of a module -> its parameters that got a gradient
    used_real_tensors: bool
    notes: tuple[str, ...] = ()


def trace_step(model: nn.Module, arguments: CallArguments, plan: StepPlan) -> TracedStep:
    """Trace one step, first on meta tensors; on real copies of the parameters where the model looks at values."""
    check_initialized([*model.parameters(), *model.buffers()])
    with one_at_a_time():
        for floats_on_meta in (False, True):
            try:
                return _run(model, arguments, plan, is_real=False, floats_on_meta=floats_on_meta)
            except NeedsData as signal:
                why = str(signal)
                break
            except _Mixed as error:
                if floats_on_meta:
                    raise _explained(error) from error.__cause__
        if any(parameter.is_meta for parameter in model.parameters()):
            raise TraceFailed(f"{why}, and its weights are on the meta device; build it with real weights")
        return _run(model, arguments, plan, is_real=True, floats_on_meta=False, note=f"run with real tensors: {why}")


class _Mixed(Exception):
    """Autograd met a gradient on another device than the value it belongs to."""


def _explained(error: BaseException) -> EdgeOptError:
    cause = error.__cause__ or error
    return TraceFailed(f"the training step failed: {message_of(cause)}")


class _Twins:
    """Parameters of the trace's own that stand for the user's: on meta, or real copies.

    They are made in the order in which the modules define them.
    """

    def __init__(self, modules: Iterable[nn.Module], trains: Mapping[int, bool], is_real: bool) -> None:
        self.by_id: dict[int, nn.Parameter] = {}
        self._kept: list[torch.Tensor] = []  # an id is an object's own only while the object lives
        self._trains = trains
        self._is_real = is_real
        for module in modules:
            for parameter in module._parameters.values():
                self.of(parameter)

    def of(self, tensor: Any) -> Any:
        """Return the twin of a parameter; anything else as it is."""
        if not isinstance(tensor, nn.Parameter):
            return tensor
        twin = self.by_id.get(id(tensor))
        if twin is None:
            if self._is_real:
                data = tensor.detach().clone()
            else:
                data = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
            twin = nn.Parameter(data, requires_grad=self._trains.get(id(tensor), tensor.requires_grad))
            twin.__dict__.update(tensor.__dict__)
            self.by_id[id(tensor)] = twin
            self._kept.append(tensor)
        return twin


def _run(
    model: nn.Module, arguments: CallArguments, plan: StepPlan, is_real: bool, floats_on_meta: bool,
    note: str | None = None,
) -> TracedStep:  # fmt: skip
    """Run one step with twins in the place of the parameters; then nothing of it is left."""
    paths = module_paths(model)
    modules = list(paths)
    owned = owned_parameters(paths)
    stack, lifetimes = StepStack(paths), Lifetimes()
    buffers = [b for module in modules for b in module._buffers.values() if b is not None]
    has_failed = False
    step: _Step | None = None
    tape: StepTape | None = None
    # The collector stays on, unlike in a trace of forward: autograd functions written in Python keep their outputs in
    # cycles, and a real step frees those when the collector runs.
    gc.collect(1)  # objects that are there already are old now: see `trace.escapes`
    try:
        with unchanged(modules, training=None) as snapshot:
            twins = _Twins(modules, plan.trains, is_real)
            snapshot.replace(twins.of, nn.Parameter)
            values = [(buffer, buffer.clone()) for buffer in buffers if is_real]
            owners = {
                id(p): module for module in reversed(modules) for p in module._parameters.values() if p is not None
            }
            roles: list[tuple[torch.Tensor, Role]] = [(twin, "parameter") for twin in twins.by_id.values()]
            tape = StepTape(stack, lifetimes, [*roles, *((b, "buffer") for b in buffers)], is_real, owners)
            tape.floats_on_meta, tape.constants = floats_on_meta, snapshot.tensors
            tape.outside.arrays = snapshot.arrays
            try:
                step = _Step(modules, tape, plan, _call(model, arguments, is_real), twins.by_id)
                traced = step.run()
                names = {id(p): paths[owners[id(p)]] for p in twins.by_id.values() if id(p) in owners}
                result = step.result(stack.calls(owned), traced, names, is_real, (note,) if note else ())
            finally:
                stack.unwatch()
                for buffer, value in values:
                    buffer.copy_(value)
    except BaseException as error:
        forget_frames(error)
        has_failed = True
        raise
    finally:
        stack.end()
        if step is not None:
            step.end()
        if tape is not None:
            tape.end()
        step = twins = roles = None  # type: ignore[assignment]
        if tape is not None:
            release_trace_tensors(partial(lifetimes.survivors, tape.is_input_independent), has_failed)
    return result


def _call(model: nn.Module, arguments: CallArguments, is_real: bool) -> tuple[CallArguments, list[torch.Tensor]]:
    """Return the call's arguments with tensors of their own, and those tensors."""
    tensors: list[torch.Tensor] = []
    first = next(model.parameters(), None)
    device = torch.device("cpu") if first is None else first.device
    floating = (parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())
    dtype = next(floating, torch.get_default_dtype())

    def make(value: Any) -> torch.Tensor:
        tensor = real_tensor(value, dtype, device) if is_real else meta_tensor(value, dtype)
        if not isinstance(value, InputSpec) and value.requires_grad:
            tensor.requires_grad_()
        tensors.append(tensor)
        return tensor

    return map_arguments(arguments, make), tensors


class _Step:
    """The step itself, segment by segment."""

    def __init__(
        self, modules: list[nn.Module], tape: StepTape, plan: StepPlan, call: tuple[CallArguments, list[torch.Tensor]],
        twins: Mapping[int, nn.Parameter],
    ) -> None:  # fmt: skip
        self.model, self.modules, self.tape, self.plan = modules[0], list(modules), tape, plan
        self.call, self.inputs = call
        self.parameters = list(twins.values())
        self._groups = [
            {**settings, "params": [twins[number] for number in ids if number in twins]}
            for ids, settings in plan.groups
        ]
        self.segments: list[StepSegment] = []
        self.optimizer: torch.optim.Optimizer | None = None
        self.loss: torch.Tensor | None = None
        self._gradients: dict[int, torch.Tensor] = {}
        self._states: dict[int, torch.Tensor] = {}

    def run(self) -> tuple[StorageInfo, ...]:
        """Trace forward and backward, a second time if gradients accumulate, then the optimizer twice."""
        tape, lifetimes = self.tape, self.tape.lifetimes
        for parameter in self.parameters:
            lifetimes.register(parameter, "parameter")
        for tensor in self.inputs:
            lifetimes.register(tensor, "input")
        # A model in training mode may hold modules in eval mode, such as norms that keep their statistics.
        if not self.model.training:
            for module in self.modules:
                module.__dict__["training"] = True
        tape.stack.watch(self.modules)
        self._checkpoint()
        on_cpu = as_on_cpu(self.plan.autocast) if not tape.is_real else nullcontext()
        with torch.enable_grad(), on_cpu, tape:
            self._batch("batch")
            # The next batch meets gradients that are there already: of its own step, or zeros of the one before.
            if self.plan.accumulate > 1 or not self.plan.set_to_none:
                self.loss = self.loss if self.plan.accumulate > 1 else None
                self._batch("next batch")
            self._gradients = self._numbers([(p.grad, p) for p in self.parameters if p.grad is not None])
            self.optimizer = self._made_optimizer()
            self._optimize("first optimizer step")
            self._states = self._numbers(self._state_tensors())
            if not self._has_born_states_first():
                self._optimize("optimizer step")
        return lifetimes.finish()

    def _made_optimizer(self) -> torch.optim.Optimizer:
        try:
            optimizer = self.plan.optimizer(self._groups or self.parameters)
        except Exception as error:
            raise InvalidInput(f"the optimizer cannot be made: {message_of(error)}") from error
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise InvalidInput(f"optimizer must make a torch optimizer, and it made a {type(optimizer).__name__}")
        return optimizer

    def _checkpoint(self) -> None:
        """Let the named modules drop what they keep, and compute it again in the backward."""
        wanted = set(self.plan.checkpoint)
        for module in self.modules if wanted else ():
            if self.tape.stack.paths[module] in wanted:
                module.__dict__["forward"] = partial(checkpoint, module.forward, use_reentrant=False)

    def end(self) -> None:
        """Let go of every tensor; an optimizer holds its own in circles."""
        for parameter in self.parameters:
            parameter.grad = None
        if self.optimizer is not None:
            self.optimizer.state.clear()
            self.optimizer.param_groups.clear()
        for tensors in (self._groups, self.parameters, self.inputs, self.modules, self._gradients, self._states):
            tensors.clear()
        del self.model
        self.loss = None
        self.call = CallArguments((), {})

    def _batch(self, name: str) -> None:
        first = len(self.tape.steps)
        self.loss = loss = self._loss()  # a loop holds it until the next one
        self._segment(f"{name}: forward", first)
        first = len(self.tape.steps)
        self.tape.phase = Phase.BACKWARD
        try:
            loss.backward()  # type: ignore[no-untyped-call]
        except (NeedsData, EdgeOptError):
            raise
        except Exception as error:
            if "device" in str(error) and not self.tape.is_real:
                raise _Mixed from error
            raise _explained(error) from error
        finally:
            self.tape.phase = Phase.FORWARD
        self._segment(f"{name}: backward", first)

    def _loss(self) -> torch.Tensor:
        stack = self.tape.stack
        try:
            with gc_paused():  # what forward makes is young until it has been judged
                with casting(self.plan.autocast is not None):
                    result = self.model(*self.call.args, **self.call.kwargs)
                    loss = summed(result) if self.plan.loss is None else self.plan.loss(result)
                self.tape.record_outside_work(result)
        except (NeedsData, EdgeOptError):
            raise
        except Exception as error:
            if "device" in str(error) and not (self.tape.is_real or self.tape.floats_on_meta):
                # A small constant stayed real, as the first state of a recurrent layer, and met what is on meta.
                raise _Mixed from error
            frame = stack.refused
            where = f"module {frame.path!r} ({frame.kind})" if frame and frame.path else "the model"
            where = "the loss" if frame is None else where
            raise TraceFailed(f"{where} failed: {message_of(error)}") from error
        del result
        if not isinstance(loss, torch.Tensor):
            raise InvalidInput(f"the loss must return a tensor, and it returned a {type(loss).__name__}")
        if loss.numel() != 1:
            raise InvalidInput(f"the loss has the shape {tuple(loss.shape)}; it must be one number, such as its mean")
        if not loss.requires_grad:
            raise InvalidInput(
                "the loss has no gradient: no trainable parameter takes part in it, or it was detached on the way"
            )
        return loss

    def _optimize(self, name: str) -> None:
        first = len(self.tape.steps)
        assert self.optimizer is not None
        self.tape.phase = Phase.OPTIMIZER
        try:
            self.optimizer.step()
        except (NeedsData, EdgeOptError):
            raise
        except Exception as error:
            raise TraceFailed(f"the optimizer failed: {message_of(error)}") from error
        finally:
            self.tape.phase = Phase.FORWARD
        self._segment(name, first)

    def _has_born_states_first(self) -> bool:
        """Return whether the optimizer made all of its state and only then began to write parameters.

        What follows then is the same in every later step, and need not be run again.
        """
        segment, roles = self.segments[-1], self.tape.lifetimes.roles
        born = segment.first
        for index in range(segment.first, segment.last):
            if not self._states.keys().isdisjoint(self.tape.steps[index].creates):
                born = index + 1
        writes = (op.reads[0] for op in self.tape.steps[segment.first : born] if op.signature.op.endswith("_"))
        if any(roles[number] == "parameter" for number in writes):
            return False
        self.segments.append(StepSegment("optimizer step", born, segment.last))
        return True

    def _segment(self, name: str, first: int) -> None:
        self.segments.append(StepSegment(name, first, len(self.tape.steps)))

    def _state_tensors(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        assert self.optimizer is not None
        return [
            (value, parameter)
            for parameter, state in self.optimizer.state.items()
            for value in state.values()
            if isinstance(value, torch.Tensor)
        ]

    def _numbers(self, tensors: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[int, torch.Tensor]:
        """Return the parameter of each storage, by the number of the storage."""
        known = self.tape.lifetimes.numbers
        numbers = ((known.get(storage_of(tensor)._cdata), parameter) for tensor, parameter in tensors)
        return {number: parameter for number, parameter in numbers if number is not None}

    def result(
        self, calls: tuple[ModuleCall, ...], storages: tuple[StorageInfo, ...], names: dict[int, str], is_real: bool,
        notes: tuple[str, ...],
    ) -> TracedStep:  # fmt: skip
        trained: dict[str, int] = {}
        for parameter in self._gradients.values():
            path = names.get(id(parameter), "")
            trained[path] = trained.get(path, 0) + parameter.numel()
        buffers = {id(b): nbytes_of(b) for module in self.modules for b in module._buffers.values() if b is not None}
        return TracedStep(
            calls,
            tuple(self.tape.steps),
            storages,
            tuple(self.segments),
            {number: names.get(id(p), "") for number, p in self._gradients.items()},
            {number: names.get(id(p), "") for number, p in self._states.items()},
            param_bytes=sum(map(nbytes_of, self.parameters)),
            buffer_bytes=sum(buffers.values()),
            input_bytes=sum(map(nbytes_of, self.inputs)),
            trained=trained,
            used_real_tensors=is_real,
            notes=notes,
        )
