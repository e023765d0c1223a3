"""A `.tflite` file as records: operators, weights by their shapes, inputs and outputs. Weights are not read.

The file is a FlatBuffer. It is read without a schema: fields by their number, from the bytes without a copy.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from edge_opt._support.files import mapped
from edge_opt.errors import UnreadableModel
from edge_opt.model_files.file_graph import (
    LARGEST_DIMENSION,
    LONGEST_NAME,
    MOST_DIMENSIONS,
    MOST_KNOWN,
    MOST_NODES,
    FileGraph,
    FileNode,
    FileTensor,
    FileValue,
    ModelFile,
    graphs_in,
    read_errors,
)

T = TypeVar("T")
IDENTIFIER = b"TFL3"
# Tables may point at the same vector again and again: what is read in all is bounded, not only each part of it.
_MOST_READ = 4_000_000
_POINTS_OUTSIDE = "it points outside itself; it is cut off or damaged"

# From the published schema: operators by number, then element types, and fields of options.
OPERATORS = (
    "ADD AVERAGE_POOL_2D CONCATENATION CONV_2D DEPTHWISE_CONV_2D DEPTH_TO_SPACE DEQUANTIZE EMBEDDING_LOOKUP FLOOR "
    "FULLY_CONNECTED HASHTABLE_LOOKUP L2_NORMALIZATION L2_POOL_2D LOCAL_RESPONSE_NORMALIZATION LOGISTIC "
    "LSH_PROJECTION LSTM MAX_POOL_2D MUL RELU RELU_N1_TO_1 RELU6 RESHAPE RESIZE_BILINEAR RNN SOFTMAX SPACE_TO_DEPTH "
    "SVDF TANH CONCAT_EMBEDDINGS SKIP_GRAM CALL CUSTOM EMBEDDING_LOOKUP_SPARSE PAD UNIDIRECTIONAL_SEQUENCE_RNN GATHER "
    "BATCH_TO_SPACE_ND SPACE_TO_BATCH_ND TRANSPOSE MEAN SUB DIV SQUEEZE UNIDIRECTIONAL_SEQUENCE_LSTM STRIDED_SLICE "
    "BIDIRECTIONAL_SEQUENCE_RNN EXP TOPK_V2 SPLIT LOG_SOFTMAX DELEGATE BIDIRECTIONAL_SEQUENCE_LSTM CAST PRELU MAXIMUM "
    "ARG_MAX MINIMUM LESS NEG PADV2 GREATER GREATER_EQUAL LESS_EQUAL SELECT SLICE SIN TRANSPOSE_CONV SPARSE_TO_DENSE "
    "TILE EXPAND_DIMS EQUAL NOT_EQUAL LOG SUM SQRT RSQRT SHAPE POW ARG_MIN FAKE_QUANT REDUCE_PROD REDUCE_MAX PACK "
    "LOGICAL_OR ONE_HOT LOGICAL_AND LOGICAL_NOT UNPACK REDUCE_MIN FLOOR_DIV REDUCE_ANY SQUARE ZEROS_LIKE FILL "
    "FLOOR_MOD RANGE RESIZE_NEAREST_NEIGHBOR LEAKY_RELU SQUARED_DIFFERENCE MIRROR_PAD ABS SPLIT_V UNIQUE CEIL "
    "REVERSE_V2 ADD_N GATHER_ND COS WHERE RANK ELU REVERSE_SEQUENCE MATRIX_DIAG QUANTIZE MATRIX_SET_DIAG ROUND "
    "HARD_SWISH IF WHILE NON_MAX_SUPPRESSION_V4 NON_MAX_SUPPRESSION_V5 SCATTER_ND SELECT_V2 DENSIFY SEGMENT_SUM "
    "BATCH_MATMUL PLACEHOLDER_FOR_GREATER_OP_CODES CUMSUM CALL_ONCE BROADCAST_TO RFFT2D CONV_3D IMAG REAL COMPLEX_ABS "
    "HASHTABLE HASHTABLE_FIND HASHTABLE_IMPORT HASHTABLE_SIZE REDUCE_ALL CONV_3D_TRANSPOSE VAR_HANDLE READ_VARIABLE "
    "ASSIGN_VARIABLE BROADCAST_ARGS RANDOM_STANDARD_NORMAL BUCKETIZE RANDOM_UNIFORM MULTINOMIAL GELU "
    "DYNAMIC_UPDATE_SLICE RELU_0_TO_1 UNSORTED_SEGMENT_PROD UNSORTED_SEGMENT_MAX UNSORTED_SEGMENT_SUM ATAN2 "
    "UNSORTED_SEGMENT_MIN SIGN BITCAST BITWISE_XOR RIGHT_SHIFT STABLEHLO_LOGISTIC STABLEHLO_ADD STABLEHLO_DIVIDE "
    "STABLEHLO_MULTIPLY STABLEHLO_MAXIMUM STABLEHLO_RESHAPE STABLEHLO_CLAMP STABLEHLO_CONCATENATE "
    "STABLEHLO_BROADCAST_IN_DIM STABLEHLO_CONVOLUTION STABLEHLO_SLICE STABLEHLO_CUSTOM_CALL STABLEHLO_REDUCE "
    "STABLEHLO_ABS STABLEHLO_AND STABLEHLO_COSINE STABLEHLO_EXPONENTIAL STABLEHLO_FLOOR STABLEHLO_LOG "
    "STABLEHLO_MINIMUM STABLEHLO_NEGATE STABLEHLO_OR STABLEHLO_POWER STABLEHLO_REMAINDER STABLEHLO_RSQRT "
    "STABLEHLO_SELECT STABLEHLO_SUBTRACT STABLEHLO_TANH STABLEHLO_SCATTER STABLEHLO_COMPARE STABLEHLO_CONVERT "
    "STABLEHLO_DYNAMIC_SLICE STABLEHLO_DYNAMIC_UPDATE_SLICE STABLEHLO_PAD STABLEHLO_IOTA STABLEHLO_DOT_GENERAL "
    "STABLEHLO_REDUCE_WINDOW STABLEHLO_SORT STABLEHLO_WHILE STABLEHLO_GATHER STABLEHLO_TRANSPOSE DILATE "
    "STABLEHLO_RNG_BIT_GENERATOR REDUCE_WINDOW STABLEHLO_COMPOSITE STABLEHLO_SHIFT_LEFT STABLEHLO_CBRT STABLEHLO_CASE"
).split()
CUSTOM = OPERATORS.index("CUSTOM")

# Element types by their number, in torch's names; None for text and handles, which are not tensors.
TYPES: tuple[str | None, ...] = (
    "float32", "float16", "int32", "uint8", "int64", None, "bool", "int16", "complex64", "int8", "float64",
    "complex128", "uint64", None, None, "uint32", "uint16", "int4", "bfloat16", "int2", "uint4", "float8_e4m3fn",
    "float8_e5m2",
)  # fmt: skip

ACTIVATIONS = ("", "RELU", "RELU_N1_TO_1", "RELU6", "TANH", "SIGN_BIT")

_WINDOW = "padding:0b stride_w:1i stride_h:2i"
_REDUCER = "keep_dims:0?"
# Options of an operator: name, number of the field and letter of its type (of a vector after "*"), then its default.
_OPTIONS = {
    "CONV_2D": f"{_WINDOW} activation:3b dilation_w:4i=1 dilation_h:5i=1",
    "DEPTHWISE_CONV_2D": f"{_WINDOW} activation:4b dilation_w:5i=1 dilation_h:6i=1",
    "TRANSPOSE_CONV": f"{_WINDOW} activation:3b",
    "CONV_3D": "padding:0b stride_d:1i stride_w:2i stride_h:3i activation:4b dilation_d:5i=1 dilation_w:6i=1 "
               "dilation_h:7i=1",
    "AVERAGE_POOL_2D": f"{_WINDOW} filter_w:3i filter_h:4i activation:5b",
    "FULLY_CONNECTED": "activation:0b weights_format:1b keep_num_dims:2?",
    "BATCH_MATMUL": "adj_x:0? adj_y:1?",
    "ADD": "activation:0b", "MUL": "activation:0b", "SUB": "activation:0b", "DIV": "activation:0b",
    "L2_NORMALIZATION": "activation:0b", "CONCATENATION": "axis:0i activation:1b", "SOFTMAX": "beta:0f",
    "LOCAL_RESPONSE_NORMALIZATION": "radius:0i", "RESHAPE": "new_shape:0*", "SPACE_TO_DEPTH": "block:0i",
    "DEPTH_TO_SPACE": "block:0i", "GATHER": "axis:0i batch_dims:1i", "SQUEEZE": "axes:0*", "SPLIT": "num_splits:0i",
    "SPLIT_V": "num_splits:0i",
    "STRIDED_SLICE": "begin_mask:0i end_mask:1i ellipsis_mask:2i new_axis_mask:3i shrink_axis_mask:4i offset:5?",
    "SHAPE": "out_type:0b", "PACK": "axis:1i", "ONE_HOT": "axis:0i", "UNPACK": "num:0i axis:1i",
    "LEAKY_RELU": "alpha:0f", "MIRROR_PAD": "mode:0b", "CUMSUM": "exclusive:0? reverse:1?", "GELU": "approximate:0?",
    "SVDF": "rank:0i activation:1b", "LSTM": "activation:0b kernel:3b", "RNN": "activation:0b",
    "UNIDIRECTIONAL_SEQUENCE_LSTM": "activation:0b time_major:3?",
    "BIDIRECTIONAL_SEQUENCE_LSTM": "activation:0b merge_outputs:3? time_major:4?=1",
    "UNIDIRECTIONAL_SEQUENCE_RNN": "time_major:0? activation:1b",
    "IF": "then_branch:0i else_branch:1i", "WHILE": "condition:0i body:1i", "CALL_ONCE": "body:0i",
    "CALL": "body:0I", "STABLEHLO_COMPOSITE": "body:1i",
    **dict.fromkeys("MEAN SUM REDUCE_PROD REDUCE_MAX REDUCE_MIN REDUCE_ANY REDUCE_ALL".split(), _REDUCER),
}  # fmt: skip
_OPTIONS["MAX_POOL_2D"] = _OPTIONS["L2_POOL_2D"] = _OPTIONS["AVERAGE_POOL_2D"]
# Options that name another graph of the file.
GRAPHS = frozenset(("then_branch", "else_branch", "condition", "body"))


@dataclass(slots=True)
class Flatbuffer:
    """The bytes of one file, and how many entries of vectors have been read from it."""

    data: memoryview
    entries: int = 0

    def number(self, form: str, position: int) -> Any:
        """Return one number in the form of `struct`, such as "<i"."""
        if position < 0 or position + struct.calcsize(form) > len(self.data):
            raise UnreadableModel(_POINTS_OUTSIDE)
        return struct.unpack_from(form, self.data, position)[0]

    def vector(self, position: int, width: int) -> memoryview:
        """Return the bytes of a vector whose entries have `width` bytes."""
        count = self.number("<I", position)
        start = position + 4
        if start + count * width > len(self.data):
            raise UnreadableModel(_POINTS_OUTSIDE)
        return self.data[start : start + count * width]

    def count(self, entries: int) -> None:
        """Count entries that become Python objects."""
        self.entries += entries
        if self.entries > _MOST_READ:
            raise UnreadableModel(f"its vectors have more than {_MOST_READ:,} entries in all")

    def root(self) -> Table:
        return Table(self, self.number("<I", 0))


class Table:
    """One table: fields by their number in the schema. A field that is absent has its default."""

    __slots__ = ("_fields", "_file", "_length", "_position")

    def __init__(self, file: Flatbuffer, position: int) -> None:
        self._file = file
        self._position = position
        self._fields = position - file.number("<i", position)
        self._length = file.number("<H", self._fields)

    def _position_of(self, number: int) -> int | None:
        """Return where a field lies; None where it is absent."""
        entry = 4 + 2 * number
        if entry + 2 > self._length:
            return None
        offset = self._file.number("<H", self._fields + entry)
        return self._position + offset if offset else None

    def _target(self, number: int) -> int | None:
        """Return where a field points to; None where it is absent."""
        position = self._position_of(number)
        return None if position is None else position + self._file.number("<I", position)

    def number(self, number: int, form: str, default: Any = 0) -> Any:
        """Return a number, in a letter of `struct`: "b", "B", "i", "I", "q", "Q", "f" or "?"."""
        position = self._position_of(number)
        return default if position is None else self._file.number(f"<{form}", position)

    def raw(self, number: int) -> memoryview | None:
        """Return the bytes of a vector of bytes; None where it is absent."""
        target = self._target(number)
        return None if target is None else self._file.vector(target, 1)

    def text(self, number: int) -> str:
        encoded = self.raw(number)
        if encoded is not None and len(encoded) > LONGEST_NAME:
            raise UnreadableModel(f"it has a name of {len(encoded):,} letters")
        self._file.count(1)
        return "" if encoded is None else bytes(encoded).decode("utf-8", "replace")

    def numbers(self, number: int, form: str = "<i4") -> tuple[int, ...]:
        """Return a vector of integers, by default of 4 bytes; empty where it is absent."""
        target = self._target(number)
        if target is None:
            return ()
        numbers = np.frombuffer(self._file.vector(target, np.dtype(form).itemsize), form)
        self._file.count(len(numbers) + 1)
        return tuple(numbers.tolist())

    def table(self, number: int) -> Table | None:
        target = self._target(number)
        return None if target is None else Table(self._file, target)

    def tables(self, number: int) -> list[Table]:
        """Return a vector of tables; empty where it is absent."""
        target = self._target(number)
        if target is None:
            return []
        offsets = np.frombuffer(self._file.vector(target, 4), "<u4").tolist()
        self._file.count(len(offsets) + 1)
        return [Table(self._file, target + 4 + 4 * index + offset) for index, offset in enumerate(offsets)]


def options(op: str, table: Table | None) -> dict[str, Any]:
    """Return the settings of an operator, by name; defaults where the file leaves them out."""
    settings: dict[str, Any] = {}
    for entry in _OPTIONS.get(op, "").split():
        name, _, rest = entry.partition(":")
        index, _, default = rest.partition("=")
        number, form = int(index[:-1]), index[-1]
        if form == "*":
            settings[name] = () if table is None else table.numbers(number)
        else:
            otherwise = int(default or 0)
            settings[name] = otherwise if table is None else table.number(number, form, otherwise)
    return settings


DOMAIN = "tflite"
CUSTOM_DOMAIN = "tflite.custom"
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
    """A tensor of a graph as the file describes it."""

    name: str  # unique in its graph
    shape: tuple[int, ...]  # as it was when the file was written
    open_shape: tuple[int, ...]  # the same with -1 for dimensions that may change
    dtype: str | None  # by torch's name; None for text and handles
    data: memoryview | None  # its bytes where it is constant

    @property
    def nbytes(self) -> int:
        return stored_bytes(self.shape, self.dtype)


def stored_bytes(shape: tuple[int, ...], dtype: str | None) -> int:
    """Return the bytes that a tensor takes; several elements share a byte where they are narrower."""
    bits = _BITS.get(dtype or "", 0)
    if bits:
        return -(-prod(shape) * bits // 8)
    width = {"complex64": 8, "complex128": 16, "bfloat16": 2}.get(dtype or "")
    return prod(shape) * (width or np.dtype(_NUMPY.get(dtype or "", "u1")).itemsize)


class TfliteTables:
    """The tables of one file, and what they refer to by number."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.data = mapped(Path(path))
        if bytes(self.data[4:8]) != IDENTIFIER:
            raise UnreadableModel("it does not begin like a TFLite model")
        self.model = Flatbuffer(self.data).root()
        self.codes = [_operator(code) for code in self.model.tables(1)]
        self.subgraphs = self.model.tables(2)
        self.buffers = self.model.tables(4)

    def buffer(self, index: int, name: str) -> memoryview | None:
        """Return the bytes of a constant, inside its table or behind all tables; None where there are none."""
        if not 0 <= index < len(self.buffers):
            raise UnreadableModel(f"the tensor {name!r} is said to be in buffer {index} of {len(self.buffers)}")
        table = self.buffers[index]
        offset, size = table.number(1, "Q"), table.number(2, "Q")
        if offset > 1 and size:
            if offset + size > len(self.data):
                raise UnreadableModel(f"the weights {name!r} end behind the file; it is cut off")
            return self.data[offset : offset + size]
        return table.raw(0) or None

    def tensor(self, table: Table, name: str) -> Tensor:
        """Return what a table says of a tensor."""
        shape, signature, number = table.numbers(0), table.numbers(7), table.number(1, "b")
        if not 0 <= number < len(TYPES):
            raise UnreadableModel(f"the tensor {name!r} is of the unknown element type {number}")
        if len(shape) > MOST_DIMENSIONS:
            raise UnreadableModel(f"the tensor {name!r} has {len(shape):,} dimensions")
        wrong = next((size for size in (*shape, *signature) if not -1 <= size < LARGEST_DIMENSION), None)
        if wrong is not None or (signature and len(signature) != len(shape)):
            raise UnreadableModel(f"the tensor {name!r} has the shape {shape}, or else {signature}")
        dtype = TYPES[number]
        # A dimension that may change is 1 if the file has no better value.
        closed = tuple(max(size, 1) if size < 0 else size for size in shape)
        tensor = Tensor(name, closed, signature or shape, dtype, self.buffer(table.number(2, "I"), name))
        if table.table(6) is not None:
            raise UnreadableModel(f"the weights {name!r} are sparse, which is not counted; make them dense")
        if tensor.data is not None and dtype is not None and len(tensor.data) != tensor.nbytes:
            raise UnreadableModel(
                f"the constant {name!r} should take {tensor.nbytes} bytes and has {len(tensor.data)}; convert it again"
            )
        return tensor

    def kind(self, table: Table, index: int) -> tuple[str, str]:
        """Return the domain and the name of an operator."""
        code: int = table.number(0, "I")
        if code >= len(self.codes):
            raise UnreadableModel(f"operator {index} is of kind {code}, and the file has {len(self.codes)}")
        return self.codes[code]


