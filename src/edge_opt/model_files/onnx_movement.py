"""Operators of ONNX that move, shape and make tensors, in torch's words."""

from __future__ import annotations

from math import floor, prod
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from edge_opt.model_files.file_graph import FileTensor
from edge_opt.model_files.node_call import (
    NodeCall,
    filled,
    numbers,
    one_hot,
    operator,
    operators,
    real_values,
    torch_dtype,
    unrecorded,
)
from edge_opt.model_files.onnx_reader import DTYPES

_MOST_PIECES = 100_000


@operator("Identity", "Optional", "ai.onnx.ml:ZipMap", "OptionalGetElement", "com.microsoft:MemcpyToHost")
def identity(call: NodeCall) -> Any:
    """Return the input: this node does nothing at inference."""
    return (call.inputs[0],)


@operator("Dropout")
def dropout(call: NodeCall) -> Any:
    """Return the input and a mask that drops nothing; before opset 12 the mask is inverted."""
    x = call.tensor()
    return (x, torch.full_like(x, call.opset >= 12, dtype=torch.bool)) if len(call.node.outputs) > 1 else x


@operator("Cast", "CastLike")
def cast(call: NodeCall) -> torch.Tensor:
    if call.node.op == "CastLike":
        return call.tensor().to(call.tensor(1).dtype)
    number = call.get("to", 1)
    return call.tensor().to(torch_dtype(DTYPES.get(number, "uint8")))


@operator("Shape")
def shape(call: NodeCall) -> torch.Tensor:
    return torch.tensor(list(call.tensor().shape)[call.get("start", 0) : call.get("end")], dtype=torch.int64)


@operator("Constant")
def constant(call: NodeCall) -> torch.Tensor:
    """Return a constant inside the graph: a tensor, or numbers as an attribute."""
    value = next(iter(call.attributes.values()), None)
    if isinstance(value, FileTensor):
        values = real_values(value) if call.device == "cpu" else None
        return call.empty(value.shape, torch_dtype(value.dtype)) if values is None else values
    if isinstance(value, str) or (isinstance(value, tuple) and value and isinstance(value[0], str)):
        return call.empty((len(value),) if isinstance(value, tuple) else (), torch.uint8)
    if not isinstance(value, (int, float, tuple)):
        raise call.error("it has no value that is understood")
    first = value[0] if isinstance(value, tuple) and value else value
    dtype = torch.float32 if isinstance(first, float) else torch.int64
    return torch.tensor(value, dtype=dtype, device=call.device)


@operator("ConstantOfShape")
def constant_of_shape(call: NodeCall) -> torch.Tensor:
    constant = call.get("value")
    is_given = isinstance(constant, FileTensor)
    dtype = torch_dtype(constant.dtype if is_given else "float32")
    known = real_values(constant) if is_given else None
    return filled(call, call.values(0), dtype, lambda: 0 if known is None else numbers(known)[0])


def _said_dtype(call: NodeCall, default: torch.dtype) -> torch.dtype:
    """Return the element type of the attribute `dtype`."""
    return torch_dtype(DTYPES[call.get("dtype")]) if call.get("dtype") in DTYPES else default


@operator("RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Bernoulli", "Multinomial")
def random(call: NodeCall) -> torch.Tensor:
    if call.node.op.endswith("Like") or call.node.op == "Bernoulli":
        x = call.tensor()
        wanted = _said_dtype(call, x.dtype)
        return torch.rand_like(x, dtype=wanted if wanted.is_floating_point else torch.float32).to(wanted)
    if call.node.op == "Multinomial":
        dims, wanted = (call.tensor().shape[0], int(call.get("sample_size", 1))), _said_dtype(call, torch.int32)
        return torch.rand(dims, device=call.device).to(wanted)
    dims, wanted = tuple(call.get("shape", ())), _said_dtype(call, torch.float32)
    return torch.rand(dims, dtype=wanted, device=call.device)


@operator("Reshape")
def reshape(call: NodeCall) -> torch.Tensor:
    x = call.tensor()
    dims = [int(dim) for dim in call.setting("shape", 1, ())]
    if not call.get("allowzero", 0):
        dims = [x.shape[axis] if dim == 0 and axis < x.dim() else dim for axis, dim in enumerate(dims)]
    return x.reshape(dims)


@operator("Flatten")
def flatten(call: NodeCall) -> torch.Tensor:
    x = call.tensor()
    axis = x.dim() if call.get("axis", 1) == x.dim() else call.axis(1)
    return x.reshape(prod(x.shape[:axis]), -1) if x.numel() else x.reshape(prod(x.shape[:axis]), prod(x.shape[axis:]))


