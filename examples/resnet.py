"""A residual network of the usual sizes, to profile without another package."""

from __future__ import annotations

import torch
from torch import nn


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions around a shortcut."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = width * self.expansion
        self.reduce = _conv_norm(inputs, width, 1)
        self.spatial = _conv_norm(width, width, 3, stride)
        self.expand = _conv_norm(width, outputs, 1)
        has_new_shape = stride != 1 or inputs != outputs
        self.shortcut = _conv_norm(inputs, outputs, 1, stride) if has_new_shape else nn.Identity()
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.relu(self.reduce(x))
        y = self.relu(self.spatial(y))
        return self.relu(self.expand(y) + self.shortcut(x))


class ResNet(nn.Module):
    """A stem, four stages of bottlenecks and a classifier."""

    def __init__(self, depths: tuple[int, ...] = (3, 4, 6, 3), classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Sequential(_conv_norm(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1))
        stages: list[nn.Module] = []
        inputs = 64
        for level, depth in enumerate(depths):
            width = 64 * 2**level
            blocks = []
            for index in range(depth):
                blocks.append(Bottleneck(inputs, width, 2 if level and not index else 1))
                inputs = width * Bottleneck.expansion
            stages.append(nn.Sequential(*blocks))
        self.stages = nn.Sequential(*stages)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(inputs, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pool(self.stages(self.stem(x)))
        logits: torch.Tensor = self.classifier(torch.flatten(x, 1))
        return logits


def _conv_norm(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Sequential:
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs))


def resnet50() -> ResNet:
    """50 layers, 25.6 million parameters."""
    return ResNet()
