"""Operators of ONNX that move, shape and make tensors, in torch's words."""

from __future__ import annotations

from math import ceil, prod
from typing import Any

import torch
import torch.nn.functional as F

from edge_opt.model_files.file_records import FileTensor
from edge_opt.model_files.graph_call import MOST_ELEMENTS, Call, numbers, operator, real_values, torch_dtype
from edge_opt.model_files.onnx_file import DTYPES

_MOST_PIECES = 100_000


@operator("Identity", "Dropout", "Optional", "ai.onnx.ml:ZipMap", "OptionalGetElement", "com.microsoft:MemcpyToHost")
def identity(call: Call) -> Any:
    """Nothing happens here when a model is used; the mask of a dropout has no reader then."""
    return (call.inputs[0], None)[: len(call.node.outputs)]


@operator("Cast", "CastLike")
def cast(call: Call) -> torch.Tensor:
    if call.node.op == "CastLike":
        return call.tensor().to(call.tensor(1).dtype)
    number = call.get("to", 1)
    return call.tensor().to(torch_dtype(DTYPES.get(number, "uint8")))


@operator("Shape")
def shape(call: Call) -> torch.Tensor:
    return torch.tensor(list(call.tensor().shape)[call.get("start", 0) : call.get("end")], dtype=torch.int64)


@operator("Size")
def size(call: Call) -> torch.Tensor:
    return torch.tensor(call.tensor().numel(), dtype=torch.int64)


@operator("Constant")
def constant(call: Call) -> torch.Tensor:
    """A constant inside the graph: a tensor, or numbers as an attribute."""
    found = next(iter(call.attributes.values()), None)
    if isinstance(found, FileTensor):
        values = real_values(found) if call.device == "cpu" else None
        return call.empty(found.shape, torch_dtype(found.dtype)) if values is None else values
    if isinstance(found, str) or (isinstance(found, tuple) and found and isinstance(found[0], str)):
        return call.empty((len(found),) if isinstance(found, tuple) else (), torch.uint8)
    if not isinstance(found, (int, float, tuple)):
        raise call.refusal("it has no value that is understood")
    first = found[0] if isinstance(found, tuple) and found else found
    dtype = torch.float32 if isinstance(first, float) else torch.int64
    return torch.tensor(found, dtype=dtype, device=call.device)


@operator("ConstantOfShape")
def constant_of_shape(call: Call) -> torch.Tensor:
    value = call.constant()
    dims = tuple(int(dim) for dim in call.values(0))
    made = call.empty(dims, torch_dtype(value.dtype if value else "float32"))
    known = None if value is None else real_values(value)
    if call.device == "cpu":
        made.fill_(0 if known is None else numbers(known)[0])
    return made


@operator("EyeLike")
def eye_like(call: Call) -> torch.Tensor:
    return torch.zeros_like(call.tensor())


@operator("Range")
def number_range(call: Call) -> torch.Tensor:
    start, limit, step = (call.values(place)[0] for place in range(3))
    count = max(ceil((limit - start) / step), 0) if step else 0
    if call.device == "meta":
        return call.empty((count,), call.tensor().dtype)
    found: torch.Tensor = torch.arange(count) * step + start
    return found


@operator("RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Bernoulli", "Multinomial")
def random(call: Call) -> torch.Tensor:
    if call.node.op.endswith("Like") or call.node.op == "Bernoulli":
        return torch.rand_like(call.tensor())
    dims = tuple(call.get("shape", ()))
    call.empty(dims, torch.float32)
    return torch.rand(dims, device=call.device)


@operator("Reshape")
def reshape(call: Call) -> torch.Tensor:
    x = call.tensor()
    dims = [int(dim) for dim in call.setting("shape", 1, ())]
    if not call.get("allowzero", 0):
        dims = [x.shape[place] if dim == 0 and place < x.dim() else dim for place, dim in enumerate(dims)]
    return x.reshape(dims)


