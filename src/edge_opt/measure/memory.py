"""Memory of one forward: the allocator's exact peak, where it stands, and what each module call adds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from edge_opt.errors import InvalidInput, MeasurementFailed
from edge_opt.measure.allocations import Boundary, Event, MarkedStack, record_events
from edge_opt.records import MeasuredMemory, ModuleMemory, Trace
from edge_opt.trace.guard import as_found
from edge_opt.trace.inputs import CallArguments, materialize
from edge_opt.trace.modules import module_paths


def measure_memory(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    trace: Trace,
    device: str | torch.device = "cpu",
    training: bool = False,
) -> MeasuredMemory:
    """What the allocator hands out during one forward without gradients, weights and inputs apart.

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
    with _ready(model, stack, args, kwargs, trace, training) as forward:
        before_bytes = _start_statistics(device)
        events = record_events(forward, device)
        counted_bytes = _peak_of_statistics(device, before_bytes)
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


@contextmanager
def _ready(
    model: nn.Module, stack: MarkedStack, args: tuple[Any, ...], kwargs: Mapping[str, Any], trace: Trace, training: bool
) -> Iterator[Callable[[], Any]]:
    """One forward, ready to be called; afterwards the model, its inputs and torch's switches are as they were."""
    kept = list(model.buffers())
    if _writes_its_own(trace):
        kept += model.parameters()

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    call = materialize(CallArguments(args, dict(kwargs)), keep)
    kept = [tensor for tensor in kept if tensor.layout is torch.strided]
    copies = [tensor.detach().clone() for tensor in kept]

    def forward() -> Any:
        try:
            return model(*call.args, **call.kwargs)
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            raise MeasurementFailed(f"the model raised while its memory was measured: {what}") from error

    modules = list(stack.paths)
    is_fast_path = torch.backends.mha.get_fastpath_enabled()
    try:
        with as_found(modules, training), torch.no_grad():
            # The guard switches it off for tracing; what is measured is what the caller would run.
            torch.backends.mha.set_fastpath_enabled(is_fast_path)
            stack.watch(modules)
            yield forward
    finally:
        for tensor, copy in zip(kept, copies, strict=True):
            # Expanded tensors and those of inference mode cannot be written to; forward could not either.
            if not torch.equal(tensor, copy):
                tensor.detach().copy_(copy)


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes alive when a module call began, how many more when it ended, and the most in between."""

    call: int
    before_bytes: int
    allocated_bytes: int
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class Replay:
    """What allocator events add up to. Scratch is what an operator took and gave back before it returned."""

    peak_bytes: int
    scratch_bytes: int
    tensor_peak_bytes: int
    peak_op: str
    peak_call: int | None
    spans: tuple[Span, ...]


def replay(events: Sequence[Event]) -> Replay:
    """Follow the events and note the first highest point; memory taken before the first event is left out."""
    scratch = _scratch(events)
    taken: dict[int, tuple[int, bool]] = {}
    running: list[list[int]] = []  # call, bytes before, peak
    spans: list[Span] = []
    alive = tensors = tensor_peak = 0
    peak, peak_scratch, peak_op, peak_call = 0, 0, "", None
    for index, event in enumerate(events):
        if isinstance(event, Boundary):
            if event.is_entry:
                running.append([event.call, alive, alive])
                continue
            call, before, most = running.pop()
            spans.append(Span(call, before, alive - before, most))
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
    """Positions of allocations that are given back before the operator which made them returns."""
    found: set[int] = set()
    taken: dict[int, tuple[int, int | None]] = {}
    for index, event in enumerate(events):
        if isinstance(event, Boundary):
            continue
        position, returns_ns = taken.pop(event.address, (0, None))
        if event.nbytes > 0:
            taken[event.address] = index, event.returns_ns
        elif returns_ns is not None and event.time_ns <= returns_ns:
            found.add(position)
    return found


def _writes_its_own(trace: Trace) -> bool:
    """Whether an in-place operator wrote to a tensor of the model."""
    return any(
        trace.signatures[call.signature].op.endswith("_")
        and bool(call.reads)
        and trace.storages[call.reads[0]].role in ("parameter", "buffer")
        for call in trace.ops
    )


def _start_statistics(device: torch.device) -> int:
    """Bytes in use on a device whose allocator keeps statistics; its peak is counted from here."""
    if device.type == "cpu":
        return 0
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def _peak_of_statistics(device: torch.device, before_bytes: int) -> int | None:
    """The allocator's own peak above `before_bytes`; None on the CPU, whose allocator keeps none."""
    if device.type == "cpu":
        return None
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before_bytes
