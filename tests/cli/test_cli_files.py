"""Files of models on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from edge_opt.cli import app
from onnx_graphs import node, write

RUN = CliRunner()


@pytest.fixture
def path(tmp_path: Path) -> str:
    nodes = [node("MatMul", "x w", "a"), node("Relu", "a", "y")]
    return write(tmp_path / "m.onnx", nodes, {"x": ("N", 16)}, ["y"], {"w": (16, 4)})


def test_a_file_is_profiled_with_its_own_shapes_or_other_ones(path: str) -> None:
    own = json.loads(RUN.invoke(app, ["profile", path, "--json"]).stdout)
    assert own["totals"]["macs"] == 16 * 4
    other = json.loads(RUN.invoke(app, ["profile", path, "-b", "5", "--json"]).stdout)
    assert other["totals"]["macs"] == 5 * 16 * 4


def test_files_are_compared_and_checked(path: str) -> None:
    found = json.loads(RUN.invoke(app, ["compare", path, path, "-i", "2x16", "--json"]).stdout)
    assert found["format"] == "edge_opt.comparison"
    assert RUN.invoke(app, ["check", path, "--budget", "macs <= 64"]).exit_code == 0
    assert RUN.invoke(app, ["check", path, "--budget", "macs <= 63"]).exit_code == 1


def test_costs_on_nodes_need_a_file_with_nodes(path: str, tmp_path: Path) -> None:
    assert RUN.invoke(app, ["profile", path, "-o", str(tmp_path / "costs.onnx")]).exit_code == 0
    assert (tmp_path / "costs.onnx").exists()
    (tmp_path / "net.py").write_text("from torch import nn\nnet = nn.Linear(2, 2)\n")
    found = RUN.invoke(app, ["profile", f"{tmp_path}/net.py:net", "-i", "1x2", "-o", str(tmp_path / "c.onnx")])
    assert found.exit_code == 2
    assert "shows costs on the nodes of an .onnx file" in found.stderr


@pytest.mark.parametrize("command", [["prune", "--ratio", "0.5"], ["export"]])
def test_what_needs_the_model_itself_says_so(path: str, tmp_path: Path, command: list[str]) -> None:
    found = RUN.invoke(app, [command[0], path, *command[1:], "-o", str(tmp_path / "out.onnx")])
    assert found.exit_code == 2, found.stderr
    assert "Traceback" not in found.stderr
    assert "file" in found.stderr.splitlines()[-1]
