"""predict(): a model's time from a calibration, operator by operator; the time of one is learned by boosted trees."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import log2, prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_opt import units
from edge_opt.calibration.calibration_file import calibrated_runtime
from edge_opt.calibration.operator_bench import Overheads, reuse_distances
from edge_opt.cost.rules import price
from edge_opt.measuring.machine import read_environment
from edge_opt.records.costs import ModuleCall, OpSignature, TensorInfo, Trace
from edge_opt.records.devices import Bound, Precision
from edge_opt.records.predictions import (
    Calibration,
    LayerPrediction,
    OperatorSample,
    Prediction,
)
from edge_opt.records.profiles import ModelProfile

NINE_IN_TEN = 1.645  # standard deviations of a normal error
_NEGLIGIBLE = 1e-3
_OUTSIDE = 3.0  # how much wider an operator's interval is where nothing like it was sampled
_UNKNOWN = 0.3
# Where data lies that was touched this many bytes ago: closer than the first, in a core's own cache; closer than the
# second, in a shared one. The regression learns what that is worth here; these only have to separate the cases.
NEAR_BYTES, FAR_BYTES = 1 << 20, 24 << 20
# From this size on, the C library may ask the system for new pages each time (glibc's largest mmap threshold).
FRESH_BYTES = 32 << 20

GROUPS = ("conv", "depthwise", "matmul", "attention", "recurrent", "pass", "view")


@dataclass(frozen=True, slots=True)
class OperatorFeatures:
    """An operator as the regression sees it: its group, its name without the mark of writing in place, numbers."""

    group: str
    op: str
    numbers: tuple[float, ...]
    estimate_s: float
    compute_s: float
    memory_s: float


@dataclass(frozen=True, slots=True)
class Scales:
    """The machine's figures that a first estimate needs."""

    flops_per_s: float
    depthwise_flops_per_s: float
    cache_bytes_per_s: float
    shared_bytes_per_s: float
    memory_bytes_per_s: float
    call_s: float = 2e-6


def scales_of(calibration: Calibration) -> Scales:
    """Return the figures of a calibrated machine."""
    by_size = sorted(calibration.bandwidths, key=lambda item: item.working_set_bytes)
    shared = [item.bytes_per_s for item in by_size if NEAR_BYTES < item.working_set_bytes <= FAR_BYTES]
    memory = by_size[-1].bytes_per_s
    return Scales(
        flops_per_s=calibration.peak("gemm", "fp32") or 1e9,
        depthwise_flops_per_s=calibration.peak("depthwise", "fp32") or 1e9,
        cache_bytes_per_s=max(item.bytes_per_s for item in by_size),
        shared_bytes_per_s=max(shared, default=memory),
        memory_bytes_per_s=memory,
    )


def describe(signature: OpSignature, distances: Sequence[int], scales: Scales) -> OperatorFeatures:
    """Return the operator's group, features and first estimate."""
    verdict = price(signature)
    op = signature.op.removeprefix("aten.").removesuffix("_")
    if verdict.status == "free" or signature.is_view:
        return OperatorFeatures("view", op, (), scales.call_s, 0.0, 0.0)
    cost = verdict.cost
    reads = signature.inputs
    total = sum(tensor.nbytes for tensor in reads) or 1
    # A price may read less than whole tensors, as of an embedding's table.
    share = min(1.0, cost.bytes_read / total)
    near, shared, far = (share * nbytes for nbytes in _by_distance(reads, distances))
    written = cost.bytes_written
    is_depthwise = _is_depthwise(signature)
    peak = scales.depthwise_flops_per_s if is_depthwise else scales.flops_per_s
    compute_s = 2 * cost.macs / peak + cost.other_ops / scales.flops_per_s
    memory_s = (
        near / scales.cache_bytes_per_s + shared / scales.shared_bytes_per_s + far / scales.memory_bytes_per_s
        + written / (scales.cache_bytes_per_s if written < NEAR_BYTES else scales.shared_bytes_per_s)
    )  # fmt: skip
    estimate_s = scales.call_s + compute_s + memory_s
    group = "depthwise" if is_depthwise else verdict.kind if verdict.kind in GROUPS else "pass"
    sizes = [estimate_s * 1e6, near, shared, far, written, signature.scratch_bytes]
    numbers = [*(log2(1 + size) for size in sizes), _spread(signature), *_OWN[group](signature)]
    return OperatorFeatures(group, op, tuple(numbers), estimate_s, compute_s, memory_s)


