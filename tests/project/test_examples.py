"""The examples run as they stand."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import nbformat
import pytest
import yaml
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run an example as a script, in this process, and return what it prints."""

    def run_script(name: str, *arguments: str) -> str:
        monkeypatch.syspath_prepend(str(EXAMPLES))
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return run_script


@pytest.mark.slow
def test_a_transformer_spends_more_on_attention_the_longer_the_text(run: Callable[..., str]) -> None:
    rows = [line.split() for line in run("transformer.py").splitlines()[-3:]]
    shares = [float(row[3].rstrip("%")) for row in rows]
    assert [int(row[0]) for row in rows] == [128, 512, 2048]
    assert shares == sorted(shares)


@pytest.mark.slow
def test_three_devices_stand_side_by_side(run: Callable[..., str]) -> None:
    shown = run("three_devices.py")
    assert all(name in shown for name in ("raspberry-pi-4", "raspberry-pi-5", "jetson-nano"))


@pytest.mark.slow
def test_a_residual_network_is_pruned_and_read_again(run: Callable[..., str]) -> None:
    assert "same outputs: True" in run("prune_residual.py")


@pytest.mark.slow
def test_a_board_is_calibrated(tmp_path: Path, run: Callable[..., str]) -> None:
    shown = run("calibrate_board.py", "--seconds", "1", "--output", str(tmp_path / "board.json"))
    assert "resnet50: " in shown
    assert (tmp_path / "board.json").exists()


@pytest.mark.slow
def test_the_notebook_runs(tmp_path: Path) -> None:
    notebook = nbformat.read(EXAMPLES / "tour.ipynb", as_version=4)
    NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [output for cell in notebook.cells for output in cell.get("outputs", ()) if "data" in output]
    assert sum("text/html" in output["data"] for output in shown) == 5


@pytest.mark.slow
def test_the_gate_of_the_ci_file_works(tmp_path: Path, edge_opt_command: str) -> None:
    """Its own commands, with the paths of a checkout; the summary goes to a file."""
    steps = yaml.safe_load((EXAMPLES / "ci" / "edge-opt.yml").read_text(encoding="utf-8"))["jobs"]["cost"]["steps"]
    commands = "\n".join(
        step["run"] for step in steps if "edge-opt " in step.get("run", "") and "pip" not in step["run"]
    )
    (tmp_path / "net.py").write_text(
        "from torch import nn\n\ndef Net():\n    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())\n",
        encoding="utf-8",
    )
    script = commands.replace("git worktree add ../before origin/main", "true").replace("../before/", "")
    done = subprocess.run(
        ["bash", "-ec", f'edge-opt() {{ {edge_opt_command} "$@"; }}\n{script}'],
        cwd=tmp_path,
        env={**os.environ, "GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "summary.md").stat().st_size
    assert (tmp_path / "cost.xml").stat().st_size
