"""Operators timed alone and inside models: operands, kept memory, a clock, and what lies between operators."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from edge_opt._support.unchanged import gc_paused
from edge_opt.calibration.operator_draws import DrawnOperator, OperatorMode, SignatureRecorder, is_warm
from edge_opt.calibration.quiet_clock import ReferenceKernel, SampleClock
from edge_opt.calibration.reference_networks import Reference
from edge_opt.cost.rules import price
from edge_opt.errors import MeasurementFailed
from edge_opt.measuring.machine import best_seconds, retain_freed_memory
from edge_opt.records.costs import OpCost, OpSignature, Trace
from edge_opt.records.predictions import OperatorSample, ReferenceRun
from edge_opt.trace import trace
from edge_opt.trace.operators import operator_name


class OperatorClock(OperatorMode):
    """Times each operator in place."""

    def __init__(self, clock: SampleClock) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []
        self.nanoseconds: list[int] = []
        self._clock = clock

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        wall, cpu, result = self._clock.span(lambda: func(*args, **kwargs))
        self.nanoseconds.append(max(1, min(wall, cpu)))
        self.names.append(operator_name(func))
        return result


_MIB = 1 << 20
_PIECE_BYTES = 16 * _MIB


@contextmanager
def kept_heap(nbytes: int) -> Iterator[None]:
    """Let tensors be made in a hole of the heap that was written before, of this many bytes.

    Memory that is freed stays, and its pages are mapped already. Weights and inputs should be there before, so that
    the hole is in one piece. Elsewhere than on glibc this does no harm.
    """
    with retain_freed_memory():
        pieces = [torch.zeros(_PIECE_BYTES, dtype=torch.uint8) for _ in range(max(1, nbytes // _PIECE_BYTES))]
        pieces.clear()
        yield


# How often a disturbed round is repeated before the least disturbed one counts.
_REPEATED = 2
_INDEXED = {"aten.embedding": 0, "aten.embedding_bag": 0}


class Runnable:
    """One operator with tensors of its own. `touch` brings what would be warm into the cache; `run` is the call."""

    def __init__(self, operator: DrawnOperator) -> None:
        self.operator = operator
        limit = _index_limit(operator.signature)
        tensors: list[torch.Tensor] = []

        def filled(meta: torch.Tensor) -> torch.Tensor:
            tensors.append(_filled(meta, limit))
            return tensors[-1]

        self.args, self.kwargs = tree_map_only(torch.Tensor, filled, (operator.args, operator.kwargs))
        self.nbytes = sum(tensor.nbytes for tensor in tensors)
        wanted = zip(tensors, is_warm(operator.signature), strict=True)
        self._warm = [tensor for tensor, is_wanted in wanted if is_wanted and tensor.dtype is not torch.bool]
        # An operator that writes its operand would drift away from ordinary values, and denormal ones are slow.
        is_writing = operator.signature.op.endswith("_") and tensors
        self._written = (tensors[0], tensors[0].clone()) if is_writing else None

    def touch(self) -> None:
        """Write the warm operands, as the operators before this one would just have done."""
        if self._written is not None:
            self._written[0].copy_(self._written[1])
        for tensor in self._warm:
            tensor.mul_(1)

    def run(self) -> Any:
        return self.operator.function(*self.args, **self.kwargs)


def _index_limit(signature: OpSignature) -> int:
    """Return what integers stay below: rows of a table, or the shortest side that an index may run along."""
    tables = [tensor for tensor in signature.inputs if "int" not in tensor.dtype and tensor.dtype != "bool"]
    if signature.op in _INDEXED and tables:
        return tables[0].shape[0]
    return max(1, min(tables[0].shape, default=1)) if tables else 2


def _filled(meta: torch.Tensor, limit: int) -> torch.Tensor:
    """Return a tensor with ordinary values, laid out in memory as the one without data is."""
    tensor = torch.empty_like(meta, device="cpu")
    if not tensor.is_floating_point():
        return tensor.random_(0, 2 if tensor.dtype is torch.bool else limit)
    # Copying random numbers is several times as fast as drawing them.
    pool, memory = _pool(), tensor.as_strided((tensor.numel(),), (1,))
    for start in range(0, len(memory), len(pool)):
        part = memory[start : start + len(pool)]
        part.copy_(pool[: len(part)])
    return tensor


@cache
def _pool() -> torch.Tensor:
    return torch.randn(1 << 20, generator=torch.Generator().manual_seed(0))


# Only short operators notice whether their code is in the cache.
_SMALL_BYTES = 4 << 20


def seconds_alone(
    operators: Sequence[DrawnOperator], rounds: int, clock: SampleClock, kernel: ReferenceKernel
) -> tuple[list[float], int]:
    """Return the least seconds of each operator in some rounds, and the bytes that a round moves.

    Outputs are made anew and dropped, as in a forward. The same operator runs on other tensors just before: it leaves
    the code in the cache, as the layers of a model do for each other, and the weights out of it. Rounds are normalized
    by the reference kernel.
    """
    runnables = [Runnable(operator) for operator in operators]
    rehearsals = [Runnable(item.operator) if item.nbytes < _SMALL_BYTES else None for item in runnables]

    def one_round() -> list[float]:
        times = []
        for runnable, rehearsal in zip(runnables, rehearsals, strict=True):
            if rehearsal is not None:
                rehearsal.run()
            runnable.touch()
            times.append(clock.nanoseconds(runnable.run) / 1e9)
        return times

    with torch.inference_mode():
        turns = [kernel.quiet_round(one_round, _REPEATED)[0] for _ in range(rounds)]
    return [min(times) for times in zip(*turns, strict=True)], sum(runnable.nbytes for runnable in runnables)


@contextmanager
def undisturbed(threads: int | None) -> Iterator[None]:
    """Run without garbage collection and with the asked number of threads; restore them and random numbers after."""
    threads_before, fast_path = torch.get_num_threads(), torch.backends.mha.get_fastpath_enabled()
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        with gc_paused(), torch.random.fork_rng(devices=[]):
            yield
    finally:
        torch.set_num_threads(threads_before)
        torch.backends.mha.set_fastpath_enabled(fast_path)


def reuse_distances(trace: Trace, is_fused: Sequence[bool] = ()) -> list[tuple[int, ...]]:
    """Return the distance of each tensor that each call reads: bytes moved since the tensor's storage was touched.

    The model is taken to run again and again, so that weights were last touched in the forward before. Bytes touched
    twice in between count twice, which only matters where everything is near anyway.
    """
    touched: dict[int, int] = {}
    clock = 0
    distances: list[tuple[int, ...]] = []
    # The first round only finds out where each storage was last touched.
    for _ in range(2):
        distances = []
        for call in trace.ops:
            signature = trace.signatures[call.signature]
            distances.append(tuple(clock - touched.get(storage, 0) for storage in call.reads))
            if signature.is_view:
                continue
            if is_fused and is_fused[call.index]:
                touched.update(dict.fromkeys(call.creates, clock))
                continue
            moved = dict(zip(call.reads, (tensor.nbytes for tensor in signature.inputs), strict=True))
            moved.update((storage, trace.storages[storage].nbytes) for storage in call.creates)
            for storage, nbytes in moved.items():
                clock += nbytes
                touched[storage] = clock
    return distances


_LAYERS = 200
_REPEATS = 15


@dataclass(frozen=True, slots=True)
class Overheads:
    """Seconds per operator and per module call beside what operators take themselves; never below zero."""

    operator_s: float
    module_s: float


def measured_overheads() -> Overheads:
    """Measure overheads by rows of modules that do nothing, and of modules that call one tiny operator each."""
    x = torch.ones(8)
    nothing = nn.Sequential(*(nn.Identity() for _ in range(_LAYERS))).eval()
    tiny = nn.Sequential(*(nn.ReLU(inplace=True) for _ in range(_LAYERS))).eval()
    with torch.inference_mode():
        module_s = best_seconds(lambda: nothing(x), _REPEATS) / (_LAYERS + 1)
        whole_s = best_seconds(lambda: tiny(x), _REPEATS) / _LAYERS
        clock = SampleClock()
        inside_s = min(sum(_timed_operators(tiny, x, clock).nanoseconds) for _ in range(_REPEATS)) / 1e9 / _LAYERS
    return Overheads(max(0.0, whole_s - module_s - inside_s), module_s)


def _timed_operators(model: nn.Module, x: torch.Tensor, clock: SampleClock) -> OperatorClock:
    """Return what the operators of one forward take by the clock that times them in place."""
    operators = OperatorClock(clock)
    with operators:
        model(x)
    return operators


_LEAST_FORWARDS, _MOST_FORWARDS, _BLOCK_NS = 1, 8, 50_000_000
_STEPS = 2


@dataclass(frozen=True, slots=True)
class ReferenceMeasurement:
    """The times of one reference model: the forward, optionally a training step, and each operator call."""

    run: ReferenceRun
    trace: Trace
    operators_s: tuple[float, ...]

    def __or__(self, other: ReferenceMeasurement) -> ReferenceMeasurement:
        """Return the smaller of two times: the time of the undisturbed machine."""
        operators_s = tuple(map(min, self.operators_s, other.operators_s))
        runs = (self.run, other.run)
        run = replace(
            self.run,
            operators_s=sum(operators_s),
            seconds=min(run.seconds for run in runs),
            step_s=min((run.step_s for run in runs if run.step_s is not None), default=None),
            backward_work=self.run.backward_work or other.run.backward_work,
        )
        return replace(self, run=run, operators_s=operators_s)


def visit_reference(
    reference: Reference, batch: int, passes: int, trains: bool, kernel: ReferenceKernel, clock: SampleClock
) -> ReferenceMeasurement:
    """Run a reference model a few times, with and without a clock at each operator; train it a little, if asked.

    All times are over the slowness of the machine beside them, and a disturbed pass is repeated.
    """
    torch.manual_seed(0)
    model = reference.build().eval()
    x = reference.inputs(batch)
    recorded = trace(model, x)
    expected = [recorded.signatures[call.signature].op for call in recorded.ops]

    def one_pass(block: int) -> list[float]:
        # Blocks are interleaved, so that a slow moment of the machine affects both.
        whole_s = clock.least_s(lambda: model(x), block)
        turns = []
        for _ in range(block):
            timed = _timed_operators(model, x, clock)
            if timed.names != expected:
                raise MeasurementFailed("a reference model ran other operators than its trace has; please report this")
            turns.append(timed.nanoseconds)
        return [whole_s, *(min(times) / 1e9 for times in zip(*turns, strict=True))]

    with torch.inference_mode():
        model(x)
        # Small models are soon done, and need more forwards in each block.
        block = max(_LEAST_FORWARDS, min(_MOST_FORWARDS, round(_BLOCK_NS / clock.nanoseconds(lambda: model(x)))))
        turns = [kernel.quiet_round(lambda: one_pass(block), 1)[0] for _ in range(passes)]
    whole_s, *seconds = (min(times) for times in zip(*turns, strict=True))
    run = ReferenceRun(
        f"{reference.name}, batch {batch}",
        reference.family,
        batch,
        len(recorded.ops),
        len(recorded.modules),
        sum(seconds),
        whole_s,
        clock.least_s(lambda: _step(model, x), 1 + _STEPS) / kernel.slowness() if trains else None,
        backward_work(model, x) if trains else None,
    )
    return ReferenceMeasurement(run, recorded, tuple(seconds))


def _step(model: nn.Module, x: torch.Tensor) -> None:
    """Run a forward while training and its backward; the loss is the sum, and gradients are dropped."""
    model.train()
    model.zero_grad(set_to_none=True)
    model(x).sum().backward()


def backward_work(model: nn.Module, x: torch.Tensor) -> float:
    """Return the work of a model's backward relative to its forward's while training, from the operators of one step.

    `training_step` scales the predicted forward with it, and compares it with `step_s`: how much slower backwards are
    than their work says is a property of the machine.
    """
    model.train()
    recorder = SignatureRecorder()
    with recorder:
        loss = model(x).sum()
        count = len(recorder.signatures)
        loss.backward()
    costs = [price(signature).cost for signature in recorder.signatures]
    return relative_work(sum(costs[count:], OpCost()), sum(costs[:count], OpCost()))


def relative_work(work: OpCost, forward: OpCost) -> float:
    """Return work relative to the forward's: by MACs, or by bytes where that is more."""
    by_macs = work.macs / forward.macs if forward.macs else 0.0
    by_bytes = work.bytes_moved / forward.bytes_moved if forward.bytes_moved else 0.0
    return max(by_macs, by_bytes)


def closed(
    samples: Sequence[OperatorSample], runs: Sequence[ReferenceRun], overheads: Overheads
) -> list[OperatorSample]:
    """Return samples scaled so that the operators of each run and what lies between them are the whole of it."""
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


def operator_samples(visit: ReferenceMeasurement) -> list[OperatorSample]:
    """Return samples of a visit: calls that look alike, at distances within a factor of two, are one, their mean."""
    recorded = visit.trace
    groups: dict[tuple[object, ...], list[int]] = {}
    distances = reuse_distances(recorded)
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
            visit.run.name,
        )
        for indices in groups.values()
    ]
