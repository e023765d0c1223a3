"""What a runtime really executes: its kernels, their precision, and on request their time."""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from edge_opt.compress.graphs import Graph, paired, read_graph
from edge_opt.compress.runtimes import OnnxRuntimeRunner, OpenVinoRunner, Runner
from edge_opt.errors import InvalidInput
from edge_opt.records import Kernel, RunnerProfile

_PRECISIONS = {
    "float": "fp32", "f32": "fp32", "float16": "fp16", "f16": "fp16", "bfloat16": "bf16", "bf16": "bf16",
    "uint8": "int8", "int8": "int8", "u8": "int8", "i8": "int8", "double": "fp64", "f64": "fp64",
}  # fmt: skip
_NOT_RUN = ("Const", "Input", "Output")


def profile_runner(runner: Runner, *inputs: Any, repeats: int = 20) -> RunnerProfile:
    """Seconds of each kernel by the runtime's own profiler, the mean of the middle half of `repeats` runs.

    Profiling costs some microseconds per kernel, and ONNX Runtime counts whole ones: read shares, not a latency.
    """
    if isinstance(repeats, bool) or not isinstance(repeats, int) or repeats < 1:
        raise InvalidInput(f"repeats is {repeats!r}; it must be a whole number of at least 1")
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
    return Kernel(name, op, _PRECISIONS.get(kind, kind), nodes[0].path if nodes else "", names, seconds)


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
            key = (event["name"].removesuffix("_kernel_time"), arguments["op_name"], types[0] if types else "")
            spent[key].append(event["dur"] * 1e-6)
    graph = read_graph(runner.path)
    kernels = [
        _kernel(graph, name, op, kind, _typical(seconds[-repeats:])) for (name, op, kind), seconds in spent.items()
    ]
    return paired(graph, kernels)


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
