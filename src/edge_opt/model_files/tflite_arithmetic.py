"""Operators of TFLite as eager torch would write them: products, arithmetic, norms, recurrent layers.

Pictures have their channels last in a file and second in torch. The change of view is off the record: no kernel
does it. Integers keep their width; where weights alone are integers, the input is quantized as it comes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any, cast

import torch
import torch.nn.functional as F

from edge_opt.model_files.node_call import (
    ARITHMETIC,
    REDUCTIONS,
    NodeCall,
    TensorFunction,
    binary,
    byte_softmax_op,
    operator,
    operators,
    pooled_as_int8,
    recurrent_op,
    same_padding,
    torch_dtype,
    unary,
    unrecorded,
)
from edge_opt.model_files.onnx_arithmetic import convolved, cumsum, linear, top_k
from edge_opt.model_files.onnx_quantized import (
    dequantize_op,
    dynamic_quantize_op,
    integer_convolution,
    integer_product,
    widened,
)
from edge_opt.model_files.tflite_reader import ACTIVATIONS

aten = torch.ops.aten
_SAME = 0


def tflite(*names: str, has_values: bool = True) -> Callable[[Any], Any]:
    """Register how operators of these names are written in torch; `has_values` as in `operator`."""
    return operator(*(f"tflite:{name}" for name in names), has_values=has_values)


def viewed(x: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """Return the same tensor with its dimensions in another order; no work of the model."""
    with unrecorded():
        return x.permute(tuple(order))


def channels_second(x: torch.Tensor) -> torch.Tensor:
    return viewed(x, (0, x.dim() - 1, *range(1, x.dim() - 1)))


def channels_last(x: torch.Tensor) -> torch.Tensor:
    return viewed(x, (0, *range(2, x.dim()), 1))


def activated(call: NodeCall, x: torch.Tensor) -> torch.Tensor:
    """Apply the activation that is fused into an operator; it works in place."""
    number = int(call.get("activation", 0))
    name = ACTIVATIONS[number] if 0 <= number < len(ACTIVATIONS) else "SIGN_BIT"
    if not name:
        return x
    if name == "RELU":
        return x.relu_()
    if name == "TANH" and x.is_floating_point():
        return x.tanh_()
    limits = {"RELU6": (0, 6), "RELU_N1_TO_1": (-1, 1), "TANH": (-1, 1)}
    if name not in limits:
        raise call.error(f"its activation {number} is not known")
    return x.clamp_(*limits[name])


def rank(call: NodeCall, x: torch.Tensor, wanted: int) -> torch.Tensor:
    """Return a tensor, and refuse another number of dimensions."""
    if x.dim() != wanted:
        raise call.error(f"its tensor {tuple(x.shape)} should have {wanted} dimensions")
    return x


def picture(call: NodeCall) -> torch.Tensor:
    """Return the first input, which must be pictures, with their channels second."""
    return channels_second(rank(call, call.tensor(), 4))


# Products


def _windows(call: NodeCall, axes: str) -> tuple[list[int], list[int]]:
    strides = [int(call.get(f"stride_{axis}", 1)) for axis in axes]
    dilations = [int(call.get(f"dilation_{axis}", 1)) for axis in axes]
    if min([*strides, *dilations]) < 1:
        raise call.error(f"its strides are {strides}, and its dilations {dilations}")
    return strides, dilations


def _padded(
    call: NodeCall, x: torch.Tensor, kernel: Sequence[int], strides: Sequence[int], dilations: Sequence[int],
    outside: float = 0.0,
) -> tuple[torch.Tensor, list[int]]:  # fmt: skip
    """Return the input, channels second, and its padding on both sides.

    "SAME" may need one more element behind than in front, and torch pads both sides alike. One more in front as well
    adds `stride` - 1 or fewer elements beyond the last window where the stride is 2 or more, so there are as many
    windows as before and each costs the same. With a stride of 1 it would add a window: there the input is padded
    beforehand, which is recorded as a copy although TFLite's kernels pad while they read.
    """
    if int(call.get("padding", _SAME)) != _SAME:
        return x, [0] * len(kernel)
    totals = same_padding(x.shape[2:], kernel, strides, dilations)
    if all(total % 2 == 0 or stride > 1 for total, stride in zip(totals, strides, strict=True)):
        return x, [-(-total // 2) for total in totals]
    order = [size for total in reversed(totals) for size in (total // 2, total - total // 2)]
    return F.pad(x, order, value=outside if x.is_floating_point() else 0), [0] * len(kernel)


def _convolved(
    call: NodeCall, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, axes: str, groups: int
) -> torch.Tensor:
    """Return x convolved; x and weight have their channels second."""
    strides, dilations = _windows(call, axes)
    kernel = list(weight.shape[2:])
    x, padding = _padded(call, x, kernel, strides, dilations)
    if x.is_floating_point() and not weight.is_floating_point():
        product = integer_convolution(dynamic_quantize_op(x)[0], weight, strides, padding, dilations, groups)
        result = dequantize_op(product, None, None, x.dtype)
        if bias is not None:
            result = result.add_(bias.reshape(-1, *[1] * len(axes)))
    else:
        result = convolved(x, weight, bias, strides, padding, dilations, groups)
    return activated(call, channels_last(result))


@tflite("CONV_2D", has_values=False)
def conv_2d(call: NodeCall) -> torch.Tensor:
    x, weight = rank(call, call.tensor(), 4), rank(call, call.tensor(1), 4)
    if not weight.shape[3] or x.shape[3] % weight.shape[3]:
        raise call.error(f"its input {tuple(x.shape)} does not fit its weight {tuple(weight.shape)}")
    groups = x.shape[3] // weight.shape[3]
    return _convolved(call, channels_second(x), channels_second(weight), call.optional(2), "hw", groups)


@tflite("DEPTHWISE_CONV_2D", has_values=False)
def depthwise_conv_2d(call: NodeCall) -> torch.Tensor:
    x, weight = rank(call, call.tensor(), 4), rank(call, call.tensor(1), 4)
    return _convolved(call, channels_second(x), viewed(weight, (3, 0, 1, 2)), call.optional(2), "hw", x.shape[3])


@tflite("CONV_3D", has_values=False)
def conv_3d(call: NodeCall) -> torch.Tensor:
    x, weight = rank(call, call.tensor(), 5), rank(call, call.tensor(1), 5)
    return _convolved(call, channels_second(x), viewed(weight, (4, 3, 0, 1, 2)), call.optional(2), "dhw", 1)


@tflite("TRANSPOSE_CONV", has_values=False)
def transpose_conv(call: NodeCall) -> torch.Tensor:
    """Convolve transposed; the file says how large the result is, and the padding follows."""
    weight, x = rank(call, call.tensor(1), 4), channels_second(rank(call, call.tensor(2), 4))
    sizes = call.values(0)[1:3] if call.constant_values[0] is not None else call.get("results")[0][0][1:3]
    strides, _ = _windows(call, "hw")
    full = [(size - 1) * stride + width for size, stride, width in zip(x.shape[2:], strides, weight.shape[1:3],
                                                                       strict=True)]  # fmt: skip
    padding = [max(-(-(whole - int(size)) // 2), 0) for whole, size in zip(full, sizes, strict=True)]
    extra = [int(size) - whole + 2 * pad for whole, size, pad in zip(full, sizes, padding, strict=True)]
    weight = widened(viewed(weight, (3, 0, 1, 2)), x.dtype)
    if x.is_floating_point():
        result = F.conv_transpose2d(x, weight, call.optional(3), strides, padding, extra)
    else:
        result = aten.convolution(x, weight, None, strides, padding, [1, 1], True, extra, 1)
    return activated(call, channels_last(result))


def _product(call: NodeCall, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return a @ b of any widths; floats times integers are quantized first, and scaled afterwards."""
    if a.is_floating_point() and not b.is_floating_point():
        product = integer_product(dynamic_quantize_op(a)[0], b, torch.int32)
        return dequantize_op(product, None, None, a.dtype)
    if a.dtype == b.dtype:
        return torch.matmul(a, b)
    if a.is_floating_point():
        return torch.matmul(a, widened(b, a.dtype))
    return integer_product(a, b, a.dtype)


