"""The arena of TensorFlow Lite Micro, to the byte: persistent data at its end, planned activations at its start.

Activations and scratch are placed by TFLM's greedy planner: largest first, each at the lowest gap between buffers that
live at the same time. Lifetimes are in steps of a counter that operators and the graphs they call advance.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from edge_opt.errors import UnreadableModel
from edge_opt.model_files.file_graph import MOST_NODES
from edge_opt.model_files.tflm_graph import TflmGraph, TflmOperator, TflmSubgraph, TflmTensor
from edge_opt.model_files.tflm_kernels import (
    TflmBuild,
    aligned,
    data_bytes,
    option_bytes,
    prepared_bytes,
    scratch_bytes,
)

ALIGNMENT = 16
# Lifetime of tensors in graphs that are never called; they take memory that any other may take, too.
_NEVER = (-1, -1)
_MOST_BUFFERS = 10_000
# TFLM's own objects: arena allocator, planner, allocator. A host has the larger recording allocator of `tflite-micro`.
_OBJECTS_BYTES, _HOST_OBJECTS_BYTES = 36 + 44 + 36, 448
# Requests for scratch that TFLM has room for while one operator prepares.
_REQUESTS = 12
_WEIGHTED = frozenset("CONV_2D DEPTHWISE_CONV_2D FULLY_CONNECTED TRANSPOSE_CONV".split())


@dataclass(frozen=True, slots=True)
class PlannedBuffer:
    """A tensor or a scratch buffer in the planned part of the arena."""

    name: str
    is_scratch: bool
    nbytes: int  # as requested
    first: int  # step of its first use
    last: int  # step of its last use
    offline_offset: int | None = None
    offset: int = 0

    @property
    def size(self) -> int:
        return aligned(self.nbytes, ALIGNMENT)


@dataclass(frozen=True, slots=True)
class TflmArena:
    """What TFLM allocates for a model."""

    head_bytes: int  # planned activations and scratch
    tail_bytes: int  # persistent data
    tail_parts: dict[str, int]  # the same by category, alignment included
    minimum_bytes: int  # the smallest arena that works, a multiple of 16
    planning_bytes: int  # what is needed while TFLM plans; above head and tail in nets of many small tensors
    buffers: tuple[PlannedBuffer, ...]  # with their offsets


def tflm_arena(graph: TflmGraph, build: TflmBuild) -> TflmArena:
    """Return the arena that TFLM needs for a file.

    Args:
        graph: The file.
        build: Kernels, core and ABI.
    """
    requests = [
        (index, position, nbytes)
        for index, subgraph in enumerate(graph.subgraphs)
        for position, operator in enumerate(subgraph.operators)
        for nbytes in scratch_bytes(operator, build)
    ]
    buffers = _placed(planned_buffers(graph, requests))
    head = _end(buffers)
    tail = _Tail()
    preparing = _stack_persistent(tail, graph, build, len(requests))
    before_ports = tail.nbytes
    _stack_ports(tail, graph.subgraphs[0], build)
    work = _planning_bytes(graph, build, len(requests), len(buffers))
    planning = aligned(before_ports, ALIGNMENT) + work
    minimum = aligned(max(head + tail.nbytes, planning, preparing), ALIGNMENT)
    return TflmArena(head, tail.nbytes, tail.parts, minimum, planning, tuple(buffers))


def _end(buffers: Sequence[PlannedBuffer]) -> int:
    return max((buffer.offset + buffer.size for buffer in buffers), default=0)


def replanned_head(buffers: Sequence[PlannedBuffer], nbytes: Mapping[str, int]) -> int:
    """Return the head if tensors had other sizes; a size of 0: it takes the memory of another."""
    # Placed buffers come largest first; the planner's order among equals is that of the file, reversed.
    changed = [
        buffer if buffer.is_scratch or buffer.name not in nbytes else replace(buffer, nbytes=nbytes[buffer.name])
        for buffer in reversed(buffers)
    ]
    return _end(_placed([buffer for buffer in changed if buffer.nbytes]))


class _Tail:
    """The stack at the end of the arena, which grows downwards."""

    def __init__(self) -> None:
        self.nbytes = 0
        self.parts: dict[str, int] = {}

    def push(self, part: str, nbytes: int, alignment: int) -> None:
        after = aligned(self.nbytes + nbytes, alignment)
        self.parts[part] = self.parts.get(part, 0) + after - self.nbytes
        self.nbytes = after


def _stack_persistent(tail: _Tail, graph: TflmGraph, build: TflmBuild, scratch_requests: int) -> int:
    """Stack what stays; return the arena that operators need while they prepare."""
    word, variables = build.pointer_bytes, set(graph.variables().values())
    tail.push("interpreter", _HOST_OBJECTS_BYTES if build.is_host else _OBJECTS_BYTES, word)
    if variables:
        tail.push("resource table", build.struct("p2i")[0], ALIGNMENT)
        tail.push("resource table", 5 * word * len(variables), ALIGNMENT)
    tail.push("interpreter", 2 * word, word)
    tail.push("interpreter", (8 if word == 4 else 24) * len(graph.subgraphs), word)
    for subgraph in graph.subgraphs:
        tail.push("tensors", build.struct("2pe")[0] * len(subgraph.tensors), word)
    for subgraph in graph.subgraphs:
        tail.push("nodes", 8 * word * len(subgraph.operators), word)
    operators = graph.operators()
    for operator in operators:
        tail.push("operator options", *option_bytes(operator, build))
    for operator in operators:
        for nbytes in data_bytes(operator, build):
            tail.push("operator data", nbytes, ALIGNMENT)
    preparing = _stack_prepared(tail, graph, build)
    if scratch_requests:
        tail.push("scratch handles", word * scratch_requests, word)
    offsets = iter(graph.offline_offsets)
    for subgraph in graph.subgraphs:
        for tensor in subgraph.tensors:
            if tensor.is_variable and next(offsets, -1) < 0:
                tail.push("variables", tensor.nbytes, ALIGNMENT)
    return preparing


def _stack_prepared(tail: _Tail, graph: TflmGraph, build: TflmBuild) -> int:
    """Stack what operators allocate once their tensors are known; a variable takes its bytes when it is first set.

    Returns the arena that one operator needs while it prepares: records of its tensors stand at the start then.
    """
    preparing, scratch_requests = 0, _REQUESTS
    assigned: set[tuple[str, str]] = set()
    variables = graph.variables()
    for number, subgraph in enumerate(graph.subgraphs):
        for operator in subgraph.operators:
            if operator.op == "ASSIGN_VARIABLE":
                variable = variables.get((number, operator.input_indices[0]), ("", str(operator.input_indices[0])))
                if variable not in assigned:
                    tail.push("operator data", operator.needed(1).nbytes, ALIGNMENT)
                assigned.add(variable)
            for nbytes in prepared_bytes(operator, build):
                tail.push("operator data", nbytes, ALIGNMENT)
            requests = (build.pointer_bytes + 8) * scratch_requests
            preparing = max(preparing, tail.nbytes + requests + _temporary_bytes(operator, build))
            scratch_requests += len(scratch_bytes(operator, build))
    return preparing


def _temporary_bytes(operator: TflmOperator, build: TflmBuild) -> int:
    """Return the bytes of tensor records, with a zero point per channel, that a layer with weights prepares from."""
    if operator.op not in _WEIGHTED:
        return 0
    word = build.pointer_bytes
    tensors = [tensor for tensor in (*operator.inputs[:3], *operator.outputs) if tensor is not None]
    if operator.op != "FULLY_CONNECTED":
        # Convolutions make them twice, the second time with the bias.
        tensors += [tensor for tensor in tensors if tensor.dtype != "int32"]
    nbytes = sum(_record_bytes(tensor, build) for tensor in tensors)
    # What a fully connected layer stores meanwhile may cover the end of the last record, which nobody reads.
    is_covered = operator.op == "FULLY_CONNECTED" and operator.outputs[0].scales
    return nbytes - (8 + word if is_covered else 0)


def _record_bytes(tensor: TflmTensor, build: TflmBuild) -> int:
    """Return the bytes of the record of a tensor, its scales and its zero points."""
    word = build.pointer_bytes
    record = {(4, 1): 32, (4, 4): 40}.get((word, build.enum_bytes), 64)
    return record + (build.struct("2pi")[0] + aligned(4 + 4 * tensor.scales, word) if tensor.scales else 0)


def _stack_ports(tail: _Tail, subgraph: TflmSubgraph, build: TflmBuild) -> None:
    """Stack the records of the model's inputs, then of its outputs."""
    word = build.pointer_bytes
    for indices in (subgraph.inputs, subgraph.outputs):
        tail.push("inputs and outputs", word * len(indices), ALIGNMENT)
        for index in indices:
            tail.push("inputs and outputs", _record_bytes(subgraph.tensors[index], build), word)