def operator_tables(subgraph: Table) -> list[Table]:
    """Return the operators of a graph."""
    tables = subgraph.tables(3)
    if len(tables) > MOST_NODES:
        raise UnreadableModel(f"it has {len(tables):,} operators, and more than {MOST_NODES:,} are not followed")
    return tables


def picked(tensors: Sequence[T], indices: tuple[int, ...]) -> tuple[T | None, ...]:
    """Return tensors by their numbers; None for -1, an optional tensor that is left out."""
    wrong = next((index for index in indices if not -1 <= index < len(tensors)), None)
    if wrong is not None:
        raise UnreadableModel(f"it has {len(tensors)} tensors, and number {wrong} is asked for")
    return tuple(None if index < 0 else tensors[index] for index in indices)


class _TfliteReader(TfliteTables):
    """Reads the graphs of one file; one graph may use another, and none itself."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
        self.inside: list[int] = []
        self.graphs: dict[int, FileGraph] = {}
        self.node_counts: dict[int, int] = {}  # of each graph with those that it calls, by its identity

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
            self.node_counts[id(graph)] = sum(
                1 + sum(self.node_counts[id(inner)] for inner in graphs_in(node)) for node in graph.nodes
            )
            if self.node_counts[id(graph)] > MOST_NODES:
                raise UnreadableModel(f"its graphs call each other for more than {MOST_NODES:,} nodes")
        return self.graphs[index]

    def _read(self, table: Table) -> FileGraph:
        tensors = self._tensors(table.tables(0))
        nodes = tuple(self._node(entry, tensors, index) for index, entry in enumerate(operator_tables(table)))
        read = {name for node in nodes for name in node.inputs}
        written = {name for node in nodes for name in node.outputs}
        inputs, outputs = (self._named(table.numbers(number), tensors) for number in (1, 2))
        if "" in (*inputs, *outputs):
            raise UnreadableModel("an input or an output of its graph is no tensor")
        weights = {node.inputs[index] for node in nodes for index in _WEIGHTS.get(node.op, ())
                   if index < len(node.inputs)}  # fmt: skip
        constants: dict[str, FileTensor] = {}
        values: dict[str, FileValue] = {}
        for tensor in tensors:
            # A tensor that is read but that no operator writes is a state kept between runs.
            is_made = tensor.name in written or tensor.name in inputs
            is_state = tensor.data is None and tensor.name in read and not is_made
            if tensor.data is not None or is_state:
                constants[tensor.name] = _constant(tensor)
            is_number = "float" in (tensor.dtype or "") or tensor.dtype in _NARROW
            is_used = tensor.name in weights or (prod(tensor.shape) > 1 and is_number)
            is_weight = tensor.data is not None and len(tensor.shape) > 0 and is_used
            role = "PARAMETER" if is_weight else "BUFFER" if is_state else ""
            shape = tuple(dim if dim >= 0 else "" for dim in tensor.open_shape)
            values[tensor.name] = FileValue(tensor.name, shape, tensor.dtype, role)
        return FileGraph(
            nodes, constants, tuple(values[name] for name in inputs), tuple(values[name] for name in outputs), values
        )

    def _tensors(self, tables: list[Table]) -> list[Tensor]:
        tensors: list[Tensor] = []
        taken: set[str] = set()
        for index, table in enumerate(tables):
            name = table.text(3) or f"tensor_{index}"
            name = name if name not in taken else f"{name}#{index}"
            taken.add(name)
            tensors.append(self.tensor(table, name))
        return tensors

    def _named(self, indices: tuple[int, ...], tensors: list[Tensor]) -> tuple[str, ...]:
        return tuple("" if tensor is None else tensor.name for tensor in picked(tensors, indices))

    def _node(self, table: Table, tensors: list[Tensor], index: int) -> FileNode:
        domain, op = self.kind(table, index)
        inputs, outputs = (self._named(table.numbers(number), tensors) for number in (1, 2))
        # Options of newer operators have a field of their own.
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


def _constant(tensor: Tensor) -> FileTensor:
    values = None
    # One without elements has no bytes, and is known all the same.
    is_there = tensor.data is not None or not prod(tensor.shape)
    if is_there and tensor.dtype in _NUMPY and prod(tensor.shape) <= MOST_KNOWN:
        values = np.frombuffer(tensor.data or b"", _NUMPY[tensor.dtype]).reshape(tensor.shape).copy()
    return FileTensor(tensor.name, tensor.shape, tensor.dtype or "uint8", values)


def read_tflite(path: str | os.PathLike[str]) -> ModelFile:
    """Read a `.tflite` file; nothing in it is run, and weights are not read.

    Args:
        path: The file. Its first graph is the model.
    """
    with read_errors(path):
        graph = _TfliteReader(path).graph(0)
        if not graph.nodes:
            raise UnreadableModel("its graph is empty")
        text = next((value.name for value in graph.inputs if value.dtype is None), None)
        if text is not None:
            raise UnreadableModel(f"its input {text!r} is text or a handle, which no operator of a profile takes")
    return ModelFile(Path(path), graph, 0, {})
