"""Operators timed in place: a reference model runs, and every operator of its trace gets its seconds."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from edge_opt.devices.calibration.distances import read_distances
from edge_opt.devices.calibration.references import Reference
from edge_opt.errors import MeasurementFailed
from edge_opt.records import OperatorSample, ReferenceRun, Trace
from edge_opt.trace import trace
from edge_opt.trace.operators import Behavior, behavior, operator_name

_MOST_PASSES, _LEAST_SECONDS = 16, 0.25
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


class OperatorClock(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Times each operator that a trace would record, in the same order; views included."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []
        self.nanoseconds: list[int] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if behavior(func) is Behavior.DECOMPOSE:
            with self:
                return func._op_dk(_COMPOSITE, *args, **kwargs)
        start = time.perf_counter_ns()
        result = func(*args, **kwargs)
        self.nanoseconds.append(time.perf_counter_ns() - start)
        self.names.append(operator_name(func))
        return result


def operator_seconds(model: nn.Module, x: torch.Tensor, recorded: Trace, passes: int) -> list[float]:
    """Least seconds of each operator call of the trace, over some forwards."""
    expected = [recorded.signatures[call.signature].op for call in recorded.ops]
    best: list[int] | None = None
    for _ in range(passes):
        clock = OperatorClock()
        with clock:
            model(x)
        if clock.names != expected:
            raise MeasurementFailed("a reference model ran other operators than its trace has; please report this")
        best = clock.nanoseconds if best is None else list(map(min, best, clock.nanoseconds))
    return [nanoseconds / 1e9 for nanoseconds in best or ()]


def run_reference(reference: Reference, batch: int, passes: int) -> tuple[ReferenceRun, list[OperatorSample]]:
    """A reference model run in place: the whole, and one sample per distinct operator and state of the caches."""
    torch.manual_seed(0)
    model = reference.build().eval()
    x = reference.inputs(batch)
    recorded = trace(model, x)
    with torch.inference_mode():
        model(x)
        whole: list[float] = []
        operators: list[list[float]] = []
        started = time.perf_counter()
        # In turns, so that a slow moment of the machine meets both. Small models are soon done, and need more turns.
        while len(whole) < passes or (len(whole) < _MOST_PASSES and time.perf_counter() - started < _LEAST_SECONDS):
            start = time.perf_counter_ns()
            model(x)
            whole.append((time.perf_counter_ns() - start) / 1e9)
            operators.append(operator_seconds(model, x, recorded, 1))
    seconds = [min(times) for times in zip(*operators, strict=True)]
    name = f"{reference.name}, batch {batch}"
    run = ReferenceRun(
        name, reference.family, batch, len(recorded.ops), len(recorded.modules), sum(seconds), min(whole)
    )
    return run, _samples(recorded, seconds, name)


def _samples(recorded: Trace, seconds: Sequence[float], name: str) -> list[OperatorSample]:
    """Calls that look alike, at distances within a factor of two of each other, are one sample: their mean."""
    groups: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    distances = read_distances(recorded)
    for call in recorded.ops:
        key = (call.signature, tuple(distance.bit_length() for distance in distances[call.index]))
        groups.setdefault(key, []).append(call.index)
    return [
        OperatorSample(
            recorded.signatures[signature],
            distances[indices[0]],
            sum(seconds[index] for index in indices) / len(indices),
            name,
        )
        for (signature, _), indices in groups.items()
    ]
