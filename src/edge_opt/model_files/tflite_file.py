"""A `.tflite` file as records: operators, weights by their shapes, inputs and outputs. Weights are not read."""

from __future__ import annotations

import os
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from edge_opt._support.files import mapped
from edge_opt.errors import ModelNotFound, UnreadableModel, message_of
from edge_opt.model_files.file_records import (
    MOST_DIMENSIONS,
    MOST_KNOWN,
    MOST_STEPS,
    FileGraph,
    FileNode,
    FileTensor,
    FileValue,
    ModelFile,
)
from edge_opt.model_files.flatbuffer_table import Flatbuffer, Table
from edge_opt.model_files.graph_scopes import graphs_in
from edge_opt.model_files.tflite_schema import CUSTOM, GRAPHS, IDENTIFIER, OPERATORS, TYPES, options

DOMAIN = "tflite"
CUSTOM_DOMAIN = "tflite.custom"
_MOST_DIMENSION = 1 << 40
_DEEPEST = 32
_BITS = {"int4": 4, "uint4": 4, "int2": 2}
_NUMPY = {"float32": "<f4", "float16": "<f2", "int32": "<i4", "uint8": "u1", "int64": "<i8", "bool": "?",
          "int16": "<i2", "int8": "i1", "float64": "<f8", "uint32": "<u4", "uint16": "<u2",
          "uint64": "<u8"}  # fmt: skip
# Inputs that are multiplied or added to what is, by operator: integers there are weights, elsewhere shapes and axes.
_WEIGHTS = {"CONV_2D": (1, 2), "DEPTHWISE_CONV_2D": (1, 2), "FULLY_CONNECTED": (1, 2), "TRANSPOSE_CONV": (1, 3),
            "CONV_3D": (1, 2), "BATCH_MATMUL": (0, 1), "SVDF": (1, 2, 3)}  # fmt: skip
_NARROW = frozenset(("int8", "uint8", "int16", "int4", "uint4", "int2"))


class Tensor(NamedTuple):
    """A tensor of a graph as the file describes it.

    Attributes:
        name: Its name; unique in its graph.
        shape: Its dimensions, as they were when the file was written.
        open_shape: The same with -1 for dimensions that may change.
        dtype: Its element type by torch's name; None for text and handles.
        data: Its bytes where it is constant; None elsewhere.
    """

    name: str
    shape: tuple[int, ...]
    open_shape: tuple[int, ...]
    dtype: str | None
    data: memoryview | None

    @property
    def nbytes(self) -> int:
        return stored_bytes(self.shape, self.dtype)