@operator("Transpose")
def transpose(call: NodeCall) -> torch.Tensor:
    x, order = call.tensor(), call.get("perm", ())
    if order and len(order) != x.dim():
        raise call.error(f"it reorders {len(order):,} dimensions, and its input has {x.dim()}")
    return x.permute(list(order) or list(reversed(range(x.dim()))))


@operator("Squeeze")
def squeeze(call: NodeCall) -> torch.Tensor:
    axes = call.setting("axes", 1)
    return call.tensor().squeeze() if not axes else call.tensor().squeeze([int(axis) for axis in axes])


@operator("Unsqueeze")
def unsqueeze(call: NodeCall) -> torch.Tensor:
    x = call.tensor()
    axes = [int(axis) for axis in call.setting("axes", 1, ())]
    rank = x.dim() + len(axes)
    for axis in sorted(axis + rank if axis < 0 else axis for axis in axes):
        x = x.unsqueeze(axis)
    return x


@operator("Concat")
def concat(call: NodeCall) -> torch.Tensor:
    axis = call.axis(0)
    shapes = [tuple(call.tensor(index).shape) for index in range(len(call.inputs))]
    around = {(shape[:axis], shape[axis + 1 :]) for shape in shapes if shape != (0,)}
    if len(around) > 1:
        # torch would import its compiler to say so, which takes seconds.
        raise call.error(f"its inputs of {', '.join(map(str, shapes[:4]))} differ beside dimension {axis}")
    return torch.cat(call.inputs, axis)


@operator("Split")
def split(call: NodeCall) -> Any:
    x, axis = call.tensor(), call.axis(0)
    sizes = call.setting("split", 1)
    if sizes is None:
        count = int(call.get("num_outputs", len(call.node.outputs)))
        if count != len(call.node.outputs):
            raise call.error(f"it should make {count} pieces, and has {len(call.node.outputs)} results")
        piece = -(-x.shape[axis] // max(count, 1))
        sizes = [min(piece, max(x.shape[axis] - number * piece, 0)) for number in range(count)]
    return tuple(torch.split(x, [int(size) for size in sizes], axis))


@operator("Slice")
def slice_(call: NodeCall) -> torch.Tensor:
    x = call.tensor()
    starts, ends = call.setting("starts", 1, ()), call.setting("ends", 2, ())
    axes = call.setting("axes", 3) or list(range(len(starts)))
    steps = call.setting("steps", 4) or [1] * len(starts)
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        picked = range(x.shape[int(axis)])[slice(int(start), int(end), int(step))]
        if step > 0:
            x = x.narrow(int(axis), picked.start, picked.stop - picked.start if len(picked) else 0) if (
                step == 1 and len(picked)
            ) else x[(slice(None),) * (int(axis) % x.dim()) + (slice(int(start), int(end), int(step)),)]  # fmt: skip
        else:  # torch has no steps backwards: those that remain, turned round
            low, high = (picked[-1], picked[0] + 1) if picked else (0, 0)
            x = x.narrow(int(axis), low, high - low).flip(int(axis))
            x = x[(slice(None),) * (int(axis) % x.dim()) + (slice(None, None, -int(step)),)]
    return x


@operator("Gather")
def gather(call: NodeCall) -> torch.Tensor:
    """Return rows by their numbers: an embedding of a table of weights, else a selection."""
    x, index, axis = call.tensor(), call.tensor(1), call.axis(0)
    known = call.constant_values[1]
    if known is not None and known.dim() == 0:
        return x.select(axis, int(numbers(known)[0]))
    if call.device == "cpu":
        index = _from_front(index, x.shape[axis])
    if x.dim() == 2 and axis == 0 and x.is_floating_point():
        return F.embedding(index.to(torch.int64) if index.dtype not in (torch.int32, torch.int64) else index, x)
    rows = torch.index_select(x, axis, index.reshape(-1).to(torch.int64))
    return rows.reshape([*x.shape[:axis], *index.shape, *x.shape[axis + 1 :]])


def _from_front(index: torch.Tensor, size: int) -> torch.Tensor:
    """Return indices counted from the front; a negative index is counted from behind."""
    return torch.where(index < 0, index + size, index)


@operator("GatherElements")
def gather_elements(call: NodeCall) -> torch.Tensor:
    x, index, axis = call.tensor(), call.tensor(1), call.axis(0)
    return torch.gather(x, axis, _from_front(index, x.shape[axis]) if call.device == "cpu" else index)


@operator("GatherND")
def gather_nd(call: NodeCall) -> torch.Tensor:
    x, index = call.tensor(), call.tensor(1)
    batch = int(call.get("batch_dims", 0))
    depth = index.shape[-1]
    with unrecorded():  # each element of a batch looks into its own
        rows = [
            torch.arange(x.shape[axis], device=call.device).reshape([-1, *[1] * (index.dim() - 2 - axis)])
            for axis in range(batch)
        ]
    return x[(*rows, *(index[..., axis] for axis in range(depth)))]


@operator("ScatterElements", "Scatter")
def scatter_elements(call: NodeCall) -> torch.Tensor:
    x, index, updates = call.tensor(), call.tensor(1), call.tensor(2)
    index = _from_front(index, x.shape[call.axis(0)]) if call.device == "cpu" else index
    how = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}.get(call.get("reduction", "none"))
    if how:
        return torch.scatter_reduce(x, call.axis(0), index, updates, how)
    return torch.scatter(x, call.axis(0), index, updates)


