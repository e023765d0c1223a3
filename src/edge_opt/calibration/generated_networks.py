"""Small graphs drawn at random, in whose layers a runtime's kernels are timed."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from edge_opt.calibration.operator_draws import Draw
from edge_opt.calibration.reference_networks import Attention, Beside, Encoder, Excite, Reference, conv_norm

_MOST_MACS = 120_000_000  # of one layer
_LAYERS = 9
_BATCHES = (1, 4)
_ACTIVATIONS: tuple[type[nn.Module] | None, ...] = (
    nn.ReLU, nn.ReLU, nn.ReLU, nn.ReLU6, nn.SiLU, nn.Hardswish, nn.LeakyReLU, None, None
)  # fmt: skip


class Sum(nn.Module):
    """x + f(x)."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + self.body(x)
        return result


def generated_networks(count: int, seed: int = 0) -> Iterator[Reference]:
    """Yield small networks of random layers: two of three of convolutions, the others of tokens."""
    for number in range(count):
        draw = Draw(1000 * seed + number)
        layers, shape = _tokens(draw) if number % 3 == 2 else _images(draw)
        net = nn.Sequential(*layers)
        yield Reference(
            f"generated-{number}", "generated", lambda net=net: net,  # type: ignore[misc]
            lambda batch, shape=shape: torch.randn(batch, *shape), _BATCHES,  # type: ignore[misc]
        )  # fmt: skip


def _images(draw: Draw) -> tuple[list[nn.Module], tuple[int, ...]]:
    side, width = draw.of(56, 56, 28, 28, 14, 112), draw.width(16, 96)
    shape = (3, side, side)
    layers: list[nn.Module] = [conv_norm(3, width)]
    for _ in range(_LAYERS):
        act = draw.of(*_ACTIVATIONS)
        kind = draw.of(*"plain point depthwise".split() * 3, *"grouped excite pool beside beside".split())
        kernel, stride = draw.of(3, 3, 3, 5, 7), draw.of(1, 1, 1, 2) if side > 8 else 1
        if kind == "excite":
            layers.append(Excite(width, max(8, width // draw.of(4, 8, 16)), torch.sigmoid, draw.chance(0.5)))
            continue
        if kind == "beside":
            body, width = _beside(draw, width, act)
            layers.append(body)
            continue
        if kind == "pool":
            layers.append(draw.of(nn.MaxPool2d(3, stride, 1), nn.AvgPool2d(3, stride, 1)))
        elif kind == "depthwise":
            layers.append(conv_norm(width, width, kernel, stride, width, act))
        else:
            groups = draw.of(2, 4, 8) if kind == "grouped" and width % 8 == 0 else 1
            kernel = 1 if kind == "point" else kernel if groups == 1 else 3
            out = width if groups > 1 else draw.width(16, 512)
            while out > 8 and side**2 * width * out * kernel**2 > _MOST_MACS * stride**2 * groups:
                out //= 2
            body = conv_norm(width, out, kernel, stride, groups if out == width else 1, act)
            layers.append(Sum(body) if out == width and stride == 1 else body)
            width = out
        side = -(-side // stride)
    return [*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(1), nn.Linear(width, draw.width(32, 1000))], shape


def _beside(draw: Draw, width: int, act: type[nn.Module] | None) -> tuple[nn.Module, int]:
    """Return branches, a growing or a shuffled layer as others concatenate them, and its width."""
    kind, growth = draw.of("branches", "dense", "ghost", "shuffled"), draw.of(8, 12, 16, 16, 24, 32, 32, 64)
    if kind == "shuffled" and width % 4 == 0:
        half = width // 2
        body = nn.Sequential(conv_norm(half, half, 1, act=act), conv_norm(half, half, 3, 1, half, None))
        return Beside([body], has_input=True, is_split=True), width
    if kind == "dense":
        norm = nn.Sequential(nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, growth, 3, padding=1))
        return Beside([norm], has_input=True, is_split=False), width + growth
    if kind == "ghost":
        return Beside([conv_norm(width, width, 3, 1, width, act)], has_input=True, is_split=False), 2 * width
    widths = [growth, draw.of(16, 24, 32, 64)]
    bodies = [conv_norm(width, out, kernel, act=act) for out, kernel in zip(widths, (1, 3), strict=True)]
    return Beside(bodies, has_input=False, is_split=False), sum(widths)


def _tokens(draw: Draw) -> tuple[list[nn.Module], tuple[int, ...]]:
    heads, length = draw.of(3, 4, 6, 8, 12), draw.of(49, 64, 128, 196, 197)
    width = heads * draw.of(32, 48, 64)
    layers: list[nn.Module] = []
    for _ in range(4):
        kind = draw.of("encoder", "linear", "linear", "norm", "attention")
        attention = Attention(width, heads, draw.chance(0.5), draw.chance(0.4))
        inner, act = draw.width(64, 2048), draw.of(nn.GELU, nn.ReLU, nn.SiLU, nn.Tanh)
        if kind == "encoder":
            layers.append(Encoder(width, attention, 2 * width, draw.of("none", "tanh"), draw.chance(0.7)))
        elif kind == "linear":
            layers.append(Sum(nn.Sequential(nn.Linear(width, inner), act(), nn.Linear(inner, width))))
        else:
            layers.append(Sum(attention) if kind == "attention" else nn.LayerNorm(width))
    return layers, (length, width)
