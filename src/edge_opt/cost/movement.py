"""Data movement and ordering: copies, fills, views and indexing; sorting, searching, selecting and counting values.

Movement reads and writes bytes and computes little. Sorting and the like count comparisons by the textbook algorithm:
Knuth, The Art of Computer Programming 3 (sorting 5.2, selection 5.3.3, binary search 6.2.1).
"""

from __future__ import annotations

from itertools import zip_longest
from math import ceil, log2, prod
from typing import Any

from edge_opt.cost.rules import Rule, Work, aten, by_operand, complex_ops, copied, cost_rule, free_operators, is_complex
from edge_opt.records.costs import Shape, TensorInfo

cost_rule(
    aten.clone, aten.contiguous, aten.reshape, aten.flatten, aten.unflatten, aten._unsafe_view, aten.to,
    aten._to_copy, aten.type_as, aten.cat, aten.stack, aten.pad, aten.constant_pad_nd, aten.reflection_pad1d,
    aten.reflection_pad2d, aten.reflection_pad3d, aten.replication_pad1d, aten.replication_pad2d,
    aten.replication_pad3d, aten.roll, aten.flip, aten.repeat, aten.tile, aten.repeat_interleave, aten.tril, aten.triu,
    aten.pixel_shuffle, aten.pixel_unshuffle, aten.channel_shuffle, aten.native_channel_shuffle, aten.im2col,
    aten.unfold_copy, aten.upsample_nearest1d, aten.upsample_nearest2d, aten.upsample_nearest3d,
    aten._upsample_nearest_exact1d, aten._upsample_nearest_exact2d, aten._upsample_nearest_exact3d, aten.rot90,
    aten.view_copy, aten.permute_copy, aten.expand_copy, aten.split_with_sizes_copy, aten.diag_embed,
    aten.nonzero, aten._pack_padded_sequence, aten._pad_packed_sequence,
    aten.argwhere, aten.nonzero_static,
    aten.block_diag, aten.detach_copy, aten.alias_copy, aten.slice_copy, aten.select_copy, aten.transpose_copy,
    aten.t_copy, aten.unsqueeze_copy, aten.squeeze_copy, aten.split_copy, aten.unbind_copy, aten.as_strided_copy,
    aten.narrow_copy, aten._chunk_cat, aten.lu_unpack, aten.masked_select,
    aten.lift_fresh_copy, aten.unsafe_split, aten.unsafe_split_with_sizes, aten.diagonal_copy,
    aten.view_as_complex_copy, aten.view_as_real_copy, aten._reshape_copy,
    kind="movement",
)(copied)  # fmt: skip


@cost_rule(aten.copy, aten.fill, kind="movement")
def overwritten(out: TensorInfo, target: TensorInfo, source: Any, *_: Any, **__: Any) -> Work:
    """The source is read, the target only written."""
    return Work(bytes_read=source.nbytes if isinstance(source, TensorInfo) else 0)


@cost_rule(
    aten.zeros, aten.ones, aten.full, aten.arange, aten.linspace, aten.logspace, aten.eye, aten.rand, aten.randn,
    aten.randint, aten.randperm, aten.zeros_like, aten.ones_like, aten.full_like, aten.rand_like, aten.randn_like,
    aten.randint_like, aten.new_zeros, aten.new_ones, aten.new_full, aten.scalar_tensor, aten.zero, aten.one_hot,
    aten.tril_indices, aten.triu_indices, aten.hann_window,
    aten.hamming_window, aten.blackman_window, aten.bartlett_window, aten.kaiser_window, aten.normal, aten.uniform,
    aten.exponential, aten.random, aten.range, aten.cauchy, aten.geometric, aten.log_normal, aten.poisson,
    kind="movement",
)  # fmt: skip
def filled(out: TensorInfo, *_: Any, **__: Any) -> Work:
    """Written, and nothing read."""
    return Work(bytes_read=0)


@cost_rule(aten.embedding, kind="embedding")
def embedding(out: TensorInfo, weight: TensorInfo, indices: TensorInfo, *_: Any, **__: Any) -> Work:
    """One row read and written per index; the rest of the table is not touched."""
    return Work(bytes_read=out.nbytes + indices.nbytes)


