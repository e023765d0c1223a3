"""Kernels of a runtime that fuses: a trace in groups of operators, what each group took, and regressions over them.

A group begins at an operator with weights or products, its head, and goes on to the next one. Runtimes fuse within
groups: a batch norm into the convolution before it, an activation behind it. So a group is the smallest part whose time
a runtime's profile tells for certain. Its head and the rest, its tail, are learned apart: heads by boosted trees, tails
by costs per call and per byte of each pair of operators that follow each other, corrected by boosted trees.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from edge_opt.calibration.operator_bench import reuse_distances
from edge_opt.calibration.predict import (
    NINE_IN_TEN,
    Array,
    BoostedTrees,
    OperatorFeatures,
    Scales,
    describe,
    differences,
    multiple_of,
    scales_of,
)
from edge_opt.cost.rules import price
from edge_opt.errors import InvalidCalibration
from edge_opt.records.costs import OpSignature, Trace
from edge_opt.records.devices import Bound
from edge_opt.records.predictions import (
    AssumedKernels,
    Calibration,
    KernelGroupSample,
    LayerPrediction,
    Prediction,
    RuntimeCalibration,
)
from edge_opt.records.profiles import ModelProfile

HEADS = ("conv", "depthwise", "matmul", "attention", "recurrent")
# Pairs of operators with fewer samples have the cost of the second operator, whatever comes before it.
_LEAST_PAIRS = 8
_LEAST_S = 1e-6
_MOST_RATIO = 6.0  # of the time of a tail to its first estimate
_BLOCK = 16  # channels of a blocked layout
# Stands between an operator's name and what sets its kernels apart.
_MARK = ", "
_SWEEPS = 60  # of coordinate descent
_ANY = "any operator"
_DOUBTFUL = 0.5  # deviation of a head that was never sampled
_LAYER_DEVIATION = 0.25
_SHOWN = 4


@dataclass(frozen=True, slots=True)
class OperatorGroup:
    """A head with what follows it in a trace: places of the operators, and what regressions see of them."""

    head: int | None
    tail: tuple[int, ...]
    features: OperatorFeatures | None
    names: tuple[str, ...]
    sizes: tuple[float, ...]

    @property
    def op(self) -> str:
        """Operator of the head; "" without one."""
        return "" if self.features is None else self.features.op


def groups_of(trace: Trace, scales: Scales, precision: str = "fp32") -> list[OperatorGroup]:
    """Return the groups of a trace in order; the first has no head."""
    is_dynamic = precision == "int8" and _is_dynamic(trace)
    distances = _fused_distances(trace)
    # Of the whole model: how cold its weights are when they are used again, and how it is quantized.
    whole = math.log2(1 + _weight_bytes(trace)), float(is_dynamic)
    described = [
        _described(trace.signatures[call.signature], distances[call.index], scales, whole) for call in trace.ops
    ]
    starts = [index for index, item in enumerate(described) if item.group in HEADS]
    groups = []
    for start, end in zip([-1, *starts], [*starts, len(described)], strict=True):
        tail = tuple(range(start + 1, end))
        groups.append(
            OperatorGroup(
                head=None if start < 0 else start,
                tail=tail,
                features=None if start < 0 else described[start],
                names=tuple(_name(trace, index, described[index], is_dynamic) for index in tail),
                sizes=tuple(_moved_bytes(trace, index) for index in tail),
            )
        )
    return groups


def _weight_bytes(trace: Trace) -> int:
    return sum(storage.nbytes for storage in trace.storages if storage.role in ("parameter", "buffer"))


def _fused_distances(trace: Trace) -> list[tuple[int, ...]]:
    """Return the bytes between two uses of each tensor: for weights those of the whole model, each counted once.

    Runtimes plan memory: activations are written where others were before, and stay near.
    """
    weights = _weight_bytes(trace)
    return [
        tuple(
            weights if trace.storages[storage].role in ("parameter", "buffer") else distance
            for storage, distance in zip(call.reads, distances, strict=True)
        )
        for call, distances in zip(trace.ops, reuse_distances(trace, _in_registers(trace)), strict=True)
    ]


def _in_registers(trace: Trace) -> list[bool]:
    """Return whether each operator works on what the head before it makes, element by element: it moves no bytes."""
    result, made = [], -1
    for call in trace.ops:
        signature = trace.signatures[call.signature]
        written = sum(tensor.nbytes for tensor in signature.outputs)
        is_head = price(signature).kind in HEADS
        made = written if is_head else made
        result.append(not is_head and written == made)
    return result


def _described(
    signature: OpSignature, distances: Sequence[int], scales: Scales, whole: tuple[float, float]
) -> OperatorFeatures:
    """Return an operator as `describe` does, with what decides on the kernel that a fusing runtime takes.

    Blocked layouts pad channels to whole blocks, or are left where channels are no multiple of four. How a product was
    written in torch does not matter.
    """
    item = describe(signature, distances, scales)
    if item.group in ("conv", "depthwise"):
        widths = signature.inputs[0].shape[1], signature.outputs[0].shape[1]
        blocks: list[float] = []
        for width in widths:
            padded = -(-width // _BLOCK) * _BLOCK
            blocks += [multiple_of(width), math.log2(padded / width)]
        return replace(item, numbers=(*item.numbers, *blocks, *whole))
    if item.group == "matmul":
        common, (batch, rows, inner, columns, *multiples) = item.numbers[:6], item.numbers[7:13]
        numbers = (*common, batch, rows, inner, columns, *multiples, item.numbers[14], *whole)
        return replace(item, op="linear" if item.op in ("addmm", "mm") else item.op, numbers=numbers)
    return item


def _name(trace: Trace, index: int, item: OperatorFeatures, is_dynamic: bool) -> str:
    """Return the operator, marked where it has other kernels: channels that do not fill blocks, or left in float."""
    if item.group == "view":
        return f"view:{item.op}"
    parts = trace.signatures[trace.ops[index].signature].inputs
    is_blocked = item.op != "cat" or all(len(part.shape) != 4 or part.shape[1] % _BLOCK == 0 for part in parts)
    return _MARK.join([item.op, *(() if is_blocked else ("unblocked",)), *(("float",) if is_dynamic else ())])


def _is_dynamic(trace: Trace) -> bool:
    """Return whether int8 rounds activations as they come, by the rule of `chosen_scheme`, from the trace alone."""
    if any(price(signature).kind == "recurrent" for signature in trace.signatures):
        return True
    shapes = {
        storage: tensor.shape
        for call in trace.ops
        for storage, tensor in zip(call.reads, trace.signatures[call.signature].inputs, strict=True)
        if trace.storages[storage].role == "parameter"
    }
    matrices = sum(math.prod(shape) for shape in shapes.values() if len(shape) == 2)
    kernels = sum(math.prod(shape) for shape in shapes.values() if len(shape) > 2)
    return matrices > kernels and any("attention" in module.kind.lower() for module in trace.modules)


def _moved_bytes(trace: Trace, index: int) -> float:
    cost = price(trace.signatures[trace.ops[index].signature]).cost
    return float(cost.bytes_read + cost.bytes_written)


def sample_of(group: OperatorGroup, head_s: float, tail_s: float, kernels: Sequence[str], origin: str,
              converting: int) -> KernelGroupSample:  # fmt: skip
    """Return what a calibration keeps of a group: numbers, because whole signatures would be megabytes."""
    item = group.features
    if not group.names:
        # Conversions behind a head that nothing follows are its own.
        head_s, tail_s = head_s + tail_s, 0.0
    return KernelGroupSample(
        group="" if item is None else item.group,
        op="" if item is None else item.op,
        numbers=() if item is None else tuple(round(number, 4) for number in item.numbers),
        estimate_s=0.0 if item is None else item.estimate_s,
        tail=group.names,
        tail_bytes=tuple(int(size) for size in group.sizes),
        head_s=head_s,
        tail_s=tail_s,
        kernels=tuple(kernels),
        converting=converting,
        origin=origin,
    )


def _chain(op: str, tail: Sequence[str]) -> list[tuple[str, str]]:
    """Return each operator of a tail with the one before it; views are between no others."""
    pairs, before = [], op or "input"
    for name in tail:
        pairs.append((before, name))
        before = before if name.startswith("view:") else name
    return pairs


class GroupTimes:
    """Learned from samples: seconds of the head and of the tail of a group, and the kernels that it becomes."""

    def __init__(self, samples: Sequence[KernelGroupSample]) -> None:
        self._heads: dict[str, BoostedTrees] = {}
        usual = [0.0]
        for kind in HEADS:
            own = [item for item in samples if item.group == kind and item.head_s > 0]
            if len(own) >= _LEAST_PAIRS:
                logs = np.array([math.log(item.head_s / item.estimate_s) for item in own])
                self._heads[kind] = BoostedTrees(np.array([item.numbers for item in own]), logs)
                usual.append(float(np.median(logs)))
        self._usual = float(np.median(usual[1:] or usual))
        self._columns = _columns(samples)
        tails = [item for item in samples if item.tail]
        self._costs = np.zeros(2 * len(self._columns))
        self._trees: BoostedTrees | None = None
        if len(tails) >= _LEAST_PAIRS:
            rows = np.array([self._row(item.op, item.tail, item.tail_bytes) for item in tails])
            seconds = np.array([max(item.tail_s, 0.0) for item in tails])
            self._costs = nonnegative_costs(rows, seconds)
            estimates = np.maximum(rows @ self._costs, _LEAST_S)
            # Not logarithms: what is fused away in one net and not in another takes their mean.
            features = [self._tail_row(item.numbers, item.op, item.tail, item.tail_bytes) for item in tails]
            self._trees = BoostedTrees(np.array(features), np.minimum(seconds / estimates, _MOST_RATIO))
        self._known = {(item.group, item.op) for item in samples if item.group}
        self._kernels: dict[str, Counter[tuple[tuple[str, ...], int]]] = {}
        for item in samples:
            self._kernels.setdefault(pattern(item.op, item.tail), Counter())[item.kernels, item.converting] += 1

    def heads_s(self, groups: Sequence[OperatorGroup]) -> Array:
        """Return the seconds of the heads."""
        result = np.zeros(len(groups))
        for kind in HEADS:
            chosen = [index for index, group in enumerate(groups) if group.features and group.features.group == kind]
            items = [item for item in (groups[index].features for index in chosen) if item is not None]
            if not items:
                continue
            logs = np.full(len(items), self._usual)
            if kind in self._heads:
                rows = np.array([item.numbers for item in items])
                if rows.shape[1] != self._heads[kind].width:
                    raise InvalidCalibration(
                        "the runtime was calibrated by another version of edge-opt; calibrate again"
                    )
                logs = self._heads[kind].predict(rows)
            result[chosen] = [item.estimate_s for item in items] * np.exp(logs)
        return result

    def tails_s(self, groups: Sequence[OperatorGroup]) -> list[list[float]]:
        """Return the seconds of each operator of the tails; those that are fused into the head take none."""
        rows = np.array([self._row(group.op, group.names, group.sizes) for group in groups])
        estimates = rows @ self._costs
        factors = np.ones(len(groups))
        if self._trees is not None:
            numbers = [() if group.features is None else group.features.numbers for group in groups]
            features = [
                self._tail_row(number, group.op, group.names, group.sizes)
                for number, group in zip(numbers, groups, strict=True)
            ]
            factors = np.maximum(self._trees.predict(np.array(features)), 0.0)
        seconds = []
        for group, estimate, factor in zip(groups, estimates, factors, strict=True):
            parts = [float(self._row_of(pair, size) @ self._costs)
                     for pair, size in zip(_chain(group.op, group.names), group.sizes, strict=True)]  # fmt: skip
            total = max(float(estimate), _LEAST_S) * float(factor) if parts else 0.0
            whole = sum(parts)
            seconds.append([total * part / whole if whole else total / len(parts) for part in parts])
        return seconds

    def is_outside(self, group: OperatorGroup) -> bool:
        """Return whether no head like this one was sampled."""
        return group.features is not None and (group.features.group, group.features.op) not in self._known

    def kernels_of(self, group: OperatorGroup) -> tuple[tuple[str, ...], int] | None:
        """Return the kernels that the runtime mostly makes of such a group, and how many of them only convert."""
        known = self._kernels.get(pattern(group.op, group.names))
        return None if known is None else known.most_common(1)[0][0]

    def _row(self, op: str, tail: Sequence[str], sizes: Sequence[float]) -> Array:
        row = np.zeros(2 * len(self._columns))
        for pair, size in zip(_chain(op, tail), sizes, strict=True):
            row += self._row_of(pair, size)
        return row

    def _row_of(self, pair: tuple[str, str], size: float) -> Array:
        """Return one call and its bytes in the columns of a pair, else of its operator, else of any."""
        row = np.zeros(2 * len(self._columns))
        keys = (" > ".join(pair), pair[1], _ANY)
        place = next((self._columns[key] for key in keys if key in self._columns), None)
        if place is not None:
            row[2 * place : 2 * place + 2] = 1.0, size
        return row

    def _tail_row(self, numbers: Sequence[float], op: str, tail: Sequence[str], sizes: Sequence[float]) -> list[float]:
        estimate = float(self._row(op, tail, sizes) @ self._costs)
        called = [size for name, size in zip(tail, sizes, strict=True) if not name.startswith("view:")]
        head = [*numbers[:6], *([0.0] * (6 - len(numbers[:6])))]
        return [math.log2(1e-7 + estimate), math.log2(1 + sum(called)), math.log2(1 + max(called, default=0.0)),
                float(len(called)), float(len(tail) - len(called)), *head]  # fmt: skip


def pattern(op: str, tail: Sequence[str]) -> str:
    """Return operators in words, views left out: `conv2d + batch_norm + relu`."""
    return " + ".join(name.partition(_MARK)[0] for name in (op, *tail) if name and not name.startswith("view:"))


def _columns(samples: Sequence[KernelGroupSample]) -> dict[str, int]:
    """Return the columns of costs: pairs that are frequent, every operator, and any operator."""
    pairs: Counter[str] = Counter()
    names: dict[str, None] = {}
    for item in samples:
        for before, name in _chain(item.op, item.tail):
            pairs[f"{before} > {name}"] += 1
            names[name] = None
    keys = [*(pair for pair, count in pairs.items() if count >= _LEAST_PAIRS), *names, _ANY]
    return {key: place for place, key in enumerate(keys)}


def nonnegative_costs(rows: Array, seconds: Array) -> Array:
    """Return costs that are not negative and fit relative errors best, by coordinate descent.

    >>> nonnegative_costs(np.array([[1.0, 0.0], [1.0, 2.0], [1.0, 4.0]]), np.array([1.0, 3.0, 5.0])).round(2).tolist()
    [1.0, 1.0]
    """
    weights = 1 / np.maximum(seconds, 10 * _LEAST_S)
    scaled, wanted = rows * weights[:, None], seconds * weights
    norms = (scaled**2).sum(0)
    costs = np.zeros(rows.shape[1])
    left = wanted.copy()
    for _ in range(_SWEEPS):
        for column in np.flatnonzero(norms > 0):
            new = max(0.0, costs[column] + float(scaled[:, column] @ left) / (norms[column] * 1.001))
            left -= scaled[:, column] * (new - costs[column])
            costs[column] = new
    return costs


_MOST_LEARNED = 8  # platforms of one machine that a process asks about
_learned: dict[int, tuple[RuntimeCalibration, GroupTimes]] = {}


def group_times(platform: RuntimeCalibration) -> GroupTimes:
    """Return the times learned from a runtime's samples; learned once while it is in use."""
    if id(platform) not in _learned:
        if len(_learned) >= _MOST_LEARNED:
            _learned.clear()
        _learned[id(platform)] = (platform, GroupTimes(platform.samples))
    return _learned[id(platform)][1]


