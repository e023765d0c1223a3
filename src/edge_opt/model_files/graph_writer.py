"""Writes a `.tflite` graph tensor by tensor, as LiteRT's converter lays it out: channels last where layers want it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, TypeVar

from edge_opt.model_files.tflm_graph import TflmGraph, TflmOperator, TflmSubgraph, TflmTensor

_T = TypeVar("_T")
# Bytes of a FlatBuffer beside its buffers: once, for each tensor and operator, and for each scale with its zero point.
# Fitted to eleven converted nets; names of tensors, which repeat the path of their module, take 65 to 250 bytes each.
_FILE_BYTES, _TENSOR_BYTES, _OPERATOR_BYTES, _SCALE_BYTES, _NAME_BYTES = 485, 98, 38, 12, 150


@dataclass(frozen=True, slots=True)
class GraphValue:
    """A tensor of the graph that a storage of the trace holds now."""

    index: int
    shape: tuple[int, ...]  # as torch has it; of a row in four dimensions
    is_last: bool  # whether channels are last in the graph
    is_row: bool = False  # whether torch has three dimensions, and the graph a height of 1 in addition

    @property
    def torch_shape(self) -> tuple[int, ...]:
        return (*self.shape[:2], self.shape[3]) if self.is_row else self.shape


class GraphWriter:
    """Tensors and operators of a graph that is being written."""

    def __init__(self, is_int8: bool) -> None:
        self.dtype = "int8" if is_int8 else "float32"
        self.scales = 1 if is_int8 else 0
        self.tensors: list[TflmTensor] = []
        self.operators: list[TflmOperator] = []
        self.makers: dict[int, int] = {}  # places of operators by the tensors that they write
        self.inputs: list[int] = []
        self.layer = "input"

    def finished(self, name: str, outputs: Sequence[int]) -> TflmGraph:
        """Return the graph with the operators and tensors that its results need."""
        operators = self._needed(outputs)
        used = {*self.inputs, *outputs}
        used.update(index for operator in operators for index in (*operator.input_indices, *operator.output_indices))
        # What the quantizer adds stands behind the tensors of the float file; of equal sizes the last is planned first.
        added = {op.output_indices[0] for op in operators if op.op in ("QUANTIZE", "DEQUANTIZE")}
        order = sorted(used, key=lambda index: (index in added, index))
        new = {index: place for place, index in enumerate(order)}
        tensors = tuple(self.tensors[index] for index in order)
        subgraph = TflmSubgraph(
            tensors, tuple(_renumbered(operator, new, tensors) for operator in operators),
            tuple(new[index] for index in self.inputs), tuple(new[index] for index in outputs),
        )  # fmt: skip
        constant_bytes = sum(tensor.nbytes for tensor in tensors if tensor.is_constant)
        scales = sum(tensor.scales for tensor in tensors)
        beside = _FILE_BYTES + (_TENSOR_BYTES + _NAME_BYTES) * len(tensors) + _SCALE_BYTES * scales
        nbytes = constant_bytes + beside + _OPERATOR_BYTES * len(operators)
        return TflmGraph(name, nbytes, constant_bytes, (subgraph,), ())

    def _needed(self, outputs: Sequence[int]) -> list[TflmOperator]:
        """Return the operators without those whose results nobody reads any more."""
        wanted, kept = set(outputs), []
        for operator in reversed(self.operators):
            if operator.output_indices[0] in wanted:
                wanted.update(operator.input_indices)
                kept.append(operator)
        return kept[::-1]

    def _tensor(self, shape: Sequence[int], is_constant: bool = False, dtype: str = "", scales: int = -1,
                values: tuple[int, ...] = ()) -> int:  # fmt: skip
        scales = self.scales if scales < 0 else scales
        dtype = dtype or self.dtype
        name = f"{self.layer} ({len(self.tensors)})"
        tensor = TflmTensor(name, tuple(shape), dtype, is_constant, False, scales, values)
        self.tensors.append(tensor)
        return len(self.tensors) - 1

    def _integers(self, *values: int, shape: Sequence[int] | None = None) -> int:
        """Return a constant of int32; the converter writes an equal one once."""
        dims = tuple(shape or (len(values),))
        for index, tensor in enumerate(self.tensors):
            if tensor.values == values and tensor.shape == dims:
                return index
        return self._tensor(dims, True, "int32", 0, values)

    def _write(self, op: str, inputs: Sequence[int], shape: Sequence[int], dtype: str = "", **options: Any) -> int:
        index = self._tensor(shape, dtype=dtype, scales=0 if dtype == "float32" else -1)
        tensors = tuple(self.tensors[place] for place in inputs)
        self.operators.append(
            TflmOperator(op, False, tensors, (self.tensors[index],), tuple(inputs), (index,), options)
        )
        self.makers[index] = len(self.operators) - 1
        return index

    def _last(self, value: GraphValue) -> GraphValue:
        """Return a value with channels last; rows get a height of 1."""
        if value.is_last:
            return value
        if len(value.shape) == 3:
            batch, channels, size = value.shape
            value = replace(self._cast_shape(value, (batch, channels, 1, size)), is_row=True)
        shape = graph_shape(value.shape, True)
        if min(value.shape[1], prod(value.shape[2:])) == 1:
            return replace(self._cast_shape(value, shape), shape=value.shape, is_last=True, is_row=value.is_row)
        index = self._transposed(value.index, (0, 2, 3, 1), shape)
        return GraphValue(index, value.shape, True, value.is_row)

    def _plain(self, value: GraphValue, shape: Sequence[int] | None = None) -> GraphValue:
        """Return a value as torch has it, in another shape if one is given."""
        if value.is_last and min(value.shape[1], prod(value.shape[2:])) > 1:
            index = self._transposed(value.index, (0, 3, 1, 2), value.shape)
            value = GraphValue(index, value.shape, False, value.is_row)
        return self._cast_shape(value, value.torch_shape if shape is None else shape)

    def _transposed(self, index: int, order: Sequence[int], shape: Sequence[int]) -> int:
        """Write a transposition; of two in a row the converter makes one, or none where they cancel out."""
        before = self._maker(index)
        if before is not None and before.op == "TRANSPOSE":
            index, first = before.input_indices[0], self.tensors[before.input_indices[1]].values
            order = tuple(first[axis] for axis in order)
        if tuple(order) == tuple(range(len(order))):
            return index
        alike = (op for op in self.operators if op.op == "TRANSPOSE" and op.input_indices[0] == index)
        for operator in alike:
            if self.tensors[operator.input_indices[1]].values == tuple(order):
                return operator.output_indices[0]
        return self._write("TRANSPOSE", (index, self._integers(*order)), shape)

    def _maker(self, index: int) -> TflmOperator | None:
        place = self.makers.get(index)
        return None if place is None else self.operators[place]

    def _changed(self, index: int, **options: Any) -> None:
        """Give the operator that writes a tensor other options."""
        place = self.makers[index]
        operator = self.operators[place]
        self.operators[place] = replace(operator, options={**operator.options, **options})

    def _cast_shape(self, value: GraphValue, shape: Sequence[int]) -> GraphValue:
        """Return the elements in another shape; of two RESHAPE in a row the converter writes one."""
        index, before = value.index, self._maker(value.index)
        if before is not None and before.op == "RESHAPE" and self.tensors[index].shape != tuple(shape):
            index = before.input_indices[0]
        if self.tensors[index].shape != tuple(shape):
            index = self._write("RESHAPE", (index, self._integers(*shape)), shape)
        return GraphValue(index, tuple(shape), False)


def _renumbered(operator: TflmOperator, new: dict[int, int], tensors: Sequence[TflmTensor]) -> TflmOperator:
    """Return an operator with the places that its tensors have in the finished graph."""
    inputs = tuple(new[index] for index in operator.input_indices)
    outputs = tuple(new[index] for index in operator.output_indices)
    return replace(
        operator, inputs=tuple(tensors[index] for index in inputs), outputs=tuple(tensors[index] for index in outputs),
        input_indices=inputs, output_indices=outputs,
    )  # fmt: skip


def graph_shape(shape: Sequence[_T], is_last: bool) -> tuple[_T, ...]:
    """Return sizes in the order of the graph."""
    return (shape[0], *shape[2:], shape[1]) if is_last and len(shape) == 4 else tuple(shape)
