"""The kernels that a runtime executed, mapped to layers, and the first layer with a wrong output."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from edge_opt._support.checks import check_whole
from edge_opt.errors import EdgeOptError, InvalidInput
from edge_opt.quantization.onnx_files import KEPT_KEY, Tensors, module_path, require
from edge_opt.records.conversions import Kernel, LayerPrecision, RunnerProfile
from edge_opt.runtimes.agreement import difference_share
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
class Graph:
    """The nodes of an ONNX file, as its NodeProtos, by name and by the tensors they make."""

    nodes: dict[str, Any]
    makers: dict[str, Any]

    def find(self, kernel: str, op: str = "") -> Any | None:
        """Return the node of a kernel: runtimes name the kernel after the node, or after its output."""
        node = self._named(kernel.removeprefix("InsertedPrecisionFreeCast_").removeprefix("fused "))
        family = FAMILY.get(op)
        if node is None or family is None or FAMILY.get(node.op_type) == family:
            return node
        return self._nearest(node, family) or node

    def _named(self, name: str) -> Any | None:
        while name:
            node = self.nodes.get(name) or self.makers.get(name)
            if node is not None:
                return node
            shorter = _DECORATION.sub("", name)
            name = name.rpartition("/")[0] if shorter == name else shorter
        return None

    def _nearest(self, start: Any, family: str) -> Any | None:
        """Return the product or convolution before a node: fused kernels are often named after their last part."""
        waiting, seen = deque([(start, 0)]), {start.name}
        while waiting:
            node, steps = waiting.popleft()
            if FAMILY.get(node.op_type) == family:
                return node
            for maker in (self.makers.get(name) for name in node.input):
                if maker is not None and maker.name not in seen and steps < _FAR:
                    seen.add(maker.name)
                    waiting.append((maker, steps + 1))
        return None

    def is_quantized(self, node: Any) -> bool:
        """Return whether the file hands this node dequantized tensors only, so that it may run in int8."""
        makers = [self.makers.get(name) for name in node.input[:2] if name]
        return bool(makers) and all(maker is not None and maker.op_type == "DequantizeLinear" for maker in makers)

    def is_read_in_float(self, node: Any) -> bool:
        """Return whether a node in float reads what this one makes, with at most an activation between."""
        for kept in filter(_is_kept, self.nodes.values()):
            for name in kept.input:
                maker = self.makers.get(name)
                while maker is not None and maker.op_type in ("Relu", "Clip"):
                    maker = self.makers.get(maker.input[0])
                if maker is not None and maker.name == node.name:
                    return True
        return False

    @property
    def is_dynamic(self) -> bool:
        """Whether the file rounds activations as they come, or weights only."""
        rounding = ("DynamicQuantizeLinear", "DynamicQuantizeLSTM", "MatMulNBits")
        return any(node.op_type in rounding for node in self.nodes.values())

    @property
    def layers(self) -> list[Any]:
        """Nodes with weights or products, in the file's order."""
        return [node for node in self.nodes.values() if node.op_type in FAMILY]


def read_graph(path: Path) -> Graph:
    """Return the graph of a file; its weights are not read."""
    nodes = list(require("onnx").load(str(path), load_external_data=False).graph.node)
    for number, node in enumerate(nodes):
        node.name = node.name or f"{node.op_type}_{number}"
    return Graph({node.name: node for node in nodes}, {output: node for node in nodes for output in node.output})


def _is_kept(node: Any) -> bool:
    return any(item.key == KEPT_KEY for item in node.metadata_props)


def paired(graph: Graph, kernels: list[Kernel]) -> tuple[Kernel, ...]:
    """Give kernels under names of the runtime's own the nodes that are left, in order, where there are as many."""
    covered = {node for kernel in kernels if kernel.op in FAMILY for node in kernel.nodes}
    result = list(kernels)
    for family in _FAMILIES:
        nodes = [node for node in graph.layers if FAMILY[node.op_type] == family and node.name not in covered]
        places = [i for i, kernel in enumerate(kernels) if FAMILY.get(kernel.op) == family and not kernel.nodes]
        if len(nodes) == len(places):
            for place, node in zip(places, nodes, strict=True):
                result[place] = replace(kernels[place], path=module_path(node), nodes=(node.name,))
    return tuple(result)


def _reason(graph: Graph, node: Any, precision: str, asked: str, runtime: str) -> str:
    if precision == "unknown":
        return f"no kernel of {runtime} could be found for it: folded away, or fused under another name"
    if asked != "int8":
        return f"{runtime} has no {asked} kernel for {node.op_type} on this CPU and computes it in {precision}"
    if _is_kept(node):
        return "kept in float, as asked"
    if node.op_type == "MatMul" and graph.is_dynamic:
        return (
            "a product of two activations, or of weights that are computed or a stack of matrices; those stay in float"
        )
    if graph.is_quantized(node) and graph.is_read_in_float(node):
        return f"a layer in float reads its output unrounded, and {runtime} rounds what an int8 {node.op_type} gives"
    if graph.is_quantized(node):
        return f"quantized in the file, but {runtime} has no int8 kernel for this {node.op_type} and ran {precision}"
    if node.op_type in ("GRU", "RNN"):
        return f"{runtime} has no int8 kernel for {node.op_type}, static or dynamic"
    if FAMILY[node.op_type] == "recurrent":
        return f"static quantization has no rule for {node.op_type}"
    return f"the quantizer left this {node.op_type} in float"


