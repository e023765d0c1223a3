"""Small models for the tests of conversions."""

from __future__ import annotations

import torch
from torch import nn


class Residual(nn.Module):
    """Two convolutions with batch norms around a shortcut, then a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.conv = nn.Conv2d(16, 16, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(16)
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.stem(x))
        x = torch.relu(self.norm(self.conv(x)) + x)
        scores: torch.Tensor = self.head(x.mean((2, 3)))
        return scores


class Tokens(nn.Module):
    """A transformer layer over token ids, with a dict for a result."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.block = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.head = nn.Linear(16, 3)

    def forward(self, ids: torch.Tensor, scale: float = 1.0) -> dict[str, torch.Tensor]:
        hidden = self.block(self.embed(ids)) * scale
        return {"scores": self.head(hidden.mean(1)), "hidden": hidden}


class Recurrent(nn.Module):
    """An LSTM, which static quantisation leaves alone, and a linear layer, which it does not."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(8, 16, batch_first=True)
        self.head = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(self.rnn(x)[0][:, -1])
        return scores


class Pair(nn.Module):
    """Two inputs of different kinds and nested outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.embed = nn.Embedding(9, 4)

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor]]:
        return self.linear(x) @ self.embed(ids).transpose(1, 2), (x + 1,)


class Branching(nn.Module):
    """Control flow that depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Sequential(nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.gate(x).sum() > 0:
            x = x * 2
        return x


class Singular(nn.Module):
    """An operator that ONNX has no form of."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values: torch.Tensor = torch.linalg.svdvals(self.linear(x))
        return values
