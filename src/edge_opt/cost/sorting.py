"""Sorting, searching, selecting and counting values: comparisons by the textbook algorithm.

Sources: Knuth, The Art of Computer Programming 3 (sorting 5.2, selection 5.3.3, binary search 6.2.1).
"""

from __future__ import annotations

from math import ceil, log2
from typing import Any

from edge_opt.cost.rules import Work, aten, cost_rule
from edge_opt.records.costs import TensorInfo


def _length(x: TensorInfo, dim: Any = -1) -> int:
    """Return the size along a dimension; a single value is a line of one."""
    return x.shape[dim] if x.shape and isinstance(dim, int) else 1


def sort_ops(elements: int, length: int) -> int:
    """n log2 n comparisons for each line of n."""
    return ceil(elements * log2(length)) if length > 1 else 0


@cost_rule(aten.sort, aten.argsort, aten.mode, kind="sorting")
def sort(out: Any, x: TensorInfo, dim: Any = -1, *_: Any, **options: Any) -> Work:
    """Every line along the dimension is sorted; a mode is read off the sorted line."""
    return Work(other_ops=sort_ops(x.elements, _length(x, options.get("dim", dim))))


@cost_rule(aten.msort, kind="sorting")
def sort_rows(out: Any, x: TensorInfo) -> Work:
    """Along the first dimension."""
    return Work(other_ops=sort_ops(x.elements, _length(x, 0)))


@cost_rule(aten.topk, kind="sorting")
def largest(out: Any, x: TensorInfo, k: int, dim: int = -1, *_: Any, **__: Any) -> Work:
    """A heap of the k best: log2 k comparisons for each element, one at least."""
    return Work(other_ops=ceil(x.elements * max(log2(k), 1.0)) if k and _length(x, dim) > 1 else 0)


@cost_rule(aten.kthvalue, aten.median, aten.nanmedian, kind="sorting")
def selected(out: Any, x: TensorInfo, *_: Any, **__: Any) -> Work:
    """Quickselect: 2 (1 + ln 2) = 3.39 comparisons for each element on average, for the middle one."""
    return Work(other_ops=ceil(3.39 * x.elements))


@cost_rule(aten._unique, aten._unique2, kind="sorting")
def unique(out: Any, x: TensorInfo, *_: Any, **__: Any) -> Work:
    """All elements sorted, then each compared with the one before."""
    return Work(other_ops=sort_ops(x.elements, x.elements) + x.elements)


@cost_rule(aten.unique_consecutive, aten.unique_dim_consecutive, kind="sorting")
def unique_consecutive(out: Any, x: TensorInfo, *_: Any, **__: Any) -> Work:
    """Each element, or slice, compared with the one before."""
    return Work(other_ops=x.elements)


@cost_rule(aten.unique_dim, kind="sorting")
def unique_slices(out: Any, x: TensorInfo, dim: int, *_: Any, **__: Any) -> Work:
    """Slices sorted, then each compared with the one before; to compare two slices takes all their elements."""
    return Work(other_ops=sort_ops(x.elements, _length(x, dim)) + x.elements)


def search_ops(values: int, length: int) -> int:
    """Binary search: log2 (n + 1) comparisons for each value, rounded up."""
    return values * ceil(log2(length + 1))


@cost_rule(aten.searchsorted, kind="sorting")
def searched(out: Any, boundaries: TensorInfo, *_: Any, **__: Any) -> Work:
    """Each value by binary search in its line of boundaries."""
    return Work(other_ops=search_ops(out.elements, _length(boundaries)))


@cost_rule(aten.bucketize, kind="sorting")
def bucketed(out: Any, x: Any, boundaries: TensorInfo, **_: Any) -> Work:
    """Each value by binary search in the boundaries."""
    return Work(other_ops=search_ops(out.elements, _length(boundaries)))


@cost_rule(aten.isin, kind="sorting")
def contained(out: TensorInfo, elements: Any, candidates: Any, **options: Any) -> Work:
    """Every pair where the candidates are few; otherwise both are sorted together. The limit is that of torch."""
    many, few = (value.elements if isinstance(value, TensorInfo) else 1 for value in (elements, candidates))
    if few < 10 * many**0.145:
        return Work(other_ops=many * few)
    return Work(other_ops=sort_ops(many + few, many + few) + many + few)


# Two comparisons with the range, then subtract, multiply, one comparison with the last bin, one addition to the bin.
_BIN_OPS = 6


@cost_rule(aten.histc, kind="reduction")
def histogram_of_range(
    out: TensorInfo, x: TensorInfo, bins: int = 100, low: Any = 0, high: Any = 0, **options: Any
) -> Work:
    """The bin of each element by its distance from the lower end; without a range, the smallest and largest first."""
    low, high = options.get("min", low), options.get("max", high)
    return Work(other_ops=x.elements * (_BIN_OPS + (2 if low == high else 0)))


@cost_rule(aten.histogram, kind="reduction")
def histogram(out: Any, x: TensorInfo, bins: Any, *_: Any, **options: Any) -> Work:
    """The bin of each element: by distance where bins are alike, by binary search where their edges are given."""
    if isinstance(bins, TensorInfo):
        return Work(other_ops=search_ops(x.elements, bins.elements) + x.elements)
    return Work(other_ops=x.elements * (_BIN_OPS + (0 if options.get("range") else 2)))


@cost_rule(aten._histogramdd_from_bin_cts, aten._histogramdd_from_bin_tensors, kind="reduction")
def histogram_of_points(out: TensorInfo, x: TensorInfo, bins: tuple[Any, ...], **_: Any) -> Work:
    """One bin for each coordinate, then one addition for each point."""
    points = x.elements // max(_length(x), 1)
    per_point = sum(ceil(log2(edges.elements + 1)) if isinstance(edges, TensorInfo) else _BIN_OPS - 1 for edges in bins)
    return Work(other_ops=points * (per_point + 1))


@cost_rule(aten._histogramdd_bin_edges, kind="reduction")
def histogram_edges(out: Any, x: TensorInfo, *_: Any, **__: Any) -> Work:
    """The smallest and the largest in each dimension."""
    return Work(other_ops=2 * x.elements)


@cost_rule(aten.bincount, kind="reduction")
def counted(out: TensorInfo, x: TensorInfo, *_: Any, **__: Any) -> Work:
    """The largest, and one addition for each element."""
    return Work(other_ops=2 * x.elements)
