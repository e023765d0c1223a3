"""SmallCNN: the reference network of the examples and of the pipeline."""

from __future__ import annotations

import torch
from torch import nn


class SmallCNN(nn.Module):
    """Two 3x3 convolutions with max-pooling and a linear classifier, for 28x28 images of one channel.

    Args:
        conv1_channels: Output channels of the first convolution; 16, as published.
        conv2_channels: Output channels of the second one; 32, as published.
        num_classes: Scores per image; ten, as MNIST has digits.
    """

    def __init__(self, conv1_channels: int = 16, conv2_channels: int = 32, num_classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, conv1_channels, kernel_size=3, padding=1)
        self.relu1 = nn.ReLU()
        self.pool1 = nn.MaxPool2d(2)
        self.conv2 = nn.Conv2d(conv1_channels, conv2_channels, kernel_size=3, padding=1)
        self.relu2 = nn.ReLU()
        self.pool2 = nn.MaxPool2d(2)
        self.classifier = nn.Linear(conv2_channels * 7 * 7, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the scores of each image, one per class.

        Args:
            x: Images, (samples, 1, 28, 28).
        """
        x = self.pool1(self.relu1(self.conv1(x)))
        x = self.pool2(self.relu2(self.conv2(x)))
        logits: torch.Tensor = self.classifier(torch.flatten(x, 1))
        return logits
