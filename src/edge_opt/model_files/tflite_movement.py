"""Operators of TFLite that move, shape, quantize and make tensors, in torch's words."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from edge_opt.cost.products import DEQUANTIZE_OPS, QUANTIZE_OPS
from edge_opt.cost.rules import Work, cost_rule
from edge_opt.model_files.node_call import NodeCall, define, filled, one_hot, operators, unrecorded
from edge_opt.model_files.onnx_movement import squeeze, tile
from edge_opt.model_files.onnx_quantized import dequantize_op, requantized
from edge_opt.model_files.tflite_arithmetic import (
    activated,
    channels_last,
    picture,
    result_dtype,
    tflite,
)

_rearranged = define(
    "rearranged(Tensor x, int[] shape) -> Tensor",
    lambda x, shape: torch.empty(shape, dtype=x.dtype, device="meta"),
)


# Elements are copied to other places; as many are read as are written, at most.
cost_rule("onnx_file::rearranged", kind="movement")(lambda out, x, _: Work(bytes_read=min(x.nbytes, out.nbytes)))


def whole(call: NodeCall, index: int) -> list[int]:
    return [int(value) for value in call.values(index)]


# Steps between floats and integers


@tflite("DEQUANTIZE", has_values=False)
def dequantize(call: NodeCall) -> torch.Tensor:
    x = call.tensor()
    if x.is_floating_point():  # halves that are widened
        return x.to(result_dtype(call))
    return dequantize_op(x, None, None, result_dtype(call))


_fake_quantized = define("fake_quantized(Tensor x) -> Tensor", lambda x: torch.empty_like(x))


# To steps and back, where each element stands.
cost_rule("onnx_file::fake_quantized", kind="quantization")(
    lambda out, x: Work(other_ops=out.elements * (QUANTIZE_OPS + DEQUANTIZE_OPS))
)


@tflite("BITCAST")
def bitcast(call: NodeCall) -> torch.Tensor:
    """View the same bits as another type: narrower elements get a new dimension, wider ones take up the last."""
    x, wanted = call.tensor(), result_dtype(call)
    if wanted.itemsize < x.dtype.itemsize:
        return x.unsqueeze(-1).view(wanted)
    return x.view(wanted).squeeze(-1) if wanted.itemsize > x.dtype.itemsize else x.view(wanted)


# Shapes


@tflite("RESHAPE")
def reshape(call: NodeCall) -> torch.Tensor:
    x = call.tensor()
    if len(call.constant_values) > 1 and call.constant_values[1] is not None:
        return x.reshape(whole(call, 1))
    sizes = list(call.get("new_shape", ()))
    if not sizes and (call.has(1) or x.numel() != 1):
        sizes = list(call.get("results")[0][0])
    return x.reshape(sizes)


# Parts and wholes


@tflite("SPLIT")
def split(call: NodeCall) -> Any:
    x, pieces = call.tensor(1), len(call.node.outputs)
    axis = call.from_front(whole(call, 0)[0], x.dim())
    if not pieces or x.shape[axis] % pieces:
        raise call.error(f"its input {tuple(x.shape)} cannot be cut into {pieces}")
    return torch.split(x, x.shape[axis] // pieces, axis)


@tflite("SPLIT_V")
def split_by_sizes(call: NodeCall) -> Any:
    x, sizes = call.tensor(), whole(call, 1)
    axis = call.from_front(whole(call, 2)[0], x.dim())
    rest = x.shape[axis] - sum(size for size in sizes if size >= 0)
    return torch.split(x, [rest if size < 0 else size for size in sizes], axis)


@tflite("SLICE")
def part(call: NodeCall) -> torch.Tensor:
    """Return a box of the input; where it begins may depend on values, how large it is may not."""
    x = call.tensor()
    begins = whole(call, 1) if call.constant_values[1] is not None else [0] * x.dim()
    for axis, (begin, size) in enumerate(zip(begins, whole(call, 2), strict=True)):
        x = x.narrow(axis, begin, x.shape[axis] - begin if size < 0 else size)
    return x


@tflite("STRIDED_SLICE")
def strided_slice(call: NodeCall) -> torch.Tensor:
    x = call.tensor()
    begins, ends, steps = (whole(call, number) for number in (1, 2, 3))
    masks = {name: int(call.get(f"{name}_mask", 0)) for name in ("begin", "end", "ellipsis", "new_axis", "shrink_axis")}
    new = sum(bool(masks["new_axis"] >> number & 1) for number in range(len(begins)))
    picks: list[Any] = []
    for number, (begin, end, step) in enumerate(zip(begins, ends, steps, strict=True)):
        bit = 1 << number
        if masks["ellipsis"] & bit:
            picks.append(Ellipsis)
        elif masks["new_axis"] & bit:
            picks.append(None)
        elif masks["shrink_axis"] & bit:
            picks.append(begin)
        else:
            end = begin + end if call.get("offset") else end
            picks.append(slice(None if masks["begin"] & bit else begin, None if masks["end"] & bit else end, step))
    if len(picks) - new > x.dim():
        raise call.error(f"it cuts {len(picks)} dimensions of {tuple(x.shape)}")
    backwards = any(isinstance(pick, slice) and pick.step < 0 for pick in picks)
    if not backwards:
        return x[tuple(picks)]
    # torch has no steps back; NumPy has, and tells the shape of the result without its values.
    return _rearranged(x, list(np.broadcast_to(np.int8(0), x.shape)[tuple(picks)].shape))


@tflite("GATHER")
def gather(call: NodeCall) -> torch.Tensor:
    x, index = call.tensor(), call.tensor(1)
    axis = call.from_front(call.get("axis", 0), x.dim())
    batch = int(call.get("batch_dims", 0))
    if batch:
        batch = batch + index.dim() if batch < 0 else batch
        return _rearranged(x, [*x.shape[:axis], *index.shape[batch:], *x.shape[axis + 1 :]])
    picked = torch.index_select(x, axis, index.reshape(-1).to(torch.int64) if index.dtype != torch.int32
                                else index.reshape(-1))  # fmt: skip
    return picked if index.dim() == 1 else picked.reshape(*x.shape[:axis], *index.shape, *x.shape[axis + 1 :])


@tflite("EMBEDDING_LOOKUP")
def embedding(call: NodeCall) -> torch.Tensor:
    """Return one row of the table for each number; of a narrow table the rows are widened."""
    ids, table = call.tensor(), call.tensor(1)
    wanted = result_dtype(call)
    rows = torch.index_select(table, 0, ids.reshape(-1)).reshape(*ids.shape, *table.shape[1:])
    if rows.dtype == wanted:
        return rows
    return dequantize_op(rows, None, None, wanted)


@tflite("GATHER_ND")
def gather_nd(call: NodeCall) -> torch.Tensor:
    x, index = call.tensor(), call.tensor(1)
    depth = index.shape[-1]
    if depth > x.dim():
        raise call.error(f"it looks {depth} dimensions into {tuple(x.shape)}")
    return _rearranged(x, [*index.shape[:-1], *x.shape[depth:]])


@tflite("SELECT", "SELECT_V2", "WHERE")
def select(call: NodeCall) -> torch.Tensor:
    if not call.has(1):
        raise call.error("how many places it finds depends on values that are known only when the model runs")
    condition, first, second = call.tensor(), call.tensor(1), call.tensor(2)
    if condition.dim() < first.dim() and call.node.op == "SELECT":
        condition = condition.reshape(-1, *[1] * (first.dim() - 1))
    return torch.where(condition, first, second)


@tflite("PAD", "PADV2", "MIRROR_PAD")
def pad(call: NodeCall) -> torch.Tensor:
    x, sizes = call.tensor(), whole(call, 1)
    if len(sizes) != 2 * x.dim():
        raise call.error(f"it has {len(sizes)} sizes for {x.dim()} dimensions")
    pairs = list(zip(sizes[::2], sizes[1::2], strict=True))
    grown = tuple(size + before + after for size, (before, after) in zip(x.shape, pairs, strict=True))
    if call.node.op == "MIRROR_PAD":
        return _rearranged(x, list(grown))
    value = call.values(2)[0] if call.has(2) and call.device == "cpu" else 0
    return F.pad(x, [size for pair in reversed(pairs) for size in pair], value=value)


@tflite("SPACE_TO_BATCH_ND", "BATCH_TO_SPACE_ND")
def batches(call: NodeCall) -> torch.Tensor:
    """Turn blocks of a picture into samples, padded before; or samples into blocks, cropped afterwards."""
    x, block, edges = call.tensor(), whole(call, 1), whole(call, 2)
    count = len(block)
    if len(edges) != 2 * count or x.dim() < count + 1 or min(block, default=1) < 1:
        raise call.error(f"its blocks {block} do not fit its input {tuple(x.shape)}")
    spare = [edges[2 * axis] + edges[2 * axis + 1] for axis in range(count)]
    times = prod(block)
    if call.node.op == "SPACE_TO_BATCH_ND":
        sizes = [(x.shape[1 + axis] + spare[axis]) // block[axis] for axis in range(count)]
        sizes = [x.shape[0] * times, *sizes, *x.shape[1 + count :]]
    else:
        sizes = [x.shape[1 + axis] * block[axis] - spare[axis] for axis in range(count)]
        sizes = [x.shape[0] // times, *sizes, *x.shape[1 + count :]]
    return _rearranged(x, sizes)


@tflite("RESIZE_BILINEAR", "RESIZE_NEAREST_NEIGHBOR", has_values=False)
def resize(call: NodeCall) -> torch.Tensor:
    x, sizes = picture(call), whole(call, 1)
    mode = "bilinear" if call.node.op == "RESIZE_BILINEAR" else "nearest"
    return channels_last(F.interpolate(x, size=sizes, mode=mode))


# Variables that are kept between runs, under a handle


@tflite("VAR_HANDLE")
def handle(call: NodeCall) -> torch.Tensor:
    with unrecorded():
        return torch.empty((), dtype=torch.uint8, device="meta")


# Operators that are one expression of torch

operators(
    {
        "CAST": lambda call: call.tensor().to(result_dtype(call)),
        "BROADCAST_TO": lambda call: call.tensor().expand(whole(call, 1)),
        "SCATTER_ND": lambda call: _rearranged(call.tensor(1), whole(call, 2)),
        # A part is replaced or reversed, where the input is not changed in place.
        "DYNAMIC_UPDATE_SLICE": lambda call: _rearranged(call.tensor(), list(call.tensor().shape)),
        "REVERSE_SEQUENCE": lambda call: _rearranged(call.tensor(), list(call.tensor().shape)),
        "RANDOM_UNIFORM": lambda call: torch.rand(whole(call, 0), device=call.device),
        "RANDOM_STANDARD_NORMAL": lambda call: torch.rand(whole(call, 0), device=call.device),
        "READ_VARIABLE": lambda call: call.empty(tuple(call.get("results")[0][0]), result_dtype(call)),
        "TILE": tile,
        "SQUEEZE": squeeze,
        "SHAPE": lambda call: torch.tensor(list(call.tensor().shape), dtype=result_dtype(call)),
        "RANK": lambda call: torch.tensor(call.tensor().dim(), dtype=torch.int32),
        "EXPAND_DIMS": lambda call: call.tensor().unsqueeze(whole(call, 1)[0]),
        "TRANSPOSE": lambda call: call.tensor().permute(whole(call, 1)),
        "CONCATENATION": lambda call: activated(call, torch.cat(call.inputs, int(call.get("axis", 0)))),
        "PACK": lambda call: torch.stack(call.inputs, int(call.get("axis", 0))),
        "UNPACK": lambda call: call.tensor().unbind(int(call.get("axis", 0))),
        "REVERSE_V2": lambda call: call.tensor().flip(whole(call, 1)),
        "FILL": lambda call: filled(call, call.values(0), call.tensor(1).dtype, lambda: call.values(1)[0]),
        "ZEROS_LIKE": lambda call: torch.zeros_like(call.tensor()),
        "ONE_HOT": lambda call: one_hot(call, call.tensor(), call.tensor(2), call.tensor(3)),
        "ASSIGN_VARIABLE": lambda call: (),
    },
    "tflite:",
)


operators(
    {
        "QUANTIZE": lambda call: requantized(call.tensor(), result_dtype(call)),
        "SPACE_TO_DEPTH": lambda call: channels_last(F.pixel_unshuffle(picture(call), int(call.get("block", 1)))),
        "DEPTH_TO_SPACE": lambda call: channels_last(F.pixel_shuffle(picture(call), int(call.get("block", 1)))),
        "FAKE_QUANT": lambda call: _fake_quantized(call.tensor()),
    },
    "tflite:",
    has_values=False,
)
