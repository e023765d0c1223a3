"""LiteRT and ExecuTorch keep the contract of the other runtimes; without them, one sentence says what to install."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch

from convertible import Residual
from edge_opt import compress
from edge_opt.boards.mcu_memory import mcu_memory
from edge_opt.errors import InvalidInput, MissingExtra
from edge_opt.model import SmallCNN
from edge_opt.run.export_best import program

SHAPE = (1, 3, 12, 12)
# requirements/dev.lock has both for this Python alone.
LOCKED = pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the lock has no such wheels for this Python")
PICTURES = [torch.randn(16, 3, 12, 12) for _ in range(2)]


@pytest.mark.parametrize(
    ("runtime", "package", "module"),
    [("litert", "litert-torch", "litert_torch"), ("executorch", "executorch", "executorch.exir")],
)
def test_a_missing_runtime_comes_with_the_command(
    runtime: str, package: str, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setitem(sys.modules, module.partition(".")[0], None)
    with pytest.raises(MissingExtra, match=rf"needs {package}.*pip install '\.\[{runtime}\]'"):
        compress.convert(Residual(), SHAPE, "fp32", runtime)


@LOCKED
@pytest.mark.slow
def test_litert_runs_static_int8_for_any_batch(tmp_path: Path) -> None:
    done = compress.convert(Residual(), SHAPE, "int8", "litert", calibration=PICTURES, output=tmp_path)
    # two convolutions and a linear layer, by hand; the batch norm is folded
    assert [(layer.path, layer.precision) for layer in done.layers] == [
        ("stem", "int8"), ("conv", "int8"), ("head", "int8"),
    ]  # fmt: skip
    assert [path.name for path in tmp_path.iterdir()] == ["Residual.int8.tflite"]
    assert [entry.samples for entry in done.agreement.by_batch if not entry.refused] == [1, 16, 512]
    with compress.open_runner(done.path) as runner:
        assert runner.runtime == "litert" and runner(torch.randn(3, 3, 12, 12))[0].shape == (3, 4)


@LOCKED
@pytest.mark.slow
def test_a_litert_file_of_one_batch_takes_several_calls_also_where_it_is_shipped(tmp_path: Path) -> None:
    # LiteRT cannot leave the batch of a flattened image open
    model, x = SmallCNN(4, 4).eval(), torch.randn(5, 1, 28, 28)
    done = compress.convert(model, (1, 1, 28, 28), "fp32", "litert", output=tmp_path, filename="model.tflite")
    assert any("the batch is fixed at 1" in remark for remark in done.remarks)
    with torch.no_grad(), compress.open_runner(done) as runner:
        assert torch.allclose(runner(x)[0], model(x), atol=1e-5)
        assert len(runner.bind(x)()) == 5  # type: ignore[arg-type]
        answers = model(x).argmax(1)
    np.savez(tmp_path / "samples.npz", input_0=x.numpy(), labels=answers.numpy())
    (tmp_path / "run_best.py").write_text(program("litert", "fp32"), encoding="utf-8")
    command = [sys.executable, "-I", str(tmp_path / "run_best.py")]
    assert "5 of 5 right" in subprocess.run(command, capture_output=True, text=True, check=True).stdout


@LOCKED
@pytest.mark.slow
def test_executorch_runs_static_int8(tmp_path: Path) -> None:
    done = compress.convert(Residual(), SHAPE, "int8", "executorch", calibration=PICTURES, output=tmp_path)
    assert {layer.path for layer in done.layers if layer.precision == "int8"} == {"stem", "conv", "head"}
    assert [path.name for path in tmp_path.iterdir()] == ["Residual.int8.pte"]
    memory = mcu_memory(done.path, core="nucleo-h743zi", runtime="executorch")
    program = import_module("executorch.exir._serialize._program")
    stated = program.deserialize_pte_binary(Path(done.path).read_bytes()).program.execution_plan[0]
    assert memory.arena_bytes == sum(stated.non_const_buffer_sizes) > 0
    assert (memory.fits, memory.flash_bytes) == (None, Path(done.path).stat().st_size)
    assert any(remark.startswith("planned memory: ") for remark in done.remarks)
    with compress.open_runner(done.path, threads=2) as runner:
        assert runner.runtime == "executorch" and runner(torch.randn(SHAPE))[0].shape == (1, 4)
        with compress.open_runner(done.path, threads=1) as other:
            # threads are the process's, and those of the runner that is open
            assert (runner.threads, other.threads) == (2, 2)


@LOCKED
@pytest.mark.slow
def test_ranges_of_a_litert_file_are_those_of_all_samples(tmp_path: Path) -> None:
    # One output per sample, 8 to -8. An average of the range of single samples would leave a point near 0.
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 1, bias=False)).eval()
    torch.nn.init.constant_(model[1].weight, 2.0)
    x = torch.linspace(-1, 1, 17)[:, None, None].expand(17, 2, 2).contiguous()
    done = compress.convert(model, (1, 2, 2), "int8", "litert", calibration=[x], output=tmp_path, fixed_batch=True)
    with compress.open_runner(done) as runner, torch.no_grad():
        # a step of the output is 16/255, one of the inputs 2/255 with a sum of weights of 8
        assert torch.allclose(runner(x)[0], model(x), atol=2 * 16 / 255)


def test_layers_are_not_spared_where_nobody_asks_the_quantiser_to() -> None:
    with pytest.raises(InvalidInput, match="cannot keep single layers in float; use onnxruntime and openvino"):
        compress.convert(Residual(), SHAPE, "int8", "litert", calibration=PICTURES, keep_float=["conv"])
