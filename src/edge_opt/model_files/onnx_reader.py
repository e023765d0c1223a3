"""Read an `.onnx` file into records: nodes, weights by their shapes, inputs and outputs.

The `onnx` package parses the file. Weights beside the file are never opened, and values of weights are not copied:
costs follow from shapes. A parsed file takes about as much memory as it has bytes.
"""

from __future__ import annotations

import os
import re
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from edge_opt._support.extras import import_optional
from edge_opt._support.files import mapped
from edge_opt.errors import ModelNotFound, UnreadableModel
from edge_opt.model_files.file_graph import (
    LARGEST_DIMENSION,
    LONGEST_NAME,
    MOST_DIMENSIONS,
    MOST_KNOWN,
    MOST_NODES,
    AttributeReference,
    FileGraph,
    FileNode,
    FileTensor,
    FileValue,
    Function,
    ModelFile,
    read_errors,
)

OLDEST_OPSET = 7
# Messages inside messages; three for a graph inside a graph.
_DEEPEST = 96
_LONGEST_PATH = 4096
# Messages and texts: a node with what exporters write beside it has about fifty.
_MOST_PARTS = 750_000
# Texts that are not names.
_LONG_TEXTS = {"doc_string", "value"}
_DAMAGED = "it is cut off or damaged, or is not an ONNX model"

# ONNX's numbers of element types, by torch's names; text has none.
DTYPES = {
    1: "float32", 2: "uint8", 3: "int8", 4: "uint16", 5: "int16", 6: "int32", 7: "int64", 9: "bool", 10: "float16",
    11: "float64", 12: "uint32", 13: "uint64", 14: "complex64", 15: "complex128", 16: "bfloat16",
    17: "float8_e4m3fn", 18: "float8_e4m3fnuz", 19: "float8_e5m2", 20: "float8_e5m2fnuz", 21: "uint4", 22: "int4",
    24: "float8_e8m0fnu", 25: "uint2", 26: "int2",
}  # fmt: skip
TEXT = 8
# Elements that share a byte, by how many.
_PER_BYTE = {21: 2, 22: 2, 25: 4, 26: 4}
_NUMPY = {1: "<f4", 2: "u1", 3: "i1", 4: "<u2", 5: "<i2", 6: "<i4", 7: "<i8", 9: "?", 10: "<f2", 11: "<f8", 12: "<u4",
          13: "<u8"}  # fmt: skip
_TYPED_FIELDS = ("float_data", "int32_data", "int64_data", "double_data", "uint64_data")
_ROLE = "pkg.torch.export.graph_signature.InputSpec.kind"


# How numbers stand in a message, by their wire type; a list of them is not always packed.
_NUMBERS = {0: rb"[\x80-\xff]{0,9}[\x00-\x7f]", 1: rb".{8}", 5: rb".{4}"}


def _check_amounts(data: memoryview, kind: Any) -> None:
    """Refuse a message of too many parts or nodes, with a name that is too long, or nested too deep.

    A parsed message takes up to a hundred times its bytes: ten megabytes can be five million empty nodes. The protobuf
    library has no limit for that, so the parts are counted in the bytes before it parses them.
    """
    parts = nodes = 0
    pending = [(kind, 0, len(data), 0)]
    tables: dict[str, dict[int, tuple[Any, bool, bool]]] = {}
    while pending:
        kind, position, end, depth = pending.pop()
        if kind.full_name not in tables:
            names = {field.name for field in kind.fields if field.type == field.TYPE_STRING} - _LONG_TEXTS
            tables[kind.full_name] = {
                field.number: (field.message_type, field.name == "node", field.name in names) for field in kind.fields
            }
        table = tables[kind.full_name]
        while position < end:
            begin = position
            key, position = _varint(data, position)
            if key & 7 in _NUMBERS:
                # A thousand at a time: one pattern for all would keep a state for each.
                same = rb"(?:%b%b){1,1000}" % (re.escape(bytes(data[begin:position])), _NUMBERS[key & 7])
                match = re.compile(same, re.DOTALL).match(data, begin, end)
                position = end + 1 if match is None else match.end()
            else:
                size, start = _varint(data, position)
                position = start + size if key & 7 == 2 else end + 1
                inner, is_node, is_name = table.get(key >> 3, (None, False, False))
                parts += 1
                nodes += is_node
                if inner is not None and size:
                    pending.append((inner, start, position, depth + 1))
                if is_name and size > LONGEST_NAME:
                    raise UnreadableModel(f"it has a name of {size:,} letters")
            if position > end:
                raise UnreadableModel(_DAMAGED)
            if parts > _MOST_PARTS or nodes > MOST_NODES or depth > _DEEPEST:
                raise UnreadableModel(
                    f"it has more than {MOST_NODES:,} nodes, {_MOST_PARTS:,} parts or {_DEEPEST} nested messages"
                )