def stored_bytes(shape: tuple[int, ...], dtype: str | None) -> int:
    """Bytes that a tensor takes; several elements share a byte where they are narrower."""
    bits = _BITS.get(dtype or "", 0)
    if bits:
        return -(-prod(shape) * bits // 8)
    width = {"complex64": 8, "complex128": 16, "bfloat16": 2}.get(dtype or "")
    return prod(shape) * (width or np.dtype(_NUMPY.get(dtype or "", "u1")).itemsize)


class _Reader:
    """Reads the graphs of one file; one graph may use another, and none itself."""

    def __init__(self, data: memoryview) -> None:
        self.data = data
        model = Flatbuffer(data).root()
        self.codes = [_operator(code) for code in model.tables(1)]
        self.subgraphs = model.tables(2)
        self.buffers = model.tables(4)
        self.inside: list[int] = []
        self.graphs: dict[int, FileGraph] = {}
        self.steps: dict[int, int] = {}  # of each graph with those that it calls, by its identity

    def graph(self, index: int) -> FileGraph:
        if not 0 <= index < len(self.subgraphs):
            raise UnreadableModel(f"it has {len(self.subgraphs)} graphs, and number {index} is asked for")
        if index in self.inside or len(self.inside) > _DEEPEST:
            raise UnreadableModel("its graphs call each other in a circle")
        if index not in self.graphs:
            self.inside.append(index)
            self.graphs[index] = graph = self._read(self.subgraphs[index])
            self.inside.pop()
            # Ten graphs that call each other ten times are few bytes, and ten thousand million steps.
            self.steps[id(graph)] = sum(
                1 + sum(self.steps[id(inner)] for inner in graphs_in(node)) for node in graph.nodes
            )
            if self.steps[id(graph)] > MOST_STEPS:
                raise UnreadableModel(f"its graphs take more than {MOST_STEPS:,} steps, and no more are followed")
        return self.graphs[index]

    def _read(self, table: Table) -> FileGraph:
        tensors = self._tensors(table.tables(0))
        operators = table.tables(3)
        if len(operators) > MOST_STEPS:
            raise UnreadableModel(f"it has {len(operators):,} operators, and more than {MOST_STEPS:,} are not followed")
        nodes = tuple(self._node(one, tensors, place) for place, one in enumerate(operators))
        read = {name for node in nodes for name in node.inputs}
        made = {name for node in nodes for name in node.outputs}
        inputs, outputs = (self._named(table.numbers(number), tensors) for number in (1, 2))
        weights = {node.inputs[place] for node in nodes for place in _WEIGHTS.get(node.op, ())
                   if place < len(node.inputs)}  # fmt: skip
        constants: dict[str, FileTensor] = {}
        values: dict[str, FileValue] = {}
        for one in tensors:
            # What is read and made by nobody is a state that is kept between runs.
            is_state = one.data is None and one.name in read and one.name not in made and one.name not in inputs
            if one.data is not None or is_state:
                constants[one.name] = _constant(one)
            is_weight = (
                one.data is not None
                and len(one.shape) > 0
                and (
                    one.name in weights
                    or (prod(one.shape) > 1 and ("float" in (one.dtype or "") or one.dtype in _NARROW))
                )
            )
            role = "PARAMETER" if is_weight else "BUFFER" if is_state else ""
            shape = tuple(dim if dim >= 0 else "" for dim in one.open_shape)
            values[one.name] = FileValue(one.name, shape, one.dtype, role)
        return FileGraph(
            nodes, constants, tuple(values[name] for name in inputs), tuple(values[name] for name in outputs), values
        )

    def _tensors(self, tables: list[Table]) -> list[Tensor]:
        found: list[Tensor] = []
        taken: set[str] = set()
        for place, table in enumerate(tables):
            name = table.text(3) or f"tensor_{place}"
            name = name if name not in taken else f"{name}#{place}"
            taken.add(name)
            found.append(self._tensor(table, name))
        return found

    def _tensor(self, table: Table, name: str) -> Tensor:
        shape, signature, number = table.numbers(0), table.numbers(7), table.number(1, "b")
        if not 0 <= number < len(TYPES):
            raise UnreadableModel(f"the tensor {name!r} is of the unknown element type {number}")
        if len(shape) > MOST_DIMENSIONS:
            raise UnreadableModel(f"the tensor {name!r} has {len(shape):,} dimensions")
        wrong = next((size for size in (*shape, *signature) if not -1 <= size < _MOST_DIMENSION), None)
        if wrong is not None or (signature and len(signature) != len(shape)):
            raise UnreadableModel(f"the tensor {name!r} has the shape {shape}, or else {signature}")
        dtype = TYPES[number]
        # A dimension that may change stands for 1 where the file has no better one.
        closed = tuple(max(size, 1) if size < 0 else size for size in shape)
        tensor = Tensor(name, closed, signature or shape, dtype, self._buffer(table.number(2, "I"), name))
        if table.table(6) is not None:
            raise UnreadableModel(f"the weights {name!r} are sparse, which is not counted; make them dense")
        if tensor.data is not None and dtype is not None and len(tensor.data) != tensor.nbytes:
            raise UnreadableModel(
                f"the constant {name!r} should take {tensor.nbytes} bytes and has {len(tensor.data)}; convert it again"
            )
        return tensor

    def _buffer(self, index: int, name: str) -> memoryview | None:
        """The bytes of a constant, inside its table or behind all tables; None where there are none."""
        if not 0 <= index < len(self.buffers):
            raise UnreadableModel(f"the tensor {name!r} is said to be in buffer {index} of {len(self.buffers)}")
        table = self.buffers[index]
        offset, size = table.number(1, "Q"), table.number(2, "Q")
        if offset > 1 and size:
            if offset + size > len(self.data):
                raise UnreadableModel(f"the weights {name!r} end behind the file; it is cut off")
            return self.data[offset : offset + size]
        return table.raw(0) or None

    def _named(self, indices: tuple[int, ...], tensors: list[Tensor]) -> tuple[str, ...]:
        wrong = next((index for index in indices if not -1 <= index < len(tensors)), None)
        if wrong is not None:
            raise UnreadableModel(f"it has {len(tensors)} tensors, and number {wrong} is asked for")
        return tuple("" if index < 0 else tensors[index].name for index in indices)

    def _node(self, table: Table, tensors: list[Tensor], place: int) -> FileNode:
        code = table.number(0, "I")
        if code >= len(self.codes):
            raise UnreadableModel(f"operator {place} is of kind {code}, and the file has {len(self.codes)}")
        domain, op = self.codes[code]
        inputs, outputs = (self._named(table.numbers(number), tensors) for number in (1, 2))
        # Options of newer operators have a place of their own.
        settings: dict[str, Any] = options(op, table.table(12 if op == "STABLEHLO_COMPOSITE" else 4))
        for name in GRAPHS.intersection(settings):
            settings[name] = self.graph(settings[name])
        settings["results"] = tuple((tensors[index].shape, tensors[index].dtype) for index in table.numbers(2))
        return FileNode(op, domain, outputs[0] if outputs else "", inputs, outputs, settings, {})


def _operator(code: Table) -> tuple[str, str]:
    number = max(code.number(0, "b"), code.number(3, "i"))
    if number == CUSTOM:
        return CUSTOM_DOMAIN, code.text(1) or "unnamed"
    return (DOMAIN, OPERATORS[number]) if 0 <= number < len(OPERATORS) else (CUSTOM_DOMAIN, f"operator_{number}")


def _constant(one: Tensor) -> FileTensor:
    values = None
    if one.data is not None and one.dtype in _NUMPY and prod(one.shape) <= MOST_KNOWN:
        values = np.frombuffer(one.data, _NUMPY[one.dtype]).reshape(one.shape).copy()
    return FileTensor(one.name, one.shape, one.dtype or "uint8", values)


def read_tflite(path: str | os.PathLike[str]) -> ModelFile:
    """What a `.tflite` file says; nothing in it is run, and weights are not read.

    Args:
        path: The file. Its first graph is the model.
    """
    file = Path(path)
    try:
        data = mapped(file)
        if bytes(data[4:8]) != IDENTIFIER:
            raise UnreadableModel("it does not begin like a TFLite model")
        graph = _Reader(data).graph(0)
    except FileNotFoundError:
        raise ModelNotFound(f"no file {str(path)!r}; the folder is {Path.cwd()}") from None
    except (UnreadableModel, OSError, ValueError) as error:  # an empty file cannot be mapped
        raise UnreadableModel(f"{str(path)!r} cannot be read: {message_of(error)}") from error
    if not graph.nodes:
        raise UnreadableModel(f"{str(path)!r} cannot be read: its graph is empty")
    return ModelFile(file, graph, 0, {})
