"""Element-wise work: activations, norms, softmax, pooling, reductions, Fourier transforms.

Counted by the textbook formula, one per arithmetic operation or comparison; exp, log, tanh, erf, sqrt and their like
are one each. docs/counting.md has the table.
"""

from __future__ import annotations

from math import ceil, log2, prod
from typing import Any

from edge_opt.cost.rules import Rule, Work, aten, cost_rule, operator_name, per_input, per_output
from edge_opt.records.costs import TensorInfo

SOFTMAX_OPS = 5  # running maximum, subtract, exp, sum, divide

_ACTIVATIONS = {
    aten.relu: 1, aten.threshold: 1, aten.tanh: 1, aten.relu6: 2, aten.hardtanh: 2, aten.leaky_relu: 2, aten.prelu: 2,
    aten._prelu_kernel: 2, aten.rrelu: 2, aten.rrelu_with_noise: 2, aten.celu: 4, aten.elu: 4, aten.selu: 5,
    aten.sigmoid: 4, aten.silu: 4, aten.mish: 4, aten.softplus: 3, aten.hardsigmoid: 4, aten.hardswish: 5,
    aten.hardshrink: 1, aten.softshrink: 2, aten.log_sigmoid: 4, aten.log_sigmoid_forward: 4, aten.gelu: 5,
    aten.glu: 5,
}  # fmt: skip

# `a &= b` and its like: operators of their own, without torch's mark for element-wise work.
_IN_PLACE_WORDS = ("and", "or", "xor", "iand", "ior", "ixor", "lshift", "rshift", "ilshift", "irshift")

_ELEMENTWISE = {
    aten.square: 1, aten.addcmul: 3, aten.addcdiv: 3, aten.lerp: 3, aten.clamp: 2, aten.clip: 2, aten.rsqrt: 2,
    aten.dropout: 2, aten.native_dropout: 2, aten.feature_dropout: 2, aten.alpha_dropout: 3,
    aten.feature_alpha_dropout: 3, aten.bernoulli: 1, aten.where: 1, aten.masked_fill: 1,
    aten.floor_divide: 1, aten.mse_loss: 3, aten.huber_loss: 4, aten.smooth_l1_loss: 4,
    aten.binary_cross_entropy: 5, aten.binary_cross_entropy_with_logits: 6, aten.soft_margin_loss: 4,
    aten.affine_grid_generator: 6, aten.multinomial: 1, aten.max_unpool2d: 0, aten.max_unpool3d: 0,
    aten._fused_dropout: 2, aten._weight_norm: 4, aten._weight_norm_interface: 4,
    aten.complex: 0, aten.polar: 4, aten.linalg_cross: 3,
    "aten::hash_tensor": 1,
    **{getattr(aten, f"__{name}__"): 1 for name in _IN_PLACE_WORDS},
}  # fmt: skip

_REDUCTIONS = {
    aten.sum: 1, aten.mean: 1, aten.prod: 1, aten.amax: 1, aten.amin: 1, aten.max: 1, aten.min: 1, aten.argmax: 1,
    aten.argmin: 1, aten.any: 1, aten.all: 1, aten.cumsum: 1, aten.cumprod: 1, aten.cummax: 1, aten.logsumexp: 4,
    aten.var: 4, aten.std: 4, aten.var_mean: 4, aten.std_mean: 4, aten.norm: 2, aten.linalg_vector_norm: 2,
    aten.cummin: 1, aten.logcumsumexp: 4, aten.equal: 1, aten.allclose: 3,
    aten._is_all_true: 1, aten._is_any_true: 1, aten.dist: 3, aten.renorm: 4, aten.nll_loss_forward: 1,
    aten.nll_loss2d_forward: 1, aten.segment_reduce: 1,
    aten.aminmax: 2, aten.nansum: 1, aten.count_nonzero: 1, aten.trace: 1,
    aten._log_softmax: SOFTMAX_OPS, aten._softmax: SOFTMAX_OPS, aten._safe_softmax: SOFTMAX_OPS,
}  # fmt: skip


for _table, _kind, _make in (
    (_ACTIVATIONS, "activation", per_output),
    (_ELEMENTWISE, "elementwise", per_output),
    (_REDUCTIONS, "reduction", per_input),
):
    for _operator, _ops in _table.items():
        cost_rule(_operator, kind=_kind)(_make(operator_name(_operator), _ops))


cost_rule(aten.softmax, aten.log_softmax, kind="softmax")(
    lambda out, *_, **__: Work(other_ops=SOFTMAX_OPS * out.elements)
)


def norm_ops(affine: int) -> int:
    """Return the operations per element of a norm: sum, subtract, square, sum, multiply; then scale and shift."""
    return 5 + affine