@operator("Flatten")
def flatten(call: Call) -> torch.Tensor:
    x = call.tensor()
    axis = call.axis(1, x.dim())
    return x.reshape(prod(x.shape[:axis]), -1) if x.numel() else x.reshape(prod(x.shape[:axis]), prod(x.shape[axis:]))


@operator("Transpose")
def transpose(call: Call) -> torch.Tensor:
    x, order = call.tensor(), call.get("perm", ())
    if order and len(order) != x.dim():
        raise call.refusal(f"it reorders {len(order):,} dimensions, and its input has {x.dim()}")
    return x.permute(list(order) or list(reversed(range(x.dim()))))


@operator("Squeeze")
def squeeze(call: Call) -> torch.Tensor:
    axes = call.setting("axes", 1)
    return call.tensor().squeeze() if not axes else call.tensor().squeeze([int(axis) for axis in axes])


@operator("Unsqueeze")
def unsqueeze(call: Call) -> torch.Tensor:
    x = call.tensor()
    axes = [int(axis) for axis in call.setting("axes", 1, ())]
    rank = x.dim() + len(axes)
    for axis in sorted(axis + rank if axis < 0 else axis for axis in axes):
        x = x.unsqueeze(axis)
    return x


@operator("Concat")
def concat(call: Call) -> torch.Tensor:
    axis = call.axis(0)
    whole = [tuple(call.tensor(place).shape) for place in range(len(call.inputs))]
    around = {(shape[:axis], shape[axis + 1 :]) for shape in whole if shape != (0,)}
    if len(around) > 1:
        # torch would import its compiler to say so, which takes seconds.
        raise call.refusal(f"its inputs of {', '.join(map(str, whole[:4]))} differ beside dimension {axis}")
    return torch.cat(call.inputs, axis)


@operator("Split")
def split(call: Call) -> Any:
    x, axis = call.tensor(), call.axis(0)
    sizes = call.setting("split", 1)
    if sizes is None:
        count = int(call.get("num_outputs", len(call.node.outputs)))
        if count != len(call.node.outputs):
            raise call.refusal(f"it should make {count} pieces, and has {len(call.node.outputs)} results")
        piece = -(-x.shape[axis] // max(count, 1))
        sizes = [min(piece, max(x.shape[axis] - place * piece, 0)) for place in range(count)]
    return tuple(torch.split(x, [int(size) for size in sizes], axis))


@operator("Slice")
def slice_(call: Call) -> torch.Tensor:
    x = call.tensor()
    starts, ends = call.setting("starts", 1, ()), call.setting("ends", 2, ())
    axes = call.setting("axes", 3) or list(range(len(starts)))
    steps = call.setting("steps", 4) or [1] * len(starts)
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        places = range(x.shape[int(axis)])[slice(int(start), int(end), int(step))]
        if step > 0:
            x = x.narrow(int(axis), places.start, places.stop - places.start if len(places) else 0) if (
                step == 1 and len(places)
            ) else x[(slice(None),) * (int(axis) % x.dim()) + (slice(int(start), int(end), int(step)),)]  # fmt: skip
        else:  # torch has no steps backwards: those that remain, turned round
            kept = list(places)
            low, high = (min(kept), max(kept) + 1) if kept else (0, 0)
            x = x.narrow(int(axis), low, high - low).flip(int(axis))
            x = x[(slice(None),) * (int(axis) % x.dim()) + (slice(None, None, -int(step)),)]
    return x


@operator("Gather")
def gather(call: Call) -> torch.Tensor:
    """Rows by their numbers: an embedding of a table of weights, else a selection."""
    x, index, axis = call.tensor(), call.tensor(1), call.axis(0)
    known = call.known[1]
    if known is not None and known.dim() == 0:
        return x.select(axis, int(numbers(known)[0]))
    if x.dim() == 2 and axis == 0 and x.is_floating_point():
        return F.embedding(index.to(torch.int64) if index.dtype not in (torch.int32, torch.int64) else index, x)
    rows = torch.index_select(x, axis, index.reshape(-1).to(torch.int64))
    return rows.reshape(*x.shape[:axis], *index.shape, *x.shape[axis + 1 :])


@operator("GatherElements")
def gather_elements(call: Call) -> torch.Tensor:
    return torch.gather(call.tensor(), call.axis(0), call.tensor(1))


@operator("GatherND")
def gather_nd(call: Call) -> torch.Tensor:
    x, index = call.tensor(), call.tensor(1)
    batch = int(call.get("batch_dims", 0))
    depth = index.shape[-1]
    if batch:
        flat = torch.gather(
            x.reshape(*x.shape[:batch], -1),
            batch,
            index.reshape(*x.shape[:batch], -1)[..., : prod(index.shape[batch:-1])],
        )
        return flat.reshape(index.shape[:-1])
    return x[tuple(index[..., place] for place in range(depth))]


@operator("ScatterElements", "Scatter")
def scatter_elements(call: Call) -> torch.Tensor:
    x, index, updates = call.tensor(), call.tensor(1), call.tensor(2)
    how = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}.get(call.get("reduction", "none"))
    if how:
        return torch.scatter_reduce(x, call.axis(0), index, updates, how)
    return torch.scatter(x, call.axis(0), index, updates)


