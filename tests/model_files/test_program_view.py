"""Costs on the nodes of an exported program, opened by Model Explorer's own reader."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import edge_opt as eo
from edge_opt.cli import app
from edge_opt.model_files.node_costs import program_costs
from needed import needed


class Two(nn.Module):
    """Two inputs, one of them by name, and a layer that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(torch.relu(self.inner(self.inner(x))) * scale)
        return found


@pytest.fixture(scope="module")
def program() -> torch.export.ExportedProgram:
    return torch.export.export(Two().eval(), (torch.zeros(2, 8),), {"scale": torch.ones(8)})


def test_nodes_add_up_to_the_model(program: torch.export.ExportedProgram) -> None:
    costs = program_costs(program, (2, 8), {"scale": torch.ones(8)})
    whole = eo.profile(Two(), (2, 8), kwargs={"scale": torch.ones(8)})
    assert sum(cost.flops for cost in costs.values()) == whole.totals.flops
    assert costs["linear"].macs == costs["linear_1"].macs == 2 * 8 * 8
    assert costs["linear_2"].macs == 2 * 8 * 3


def test_keys_are_nodes_of_the_graph_that_model_explorer_draws(
    program: torch.export.ExportedProgram, tmp_path: Path
) -> None:
    needed("model_explorer")
    torch.export.save(program, tmp_path / "m.pt2")
    done = CliRunner().invoke(
        app, ["profile", str(tmp_path / "m.pt2"), "-o", str(tmp_path / "m.nodes.json"), "--trust"]
    )
    assert done.exit_code == 0, done.stderr
    data = json.loads((tmp_path / "m.nodes.json").read_text())
    reader = import_module("model_explorer.pytorch_exported_program_adapter_impl")
    graph = reader.PytorchExportedProgramAdapterImpl(program, {"const_element_count_limit": 4}).convert()["graphs"][0]
    assert set(data["results"]) <= {node.id for node in graph.nodes}
    builder = import_module("model_explorer.node_data_builder")
    results = {name: builder.NodeDataResult(one["value"]) for name, one in data["results"].items()}
    gradient = [builder.GradientItem(**one) for one in data["gradient"]]
    theirs = json.loads(builder.GraphNodeData(results=results, gradient=gradient).to_json_string())
    assert {key: theirs[key] for key in data} == data
