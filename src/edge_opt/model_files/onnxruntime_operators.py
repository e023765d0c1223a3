"""Attention, and operators that ONNX Runtime fuses or adds: embeddings with a norm, weights of 4 and 2 bits."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from edge_opt.cost.products import DEQUANTIZE_OPS
from edge_opt.cost.rules import Work, cost_rule
from edge_opt.model_files.node_call import (
    NodeCall,
    byte_softmax_op,
    define,
    operator,
    operators,
    recurrent_op,
    unrecorded,
)
from edge_opt.model_files.onnx_quantized import dequantize_op, integer_product
from edge_opt.records.costs import TensorInfo

# Weights of a few bits


_narrow_product = define(
    "narrow_product(Tensor x, Tensor weight, Tensor scale, Tensor? zero, Tensor? bias) -> Tensor",
    lambda x, weight, scale, zero, bias: x.new_empty((*x.shape[:-1], weight.shape[0])),
)


@cost_rule("onnx_file::narrow_product", kind="matmul")
def narrow_product_cost(out: TensorInfo, x: TensorInfo, weight: TensorInfo, *others: Any) -> Work:
    """One MAC per output and inner element; each weight is widened once, where it is multiplied."""
    has_bias = len(others) > 2 and isinstance(others[2], TensorInfo)
    return Work(
        macs=out.elements * x.shape[-1],
        other_ops=weight.elements * DEQUANTIZE_OPS + (out.elements if has_bias else 0),
    )


@operator("com.microsoft:MatMulNBits", has_values=False)
def matmul_of_few_bits(call: NodeCall) -> torch.Tensor:
    x, weight = call.tensor(), call.tensor(1)
    if weight.dim() != 2 or x.shape[-1] != weight.shape[1]:
        raise call.error(f"its input {tuple(x.shape)} does not fit {call.get('N')}x{call.get('K')} weights")
    return _narrow_product(x, weight, call.tensor(2), call.optional(3), call.optional(5))


@operator("com.microsoft:GatherBlockQuantized", has_values=False)
def gather_of_few_bits(call: NodeCall) -> torch.Tensor:
    """Return rows of a quantized table, widened; of weights that are packed as bytes, one byte holds several."""
    table, index, scale = call.tensor(), call.tensor(1), call.tensor(2)
    axis = int(call.get("gather_axis", 0)) % table.dim()
    packed = 8 // int(call.get("bits", 4)) if table.dtype == torch.uint8 else 1
    rows = torch.index_select(table, axis, index.reshape(-1))
    shape = [*table.shape[:axis], *index.shape, *table.shape[axis + 1 :]]
    if packed > 1:
        return _unpacked(rows.reshape(shape), [*shape[:-1], shape[-1] * packed], scale.dtype)
    return dequantize_op(rows.reshape(shape), None, None, scale.dtype)


_unpacked = define(
    "unpacked(Tensor x, int[] shape, ScalarType dtype) -> Tensor",
    lambda x, shape, dtype: torch.empty(shape, dtype=dtype, device="meta"),
)


# Attention


def _turned(x: torch.Tensor, width: int) -> torch.Tensor:
    """Turn pairs: each element times a cosine, plus its neighbour times a sine. The rest passes as it is."""
    if not 0 < width < x.shape[-1]:
        return (x * 1.0).add_(x * 1.0)
    part = x[..., :width]
    return torch.cat([(part * 1.0).add_(part * 1.0), x[..., width:]], -1)


def _attended(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool, mask: Any = None, is_flat: bool = True
) -> torch.Tensor:
    """Run attention; where `is_flat`, the heads of the result stand side by side in its last dimension."""
    is_grouped = query.shape[1] != key.shape[1]
    result = F.scaled_dot_product_attention(query, key, value, mask, is_causal=is_causal, enable_gqa=is_grouped)
    return result.transpose(1, 2).reshape(result.shape[0], result.shape[2], -1) if is_flat else result


def _heads(x: torch.Tensor, count: int) -> torch.Tensor:
    return x.reshape(x.shape[0], x.shape[1], count, -1).transpose(1, 2)


@operator("Attention", "com.microsoft:MultiHeadAttention", has_values=False)
def attention(call: NodeCall) -> Any:
    """Run ONNX's attention, or the runtime's: heads in a dimension of their own, or side by side in the last."""
    query, key, value = call.tensor(), call.tensor(1), call.tensor(2)
    heads = int(call.get("q_num_heads", call.get("num_heads", 0)))
    is_standard = not call.node.domain
    if not is_standard and call.has(3):  # one bias for the three
        parts = torch.split(call.tensor(3), [x.shape[-1] if x.dim() == 3 else heads * x.shape[-1]
                                             for x in (query, key, value)])  # fmt: skip
        query, key, value = (
            x + part if x.dim() == 3 else x + part.reshape(heads, 1, -1)
            for x, part in zip((query, key, value), parts, strict=True)
        )
    is_flat = query.dim() == 3
    if is_flat:
        if not heads:
            raise call.error("it does not say how many heads it has")
        own = int(call.get("kv_num_heads", heads))
        query, key, value = (
            _heads(x, count) if x.dim() == 3 else x for x, count in ((query, heads), (key, own), (value, own))
        )
    mask = call.optional(3) if is_standard else None
    past = 4 if is_standard else 6
    if call.has(past) and call.has(past + 1):
        key, value = torch.cat([call.tensor(past), key], 2), torch.cat([call.tensor(past + 1), value], 2)
    result = _attended(query, key, value, bool(call.get("is_causal", 0)) and mask is None, mask, is_flat)
    scores = call.empty((*query.shape[:3], key.shape[2]), query.dtype)
    return (result, key, value, scores)[: len(call.node.outputs)]


def _joined(call: NodeCall, projected: torch.Tensor, past: int) -> Any:
    """Run the attention of queries, keys and values that one product made side by side."""
    heads = int(call.get("num_heads", 0))
    sizes = [int(size) for size in call.get("qkv_hidden_sizes", ())] or [projected.shape[-1] // 3] * 3
    if heads < 1 or sum(sizes) != projected.shape[-1] or any(size % heads for size in sizes):
        raise call.error(f"its {heads} heads do not fit {projected.shape[-1]} columns of queries, keys and values")
    query, key, value = (_heads(part, heads) for part in torch.split(projected, sizes, -1))
    if call.has(past):
        old_key, old_value = call.tensor(past).unbind()
        key, value = torch.cat([old_key, key], 2), torch.cat([old_value, value], 2)
    result = _attended(query, key, value, bool(call.get("unidirectional", 0)) and not call.has(past))
    return (result, torch.stack([key, value])) if len(call.node.outputs) > 1 else result


@operator("com.microsoft:Attention", has_values=False)
def fused_attention(call: NodeCall) -> Any:
    """Run one product for queries, keys and values, then attention; the mask is applied inside."""
    x, weight = call.tensor(), call.tensor(1)
    projected = torch.matmul(x, weight)
    return _joined(call, projected + call.tensor(2) if call.has(2) else projected, 4)


@operator("com.microsoft:QAttention", has_values=False)
def quantized_attention(call: NodeCall) -> Any:
    """Run the same with a product of bytes; attention itself is of floats."""
    product = integer_product(call.tensor(), call.tensor(1), torch.int32)
    projected = dequantize_op(product, None, None, call.tensor(3).dtype)
    return _joined(call, projected + call.tensor(2) if call.has(2) else projected, 8)


@operator("com.microsoft:GroupQueryAttention", has_values=False)
def grouped_attention(call: NodeCall) -> Any:
    """Run attention whose queries share keys and values; earlier tokens come from a cache as long as the inputs say."""
    heads, own = int(call.get("num_heads", 0)), int(call.get("kv_num_heads", 0))
    if heads < 1 or own < 1:
        raise call.error("it does not say how many heads it has")
    query = call.tensor()
    if call.has(1):
        key, value = call.tensor(1), call.tensor(2)
    else:
        width = query.shape[-1] // (heads + 2 * own)
        query, key, value = torch.split(query, [heads * width, own * width, own * width], -1)
    query, key, value = _heads(query, heads), _heads(key, own), _heads(value, own)
    if call.get("do_rotary", 0):
        query, key = _turned(query, 0), _turned(key, 0)
    if call.has(3) and call.tensor(3).shape[2]:
        key, value = torch.cat([call.tensor(3), key], 2), torch.cat([call.tensor(4), value], 2)
    result = _attended(query, key, value, query.shape[2] == key.shape[2])
    return (result, key, value)[: len(call.node.outputs)]


# Parts of transformers and of pictures


@operator("com.microsoft:SkipLayerNormalization", "com.microsoft:SkipSimplifiedLayerNormalization", has_values=False)
def skip_layer_norm(call: NodeCall) -> Any:
    whole = call.tensor() + call.tensor(1)
    is_simple = "Simplified" in call.node.op
    bias = 3 if is_simple else 4
    if call.has(bias):
        whole = whole + call.tensor(bias)
    shape = [whole.shape[-1]]
    if is_simple:
        result = F.rms_norm(whole, shape, call.tensor(2))
    else:
        result = F.layer_norm(whole, shape, call.tensor(2), call.optional(3))
    return (result, None, None, whole)[: len(call.node.outputs)]


@operator("com.microsoft:GroupNorm", has_values=False)
def group_norm_channels_last(call: NodeCall) -> torch.Tensor:
    """Normalize groups of channels of channels-last images, followed by x * sigmoid(x) if the node says so."""
    is_last = bool(call.get("channels_last", 1))
    with unrecorded():
        x = call.tensor().movedim(-1, 1) if is_last else call.tensor()
    result = F.group_norm(x, int(call.get("groups", 1)), call.tensor(1), call.tensor(2))
    result = F.silu(result) if call.get("activation", 0) else result
    with unrecorded():
        return result.movedim(1, -1) if is_last else result


@operator("com.microsoft:EmbedLayerNormalization", has_values=False)
def embed_layer_norm(call: NodeCall) -> Any:
    """Add rows of two or three tables, and normalize the sum."""
    ids = call.tensor()
    words = F.embedding(ids, call.tensor(2))
    whole = words + call.tensor(3)[: ids.shape[1]]
    if call.has(1) and call.has(4):
        whole = whole + F.embedding(call.tensor(1), call.tensor(4))
    result = F.layer_norm(whole, [whole.shape[-1]], call.tensor(5), call.tensor(6))
    return (result, ids.new_empty((ids.shape[0],)), whole)[: len(call.node.outputs)]


@operator("com.microsoft:DynamicQuantizeLSTM", has_values=False)
def dynamic_lstm(call: NodeCall) -> Any:
    """Run an LSTM whose two matrices are of bytes; each is multiplied once per row and step."""
    x, inner, outer = call.tensor(), call.tensor(1), call.tensor(2)
    hidden = int(call.get("hidden_size", outer.shape[1]))
    directions = inner.shape[0]
    with unrecorded():
        # Here a matrix is (inputs, 4 · hidden); the cost rule takes one of (hidden, inputs) per gate, as TFLite has.
        weights = [
            gate for number in range(directions) for matrix in (inner, outer) for gate in matrix[number].t().chunk(4)
        ]
    weights += [call.tensor(3)[number] for number in range(directions) if call.has(3)]
    steps, batch = x.shape[:2]
    shape = [steps, directions, batch, hidden]
    cell = "BIDIRECTIONAL_LSTM" if directions == 2 else "LSTM"
    output = recurrent_op(x, weights, cell, shape)
    return (output, output[-1], output[-1])[: len(call.node.outputs)]


@operator("com.microsoft:QLinearReduceMean", has_values=False)
def byte_mean(call: NodeCall) -> torch.Tensor:
    x = call.tensor()
    axes = [int(axis) for axis in call.get("axes", ())] or list(range(x.dim()))
    return x.sum(axes, keepdim=bool(call.get("keepdims", 1)), dtype=x.dtype).mul_(1)


# Blocks of channels, as kernels for wide registers want them


@operator("com.microsoft.nchwc:ReorderInput", "com.microsoft.nchwc:ReorderOutput", has_values=False)
def reordered(call: NodeCall) -> torch.Tensor:
    x = call.tensor()
    if call.get("channels_last", 0) and call.node.op == "ReorderInput":
        x = x.permute(0, 3, 1, 2)
    channels = int(call.get("channels", 0)) or x.shape[1]
    result = x[:, :channels].clone()
    return result.permute(0, 2, 3, 1) if call.get("channels_last", 0) and call.node.op == "ReorderOutput" else result


# Operators that are one expression of torch

operators(
    {
        "com.microsoft:RotaryEmbedding": lambda call: _turned(call.tensor(), int(call.get("rotary_embedding_dim", 0))),
        "RotaryEmbedding": lambda call: _turned(call.tensor(), int(call.get("rotary_embedding_dim", 0))),
        "com.microsoft:QLinearSoftmax": lambda call: byte_softmax_op(call.tensor()),
        "com.microsoft:QLinearWhere": lambda call: torch.where(call.tensor(), call.tensor(1), call.tensor(4)),
    },
    has_values=False,
)