def _by_distance(reads: Sequence[TensorInfo], distances: Sequence[int]) -> tuple[float, float, float]:
    parts = [0.0, 0.0, 0.0]
    for tensor, distance in zip(reads, distances, strict=True):
        span = distance + tensor.nbytes
        parts[0 if span < NEAR_BYTES else 1 if span < FAR_BYTES else 2] += tensor.nbytes
    return parts[0], parts[1], parts[2]


def _is_depthwise(signature: OpSignature) -> bool:
    groups = signature.argument("groups", 1)
    weight = signature.argument("weight")
    return (
        isinstance(groups, int) and groups > 1 and isinstance(weight, TensorInfo) and groups == weight.shape[0]
        and weight.shape[1] == 1
    )  # fmt: skip


def _spread(signature: OpSignature) -> float:
    """Return how the first operand lies in memory: 0 row by row, 1 channels last, 2 otherwise permuted."""
    strides = next((item for item in signature.strides if item is not None), None)
    if strides is None:
        return 0.0
    return 1.0 if len(strides) == 4 and strides[1] == 1 else 2.0


def _both(value: Any, default: int = 1) -> tuple[int, int]:
    values = value if isinstance(value, tuple) and value else (value if isinstance(value, int) else default,)
    return int(values[0]), int(values[-1])


def multiple_of(width: int) -> float:
    """Return the power of the largest of 1, 2, 4, 8, 16, 32 that divides a width: kernels work in blocks of these."""
    return float(next(power for power in range(5, -1, -1) if width % (1 << power) == 0))


