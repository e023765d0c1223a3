"""Map costs onto the nodes of a file or an exported program: inside a file for Netron, beside it for Model Explorer."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from edge_opt._support.extras import import_optional
from edge_opt._support.files import write_whole
from edge_opt.cost.rules import price
from edge_opt.errors import InvalidInput
from edge_opt.model_files.file_graph import FileNode
from edge_opt.model_files.file_model import FileModel
from edge_opt.model_files.graph_interpreter import recorded_operators
from edge_opt.records.costs import OpCost, Trace
from edge_opt.records.profiles import ModelProfile
from edge_opt.trace.tracer import trace

Node = TypeVar("Node", int, str)
# From light to dark, as Model Explorer mixes them.
_GRADIENT = [{"stop": 0, "bgColor": "white"}, {"stop": 1, "bgColor": "#d9480f"}]


def node_costs(
    model: FileModel, inputs: Any, kwargs: Mapping[str, Any] | None = None
) -> list[tuple[int, FileNode, OpCost]]:
    """Return each node of the file that is run, with its index and its cost; together they are the whole model's.

    Args:
        model: The model that was read from the file.
        inputs: As in `profile`; the shape of one call.
        kwargs: Arguments of the model by name.
    """
    recorded, reading = model.read(inputs, kwargs)
    return [(index, model.plan.nodes[index], cost) for index, cost in _span_costs(recorded, reading.spans).items()]


def _span_costs(recorded: Trace, spans: Mapping[Node, tuple[int, int]]) -> dict[Node, OpCost]:
    """Return what each node costs by the operators that it became; nodes without work are left out."""
    prices = [price(signature).cost for signature in recorded.signatures]
    return {
        node: sum((prices[call.signature] for call in recorded.ops[first:end]), OpCost())
        for node, (first, end) in spans.items()
        if end > first
    }


def save_view(
    model: FileModel, profile: ModelProfile, inputs: Any, kwargs: Mapping[str, Any], path: str | os.PathLike[str]
) -> Path:
    """Write the costs of the nodes, by suffix: a copy of the file with them as metadata, or data for Model Explorer.

    Args:
        model: The model that was read from the file.
        profile: Its profile, for the totals.
        inputs: As in `profile`; the shape of one call.
        kwargs: Arguments of the model by name.
        path: `NAME.onnx`, which Netron shows, or `NAME.nodes.json`, which Model Explorer loads beside the file.
    """
    if str(path).lower().endswith(".nodes.json"):
        return write_whole(path, json.dumps(node_data(model, inputs, kwargs), indent=1) + "\n")
    onnx = import_optional("onnx", "writing an ONNX file needs", "onnx")
    if os.path.realpath(path) == os.path.realpath(model.file):
        raise InvalidInput(f"{str(path)!r} is the file that was read; write the costs to another one")
    copy = onnx.load(str(model.file), load_external_data=False)
    for index, _, cost in node_costs(model, inputs, kwargs):
        figures = {"macs": cost.macs, "flops": cost.flops, "bytes_moved": cost.bytes_moved}
        _add(copy.graph.node[index].metadata_props, figures)
    totals = profile.totals
    whole = {"macs": totals.macs, "flops": totals.flops, "parameters": totals.params,
             "peak_activation_bytes": profile.peak.live_bytes}  # fmt: skip
    _add(copy.metadata_props, whole)
    return write_whole(path, copy.SerializeToString())


def node_data(model: FileModel, inputs: Any, kwargs: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return FLOPs by the name of the node, as Model Explorer's custom node data.

    Args:
        model: The model that was read from the file.
        inputs: As in `profile`; the shape of one call.
        kwargs: Arguments of the model by name.
    """
    costs = node_costs(model, inputs, kwargs)
    return explorer_data({node.name or f"{node.op}_{index}": cost for index, node, cost in costs})


def explorer_data(costs: Mapping[str, OpCost]) -> dict[str, Any]:
    """Return FLOPs of nodes in the form that Model Explorer loads beside a model.

    Args:
        costs: What each node costs, by its name in the viewer: of an `.onnx` file the node's, of a `.tflite` file that
            of the tensor it makes, of a `.pt2` file that in its graph.
    """
    return {"results": {name: {"value": cost.flops} for name, cost in costs.items()}, "gradient": _GRADIENT}


def save_program_view(program: Any, inputs: Any, kwargs: Mapping[str, Any], path: str | os.PathLike[str]) -> Path:
    """Write the costs of the nodes of an exported program, for Model Explorer.

    Args:
        program: What `torch.export.load` reads.
        inputs: As in `profile`; the shape of one call.
        kwargs: Arguments of the model by name.
        path: `NAME.nodes.json`.
    """
    return write_whole(path, json.dumps(explorer_data(program_costs(program, inputs, kwargs)), indent=1) + "\n")


def _add(entries: Any, figures: dict[str, int]) -> None:
    for key, value in figures.items():
        entries.add(key=f"edge_opt.{key}", value=str(value))


class _ProgramInterpreter(torch.fx.Interpreter):
    """Runs the nodes one by one, and notes which operators of the trace each became."""

    def __init__(self, graph: Any) -> None:
        super().__init__(graph)
        self.spans: dict[str, tuple[int, int]] = {}

    def run_node(self, n: torch.fx.Node) -> Any:
        before = recorded_operators()
        result = super().run_node(n)
        self.spans[n.name] = (before, recorded_operators())
        return result


class _Program(nn.Module):
    """Runs an exported program under a trace, and returns which operators each node became."""

    def __init__(self, graph: nn.Module) -> None:
        super().__init__()
        self.graph = graph

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, tuple[int, int]]:
        interpreter = _ProgramInterpreter(self.graph)
        interpreter.run(*tree_leaves((args, kwargs)), enable_io_processing=False)
        return interpreter.spans


def program_costs(program: Any, inputs: Any, kwargs: Mapping[str, Any] | None = None) -> dict[str, OpCost]:
    """Return what each node of an exported program costs, by its name; together they are the whole model's.

    Args:
        program: What `torch.export.export` returns, or `torch.export.load` reads.
        inputs: As in `profile`; the shape of one call.
        kwargs: Arguments of the model by name.
    """
    spans: list[dict[str, tuple[int, int]]] = []
    recorded = trace(_Program(program.module()), inputs, kwargs, results=spans)
    return _span_costs(recorded, spans[0])
