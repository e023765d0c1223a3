"""Segmentation of discs and squares on noise, scored by the mean intersection over union of three classes.

Run it: python examples/segmentation.py
"""

from __future__ import annotations

import sys
import tempfile
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import edge_opt as eo

SIDE = 24


def shapes(count: int, seed: int) -> TensorDataset:
    """Images (1, 24, 24) with one disc and one square each, and masks: 0 ground, 1 disc, 2 square."""
    draw = torch.Generator().manual_seed(seed)
    rows, columns = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
    masks = torch.zeros(count, SIDE, SIDE, dtype=torch.int64)
    for mask in masks:
        (a, b), (c, d) = torch.randint(5, SIDE - 5, (2, 2), generator=draw).tolist()
        mask[(rows - a).abs().maximum((columns - b).abs()) <= 3] = 2
        mask[(rows - c) ** 2 + (columns - d) ** 2 <= 16] = 1
    light = torch.tensor([0.0, 1.0, 0.5])[masks][:, None]
    return TensorDataset(light + 0.15 * torch.randn(light.shape, generator=draw), masks)


def loaders() -> dict[str, Any]:
    return {name: DataLoader(shapes(*how), 16) for name, how in {"train": (96, 0), "validation": (48, 1)}.items()}


def trained() -> nn.Module:
    """Four convolutions that keep the size; the last has a channel per class."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(),
        nn.Conv2d(16, 24, 3, padding=1), nn.ReLU(),
        nn.Conv2d(24, 16, 3, padding=1), nn.ReLU(),
        nn.Conv2d(16, 3, 1),
    )  # fmt: skip
    return eo.compress.finetune(
        net, loaders()["train"], epochs=6, learning_rate=1e-2, metric="miou", progress=False
    ).model


def main(folder: str) -> None:
    result = eo.sweep(
        f"{__file__}:trained",
        f"{__file__}:loaders",
        output=folder,
        metric="miou",
        budgets=["miou_drop <= 0.05"],
        pruning_levels=[0.0, 0.5],
        precisions=["int8"],
        runtimes=["onnxruntime"],
        fine_tune_epochs=2,
        learning_rate=1e-2,
        min_time_s=0.05,
    )
    print(result.recommendation)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
