"""Every TFLite operator that we read, beside what LiteRT makes of the same file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_opt.errors import TraceFailed
from edge_opt.model_files.node_call import handlers
from operator_rows import Fed, outline, w, x
from tflite_graphs import Op, Scaled, State, Steps
from tflite_rows import TfliteRow, joined, known_values, litert_makes, one_op, profiled, reading_makes

SAME, VALID = 0, 1
RELU, RELU_N1_TO_1, RELU6, TANH = 1, 2, 3, 4


def i32(*values: int) -> Any:
    return np.array(values, np.int32)


def scalar(value: Any, of: str = "int32") -> Any:
    return np.array(value, of)


def fed(values: Any, of: str = "int32") -> Fed:
    return Fed(np.array(values, of))


def conv(kind: str, *inputs: Any, **settings: Any) -> TfliteRow:
    options = {"CONV_2D": "Conv2DOptions", "DEPTHWISE_CONV_2D": "DepthwiseConv2DOptions"}[kind]
    return one_op(kind, *inputs, options=options, **{"strideW": 1, "strideH": 1, **settings})


def pool(kind: str, given: Any, height: int, width: int, **settings: Any) -> TfliteRow:
    steps = {"strideW": 1, "strideH": 1, "filterHeight": height, "filterWidth": width}
    return one_op(kind, given, options="Pool2DOptions", **(steps | settings))


# In the products: results x channels that each sees x window.
PRODUCTS = [
    conv("CONV_2D", x(2, 8, 8, 4), w(6, 3, 3, 4), w(6), macs=2 * 64 * 6 * 4 * 9),
    conv("CONV_2D", x(1, 8, 8, 4), w(6, 3, 3, 4), w(6), padding=VALID, strideW=2, macs=6 * 3 * 6 * 4 * 9),
    conv("CONV_2D", x(1, 9, 9, 4), w(6, 3, 3, 4), w(6), padding=VALID, dilationWFactor=2, dilationHFactor=3,
         macs=3 * 5 * 6 * 4 * 9),
    conv("CONV_2D", x(1, 7, 8, 4), w(6, 2, 4, 4), w(6), strideW=2, strideH=3, macs=3 * 4 * 6 * 4 * 8),
    conv("CONV_2D", x(1, 7, 8, 4), w(6, 2, 4, 4), w(6), macs=7 * 8 * 6 * 4 * 8),
    conv("CONV_2D", x(1, 6, 6, 4), w(6, 1, 1, 2), w(6), macs=36 * 6 * 2),
    *(conv("CONV_2D", x(1, 4, 4, 2), w(2, 1, 1, 2), w(2), fusedActivationFunction=one, macs=16 * 4)
      for one in (RELU, RELU_N1_TO_1, RELU6)),
    conv("CONV_2D", x(1, 8, 8, 4, of="int8"), w(6, 3, 3, 4, of="int8"), Steps(i32(*range(6)), 0.01), makes="int8",
         macs=64 * 6 * 4 * 9),
    conv("CONV_2D", x(1, 8, 8, 4, of="uint8"), w(6, 3, 3, 4, of="uint8"), Steps(i32(*range(6)), 0.01), makes="uint8",
         fusedActivationFunction=RELU6, macs=64 * 6 * 4 * 9),
    conv("CONV_2D", x(1, 8, 8, 4), w(6, 3, 3, 4, of="int8"), w(6), macs=64 * 6 * 4 * 9),
    conv("DEPTHWISE_CONV_2D", x(1, 8, 8, 4), w(1, 3, 3, 4), w(4), depthMultiplier=1, macs=64 * 4 * 9),
    conv("DEPTHWISE_CONV_2D", x(1, 8, 8, 4), w(1, 3, 2, 8), w(8), depthMultiplier=2, padding=VALID, strideW=2,
        strideH=2,
         macs=3 * 4 * 8 * 6),
    conv("DEPTHWISE_CONV_2D", x(1, 8, 8, 4, of="int8"), w(1, 3, 3, 4, of="int8"), Steps(i32(1, 2, 3, 4), 0.01),
         makes="int8", depthMultiplier=1, dilationWFactor=2, macs=64 * 4 * 9),
    conv("DEPTHWISE_CONV_2D", x(1, 8, 8, 4), w(1, 3, 3, 4, of="int8"), w(4), depthMultiplier=1, macs=64 * 4 * 9),
    one_op("CONV_3D", x(1, 5, 5, 5, 2), w(2, 2, 2, 2, 3), w(3), options="Conv3DOptions", padding=VALID, strideD=1,
           strideW=2, strideH=1, macs=4 * 4 * 2 * 3 * 2 * 8),
    one_op("CONV_3D", x(1, 5, 5, 5, 2), w(2, 3, 2, 2, 3), options="Conv3DOptions", strideD=2, strideW=1, strideH=1,
           macs=3 * 5 * 5 * 3 * 2 * 12),
    *(one_op("TRANSPOSE_CONV", i32(1, high, wide, 3), w(3, 3, 3, 4), x(1, 5, 5, 4), options="TransposeConvOptions",
             padding=padding, strideW=2, strideH=2, macs=25 * 4 * 3 * 9)
      for high, wide, padding in ((10, 10, SAME), (9, 10, SAME), (11, 11, VALID))),
    one_op("TRANSPOSE_CONV", i32(1, 11, 11, 3), w(3, 3, 3, 4), x(1, 5, 5, 4), w(3), options="TransposeConvOptions",
           padding=VALID, strideW=2, strideH=2, macs=25 * 4 * 3 * 9),
    one_op("TRANSPOSE_CONV", i32(1, 10, 10, 3), w(3, 3, 3, 4, of="int8"), x(1, 5, 5, 4, of="int8"), makes="int8",
           options="TransposeConvOptions", strideW=2, strideH=2, macs=25 * 4 * 3 * 9),
    one_op("FULLY_CONNECTED", x(2, 3), w(4, 3), w(4), options="FullyConnectedOptions", macs=2 * 3 * 4),
    one_op("FULLY_CONNECTED", x(5, 2, 3), w(4, 3), None, options="FullyConnectedOptions", keepNumDims=True,
           fusedActivationFunction=RELU, macs=5 * 2 * 3 * 4),
    one_op("FULLY_CONNECTED", x(5, 2, 3), w(4, 3), w(4), options="FullyConnectedOptions", macs=5 * 2 * 3 * 4),
    one_op("FULLY_CONNECTED", x(2, 2, 3), w(4, 6), w(4), options="FullyConnectedOptions", macs=2 * 6 * 4),
    one_op("FULLY_CONNECTED", x(2, 3, of="int8"), w(4, 3, of="int8"), Steps(i32(1, 2, 3, 4), 0.01), makes="int8",
           options="FullyConnectedOptions", macs=2 * 3 * 4),
    one_op("FULLY_CONNECTED", x(2, 3), w(4, 3, of="int8"), w(4), options="FullyConnectedOptions", macs=2 * 3 * 4),
    one_op("FULLY_CONNECTED", x(2, 3, of="int16"), w(4, 3, of="int8"), Steps(np.arange(4), 0.01), makes="int16",
           options="FullyConnectedOptions", macs=2 * 3 * 4),
    one_op("BATCH_MATMUL", x(5, 2, 3), x(5, 3, 4), options="BatchMatMulOptions", macs=5 * 2 * 3 * 4),
    one_op("BATCH_MATMUL", x(5, 3, 2), w(4, 3), options="BatchMatMulOptions", adjX=True, adjY=True, macs=5 * 2 * 3 * 4),
    one_op("BATCH_MATMUL", x(5, 1, 2, 3), x(6, 3, 4), options="BatchMatMulOptions", macs=5 * 6 * 2 * 3 * 4),
    one_op("BATCH_MATMUL", x(2, 3, of="int8"), x(3, 4, of="int8"), makes="int8", options="BatchMatMulOptions",
           macs=2 * 3 * 4),
    one_op("BATCH_MATMUL", x(2, 3), w(3, 4, of="int8"), options="BatchMatMulOptions", macs=2 * 3 * 4),
]  # fmt: skip

_OPTIONS = {"ADD": "AddOptions", "SUB": "SubOptions", "MUL": "MulOptions", "DIV": "DivOptions"}
_COMPARED = "LESS GREATER LESS_EQUAL GREATER_EQUAL EQUAL NOT_EQUAL".split()
ARITHMETIC = [
    *(one_op(kind, x(2, 3), x(3), options=options) for kind, options in _OPTIONS.items()),
    *(one_op(kind, x(2, 3), scalar(2, "float32"), options=options) for kind, options in _OPTIONS.items()),
    *(one_op(kind, scalar(2, "float32"), x(2, 3), options=options) for kind, options in _OPTIONS.items()),
    *(one_op(kind, x(2, 3), x(2, 3), options=options, fusedActivationFunction=RELU6)
      for kind, options in _OPTIONS.items()),
    *(one_op(kind, x(2, 3, of="int32"), x(3, of="int32"), makes="int32", options=options)
      for kind, options in _OPTIONS.items()),
    *(one_op(kind, x(2, 3, of="int8"), x(2, 3, of="int8"), makes="int8", options=_OPTIONS[kind])
      for kind in ("ADD", "SUB", "MUL")),
    *(one_op(kind, x(2, 1, 3), x(4, 1)) for kind in ("POW", "MAXIMUM", "MINIMUM", "SQUARED_DIFFERENCE", "FLOOR_DIV",
                                                     "FLOOR_MOD")),
    *(one_op(kind, fed([-5, 5, -7]), fed([3, -3, 2]), makes="int32") for kind in ("FLOOR_DIV", "FLOOR_MOD", "MAXIMUM")),
    one_op("DIV", fed([-5, 5, -7]), fed([3, -3, 2]), makes="int32", options="DivOptions"),
    *(one_op(kind, x(2, 3, of="int32"), x(2, 3, of="int32"), makes="int32")
      for kind in ("POW", "SQUARED_DIFFERENCE", "MINIMUM", "BITWISE_XOR", "RIGHT_SHIFT")),
    one_op("ATAN2", x(2, 3), x(2, 3)),
    *(one_op(kind, x(2, 3, of=of), x(3, of=of), makes="bool") for kind in _COMPARED for of in ("float32", "int32")),
    *(one_op(kind, x(2, 3, of="bool"), x(3, of="bool"), makes="bool") for kind in ("LOGICAL_OR", "LOGICAL_AND")),
    one_op("LOGICAL_NOT", x(2, 3, of="bool"), makes="bool"),
    one_op("ADD_N", x(2, 3), x(2, 3), x(2, 3)), one_op("ADD_N", x(3, of="int32"), x(3, of="int32"), makes="int32"),
    *(one_op(kind, x(2, 3, 4)) for kind in (
        "LOGISTIC TANH EXP LOG SQRT RSQRT SIN COS ELU HARD_SWISH FLOOR CEIL ROUND RELU RELU6 RELU_N1_TO_1 RELU_0_TO_1 "
        "ABS NEG SIGN SQUARE").split()),
    *(one_op(kind, x(2, 3, of="int8"), makes="int8")
      for kind in "TANH EXP HARD_SWISH RELU RELU6 RELU_N1_TO_1 ELU".split()),
    one_op("LOGISTIC", x(2, 3, of="int8"), makes=Scaled((1,), "int8", 1 / 256, -128)),
    *(one_op(kind, x(3, of="int32"), makes="int32") for kind in ("ABS", "NEG", "SIGN")),
    *(one_op("GELU", x(2, 3), options="GeluOptions", approximate=one) for one in (True, False)),
    one_op("LEAKY_RELU", x(2, 3), options="LeakyReluOptions", alpha=0.3),
    one_op("LEAKY_RELU", x(2, 3, of="int8"), makes="int8", options="LeakyReluOptions", alpha=0.3),
    one_op("PRELU", x(2, 4, 4, 3), w(1, 1, 3)), one_op("PRELU", x(2, 4, 4, 3), w(4, 1, 3)),
    one_op("PRELU", x(2, 4, 4, 3, of="int8"), w(1, 1, 3, of="int8"), makes="int8"), one_op("PRELU", x(2, 3), w(3)),
    one_op("COMPLEX_ABS", Fed((w(2, 3) + 1j * w(2, 3)).astype(np.complex64))),
]  # fmt: skip

_REDUCED = "MEAN SUM REDUCE_MAX REDUCE_MIN REDUCE_PROD".split()
NORMS = [
    *(one_op("SOFTMAX", x(2, 3, of=of), makes=of, options="SoftmaxOptions", beta=1.0) for of in ("float32", "uint8")),
    one_op("LOG_SOFTMAX", x(2, 3), options="LogSoftmaxOptions"),
    one_op("L2_NORMALIZATION", x(2, 3), options="L2NormOptions"),
    one_op("L2_NORMALIZATION", x(2, 3, of="uint8"), makes=Scaled((1,), "uint8", 1 / 128, 128), options="L2NormOptions"),
    one_op("LOCAL_RESPONSE_NORMALIZATION", x(1, 4, 4, 6), options="LocalResponseNormalizationOptions", radius=2,
           bias=1.0, alpha=0.1, beta=0.5),
    *(one_op(kind, x(2, 3, 4), i32(1), options="ReducerOptions") for kind in _REDUCED),
    *(one_op(kind, x(2, 3, 4), i32(0, -1), options="ReducerOptions", keepDims=True) for kind in _REDUCED),
    *(one_op(kind, x(2, 3, 4), i32(0, 1, 2), options="ReducerOptions") for kind in _REDUCED),
    *(one_op(kind, x(2, 3, 4), scalar(-1), options="ReducerOptions") for kind in _REDUCED),
    *(one_op(kind, x(2, 3, of="int32"), i32(0), makes="int32", options="ReducerOptions") for kind in _REDUCED),
    *(one_op(kind, x(2, 3, 4), i32(1, 1, -2), options="ReducerOptions") for kind in _REDUCED),
    *(one_op(kind, x(), i32(), options="ReducerOptions") for kind in _REDUCED),
    *(one_op(kind, x(2, 3, of="int8"), i32(0), makes="int8", options="ReducerOptions")
      for kind in ("MEAN", "SUM", "REDUCE_MAX")),
    *(one_op(kind, x(2, 3, of="bool"), i32(-1), makes="bool", options="ReducerOptions")
      for kind in ("REDUCE_ANY", "REDUCE_ALL")),
    *(one_op(kind, x(2, 3, of="bool"), i32(0, 1), makes="bool", options="ReducerOptions", keepDims=True)
      for kind in ("REDUCE_ANY", "REDUCE_ALL")),
    *(one_op(kind, x(2, 3, 4), scalar(axis), makes="int32", options=options, outputType=2)
      for kind, options in (("ARG_MAX", "ArgMaxOptions"), ("ARG_MIN", "ArgMinOptions")) for axis in (0, -1)),
    one_op("ARG_MAX", x(2, 3), i32(1), makes="int64", options="ArgMaxOptions", outputType=4),
    *(one_op("CUMSUM", x(2, 3, of="int32"), scalar(axis), makes="int32", options="CumsumOptions", exclusive=left_out,
             reverse=back) for axis, left_out, back in ((0, False, False), (-1, True, False), (1, True, True))),
    one_op("TOPK_V2", x(2, 5), scalar(3), makes=["float32", "int32"], options="TopKV2Options"),
]  # fmt: skip

_POOLS = ("AVERAGE_POOL_2D", "MAX_POOL_2D", "L2_POOL_2D")
POOLS = [
    *(pool(kind, x(1, 7, 7, 2), 3, 3, padding=VALID) for kind in _POOLS),
    *(pool(kind, x(1, 7, 8, 2), 2, 3, strideW=2, strideH=2) for kind in _POOLS),
    *(pool(kind, x(1, 7, 8, 2), 2, 2) for kind in _POOLS),
    *(pool(kind, x(1, 8, 8, 2), 3, 2, strideW=2, strideH=3, fusedActivationFunction=RELU) for kind in _POOLS),
    *(pool(kind, x(1, 7, 7, 2, of=of), 2, 2, strideW=2, strideH=2, makes=of)
      for kind in ("AVERAGE_POOL_2D", "MAX_POOL_2D") for of in ("int8", "uint8", "int16")),
]  # fmt: skip

MOVED = [
    *(one_op("QUANTIZE", x(2, 3, of=one), makes=other) for one, other in
      (("float32", "int8"), ("float32", "uint8"), ("int8", "uint8"), ("float32", "int16"))),
    *(one_op("DEQUANTIZE", x(2, 3, of=of)) for of in ("int8", "uint8", "int16", "float16")),
    one_op("FAKE_QUANT", x(2, 3), options="FakeQuantOptions", min=-1.0, max=1.0, numBits=8),
    *(one_op("CAST", x(2, 3, of=one), makes=other, options="CastOptions") for one, other in
      (("float32", "int32"), ("int32", "float32"), ("bool", "float32"), ("float32", "bool"), ("int64", "int32"))),
    *(one_op("BITCAST", x(2, 4, of=one), makes=other) for one, other in
      (("float32", "int32"), ("int32", "uint32"), ("float32", "uint8"), ("uint8", "float32"))),
    *(one_op("SHAPE", x(2, 3, 4), makes=of, options="ShapeOptions", outType=number)
      for of, number in (("int32", 2), ("int64", 4))),
    one_op("RANK", x(2, 3, 4), makes="int32"),
    one_op("RESHAPE", x(2, 3, 4), i32(4, -1), options="ReshapeOptions"),
    one_op("RESHAPE", x(2, 3, 4), options="ReshapeOptions", newShape=[6, -1]),
    one_op("RESHAPE", x(1, 1), i32(), options="ReshapeOptions"),
    one_op("RESHAPE", x(2, 3), fed([3, 2]), makes=((3, 2), "float32"), options="ReshapeOptions"),
    one_op("SQUEEZE", x(1, 3, 1), options="SqueezeOptions", squeezeDims=[]),
    one_op("SQUEEZE", x(1, 3, 1), options="SqueezeOptions", squeezeDims=[-1]),
    *(one_op("EXPAND_DIMS", x(2, 3), i32(axis), options="ExpandDimsOptions") for axis in (0, -1, 1)),
    one_op("TRANSPOSE", x(2, 3, 4), i32(2, 0, 1)), one_op("BROADCAST_TO", x(3, 1), i32(2, 3, 4)),
    one_op("CONCATENATION", x(2, 3), x(2, 1), options="ConcatenationOptions", axis=-1),
    one_op("CONCATENATION", x(2, 3, of="int8"), x(4, 3, of="int8"), makes="int8", options="ConcatenationOptions"),
    one_op("PACK", x(2, 3), x(2, 3), options="PackOptions", axis=-1, valuesCount=2),
    one_op("UNPACK", x(2, 3), makes=["float32"] * 3, options="UnpackOptions", axis=-1, num=3),
    one_op("SPLIT", scalar(-1), x(2, 6), makes=["float32"] * 3, options="SplitOptions", numSplits=3),
    one_op("SPLIT_V", x(6, 2), i32(1, -1, 2), scalar(0), makes=["float32"] * 3, options="SplitVOptions", numSplits=3),
    one_op("SLICE", x(4, 5), i32(1, 0), i32(2, -1), makes=((2, 5), "float32")),
    one_op("SLICE", x(4, 5, of="int32"), i32(0, 2), i32(-1, 1), makes=((4, 1), "int32")),
    *(one_op("STRIDED_SLICE", x(4, 5, 6), i32(*begin), i32(*end), i32(*step), options="StridedSliceOptions", **masks)
      for begin, end, step, masks in (
        ((1, 0, 0), (3, 5, 6), (1, 2, 1), {}), ((0, 1), (4, 3), (1, 1), {}), ((-1,), (9,), (1,), {}),
        ((1, 2, 3), (2, 9, 9), (1, 1, 1), {"shrinkAxisMask": 1}), ((0, 2), (0, 3), (1, 1), {"ellipsisMask": 1}),
        ((0, 2), (0, 3), (1, 1), {"ellipsisMask": 1, "shrinkAxisMask": 2}),
        ((0, 0, 1), (0, 2, 3), (1, 1, 1), {"newAxisMask": 1}),
        ((3, 4, 5), (0, 0, 0), (-1, -2, -1), {}), ((3, 4), (0, 0), (-1, -2), {"endMask": 3}),
        ((0, 5), (0, 0), (1, -1), {"ellipsisMask": 1}), ((0, 5, 1), (4, 0, 2), (1, -1, 1), {"shrinkAxisMask": 4}),
        ((0, 5, 3), (0, 2, 1), (1, -1, -1), {"newAxisMask": 1}),
        ((1, 1, 1), (2, 2, 2), (1, 1, 1), {"beginMask": 5, "endMask": 6}),
        ((1, 0, 2), (2, 3, 1), (1, 1, 1), {"offset": True}))),
    one_op("GATHER", x(6, 4), x(2, 3, of="int32"), options="GatherOptions"),
    one_op("GATHER", x(3, 6, 4), i32(0, 2), options="GatherOptions", axis=-2),
    one_op("GATHER", x(7, 6, 2), scalar(1), options="GatherOptions", axis=1),
    one_op("GATHER", x(7), x(2, of="int64"), options="GatherOptions"),
    one_op("GATHER", x(2, 6, 4), x(2, 3, of="int32"), options="GatherOptions", axis=1, batchDims=1),
    one_op("GATHER", x(2, 4, 6), x(2, 3, of="int32"), options="GatherOptions", axis=2, batchDims=1),
    one_op("EMBEDDING_LOOKUP", x(5, of="int32"), w(6, 4)),
    one_op("EMBEDDING_LOOKUP", x(5, of="int32"), w(6, 4, of="int8")),
    one_op("GATHER_ND", x(6, 6, 4), x(3, 2, of="int32")), one_op("GATHER_ND", x(6, 6), x(2, 3, 2, of="int32")),
    one_op("SCATTER_ND", fed([[1], [3]]), x(2, 4), i32(5, 4)),
    one_op("DYNAMIC_UPDATE_SLICE", x(4, 5), x(2, 2), fed([1, 1])),
    one_op("REVERSE_SEQUENCE", x(3, 4), fed([1, 4, 2]), options="ReverseSequenceOptions", seqDim=1, batchDim=0),
    one_op("SELECT", x(2, 3, of="bool"), x(2, 3), x(2, 3)), one_op("SELECT", x(2, of="bool"), x(2, 3), x(2, 3)),
    one_op("SELECT", x(of="bool"), x(2, 3), x(2, 3)),
    one_op("SELECT_V2", x(3, of="bool"), x(2, 3), scalar(0, "float32")),
    one_op("SELECT_V2", x(4, 1, of="bool"), x(3), x(3)),
    one_op("TILE", x(2, 3), i32(2, 1)), one_op("REVERSE_V2", x(2, 3), i32(1)), one_op("REVERSE_V2", x(2, 3, 4), i32(1)),
    one_op("PAD", x(2, 3), scalar([[1, 0], [2, 3]])),
    one_op("PAD", x(2, 3, of="int8"), scalar([[1, 0], [2, 3]]), makes="int8"),
    one_op("PADV2", x(2, 3), scalar([[1, 0], [2, 3]]), scalar(5, "float32")),
    *(one_op("MIRROR_PAD", x(3, 4), scalar([[1, 0], [2, 1]]), options="MirrorPadOptions", mode=mode)
        for mode in (0, 1)),
    one_op("SPACE_TO_DEPTH", x(1, 4, 6, 2), options="SpaceToDepthOptions", blockSize=2),
    one_op("DEPTH_TO_SPACE", x(1, 2, 3, 8), options="DepthToSpaceOptions", blockSize=2),
    one_op("SPACE_TO_BATCH_ND", x(1, 4, 5, 2), i32(2, 3), scalar([[0, 0], [1, 0]])),
    one_op("SPACE_TO_BATCH_ND", x(1, 4, 2), i32(2), scalar([[0, 0]])),
    one_op("BATCH_TO_SPACE_ND", x(6, 2, 2, 2), i32(2, 3), scalar([[0, 1], [1, 0]])),
    *(one_op("RESIZE_BILINEAR", x(1, 4, 4, 2, of=of), i32(7, 3), makes=of, options="ResizeBilinearOptions")
      for of in ("float32", "int8", "uint8")),
    *(one_op("RESIZE_NEAREST_NEIGHBOR", x(1, 4, 4, 2, of=of), i32(7, 3), makes=of,
        options="ResizeNearestNeighborOptions")
      for of in ("float32", "int8", "uint8")),
    one_op("FILL", i32(2, 3), scalar(7, "float32")), one_op("FILL", i32(2), scalar(7), makes="int32"),
    one_op("ZEROS_LIKE", x(2, 3)), one_op("ZEROS_LIKE", x(2, 3, of="int32"), makes="int32"),
    *(one_op("RANGE", *(scalar(one, of) for one in given), makes=of) for of, given in
      (("int32", (1, 10, 3)), ("int32", (5, 0, -2)), ("float32", (0, 1, 0.25)))),
    *(one_op(kind, i32(2, 3), options="RandomOptions") for kind in ("RANDOM_UNIFORM", "RANDOM_STANDARD_NORMAL")),
    *(one_op("ONE_HOT", x(2, 3, of="int32"), scalar(6), scalar(1, of), scalar(0, of), makes=of,
        options="OneHotOptions", axis=axis)
      for of, axis in (("float32", -1), ("int32", 0), ("float32", 1))),
]  # fmt: skip


def _weights(count: int, *shape: int) -> list[Any]:
    return [w(*shape) for _ in range(count)]


# Rows x gates x hidden x (inputs + hidden): each matrix is multiplied once a step.
_LSTM = [*_weights(4, 6, 3), *_weights(4, 6, 6), None, None, None, *_weights(4, 6), None, None]
_STATE = State((2, 6))
RECURRENT = [
    one_op("UNIDIRECTIONAL_SEQUENCE_LSTM", x(2, 5, 3), *_LSTM, _STATE, _STATE, makes=((1, 1, 6), "float32"),
           options="UnidirectionalSequenceLSTMOptions", fusedActivationFunction=TANH, macs=2 * 5 * 4 * 6 * (3 + 6)),
    one_op("UNIDIRECTIONAL_SEQUENCE_LSTM", x(5, 2, 3), *_LSTM, _STATE, _STATE, makes=((1, 1, 6), "float32"),
           options="UnidirectionalSequenceLSTMOptions", fusedActivationFunction=TANH, timeMajor=True,
           macs=2 * 5 * 4 * 6 * (3 + 6)),
    one_op("UNIDIRECTIONAL_SEQUENCE_LSTM", x(2, 5, 3), *_weights(4, 6, 3), *_weights(4, 6, 2), None, None, None,
           *_weights(4, 6), w(2, 6), None, State((2, 2)), _STATE, makes=((1, 1, 2), "float32"),
           options="UnidirectionalSequenceLSTMOptions", fusedActivationFunction=TANH,
           macs=2 * 5 * (4 * 6 * (3 + 2) + 6 * 2)),
    one_op("BIDIRECTIONAL_SEQUENCE_LSTM", x(2, 5, 3), *_LSTM, *_LSTM, _STATE, _STATE, _STATE, _STATE, *[None] * 9,
           makes=((1, 1, 12), "float32"), options="BidirectionalSequenceLSTMOptions", fusedActivationFunction=TANH,
           mergeOutputs=True, timeMajor=False, macs=2 * 2 * 5 * 4 * 6 * (3 + 6)),
    one_op("BIDIRECTIONAL_SEQUENCE_LSTM", x(5, 2, 3), *_LSTM, *_LSTM, _STATE, _STATE, _STATE, _STATE, *[None] * 9,
           makes=[((1, 1, 6), "float32")] * 2, options="BidirectionalSequenceLSTMOptions",
           fusedActivationFunction=TANH, macs=2 * 2 * 5 * 4 * 6 * (3 + 6)),
    one_op("UNIDIRECTIONAL_SEQUENCE_RNN", x(2, 5, 3), w(6, 3), w(6, 6), w(6), _STATE, makes=((1, 1, 6), "float32"),
           options="SequenceRNNOptions", fusedActivationFunction=TANH, macs=2 * 5 * 6 * (3 + 6)),
    one_op("RNN", x(2, 3), w(6, 3), w(6, 6), w(6), _STATE, makes=((1, 6), "float32"), options="RNNOptions",
           fusedActivationFunction=TANH, macs=2 * 6 * (3 + 6)),
    # 4 units of rank 2: 8 filters over 3 features, then over 5 steps
    one_op("SVDF", x(2, 3), w(8, 3), w(8, 5), w(4), State((2, 5 * 8)), makes=((1, 4), "float32"), options="SVDFOptions",
           rank=2, macs=2 * 8 * (3 + 5)),
]  # fmt: skip

KEPT = [
    TfliteRow(
        [Op("VAR_HANDLE", "", "h", "VarHandleOptions", {"sharedName": "v"}), Op("ASSIGN_VARIABLE", "h x", ""),
         Op("READ_VARIABLE", "h", "y")],
        {"x": x(2, 3)}, {"h": ((), "resource"), "y": ((2, 3), "float32")}, "y",
    ),
]  # fmt: skip

TABLES = [PRODUCTS, ARITHMETIC, NORMS, POOLS, MOVED, RECURRENT, KEPT]
ROWS = [pytest.param(one, id=one.label) for table in TABLES for one in table]
RANDOM = {"RANDOM_UNIFORM", "RANDOM_STANDARD_NORMAL", "READ_VARIABLE"}
# What converters make shapes and conditions of.
SIZES = (
    "ADD SUB MUL DIV FLOOR_DIV FLOOR_MOD MAXIMUM MINIMUM POW LESS GREATER LESS_EQUAL GREATER_EQUAL EQUAL NOT_EQUAL "
    "LOGICAL_OR LOGICAL_AND LOGICAL_NOT ABS NEG CAST SHAPE RANK RESHAPE SQUEEZE EXPAND_DIMS TRANSPOSE CONCATENATION "
    "PACK UNPACK SPLIT SLICE GATHER FILL RANGE SUM REDUCE_PROD REDUCE_MAX REDUCE_MIN CUMSUM BROADCAST_TO TILE SELECT_V2"
).split()

# Their answers would be wrong, so there is none.
REFUSED = {
    "how many places it finds depends on values": one_op("WHERE", x(4, of="bool"), makes="int64"),
    "should have 4 dimensions": conv("CONV_2D", x(8, 8, 4), w(6, 3, 3, 4), w(6)),
    "does not fit its weight (6, 3, 3, 3)": conv("CONV_2D", x(1, 8, 8, 4), w(6, 3, 3, 3), w(6)),
    "does not fit its weight (4, 5)": one_op("FULLY_CONNECTED", x(2, 3), w(4, 5), options="FullyConnectedOptions"),
    "its strides are [0, 1]": conv("CONV_2D", x(1, 8, 8, 4), w(6, 3, 3, 4), w(6), strideH=0),
    "its activation 5 is not known": conv("CONV_2D", x(1, 8, 8, 4), w(6, 1, 1, 4), w(6), fusedActivationFunction=5),
    "its window is [0, 2]": pool("MAX_POOL_2D", x(1, 8, 8, 4), 0, 2),
    "its axis is 2": one_op("SPLIT", scalar(2), x(2, 6), options="SplitOptions", numSplits=1),
    "its axis is 3": one_op("SUM", x(2, 3, 4), i32(3), options="ReducerOptions"),
    "cannot be cut into 4": one_op("SPLIT", scalar(1), x(2, 6), makes=["float32"] * 4, options="SplitOptions"),
    "it cuts 3 dimensions of (4, 5)": one_op("STRIDED_SLICE", x(4, 5), i32(0, 0, 0), i32(1, 1, 1), i32(1, 1, 1),
                                             options="StridedSliceOptions"),
    "it looks 3 dimensions into (6, 6)": one_op("GATHER_ND", x(6, 6), x(2, 3, of="int32")),
    "it has 2 sizes for 2 dimensions": one_op("PAD", x(2, 3), i32(1, 0)),
    "do not fit its input (1, 4)": one_op("SPACE_TO_BATCH_ND", x(1, 4), i32(2, 2), scalar([[0, 0], [0, 0]])),
    "depends on the values of": one_op("TRANSPOSE", x(2, 3), x(2, of="int32")),
    "its result would have the shape": one_op("FILL", i32(-1, 2), scalar(7, "float32")),
    "its result would be float32, but the file says int32": one_op("ABS", x(2, 3), makes="int32"),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("operators")


@pytest.mark.parametrize("one", ROWS)
def test_shapes_and_types_are_those_of_litert(one: TfliteRow, folder: Path) -> None:
    assert reading_makes(one, folder) == outline(litert_makes(one))


@pytest.mark.parametrize("one", [given for given in ROWS if given.values[0].macs])
def test_macs_follow_from_the_dimensions(one: TfliteRow, folder: Path) -> None:
    assert profiled(one, folder).totals.macs == one.macs


def test_nothing_is_without_a_price_and_nothing_else_has_macs(folder: Path) -> None:
    whole = joined([given.values[0] for given in ROWS])
    found = profiled(whole, folder)
    assert not found.unpriced
    assert found.totals.macs == whole.macs


@pytest.mark.parametrize("one", [given for given in ROWS if not RANDOM.intersection(given.values[0].kinds)])
def test_values_that_are_worked_out_beforehand_are_those_of_litert(one: TfliteRow, folder: Path) -> None:
    """Shapes are made of such values in many files. Where ours would differ, there must be none."""
    for ours, theirs in zip(known_values(one, folder), litert_makes(one), strict=True):
        if ours is not None:
            assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", SIZES)
def test_sizes_that_a_graph_works_out_are_known(kind: str, folder: Path) -> None:
    rows = [given.values[0] for given in ROWS if given.values[0].kinds == {kind}]
    # Integers of 8 bits are no sizes, and nobody gathers sizes by batches.
    plain = [one for one in rows if "int8" not in str(one.made) and "batchDims" not in one.ops[0].fields]
    assert plain
    assert all(value is not None for one in plain for value in known_values(one, folder))


@pytest.mark.parametrize("message", REFUSED)
def test_what_would_be_wrong_is_refused(message: str, folder: Path) -> None:
    with pytest.raises(TraceFailed, match=re.escape(message)):
        reading_makes(REFUSED[message], folder)


def test_every_operator_that_we_read_has_a_row() -> None:
    ours = {name.removeprefix("tflite:") for name in handlers if name.startswith("tflite:")}
    met = {kind for given in ROWS for kind in given.values[0].kinds}
    assert ours - met == {"WHERE"}  # which is refused, above
