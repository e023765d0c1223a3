"""Regression on scikit-learn's diabetes data: how small can a network be within an error limit?

Run it: python examples/regression.py
"""

from __future__ import annotations

import sys
import tempfile
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import edge_opt as eo


def loaders() -> dict[str, Any]:
    """442 patients: ten measurements, and how far the disease went on in a year, in standard deviations."""
    from sklearn.datasets import load_diabetes

    data = load_diabetes()
    x = torch.from_numpy(data.data).float() / 0.05
    y = torch.from_numpy(data.target).float()
    y = (y - y.mean()) / y.std()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    parts = {"train": order[:260], "validation": order[260:360], "test": order[360:]}
    return {name: DataLoader(TensorDataset(x[rows], y[rows]), 20) for name, rows in parts.items()}


def trained() -> nn.Module:
    """A network of 10, 64, 64 and 1, trained on squared errors: what follows from the metric."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1), nn.Flatten(0))
    parts = loaders()
    tuned = eo.compress.finetune(
        net, parts["train"], epochs=12, learning_rate=3e-3, metric="mae", validate=parts["validation"], progress=False
    )
    return tuned.model


def main(folder: str) -> None:
    result = eo.sweep(
        f"{__file__}:trained",
        f"{__file__}:loaders",
        output=folder,
        metric="mae",
        budgets=["mae_drop <= 0.05"],
        pruning_levels=[0.0, 0.5],
        precisions=["int8"],
        runtimes=["onnxruntime"],
        fine_tune_epochs=4,
        min_time_s=0.05,
    )
    print(result.recommendation)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
