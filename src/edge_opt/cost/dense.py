"""Dense products: convolutions, linear layers and matrix products. A bias add is not a MAC; it is other work."""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from edge_opt.cost.registry import Work, cost_rule
from edge_opt.records import TensorInfo

aten = torch.ops.aten


@cost_rule(aten.linear, aten.mkldnn_linear, kind="matmul")
def linear(out: TensorInfo, x: TensorInfo, weight: TensorInfo, bias: TensorInfo | None = None) -> Work:
    """x @ weight.T: one MAC per (row, in, out)."""
    return Work(macs=out.elements * weight.shape[-1], other_ops=out.elements if bias else 0)


@cost_rule(
    aten.conv1d, aten.conv2d, aten.conv3d, aten._convolution_mode, aten.thnn_conv2d, aten._slow_conv2d_forward,
    aten.mkldnn_convolution, aten._conv_depthwise2d, aten.conv_depthwise3d, aten.slow_conv3d_forward,
    aten.slow_conv_dilated2d, aten.slow_conv_dilated3d, kind="conv",
)  # fmt: skip
def convolution(out: TensorInfo, x: TensorInfo, weight: TensorInfo, bias: Any = None, *_: Any) -> Work:
    """One MAC per output and tap, taps on the padding included; weight is (out, in / groups, *kernel)."""
    has_bias = isinstance(bias, TensorInfo)
    return Work(macs=out.elements * prod(weight.shape[1:]), other_ops=out.elements if has_bias else 0)


@cost_rule(aten.conv_transpose1d, aten.conv_transpose2d, aten.conv_transpose3d, kind="conv")
def transposed_convolution(out: TensorInfo, x: TensorInfo, weight: TensorInfo, bias: Any = None, *_: Any) -> Work:
    """One MAC per input and tap, cropped outputs included; weight is (in, out / groups, *kernel)."""
    return Work(macs=x.elements * prod(weight.shape[1:]), other_ops=out.elements if bias else 0)


@cost_rule(aten.convolution, aten._convolution, aten.convolution_overrideable, kind="conv")
def any_convolution(
    out: TensorInfo, x: TensorInfo, weight: TensorInfo, bias: TensorInfo | None, stride: Any, padding: Any,
    dilation: Any, transposed: bool, *_: Any,
) -> Work:  # fmt: skip
    """A convolution in torch's general form."""
    return transposed_convolution(out, x, weight, bias) if transposed else convolution(out, x, weight, bias)


@cost_rule(aten.mm, aten.bmm, aten.mv, aten.dot, aten.vdot, aten._int_mm, kind="matmul")
def product(out: TensorInfo, x: TensorInfo, *_: Any, **__: Any) -> Work:
    """One MAC per output and inner element."""
    return Work(macs=out.elements * x.shape[-1])


@cost_rule(aten.addmm, aten.baddbmm, aten.addmv, aten._addmm_activation, kind="matmul")
def product_plus(out: TensorInfo, bias: TensorInfo, x: TensorInfo, *_: Any, **__: Any) -> Work:
    """A product added to a third operand: the add is other work."""
    return Work(macs=out.elements * x.shape[-1], other_ops=out.elements)


@cost_rule(aten.addbmm, kind="matmul")
def summed_products(out: TensorInfo, bias: TensorInfo, x: TensorInfo, y: TensorInfo, **_: Any) -> Work:
    """Products of a batch, summed over it."""
    return Work(macs=out.elements * x.shape[0] * x.shape[2], other_ops=out.elements)


@cost_rule(aten.addr, kind="matmul")
def outer_plus(out: TensorInfo, *_: Any, **__: Any) -> Work:
    """An outer product added to a matrix."""
    return Work(macs=out.elements)


@cost_rule("aten::_grouped_mm", kind="matmul")  # by name: older versions of torch do not have it
def grouped_product(out: TensorInfo, x: TensorInfo, y: TensorInfo, *_: Any, **__: Any) -> Work:
    """Rows of x meet the matrix of their group only, whichever group that is; inner groups are split, not repeated."""
    is_split_inside = len(x.shape) == 2 and len(y.shape) == 2
    return Work(macs=(x.shape[-2] * y.shape[-1] if is_split_inside else out.elements) * x.shape[-1])


@cost_rule(
    aten._scaled_mm, aten._weight_int8pack_mm, aten._weight_int4pack_mm, aten._weight_int4pack_mm_for_cpu,
    kind="matmul",
)  # fmt: skip
def scaled_product(out: Any, x: TensorInfo, *_: Any, **__: Any) -> Work:
    """A product of quantised operands with scales."""
    elements = out[0].elements if isinstance(out, tuple) else out.elements
    return Work(macs=elements * x.shape[-1], other_ops=elements)


@cost_rule(aten.bilinear, kind="matmul")
def bilinear(out: TensorInfo, x: TensorInfo, y: TensorInfo, weight: TensorInfo, bias: TensorInfo | None = None) -> Work:
    """x W_k y for each output k: |x|·|y| MACs for x W_k, then |y| for the product with y."""
    _, left, right = weight.shape
    return Work(macs=out.elements * (left * right + right), other_ops=out.elements if bias else 0)
