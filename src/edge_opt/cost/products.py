"""Products: convolutions, linear layers, attention, recurrent layers, with dense, sparse and quantized operands."""

from __future__ import annotations

from math import prod
from typing import Any

from edge_opt.cost.movement import sort_ops
from edge_opt.cost.pointwise import SOFTMAX_OPS, norm_ops
from edge_opt.cost.rules import (
    COMPLEX_ADD,
    COMPLEX_MACS,
    Rule,
    Work,
    aten,
    by_operand,
    copied,
    cost_rule,
    free_operators,
    is_complex,
    operator_name,
    per_output,
)
from edge_opt.records.costs import SparseInfo, TensorInfo


def products(x: TensorInfo, macs: int, additions: int = 0) -> Work:
    """Return the work of multiply-accumulates and additions in x's type, in real operations."""
    if is_complex(x):
        return Work(macs=COMPLEX_MACS * macs, other_ops=COMPLEX_ADD * additions)
    return Work(macs=macs, other_ops=additions)


def any_product(out: TensorInfo, x: TensorInfo, y: TensorInfo, additions: int = 0) -> Work | None:
    """x @ y. A sparse operand multiplies what it stores with each row or column of the other.

    Of two sparse ones it depends on which places meet, so that is not known.
    """
    if isinstance(x, SparseInfo) and isinstance(y, SparseInfo):
        return None
    if isinstance(x, SparseInfo):
        columns = y.shape[-1] if len(y.shape) > 1 else 1
        return products(x, x.stored * columns, additions)
    if isinstance(y, SparseInfo):
        return products(x, y.stored * x.shape[-2], additions)
    return products(x, out.elements * x.shape[-1], additions)


@cost_rule(aten.linear, aten.mkldnn_linear, kind="matmul")
def linear(out: TensorInfo, x: TensorInfo, weight: TensorInfo, bias: TensorInfo | None = None) -> Work:
    """x @ weight.T: one MAC per (row, in, out); per row and stored weight where the weights are sparse."""
    if isinstance(weight, SparseInfo):
        return products(x, prod(x.shape[:-1]) * weight.stored, out.elements if bias else 0)
    return products(x, out.elements * weight.shape[-1], out.elements if bias else 0)


@cost_rule(
    aten.conv1d, aten.conv2d, aten.conv3d, aten._convolution_mode, aten.thnn_conv2d, aten._slow_conv2d_forward,
    aten.mkldnn_convolution, aten._conv_depthwise2d, aten.conv_depthwise3d, aten.slow_conv3d_forward,
    aten.slow_conv_dilated2d, aten.slow_conv_dilated3d, kind="conv",
)  # fmt: skip
def convolution(out: TensorInfo, x: TensorInfo, weight: TensorInfo, bias: Any = None, *_: Any) -> Work:
    """One MAC per output and tap, taps on the padding included; weight is (out, in / groups, *kernel)."""
    has_bias = isinstance(bias, TensorInfo)
    return products(x, out.elements * prod(weight.shape[1:]), out.elements if has_bias else 0)


@cost_rule(aten.conv_transpose1d, aten.conv_transpose2d, aten.conv_transpose3d, kind="conv")
def transposed_convolution(out: TensorInfo, x: TensorInfo, weight: TensorInfo, bias: Any = None, *_: Any) -> Work:
    """One MAC per input and tap, cropped outputs included; weight is (in, out / groups, *kernel)."""
    return products(x, x.elements * prod(weight.shape[1:]), out.elements if bias else 0)


@cost_rule(aten.convolution, aten._convolution, aten.convolution_overrideable, kind="conv")
def any_convolution(
    out: TensorInfo, x: TensorInfo, weight: TensorInfo, bias: TensorInfo | None, stride: Any, padding: Any,
    dilation: Any, transposed: bool, *_: Any,
) -> Work | None:  # fmt: skip
    """A convolution in torch's general form."""
    return transposed_convolution(out, x, weight, bias) if transposed else convolution(out, x, weight, bias)


@cost_rule(
    aten.mm, aten.bmm, aten.mv, aten.dot, aten.vdot, aten._int_mm, aten._sparse_mm, aten.smm, aten.hspmm, kind="matmul",
)  # fmt: skip
def product(out: TensorInfo, x: TensorInfo, y: TensorInfo, *_: Any, **__: Any) -> Work | None:
    """One MAC per output and inner element; with a sparse operand, per stored element and column of the other."""
    return any_product(out, x, y)