def _convolution(signature: OpSignature) -> list[float]:
    x, weight = signature.inputs[0], signature.inputs[1]
    out = signature.outputs[0]
    groups = signature.argument("groups", 1)
    groups = groups if isinstance(groups, int) else 1
    is_transposed = "transpose" in signature.op
    width, inner = (x.shape[1], weight.shape[1]) if is_transposed else (weight.shape[0], weight.shape[1])
    taps = prod(weight.shape[2:])
    stride = max(_both(signature.argument("stride", 1)))
    places = prod(out.shape[2:])
    batch = x.shape[0] if len(x.shape) == len(weight.shape) else 1
    padding = signature.argument("padding", 0)
    return [
        log2(batch), log2(inner), log2(max(1, width // groups)), log2(groups), log2(taps), log2(stride), log2(places),
        log2(out.shape[-1]), multiple_of(inner), multiple_of(width // groups), float(is_transposed),
        float(max(_both(padding, 0)) > 0 if not isinstance(padding, str) else padding == "same"),
        float(len(weight.shape)), log2(batch * places), log2(inner * taps), float(taps == 1),
        float(stride >= weight.shape[-1] > 1),
    ]  # fmt: skip


def _product(signature: OpSignature) -> list[float]:
    out = signature.outputs[0]
    matrices = [tensor for tensor in signature.inputs if len(tensor.shape) >= 2] or list(signature.inputs)
    inner = matrices[0].shape[-1] if matrices and matrices[0].shape else 1
    columns = out.shape[-1] if out.shape else 1
    is_linear = signature.op.endswith("linear")
    batch = 1 if is_linear or len(out.shape) < 3 else prod(out.shape[:-2])
    rows = max(1, out.elements // max(1, columns * batch))
    return [
        log2(batch), log2(rows), log2(max(1, inner)), log2(max(1, columns)), multiple_of(inner), multiple_of(columns),
        float(is_linear), multiple_of(rows), float(len(out.shape)), float(rows == 1),
        float(sum(1 for item in signature.strides if item is not None)),
        float(signature.op.endswith("addmm") or signature.argument("bias") is not None),
    ]  # fmt: skip


def _attention(signature: OpSignature) -> list[float]:
    query, key = signature.inputs[0], signature.inputs[1]
    batch = prod(query.shape[:-2])
    mask = signature.argument("attn_mask")
    causal = signature.argument("is_causal", False) is True
    return [
        log2(max(1, batch)), log2(query.shape[-2]), log2(key.shape[-2]), log2(query.shape[-1]), float(causal),
        0.0 if mask is None else 1.0 if mask.dtype == "bool" else 2.0, multiple_of(query.shape[-1]),
        multiple_of(key.shape[-2]),
    ]  # fmt: skip


def _recurrent(signature: OpSignature) -> list[float]:
    x, out = signature.inputs[0], signature.outputs[0]
    largest = max(signature.inputs, key=lambda tensor: tensor.nbytes)
    steps = max(x.shape[0], 1)
    return [log2(steps), log2(max(1, x.elements // steps)), log2(max(1, out.shape[-1])), log2(largest.nbytes)]


def _passes(signature: OpSignature) -> list[float]:
    x = signature.inputs[0] if signature.inputs else TensorInfo((), "float32", 0)
    out = signature.outputs[0] if signature.outputs else x
    second = signature.inputs[1] if len(signature.inputs) > 1 else None
    last, out_last = (tensor.shape[-1] if tensor.shape else 1 for tensor in (x, out))
    kernel = signature.argument("kernel_size")
    return [
        log2(1 + x.elements), log2(1 + out.elements), log2(1 + last), log2(1 + out_last),
        log2(1 + x.elements / max(1, out.elements)), float(signature.op.endswith("_")), float(len(signature.inputs)),
        0.0 if second is None else log2(1 + x.elements / max(1, second.elements)), float(max(_both(kernel, 0))),
        float(max(_both(signature.argument("stride", 0), 0))), float(signature.argument("approximate") == "tanh"),
        float(len(x.shape)), _inner(signature),
    ]  # fmt: skip


def _inner(signature: OpSignature) -> float:
    """Return the elements that lie side by side in the order in which the result is written."""
    strides = next((item for item in signature.strides if item is not None), None)
    if strides is None or not signature.inputs[0].shape:
        return 10.0
    return log2(1 + min(1 << 10, strides[-1]))


_OWN = {
    "conv": _convolution, "depthwise": _convolution, "matmul": _product, "attention": _attention,
    "recurrent": _recurrent, "pass": _passes,
}  # fmt: skip


Array = NDArray[np.float64]
_BINS = 32
_DEPTH = 4
_RATE = 0.08
_LEAST_ROWS = 4  # on either side of a split
_FEATURE_SHARE = 0.5  # of the features that a tree sees
_SHRINKAGE = 1.0  # pseudo-observations of zero in each leaf


class BoostedTrees:
    """A regression by trees of one depth, each fitted to what those before it left; every tree sees some features."""

    def __init__(self, rows: Array, targets: Array, trees: int = 200) -> None:
        random = np.random.default_rng(0)
        count, width = rows.shape
        self.width = width
        self._edges = [_edges(rows[:, column]) for column in range(width)]
        binned = self._binned(rows)
        places = np.arange(width) * _BINS + binned
        self._base = float(targets.mean())
        residuals = targets - self._base
        self._features = np.zeros((trees, 2**_DEPTH - 1), dtype=np.int64)
        self._thresholds = np.full((trees, 2**_DEPTH - 1), _BINS, dtype=np.int64)
        self._leaves = np.zeros((trees, 2**_DEPTH))
        for tree in range(trees):
            hidden: NDArray[np.bool_] = np.greater(random.random(width), _FEATURE_SHARE)
            hidden[random.integers(width)] = False
            node = np.zeros(count, dtype=np.int64)
            for level in range(_DEPTH):
                features, thresholds = _splits(places, residuals, node, 2**level, hidden)
                first = 2**level - 1
                self._features[tree, first : first + 2**level] = features
                self._thresholds[tree, first : first + 2**level] = thresholds
                node = 2 * node + (binned[np.arange(count), features[node]] > thresholds[node])
            sums = np.bincount(node, residuals, 2**_DEPTH)
            leaves = _RATE * sums / (np.bincount(node, minlength=2**_DEPTH) + _SHRINKAGE)
            self._leaves[tree] = leaves
            residuals = residuals - leaves[node]

    def predict(self, rows: Array) -> Array:
        """Return the targets of other rows."""
        binned = self._binned(rows)
        lines = np.arange(len(rows))
        total = np.full(len(rows), self._base)
        for features, thresholds, leaves in zip(self._features, self._thresholds, self._leaves, strict=True):
            node = np.zeros(len(rows), dtype=np.int64)
            for level in range(_DEPTH):
                at = node + 2**level - 1
                node = 2 * node + (binned[lines, features[at]] > thresholds[at])
            total += leaves[node]
        return total

    def _binned(self, rows: Array) -> NDArray[np.int64]:
        columns = [np.searchsorted(edges, rows[:, column]) for column, edges in enumerate(self._edges)]
        return np.stack(columns, axis=1).astype(np.int64)


def _splits(
    places: NDArray[np.int64], residuals: Array, node: NDArray[np.int64], nodes: int, hidden: NDArray[np.bool_]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the feature and threshold of each node that explain most of what is left; none where too few rows are."""
    width = places.shape[1]
    flat = (node[:, None] * (width * _BINS) + places).ravel()
    size, shape = nodes * width * _BINS, (nodes, width, _BINS)
    counts = np.bincount(flat, minlength=size).reshape(shape).cumsum(2)
    sums = np.bincount(flat, np.repeat(residuals, width), size).reshape(shape).cumsum(2)
    rest, counts_rest = sums[:, :, -1:] - sums, counts[:, :, -1:] - counts
    gain = sums**2 / (counts + _SHRINKAGE) + rest**2 / (counts_rest + _SHRINKAGE)
    gain -= sums[:, :, -1:] ** 2 / (counts[:, :, -1:] + _SHRINKAGE)
    is_small = (counts < _LEAST_ROWS) | (counts_rest < _LEAST_ROWS)
    gain[is_small | hidden[None, :, None]] = 0.0
    best = gain.reshape(nodes, -1).argmax(1)
    features, thresholds = best // _BINS, best % _BINS
    is_nothing = gain.reshape(nodes, -1).max(1) <= 0
    return features, np.where(is_nothing, _BINS, thresholds)


def _edges(values: Array) -> Array:
    """Return thresholds between distinct values where there are few, else between equal shares of the rows."""
    distinct = np.unique(values)
    if len(distinct) > _BINS:
        distinct = np.unique(np.quantile(values, np.linspace(0, 1, _BINS)))
    return (distinct[1:] + distinct[:-1]) / 2


# An estimate this many times beyond the samples of an operator is outside of them.
_REACH = 4.0
_ALONE, _IN_PLACE = 1.0, 0.0


class OperatorTimes:
    """Learned from samples: the logarithm of what an operator takes over what a first estimate says it would."""

    def __init__(self, samples: Sequence[OperatorSample], calibration: Calibration) -> None:
        self.scales = scales_of(calibration)
        described = [describe(sample.signature, sample.distances, self.scales) for sample in samples]
        deviations = np.array(
            [np.log(sample.seconds / item.estimate_s) for sample, item in zip(samples, described, strict=True)]
        )
        members: dict[tuple[str, str], list[int]] = {}
        for index, item in enumerate(described):
            members.setdefault((item.group, item.op), []).append(index)
        self._deviations = {key: float(np.median(deviations[indices])) for key, indices in members.items()}
        self._estimates_s = {key: [described[index].estimate_s for index in it] for key, it in members.items()}
        self._usual = {
            group: float(np.median(values))
            for group in GROUPS
            if len(values := deviations[[item.group == group for item in described]])
        }
        # For a group without samples: what is usual elsewhere is better than nothing.
        self._elsewhere = float(np.median(list(self._usual.values()))) if self._usual else 0.0
        self._models: dict[str, BoostedTrees] = {}
        for group in GROUPS:
            chosen = np.array([index for index, item in enumerate(described) if item.group == group])
            if group == "view" or not len(chosen):
                continue
            rows = self._rows([described[index] for index in chosen])
            rows[:, -1] = [_IN_PLACE if samples[index].origin else _ALONE for index in chosen]
            self._models[group] = BoostedTrees(rows, deviations[chosen])

    def seconds(self, described: Sequence[OperatorFeatures]) -> Array:
        """Return the seconds of each operator, in place."""
        result = np.array([item.estimate_s for item in described])
        for group in {item.group for item in described}:
            chosen = [index for index, item in enumerate(described) if item.group == group]
            model = self._models.get(group)
            if model is None:
                result[chosen] *= np.exp(self._usual.get(group, self._elsewhere))
            else:
                result[chosen] *= np.exp(model.predict(self._rows([described[index] for index in chosen])))
        return result

    def is_outside(self, item: OperatorFeatures) -> bool:
        """Return whether nothing like this operator was sampled."""
        known_s = self._estimates_s.get((item.group, item.op))
        if item.group == "view":
            return False
        return known_s is None or not min(known_s) / _REACH <= item.estimate_s <= max(known_s) * _REACH

    def _rows(self, described: Sequence[OperatorFeatures]) -> Array:
        known, usual = self._deviations, self._usual
        return np.array(
            [
                (*item.numbers, known.get((item.group, item.op), usual.get(item.group, 0.0)), _IN_PLACE)
                for item in described
            ]
        )


_learned: dict[int, tuple[Calibration, OperatorTimes]] = {}


def operator_times(calibration: Calibration) -> OperatorTimes:
    """Return the times learned from a calibration; learned once while it is in use."""
    # By identity: a calibration's own hash would visit thousands of samples.
    if id(calibration) not in _learned:
        _learned.clear()
        _learned[id(calibration)] = (calibration, OperatorTimes(calibration.samples, calibration))
    return _learned[id(calibration)][1]


def predict(
    profile: ModelProfile,
    calibration: Calibration,
    precision: Precision = "fp32",
    runtime: str | None = None,
    threads: int | None = None,
) -> Prediction:
    """Predict what the profiled model would take on the calibrated machine, with a 90 % interval; nothing is run.

    Operators unlike anything that was sampled are named in `outside`, and make the interval wider. Layers add up to the
    whole.

    Args:
        profile: The model and its inputs.
        calibration: The machine.
        precision: Type of the numbers; eager torch is calibrated at fp32, other runtimes as `calibrate` was asked.
        runtime: Such as "onnxruntime"; default: eager torch at fp32, else the calibrated one with the smallest error.
        threads: Of that runtime; default: as many as it was calibrated with.
    """
    platform = calibrated_runtime(calibration, precision, runtime, threads)
    if platform is not None:
        from edge_opt.calibration.fused_kernels import predicted_kernels

        return predicted_kernels(profile, calibration, platform)
    trace = profile.trace
    forward = timed_forward(trace, calibration)
    own: list[list[int]] = [[] for _ in trace.modules]
    for call in trace.ops:
        own[call.module].append(call.index)
    layers = tuple(forward.layer(module, indices) for module, indices in zip(trace.modules, own, strict=True))
    seconds = math.fsum(layer.seconds or 0.0 for layer in layers)
    outside = [index for index in range(len(trace.ops)) if forward.is_outside[index]]
    factor = forward.uncertainty(seconds)
    disturbed = (f"the calibration was disturbed: {remark}" for remark in calibration.remarks)
    note = "" if calibration.check is None else calibration.check.note
    return Prediction(
        target=calibration.name,
        basis="calibrated",
        precision=precision,
        seconds=seconds,
        low=seconds / factor,
        high=seconds * factor,
        bound=forward.bound(range(len(trace.ops)), len(trace.modules)),
        layers=layers,
        outside=tuple(dict.fromkeys(trace.signatures[trace.ops[index].signature].op for index in outside)),
        energies=(),
        remarks=(*differences(calibration), *disturbed, *filter(None, [note]), *_fresh_memory(trace, calibration)),
    )


def forward_seconds(trace: Trace, calibration: Calibration) -> float:
    """Return the predicted seconds of a whole forward."""
    return timed_forward(trace, calibration).whole_s(range(len(trace.ops)), len(trace.modules))


def forward_interval(trace: Trace, calibration: Calibration) -> tuple[float, float]:
    """Return the ends of the 90 % interval of a whole forward."""
    forward = timed_forward(trace, calibration)
    seconds = forward.whole_s(range(len(trace.ops)), len(trace.modules))
    factor = forward.uncertainty(seconds)
    return seconds / factor, seconds * factor


def timing_key(signature: OpSignature, distances: Sequence[int]) -> tuple[object, ...]:
    """Return what calls that take equally long have in common: distances may differ by a factor of two."""
    return signature, tuple(distance.bit_length() for distance in distances)


def timed_forward(trace: Trace, calibration: Calibration) -> TimedForward:
    """Return the operators of a trace with the seconds that each takes in place, learned or timed."""
    times = operator_times(calibration)
    distances = reuse_distances(trace)
    described = [describe(trace.signatures[call.signature], distances[call.index], times.scales) for call in trace.ops]
    seconds = times.seconds(described)
    # An operator of negligible time does not make the others doubtful.
    floor_s = _NEGLIGIBLE * float(seconds.sum())
    is_outside = [value > floor_s and times.is_outside(item) for value, item in zip(seconds, described, strict=True)]
    usual = {item.group: item.deviation for item in calibration.deviations}
    deviations = np.array(
        [
            usual.get(item.group, _UNKNOWN) * (_OUTSIDE if outside else 1.0)
            for item, outside in zip(described, is_outside, strict=True)
        ]
    )
    # Both estimates have the error of the machine's factor in common.
    common = 0.0 if calibration.check is None else min(calibration.check.factor_deviation, calibration.deviation)
    rest = math.sqrt(calibration.deviation**2 - common**2)
    whole_deviations = np.full(len(described), calibration.deviation)
    known = {timing_key(it.signature, it.distances): (it, timed) for timed in calibration.timed for it in timed.samples}
    for call in trace.ops if known else ():
        sample, timed = known.get(timing_key(trace.signatures[call.signature], distances[call.index]), (None, None))
        if sample is not None and timed is not None:
            index = call.index
            # Two estimates with errors of their own: each counts by the inverse of its variance.
            share = deviations[index] ** 2 / (deviations[index] ** 2 + timed.operator_deviation**2)
            seconds[index] *= (sample.seconds / seconds[index]) ** share
            deviations[index] = _of_both(deviations[index], timed.operator_deviation)
            whole_deviations[index] = math.hypot(common, _of_both(rest, timed.deviation))
            is_outside[index] = False
    factor = calibration.factor
    overheads = Overheads(factor * calibration.overhead_per_operator_s, factor * calibration.overhead_per_module_s)
    deviation = float(seconds @ whole_deviations / seconds.sum()) if seconds.any() else calibration.deviation
    return TimedForward(factor * seconds, deviations, deviation, distances, described, is_outside, overheads)


def _of_both(one: float, other: float) -> float:
    """Return the standard deviation of the best mean of two estimates."""
    return one * other / math.hypot(one, other) if one and other else 0.0


@dataclass(frozen=True, slots=True)
class TimedForward:
    """The operators of a trace in order: seconds, the standard deviation of their logarithm, what they are.

    `deviation` is that of the whole, without what is outside.
    """

    seconds: Array
    deviations: Array
    deviation: float
    distances: Sequence[tuple[int, ...]]
    described: Sequence[OperatorFeatures]
    is_outside: Sequence[bool]
    overheads: Overheads

    def layer(self, module: ModuleCall, indices: Sequence[int]) -> LayerPrediction:
        """Return the prediction of one module call from its own operators."""
        seconds = self.whole_s(indices, 1)
        # Operators of one layer are of one kind, and err together.
        factor = math.exp(NINE_IN_TEN * self.error_s(indices) / seconds) if seconds else 1.0
        return LayerPrediction(
            module=module.index,
            path=module.path,
            kind=module.kind,
            seconds=seconds,
            low=seconds / factor,
            high=seconds * factor,
            bound=self.bound(indices, 1),
            is_outside=any(self.is_outside[index] for index in indices),
        )

    def whole_s(self, indices: Sequence[int], modules: int) -> float:
        """Return the seconds of some operators and module calls together."""
        operators_s = math.fsum(float(self.seconds[index]) + self.overheads.operator_s for index in indices)
        return operators_s + self.overheads.module_s * modules

    def uncertainty(self, seconds: float) -> float:
        """Return the factor between the whole and the ends of its 90 % interval."""
        # Wholes are off by so much where nothing is outside; what is outside adds its own.
        outside = [index for index, is_outside in enumerate(self.is_outside) if is_outside]
        return math.exp(NINE_IN_TEN * math.hypot(self.deviation, self.error_s(outside) / seconds if seconds else 0.0))

    def error_s(self, indices: Sequence[int]) -> float:
        """Return the seconds by which operators err if all err the same way."""
        return math.fsum(float(self.seconds[index] * self.deviations[index]) for index in indices)

    def bound(self, indices: Sequence[int], modules: int) -> Bound:
        """Return what takes most of the time."""
        compute_s = sum(self.described[index].compute_s for index in indices)
        memory_s = sum(self.described[index].memory_s for index in indices)
        overhead_s = self.overheads.module_s * modules + self.overheads.operator_s * len(indices)
        shares: dict[Bound, float] = {"compute": compute_s, "memory": memory_s, "overhead": overhead_s}
        return max(shares, key=lambda name: shares[name])


def _fresh_memory(trace: Trace, calibration: Calibration) -> Iterator[str]:
    """Say what the C library may add where it maps large outputs anew in each forward."""
    large = sum(
        storage.nbytes
        for storage in trace.storages
        if storage.role == "activation" and storage.born is not None and storage.nbytes >= FRESH_BYTES
    )
    if large and calibration.fresh_outputs:
        item = max(calibration.fresh_outputs, key=lambda item: item.nbytes)
        extra_s = max(0.0, item.fresh_s - item.reused_s) / item.nbytes * large
        yield (
            f"{units.size(large)} of outputs are so large that the C library may map them anew in each forward, which "
            f"would take up to {units.duration(extra_s)} more; the figures are for memory that is kept"
        )


def differences(calibration: Calibration, threads: int | None = None) -> Iterator[str]:
    """Name what the calibration was made with that is different here, one sentence each; none on the machine itself.

    `threads` are those of a runtime that has its own; None: torch's, which are compared.
    """
    here, there = read_environment(), calibration.machine
    if (here.cpu, here.cores, here.system.split()[0]) != (there.cpu, there.cores, there.system.split()[0]):
        yield (
            f"the calibration is of another machine: {there.cpu}, {there.cores} core(s), {there.system}; "
            f"the figures are for that one, not for {here.cpu}"
        )
        return
    if here.torch != there.torch:
        yield f"the calibration was made with torch {there.torch}, and this is {here.torch}; calibrate again"
    if threads is None and here.threads != there.threads:
        yield (
            f"the calibration was made with {there.threads} thread(s), and torch now uses {here.threads}; "
            f"the figures are for {there.threads}"
        )
