"""Quantized operators of ONNX at their real widths: products of bytes, and steps between bytes and floats."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from edge_opt.cost.products import DEQUANTIZE_OPS, QUANTIZE_OPS
from edge_opt.cost.products import convolution as convolution_cost
from edge_opt.cost.rules import Work, cost_rule
from edge_opt.model_files.file_graph import FileNode
from edge_opt.model_files.node_call import (
    NodeCall,
    define,
    operator,
    operators,
    torch_dtype,
    unrecorded,
)
from edge_opt.model_files.onnx_arithmetic import convolution, evenly_padded, linear, pooled, windows
from edge_opt.model_files.onnx_reader import DTYPES

_OBSERVE_OPS = 2  # the smallest and the largest


def _as(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(x.shape, dtype=dtype, device="meta")


def _product_shape(a: torch.Tensor, b: torch.Tensor) -> tuple[int, ...]:
    if a.dim() < 2 or b.dim() < 2 or a.shape[-1] != b.shape[-2]:
        raise ValueError(f"{tuple(a.shape)} cannot be multiplied by {tuple(b.shape)}")
    around = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])  # type: ignore[no-untyped-call]
    return (*around, a.shape[-2], b.shape[-1])


_quantize = define(
    "quantize(Tensor x, Tensor? scale, Tensor? zero, ScalarType dtype) -> Tensor",
    lambda x, scale, zero, dtype: _as(x, dtype),
)
dequantize_op = define(
    "dequantize(Tensor x, Tensor? scale, Tensor? zero, ScalarType dtype) -> Tensor",
    lambda x, scale, zero, dtype: _as(x, dtype),
)
_quantize_dynamic = define(
    "quantize_dynamic(Tensor x) -> (Tensor, Tensor, Tensor)",
    lambda x: (_as(x, torch.uint8), x.new_empty(()), x.new_empty((), dtype=torch.uint8)),
)
integer_product = define(
    "integer_product(Tensor a, Tensor b, ScalarType dtype) -> Tensor",
    lambda a, b, dtype: torch.empty(_product_shape(a, b), dtype=dtype, device="meta"),
)
integer_convolution = define(
    "integer_convolution(Tensor x, Tensor weight, int[] stride, int[] padding, int[] dilation, int groups) -> Tensor",
    lambda x, weight, stride, padding, dilation, groups: _as(
        torch.ops.aten.convolution(x, weight, None, stride, padding, dilation, False, [0] * len(stride), groups),
        torch.int32,
    ),
)


# Multiply by 1 / scale, round, add the zero point, clamp on both sides.
cost_rule("onnx_file::quantize", kind="quantization")(lambda out, *_: Work(other_ops=out.elements * QUANTIZE_OPS))
# Subtract the zero point, multiply by the scale.
cost_rule("onnx_file::dequantize", "onnx_file::unpacked", kind="quantization")(
    lambda out, *_: Work(other_ops=out.elements * DEQUANTIZE_OPS)
)
# The smallest and the largest element are looked for first.
cost_rule("onnx_file::quantize_dynamic", kind="quantization")(
    lambda out, x: Work(other_ops=x.elements * (_OBSERVE_OPS + QUANTIZE_OPS))
)
# One MAC per output and inner element, on bytes.
cost_rule("onnx_file::integer_product", kind="matmul")(lambda out, a, b, _: Work(macs=out.elements * a.shape[-1]))
cost_rule("onnx_file::integer_convolution", kind="conv")(
    lambda out, x, weight, *_: convolution_cost(out, x, weight, None)
)


def dynamic_quantize_op(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Quantize floats to their own range; return bytes, scale and zero point."""
    return tuple(_quantize_dynamic(x))


