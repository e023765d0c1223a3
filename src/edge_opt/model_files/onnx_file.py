"""An ONNX file as records: nodes, weights by their shapes, inputs and outputs. Weights are not read."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from edge_opt.errors import ModelNotFound, UnreadableModel
from edge_opt.model_files.binary_formats import Field, Wire, bytes_of, singles, whole_numbers
from edge_opt.model_files.file_records import (
    LARGEST_DIMENSION,
    MOST_DIMENSIONS,
    MOST_KNOWN,
    MOST_NODES,
    FileGraph,
    FileNode,
    FileTensor,
    FileValue,
    Function,
    ModelFile,
    Reference,
)

OLDEST_OPSET = 7
_DEEPEST = 32
_LONGEST_PATH = 4096
# A node of torch's exporter has about 60, with what it says of its origin; nothing else has as many.
_USUAL_FIELDS = 200

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


@dataclass(slots=True)
class _Reader:
    """Reads messages of one file; `folder` is where its external data must lie."""

    folder: Path
    wire: Wire = field(default_factory=Wire)
    depth: int = 0
    nodes: int = 0
    sizes: dict[Path, int] = field(default_factory=dict)

    def graph(self, message: memoryview) -> FileGraph:
        self.depth += 1
        if self.depth > _DEEPEST:
            raise UnreadableModel(f"its graphs are nested more than {_DEEPEST} deep")
        nodes: list[FileNode] = []
        constants: dict[str, FileTensor] = {}
        described: dict[int, list[FileValue]] = {11: [], 12: [], 13: []}
        for item in self.wire.fields(message):
            if item.number == 1:
                nodes.append(self.node(item.view))
            elif item.number == 5:
                tensor = self.tensor(item.view)
                constants[tensor.name] = tensor
            elif item.number == 15:
                raise UnreadableModel("it has sparse weights, which are not counted; make them dense")
            elif item.number in described:
                described[item.number].append(_value(self.wire, item.view))
        self.depth -= 1
        inputs = tuple(value for value in described[11] if value.name not in constants)
        values = {value.name: value for kind in described.values() for value in kind}
        return FileGraph(tuple(nodes), constants, inputs, tuple(described[12]), values)

    def node(self, message: memoryview) -> FileNode:
        self.nodes += 1
        self.wire.allow(_USUAL_FIELDS)
        if self.nodes > MOST_NODES:
            raise UnreadableModel(f"it has more than {MOST_NODES:,} nodes, and no more are followed")
        texts: dict[int, str] = {3: "", 4: "", 7: ""}
        inputs: list[str] = []
        outputs: list[str] = []
        attributes: dict[str, Any] = {}
        metadata: dict[str, str] = {}
        for item in self.wire.fields(message):
            if item.number == 1:
                inputs.append(item.text)
            elif item.number == 2:
                outputs.append(item.text)
            elif item.number in texts:
                texts[item.number] = item.text
            elif item.number == 5:
                name, value = self.attribute(item.view)
                attributes[name] = value
            elif item.number == 9:
                metadata.update([_entry(self.wire, item)])
        domain = "" if texts[7] == "ai.onnx" else texts[7]
        return FileNode(texts[4], domain, texts[3], tuple(inputs), tuple(outputs), attributes, metadata)

    def attribute(self, message: memoryview) -> tuple[str, Any]:
        name, kind = "", 0
        value: Any = None
        many: list[Any] = []
        for item in self.wire.fields(message):
            number = item.number
            if number == 1:
                name = item.text
            elif number == 20:
                kind = item.whole
            elif number == 21:
                value = Reference(item.text)
            elif number in _SINGLE:
                value = _SINGLE[number](item)
            elif number in _REPEATED:
                many.extend(_REPEATED[number](item))
            elif number == 5:
                value = self.tensor(item.view)
            elif number == 6:
                value = self.graph(item.view)
            elif number == 11:
                many.append(self.graph(item.view))
        if many or 6 <= kind <= 10:
            return name, tuple(many)
        # A number that is 0 is not written at all.
        return name, {1: 0.0, 2: 0, 3: ""}.get(kind) if value is None else value

    def tensor(self, message: memoryview) -> FileTensor:
        self.wire.allow(_USUAL_FIELDS)
        shape: list[int] = []
        name, data_type, is_external = "", 0, False
        raw: memoryview | None = None
        typed: list[Field] = []
        external: dict[str, str] = {}
        for item in self.wire.fields(message):
            if item.number == 1:
                shape.extend(whole_numbers(item))
            elif item.number == 2:
                data_type = item.whole
            elif item.number in (4, 5, 6, 7, 10, 11):
                typed.append(item)
            elif item.number == 8:
                name = item.text
            elif item.number == 9:
                raw = item.view
            elif item.number == 13:
                external.update([_entry(self.wire, item)])
            elif item.number == 14:
                is_external = item.whole == 1
        _check_shape(name, shape)
        if data_type not in DTYPES and data_type != TEXT:
            raise UnreadableModel(f"the constant {name!r} is of the unknown element type {data_type}")
        size = -(-prod(shape) * _itemsize(data_type) // _PER_BYTE.get(data_type, 1))
        if is_external:
            self._check_external(name, external, size)
        elif raw is not None and len(raw) != size and data_type != TEXT:
            raise UnreadableModel(f"the constant {name!r} should take {size} bytes and has {len(raw)}; export it again")
        elif raw is None and not typed and size and data_type != TEXT:
            raise UnreadableModel(f"the constant {name!r} should take {size} bytes and has none; export it again")
        values = None if is_external or prod(shape) > MOST_KNOWN else _values(data_type, shape, raw, typed)
        return FileTensor(name, tuple(shape), DTYPES.get(data_type, "uint8"), values)

    def _check_external(self, name: str, external: dict[str, str], size: int) -> None:
        """Weights beside the file: they must lie in its folder and be long enough. They are not opened."""
        location = external.get("location", "")
        path = Path(os.path.realpath(self.folder / location[:_LONGEST_PATH]))
        if not location or len(location) > _LONGEST_PATH or not path.is_relative_to(os.path.realpath(self.folder)):
            raise UnreadableModel(
                f"the weights {name!r} are said to be in {location[:200]!r}, outside the folder of the file; not opened"
            )
        if path not in self.sizes:
            if not path.is_file():
                raise ModelNotFound(f"the weights {name!r} should be in {str(path)!r}, and there is no such file")
            self.sizes[path] = path.stat().st_size
        offset = external.get("offset", "0")
        is_number = offset.isascii() and offset.isdecimal() and len(offset) < 20
        if not is_number or int(offset) + size > self.sizes[path]:
            raise UnreadableModel(
                f"the weights {name!r} take {size} bytes from {offset[:40]}, and {str(path)!r} has {self.sizes[path]}"
            )


_SINGLE: dict[int, Callable[[Field], Any]] = {2: lambda item: item.single, 3: lambda item: item.whole,
                                              4: lambda item: item.text}  # fmt: skip
_REPEATED: dict[int, Callable[[Field], list[Any]]] = {7: singles, 8: whole_numbers, 9: lambda item: [item.text]}


def _itemsize(data_type: int) -> int:
    if data_type in _NUMPY:
        return np.dtype(_NUMPY[data_type]).itemsize
    return {14: 8, 15: 16, 16: 2}.get(data_type, 1)


def _check_shape(name: str, shape: list[int]) -> None:
    if len(shape) > MOST_DIMENSIONS:
        raise UnreadableModel(f"the constant {name[:80]!r} has {len(shape):,} dimensions")
    wrong = next((size for size in shape if not 0 <= size < LARGEST_DIMENSION), None)
    if wrong is not None:
        raise UnreadableModel(f"the constant {name!r} has the dimension {wrong}")


def _values(
    data_type: int, shape: list[int], raw: memoryview | None, typed: list[Field]
) -> np.ndarray[Any, Any] | None:
    if data_type not in _NUMPY:
        return None
    if raw is not None:
        return np.frombuffer(raw, _NUMPY[data_type]).reshape(shape).copy()
    found: list[Any] = []
    for item in typed:
        if item.number == 4:
            found.extend(singles(item))
        elif item.number == 10:
            bits = item.value if isinstance(item.value, memoryview) else np.array(whole_numbers(item))
            found.extend(np.frombuffer(bits, "<f8"))
        elif item.number in (5, 7, 11):
            found.extend(whole_numbers(item))
    if len(found) != prod(shape):
        raise UnreadableModel(f"a constant of {prod(shape)} elements has {len(found)} values; export it again")
    if data_type == 10:  # halves are written as the integers of their bits
        return np.array(found, np.uint16).view(np.float16).reshape(shape)
    return np.array(found).astype(_NUMPY[data_type]).reshape(shape)


def _entry(wire: Wire, item: Field) -> tuple[str, str]:
    key = value = ""
    for part in wire.fields(item.view):
        if part.number == 1:
            key = part.text
        elif part.number == 2:
            value = part.text
    return key, value


_ROLE = "pkg.torch.export.graph_signature.InputSpec.kind"


def _value(wire: Wire, message: memoryview) -> FileValue:
    name, role = "", ""
    shape: tuple[int | str, ...] | None = None
    dtype = None
    for item in wire.fields(message):
        if item.number == 1:
            name = item.text
        elif item.number == 2:
            dtype, shape = _type(wire, item.view)
        elif item.number == 4:
            key, text = _entry(wire, item)
            role = text if key == _ROLE else role
    return FileValue(name, shape, dtype, role)


def _type(wire: Wire, message: memoryview) -> tuple[str | None, tuple[int | str, ...] | None]:
    """Element type and shape of a tensor; nothing is known of sequences and maps."""
    dtype, shape = None, None
    for item in wire.fields(message):
        if item.number != 1:
            continue
        for part in wire.fields(item.view):
            if part.number == 1:
                dtype = DTYPES.get(part.whole)
            elif part.number == 2:
                shape = tuple(_dimension(wire, dim.view) for dim in wire.fields(part.view) if dim.number == 1)
                if len(shape) > MOST_DIMENSIONS:
                    raise UnreadableModel(f"a tensor of it has {len(shape):,} dimensions")
    return dtype, shape


def _dimension(wire: Wire, message: memoryview) -> int | str:
    for item in wire.fields(message):
        if item.number == 1:
            return item.whole
        if item.number == 2:
            return item.text
    return ""


def read_onnx(path: str | os.PathLike[str]) -> ModelFile:
    """What an `.onnx` file says; nothing in it is run, and weights are not read.

    Args:
        path: The file. Weights beside it must lie in its folder.
    """
    with bytes_of(path) as data:
        return _file(Path(path), data)


def _file(path: Path, message: memoryview) -> ModelFile:
    reader = _Reader(path.parent)
    graph: FileGraph | None = None
    opsets: dict[str, int] = {}
    functions: dict[tuple[str, str], Function] = {}
    for item in reader.wire.fields(message):
        if item.number == 7:
            graph = reader.graph(item.view)
        elif item.number == 8:
            domain, version = "", 0
            for part in reader.wire.fields(item.view):
                domain = part.text if part.number == 1 else domain
                version = part.whole if part.number == 2 else version
            opsets["" if domain == "ai.onnx" else domain] = version
        elif item.number == 25:
            key, function = _function(reader, item.view)
            functions[key] = function
    if graph is None or not (graph.nodes or graph.outputs):
        raise UnreadableModel("it has no graph; is it an ONNX model?")
    opset = opsets.get("", 0)
    if opset and opset < OLDEST_OPSET:
        raise UnreadableModel(
            f"its operators are of opset {opset}, and {OLDEST_OPSET} is the oldest that is understood; "
            "onnx.version_converter brings it up to date"
        )
    return ModelFile(path, graph, opset or 21, functions)


def _function(reader: _Reader, message: memoryview) -> tuple[tuple[str, str], Function]:
    texts = {1: "", 10: ""}
    names: dict[int, list[str]] = {4: [], 5: []}
    defaults: dict[str, Any] = {}
    nodes: list[FileNode] = []
    for item in reader.wire.fields(message):
        if item.number in texts:
            texts[item.number] = item.text
        elif item.number in names:
            names[item.number].append(item.text)
        elif item.number == 7:
            nodes.append(reader.node(item.view))
        elif item.number == 11:
            name, value = reader.attribute(item.view)
            defaults[name] = value
    return (texts[10], texts[1]), Function(tuple(names[4]), tuple(names[5]), defaults, tuple(nodes))
