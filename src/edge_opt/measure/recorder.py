"""The recorder: time stamps around the forward of each module, and whose time lies between them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from edge_opt.measure.device import Device
from edge_opt.records import ModuleCall
from edge_opt.trace.modules import module_paths

Now = Callable[[], int]
_END = -1


@dataclass(frozen=True, slots=True)
class RecordedBlock:
    """Mean seconds of one forward by index in the trace; the last place is the time outside of every forward.

    `calls` are the calls recorded in each place, `children` those made from it, both per forward.
    """

    own_s: NDArray[np.float64]
    calls: NDArray[np.float64]
    children: NDArray[np.float64]


class Recorder:
    """Watches the modules of one model while attached, and leaves no trace of itself when detached.

    A module call is known by its path and how many times the module was called before in the same forward, as in the
    trace. What the trace does not know is the work of the nearest caller that it does.
    """

    def __init__(self, model: nn.Module, calls: Sequence[ModuleCall], now: Now = time.perf_counter_ns) -> None:
        self.blocks: list[RecordedBlock] = []
        self._known = {(call.path, call.call_number): call.index for call in calls}
        self._places = len(calls) + 1
        watched = _watched_modules(model)
        self._paths = list(watched.values())
        self._events: list[int] = []
        self._wrappers = [
            (module.__dict__, *_wrapper(module, number, self._events, now)) for number, module in enumerate(watched)
        ]
        self._seen: list[int] = []
        self._owners = _Owners(0)

    def attach(self, count: int) -> None:
        """Start recording; made to stand before a block."""
        self._events.clear()
        for attributes, name, wrapper, _ in self._wrappers:
            attributes[name] = wrapper

    def detach(self, count: int) -> None:
        """Stop recording and keep what was recorded as one block of `count` forwards."""
        for attributes, name, _, original in self._wrappers:
            if original is _ABSENT:
                attributes.pop(name, None)
            else:
                attributes[name] = original
        modules = self._events[0::2]
        if modules != self._seen:
            self._seen, self._owners = modules, _owners(modules, self._paths, self._known, self._places)
        owners = self._owners
        stamps_ns = np.array(self._events[1::2], dtype=np.int64)
        own_ns = np.bincount(owners.intervals, weights=np.diff(stamps_ns), minlength=self._places)
        self.blocks.append(RecordedBlock(own_ns / count * 1e-9, owners.calls / count, owners.children / count))


def clock_of(device: Device) -> Now:
    """A clock in nanoseconds that first waits for the device, where work goes on after a call returned."""
    if not device.is_asynchronous:
        return time.perf_counter_ns

    def now() -> int:
        device.synchronize()
        return time.perf_counter_ns()

    return now


def recorded(forward: Callable[..., Any], number: int, events: list[int], now: Now) -> Callable[..., Any]:
    """`forward` between two events. Each is a pair in a flat list: which module (or the end of one), and when.

    Plain integers in one list: nothing here can start the garbage collector.
    """
    note = events.append

    def call(*args: Any, **kwargs: Any) -> Any:
        note(number)
        note(now())
        try:
            return forward(*args, **kwargs)
        finally:
            end = now()
            note(_END)
            note(end)

    return call


_ABSENT = object()


def _wrapper(
    module: nn.Module, number: int, events: list[int], now: Now
) -> tuple[str, Callable[..., Any], Callable[..., Any] | object]:
    """The attribute to replace, by what, and what stands there now. A compiled call never looks at `forward`."""
    name = "forward" if module.__dict__.get("_compiled_call_impl") is None else "_compiled_call_impl"
    return name, recorded(getattr(module, name), number, events, now), module.__dict__.get(name, _ABSENT)


def _watched_modules(model: nn.Module) -> dict[nn.Module, str]:
    """Modules that Python calls: what lies inside a compiled or script module runs, and is timed, as one."""
    watched: dict[nn.Module, str] = {}
    sealed: list[str] = []
    for module, path in module_paths(model).items():
        if any(path.startswith(prefix) for prefix in sealed):
            continue
        watched[module] = path
        if is_sealed(module):
            sealed.append(f"{path}." if path else "")
    return watched


def is_sealed(module: nn.Module) -> bool:
    """Whether the children of a module are out of Python's reach."""
    is_compiled = "_orig_mod" in module._modules or module.__dict__.get("_compiled_call_impl") is not None
    return is_compiled or isinstance(module, torch.jit.ScriptModule)


class _Owners:
    """To which place each interval between two events belongs, and how many calls stand in each place."""

    def __init__(self, places: int) -> None:
        self.intervals: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self.calls = np.zeros(places)
        self.children = np.zeros(places)


def _owners(modules: Sequence[int], paths: Sequence[str], known: Mapping[tuple[str, int], int], places: int) -> _Owners:
    """Between two events runs the module entered last and not yet left."""
    owners = _Owners(places)
    intervals: list[int] = []
    stack = [places - 1]
    calls: dict[int, int] = {}
    for number in modules:
        caller = stack[-1]
        if number == _END:
            stack.pop()
        else:
            if number == 0 and len(stack) == 1:
                calls = {}  # the model itself is entered: the next forward
            calls[number] = calls.get(number, 0) + 1
            place = known.get((paths[number], calls[number]), caller)
            owners.children[caller] += 1
            owners.calls[place] += 1
            stack.append(place)
        intervals.append(stack[-1])
    owners.intervals = np.array(intervals[:-1], dtype=np.int64)
    return owners


@dataclass(frozen=True, slots=True)
class RecordingCost:
    """Seconds that recording adds to one call: inside its own time stamps, and in its caller."""

    inside_s: float
    in_caller_s: float


def recording_cost(now: Now = time.perf_counter_ns, count: int = 200, rounds: int = 9) -> RecordingCost:
    """What recording one call costs here, on a module that does nothing; the smallest of a few rounds."""
    probe = nn.Identity()
    events: list[int] = []
    watched = recorded(probe.forward, 0, events, now)
    direct_ns, plain_ns, watched_ns, between_ns = [], [], [], []
    for _ in range(rounds):
        direct_ns.append(_loop_ns(probe.forward, count, now))
        plain_ns.append(_loop_ns(probe, count, now))
        events.clear()
        probe.__dict__["forward"] = watched
        watched_ns.append(_loop_ns(probe, count, now))
        del probe.__dict__["forward"]
        stamps = events[1::2]
        between_ns.append(sum(stamps[1::2]) - sum(stamps[0::2]))
    total = max(0, min(watched_ns) - min(plain_ns)) / count * 1e-9
    inside = max(0, min(between_ns) - min(direct_ns)) / count * 1e-9
    return RecordingCost(min(inside, total), max(0.0, total - inside))


def _loop_ns(call: Callable[[Any], Any], count: int, now: Now) -> int:
    start = now()
    for _ in range(count):
        call(None)
    return now() - start
