"""Files of models on the command line."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from torch import nn
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
    assert "c.onnx" in found.stderr and ".onnx as the model" in found.stderr


@pytest.mark.parametrize("command", [["prune", "--ratio", "0.5"], ["convert"]])
def test_what_needs_the_model_itself_says_so(path: str, tmp_path: Path, command: list[str]) -> None:
    found = RUN.invoke(app, [command[0], path, *command[1:], "-o", str(tmp_path / "out.onnx")])
    assert found.exit_code == 2, found.stderr
    assert "Traceback" not in found.stderr
    assert "file" in found.stderr.splitlines()[-1]


def linear(path: Path) -> None:
    program = torch.export.export(nn.Linear(16, 4), (torch.zeros(1, 16),))
    torch.export.save(program, path)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> str:
    found = tmp_path_factory.mktemp("files") / "m.pt2"
    linear(found)
    return str(found)


@pytest.mark.parametrize("suffix", [".onnx", ".pt2"])
def test_the_page_of_a_file_is_that_of_its_profile(path: str, exported: str, suffix: str, tmp_path: Path) -> None:
    file = path if suffix == ".onnx" else exported
    trust = ["--trust"] if suffix == ".pt2" else []
    found = RUN.invoke(app, ["report", file, *trust])
    assert found.exit_code == 0, found.stderr
    page = Path(file).with_suffix(".html")
    assert Path(found.stdout.strip()) == page
    same = tmp_path / "same.html"
    assert RUN.invoke(app, ["profile", file, "-o", str(same), *trust]).exit_code == 0
    texts = [
        re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC", "", one.read_text()) for one in (page, same)
    ]  # when it was written
    assert texts[0] == texts[1]


def test_a_file_with_open_shapes_has_a_page_when_they_are_given(tmp_path: Path) -> None:
    open_shapes = write(tmp_path / "m.onnx", [node("Relu", "x", "y")], {"x": ("N", "C")}, ["y"])
    found = RUN.invoke(app, ["report", open_shapes])
    assert found.exit_code == 2
    assert "-i SHAPE -o report.html" in found.stderr


def test_commands_on_files_work_or_say_what_to_do(path: str, exported: str, tmp_path: Path) -> None:
    """Each ends with 0, or with one sentence that names a command or what to give instead."""
    flat = str(tmp_path / "none.tflite")
    for command, said in [
        (["compare", exported, path, "--trust"], ""),
        (["check", exported, "--budget", "macs <= 64", "--trust"], ""),
        (["profile", exported, "-t", "raspberry-pi-4", "--trust"], ""),
        (["report", path, exported], "edge-opt compare A B"),
        (["devices", path], "-t NAME"),
        (["devices", exported], "-t NAME"),
        (["prune", exported, "--ratio", "0.5", "-o", str(tmp_path / "out.pt2")], "give the model's source"),
        (["convert", flat, "-c", "random", "-o", str(tmp_path / "out")], "give the model's source"),
        (["report", flat], "no file"),
    ]:
        found = RUN.invoke(app, command)
        assert found.exit_code == (2 if said else 0), (command, found.stderr)
        assert said in found.stderr
        assert "Traceback" not in found.stderr
