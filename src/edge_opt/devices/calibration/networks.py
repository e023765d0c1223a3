"""Networks of our own, in the shapes that models usually have; the reference models are made of these."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from edge_opt.devices.calibration.blocks import (
    Attention,
    Branches,
    Dense,
    Encoder,
    Inverted,
    LastNorm,
    Residual,
    Windows,
    conv_norm,
)

WORDS = 8000


def _stem(width: int, kernel: int = 7, act: type[nn.Module] = nn.ReLU, has_pool: bool = True) -> nn.Sequential:
    pool: list[nn.Module] = [nn.MaxPool2d(3, 2, 1)] if has_pool else []
    return nn.Sequential(*conv_norm(3, width, kernel, 2, act=act), *pool)


def _head(width: int, classes: int) -> nn.Sequential:
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(1), nn.Linear(width, classes))


def residual(widths: list[int], depths: list[int], bottleneck: int = 0, groups: int = 1) -> nn.Module:
    layers: list[nn.Module] = [_stem(widths[0])]
    before = widths[0]
    for stage, (width, depth) in enumerate(zip(widths, depths, strict=True)):
        out = width * bottleneck if bottleneck else width
        inner = width * (2 if bottleneck > 1 and groups > 1 else 1) if bottleneck else None
        for index in range(depth):
            stride = 2 if stage and not index else 1
            # One to one outside means groups of so many channels, otherwise so many groups.
            layers.append(Residual(before, out, inner, stride, width // groups if bottleneck == 1 else groups))
            before = out
    return nn.Sequential(*layers, _head(before, 500))


def plain(widths: list[int], has_norm: bool, hidden: int) -> nn.Module:
    layers: list[nn.Module] = []
    before = 3
    for width in widths:
        for _ in range(2):
            block = conv_norm(before, width) if has_norm else [nn.Conv2d(before, width, 3, 1, 1), nn.ReLU(True)]
            layers += list(block)
            before = width
        layers.append(nn.MaxPool2d(2, 2))
    classifier = [nn.Linear(before * 25, hidden), nn.ReLU(True), nn.Dropout(), nn.Linear(hidden, 500)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(5), nn.Flatten(1), *classifier)


def mobile(
    stem: int, stages: list[tuple[int, int, int, int, int]], act: type[nn.Module], has_excite: bool, last: int
) -> nn.Module:
    """Stages are (expansion, width, depth, stride, kernel)."""
    layers: list[nn.Module] = [conv_norm(3, stem, 3, 2, act=act)]
    before = stem
    for expand, width, depth, stride, kernel in stages:
        for index in range(depth):
            layers.append(Inverted(before, width, expand, kernel, 1 if index else stride, act, has_excite))
            before = width
    return nn.Sequential(*layers, conv_norm(before, last, 1, act=act), _head(last, 500))


class DenseNet(nn.Module):
    def __init__(self, growth: int, depths: list[int]) -> None:
        super().__init__()
        width = 2 * growth
        self.stem = _stem(width)
        self.stages = nn.ModuleList()
        self.shrinks = nn.ModuleList()
        for depth in depths:
            self.stages.append(nn.ModuleList(Dense(width + index * growth, growth) for index in range(depth)))
            width += depth * growth
            norm: list[nn.Module] = [nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
            self.shrinks.append(nn.Sequential(*norm, nn.Conv2d(width, width // 2, 1, bias=False), nn.AvgPool2d(2, 2)))
            width //= 2
        self.head = nn.Linear(width, 500)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for stage, shrink in zip(self.stages, self.shrinks, strict=True):
            parts = [x]
            for layer in stage:  # type: ignore[attr-defined]
                parts.append(layer(parts))
            x = shrink(torch.cat(parts, 1))
        result: torch.Tensor = self.head(F.adaptive_avg_pool2d(F.relu(x, inplace=True), (1, 1)).flatten(1))
        return result


def branches(stem: int, widths: list[int]) -> nn.Module:
    layers: list[nn.Module] = [_stem(stem), conv_norm(stem, stem * 3, 3), nn.MaxPool2d(3, 2, ceil_mode=True)]
    before = stem * 3
    for index, width in enumerate(widths):
        layers.append(Branches(before, width))
        before = width + width * 3 // 2 + width + width // 2
        if index % 2:
            layers.append(nn.MaxPool2d(3, 2, ceil_mode=True))
    return nn.Sequential(*layers, _head(before, 500))


class Text(nn.Module):
    """Tokens through encoder layers; the last state of each token, or (`is_causal`) the next one's scores."""

    def __init__(
        self, width: int, heads: int, depth: int, hidden: int, mlp: str, is_norm_first: bool, is_causal: bool = False,
        is_apart: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, width), nn.Embedding(512, width)
        self.norm = nn.LayerNorm(width)
        self.layers = nn.ModuleList(
            Encoder(width, Attention(width, heads, is_causal, is_apart, is_causal), hidden, mlp, is_norm_first)
            for _ in range(depth)
        )
        self.head = nn.Linear(width, WORDS if is_causal else width)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.words(ids) + self.places(torch.arange(ids.shape[1])))
        for layer in self.layers:
            x = layer(x)
        result: torch.Tensor = self.head(x)
        return result


