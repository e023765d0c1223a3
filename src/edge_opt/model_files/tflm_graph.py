"""A `.tflite` file as TensorFlow Lite Micro sees it: every tensor and operator of every graph, in the file's order.

`tflite_reader` keeps what a profile needs. TFLM's arena also depends on tensors that nobody uses, on the number of
scales, and on which tensors are variables. Of weights only channels that are all zero are noted.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from edge_opt._support.files import mapped
from edge_opt.errors import UnreadableModel
from edge_opt.model_files.file_graph import LARGEST_DIMENSION, MOST_DIMENSIONS, MOST_NODES, read_errors
from edge_opt.model_files.tflite_reader import (
    CUSTOM,
    IDENTIFIER,
    OPERATORS,
    TYPES,
    Flatbuffer,
    Table,
    options,
)

_WIDTHS = {
    "float32": 4, "float16": 2, "int32": 4, "uint8": 1, "int64": 8, "bool": 1, "int16": 2, "complex64": 8, "int8": 1,
    "float64": 8, "complex128": 16, "uint64": 8, "uint32": 4, "uint16": 2, "int4": 1, "bfloat16": 2,
}  # fmt: skip
_NOT_NUMBERS = {5: "string", 13: "resource", 14: "variant"}
# Graphs that an operator calls, in the order in which TFLM walks them.
_CALLS = {"CALL_ONCE": ("body",), "IF": ("then_branch", "else_branch"), "WHILE": ("condition", "body")}
_OFFLINE_PLAN = "OfflineMemoryAllocation"
_PLAN_HEADER_WORDS = 3
_MOST_VALUES = 64


@dataclass(frozen=True, slots=True)
class TflmTensor:
    """A tensor as the file describes it."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # by torch's name; "resource" for the handle of a variable
    is_constant: bool
    is_variable: bool
    scales: int  # how many; more than one: one per channel
    zero_points: int
    values: tuple[int, ...]  # of small constants of int32: shapes, axes
    empty_channels: tuple[int, ...] = ()  # of int8 weights with a scale per channel: those that are all zero

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def element_bytes(self) -> int:
        return _WIDTHS.get(self.dtype, 4)

    @property
    def nbytes(self) -> int:
        """Bytes in the arena; TFLM counts a byte for each element narrower than one."""
        return self.elements * self.element_bytes


@dataclass(frozen=True, slots=True)
class TflmOperator:
    """An operator with its tensors; None stands for an optional tensor that is left out."""

    op: str  # the builtin operator's name, or the custom operator's own
    is_custom: bool
    inputs: tuple[TflmTensor | None, ...]
    outputs: tuple[TflmTensor, ...]
    intermediates: tuple[TflmTensor, ...]
    input_indices: tuple[int, ...]
    output_indices: tuple[int, ...]
    options: dict[str, Any]
    subgraphs: tuple[int, ...]  # those that it calls, in the order in which TFLM walks them
    variable_name: tuple[str, str]  # container and name of a VAR_HANDLE

    def given(self, index: int) -> TflmTensor | None:
        """Return an input; None where the operator has none there."""
        return self.inputs[index] if index < len(self.inputs) else None


