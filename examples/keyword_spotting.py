"""Keyword spotting: a 1-D CNN finds which of four whistles is in a second of noise, scored by its own metric.

Run it: python examples/keyword_spotting.py
"""

from __future__ import annotations

import math
import sys
import tempfile
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import edge_opt as eo

RATE = 800
# From and to how many hertz each word's whistle goes; class 0 is noise alone.
WHISTLES = ((0, 0), (60, 60), (150, 150), (60, 150), (150, 60))


def sounds(count: int, seed: int) -> TensorDataset:
    """One second each: (1, 800) samples, and which word it is."""
    draw = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % len(WHISTLES)
    time = torch.arange(RATE) / RATE
    waves = []
    for label in labels.tolist():
        low, high = WHISTLES[label]
        turn = torch.rand(1, generator=draw) * 2 * math.pi
        tone = torch.sin(2 * math.pi * (low * time + (high - low) * time**2 / 2) + turn) * (label > 0)
        waves.append(tone + 0.3 * torch.randn(RATE, generator=draw))
    return TensorDataset(torch.stack(waves)[:, None], labels)


def loaders() -> dict[str, Any]:
    return {name: DataLoader(sounds(*how), 25) for name, how in {"train": (200, 0), "validation": (100, 1)}.items()}


def missed(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Per sample whether a word was there and was not heard: missing one is what costs; the mean counts."""
    return ((targets > 0) & (outputs.argmax(1) != targets)).float()


missed.higher_is_better = False  # type: ignore[attr-defined]


def trained() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv1d(1, 16, 16, stride=4), nn.ReLU(),
        nn.Conv1d(16, 32, 8, stride=4), nn.ReLU(),
        nn.Conv1d(32, 32, 4, stride=2), nn.ReLU(),
        nn.Flatten(), nn.Linear(32 * 23, 5),
    )  # fmt: skip
    return eo.compress.finetune(net, loaders()["train"], epochs=8, learning_rate=3e-3, progress=False).model


def main(folder: str) -> None:
    result = eo.sweep(
        f"{__file__}:trained",
        f"{__file__}:loaders",
        output=folder,
        metric=f"{__file__}:missed",
        budgets=["missed_drop <= 0.1"],
        pruning_levels=[0.0, 0.5],
        precisions=["int8"],
        runtimes=["onnxruntime"],
        fine_tune_epochs=2,
        min_time_s=0.05,
    )
    print(result.recommendation)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
