"""What a profile found, laid on the nodes of the file: for Netron inside the file, for Model Explorer beside it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from edge_opt._support.extras import optional
from edge_opt._support.files import write_whole
from edge_opt.errors import InvalidInput
from edge_opt.model_files.file_model import FileModel
from edge_opt.model_files.file_records import FileNode
from edge_opt.model_files.program_view import program_costs
from edge_opt.records import ModelProfile, OpCost

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
    onnx = optional("onnx", "writing an ONNX file needs", "onnx")
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