class Patches(nn.Module):
    """An image as a row of patches, with a class token in front."""

    def __init__(self, size: int, patch: int, width: int, heads: int, depth: int, is_joint: bool, mlp: str) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, patch, patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(torch.zeros(1, (size // patch) ** 2 + 1, width))
        self.layers = nn.Sequential(
            *(Encoder(width, Attention(width, heads, is_joint, False), 4 * width, mlp, True) for _ in range(depth))
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 500)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.places
        result: torch.Tensor = self.head(self.norm(self.layers(x))[:, 0])
        return result


class Shifted(nn.Module):
    """Windows of an image, shifted every second layer; patches merge between stages."""

    def __init__(self, width: int, depths: list[int], window: int) -> None:
        super().__init__()
        self.patch, self.norm = nn.Conv2d(3, width, 4, 4), nn.LayerNorm(width)
        self.stages, self.merges = nn.ModuleList(), nn.ModuleList()
        for stage, depth in enumerate(depths):
            wide = width << stage
            attentions = [Windows(wide, wide // 32, window, window // 2 * (index % 2)) for index in range(depth)]
            self.stages.append(nn.Sequential(*(Encoder(wide, item, 4 * wide, "none", True) for item in attentions)))
            self.merges.append(nn.Sequential(nn.LayerNorm(4 * wide), nn.Linear(4 * wide, 2 * wide, bias=False)))
        self.head = nn.Linear(width << len(depths), 500)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.patch(x).permute(0, 2, 3, 1))
        for stage, merge in zip(self.stages, self.merges, strict=True):
            x = stage(x)
            corners = [x[:, i::2, j::2, :] for j in (0, 1) for i in (0, 1)]
            x = merge(torch.cat(corners, -1))
        result: torch.Tensor = self.head(x.mean((1, 2)))
        return result


class LastNet(nn.Module):
    """Stages of depthwise blocks with channels-last norms, halved in size between them."""

    def __init__(self, widths: list[int], depths: list[int], is_permuted: bool) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, widths[0], 4, 4)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for width in widths)
        self.shrinks = nn.ModuleList(nn.Conv2d(a, b, 2, 2) for a, b in pairwise(widths))
        self.stages = nn.ModuleList(
            nn.Sequential(*(LastNorm(width, is_permuted) for _ in range(depth)))
            for width, depth in zip(widths, depths, strict=True)
        )
        self.head = _head(widths[-1], 500)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for index, (norm, stage) in enumerate(zip(self.norms, self.stages, strict=True)):
            x = norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
            x = stage(x)
            if index < len(self.shrinks):
                x = self.shrinks[index](x)
        result: torch.Tensor = self.head(x)
        return result


class UNet(nn.Module):
    """Down and up again, with what was there before put beside it."""

    def __init__(self, widths: list[int], is_interpolated: bool) -> None:
        super().__init__()
        pairs = list(zip([3, *widths], widths, strict=False))
        self.down = nn.ModuleList(nn.Sequential(conv_norm(a, b), conv_norm(b, b)) for a, b in pairs)
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in reversed(pairs[1:]))
        self.thin = nn.ModuleList(conv_norm(b, a, 1) for a, b in reversed(pairs[1:]))
        self.join = nn.ModuleList(conv_norm(2 * a, a) for a, _ in reversed(pairs[1:]))
        self.last = nn.Conv2d(widths[0], 4, 1)
        self.is_interpolated = is_interpolated

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept: list[torch.Tensor] = []
        for index, stage in enumerate(self.down):
            x = stage(F.max_pool2d(x, 2) if index else x)
            kept.append(x)
        kept.pop()
        for up, thin, join in zip(self.up, self.thin, self.join, strict=True):
            if self.is_interpolated:
                x = F.interpolate(thin(x), scale_factor=2, mode="bilinear", align_corners=False)
            else:
                x = up(x)
            x = join(torch.cat([x, kept.pop()], 1))
        result: torch.Tensor = self.last(x)
        return result


class Recurrent(nn.Module):
    """Tokens through a recurrent stack; the last state decides."""

    def __init__(self, kind: Any, width: int, hidden: int, layers: int, is_bidirectional: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.body = kind(width, hidden, layers, batch_first=True, bidirectional=is_bidirectional)
        self.head = nn.Linear(hidden * (2 if is_bidirectional else 1), 32)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        states, _ = self.body(self.words(ids))
        result: torch.Tensor = self.head(states[:, -1])
        return result
