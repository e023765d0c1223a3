"""A real forward and backward, timed layer by layer: which module each node of autograd belongs to, and when it ran."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from statistics import median
from typing import Any

import torch
from torch import nn

from edge_opt._support.unchanged import preserve_rng
from edge_opt.errors import InvalidInput
from edge_opt.measuring.latency import interleaved
from edge_opt.records.measurements import LayerStep, MeasuredStep
from edge_opt.trace.module_calls import module_paths

_sequence_number = torch._C._autograd._get_sequence_nr
_OUTSIDE = -1  # the place of what no module does: the loss, and autograd's own work before its first node


def summed(result: Any) -> torch.Tensor:
    """The loss where none is given: `loss` of the output if it has one, else the sum of its floating tensors."""
    own = getattr(result, "loss", None)
    if isinstance(own, torch.Tensor):
        return own
    found = list(_floating(result))
    if not found:
        raise InvalidInput("the output has no floating tensor to sum; pass loss=, a function of the output")
    total = found[0].sum()
    for tensor in found[1:]:
        total = total + tensor.sum()
    return total


def _floating(value: Any) -> Iterable[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if value.requires_grad and value.is_floating_point():
            yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _floating(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _floating(item)
    elif hasattr(value, "__dataclass_fields__"):
        for name in value.__dataclass_fields__:
            yield from _floating(getattr(value, name, None))


def measured_step(
    model: nn.Module, call: Callable[[], Any], min_time_s: float, max_time_s: float | None, target_precision: float
) -> MeasuredStep | None:
    """Seconds of forward and backward, the loss being the sum of the output; None where nothing has a gradient.

    `call` runs the forward, on the CPU. Gradients and random numbers are put back.
    """
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    recorder = _StepRecorder(model, call)

    def plain() -> None:
        for parameter, _ in gradients:
            parameter.grad = None
        summed(call()).backward()  # type: ignore[no-untyped-call]

    try:
        with torch.enable_grad(), preserve_rng():
            if not any(True for _ in _floating(call())):
                return None
            found = interleaved(
                {"plain": plain, "recorded": recorder.run},
                min_time_s=min_time_s, max_time_s=max_time_s, target_precision=target_precision,
            )["plain"]  # fmt: skip
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
    return recorder.closed(found.median_s)


class _StepRecorder:
    """Runs steps with time stamps: at the doors of modules in the forward, before each node in the backward."""

    def __init__(self, model: nn.Module, call: Callable[[], Any]) -> None:
        self._call = call
        self._modules = module_paths(model)
        self._owners = {
            id(parameter): place
            for place, module in reversed(list(enumerate(self._modules)))
            for parameter in module._parameters.values()
            if parameter is not None
        }
        self.steps: list[tuple[dict[int, int], dict[int, int]]] = []

    def run(self) -> None:
        """One step; nanoseconds of forward and backward by module are kept."""
        forward: dict[int, int] = {}
        numbers, places = [0], [_OUTSIDE]
        for module in self._modules:
            for parameter in module._parameters.values():
                if parameter is not None:
                    parameter.grad = None
        doors = _Doors(forward, numbers, places)
        with doors.watching(self._modules):
            doors.start()
            loss = summed(self._call())
            doors.stop()
        self.steps.append((forward, self._backward(loss, numbers, places)))

    def _backward(self, loss: torch.Tensor, numbers: list[int], places: list[int]) -> dict[int, int]:
        stamps: list[int] = []
        now, note = time.perf_counter_ns, stamps.append
        for node in _nodes(loss):
            variable = getattr(node, "variable", None)
            if variable is None:
                place = places[bisect_right(numbers, node._sequence_nr()) - 1]
            else:
                place = self._owners.get(id(variable), _OUTSIDE)

            def stamp(_: Any, place: int = place) -> None:
                note(place)
                note(now())

            node.register_prehook(stamp)
        note(_OUTSIDE)
        note(now())
        loss.backward()  # type: ignore[no-untyped-call]
        end = now()
        backward: dict[int, int] = {}
        times = [*stamps[1::2], end]
        for place, start, stop in zip(stamps[0::2], times, times[1:], strict=False):
            backward[place] = backward.get(place, 0) + stop - start
        return backward

    def closed(self, whole_s: float) -> MeasuredStep:
        """Medians over the recorded steps, scaled so that they add up to the step without time stamps."""
        parts = {
            (place, phase): median(step[phase].get(place, 0) for step in self.steps)
            for phase in (0, 1)
            for place in {place for step in self.steps for place in step[phase]}
        }
        scale = whole_s / max(sum(parts.values()), 1)
        seconds = {key: scale * part for key, part in parts.items()}
        places = sorted({place for place, _ in seconds if place != _OUTSIDE})
        names = [(path, type(module).__name__) for module, path in self._modules.items()]
        rows = tuple(LayerStep(*names[at], seconds.get((at, 0), 0.0), seconds.get((at, 1), 0.0)) for at in places)
        forward_s = sum(part for (_, phase), part in seconds.items() if phase == 0)
        between_s = whole_s - sum(row.forward_s + row.backward_s for row in rows)
        return MeasuredStep(whole_s, forward_s, whole_s - forward_s, max(between_s, 0.0), rows, len(self.steps))


class _Doors:
    """Charges time to the module that was entered last and not left; notes autograd's numbers at each door."""

    def __init__(self, spent: dict[int, int], numbers: list[int], places: list[int]) -> None:
        self._spent, self._numbers, self._places = spent, numbers, places
        self._stack = [_OUTSIDE]
        self._last = 0

    def start(self) -> None:
        self._last = time.perf_counter_ns()

    def stop(self) -> None:
        self._charge()

    def _charge(self) -> None:
        here, now = self._stack[-1], time.perf_counter_ns()
        self._spent[here] = self._spent.get(here, 0) + now - self._last
        self._last = now

    def _note(self) -> None:
        self._numbers.append(_sequence_number())
        self._places.append(self._stack[-1])

    def watching(self, modules: Iterable[nn.Module]) -> _Watch:
        return _Watch(self, modules)

    def through(self, forward: Callable[..., Any], place: int) -> Callable[..., Any]:
        """A forward with a stamp on either side."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self._charge()
            self._stack.append(place)
            self._note()
            try:
                return forward(*args, **kwargs)
            finally:
                self._charge()
                self._stack.pop()
                self._note()

        return call


class _Watch:
    """Puts doors in front of the modules' forwards, in the instances' own dicts, and takes them away."""

    def __init__(self, doors: _Doors, modules: Iterable[nn.Module]) -> None:
        self._doors, self._modules = doors, list(modules)
        self._before: list[tuple[dict[str, Any], Any]] = []

    def __enter__(self) -> None:
        for place, module in enumerate(self._modules):
            attributes = module.__dict__
            self._before.append((attributes, attributes.get("forward")))
            attributes["forward"] = self._doors.through(module.forward, place)

    def __exit__(self, *_: object) -> None:
        for attributes, forward in self._before:
            if forward is None:
                del attributes["forward"]
            else:
                attributes["forward"] = forward


def _nodes(loss: torch.Tensor) -> Iterator[Any]:
    """Every node of autograd that the backward of a loss runs."""
    waiting: list[Any] = [loss.grad_fn]
    seen: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [following for following, _ in node.next_functions]
        yield node
