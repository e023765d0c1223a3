"""Movement: operators that compute nothing, and read and write bytes."""

from __future__ import annotations

from typing import Any

import torch

from edge_opt.cost.registry import Work, cost_rule, free_operators
from edge_opt.records import TensorInfo

aten = torch.ops.aten


@cost_rule(
    aten.clone, aten.contiguous, aten.reshape, aten.flatten, aten.unflatten, aten._unsafe_view, aten.to,
    aten._to_copy, aten.type_as, aten.cat, aten.stack, aten.pad, aten.constant_pad_nd, aten.reflection_pad1d,
    aten.reflection_pad2d, aten.reflection_pad3d, aten.replication_pad1d, aten.replication_pad2d,
    aten.replication_pad3d, aten.roll, aten.flip, aten.repeat, aten.tile, aten.repeat_interleave, aten.tril, aten.triu,
    aten.pixel_shuffle, aten.pixel_unshuffle, aten.channel_shuffle, aten.native_channel_shuffle, aten.im2col,
    aten.unfold_copy, aten.upsample_nearest1d, aten.upsample_nearest2d, aten.upsample_nearest3d,
    aten._upsample_nearest_exact1d, aten._upsample_nearest_exact2d, aten._upsample_nearest_exact3d, aten.rot90,
    aten.view_copy, aten.permute_copy, aten.expand_copy, aten.split_with_sizes_copy, aten.diag_embed,
    aten.masked_select, aten.nonzero, aten._pack_padded_sequence, aten._pad_packed_sequence, aten.unique_consecutive,
    aten._unique2, aten.unique_dim, aten._unique, aten.unique_dim_consecutive, aten.argwhere, aten.nonzero_static,
    aten.block_diag, aten.detach_copy, aten.alias_copy, aten.slice_copy, aten.select_copy, aten.transpose_copy,
    aten.t_copy, aten.unsqueeze_copy, aten.squeeze_copy, aten.split_copy, aten.unbind_copy, aten.as_strided_copy,
    aten.narrow_copy, aten.lift_fresh_copy, aten.unsafe_split, aten.unsafe_split_with_sizes, aten.diagonal_copy,
    aten.view_as_complex_copy, aten.view_as_real_copy, aten._reshape_copy,
    kind="movement",
)  # fmt: skip
def copied(out: Any, *_: Any, **__: Any) -> Work:
    """Every input read once, every output written once."""
    return Work()


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
    aten.exponential, aten.random, aten.range,
    kind="movement",
)  # fmt: skip
def filled(out: TensorInfo, *_: Any, **__: Any) -> Work:
    """Written, and nothing read."""
    return Work(bytes_read=0)


def _indices(values: tuple[Any, ...]) -> int:
    return sum(
        item.nbytes
        for value in values
        for item in (value if isinstance(value, tuple) else (value,))
        if isinstance(item, TensorInfo)
    )


@cost_rule(
    aten.index, aten._unsafe_index, aten.index_select, aten.gather, aten.take, aten.take_along_dim, kind="movement"
)
def gathered(out: TensorInfo, source: TensorInfo, *indices: Any, **_: Any) -> Work:
    """Only the elements taken are read, and the indices."""
    return Work(bytes_read=out.nbytes + _indices(indices))


@cost_rule(
    aten.scatter, aten.scatter_add, aten.scatter_reduce, aten.index_put, aten._index_put_impl_, aten.index_add,
    aten.index_copy, aten.index_fill, aten.masked_scatter, aten.slice_scatter, aten.select_scatter, aten.put,
    aten._unsafe_index_put, aten.diagonal_scatter, aten.as_strided_scatter, aten.index_reduce,
    kind="movement",
)  # fmt: skip
def scattered(out: TensorInfo, target: TensorInfo, *rest: Any, **_: Any) -> Work:
    """Indices and values are read, and as many elements are written as there are values."""
    tensors = [item for item in rest if isinstance(item, TensorInfo)]
    values = tensors[-1].nbytes if tensors else out.nbytes
    return Work(bytes_read=_indices(rest), bytes_written=min(values, out.nbytes))


@cost_rule(aten.embedding, kind="embedding")
def embedding(out: TensorInfo, weight: TensorInfo, indices: TensorInfo, *_: Any, **__: Any) -> Work:
    """One row read and written per index; the rest of the table is not touched."""
    return Work(bytes_read=out.nbytes + indices.nbytes)


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


@cost_rule(aten.col2im, kind="movement")
def folded(out: TensorInfo, x: TensorInfo, *_: Any, **__: Any) -> Work:
    """Overlapping patches are added."""
    return Work(other_ops=x.elements)


free_operators(
    aten.empty, aten.empty_like, aten.empty_strided, aten.empty_permuted, aten.new_empty, aten.new_empty_strided,
    aten.lift_fresh, aten.lift, aten.detach, aten.alias, aten.item, aten._local_scalar_dense, aten.is_nonzero,
    aten.sym_size, aten.sym_numel, aten._assert_async, aten._assert_scalar, aten._assert_tensor_metadata,
    aten._functional_assert_async, aten._functional_assert_scalar, aten.result_type, aten.promote_types,
    aten.can_cast, aten.resize_, aten.set_,
    "profiler::_record_function_enter_new", "profiler::_record_function_exit",
)  # fmt: skip
