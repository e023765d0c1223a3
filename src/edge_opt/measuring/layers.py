"""Latency of layers, forward and backward: time stamps around modules, scaled to the latency measured without them."""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from edge_opt._support.unchanged import preserve_rng
from edge_opt.measuring.latency import interleaved
from edge_opt.measuring.machine import Device
from edge_opt.measuring.statistics import Floats, resamples
from edge_opt.records.costs import LayerCost, ModuleCall, OpCost
from edge_opt.records.measurements import Interval, Latency, LayerLatencies, LayerLatency, LayerStep, MeasuredStep
from edge_opt.trace.inputs import summed, with_gradient
from edge_opt.trace.module_calls import module_paths

Now = Callable[[], int]
END = -1


@dataclass(frozen=True, slots=True)
class RecordedBlock:
    """Mean seconds of one forward by index in the trace; the last place is the time outside of every forward.

    `calls` are the calls recorded in each place, `children` those made from it, both per forward.
    """

    own_s: Floats
    calls: Floats
    children: Floats


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
        # The attribute of each module to replace, by what, and its value now. A compiled call never reads `forward`.
        self._wrappers: list[tuple[dict[str, Any], str, Callable[..., Any], object]] = []
        for number, module in enumerate(watched):
            name = "forward" if module.__dict__.get("_compiled_call_impl") is None else "_compiled_call_impl"
            wrapper = recorded(getattr(module, name), number, self._events, now)
            self._wrappers.append((module.__dict__, name, wrapper, module.__dict__.get(name, _ABSENT)))
        self._seen: list[int] = []
        self._owners = (np.zeros(0, dtype=np.int64), np.zeros(0), np.zeros(0))

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
            self._seen, self._owners = modules, self._owners_of(modules)
        intervals, calls, children = self._owners
        stamps_ns = np.array(self._events[1::2], dtype=np.int64)
        own_ns = np.bincount(intervals, weights=np.diff(stamps_ns), minlength=self._places)
        self.blocks.append(RecordedBlock(own_ns / count * 1e-9, calls / count, children / count))

    def _owners_of(self, modules: Sequence[int]) -> tuple[NDArray[np.int64], Floats, Floats]:
        """Return the owner of each interval between two events, and how many calls are open and are made in each.

        Between two events runs the module entered last and not yet left.
        """
        calls, children = np.zeros(self._places), np.zeros(self._places)
        intervals: list[int] = []
        stack = [self._places - 1]
        numbers = Counter[int]()
        for number in modules:
            caller = stack[-1]
            if number == END:
                stack.pop()
            else:
                if number == 0 and len(stack) == 1:
                    numbers.clear()  # the model itself is entered: the next forward
                numbers[number] += 1
                owner = self._known.get((self._paths[number], numbers[number]), caller)
                children[caller] += 1
                calls[owner] += 1
                stack.append(owner)
            intervals.append(stack[-1])
        return np.array(intervals[:-1], dtype=np.int64), calls, children


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


_sequence_number = torch._C._autograd._get_sequence_nr
# Stands for what no module does: the loss, and autograd's own work before its first node.
_OUTSIDE = -1


def measured_step(
    model: nn.Module, call: Callable[[], Any], min_time_s: float, max_time_s: float | None, target_precision: float
) -> MeasuredStep | None:
    """Measure forward and backward, the loss being the sum of the output; None where nothing has a gradient.

    `call` runs the forward, on the CPU. Gradients and random numbers are put back.
    """
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    recorder = StepRecorder(model, call)

    def plain() -> None:
        for parameter, _ in gradients:
            parameter.grad = None
        summed(call()).backward()  # type: ignore[no-untyped-call]

    try:
        with torch.enable_grad(), preserve_rng():
            if not with_gradient(call()):
                return None
            latency = interleaved(
                {"plain": plain, "recorded": recorder.run},
                min_time_s=min_time_s, max_time_s=max_time_s, target_precision=target_precision,
            )["plain"]  # fmt: skip
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
    return recorder.closed(latency.median_s)