@operator("ScatterND")
def scatter_nd(call: Call) -> torch.Tensor:
    x, index, updates = call.tensor(), call.tensor(1), call.tensor(2)
    places: list[torch.Tensor | None] = [index[..., place] for place in range(index.shape[-1])]
    return torch.index_put(x, places, updates, accumulate=call.get("reduction", "none") == "add")


@operator("Expand")
def expand(call: Call) -> torch.Tensor:
    x, wanted = call.tensor(), [int(dim) for dim in call.values(1)]
    rank = max(x.dim(), len(wanted))
    sizes = zip([1] * (rank - x.dim()) + list(x.shape), [1] * (rank - len(wanted)) + wanted, strict=True)
    return x.expand([want if size == 1 else size for size, want in sizes])


@operator("Tile")
def tile(call: Call) -> torch.Tensor:
    repeats = [int(count) for count in call.values(1)]
    if prod(repeats) * call.tensor().numel() > MOST_ELEMENTS:
        raise call.refusal(f"it repeats its input {repeats} times")
    return call.tensor().repeat(repeats)


@operator("Pad")
def pad(call: Call) -> torch.Tensor:
    x = call.tensor()
    pads = [int(size) for size in call.setting("pads", 1, ())]
    axes = [int(axis) % x.dim() for axis in call.setting("axes", 3) or range(x.dim())]
    count = len(axes)
    each = {axis: (pads[place], pads[place + count]) for place, axis in enumerate(axes)}
    mode = {"edge": "replicate", "reflect": "reflect", "wrap": "circular"}.get(call.get("mode", "constant"), "constant")
    if mode != "constant":  # torch pads the last dimensions only, and wants no word on the others
        padded = [axis for axis, sides in each.items() if any(sides)]
        first = min(padded, default=x.dim() - 1)
        order = [size for axis in reversed(range(first, x.dim())) for size in each.get(axis, (0, 0))]
        return F.pad(x, order, mode=mode) if padded else x
    order = [size for axis in reversed(range(x.dim())) for size in each.get(axis, (0, 0))]
    return F.pad(x, order) if any(order) else x