def _planning_bytes(graph: TflmGraph, build: TflmBuild, scratch_requests: int, buffers: int) -> int:
    """Return the work area of the planner, on top of the tail before inputs and outputs are made."""
    tensors = sum(len(subgraph.tensors) for subgraph in graph.subgraphs)
    word = build.pointer_bytes
    requests = (word + 8) * (scratch_requests + _REQUESTS)
    lists = word * len(graph.subgraphs) + (2 * word + 16) * (tensors + scratch_requests)
    return aligned(requests + lists, ALIGNMENT) + 40 * buffers


def planned_buffers(graph: TflmGraph, requests: Sequence[tuple[int, int, int]] = ()) -> list[PlannedBuffer]:
    """Return the buffers to plan with their lifetimes, in TFLM's order: tensors by graph and index, then scratch."""
    lives = _Lives(graph)
    lives.walk(0)
    buffers: list[PlannedBuffer] = []
    variables = graph.variables()
    offsets = iter(graph.offline_offsets)
    for number, subgraph in enumerate(graph.subgraphs):
        for index, tensor in enumerate(subgraph.tensors):
            offline = next(offsets, -1)
            is_kept = tensor.is_constant or tensor.is_variable or (number, index) in variables
            if is_kept or not tensor.nbytes:
                continue
            first, last = lives.tensors.get((number, index), _NEVER)
            offset = offline if offline >= 0 else None
            buffers.append(PlannedBuffer(tensor.name, False, tensor.nbytes, first, last, offset))
    if len(buffers) + len(requests) > _MOST_BUFFERS:
        raise UnreadableModel(f"it has more than {_MOST_BUFFERS:,} tensors to plan")
    for number, position, nbytes in requests:
        first, last = lives.operators.get((number, position), _NEVER)
        operator = graph.subgraphs[number].operators[position]
        if nbytes:
            buffers.append(PlannedBuffer(f"scratch of {operator.op}", True, nbytes, first, last))
    return buffers


