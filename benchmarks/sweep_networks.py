"""The networks of `sweep_against_tools.py`, trained briefly on Fashion-MNIST, and their data.

`densenet` and `kws` were kept back: nothing in the search was chosen by looking at them.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from pruning_accuracy import Basic, _head, _stem, mobilenet
from torch import nn

from edge_opt.compress import finetune
from edge_opt.data import load_splits

SHAPE = (1, 1, 28, 28)
EPOCHS, RATE = 4, 3e-3
DATA = {"batch_size": 64, "train_subset": 20_000, "val_subset": 5_000, "calibration_batches": 4}
WEIGHTS = Path(os.environ.get("EDGE_OPT_BENCH_WEIGHTS", tempfile.gettempdir())) / "edge-opt-sweep-networks"


def resnet() -> nn.Module:
    """A ResNet of 5.5 M MACs."""
    widths = [(16, 16, 1), (16, 16, 1), (16, 32, 2), (32, 32, 1), (32, 64, 2), (64, 64, 1)]
    return nn.Sequential(*_stem(16), *(Basic(*width) for width in widths), *_head(64))


class Separable(nn.Sequential):
    """A depthwise and a pointwise convolution."""

    def __init__(self, width: int) -> None:
        super().__init__(
            nn.Conv2d(width, width, 3, 1, 1, groups=width, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
        )  # fmt: skip


def kws() -> nn.Module:
    """DS-CNN of MLPerf Tiny for keyword spotting, with images for spectrograms: 4.2 M MACs."""
    first = [nn.Conv2d(1, 64, (10, 4), 2, (5, 1), bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.Dropout(0.2)]
    return nn.Sequential(*first, *(Separable(64) for _ in range(4)), nn.Dropout(0.4), *_head(64))


class Dense(nn.Module):
    """A layer of a DenseNet: its channels are added to those that it reads."""

    def __init__(self, inputs: int, growth: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.BatchNorm2d(inputs), nn.ReLU(), nn.Conv2d(inputs, growth, 3, 1, 1, bias=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, self.body(x)], 1)


def densenet() -> nn.Module:
    """A DenseNet of two blocks of four layers, 16 channels each: 7.0 M MACs."""
    blocks = [*(Dense(16 * place, 16) for place in range(1, 5)), nn.Conv2d(80, 40, 1, bias=False), nn.AvgPool2d(2)]
    blocks += [Dense(40 + 16 * place, 16) for place in range(4)]
    return nn.Sequential(*_stem(16), *blocks, nn.BatchNorm2d(104), nn.ReLU(), *_head(104))


NETS: dict[str, Callable[[], nn.Module]] = {"resnet": resnet, "mobilenet": mobilenet, "densenet": densenet, "kws": kws}


def loaders(seed: int = 0) -> dict[str, Any]:
    """The four parts of the data."""
    splits = load_splits("fashion-mnist", seed=seed, **DATA)  # type: ignore[arg-type]
    return {part: getattr(splits, part) for part in ("train", "validation", "calibration", "test")}


def trained(net: str, seed: int = 0) -> nn.Module:
    """Return a trained network; it is trained once, and its weights are kept."""
    torch.manual_seed(seed)
    model, path = NETS[net](), WEIGHTS / f"{net}-{seed}.pt"
    if path.is_file():
        model.load_state_dict(torch.load(path, weights_only=True))
        return model.eval()
    model = finetune(
        model, loaders(seed)["train"], epochs=EPOCHS, learning_rate=RATE, seed=seed, progress=False
    ).model.eval()
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), path)
    return model