@tflite("FULLY_CONNECTED")
def fully_connected(call: NodeCall) -> torch.Tensor:
    x, weight, bias = call.tensor(), rank(call, call.tensor(1), 2), call.optional(2)
    inner = weight.shape[1]
    if not inner or x.numel() % inner:
        raise call.error(f"its input {tuple(x.shape)} does not fit its weight {tuple(weight.shape)}")
    with unrecorded():
        rows = x.reshape(-1, inner) if x.is_contiguous() else x.contiguous().reshape(-1, inner)
    if x.dtype == weight.dtype:
        result = linear(rows, weight, bias)
    else:
        result = _product(call, rows, viewed(weight, (1, 0)))
        if bias is not None and result.is_floating_point():
            result = result.add_(bias)
    result = activated(call, result)
    if not call.get("keep_num_dims") or x.dim() == 2:
        return result
    with unrecorded():
        return result.reshape(*x.shape[:-1], weight.shape[0])


@tflite("BATCH_MATMUL")
def batch_matmul(call: NodeCall) -> torch.Tensor:
    a, b = call.tensor(), call.tensor(1)
    with unrecorded():
        a = a.transpose(-1, -2) if call.get("adj_x") else a
        b = b.transpose(-1, -2) if call.get("adj_y") else b
    return _product(call, a, b)


