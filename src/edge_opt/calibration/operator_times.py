"""The time of an operator, learned from samples by boosted trees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log2, prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_opt.cost.rules import price
from edge_opt.records.costs import OpSignature, TensorInfo
from edge_opt.records.predictions import Calibration, OperatorSample

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
    """The figures of a calibrated machine."""
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
    """The operator's group, features and first estimate."""
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
    group = _group(verdict.kind, is_depthwise)
    sizes = [estimate_s * 1e6, near, shared, far, written, signature.scratch_bytes]
    numbers = [*(log2(1 + size) for size in sizes), _spread(signature), *_OWN[group](signature)]
    return OperatorFeatures(group, op, tuple(numbers), estimate_s, compute_s, memory_s)


def _by_distance(reads: Sequence[TensorInfo], distances: Sequence[int]) -> tuple[float, float, float]:
    parts = [0.0, 0.0, 0.0]
    for tensor, distance in zip(reads, distances, strict=True):
        span = distance + tensor.nbytes
        parts[0 if span < NEAR_BYTES else 1 if span < FAR_BYTES else 2] += tensor.nbytes
    return parts[0], parts[1], parts[2]


def _group(kind: str, is_depthwise: bool) -> str:
    if is_depthwise:
        return "depthwise"
    return kind if kind in GROUPS else "pass"


def _is_depthwise(signature: OpSignature) -> bool:
    groups = signature.argument("groups", 1)
    weight = signature.argument("weight")
    return (
        isinstance(groups, int) and groups > 1 and isinstance(weight, TensorInfo) and groups == weight.shape[0]
        and weight.shape[1] == 1
    )  # fmt: skip


def _spread(signature: OpSignature) -> float:
    """How the first operand lies in memory: 0 row by row, 1 channels last, 2 otherwise permuted."""
    strides = next((item for item in signature.strides if item is not None), None)
    if strides is None:
        return 0.0
    return 1.0 if len(strides) == 4 and strides[1] == 1 else 2.0


def _both(value: Any, default: int = 1) -> tuple[int, int]:
    values = value if isinstance(value, tuple) and value else (value if isinstance(value, int) else default,)
    return int(values[0]), int(values[-1])


