"""The command line as a whole: help, version, exit codes, and what goes where."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import edge_opt
from edge_opt.cli import app

SOURCE = str(Path(edge_opt.__file__).parents[1])


def run(*arguments: str, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """A real process, as users start it."""
    return subprocess.run(
        [sys.executable, "-m", "edge_opt", *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        check=False,
        encoding="utf-8",
        env={**os.environ, "PYTHONPATH": SOURCE, "PYTHONIOENCODING": "utf-8", **environment},
    )


NET = """
import torch
from torch import nn

print("a model's author talks")

class Net(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.layer = nn.Linear(4, width)

    def forward(self, x, repeat=1):
        for _ in range(repeat):
            y = self.layer(x)
        return torch.linalg.matrix_exp(y) if y.shape[-1] == 5 else y
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "net.py").write_text(NET)
    return tmp_path


def test_help_fits_a_screen_and_shows_examples() -> None:
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0
    assert "edge-opt profile torchvision:resnet50 -i 1x3x224x224" in result.stdout
    assert len(result.stdout.splitlines()) <= 45


COMMANDS = (
    "profile check compare sweep run llm devices convert prune calibrate measure-on report train-cost status doctor "
    "board init explain reconcile mcp targets"
).split()


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_fits_a_screen_of_40_lines_and_100_columns(command: str) -> None:
    result = CliRunner().invoke(app, [command, "-h"], env={"COLUMNS": "100"})
    lines = result.stdout.splitlines()
    assert result.exit_code == 0 and lines[0].startswith("Usage: ")
    assert len(lines) <= 40 and max(map(len, lines)) <= 100
    assert any(line.startswith(f"  edge-opt {command}") for line in lines), "an example"
    assert "Every command" in lines
    assert all(any(line.startswith(f"  {flag} ") for line in lines) for flag in ("--json", "--trust", "--debug"))


def test_there_are_at_most_165_options_and_19_of_a_command() -> None:
    commands = vars(typer.main.get_command(app))["commands"]
    assert sorted(commands) == sorted(COMMANDS)
    options = {
        name: {param.name for param in command.params if param.param_type_name == "option"}
        for name, command in commands.items()
    }
    assert sum(map(len, options.values())) <= 165
    shared = {"inputs", "batch", "output"}
    assert max(len(names - shared) for names in options.values()) <= 19


def test_version() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"edge-opt {edge_opt.__version__}\n")


def test_help_does_not_import_torch() -> None:
    code = (
        "import sys\n"
        "from edge_opt.cli import app\n"
        "app(['profile', '--help'], standalone_mode=False)\n"
        "print('torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.stdout.endswith("False\n")
    assert "--inputs" in result.stdout


def test_results_go_to_stdout_and_talk_to_stderr(folder: Path) -> None:
    result = run("profile", "net.py:Net", "-i", "2x4", "-o", "out/profile.csv", cwd=folder)
    assert result.returncode == 0
    assert result.stdout.startswith("Module")
    assert "talks" not in result.stdout
    assert result.stderr.splitlines() == ["a model's author talks", f"saved to {Path('out/profile.csv')}"]
    assert (folder / "out" / "profile.csv").is_file()


def test_a_mistake_is_one_sentence_and_exit_code_2(folder: Path, edge_opt_command: str) -> None:
    command = [*shlex.split(edge_opt_command), "profile", "net.py:Nat", "-i", "2x4"]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.splitlines()[1:] == ["error: 'net.py' has no 'Nat'; closest: Net"]


@pytest.mark.parametrize("arguments", [["--debug", "profile"], ["profile", "--debug"]])
def test_debug_shows_the_traceback(folder: Path, arguments: list[str]) -> None:
    result = CliRunner().invoke(app, [*arguments, f"{folder / 'net.py'}:Net", "-i", "2x3"])
    assert result.exit_code == 2
    assert "Traceback (most recent call last)" in result.stderr
    assert result.stderr.splitlines()[-1].startswith("error: module 'layer' (Linear) refused its input (2, 3)")


def test_unpriced_operators_fail_on_request_only(folder: Path) -> None:
    priced, unpriced = (["profile", f"{folder / 'net.py'}:Net(width={width})", "-i", "5x4"] for width in (4, 5))
    assert CliRunner().invoke(app, unpriced).exit_code == 0
    assert CliRunner().invoke(app, [*priced, "--strict"]).exit_code == 0
    result = CliRunner().invoke(app, [*unpriced, "--strict"])
    assert result.exit_code == 1
    assert "1 operator unpriced: aten.linalg_matrix_exp" in result.stdout
    assert "unpriced operators: 1" in result.stderr


def test_wrong_use_is_exit_code_2() -> None:
    for arguments in (["profile"], ["nothing"], ["profile", "a:b", "--depth", "x"], ["profile", "a:b", "--nothing"]):
        assert CliRunner().invoke(app, arguments).exit_code == 2, arguments


def test_a_reader_that_leaves_early_gets_no_traceback(folder: Path, edge_opt_command: str) -> None:
    command = f"{edge_opt_command} profile net.py:Net -i 2x4 --json | head -1"
    result = subprocess.run(command, shell=True, capture_output=True, text=True, cwd=folder, check=False)
    assert result.stdout == "{\n"
    assert "Traceback" not in result.stderr


def test_a_terminal_without_unicode_is_served(folder: Path) -> None:
    result = run("profile", "net.py:Net", "-i", "2x4", cwd=folder, PYTHONIOENCODING="ascii")
    assert result.returncode == 0
    assert "\\u2514 layer" in result.stdout


def test_commands_complete_in_a_shell() -> None:
    request = {"_EDGE_OPT_COMPLETE": "complete_bash", "COMP_WORDS": "edge-opt pr", "COMP_CWORD": "1"}
    done = subprocess.run(
        [sys.executable, "-c", "from edge_opt.cli import main; main()"],
        env={**os.environ, **request},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == ["profile", "prune"]
