"""Building blocks of the reference models: the usual ways in which operators follow each other."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn


def conv_norm(
    width_in: int, width: int, kernel: int = 3, stride: int = 1, groups: int = 1, act: type[nn.Module] | None = nn.ReLU
) -> nn.Sequential:
    """Convolution, batch norm and, unless None, an activation in place."""
    conv = nn.Conv2d(width_in, width, kernel, stride, kernel // 2, groups=groups, bias=False)
    layers: list[nn.Module] = [conv, nn.BatchNorm2d(width)]
    return nn.Sequential(*layers, *([] if act is None else [_made(act)]))


def _made(act: type[nn.Module]) -> nn.Module:
    # nn.GELU has no in-place form.
    return act() if act is nn.GELU else act(inplace=True)


class Residual(nn.Module):
    """x + f(x), then ReLU; with a projection where shapes differ."""

    def __init__(self, width_in: int, width: int, inner: int | None, stride: int = 1, groups: int = 1) -> None:
        super().__init__()
        if inner is None:
            self.body = nn.Sequential(
                conv_norm(width_in, width, 3, stride, groups), conv_norm(width, width, 3, 1, groups, None)
            )
        else:
            self.body = nn.Sequential(
                conv_norm(width_in, inner, 1), conv_norm(inner, inner, 3, stride, groups),
                conv_norm(inner, width, 1, act=None),
            )  # fmt: skip
        is_same = stride == 1 and width_in == width
        self.skip = None if is_same else conv_norm(width_in, width, 1, stride, act=None)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.body(x)
        out += x if self.skip is None else self.skip(x)
        result: torch.Tensor = self.act(out)
        return result


class Excite(nn.Module):
    """Squeeze and excitation: channels scaled by what their means say."""

    def __init__(self, width: int, inner: int, gate: Callable[[torch.Tensor], torch.Tensor], is_pooled: bool) -> None:
        super().__init__()
        self.down = nn.Conv2d(width, inner, 1)
        self.up = nn.Conv2d(inner, width, 1)
        self.gate = gate
        self.is_pooled = is_pooled

    def forward(self, x: torch.Tensor) -> torch.Tensor:
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
            parts.append(Excite(inner, max(8, inner // 16 * 4 // 4), gate, is_pooled=act is nn.Hardswish))
        parts.append(conv_norm(inner, width, 1, act=None))
        self.body = nn.Sequential(*parts)
        self.is_same = stride == 1 and width_in == width

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.body(x)
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

    def forward(self, parts: list[torch.Tensor]) -> torch.Tensor:
        out: torch.Tensor = self.body(torch.cat(parts, 1))
        return out


class Branches(nn.Module):
    """Kernels of several sizes and a pool side by side, concatenated."""

    def __init__(self, width_in: int, width: int) -> None:
        super().__init__()
        self.one = conv_norm(width_in, width, 1)
        self.three = nn.Sequential(conv_norm(width_in, width, 1), conv_norm(width, width * 3 // 2, 3))
        self.five = nn.Sequential(conv_norm(width_in, width // 2, 1), conv_norm(width // 2, width, 5))
        self.pool = nn.Sequential(nn.MaxPool2d(3, 1, 1), conv_norm(width_in, width // 2, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.one(x), self.three(x), self.five(x), self.pool(x)], 1)


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

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        if len(self.projections) == 1:
            joint = self.projections[0](x).reshape(batch, length, 3, self.heads, width // self.heads)
            q, k, v = joint.permute(2, 0, 3, 1, 4).unbind(0)
        else:
            split = [p(x).view(batch, length, self.heads, width // self.heads) for p in self.projections]
            q, k, v = (item.transpose(1, 2) for item in split)
        if self.is_apart:
            weights = ((q * (width // self.heads) ** -0.5) @ k.transpose(-2, -1)).softmax(-1)
            mixed = weights @ v
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal)
        result: torch.Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return result


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

    def mix(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x) if self.gate is None else self.act(self.gate(x)) * self.up(x)
        result: torch.Tensor = self.down(self.act(hidden) if self.gate is None else hidden)
        return result

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_norm_first:
            x = x + self.attention(self.norms[0](x))
            return x + self.mix(self.norms[1](x))
        x = self.norms[0](x + self.attention(x))
        result: torch.Tensor = self.norms[1](x + self.mix(x))
        return result


class Windows(nn.Module):
    """Attention inside windows of an image with channels last, shifted or not, with a bias per pair of places."""

    def __init__(self, width: int, heads: int, window: int, shift: int) -> None:
        super().__init__()
        self.heads, self.window, self.shift = heads, window, shift
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.bias = nn.Parameter(torch.zeros(heads, window**2, window**2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
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

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.depthwise(x).permute(0, 2, 3, 1)
        y = torch.permute(self.down(F.gelu(self.up(self.norm(y)))), (0, 3, 1, 2))
        return x + self.scale * y if self.is_permuted else self.scale * y.contiguous() + x
