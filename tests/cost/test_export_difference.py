"""What makes a file differ from its model: causes with names, and they add up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

import edge_opt as eo
from edge_opt.model_files.file_model import load_onnx
from edge_opt.records.costs import Reconciliation
from onnx_graphs import node, write


def named(name: str, op: str, inputs: str, outputs: str, **attributes: Any) -> Any:
    """A node as exporters write it, with the path of its module in its name."""
    made = node(op, inputs, outputs, **attributes)
    made.name = name
    return made


def reconciled(
    model: nn.Module, shape: tuple[int, ...], path: Path, nodes: list[Any], weights: dict[str, Any]
) -> Reconciliation:
    file = load_onnx(write(path, nodes, {"x": shape}, ["y"], weights))
    found = eo.reconcile(eo.profile(model, shape), eo.profile(file, shape, name=path.name))
    assert found.ours + sum(cause.difference for cause in found.causes) == found.theirs
    return found


def test_a_file_that_costs_the_same_has_no_causes(tmp_path: Path) -> None:
    nodes = [named("/0/Gemm", "Gemm", "x w b", "a", transB=1), named("/1/Relu", "Relu", "a", "y")]
    model = nn.Sequential(nn.Linear(8, 4), nn.ReLU())
    found = reconciled(model, (3, 8), tmp_path / "m.onnx", nodes, {"w": (4, 8), "b": (4,)})
    assert (found.causes, found.convention, found.ours) == ((), "m.onnx", 3 * (2 * 8 * 4 + 4 + 4))


def test_a_folded_norm_is_named(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4))
    nodes = [named("/0/Conv", "Conv", "x w b", "y")]
    found = reconciled(model, (1, 3, 6, 6), tmp_path / "m.onnx", nodes, {"w": (4, 3, 3, 3), "b": (4,)})
    # 4x4 results of 4 channels: a factor and an addition each are gone, and the bias came
    assert [(one.cause, one.difference, one.layers) for one in found.causes] == [
        ("norm folded into the product before it", -2 * 64, ("1",)),
        ("bias that a folded norm leaves", 64, ("0",)),
    ]


class Grid(nn.Module):
    """Adds a projection of its own positions, which no input reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(4, 8)
        self.register_buffer("positions", torch.arange(20.0).reshape(5, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = x + self.project(self.get_buffer("positions"))
        return found


def test_what_no_input_reaches_is_worked_out_when_exported(tmp_path: Path) -> None:
    nodes = [named("/Add", "Add", "x p", "y")]
    found = reconciled(Grid(), (2, 5, 8), tmp_path / "m.onnx", nodes, {"p": (5, 8)})
    assert [(one.cause, one.difference, one.layers) for one in found.causes] == [
        ("computed when exported: no input reaches it", -(2 * 5 * 4 * 8 + 5 * 8), ("project",))
    ]


def test_an_operator_that_is_written_as_others_is_named(tmp_path: Path) -> None:
    nodes = [named("/0/Tanh", "Tanh", "x", "s"), named("/0/Mul", "Mul", "x s", "y")]
    found = reconciled(nn.Sequential(nn.GELU()), (2, 8), tmp_path / "m.onnx", nodes, {})
    [cause] = found.causes
    assert (cause.cause, cause.layers) == ("activation written as activation, elementwise", ("0",))