@cost_rule(
    aten.addmm, aten.baddbmm, aten.addmv, aten._addmm_activation, aten._sparse_addmm, aten.sspaddmm, kind="matmul",
)  # fmt: skip
def product_plus(out: TensorInfo, bias: Any, x: TensorInfo, y: TensorInfo, *_: Any, **__: Any) -> Work | None:
    """A product added to a third operand: the add is other work."""
    return any_product(out, x, y, additions=out.stored)


# Products of a batch, summed over it.
cost_rule(aten.addbmm, kind="matmul")(
    lambda out, bias, x, y, **_: products(x, out.elements * x.shape[0] * x.shape[2], out.elements)
)
# An outer product added to a matrix.
cost_rule(aten.addr, kind="matmul")(lambda out, *_, **__: products(out, out.elements))


@cost_rule("aten::_grouped_mm", kind="matmul")  # by name: older versions of torch do not have it
def grouped_product(out: TensorInfo, x: TensorInfo, y: TensorInfo, *_: Any, **__: Any) -> Work:
    """Rows of x meet the matrix of their group only, whichever group that is; inner groups are split, not repeated."""
    is_split_inside = len(x.shape) == 2 and len(y.shape) == 2
    return Work(macs=(x.shape[-2] * y.shape[-1] if is_split_inside else out.elements) * x.shape[-1])


@cost_rule(
    aten._scaled_mm, "aten::_scaled_mm_v2", aten._weight_int8pack_mm, aten._weight_int4pack_mm,
    aten._weight_int4pack_mm_for_cpu, kind="matmul",
)  # fmt: skip
def scaled_product(out: Any, x: TensorInfo, *_: Any, **__: Any) -> Work:
    """A product of quantized operands with scales."""
    elements = out[0].elements if isinstance(out, tuple) else out.elements
    return Work(macs=elements * x.shape[-1], other_ops=elements)


@cost_rule(aten.bilinear, kind="matmul")
def bilinear(out: TensorInfo, x: TensorInfo, y: TensorInfo, weight: TensorInfo, bias: TensorInfo | None = None) -> Work:
    """x W_k y for each output k: |x|·|y| MACs for x W_k, then |y| for the product with y."""
    _, left, right = weight.shape
    return products(x, out.elements * (left * right + right), out.elements if bias else 0)


@cost_rule(
    aten.scaled_dot_product_attention,
    aten._scaled_dot_product_attention_math,
    aten._scaled_dot_product_flash_attention_for_cpu,
    aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_efficient_attention,
    aten._scaled_dot_product_cudnn_attention,
    aten._scaled_dot_product_fused_attention_overrideable,
    kind="attention",
)
def attention(out: Any, query: TensorInfo, key: TensorInfo, value: TensorInfo, *rest: Any, **options: Any) -> Work:
    """query @ key.T then weights @ value, for every query head; fewer key heads do not make it cheaper."""
    mask = options.get("attn_mask") or (rest[0] if rest else None)
    first = out[0] if isinstance(out, tuple) else out
    scores = prod(query.shape[:-1]) * key.shape[-2]
    return Work(
        macs=scores * (query.shape[-1] + value.shape[-1]),
        other_ops=scores * (1 + SOFTMAX_OPS + (1 if isinstance(mask, TensorInfo) else 0)),
        bytes_written=first.nbytes,
    )


@cost_rule(aten._native_multi_head_attention, kind="attention")
def multi_head_attention(
    out: Any, query: TensorInfo, key: TensorInfo, value: TensorInfo, width: int, heads: int, *weights: Any, **_: Any
) -> Work:
    """Projections in, attention, projection out."""
    rows, length = prod(query.shape[:-1]), key.shape[-2]
    return Work(macs=_projected_attention(rows, length, width), other_ops=_attention_ops(rows, length, width, heads))


@cost_rule(aten._transformer_encoder_layer_fwd, kind="attention")
def encoder_layer(out: TensorInfo, x: TensorInfo, width: int, heads: int, *rest: Any, **_: Any) -> Work:
    """The fused encoder layer: attention, two norms, two linears with an activation, two residual adds."""
    rows, length = prod(x.shape[:-1]), x.shape[-2]
    hidden = next(t.shape[0] for t in rest[10:] if isinstance(t, TensorInfo) and len(t.shape) == 2)
    return Work(
        macs=_projected_attention(rows, length, width) + 2 * rows * width * hidden,
        other_ops=_attention_ops(rows, length, width, heads)
        + 2 * rows * width * (norm_ops(affine=2) + 1)
        + rows * (2 * hidden + width),
    )


