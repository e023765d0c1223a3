"""Small graphs drawn at random, in whose layers a runtime's kernels are timed."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from edge_opt.calibration.operator_draws import Draw
from edge_opt.calibration.reference_networks import Attention, Encoder, Excite, Reference, conv_norm

_MOST_MACS = 120_000_000  # of one layer
_LAYERS = 9
_BATCHES = (1, 4)
_ACTIVATIONS: tuple[type[nn.Module] | None, ...] = (
    nn.ReLU, nn.ReLU, nn.ReLU, nn.ReLU6, nn.SiLU, nn.Hardswish, nn.GELU, nn.LeakyReLU, None, None,
)  # fmt: skip


class _Act(nn.Module):
    """An activation that takes `inplace` whether it knows it or not."""

    def __init__(self, kind: type[nn.Module], inplace: bool = False) -> None:
        super().__init__()
        self.act = kind() if kind is nn.GELU else kind(inplace=inplace)  # type: ignore[call-arg]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.act(x)
        return result


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
        if number % 3 == 2:
            yield _tokens(draw, number)
        else:
            yield _images(draw, number)


def _images(draw: Draw, number: int) -> Reference:
    side, width = draw.of(56, 56, 28, 28, 14, 112), draw.width(16, 96)
    first = side
    layers: list[nn.Module] = [conv_norm(3, width, 3, 1)]
    for _ in range(_LAYERS):
        chosen = draw.of(*_ACTIVATIONS)
        act = None if chosen is None else (lambda inplace, kind=chosen: _Act(kind, inplace))
        kind = draw.of("plain", "plain", "plain", "point", "point", "point", "depthwise", "depthwise", "grouped",
                       "excite", "pool")  # fmt: skip
        kernel, stride = draw.of(3, 3, 3, 5, 7), draw.of(1, 1, 1, 2) if side > 8 else 1
        if kind == "excite":
            layers.append(Excite(width, max(8, width // draw.of(4, 8, 16)), torch.sigmoid, draw.chance(0.5)))
        elif kind == "pool" and side > 8:
            layers.append(draw.of(nn.MaxPool2d(3, 2, 1), nn.AvgPool2d(2, 2), nn.MaxPool2d(2, 2)))
            side = (
                (side + 1) // 2 if isinstance(layers[-1], nn.MaxPool2d) and layers[-1].kernel_size == 3 else side // 2
            )
        elif kind == "depthwise":
            layers.append(conv_norm(width, width, kernel, stride, width, act))  # type: ignore[arg-type]
            side = -(-side // stride)
        elif kind == "grouped" and width % 8 == 0:
            body = conv_norm(width, width, 3, 1, draw.of(2, 4, 8), act)  # type: ignore[arg-type]
            layers.append(Sum(body) if draw.chance(0.3) else body)
        else:
            kernel = 1 if kind == "point" else kernel
            out = draw.width(16, 512)
            while side**2 * width * out * kernel**2 > _MOST_MACS * stride**2:
                out = max(8, out // 2)
                kernel = kernel if out > 8 else 1
                if out == 8 and kernel == 1:
                    break
            body = conv_norm(width, out, kernel, stride, 1, act)  # type: ignore[arg-type]
            layers.append(Sum(body) if out == width and stride == 1 else body)
            width, side = out, -(-side // stride)
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(1), nn.Linear(width, draw.width(32, 1000))]
    return Reference(
        f"images-{number}", "generated", lambda: nn.Sequential(*layers),
        lambda batch: torch.randn(batch, 3, first, first), _BATCHES,
    )  # fmt: skip


def _tokens(draw: Draw, number: int) -> Reference:
    heads, length = draw.of(3, 4, 6, 8, 12), draw.of(49, 64, 128, 196, 197)
    width = heads * draw.of(32, 48, 64)
    first = width
    layers: list[nn.Module] = []
    for _ in range(4):
        kind = draw.of("encoder", "linear", "linear", "norm", "attention")
        if kind == "encoder":
            attention = Attention(width, heads, draw.chance(0.5), draw.chance(0.3))
            layers.append(Encoder(width, attention, draw.of(2, 4) * width, draw.of("none", "tanh"), draw.chance(0.7)))
        elif kind == "attention":
            layers.append(Sum(Attention(width, heads, draw.chance(0.5), draw.chance(0.5))))
        elif kind == "norm":
            layers.append(nn.LayerNorm(width))
        else:
            inner = draw.width(64, 2048)
            act = draw.of(nn.GELU, nn.ReLU, nn.SiLU, nn.Tanh)
            layers.append(Sum(nn.Sequential(nn.Linear(width, inner), act(), nn.Linear(inner, width))))
    return Reference(
        f"tokens-{number}", "generated", lambda: nn.Sequential(*layers),
        lambda batch: torch.randn(batch, length, first), _BATCHES,
    )  # fmt: skip
