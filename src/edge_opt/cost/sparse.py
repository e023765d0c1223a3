"""Sparse products: work follows the elements that are stored, not the shape."""

from __future__ import annotations

from typing import Any

from edge_opt.cost.dense import any_product, products
from edge_opt.cost.rules import Work, aten, cost_rule, free_operators
from edge_opt.cost.sorting import sort_ops
from edge_opt.records import TensorInfo


@cost_rule(aten._sparse_mm, aten.smm, aten.hspmm, kind="matmul")
def product(out: TensorInfo, x: TensorInfo, y: TensorInfo, *_: Any, **__: Any) -> Work | None:
    """One MAC for each stored element and column of the other matrix."""
    return any_product(out, x, y)


@cost_rule(aten._sparse_addmm, aten.sspaddmm, kind="matmul")
def product_plus(out: TensorInfo, bias: TensorInfo, x: TensorInfo, y: TensorInfo, *_: Any, **__: Any) -> Work | None:
    """A sparse product added to a third operand."""
    return any_product(out, x, y, additions=out.stored)


@cost_rule(aten._sparse_mm_reduce_impl, kind="matmul")
def reduced_product(out: Any, x: TensorInfo, y: TensorInfo, *_: Any, **__: Any) -> Work:
    """Products as in a plain one; sums, means, minima and maxima alike take one step for each."""
    return products(x, x.stored * y.shape[-1])


@cost_rule(aten.sparse_sampled_addmm, kind="matmul")
def sampled_product(out: TensorInfo, x: TensorInfo, left: TensorInfo, right: TensorInfo, **_: Any) -> Work:
    """Only the elements that the sparse operand stores are worked out, each over the whole inner dimension."""
    return products(x, x.stored * left.shape[-1], x.stored)


@cost_rule(aten._coalesce, kind="sorting")
def coalesced(out: TensorInfo, x: TensorInfo) -> Work:
    """Indices sorted, and values with the same place added."""
    return Work(other_ops=sort_ops(x.stored, x.stored) + x.stored)


@cost_rule(aten._sparse_sum, kind="reduction")
def summed(out: TensorInfo, x: TensorInfo, *_: Any, **__: Any) -> Work:
    """One addition for each stored element."""
    return Work(other_ops=x.stored)


@cost_rule(aten._sparse_softmax, aten._sparse_log_softmax, kind="softmax")
def softmax(out: TensorInfo, x: TensorInfo, *_: Any, **__: Any) -> Work:
    """Maximum, subtract, exp, sum, divide for each stored element."""
    return Work(other_ops=5 * x.stored)


@cost_rule(
    aten._to_dense, aten.to_dense, aten._to_sparse, aten._to_sparse_csr, aten._to_sparse_csc, aten._to_sparse_bsr,
    aten._to_sparse_bsc, aten.sparse_mask, aten._sparse_mask_projection, aten._convert_indices_from_coo_to_csr,
    aten._convert_indices_from_csr_to_coo, aten.copy_sparse_to_sparse_, kind="movement",
)  # fmt: skip
def converted(out: Any, *_: Any, **__: Any) -> Work:
    """Every input read once, every output written once."""
    return Work()


free_operators(
    aten._sparse_coo_tensor_unsafe, aten._sparse_coo_tensor_with_dims, aten._sparse_coo_tensor_with_dims_and_tensors,
    aten._sparse_compressed_tensor_with_dims, aten._sparse_csr_tensor_unsafe, aten._sparse_compressed_tensor_unsafe,
    aten.sparse_dim, aten.dense_dim, aten._nnz, aten.is_coalesced, aten._coalesced_, aten._values, aten._indices,
    aten.values, aten.indices, aten.crow_indices, aten.col_indices, aten.ccol_indices, aten.row_indices,
    aten._validate_sparse_coo_tensor_args, aten._validate_sparse_compressed_tensor_args,
    aten._validate_sparse_csr_tensor_args,
)  # fmt: skip
