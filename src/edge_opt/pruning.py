"""Pruning as the published pipeline calls it."""

from __future__ import annotations

from torch import nn

import edge_opt as eo


def structured_channel_prune(
    model: nn.Module, level: float, input_shape: tuple[int, ...] = (1, 1, 28, 28), round_to: int = 1
) -> nn.Module:
    """A copy of the model without a share of its channels, those with the smallest weights.

    Args:
        model: Any model; it is left as it was.
        level: Share of every layer's channels that goes, from 0 to below 1.
        input_shape: What the model takes, batch included; the default is SmallCNN's.
        round_to: Kept channels are a multiple of this; 1, as published, comes nearest to the share.

    >>> from edge_opt.model import SmallCNN
    >>> structured_channel_prune(SmallCNN(16, 32), 0.25).conv2
    Conv2d(12, 24, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1))
    """
    return eo.compress.prune(model, input_shape, level, round_to=round_to).model
