"""`edge-opt explain`: files, conversions and rows of sweeps are run, and their kernels named."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from edge_opt import compress
from edge_opt.cli import app
from edge_opt.cli.explain_commands import _row_file, explained
from edge_opt.errors import InvalidInput
from edge_opt.model import SmallCNN
from edge_opt.records.sweeps import Candidate
from edge_opt.report.sweep_files import sweep_document
from edge_opt.search.sweep import candidate_folder
from sweeps import done, sweep

MODEL = "edge_opt.model:SmallCNN"
SHAPE = "1x1x28x28"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder, model = tmp_path_factory.mktemp("files"), SmallCNN()
    batches = [torch.randn(4, 1, 28, 28)]
    return {
        name: compress.convert(model, (1, 1, 28, 28), name, calibration=batches, output=folder).path
        for name in ("fp32", "int8")
    }


def test_two_files_are_explained_by_their_kernels(files: dict[str, str]) -> None:
    explanation = explained((files["fp32"], files["int8"]), None, None, 0.02, 1)
    assert explanation.comparison is not None
    assert explanation.macs_ratio == 1.0
    conv1 = next(row for row in explanation.layers if row.path == "conv1")
    assert (conv1.kernels_before, conv1.kernels_after) == ("Conv fp32", "QLinearConv int8")
    assert conv1.seconds_before and conv1.seconds_after and conv1.precision == "int8"


def test_a_model_and_its_conversion(files: dict[str, str]) -> None:
    arguments = ["explain", MODEL, f"{MODEL}@fp32", "-i", SHAPE, "--json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    assert "runtime" in [reason["topic"] for reason in document["reasons"]]
    assert all(row["seconds_before"] for row in document["layers"] if row["path"] in ("conv1", "conv2"))


@pytest.mark.parametrize("models", [["a.onnx"], ["saved.json", "a.onnx"], ["a.onnx", "b.onnx", "c.onnx"]])
def test_wrong_use_is_one_sentence(models: list[str]) -> None:
    result = CliRunner().invoke(app, ["explain", *models])
    assert result.exit_code == 2
    assert "give two" in result.stderr or "name two" in result.stderr


def test_reconcile_adds_up() -> None:
    result = CliRunner().invoke(app, ["reconcile", MODEL, "-i", SHAPE, "--with", "thop", "--json"])
    document = json.loads(result.stdout)
    assert document["ours"] + sum(cause["difference"] for cause in document["causes"]) == document["theirs"]


def test_a_row_of_a_sweep_is_the_file_that_it_built(tmp_path: Path) -> None:
    trial = replace(done(0.5, "int8"), candidate=Candidate(0.5, "int8", "onnxruntime"))
    (tmp_path / "sweep.json").write_text(sweep_document(sweep(done(0.0), trial)))
    with pytest.raises(InvalidInput, match="cannot be run again"):
        _row_file(f"{tmp_path}#{trial.candidate.label}")
    folder = candidate_folder(tmp_path, trial.candidate)
    folder.mkdir(parents=True)
    (folder / "Net.int8.onnx").touch()
    assert _row_file(f"{tmp_path}#{trial.candidate.label}") == (str(folder / "Net.int8.onnx"), "onnxruntime")
