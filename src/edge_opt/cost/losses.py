"""Losses and distances that compare more than element with element."""

from __future__ import annotations

from math import inf
from typing import Any

from edge_opt.cost.dense import products
from edge_opt.cost.pointwise import SOFTMAX_OPS
from edge_opt.cost.rules import Work, aten, cost_rule
from edge_opt.records import TensorInfo


def _pair_ops(p: float) -> int:
    """For each coordinate of a pair: subtract, square (or absolute, or compare), add; a power p is one more."""
    return 3 if p in (0, 1, 2, inf) else 4


@cost_rule(aten._cdist_forward, aten.cdist, kind="reduction")
def distances(out: TensorInfo, x: TensorInfo, y: TensorInfo, p: float = 2.0, *_: Any, **__: Any) -> Work:
    """Each pair and coordinate, then one root for each pair where p needs one."""
    roots = 0 if p in (0, 1, inf) else out.elements
    return Work(other_ops=_pair_ops(p) * out.elements * x.shape[-1] + roots)


@cost_rule(aten._pdist_forward, kind="reduction")
def distances_within(out: TensorInfo, x: TensorInfo, p: float = 2.0) -> Work:
    """Each pair of rows once."""
    roots = 0 if p in (0, 1, inf) else out.elements
    return Work(other_ops=_pair_ops(p) * out.elements * x.shape[-1] + roots)


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


@cost_rule(aten._softmax_backward_data, aten._log_softmax_backward_data, kind="softmax")
def softmax_backward(out: TensorInfo, *_: Any, **__: Any) -> Work:
    """Multiply, sum, multiply, subtract."""
    return Work(other_ops=4 * out.elements)


@cost_rule(
    aten.max_pool2d_with_indices_backward, aten.max_pool3d_with_indices_backward, kind="pooling",
)  # fmt: skip
def max_pool_backward(out: TensorInfo, gradient: TensorInfo, *_: Any, **__: Any) -> Work:
    """Each gradient is added to the input it came from."""
    return Work(other_ops=gradient.elements)


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
