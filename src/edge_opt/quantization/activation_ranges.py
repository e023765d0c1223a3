"""Ranges of activations on calibration batches: whole, without the rarest values, or by least loss of information."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from edge_opt._support.progress import report_progress
from edge_opt.quantization.onnx_files import Tensors, require

METHODS = ("minmax", "entropy", "percentile")
_BINS = 2048
_LEVELS = 256
# Of all values, so many may be cut off by "percentile".
_CUT = 1e-4
_SHRINKS = 48
_NARROWEST = 0.3

# Masks add this, or more, to scores that must not count; what is rounded to a 256th of it is gone.
ENDLESS = 1e4

Ranges = dict[str, tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Calibrated:
    """Ranges of all batches, and of those that were not held out: None where none were."""

    ranges: Ranges
    fewer: Ranges | None = None

    @property
    def endless(self) -> set[str]:
        """Tensors with values that 256 levels cannot hold beside any others."""
        return {name for name, (low, high) in self.ranges.items() if max(-low, high) >= ENDLESS}


def collect_ranges(
    prepared: Path,
    ops: Iterable[str],
    names: tuple[str, ...],
    batches: Sequence[Tensors],
    method: str,
    held_out: Sequence[Tensors] = (),
) -> Calibrated:
    """The range of every float tensor that goes into or out of an operator of these kinds; each batch is run once.

    Histograms take a second run, for their bins need the whole range.
    """
    onnx = require("onnx")
    model = onnx.load(str(prepared), load_external_data=False)
    wanted = _tensors(onnx, model.graph, frozenset(ops))
    with Observer(prepared, wanted, names) as observer:
        seen, unseen = _whole(observer.values(batches)), _whole(observer.values(held_out, len(batches)))
        ranges = _united(seen, unseen)
        if method == "minmax":
            return Calibrated(ranges, seen if held_out else None)
        choose = _percentile if method == "percentile" else _entropy
        few = _histograms(observer.values(batches), ranges)
        rest = _histograms(observer.values(held_out, len(batches)), ranges)
    fewer = {name: _within(choose(counts, *ranges[name]), seen[name]) for name, counts in few.items()}
    if not held_out:
        return Calibrated(fewer)
    return Calibrated({name: choose(counts + rest[name], *ranges[name]) for name, counts in few.items()}, fewer)


def _united(some: Ranges, others: Ranges) -> Ranges:
    return {
        name: (min(low, others.get(name, (low, high))[0]), max(high, others.get(name, (low, high))[1]))
        for name, (low, high) in some.items()
    }


def _within(chosen: tuple[float, float], seen: tuple[float, float]) -> tuple[float, float]:
    """A range chosen from bins of a wider one, no wider than what was seen."""
    return max(chosen[0], seen[0]), min(chosen[1], seen[1])


class Observer:
    """Tensors of a float graph, as it computes them; a context, for a file beside the graph is there meanwhile."""

    def __init__(self, graph: Path, wanted: list[str], names: tuple[str, ...]) -> None:
        self._wanted, self._names = wanted, names
        self._inner = [name for name in wanted if name not in names]
        self._probe = graph.with_name(f"observed-{graph.name}")
        onnx, runtime = require("onnx"), require("onnxruntime")
        model = onnx.load(str(graph), load_external_data=False)
        known = [value.name for value in model.graph.output]
        model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in self._inner if name not in known)
        self._probe.write_bytes(model.SerializeToString())
        options = runtime.SessionOptions()
        options.log_severity_level = 4
        # Optimised graphs do not have all of these tensors.
        options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
        self._session = runtime.InferenceSession(str(self._probe), options, providers=["CPUExecutionProvider"])

    def __enter__(self) -> Observer:
        return self

    def __exit__(self, *_: object) -> None:
        self._probe.unlink(missing_ok=True)

    def values(self, batches: Iterable[Tensors], before: int = 0) -> Iterator[tuple[str, Any]]:
        """Each tensor by name with its values, batch by batch; so many batches came before these."""
        for number, batch in enumerate(batches, start=before + 1):
            report_progress(f"quantising: ranges of calibration batch {number}")
            feeds = {name: tensor.numpy() for name, tensor in zip(self._names, batch, strict=True)}
            # Without a name the session would return every output.
            yield from zip(self._inner, self._session.run(self._inner, feeds) if self._inner else [], strict=True)
            yield from ((name, array) for name, array in feeds.items() if name in self._wanted)


def _tensors(onnx: Any, graph: Any, ops: frozenset[str]) -> list[str]:
    floats = {
        value.name
        for value in chain(graph.value_info, graph.input, graph.output)
        if value.type.tensor_type.elem_type == onnx.TensorProto.FLOAT
    } - {tensor.name for tensor in graph.initializer}
    used = (name for node in graph.node if node.op_type in ops for name in chain(node.input, node.output))
    return [name for name in dict.fromkeys(used) if name in floats]


def _whole(values: Iterable[tuple[str, Any]]) -> Ranges:
    ranges: Ranges = {}
    for name, array in values:
        finite = array[np.isfinite(array)]
        low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
        known = ranges.get(name, (low, high))
        ranges[name] = min(low, known[0]), max(high, known[1])
    return ranges


def _histograms(values: Iterable[tuple[str, Any]], ranges: Ranges) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, array in values:
        low, high = ranges[name]
        # In 64 bits: of a tensor that hardly changes, numpy cannot tell the edges of 2048 bins apart in 32.
        counts, _ = np.histogram(array.astype(np.float64), _BINS, (low, high if high > low else low + 1.0))
        found[name] = found.get(name, 0) + counts
    return found


def _percentile(counts: Any, low: float, high: float) -> tuple[float, float]:
    """The range without the rarest values at both ends."""
    share = np.cumsum(counts) / max(1, counts.sum())
    first = int(np.searchsorted(share, _CUT / 2, side="right"))
    last = int(np.searchsorted(share, 1 - _CUT / 2))
    width = (high - low) / _BINS
    return low + first * width, low + min(last + 1, _BINS) * width


def _entropy(counts: Any, low: float, high: float) -> tuple[float, float]:
    """The range, narrowed towards zero, whose 256 levels tell least from the values: by Kullback-Leibler divergence."""
    edges = np.linspace(low, high, _BINS + 1)
    counts = _without_zeros(counts, edges)
    best, chosen = np.inf, (low, high)
    for shrink in np.linspace(1.0, _NARROWEST, _SHRINKS):
        start = int(np.searchsorted(edges, low * shrink, side="right")) - 1 if low < 0 else 0
        stop = int(np.searchsorted(edges, high * shrink)) if high > 0 else _BINS
        start, stop = max(start, 0), min(stop, _BINS)
        if stop - start < _LEVELS // 2:
            break
        loss = _divergence(counts, start, stop)
        if loss < best:
            best, chosen = loss, (float(edges[start]), float(edges[stop]))
    return chosen


def _without_zeros(counts: Any, edges: Any) -> Any:
    """As many zeros as values beside them: zero is a level of every range, so those behind a ReLU must not decide."""
    place = int(np.clip(np.searchsorted(edges, 0.0, side="right") - 1, 0, _BINS - 1))
    kept = counts.copy()
    kept[place] = min(counts[place], max(counts[other] for other in (place - 1, place + 1) if 0 <= other < _BINS))
    return kept


def _divergence(counts: Any, start: int, stop: int) -> float:
    inside = counts[start:stop].astype(float)
    clipped = inside.copy()
    # What is cut off lands on the outermost levels.
    clipped[0] += counts[:start].sum()
    clipped[-1] += counts[stop:].sum()
    level = np.arange(len(inside)) * _LEVELS // len(inside)
    is_there = inside > 0
    mass = np.bincount(level, inside, _LEVELS)
    occupied = np.bincount(level, is_there, _LEVELS)
    rebuilt = np.where(is_there, mass[level] / np.maximum(occupied[level], 1), 0.0)
    p, q = clipped / max(clipped.sum(), 1.0), rebuilt / max(rebuilt.sum(), 1.0)
    return float(np.sum(np.where(p > 0, p * np.log(np.maximum(p, 1e-12) / np.maximum(q, 1e-12)), 0.0)))
