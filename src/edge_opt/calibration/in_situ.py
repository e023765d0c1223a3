"""Operators timed inside models, and what lies between them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from edge_opt.calibration.operator_bench import OperatorClock, best_seconds
from edge_opt.calibration.reference_networks import Reference
from edge_opt.errors import MeasurementFailed
from edge_opt.records import OperatorSample, ReferenceRun, Trace
from edge_opt.trace import trace


def read_distances(trace: Trace) -> list[tuple[int, ...]]:
    """For each operator call, one distance per tensor it reads: bytes moved since that tensor's storage was touched.

    The model is taken to run again and again, so that weights were last touched in the forward before. Bytes touched
    twice in between count twice, which only matters where everything is near anyway.
    """
    touched: dict[int, int] = {}
    clock = 0
    found: list[tuple[int, ...]] = []
    # The first round only finds out where each storage was last touched.
    for _ in range(2):
        found = []
        for call in trace.ops:
            signature = trace.signatures[call.signature]
            found.append(tuple(clock - touched.get(storage, 0) for storage in call.reads))
            if signature.is_view:
                continue
            moved = dict(zip(call.reads, (tensor.nbytes for tensor in signature.inputs), strict=True))
            moved.update((storage, trace.storages[storage].nbytes) for storage in call.creates)
            for storage, nbytes in moved.items():
                clock += nbytes
                touched[storage] = clock
    return found


_LAYERS = 200
_REPEATS = 15


@dataclass(frozen=True, slots=True)
class Overheads:
    """Seconds per operator and per module call beside what operators take themselves; never below zero."""

    operator_s: float
    module_s: float


def measured_overheads() -> Overheads:
    """From rows of modules that do nothing, and of modules that call one tiny operator each."""
    x = torch.ones(8)
    nothing = nn.Sequential(*(nn.Identity() for _ in range(_LAYERS))).eval()
    tiny = nn.Sequential(*(nn.ReLU(inplace=True) for _ in range(_LAYERS))).eval()
    with torch.inference_mode():
        module_s = best_seconds(lambda: nothing(x), _REPEATS) / (_LAYERS + 1)
        whole_s = best_seconds(lambda: tiny(x), _REPEATS) / _LAYERS
        inside_s = min(_recorded(tiny, x) for _ in range(_REPEATS)) / _LAYERS
    return Overheads(max(0.0, whole_s - module_s - inside_s), module_s)


def _recorded(model: nn.Module, x: torch.Tensor) -> float:
    """Seconds that the operators of one forward take by the clock that times them in place."""
    clock = OperatorClock(time.perf_counter_ns)
    with clock:
        model(x)
    return sum(clock.nanoseconds) / 1e9


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
    """What one reference model took: the whole forward, each operator call of its trace, and maybe a training step."""

    name: str
    family: str
    batch: int
    trace: Trace
    operators_s: tuple[float, ...]
    seconds: float
    step_s: float | None = None

    def __or__(self, other: Visit) -> Visit:
        """The least of two visits: what the machine does when nobody is in the way."""
        operators_s = tuple(map(min, self.operators_s, other.operators_s))
        steps = [visit.step_s for visit in (self, other) if visit.step_s is not None]
        least = min(steps, default=None)
        return replace(self, operators_s=operators_s, seconds=min(self.seconds, other.seconds), step_s=least)

    def run(self) -> ReferenceRun:
        return ReferenceRun(
            self.name,
            self.family,
            self.batch,
            len(self.trace.ops),
            len(self.trace.modules),
            sum(self.operators_s),
            self.seconds,
            self.step_s,
        )


def visit_reference(reference: Reference, batch: int, passes: int, trains: bool = False) -> Visit:
    """A reference model run a few times, with and without a clock at each operator; trained a little, if asked for."""
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
    step_s = best_seconds(lambda: _step(model, x), _STEPS) if trains else None
    return Visit(f"{reference.name}, batch {batch}", reference.family, batch, recorded, seconds, whole_s, step_s)


_STEPS = 2


def _step(model: nn.Module, x: torch.Tensor) -> None:
    """A forward while training and its backward; the loss is the sum, and gradients are dropped."""
    model.train()
    model.zero_grad(set_to_none=True)
    model(x).sum().backward()


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