def _affine(*parts: Any) -> int:
    return sum(isinstance(part, TensorInfo) for part in parts)


@cost_rule(aten.layer_norm, aten.native_layer_norm, aten.group_norm, kind="norm")
def layer_norm(out: Any, x: TensorInfo, size: Any, weight: Any = None, bias: Any = None, *_: Any) -> Work:
    """Statistics and normalization of every element; `size` is a shape or a number of groups."""
    return Work(other_ops=norm_ops(_affine(weight, bias)) * x.elements, bytes_written=x.nbytes)


@cost_rule(aten.rms_norm, "aten::_fused_rms_norm", kind="norm")
def rms_norm(out: Any, x: TensorInfo, shape: Any, weight: Any = None, *_: Any) -> Work:
    """Square, sum, multiply; then scale."""
    return Work(other_ops=(3 + _affine(weight)) * x.elements, bytes_written=x.nbytes)


# The same, without its size among the first arguments.
cost_rule(aten.native_group_norm, kind="norm")(lambda out, x, *rest: layer_norm(out, x, None, *rest))


@cost_rule(
    aten.batch_norm, aten.instance_norm, aten.native_batch_norm, aten._native_batch_norm_legit,
    aten._native_batch_norm_legit_no_training, aten._batch_norm_with_update, kind="norm",
)  # fmt: skip
def batch_norm(
    out: Any, x: TensorInfo, weight: Any = None, bias: Any = None, mean: Any = None, var: Any = None,
    training: Any = False, *_: Any,
) -> Work:  # fmt: skip
    """With running statistics one scale and one shift, folded from four vectors; else statistics first."""
    uses_batch = training is True or not isinstance(mean, TensorInfo)
    ops = norm_ops(_affine(weight, bias)) if uses_batch else 2
    return Work(other_ops=ops * x.elements, bytes_written=x.nbytes)


def _window(kernel: Any, dims: int) -> int:
    """Return the taps of a pooling kernel; one number means that size in every dimension."""
    sizes = kernel if isinstance(kernel, tuple) else (kernel,)
    return int(prod(sizes)) if len(sizes) == dims else int(sizes[0]) ** dims


def _pooling(dims: int, is_average: bool) -> Rule:
    def rule(out: Any, x: TensorInfo, kernel: Any, *_: Any, **__: Any) -> Work:
        first = out[0] if isinstance(out, tuple) else out
        # An average adds all taps but the first, then divides; a maximum compares all but the first.
        return Work(other_ops=first.elements * (_window(kernel, dims) - (0 if is_average else 1)))

    return rule


def adaptive_taps(size: int, out: int) -> int:
    """Return the inputs read along one dimension by all windows of an adaptive pool, which may overlap."""
    return sum(-(-(index + 1) * size // out) - index * size // out for index in range(out))


def _adaptive(dims: int, is_average: bool) -> Rule:
    def rule(out: Any, x: TensorInfo, *_: Any, **__: Any) -> Work:
        first = out[0] if isinstance(out, tuple) else out
        taps = prod(adaptive_taps(x.shape[axis], first.shape[axis]) for axis in range(-dims, 0))
        lines = prod(x.shape[:-dims])
        return Work(other_ops=lines * taps - (0 if is_average else first.elements))

    return rule


for _dims in (1, 2, 3):
    _maxima = (f"aten::max_pool{_dims}d", f"aten::max_pool{_dims}d_with_indices")
    cost_rule(*_maxima, kind="pooling")(_pooling(_dims, is_average=False))
    cost_rule(f"aten::avg_pool{_dims}d", kind="pooling")(_pooling(_dims, is_average=True))
    cost_rule(f"aten::adaptive_max_pool{_dims}d", kind="pooling")(_adaptive(_dims, is_average=False))
    cost_rule(f"aten::adaptive_avg_pool{_dims}d", kind="pooling")(_adaptive(_dims, is_average=True))
for _dims in (2, 3):
    cost_rule(f"aten::fractional_max_pool{_dims}d", kind="pooling")(_pooling(_dims, is_average=False))
    cost_rule(f"aten::_adaptive_avg_pool{_dims}d", kind="pooling")(_adaptive(_dims, is_average=True))


@cost_rule(aten._fft_r2c, aten._fft_c2r, aten._fft_c2c, kind="fft")
def fourier(out: TensorInfo, x: TensorInfo, dims: tuple[int, ...], *_: Any) -> Work:
    """5 n log2 n per transform of n points, half of it where one side is real."""
    larger = x if x.elements >= out.elements else out
    points = prod(larger.shape[axis] for axis in dims)
    is_half = ("complex" in x.dtype) != ("complex" in out.dtype)
    whole = 5 * larger.elements * log2(max(points, 2))
    return Work(other_ops=ceil(whole / 2 if is_half else whole))
