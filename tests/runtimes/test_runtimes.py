"""One interface for all runtimes: the same inputs, the same outputs, threads controlled, measured alike."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from convertible import Pair
from edge_opt import compress
from edge_opt.errors import ConversionFailed, InvalidInput
from edge_opt.measuring.machine import crash_of
from edge_opt.model import SmallCNN
from edge_opt.records.conversions import Converted
from edge_opt.runtimes import openvino, torch_runtime

SHAPE = (1, 1, 28, 28)


@pytest.fixture(scope="module")
def converted() -> dict[str, Converted]:
    torch.manual_seed(0)
    model = SmallCNN()
    return {
        runtime: compress.convert(model, SHAPE, "fp32", runtime) for runtime in ("torch", "onnxruntime", "openvino")
    }


@pytest.mark.parametrize("runtime", ["torch", "onnxruntime", "openvino"])
def test_all_runtimes_give_the_same_tensors(runtime: str, converted: dict[str, Converted]) -> None:
    x = torch.randn(3, 1, 28, 28)
    with compress.open_runner(converted["torch"]) as reference, compress.open_runner(converted[runtime]) as runner:
        assert isinstance(runner, compress.Runner)
        assert (runner.runtime, runner.threads, runner.effective_precision) == (runtime, 1, "fp32")
        expected, found = reference(x), runner(x)
        assert isinstance(found, tuple) and found[0].dtype is torch.float32
        assert torch.allclose(expected[0], found[0], atol=1e-4)
        assert torch.equal(found[0], runner(x.numpy())[0])
        kept = found[0].clone()
        runner(torch.zeros(3, 1, 28, 28))
        assert torch.equal(found[0], kept)  # a later call does not write into an earlier result


@pytest.mark.parametrize("runtime", ["torch", "onnxruntime", "openvino"])
def test_a_closed_runner_refuses(runtime: str, converted: dict[str, Converted]) -> None:
    with compress.open_runner(converted[runtime]) as runner:
        pass
    with pytest.raises(InvalidInput, match="closed"):
        runner(torch.zeros(SHAPE))


def test_a_file_runs_in_either_runtime(converted: dict[str, Converted]) -> None:
    x = torch.randn(2, 1, 28, 28)
    path = Path(converted["onnxruntime"].path)
    with compress.open_runner(path) as first, compress.open_runner(path, "openvino") as second:
        assert first.effective_precision is None
        assert torch.allclose(first(x)[0], second(x)[0], atol=1e-4)
    with compress.open_runner(converted["onnxruntime"], "openvino") as other:
        assert other.effective_precision is None  # verified in another runtime only


def test_a_module_runs_in_eval_and_stays_in_train() -> None:
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 2)).train()
    with compress.open_runner(model) as runner:
        assert torch.equal(runner(torch.ones(1, 4))[0], runner(torch.ones(1, 4))[0])
    assert model.training and model[0].training


def test_nested_outputs_come_flat_and_in_order() -> None:
    inputs = [torch.randn(1, 3, 4), torch.zeros(1, 5, dtype=torch.long)]
    done = compress.convert(Pair(), inputs, "fp32")
    with compress.open_runner(done) as runner:
        product, shifted = runner(*inputs)
    assert product.shape == (1, 3, 5) and torch.allclose(shifted, inputs[0] + 1)


@pytest.mark.parametrize("runtime", ["torch", "onnxruntime", "openvino"])
def test_measured_for_one_and_for_many(runtime: str, converted: dict[str, Converted]) -> None:
    before = torch.get_num_threads()
    with compress.open_runner(converted[runtime], threads=1) as runner:
        for count in (1, 4):
            found = compress.measure_runner(runner, torch.randn(count, 1, 28, 28), repeats=3)
            assert found.batch_size == count and len(found.samples_s) == len(found.cpu_samples_s) == 3
    assert torch.get_num_threads() == before


def test_torch_threads_are_set_inside_only() -> None:
    seen = []

    class Looking(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(torch.get_num_threads())
            return x

    before = torch.get_num_threads()
    with compress.open_runner(Looking(), threads=before + 1) as runner:
        runner(torch.zeros(1))
        compress.measure_runner(runner, torch.zeros(1), repeats=2)
    assert seen == [before + 1] * 3 and torch.get_num_threads() == before


@pytest.mark.parametrize("runtime", ["onnxruntime", "openvino"])
def test_kernels_have_times_and_the_layers_they_stand_for(runtime: str, converted: dict[str, Converted]) -> None:
    with compress.open_runner(converted[runtime]) as runner:
        profile = compress.profile_runner(runner, torch.zeros(SHAPE), repeats=3)
    paths = [kernel.path for kernel in profile.kernels if kernel.nodes]
    assert [path for path in paths if path] == ["conv1", "pool1", "conv2", "pool2", "classifier"]
    assert (
        profile.seconds == pytest.approx(sum(kernel.seconds or 0 for kernel in profile.kernels)) and profile.seconds > 0
    )
    assert {kernel.precision for kernel in profile.kernels if kernel.nodes} == {"fp32"}


def test_refusals(converted: dict[str, Converted], tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="threads is 0"):
        compress.open_runner(converted["torch"], threads=0)
    with pytest.raises(InvalidInput, match="unknown runtime 'tvm'"):
        compress.open_runner(converted["onnxruntime"].path, "tvm")
    with pytest.raises(InvalidInput, match="no file"):
        compress.open_runner(tmp_path / "none.onnx")
    with pytest.raises(InvalidInput, match="onnxruntime cannot run a module"):
        compress.open_runner(SmallCNN(), "onnxruntime")
    with pytest.raises(InvalidInput, match="torch runs modules"):
        compress.open_runner(converted["onnxruntime"].path, "torch")
    with compress.open_runner(converted["torch"]) as runner, pytest.raises(InvalidInput, match="torch has no profiler"):
        compress.profile_runner(runner, torch.zeros(SHAPE))
    with compress.open_runner(converted["onnxruntime"]) as runner:
        with pytest.raises(InvalidInput, match="2 inputs given; the model takes 1"):
            runner(torch.zeros(SHAPE), torch.zeros(SHAPE))
        with pytest.raises(InvalidInput, match="refused the inputs"):
            runner(torch.zeros(1, 2, 28, 28))
        with pytest.raises(InvalidInput, match="no inputs given"):
            compress.measure_runner(runner)


def test_instructions_that_a_machine_announces_and_refuses_end_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The process that tries them is ended, as a virtual machine ends one that uses AMX.
    dying = tmp_path / "python"
    dying.write_text("#!/bin/sh\nkill -ILL $$\n", encoding="utf-8")
    dying.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(dying))
    monkeypatch.setattr(torch_runtime, "crash_of", crash_of.__wrapped__)
    monkeypatch.setattr(openvino, "cpu_flags", lambda: frozenset({"avx512f", "amx_tile"}))
    for precision, runtime in (("int8", "openvino"), ("bf16", "openvino"), ("bf16", "torch")):
        with pytest.raises(ConversionFailed, match=rf"{runtime} computes {precision} here .*\(SIGILL\); start Python"):
            compress.convert(nn.Linear(2, 2), (1, 2), precision, runtime, calibration=[torch.randn(8, 2)])
    assert compress.convert(nn.Linear(2, 2), (1, 2), "fp32", "openvino").effective_precision == "fp32"
    monkeypatch.setattr(openvino, "cpu_flags", lambda: frozenset({"avx512f"}))
    options = {"calibration": [torch.randn(8, 2)], "max_difference": True, "require_precision": False}
    compress.convert(nn.Linear(2, 2), (1, 2), "int8", "openvino", **options)
