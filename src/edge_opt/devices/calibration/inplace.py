"""Operators timed in place: a reference model runs, and every operator of its trace gets its seconds."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from edge_opt.devices.calibration.clock import OperatorClock
from edge_opt.devices.calibration.distances import read_distances
from edge_opt.devices.calibration.overheads import Overheads
from edge_opt.devices.calibration.references import Reference
from edge_opt.errors import MeasurementFailed
from edge_opt.records import OperatorSample, ReferenceRun, Trace
from edge_opt.trace import trace

_MOST_FORWARDS, _BLOCK_NS = 8, 50_000_000


def recorded_forward(model: nn.Module, x: torch.Tensor, expected: Sequence[str]) -> list[int]:
    """Nanoseconds of each operator call of the trace, in one forward."""
    clock = OperatorClock()
    with clock:
        model(x)
    if clock.names != expected:
        raise MeasurementFailed("a reference model ran other operators than its trace has; please report this")
    return clock.nanoseconds


@dataclass(frozen=True, slots=True)
class Visit:
    """What one reference model took: the whole forward, and each operator call of its trace."""

    name: str
    family: str
    batch: int
    trace: Trace
    operators_s: tuple[float, ...]
    seconds: float

    def __or__(self, other: Visit) -> Visit:
        """The least of two visits: what the machine does when nobody is in the way."""
        operators_s = tuple(map(min, self.operators_s, other.operators_s))
        return replace(self, operators_s=operators_s, seconds=min(self.seconds, other.seconds))

    def run(self) -> ReferenceRun:
        operators, modules = len(self.trace.ops), len(self.trace.modules)
        return ReferenceRun(self.name, self.family, self.batch, operators, modules, sum(self.operators_s), self.seconds)


def visit_reference(reference: Reference, batch: int, passes: int) -> Visit:
    """A reference model run a few times, with and without a clock at each operator."""
    torch.manual_seed(0)
    model = reference.build().eval()
    x = reference.inputs(batch)
    recorded = trace(model, x)
    expected = [recorded.signatures[call.signature].op for call in recorded.ops]
    with torch.inference_mode():
        model(x)
        start = time.perf_counter_ns()
        model(x)
        # Small models are soon done, and need more forwards in each block.
        block = max(1, min(_MOST_FORWARDS, round(_BLOCK_NS / (time.perf_counter_ns() - start))))
        whole_s = float("inf")
        operators: list[list[int]] = []
        # Blocks in turns, so that a slow moment of the machine meets both.
        for _ in range(passes):
            start = time.perf_counter_ns()
            for _ in range(block):
                model(x)
            whole_s = min(whole_s, (time.perf_counter_ns() - start) / block / 1e9)
            operators += [recorded_forward(model, x, expected) for _ in range(block)]
    seconds = tuple(min(times) / 1e9 for times in zip(*operators, strict=True))
    return Visit(f"{reference.name}, batch {batch}", reference.family, batch, recorded, seconds, whole_s)


def closed(
    samples: Sequence[OperatorSample], runs: Sequence[ReferenceRun], overheads: Overheads
) -> list[OperatorSample]:
    """Samples scaled so that the operators of each run and what lies between them are the whole of it."""
    scales = {
        run.name: (run.seconds - overheads.operator_s * run.operators - overheads.module_s * run.modules)
        / run.operators_s
        for run in runs
    }
    return [
        replace(sample, seconds=sample.seconds * min(1.2, max(0.8, scales[sample.origin])))
        if sample.origin in scales
        else sample
        for sample in samples
    ]


def operator_samples(visit: Visit) -> list[OperatorSample]:
    """Calls that look alike, at distances within a factor of two of each other, are one sample: their mean."""
    recorded = visit.trace
    groups: dict[tuple[object, ...], list[int]] = {}
    distances = read_distances(recorded)
    for call in recorded.ops:
        signature = recorded.signatures[call.signature]
        # All views cost the same; one of each kind is enough.
        key: tuple[object, ...] = (signature.op,)
        if not signature.is_view:
            key = (call.signature, tuple(distance.bit_length() for distance in distances[call.index]))
        groups.setdefault(key, []).append(call.index)
    return [
        OperatorSample(
            recorded.signatures[recorded.ops[indices[0]].signature],
            distances[indices[0]],
            sum(visit.operators_s[index] for index in indices) / len(indices),
            visit.name,
        )
        for indices in groups.values()
    ]
