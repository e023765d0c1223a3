"""Every function that takes a model takes a module, an exported program, a reference or the path of a file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import edge_opt as eo
from edge_opt._support.deprecation import FormerNameWarning
from edge_opt.errors import InvalidInput, ModelNotFound
from edge_opt.model import SmallCNN

SHAPE = (1, 1, 28, 28)
REFERENCE = "edge_opt.model:SmallCNN"
# 3x3 convolutions to 16 and 32 channels, each followed by a 2x2 pool, and 10 classes.
MACS = 28 * 28 * 16 * 9 + 14 * 14 * 32 * 16 * 9 + 32 * 7 * 7 * 10


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    eo.compress.export_onnx(SmallCNN(), SHAPE, folder / "net.onnx")
    torch.export.save(program(), folder / "net.pt2")
    eo.profile(SmallCNN(), SHAPE).save(folder / "net.json")
    configuration = {"model_type": "bert", "architectures": ["BertForMaskedLM"], "hidden_size": 8, "vocab_size": 100}
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "max_position_embeddings": 32}
    (folder / "bert").mkdir()
    (folder / "bert" / "config.json").write_text(json.dumps(configuration | sizes))
    return folder


def program() -> torch.export.ExportedProgram:
    return torch.export.export(SmallCNN().eval(), (torch.zeros(SHAPE),))


def test_profile_takes_every_form(files: Path) -> None:
    with_inputs = [SmallCNN(), REFERENCE, eo.load_model(REFERENCE), str(files / "net.onnx")]
    own_inputs = [files / "net.onnx", eo.load_model(files / "net.onnx"), files / "net.json", program()]
    profiles = [eo.profile(model, SHAPE) for model in with_inputs] + [eo.profile(model) for model in own_inputs]
    profiles.append(eo.profile(files / "net.pt2", trust=True))
    assert [profile.totals.macs for profile in profiles] == [MACS] * 9
    assert [profile.name for profile in profiles[1:6]] == ["SmallCNN", "SmallCNN", "net", "net", "net"]


def test_a_saved_profile_is_predicted_for_a_target_and_not_traced_again(files: Path) -> None:
    saved = eo.profile(files / "net.json", target="raspberry-pi-4", name="mine")
    assert saved.prediction == eo.profile(SmallCNN(), SHAPE, target="raspberry-pi-4").prediction
    assert saved.name == "mine"
    for options in ({"inputs": SHAPE}, {"measure": True}, {"mode": "train"}):
        with pytest.raises(InvalidInput):
            eo.profile(files / "net.json", **options)


def test_a_model_of_the_hub_is_built_from_its_configuration(files: Path) -> None:
    inputs = {"input_ids": eo.InputSpec((1, 4), "int64")}
    profile, smaller = (eo.profile(f"hf:{files / 'bert'}{layers}", inputs) for layers in ("", "(num_hidden_layers=0)"))
    # Query, key, value, output: 4 of 8 x 8; two linear layers of 8 x 16; scores and values of 4 x 4 x 8 each.
    layer = 4 * (4 * 8 * 8 + 2 * 8 * 16) + 2 * 4 * 4 * 8
    assert profile.totals.macs - smaller.totals.macs == layer
    with pytest.raises(ModelNotFound, match="num_layer_s"):
        eo.profile(f"hf:{files / 'bert'}(num_layer_s=2)", inputs)


def test_other_functions_take_references_and_files(files: Path) -> None:
    batch = (torch.randn(8, *SHAPE[1:]), torch.zeros(8, dtype=torch.int64))
    onnx = files / "net.onnx"
    assert eo.compare(onnx, REFERENCE, files / "net.json", inputs=SHAPE).figure("macs").values == (MACS,) * 3
    assert [eo.check(model, f"macs <= {MACS}", inputs=SHAPE).passed for model in (onnx, REFERENCE)] == [True, True]
    assert eo.prune(REFERENCE, SHAPE, 0.5).model.get_submodule("conv2").out_channels == 16
    assert eo.convert(onnx, calibration=[batch[0]]).effective_precision == "int8"
    assert eo.measure(onnx, min_time_s=0.01, energy=None).latency.batch_size == 1
    assert eo.training_step(REFERENCE, SHAPE).peak_bytes == eo.training_step(SmallCNN(), SHAPE).peak_bytes
    assert eo.fit_batch(REFERENCE, SHAPE[1:], memory_limit_mb=1, max_batch=4).batch == 4
    assert eo.compare_targets(onnx, targets="raspberry-pi-4").model == "net"
    assert eo.sensitivity(REFERENCE, [batch], prune=(), layers=["conv1"]).rows[0].path == "conv1"


@pytest.mark.parametrize(
    "change",
    [
        lambda model, folder: eo.prune(model, SHAPE, 0.5),
        lambda model, folder: eo.sensitivity(model, []),
        lambda model, folder: eo.sweep(model, {"train": [], "validation": []}, output=folder),
    ],
)
def test_what_is_exported_is_not_pruned_or_trained(
    files: Path, tmp_path: Path, change: Callable[[Any, Path], object]
) -> None:
    for model in (str(files / "net.onnx"), program()):
        with pytest.raises(InvalidInput, match="exported"):
            change(model, tmp_path)


def test_a_pt2_file_needs_trust_everywhere(files: Path) -> None:
    path = str(files / "net.pt2")
    for use in (
        lambda: eo.load_model(path),
        lambda: eo.profile(path),
        lambda: eo.compare(path, path),
        lambda: eo.check(path, "macs <= 1"),
        lambda: eo.measure(path),
        lambda: eo.convert(path, precision="fp32"),
        lambda: eo.prune(path, ratio=0.5),
    ):
        with pytest.raises(InvalidInput, match="trust"):
            use()


def test_former_names_of_parameters_warn_and_work() -> None:
    with pytest.warns(FormerNameWarning, match="max_batch"):
        fit = eo.fit_batch(nn.Linear(4, 4), shape=(4,), memory_limit_mb=1, most=2)  # type: ignore[call-arg]
    assert fit.batch == 2
    with pytest.warns(FormerNameWarning, match="edge_opt.cost.free_operators"):
        assert callable(eo.free_operators)  # type: ignore[attr-defined]


def test_run_is_a_function_and_a_package(tmp_path: Path) -> None:
    from edge_opt.errors import InvalidConfig
    from edge_opt.run.config import read_config

    assert read_config().budgets == ["accuracy_drop <= 0.01"]
    with pytest.raises(InvalidConfig, match="epochs"):
        eo.run({"epochs": 0}, tmp_path)
    with pytest.raises(InvalidConfig, match=r"nowhere\.yaml"):
        eo.run(tmp_path / "nowhere.yaml")
