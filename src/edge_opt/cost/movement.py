"""Movement: operators that compute nothing, and read and write bytes."""

from __future__ import annotations

from typing import Any

from edge_opt.cost.rules import Work, aten, cost_rule, free_operators
from edge_opt.records import TensorInfo


@cost_rule(
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


free_operators(
    aten.empty, aten.empty_like, aten.empty_strided, aten.empty_permuted, aten.new_empty, aten.new_empty_strided,
    aten.lift_fresh, aten.lift, aten.detach, aten.alias, aten.item, aten._local_scalar_dense, aten.is_nonzero,
    aten.sym_size, aten.sym_numel, aten._assert_async, aten._assert_scalar, aten._assert_tensor_metadata,
    aten._functional_assert_async, aten._functional_assert_scalar, aten.result_type, aten.promote_types,
    aten.can_cast, aten.resize_, aten.set_, aten.resize_as_, aten._linalg_check_errors, aten._resize_output_,
    "profiler::_record_function_enter_new", "profiler::_record_function_exit",
)  # fmt: skip
