"""Costs laid on the nodes of a file or an exported program: inside a file for Netron, beside it for Model Explorer."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

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
from edge_opt.records.costs import OpCost
from edge_opt.records.profiles import ModelProfile
from edge_opt.trace.tracer import trace

# From light to dark, as Model Explorer mixes them.
_GRADIENT = [{"stop": 0, "bgColor": "white"}, {"stop": 1, "bgColor": "#d9480f"}]


def node_costs(model: FileModel, profile: ModelProfile) -> Iterator[tuple[int, FileNode, OpCost]]:
    """Each node of the file that is run, with its place and its cost; together they are the whole model's.

    Args:
        model: The model that was read from the file.
        profile: Its profile; the last that was made of it.
    """
    spans = model.plan.read_ops
    operators = profile.trace.ops
    if not spans or max(end for _, end in spans) > len(operators):
        raise InvalidInput("the profile is not the last one of this file; profile it again")
    prices = profile.prices
    for place, (first, end) in enumerate(spans):
        if end > first:
            cost = sum((prices[call.signature].cost for call in operators[first:end]), OpCost())
            yield place, model.plan.nodes[place], cost


def save_view(model: FileModel, profile: ModelProfile, path: str | os.PathLike[str]) -> Path:
    """Write the costs of the nodes, by suffix: a copy of the file with them as metadata, or data for Model Explorer.

    Args:
        model: The model that was read from the file.
        profile: Its profile.
        path: `NAME.onnx`, which Netron shows, or `NAME.nodes.json`, which Model Explorer loads beside the file.
    """
    if str(path).lower().endswith(".nodes.json"):
        return write_whole(path, json.dumps(node_data(model, profile), indent=1) + "\n")
    onnx = import_optional("onnx", "writing an ONNX file needs", "onnx")
    if os.path.realpath(path) == os.path.realpath(model.file):
        raise InvalidInput(f"{str(path)!r} is the file that was read; write the costs to another one")
    copy = onnx.load(str(model.file), load_external_data=False)
    for place, _, cost in node_costs(model, profile):
        _add(copy.graph.node[place].metadata_props, _figures(cost))
    totals = profile.totals
    whole = {"macs": totals.macs, "flops": totals.flops, "parameters": totals.params,
             "peak_activation_bytes": profile.peak.live_bytes}  # fmt: skip
    _add(copy.metadata_props, whole)
    return write_whole(path, copy.SerializeToString())


def node_data(model: FileModel, profile: ModelProfile) -> dict[str, Any]:
    """FLOPs by the name of the node, as Model Explorer's custom node data.

    Args:
        model: The model that was read from the file.
        profile: Its profile.
    """
    return explorer_data({node.name or f"{node.op}_{place}": cost for place, node, cost in node_costs(model, profile)})


def explorer_data(costs: Mapping[str, OpCost]) -> dict[str, Any]:
    """FLOPs of nodes in the form that Model Explorer loads beside a model.

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


def _figures(cost: OpCost) -> dict[str, int]:
    return {"macs": cost.macs, "flops": cost.flops, "bytes_moved": cost.bytes_moved}


def _add(entries: Any, figures: dict[str, int]) -> None:
    for key, value in figures.items():
        entries.add(key=f"edge_opt.{key}", value=str(value))


class _Reading(torch.fx.Interpreter):
    """Runs the nodes one by one, and notes which operators of the trace each became."""

    def __init__(self, graph: Any, spans: dict[str, tuple[int, int]]) -> None:
        super().__init__(graph)
        self.spans = spans

    def run_node(self, n: torch.fx.Node) -> Any:
        before = recorded_operators()
        found = super().run_node(n)
        self.spans[n.name] = (before, recorded_operators())
        return found


class _Spans:
    """What a reading noted; an object of its own, which a trace does not copy."""

    def __init__(self) -> None:
        self.found: dict[str, tuple[int, int]] = {}


class _Program(nn.Module):
    def __init__(self, graph: nn.Module) -> None:
        super().__init__()
        self.graph = graph
        self.spans = _Spans()

    def forward(self, *given: Any, **named: Any) -> Any:
        reading = _Reading(self.graph, self.spans.found)
        return reading.run(*tree_leaves((given, named)), enable_io_processing=False)


def program_costs(program: Any, inputs: Any, kwargs: Mapping[str, Any] | None = None) -> dict[str, OpCost]:
    """What each node of an exported program costs, by its name; together they are the whole model's.

    Args:
        program: What `torch.export.export` returns, or `torch.export.load` reads.
        inputs: As in `profile`; the shape of one call.
        kwargs: Arguments of the model by name.
    """
    model = _Program(program.module())
    traced = trace(model, inputs, kwargs)
    prices = [price(signature).cost for signature in traced.signatures]
    calls = traced.ops
    return {
        name: sum((prices[call.signature] for call in calls[first:end]), OpCost())
        for name, (first, end) in model.spans.found.items()
        if end > first
    }
