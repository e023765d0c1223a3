"""Operators of TFLite as eager torch would write them: products, arithmetic, norms, recurrent layers.

Pictures have their channels last in a file and second in torch. The change of view is off the record: no kernel
does it. Integers keep their width; where weights alone are integers, the input is quantised as it comes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import _disable_current_modes

from edge_opt.cost.pointwise import SOFTMAX_OPS
from edge_opt.cost.products import LSTM_OPS, RNN_OPS
from edge_opt.cost.rules import Work, cost_rule
from edge_opt.model_files.node_call import NodeCall, operator, torch_dtype
from edge_opt.model_files.onnx_arithmetic import cumsum, divided, linear
from edge_opt.model_files.onnx_quantized import (
    define,
    integer_convolution,
    integer_product,
    steps_to_bytes,
    steps_to_floats,
    widened,
)
from edge_opt.model_files.tflite_reader import ACTIVATIONS
from edge_opt.records.costs import TensorInfo

aten = torch.ops.aten
_SAME = 0


def tflite(*names: str, has_values: bool = True) -> Callable[[Any], Any]:
    """Register how operators of these names are written in torch; `has_values` as in `operator`."""
    return operator(*(f"tflite:{name}" for name in names), has_values=has_values)


def viewed(x: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """The same tensor with its dimensions in another order; no work of the model."""
    with _disable_current_modes():
        return x.permute(tuple(order))


def channels_second(x: torch.Tensor) -> torch.Tensor:
    return viewed(x, (0, x.dim() - 1, *range(1, x.dim() - 1)))


def channels_last(x: torch.Tensor) -> torch.Tensor:
    return viewed(x, (0, *range(2, x.dim()), 1))


def activated(call: NodeCall, x: torch.Tensor) -> torch.Tensor:
    """What is fused behind an operator; it works where the result stands."""
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
        raise call.refusal(f"its activation {number} is not known")
    return x.clamp_(*limits[name])


def rank(call: NodeCall, x: torch.Tensor, wanted: int) -> torch.Tensor:
    """A tensor that must have so many dimensions."""
    if x.dim() != wanted:
        raise call.refusal(f"its tensor {tuple(x.shape)} should have {wanted} dimensions")
    return x


# Products


def _windows(call: NodeCall, axes: str) -> tuple[list[int], list[int]]:
    strides = [int(call.get(f"stride_{axis}", 1)) for axis in axes]
    dilations = [int(call.get(f"dilation_{axis}", 1)) for axis in axes]
    if min([*strides, *dilations]) < 1:
        raise call.refusal(f"its strides are {strides}, and its dilations {dilations}")
    return strides, dilations


def _padded(
    call: NodeCall, x: torch.Tensor, kernel: Sequence[int], strides: Sequence[int], dilations: Sequence[int],
    outside: float = 0.0,
) -> tuple[torch.Tensor, list[int]]:  # fmt: skip
    """The input, channels second, and its padding on both sides.

    "SAME" may need one more behind than in front. With a stride of 2 and more, one more in front as well changes
    neither the number of results nor their cost; else the input is padded beforehand.
    """
    if int(call.get("padding", _SAME)) != _SAME:
        return x, [0] * len(kernel)
    totals = []
    for size, width, stride, dilation in zip(x.shape[2:], kernel, strides, dilations, strict=True):
        totals.append(max((-(-size // stride) - 1) * stride + (width - 1) * dilation + 1 - size, 0))
    if all(total % 2 == 0 or stride > 1 for total, stride in zip(totals, strides, strict=True)):
        return x, [-(-total // 2) for total in totals]
    order = [size for total in reversed(totals) for size in (total // 2, total - total // 2)]
    return F.pad(x, order, value=outside if x.is_floating_point() else 0), [0] * len(kernel)


_CONVOLUTIONS: dict[int, Any] = {2: F.conv2d, 3: F.conv3d}


def _convolved(
    call: NodeCall, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, axes: str, groups: int
) -> torch.Tensor:
    """x convolved; x and weight have their channels second."""
    strides, dilations = _windows(call, axes)
    kernel = list(weight.shape[2:])
    x, padding = _padded(call, x, kernel, strides, dilations)
    if x.is_floating_point() == weight.is_floating_point() and x.is_floating_point():
        found: torch.Tensor = _CONVOLUTIONS[len(axes)](x, weight, bias, strides, padding, dilations, groups)
    elif x.is_floating_point():
        product = integer_convolution(steps_to_bytes(x)[0], weight, strides, padding, dilations, groups)
        found = steps_to_floats(product, None, None, x.dtype)
        if bias is not None:
            found = found.add_(bias.reshape(-1, *[1] * len(axes)))
    else:
        found = aten.convolution(x, weight, bias, strides, padding, dilations, False, [0] * len(axes), groups)
    return activated(call, channels_last(found))


@tflite("CONV_2D", has_values=False)
def conv_2d(call: NodeCall) -> torch.Tensor:
    x, weight = rank(call, call.tensor(), 4), rank(call, call.tensor(1), 4)
    if not weight.shape[3] or x.shape[3] % weight.shape[3]:
        raise call.refusal(f"its input {tuple(x.shape)} does not fit its weight {tuple(weight.shape)}")
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
    """The file says how large the result is, and the padding follows."""
    weight, x = rank(call, call.tensor(1), 4), channels_second(rank(call, call.tensor(2), 4))
    sizes = call.values(0)[1:3] if call.known[0] is not None else call.get("results")[0][0][1:3]
    strides, _ = _windows(call, "hw")
    full = [(size - 1) * stride + width for size, stride, width in zip(x.shape[2:], strides, weight.shape[1:3],
                                                                       strict=True)]  # fmt: skip
    padding = [max(-(-(whole - int(size)) // 2), 0) for whole, size in zip(full, sizes, strict=True)]
    extra = [int(size) - whole + 2 * pad for whole, size, pad in zip(full, sizes, padding, strict=True)]
    weight = widened(viewed(weight, (3, 0, 1, 2)), x.dtype)
    if x.is_floating_point():
        found = F.conv_transpose2d(x, weight, call.optional(3), strides, padding, extra)
    else:
        found = aten.convolution(x, weight, None, strides, padding, [1, 1], True, extra, 1)
    return activated(call, channels_last(found))


def _product(call: NodeCall, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b of whatever widths; floats times integers are quantised first, and scaled afterwards."""
    if a.is_floating_point() and not b.is_floating_point():
        product = integer_product(steps_to_bytes(a)[0], b, torch.int32)
        found: torch.Tensor = steps_to_floats(product, None, None, a.dtype)
        return found
    if a.dtype == b.dtype:
        return torch.matmul(a, b)
    if a.is_floating_point():
        return torch.matmul(a, widened(b, a.dtype))
    mixed: torch.Tensor = integer_product(a, b, a.dtype)
    return mixed