@operator("Resize", "Upsample")
def resize(call: Call) -> torch.Tensor:
    x, count = call.tensor(), call.tensor().dim() - 2
    given = {"scales": 2, "sizes": 3} if call.node.op == "Resize" and call.opset >= 11 else {"scales": 1}
    if "sizes" in given and call.has(given["sizes"]) and call.values(given["sizes"]):
        wanted = [int(dim) for dim in call.values(given["sizes"])]
    else:
        scales = call.setting("scales", given["scales"], ())
        wanted = [int(size * scale) for size, scale in zip(x.shape[-len(scales) :], scales, strict=True)]
    if "axes" not in call.attributes and len(wanted) != x.dim():
        raise call.refusal(f"it gives {len(wanted)} sizes for {x.dim()} dimensions")
    target = tuple(wanted[-count:])
    if target == tuple(x.shape[2:]):
        return x
    names = {1: "linear", 2: "bilinear", 3: "trilinear"}
    mode = {"nearest": "nearest", "linear": names.get(count, ""), "cubic": "bicubic"}.get(
        call.get("mode", "nearest"), ""
    )
    if not mode or count not in names:
        raise call.refusal(f"it resizes {count} dimensions in the mode {call.get('mode')!r}")
    align = None if mode == "nearest" else call.get("coordinate_transformation_mode") == "align_corners"
    return F.interpolate(x, size=target, mode=mode, align_corners=align)


@operator("DepthToSpace")
def depth_to_space(call: Call) -> torch.Tensor:
    return F.pixel_shuffle(call.tensor(), int(call.get("blocksize", 1)))


@operator("SpaceToDepth")
def space_to_depth(call: Call) -> torch.Tensor:
    return F.pixel_unshuffle(call.tensor(), int(call.get("blocksize", 1)))


@operator("Trilu")
def trilu(call: Call) -> torch.Tensor:
    diagonal = int(call.values(1)[0]) if call.has(1) else 0
    return torch.triu(call.tensor(), diagonal) if call.get("upper", 1) else torch.tril(call.tensor(), diagonal)


@operator("OneHot")
def one_hot(call: Call) -> Any:
    """Which class each element is: compared with every class, then one of two values."""
    index, depth = call.tensor(), int(call.values(1)[0])
    if depth * max(index.numel(), 1) > MOST_ELEMENTS:
        raise call.refusal(f"it has {depth} classes")
    axis = int(call.get("axis", -1))
    axis = axis + index.dim() + 1 if axis < 0 else axis
    classes = torch.arange(depth, dtype=index.dtype, device=index.device if index.device.type == "cpu" else "meta")
    equal = index.unsqueeze(axis) == classes.reshape([-1 if place == axis else 1 for place in range(index.dim() + 1)])
    return torch.where(equal, *call.tensor(2).unbind())


@operator("ReverseSequence")
def reverse_sequence(call: Call) -> torch.Tensor:
    return call.tensor().flip(int(call.get("time_axis", 0)))


@operator("ai.onnx.ml:ArrayFeatureExtractor")
def array_feature(call: Call) -> torch.Tensor:
    found = torch.index_select(call.tensor(), -1, call.tensor(1).reshape(-1).to(torch.int64))
    return found.reshape(1, -1) if found.dim() == 1 else found


# Sequences: lists of tensors


@operator("SequenceConstruct")
def sequence(call: Call) -> Any:
    return ([*call.inputs],)


@operator("SequenceEmpty")
def sequence_empty(call: Call) -> Any:
    return ([],)


@operator("SequenceInsert")
def sequence_insert(call: Call) -> Any:
    items = list(call.inputs[0])
    items.insert(int(call.values(2)[0]) if call.has(2) else len(items), call.inputs[1])
    return (items,)


@operator("SequenceAt")
def sequence_at(call: Call) -> Any:
    return call.inputs[0][int(call.values(1)[0])]


@operator("ConcatFromSequence")
def concat_sequence(call: Call) -> torch.Tensor:
    items, axis = call.inputs[0], int(call.get("axis", 0))
    return torch.stack(items, axis) if call.get("new_axis", 0) else torch.cat(items, axis)


@operator("SplitToSequence")
def split_sequence(call: Call) -> Any:
    x, axis = call.tensor(), call.axis(0)
    sizes = [int(size) for size in call.values(1)] if call.has(1) else [1] * min(x.shape[axis], _MOST_PIECES)
    pieces = torch.split(x, sizes if len(sizes) > 1 or call.known[1] is None else sizes[0], axis)
    is_dropped = not call.has(1) and not call.get("keepdims", 1)
    return ([piece.squeeze(axis) if is_dropped else piece for piece in pieces],)
