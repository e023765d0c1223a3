"""Files for other services, tested as far as a machine without them allows."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
import torch
import yaml
from torch import nn

import edge_opt as eo

ROOT = Path(__file__).parents[2]


def action_steps() -> list[dict[str, str]]:
    steps: list[dict[str, str]] = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))["runs"]["steps"]
    return steps


def run_action(folder: Path, command: str, **values: str) -> subprocess.CompletedProcess[str]:
    """Run the script of the action; a function `gh` keeps what the service would get."""
    script = next(step["run"] for step in action_steps() if step["name"] == "Check")
    (folder / "net.py").write_text("from torch import nn\n\ndef Net():\n    return nn.Linear(8, 4)\n", encoding="utf-8")
    functions = f'edge-opt() {{ {command} "$@"; }}\ngh() {{ cp "$5" comment.md; echo "$@" >> gh.log; }}\n'
    given = {"MODEL": "net.py:Net", "SHAPES": "1x8", "BUDGETS": "", "BASELINE": "", "INCREASES": "", "COMMENT": "true",
             "TRUST": "false", "PULL_REQUEST": "7", "GITHUB_STEP_SUMMARY": str(folder / "summary.md")}  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **given, **values}
    return subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", functions + script],
        cwd=folder, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_the_action_comments_and_passes_within_budget(tmp_path: Path, edge_opt_command: str) -> None:
    done = run_action(tmp_path, edge_opt_command, BUDGETS="macs <= 32\nparams <= 36\n")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "gh.log").read_text().startswith("pr comment 7 --body-file")
    assert (tmp_path / "comment.md").read_text() == (tmp_path / "summary.md").read_text()


def test_the_action_fails_over_budget_and_still_comments(tmp_path: Path, edge_opt_command: str) -> None:
    done = run_action(tmp_path, edge_opt_command, BUDGETS="macs <= 31")
    assert done.returncode == 1, done.stderr
    assert "macs" in (tmp_path / "comment.md").read_text()


def test_the_action_compares_with_a_baseline_and_fails_over_its_limit(tmp_path: Path, edge_opt_command: str) -> None:
    eo.profile(nn.Linear(8, 2), (1, 8)).save(tmp_path / "old.json")
    done = run_action(tmp_path, edge_opt_command, BASELINE="old.json", INCREASES="macs=5%\nparams=200%\n")
    assert done.returncode == 1, done.stderr
    comment = (tmp_path / "comment.md").read_text()
    assert "+100.0%" in comment  # 8 x 4 products instead of 8 x 2
    # The verdict first, then what differs, as two tables that GitHub draws.
    assert comment.count("\n| ---") + comment.count("\n|---") >= 2, comment


def test_the_action_opens_an_exported_program_only_with_trust(tmp_path: Path, edge_opt_command: str) -> None:
    torch.export.save(torch.export.export(nn.Linear(8, 4).eval(), (torch.zeros(1, 8),)), tmp_path / "net.pt2")
    refused = run_action(tmp_path, edge_opt_command, MODEL="net.pt2", BUDGETS="macs <= 32")
    assert refused.returncode == 2 and "can execute code from the file" in refused.stderr
    done = run_action(tmp_path, edge_opt_command, MODEL="net.pt2", BUDGETS="macs <= 32", TRUST="true")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_runner_installs_the_action_from_its_own_files_and_names_the_model(tmp_path: Path) -> None:
    """A job in a fresh environment that has torch, as a runner with a cache has, and no edge-opt."""
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    [site_packages] = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    # All packages of this environment but edge-opt itself: entries of a folder on PYTHONPATH run no .pth files.
    environment = {**os.environ, "PYTHONPATH": sysconfig.get_paths()["purelib"]}
    install = next(step["run"] for step in action_steps() if step["name"] == "Install")
    pip = f'pip() {{ {shlex.quote(str(python))} -m pip "$@" --no-deps --no-build-isolation; }}\n'
    subprocess.run(
        ["bash", "-e", "-c", pip + install],
        cwd=tmp_path, env={**environment, "PACKAGE": "", "ACTION_PATH": str(ROOT)}, check=True,
    )  # fmt: skip
    assert (site_packages / "edge_opt" / "cli").is_dir()
    done = run_action(tmp_path, f"{python} -m edge_opt.cli", BUDGETS="macs <= 32", PYTHONPATH=environment["PYTHONPATH"])
    assert done.returncode == 0, done.stderr
    assert " Net: within 1 budget" in (tmp_path / "summary.md").read_text()


def test_the_hook_names_a_command_that_is_there() -> None:
    [hook] = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))
    command = [sys.executable, "-m", "edge_opt.cli", *hook["entry"].split()[1:], "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "--budget" in done.stdout


def test_the_image_copies_only_what_is_there() -> None:
    lines = (ROOT / "Dockerfile").read_text(encoding="utf-8").splitlines()
    copied = [name for line in lines if line.startswith("COPY") for name in line.split()[1:-1]]
    assert copied and all((ROOT / name).exists() for name in copied)
