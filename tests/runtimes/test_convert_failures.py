"""Bad input is one sentence with its cure, and nothing is left behind: no file, no changed model, no chatter."""

from __future__ import annotations

import copy
import errno
import resource
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from awkward import same
from convertible import Branching, Pair, Residual, Singular
from edge_opt import compress
from edge_opt.errors import ConversionFailed, ExportFailed, InvalidInput, MissingExtra
from edge_opt.model import SmallCNN

SHAPE = (1, 1, 28, 28)
BATCH = [torch.randn(4, 1, 28, 28)]


def int8(**options: Any) -> Any:
    return compress.convert(SmallCNN(), SHAPE, "int8", **options)


def test_empty_calibration() -> None:
    with pytest.raises(InvalidInput, match="calibration loader is empty"):
        int8(calibration=[])
    with pytest.raises(InvalidInput, match="needs calibration="):
        int8()
    with pytest.raises(InvalidInput, match="calibration_batches is 0"):
        int8(calibration=BATCH, calibration_batches=0)


def test_calibration_of_the_wrong_shape_names_what_was_expected() -> None:
    with pytest.raises(InvalidInput, match="batch 2: input 'x' is 4×3×28×28 of float32; the model takes N×1×28×28"):
        int8(calibration=[*BATCH, torch.randn(4, 3, 28, 28)])
    with pytest.raises(InvalidInput, match="of uint8; the model takes N×1×28×28 of float32"):
        int8(calibration=[torch.zeros(4, 1, 28, 28, dtype=torch.uint8)])
    with pytest.raises(InvalidInput, match="has 1 tensors; the model takes 2: x, ids"):
        compress.convert(
            Pair(),
            [torch.randn(1, 3, 4), torch.zeros(1, 5, dtype=torch.long)],
            "int8",
            calibration=[torch.randn(1, 3, 4)],
        )
    with pytest.raises(InvalidInput, match="has no 'x'; it has pixels"):
        int8(calibration=[{"pixels": BATCH[0]}])


def test_unknown_names_are_refused_with_those_there_are() -> None:
    with pytest.raises(InvalidInput, match="unknown precision 'int2'; it is one of fp32, fp16, bf16, int8"):
        compress.convert(SmallCNN(), SHAPE, "int2")
    with pytest.raises(InvalidInput, match="unknown runtime 'tensorrt'; it is one of torch, onnxruntime, openvino"):
        compress.convert(SmallCNN(), SHAPE, "fp32", "tensorrt")
    with pytest.raises(InvalidInput, match="no layer 'conv3' to keep in float; closest: conv2, conv1"):
        int8(calibration=BATCH, keep_float=["conv3"])
    with pytest.raises(InvalidInput, match="kept in float in int8 only"):
        compress.convert(SmallCNN(), SHAPE, "fp32", keep_float=["conv1"])


def test_control_flow_that_depends_on_values_names_its_place(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ExportFailed, match=r"values \(Branching.forward, convertible.py line \d+: `if self.gate"):
        compress.convert(Branching(), (1, 4), "fp32")
    assert capfd.readouterr() == ("", "")


def test_an_operator_without_a_form_in_onnx_is_named() -> None:
    with pytest.raises(ExportFailed, match=r"no form of the operator aten\._linalg_svd"):
        compress.convert(Singular(), (1, 3, 4), "fp32")


