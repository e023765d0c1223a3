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

from edge_opt.errors import UnreadableModel
from edge_opt.model_files.file_graph import read_errors
from edge_opt.model_files.tflite_reader import (
    CUSTOM_DOMAIN,
    Table,
    TfliteTables,
    operator_tables,
    options,
    picked,
    stored_bytes,
)

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
    scales: int  # how many, each with a zero point; more than one: one per channel
    values: tuple[int, ...]  # of small constants of int32: shapes, axes
    empty_channels: tuple[int, ...] = ()  # of int8 weights with a scale per channel: those that are all zero

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def is_quantized(self) -> bool:
        return self.dtype in ("int8", "int16")

    @property
    def element_bytes(self) -> int:
        return 4 if self.dtype in _NOT_NUMBERS.values() else stored_bytes((1,), self.dtype)

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
    input_indices: tuple[int, ...]
    output_indices: tuple[int, ...]
    options: dict[str, Any]

    @property
    def subgraphs(self) -> tuple[int, ...]:
        """The graphs that it calls, in the order in which TFLM walks them."""
        return tuple(self.options[name] for name in _CALLS.get(self.op, ()))

    def given(self, index: int) -> TflmTensor | None:
        """Return an input; None where the operator has none there."""
        return self.inputs[index] if index < len(self.inputs) else None

    def needed(self, index: int) -> TflmTensor:
        """Return an input that the operator cannot do without."""
        tensor = self.given(index)
        if tensor is None:
            raise UnreadableModel(f"{self.op} lacks its input {index}")
        return tensor


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

    def variables(self) -> dict[tuple[int, int], tuple[str, str]]:
        """Return container and name of each variable, by the graph and the number of a tensor that stands for it."""
        return {
            (number, operator.output_indices[0]): operator.options["variable"]
            for number, subgraph in enumerate(self.subgraphs)
            for operator in subgraph.operators
            if operator.op == "VAR_HANDLE"
        }


def read_tflm(path: str | os.PathLike[str]) -> TflmGraph:
    """Read a `.tflite` file for TFLM; nothing in it is run.

    Args:
        path: The file.
    """
    with read_errors(path):
        return _TflmReader(path).graph(Path(path).name)


class _TflmReader(TfliteTables):
    def graph(self, name: str) -> TflmGraph:
        subgraphs = tuple(map(self._subgraph, self.subgraphs))
        if not subgraphs or not subgraphs[0].operators:
            raise UnreadableModel("its graph is empty")
        constants = sum(len(self.buffer(index, name) or b"") for index in range(len(self.buffers)))
        is_split = any(table.number(1, "Q") > 1 for table in self.buffers)
        return TflmGraph(name, len(self.data), constants, subgraphs, self._offline_offsets(), is_split)

    def _offline_offsets(self) -> tuple[int, ...]:
        for entry in self.model.tables(6):
            if entry.text(0) == _OFFLINE_PLAN:
                words = np.frombuffer(self.buffer(entry.number(1, "I"), _OFFLINE_PLAN) or b"", "<i4")
                return tuple(words[_PLAN_HEADER_WORDS:].tolist())
        return ()

    def _subgraph(self, table: Table) -> TflmSubgraph:
        tensors = tuple(self._tensor(entry, index) for index, entry in enumerate(table.tables(0)))
        operators = tuple(self._operator(*entry, tensors) for entry in enumerate(operator_tables(table)))
        inputs, outputs = table.numbers(1), table.numbers(2)
        picked(tensors, (*inputs, *outputs))
        return TflmSubgraph(tensors, operators, inputs, outputs)

    def _tensor(self, table: Table, index: int) -> TflmTensor:
        name, shape, _, dtype, data = self.tensor(table, table.text(3) or f"tensor_{index}")
        dtype, scales = dtype or _NOT_NUMBERS[table.number(1, "b")], table.table(4)
        if min(table.numbers(0), default=0) < 0:
            raise UnreadableModel(f"the tensor {name!r} has the shape {table.numbers(0)}; TFLM needs fixed sizes")
        is_short = data is not None and dtype == "int32" and len(data) <= 4 * _MOST_VALUES
        values = tuple(np.frombuffer(data, "<i4").tolist()) if is_short and data is not None else ()
        count = 0 if scales is None else min(len(scales.numbers(2, "<f4")), len(scales.numbers(3, "<i8")))
        empty: tuple[int, ...] = ()
        if data is not None and dtype == "int8" and scales is not None and len(data) == prod(shape) > 0:
            axis = scales.number(6, "i")
            if 0 <= axis < len(shape) == 4 and count == shape[axis]:
                others = tuple(place for place in range(4) if place != axis)
                used = np.frombuffer(data, np.int8).reshape(shape).any(axis=others)
                empty = tuple(np.flatnonzero(~used).tolist())
        return TflmTensor(name, shape, dtype, data is not None, bool(table.number(5, "?")), count, values, empty)

    def _operator(self, number: int, table: Table, tensors: tuple[TflmTensor, ...]) -> TflmOperator:
        domain, op = self.kind(table, number)
        inputs, outputs = table.numbers(1), table.numbers(2)
        results = tuple(tensor for tensor in picked(tensors, outputs) if tensor is not None)
        is_custom, own = domain == CUSTOM_DOMAIN, table.table(4)
        settings = {} if is_custom else options(op, own)
        if op == "VAR_HANDLE":
            settings["variable"] = ("", "") if own is None else (own.text(0), own.text(1))
        operator = TflmOperator(op, is_custom, picked(tensors, inputs), results, inputs, outputs, settings)
        if any(not 0 < index < len(self.subgraphs) for index in operator.subgraphs):
            raise UnreadableModel(f"{op} calls the graphs {operator.subgraphs} of {len(self.subgraphs)}")
        return operator