# Arithmetic, element by element


_WITH_NUMBERS: dict[str, TensorFunction] = {
    **{name.upper(): function for name, function in ARITHMETIC.items()}, "POW": torch.pow,
}  # fmt: skip
_BINARY: dict[str, TensorFunction] = {
    **_WITH_NUMBERS, "FLOOR_DIV": torch.floor_divide, "FLOOR_MOD": torch.remainder,
    "ATAN2": torch.atan2, "MAXIMUM": torch.maximum, "MINIMUM": torch.minimum, "LESS": torch.lt, "GREATER": torch.gt,
    "LESS_EQUAL": torch.le, "GREATER_EQUAL": torch.ge, "EQUAL": torch.eq, "NOT_EQUAL": torch.ne,
    "LOGICAL_OR": torch.logical_or, "LOGICAL_AND": torch.logical_and, "BITWISE_XOR": torch.bitwise_xor,
    "RIGHT_SHIFT": torch.bitwise_right_shift,
}  # fmt: skip


@tflite(*_BINARY)
def arithmetic(call: NodeCall) -> torch.Tensor:
    return activated(call, binary(call, _BINARY[call.node.op], call.node.op in _WITH_NUMBERS))


_UNARY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "LOGISTIC": torch.sigmoid, "TANH": torch.tanh, "EXP": torch.exp, "LOG": torch.log, "SQRT": torch.sqrt,
    "RSQRT": torch.rsqrt, "SIN": torch.sin, "COS": torch.cos, "ELU": F.elu, "HARD_SWISH": F.hardswish,
    "FLOOR": torch.floor, "CEIL": torch.ceil, "ROUND": torch.round,
}  # fmt: skip
_EXACT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "RELU": F.relu, "RELU6": lambda x: F.relu6(x) if x.is_floating_point() else torch.clamp(x, 0, 6),
    "RELU_N1_TO_1": partial(torch.clamp, min=-1, max=1), "RELU_0_TO_1": partial(torch.clamp, min=0, max=1),
    "ABS": torch.abs, "NEG": torch.neg, "SIGN": torch.sign, "LOGICAL_NOT": torch.logical_not, "SQUARE": torch.square,
    "COMPLEX_ABS": torch.abs,
}  # fmt: skip


def _curve(function: Callable[[torch.Tensor], torch.Tensor], call: NodeCall) -> torch.Tensor:
    """Apply a curve; of integers it is one look-up in a table, counted as one operation."""
    x = call.tensor()
    return function(x) if x.is_floating_point() else F.relu(x)


operators({name: partial(_curve, function) for name, function in _UNARY.items()}, "tflite:")
operators({name: partial(unary, function) for name, function in _EXACT.items()}, "tflite:")


@tflite("PRELU")
def prelu(call: NodeCall) -> torch.Tensor:
    x, slope = call.tensor(), call.tensor(1)
    if not x.is_floating_point():
        return F.relu(x)
    if slope.numel() in (1, x.shape[-1]) and x.dim() > 1:
        return channels_last(F.prelu(channels_second(x), slope.reshape(-1)))
    return torch.where(x < 0, x * slope, x)


# Norms and reductions


@tflite("SOFTMAX", "LOG_SOFTMAX")
def softmax(call: NodeCall) -> torch.Tensor:
    x = call.tensor()
    if not x.is_floating_point():
        return byte_softmax_op(x, result_dtype(call))  # int16 of int8 in keyword models of TFLM
    return F.softmax(x, -1) if call.node.op == "SOFTMAX" else F.log_softmax(x, -1)


@tflite("L2_NORMALIZATION")
def l2_normalization(call: NodeCall) -> torch.Tensor:
    x = call.tensor()
    if not x.is_floating_point():
        return x * x.square().sum(-1, keepdim=True, dtype=x.dtype)
    return activated(call, F.normalize(x, 2.0, -1))


@tflite("LOCAL_RESPONSE_NORMALIZATION", has_values=False)
def local_response(call: NodeCall) -> torch.Tensor:
    size = 2 * int(call.get("radius", 0)) + 1
    return channels_last(F.local_response_norm(picture(call), size))


