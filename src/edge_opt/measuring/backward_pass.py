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
from edge_opt.measuring.layers import END, LayerRecorder, is_sealed, watched_modules
from edge_opt.records.measurements import LayerStep, MeasuredStep

_sequence_number = torch._C._autograd._get_sequence_nr
# Stands for what no module does: the loss, and autograd's own work before its first node.
_OUTSIDE = -1


def summed(result: Any) -> torch.Tensor:
    """Return the loss where none is given: `loss` of the output if it has one, else the sum of its floating tensors."""
    own = getattr(result, "loss", None)
    if isinstance(own, torch.Tensor):
        return own
    tensors = list(_floating(result))
    if not tensors:
        raise InvalidInput("the output has no floating tensor to sum; pass loss=, a function of the output")
    total = tensors[0].sum()
    for tensor in tensors[1:]:
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
            if not any(True for _ in _floating(call())):
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
        self.steps: list[tuple[dict[int, int], dict[int, int]]] = []

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
        forward: dict[int, int] = {}
        stack, numbers, owners = [_OUTSIDE], [0], [_OUTSIDE]
        for (module, stamp), sequence in zip(self._recorder.events, self._sequence, strict=True):
            forward[stack[-1]] = forward.get(stack[-1], 0) + stamp - last
            last = stamp
            if module == END:
                stack.pop()
            else:
                stack.append(module)
            numbers.append(sequence)
            owners.append(stack[-1])
        forward[_OUTSIDE] = forward.get(_OUTSIDE, 0) + end - last
        self.steps.append((forward, self._backward(loss, numbers, owners)))

    def _backward(self, loss: torch.Tensor, numbers: list[int], owners: list[int]) -> dict[int, int]:
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
        backward: dict[int, int] = {}
        times = [*stamps[1::2], end]
        for owner, start, stop in zip(stamps[0::2], times, times[1:], strict=False):
            backward[owner] = backward.get(owner, 0) + stop - start
        return backward

    def closed(self, whole_s: float) -> MeasuredStep:
        """Return medians over the recorded steps, scaled so that they add up to the step without time stamps."""
        parts = {
            (owner, phase): median(step[phase].get(owner, 0) for step in self.steps)
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
