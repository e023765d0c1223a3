"""What a runtime really executed, kernel by kernel, laid on layers."""

from __future__ import annotations

import json
import re
import tempfile
from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from edge_opt._support.checks import check_whole
from edge_opt.errors import InvalidInput
from edge_opt.quantization.onnx_files import PATH_KEY, SPARED_KEY, require
from edge_opt.records.conversions import Kernel, LayerPrecision, RunnerProfile
from edge_opt.runtimes.runners import OnnxRuntimeRunner, OpenVinoRunner, Runner

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
    """The nodes of a file, by name and by the tensors they make; bits of those whose weights alone are quantised."""

    nodes: dict[str, Node]
    makers: dict[str, Node]
    bits: dict[str, int] = field(default_factory=dict)

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

    def is_read_by_spared(self, node: Node) -> bool:
        """Whether a spared node reads what this one makes, with at most an activation between."""
        for spared in (other for other in self.nodes.values() if other.is_spared):
            for name in spared.inputs:
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
    bits = {
        node.name: attribute.i for node in model.graph.node for attribute in node.attribute if attribute.name == "bits"
    }
    return Graph({node.name: node for node in found}, {output: node for node in found for output in node.outputs}, bits)


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
    if node.op == "MatMul" and runtime == "onnxruntime" and graph.is_dynamic:
        return "a product of two activations, or of weights that are not constant; those stay in float"
    if graph.is_quantized(node) and graph.is_read_by_spared(node):
        return f"a spared layer reads its output unrounded, and {runtime} rounds what an int8 {node.op} gives"
    if graph.is_quantized(node):
        return f"quantised in the file, but {runtime} has no int8 kernel for this {node.op} and ran {precision}"
    if node.op in ("GRU", "RNN"):
        return f"{runtime} has no int8 kernel for {node.op}, static or dynamic; litert computes its products in int8"
    if FAMILY[node.op] == "recurrent":
        return f"static quantisation has no rule for {node.op}"
    return f"the quantiser left this {node.op} in float"


_PRECISIONS = {
    "float": "fp32", "f32": "fp32", "float16": "fp16", "f16": "fp16", "bfloat16": "bf16", "bf16": "bf16",
    "uint8": "int8", "int8": "int8", "u8": "int8", "i8": "int8", "double": "fp64", "f64": "fp64",
}  # fmt: skip
_NOT_RUN = ("Const", "Input", "Output")


def profile_runner(runner: Runner, *inputs: Any, repeats: int = 20) -> RunnerProfile:
    """Seconds of each kernel by the runtime's own profiler.

    Profiling costs some microseconds per kernel, and ONNX Runtime counts whole ones: read shares, not a latency.

    Args:
        runner: What to run, in ONNX Runtime or OpenVINO.
        inputs: The tensors of one call.
        repeats: Runs to profile; a kernel's time is the mean of the middle half of them.
    """
    check_whole("repeats", repeats)
    if isinstance(runner, OnnxRuntimeRunner):
        return RunnerProfile("onnxruntime", _onnxruntime(runner, inputs, repeats), repeats)
    if isinstance(runner, OpenVinoRunner):
        return RunnerProfile("openvino", _openvino(runner, inputs, repeats), repeats)
    raise InvalidInput("torch has no graph to profile; edge_opt.measure(model, inputs) times its layers")


def executed_kernels(runner: Runner, inputs: Iterable[Any]) -> tuple[Kernel, ...]:
    """The kernels of one run, untimed."""
    return tuple(replace(kernel, seconds=None) for kernel in profile_runner(runner, *inputs, repeats=1).kernels)


def _typical(samples: list[float]) -> float:
    """The mean of the middle half: whole microseconds need a mean, interruptions forbid a plain one."""
    quarter = len(samples) // 4
    middle = sorted(samples)[quarter : len(samples) - quarter]
    return sum(middle) / len(middle)


def _kernel(graph: Graph, name: str, op: str, kind: str, seconds: float, aliases: Iterable[str] = ()) -> Kernel:
    found = (graph.find(alias, op) for alias in (*aliases, name))
    nodes = [node for node in found if node is not None and node.op not in ("QuantizeLinear", "DequantizeLinear")]
    names = tuple(dict.fromkeys(node.name for node in nodes))
    precision = f"int{graph.bits.get(names[0] if names else '', 4)}" if kind == "MatMulNBits" else kind
    return Kernel(name, op, _PRECISIONS.get(precision, precision), nodes[0].path if nodes else "", names, seconds)


def _onnxruntime(runner: OnnxRuntimeRunner, inputs: Iterable[Any], repeats: int) -> tuple[Kernel, ...]:
    """By ONNX Runtime's profiler, in a session of its own; the first run, which allocates, does not count."""
    with tempfile.TemporaryDirectory(prefix="edge-opt-") as folder:
        session = runner.session(profile_prefix=str(Path(folder) / "run"))
        feeds = runner.feeds(inputs)
        for _ in range(1 + repeats):
            session.run(None, feeds)
        events = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
    spent: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for event in events:
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
            arguments = event["args"]
            types = [next(iter(entry)) for entry in arguments.get("input_type_shape") or [{"": []}]]
            op = arguments["op_name"]
            key = (event["name"].removesuffix("_kernel_time"), op, _kind(op, types))
            spent[key].append(event["dur"] * 1e-6)
    graph = read_graph(runner.path)
    kernels = [
        _kernel(graph, name, op, kind, _typical(seconds[-repeats:])) for (name, op, kind), seconds in spent.items()
    ]
    return paired(graph, kernels)


def _kind(op: str, types: list[str]) -> str:
    """What a kernel runs in: the type of its first input, unless the kernel itself rounds that."""
    if op == "MatMulNBits":
        return op
    return "int8" if op.startswith("DynamicQuantize") else types[0] if types else ""


def _openvino(runner: OpenVinoRunner, inputs: Iterable[Any], repeats: int) -> tuple[Kernel, ...]:
    """By OpenVINO's counters; the precision is what the compiled model says of itself, not what was asked."""
    compiled = runner.compiled({"PERF_COUNT": True})
    request = compiled.create_infer_request()
    feeds = runner.feeds(inputs)
    spent: dict[str, list[float]] = defaultdict(list)
    for _ in range(1 + repeats):
        request.infer(feeds)
        for entry in request.get_profiling_info():
            if str(entry.status).endswith("EXECUTED"):
                spent[entry.node_name].append(entry.real_time.total_seconds())
    graph = read_graph(runner.path)
    kernels = []
    for node in compiled.get_runtime_model().get_ordered_ops():
        facts = {key: str(value.astype(str)) for key, value in node.get_rt_info().items() if key in _FACTS}
        if facts.get("layerType") in _NOT_RUN or node.get_friendly_name() not in spent:
            continue
        aliases = [name.partition("/")[0] for name in facts.get("originalLayersNames", "").split(",") if name]
        seconds = _typical(spent[node.get_friendly_name()][-repeats:])
        op, kind = facts.get("layerType", ""), facts["runtimePrecision"]
        kernels.append(_kernel(graph, node.get_friendly_name(), op, kind, seconds, aliases))
    return paired(graph, kernels)


_FACTS = ("layerType", "runtimePrecision", "originalLayersNames")
