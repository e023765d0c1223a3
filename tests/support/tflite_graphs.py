"""Small `.tflite` files for the tests, made of operators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import flatbuffers
import numpy as np
from ai_edge_litert import schema_py_generated as schema

_TYPES = {name: value for name, value in vars(schema.TensorType).items() if not name.startswith("_")}
_CODES = {name: value for name, value in vars(schema.BuiltinOperator).items() if not name.startswith("_")}


class Op(NamedTuple):
    """One operator: names of its tensors separated by blanks ("-" is one that is left out), and its options.

    Options are the name of their class with the fields that differ from its defaults.
    """

    kind: str
    inputs: str
    outputs: str
    options: str = ""
    fields: Mapping[str, Any] = {}


class Steps(NamedTuple):
    """A constant of integers that stand for multiples of a scale; with an axis, each place there has one."""

    array: np.ndarray[Any, Any]
    scale: float
    axis: int | None = None


class Scaled(NamedTuple):
    """A tensor of integers that stand for multiples of a scale."""

    shape: tuple[int, ...]
    kind: str
    scale: float
    zero: int


class State(NamedTuple):
    """A tensor that is kept between runs."""

    shape: tuple[int, ...]
    kind: str = "float32"


class Graph(NamedTuple):
    """Operators on tensors: a shape with an element type and perhaps a scale, an array for a constant, or a state."""

    ops: Sequence[Op]
    tensors: Mapping[str, Any]
    inputs: str
    outputs: str


def conv(kind: str, inputs: str, outputs: str, **fields: Any) -> Op:
    """A convolution, with strides of 1 and "SAME" unless told otherwise."""
    options = "Conv2DOptions" if kind == "CONV_2D" else "DepthwiseConv2DOptions"
    return Op(kind, inputs, outputs, options, {"strideW": 1, "strideH": 1, **fields})


def write(path: Path, *graphs: Graph, opening: Mapping[str, Sequence[int]] | None = None) -> str:
    """The path of a file with these graphs; `opening` has shapes with -1 where a dimension may change."""
    model = schema.ModelT()
    model.version, model.description = 3, "made by a test"
    model.buffers, model.operatorCodes, model.subgraphs = [schema.BufferT()], [], []
    codes: dict[str, int] = {}
    for graph in graphs:
        model.subgraphs.append(_subgraph(graph, model, codes, dict(opening or {})))
    builder = flatbuffers.Builder(1024)
    builder.Finish(model.Pack(builder), b"TFL3")
    path.write_bytes(bytes(builder.Output()))
    return str(path)


def _subgraph(graph: Graph, model: Any, codes: dict[str, int], opening: dict[str, Any]) -> Any:
    made = schema.SubGraphT()
    places = {name: place for place, name in enumerate(graph.tensors)}
    made.tensors = [_tensor(name, value, model, opening.get(name)) for name, value in graph.tensors.items()]
    made.inputs, made.outputs = ([places[name] for name in text.split()] for text in (graph.inputs, graph.outputs))
    made.operators = []
    for op in graph.ops:
        one = schema.OperatorT()
        one.opcodeIndex = _code(op.kind, model, codes)
        one.inputs, one.outputs = ([-1 if name == "-" else places[name] for name in text.split()]
                                   for text in (op.inputs, op.outputs))  # fmt: skip
        if op.options:
            one.builtinOptionsType = getattr(schema.BuiltinOptions, op.options)
            one.builtinOptions = getattr(schema, f"{op.options}T")()
            for name, value in op.fields.items():
                setattr(one.builtinOptions, name, value)
        made.operators.append(one)
    return made


def _code(kind: str, model: Any, codes: dict[str, int]) -> int:
    if kind not in codes:
        code = schema.OperatorCodeT()
        code.version = 2 if kind == "BROADCAST_TO" else 1
        code.builtinCode = _CODES.get(kind, schema.BuiltinOperator.CUSTOM)
        code.deprecatedBuiltinCode = min(code.builtinCode, 127)
        code.customCode = None if kind in _CODES else kind
        codes[kind] = len(model.operatorCodes)
        model.operatorCodes.append(code)
    return codes[kind]


def _tensor(name: str, value: Any, model: Any, opened: Sequence[int] | None) -> Any:
    tensor = schema.TensorT()
    tensor.name, tensor.buffer = name, 0
    tensor.isVariable = isinstance(value, State)
    scale, zero = value.scale if isinstance(value, (Steps, Scaled)) else 0.1, 0
    if isinstance(value, Scaled):
        value, zero = value[:2], value.zero
    axis = value.axis if isinstance(value, Steps) else None
    value = value.array if isinstance(value, Steps) else value
    if isinstance(value, np.ndarray):
        shape, kind = value.shape, value.dtype.name
        data = value.tobytes()
    else:
        shape, kind, *rest = value
        data = rest[0] if rest else b""
    tensor.shape, tensor.type = list(shape), _TYPES[kind.upper()]
    if opened is not None:
        tensor.shapeSignature = list(opened)
    if kind in ("int8", "int16", "uint8", "int4") or scale != 0.1:
        tensor.quantization = schema.QuantizationParametersT()
        count = 1 if axis is None else shape[axis]
        tensor.quantization.scale, tensor.quantization.zeroPoint = [scale] * count, [zero] * count
        tensor.quantization.quantizedDimension = axis or 0
    if data:
        buffer = schema.BufferT()
        buffer.data = np.frombuffer(data, np.uint8)
        tensor.buffer = len(model.buffers)
        model.buffers.append(buffer)
    return tensor
