"""The allocator's peak, replayed from the events of torch's profiler.

The events come from kineto's tree (`profiler.kineto_results.experimental_event_tree()`), which is private to torch. It
is the only source that has, in one order, allocations with addresses, the operators around them, and our own marks.
`torch.profiler.profile` adds a schedule and post-processing that take longer than the forward. When torch changes,
check the event's `tag`, `extra_fields` (`ptr`, `alloc_size`, `device`), `start_time_ns`, `end_time_ns`, `children`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn
from torch._C._profiler import _EventType, _RecordFunctionFast
from torch.autograd.profiler import profile

from edge_opt.errors import InvalidInput, MeasurementFailed
from edge_opt.measuring.session import ready
from edge_opt.records.costs import Trace
from edge_opt.records.measurements import MeasuredMemory, ModuleMemory
from edge_opt.trace.inputs import CallArguments, map_arguments
from edge_opt.trace.module_calls import Frame, ModuleStack, module_paths
from edge_opt.trace.operators import WHOLE

_MARK = "edge_opt module call "


@dataclass(frozen=True, slots=True)
class Allocation:
    """Memory taken, or given back where `nbytes` is below zero, with the operator at work.

    `operator` is named as in the trace; `returns_ns` is when the dispatched operator inside it returns. Both are empty
    between operators.
    """

    time_ns: int
    address: int
    nbytes: int
    operator: str = ""
    returns_ns: int | None = None


@dataclass(frozen=True, slots=True)
class Boundary:
    """The beginning or the end of a module call, by its number in order of execution."""

    time_ns: int
    call: int
    is_entry: bool


Event = Allocation | Boundary


class MarkedStack(ModuleStack):
    """A module stack that leaves a mark in the profiler's record at each call."""

    def __init__(self, paths: dict[torch.nn.Module, str]) -> None:
        super().__init__(paths)
        self._marks: list[Any] = []

    def enter(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Frame:
        frame = super().enter(module, args, kwargs)
        mark = _RecordFunctionFast(f"{_MARK}{frame.index}")
        mark.__enter__()
        self._marks.append(mark)
        return frame

    def leave(self, frame: Frame, result: Any) -> None:
        self._marks.pop().__exit__(None, None, None)
        super().leave(frame, result)

    def fail(self, frame: Frame, error: BaseException) -> None:
        self._marks.pop().__exit__(None, None, None)
        super().fail(frame, error)


def record_events(forward: Callable[[], Any], device: torch.device) -> list[Event]:
    """Run `forward` once and return what the allocator of `device` did, result included.

    Memory that was taken before is not part of it, and neither is what worker threads take for themselves.
    """
    if torch._C._autograd._profiler_enabled():
        raise InvalidInput("a torch profiler is running, and there can be only one; stop it to measure memory")
    profiler = profile(profile_memory=True)
    with _muted():
        profiler.__enter__()  # type: ignore[no-untyped-call]
    try:
        result = forward()
        # The result must die while recording. The profiler keeps a table of live addresses; an address that is freed
        # after the recording stays in it, and the next tensor at that address would count as freed unseen.
        del result
    finally:
        with _muted():
            profiler.__exit__(None, None, None)  # type: ignore[no-untyped-call]
    events: list[Event] = []
    results: Any = profiler.kineto_results
    for root in results.experimental_event_tree():
        _collect(root, device.type, "", None, events)
    return sorted(events, key=lambda event: event.time_ns)


def _collect(node: Any, device_type: str, operator: str, returns_ns: int | None, events: list[Event]) -> None:
    """Add the events at and below a node; children come in order of time.

    An allocation belongs to the operator that the trace has: the outermost one that torch dispatches to a kernel of its
    own. CompositeImplicitAutograd operators, such as `linear`, only call others, and no dispatch mode sees them. So
    they do not count as "operator", unless the trace keeps them whole.
    """
    if node.tag == _EventType.Allocation:
        fields = node.extra_fields
        if fields.device.type == device_type:
            events.append(Allocation(node.start_time_ns, fields.ptr, fields.alloc_size, operator, returns_ns))
        return
    is_mark = node.name.startswith(_MARK)
    if is_mark:
        events.append(Boundary(node.start_time_ns, int(node.name.removeprefix(_MARK)), True))
    elif returns_ns is None:
        share = _composite_share(node.name)
        # If two overloads share a name, the composite one calls the other.
        is_dispatched = share == 0 or (share < 1 and all(child.name != node.name for child in node.children))
        if not operator and (is_dispatched or node.name in WHOLE):
            operator = node.name.replace("::", ".")
        if is_dispatched:
            returns_ns = node.end_time_ns
    for child in node.children:
        _collect(child, device_type, operator, returns_ns, events)
    if is_mark:
        events.append(Boundary(node.end_time_ns, int(node.name.removeprefix(_MARK)), False))


@cache
def _composite_share(name: str) -> float:
    """Return the share of an operator's overloads that are made of other operators; 1 for what is not an operator.

    Kineto tells the name without the overload, so an operator with overloads of both sorts has a share in between.
    """
    if "::" not in name:
        return 1.0
    schemas = [
        (f"{name}.{schema.overload_name}" if schema.overload_name else name, schema.is_mutable)
        for schema in torch._C._jit_get_schemas_for_operator(name)
    ]
    known = [(full, is_mutable) for full, is_mutable in schemas if torch._C._dispatch_has_kernel(full)]
    # Variants with `out=` are never composite, and are not what a model calls.
    plain = [full for full, is_mutable in known if not is_mutable] or [full for full, _ in known]
    composite = [torch._C._dispatch_has_kernel_for_dispatch_key(full, "CompositeImplicitAutograd") for full in plain]
    return sum(composite) / len(composite) if composite else 1.0


@contextmanager
def _muted() -> Iterator[None]:
    """Keep the profiler's library from announcing its start and end on the error stream."""
    try:
        stderr = os.dup(2)
    except OSError:  # there is no error stream
        yield
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    os.close(nowhere)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)


