"""An ONNX file as a graph of layers: who made which tensor, and which module each node belongs to."""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path

from edge_opt.compress.exporting import PATH_KEY, require
from edge_opt.compress.quantizing import SPARED_KEY
from edge_opt.records import Kernel, LayerPrecision

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
    is_spared: bool


@dataclass(frozen=True, slots=True)
class Graph:
    """The nodes of a file, by name and by the tensors they make."""

    nodes: dict[str, Node]
    makers: dict[str, Node]

    def find(self, kernel: str, op: str = "") -> Node | None:
        """The node that a kernel stands for: runtimes name it after the node, or after what it makes."""
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
        """Whether the file hands this node dequantised tensors only, so that a runtime may compute it in int8."""
        makers = [self.makers.get(name) for name in node.inputs[:2] if name]
        return bool(makers) and all(maker is not None and maker.op == "DequantizeLinear" for maker in makers)

    @property
    def layers(self) -> list[Node]:
        """Nodes with weights or products, in the file's order."""
        return [node for node in self.nodes.values() if node.op in FAMILY]


def read_graph(path: Path) -> Graph:
    """The graph of a file; its weights are not read."""
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
                SPARED_KEY in facts,
            )
        )
    return Graph({node.name: node for node in found}, {output: node for node in found for output in node.outputs})


def layer_precisions(graph: Graph, kernels: tuple[Kernel, ...], asked: str, runtime: str) -> tuple[LayerPrecision, ...]:
    """What each layer ran in by the kernels, and why where that is not what was asked."""
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
    if node.is_spared:
        return "spared, as asked"
    if graph.is_quantized(node):
        return f"quantised in the file, but {runtime} has no int8 kernel for this {node.op} and ran {precision}"
    if FAMILY[node.op] == "recurrent":
        return f"static quantisation has no rule for {node.op}"
    return f"the quantiser left this {node.op} in float"
