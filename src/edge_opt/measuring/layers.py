"""Time stamps around modules, laid over the latency that was measured without them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from edge_opt.measuring.machine import Device
from edge_opt.measuring.statistics import resamples
from edge_opt.records.costs import LayerCost, ModuleCall, OpCost
from edge_opt.records.measurements import Interval, Latency, LayerLatencies, LayerLatency
from edge_opt.trace.module_calls import module_paths

Now = Callable[[], int]
END = -1


@dataclass(frozen=True, slots=True)
class RecordedBlock:
    """Mean seconds of one forward by index in the trace; the last place is the time outside of every forward.

    `calls` are the calls recorded in each place, `children` those made from it, both per forward.
    """

    own_s: NDArray[np.float64]
    calls: NDArray[np.float64]
    children: NDArray[np.float64]


class LayerRecorder:
    """Watches the modules of one model while attached, and leaves no trace of itself when detached.

    A module call is known by its path and how many times the module was called before in the same forward, as in the
    trace. What the trace does not know is the work of the nearest caller that it does.
    """

    def __init__(self, model: nn.Module, calls: Sequence[ModuleCall], now: Now = time.perf_counter_ns) -> None:
        self.blocks: list[RecordedBlock] = []
        self._known = {(call.path, call.call_number): call.index for call in calls}
        self._places = len(calls) + 1
        watched = watched_modules(model)
        self._paths = list(watched.values())
        self._events: list[int] = []
        self._wrappers = [
            (module.__dict__, *_wrapper(module, number, self._events, now)) for number, module in enumerate(watched)
        ]
        self._seen: list[int] = []
        self._owners = _Owners(0)

    @property
    def events(self) -> list[tuple[int, int]]:
        """The events of the last block in order: the number of the module that was entered, or END, and when."""
        return list(zip(self._events[0::2], self._events[1::2], strict=True))

    def attach(self, count: int) -> None:
        """Start recording; called before a block."""
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
    """Return a clock in nanoseconds that first waits for the device, where work goes on after a call returned."""
    if not device.is_asynchronous:
        return time.perf_counter_ns

    def now() -> int:
        device.synchronize()
        return time.perf_counter_ns()

    return now


def recorded(forward: Callable[..., Any], number: int, events: list[int], now: Now) -> Callable[..., Any]:
    """Return `forward` between two events. Each is a pair in a flat list: which module (or the end of one), and when.

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
            note(END)
            note(end)

    return call


_ABSENT = object()


def _wrapper(
    module: nn.Module, number: int, events: list[int], now: Now
) -> tuple[str, Callable[..., Any], Callable[..., Any] | object]:
    """Return the attribute to replace, by what, and its value now. A compiled call never reads `forward`."""
    name = "forward" if module.__dict__.get("_compiled_call_impl") is None else "_compiled_call_impl"
    return name, recorded(getattr(module, name), number, events, now), module.__dict__.get(name, _ABSENT)


def watched_modules(model: nn.Module) -> dict[nn.Module, str]:
    """Return the modules that Python calls, with their paths; a compiled or script module is timed as one."""
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
    """Return whether the children of a module are out of Python's reach."""
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
        if number == END:
            stack.pop()
        else:
            if number == 0 and len(stack) == 1:
                calls = {}  # the model itself is entered: the next forward
            calls[number] = calls.get(number, 0) + 1
            owner = known.get((paths[number], calls[number]), caller)
            owners.children[caller] += 1
            owners.calls[owner] += 1
            stack.append(owner)
        intervals.append(stack[-1])
    owners.intervals = np.array(intervals[:-1], dtype=np.int64)
    return owners


@dataclass(frozen=True, slots=True)
class RecordingCost:
    """Seconds that recording adds to one call: inside its own time stamps, and in its caller."""

    inside_s: float
    in_caller_s: float


def recording_cost(now: Now = time.perf_counter_ns, count: int = 200, rounds: int = 9) -> RecordingCost:
    """Return what recording one call costs here, on a module that does nothing; the smallest of a few rounds."""
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


Floats = NDArray[np.float64]

# Bootstrap draws times blocks: twice as many would move the ends of an interval by less than their own noise.
_DRAWN = 200_000
_AT_ONCE = 64


