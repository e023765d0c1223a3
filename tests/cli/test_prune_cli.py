"""`edge-opt prune`: what it prints, saves and refuses."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from edge_opt.cli import app
from edge_opt.compress import load_pruned, prune, save_pruned
from edge_opt.errors import MissingExtra
from edge_opt.model import SmallCNN

SMALL = ("edge_opt.model:SmallCNN", "-i", "1x1x28x28")


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["prune", *arguments], env={"COLUMNS": "120"})


def test_a_deep_model_shows_the_layers_that_lost_most_and_counts_the_others(tmp_path: Path) -> None:
    (tmp_path / "deep.py").write_text(
        "from torch import nn\n"
        "def deep():\n"
        "    return nn.Sequential(*[nn.Conv2d(8 * (1 + (n == 5)), 8 * (1 + (n == 4)), 1) for n in range(20)])\n"
    )
    result = invoke(f"{tmp_path}/deep.py:deep", "-i", "1x8x4x4", "--ratio", "0.5", "--round-to", "1")
    lines = result.stdout.splitlines()
    rows = [line.split() for line in lines if "Conv2d" in line]
    assert len(rows) == 12 and ["4", "Conv2d", "16", "8", "50.0%", "50.0%"] in rows
    assert "More         8 layers that lost fewer channels: --json, or .achieved.layers in Python" in lines


def test_the_proof_is_printed_and_the_model_saved(tmp_path: Path) -> None:
    result = invoke(*SMALL, "--ratio", "0.5", "-o", str(tmp_path / "out"))
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0].startswith("asked: 50.0% of every layer removed")
    assert lines[1].split() == ["Layer", "Kind", "Before", "After", "Asked", "Removed"]
    assert lines[3].split() == ["conv1", "Conv2d", "16", "8", "50.0%", "50.0%"]
    # 58 channels, of which 24 go: 8 + 16
    assert any(line.split() == ["Channels", "58", "→", "34", "58.6%", "remain"] for line in lines)
    assert "Short        classifier: 0.0% removed of 50.0%: classifier is the model's output" in lines
    assert any(line.startswith("Proved       forward, backward (6 gradients); equal to the original") for line in lines)
    assert f"saved to {tmp_path / 'out'}" in result.stderr
    assert load_pruned(tmp_path / "out", SmallCNN).conv2.out_channels == 16


def test_json_holds_the_request_and_the_result(tmp_path: Path) -> None:
    result = invoke(*SMALL, "--macs-target", "0.5", "--json", "-o", str(tmp_path / "out"))
    found = json.loads(result.stdout)
    assert found["asked"]["macs_target"] == 0.5
    assert abs(found["achieved"]["macs_ratio"] - 0.5) < 0.05
    assert found["saved"] == str(tmp_path / "out")
    assert found["shortfalls"] == []


def test_layers_and_rounding_are_options() -> None:
    options = ("--ratio", "conv1=0.25", "--ratio", "0.5", "--ignore", "conv2", "--round-to", "1", "--json")
    layers = json.loads(invoke(*SMALL, *options).stdout)["achieved"]["layers"]
    assert [(layer["path"], layer["after"]) for layer in layers] == [("conv1", 12), ("conv2", 32), ("classifier", 10)]


def test_weights_are_loaded_before_they_are_ranked(tmp_path: Path) -> None:
    torch.manual_seed(7)
    model = SmallCNN()
    torch.save(model.state_dict(), tmp_path / "small.pt")
    assert invoke(*SMALL, "-r", "0.5", "-w", str(tmp_path / "small.pt"), "-o", str(tmp_path / "out")).exit_code == 0
    expected = prune(model, (1, 1, 28, 28), 0.5).model
    assert torch.equal(load_pruned(tmp_path / "out", SmallCNN).conv1.weight, expected.conv1.weight)


def test_a_missed_target_fails_on_request() -> None:
    options = (*SMALL, "--macs-target", "0.01", "--ignore", "conv1")
    assert invoke(*options).exit_code == 0
    result = invoke(*options, "--strict")
    assert result.exit_code == 1
    assert "the target is missed by more than 10 %" in result.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--ratio", "1.5"), "error: --ratio is 1.5; it is the share of channels to remove, at least 0 and below 1"),
        (("--ratio", "0.5", "--importance", "taylor"), "error: --importance taylor needs data"),
        (("--ratio", "conv1"), "error: --ratio 'conv1' cannot be read; write a share such as 0.5, or LAYER=RATIO"),
        (("--ratio", "conv3=0.5"), "error: SmallCNN has no layer 'conv3'; closest: conv2, conv1"),
        ((), "error: nothing says how much to prune"),
        (("--latency-target", "0.5"), "error: --latency-target requires --target"),
        (("--ratio", "0.5", "-o", "/proc/nowhere"), "error: cannot write to '/proc/nowhere'"),
    ],
)
def test_mistakes_are_one_sentence_and_exit_code_2(options: tuple[str, ...], message: str) -> None:
    result = invoke(*SMALL, *options)
    assert result.exit_code == 2
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_an_input_is_needed() -> None:
    result = invoke("edge_opt.model:SmallCNN", "--ratio", "0.5")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "needs the shape of each of its inputs" in result.stderr


@pytest.mark.parametrize(
    ("package", "needs"), [("torch_pruning", "torch-pruning"), ("safetensors.torch", "safetensors")]
)
def test_a_missing_package_names_its_command(
    package: str, needs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtra, match=rf"{needs}.*`pip install '\.\[comp"):
        save_pruned(prune(SmallCNN(), (1, 1, 28, 28), 0.5), tmp_path / "out")
