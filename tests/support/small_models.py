"""A hundred small models of all kinds, each with an input: for tests over many."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

Rows = dict[str, Callable[[], tuple[nn.Module, tuple[Any, ...]]]]
ROW, IMAGE, SERIES, VOLUME, IDS = (2, 8), (1, 4, 8, 8), (1, 4, 16), (1, 4, 4, 8, 8), ((2, 6), "int64")


class Calls(nn.Module):
    """A layer, and a function of its output."""

    def __init__(self, layer: nn.Module, function: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.function = layer, function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self.layer(x))


class Attention(nn.Module):
    """Self-attention, with positions that forward writes to a table of its own, as ConViT's."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.qkv, self.position, self.causal = nn.Linear(8, 24), nn.Linear(3, 1), causal
        self.table = torch.zeros(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        count = x.shape[1]
        if self.table.shape[0] != count:
            table = torch.zeros(count, count, 3)
            steps = torch.arange(count, dtype=torch.float32).view(1, -1) - torch.arange(count).view(-1, 1)
            table[:, :, 0], table[:, :, 1] = steps, steps**2
            self.table = table.to(x.device)
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.transpose(-2, -1) + self.position(self.table).squeeze(-1)
        if self.causal:
            scores = scores.masked_fill(torch.ones(count, count).triu(1).bool().to(x.device), float("-inf"))
        mixed: torch.Tensor = scores.softmax(-1) @ v
        return mixed


class Dense(nn.Module):
    """Layers that get everything before them."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(4 + 2 * index, 2, 3, padding=1) for index in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.cat([x, torch.relu(layer(x))], 1)
        return x


class Looks(nn.Module):
    """Reads a value and branches."""

    def __init__(self, least: float) -> None:
        super().__init__()
        self.linear, self.least = nn.Linear(8, 8), least

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x)
        return y * 2 if y.mean().item() > self.least else y[:, : int((y > 0).sum(-1).max())]


class First(nn.Module):
    """The first output of a layer that has several."""

    def __init__(self, layer: nn.Module, repeats: int = 1) -> None:
        super().__init__()
        self.layer, self.repeats = layer, repeats

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layer(*[x] * self.repeats)[0]
        return output


FUNCTIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    **{name: getattr(F, name) for name in (
        "relu gelu silu mish hardswish hardsigmoid softplus elu selu celu leaky_relu relu6 logsigmoid tanhshrink "
        "softsign glu normalize"
    ).split()},
    **{name: getattr(torch, name) for name in "sigmoid tanh exp erf sort unique std var_mean median svd".split()},
    "cumsum": lambda x: x.cumsum(1),
    "logsumexp": lambda x: x.logsumexp(1),
    "topk": lambda x: x.topk(3),
    "cdist": lambda x: torch.cdist(x, x),
    "fft": lambda x: torch.fft.rfft(x).abs(),
    "inverse": lambda x: torch.linalg.inv(x @ x.T + torch.eye(2)),
    "einsum": lambda x: torch.einsum("bi,bj->bij", x, x),
    "gather": lambda x: x.gather(1, torch.zeros(2, 3, dtype=torch.int64)),
    "index_add": lambda x: torch.zeros(4, 8).index_add(0, torch.tensor([1, 3]), x),
    "where": lambda x: torch.where(x > 0, x, x.abs().sqrt()),
    "in_place": lambda x: x.relu_().mul_(2).add_(1),
    "roll": lambda x: x.roll(1, 1).flip(0),
    "outer_softmax": lambda x: (x[:, :, None] * x[:, None]).softmax(-1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "views": lambda x: x.view(2, 2, 4).transpose(1, 2).reshape(4, 4).T,
    "linspace": lambda x: x * torch.linspace(0, 1, 8).to(x.device),
    "meshgrid": lambda x: x[:1, :4] + torch.stack(torch.meshgrid(torch.arange(4), torch.arange(4), indexing="ij"))[0],
    "chunks": lambda x: sum(part.mean() for part in x.chunk(4, 1)),
    "half": lambda x: (x.half() + 1).float(),
    "vmap": lambda x: torch.vmap(lambda row: row * row.sum())(x),
}  # fmt: skip
IMAGE_LAYERS: dict[str, Callable[[], nn.Module]] = {
    "conv": lambda: nn.Conv2d(4, 6, 3, padding=1),
    "depthwise": lambda: nn.Conv2d(4, 4, 3, groups=4, bias=False),
    "dilated": lambda: nn.Conv2d(4, 4, 3, dilation=2, stride=2),
    "transposed": lambda: nn.ConvTranspose2d(4, 2, 3, stride=2),
    "batch_norm": lambda: nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU(inplace=True)),
    "group_norm": lambda: nn.GroupNorm(2, 4),
    "instance_norm": lambda: nn.InstanceNorm2d(4, affine=True),
    "max_pool": lambda: nn.MaxPool2d(2),
    "max_pool_indices": lambda: nn.MaxPool2d(2, return_indices=True),
    "average_pool": lambda: nn.AvgPool2d(3, stride=2, padding=1),
    "adaptive_pool": lambda: nn.AdaptiveAvgPool2d(1),
    "upsample": lambda: nn.Upsample(scale_factor=2),
    "bilinear_upsample": lambda: nn.Upsample(scale_factor=2, mode="bilinear"),
    "pixel_shuffle": lambda: nn.PixelShuffle(2),
    "unfold": lambda: nn.Unfold(3),
    "reflection": lambda: nn.ReflectionPad2d(1),
    "dropout": lambda: nn.Dropout2d(0.5),
    "lp_pool": lambda: nn.LPPool2d(2, 2),
    "local_response": lambda: nn.LocalResponseNorm(2),
    "shuffle": lambda: nn.ChannelShuffle(2),
    "dense_2": lambda: Dense(2),
    "dense_4": lambda: Dense(4),
    "squeeze": lambda: Calls(nn.Conv2d(4, 4, 1), lambda x: x * x.mean((2, 3), keepdim=True).sigmoid()),
    "residual": lambda: Calls(nn.Conv2d(4, 4, 1), lambda x: x + x.relu()),
    "classifier": lambda: nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 3)),
}
OTHER: Rows = {
    "conv1d": lambda: (nn.Conv1d(4, 8, 3), (SERIES,)),
    "causal_conv": lambda: (nn.Sequential(nn.ConstantPad1d((2, 0), 0.0), nn.Conv1d(4, 4, 3)), (SERIES,)),
    "conv3d": lambda: (nn.Conv3d(4, 2, 3), (VOLUME,)),
    "max_pool3d": lambda: (nn.MaxPool3d(2), (VOLUME,)),
    "lstm": lambda: (First(nn.LSTM(8, 4, batch_first=True)), ((2, 5, 8),)),
    "deep_lstm": lambda: (First(nn.LSTM(8, 4, num_layers=2, bidirectional=True)), ((5, 2, 8),)),
    "gru": lambda: (First(nn.GRU(8, 4)), ((5, 2, 8),)),
    "rnn": lambda: (First(nn.RNN(8, 4)), ((5, 2, 8),)),
    "gru_cell": lambda: (nn.GRUCell(8, 4), (ROW,)),
    "attention": lambda: (Attention(causal=False), ((2, 6, 8),)),
    "causal_attention": lambda: (Attention(causal=True), ((2, 6, 8),)),
    "multi_head": lambda: (First(nn.MultiheadAttention(8, 2), 3), ((5, 2, 8),)),
    "encoder": lambda: (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval(), ((2, 5, 8),)),
    "encoder_norm_first": lambda: (nn.TransformerEncoderLayer(8, 2, 16, norm_first=True), ((5, 2, 8),)),
    "transformer": lambda: (nn.Transformer(8, 2, 1, 1, 16), ((5, 2, 8), (4, 2, 8))),
    "embedding": lambda: (nn.Embedding(20, 8), (IDS,)),
    "embedding_bag": lambda: (nn.EmbeddingBag(20, 8), (IDS,)),
    "one_hot": lambda: (Calls(nn.Identity(), lambda ids: F.one_hot(ids, 8).float()), (IDS,)),
    "bilinear": lambda: (nn.Bilinear(8, 8, 2), (ROW, ROW)),
    "layer_norm": lambda: (nn.LayerNorm(8), (ROW,)),
    "rms_norm": lambda: (nn.RMSNorm(8), (ROW,)),
    "looks": lambda: (Looks(10.0), (ROW,)),
    "looks_and_doubles": lambda: (Looks(-10.0), (ROW,)),
    "shared": lambda: (nn.Sequential(*[nn.Linear(8, 8)] * 3), (ROW,)),
}


def _called(call: Callable[[torch.Tensor], Any]) -> tuple[nn.Module, tuple[Any, ...]]:
    return Calls(nn.Linear(8, 8), call), (ROW,)


def _image(make: Callable[[], nn.Module]) -> tuple[nn.Module, tuple[Any, ...]]:
    return make(), (IMAGE,)


MODELS: Rows = {
    **{name: partial(_called, call) for name, call in FUNCTIONS.items()},
    **{f"image_{name}": partial(_image, make) for name, make in IMAGE_LAYERS.items()},
    **OTHER,
}  # fmt: skip