class _Lives:
    """Walks operators as TFLM does and notes first and last steps."""

    def __init__(self, graph: TflmGraph) -> None:
        self.graph = graph
        self.step = 0
        self.tensors: dict[tuple[int, int], tuple[int, int]] = {}
        self.operators: dict[tuple[int, int], tuple[int, int]] = {}

    def _seen(self, number: int, index: int) -> None:
        if index >= 0:
            first = self.tensors.get((number, index), (self.step, 0))[0]
            self.tensors[number, index] = (first, self.step)

    def walk(self, number: int) -> None:
        """Walk a graph and those it calls."""
        if self.step > MOST_NODES:
            raise UnreadableModel(f"its graphs call each other for more than {MOST_NODES:,} operators")
        subgraph = self.graph.subgraphs[number]
        for index in subgraph.inputs:
            self._seen(number, index)
        for position, operator in enumerate(subgraph.operators):
            self.step += 1
            first = self.step
            for index in operator.output_indices:
                self._seen(number, index)
            for called in operator.subgraphs:
                self.step += 1
                self.walk(called)
            for index in (*operator.input_indices, *operator.output_indices):
                self._seen(number, index)
            self.operators[number, position] = (first, self.step)
        for index in subgraph.outputs:
            self._seen(number, index)


def _placed(buffers: Sequence[PlannedBuffer]) -> list[PlannedBuffer]:
    """Return the buffers with their offsets, in the order of placement."""
    fixed = [buffer for buffer in buffers if buffer.offline_offset is not None]
    free = [buffer for buffer in reversed(buffers) if buffer.offline_offset is None]
    placed: list[PlannedBuffer] = []
    by_offset: list[PlannedBuffer] = []
    # From large to small; of equal ones the later first.
    for buffer in (*fixed, *sorted(free, key=lambda buffer: -buffer.size)):
        offset = buffer.offline_offset if buffer.offline_offset is not None else _lowest_gap(buffer, by_offset)
        placed.append(replace(buffer, offset=offset))
        insort(by_offset, placed[-1], key=lambda other: other.offset)
    return placed


def _lowest_gap(buffer: PlannedBuffer, by_offset: Sequence[PlannedBuffer]) -> int:
    end = 0
    for other in by_offset:
        if other.first > buffer.last or other.last < buffer.first:
            continue
        if other.offset - end >= buffer.size:
            return end
        end = max(end, other.offset + other.size)
    return end
