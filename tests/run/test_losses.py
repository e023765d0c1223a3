"""A loss that does not fit does not ruin a variant: it is named, doubted, and its training left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import edge_opt as eo
from edge_opt.compress import finetune
from edge_opt.data.datasets import splits_of
from edge_opt.errors import InvalidInput, MissingExtra
from edge_opt.model import SmallCNN
from edge_opt.records.sweeps import Candidate
from edge_opt.run.config import RunConfig
from edge_opt.run.model_and_data import ModelAndData
from edge_opt.run.variants import variant_of
from edge_opt.runtimes import registry
from edge_opt.search.sweep_progress import Notice
from edge_opt.tasks.batches import task_of

NET = """
import torch
from torch import nn
from torch.nn import functional as F


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.Conv2d(1, 16, 3, padding=1)
        self.inner = nn.Conv2d(16, 16, 3, padding=1)
        self.up = nn.Conv2d(32, 16, 3, padding=1)
        self.head = nn.Conv2d(16, 1, 1)

    def forward(self, x):
        first = F.relu(self.down(x))
        inner = F.relu(self.inner(F.max_pool2d(first, 2)))
        return self.head(F.relu(self.up(torch.cat([first, F.interpolate(inner, scale_factor=2.0)], 1))))


def dice(outputs, targets):
    masks = (outputs > 0).float()
    return float(2 * (masks * targets).sum() / (masks.sum() + targets.sum()).clamp(min=1))


def loaders():
    with open(__file__ + ".calls", "a") as file:
        file.write("x")
    generator = torch.Generator().manual_seed(0)
    images = F.avg_pool2d(torch.rand(48, 1, 20, 20, generator=generator), 5, 1)
    masks = (images > 0.53).float()
    batches = [(10 * (images[i : i + 16] - 0.5), masks[i : i + 16]) for i in (0, 16, 32)]
    return {"train": batches[:2], "validation": batches[2:], "calibration": batches[:1]}
"""


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The file of a U-Net with masks as float labels, and the network trained with the loss that fits."""
    path = tmp_path_factory.mktemp("unet") / "unet_file.py"
    path.write_text(NET)
    import importlib.util

    spec = importlib.util.spec_from_file_location("unet_file", path)
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    torch.manual_seed(0)
    data = loaded.loaders()["train"]
    net = finetune(loaded.UNet(), data, epochs=40, learning_rate=1e-2, loss="bce_with_logits", progress=False).model
    torch.save(net.state_dict(), path.with_suffix(".pt"))
    trained = (
        f"\n\ndef trained():\n    net = UNet()\n    net.load_state_dict(torch.load({str(path.with_suffix('.pt'))!r}))"
    )
    path.write_text(f"{NET}{trained}\n    return net.eval()\n")
    loaded.path, loaded.net = path, net.eval()
    return loaded


def test_the_loss_and_its_reason_are_known(module: Any) -> None:
    data = module.loaders()["train"]
    dice = {"metric": module.dice, "metric_direction": "higher"}
    choice = task_of(**dice).check(module.net, data)
    assert (choice.name, choice.reason) == ("mse", "because targets are floating-point numbers")
    assert "bce_with_logits" in choice.suggestion
    fitting = task_of(**dice, loss="BCE_with_logits").check(module.net, data)
    assert (fitting.name, fitting.suggestion) == ("bce_with_logits", "")
    # Outputs between 0 and 1 are no logits, and classes are no masks.
    assert task_of(**dice).check(nn.Sequential(module.net, nn.Sigmoid()), data).suggestion == ""
    labels = [(torch.zeros(4, 1, 28, 28), torch.arange(4))]
    assert task_of().check(SmallCNN(), labels).name == "cross_entropy"
    assert task_of(loss=F.nll_loss).check(SmallCNN(), labels).name == "nll_loss"