@tflite("FULLY_CONNECTED")
def fully_connected(call: NodeCall) -> torch.Tensor:
    x, weight, bias = call.tensor(), rank(call, call.tensor(1), 2), call.optional(2)
    inner = weight.shape[1]
    if not inner or x.numel() % inner:
        raise call.refusal(f"its input {tuple(x.shape)} does not fit its weight {tuple(weight.shape)}")
    with _disable_current_modes():
        rows = x.reshape(-1, inner) if x.is_contiguous() else x.contiguous().reshape(-1, inner)
    if x.dtype == weight.dtype:
        found = linear(rows, weight, bias)
    else:
        found = _product(call, rows, viewed(weight, (1, 0)))
        if bias is not None and found.is_floating_point():
            found = found.add_(bias)
    found = activated(call, found)
    if not call.get("keep_num_dims") or x.dim() == 2:
        return found
    with _disable_current_modes():
        return found.reshape(*x.shape[:-1], weight.shape[0])


@tflite("BATCH_MATMUL")
def batch_matmul(call: NodeCall) -> torch.Tensor:
    a, b = call.tensor(), call.tensor(1)
    with _disable_current_modes():
        a = a.transpose(-1, -2) if call.get("adj_x") else a
        b = b.transpose(-1, -2) if call.get("adj_y") else b
    return _product(call, a, b)


# Arithmetic, element by element


