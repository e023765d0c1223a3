"""Operators of ONNX written as eager torch would: arithmetic, products, convolutions, norms, recurrent layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce
from itertools import combinations
from typing import Any

import torch
import torch.nn.functional as F

from edge_opt.model_files.node_call import (
    ARITHMETIC,
    REDUCTIONS,
    NodeCall,
    TensorFunction,
    binary,
    can_broadcast,
    numbers,
    operator,
    operators,
    pooled_as_int8,
    same_padding,
    unary,
)

aten = torch.ops.aten


def pads_of(call: NodeCall, kernel: Sequence[int], strides: Sequence[int], dilations: Sequence[int]) -> list[int]:
    """Return the padding before each dimension, then after each; `auto_pad` follows from the input's shape."""
    count = len(kernel)
    how = call.get("auto_pad", "NOTSET")
    if how == "VALID":
        return [0] * 2 * count
    if how in ("SAME_UPPER", "SAME_LOWER"):
        totals = same_padding(call.tensor().shape[2:], kernel, strides, dilations)
        small, large = [total // 2 for total in totals], [total - total // 2 for total in totals]
        return small + large if how == "SAME_UPPER" else large + small
    pads = list(call.get("pads", ())) or [0] * 2 * count
    if len(pads) != 2 * count:
        raise call.error(f"it has {len(pads)} pads for {count} dimensions")
    return pads


def windows(call: NodeCall, kernel: Sequence[int]) -> tuple[list[int], list[int], list[int]]:
    """Return strides, dilations and padding of a window."""
    count = len(kernel)
    strides = list(call.get("strides", ())) or [1] * count
    dilations = list(call.get("dilations", ())) or [1] * count
    if len(strides) != count or len(dilations) != count or min([*strides, *dilations, *kernel], default=1) < 1:
        raise call.error(f"its strides {strides} and dilations {dilations} do not fit a kernel {list(kernel)}")
    return strides, dilations, pads_of(call, kernel, strides, dilations)


def evenly_padded(x: torch.Tensor, pads: list[int], value: float = 0.0) -> tuple[torch.Tensor, list[int]]:
    """Return the input and one padding for both sides of each dimension; where they differ it is padded here."""
    count = len(pads) // 2
    before, after = pads[:count], pads[count:]
    if before == after:
        return x, before
    order = [size for pair in reversed(list(zip(before, after, strict=True))) for size in pair]
    return F.pad(x, order, value=value if x.is_floating_point() else 0), [0] * count


_CONVOLUTIONS: dict[int, TensorFunction] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_TRANSPOSED: dict[int, TensorFunction] = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


def convolution(call: NodeCall, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return x convolved with the windows of a node; integers keep their width."""
    kernel = list(weight.shape[2:])
    strides, dilations, pads = windows(call, kernel)
    x, padding = evenly_padded(x, pads)
    groups = int(call.get("group", 1))
    if not kernel or x.dim() != weight.dim() or len(kernel) not in _CONVOLUTIONS:
        raise call.error(f"input {tuple(x.shape)} and weight {tuple(weight.shape)} do not fit")
    return convolved(x, weight, bias, strides, padding, dilations, groups)


def convolved(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, strides: list[int], padding: list[int],
    dilations: list[int], groups: int,
) -> torch.Tensor:  # fmt: skip
    """Return x convolved; torch's functions take floats alone, so integers go to the operator itself."""
    dims = len(strides)
    if x.is_floating_point():
        return _CONVOLUTIONS[dims](x, weight, bias, strides, padding, dilations, groups)
    return aten.convolution(x, weight, bias, strides, padding, dilations, False, [0] * dims, groups)  # type: ignore[no-any-return]


@operator("Conv", "com.microsoft:FusedConv", "com.microsoft.nchwc:Conv", has_values=False)
def conv(call: NodeCall) -> torch.Tensor:
    result = convolution(call, call.tensor(), call.tensor(1), call.optional(2))
    # A runtime may add another branch before the activation.
    return activated(call, result if not call.has(3) else result.add_(call.tensor(3)))


def activated(call: NodeCall, x: torch.Tensor) -> torch.Tensor:
    """Apply the activation that a runtime fused into a product."""
    name = call.get("activation", "")
    if not name:
        return x
    known: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "Relu": F.relu, "Sigmoid": torch.sigmoid, "Tanh": torch.tanh, "LeakyRelu": F.leaky_relu,
        "Clip": partial(torch.clamp, min=0.0, max=6.0), "HardSigmoid": F.hardsigmoid,
    }  # fmt: skip
    if name not in known:
        raise call.error(f"its activation {name!r} is not known")
    return known[name](x)


@operator("ConvTranspose", has_values=False)
def conv_transpose(call: NodeCall) -> torch.Tensor:
    x, weight = call.tensor(), call.tensor(1)
    kernel = list(weight.shape[2:])
    strides, dilations, pads = windows(call, kernel)
    count = len(kernel)
    extra = list(call.get("output_padding", ())) or [0] * count
    wanted = list(call.get("output_shape", ()))[-count:]
    is_same = call.get("auto_pad", "NOTSET") in ("SAME_UPPER", "SAME_LOWER")
    if wanted or is_same:
        sizes = zip(x.shape[2:], strides, kernel, dilations, extra, strict=True)
        full = [(s - 1) * t + (k - 1) * d + 1 + e for s, t, k, d, e in sizes]
        # "SAME" means as many as steps; where the windows do not reach that far, they stay apart.
        same = [size * step for size, step in zip(x.shape[2:], strides, strict=True)]
        crop = [size - out for size, out in zip(full, wanted or map(min, same, full), strict=True)]
        extra = [size + max(-less, 0) for size, less in zip(extra, crop, strict=True)]
        crop = [max(less, 0) for less in crop]
        pads = [size // 2 for size in crop] + [size - size // 2 for size in crop]
    before, after = pads[:count], pads[count:]
    # A crop that is larger behind is the same as output padding that is missing.
    extra = [size + left - right for size, left, right in zip(extra, before, after, strict=True)]
    padding = before
    if min(extra) < 0:
        padding = [max(left, right) for left, right in zip(before, after, strict=True)]
        extra = [2 * pad - left - right for pad, left, right in zip(padding, before, after, strict=True)]
    groups = int(call.get("group", 1))
    if x.is_floating_point():
        return _TRANSPOSED[count](x, weight, call.optional(2), strides, padding, extra, groups, dilations)
    return aten.convolution(x, weight, None, strides, padding, dilations, True, extra, groups)  # type: ignore[no-any-return]


@operator("MatMul", "com.microsoft:FusedMatMul", "com.microsoft:TransposeMatMul")
def matmul(call: NodeCall) -> torch.Tensor:
    a, b = call.tensor(), call.tensor(1)
    # The fused one may have its rows before the batch.
    a = a.movedim(0, -2) if call.get("transBatchA", 0) else a
    b = b.movedim(0, -2) if call.get("transBatchB", 0) else b
    a = a.transpose(-1, -2) if call.get("transA", 0) else a
    b = b.transpose(-1, -2) if call.get("transB", 0) else b
    result = torch.matmul(a, b)
    # A factor that is not 1 is applied to the result.
    return result if call.get("alpha", 1.0) == 1.0 else result * call.get("alpha")


@operator("Gemm", "com.microsoft:FusedGemm", has_values=False)
def gemm(call: NodeCall) -> torch.Tensor:
    a, b, c = call.tensor(), call.tensor(1), call.optional(2)
    a = a.t() if call.get("transA", 0) else a
    b = b if call.get("transB", 0) else b.t()
    c = None if c is not None and not call.get("beta", 1.0) else c
    if c is not None and c.numel() == 1:
        return activated(call, torch.addmm(c, a, b.t()))
    return activated(call, linear(a, b, c))


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Multiply x by weight.T and add the bias; quantized ones keep their width, although their bias is wider."""
    if bias is None or bias.dim() <= 1:
        if bias is not None and bias.dim() == 1 and bias.dtype != x.dtype:
            # torch's linear wants one type, and the product of a quantized layer must stay int8 for its traffic to be
            # right. The int32 bias is therefore viewed as int8 and cut to one entry per column: its bytes count a
            # quarter, which is less than a hundredth of the weight's for any layer wider than 300. A copy in int8
            # was rejected, because it would be recorded as work.
            bias = bias.view(x.dtype)[: bias.shape[0]]
        return F.linear(x, weight, bias if bias is not None and bias.dim() else None)
    return torch.addmm(bias, x, weight.t())


def _flipped(function: Callable[[Any, Any], torch.Tensor]) -> Callable[[Any, Any], torch.Tensor]:
    """Return a comparison that takes a number in front as well: torch takes it behind only."""
    mirrors: dict[Any, Any] = {torch.gt: torch.lt, torch.ge: torch.le, torch.lt: torch.gt, torch.le: torch.ge}
    mirrored = mirrors.get(function, function)
    return lambda a, b: function(a, b) if isinstance(a, torch.Tensor) else mirrored(b, a)


_BINARY: dict[str, TensorFunction] = {
    **ARITHMETIC, "And": torch.logical_and, "Or": torch.logical_or, "Xor": torch.logical_xor,
    "Equal": _flipped(torch.eq), "Greater": _flipped(torch.gt), "GreaterOrEqual": _flipped(torch.ge),
    "Less": _flipped(torch.lt), "LessOrEqual": _flipped(torch.le), "BitwiseAnd": torch.bitwise_and,
    "BitwiseOr": torch.bitwise_or, "BitwiseXor": torch.bitwise_xor,
}  # fmt: skip


_BOTH_TENSORS = (torch.logical_and, torch.logical_or, torch.logical_xor, torch.fmod)
operators({
    name: partial(binary, function=function, takes_numbers=function not in _BOTH_TENSORS)
    for name, function in _BINARY.items()
})  # fmt: skip


@operator("Mod")
def remainder(call: NodeCall) -> torch.Tensor:
    """Return the remainder of a division: of the divisor's sign, or of the dividend's as in C."""
    is_c = bool(call.get("fmod", 0))
    return binary(call, torch.fmod if is_c else torch.remainder, takes_numbers=not is_c)


_UNARY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "Relu": F.relu, "Sigmoid": torch.sigmoid, "Tanh": torch.tanh, "Exp": torch.exp, "Log": torch.log,
    "Sqrt": torch.sqrt, "Abs": torch.abs, "Neg": torch.neg, "Sign": torch.sign, "Floor": torch.floor,
    "Ceil": torch.ceil, "Round": torch.round, "Reciprocal": torch.reciprocal, "Erf": torch.erf, "Sin": torch.sin,
    "Cos": torch.cos, "Tan": torch.tan, "Asin": torch.asin, "Acos": torch.acos, "Atan": torch.atan, "Sinh": torch.sinh,
    "Cosh": torch.cosh, "Asinh": torch.asinh, "Acosh": torch.acosh, "Atanh": torch.atanh, "Not": torch.logical_not,
    "IsNaN": torch.isnan, "Softplus": F.softplus, "Softsign": F.softsign, "HardSwish": F.hardswish, "Mish": F.mish,
    "BitwiseNot": torch.bitwise_not, "Det": torch.linalg.det, "com.microsoft:Gelu": F.gelu,
}  # fmt: skip
# These cost the same as torch's; their settings differ, or have other defaults.
_ALIKE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "IsInf": torch.isinf, "Selu": F.selu, "Celu": F.celu, "HardSigmoid": F.hardsigmoid, "Swish": F.silu,
    "Shrink": F.hardshrink, "com.microsoft:QuickGelu": F.gelu,
}  # fmt: skip
operators({name: partial(unary, function) for name, function in _UNARY.items()})
operators({name: partial(unary, function) for name, function in _ALIKE.items()}, has_values=False)


@operator("com.microsoft:BiasGelu", "com.microsoft:FastGelu")
def bias_gelu(call: NodeCall) -> torch.Tensor:
    x = call.tensor() + call.tensor(1) if call.has(1) else call.tensor()
    return F.gelu(x, approximate="tanh" if call.node.op == "FastGelu" else "none")


@operator("PRelu")
def prelu(call: NodeCall) -> torch.Tensor:
    x, slope = call.tensor(), call.tensor(1)
    # From behind, as in all broadcasting: a slope for each channel has a 1 for each dimension after it.
    channels = x.shape[1] if x.dim() > 1 else 1
    is_each = slope.numel() == channels and slope.shape[: slope.dim() - x.dim() + 2][-1:] == (channels,)
    if slope.numel() == 1 or is_each:
        return F.prelu(x, slope.reshape(-1))
    return torch.where(x < 0, x * slope, x)


@operator("Clip")
def clip(call: NodeCall) -> torch.Tensor:
    x = call.tensor()
    low, high = (
        call.tensor(index) if call.has(index) and call.constant_values[index] is None else call.number(name, index)
        for name, index in (("min", 1), ("max", 2))
    )  # fmt: skip
    if low is None and high is None:
        return x
    if isinstance(low, torch.Tensor) or isinstance(high, torch.Tensor):
        return torch.clamp(x, call.optional(1), call.optional(2))
    if not x.is_floating_point():
        return torch.clamp(x, 0) if isinstance(low, float) or isinstance(high, float) else torch.clamp(x, low, high)
    if low == 0 and high == 6:
        return F.relu6(x)
    return torch.clamp(x, low, high)


@operator("Where")
def where(call: NodeCall) -> Any:
    condition, *others = call.inputs
    values = [
        numbers(known)[0] if known is not None and known.dim() == 0 else value
        for value, known in zip(others, call.constant_values[1:], strict=True)
    ]
    if not any(isinstance(value, torch.Tensor) for value in values):
        values = others
    shapes = [value.shape for value in (condition, *values) if isinstance(value, torch.Tensor)]
    if not all(can_broadcast(first, second) for first, second in combinations(shapes, 2)):
        # torch would import its compiler to say so, which takes seconds.
        raise call.error(f"its inputs of {', '.join(str(tuple(shape)) for shape in shapes)} do not fit each other")
    return torch.where(condition, *values)


@operator("CumSum")
def cumsum(call: NodeCall) -> torch.Tensor:
    x, axis = call.tensor(), int(call.values(1)[0])
    if call.device == "meta":
        return torch.cumsum(x, axis, dtype=x.dtype)
    is_reversed = bool(call.get("reverse", 0))
    x = x.flip(axis) if is_reversed else x
    result = torch.cumsum(x, axis, dtype=x.dtype)
    result = result - x if call.get("exclusive", 0) else result
    return result.flip(axis) if is_reversed else result


@operator("Softmax", "LogSoftmax")
def softmax(call: NodeCall) -> torch.Tensor:
    function = F.softmax if call.node.op == "Softmax" else F.log_softmax
    axis = call.axis(-1 if call.opset >= 13 else 1)
    if call.opset >= 13 or axis == call.tensor().dim() - 1:
        return function(call.tensor(), axis)
    return function(call.tensor().flatten(axis), -1).reshape(call.tensor().shape)


# Pooling


_POOLS: dict[tuple[str, int], Any] = {
    ("MaxPool", 1): F.max_pool1d, ("MaxPool", 2): F.max_pool2d, ("MaxPool", 3): F.max_pool3d,
    ("AveragePool", 1): F.avg_pool1d, ("AveragePool", 2): F.avg_pool2d, ("AveragePool", 3): F.avg_pool3d,
    ("GlobalAveragePool", 1): F.adaptive_avg_pool1d, ("GlobalAveragePool", 2): F.adaptive_avg_pool2d,
    ("GlobalAveragePool", 3): F.adaptive_avg_pool3d, ("GlobalMaxPool", 1): F.adaptive_max_pool1d,
    ("GlobalMaxPool", 2): F.adaptive_max_pool2d, ("GlobalMaxPool", 3): F.adaptive_max_pool3d,
}  # fmt: skip


def pooled(call: NodeCall, kind: str, x: torch.Tensor) -> Any:
    """Pool by windows, or the whole; integers are pooled as they are."""
    return pooled_as_int8(partial(_pooled, call, kind), x)


def _pooled(call: NodeCall, kind: str, x: torch.Tensor) -> Any:
    count = x.dim() - 2
    if (kind, count) not in _POOLS:
        raise call.error(f"its input {tuple(x.shape)} has {count} dimensions to pool")
    if kind.startswith("Global"):
        # Averages of integers use a window over the whole, which torch also supports for integers.
        if x.is_floating_point() or kind == "GlobalMaxPool":
            return _POOLS[kind, count](x, 1)
        return _POOLS["AveragePool", count](x, list(x.shape[2:]))
    kernel = list(call.get("kernel_shape", ()))
    strides, dilations, pads = windows(call, kernel)
    if kind == "AveragePool" and max(dilations) > 1:
        raise call.error(f"its window has dilations of {dilations}, and torch averages none")
    ceil = bool(call.get("ceil_mode", 0))
    outside = float("-inf") if kind == "MaxPool" else 0.0
    x, padding = evenly_padded(x, pads, outside)
    if any(2 * pad > size for pad, size in zip(padding, kernel, strict=True)):
        x, padding = F.pad(x, [pad for pad in reversed(padding) for _ in range(2)], value=outside), [0] * count
    if kind == "MaxPool":
        return _POOLS[kind, count](
            x, kernel, strides, padding, dilations, ceil_mode=ceil, return_indices=len(call.node.outputs) > 1
        )
    return _POOLS[kind, count](x, kernel, strides, padding, ceil, bool(call.get("count_include_pad", 0)))


_POOL_NAMES = ("MaxPool", "AveragePool", "GlobalAveragePool", "GlobalMaxPool")


@operator(*_POOL_NAMES, *(f"com.microsoft.nchwc:{name}" for name in _POOL_NAMES), has_values=False)
def pool(call: NodeCall) -> Any:
    return pooled(call, call.node.op, call.tensor())


# Norms


@operator("BatchNormalization")
def batch_norm(call: NodeCall) -> torch.Tensor:
    x, weight, bias, mean, variance = (call.tensor(index) for index in range(5))
    return F.batch_norm(x, mean, variance, weight, bias, False, 0.1, call.get("epsilon", 1e-5))


@operator("InstanceNormalization")
def instance_norm(call: NodeCall) -> torch.Tensor:
    return F.instance_norm(call.tensor(), weight=call.tensor(1), bias=call.tensor(2), eps=call.get("epsilon", 1e-5))


@operator("LayerNormalization")
def layer_norm(call: NodeCall) -> Any:
    x = call.tensor()
    shape = list(x.shape[call.axis(-1) :])
    weight, bias = call.tensor(1).expand(shape), call.optional(2)
    bias = None if bias is None else bias.expand(shape)
    if len([name for name in call.node.outputs if name]) > 1:
        return torch.native_layer_norm(x, shape, weight, bias, call.get("epsilon", 1e-5))
    return F.layer_norm(x, shape, weight, bias, call.get("epsilon", 1e-5))


@operator("RMSNormalization", "SimplifiedLayerNormalization", "com.microsoft:SimplifiedLayerNormalization")
def rms_norm(call: NodeCall) -> torch.Tensor:
    x = call.tensor()
    shape = list(x.shape[call.axis(-1) :])
    return F.rms_norm(x, shape, call.tensor(1).expand(shape), call.get("epsilon", 1e-5))


@operator("GroupNormalization")
def group_norm(call: NodeCall) -> torch.Tensor:
    x, weight, bias = call.tensor(), call.tensor(1), call.tensor(2)
    groups = int(call.get("num_groups", 1))
    if weight.shape[0] != x.shape[1]:  # before opset 21 there is one per group
        weight, bias = (value.repeat_interleave(x.shape[1] // groups) for value in (weight, bias))
    return F.group_norm(x, groups, weight, bias)


@operator("LRN")
def local_response_norm(call: NodeCall) -> torch.Tensor:
    alpha, beta, bias = (call.get(name, default) for name, default in (("alpha", 1e-4), ("beta", 0.75), ("bias", 1.0)))
    return F.local_response_norm(call.tensor(), int(call.get("size", 1)), alpha, beta, bias)


# Reductions


_REDUCTIONS: dict[str, TensorFunction] = {
    **{f"Reduce{name}": function for name, function in REDUCTIONS.items()},
    "ReduceMean": lambda x, axes, keep: x.mean(axes, keepdim=keep),
    "ReduceL1": lambda x, axes, keep: torch.linalg.vector_norm(x, 1, axes, keep),
    "ReduceL2": lambda x, axes, keep: torch.linalg.vector_norm(x, 2, axes, keep),
    "ReduceSumSquare": lambda x, axes, keep: (x * x).sum(axes, keepdim=keep, dtype=x.dtype),
    "ReduceLogSumExp": torch.logsumexp,
    "ReduceLogSum": lambda x, axes, keep: x.sum(axes, keepdim=keep).log(),
}
# A single element: there is nothing to reduce.
_OF_EACH: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "ReduceL1": torch.abs, "ReduceL2": torch.abs, "ReduceSumSquare": torch.square, "ReduceLogSum": torch.log,
}  # fmt: skip
# torch has them for floats alone.
_OF_FLOATS = frozenset(("ReduceMean", "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp"))


@operator(*_REDUCTIONS)
def reduction(call: NodeCall) -> torch.Tensor:
    x, keep = call.tensor(), bool(call.get("keepdims", 1))
    axes = [int(axis) for axis in call.setting("axes", 1) or ()]
    if not axes and call.get("noop_with_empty_axes", 0):
        return _OF_EACH[call.node.op](x) if call.node.op in _OF_EACH else x
    axes = axes or list(range(x.dim()))
    if call.node.op in _OF_FLOATS and not x.is_floating_point():
        return _REDUCTIONS[call.node.op](x.to(torch.float64), axes, keep).to(x.dtype)
    return _REDUCTIONS[call.node.op](x, axes, keep)


@operator("TopK")
def top_k(call: NodeCall) -> Any:
    count = int(call.number("k", 1))
    return torch.topk(call.tensor(), count, call.axis(-1), bool(call.get("largest", 1)), bool(call.get("sorted", 1)))


# Recurrent layers


_CELLS: dict[str, tuple[int, Any]] = {"LSTM": (4, torch.lstm), "GRU": (3, torch.gru), "RNN": (1, torch.rnn_tanh)}


@operator(*_CELLS, has_values=False)
def recurrent(call: NodeCall) -> Any:
    """Run one layer over a sequence. ONNX stacks the directions in front and both biases in one row."""
    gates, function = _CELLS[call.node.op]
    x, inner, outer, biases = call.tensor(), call.tensor(1), call.tensor(2), call.optional(3)
    if call.get("layout", 0):
        raise call.error("its batch comes first (layout=1), which no runtime takes; export it with layout=0")
    directions, rows = inner.shape[0], inner.shape[1]
    hidden, (steps, batch) = rows // gates, x.shape[:2]
    weights: list[torch.Tensor] = []
    for number in range(directions):
        weights += [inner[number], outer[number]]
        if biases is not None:
            weights += [biases[number][:rows], biases[number][rows:]]
    shape = (directions, batch, hidden)
    state = [
        call.tensor(index) if call.has(index) else torch.zeros(shape, dtype=x.dtype, device=x.device)
        for index in ((5, 6) if call.node.op == "LSTM" else (5,))
    ]  # fmt: skip
    first_state = tuple(state) if call.node.op == "LSTM" else state[0]
    result = function(x, first_state, weights, biases is not None, 1, 0.0, False, directions == 2, False)
    # torch concatenates directions; here they are a dimension of their own.
    out = result[0].reshape(steps, batch, directions, hidden).transpose(1, 2)
    return (out, *result[1:])[: len(call.node.outputs)]


@operator("GridSample", has_values=False)
def grid_sample(call: NodeCall) -> torch.Tensor:
    mode = {"linear": "bilinear", "cubic": "bicubic"}.get(call.get("mode", "linear"), call.get("mode", "bilinear"))
    return F.grid_sample(call.tensor(), call.tensor(1), mode=mode, align_corners=bool(call.get("align_corners", 0)))


# Learned models of scikit-learn: products and sums


@operator("ai.onnx.ml:LinearRegressor", "ai.onnx.ml:LinearClassifier", has_values=False)
def sklearn_linear(call: NodeCall) -> Any:
    """Multiply rows by coefficients; the classifier names the largest, and turns scores into shares."""
    x, weight = call.tensor(), call.tensor(1)
    x = x if x.is_floating_point() else x.to(torch.float32)
    outputs = max(weight.numel() // max(x.shape[-1], 1), 1)
    scores = F.linear(x.reshape(-1, x.shape[-1]), weight.reshape(outputs, -1), call.optional(2))
    if call.node.op == "LinearRegressor":
        return scores
    known: dict[str, Any] = {"SOFTMAX": partial(F.softmax, dim=-1), "LOGISTIC": torch.sigmoid}
    shares = known.get(call.get("post_transform", "NONE"))
    if outputs == 1:
        scores = torch.cat([1 - scores, scores], 1)
    return torch.argmax(scores, -1), scores if shares is None else shares(scores)


@operator("ai.onnx.ml:Normalizer", has_values=False)
def normalizer(call: NodeCall) -> torch.Tensor:
    x = call.tensor() if call.tensor().is_floating_point() else call.tensor().to(torch.float32)
    return F.normalize(x, {"L1": 1.0, "L2": 2.0, "MAX": float("inf")}.get(call.get("norm", "MAX"), 2.0), -1)


_SHIFTS: dict[bool, TensorFunction] = {True: torch.bitwise_left_shift, False: torch.bitwise_right_shift}
operators(
    {
        # Of the first input's type, also where the power is of floats.
        "Pow": lambda call: binary(call, torch.pow).to(call.tensor().dtype),
        "Einsum": lambda call: torch.einsum(call.get("equation", ""), *call.inputs),
        "LeakyRelu": lambda call: F.leaky_relu(call.tensor(), call.get("alpha", 0.01)),
        "Min": lambda call: reduce(torch.minimum, call.inputs),
        "Max": lambda call: reduce(torch.maximum, call.inputs),
        "Sum": lambda call: reduce(torch.add, call.inputs),
        "Mean": lambda call: reduce(torch.add, call.inputs) / len(call.inputs),
        "ArgMax": lambda call: torch.argmax(call.tensor(), call.axis(0), keepdim=bool(call.get("keepdims", 1))),
        "ArgMin": lambda call: torch.argmin(call.tensor(), call.axis(0), keepdim=bool(call.get("keepdims", 1))),
        "BitShift": lambda call: _SHIFTS[call.get("direction") == "LEFT"](call.tensor(), call.tensor(1)),
        "Elu": lambda call: F.elu(call.tensor(), call.get("alpha", 1.0)),
        "ThresholdedRelu": lambda call: F.threshold(call.tensor(), call.get("alpha", 1.0), 0.0),
        "Gelu": lambda call: F.gelu(call.tensor(), approximate=call.get("approximate", "none")),
        "LpNormalization": lambda call: F.normalize(call.tensor(), float(call.get("p", 2)), call.axis(-1)),
        "ai.onnx.ml:Scaler": lambda call: (call.tensor() - call.tensor(1)) * call.tensor(2),
    },
)