@operator("ScatterND")
def scatter_nd(call: NodeCall) -> torch.Tensor:
    x, index, updates = call.tensor(), call.tensor(1), call.tensor(2)
    positions: list[torch.Tensor | None] = [index[..., axis] for axis in range(index.shape[-1])]
    how = {"mul": "prod", "max": "amax", "min": "amin"}.get(call.get("reduction", "none"))
    if how and call.device == "cpu":
        depth = index.shape[-1]
        steps = [prod(x.shape[axis + 1 : depth]) for axis in range(depth)]
        parts = [_from_front(index[..., axis], x.shape[axis]) * step for axis, step in enumerate(steps)]
        flat = x.reshape(prod(x.shape[:depth]), -1)
        rows = updates.reshape(-1, flat.shape[1])
        at = torch.stack(parts).sum(0).reshape(-1, 1).expand_as(rows)
        return torch.scatter_reduce(flat, 0, at, rows, how).reshape(x.shape)
    return torch.index_put(x, positions, updates, accumulate=call.get("reduction", "none") == "add")


@operator("Expand")
def expand(call: NodeCall) -> torch.Tensor:
    x, wanted = call.tensor(), [int(dim) for dim in call.values(1)]
    rank = max(x.dim(), len(wanted))
    sizes = zip([1] * (rank - x.dim()) + list(x.shape), [1] * (rank - len(wanted)) + wanted, strict=True)
    return x.expand([want if size == 1 else size for size, want in sizes])


@operator("Tile")
def tile(call: NodeCall) -> torch.Tensor:
    return call.tensor().repeat([int(count) for count in call.values(1)])


@operator("Pad")
def pad(call: NodeCall) -> torch.Tensor:
    x = call.tensor()
    pads = [int(size) for size in call.setting("pads", 1, ())]
    axes = [call.from_front(axis, x.dim()) for axis in call.setting("axes", 3) or range(x.dim())]
    count = len(axes)
    each = {axis: (pads[number], pads[number + count]) for number, axis in enumerate(axes)}
    mode = {"edge": "replicate", "reflect": "reflect", "wrap": "circular"}.get(call.get("mode", "constant"), "constant")
    order = [size for axis in reversed(range(x.dim())) for size in each.get(axis, (0, 0))]
    if not any(order):
        return x
    if mode != "constant" and call.device == "cpu":
        kept = F.pad(x, [min(size, 0) for size in order])
        pairs = [tuple(max(size, 0) for size in each.get(axis, (0, 0))) for axis in range(x.dim())]
        return torch.from_numpy(np.pad(kept.numpy(), pairs, mode=call.get("mode")))
    if mode != "constant":  # torch pads the last dimensions only, and wants no word on the others
        count = x.dim() - min(axis for axis, sides in each.items() if any(sides))
        if (x.dim(), count) in _PADDED:
            return F.pad(x, order[: 2 * count], mode=mode)
    value = call.number("value", 2, 0) if call.device == "cpu" else 0
    return F.pad(x, order, value=value)


# Dimensions of a tensor, and how many of the last ones torch pads with its own elements.
_PADDED = frozenset(((2, 1), (3, 1), (3, 2), (4, 2), (4, 3), (5, 3)))


def _new_sizes(call: NodeCall, x: torch.Tensor) -> list[int]:
    """Return the dimensions after a Resize, which gives them as they are or as factors, of all axes or of some."""
    scales_input = 2 if call.node.op == "Resize" and call.opset >= 11 else 1
    axes = [call.from_front(axis, x.dim()) for axis in call.get("axes", ())] or list(range(x.dim()))
    before = [x.shape[axis] for axis in axes]
    has_sizes = bool(scales_input == 2 and call.has(3) and call.values(3))
    new_sizes = call.values(3) if has_sizes else call.setting("scales", scales_input, ())
    if len(new_sizes) != len(axes):
        raise call.error(f"it gives {len(new_sizes)} sizes for {len(axes)} dimensions")
    if has_sizes:
        choose = {"not_larger": min, "not_smaller": max}.get(call.get("keep_aspect_ratio_policy", "stretch"))
        if choose is not None:
            factor = choose(new / old for new, old in zip(new_sizes, before, strict=True))
            new_sizes = [floor(factor * old + 0.5) for old in before]
    else:  # runtimes multiply in single precision, where 10 times 0.7 is 7
        new_sizes = [np.float32(old) * np.float32(scale) for old, scale in zip(before, new_sizes, strict=True)]
    shape = list(x.shape)
    for axis, size in zip(axes, new_sizes, strict=True):
        shape[axis] = int(size)
    return shape


