"""Allocator events of one forward, in order, with the operator and the module call that caused each."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch._C._profiler import _EventType, _RecordFunctionFast
from torch.autograd.profiler import profile

from edge_opt.errors import InvalidInput
from edge_opt.trace.modules import Frame, ModuleStack
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
        # Dropped while recording: torch would otherwise keep its address in the allocator's books for ever.
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
    """Add the events at and below a node; children come in order of time."""
    if node.tag == _EventType.Allocation:
        taken = node.extra_fields
        if taken.device.type == device_type:
            events.append(Allocation(node.start_time_ns, taken.ptr, taken.alloc_size, operator, returns_ns))
        return
    is_mark = node.name.startswith(_MARK)
    if is_mark:
        events.append(Boundary(node.start_time_ns, int(node.name.removeprefix(_MARK)), True))
    elif returns_ns is None:
        share = _composite_share(node.name)
        # Of overloads that share a name, the composite one calls the other.
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
    """How many of an operator's overloads are made of other operators; 1 also for what is no operator at all."""
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
        kept = os.dup(2)
    except OSError:  # there is no error stream
        yield
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    os.close(nowhere)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