def test_training_that_makes_it_worse_is_left_out_and_named(module: Any, tmp_path: Path) -> None:
    dice = {"metric": module.dice, "metric_direction": "higher", "pruning_levels": [0.3]}
    splits = splits_of(module.loaders(), "loaders", 1)
    made = {}
    for loss in ("mse", "bce_with_logits"):
        # Squared error of logits pulls them to 0 and 1: at this rate nothing of the mask is left.
        config = RunConfig(**dice, loss=loss, fine_tune_epochs=4, learning_rate=0.1 if loss == "mse" else 3e-3)
        source = ModelAndData(module.net, splits, config)
        made[loss] = variant_of(source, splits, Candidate(0.3, "fp32", "torch"), tmp_path / loss)
    untrained = RunConfig(**dice, fine_tune_epochs=0)
    source = ModelAndData(module.net, splits, untrained)
    cut = variant_of(source, splits, Candidate(0.3, "fp32", "torch"), tmp_path / "cut").model.state_dict()
    worse, better = made["mse"], made["bce_with_logits"]
    assert worse.epochs == 0 and worse.remarks[-1].startswith("fine-tuning made it worse: check the loss")
    assert all(torch.equal(tensor, cut[name]) for name, tensor in worse.model.state_dict().items())
    assert better.epochs == 4 and better.remarks[-1].startswith("trained for 4 epochs that the baseline was not")
    score = source.task().score
    assert score(better.model, splits.train).value > score(worse.model, splits.train).value


def test_with_fair_the_baseline_is_trained_as_long(module: Any, tmp_path: Path) -> None:
    splits = splits_of(module.loaders(), "loaders", 1)
    config = RunConfig(
        metric=module.dice,
        metric_direction="higher",
        loss="bce_with_logits",
        learning_rate=1e-4,
        fine_tune_epochs=1,
        fair=True,
    )
    source = ModelAndData(module.net, splits, config)
    whole, cut = (variant_of(source, splits, Candidate(ratio, "fp32", "torch"), tmp_path) for ratio in (0.0, 0.3))
    assert whole.epochs == cut.epochs == 1 and not [text for text in cut.remarks if "trained for" in text]
    assert not torch.equal(whole.model.head.weight, module.net.head.weight)


@pytest.mark.slow
def test_a_sweep_names_its_loss_everywhere_and_loads_data_once_for_all_children(module: Any, tmp_path: Path) -> None:
    calls = Path(f"{module.path}.calls")
    calls.unlink()
    notices: list[str] = []
    result = eo.sweep(
        f"{module.path}:trained",
        f"{module.path}:loaders",
        output=tmp_path,
        metric=f"{module.path}:dice",
        loss="mse",
        pruning_levels=[0.0, 0.3],
        precisions=["fp32"],
        runtimes=["onnxruntime"],
        fine_tune_epochs=1,
        min_time_s=0.01,
        budgets=["latency_ms <= 1000"],
        on_event=lambda event: notices.append(event.text) if isinstance(event, Notice) else None,
    )
    # Here, and in the process that all others are forked from.
    assert len(result.trials) == 2 and calls.read_text() == "xx"
    text = json.loads((tmp_path / "reproducibility.json").read_text())["loss"]
    assert text.startswith("mse, as set by loss; targets are 0 and 1") and f"loss: {text}" in notices
    assert text in (tmp_path / "best" / "MODEL_CARD.md").read_text()
    assert json.dumps(text)[1:-1] in (tmp_path / "report.html").read_text()
    assert not list(tmp_path.glob("*.png"))


def test_a_runtime_that_is_not_installed_is_refused_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(registry, "find_spec", lambda name: None if name == "ai_edge_litert" else registry)
    with pytest.raises(MissingExtra, match=r"pip install '.\[litert\]'"):
        eo.sweep(SmallCNN(), "no_file.py:loaders", output=tmp_path, runtimes=["onnxruntime", "litert"])
    monkeypatch.delenv(registry.LIMIT_VARIABLE)
    assert registry.installed_runtimes() == ("torch", "onnxruntime", "openvino", "executorch")
    monkeypatch.setenv(registry.LIMIT_VARIABLE, "onnxruntime, nothing")
    with pytest.raises(InvalidInput, match="unknown runtime 'nothing'"):
        registry.installed_runtimes()
