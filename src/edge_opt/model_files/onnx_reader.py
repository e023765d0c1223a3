"""Read an `.onnx` file into records: nodes, weights by their shapes, inputs and outputs.

The `onnx` package parses the file. Weights beside the file are never opened, and values of weights are not copied:
costs follow from shapes. A parsed file takes about as much memory as it has bytes.
"""

from __future__ import annotations

import os
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from edge_opt._support.extras import import_optional
from edge_opt.errors import ModelNotFound, UnreadableModel
from edge_opt.model_files.file_graph import (
    LARGEST_DIMENSION,
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
    file_bytes,
)

OLDEST_OPSET = 7
_DEEPEST = 32
_LONGEST_PATH = 4096
# Names, numbers and descriptions that become Python objects: a forest of a million trees has fewer.
_MOST_ENTRIES = 16_000_000

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


class _OnnxReader:
    """Converts the messages of one file to records; `folder` is where its external data must lie."""

    def __init__(self, folder: Path, onnx: Any) -> None:
        self.folder = folder
        self.onnx = onnx
        self.depth = 0
        self.nodes = 0
        self.entries = 0
        self.external_sizes: dict[Path, int] = {}

    def count(self, entries: int) -> None:
        """Count entries that become Python objects, so that a file of tiny parts does not fill the memory."""
        self.entries += entries
        if self.entries > _MOST_ENTRIES:
            raise UnreadableModel(f"its lists have more than {_MOST_ENTRIES:,} entries")

    def graph(self, proto: Any) -> FileGraph:
        self.depth += 1
        if self.depth > _DEEPEST:
            raise UnreadableModel(f"its graphs are nested more than {_DEEPEST} deep")
        if proto.sparse_initializer:
            raise UnreadableModel("it has sparse weights, which are not counted; make them dense")
        self.count(len(proto.initializer) + len(proto.input) + len(proto.output) + len(proto.value_info))
        nodes = self.nodes_of(proto)
        constants = {tensor.name: tensor for tensor in map(self.tensor, proto.initializer)}
        inputs, outputs, others = (
            [self.value(value) for value in values] for values in (proto.input, proto.output, proto.value_info)
        )
        self.depth -= 1
        values = {value.name: value for value in (*inputs, *outputs, *others)}
        called = tuple(value for value in inputs if value.name not in constants)
        return FileGraph(nodes, constants, called, tuple(outputs), values)

    def nodes_of(self, proto: Any) -> tuple[FileNode, ...]:
        """Convert the nodes of a graph or a function."""
        self.nodes += len(proto.node)
        if self.nodes > MOST_NODES:
            raise UnreadableModel(f"it has more than {MOST_NODES:,} nodes, and no more are followed")
        return tuple(map(self.node, proto.node))

    def node(self, proto: Any) -> FileNode:
        self.count(len(proto.input) + len(proto.output) + len(proto.attribute) + len(proto.metadata_props))
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
            self.count(len(value))
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
        self.count(len(proto.input) + len(proto.output) + len(proto.attribute_proto))
        defaults = {_text(attribute.name): self.attribute(attribute) for attribute in proto.attribute_proto}
        inputs, outputs = tuple(map(_text, proto.input)), tuple(map(_text, proto.output))
        return Function(inputs, outputs, defaults, self.nodes_of(proto))


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
    with file_bytes(path) as data:
        try:
            model = onnx.ModelProto.FromString(data)
        except message_error as error:
            raise UnreadableModel("it is cut off or damaged, or is not an ONNX model") from error
        return _model_file(Path(path), model, onnx)


def _model_file(path: Path, model: Any, onnx: Any) -> ModelFile:
    reader = _OnnxReader(path.parent, onnx)
    graph = reader.graph(model.graph)
    if not (graph.nodes or graph.outputs):
        raise UnreadableModel("it has no graph; is it an ONNX model?")
    opsets = {"" if entry.domain == "ai.onnx" else entry.domain: entry.version for entry in model.opset_import}
    opset = opsets.get("", 0)
    if opset and opset < OLDEST_OPSET:
        raise UnreadableModel(
            f"its operators are of opset {opset}, and {OLDEST_OPSET} is the oldest that is understood; "
            "onnx.version_converter brings it up to date"
        )
    functions = {
        (_text(function.domain), _text(function.name)): reader.function(function) for function in model.functions
    }
    return ModelFile(path, graph, opset or 21, functions)