def _mean(x: torch.Tensor, axes: list[int], keep: bool) -> torch.Tensor:
    """Return the mean; of integers the sum, then one multiplication that scales it."""
    if x.is_floating_point():
        return x.mean(axes, keepdim=keep)
    total = x.sum(axes, keepdim=keep, dtype=x.dtype)
    return total.mul_(1) if x.is_meta else total.div(x.numel() // max(total.numel(), 1), rounding_mode="trunc")


_REDUCTIONS: dict[str, TensorFunction] = {
    "MEAN": _mean,
    "SUM": REDUCTIONS["Sum"],
    "REDUCE_MAX": REDUCTIONS["Max"],
    "REDUCE_MIN": REDUCTIONS["Min"],
    "REDUCE_PROD": REDUCTIONS["Prod"],
    "REDUCE_ANY": lambda x, axes, keep: torch.any(x, axes, keepdim=keep),
    "REDUCE_ALL": lambda x, axes, keep: torch.all(x, axes, keepdim=keep),
}


@tflite(*_REDUCTIONS)
def reduction(call: NodeCall) -> torch.Tensor:
    x = call.tensor()
    axes = sorted({call.from_front(axis, x.dim()) for axis in call.values(1)})
    if not axes or not x.dim():
        return x
    return _REDUCTIONS[call.node.op](x, axes, bool(call.get("keep_dims")))


@tflite("ARG_MAX", "ARG_MIN")
def position(call: NodeCall) -> torch.Tensor:
    function = torch.argmax if call.node.op == "ARG_MAX" else torch.argmin
    return function(call.tensor(), int(call.values(1)[0])).to(result_dtype(call))


def result_dtype(call: NodeCall, index: int = 0) -> torch.dtype:
    """Return the element type that the file says of a result."""
    return torch_dtype(call.get("results")[index][1] or "uint8")


@tflite("TOPK_V2")
def top_k_v2(call: NodeCall) -> Any:
    values, positions = cast("tuple[torch.Tensor, torch.Tensor]", top_k(call))
    return values, positions.to(result_dtype(call, 1))


# Pooling


_POOLS: dict[str, TensorFunction] = {
    "AVERAGE_POOL_2D": F.avg_pool2d,
    "MAX_POOL_2D": F.max_pool2d,
    "L2_POOL_2D": F.lp_pool2d,
}


@tflite(*_POOLS, has_values=False)
def pool(call: NodeCall) -> torch.Tensor:
    kernel = [int(call.get("filter_h", 0)), int(call.get("filter_w", 0))]
    strides, ones = _windows(call, "hw")
    if min(kernel) < 1:
        raise call.error(f"its window is {kernel}")
    outside = float("-inf") if call.node.op == "MAX_POOL_2D" else 0.0
    x, padding = _padded(call, picture(call), kernel, strides, ones, outside)
    if call.node.op == "L2_POOL_2D":
        x = F.pad(x, [pad for pad in reversed(padding) for _ in (0, 1)])
        pooled = F.lp_pool2d(x, 2.0, (kernel[0], kernel[1]), strides)
    else:
        function = partial(_POOLS[call.node.op], kernel_size=kernel, stride=strides, padding=padding)
        pooled = pooled_as_int8(function, x)
    return activated(call, channels_last(pooled))


# Recurrent layers: each matrix is multiplied once per step and row


@tflite("UNIDIRECTIONAL_SEQUENCE_LSTM", "BIDIRECTIONAL_SEQUENCE_LSTM", "UNIDIRECTIONAL_SEQUENCE_RNN", "RNN", "SVDF",
        has_values=False)  # fmt: skip
def recurrent(call: NodeCall) -> Any:
    x = call.tensor()
    # States that are kept between runs are read and written, and not multiplied by.
    weights = [value for value in call.inputs[1:] if value is None or isinstance(value, torch.nn.Parameter)]
    widths = [sizes[-1] for sizes, _ in call.get("results")]
    output = recurrent_op(x, weights, call.node.op, [*x.shape[:-1], sum(widths)])
    return torch.split(output, widths, -1) if len(widths) > 1 else output


# Operators that are one expression of torch

operators(
    {
        "ADD_N": lambda call: reduce(torch.add, call.inputs),
        "CUMSUM": cumsum,
        "SQUARED_DIFFERENCE": lambda call: torch.sub(call.tensor(), call.tensor(1)).square_(),
        "GELU": lambda call: _curve(partial(F.gelu, approximate="tanh" if call.get("approximate") else "none"), call),
        "LEAKY_RELU": lambda call: _curve(partial(F.leaky_relu, negative_slope=call.get("alpha", 0.01)), call),
    },
    "tflite:",
)