@cost_rule(aten.embedding_renorm, kind="embedding")
def renormed(out: TensorInfo, weight: TensorInfo, indices: TensorInfo, *_: Any, **__: Any) -> Work:
    """The norm of each row that is named (square, sum), compared, and the row scaled."""
    rows = min(indices.elements, weight.shape[0])
    moved = rows * weight.shape[1] * (weight.nbytes // max(weight.elements, 1))
    return Work(other_ops=rows * (3 * weight.shape[1] + 2), bytes_read=moved + indices.nbytes, bytes_written=moved)


@cost_rule(aten.embedding_bag, aten._embedding_bag, aten._embedding_bag_forward_only, kind="embedding")
def embedding_bag(out: Any, weight: TensorInfo, indices: TensorInfo, *_: Any, **__: Any) -> Work:
    """One row read and added per index; one row written per bag."""
    width = weight.shape[1]
    itemsize = weight.nbytes // max(weight.elements, 1)
    return Work(
        other_ops=indices.elements * width,
        bytes_read=indices.nbytes + indices.elements * width * itemsize,
        bytes_written=out[0].nbytes,
    )


def _nbytes(values: tuple[Any, ...]) -> int:
    return sum(
        item.nbytes
        for value in values
        for item in (value if isinstance(value, tuple) else (value,))
        if isinstance(item, TensorInfo)
    )


@cost_rule(
    aten.index, aten._unsafe_index, aten.index_select, aten.gather, aten.take, aten.take_along_dim,
    "aten::_unsafe_masked_index", kind="movement",
)  # fmt: skip
def gathered(out: TensorInfo, source: TensorInfo, *indices: Any, **_: Any) -> Work:
    """Only the elements taken are read, and the indices."""
    return Work(bytes_read=out.nbytes + _nbytes(indices))


# Operators that write into a tensor: which argument after the target has one element per write (an index or the
# values), and whether every write is added to what is there. The others say so in `reduce` or `accumulate`.
_WRITES = {
    "scatter": (1, False), "scatter_reduce": (1, False), "scatter_add": (1, True), "index_fill": (1, False),
    "index_copy": (2, False), "index_reduce": (2, False), "index_add": (2, True), "masked_scatter": (1, False),
    "put": (0, False), "index_put": (0, False), "_unsafe_index_put": (0, False), "_index_put_impl": (0, False),
    "_unsafe_masked_index_put_accumulate": (1, True), "slice_scatter": (0, False), "select_scatter": (0, False),
    "diagonal_scatter": (0, False), "as_strided_scatter": (0, False),
}  # fmt: skip


def _writing_rule(operator: str, argument: int, always_adds: bool, is_in_place: bool) -> Rule:
    def rule(out: TensorInfo, target: TensorInfo, *args: Any, **kwargs: Any) -> Work:
        """In place only the named elements move; otherwise the target is copied first, and every operand read once."""
        elements = args[argument].elements if isinstance(args[argument], TensorInfo) else 0
        if operator == "index_fill":
            elements *= target.elements // max(target.shape[args[0]], 1) if target.shape else 1
        elif operator == "masked_scatter":
            elements = min(target.elements, elements)  # as many as the mask may let through
        elif "index_put" in operator:
            elements = _indexed_elements(target, args[argument], args[argument + 1])
        texts = (value for value in (*args, *kwargs.values()) if isinstance(value, str))
        # `accumulate` follows the values of put and of index_put, and always adds.
        is_accumulating = "put" in operator and (kwargs.get("accumulate") or args[2:3] == (True,))
        reduction = "sum" if always_adds or is_accumulating else next(texts, None)
        factor = 2 if kwargs.get("alpha", 1) != 1 else 1
        ops = factor * _reduction_ops(target, elements, reduction)
        if not is_in_place:
            return Work(other_ops=ops)
        itemsize = target.nbytes // target.elements if target.elements else 0
        moved = min(elements * itemsize, target.nbytes)
        others = _nbytes((*args, *kwargs.values()))
        return Work(other_ops=ops, bytes_read=others + (moved if reduction else 0), bytes_written=moved)

    return rule


def _reduction_ops(target: TensorInfo, elements: int, reduction: str | None) -> int:
    """Return one operation per element put in; a mean also counts them, and divides each element of the target."""
    if reduction is None:
        return 0
    if reduction == "mean":
        return 2 * elements + target.elements
    if not is_complex(target):
        return elements
    return elements * complex_ops("aten.mul" if reduction in ("prod", "multiply") else "aten.add", 1)


def _indexed_elements(target: TensorInfo, indices: tuple[Any, ...], values: TensorInfo) -> int:
    """Return how many elements an index names: one for each of its own, times the dimensions it leaves whole.

    A mask names as many as there are values for it; as many as it has elements, where one value goes everywhere.
    """
    index_shapes: list[Shape] = []
    whole_dims: list[int] = []
    axis = 0
    has_mask = False
    for index in indices:
        if not isinstance(index, TensorInfo):
            whole_dims.append(target.shape[axis])
            axis += 1
        elif index.dtype in ("bool", "uint8"):
            has_mask = True
            index_shapes.append((index.elements,))
            axis += max(len(index.shape), 1)
        else:
            index_shapes.append(index.shape)
            axis += 1
    whole_dims += target.shape[axis:]
    if has_mask and len(values.shape) == 1 + len(whole_dims):
        return values.elements
    # Index tensors are broadcast against each other.
    sizes = zip_longest(*(reversed(shape) for shape in index_shapes), fillvalue=1)
    return prod(0 if 0 in axis_sizes else max(axis_sizes) for axis_sizes in sizes) * prod(whole_dims)


for _operator, (_argument, _adds) in _WRITES.items():
    cost_rule(f"aten::{_operator}", kind="movement")(_writing_rule(_operator, _argument, _adds, is_in_place=False))
    cost_rule(f"aten::{_operator}_", kind="movement")(_writing_rule(_operator, _argument, _adds, is_in_place=True))


free_operators(
    aten.empty, aten.empty_like, aten.empty_strided, aten.empty_permuted, aten.new_empty, aten.new_empty_strided,
    aten.lift_fresh, aten.lift, aten.detach, aten.alias, aten.item, aten._local_scalar_dense, aten.is_nonzero,
    aten.sym_size, aten.sym_numel, aten._assert_async, aten._assert_scalar, aten._assert_tensor_metadata,
    aten._functional_assert_async, aten._functional_assert_scalar, aten.result_type, aten.promote_types,
    aten.can_cast, aten.resize_, aten.set_, aten.resize_as_, aten._linalg_check_errors, aten._resize_output_,
    aten.is_same_size, aten._has_same_storage_numel, aten._efficientzerotensor,
    "profiler::_record_function_enter_new", "profiler::_record_function_exit",
)  # fmt: skip


# Sorting, searching, selecting and counting


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


@cost_rule(aten.topk, kind="sorting")
def largest(out: Any, x: TensorInfo, k: int, dim: int = -1, *_: Any, **__: Any) -> Work:
    """A heap of the k best: log2 k comparisons for each element, one at least."""
    return Work(other_ops=ceil(x.elements * max(log2(k), 1.0)) if k and _length(x, dim) > 1 else 0)


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


cost_rule(aten.bucketize, kind="sorting")(lambda out, x, boundaries, **_: searched(out, boundaries))


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


for _operators, _kind, _ops in (
    # Overlapping patches are added.
    ((aten.col2im, aten.unfold_backward), "movement", lambda x: x.elements),
    # Along the first dimension.
    ((aten.msort,), "sorting", lambda x: sort_ops(x.elements, _length(x, 0))),
    # Quickselect of the median: on average 2 (1 + ln 2) = 3.39 comparisons for each element.
    ((aten.kthvalue, aten.median, aten.nanmedian), "sorting", lambda x: ceil(3.39 * x.elements)),
    # All elements sorted, then each compared with the one before.
    ((aten._unique, aten._unique2), "sorting", lambda x: sort_ops(x.elements, x.elements) + x.elements),
    # Each element, or slice, compared with the one before.
    ((aten.unique_consecutive, aten.unique_dim_consecutive), "sorting", lambda x: x.elements),
    # The smallest and the largest in each dimension.
    ((aten._histogramdd_bin_edges,), "reduction", lambda x: 2 * x.elements),
    # The largest, and one addition for each element.
    ((aten.bincount,), "reduction", lambda x: 2 * x.elements),
):
    cost_rule(*_operators, kind=_kind)(by_operand(_ops))