@operator("Resize", "Upsample", has_values=False)
def resize(call: NodeCall) -> torch.Tensor:
    """Interpolate between elements.

    Torch resizes the dimensions behind the first two, so those that change are viewed there.
    """
    x = call.tensor()
    wanted = _new_sizes(call, x)
    changed = [axis for axis, size in enumerate(x.shape) if wanted[axis] != size]
    if not changed:
        return x
    others = [axis for axis in range(x.dim()) if axis not in changed]
    while len(others) > 2:
        changed.append(others.pop())
    changed.sort()
    names = {1: "linear", 2: "bilinear", 3: "trilinear"}
    mode = {"nearest": "nearest", "linear": names.get(len(changed), ""), "cubic": "bicubic"}.get(
        call.get("mode", "nearest"), ""
    )
    if not mode or len(changed) not in names or (mode == "bicubic" and len(changed) != 2):
        raise call.error(f"it resizes {len(changed)} dimensions in the mode {call.get('mode')!r}")
    order = [*others, *changed]
    with unrecorded():
        seen = x.permute(order)
        for _ in range(2 - len(others)):
            seen = seen.unsqueeze(0)
    align = None if mode == "nearest" else call.get("coordinate_transformation_mode") == "align_corners"
    resized = F.interpolate(seen, size=[wanted[axis] for axis in changed], mode=mode, align_corners=align)
    with unrecorded():
        resized = resized.reshape([wanted[axis] for axis in order])
        return resized.permute([order.index(axis) for axis in range(x.dim())])


@operator("Trilu")
def trilu(call: NodeCall) -> torch.Tensor:
    diagonal = int(call.values(1)[0]) if call.has(1) else 0
    return torch.triu(call.tensor(), diagonal) if call.get("upper", 1) else torch.tril(call.tensor(), diagonal)


@operator("OneHot")
def one_hot_of_indices(call: NodeCall) -> torch.Tensor:
    index = call.tensor()
    off, on = call.tensor(2).unbind()
    return one_hot(call, _from_front(index, int(call.values(1)[0])) if call.device == "cpu" else index, on, off)


@operator("ai.onnx.ml:ArrayFeatureExtractor")
def array_feature(call: NodeCall) -> torch.Tensor:
    features = torch.index_select(call.tensor(), -1, call.tensor(1).reshape(-1).to(torch.int64))
    return features.reshape(1, -1) if features.dim() == 1 else features


# Sequences: lists of tensors


@operator("SequenceInsert", has_values=False)
def sequence_insert(call: NodeCall) -> Any:
    items = list(call.inputs[0])
    items.insert(int(call.values(2)[0]) if call.has(2) else len(items), call.inputs[1])
    return (items,)


@operator("ConcatFromSequence")
def concat_sequence(call: NodeCall) -> torch.Tensor:
    items, axis = call.inputs[0], int(call.get("axis", 0))
    return torch.stack(items, axis) if call.get("new_axis", 0) else torch.cat(items, axis)


@operator("SplitToSequence", has_values=False)
def split_sequence(call: NodeCall) -> Any:
    x, axis = call.tensor(), call.axis(0)
    sizes = [int(size) for size in call.values(1)] if call.has(1) else [1] * min(x.shape[axis], _MOST_PIECES)
    is_one_size = call.has(1) and call.tensor(1).dim() == 0
    pieces = torch.split(x, sizes[0] if is_one_size else sizes, axis)
    is_dropped = not call.has(1) and not call.get("keepdims", 1)
    return ([piece.squeeze(axis) if is_dropped else piece for piece in pieces],)


# Operators that are one expression of torch

operators(
    {
        "Size": lambda call: torch.tensor(call.tensor().numel(), dtype=torch.int64),
        "SequenceAt": lambda call: call.inputs[0][int(call.values(1)[0])],
    },
)


operators(
    {
        "EyeLike": lambda call: torch.zeros_like(call.tensor(), dtype=_said_dtype(call, call.tensor().dtype)),
        "DepthToSpace": lambda call: F.pixel_shuffle(call.tensor(), int(call.get("blocksize", 1))),
        "SpaceToDepth": lambda call: F.pixel_unshuffle(call.tensor(), int(call.get("blocksize", 1))),
        "ReverseSequence": lambda call: call.tensor().flip(int(call.get("time_axis", 0))),
        "SequenceConstruct": lambda call: ([*call.inputs],),
        "SequenceEmpty": lambda call: ([],),
    },
    has_values=False,
)
