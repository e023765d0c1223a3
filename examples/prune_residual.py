"""Prune a residual CNN to half of its MACs, prove it, save it without a pickle, and load it again."""

from __future__ import annotations

import tempfile

import torch
from torch import nn

import edge_opt as eo


class Block(nn.Module):
    """Two convolutions around a shortcut: what is added must keep the same channels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + self.second(self.first(x)))


def residual(width: int = 64, blocks: int = 3) -> nn.Module:
    """The network, before pruning."""
    stem = nn.Sequential(nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))
    return nn.Sequential(stem, *(Block(width) for _ in range(blocks)), head).eval()


def main() -> None:
    model, shape = residual(), (1, 3, 32, 32)
    pruned = eo.compress.prune(model, shape, macs_target=0.5)
    print(pruned)
    print(eo.compare(eo.profile(model, shape), eo.profile(pruned.model, shape), names=["before", "after"]))
    with tempfile.TemporaryDirectory() as folder:
        eo.compress.save_pruned(pruned, folder)
        again = eo.compress.load_pruned(folder, residual)
    image = torch.randn(shape)
    print("read again, same outputs:", torch.equal(again(image), pruned.model(image)))


if __name__ == "__main__":
    main()