def predicted_kernels(profile: ModelProfile, calibration: Calibration, platform: RuntimeCalibration) -> Prediction:
    """Predict what a model would take in a calibrated runtime, with a 90 % interval, without converting or running it.

    Args:
        profile: The model and its inputs.
        calibration: The machine.
        platform: The runtime there, in a precision and with a number of threads.
    """
    trace = profile.trace
    times = group_times(platform)
    groups = groups_of(trace, scales_of(calibration), platform.precision)
    heads_s, tails_s = platform.check.factor * times.heads_s(groups), times.tails_s(groups)
    own_s, compute_s, memory_s = np.zeros(len(trace.modules)), 0.0, 0.0
    is_outside = [times.is_outside(group) for group in groups]
    doubtful_modules: set[int] = set()
    doubtful_s = 0.0
    assumed: dict[str, AssumedKernels] = {}
    for group, head_s, tail_s, outside in zip(groups, heads_s, tails_s, is_outside, strict=True):
        scaled = [platform.check.factor * seconds for seconds in tail_s]
        if group.head is not None and group.features is not None:
            own_s[trace.ops[group.head].module] += head_s
            compute_s += group.features.compute_s
            memory_s += group.features.memory_s
        for index, seconds in zip(group.tail, scaled, strict=True):
            own_s[trace.ops[index].module] += seconds
        memory_s += sum(scaled)
        whole_s = float(head_s) + sum(scaled)
        if outside and group.head is not None:
            doubtful_s += whole_s
            doubtful_modules.add(trace.ops[group.head].module)
        kernels, converting = times.kernels_of(group) or ((), 0)
        name = pattern(group.op, group.names)
        before = assumed.get(name, AssumedKernels(name, kernels, converting, 0, 0.0))
        assumed[name] = replace(before, count=before.count + 1, seconds=before.seconds + whole_s)
    seconds = float(own_s.sum())
    deviation = math.hypot(platform.check.deviation, _DOUBTFUL * doubtful_s / seconds if seconds else 0.0)
    factor, part = math.exp(NINE_IN_TEN * deviation), math.exp(NINE_IN_TEN * max(_LAYER_DEVIATION, deviation))
    bound: Bound = "compute" if compute_s >= memory_s else "memory"
    layers = tuple(
        LayerPrediction(
            module.index, module.path, module.kind, float(own), float(own) / part, float(own) * part, bound,
            is_outside=module.index in doubtful_modules,
        )
        for module, own in zip(trace.modules, own_s, strict=True)
    )  # fmt: skip
    outside_ops = (trace.signatures[trace.ops[group.head].signature].op
                   for group, outside in zip(groups, is_outside, strict=True)
                   if outside and group.head is not None)  # fmt: skip
    fused = tuple(sorted((item for item in assumed.values() if item.operators), key=lambda item: -item.seconds))
    return Prediction(
        target=f"{calibration.name}/{platform.name}",
        basis="calibrated",
        precision=platform.precision,
        seconds=seconds,
        low=seconds / factor,
        high=seconds * factor,
        bound=bound,
        layers=layers,
        outside=tuple(dict.fromkeys(outside_ops)),
        energies=(),
        remarks=(*differences(calibration, platform.threads), _in_words(fused), *platform.remarks),
        kernels=fused,
    )


def _in_words(kernels: Sequence[AssumedKernels]) -> str:
    """Say what is assumed to be fused, the groups that take longest first, and how many kernels only convert."""
    known = [item for item in kernels if item.kernels]
    total = sum(item.count * len(item.kernels) for item in known)
    converting = sum(item.count * item.converting for item in known)
    shown = "; ".join(
        f"{item.operators} -> {' + '.join(item.kernels) or 'nothing'} ({item.count} ×)" for item in known[:_SHOWN]
    )
    only = f"; {converting} of {total} kernels only convert or reorder" if converting else ""
    return f"not converted: kernels are assumed as in similar groups of sampled nets: {shown}{only}"