def _varint(data: memoryview, position: int) -> tuple[int, int]:
    """Return a number of variable length, and the position behind it."""
    value = shift = 0
    while position < len(data) and shift < 64:
        byte = data[position]
        value |= (byte & 127) << shift
        position, shift = position + 1, shift + 7
        if byte < 128:
            return value, position
    raise UnreadableModel(_DAMAGED)


class _OnnxReader:
    """Converts the messages of one file to records; `folder` is where its external data must lie."""

    def __init__(self, folder: Path, onnx: Any) -> None:
        self.folder = folder
        self.onnx = onnx
        self.external_sizes: dict[Path, int] = {}

    def graph(self, proto: Any) -> FileGraph:
        if proto.sparse_initializer:
            raise UnreadableModel("it has sparse weights, which are not counted; make them dense")
        constants = {tensor.name: tensor for tensor in map(self.tensor, proto.initializer)}
        inputs, outputs, others = (
            [self.value(value) for value in values] for values in (proto.input, proto.output, proto.value_info)
        )
        values = {value.name: value for value in (*inputs, *outputs, *others)}
        called = tuple(value for value in inputs if value.name not in constants)
        return FileGraph(tuple(map(self.node, proto.node)), constants, called, tuple(outputs), values)

    def node(self, proto: Any) -> FileNode:
        return FileNode(
            op=_text(proto.op_type),
            domain="" if proto.domain == "ai.onnx" else _text(proto.domain),
            name=_text(proto.name),
            inputs=tuple(map(_text, proto.input)),
            outputs=tuple(map(_text, proto.output)),
            attributes={_text(attribute.name): self.attribute(attribute) for attribute in proto.attribute},
            metadata=_entries(proto.metadata_props),
        )

    def attribute(self, proto: Any) -> Any:
        """Convert the value of an attribute."""
        if proto.ref_attr_name:
            return AttributeReference(_text(proto.ref_attr_name))
        if proto.type == self.onnx.AttributeProto.UNDEFINED:
            raise UnreadableModel(f"the attribute {_text(proto.name)[:80]!r} has no type; export the model again")
        return self._converted(self.onnx.helper.get_attribute_value(proto))

    def _converted(self, value: Any) -> Any:
        """Convert a number, a text, a tensor, a graph, or several of them; None for types and sparse tensors."""
        if isinstance(value, (int, float)):
            return value
        if isinstance(value, bytes):
            return _text(value)
        if isinstance(value, list):
            return tuple(map(self._converted, value))
        if isinstance(value, self.onnx.TensorProto):
            return self.tensor(value)
        return self.graph(value) if isinstance(value, self.onnx.GraphProto) else None

    def tensor(self, proto: Any) -> FileTensor:
        name, shape, data_type = _text(proto.name), tuple(proto.dims), proto.data_type
        if len(shape) > MOST_DIMENSIONS:
            raise UnreadableModel(f"the constant {name[:80]!r} has {len(shape):,} dimensions")
        wrong = next((size for size in shape if not 0 <= size < LARGEST_DIMENSION), None)
        if wrong is not None:
            raise UnreadableModel(f"the constant {name[:80]!r} has the dimension {wrong}")
        if data_type not in DTYPES and data_type != TEXT:
            raise UnreadableModel(f"the constant {name[:80]!r} is of the unknown element type {data_type}")
        size = -(-prod(shape) * _itemsize(data_type) // _PER_BYTE.get(data_type, 1))
        is_external = proto.data_location == self.onnx.TensorProto.EXTERNAL
        if is_external:
            self._check_external(name, _entries(proto.external_data), size)
        elif data_type != TEXT:
            _check_data(proto, size)
        dtype = DTYPES.get(data_type, "uint8")
        if is_external or data_type not in _NUMPY or prod(shape) > MOST_KNOWN:
            return FileTensor(name, shape, dtype, None)
        return FileTensor(name, shape, dtype, np.array(self.onnx.numpy_helper.to_array(proto)))

    def _check_external(self, name: str, external: dict[str, str], size: int) -> None:
        """Check that weights beside the file lie in its folder and are long enough, without opening them."""
        location = external.get("location", "")
        path = Path(os.path.realpath(self.folder / location[:_LONGEST_PATH]))
        if not location or len(location) > _LONGEST_PATH or not path.is_relative_to(os.path.realpath(self.folder)):
            raise UnreadableModel(
                f"the weights {name!r} are said to be in {location[:200]!r}, outside the folder of the file; not opened"
            )
        if path not in self.external_sizes:
            if not path.is_file():
                raise ModelNotFound(f"the weights {name!r} should be in {str(path)!r}, and there is no such file")
            self.external_sizes[path] = path.stat().st_size
        available = self.external_sizes[path]
        offset = external.get("offset", "0")
        is_number = offset.isascii() and offset.isdecimal() and len(offset) < 20
        if not is_number or int(offset) + size > available:
            raise UnreadableModel(
                f"the weights {name!r} take {size} bytes from {offset[:40]}, and {str(path)!r} has {available}"
            )

    def value(self, proto: Any) -> FileValue:
        """Convert what the file says of a value; nothing is known of sequences and maps."""
        dtype, shape = None, None
        if proto.type.WhichOneof("value") == "tensor_type":
            dtype = DTYPES.get(proto.type.tensor_type.elem_type)
            if proto.type.tensor_type.HasField("shape"):
                dimensions = proto.type.tensor_type.shape.dim
                if len(dimensions) > MOST_DIMENSIONS:
                    raise UnreadableModel(f"a tensor of it has {len(dimensions):,} dimensions")
                shape = tuple(
                    dim.dim_value if dim.HasField("dim_value") else _text(dim.dim_param) for dim in dimensions
                )
        return FileValue(_text(proto.name), shape, dtype, _entries(proto.metadata_props).get(_ROLE, ""))

    def function(self, proto: Any) -> Function:
        defaults = {_text(attribute.name): self.attribute(attribute) for attribute in proto.attribute_proto}
        inputs, outputs = tuple(map(_text, proto.input)), tuple(map(_text, proto.output))
        return Function(inputs, outputs, defaults, tuple(map(self.node, proto.node)))


def _text(value: str | bytes) -> str:
    """Return a text of a message; protobuf leaves one that is not UTF-8 as bytes."""
    return value if isinstance(value, str) else value.decode("utf-8", errors="replace")


def _entries(protos: Any) -> dict[str, str]:
    return {_text(entry.key): _text(entry.value) for entry in protos}


def _itemsize(data_type: int) -> int:
    if data_type in _NUMPY:
        return np.dtype(_NUMPY[data_type]).itemsize
    return {14: 8, 15: 16, 16: 2}.get(data_type, 1)


def _check_data(proto: Any, size: int) -> None:
    """Refuse a constant whose data do not have the size that its shape and its type say."""
    # Reading `raw_data` copies it; the copy of one weight at a time is gone at once.
    available = len(proto.raw_data) if proto.HasField("raw_data") else None
    if available is None and size and any(len(getattr(proto, field)) for field in _TYPED_FIELDS):
        return
    if (available or 0) != size:
        name, amount = _text(proto.name)[:80], available or "none"
        raise UnreadableModel(f"the constant {name!r} should take {size} bytes and has {amount}; export it again")


def read_onnx(path: str | os.PathLike[str]) -> ModelFile:
    """Read an `.onnx` file; nothing in it is run, and weights beside it are not opened.

    Args:
        path: The file. Weights beside it must lie in its folder.
    """
    onnx = import_optional("onnx", "reading an .onnx file needs", "onnx")
    message_error = import_optional(
        "google.protobuf.message", "reading an .onnx file needs", "onnx", "protobuf"
    ).DecodeError
    with read_errors(path):
        data = mapped(Path(path))
        _check_amounts(data, onnx.ModelProto.DESCRIPTOR)
        try:
            model = onnx.ModelProto.FromString(data)
        except message_error as error:
            raise UnreadableModel(_DAMAGED) from error
        return _model_file(Path(path), model, onnx)


def _model_file(path: Path, model: Any, onnx: Any) -> ModelFile:
    reader = _OnnxReader(path.parent, onnx)
    graph = reader.graph(model.graph)
    if not (graph.nodes or graph.outputs):
        raise UnreadableModel("it has no graph; is it an ONNX model?")
    opsets = {"" if entry.domain == "ai.onnx" else entry.domain: entry.version for entry in model.opset_import}
    # A file of operators of other domains alone names no version of ONNX's own.
    newest = onnx.defs.onnx_opset_version()
    opset = opsets.get("", 21)
    if not OLDEST_OPSET <= opset <= newest:
        remedy = "`pip install -U onnx`" if opset > newest else "onnx.version_converter"
        raise UnreadableModel(f"it has opset {opset}; opsets {OLDEST_OPSET} to {newest} are read: use {remedy}")
    functions = {
        (_text(function.domain), _text(function.name)): reader.function(function) for function in model.functions
    }
    return ModelFile(path, graph, opset, functions)