def widened(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return weights as floats where they are multiplied with floats; as they are elsewhere."""
    if weight.is_floating_point() or not dtype.is_floating_point:
        return weight
    return dequantize_op(weight, None, None, dtype)


def requantized(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return floats or integers in steps of another size."""
    return _quantize(x, None, None, dtype)


@operator("QuantizeLinear", "com.microsoft:QuantizeLinear", has_values=False)
def quantize(call: NodeCall) -> torch.Tensor:
    x = call.tensor()
    output_dtype = torch_dtype(DTYPES.get(call.get("output_dtype", 0), "uint8"))
    dtype = call.tensor(2).dtype if call.has(2) else output_dtype
    if x.dtype == dtype:  # what made it has quantized it already
        return x
    return _quantize(x, call.optional(1), call.optional(2), dtype)


@operator("DequantizeLinear", "com.microsoft:DequantizeLinear", has_values=False)
def dequantize(call: NodeCall) -> torch.Tensor:
    return dequantize_op(call.tensor(), call.tensor(1), call.optional(2), call.tensor(1).dtype)


@operator("MatMulInteger", has_values=False)
def matmul_integer(call: NodeCall) -> torch.Tensor:
    a, b = call.tensor(), call.tensor(1)
    rows, columns = a if a.dim() > 1 else a.unsqueeze(0), b if b.dim() > 1 else b.unsqueeze(1)
    product = integer_product(rows, columns, torch.int32)
    product = product if b.dim() > 1 else product.squeeze(-1)
    return product if a.dim() > 1 else product.squeeze(-1 if b.dim() == 1 else -2)


@operator("com.microsoft:MatMulIntegerToFloat", "com.microsoft:DynamicQuantizeMatMul", has_values=False)
def matmul_to_float(call: NodeCall) -> torch.Tensor:
    """Multiply bytes and scale the product to floats where it is made; the dynamic one quantizes its input first."""
    a = call.tensor()
    is_dynamic = call.node.op == "DynamicQuantizeMatMul"
    if is_dynamic:
        a = dynamic_quantize_op(a)[0]
    product = integer_product(a, call.tensor(1), torch.int32)
    result = dequantize_op(product, None, None, torch.float32)
    bias = 4 if is_dynamic else 6
    return result + call.tensor(bias) if call.has(bias) else result


@operator("ConvInteger", has_values=False)
def conv_integer(call: NodeCall) -> torch.Tensor:
    x, weight = call.tensor(), call.tensor(1)
    strides, dilations, pads = windows(call, list(weight.shape[2:]))
    x, padding = evenly_padded(x, pads)
    return integer_convolution(x, weight, strides, padding, dilations, int(call.get("group", 1)))


@operator("com.microsoft:QGemm", has_values=False)
def qgemm(call: NodeCall) -> torch.Tensor:
    a, b = call.tensor(), call.tensor(3)
    a = a.t() if call.get("transA", 0) else a
    if call.has(7):
        return linear(a, b if call.get("transB", 0) else b.t(), call.optional(6))
    # Without a scale for them, the results are floats.
    product = integer_product(a, b.t() if call.get("transB", 0) else b, torch.int32)
    product = product + call.tensor(6) if call.has(6) else product
    return dequantize_op(product, None, None, call.tensor(1).dtype)


@operator("com.microsoft:QLinearGlobalAveragePool", "com.microsoft:QLinearAveragePool", has_values=False)
def qlinear_pool(call: NodeCall) -> Any:
    is_last = bool(call.get("channels_last", 0))
    with unrecorded():
        x = call.tensor().movedim(-1, 1) if is_last else call.tensor()
    result = pooled(call, call.node.op.removeprefix("QLinear"), x)
    with unrecorded():
        return result.movedim(1, -1) if is_last else result


# Runtimes run these on bytes where they stand between DequantizeLinear and QuantizeLinear.
_ON_BYTES = frozenset(
    "Conv ConvTranspose Gemm MatMul Add Mul Sub Relu Clip MaxPool AveragePool GlobalAveragePool Concat Reshape Flatten "
    "Transpose Squeeze Unsqueeze Slice Split Pad Resize".split()
)
_BEHIND = frozenset(("Relu", "Clip"))


def quantized_nodes(nodes: tuple[FileNode, ...], constants: frozenset[str], outputs: frozenset[str]) -> frozenset[int]:
    """Return indices of the nodes that a runtime runs on bytes: all their data come from DequantizeLinear, and all
    their results go to QuantizeLinear."""
    makers = {name: index for index, node in enumerate(nodes) for name in node.outputs if name}
    readers: dict[str, list[int]] = {}
    for index, node in enumerate(nodes):
        for name in node.inputs:
            readers.setdefault(name, []).append(index)
    quantized: set[int] = set()

    def is_bytes(name: str, index: int, node: FileNode) -> bool:
        maker = makers.get(name)
        if maker is not None and nodes[maker].op == "DequantizeLinear":
            return True
        if maker in quantized and node.op in _BEHIND:
            return True
        # Shapes, axes, limits: settings, not data.
        return (
            name in constants and index > 0 and node.op not in ("Conv", "Gemm", "MatMul", "Add", "Mul", "Sub", "Concat")
        )

    for index, node in enumerate(nodes):
        inputs = [(number, name) for number, name in enumerate(node.inputs) if name]
        if node.op in _ON_BYTES and not node.domain and inputs and all(is_bytes(name, n, node) for n, name in inputs):
            quantized.add(index)
    for index in sorted(quantized, reverse=True):
        ends = [reader for name in nodes[index].outputs for reader in readers.get(name, [])]
        is_kept = ends and not outputs.intersection(nodes[index].outputs) and all(
            nodes[end].op == "QuantizeLinear" or (end in quantized and nodes[end].op in _BEHIND) for end in ends
        )  # fmt: skip
        if not is_kept:
            quantized.discard(index)
    # Nodes after one that is not run on bytes are not run on bytes either.
    for index in sorted(quantized):
        node = nodes[index]
        first = makers.get(node.inputs[0])
        if first is not None and nodes[first].op != "DequantizeLinear" and first not in quantized:
            quantized.discard(index)
    return frozenset(quantized)


# Operators that are one expression of torch

operators(
    {
        "DynamicQuantizeLinear": lambda call: dynamic_quantize_op(call.tensor()),
        "QLinearConv": lambda call: convolution(call, call.tensor(), call.tensor(3), call.optional(8)),
        "QLinearMatMul": lambda call: torch.matmul(call.tensor(), call.tensor(3)),
        "com.microsoft:QLinearAdd": lambda call: torch.add(call.tensor(), call.tensor(3)),
        "com.microsoft:QLinearMul": lambda call: torch.mul(call.tensor(), call.tensor(3)),
        "com.microsoft:QLinearConcat": lambda call: torch.cat(call.inputs[2::3], int(call.get("axis", 0))),
        # Each byte is looked up in a table of 256 results, which counts as one operation.
        "com.microsoft:QLinearSigmoid": lambda call: F.relu(call.tensor()),
        "com.microsoft:QLinearLeakyRelu": lambda call: F.relu(call.tensor()),
    },
    has_values=False,
)
