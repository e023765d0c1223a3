"""A `.pt2` file is opened with trust only: opening one can execute code from the file."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import pytest
import torch
import yaml
from torch import nn
from typer.testing import CliRunner

from edge_opt.cli import app
from edge_opt.errors import InvalidInput, ModelNotFound
from edge_opt.loading import TRUST, load_model, open_program

ROOT = Path(__file__).parents[2]


class Bomb:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return Path.touch, (self.mark,)  # type: ignore[return-value]


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    return tmp_path / "it-ran"


@pytest.fixture
def program(tmp_path: Path, mark: Path) -> Path:
    """An exported program whose example inputs execute code when torch opens it."""
    honest, path = tmp_path / "honest.pt2", tmp_path / "net.pt2"
    torch.export.save(torch.export.export(nn.Linear(8, 4).eval(), (torch.zeros(4, 8),)), honest)
    buffer = io.BytesIO()
    torch.save(((torch.zeros(4, 8), Bomb(mark)), {}), buffer)
    with zipfile.ZipFile(honest) as archive, zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as changed:
        for name in archive.namelist():
            is_inputs = name.endswith("data/sample_inputs/model.pt")
            changed.writestr(name, buffer.getvalue() if is_inputs else archive.read(name))
    return path


@pytest.mark.parametrize("opened", [lambda path: load_model(str(path)), open_program])
def test_a_program_is_refused_before_it_is_opened(opened: object, program: Path, mark: Path) -> None:
    with pytest.raises(InvalidInput, match="--trust.*trust=True"):
        opened(program)  # type: ignore[operator]
    assert not mark.exists()


def test_trust_opens_the_file(program: Path) -> None:
    assert load_model(str(program.with_name("honest.pt2")), trust=True).name == "honest"


@pytest.mark.parametrize(
    "command",
    [
        "profile NET -i 4x8",
        "profile NET -i 4x8 -o FOLDER/net.nodes.json",
        "profile NET -i 4x8 -t raspberry-pi-4 -t jetson-nano",
        "compare NET NET -i 4x8",
        "check NET -i 4x8 --budget macs<=200",
        "report NET",
        "train-cost NET -i 4x8",
        "convert NET -i 4x8 -c random -o FOLDER/out",
        "board NET -i 4x8",
        "sweep NET -i 4x8 -o FOLDER/out",
    ],
)
def test_every_command_refuses_it_without_trust(command: str, program: Path, mark: Path, tmp_path: Path) -> None:
    words = command.replace("NET", str(program)).replace("FOLDER", str(tmp_path)).split()
    refused = CliRunner().invoke(app, words)
    assert (refused.exit_code, mark.exists()) == (2, False), refused.output


@pytest.mark.parametrize("command", ["profile", "compare", "check", "report", "train-cost", "convert", "sweep", "run"])
def test_commands_that_open_models_take_trust(command: str) -> None:
    assert "--trust" in CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"}).output


def test_trust_is_for_one_command(program: Path, mark: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TRUST, raising=False)
    CliRunner().invoke(app, ["profile", str(program), "-i", "4x8", "--trust"])
    assert mark.exists()
    mark.unlink()
    assert CliRunner().invoke(app, ["profile", str(program), "-i", "4x8"]).exit_code == 2
    assert not mark.exists()


def test_the_hook_passes_the_arguments_on_and_trusts_nothing_itself() -> None:
    [hook] = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))
    assert "--trust" not in hook["entry"] and "--trust" in hook["description"]


def test_a_damaged_program_is_one_sentence(program: Path) -> None:
    program.write_bytes(program.read_bytes()[:200])
    with pytest.raises(ModelNotFound, match="cannot be read by torch") as caught:
        load_model(str(program), trust=True)
    assert "\n" not in str(caught.value)
