"""`edge-opt profile`: its options, its files and its refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner, Result

import edge_opt as eo
from edge_opt.cli import app

NET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3)])
        self.drop = nn.Dropout()

    def forward(self, ids, mask=None, *, repeat=1):
        x = self.embed(ids)
        for _ in range(repeat):
            for block in self.blocks:
                x = block(x)
        return self.drop(x if mask is None else x * mask)
"""
LINEARS = 3 * 8 * 8  # per token


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "net.py").write_text(NET)
    return f"{tmp_path / 'net.py'}:Net"


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["profile", *arguments], env={"COLUMNS": "120"})


def totals(*arguments: str) -> dict[str, Any]:
    result = invoke(*arguments, "--json")
    assert result.exit_code == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)["totals"]
    return found


def test_inputs_by_order_name_and_dtype(model: str) -> None:
    assert totals(model, "-i", "2x5:int64")["macs"] == 2 * 5 * LINEARS
    assert totals(model, "-i", "ids:2x5:int64")["macs"] == 2 * 5 * LINEARS
    both = totals(model, "-i", "2x5:int64", "-i", "mask:2x5x1:float32")
    # 2 x 5 tokens of 8 bytes, and as many floats
    assert both["input_bytes"] == 2 * 5 * 8 + 2 * 5 * 4


def test_batch_and_keywords(model: str) -> None:
    assert totals(model, "-i", "1x5:int64", "--batch", "7")["macs"] == 7 * 5 * LINEARS
    assert totals(model, "-i", "1x5:int64", "-i", "repeat=4")["macs"] == 4 * 5 * LINEARS


def test_json_is_the_document_that_save_writes(model: str, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    result = invoke(model, "-i", "2x5:int64", "--json", "-o", str(path))
    assert result.stdout == path.read_text()
    assert eo.load(path).name == "Net"
    assert eo.load(path).totals.macs == 2 * 5 * LINEARS


def test_output_is_by_suffix_and_repeatable(model: str, tmp_path: Path) -> None:
    paths = [tmp_path / "deep" / f"profile.{suffix}" for suffix in ("json", "csv", "md", "txt")]
    result = invoke(model, "-i", "2x5:int64", *(text for path in paths for text in ("-o", str(path))))
    assert result.exit_code == 0
    assert result.stderr.splitlines() == [f"saved to {path}" for path in paths]
    assert all(path.stat().st_size for path in paths)
    assert len(paths[1].read_text().splitlines()) == 1 + len(eo.load(paths[0]).to_dataframe("leaves"))


def test_level_chooses_the_rows_shown_and_saved(model: str, tmp_path: Path) -> None:
    path = tmp_path / "profile.csv"
    result = invoke(model, "-i", "2x5:int64", "--level", "operators", "-o", str(path))
    assert result.stdout.split()[:2] == ["#", "Operator"]
    assert path.read_text().startswith("index,op,kind,status,module")
    assert invoke(model, "-i", "2x5:int64", "--level", "root").stdout.startswith("Compute")


def test_depth_sort_and_top_shape_the_table(model: str) -> None:
    shown = ("-i", "2x5:int64")
    assert "Linear" in invoke(model, *shown).stdout
    assert "Linear" not in invoke(model, *shown, "--depth", "1").stdout
    lines = invoke(model, *shown, "--sort", "params", "--top", "2").stdout.splitlines()
    # 10 x 8 in the embedding against 8 x 8 + 8 in each layer
    assert [line.split()[0] for line in lines[2:5]] == ["embed", "blocks.0.0", "…"]


def test_mode_train_is_said_in_the_summary(model: str) -> None:
    assert "train: " in invoke(model, "-i", "2x5:int64", "--mode", "train").stdout


def test_a_convention_is_passed_on(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def under_convention(profile: eo.ModelProfile, name: str) -> eo.ModelProfile:
        asked.append(name)
        return profile

    monkeypatch.setattr("edge_opt.cost.conventions.under_convention", under_convention)
    assert invoke(model, "-i", "2x5:int64", "--convention", "fvcore").exit_code == 0
    assert asked == ["fvcore"]


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_an_exported_program_needs_no_input(tmp_path: Path) -> None:
    path = tmp_path / "net.pt2"
    torch.export.save(torch.export.export(nn.Linear(4, 3).eval(), (torch.zeros(2, 4),)), path)
    result = invoke(str(path), "--trust")
    assert result.exit_code == 0
    assert result.stderr == "no --inputs given: using those of the file\n"
    assert totals(str(path), "-i", "2x4", "--trust")["macs"] == 2 * 4 * 3
    wrong = invoke(str(path), "-i", "3x4", "--trust")
    assert wrong.exit_code == 2
    assert "refused its input (3, 4)" in wrong.stderr


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "Net needs the shape of each of its inputs; add -i [NAME:]DIMxDIM"),
        (["-i", "repeat=2"], "Net needs the shape of each of its inputs"),
        (["-i", "0x5:int64"], "has the dimension 0"),
        (["-i", "2x5:int64", "--batch", "0"], "--batch is 0; it must be at least 1"),
        (["-i", "2x5:int63"], "unknown dtype 'int63'"),
        (["-i", "ids:2x5:int64", "-i", "ids:2x5"], "the argument 'ids' is given twice"),
        (["-i", "2x5:int64", "-i", "ids:2x5:int64"], "multiple values for argument 'ids'"),
        (["-i", "2x5:int64", "-i", "nothing:2x5"], "unexpected keyword argument 'nothing'"),
        (["-i", "2x5:int64", "-i", "mask:2x4x1"], "refused its input"),
        (["-i", "2x5:int64", "--mode", "test"], "mode is 'test'; it must be one of eval, train"),
        (["-i", "2x5:int64", "--level", "layers"], "unknown level 'layers'; it is one of leaves, modules"),
        (["-i", "2x5:int64", "--sort", "size"], "cannot sort by 'size'; use one of macs"),
        (["-i", "2x5:int64", "--top", "0"], "top is 0; it must be at least 1"),
        (["-i", "2x5:int64", "--depth", "-1"], "depth is -1"),
        (["-i", "2x5:int64", "--level", "leaves", "--depth", "1"], "drop one of the two"),
        (["-i", "2x5:int64", "--json", "--top", "3"], "--json prints the whole profile"),
        (["-i", "2x5:int64", "-o", "x.pdf"], "use one of .csv, .html, .json, .md, .trace.json, .txt"),
        (["-i", "2x5:int64", "-o", "/dev/null/x.csv"], "cannot write '/dev/null/x.csv'"),
    ],
)
def test_a_mistake_is_one_sentence_on_stderr(model: str, arguments: list[str], sentence: str) -> None:
    result = invoke(model, *arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert sentence in result.stderr
    assert len(result.stderr.splitlines()) == 1