_PRECISIONS = {
    "float": "fp32", "f32": "fp32", "float16": "fp16", "f16": "fp16", "bfloat16": "bf16", "bf16": "bf16",
    "uint8": "int8", "int8": "int8", "u8": "int8", "i8": "int8", "double": "fp64", "f64": "fp64",
}  # fmt: skip


def profile_runner(runner: Runner, *inputs: Any, repeats: int = 20) -> RunnerProfile:
    """Return the seconds of each kernel by the runtime's own profiler.

    Profiling costs some microseconds per kernel, and ONNX Runtime counts whole ones: read shares, not a latency.

    Args:
        runner: A runner of ONNX Runtime or OpenVINO, which have a profiler.
        inputs: The tensors of one call.
        repeats: Runs to profile; a kernel's time is the mean of the middle half of them.
    """
    check_whole("repeats", repeats)
    if not hasattr(runner, "kernel_times"):
        remedy = "edge_opt.measure(model, inputs) times the layers of a torch model"
        raise InvalidInput(f"{runner.runtime} has no profiler of kernels that can be read here; {remedy}")
    return RunnerProfile(runner.runtime, _kernels(read_graph(runner.path), runner, inputs, repeats), repeats)


def inspect_kernels(runner: Any, asked: str, batch: Sequence[Any]) -> Inspection:
    """Return the kernels of one run, untimed, and what each layer ran in, with the reason where that was not asked."""
    graph = read_graph(runner.path)
    kernels = tuple(replace(kernel, seconds=None) for kernel in _kernels(graph, runner, batch, 0))
    # Kernels of the kind last, so that they have the last word over those that fused something else with it.
    ran = {
        node: kernel.precision
        for kernel in sorted(kernels, key=lambda kernel: kernel.op in FAMILY)
        for node in kernel.nodes
    }
    layers = []
    for node in graph.layers:
        precision = ran.get(node.name, "unknown")
        reason = "" if precision == asked else _reason(graph, node, precision, asked, runner.runtime)
        layers.append(LayerPrecision(module_path(node), node.op_type, precision, reason, node.name))
    return Inspection(kernels, tuple(layers))


def _kernels(graph: Graph, runner: Any, inputs: Sequence[Any], repeats: int) -> tuple[Kernel, ...]:
    """Return every kernel with its layer and its median seconds."""
    kernels = []
    for entry in runner.kernel_times(inputs, repeats):
        candidates = (graph.find(alias, entry.op) for alias in (*entry.aliases, entry.name))
        nodes = [node for node in candidates if node and node.op_type not in ("QuantizeLinear", "DequantizeLinear")]
        precision = _PRECISIONS.get(entry.kind, entry.kind)
        if entry.op == "MatMulNBits":
            attributes = nodes[0].attribute if nodes else ()
            precision = f"int{next((item.i for item in attributes if item.name == 'bits'), 4)}"
        # The mean of the middle half: whole microseconds need a mean, interruptions forbid a plain one.
        quarter = len(entry.samples_s) // 4
        middle = sorted(entry.samples_s)[quarter : len(entry.samples_s) - quarter]
        path = module_path(nodes[0]) if nodes else ""
        names = tuple(dict.fromkeys(node.name for node in nodes))
        kernels.append(Kernel(entry.name, entry.op, precision, path, names, sum(middle) / len(middle)))
    return paired(graph, kernels)


# Operators that only compute shapes and positions.
_WITHOUT_FLOATS = frozenset(
    "Shape Cast Constant ConstantOfShape Range Equal Size NonZero Gather Unsqueeze Concat".split()
)


Opener = Callable[[Path], Runner]


def first_difference(
    reference: tuple[Path, Opener], converted: tuple[Path, Opener], batch: Tensors, bound: float
) -> str | None:
    """Return the first layer whose output differs by more than the bound, by bisection; None where files tell nothing.

    Both are files with what opens them. Each step adds one output to both and runs them on the batch; the rest of the
    graph stays, so that the runtime fuses as it did.
    """
    onnx = require("onnx")
    before, after = (onnx.load(str(path), load_external_data=False).graph for path, _ in (reference, converted))
    nodes = {node.name: node for node in after.node}
    shared = [node for node in before.node if node.name in nodes and node.op_type not in _WITHOUT_FLOATS]
    if not shared:
        return None

    def output(file: tuple[Path, Opener], tensor: str) -> torch.Tensor:
        path, opener = file
        model = onnx.load(str(path), load_external_data=False)
        names = [value.name for value in model.graph.output]
        if tensor not in names:
            model.graph.output.append(onnx.ValueInfoProto(name=tensor))
        probe = path.with_name(f"probe-{path.name}")
        probe.write_bytes(model.SerializeToString())
        with opener(probe) as runner:
            value = runner(*batch)[names.index(tensor) if tensor in names else len(names)]
        probe.unlink()
        return value

    low, high = 0, len(shared)
    try:
        while low < high:
            middle = (low + high) // 2
            node = shared[middle]
            values = output(reference, node.output[0]), output(converted, nodes[node.name].output[0])
            low, high = (low, middle) if difference_share(*values) > bound else (middle + 1, high)
    except (EdgeOptError, ValueError):  # a tensor that this runtime does not give away
        return None
    node = shared[min(low, len(shared) - 1)]
    layer = f"{(module_path(node) or node.name)!r} ({node.op_type})"
    return layer if low < len(shared) else f"the end, behind {layer}"
