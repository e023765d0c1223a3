"""Single layers and functions under each convention, against the packages themselves."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from peers import PEERS, Case, agree


class Function(nn.Module):
    """A model that is one function of its input."""

    def __init__(self, function: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x)


class SelfAttention(nn.Module):
    def __init__(self, need_weights: bool, has_mask: bool = False, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, **options)
        self.need_weights = need_weights
        self.has_mask = has_mask

    def forward(self, x: torch.Tensor) -> Any:
        length = x.shape[1] if self.attention.batch_first else x.shape[0]
        mask = torch.zeros(length, length, device=x.device) if self.has_mask else None
        return self.attention(x, x, x, need_weights=self.need_weights, attn_mask=mask)[0]


class CrossAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.keys, self.values = nn.Linear(8, 6), nn.Linear(8, 4)
        self.attention = nn.MultiheadAttention(8, 2, kdim=6, vdim=4)

    def forward(self, x: torch.Tensor) -> Any:
        return self.attention(x[:3], self.keys(x), self.values(x))[0]


class Mixed(nn.Module):
    """Functional and modular work in one model: product by `matmul`, attention, a recurrent layer, pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.norm = nn.GroupNorm(2, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.layer_norm = nn.LayerNorm(8)
        self.recurrent = nn.GRU(8, 5, batch_first=True)
        self.weight = nn.Parameter(torch.randn(7, 5))
        self.head = nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm(self.stem(x)))
        x = F.interpolate(F.max_pool2d(x, 2), scale_factor=2, mode="bilinear").flatten(2).transpose(1, 2)
        x = self.layer_norm(x + self.attention(x, x, x, need_weights=False)[0])
        x = torch.matmul(F.softmax(torch.matmul(x, x.transpose(1, 2)), dim=-1), x)
        x = F.linear(self.recurrent(x)[0], self.weight)
        gram = torch.bmm(x, x.transpose(1, 2))
        out: torch.Tensor = self.head(F.gelu(torch.bmm(gram, x)).mean(1))
        return out


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.Transformer(8, 2, 1, 1, 16, batch_first=True)

    def forward(self, x: torch.Tensor) -> Any:
        return self.transformer(x, x)


def namesake(name: str, *layers: nn.Module) -> nn.Module:
    """A class that is called as one of torch's and is none."""
    made: nn.Module = type(name, (nn.Sequential,), {})(*layers)
    return made


def sequence(*layers: nn.Module) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*layers)


def function(body: Callable[[torch.Tensor], Any]) -> Callable[[], nn.Module]:
    return lambda: Function(body)


SQUARES = (2, 3, 37, 41)
ACTIVATIONS = "ReLU ReLU6 Hardswish Sigmoid Tanh SiLU GELU ELU PReLU LeakyReLU SELU Mish Softmax2d LogSigmoid".split()

