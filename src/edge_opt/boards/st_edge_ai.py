"""ST Edge AI on a microcontroller: which channels of a file it keeps, its activations in RAM, and its flash.

Its planner is not public. Shares and sizes here are fitted to rows of ST's model zoo (ST Edge AI 4.0.0, STM32H7) by
benchmarks/st_memory.py. Weights are known: int8 weights and int32 biases; a scale of four bytes for each channel is
part of the code.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from edge_opt.boards.class_costs import LayerWork, ModelWork
from edge_opt.model_files.tflm_arena import PlannedBuffer, planned_buffers
from edge_opt.model_files.tflm_graph import TflmGraph, TflmOperator

_WEIGHTED = ("CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED")
# Operators whose result has the channels of their input: a channel without weights stays one.
KEEPS_CHANNELS = frozenset(
    "DEPTHWISE_CONV_2D PAD AVERAGE_POOL_2D MAX_POOL_2D MEAN RELU RELU6 LEAKY_RELU TANH HARD_SWISH QUANTIZE".split()
)
# How much of the smaller of input and result a kernel places in the memory of the larger; operators that are not named
# compute in place.
_SHARED = {
    "CONV_2D": 0.8, "1x1": 0.2, "deep": 0.0, "DEPTHWISE_CONV_2D": 0.5, "MAX_POOL_2D": 0.5, "AVERAGE_POOL_2D": 0.5,
}  # fmt: skip
_SAME = 0  # padding of a convolution in the file
# A convolution of more than one place on this many channels is a kernel of its own, which reads a padded copy.
_DEEP_CHANNELS = 8
# Bytes of code: always, for each operator, and for deep convolutions.
_CODE_BYTES, _OPERATOR_BYTES, _DEEP_BYTES = 10_726, 408, 9_290


@dataclass(frozen=True, slots=True)
class StMemory:
    """What ST Edge AI needs for a model, as estimated."""

    activation_bytes: int
    scratch_bytes: int  # of all operators
    weight_bytes: int
    code_bytes: int
    step: int  # operator at the peak, counted from 1
    alive: tuple[PlannedBuffer, ...]  # at the peak


def st_memory(graph: TflmGraph) -> StMemory:
    """Return the activations and the flash of a model in ST Edge AI.

    Args:
        graph: The int8 file, or the graph that a converter would write; its first subgraph is meant.
    """
    operators, buffers = graph.subgraphs[0].operators, planned_buffers(graph)
    peak, step = max((_bytes_at(number, operator, buffers), number) for number, operator in enumerate(operators, 1))
    constants = [tensor for tensor in graph.subgraphs[0].tensors if tensor.is_constant and tensor.scales]
    dropped = sum(
        (1 - of_input * of_output) * operator.inputs[1].nbytes
        for operator, of_input, of_output in live_shares(graph)
        if operator.inputs[1] is not None
    )
    is_deep = any(_kernel(operator) == "deep" for operator in operators)
    counted = sum(operator.op != "RESHAPE" for operator in operators)
    scales = sum(tensor.scales for tensor in constants if tensor.dtype == "int8" and tensor.scales > 1)
    return StMemory(
        activation_bytes=peak,
        scratch_bytes=sum(map(_scratch_bytes, operators)),
        weight_bytes=sum(tensor.nbytes for tensor in constants) - int(dropped),
        code_bytes=_CODE_BYTES + _OPERATOR_BYTES * counted + _DEEP_BYTES * is_deep + 4 * scales,
        step=step,
        alive=tuple(buffer for buffer in buffers if buffer.first <= step <= buffer.last),
    )


def _bytes_at(step: int, operator: TflmOperator, buffers: Sequence[PlannedBuffer]) -> int:
    """Return the bytes that live while an operator runs, less what its result takes over from an input."""
    alive = [buffer for buffer in buffers if buffer.first <= step <= buffer.last]
    ending = {buffer.name for buffer in alive if buffer.last == step}
    inputs = (tensor for tensor in operator.inputs if tensor is not None)
    largest = max((tensor.nbytes for tensor in inputs if tensor.name in ending), default=0)
    made = sum(tensor.nbytes for tensor in operator.outputs)  # 0 where a variable is assigned
    shared = _SHARED.get(_kernel(operator), 1.0) * min(largest, made)
    copied = max(_padded_bytes(operator) - largest, 0)
    return sum(buffer.nbytes for buffer in alive) - int(shared) + copied + _scratch_bytes(operator)


def _kernel(operator: TflmOperator) -> str:
    weight = operator.given(1)
    if weight is None or operator.op != "CONV_2D":
        return operator.op
    _, height, width, channels = weight.shape
    return "1x1" if height * width == 1 else "deep" if channels >= _DEEP_CHANNELS else operator.op


def _padded_bytes(operator: TflmOperator) -> int:
    """Return the bytes of the padded input of a deep convolution; 0 where it needs none."""
    weight, options = operator.given(1), operator.options
    if weight is None or _kernel(operator) != "deep" or options["padding"] != _SAME:
        return 0
    _, height, width, _ = operator.outputs[0].shape
    _, kernel_h, kernel_w, channels = weight.shape
    rows, columns = (height - 1) * options["stride_h"] + kernel_h, (width - 1) * options["stride_w"] + kernel_w
    return int(rows * columns * channels)


def _scratch_bytes(operator: TflmOperator) -> int:
    """Return the scratch of a convolution, as in code that ST's tool wrote for a MobileNet (2025)."""
    weight = operator.given(1)
    if weight is None or operator.op not in ("CONV_2D", "DEPTHWISE_CONV_2D"):
        return 0
    filters, height, width, channels = weight.shape
    if operator.op == "CONV_2D":
        return 4 * height * width * channels + 10 * filters
    return (4 * height * width + 1) * channels + 1


