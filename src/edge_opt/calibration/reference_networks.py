"""Models of our own, to time operators in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


def conv_norm(
    width_in: int, width: int, kernel: int = 3, stride: int = 1, groups: int = 1, act: type[nn.Module] | None = nn.ReLU
) -> nn.Sequential:
    """Return a convolution, a batch norm and, unless None, an activation in place."""
    conv = nn.Conv2d(width_in, width, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(width), *([] if act is None else [act(inplace=True)]))


class Residual(nn.Module):
    """x + f(x), then ReLU; with a projection where shapes differ."""

    def __init__(self, width_in: int, width: int, inner: int | None, stride: int = 1, groups: int = 1) -> None:
        super().__init__()
        if inner is None:
            layers = [conv_norm(width_in, width, 3, stride, groups), conv_norm(width, width, 3, 1, groups, None)]
        else:
            layers = [conv_norm(width_in, inner, 1), conv_norm(inner, inner, 3, stride, groups)]
            layers.append(conv_norm(inner, width, 1, act=None))
        self.body = nn.Sequential(*layers)
        is_same = stride == 1 and width_in == width
        self.skip = None if is_same else conv_norm(width_in, width, 1, stride, act=None)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> Any:
        out = self.body(x)
        out += x if self.skip is None else self.skip(x)
        return self.act(out)


class Excite(nn.Module):
    """Squeeze and excitation: channels scaled by what their means say."""

    def __init__(self, width: int, inner: int, gate: Callable[[torch.Tensor], torch.Tensor], is_pooled: bool) -> None:
        super().__init__()
        self.down = nn.Conv2d(width, inner, 1)
        self.up = nn.Conv2d(inner, width, 1)
        self.gate = gate
        self.is_pooled = is_pooled

    def forward(self, x: torch.Tensor) -> Any:
        s = F.adaptive_avg_pool2d(x, 1) if self.is_pooled else x.mean((2, 3), keepdim=True)
        return x * self.gate(self.up(F.relu(self.down(s))))


class Inverted(nn.Module):
    """Wide inside, narrow outside: 1x1, depthwise, excitation, 1x1."""

    def __init__(
        self, width_in: int, width: int, expand: int, kernel: int, stride: int, act: type[nn.Module], has_excite: bool
    ) -> None:
        super().__init__()
        inner = width_in * expand
        gate: Callable[[torch.Tensor], torch.Tensor] = F.hardsigmoid if act is nn.Hardswish else torch.sigmoid
        parts: list[nn.Module] = [conv_norm(width_in, inner, 1, act=act)] if expand > 1 else []
        parts.append(conv_norm(inner, inner, kernel, stride, inner, act))
        if has_excite:
            parts.append(Excite(inner, max(8, inner // 16), gate, is_pooled=act is nn.Hardswish))
        parts.append(conv_norm(inner, width, 1, act=None))
        self.body = nn.Sequential(*parts)
        self.is_same = stride == 1 and width_in == width

    def forward(self, x: torch.Tensor) -> Any:
        out = self.body(x)
        return x + out if self.is_same else out


class Dense(nn.Module):
    """Norm and ReLU first; the result is put beside everything before it."""

    def __init__(self, width_in: int, growth: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.BatchNorm2d(width_in), nn.ReLU(inplace=True), nn.Conv2d(width_in, 4 * growth, 1, bias=False),
            nn.BatchNorm2d(4 * growth), nn.ReLU(inplace=True),
            nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False),
        )  # fmt: skip

    def forward(self, parts: list[torch.Tensor]) -> Any:
        return self.body(torch.cat(parts, 1))


class Beside(nn.Module):
    """Results of several bodies side by side, after x itself or a half of it that they do not see, then shuffled."""

    def __init__(self, bodies: Sequence[nn.Module], has_input: bool, is_split: bool) -> None:
        super().__init__()
        self.bodies = nn.ModuleList(bodies)
        self.has_input = has_input
        self.is_split = is_split

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept, seen = x.chunk(2, 1) if self.is_split else (x, x)
        results = [body(seen) for body in self.bodies]
        y = torch.cat([kept, *results] if self.has_input else results, 1)
        if not self.is_split:
            return y
        batch, width, height, columns = y.shape
        return y.view(batch, 2, width // 2, height, columns).transpose(1, 2).contiguous().view(y.shape)


def _kernels_and_pool(width_in: int, width: int) -> Beside:
    """Return kernels of several sizes and a pool side by side."""
    three = nn.Sequential(conv_norm(width_in, width, 1), conv_norm(width, width * 3 // 2, 3))
    five = nn.Sequential(conv_norm(width_in, width // 2, 1), conv_norm(width // 2, width, 5))
    pool = nn.Sequential(nn.MaxPool2d(3, 1, 1), conv_norm(width_in, width // 2, 1))
    return Beside([conv_norm(width_in, width, 1), three, five, pool], has_input=False, is_split=False)


class Attention(nn.Module):
    """Self-attention over tokens: one kernel, or (`is_apart`) as matrix products and a softmax."""

    def __init__(self, width: int, heads: int, is_joint: bool, is_apart: bool, is_causal: bool = False) -> None:
        super().__init__()
        self.heads = heads
        self.is_apart = is_apart
        self.is_causal = is_causal
        names = ["qkv"] if is_joint else ["q", "k", "v"]
        self.projections = nn.ModuleList(nn.Linear(width, width * 3 // len(names)) for _ in names)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> Any:
        batch, length, width = x.shape
        if len(self.projections) == 1:
            joint = self.projections[0](x).reshape(batch, length, 3, self.heads, width // self.heads)
            q, k, v = joint.permute(2, 0, 3, 1, 4).unbind(0)
        else:
            split = [p(x).view(batch, length, self.heads, width // self.heads) for p in self.projections]
            q, k, v = (item.transpose(1, 2) for item in split)
        if self.is_apart:
            mixed = ((q * (width // self.heads) ** -0.5) @ k.transpose(-2, -1)).softmax(-1) @ v
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Encoder(nn.Module):
    """A transformer layer, norm first or last, with GELU, tanh-GELU or a gated SiLU inside."""

    def __init__(self, width: int, attention: nn.Module, hidden: int, mlp: str, is_norm_first: bool) -> None:
        super().__init__()
        self.attention = attention
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.is_norm_first = is_norm_first
        self.gate = nn.Linear(width, hidden, bias=False) if mlp == "gated" else None
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)
        self.act: nn.Module = nn.SiLU() if mlp == "gated" else nn.GELU("tanh" if mlp == "tanh" else "none")

    def mix(self, x: torch.Tensor) -> Any:
        if self.gate is None:
            return self.down(self.act(self.up(x)))
        return self.down(self.act(self.gate(x)) * self.up(x))

    def forward(self, x: torch.Tensor) -> Any:
        if self.is_norm_first:
            x = x + self.attention(self.norms[0](x))
            return x + self.mix(self.norms[1](x))
        x = self.norms[0](x + self.attention(x))
        return self.norms[1](x + self.mix(x))


class Windows(nn.Module):
    """Attention inside windows of an image with channels last, shifted or not, with a bias per pair of places."""

    def __init__(self, width: int, heads: int, window: int, shift: int) -> None:
        super().__init__()
        self.heads, self.window, self.shift = heads, window, shift
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.bias = nn.Parameter(torch.zeros(heads, window**2, window**2))

    def forward(self, x: torch.Tensor) -> Any:
        batch, height, breadth, width = x.shape
        w = self.window
        if self.shift:
            x = torch.roll(x, (-self.shift, -self.shift), (1, 2))
        x = x.view(batch, height // w, w, breadth // w, w, width).permute(0, 1, 3, 2, 4, 5).reshape(-1, w * w, width)
        q, k, v = self.qkv(x).reshape(-1, w * w, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        weights = (q * (width // self.heads) ** -0.5).matmul(k.transpose(-2, -1)) + self.bias.unsqueeze(0)
        x = F.softmax(weights, dim=-1).matmul(v).transpose(1, 2).reshape(-1, w * w, width)
        x = self.out(x).view(batch, height // w, breadth // w, w, w, width).permute(0, 1, 3, 2, 4, 5)
        x = x.reshape(batch, height, breadth, width)
        return torch.roll(x, (self.shift, self.shift), (1, 2)) if self.shift else x


class LastNorm(nn.Module):
    """Depthwise 7x7, then norm and two linears with channels last; scaled and added."""

    def __init__(self, width: int, is_permuted: bool) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.full((width, 1, 1), 0.1))
        self.is_permuted = is_permuted

    def forward(self, x: torch.Tensor) -> Any:
        y = self.depthwise(x).permute(0, 2, 3, 1)
        y = torch.permute(self.down(F.gelu(self.up(self.norm(y)))), (0, 3, 1, 2))
        return x + self.scale * y if self.is_permuted else self.scale * y.contiguous() + x


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
            # With equal outer widths, the number is channels per group; otherwise the number of groups.
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
    """Return a mobile network. Stages are (expansion, width, depth, stride, kernel)."""
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

    def forward(self, x: torch.Tensor) -> Any:
        x = self.stem(x)
        for stage, shrink in zip(self.stages, self.shrinks, strict=True):
            parts = [x]
            for layer in stage:  # type: ignore[attr-defined]
                parts.append(layer(parts))
            x = shrink(torch.cat(parts, 1))
        return self.head(F.adaptive_avg_pool2d(F.relu(x, inplace=True), (1, 1)).flatten(1))


def branches(stem: int, widths: list[int]) -> nn.Module:
    layers: list[nn.Module] = [_stem(stem), conv_norm(stem, stem * 3, 3), nn.MaxPool2d(3, 2, ceil_mode=True)]
    before = stem * 3
    for index, width in enumerate(widths):
        layers.append(_kernels_and_pool(before, width))
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

    def forward(self, ids: torch.Tensor) -> Any:
        x = self.norm(self.words(ids) + self.places(torch.arange(ids.shape[1])))
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


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

    def forward(self, x: torch.Tensor) -> Any:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.places
        return self.head(self.norm(self.layers(x))[:, 0])


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

    def forward(self, x: torch.Tensor) -> Any:
        x = self.norm(self.patch(x).permute(0, 2, 3, 1))
        for stage, merge in zip(self.stages, self.merges, strict=True):
            x = stage(x)
            corners = [x[:, i::2, j::2, :] for j in (0, 1) for i in (0, 1)]
            x = merge(torch.cat(corners, -1))
        return self.head(x.mean((1, 2)))


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

    def forward(self, x: torch.Tensor) -> Any:
        x = self.stem(x)
        for index, (norm, stage) in enumerate(zip(self.norms, self.stages, strict=True)):
            x = norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
            x = stage(x)
            if index < len(self.shrinks):
                x = self.shrinks[index](x)
        return self.head(x)


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

    def forward(self, x: torch.Tensor) -> Any:
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
        return self.last(x)


class Recurrent(nn.Module):
    """Tokens through a recurrent stack; the last state decides."""

    def __init__(self, kind: Any, width: int, hidden: int, layers: int, is_bidirectional: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.body = kind(width, hidden, layers, batch_first=True, bidirectional=is_bidirectional)
        self.head = nn.Linear(hidden * (2 if is_bidirectional else 1), 32)

    def forward(self, ids: torch.Tensor) -> Any:
        states, _ = self.body(self.words(ids))
        return self.head(states[:, -1])


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

# Nets of the self-check: no sample is taken of them, and their sizes are not those of the reference models.
CHECKS: tuple[Reference, ...] = (
    Reference("check-residual", "residual", lambda: residual([48, 104, 208, 416], [1, 2, 2, 1]), _image(192), (1, 8)),
    Reference(
        "check-mobile", "mobile",
        lambda: mobile(24, [(1, 16, 1, 1, 3), (5, 32, 2, 2, 3), (4, 56, 2, 2, 5), (6, 104, 2, 2, 3), (5, 184, 2, 2, 5)],
                       nn.SiLU, True, 960), _image(208), (1, 8),
    ),
    Reference("check-text", "transformer", lambda: Text(448, 7, 3, 1792, "none", False), _tokens(80), (1, 8)),
    Reference("check-last-norm", "last-norm", lambda: LastNet([72, 144, 288, 576], [1, 1, 2, 1], True),
              _image(224), (1, 8)),
    Reference("check-patches", "transformer", lambda: Patches(208, 16, 384, 6, 3, False, "none"), _image(208), (1, 8)),
    Reference("check-bottleneck", "residual", lambda: residual([64, 120, 240], [1, 2, 2], 4), _image(208), (1, 8)),
    Reference("check-dense", "dense", lambda: DenseNet(24, [3, 5, 6, 5]), _image(208), (1, 8)),
    Reference("check-plain", "plain", lambda: plain([48, 96, 176, 288], False, 1024), _image(160), (1, 8)),
    Reference("check-shifted", "windows", lambda: Shifted(64, [1, 2, 3], 7), _image(224), (1, 8)),
    Reference("check-branches", "branches", lambda: branches(48, [56, 104, 136, 176]), _image(208), (1, 8)),
)  # fmt: skip