class StepRecorder:
    """Runs steps with time stamps: around modules in the forward, before each node of autograd in the backward."""

    def __init__(self, model: nn.Module, call: Callable[[], Any]) -> None:
        self._call = call
        self._parameters = list(model.parameters())
        self._modules = watched_modules(model)
        self._owners = {
            id(parameter): number
            for number, module in reversed(list(enumerate(self._modules)))
            for parameter in module.parameters(recurse=is_sealed(module))
        }
        self._sequence: list[int] = []
        self._recorder = LayerRecorder(model, (), self._now)
        self.steps: list[tuple[Counter[int], Counter[int]]] = []

    def _now(self) -> int:
        """Return the time in nanoseconds, and note which number autograd's next node will get."""
        self._sequence.append(_sequence_number())
        return time.perf_counter_ns()

    def run(self) -> None:
        """Run one step, and keep the nanoseconds of forward and backward by module."""
        for parameter in self._parameters:
            parameter.grad = None
        self._sequence.clear()
        self._recorder.attach(1)
        last = time.perf_counter_ns()
        try:
            loss = summed(self._call())
            end = time.perf_counter_ns()
        finally:
            self._recorder.detach(1)
        self._recorder.blocks.clear()
        # Time belongs to the module that was entered last and not left.
        forward = Counter[int]()
        stack, numbers, owners = [_OUTSIDE], [0], [_OUTSIDE]
        for (module, stamp), sequence in zip(self._recorder.events, self._sequence, strict=True):
            forward[stack[-1]] += stamp - last
            last = stamp
            if module == END:
                stack.pop()
            else:
                stack.append(module)
            numbers.append(sequence)
            owners.append(stack[-1])
        forward[_OUTSIDE] += end - last
        self.steps.append((forward, self._backward(loss, numbers, owners)))

    def _backward(self, loss: torch.Tensor, numbers: list[int], owners: list[int]) -> Counter[int]:
        """Run the backward and return the nanoseconds of each module's nodes.

        Autograd numbers nodes in the order in which a thread creates them. So a node belongs to the module that was
        running when its number was given, which the numbers noted at the modules' boundaries tell. Other threads count
        on their own: a model that computes in several threads cannot be timed this way.
        """
        stamps: list[int] = []
        now, note = time.perf_counter_ns, stamps.append
        for node in _nodes(loss):
            variable = getattr(node, "variable", None)
            if variable is None:
                owner = owners[bisect_right(numbers, node._sequence_nr()) - 1]
            else:
                owner = self._owners.get(id(variable), _OUTSIDE)

            def stamp(_: Any, owner: int = owner) -> None:
                note(owner)
                note(now())

            node.register_prehook(stamp)
        note(_OUTSIDE)
        note(now())
        loss.backward()  # type: ignore[no-untyped-call]
        end = now()
        backward = Counter[int]()
        times = [*stamps[1::2], end]
        for owner, start, stop in zip(stamps[0::2], times, times[1:], strict=False):
            backward[owner] += stop - start
        return backward

    def closed(self, whole_s: float) -> MeasuredStep:
        """Return medians over the recorded steps, scaled so that they add up to the step without time stamps."""
        parts = {
            (owner, phase): median(step[phase][owner] for step in self.steps)
            for phase in (0, 1)
            for owner in {owner for step in self.steps for owner in step[phase]}
        }
        scale = whole_s / max(sum(parts.values()), 1)
        seconds = {key: scale * part for key, part in parts.items()}
        owners = sorted({owner for owner, _ in seconds if owner != _OUTSIDE})
        names = [(path, type(module).__name__) for module, path in self._modules.items()]
        rows = tuple(LayerStep(*names[at], seconds.get((at, 0), 0.0), seconds.get((at, 1), 0.0)) for at in owners)
        forward_s = sum(part for (_, phase), part in seconds.items() if phase == 0)
        between_s = whole_s - sum(row.forward_s + row.backward_s for row in rows)
        return MeasuredStep(whole_s, forward_s, whole_s - forward_s, max(between_s, 0.0), rows, len(self.steps))


def _nodes(loss: torch.Tensor) -> Iterator[Any]:
    """Yield every node of autograd that the backward of a loss runs."""
    waiting: list[Any] = [loss.grad_fn]
    seen: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [following for following, _ in node.next_functions]
        yield node
