"""The reference models: run during calibration, so that operators are timed where they usually stand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from edge_opt.devices.calibration.networks import (
    WORDS,
    DenseNet,
    LastNet,
    Patches,
    Recurrent,
    Shifted,
    Text,
    UNet,
    branches,
    mobile,
    plain,
    residual,
)


@dataclass(frozen=True, slots=True)
class Reference:
    """One reference model: its family, how it is built, its input for a batch size, and the batches it runs with."""

    name: str
    family: str
    build: Callable[[], nn.Module]
    inputs: Callable[[int], torch.Tensor]
    batches: tuple[int, ...]


def _image(size: int) -> Callable[[int], torch.Tensor]:
    return lambda batch: torch.randn(batch, 3, size, size)


def _tokens(length: int) -> Callable[[int], torch.Tensor]:
    return lambda batch: torch.randint(0, WORDS, (batch, length))


# Ordered so that a calibration which is cut short has seen something of every family.
REFERENCES: tuple[Reference, ...] = (
    Reference("residual-56", "residual", lambda: residual([56, 112, 224, 448], [1, 2, 1, 1]), _image(208), (1, 8)),
    Reference(
        "mobile-hardswish", "mobile",
        lambda: mobile(16, [(1, 24, 1, 2, 3), (4, 40, 2, 2, 5), (5, 80, 2, 2, 3), (6, 112, 2, 1, 5), (4, 176, 2, 2, 5)],
                       nn.Hardswish, True, 704), _image(224), (1, 8),
    ),
    Reference("text-384", "transformer", lambda: Text(384, 6, 3, 1536, "none", False), _tokens(96), (1, 8)),
    Reference("patches-448", "transformer", lambda: Patches(224, 16, 448, 7, 3, True, "none"), _image(224), (1, 8)),
    Reference("dense-28", "dense", lambda: DenseNet(28, [4, 6, 8, 4]), _image(224), (1, 8)),
    Reference("shifted-80", "windows", lambda: Shifted(96, [2, 2, 2], 7), _image(224), (1, 8)),
    Reference("last-norm-88", "last-norm", lambda: LastNet([88, 176, 352, 704], [1, 1, 3, 1], True),
              _image(224), (1, 8)),
    Reference(
        "mobile-relu6", "mobile",
        lambda: mobile(32, [(1, 16, 1, 1, 3), (6, 32, 2, 2, 3), (6, 48, 2, 2, 3), (6, 96, 2, 2, 3), (6, 192, 2, 2, 3)],
                       nn.ReLU6, False, 1024), _image(224), (1, 8),
    ),
    Reference("bottleneck-72", "residual", lambda: residual([72, 144, 288, 576], [1, 1, 2, 1], 4), _image(224), (1, 8)),
    Reference("lstm-224", "recurrent", lambda: Recurrent(nn.LSTM, 224, 320, 2, False), _tokens(48), (1, 8)),
    Reference("branches-56", "branches", lambda: branches(56, [64, 96, 128, 160]), _image(224), (1, 8)),
    Reference("plain-40", "plain", lambda: plain([40, 80, 160, 320, 384], False, 1536), _image(176), (1, 8)),
    Reference("causal-640", "transformer", lambda: Text(640, 10, 2, 2560, "tanh", True, True), _tokens(64), (1, 8)),
    Reference("u-net-24", "u-net", lambda: UNet([24, 48, 96, 192], False), _image(160), (1, 4)),
    Reference("grouped-64", "residual", lambda: residual([64, 128, 256], [1, 1, 1], 2, 32), _image(224), (1, 8)),
    Reference(
        "mobile-silu", "mobile",
        lambda: mobile(24, [(1, 24, 1, 1, 3), (4, 40, 2, 2, 3), (6, 64, 2, 2, 5), (6, 120, 2, 2, 3), (6, 208, 2, 2, 5)],
                       nn.SiLU, True, 1280), _image(192), (1, 8),
    ),
    Reference("plain-norm-64", "plain", lambda: plain([64, 96, 192, 256], True, 1024), _image(160), (1, 8)),
    Reference("groups-of-8", "residual", lambda: residual([40, 112, 184, 376], [1, 1, 2, 2], 1, 8),
              _image(224), (1, 8)),
    Reference("gated-512", "transformer", lambda: Text(512, 8, 2, 1408, "gated", True, True, True),
              _tokens(128), (1, 4)),
    Reference("gru-160", "recurrent", lambda: Recurrent(nn.GRU, 160, 256, 1, True), _tokens(64), (1, 8)),
    Reference("last-norm-64", "last-norm", lambda: LastNet([64, 128, 256], [1, 2, 1], False), _image(224), (1, 8)),
    Reference("u-net-bilinear", "u-net", lambda: UNet([32, 64, 128], True), _image(128), (1, 8)),
    Reference("patches-32", "transformer", lambda: Patches(224, 32, 704, 11, 2, False, "tanh"), _image(224), (1, 8)),
)  # fmt: skip
