"""What a runtime really executed, kernel by kernel, and the layers that the kernels stand for."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from edge_opt._support.checks import check_whole
from edge_opt.errors import InvalidInput
from edge_opt.quantization.onnx_files import KEPT_KEY, PATH_KEY, require
from edge_opt.records.conversions import Kernel, LayerPrecision, RunnerProfile
from edge_opt.runtimes.protocol import Inspection, Runner

# Operators with weights or products, by the family that runtimes fuse and rename them within.
_FAMILIES = {
    "conv": """Conv ConvTranspose FusedConv NhwcFusedConv NhwcConv QLinearConv QLinearConvTranspose ConvInteger
        Convolution GroupConvolution Deconvolution""",
    "product": """Gemm MatMul FusedGemm FusedMatMul QGemm QLinearMatMul MatMulInteger MatMulIntegerToFloat
        DynamicQuantizeMatMul FullyConnected Einsum MatMulNBits""",
    "recurrent": """LSTM GRU RNN DynamicQuantizeLSTM LSTMCell GRUCell LSTMSequence GRUSequence RNNSeq RNNCell
        RNNSequence""",
    "attention": """Attention MultiHeadAttention QAttention ScaledDotProductAttention
        ScaledDotProductAttentionWithKVCache""",
}
FAMILY = {op: family for family, ops in _FAMILIES.items() for op in ops.split()}
_DECORATION = re.compile(r"(_token_\d+|_nchwc|_nhwc)$")
_FAR = 12


@dataclass(frozen=True, slots=True)
class Node:
    """One node of the file."""

    name: str
    op: str
    path: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    is_kept: bool


@dataclass(frozen=True, slots=True)
class Graph:
    """The nodes of a file, by name and by the tensors they make; bits of those whose weights alone are quantised."""

    nodes: dict[str, Node]
    makers: dict[str, Node]
    bits: dict[str, int] = field(default_factory=dict)

    def find(self, kernel: str, op: str = "") -> Node | None:
        """Return the node that a kernel stands for: runtimes name it after the node, or after what it makes."""
        found = self._named(kernel.removeprefix("InsertedPrecisionFreeCast_").removeprefix("fused "))
        family = FAMILY.get(op)
        if found is None or family is None or FAMILY.get(found.op) == family:
            return found
        return self._nearest(found, family) or found

    def _named(self, name: str) -> Node | None:
        while name:
            found = self.nodes.get(name) or self.makers.get(name)
            if found is not None:
                return found
            shorter = _DECORATION.sub("", name)
            name = name.rpartition("/")[0] if shorter == name else shorter
        return None

    def _nearest(self, start: Node, family: str) -> Node | None:
        """A fused kernel often carries the name of its last part; the product or convolution stands before that."""
        waiting, seen = deque([(start, 0)]), {start.name}
        while waiting:
            node, steps = waiting.popleft()
            if FAMILY.get(node.op) == family:
                return node
            for maker in (self.makers.get(name) for name in node.inputs):
                if maker is not None and maker.name not in seen and steps < _FAR:
                    seen.add(maker.name)
                    waiting.append((maker, steps + 1))
        return None

    def is_quantized(self, node: Node) -> bool:
        """Return whether the file hands this node dequantized tensors only, so that it may run in int8."""
        makers = [self.makers.get(name) for name in node.inputs[:2] if name]
        return bool(makers) and all(maker is not None and maker.op == "DequantizeLinear" for maker in makers)

    def is_read_in_float(self, node: Node) -> bool:
        """Return whether a node in float reads what this one makes, with at most an activation between."""
        for kept in (other for other in self.nodes.values() if other.is_kept):
            for name in kept.inputs:
                maker = self.makers.get(name)
                while maker is not None and maker.op in ("Relu", "Clip"):
                    maker = self.makers.get(maker.inputs[0])
                if maker is not None and maker.name == node.name:
                    return True
        return False

    @property
    def is_dynamic(self) -> bool:
        """Whether the file rounds activations as they come, or weights only."""
        return any(
            node.op in ("DynamicQuantizeLinear", "DynamicQuantizeLSTM", "MatMulNBits") for node in self.nodes.values()
        )

    @property
    def layers(self) -> list[Node]:
        """Nodes with weights or products, in the file's order."""
        return [node for node in self.nodes.values() if node.op in FAMILY]


def read_graph(path: Path) -> Graph:
    """Return the graph of a file; its weights are not read."""
    model = require("onnx").load(str(path), load_external_data=False)
    found = []
    for number, node in enumerate(model.graph.node):
        facts = {item.key: item.value for item in node.metadata_props}
        found.append(
            Node(
                node.name or f"{node.op_type}_{number}",
                node.op_type,
                facts.get(PATH_KEY, ""),
                tuple(node.input),
                tuple(node.output),
                KEPT_KEY in facts,
            )
        )
    bits = {
        node.name: attribute.i for node in model.graph.node for attribute in node.attribute if attribute.name == "bits"
    }
    return Graph({node.name: node for node in found}, {output: node for node in found for output in node.outputs}, bits)


def layer_precisions(graph: Graph, kernels: tuple[Kernel, ...], asked: str, runtime: str) -> tuple[LayerPrecision, ...]:
    """Return what each layer ran in by the kernels, and why where that is not what was asked."""
    # Kernels of the kind last, so that they have the last word over those that fused something else with it.
    ran = {
        node: kernel.precision
        for kernel in sorted(kernels, key=lambda kernel: kernel.op in FAMILY)
        for node in kernel.nodes
    }
    found = []
    for node in graph.layers:
        precision = ran.get(node.name, "unknown")
        reason = "" if precision == asked else _reason(graph, node, precision, asked, runtime)
        found.append(LayerPrecision(node.path, node.op, precision, reason, node.name))
    return tuple(found)


