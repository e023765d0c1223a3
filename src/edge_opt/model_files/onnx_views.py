"""What a profile found, laid on the nodes of the file: for Netron inside the file, for Model Explorer beside it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from edge_opt._support.extras import optional
from edge_opt._support.files import write_whole
from edge_opt.errors import InvalidInput
from edge_opt.model_files.onnx_file import OnnxNode
from edge_opt.model_files.onnx_model import OnnxModel
from edge_opt.records import ModelProfile, OpCost

SUFFIXES = (".onnx", ".nodes.json")
# From light to dark, as Model Explorer mixes them.
_GRADIENT = [{"stop": 0, "bgColor": "white"}, {"stop": 1, "bgColor": "#d9480f"}]


def node_costs(model: OnnxModel, profile: ModelProfile) -> Iterator[tuple[int, OnnxNode, OpCost]]:
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


def save_view(model: OnnxModel, profile: ModelProfile, path: str | os.PathLike[str]) -> Path:
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


def node_data(model: OnnxModel, profile: ModelProfile) -> dict[str, Any]:
    """FLOPs by the name of the node, as Model Explorer's custom node data.

    Args:
        model: The model that was read from the file.
        profile: Its profile.
    """
    results = {
        node.name or f"{node.op}_{place}": {"value": cost.flops} for place, node, cost in node_costs(model, profile)
    }
    return {"results": results, "gradient": _GRADIENT}


def _figures(cost: OpCost) -> dict[str, int]:
    return {"macs": cost.macs, "flops": cost.flops, "bytes_moved": cost.bytes_moved}


def _add(entries: Any, figures: dict[str, int]) -> None:
    for key, value in figures.items():
        entries.add(key=f"edge_opt.{key}", value=str(value))