_BINARY: dict[str, Callable[[Any, Any], torch.Tensor]] = {
    "ADD": torch.add, "SUB": lambda a, b: torch.sub(a, b) if isinstance(a, torch.Tensor) else torch.rsub(b, a),
    "MUL": torch.mul, "DIV": divided, "POW": torch.pow, "FLOOR_DIV": torch.floor_divide, "FLOOR_MOD": torch.remainder,
    "ATAN2": torch.atan2, "MAXIMUM": torch.maximum, "MINIMUM": torch.minimum, "LESS": torch.lt, "GREATER": torch.gt,
    "LESS_EQUAL": torch.le, "GREATER_EQUAL": torch.ge, "EQUAL": torch.eq, "NOT_EQUAL": torch.ne,
    "LOGICAL_OR": torch.logical_or, "LOGICAL_AND": torch.logical_and, "BITWISE_XOR": torch.bitwise_xor,
    "RIGHT_SHIFT": torch.bitwise_right_shift,
}  # fmt: skip
_WITH_NUMBERS = frozenset(("ADD", "SUB", "MUL", "DIV", "POW"))


def _binary(name: str, call: NodeCall) -> torch.Tensor:
    a, b = call.operands() if name in _WITH_NUMBERS else (call.tensor(), call.tensor(1))
    if not isinstance(a, torch.Tensor) and name in ("ADD", "MUL"):
        a, b = b, a
    return activated(call, _BINARY[name](a, b))


for _name in _BINARY:
    tflite(_name)(partial(_binary, _name))


@tflite("SQUARED_DIFFERENCE")
def squared_difference(call: NodeCall) -> torch.Tensor:
    return torch.sub(call.tensor(), call.tensor(1)).square_()


@tflite("ADD_N")
def add_n(call: NodeCall) -> torch.Tensor:
    found: torch.Tensor = reduce(torch.add, call.inputs)
    return found


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
    """A curve; of integers it is one look-up in a table, counted as one operation."""
    x = call.tensor()
    return function(x) if x.is_floating_point() else F.relu(x)


for _name, _function in _UNARY.items():
    tflite(_name)(partial(_curve, _function))
for _name, _function in _EXACT.items():
    tflite(_name)(lambda call, function=_function: function(call.tensor()))


@tflite("GELU")
def gelu(call: NodeCall) -> torch.Tensor:
    return _curve(partial(F.gelu, approximate="tanh" if call.get("approximate") else "none"), call)


@tflite("LEAKY_RELU")
def leaky_relu(call: NodeCall) -> torch.Tensor:
    return _curve(partial(F.leaky_relu, negative_slope=call.get("alpha", 0.01)), call)


@tflite("PRELU")
def prelu(call: NodeCall) -> torch.Tensor:
    x, slope = call.tensor(), call.tensor(1)
    if not x.is_floating_point():
        return F.relu(x)
    if slope.numel() in (1, x.shape[-1]) and x.dim() > 1:
        return channels_last(F.prelu(channels_second(x), slope.reshape(-1)))
    return torch.where(x < 0, x * slope, x)


# Norms and reductions


_byte_softmax = define("byte_softmax(Tensor x) -> Tensor", lambda x: torch.empty_like(x))


@cost_rule("onnx_file::byte_softmax", kind="softmax")
def byte_softmax_cost(out: TensorInfo, x: TensorInfo) -> Work:
    """As many steps as of floats: maximum, subtract, a table of exponents, sum, divide."""
    return Work(other_ops=SOFTMAX_OPS * out.elements)


@tflite("SOFTMAX", "LOG_SOFTMAX")
def softmax(call: NodeCall) -> torch.Tensor:
    x = call.tensor()
    if not x.is_floating_point():
        found: torch.Tensor = _byte_softmax(x)
        return found
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
    return channels_last(F.local_response_norm(channels_second(rank(call, call.tensor(), 4)), size))


