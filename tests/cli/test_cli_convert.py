"""`edge-opt convert`: its verification, its files, its refusals, and its former names quantize and export."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from edge_opt.cli import app

MODEL = "edge_opt.model:SmallCNN"
DATA = """
import torch
torch.manual_seed(0)
loader = [(torch.randn(16, 1, 28, 28), torch.zeros(16)) for _ in range(2)]
def batches():
    print("loading")
    return loader
wrong = [torch.randn(4, 3, 28, 28)]
empty = []
number = 3
"""


@pytest.fixture
def data(tmp_path: Path) -> str:
    (tmp_path / "calibration_data.py").write_text(DATA)
    return str(tmp_path / "calibration_data.py")


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def test_int8_prints_the_verification(data: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = invoke("convert", MODEL, "-i", "1x1x28x28", "-c", f"{data}:loader", "--keep-float", "conv1", "-o", str(out))
    assert done.exit_code == 0, done.stderr
    assert "int8 on onnxruntime: runs in int8+fp32, 2 of 3 layers as asked" in done.stdout
    assert "conv1  Conv      fp32     kept in float, as asked" in done.stdout
    assert "Agreement    on 32 samples of calibration batches" in done.stdout
    assert [path.name for path in out.iterdir()] == ["SmallCNN.int8.onnx"]
    assert f"saved to {out / 'SmallCNN.int8.onnx'}" in done.stderr


def test_int8_as_json_with_a_function_for_a_loader(data: str, tmp_path: Path) -> None:
    done = invoke(
        "convert", MODEL, "-i", "1x1x28x28", "-c", f"{data}:batches", "--runtime", "openvino", "--json",
        "--calibration-batches", "1", "-o", str(tmp_path / "out"),
    )  # fmt: skip
    found = json.loads(done.stdout)
    assert (found["format"], found["schema_version"]) == ("edge_opt.converted", 1)
    assert found["effective_precision"] == "int8" and found["agreement"]["samples"] == 16
    assert [layer["path"] for layer in found["layers"]] == ["conv1", "conv2", "classifier"]
    assert "loading" in done.stderr


def test_random_calibration_must_be_said_and_is_told(tmp_path: Path) -> None:
    refused = invoke("convert", MODEL, "-i", "1x1x28x28", "--precision", "int8")
    assert refused.exit_code == 2 and "int8 needs --calibration" in refused.stderr
    done = invoke("convert", MODEL, "-i", "2x1x28x28", "-c", "random", "-o", str(tmp_path))
    assert done.exit_code == 0 and "say nothing about real inputs" in done.stderr


def test_agreement_below_the_least_is_exit_1(data: str, tmp_path: Path) -> None:
    # Noise in front of random weights: some of 32 images change their class in int8, none in float32.
    words = ("convert", MODEL, "-i", "1x1x28x28", "-o", str(tmp_path / "net.onnx"), "--verify-on", f"{data}:loader")
    done = invoke(*words, "--min-agreement", "1")
    assert done.exit_code == 0, done.stderr
    assert "fp32 on onnxruntime: runs in fp32, 3 of 3 layers as asked" in done.stdout
    assert "Agreement    on 32 samples of verify_on: same top-1 for 100.0%" in done.stdout
    bad = invoke("convert", "torch.nn:Identity", "-i", "1x4", "-c", "random", "-o", str(tmp_path))
    assert bad.exit_code == 2 and "did not take" in bad.stderr


def test_fp16_says_what_it_runs_in_here(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "half.onnx"
    done = invoke("convert", MODEL, "-i", "1x1x28x28", "-o", str(path), "--precision", "fp16")
    assert done.exit_code == 0, done.stderr
    assert done.stdout.startswith("fp16 on onnxruntime: runs in ")
    assert path.stat().st_size < 60_000  # 20490 weights of two bytes


def test_quantize_and_export_are_convert_with_a_warning(tmp_path: Path) -> None:
    done = invoke("quantize", MODEL, "-i", "2x1x28x28", "--random-calibration", "--batches", "1", "-o", str(tmp_path))
    assert done.exit_code == 0 and (tmp_path / "SmallCNN.int8.onnx").is_file()
    warnings = [line for line in done.stderr.splitlines() if line.startswith("warning: ")]
    assert warnings[-1] == (
        "warning: the command quantize is deprecated since 0.3, use convert --precision int8; it is removed in 0.4"
    )
    assert ["convert --calibration random" in warnings[0], "convert --calibration-batches" in warnings[1]] == [True] * 2
    done = invoke("export", MODEL, "-i", "2x1x28x28", "--precision", "fp16", "-o", str(tmp_path / "half.onnx"))
    assert done.stdout.startswith("fp16 on onnxruntime")
    assert done.stderr.startswith("warning: the command export is deprecated since 0.3, use convert")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["convert", MODEL, "-i", "1x1x28x28", "-o", "net.pt"], "must end in .onnx"),
        (["convert", MODEL, "-i", "1x1x28x28", "-o", "n.onnx", "--precision", "int8"], "int8 needs --calibration"),
        (["convert", MODEL, "-i", "1x1x28x28", "-o", "n.onnx", "--runtime", "litert"], "writes .tflite files"),
        (["convert", MODEL, "-i", "1x3x28x28", "-o", "n.onnx"], "(1, 3, 28, 28)"),
        (["convert", MODEL, "-i", "1x1x28x28", "-o", "n.onnx", "--min-agreement", "2"], "a share from 0 to 1"),
        (["convert", MODEL, "-o", "n.onnx"], "needs the shape of each of its inputs"),
        (["convert", MODEL, "-i", "1x1x28x28", "-c", "DATA:wrong"], "the model takes N×1×28×28"),
        (["convert", MODEL, "-i", "1x1x28x28", "-c", "DATA:empty"], "calibration loader is empty"),
        (["convert", MODEL, "-i", "1x1x28x28", "-c", "DATA:number"], "is of type int"),
        (["convert", MODEL, "-i", "1x1x28x28", "-c", "DATA:none"], "has no 'none'"),
        (["convert", MODEL, "-i", "1x1x28x28", "-c", "loader"], "names no batches"),
        (["convert", MODEL, "-i", "1x1x28x28", "-c", "DATA:loader", "--scheme", "mse"], "unknown scheme"),
        (["convert", MODEL, "-i", "1x1x28x28", "-c", "DATA:loader", "--runtime", "torch"], "use --runtime onnxruntime"),
    ],
)
def test_refusals(
    arguments: list[str], sentence: str, data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = invoke(*(text.replace("DATA", data) for text in arguments))
    assert done.exit_code == 2 and sentence in done.stderr and not done.stdout
    assert not list(tmp_path.glob("*.onnx"))