def _projected_attention(rows: int, length: int, width: int) -> int:
    return 4 * rows * width * width + 2 * rows * length * width


def _attention_ops(rows: int, length: int, width: int, heads: int) -> int:
    return 4 * rows * width + rows * heads * length * (1 + SOFTMAX_OPS)


# Element-wise work per hidden unit and step, beside the gates' own sums: activations (sigmoid 4, tanh 1) and updates.
LSTM_OPS = 3 * 4 + 1 + 1 + 3 + 1  # three sigmoids, two tanhs, c = f·c + i·g, h = o·tanh(c)
_GRU_OPS = 2 * 4 + 1 + 1 + 4  # two sigmoids, tanh, r·n, h = (1 − z)·n + z·h
RNN_OPS = 1


def _recurrent(gates: int, ops_per_unit: int, is_cell: bool) -> Rule:
    def rule(out: Any, x: TensorInfo, *args: Any) -> Work:
        """All layers and directions, with projections; each matrix a MAC per element and step, each sum one."""
        if is_cell:
            weights = [value for value in args[1:] if isinstance(value, TensorInfo)]  # after the state
        else:
            # The last list of tensors: lists of lengths and of states come before it.
            lists = [value for value in args if isinstance(value, tuple) and value and isinstance(value[0], TensorInfo)]
            weights = list(lists[-1])
        steps = prod(x.shape[:-1])  # times the batch; packed data are already flat
        matrices = [weight for weight in weights if len(weight.shape) == 2]
        biases = [weight for weight in weights if len(weight.shape) == 1]
        # Matrices come as input and hidden weights, then an LSTM's projection if there is one, whose columns and not
        # its rows are the hidden units.
        rows = matrices[0].shape[0]
        gate_matrices = [m for m in matrices if m.shape[0] == rows or m.shape[1] * gates != rows]
        cells, units = len(gate_matrices) // 2, rows // gates
        sums = sum(matrix.shape[0] for matrix in gate_matrices) // 2 + sum(bias.elements for bias in biases)
        return Work(
            macs=steps * sum(matrix.elements for matrix in matrices),
            other_ops=steps * (sums + cells * units * ops_per_unit),
        )

    return rule


for _name, _gates, _ops in (("lstm", 4, LSTM_OPS), ("gru", 3, _GRU_OPS), ("rnn_tanh", 1, RNN_OPS),
                            ("rnn_relu", 1, RNN_OPS)):  # fmt: skip
    cost_rule(f"aten::{_name}", kind="recurrent")(_recurrent(_gates, _ops, is_cell=False))
    cost_rule(f"aten::{_name}_cell", kind="recurrent")(_recurrent(_gates, _ops, is_cell=True))


# Of sparse operands, work follows the elements that are stored, not the shape.


# Products as in a plain one; sums, means, minima and maxima alike take one step for each.
cost_rule(aten._sparse_mm_reduce_impl, kind="matmul")(lambda out, x, y, *_, **__: products(x, x.stored * y.shape[-1]))
# Only the elements that the sparse operand stores are worked out, each over the whole inner dimension.
cost_rule(aten.sparse_sampled_addmm, kind="matmul")(
    lambda out, x, left, right, **_: products(x, x.stored * left.shape[-1], x.stored)
)
for _operators, _kind, _count in (
    # Indices sorted, and values with the same place added.
    ((aten._coalesce,), "sorting", lambda x: sort_ops(x.stored, x.stored) + x.stored),
    # One addition for each stored element.
    ((aten._sparse_sum,), "reduction", lambda x: x.stored),
    # For each stored element.
    ((aten._sparse_softmax, aten._sparse_log_softmax), "softmax", lambda x: SOFTMAX_OPS * x.stored),
):
    cost_rule(*_operators, kind=_kind)(by_operand(_count))

cost_rule(
    aten._to_dense, aten.to_dense, aten._to_sparse, aten._to_sparse_csr, aten._to_sparse_csc, aten._to_sparse_bsr,
    aten._to_sparse_bsc, aten.sparse_mask, aten._sparse_mask_projection, aten._convert_indices_from_coo_to_csr,
    aten._convert_indices_from_csr_to_coo, aten.copy_sparse_to_sparse_, kind="movement",
)(copied)  # fmt: skip


