"""Movement: operators that read and write bytes and compute little: copies, fills, views, indexing."""

from __future__ import annotations

from math import prod
from typing import Any

from edge_opt.cost.complex_numbers import complex_ops, is_complex
from edge_opt.cost.rules import Work, aten, copied, cost_rule, free_operators
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


@cost_rule(aten.col2im, aten.unfold_backward, kind="movement")
def folded(out: TensorInfo, x: TensorInfo, *_: Any, **__: Any) -> Work:
    """Overlapping patches are added."""
    return Work(other_ops=x.elements)


_MASKS = ("bool", "uint8")


def _nbytes(values: tuple[Any, ...]) -> int:
    return sum(
        item.nbytes
        for value in values
        for item in (value if isinstance(value, tuple) else (value,))
        if isinstance(item, TensorInfo)
    )


def _size(target: TensorInfo, elements: int) -> int:
    """Bytes of so many elements of the target's type."""
    return elements * (target.nbytes // target.elements) if target.elements else 0


@cost_rule(
    aten.index, aten._unsafe_index, aten.index_select, aten.gather, aten.take, aten.take_along_dim,
    "aten::_unsafe_masked_index", kind="movement",
)  # fmt: skip
def gathered(out: TensorInfo, source: TensorInfo, *indices: Any, **_: Any) -> Work:
    """Only the elements taken are read, and the indices."""
    return Work(bytes_read=out.nbytes + _nbytes(indices))


class _Written:
    """How many elements an operator writes, and what it computes for each."""

    def __init__(self, elements: int, ops: int, is_accumulating: bool) -> None:
        self.elements = elements
        self.ops = ops
        self.is_accumulating = is_accumulating

    def work(self, target: TensorInfo, others: tuple[Any, ...], is_in_place: bool) -> Work:
        """In place only the named elements move; otherwise the target is copied first, and every operand read once."""
        if not is_in_place:
            return Work(other_ops=self.ops)
        moved = min(_size(target, self.elements), target.nbytes)
        return Work(
            other_ops=self.ops,
            bytes_read=_nbytes(others) + (moved if self.is_accumulating else 0),
            bytes_written=moved,
        )


def _added(target: TensorInfo, elements: int, per_element: int = 1) -> _Written:
    """Each element is added to the target, or multiplied with it, or compared."""
    ops = complex_ops("aten.add", 1) if is_complex(target) else 1
    return _Written(elements, elements * ops * per_element, True)


def _reduced(target: TensorInfo, elements: int, reduce: Any) -> _Written:
    """One operation for each element put in; a mean also counts them, and divides each element of the target."""
    if reduce is None:
        return _Written(elements, 0, False)
    if reduce == "mean":
        return _Written(elements, 2 * elements + target.elements, True)
    if is_complex(target) and reduce in ("prod", "multiply"):
        return _Written(elements, elements * complex_ops("aten.mul", 1), True)
    return _added(target, elements)


def _scatter(target: TensorInfo, dim: Any, index: TensorInfo, *rest: Any, **options: Any) -> _Written:
    reduce = options.get("reduce") or next((value for value in rest if isinstance(value, str)), None)
    return _reduced(target, index.elements, reduce)


def _scatter_add(target: TensorInfo, dim: Any, index: TensorInfo, *_: Any, **__: Any) -> _Written:
    return _added(target, index.elements)


def _index_add(
    target: TensorInfo, dim: Any, index: TensorInfo, source: TensorInfo, alpha: Any = 1, **_: Any
) -> _Written:
    """A factor `alpha` is one multiplication more."""
    return _added(target, source.elements, 1 if alpha == 1 else 2)


def _index_reduce(
    target: TensorInfo, dim: Any, index: TensorInfo, source: TensorInfo, reduce: str, **_: Any
) -> _Written:
    return _reduced(target, source.elements, reduce)


def _index_fill(target: TensorInfo, dim: int, index: TensorInfo, value: Any) -> _Written:
    lines = target.elements // max(target.shape[dim], 1) if target.shape else 1
    return _Written(lines * index.elements, 0, False)


def _index_copy(target: TensorInfo, dim: Any, index: TensorInfo, source: TensorInfo) -> _Written:
    return _Written(source.elements, 0, False)


def _masked_scatter(target: TensorInfo, mask: TensorInfo, source: TensorInfo) -> _Written:
    """As many as the mask may let through."""
    return _Written(min(target.elements, source.elements), 0, False)


def _put(target: TensorInfo, index: TensorInfo, source: TensorInfo, accumulate: bool = False) -> _Written:
    return _added(target, index.elements) if accumulate else _Written(index.elements, 0, False)


def _index_put(
    target: TensorInfo, indices: tuple[Any, ...], values: TensorInfo, accumulate: bool = False, *_: Any
) -> _Written:
    elements = _places(target, indices, values)
    return _added(target, elements) if accumulate else _Written(elements, 0, False)


def _masked_put_accumulate(target: TensorInfo, mask: Any, indices: tuple[Any, ...], values: TensorInfo) -> _Written:
    return _added(target, _places(target, indices, values))


def _places(target: TensorInfo, indices: tuple[Any, ...], values: TensorInfo) -> int:
    """How many elements an index names: one for each of its own, times the dimensions it leaves whole.

    A mask names as many as there are values for it; as many as it has elements, where one value goes everywhere.
    """
    taken: list[Shape] = []
    kept: list[int] = []
    axis = 0
    has_mask = False
    for index in indices:
        if not isinstance(index, TensorInfo):
            kept.append(target.shape[axis])
            axis += 1
        elif index.dtype in _MASKS:
            has_mask = True
            taken.append((index.elements,))
            axis += max(len(index.shape), 1)
        else:
            taken.append(index.shape)
            axis += 1
    kept += target.shape[axis:]
    if has_mask and len(values.shape) == 1 + len(kept):
        return values.elements
    return prod(_broadcast(taken)) * prod(kept)


def _broadcast(shapes: list[Shape]) -> Shape:
    longest = max((len(shape) for shape in shapes), default=0)
    padded = [(1,) * (longest - len(shape)) + shape for shape in shapes]
    return tuple(max(sizes) if 0 not in sizes else 0 for sizes in zip(*padded, strict=True))


def _values(target: TensorInfo, source: TensorInfo, *_: Any, **__: Any) -> _Written:
    return _Written(source.elements, 0, False)


for _operator, _count in {
    "scatter": _scatter, "scatter_add": _scatter_add, "scatter_reduce": _scatter, "index_add": _index_add,
    "index_reduce": _index_reduce, "index_fill": _index_fill, "index_copy": _index_copy,
    "masked_scatter": _masked_scatter, "put": _put, "index_put": _index_put, "_unsafe_index_put": _index_put,
    "_index_put_impl": _index_put, "_unsafe_masked_index_put_accumulate": _masked_put_accumulate,
    "slice_scatter": _values, "select_scatter": _values, "diagonal_scatter": _values, "as_strided_scatter": _values,
}.items():  # fmt: skip

    def _rule(count: Any, is_in_place: bool) -> Any:
        def rule(out: TensorInfo, target: TensorInfo, *args: Any, **kwargs: Any) -> Work:
            written: _Written = count(target, *args, **kwargs)
            return written.work(target, (*args, *kwargs.values()), is_in_place)

        return rule

    cost_rule(f"aten::{_operator}", kind="movement")(_rule(_count, is_in_place=False))
    cost_rule(f"aten::{_operator}_", kind="movement")(_rule(_count, is_in_place=True))


free_operators(
    aten.empty, aten.empty_like, aten.empty_strided, aten.empty_permuted, aten.new_empty, aten.new_empty_strided,
    aten.lift_fresh, aten.lift, aten.detach, aten.alias, aten.item, aten._local_scalar_dense, aten.is_nonzero,
    aten.sym_size, aten.sym_numel, aten._assert_async, aten._assert_scalar, aten._assert_tensor_metadata,
    aten._functional_assert_async, aten._functional_assert_scalar, aten.result_type, aten.promote_types,
    aten.can_cast, aten.resize_, aten.set_, aten.resize_as_, aten._linalg_check_errors, aten._resize_output_,
    "profiler::_record_function_enter_new", "profiler::_record_function_exit",
)  # fmt: skip
