"""Every ONNX operator that we read, beside what ONNX Runtime makes of the same file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

from edge_opt.errors import TraceFailed
from edge_opt.model_files.node_call import handlers
from onnx_graphs import node
from operator_rows import (
    Fed,
    OnnxRow,
    ints,
    joined,
    known_values,
    onnxruntime_makes,
    outline,
    profiled,
    reading_makes,
    row,
    w,
    x,
)

MS, ML, BLOCKED = "com.microsoft", "ai.onnx.ml", "com.microsoft.nchwc"


def fed(*values: Any, of: str = "int64") -> Fed:
    return Fed(np.array(values, of))


def scalar(value: Any, of: str = "int64") -> Any:
    return np.array(value, of)


CURVES = (
    "Relu Sigmoid Tanh Exp Log Sqrt Abs Neg Sign Floor Ceil Round Reciprocal Erf Sin Cos Tan Asin Acos Atan Sinh Cosh "
    "Asinh Acosh Atanh IsNaN IsInf Selu Celu Softplus Softsign HardSwish HardSigmoid Mish Shrink LeakyRelu Elu "
    "ThresholdedRelu Gelu Identity Softmax LogSoftmax"
).split()
WHOLE = "Add Sub Mul Div Mod Pow Equal Greater GreaterOrEqual Less LessOrEqual BitwiseAnd BitwiseOr BitwiseXor".split()
REDUCTIONS = (
    "ReduceMean ReduceSum ReduceMax ReduceMin ReduceL1 ReduceL2 ReduceSumSquare ReduceLogSumExp ReduceLogSum ReduceProd"
).split()

ARITHMETIC = [
    *(row(op, x(2, 3, 4)) for op in CURVES),
    *(row(op, x(2, 3, of="int64"), x(3, of="int64")) for op in WHOLE),
    *(row(op, x(2, 3, of="int32"), scalar(2, "int32")) for op in WHOLE),
    *(row(op, scalar(7), x(2, 3, of="int64")) for op in WHOLE),
    *(row(op, x(2, 1, 3), x(4, 1)) for op in "Add Sub Mul Div Equal Greater GreaterOrEqual Less LessOrEqual".split()),
    *(row(op, scalar([2], "float32"), x(2, 3)) for op in "Add Sub Mul Div Pow Equal Greater Less".split()),
    *(row(op, x(), scalar([2], "float32")) for op in "Add Sub Mul Div Pow Equal Greater Less".split()),
    *(row(op, x(2, 1, of="bool"), x(3, of="bool")) for op in "And Or Xor Equal".split()),
    *(row(op, x(3, of="bool"), scalar(True, "bool")) for op in "And Or Xor".split()),
    row("Mod", x(2, 3), x(2, 3), fmod=1),
    row("Mod", fed(-5, 5, -7), fed(3, -3, 2)),
    row("Mod", fed(-5, 5, -7), fed(3, -3, 2), fmod=1),
    row("Div", fed(-5, 5, -7), fed(3, -3, 2)),
    row("Pow", x(2, 3), x(2, 3, of="int64")),
    row("Pow", x(2, 3, of="int64"), scalar(2.0, "float32")),
    row("Pow", x(2, 3, of="int32"), scalar(2.0, "float32")),
    row("Pow", x(2, 3, of="int64"), x(3)),
    row("Not", x(2, 3, of="bool")),
    row("BitwiseNot", x(2, 3, of="int32")),
    row("Swish", x(2, 3), version=24),
    row("Swish", x(2, 3), version=24, alpha=2.0),
    row("Gelu", x(2, 3), approximate="tanh"),
    row("HardSigmoid", x(2, 3), alpha=0.1, beta=0.4),
    row("Celu", x(2, 3), alpha=2.0),
    row("Selu", x(2, 3), alpha=2.0, gamma=1.5),
    row("Elu", x(2, 3), alpha=2.0),
    row("Shrink", x(2, 3), lambd=0.2, bias=0.1),
    row("Shrink", x(2, 3, of="int32"), lambd=2.5),
    row("IsInf", fed(1, np.inf, -np.inf, of="float32"), detect_negative=0),
    row("Abs", x(3, of="int64")), row("Neg", x(3, of="int32")), row("Sign", x(3, of="int64")),
    row("Relu", x(3, of="int32")),
    row("Det", x(2, 3, 3)), row("Det", x(4, 4)),
    row(f"{MS}:FastGelu", x(2, 3, 4)), row(f"{MS}:FastGelu", x(2, 3, 4), w(4)),
    row(f"{MS}:Gelu", x(2, 3)), row(f"{MS}:QuickGelu", x(2, 3)), row(f"{MS}:BiasGelu", x(2, 3, 4), w(4)),
    row("PRelu", x(2, 3, 4, 4), w(3, 1, 1)), row("PRelu", x(2, 3), w(1)), row("PRelu", x(2, 3, 4), w(3, 4)),
    row("PRelu", x(2, 3, 3), w(3)),
    row("Clip", x(2, 3)), row("Clip", x(2, 3), None, scalar(1.0, "float32")),
    row("Clip", x(2, 3), scalar(0.0, "float32"), scalar(6.0, "float32")),
    row("Clip", x(2, 3), x(), scalar(6.0, "float32")), row("Clip", x(2, 3), scalar(-1.0, "float32"), x()),
    row("Clip", x(2, 3), scalar(-1.0, "float32")),
    row("Clip", x(2, 3), version=10, min=-1.0, max=1.0), row("Clip", x(2, 3), version=7, max=1.0),
    row("Clip", x(4, of="int64"), scalar(2), scalar(3)), row("Clip", x(4, of="int32"), None, scalar(3, "int32")),
    *(row(op, x(2, 1, 3), x(4, 1), x(3)) for op in "Min Max Sum Mean".split()),
    *(row(op, x(2, 3)) for op in "Min Max Sum Mean".split()),
    *(row(op, x(2, 3, of="int64"), scalar([2, 3, 4])) for op in "Min Max".split()),
    row("Where", x(2, 3, of="bool"), x(2, 3), x(3)), row("Where", x(2, 1, of="bool"), x(3), scalar(0.0, "float32")),
    row("Where", x(4, of="bool"), scalar(1), scalar(0)), row("Where", x(4, of="bool"), scalar(1), x(4, of="int64")),
    row("Where", x(4, of="bool"), scalar(1, "int32"), scalar(0, "int32")),
    *(row("CumSum", x(2, 3, of=kind), scalar(axis)) for kind in ("float32", "int64", "int32") for axis in (0, -1)),
    row("CumSum", x(2, 3, of="int64"), scalar(1), exclusive=1), row("CumSum", x(2, 3), scalar(0), reverse=1),
    row("CumSum", x(2, 4, of="int64"), ints(1), exclusive=1, reverse=1),
    *(row("BitShift", x(3, of="uint32"), x(3, of="uint32"), direction=way) for way in ("LEFT", "RIGHT")),
    *(row(op, x(2, 3, 4), axis=axis) for op in ("Softmax", "LogSoftmax") for axis in (0, 1, -1)),
    *(row(op, x(2, 3, 4), version=11) for op in ("Softmax", "LogSoftmax")),
    *(row("Softmax", x(2, 3, 4), version=12, axis=axis) for axis in (0, -1, 2)),
    row("GridSample", x(1, 2, 4, 4), x(1, 3, 5, 2)), row("GridSample", x(1, 2, 4, 4), x(1, 3, 5, 2), mode="cubic"),
    row("GridSample", x(1, 2, 4, 4), x(1, 3, 5, 2), mode="nearest", align_corners=1, padding_mode="border"),
    row("GridSample", x(1, 2, 4, 4), x(1, 3, 5, 2), version=16, mode="bicubic"),
    row("GridSample", x(1, 2, 3, 4, 4), x(1, 2, 3, 5, 3)),
]  # fmt: skip

REDUCED = [
    *(row(op, x(2, 3, 4), ints(1), version=18) for op in REDUCTIONS),
    *(row(op, x(2, 3, 4), version=18) for op in REDUCTIONS),
    *(row(op, x(2, 3, 4), ints(0, -1), version=18, keepdims=0) for op in REDUCTIONS),
    *(row(op, x(2, 3, 4), axes=[-1, 0], keepdims=0, version=11) for op in REDUCTIONS),
    *(row(op, x(2, 3, 4), version=18, noop_with_empty_axes=1) for op in REDUCTIONS),
    *(row(op, x(2, 3, 4), version=18, keepdims=0) for op in REDUCTIONS),
    *(row(op, x(2, 3, of="int32"), ints(1), version=18) for op in REDUCTIONS),
    *(row(op, x(2, 3, of="int64"), ints(1), version=18) for op in ("ReduceSum", "ReduceProd", "ReduceMax",
        "ReduceMin")),
    *(row(op, x(2, 3, of="bool"), ints(1)) for op in ("ReduceMax", "ReduceMin")),
    row("ReduceSum", x(2, 3, 4), ints(), version=13), row("ReduceSum", x(), version=13),
    *(row(op, x(2, 3, 4)) for op in ("ArgMax", "ArgMin")),
    *(row(op, x(2, 3, 4), axis=-1, keepdims=0) for op in ("ArgMax", "ArgMin")),
    row("ArgMax", x(2, 3), axis=1, select_last_index=1), row("ArgMax", x(2, 3, of="int32"), axis=1),
    row("TopK", x(2, 5), ints(3), makes="y z"), row("TopK", x(5, 2), ints(3), makes="y z", axis=0, largest=0),
    row("TopK", x(2, 5, of="int64"), ints(2), makes="y z"), row("TopK", x(2, 5), version=9, k=2, makes="y z"),
]  # fmt: skip

MOVED = [
    *(row("Cast", x(2, 3, of=kind), to=to) for kind, to in
      [("float32", 7), ("int64", 1), ("float32", 10), ("bool", 6), ("float32", 9), ("int32", 11), ("float32", 2)]),
    row("CastLike", x(2, 3), w(1, of="int32")),
    row("Dropout", x(2, 3)), row("Dropout", x(2, 3), scalar(0.5, "float32"), version=13),
    row("Dropout", x(2, 3), makes="y z"), row("Dropout", x(2, 3), version=10, ratio=0.3),
    row("Dropout", x(2, 3), version=10, makes="y z"),
    row("Shape", x(2, 3, 4)), row("Shape", x(2, 3, 4), start=1), row("Shape", x(2, 3, 4), start=-2, end=-1),
    row("Shape", x(2, 3, 4), start=-9, end=9), row("Shape", x()),
    row("Size", x(2, 3, 4)), row("Size", x()),
    row("Constant", value_float=2.0), row("Constant", value_int=3), row("Constant", value_ints=[1, 2]),
    row("Constant", value_floats=[1.0, 2.0]),
    row("Constant", value=helper.make_tensor("c", TensorProto.INT32, (2, 2), [1, 2, 3, 4])),
    row("ConstantOfShape", ints(2, 3)), row("ConstantOfShape", ints()),
    row("ConstantOfShape", ints(2, 3), value=helper.make_tensor("c", TensorProto.INT64, (1,), [7])),
    row("EyeLike", x(3, 3)), row("EyeLike", x(2, 4), dtype=7, k=1), row("EyeLike", x(2, 4, of="int32"), k=-1),
    row("Range", scalar(1), scalar(10), scalar(3)), row("Range", scalar(5), scalar(0), scalar(-2)),
    row("Range", *(scalar(one, "float32") for one in (0, 1, 0.25))), row("Range", scalar(5), scalar(1), scalar(1)),
    row("Range", *(scalar(one, "int32") for one in (0, 4, 1))),
    row("RandomNormal", shape=[2, 3]), row("RandomUniform", shape=[2, 3], dtype=11),
    row("RandomNormal", shape=[2, 3], dtype=11),
    row("RandomNormalLike", x(2, 3)), row("RandomUniformLike", x(2, 3), dtype=11),
    row("RandomUniformLike", x(2, 3, of="int32"), dtype=1),
    row("Bernoulli", Fed(np.full((2, 3), 0.5, np.float32))),
    row("Bernoulli", Fed(np.full(3, 0.5, np.float32)), dtype=7),
    row("Multinomial", x(2, 5)), row("Multinomial", x(2, 5), sample_size=4, dtype=7),
    row("Reshape", x(2, 3, 4), ints(0, -1)), row("Reshape", x(2, 3, 4), ints(4, 3, 2)), row("Reshape", x(1, 1), ints()),
    row("Reshape", x(0, 3), ints(3, 0), allowzero=1), row("Reshape", x(2, 3, 4), ints(-1)),
    row("Flatten", x(2, 3, 4)), row("Flatten", x(2, 3, 4), axis=0), row("Flatten", x(2, 3, 4), axis=3),
    row("Flatten", x(2, 3, 4), axis=-1), row("Flatten", x(0, 3), axis=1), row("Flatten", x(4)),
    row("Transpose", x(2, 3, 4)), row("Transpose", x(2, 3, 4), perm=[0, 2, 1]),
    row("Squeeze", x(1, 3, 1)), row("Squeeze", x(1, 3, 1), ints(-1)),
    row("Squeeze", x(1, 3, 1), version=11, axes=[0, -1]),
    row("Unsqueeze", x(3), ints(0, -1)), row("Unsqueeze", x(3, 4), version=11, axes=[2, 0]),
    row("Unsqueeze", x(), scalar(0)), row("Unsqueeze", x(3, 4), ints(-1, -4)),
    row("Concat", x(2, 3), x(2, 1), axis=1), row("Concat", x(2, 3), x(4, 3), axis=-2),
    row("Concat", x(0), x(2), axis=0),
    row("Split", x(6, 2), makes="y z", version=11), row("Split", x(2, 7), makes="y z a", axis=-1, num_outputs=3),
    row("Split", x(6, 2), ints(1, 5), makes="y z"), row("Split", x(6, 2), makes="y z", version=11, split=[4, 2]),
    row("Slice", x(4, 5), ints(1), ints(3)), row("Slice", x(4, 5), ints(-3), ints(-1), ints(-1)),
    row("Slice", x(4, 5), ints(0, 1), ints(4, 5), ints(0, 1), ints(2, 3)), row("Slice", x(4, 5), ints(9), ints(99)),
    row("Slice", x(4, 5), ints(-1), ints(-99), ints(1), ints(-2)),
    row("Slice", x(4, 5), ints(3), ints(0), ints(0), ints(-1)),
    row("Slice", x(4, 5), ints(0), ints(2), ints(0), ints(-1)), row("Slice", x(4, 5), ints(3), ints(1), ints(0)),
    row("Slice", x(4, 5), version=9, starts=[1, 0], ends=[3, -1]),
    row("Slice", x(4, 5), version=9, starts=[1], ends=[2], axes=[1]),
    row("Slice", x(4, 5), ints(-99), ints(np.iinfo(np.int64).max), ints(1)),
    row("Gather", w(7, 4), x(2, 3, of="int64")), row("Gather", x(4, 5), scalar(2), axis=1),
    row("Gather", x(4, 5), scalar(-1)),
    row("Gather", x(4, 5), ints(0, -1), axis=-1), row("Gather", x(6, 3, 4), x(2, 2, of="int32"), axis=0),
    row("Gather", x(7, of="int64"), x(of="int64")), row("Gather", w(7, 4), x(of="int64")),
    row("Gather", x(7, 7, 2), x(of="int64"), axis=1),
    row("GatherElements", x(6, 6), x(2, 3, of="int64")), row("GatherElements", x(6, 6), x(6, 3, of="int32"), axis=-1),
    row("GatherElements", x(6), fed(-1, 0, -6)), row("ScatterElements", x(6), fed(-1, 0), x(2)),
    row("Gather", w(6, 2), fed(-1, 0)),
    row("GatherND", x(6, 6, 4), x(3, 2, of="int64")), row("GatherND", x(6, 6), x(2, 3, 2, of="int64")),
    row("GatherND", x(2, 6, 4), x(2, 1, of="int64"), batch_dims=1),
    row("GatherND", x(2, 6, 6), x(2, 3, 2, of="int64"), batch_dims=1),
    row("GatherND", x(2, 6, 4), x(2, 3, 1, of="int64"), batch_dims=1),
    *(row("ScatterElements", x(6, 6), x(2, 3, of="int64"), x(2, 3), reduction=how)
      for how in ("none", "add", "mul", "max", "min")),
    row("ScatterElements", x(6, 6), x(2, 3, of="int32"), x(2, 3), axis=-1),
    row("Scatter", x(6, 6), x(2, 3, of="int64"), x(2, 3), version=10),
    *(row("ScatterND", x(6, 6), Fed(ints(1, 4).reshape(2, 1)), x(2, 6), reduction=how)
      for how in ("none", "add", "mul", "max", "min")),
    row("ScatterND", x(6, 6), Fed(ints(1, 1, 4, 2).reshape(2, 2)), x(2)),
    row("Expand", x(3, 1), ints(2, 1, 4)), row("Expand", x(3, 4), ints(1)), row("Expand", x(), ints(2, 2)),
    row("Tile", x(2, 3), ints(2, 2)), row("Tile", x(3), ints(0)),
    *(row("Pad", x(1, 2, 4, 4), ints(0, 0, 1, 2, 0, 0, 3, 0), mode=mode) for mode in ("constant", "edge", "reflect")),
    row("Pad", x(1, 2, 4, 4), ints(0, 0, 1, 2, 0, 0, 3, 0), mode="wrap"),
    *(row("Pad", x(3, 4), ints(1, 1, 2, 2), mode=mode) for mode in ("constant", "edge", "reflect", "wrap")),
    *(row("Pad", x(4), ints(1, 2), mode=mode) for mode in ("constant", "edge", "reflect")),
    *(row("Pad", x(2, 3, 4, of="int64"), ints(1, 0, 0, 1, 1, 0), mode=mode)
        for mode in ("constant", "edge", "reflect")),
    row("Pad", x(3, 4), ints(1, 1, 2, 2), scalar(5.0, "float32")), row("Pad", x(3, 4), ints(1, 2), None, ints(-1)),
    row("Pad", x(3, 4), ints(-1, 0, 0, -2)), row("Pad", x(3, 4), version=10, pads=[0, 1, 0, 1], value=1.0),
    row("Pad", x(3, 4), ints(0, 0, 0, 0), mode="edge"),
    row("Pad", x(1, 2, 4, 4), ints(0, 1, 1, 0, 0, 1, 0, 0), mode="edge"),
    row("DepthToSpace", x(1, 8, 2, 3), blocksize=2), row("DepthToSpace", x(1, 8, 2, 3), blocksize=2, mode="CRD"),
    row("SpaceToDepth", x(1, 2, 4, 6), blocksize=2),
    row("Trilu", x(3, 4)), row("Trilu", x(2, 3, 4), scalar(1), upper=0), row("Trilu", x(3, 4, of="int64"), scalar(-1)),
    row("OneHot", fed(0, 2, -1), scalar(4), scalar([0.0, 1.0], "float32")),
    row("OneHot", x(2, 3, of="int64"), ints(6), scalar([5, 2], "int64"), axis=1),
    row("OneHot", x(2, 3, of="int32"), scalar(6, "int32"), scalar([5, 2], "float32"), axis=0),
    row("ReverseSequence", x(4, 3, 2), fed(1, 4, 2)),
    row("ReverseSequence", x(3, 4), fed(1, 4, 2), time_axis=1, batch_axis=0),
]  # fmt: skip

RESIZED = [
    *(row("Resize", x(1, 2, 4, 4), None, scalar([1, 1, 2, 1.5], "float32"), mode=mode)
        for mode in ("nearest", "linear", "cubic")),
    row("Resize", x(1, 2, 4, 4), None, None, ints(1, 2, 7, 3)),
    row("Resize", x(1, 2, 4), None, scalar([1, 1, 2], "float32"), mode="linear"),
    row("Resize", x(1, 2, 4, 4), None, None, ints(1, 2, 8, 8), mode="linear",
        coordinate_transformation_mode="align_corners"),
    row("Resize", x(1, 2, 4, 4), None, None, ints(6, 5), axes=[2, 3]),
    row("Resize", x(1, 2, 4, 4), None, None, ints(5, 6), axes=[3, 2]),
    row("Resize", x(1, 2, 4, 4), None, None, ints(6), axes=[3]),
    row("Resize", x(1, 2, 4, 4), None, scalar([0.6, 0.6], "float32"), axes=[-2, -1]),
    row("Resize", x(1, 2, 4, 4), None, scalar([1, 1, 1, 1], "float32")),
    row("Resize", x(1, 2, 4, 4), scalar([1, 1, 2, 2], "float32"), version=10),
    row("Resize", x(1, 2, 3, 3), None, scalar([1, 1, 1.3, 0.7], "float32"), mode="linear"),
    row("Resize", x(1, 2, 10, 10), None, scalar([1, 1, 0.7, 0.1], "float32")),
    row("Resize", x(1, 2, 3, 3), None, scalar([1, 2, 2, 2], "float32")),
    row("Resize", x(3, 3), None, scalar([2, 2], "float32"), mode="linear"),
    row("Resize", x(1, 2, 3, 3, 3), None, scalar([1, 1, 2, 2, 2], "float32"), mode="nearest"),
    row("Resize", x(1, 2, 3, 3, 3), None, scalar([1, 1, 2, 2, 2], "float32"), mode="linear"),
    row("Resize", x(1, 2, 4, 6), None, None, ints(8, 8), axes=[2, 3], keep_aspect_ratio_policy="not_larger"),
    row("Resize", x(1, 2, 4, 6), None, None, ints(8, 8), axes=[2, 3], keep_aspect_ratio_policy="not_smaller"),
    row("Resize", x(1, 4, 4, 2), None, scalar([1, 2, 2, 1], "float32"), mode="linear"),
    row("Resize", x(1, 2, 4, 4, of="uint8"), None, scalar([1, 1, 2, 2], "float32")),
    row("Resize", x(1, 2, 4, 4), scalar([0, 0, 0.2, 0.2, 1, 1, 0.8, 0.8], "float32"), None, ints(1, 2, 3, 3),
        mode="linear",
        coordinate_transformation_mode="tf_crop_and_resize"),
    row("Resize", x(1, 2, 4, 4), scalar([0, 0, 0.2, 0.2, 1, 1, 0.8, 0.8], "float32"), scalar([1, 1, 2, 2], "float32"),
        mode="linear",
        coordinate_transformation_mode="tf_crop_and_resize"),
    row("Upsample", x(1, 2, 4, 4), scalar([1, 1, 2, 3], "float32"), version=9),
    row("Upsample", x(1, 2, 4, 4), version=8, scales=[1.0, 1.0, 2.0, 2.0], mode="linear"),
]  # fmt: skip

# In the comments: results x channels that each sees x window.
PRODUCTS = [
    row("Conv", x(2, 4, 8, 8), w(6, 4, 3, 3), macs=2 * 6 * 6 * 6 * 4 * 9),
    row("Conv", x(1, 4, 8, 8), w(6, 2, 3, 3), w(6), group=2, pads=[0, 1, 1, 0], strides=[2, 1],
        macs=6 * (((8 + 1 - 3) // 2 + 1) * (8 + 1 - 3 + 1)) * 2 * 9),
    row("Conv", x(1, 4, 9, 9), w(6, 4, 3, 3), dilations=[2, 2], macs=6 * (9 - 4) ** 2 * 4 * 9),
    row("Conv", x(1, 3, 7, 7), w(2, 3, 4, 4), auto_pad="SAME_LOWER", strides=[2, 2], macs=2 * 4 * 4 * 3 * 16),
    row("Conv", x(1, 3, 7, 7), w(2, 3, 4, 4), auto_pad="SAME_UPPER", macs=2 * 7 * 7 * 3 * 16),
    row("Conv", x(1, 3, 7, 7), w(2, 3, 4, 4), auto_pad="VALID", macs=2 * 4 * 4 * 3 * 16),
    row("Conv", x(1, 3, 9), w(2, 3, 3), pads=[1, 1], macs=2 * 9 * 3 * 3),
    row("Conv", x(1, 3, 5, 5, 5), w(2, 3, 2, 2, 2), macs=2 * 4**3 * 3 * 8),
    row("Conv", x(1, 4, 6, 6), w(4, 1, 3, 3), group=4, macs=4 * 16 * 9),
    row(f"{MS}:FusedConv", x(1, 4, 6, 6), w(4, 4, 3, 3), w(4), activation="Relu", macs=4 * 16 * 4 * 9),
    row(f"{MS}:FusedConv", x(1, 4, 6, 6), w(4, 4, 1, 1), w(4), x(1, 4, 6, 6), activation="Relu", macs=4 * 36 * 4),
    *(row(f"{MS}:FusedConv", x(1, 4, 6, 6), w(4, 4, 1, 1), activation=name, macs=4 * 36 * 4)
        for name in ("Sigmoid", "Tanh")),
    *(row(f"{MS}:FusedConv", x(1, 4, 6, 6), w(4, 4, 1, 1), activation=name, activation_params=given, macs=4 * 36 * 4)
      for name, given in (("LeakyRelu", [0.1]), ("Clip", [0.0, 6.0]), ("HardSigmoid", [0.2, 0.5]))),
    row("ConvTranspose", x(1, 4, 5, 5), w(4, 3, 3, 3), macs=4 * 25 * 3 * 9),
    row("ConvTranspose", x(1, 4, 5, 5), w(4, 3, 3, 3), w(3), strides=[2, 2], pads=[1, 1, 1, 1], output_padding=[1, 1],
        macs=4 * 25 * 3 * 9),
    row("ConvTranspose", x(1, 4, 5, 5), w(4, 3, 3, 3), strides=[2, 2], pads=[0, 0, 1, 1], macs=4 * 25 * 3 * 9),
    row("ConvTranspose", x(1, 4, 5, 5), w(4, 3, 3, 3), strides=[2, 2], pads=[1, 1, 0, 0], macs=4 * 25 * 3 * 9),
    row("ConvTranspose", x(1, 4, 5, 5), w(4, 3, 3, 3), strides=[2, 2], output_shape=[10, 10], macs=4 * 25 * 3 * 9),
    row("ConvTranspose", x(1, 4, 5, 5), w(4, 3, 3, 3), strides=[2, 2], output_shape=[12, 12], macs=4 * 25 * 3 * 9),
    row("ConvTranspose", x(1, 4, 5, 5), w(4, 3, 3, 3), strides=[3, 3], output_shape=[16, 17], output_padding=[1, 2],
        macs=4 * 25 * 3 * 9),
    row("ConvTranspose", x(1, 4, 5, 5), w(4, 3, 3, 3), strides=[3, 3], output_shape=[15, 14], output_padding=[1, 1],
        macs=4 * 25 * 3 * 9),
    *(row("ConvTranspose", x(1, 4, 5, 5), w(4, 3, 3, 3), strides=[2, 2], auto_pad=how, macs=4 * 25 * 3 * 9)
      for how in ("SAME_UPPER", "SAME_LOWER", "VALID")),
    row("ConvTranspose", x(1, 4, 5, 5), w(4, 3, 2, 2), strides=[3, 3], auto_pad="SAME_UPPER", macs=4 * 25 * 3 * 4),
    row("ConvTranspose", x(1, 4, 5, 5), w(4, 3, 3, 3), group=2, dilations=[2, 2], macs=4 * 25 * 3 * 9),
    row("ConvTranspose", x(1, 4, 5), w(4, 3, 3), macs=4 * 5 * 3 * 3),
    row("ConvTranspose", x(1, 4, 3, 3, 3), w(4, 3, 2, 2, 2), macs=4 * 27 * 3 * 8),
    row("MatMul", x(2, 3), x(3, 4), macs=2 * 3 * 4), row("MatMul", x(5, 2, 3), w(3, 4), macs=5 * 2 * 3 * 4),
    row("MatMul", x(3), x(3), macs=3), row("MatMul", x(2, 3), x(3), macs=2 * 3),
    row("MatMul", x(3), x(5, 3, 4), macs=5 * 3 * 4),
    row("MatMul", x(5, 1, 2, 3), x(4, 3, 6), macs=5 * 4 * 2 * 3 * 6),
    row(f"{MS}:FusedMatMul", x(2, 3), x(4, 3), transB=1, alpha=0.5, macs=2 * 3 * 4),
    row(f"{MS}:FusedMatMul", x(5, 3, 2), x(5, 3, 4), transA=1, macs=5 * 2 * 3 * 4),
    row(f"{MS}:FusedMatMul", x(3, 5, 2), x(5, 2, 4), transBatchA=1, macs=5 * 3 * 2 * 4),
    row(f"{MS}:FusedMatMul", x(5, 3, 2), x(2, 5, 4), transBatchB=1, macs=5 * 3 * 2 * 4),
    row(f"{MS}:FusedMatMul", x(2, 5, 3), x(5, 2, 4), transA=1, transBatchA=1, macs=5 * 3 * 2 * 4),
    row(f"{MS}:TransposeMatMul", x(2, 3), x(4, 3), transB=1, macs=2 * 3 * 4),
    row("Gemm", x(2, 3), w(3, 4), macs=2 * 3 * 4),
    row("Gemm", x(3, 2), w(4, 3), w(4), transA=1, transB=1, macs=2 * 3 * 4),
    row("Gemm", x(2, 3), w(3, 4), w(2, 1), macs=2 * 3 * 4),
    row("Gemm", x(2, 3), w(3, 4), scalar(1.0, "float32"), macs=2 * 3 * 4),
    row("Gemm", x(2, 3), w(3, 4), w(1), macs=2 * 3 * 4), row("Gemm", x(2, 3), w(3, 4), w(1, 4), macs=2 * 3 * 4),
    row("Gemm", x(2, 3), w(3, 4), w(4), alpha=0.5, beta=0.0, macs=2 * 3 * 4),
    row(f"{MS}:FusedGemm", x(2, 3), w(3, 4), w(4), activation="Relu", macs=2 * 3 * 4),
    row(f"{MS}:FusedGemm", x(2, 3), w(3, 4), w(4), activation="LeakyRelu", activation_alpha=0.1, macs=2 * 3 * 4),
    row("Einsum", x(2, 3), x(3, 4), equation="ij,jk->ik", macs=2 * 3 * 4),
    row("Einsum", x(2, 3), equation="ij->ji", macs=0),
    row("Einsum", x(5, 2, 3), x(5, 4, 3), equation="bij,bkj->bik", macs=5 * 2 * 3 * 4),
    row("Einsum", x(3, 3), equation="ii->i", macs=0),
]  # fmt: skip

POOLS = [
    *(row(op, x(1, 2, 7, 7), kernel_shape=[3, 3]) for op in ("MaxPool", "AveragePool")),
    *(row(op, x(1, 2, 7, 7), kernel_shape=[3, 3], strides=[2, 2], ceil_mode=1) for op in ("MaxPool", "AveragePool")),
    *(row(op, x(1, 2, 8, 8), kernel_shape=[3, 3], strides=[2, 2], ceil_mode=1) for op in ("MaxPool", "AveragePool")),
    *(row(op, x(1, 2, 8, 8), kernel_shape=[3, 3], strides=[2, 2], ceil_mode=1, pads=[0, 0, 1, 1])
        for op in ("MaxPool", "AveragePool")),
    *(row(op, x(1, 2, 7, 7), kernel_shape=[1, 1], strides=[3, 3], ceil_mode=1, pads=[0, 0, 0, 0])
        for op in ("MaxPool", "AveragePool")),
    *(row(op, x(1, 2, 7, 7), kernel_shape=[2, 2], strides=[3, 3], ceil_mode=1, pads=[1, 1, 1, 1])
        for op in ("MaxPool", "AveragePool")),
    *(row(op, x(1, 2, 7, 7), kernel_shape=[2, 3], pads=[0, 0, 1, 1], strides=[2, 1])
        for op in ("MaxPool", "AveragePool")),
    *(row(op, x(1, 2, 7, 7), kernel_shape=[3, 3], auto_pad="SAME_UPPER", strides=[2, 2])
        for op in ("MaxPool", "AveragePool")),
    *(row(op, x(1, 2, 7, 7), kernel_shape=[2, 2], auto_pad="SAME_LOWER") for op in ("MaxPool", "AveragePool")),
    *(row(op, x(1, 2, 9), kernel_shape=[3], pads=[1, 1]) for op in ("MaxPool", "AveragePool")),
    *(row(op, x(1, 2, 5, 5, 5), kernel_shape=[2, 2, 2]) for op in ("MaxPool", "AveragePool")),
    row("MaxPool", x(1, 2, 7, 7), kernel_shape=[3, 3], dilations=[2, 2]),
    row("MaxPool", x(1, 2, 6, 6), kernel_shape=[2, 2], makes="y z"),
    row("AveragePool", x(1, 2, 7, 7), kernel_shape=[3, 3], pads=[1, 1, 1, 1], count_include_pad=1),
    row("AveragePool", x(1, 2, 7, 7), kernel_shape=[2, 2], pads=[1, 1, 1, 1], count_include_pad=1),
    row("MaxPool", x(1, 2, 7, 7), kernel_shape=[3, 3], pads=[2, 2, 2, 2]),
    row("MaxPool", x(1, 2, 6, 6, of="uint8"), kernel_shape=[2, 2]),
    row("MaxPool", x(1, 2, 6, 6, of="int8"), kernel_shape=[2, 2]),
    *(row(op, x(1, 2, *size)) for op in ("GlobalAveragePool", "GlobalMaxPool") for size in ((5,), (5, 6), (3, 4, 5))),
]  # fmt: skip

NORMS = [
    row("BatchNormalization", x(2, 3, 4, 4), w(3), w(3), w(3), w(3) ** 2),
    row("BatchNormalization", x(2, 3), w(3), w(3), w(3), w(3) ** 2, version=9),
    row("InstanceNormalization", x(2, 3, 4, 4), w(3), w(3)),
    row("InstanceNormalization", x(2, 3, 4), w(3), w(3), epsilon=1e-3),
    row("LayerNormalization", x(2, 3, 4), w(4)), row("LayerNormalization", x(2, 3, 4), w(3, 4), w(3, 4), axis=1),
    row("LayerNormalization", x(2, 3, 4), w(4), w(4), makes="y z a"),
    row("LayerNormalization", x(2, 3, 4), w(1, 3, 4)[0], axis=-2, makes="y z"),
    row("LayerNormalization", x(2, 3, 4), w(4), axis=1),
    row("RMSNormalization", x(2, 3, 4), w(4), version=23),
    row("RMSNormalization", x(2, 3, 4), w(3, 4), version=23, axis=1),
    row("SimplifiedLayerNormalization", x(2, 3, 4), w(4)),
    row(f"{MS}:SkipLayerNormalization", x(2, 3, 4), x(2, 3, 4), w(4), w(4)),
    row(f"{MS}:SkipLayerNormalization", x(2, 3, 4), x(2, 3, 4), w(4)),
    row(f"{MS}:SkipLayerNormalization", x(2, 3, 4), x(2, 3, 4), w(4), w(4), w(4), makes="y - - z"),
    row(f"{MS}:SkipLayerNormalization", x(2, 3, 4), x(1, 3, 4), w(4), w(4)),
    row(f"{MS}:SkipLayerNormalization", x(2, 3, 4), x(3, 4), w(4), w(4)),
    row(f"{MS}:SkipSimplifiedLayerNormalization", x(2, 3, 4), x(2, 3, 4), w(4), w(4), makes="y - - z"),
    row(f"{MS}:SkipSimplifiedLayerNormalization", x(2, 3, 4), x(2, 3, 4), w(4)),
    row("GroupNormalization", x(2, 6, 4), w(2), w(2), version=18, num_groups=2),
    row("GroupNormalization", x(2, 6, 4, 4), w(6), w(6), version=21, num_groups=3),
    *(row("LpNormalization", x(2, 3, 4), p=p, axis=axis) for p, axis in ((1, 0), (2, -1))),
    row("LpNormalization", x(2, 3)),
    row("LRN", x(1, 6, 4, 4), size=3), row("LRN", x(1, 6, 4, 4), size=5, alpha=1e-3, beta=0.5, bias=2.0),
]  # fmt: skip

ATTENTION = [
    # scores and sums: heads x queries x keys x columns, each twice
    row("Attention", x(1, 2, 5, 4), x(1, 2, 6, 4), x(1, 2, 6, 4), version=23, macs=2 * 2 * 5 * 6 * 4),
    row("Attention", x(1, 5, 8), x(1, 6, 8), x(1, 6, 8), version=23, q_num_heads=2, kv_num_heads=2,
        macs=2 * 2 * 5 * 6 * 4),
    row("Attention", x(1, 5, 8), x(1, 6, 4), x(1, 6, 4), version=23, q_num_heads=4, kv_num_heads=2,
        macs=2 * 4 * 5 * 6 * 2),
    row("Attention", x(1, 2, 5, 4), x(1, 2, 6, 4), x(1, 2, 6, 3), x(5, 6), version=23, macs=2 * 5 * 6 * (4 + 3)),
    row("Attention", x(1, 2, 5, 4), x(1, 2, 5, 4), x(1, 2, 5, 4), version=23, is_causal=1, macs=2 * 2 * 5 * 5 * 4),
    row("Attention", x(1, 2, 1, 4), x(1, 2, 1, 4), x(1, 2, 1, 4), None, x(1, 2, 6, 4), x(1, 2, 6, 4), version=23,
        makes="y z a",
        macs=2 * 2 * 1 * 7 * 4),
    row("Attention", x(1, 5, 8), x(1, 6, 8), x(1, 6, 8), None, x(1, 2, 3, 4), x(1, 2, 3, 4), version=23,
        q_num_heads=2, kv_num_heads=2,
        makes="y z a", macs=2 * 2 * 5 * 9 * 4),
    row("Attention", x(1, 2, 5, 4), x(1, 2, 6, 4), x(1, 2, 6, 4), version=23, makes="y - - z", macs=2 * 2 * 5 * 6 * 4),
    row(f"{MS}:MultiHeadAttention", x(1, 5, 8), x(1, 6, 8), x(1, 6, 8), num_heads=2, macs=2 * 2 * 5 * 6 * 4),
    row(f"{MS}:MultiHeadAttention", x(1, 5, 8), x(1, 6, 8), x(1, 6, 12), num_heads=2, macs=2 * 5 * 6 * (4 + 6)),
    row(f"{MS}:MultiHeadAttention", x(1, 5, 8), x(1, 6, 8), x(1, 6, 8), w(24), num_heads=2, macs=2 * 2 * 5 * 6 * 4),
    row(f"{MS}:MultiHeadAttention", x(1, 5, 8), x(1, 2, 6, 4), x(1, 2, 6, 4), num_heads=2, macs=2 * 2 * 5 * 6 * 4),
    row(f"{MS}:MultiHeadAttention", x(1, 1, 8), x(1, 1, 8), x(1, 1, 8), None, None, None, x(1, 2, 6, 4),
        x(1, 2, 6, 4), num_heads=2,
        makes="y z a", macs=2 * 2 * 1 * 7 * 4),
    row(f"{MS}:Attention", x(1, 6, 8), w(8, 24), w(24), num_heads=2, macs=6 * 8 * 24 + 2 * 6 * 6 * 8),
    row(f"{MS}:Attention", x(1, 6, 8), w(8, 24), w(24), num_heads=2, unidirectional=1, macs=6 * 8 * 24 + 2 * 6 * 6 * 8),
    row(f"{MS}:Attention", x(1, 6, 8), w(8, 20), w(20), num_heads=2, qkv_hidden_sizes=[8, 8, 4],
        macs=6 * 8 * 20 + 6 * 6 * (8 + 4)),
    row(f"{MS}:Attention", x(1, 1, 8), w(8, 24), w(24), None, x(2, 1, 2, 6, 4), num_heads=2, makes="y z",
        macs=8 * 24 + 2 * 7 * 8),
    row(f"{MS}:Attention", x(2, 6, 8), w(8, 24), w(24), Fed(np.array([6, 4], np.int32)), num_heads=2,
        macs=2 * (6 * 8 * 24 + 2 * 6 * 6 * 8)),
    row(f"{MS}:QAttention", x(1, 6, 8, of="uint8"), w(8, 24, of="uint8"), w(24), scalar(0.1, "float32"),
        scalar(0.1, "float32"), None,
        scalar(0, "uint8"), scalar(0, "uint8"), num_heads=2, macs=6 * 8 * 24 + 2 * 6 * 6 * 8),
    row(f"{MS}:QAttention", x(1, 1, 8, of="uint8"), w(8, 24, of="uint8"), w(24), scalar(0.1, "float32"),
        scalar(0.1, "float32"), None,
        scalar(0, "uint8"), scalar(0, "uint8"), x(2, 1, 2, 6, 4), num_heads=2, unidirectional=1, makes="y z",
        macs=8 * 24 + 2 * 7 * 8),
    row(f"{MS}:GroupQueryAttention", x(1, 6, 64), x(1, 6, 32), x(1, 6, 32), None, None, fed(5, of="int32"),
        scalar(6, "int32"), num_heads=4,
        kv_num_heads=2, makes="y z a", macs=2 * 4 * 6 * 6 * 16),
    row(f"{MS}:GroupQueryAttention", x(1, 1, 64), x(1, 1, 32), x(1, 1, 32), x(1, 2, 9, 16), x(1, 2, 9, 16),
        fed(9, of="int32"),
        scalar(10, "int32"), num_heads=4, kv_num_heads=2, makes="y z a", macs=2 * 4 * 10 * 16),
    row(f"{MS}:GroupQueryAttention", x(1, 6, 128), None, None, None, None, fed(5, of="int32"), scalar(6, "int32"),
        w(8, 8), w(8, 8),
        num_heads=4, kv_num_heads=2, do_rotary=1, makes="y z a", macs=2 * 4 * 6 * 6 * 16),
    row(f"{MS}:RotaryEmbedding", x(1, 2, 3, 8), x(1, 3, of="int64"), w(6, 4), w(6, 4)),
    row(f"{MS}:RotaryEmbedding", x(1, 3, 16), x(1, 3, of="int64"), w(6, 4), w(6, 4)),
    row(f"{MS}:RotaryEmbedding", x(1, 2, 3, 8), x(1, 3, of="int64"), w(6, 2), w(6, 2), rotary_embedding_dim=4,
        num_heads=2),
    row("RotaryEmbedding", x(1, 2, 3, 8), w(6, 4), w(6, 4), x(1, 3, of="int64"), version=23),
    row("RotaryEmbedding", x(1, 3, 16), w(1, 3, 4), w(1, 3, 4), version=23, num_heads=2),
    row("RotaryEmbedding", x(1, 3, 16), w(1, 3, 2), w(1, 3, 2), version=23, num_heads=2, rotary_embedding_dim=4),
    row(f"{MS}:EmbedLayerNormalization", x(2, 3, of="int32"), x(2, 3, of="int32"), w(9, 8), w(9, 8), w(9, 8), w(8),
        w(8), makes="y z"),
    row(f"{MS}:EmbedLayerNormalization", x(2, 3, of="int32"), None, w(9, 8), w(9, 8), None, w(8), w(8), makes="y z a"),
]  # fmt: skip

# Rows x directions x gates x hidden x (inputs + hidden); a step takes each matrix once.
RECURRENT = [
    row("LSTM", x(7, 3, 5), w(1, 24, 5), w(1, 24, 6), hidden_size=6, makes="y z a", macs=7 * 3 * 24 * (5 + 6)),
    row("LSTM", x(7, 3, 5), w(2, 24, 5), w(2, 24, 6), w(2, 48), None, x(2, 3, 6), x(2, 3, 6), hidden_size=6,
        direction="bidirectional",
        makes="y z a", macs=7 * 3 * 2 * 24 * (5 + 6)),
    row("LSTM", x(7, 3, 5), w(1, 24, 5), w(1, 24, 6), w(1, 48), Fed(np.array([7, 4, 2], np.int32)), hidden_size=6,
        direction="reverse",
        makes="- z", macs=7 * 3 * 24 * (5 + 6)),
    row("GRU", x(7, 3, 5), w(1, 18, 5), w(1, 18, 6), w(1, 36), hidden_size=6, makes="y z", macs=7 * 3 * 18 * (5 + 6)),
    row("GRU", x(7, 3, 5), w(2, 18, 5), w(2, 18, 6), hidden_size=6, direction="bidirectional", linear_before_reset=1,
        macs=7 * 3 * 2 * 18 * (5 + 6)),
    row("RNN", x(7, 3, 5), w(1, 6, 5), w(1, 6, 6), hidden_size=6, makes="y z", macs=7 * 3 * 6 * (5 + 6)),
    row("RNN", x(7, 3, 5), w(2, 6, 5), w(2, 6, 6), w(2, 12), None, x(2, 3, 6), hidden_size=6, direction="bidirectional",
        activations=["Relu", "Relu"], makes="y z", macs=7 * 3 * 2 * 6 * (5 + 6)),
    row(f"{MS}:DynamicQuantizeLSTM", x(7, 3, 5), w(1, 5, 24, of="uint8"), w(1, 6, 24, of="uint8"), w(1, 48), None,
        None, None, None,
        w(1), scalar([0], "uint8"), w(1), scalar([0], "uint8"), hidden_size=6, makes="y z a",
        macs=7 * 3 * 24 * (5 + 6)),
    row(f"{MS}:DynamicQuantizeLSTM", x(7, 3, 5), w(2, 5, 24, of="uint8"), w(2, 6, 24, of="uint8"), None, None, None,
        None, None,
        w(2), scalar([0, 0], "uint8"), w(2), scalar([0, 0], "uint8"), hidden_size=6, direction="bidirectional",
        makes="y z a",
        macs=7 * 3 * 2 * 24 * (5 + 6)),
]  # fmt: skip

ONE, ZERO, SIGNED = scalar(0.1, "float32"), scalar(0, "uint8"), scalar(0, "int8")
BYTES = [
    row("QuantizeLinear", x(2, 3), ONE), row("QuantizeLinear", x(2, 3), ONE, SIGNED),
    row("QuantizeLinear", x(2, 3), w(3) ** 2, scalar([0] * 3, "int8"), axis=1),
    row("QuantizeLinear", x(2, 3), ONE, version=21, output_dtype=3),
    row("QuantizeLinear", x(2, 3), ONE, scalar(0, "uint16"), version=21),
    row(f"{MS}:QuantizeLinear", x(2, 3), ONE, scalar(0, "uint16")),
    row("DequantizeLinear", x(2, 3, of="uint8"), ONE),
    row("DequantizeLinear", x(2, 3, of="int8"), w(3), scalar([0] * 3, "int8"), axis=1),
    row("DequantizeLinear", x(2, 3, of="int32"), ONE),
    row(f"{MS}:DequantizeLinear", x(2, 3, of="uint16"), ONE, scalar(0, "uint16")),
    row("DynamicQuantizeLinear", x(2, 3), makes="y z a"),
    row("MatMulInteger", x(2, 3, of="uint8"), x(3, 4, of="int8"), macs=2 * 3 * 4),
    row("MatMulInteger", x(5, 2, 3, of="uint8"), w(3, 4, of="uint8"), ZERO, ZERO, macs=5 * 2 * 3 * 4),
    row("MatMulInteger", x(3, of="uint8"), w(3, 4, of="uint8"), macs=3 * 4),
    row("MatMulInteger", x(2, 3, of="uint8"), w(3, of="uint8"), macs=2 * 3),
    row(f"{MS}:MatMulIntegerToFloat", x(2, 3, of="uint8"), w(3, 4, of="uint8"), ONE, ONE, ZERO, ZERO, w(4),
        macs=2 * 3 * 4),
    row(f"{MS}:MatMulIntegerToFloat", x(2, 3, of="uint8"), w(3, 4, of="uint8"), ONE, w(4), macs=2 * 3 * 4),
    row(f"{MS}:DynamicQuantizeMatMul", x(5, 2, 3), w(3, 4, of="uint8"), ONE, ZERO, w(4), macs=5 * 2 * 3 * 4),
    row(f"{MS}:DynamicQuantizeMatMul", x(2, 3), w(3, 4, of="uint8"), ONE, macs=2 * 3 * 4),
    row("ConvInteger", x(1, 4, 6, 6, of="uint8"), w(6, 4, 3, 3, of="uint8"), macs=6 * 16 * 4 * 9),
    row("ConvInteger", x(1, 4, 6, 6, of="uint8"), w(6, 2, 3, 3, of="uint8"), ZERO, ZERO, group=2, pads=[0, 0, 1, 1],
        strides=[2, 2], macs=6 * 9 * 2 * 9),
    row("QLinearConv", x(1, 4, 6, 6, of="uint8"), ONE, ZERO, w(6, 4, 3, 3, of="uint8"), ONE, ZERO, ONE, ZERO,
        w(6, of="int32"), pads=[0, 1, 1, 0],
        macs=6 * 25 * 4 * 9),
    row("QLinearConv", x(1, 4, 6, 6, of="int8"), ONE, SIGNED, w(4, 1, 3, 3, of="int8"), w(4) ** 2,
        scalar([0] * 4, "int8"), ONE, SIGNED, group=4,
        dilations=[2, 2], macs=4 * 4 * 9),
    row("QLinearConv", x(1, 4, 9, of="uint8"), ONE, ZERO, w(6, 4, 3, of="uint8"), ONE, ZERO, ONE, ZERO, strides=[2],
        macs=6 * 4 * 4 * 3),
    row("QLinearMatMul", x(2, 3, of="uint8"), ONE, ZERO, w(3, 4, of="uint8"), ONE, ZERO, ONE, ZERO, macs=2 * 3 * 4),
    row("QLinearMatMul", x(5, 2, 3, of="int8"), ONE, SIGNED, w(3, 4, of="int8"), ONE, SIGNED, ONE, SIGNED,
        macs=5 * 2 * 3 * 4),
    row("QLinearMatMul", x(2, 3, of="uint8"), ONE, ZERO, w(3, 4, of="int8"), ONE, SIGNED, ONE, ZERO, macs=2 * 3 * 4),
    row(f"{MS}:QGemm", x(2, 3, of="uint8"), ONE, ZERO, w(3, 4, of="uint8"), ONE, ZERO, w(4, of="int32"), ONE, ZERO,
        macs=2 * 3 * 4),
    row(f"{MS}:QGemm", x(2, 3, of="uint8"), ONE, ZERO, w(4, 3, of="int8"), ONE, SIGNED, None, ONE, ZERO, transB=1,
        macs=2 * 3 * 4),
    row(f"{MS}:QGemm", x(3, 2, of="uint8"), ONE, ZERO, w(3, 4, of="uint8"), ONE, ZERO, None, transA=1, macs=2 * 3 * 4),
    *(row(f"{MS}:{op}", x(2, 3, of="uint8"), ONE, ZERO, x(3, of="uint8"), ONE, ZERO, ONE, ZERO)
        for op in ("QLinearAdd", "QLinearMul")),
    row(f"{MS}:QLinearGlobalAveragePool", x(1, 4, 5, 5, of="uint8"), ONE, ZERO, ONE, ZERO),
    row(f"{MS}:QLinearGlobalAveragePool", x(1, 5, 5, 4, of="uint8"), ONE, ZERO, ONE, ZERO, channels_last=1),
    row(f"{MS}:QLinearAveragePool", x(1, 4, 7, 7, of="uint8"), ONE, ZERO, ONE, ZERO, kernel_shape=[3, 3],
        strides=[2, 2]),
    row(f"{MS}:QLinearAveragePool", x(1, 7, 7, 4, of="int8"), ONE, SIGNED, ONE, SIGNED, kernel_shape=[3, 3],
        channels_last=1),
    row(f"{MS}:QLinearConcat", ONE, ZERO, x(2, 3, of="uint8"), ONE, ZERO, x(2, 1, of="uint8"), ONE, ZERO, axis=1),
    *(row(f"{MS}:{op}", x(2, 3, of="uint8"), ONE, ZERO, ONE, ZERO) for op in ("QLinearSigmoid", "QLinearLeakyRelu")),
    row(f"{MS}:QLinearSoftmax", x(2, 3, of="uint8"), ONE, ZERO, ONE, ZERO, opset=13),
    row(f"{MS}:QLinearWhere", x(2, 3, of="bool"), x(2, 3, of="uint8"), ONE, ZERO, x(3, of="uint8"), ONE, ZERO, ONE,
        ZERO),
    row(f"{MS}:MatMulNBits", x(3, 64), w(24, 2, 16, of="uint8"), w(24 * 2), N=24, K=64, bits=4, block_size=32,
        macs=3 * 24 * 64),
    row(f"{MS}:MatMulNBits", x(2, 3, 64), w(24, 2, 16, of="uint8"), w(24 * 2), w(24, of="uint8"), None, w(24), N=24,
        K=64, bits=4, block_size=32,
        macs=2 * 3 * 24 * 64),
    row(f"{MS}:MatMulNBits", x(3, 64), w(24, 2, 32, of="uint8"), w(24 * 2), N=24, K=64, bits=8, block_size=32,
        macs=3 * 24 * 64),
    row(f"{MS}:GatherBlockQuantized", w(9, 16, of="uint8"), x(2, 3, of="int64"), w(9, 2), block_size=16, bits=4,
        quantize_axis=1),
    row(f"{MS}:GatherBlockQuantized", w(9, 32, of="uint8"), x(2, 3, of="int64"), w(9, 2), block_size=16, bits=8,
        quantize_axis=1),
]  # fmt: skip

LEARNED = [
    row(f"{ML}:LinearRegressor", x(2, 3), coefficients=[1.0] * 6, intercepts=[1.0] * 2, targets=2, version=15,
        macs=2 * 3 * 2),
    row(f"{ML}:LinearRegressor", x(2, 3), coefficients=[1.0] * 3, version=15, macs=2 * 3),
    row(f"{ML}:LinearClassifier", x(2, 3), coefficients=[1.0] * 9, intercepts=[1.0] * 3, classlabels_ints=[0, 1, 2],
        version=15,
        post_transform="SOFTMAX", multi_class=1, makes="y z", macs=2 * 3 * 3),
    row(f"{ML}:LinearClassifier", x(2, 3), coefficients=[1.0] * 3, intercepts=[1.0], classlabels_ints=[0, 1],
        post_transform="LOGISTIC",
        version=15, makes="y z", macs=2 * 3),
    row(f"{ML}:LinearClassifier", x(2, 3, of="int64"), coefficients=[1.0] * 9, intercepts=[1.0] * 3,
        classlabels_ints=[0, 1, 2],
        version=15, makes="y z", macs=2 * 3 * 3),
    row(f"{ML}:Scaler", x(2, 3), offset=[1.0] * 3, scale=[2.0] * 3, version=15),
    row(f"{ML}:Scaler", x(2, 3), offset=[1.0], scale=[2.0], version=15),
    row(f"{ML}:Scaler", x(2, 3, of="int64"), offset=[1.0], scale=[2.0], version=15),
    *(row(f"{ML}:Normalizer", x(2, 3), norm=norm, version=15) for norm in ("L1", "L2", "MAX")),
    row(f"{ML}:Normalizer", x(2, 3, of="int64"), norm="L2", version=15),
    row(f"{ML}:ArrayFeatureExtractor", x(2, 5), ints(0, 3), version=15),
    row(f"{ML}:ArrayFeatureExtractor", x(5), ints(0, 3), version=15),
]  # fmt: skip


def several(text: str, given: dict[str, Any], instead: str = "", version: int = 20, macs: int = 0) -> OnnxRow:
    """A file of a few nodes that makes "y": `result = Type(inputs, setting=value)`, separated by semicolons."""
    return OnnxRow(nodes_of(text), given, "y", version, macs, nodes_of(instead))


def nodes_of(text: str) -> list[Any]:
    found = []
    for part in filter(None, map(str.strip, text.split(";"))):
        made, _, call = part.partition(" = ")
        kind, _, rest = call.rstrip(")").partition("(")
        domain, _, op = kind.rpartition(":")
        words = [one for one in rest.split(" ") if one]
        settings = {key: eval(value) for key, _, value in (word.partition("=") for word in words if "=" in word)}
        found.append(node(op, " ".join(word for word in words if "=" not in word), made, domain=domain, **settings))
    return found


LISTS = [
    several("s = SequenceConstruct(a b); y = SequenceAt(s k)", {"a": x(2, 3), "b": x(4, 3), "k": scalar(1)}),
    several("s = SequenceConstruct(a b); y = SequenceAt(s k)", {"a": x(2, 3), "b": x(4, 3), "k": scalar(-2)}),
    several("s = SequenceConstruct(a b); y = ConcatFromSequence(s axis=-2)", {"a": x(2, 3), "b": x(4, 3)}),
    several("s = SequenceConstruct(a b); y = ConcatFromSequence(s axis=-1 new_axis=1)", {"a": x(2, 3), "b": x(2, 3)}),
    several("s = SequenceEmpty(); t = SequenceInsert(s a); y = ConcatFromSequence(t axis=0)", {"a": x(2, 3)}),
    several("s = SequenceConstruct(a); t = SequenceInsert(s b k); y = SequenceAt(t k)",
        {"a": x(2, 3), "b": x(4, 3), "k": scalar(0)}),
    several("s = SequenceConstruct(a a); t = SequenceInsert(s b k); y = SequenceAt(t k)",
        {"a": x(2, 3), "b": x(4, 3), "k": scalar(-1)}),
    *(several(f"s = SplitToSequence(a {how}); y = SequenceAt(s k)", {"a": x(6, 2), "n": sizes, "k": scalar(place)})
      for how, sizes,
      place in [("n", scalar(4), 1), ("n", ints(1, 5), 1), ("n", ints(6), 0), ("n axis=-1", scalar(1), 0)]),
    *(several(f"s = SplitToSequence(a {how}); y = SequenceAt(s k)", {"a": x(6, 2), "k": scalar(1)})
        for how in ("", "keepdims=0", "axis=1")),
    several("s = SplitToSequence(a axis=1); y = SequenceAt(s k)", {"a": x(6, 1), "k": scalar(0)}),
    several("s = SplitToSequence(a axis=1); y = Identity(s)", {"a": x(6, 2)}),
    several("t = Constant(value_string='text'); u = Constant(value_strings=['a','b']); y = Relu(a)", {"a": x(2, 3)}),
    several("s = Optional(a); y = OptionalGetElement(s)", {"a": x(2, 3)}),
    several(f"b = {MS}:MemcpyToHost(a); y = Relu(b)", {"a": x(2, 3)}, "y = Relu(a)"),
    several(f"l p = {ML}:LinearClassifier(a coefficients=[1.0]*9 intercepts=[1.0]*3 classlabels_ints=[0,1,2]); "
            f"q = {ML}:ZipMap(p classlabels_int64s=[0,1,2]); y = Relu(p)", {"a": x(2, 3)}, version=15, macs=2 * 9),
]  # fmt: skip


def on_bytes(call: str, given: Fed, weight: Any = ZERO, macs: int = 0, **more: Any) -> OnnxRow:
    """An operator that runtimes run on bytes, because it stands between steps to floats and back."""
    text = ("q = QuantizeLinear(a s o); f = DequantizeLinear(q s o); v = DequantizeLinear(w s o); c = {}; "
            "r = QuantizeLinear(c s o); y = DequantizeLinear(r s o)")  # fmt: skip
    return several(text.format(call), {"a": given, "w": weight, "s": ONE, "o": ZERO, **more}, macs=macs, version=13)


_BYTES = w(4, 4, 3, 3, of="uint8")
ON_BYTES = [
    on_bytes("Conv(f v strides=[2,2] pads=[0,0,1,1])", x(1, 4, 6, 6), _BYTES, macs=9 * 4 * 4 * 9),
    on_bytes("ConvTranspose(f v strides=[2,2])", x(1, 4, 5, 5), _BYTES, macs=25 * 4 * 4 * 9),
    on_bytes("Gemm(f v transB=1)", x(2, 3), w(4, 3, of="uint8"), macs=2 * 3 * 4),
    on_bytes("MatMul(f v)", x(5, 2, 3), w(3, 4, of="uint8"), macs=5 * 2 * 3 * 4),
    *(on_bytes(f"{op}(f f)", x(2, 3)) for op in ("Add", "Mul", "Sub")),
    on_bytes("Concat(f f axis=1)", x(2, 3)), on_bytes("Flatten(f)", x(2, 3, 4)), on_bytes("Transpose(f)", x(2, 3)),
    on_bytes("MaxPool(f kernel_shape=[3,3] pads=[1]*4)", x(1, 4, 6, 6)),
    on_bytes("GlobalAveragePool(f)", x(1, 4, 6, 6)),
    on_bytes("AveragePool(f kernel_shape=[3,3] pads=[0,1,1,0])", x(1, 4, 6, 6)),
    on_bytes("Reshape(f n)", x(2, 3, 4), n=ints(6, -1)), on_bytes("Squeeze(f n)", x(1, 3), n=ints(0)),
    on_bytes("Unsqueeze(f n)", x(2, 3), n=ints(1)), on_bytes("Slice(f n m)", x(4, 5), n=ints(1), m=ints(3)),
    on_bytes("Pad(f n)", x(2, 3), n=ints(1, 0, 0, 2)), on_bytes("Clip(f)", x(2, 3)), on_bytes("Relu(f)", x(2, 3)),
    on_bytes("Resize(f - n)", x(1, 2, 4, 4), n=scalar([1, 1, 2, 2], "float32")),
]  # fmt: skip

PICTURE = {"a": x(1, 16, 6, 6), "w": w(16, 16, 3, 3)}
_BLOCKED = f"b = {BLOCKED}:ReorderInput(a); c = {BLOCKED}:%s; y = {BLOCKED}:ReorderOutput(c channels=16)"
# Blocks of channels are as wide as the machine's registers, and some machines have none.
OTHER_HARDWARE = [
    several(_BLOCKED % "Conv(b w pads=[1]*4)", PICTURE, "y = Conv(a w pads=[1]*4)", macs=36 * 16 * 16 * 9),
    *(several(_BLOCKED % f"{op}(b kernel_shape=[2,2] strides=[2,2])", {"a": x(1, 16, 6, 6)},
        f"y = {op}(a kernel_shape=[2,2] strides=[2,2])")
      for op in ("MaxPool", "AveragePool")),
    *(several(_BLOCKED % f"{op}(b)", {"a": x(1, 16, 6, 6)}, f"y = {op}(a)")
        for op in ("GlobalAveragePool", "GlobalMaxPool")),
    several(f"b = {BLOCKED}:ReorderInput(a channels_last=1); y = {BLOCKED}:ReorderOutput(b channels=10)",
        {"a": x(1, 6, 5, 10)},
            "y = Transpose(a perm=[0,3,1,2])"),
    several(f"b = {BLOCKED}:ReorderInput(a); y = {BLOCKED}:ReorderOutput(b channels=10 channels_last=1)",
        {"a": x(1, 10, 6, 5)},
            "y = Transpose(a perm=[0,2,3,1])"),
    several(f"y = {MS}:GroupNorm(a w b groups=2 activation=0)", {"a": x(1, 4, 4, 6), "w": w(6), "b": w(6)},
        "y = Identity(a)"),
    several(f"y = {MS}:GroupNorm(a w b groups=2 activation=1)", {"a": x(1, 4, 4, 6), "w": w(6), "b": w(6)},
        "y = Sigmoid(a)"),
    *(several(f"y = {MS}:QLinearReduceMean(a s o s o axes=[1,-1] keepdims={keep})",
              {"a": x(2, 3, 4, of="uint8"), "s": ONE, "o": ZERO},
              f"b = DequantizeLinear(a s o); c = ReduceMean(b axes=[1,-1] keepdims={keep}); y = QuantizeLinear(c s o)",
              version=13) for keep in (0, 1)),
    several(f"y = {MS}:SimplifiedLayerNormalization(a w)", {"a": x(2, 3, 4), "w": w(4)},
        "y = SimplifiedLayerNormalization(a w)"),
]  # fmt: skip

TABLES = [
    ARITHMETIC,
    REDUCED,
    MOVED,
    RESIZED,
    PRODUCTS,
    POOLS,
    NORMS,
    ATTENTION,
    RECURRENT,
    BYTES,
    LEARNED,
    LISTS,
    ON_BYTES,
    OTHER_HARDWARE,
]
ROWS = [pytest.param(one, id=one.label) for table in TABLES for one in table]
RANDOM = {"RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Bernoulli", "Multinomial"}

# What exporters make shapes and conditions of.
SIZES = (
    "Add Sub Mul Div Mod Pow Neg Abs Sign Floor Ceil Round Sqrt Min Max Clip CumSum Equal Greater GreaterOrEqual Less "
    "LessOrEqual And Or Xor Not Where Cast CastLike Shape Size Constant ConstantOfShape Range Reshape Flatten "
    "Transpose Squeeze Unsqueeze Concat Split Slice Gather GatherElements GatherND ScatterElements ScatterND Expand "
    "Tile Pad Trilu OneHot ReduceSum ReduceProd ReduceMax ReduceMin ReduceMean ArgMax ArgMin TopK Identity"
).split()

# Their answers would be wrong, so there is none.
REFUSED = {
    "its window has dilations of": row("AveragePool", x(1, 2, 7, 7), kernel_shape=[3, 3], dilations=[2, 2]),
    "input 1 is missing": row(f"{MS}:MultiHeadAttention", x(1, 5, 2, 3, 4), num_heads=2),
    "it gives 2 sizes for 4 dimensions": row("Resize", x(1, 2, 4, 4), None, None, ints(6, 5)),
    "it resizes 4 dimensions": row("Resize", x(2, 2, 2, 2), None, scalar([2] * 4, "float32")),
    "it resizes 3 dimensions in the mode 'cubic'": row("Resize", x(1, 2, 3, 3, 3), None, None, ints(1, 2, 5, 5, 5),
        mode="cubic"),
    "its batch comes first": row("GRU", x(3, 7, 5), w(1, 18, 5), w(1, 18, 6), hidden_size=6, layout=1),
    "its activation 'Magic' is not known": row(f"{MS}:FusedConv", x(1, 4, 6, 6), w(4, 4, 1, 1), activation="Magic"),
    "it has 3 pads for 2 dimensions": row("Conv", x(1, 4, 6, 6), w(4, 4, 1, 1), pads=[1, 1, 1]),
    "do not fit a kernel": row("Conv", x(1, 4, 6, 6), w(4, 4, 1, 1), strides=[1]),
    "and weight (4, 4, 1) do not fit": row("Conv", x(1, 4, 6, 6), w(4, 4, 1)),
    "has 0 dimensions to pool": row("GlobalMaxPool", x(1, 4)),
    "it reorders 3 dimensions": row("Transpose", x(2, 3), perm=[0, 1, 2]),
    "differ beside dimension 0": row("Concat", x(2, 3), x(2, 4), axis=0),
    "it has no value that is understood": row("Constant"),
    "cannot be multiplied by (4, 4)": row("MatMulInteger", x(2, 3, of="uint8"), w(4, 4, of="uint8")),
    "its axis is 4": row("Resize", x(1, 2, 4, 4), None, None, ints(6), axes=[4]),
    "its axis is 2": row("Pad", x(3, 4), ints(1, 2), None, ints(2)),
    "its axis is 3": row("Flatten", x(2), axis=3),
    "depends on the values of": row("Tile", x(2, 3), x(2, of="int64")),
    "do not fit each other": row("Where", x(2, of="bool"), x(3), x(3)),
    "it does not say how many heads it has": row("Attention", x(1, 5, 8), x(1, 6, 8), x(1, 6, 8), version=23),
    "it does not say how many heads": row(f"{MS}:GroupQueryAttention", x(1, 5, 8), x(1, 6, 8), x(1, 6, 8)),
    "its 3 heads do not fit 24 columns": row(f"{MS}:Attention", x(1, 6, 8), w(8, 24), num_heads=3),
    "does not fit 24x64 weights": row(f"{MS}:MatMulNBits", x(3, 32), w(24, 2, 16, of="uint8"), w(48), N=24, K=64,
        bits=4, block_size=32),
    f"its result would have {6 << 50:,} elements": row("Tile", x(2, 3), ints(1 << 25, 1 << 25)),
    "its inputs do not fit": row("Tile", x(2, 3), ints(1 << 40, 1 << 40)),
    f"its result would have {2 << 50:,} elements": row(
        "OneHot", x(2, of="int64"), scalar(1 << 50), scalar([0.0, 1.0], "float32")),
    "its result would have the shape (-1,)": row("ConstantOfShape", ints(-1)),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("operators")


@pytest.mark.parametrize("one", ROWS)
def test_shapes_and_types_are_those_of_onnxruntime(one: OnnxRow, folder: Path) -> None:
    assert reading_makes(one, folder) == outline(onnxruntime_makes(one))


@pytest.mark.parametrize("one", [given for given in ROWS if given.values[0].macs])
def test_macs_follow_from_the_dimensions(one: OnnxRow, folder: Path) -> None:
    assert profiled(one, folder).totals.macs == one.macs


# One addition for each result, or of each query, key and value.
BIASED = {
    "FastGelu": (lambda *bias: row(f"{MS}:FastGelu", x(2, 3), *bias), w(3), 2 * 3),
    "MatMulIntegerToFloat": (
        lambda *bias: row(f"{MS}:MatMulIntegerToFloat", x(2, 3, of="uint8"), w(3, 4, of="uint8"), ONE, ONE, ZERO,
        ZERO, *bias),
        w(4), 2 * 4,
    ),
    "DynamicQuantizeMatMul": (
        lambda *bias: row(f"{MS}:DynamicQuantizeMatMul", x(2, 3), w(3, 4, of="uint8"), ONE, ZERO, *bias), w(4), 2 * 4
    ),
    "Gemm": (lambda *bias: row("Gemm", x(2, 3), w(3, 4), *bias), w(1), 2 * 4),
    "QGemm": (
        lambda *bias: row(f"{MS}:QGemm", x(2, 3, of="uint8"), ONE, ZERO, w(3, 4, of="uint8"), ONE, ZERO, *bias),
        w(4, of="int32"), 2 * 4,
    ),
    "SkipLayerNormalization": (
        lambda *bias: row(f"{MS}:SkipLayerNormalization", x(2, 3), x(2, 3), w(3), w(3), *bias), w(3), 2 * 3
    ),
    "MultiHeadAttention": (
        lambda *bias: row(f"{MS}:MultiHeadAttention", x(1, 5, 8), x(1, 6, 8), x(1, 6, 8), *bias, num_heads=2),
        w(24), (5 + 6 + 6) * 8,
    ),
    "Attention": (lambda *bias: row(f"{MS}:Attention", x(1, 6, 8), w(8, 24), *bias, num_heads=2), w(24), 6 * 24),
    "Conv": (lambda *bias: row("Conv", x(1, 4, 6, 6), w(6, 4, 3, 3), *bias), w(6), 16 * 6),
}  # fmt: skip


@pytest.mark.parametrize("name", BIASED)
def test_a_bias_is_one_addition_for_each_result(name: str, folder: Path) -> None:
    made, bias, additions = BIASED[name]
    without, with_bias = (profiled(one, folder).totals.flops for one in (made(), made(bias)))
    assert with_bias - without == additions


@pytest.mark.parametrize("version", sorted({given.values[0].version for given in ROWS}))
def test_nothing_is_without_a_price_and_nothing_else_has_macs(version: int, folder: Path) -> None:
    whole = joined([given.values[0] for given in ROWS if given.values[0].version == version])
    found = profiled(whole, folder)
    assert not found.unpriced
    assert found.totals.macs == whole.macs


@pytest.mark.parametrize("one", [given for given in ROWS if not RANDOM.intersection(given.values[0].ops)])
def test_values_that_are_worked_out_beforehand_are_those_of_onnxruntime(one: OnnxRow, folder: Path) -> None:
    """Shapes are made of such values in many files. Where ours would differ, there must be none."""
    for ours, theirs in zip(known_values(one, folder), onnxruntime_makes(one), strict=True):
        if ours is not None:
            assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("op", SIZES)
def test_sizes_that_a_graph_works_out_are_known(op: str, folder: Path) -> None:
    rows = [given.values[0] for given in ROWS if given.values[0].ops == {op}]
    assert rows
    assert all(value is not None for one in rows for value in known_values(one, folder))


@pytest.mark.parametrize("message", REFUSED)
def test_what_would_be_wrong_is_refused(message: str, folder: Path) -> None:
    with pytest.raises(TraceFailed, match=re.escape(message)):
        reading_makes(REFUSED[message], folder)


def test_every_operator_that_we_read_has_a_row() -> None:
    ours = {name for name in handlers if not name.startswith("tflite:")}
    assert ours - {op for given in ROWS for op in given.values[0].ops} == set()