def measure_memory(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    trace: Trace,
    device: str | torch.device = "cpu",
    training: bool = False,
) -> MeasuredMemory:
    """Measure what the allocator hands out during one forward without gradients, weights and inputs apart.

    `trace` is the model's own, on inputs of the same shapes; rows of modules carry its numbers.

    >>> from edge_opt.trace import trace
    >>> model, x = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 8)), torch.zeros(4, 16)
    >>> measure_memory(model, (x,), {}, trace(model, x)).peak_bytes == 4 * (64 + 64) * 4
    True
    """
    device = torch.device(device)
    if device.type not in ("cpu", "cuda"):
        raise InvalidInput(f"memory cannot be measured on {device.type!r}; it can on 'cpu' and 'cuda'")
    # As in the trace, what is measured is the module behind `torch.compile`.
    model = getattr(model, "_orig_mod", model)
    stack = MarkedStack(module_paths(model))
    # Clones, so that a model that writes to its inputs leaves the caller's unchanged.
    call = map_arguments(CallArguments(args, dict(kwargs)), torch.clone)

    def forward() -> Any:
        try:
            return model(*call.args, **call.kwargs)
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            raise MeasurementFailed(f"the model raised while its memory was measured: {what}") from error

    counted_bytes = None
    with ready(model, trace, training, threads=None):
        stack.watch(list(stack.paths))
        if device.type == "cpu":
            events = record_events(forward, device)
        else:
            # This allocator keeps statistics of its own, which also count what no event tells.
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
            before_bytes = torch.cuda.memory_allocated(device)
            events = record_events(forward, device)
            torch.cuda.synchronize(device)
            counted_bytes = torch.cuda.max_memory_allocated(device) - before_bytes
    numbers = {(call.path, call.call_number): call.index for call in trace.modules}
    calls = [(frame.path, numbers.get((frame.path, frame.call_number))) for frame in stack.frames]
    replayed = replay(events)
    peak_bytes = replayed.peak_bytes if counted_bytes is None else counted_bytes
    return MeasuredMemory(
        peak_bytes=peak_bytes,
        activation_bytes=peak_bytes - replayed.scratch_bytes,
        scratch_bytes=replayed.scratch_bytes,
        tensor_peak_bytes=replayed.tensor_peak_bytes,
        peak_op=replayed.peak_op,
        peak_module="" if replayed.peak_call is None else calls[replayed.peak_call][0],
        param_bytes=trace.param_bytes,
        modules=tuple(
            ModuleMemory(number, path, span.before_bytes, span.allocated_bytes, span.peak_bytes)
            for span in replayed.spans
            for path, number in (calls[span.call],)
            if number is not None
        ),
        source="allocator events" if counted_bytes is None else "statistics of the caching allocator",
    )


@dataclass(frozen=True, slots=True)
class CallMemory:
    """Bytes alive when a module call began, how many more when it ended, and the most in between."""

    call: int
    before_bytes: int
    allocated_bytes: int
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class Replay:
    """The sums of allocator events. Scratch is memory that an operator allocated and freed before it returned."""

    peak_bytes: int
    scratch_bytes: int
    tensor_peak_bytes: int
    peak_op: str
    peak_call: int | None
    spans: tuple[CallMemory, ...]


def replay(events: Sequence[Event]) -> Replay:
    """Follow the events and note the first highest point; memory taken before the first event is left out."""
    scratch = _scratch(events)
    taken: dict[int, tuple[int, bool]] = {}
    running: list[list[int]] = []  # call, bytes before, peak
    spans: list[CallMemory] = []
    alive = tensors = tensor_peak = 0
    peak, peak_scratch, peak_op, peak_call = 0, 0, "", None
    for index, event in enumerate(events):
        if isinstance(event, Boundary):
            if event.is_entry:
                running.append([event.call, alive, alive])
                continue
            call, before, most = running.pop()
            spans.append(CallMemory(call, before, alive - before, most))
            if running:
                running[-1][2] = max(running[-1][2], most)
            continue
        # An address handed out again was given back unseen, in another thread.
        nbytes, is_scratch = taken.pop(event.address, (0, False))
        alive -= nbytes
        tensors -= 0 if is_scratch else nbytes
        if event.nbytes < 0:
            continue
        taken[event.address] = event.nbytes, index in scratch
        alive += event.nbytes
        tensors += 0 if index in scratch else event.nbytes
        tensor_peak = max(tensor_peak, tensors)
        if running:
            running[-1][2] = max(running[-1][2], alive)
        if alive > peak:
            peak, peak_scratch, peak_op = alive, alive - tensors, event.operator
            peak_call = running[-1][0] if running else None
    spans.sort(key=lambda span: span.call)
    return Replay(peak, peak_scratch, tensor_peak, peak_op, peak_call, tuple(spans))


def _scratch(events: Sequence[Event]) -> set[int]:
    """Return the positions of allocations that are given back before the operator which made them returns."""
    scratch: set[int] = set()
    taken: dict[int, tuple[int, int | None]] = {}
    for index, event in enumerate(events):
        if isinstance(event, Boundary):
            continue
        position, returns_ns = taken.pop(event.address, (0, None))
        if event.nbytes > 0:
            taken[event.address] = index, event.returns_ns
        elif returns_ns is not None and event.time_ns <= returns_ns:
            scratch.add(position)
    return scratch
