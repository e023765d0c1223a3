"""Boosted trees in numpy: small, fast to fit, and the same every time."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

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