@dataclass(frozen=True, slots=True)
class TflmSubgraph:
    """A graph of the file."""

    tensors: tuple[TflmTensor, ...]
    operators: tuple[TflmOperator, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TflmGraph:
    """All graphs of a file."""

    name: str
    nbytes: int  # of the file
    constant_bytes: int  # of the buffers in it
    subgraphs: tuple[TflmSubgraph, ...]
    offline_offsets: tuple[int, ...]  # by tensor, over all graphs; empty, or -1 where TFLM plans itself
    is_split: bool = False  # whether weights lie behind the FlatBuffer, where TFLM does not read them

    def operators(self) -> list[TflmOperator]:
        """Return the operators of all graphs, in the file's order."""
        return [operator for subgraph in self.subgraphs for operator in subgraph.operators]


def read_tflm(path: str | os.PathLike[str]) -> TflmGraph:
    """Read a `.tflite` file for TFLM; nothing in it is run.

    Args:
        path: The file.
    """
    with read_errors(path):
        data = mapped(Path(path))
        if bytes(data[4:8]) != IDENTIFIER:
            raise UnreadableModel("it does not begin like a TFLite model")
        return _TflmReader(data).graph(Path(path).name)


class _TflmReader:
    def __init__(self, data: memoryview) -> None:
        self.data = data
        self.model = Flatbuffer(data).root()
        self.codes = [_code(code) for code in self.model.tables(1)]
        self.buffers = [_contents(table, data) for table in self.model.tables(4)]
        self.tables = self.model.tables(2)

    def graph(self, name: str) -> TflmGraph:
        subgraphs = tuple(map(self._subgraph, self.tables))
        if not subgraphs or not subgraphs[0].operators:
            raise UnreadableModel("its graph is empty")
        constants = sum(len(buffer) for buffer in self.buffers if buffer is not None)
        is_split = any(table.number(1, "Q") > 1 for table in self.model.tables(4))
        return TflmGraph(name, len(self.data), constants, subgraphs, self._offline_offsets(), is_split)

    def _offline_offsets(self) -> tuple[int, ...]:
        for entry in self.model.tables(6):
            if entry.text(0) == _OFFLINE_PLAN:
                words = np.frombuffer(self._buffer(entry.number(1, "I")) or b"", "<i4")
                return tuple(words[_PLAN_HEADER_WORDS:].tolist())
        return ()

    def _buffer(self, index: int) -> memoryview | None:
        if not 0 <= index < len(self.buffers):
            raise UnreadableModel(f"it has {len(self.buffers)} buffers, and number {index} is asked for")
        return self.buffers[index]

    def _subgraph(self, table: Table) -> TflmSubgraph:
        tensors = tuple(self._tensor(entry, index) for index, entry in enumerate(table.tables(0)))
        entries = table.tables(3)
        if len(entries) > MOST_NODES:
            raise UnreadableModel(f"it has {len(entries):,} operators, and more than {MOST_NODES:,} are not followed")
        inputs, outputs = table.numbers(1), table.numbers(2)
        _pick(tensors, (*inputs, *outputs))
        return TflmSubgraph(tensors, tuple(self._operator(entry, tensors) for entry in entries), inputs, outputs)

    def _tensor(self, table: Table, index: int) -> TflmTensor:
        shape, number, scales = table.numbers(0), table.number(1, "b"), table.table(4)
        name = table.text(3) or f"tensor_{index}"
        dtype = _NOT_NUMBERS.get(number) or (TYPES[number] if 0 <= number < len(TYPES) else None)
        if dtype is None:
            raise UnreadableModel(f"the tensor {name!r} is of the element type {number}, which TFLM does not have")
        if len(shape) > MOST_DIMENSIONS or any(not 0 <= size < LARGEST_DIMENSION for size in shape):
            raise UnreadableModel(f"the tensor {name!r} has the shape {shape}; TFLM needs fixed sizes")
        data = self._buffer(table.number(2, "I"))
        is_short = data is not None and dtype == "int32" and len(data) <= 4 * _MOST_VALUES
        values = tuple(np.frombuffer(data, "<i4").tolist()) if is_short and data is not None else ()
        empty: tuple[int, ...] = ()
        if data is not None and dtype == "int8" and scales is not None and len(data) == prod(shape) > 0:
            axis = scales.number(6, "i")
            if 0 <= axis < len(shape) == 4 and _length(scales, 2) == shape[axis]:
                others = tuple(place for place in range(4) if place != axis)
                used = np.frombuffer(data, np.int8).reshape(shape).any(axis=others)
                empty = tuple(np.flatnonzero(~used).tolist())
        return TflmTensor(
            name, shape, dtype, data is not None, bool(table.number(5, "?")),
            _length(scales, 2), _length(scales, 3), values, empty,
        )  # fmt: skip

    def _operator(self, table: Table, tensors: tuple[TflmTensor, ...]) -> TflmOperator:
        code = table.number(0, "I")
        if code >= len(self.codes):
            raise UnreadableModel(f"an operator is of kind {code}, and the file has {len(self.codes)}")
        op, is_custom = self.codes[code]
        inputs, outputs, between = table.numbers(1), table.numbers(2), table.numbers(8)
        settings = {} if is_custom else options(op, table.table(4))
        names = _CALLS.get(op, ())
        called = tuple(settings[name] for name in names)
        if any(not 0 < index < len(self.tables) for index in called):
            raise UnreadableModel(f"{op} calls the graphs {called} of {len(self.tables)}")
        made = table.table(4) if op == "VAR_HANDLE" else None
        return TflmOperator(
            op, is_custom, _pick(tensors, inputs),
            tuple(tensor for tensor in _pick(tensors, outputs) if tensor is not None),
            tuple(tensor for tensor in _pick(tensors, between) if tensor is not None), inputs, outputs, settings,
            called, (made.text(0), made.text(1)) if made else ("", ""),
        )  # fmt: skip


def _code(table: Table) -> tuple[str, bool]:
    number = max(table.number(0, "b"), table.number(3, "i"))
    if number == CUSTOM:
        return table.text(1) or "unnamed", True
    return (OPERATORS[number], False) if 0 <= number < len(OPERATORS) else (f"operator_{number}", True)


def _contents(table: Table, data: memoryview) -> memoryview | None:
    """Return the bytes of a buffer, inside its table or behind all tables; None where it has none."""
    offset, size = table.number(1, "Q"), table.number(2, "Q")
    if offset > 1 and size:
        if offset + size > len(data):
            raise UnreadableModel("its weights end behind the file; it is cut off")
        return data[offset : offset + size]
    return table.raw(0) or None


def _pick(tensors: tuple[TflmTensor, ...], indices: tuple[int, ...]) -> tuple[TflmTensor | None, ...]:
    wrong = next((index for index in indices if not -1 <= index < len(tensors)), None)
    if wrong is not None:
        raise UnreadableModel(f"it has {len(tensors)} tensors, and number {wrong} is asked for")
    return tuple(None if index < 0 else tensors[index] for index in indices)


def _length(table: Table | None, number: int) -> int:
    """Return how many entries a vector has, of any width."""
    return 0 if table is None else table.length(number)