def _multiple(width: int) -> float:
    """The largest of 1, 2, 4, 8, 16, 32 that divides a width: kernels work in blocks of these."""
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
        log2(out.shape[-1]), _multiple(inner), _multiple(width // groups), float(is_transposed),
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
        log2(batch), log2(rows), log2(max(1, inner)), log2(max(1, columns)), _multiple(inner), _multiple(columns),
        float(is_linear), _multiple(rows), float(len(out.shape)), float(rows == 1),
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
        0.0 if mask is None else 1.0 if mask.dtype == "bool" else 2.0, _multiple(query.shape[-1]),
        _multiple(key.shape[-2]),
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
    """Elements that lie side by side in the order in which the result is written."""
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
_SHRINKAGE = 1.0  # pseudo-observations of zero in each leaf


class BoostedTrees:
    """A regression by trees of one depth, each fitted to what those before it left; every tree sees some features."""

    def __init__(
        self, trees: int = 200, depth: int = 4, rate: float = 0.08, least: int = 4, share: float = 0.5
    ) -> None:
        self.trees, self.depth, self.rate, self.least, self.share = trees, depth, rate, least, share

    def fit(self, rows: Array, targets: Array, weights: Array, seed: int = 0) -> BoostedTrees:
        """Learn targets from rows of features; rows count by their weight."""
        random = np.random.default_rng(seed)
        count, width = rows.shape
        self._edges = [_edges(rows[:, column]) for column in range(width)]
        binned = self._binned(rows)
        places = np.arange(width) * _BINS + binned
        self._base = float(np.average(targets, weights=weights))
        left = targets - self._base
        self._features = np.zeros((self.trees, 2**self.depth - 1), dtype=np.int64)
        self._thresholds = np.full((self.trees, 2**self.depth - 1), _BINS, dtype=np.int64)
        self._leaves = np.zeros((self.trees, 2**self.depth))
        for tree in range(self.trees):
            hidden: NDArray[np.bool_] = np.greater(random.random(width), self.share)
            hidden[random.integers(width)] = False
            node = np.zeros(count, dtype=np.int64)
            for level in range(self.depth):
                features, thresholds = self._splits(places, left, weights, node, 2**level, hidden)
                first = 2**level - 1
                self._features[tree, first : first + 2**level] = features
                self._thresholds[tree, first : first + 2**level] = thresholds
                node = 2 * node + (binned[np.arange(count), features[node]] > thresholds[node])
            size = 2**self.depth
            sums = np.bincount(node, left * weights, size)
            leaves = self.rate * sums / (np.bincount(node, weights, size) + _SHRINKAGE)
            self._leaves[tree] = leaves
            left = left - leaves[node]
        return self

    def predict(self, rows: Array) -> Array:
        binned = self._binned(rows)
        lines = np.arange(len(rows))
        total = np.full(len(rows), self._base)
        for features, thresholds, leaves in zip(self._features, self._thresholds, self._leaves, strict=True):
            node = np.zeros(len(rows), dtype=np.int64)
            for level in range(self.depth):
                at = node + 2**level - 1
                node = 2 * node + (binned[lines, features[at]] > thresholds[at])
            total += leaves[node]
        return total

    def _binned(self, rows: Array) -> NDArray[np.int64]:
        columns = [np.searchsorted(edges, rows[:, column]) for column, edges in enumerate(self._edges)]
        return np.stack(columns, axis=1).astype(np.int64)

    def _splits(
        self, places: NDArray[np.int64], left: Array, weights: Array, node: NDArray[np.int64], nodes: int,
        hidden: NDArray[np.bool_],
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:  # fmt: skip
        """The feature and threshold of each node that explain most of what is left; none where too few rows are."""
        width = places.shape[1]
        flat = (node[:, None] * (width * _BINS) + places).ravel()
        size = nodes * width * _BINS
        shape = (nodes, width, _BINS)
        counts = np.bincount(flat, minlength=size).reshape(shape).cumsum(2)
        heavy = np.bincount(flat, np.repeat(weights, width), size).reshape(shape).cumsum(2)
        sums = np.bincount(flat, np.repeat(left * weights, width), size).reshape(shape).cumsum(2)
        rest, heavy_rest = sums[:, :, -1:] - sums, heavy[:, :, -1:] - heavy
        gain = sums**2 / (heavy + _SHRINKAGE) + rest**2 / (heavy_rest + _SHRINKAGE)
        gain -= sums[:, :, -1:] ** 2 / (heavy[:, :, -1:] + _SHRINKAGE)
        is_small = (counts < self.least) | (counts[:, :, -1:] - counts < self.least)
        gain[is_small | hidden[None, :, None]] = 0.0
        best = gain.reshape(nodes, -1).argmax(1)
        features, thresholds = best // _BINS, best % _BINS
        is_nothing = gain.reshape(nodes, -1).max(1) <= 0
        return features, np.where(is_nothing, _BINS, thresholds)


def _edges(values: Array) -> Array:
    """Thresholds between distinct values where there are few, else between equal shares of the rows."""
    distinct = np.unique(values)
    if len(distinct) > _BINS:
        distinct = np.unique(np.quantile(values, np.linspace(0, 1, _BINS)))
    return (distinct[1:] + distinct[:-1]) / 2


# An estimate this many times beyond the samples of an operator is outside of them.
_REACH = 4.0
_ALONE, _IN_PLACE = 1.0, 0.0


@dataclass(frozen=True, slots=True)
class _Known:
    """What was sampled of one operator: its usual deviation from the first estimate, and the span of estimates."""

    deviation: float
    least_s: float
    most_s: float


class OperatorTimes:
    """Learned from samples: the logarithm of what an operator takes over what a first estimate says it would."""

    def __init__(self, samples: Sequence[OperatorSample], calibration: Calibration) -> None:
        self.scales = scales_of(calibration)
        described = [describe(sample.signature, sample.distances, self.scales) for sample in samples]
        deviations = np.array(
            [np.log(sample.seconds / item.estimate_s) for sample, item in zip(samples, described, strict=True)]
        )
        self._known = _known(described, deviations)
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
            self._models[group] = BoostedTrees().fit(rows, deviations[chosen], np.ones(len(chosen)))

    def seconds(self, described: Sequence[OperatorFeatures]) -> Array:
        """Seconds of each operator, in place."""
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
        """Whether nothing like this operator was sampled."""
        known = self._known.get((item.group, item.op))
        if item.group == "view":
            return False
        return known is None or not known.least_s / _REACH <= item.estimate_s <= known.most_s * _REACH

    def _rows(self, described: Sequence[OperatorFeatures]) -> Array:
        usual = self._usual
        return np.array(
            [
                (*item.numbers, known.deviation if known else usual.get(item.group, 0.0), _IN_PLACE)
                for item in described
                for known in (self._known.get((item.group, item.op)),)
            ]
        )


def _known(described: Sequence[OperatorFeatures], deviations: Array) -> dict[tuple[str, str], _Known]:
    members: dict[tuple[str, str], list[int]] = {}
    for index, item in enumerate(described):
        members.setdefault((item.group, item.op), []).append(index)
    return {
        key: _Known(
            float(np.median(deviations[indices])),
            min(described[index].estimate_s for index in indices),
            max(described[index].estimate_s for index in indices),
        )
        for key, indices in members.items()
    }


_learned: dict[int, tuple[Calibration, OperatorTimes]] = {}


def operator_times(calibration: Calibration) -> OperatorTimes:
    """The times learned from a calibration; learned once while it is in use."""
    # By identity: a calibration's own hash would visit thousands of samples.
    found = _learned.get(id(calibration))
    if found is None:
        _learned.clear()
        found = _learned[id(calibration)] = (calibration, OperatorTimes(calibration.samples, calibration))
    return found[1]