def layer_latencies(
    layers: Sequence[LayerCost],
    plain: Latency,
    recorded: Latency,
    blocks: Sequence[RecordedBlock],
    cost: RecordingCost,
) -> LayerLatencies:
    """Return seconds of each layer and of what lies between them; together they are the median of `plain`.

    The recorded parts of a forward, taken where nothing held them up, divide the unrecorded latency among them. A row
    is a call that runs operators or has no children; time spent in other containers, in calling modules and outside of
    the model lies between the layers.
    """
    rows = _rows(layers, blocks)
    places = [row for row, _, _ in rows]
    parts_s = _parts(recorded.samples_s, blocks, cost)
    undisturbed_s = _lower_quartile(parts_s)
    whole_s = plain.median_s
    recorded_s = math.fsum(undisturbed_s)
    shares = undisturbed_s[places] / max(recorded_s, np.finfo(float).tiny)
    lows, highs = _bounds(parts_s, np.array(plain.samples_s), places)
    seconds = [float(share) * whole_s for share in shares]
    return LayerLatencies(
        tuple(
            LayerLatency(
                module=row,
                path=layers[row].call.path,
                kind=layers[row].call.kind,
                seconds=mine_s,
                interval_s=Interval(min(float(low), mine_s), max(float(high), mine_s)),
                share=float(share),
                macs_per_s=own.macs / mine_s if is_complete and mine_s else None,
                bytes_per_s=own.bytes_moved / mine_s if is_complete and mine_s else None,
            )
            for (row, own, is_complete), mine_s, share, low, high in zip(
                rows, seconds, shares, lows, highs, strict=True
            )
        ),
        between_layers_s=max(0.0, whole_s - math.fsum(seconds)),
        whole_s=whole_s,
        overhead_s=recorded.median_s - plain.median_s,
        recorded_s=recorded_s,
    )


def _rows(layers: Sequence[LayerCost], blocks: Sequence[RecordedBlock]) -> list[tuple[int, OpCost, bool]]:
    """Return the calls that get a row, each with its cost and whether that is complete.

    A call in the trace that never came (a fused encoder layer runs none of its children) was the work of its caller.
    """
    came = np.sum([block.calls for block in blocks], axis=0)[:-1] > 0
    homes: list[int] = []
    costs = [OpCost() for _ in layers]
    operators, unpriced = [0] * len(layers), [0] * len(layers)
    for index, layer in enumerate(layers):
        parent = layer.call.parent
        home = index if came[index] or parent is None else homes[parent]
        homes.append(home)
        costs[home] += layer.cost
        operators[home] += layer.operators
        unpriced[home] += layer.unpriced
    return [
        (index, costs[index], unpriced[index] == 0)
        for index, layer in enumerate(layers)
        if came[index] and (operators[index] or layer.call.is_leaf)
    ]


def _parts(forwards_s: Sequence[float], blocks: Sequence[RecordedBlock], cost: RecordingCost) -> Floats:
    """Return seconds in each place by block, without the recorder's own; last, what belongs to no call."""
    own = np.stack([block.own_s for block in blocks])
    calls = np.stack([block.calls for block in blocks])
    children = np.stack([block.children for block in blocks])
    parts: Floats = np.maximum(own - calls * cost.inside_s - children * cost.in_caller_s, 0.0)
    forwards = np.array(forwards_s) - calls.sum(axis=1) * (cost.inside_s + cost.in_caller_s)
    parts[:, -1] = np.maximum(forwards - parts[:, :-1].sum(axis=1), 0.0)
    return parts


def _lower_quartile(samples: Floats) -> Floats:
    """Return the lower quartile along the first axis: half of the repeats may be held up, each in another layer."""
    position = (len(samples) - 1) // 4
    quartile: Floats = np.partition(samples, position, axis=0)[position]
    return quartile


def _bounds(parts_s: Floats, wholes_s: Floats, places: Sequence[int]) -> Floats:
    """Return lows and highs of the seconds in `places`, over blocks drawn again; a round's parts stay together."""
    count = len(parts_s)
    drawn = resamples(count, min(1000, max(200, _DRAWN // count))).T
    quartiles = np.concatenate(
        [
            _lower_quartile(parts_s[:, first : first + _AT_ONCE][drawn])
            for first in range(0, parts_s.shape[1], _AT_ONCE)
        ],
        axis=1,
    )
    totals = np.maximum(quartiles.sum(axis=1), np.finfo(float).tiny)
    wholes = np.median(wholes_s[drawn], axis=0)
    bounds: Floats = np.percentile(quartiles[:, places] * (wholes / totals)[:, None], (2.5, 97.5), axis=0)
    return bounds