def live_shares(graph: TflmGraph) -> list[tuple[TflmOperator, float, float]]:
    """Return operators with weights, and the shares of their input's and output's channels that ST's tool keeps.

    A channel whose weights are all zero is constant. The tool folds it into the bias of the layers that read it, and
    does not compute what only such a channel reads.
    """
    tensors, operators = graph.subgraphs[0].tensors, graph.subgraphs[0].operators
    dropped: defaultdict[int, frozenset[int]] = defaultdict(frozenset)
    # Pairs of input and output with the same channels; a depthwise convolution may have more of them behind it.
    alike = [
        (operator.input_indices[0], operator.output_indices[0])
        for operator in operators
        if operator.op in KEEPS_CHANNELS and operator.inputs[0] is not None
        if operator.inputs[0].shape[-1:] == operator.outputs[0].shape[-1:]
    ]
    for operator in operators:
        if operator.op in _WEIGHTED and (weight := operator.given(1)) is not None:
            dropped[operator.output_indices[0]] |= frozenset(weight.empty_channels)
    for source, result in alike:
        dropped[result] |= dropped[source]
    readers = Counter(index for operator in operators for index in operator.input_indices)
    for source, result in reversed(alike):
        if readers[source] == 1:
            dropped[source] |= dropped[result]

    def kept(index: int) -> float:
        channels = tensors[index].shape[-1:]
        return 1 - len(dropped[index]) / channels[0] if channels else 1.0

    return [
        (
            operator,
            1.0 if operator.op == "DEPTHWISE_CONV_2D" else kept(operator.input_indices[0]),
            kept(operator.output_indices[0]),
        )
        for operator in operators
        if operator.op in _WEIGHTED
    ]


def live_work(work: ModelWork, graph: TflmGraph) -> ModelWork:
    """Return the layers without the channels that ST's tool drops; unchanged where layers and file differ.

    Args:
        work: The layers of the profiled file.
        graph: The same file.
    """
    shares = live_shares(graph)
    if len(shares) != sum(layer.weights > 0 for layer in work.works):
        return work
    left = iter(shares)

    def live(layer: LayerWork) -> LayerWork:
        if not layer.weights:
            return layer
        _, of_input, of_output = next(left)
        return layer._replace(
            macs=int(layer.macs * of_input * of_output),
            weights=int(layer.weights * of_input * of_output),
            reads=int(layer.reads * of_input),
            writes=int(layer.writes * of_output),
        )

    return replace(work, works=tuple(map(live, work.works)))
