"""A profile in a separate process is the same profile, and a crash there is a sentence."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest
from torch import nn
from typer.testing import CliRunner

import edge_opt as eo
from edge_opt.cli import app
from edge_opt.errors import TraceFailed


class Crashes(nn.Module):
    def forward(self, x):
        ctypes.memmove(x.untyped_storage().data_ptr(), 4, 8)
        return x


class Exits(nn.Module):
    def forward(self, x):
        os._exit(3)


class Interrupted(nn.Module):
    def forward(self, x):
        raise KeyboardInterrupt


class Unpicklable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.scale = lambda x: x * 2

    def forward(self, x):
        return self.scale(self.linear(x))


def test_an_isolated_profile_equals_an_ordinary_one() -> None:
    model = Unpicklable()
    assert eo.profile(model, (2, 8), isolate=True) == eo.profile(model, (2, 8))


@pytest.mark.parametrize(("model", "message"), [(Crashes(), "SIGSEGV"), (Exits(), "exit code 3")])
def test_a_crash_becomes_a_sentence(model: nn.Module, message: str) -> None:
    with pytest.raises(TraceFailed, match=message):
        eo.profile(model, (2, 8), isolate=True)


def test_an_interrupt_prints_nothing_in_the_other_process(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(TraceFailed, match="exit code 130"):
        eo.profile(Interrupted(), (2, 8), isolate=True)
    assert capfd.readouterr().err == ""


def test_a_refusal_is_the_same_in_a_separate_process() -> None:
    with pytest.raises(TraceFailed, match=r"refused its input \(2, 9\)"):
        eo.profile(nn.Linear(8, 8), (2, 9), isolate=True)


def test_the_command_line_survives_a_crash(tmp_path: Path) -> None:
    file = tmp_path / "net.py"
    file.write_text(
        "import ctypes\nfrom torch import nn\nclass Net(nn.Module):\n    def forward(self, x):\n"
        "        ctypes.memmove(x.untyped_storage().data_ptr(), 4, 8)\n        return x\n"
    )
    result = CliRunner().invoke(app, ["profile", f"{file}:Net", "-i", "2x8", "--isolate"])
    assert result.exit_code == 2
    assert "SIGSEGV" in result.output