def paired(graph: Graph, kernels: list[Kernel]) -> tuple[Kernel, ...]:
    """Kernels under names of the runtime's own are given the nodes that are left, in order, where there are as many."""
    covered = {node for kernel in kernels if kernel.op in FAMILY for node in kernel.nodes}
    result = list(kernels)
    for family in _FAMILIES:
        nodes = [node for node in graph.layers if FAMILY[node.op] == family and node.name not in covered]
        places = [i for i, kernel in enumerate(kernels) if FAMILY.get(kernel.op) == family and not kernel.nodes]
        if len(nodes) == len(places):
            for place, node in zip(places, nodes, strict=True):
                result[place] = replace(kernels[place], path=node.path, nodes=(node.name,))
    return tuple(result)


def _reason(graph: Graph, node: Node, precision: str, asked: str, runtime: str) -> str:
    if precision == "unknown":
        return f"no kernel of {runtime} could be found for it: folded away, or fused under another name"
    if asked != "int8":
        return f"{runtime} has no {asked} kernel for {node.op} on this CPU and computes it in {precision}"
    if node.is_kept:
        return "kept in float, as asked"
    if node.op == "MatMul" and graph.is_dynamic:
        return "a product of two activations, or of weights that are not constant; those stay in float"
    if graph.is_quantized(node) and graph.is_read_in_float(node):
        return f"a layer in float reads its output unrounded, and {runtime} rounds what an int8 {node.op} gives"
    if graph.is_quantized(node):
        return f"quantized in the file, but {runtime} has no int8 kernel for this {node.op} and ran {precision}"
    if node.op in ("GRU", "RNN"):
        return f"{runtime} has no int8 kernel for {node.op}, static or dynamic"
    if FAMILY[node.op] == "recurrent":
        return f"static quantization has no rule for {node.op}"
    return f"the quantizer left this {node.op} in float"


_PRECISIONS = {
    "float": "fp32", "f32": "fp32", "float16": "fp16", "f16": "fp16", "bfloat16": "bf16", "bf16": "bf16",
    "uint8": "int8", "int8": "int8", "u8": "int8", "i8": "int8", "double": "fp64", "f64": "fp64",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class KernelTime:
    """One kernel as a runtime's profiler tells it.

    Attributes:
        name: Its name in the runtime.
        op: What it computes, such as "Conv".
        kind: The type that it computes in, in the runtime's own words.
        samples_s: Seconds of each run.
        aliases: Names of nodes that it stands for, where the runtime says so.
    """

    name: str
    op: str
    kind: str
    samples_s: Sequence[float]
    aliases: tuple[str, ...] = ()


@runtime_checkable
class ProfiledRunner(Protocol):
    """A runner of an ONNX file whose runtime has a profiler."""

    path: Path

    def kernel_times(self, inputs: Sequence[Any], repeats: int) -> list[KernelTime]:
        """Return every kernel with the seconds of each of so many runs, after one that does not count."""
        ...


def profile_runner(runner: Runner, *inputs: Any, repeats: int = 20) -> RunnerProfile:
    """Return the seconds of each kernel by the runtime's own profiler.

    Profiling costs some microseconds per kernel, and ONNX Runtime counts whole ones: read shares, not a latency.

    Args:
        runner: What to run, in a runtime that has a profiler: ONNX Runtime or OpenVINO.
        inputs: The tensors of one call.
        repeats: Runs to profile; a kernel's time is the mean of the middle half of them.
    """
    check_whole("repeats", repeats)
    if not isinstance(runner, ProfiledRunner):
        remedy = "edge_opt.measure(model, inputs) times the layers of a torch model"
        raise InvalidInput(f"{runner.runtime} has no profiler of kernels that can be read here; {remedy}")
    graph = read_graph(runner.path)
    kernels = [_kernel(graph, kernel) for kernel in runner.kernel_times(inputs, repeats)]
    return RunnerProfile(runner.runtime, paired(graph, kernels), repeats)


def inspect_kernels(runner: Runner, asked: str, batch: Sequence[Any]) -> Inspection:
    """Return the kernels of one run, untimed, and the precision that each layer of the file ran in."""
    assert isinstance(runner, ProfiledRunner)
    graph = read_graph(runner.path)
    timed = paired(graph, [_kernel(graph, kernel) for kernel in runner.kernel_times(batch, 1)])
    kernels = tuple(replace(kernel, seconds=None) for kernel in timed)
    return Inspection(kernels, layer_precisions(graph, kernels, asked, runner.runtime))


def _kernel(graph: Graph, measured: KernelTime) -> Kernel:
    candidates = (graph.find(alias, measured.op) for alias in (*measured.aliases, measured.name))
    nodes = [node for node in candidates if node and node.op not in ("QuantizeLinear", "DequantizeLinear")]
    names = tuple(dict.fromkeys(node.name for node in nodes))
    bits = graph.bits.get(names[0] if names else "", 4)
    kind = f"int{bits}" if measured.op == "MatMulNBits" else _PRECISIONS.get(measured.kind, measured.kind)
    path = nodes[0].path if nodes else ""
    return Kernel(measured.name, measured.op, kind, path, names, _typical(measured.samples_s))


def _typical(samples: Sequence[float]) -> float:
    """Return the mean of the middle half: whole microseconds need a mean, interruptions forbid a plain one."""
    quarter = len(samples) // 4
    middle = sorted(samples)[quarter : len(samples) - quarter]
    return sum(middle) / len(middle)
