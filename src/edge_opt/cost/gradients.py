"""Gradients: operators that autograd calls in the backward pass."""

from __future__ import annotations

from math import prod
from typing import Any

from edge_opt.cost.pointwise import SOFTMAX_OPS, norm_ops
from edge_opt.cost.rules import Work, aten, cost_rule, per_output
from edge_opt.records import TensorInfo


def convolution_macs(grad: TensorInfo, x: TensorInfo, weight: TensorInfo, transposed: bool) -> int:
    """MACs of a convolution, of its input's gradient and of its weights' gradient: three times the same.

    Each output of the convolution meets each of its taps once. For the input, every gradient of an output goes back
    through its taps; for the weights, every tap collects what it met.
    """
    return (x if transposed else grad).elements * prod(weight.shape[1:])


@cost_rule(aten.convolution_backward, kind="conv")
def convolution_backward(
    out: Any, grad: TensorInfo, x: TensorInfo, weight: TensorInfo, bias: Any, stride: Any, padding: Any, dilation: Any,
    transposed: bool, output_padding: Any, groups: int, mask: tuple[bool, ...],
) -> Work:  # fmt: skip
    """The gradients that are asked for: of the input, of the weights, of the bias (a sum)."""
    macs = convolution_macs(grad, x, weight, transposed)
    return Work(macs=macs * (mask[0] + mask[1]), other_ops=grad.elements if mask[2] else 0)


@cost_rule(
    aten._scaled_dot_product_flash_attention_for_cpu_backward,
    aten._scaled_dot_product_flash_attention_backward,
    aten._scaled_dot_product_efficient_attention_backward,
    kind="attention",
)
def attention_backward(out: Any, grad: TensorInfo, query: TensorInfo, key: TensorInfo, value: TensorInfo, *_: Any,
                       **__: Any) -> Work:  # fmt: skip
    """Four products: gradients of the weights and of value, of query and of key. The scores that a fused kernel
    computes a second time are not counted, as for attention that is taken apart."""
    scores = prod(query.shape[:-1]) * key.shape[-2]
    return Work(macs=2 * scores * (query.shape[-1] + value.shape[-1]), other_ops=scores * (2 + SOFTMAX_OPS))


# Per hidden unit and step of an LSTM: derivatives of three sigmoids (2) and two tanhs (2), products and sums.
_LSTM_BACKWARD_OPS = 3 * 2 + 2 * 2 + 10


@cost_rule(aten.mkldnn_rnn_layer, kind="recurrent")
def recurrent_layer(out: Any, x: TensorInfo, *args: Any) -> Work:
    """One layer and direction of an LSTM: a MAC per step and weight; see `lstm` for its element-wise work."""
    rows, width = prod(x.shape[:-1]), args[1].shape[-1]
    return Work(macs=rows * (args[0].elements + args[1].elements), other_ops=rows * width * (4 * 3 + 18))


@cost_rule(aten.mkldnn_rnn_layer_backward, kind="recurrent")
def recurrent_layer_backward(out: Any, x: TensorInfo, *args: Any) -> Work:
    """Gradients of the inputs and of the weights, each as many MACs as the forward."""
    rows, width = prod(x.shape[:-1]), args[1].shape[-1]
    return Work(
        macs=2 * rows * (args[0].elements + args[1].elements), other_ops=rows * width * (4 * 2 + _LSTM_BACKWARD_OPS)
    )


@cost_rule(
    aten.native_batch_norm_backward, aten.native_layer_norm_backward, aten.native_group_norm_backward,
    "aten::_fused_rms_norm_backward", kind="norm",
)  # fmt: skip
def norm_backward(out: Any, grad: TensorInfo, *_: Any, **__: Any) -> Work:
    """Two sums over the gradient, then scale, subtract, subtract for every element; twice the norm's own work."""
    return Work(other_ops=2 * norm_ops(affine=2) * grad.elements)


@cost_rule(
    aten.slice_backward, aten.select_backward, aten.diagonal_backward, aten.embedding_dense_backward,
    aten.value_selecting_reduction_backward, aten._embedding_bag_backward, aten._embedding_bag_dense_backward,
    kind="movement",
)  # fmt: skip
def scattered(out: Any, grad: TensorInfo, *_: Any, **__: Any) -> Work:
    """A gradient put where it belongs in a tensor of zeros: one addition for each of its elements."""
    return Work(other_ops=grad.elements)


for _name in ("avg_pool2d", "avg_pool3d", "_adaptive_avg_pool2d", "_adaptive_avg_pool3d"):
    cost_rule(f"aten::{_name}_backward", kind="pool")(per_output(_name, 2))
for _name in ("hardswish", "hardsigmoid", "hardtanh", "leaky_relu", "elu", "glu", "nll_loss", "nll_loss2d", "mse_loss",
              "smooth_l1_loss", "huber_loss", "upsample_nearest2d", "upsample_bilinear2d", "upsample_nearest1d",
              "mish", "binary_cross_entropy", "softplus", "softshrink", "hardshrink", "log_sigmoid", "logit",
              "rrelu_with_noise", "_prelu_kernel", "_weight_norm_interface", "soft_margin_loss", "upsample_nearest3d",
              "upsample_linear1d", "upsample_trilinear3d", "upsample_bicubic2d"):  # fmt: skip
    cost_rule(f"aten::{_name}_backward", kind="elementwise")(per_output(_name, 2))