free_operators(
    aten._sparse_coo_tensor_unsafe, aten._sparse_coo_tensor_with_dims, aten._sparse_coo_tensor_with_dims_and_tensors,
    aten._sparse_compressed_tensor_with_dims, aten._sparse_csr_tensor_unsafe, aten._sparse_compressed_tensor_unsafe,
    aten.sparse_dim, aten.dense_dim, aten._nnz, aten.is_coalesced, aten._coalesced_, aten._values, aten._indices,
    aten.values, aten.indices, aten.crow_indices, aten.col_indices, aten.ccol_indices, aten.row_indices,
    aten._validate_sparse_coo_tensor_args, aten._validate_sparse_compressed_tensor_args,
    aten._validate_sparse_csr_tensor_args,
)  # fmt: skip


QUANTIZE_OPS = 5  # multiply by 1 / scale, round, add the zero point, clamp on both sides
DEQUANTIZE_OPS = 2  # subtract the zero point, multiply by the scale
_OBSERVE_OPS = 2  # the smallest and the largest

for _operator, _ops in (
    (aten.quantize_per_tensor, QUANTIZE_OPS), (aten.quantize_per_channel, QUANTIZE_OPS),
    (aten.quantize_per_tensor_dynamic, QUANTIZE_OPS + _OBSERVE_OPS), (aten.dequantize, DEQUANTIZE_OPS),
    (aten.fake_quantize_per_tensor_affine, QUANTIZE_OPS + DEQUANTIZE_OPS),
    (aten.fake_quantize_per_channel_affine, QUANTIZE_OPS + DEQUANTIZE_OPS),
    (aten.fake_quantize_per_tensor_affine_cachemask, QUANTIZE_OPS + DEQUANTIZE_OPS),
    (aten.fake_quantize_per_channel_affine_cachemask, QUANTIZE_OPS + DEQUANTIZE_OPS),
    (aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams, QUANTIZE_OPS + DEQUANTIZE_OPS),
    (aten._fake_quantize_learnable_per_tensor_affine, QUANTIZE_OPS + DEQUANTIZE_OPS),
    (aten._fake_quantize_learnable_per_channel_affine, QUANTIZE_OPS + DEQUANTIZE_OPS),
    (aten.fused_moving_avg_obs_fake_quant, QUANTIZE_OPS + DEQUANTIZE_OPS + _OBSERVE_OPS),
    (aten._fused_moving_avg_obs_fq_helper, QUANTIZE_OPS + DEQUANTIZE_OPS + _OBSERVE_OPS),
):  # fmt: skip
    cost_rule(_operator, kind="quantization")(per_output(operator_name(_operator), _ops))

cost_rule("quantized_decomposed::quantize_per_tensor", "quantized_decomposed::quantize_per_channel",
          kind="quantization")(per_output("quantize", QUANTIZE_OPS))  # fmt: skip
cost_rule("quantized_decomposed::dequantize_per_tensor", "quantized_decomposed::dequantize_per_channel",
          kind="quantization")(per_output("dequantize", DEQUANTIZE_OPS))  # fmt: skip


def _packed_linear(out: TensorInfo, x: TensorInfo, other_ops: int, x_bytes: int, weight_itemsize: int = 1) -> Work:
    """Packed weights are not a tensor to the trace: in x out of them, one or two bytes each."""
    inner, outer = x.shape[-1], out.shape[-1]
    return Work(out.elements * inner, other_ops, bytes_read=x_bytes + weight_itemsize * inner * outer)


@cost_rule("quantized::linear_dynamic", "quantized::linear_relu_dynamic", kind="matmul")
def dynamic_linear(out: TensorInfo, x: TensorInfo, *_: Any, **__: Any) -> Work:
    """The input is observed and quantized, multiplied in int8, and the result scaled with its bias."""
    return _packed_linear(out, x, x.elements * (_OBSERVE_OPS + QUANTIZE_OPS) + 2 * out.elements, x.nbytes)


@cost_rule("quantized::linear_dynamic_fp16", "quantized::linear_relu_dynamic_fp16", kind="matmul")
def half_linear(out: TensorInfo, x: TensorInfo, *_: Any, **__: Any) -> Work:
    """Weights are packed in two bytes each, and widened for the product."""
    return _packed_linear(out, x, out.elements, x.nbytes, weight_itemsize=2)


@cost_rule("quantized::linear", "quantized::linear_relu", kind="matmul")
def static_linear(out: TensorInfo, x: TensorInfo, *_: Any, **__: Any) -> Work:
    """An int8 product, its bias, and the result quantized again."""
    return _packed_linear(out, x, out.elements * (1 + QUANTIZE_OPS), x.elements)
