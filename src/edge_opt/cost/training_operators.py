"""Operators of a training step: losses and distances, and the gradients that autograd calls."""

from __future__ import annotations

from math import inf, prod
from typing import Any

from edge_opt.cost.pointwise import SOFTMAX_OPS, norm_ops
from edge_opt.cost.products import products
from edge_opt.cost.rules import Work, aten, by_operand, cost_rule, per_output
from edge_opt.records.costs import TensorInfo


@cost_rule(aten._cdist_forward, aten.cdist, kind="reduction")
def distances(out: TensorInfo, x: TensorInfo, y: TensorInfo, p: float = 2.0, *_: Any, **__: Any) -> Work:
    """Each pair and coordinate, then one root for each pair where p needs one."""
    # For each coordinate: subtract, square (or absolute, or compare), add; another power is one more.
    ops = 3 if p in (0, 1, 2, inf) else 4
    roots = 0 if p in (0, 1, inf) else out.elements
    return Work(other_ops=ops * out.elements * x.shape[-1] + roots)


# Each pair of rows once.
cost_rule(aten._pdist_forward, kind="reduction")(lambda out, x, p=2.0: distances(out, x, x, p))


@cost_rule(aten._euclidean_dist, kind="matmul")
def distances_by_product(out: TensorInfo, x: TensorInfo, y: TensorInfo) -> Work:
    """|x|² + |y|² - 2xy as one product with two columns more; squares and scaling before, clamp and root after."""
    width = x.shape[-1]
    return products(x, out.elements * (width + 2), 3 * x.elements + 2 * y.elements + 2 * out.elements)


# log(exp a + exp b + exp c): two comparisons for the largest, three differences and exponentials, two sums, the
# logarithm, the largest added again; then the symbol's own log-probability.
_CTC_OPS = 2 + 3 + 3 + 2 + 1 + 1 + 1


@cost_rule(aten._ctc_loss, aten.ctc_loss, kind="reduction")
def ctc_loss(
    out: Any, log_probs: TensorInfo, targets: TensorInfo, input_lengths: Any, target_lengths: Any, *_: Any, **__: Any
) -> Work:
    """The forward recursion over 2L + 1 states at each step (Graves 2006).

    Lengths that are tensors are taken as the longest there can be: every step, and targets as long as they are wide.
    """
    time, batch = log_probs.shape[0], log_probs.shape[1] if len(log_probs.shape) == 3 else 1
    longest = targets.shape[-1] if len(targets.shape) == 2 else -(-targets.elements // max(batch, 1))
    steps = input_lengths if isinstance(input_lengths, tuple) else (time,) * batch
    labels = target_lengths if isinstance(target_lengths, tuple) else (longest,) * batch
    states = sum(step * (2 * label + 1) for step, label in zip(steps, labels, strict=True))
    return Work(other_ops=_CTC_OPS * states)


@cost_rule(aten.multi_margin_loss, kind="reduction")
def multi_margin_loss(
    out: Any, x: TensorInfo, target: Any, p: Any = 1, margin: Any = 1, weight: Any = None, *_: Any
) -> Work:
    """Each class: subtract the target's score, add the margin, clamp, sum; a square or a weight is one more."""
    return Work(other_ops=x.elements * (4 + (p == 2) + isinstance(weight, TensorInfo)))


@cost_rule(aten.multilabel_margin_loss_forward, kind="reduction")
def multilabel_margin_loss(out: Any, x: TensorInfo, *_: Any) -> Work:
    """Every target against every other class, four operations each: at most C²/4 pairs for C classes."""
    return Work(other_ops=x.elements * x.shape[-1] if x.shape else 0)


@cost_rule(
    "torch_nn::_linear_cross_entropy_batch_chunked", "torch_nn::_linear_cross_entropy_batch_chunked_no_reduction",
    kind="matmul",
)  # fmt: skip
def linear_cross_entropy(
    out: Any, x: TensorInfo, weight: TensorInfo, target: Any, bias: Any = None, *_: Any, **__: Any
) -> Work:
    """The head's product, its bias, a log-softmax over the classes, and the target picked and summed for each row."""
    rows = x.elements // x.shape[-1]
    scores = rows * weight.shape[0]
    per_score = SOFTMAX_OPS + isinstance(bias, TensorInfo)
    return products(x, scores * x.shape[-1], scores * per_score + 2 * rows)


def convolution_macs(grad: TensorInfo, x: TensorInfo, weight: TensorInfo, transposed: bool) -> int:
    """Return the MACs of a convolution, of its input's gradient and of its weights' gradient: three times the same.

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


for _operators, _kind, _ops in (
    # Two sums over the gradient, then scale, subtract, subtract for every element; twice the norm's own work.
    (
        (aten.native_batch_norm_backward, aten.native_layer_norm_backward, aten.native_group_norm_backward,
         "aten::_fused_rms_norm_backward"), "norm", lambda grad: 2 * norm_ops(affine=2) * grad.elements,
    ),
    # Multiply, sum, multiply, subtract.
    ((aten._softmax_backward_data, aten._log_softmax_backward_data), "softmax", lambda grad: 4 * grad.elements),
    # Each gradient is added to the input it came from.
    (
        (aten.max_pool2d_with_indices_backward, aten.max_pool3d_with_indices_backward), "pooling",
        lambda grad: grad.elements,
    ),
    # A gradient put where it belongs in a tensor of zeros: one addition for each of its elements.
    (
        (aten.slice_backward, aten.select_backward, aten.diagonal_backward, aten.embedding_dense_backward,
         aten.value_selecting_reduction_backward, aten._embedding_bag_backward, aten._embedding_bag_dense_backward),
        "movement", lambda grad: grad.elements,
    ),
):  # fmt: skip
    cost_rule(*_operators, kind=_kind)(by_operand(_ops))

for _name in ("avg_pool2d", "avg_pool3d", "_adaptive_avg_pool2d", "_adaptive_avg_pool3d"):
    cost_rule(f"aten::{_name}_backward", kind="pooling")(per_output(_name, 2))
for _name in ("hardswish", "hardsigmoid", "hardtanh", "leaky_relu", "elu", "glu", "nll_loss", "nll_loss2d", "mse_loss",
              "smooth_l1_loss", "huber_loss", "upsample_nearest2d", "upsample_bilinear2d", "upsample_nearest1d",
              "mish", "binary_cross_entropy", "softplus", "softshrink", "hardshrink", "log_sigmoid", "logit",
              "rrelu_with_noise", "_prelu_kernel", "_weight_norm_interface", "soft_margin_loss", "upsample_nearest3d",
              "upsample_linear1d", "upsample_trilinear3d", "upsample_bicubic2d"):  # fmt: skip
    cost_rule(f"aten::{_name}_backward", kind="elementwise")(per_output(_name, 2))