def _mean(x: torch.Tensor, axes: list[int], keep: bool) -> torch.Tensor:
    """Of integers: the sum, then one multiplication that scales it."""
    if x.is_floating_point():
        return x.mean(axes, keepdim=keep)
    total = x.sum(axes, keepdim=keep, dtype=x.dtype)
    return total.mul_(1) if x.is_meta else total.div(x.numel() // max(total.numel(), 1), rounding_mode="trunc")


_REDUCTIONS: dict[str, Callable[[torch.Tensor, list[int], bool], torch.Tensor]] = {
    "MEAN": _mean,
    "SUM": lambda x, axes, keep: x.sum(axes, keepdim=keep, dtype=x.dtype),
    "REDUCE_MAX": lambda x, axes, keep: x.amax(axes, keepdim=keep),
    "REDUCE_MIN": lambda x, axes, keep: x.amin(axes, keepdim=keep),
    "REDUCE_ANY": lambda x, axes, keep: torch.any(x, axes, keepdim=keep),
    "REDUCE_ALL": lambda x, axes, keep: torch.all(x, axes, keepdim=keep),
    "REDUCE_PROD": lambda x, axes, keep: reduce(lambda y, axis: y.prod(axis, keepdim=keep, dtype=x.dtype),
                                                sorted((a % x.dim() for a in axes), reverse=True), x),
}  # fmt: skip


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


def result_dtype(call: NodeCall, place: int = 0) -> torch.dtype:
    """The element type that the file says of a result."""
    return torch_dtype(call.get("results")[place][1] or "uint8")


tflite("CUMSUM")(cumsum)


@tflite("TOPK_V2")
def top_k(call: NodeCall) -> Any:
    values, places = torch.topk(call.tensor(), int(call.values(1)[0]))
    return values, places.to(result_dtype(call, 1))


# Pooling


_POOLS: dict[str, Any] = {"AVERAGE_POOL_2D": F.avg_pool2d, "MAX_POOL_2D": F.max_pool2d, "L2_POOL_2D": F.lp_pool2d}


@tflite(*_POOLS, has_values=False)
def pool(call: NodeCall) -> torch.Tensor:
    kernel = [int(call.get("filter_h", 0)), int(call.get("filter_w", 0))]
    strides, ones = _windows(call, "hw")
    if min(kernel) < 1:
        raise call.refusal(f"its window is {kernel}")
    outside = float("-inf") if call.node.op == "MAX_POOL_2D" else 0.0
    x, padding = _padded(call, channels_second(rank(call, call.tensor(), 4)), kernel, strides, ones, outside)
    if x.dtype == torch.uint8:  # for which torch has no average on shapes alone
        with _disable_current_modes():
            x = x.view(torch.int8)
    if call.node.op == "L2_POOL_2D":
        found = F.lp_pool2d(
            F.pad(x, [pad for pad in reversed(padding) for _ in (0, 1)]), 2.0, (kernel[0], kernel[1]), strides
        )
    else:
        found = _POOLS[call.node.op](x, kernel, strides, padding)
    if call.tensor().dtype == torch.uint8:
        with _disable_current_modes():
            found = found.view(torch.uint8)
    return activated(call, channels_last(found))


# Recurrent layers: each matrix is multiplied once per step and row


_recurrent = define(
    "recurrent(Tensor x, Tensor?[] weights, str cell, int[] shape) -> Tensor",
    lambda x, weights, cell, shape: torch.empty(shape, dtype=x.dtype, device="meta"),
)


@cost_rule("onnx_file::recurrent", kind="recurrent")
def recurrent_cost(out: TensorInfo, x: TensorInfo, weights: Any, cell: str, shape: Any) -> Work:
    """Every matrix once per row and step; sums of gates, biases and activations as in torch's own cells."""
    rows = prod(x.shape[:-1])
    given = [one for one in weights if isinstance(one, TensorInfo)]
    matrices = [one for one in given if len(one.shape) == 2]
    macs = rows * sum(one.elements for one in matrices)
    biases = sum(one.elements for one in given if len(one.shape) == 1)
    if cell == "SVDF" or not matrices:  # a filter over features, one over time, then their sum
        return Work(macs=macs, other_ops=rows * biases)
    units = matrices[0].shape[0]
    sums = sum(one.shape[0] for one in matrices if one.shape[0] == units) // 2 + biases
    cells = units * (2 if cell.startswith("BI") else 1)
    return Work(macs=macs, other_ops=rows * (sums + cells * (LSTM_OPS if cell.endswith("LSTM") else RNN_OPS)))


@tflite("UNIDIRECTIONAL_SEQUENCE_LSTM", "BIDIRECTIONAL_SEQUENCE_LSTM", "UNIDIRECTIONAL_SEQUENCE_RNN", "RNN", "SVDF",
        has_values=False)  # fmt: skip
def recurrent(call: NodeCall) -> Any:
    x = call.tensor()
    # States that are kept between runs are read and written, and not multiplied by.
    weights = [one for one in call.inputs[1:] if one is None or isinstance(one, torch.nn.Parameter)]
    widths = [sizes[-1] for sizes, _ in call.get("results")]
    made = _recurrent(x, weights, call.node.op, [*x.shape[:-1], sum(widths)])
    return torch.split(made, widths, -1) if len(widths) > 1 else made