LAYERS: dict[str, Case] = {
    "mixed": (Mixed, (2, 3, 16, 16)),
    "transformer": (Transformer, (2, 5, 8)),
    "encoder": (lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (2, 5, 8)),
    "attention": (lambda: SelfAttention(False, batch_first=True), (3, 5, 8)),
    "attention weights": (lambda: SelfAttention(True, bias=False), (5, 3, 8)),
    "attention masked": (lambda: SelfAttention(True, True, batch_first=True), (3, 5, 8)),
    "attention extra keys": (lambda: SelfAttention(True, add_bias_kv=True, add_zero_attn=True), (5, 3, 8)),
    "attention unbatched": (lambda: SelfAttention(False), (5, 8)),
    "cross attention": (CrossAttention, (5, 1, 8)),
    "lstm": (lambda: nn.LSTM(4, 6, 2, bidirectional=True), (5, 3, 4)),
    "lstm projected": (lambda: nn.LSTM(4, 6, 2, proj_size=3, bias=False), (5, 3, 4)),
    "gru": (lambda: nn.GRU(4, 6, 2, bidirectional=True, batch_first=True), (5, 3, 4)),
    "rnn": (lambda: nn.RNN(4, 6), (5, 3, 4)),
    "lstm cell": (lambda: nn.LSTMCell(4, 6), (5, 4)),
    "gru cell": (lambda: nn.GRUCell(4, 6, bias=False), (5, 4)),
    "convolutions": (
        sequence(nn.Conv2d(4, 6, 3, groups=2, padding=1), nn.Conv2d(6, 6, 3, padding=1, padding_mode="circular")),
        (2, 4, 5, 5),
    ),
    "padding by name": (sequence(nn.Conv2d(4, 6, 3, padding="same"), nn.Conv2d(6, 2, 1)), (2, 4, 5, 5)),
    "convolution unbatched": (sequence(nn.Conv2d(4, 6, 3)), (4, 9, 9)),
    "transposed": (
        sequence(nn.ConvTranspose2d(4, 6, 3, 2, groups=2), nn.ConvTranspose2d(6, 2, 2, bias=False)), (2, 4, 5, 5)
    ),
    "one dimension": (sequence(nn.Conv1d(4, 6, 3), nn.ConvTranspose1d(6, 4, 3), nn.AvgPool1d(2, padding=1)), (2, 4, 9)),
    "three dimensions": (
        sequence(nn.Conv3d(2, 3, 3, padding=1), nn.AvgPool3d(2), nn.MaxPool3d(2, 1), nn.AdaptiveAvgPool3d((1, 2, 1))),
        (2, 2, 7, 8, 7),
    ),
    "embedding": (sequence(nn.Embedding(10, 4), nn.Linear(4, 4)), torch.arange(6).view(2, 3)),
    "embedding bag": (sequence(nn.EmbeddingBag(10, 4), nn.Linear(4, 4)), torch.arange(6).view(2, 3)),
    "namesakes": (
        sequence(
            namesake("Upsample", nn.Upsample(scale_factor=2), nn.Conv2d(3, 3, 3)), namesake("ReLU"),
            namesake("MultiheadAttention", nn.Linear(6, 6)), namesake("Attention", nn.Linear(6, 6)),
            namesake("LayerNorm", nn.LayerNorm(6)),
        ),
        (2, 3, 4, 4),
    ),
    "linears": (sequence(nn.Linear(4, 5), nn.Linear(5, 6, bias=False)), (2, 3, 4)),
    "norms": (
        sequence(
            nn.BatchNorm2d(4), nn.BatchNorm2d(4, affine=False), nn.InstanceNorm2d(4), nn.InstanceNorm2d(4, affine=True),
            nn.GroupNorm(2, 4), nn.LayerNorm(5), nn.LayerNorm(5, elementwise_affine=False), nn.RMSNorm(5),
            nn.LocalResponseNorm(2),
        ),
        (2, 4, 5, 5),
    ),
    "activations": (sequence(*(getattr(nn, name)() for name in ACTIVATIONS)), (2, 3, 4, 4)),
    "softmax": (sequence(nn.Softmax(-1), nn.Softmin(1), nn.LogSoftmax(2)), (2, 3, 4, 4)),
    "pooling": (
        sequence(
            nn.MaxPool2d(3, 1, 1), nn.AvgPool2d(3, 1, 1, count_include_pad=False),
            nn.AvgPool2d(2, 1, 1, ceil_mode=True), nn.AdaptiveAvgPool2d(3), nn.AdaptiveMaxPool2d((2, 1)),
        ),
        (2, 3, 7, 7),
    ),
    "interpolation": (
        sequence(
            nn.Upsample(scale_factor=2, mode="bilinear"), nn.Upsample(size=(9, 9)), nn.UpsamplingNearest2d(size=5),
            nn.Upsample(scale_factor=1.5, mode="nearest"), nn.UpsamplingBilinear2d(scale_factor=2),
            nn.Upsample(scale_factor=2, mode="bicubic"), nn.Upsample(scale_factor=2, mode="nearest-exact"),
        ),
        (2, 3, 4, 4),
    ),
    "pooling with indices": (lambda: nn.MaxPool2d(2, return_indices=True), (2, 3, 8, 8)),
    "functional": (
        function(lambda x: F.relu6(F.silu(F.elu(F.adaptive_avg_pool2d(F.avg_pool2d(F.relu(x), 2), 5))))), SQUARES
    ),
    "matmul": (function(lambda x: torch.matmul(x, x.transpose(-1, -2))), SQUARES),
    "matmul broadcast": (function(lambda x: torch.matmul(x[0, 0], x.transpose(-1, -2))), SQUARES),
    "matrix and vector": (function(lambda x: torch.matmul(x[0, 0], x[0, 0, 0])), SQUARES),
    "bmm and baddbmm": (function(lambda x: torch.baddbmm(x[0, :, :, :1], x[0], torch.bmm(x[0].mT, x[0]))), SQUARES),
    "einsum": (function(lambda x: torch.einsum("bhid,bhjd->bhij", x, x)), SQUARES),
    "einsum known": (function(lambda x: torch.einsum("nij,nik->njk", x[0], x[0])), SQUARES),
    "sdpa": (function(lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True)), SQUARES),
    "sdpa unbatched": (function(lambda x: F.scaled_dot_product_attention(x[0], x[0], x[0])), SQUARES),
    "functional linear and conv": (function(lambda x: F.conv2d(F.linear(x, x[0, 0]), x[:, :, :3, :3])), SQUARES),
}  # fmt: skip

LEFT_OUT = {
    ("attention unbatched", "ptflops"): "ptflops reads a third axis, and gives up",
    ("einsum", "ptflops"): "ptflops sees no einsum, which is a product in a trace",
    ("einsum known", "ptflops"): "ptflops sees no einsum, which is a product in a trace",
    ("einsum", "fvcore"): "fvcore reads the count of an einsum from a text of four digits",
    ("matmul broadcast", "fvcore"): "fvcore leaves out a batch that only the right operand has",
    ("matmul broadcast", "ptflops"): "ptflops leaves out a batch that only the right operand has",
    ("matrix and vector", "fvcore"): "fvcore reads the second axis of the vector, and raises IndexError",
}


@pytest.mark.parametrize(("name", "tool"), [pair for pair in product(LAYERS, PEERS) if pair not in LEFT_OUT])
def test_layers_count_as_their_tool_counts_them(name: str, tool: str) -> None:
    agree(LAYERS[name], tool)
