"""What every runtime keeps: these tests run on each that is registered, a new one included, without a change."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from edge_opt import compress
from edge_opt.errors import InvalidInput, MissingExtra
from edge_opt.records.conversions import Converted
from edge_opt.run.export_best import program
from edge_opt.runtimes.protocol import Runtime
from edge_opt.runtimes.registry import all_runtimes, find_runtime, register_runtime, runtime_names

SHAPE = (1, 6)
BATCHES = list(torch.randn(4, 8, 6, generator=torch.Generator().manual_seed(0)))
PRECISIONS = ("fp32", "fp16", "bf16", "int8", "int4")
# requirements/dev.lock has the packages of edge runtimes for this Python alone.
LOCKED = pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the lock has no such wheels for this Python")


def marked(name: str) -> object:
    runtime = find_runtime(name)
    marks = [LOCKED, pytest.mark.slow] if runtime.may_fix_batch else [pytest.mark.slow] if "compile" in name else []
    return pytest.param(runtime, id=name, marks=marks)


EVERY = pytest.mark.parametrize("runtime", [marked(name) for name in runtime_names()])
INSTALLED = pytest.mark.parametrize("runtime", [pytest.param(find_runtime(name), id=name) for name in runtime_names()])


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).eval()


def converted(runtime: Runtime, folder: Path, precision: str = "fp32") -> Converted:
    calibration = BATCHES if precision == "int8" else None
    return compress.convert(
        model(), SHAPE, precision, runtime.name, calibration=calibration, output=folder,
        filename=f"model.{runtime.suffix}",
    )  # fmt: skip


@EVERY
def test_it_builds_a_file_that_opens_and_agrees(runtime: Runtime, tmp_path: Path) -> None:
    done = converted(runtime, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [f"model.{runtime.suffix}"]
    assert (done.runtime, done.effective_precision, done.inputs) == (runtime.name, "fp32", ("input",))
    assert len(done.layers) == 2 and done.agreement.max_difference < 1e-4
    with compress.open_runner(done, threads=1) as runner:
        assert (runner.runtime, runner.threads, runner.effective_precision) == (runtime.name, 1, "fp32")
        # one sample as it was exported, and several, whether the file's batch is free or fixed at one
        for count in (1, 4):
            x = torch.randn(count, 6)
            [output] = runner(x)
            assert torch.allclose(output, model()(x), atol=1e-4)
        runner.bind(torch.randn(1, 6))()
    with pytest.raises(InvalidInput, match="closed; open it again"):
        runner(torch.randn(1, 6))


@EVERY
def test_int8_runs_in_int8_where_it_is_supported(runtime: Runtime, tmp_path: Path) -> None:
    if runtime.precisions["int8"]:
        with pytest.raises(InvalidInput, match=f"int8 is not supported on {runtime.name}: "):
            converted(runtime, tmp_path, "int8")
        return
    done = converted(runtime, tmp_path, "int8")
    assert "int8" in done.effective_precision.split("+") and done.agreement.samples == 32


@INSTALLED
def test_each_precision_is_supported_or_refused_with_a_reason(runtime: Runtime) -> None:
    assert set(runtime.precisions) == set(PRECISIONS)
    for precision, reason in runtime.precisions.items():
        if reason:
            with pytest.raises(InvalidInput, match=f"{precision} is not supported on {runtime.name}: "):
                compress.convert(model(), SHAPE, precision, runtime.name)


@INSTALLED
def test_a_missing_package_comes_with_the_command(
    runtime: Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not runtime.extra:
        pytest.importorskip(runtime.package)
        return
    for name in (runtime.package, runtime.package.partition(".")[0]):
        monkeypatch.setitem(sys.modules, name, None)
    file = tmp_path / f"model.{runtime.suffix}"
    file.write_bytes(b"")
    with pytest.raises(MissingExtra, match=rf"pip install '\.\[{runtime.extra}\]'"):
        compress.open_runner(file, runtime.name)


@INSTALLED
def test_its_program_compiles(runtime: Runtime) -> None:
    for precision in (name for name, reason in runtime.precisions.items() if not reason):
        compile(program(runtime.name, precision), "run_best.py", "exec")


@EVERY
def test_a_shipped_program_answers_as_the_model_does(runtime: Runtime, tmp_path: Path) -> None:
    x = torch.randn(5, 6)
    if runtime.runs_modules:
        # torch ships an exported program instead of the weights
        dim = torch.export.Dim("batch", min=2)
        torch.export.save(torch.export.export(model(), (x,), dynamic_shapes=({0: dim},)), tmp_path / "model.pt2")
    else:
        converted(runtime, tmp_path)
    np.savez(tmp_path / "samples.npz", input_0=x.numpy(), labels=model()(x).argmax(1).numpy())
    (tmp_path / "run_best.py").write_text(program(runtime.name, "fp32"), encoding="utf-8")
    command = [sys.executable, str(tmp_path / "run_best.py")]
    assert "5 of 5 right" in subprocess.run(command, capture_output=True, text=True, check=True).stdout


@INSTALLED
def test_the_documentation_lists_it(runtime: Runtime) -> None:
    page = (Path(__file__).parents[2] / "docs" / "which_precision.md").read_text(encoding="utf-8")
    [row] = [line for line in page.splitlines() if line.startswith(f"| `{runtime.name}` |")]
    _, _, file, precisions, extra, _ = (cell.strip() for cell in row.split("|"))
    assert runtime.runs_modules or file.startswith(f"`.{runtime.suffix}`")
    supported = [name for name, reason in runtime.precisions.items() if not reason]
    assert [word for word in precisions.replace(",", "").split() if word in PRECISIONS] == supported
    assert extra == (f"`{runtime.extra}`" if runtime.extra else "–")


def test_names_are_unique_and_unknown_ones_are_refused() -> None:
    assert len({runtime.name for runtime in all_runtimes()}) == len(runtime_names())
    with pytest.raises(InvalidInput, match="unknown runtime 'tensorrt'; it is one of torch, onnxruntime"):
        find_runtime("tensorrt")
    with pytest.raises(InvalidInput, match="'torch' is registered already"):
        register_runtime(find_runtime("torch"))


def test_names_are_known_without_torch() -> None:
    code = (
        "import sys; from edge_opt.runtimes import registry; registry.runtime_names(); sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", [name for name in runtime_names() if not find_runtime(name).runs_onnx])
def test_a_runtime_without_a_profiler_is_named(name: str) -> None:
    class Silent:
        runtime = name

    with pytest.raises(InvalidInput, match=f"^{name} has no profiler of kernels"):
        compress.profile_runner(Silent(), torch.zeros(SHAPE))  # type: ignore[arg-type]