@pytest.mark.parametrize(
    ("package", "runtime", "extra"),
    [
        ("onnxscript", "onnxruntime", "onnx"),
        ("onnxruntime", "onnxruntime", "onnx"),
        ("openvino", "openvino", "openvino"),
    ],
)
def test_a_missing_package_comes_with_the_command(
    package: str, runtime: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtra, match=rf"needs? {package}.*pip install '\.\[{extra}\]'"):
        compress.convert(SmallCNN(), SHAPE, "fp32", runtime)


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    # The kernel refuses files beyond 20 kB; the export has 80 kB of weights.
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    batches = [torch.randn(4, 1, 28, 28)]
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(ConversionFailed, match="cannot write"):
            compress.convert(SmallCNN(), SHAPE, "int8", calibration=batches, output=tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not (tmp_path / "out").exists()


def test_a_failed_conversion_keeps_the_older_file(tmp_path: Path) -> None:
    done = compress.convert(SmallCNN(), SHAPE, "fp32", output=tmp_path)
    before = Path(done.path).read_bytes()

    class Breaking(SmallCNN):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("no")

    with pytest.raises(ExportFailed, match="RuntimeError: no"):
        compress.convert(Breaking(), SHAPE, "fp32", output=tmp_path, filename=Path(done.path).name)
    assert [path.name for path in tmp_path.iterdir()] == ["SmallCNN.fp32.onnx"]
    assert Path(done.path).read_bytes() == before


def _full(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def facts(model: nn.Module) -> dict[str, Any]:
    return {
        "tensors": {name: tensor.clone() for name, tensor in model.state_dict().items()},
        "identities": [id(tensor) for tensor in (*model.parameters(), *model.buffers())],
        "training": [module.training for module in model.modules()],
        "hooks": [len(module._forward_hooks) for module in model.modules()],
        "attributes": [sorted(module.__dict__) for module in model.modules()],
        "gradients": [parameter.requires_grad for parameter in model.parameters()],
        "random": torch.get_rng_state(),
        "threads": torch.get_num_threads(),
        "grad": torch.is_grad_enabled(),
        "fast_path": torch.backends.mha.get_fastpath_enabled(),
    }


@pytest.mark.parametrize("runtime", ["torch", "onnxruntime", "openvino"])
@pytest.mark.parametrize("fails", [False, True])
def test_the_model_and_the_process_are_as_found(
    runtime: str, fails: bool, capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Residual().train()
    model.norm.eval()
    model.stem.weight.requires_grad_(False)
    seen: list[int] = []
    model.head.register_forward_hook(lambda *_: seen.append(1))
    data = torch.utils.data.TensorDataset(torch.randn(4, 3, 12, 12), torch.zeros(4))
    loader = torch.utils.data.DataLoader(data, batch_size=2, shuffle=True)
    before, twin = facts(model), copy.deepcopy(model)
    # A folder that cannot be written fails at the very end of the work, after the model ran.
    place = tmp_path / "out"
    if fails:
        monkeypatch.setattr(sys.modules["edge_opt.runtimes.convert"], "publish", _full)
    try:
        compress.convert(model, (1, 3, 12, 12), "fp32", runtime, verify_on=loader, output=place)
        assert not fails
    except ConversionFailed as error:
        assert fails and "No space left" in str(error) and not place.exists()
    after = facts(model)
    for name, value in before.items():
        assert same(value, after[name]), name
    assert torch.equal(twin.norm.running_mean, model.norm.running_mean)
    assert capfd.readouterr() == ("", "")


def test_weights_of_big_models_stand_beside_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for module in ("runtimes.export", "quantization.onnx_files"):
        monkeypatch.setattr(import_module(f"edge_opt.{module}"), "EXTERNAL_DATA_BYTES", 1000)
    model = SmallCNN()
    done = compress.convert(model, SHAPE, "fp32", output=tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["SmallCNN.fp32.onnx", "SmallCNN.fp32.onnx.data"]
    assert done.size_bytes == sum(path.stat().st_size for path in tmp_path.iterdir())
    assert done.agreement.max_difference <= 1e-4
    moved = tmp_path / "moved"
    moved.mkdir()
    for name in names:
        (tmp_path / name).rename(moved / name)
    with compress.open_runner(moved / names[0]) as runner:
        assert runner(torch.zeros(3, 1, 28, 28))[0].shape == (3, 10)


def test_files_name_no_folder_of_their_author(tmp_path: Path) -> None:
    done = compress.convert(SmallCNN(), SHAPE, "int8", calibration=BATCH, output=tmp_path)
    content = Path(done.path).read_bytes()
    assert b"site-packages" not in content and str(Path(__file__).parents[2]).encode() not in content


def test_refusals_of_the_command_to_write_elsewhere_than_onnx(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="must end in .onnx"):
        compress.export_onnx(SmallCNN(), SHAPE, tmp_path / "model.pt")
    with pytest.raises(ConversionFailed, match="cannot write"):
        (tmp_path / "file").write_text("")
        compress.convert(SmallCNN(), SHAPE, "fp32", output=tmp_path / "file" / "below")
