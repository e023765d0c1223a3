"""Networks whose channels hang together in awkward ways, small enough to prune in a moment."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


class Residual(nn.Module):
    """A stem, a block that is added to its input, and a head; no norms, so that sums are exact."""

    def __init__(self, width: int = 16, inner: int = 32) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.up = nn.Conv2d(width, inner, 3, padding=1)
        self.down = nn.Conv2d(inner, width, 3, padding=1)
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.stem(x))
        x = F.relu(x + self.down(F.relu(self.up(x))))
        return self.head(x.mean((2, 3)))


class UNet(nn.Module):
    """Two levels with concatenations over the top, transposed convolutions and batch norms."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()

        def block(inputs: int, outputs: int) -> nn.Sequential:
            return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU())

        self.enter = block(3, width)
        self.lower = block(width, 2 * width)
        self.bottom = block(2 * width, 4 * width)
        self.up_lower = nn.ConvTranspose2d(4 * width, 2 * width, 2, stride=2)
        self.join_lower = block(4 * width, 2 * width)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.join = block(2 * width, width)
        self.out = nn.Conv2d(width, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        high = self.enter(x)
        middle = self.lower(F.max_pool2d(high, 2))
        low = self.bottom(F.max_pool2d(middle, 2))
        middle = self.join_lower(torch.cat([self.up_lower(low), middle], dim=1))
        return self.out(self.join(torch.cat([self.up(middle), high], dim=1)))


class Grouped(nn.Module):
    """Grouped and depthwise convolutions, one with two outputs per input, and group norm."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, 32, 3, padding=1)
        self.grouped = nn.Conv2d(32, 64, 3, padding=1, groups=4)
        self.norm = nn.GroupNorm(4, 64)
        self.depthwise = nn.Conv2d(64, 64, 3, padding=1, groups=64)
        self.doubling = nn.Conv2d(64, 128, 3, padding=1, groups=64)
        self.mix = nn.Conv2d(128, 32, 1)
        self.head = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm(self.grouped(F.relu(self.enter(x)))))
        return self.head(F.relu(self.mix(self.doubling(self.depthwise(x)))).mean((2, 3)))


class ConvNeXtLike(nn.Module):
    """A residual stream that is normalized over its channels, with a layer scale."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 4, stride=4)
        self.spatial = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.norm = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.full((width, 1, 1), 0.5))
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        inner = self.narrow(F.gelu(self.wide(self.norm(self.spatial(x).permute(0, 2, 3, 1)))))
        return self.head((x + self.scale * inner.permute(0, 3, 1, 2)).mean((2, 3)))


class Shared(nn.Module):
    """One convolution used twice, and one norm after each use."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, 16, 3, padding=1)
        self.twice = nn.Conv2d(16, 16, 3, padding=1)
        self.head = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.enter(x))
        return self.head(F.relu(self.twice(F.relu(self.twice(x)))).mean((2, 3)))


class SuperResolution(nn.Module):
    """A pixel shuffle between convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, 16, 3, padding=1)
        self.expand = nn.Conv2d(16, 64, 3, padding=1)
        self.out = nn.Conv2d(16, 3, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(F.relu(F.pixel_shuffle(self.expand(F.relu(self.enter(x))), 2)))


class Shuffled(nn.Module):
    """Channels reordered by a reshape, which a graph of layers does not see."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, 16, 3, padding=1)
        self.next = nn.Conv2d(16, 16, 3, padding=1)
        self.head = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.enter(x))
        n, c, h, w = x.shape
        x = x.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)
        return self.head(F.relu(self.next(x)).mean((2, 3)))


class SelfAttention(nn.Module):
    """Query, key and value of their own, split into heads, as BERT has it."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.num_attention_heads = heads
        self.attention_head_size = width // heads
        self.all_head_size = width
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def split(y: torch.Tensor) -> torch.Tensor:
            return y.view(*y.shape[:2], self.num_attention_heads, self.attention_head_size).transpose(1, 2)

        mixed = F.scaled_dot_product_attention(split(self.query(x)), split(self.key(x)), split(self.value(x)))
        return mixed.transpose(1, 2).reshape(*x.shape[:2], self.all_head_size)


class BertLike(nn.Module):
    """One encoder layer over token ids."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, width)
        self.attention = SelfAttention(width, heads)
        self.output = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 64)
        self.narrow = nn.Linear(64, width)
        self.classifier = nn.Linear(width, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        x = self.norm(x + self.output(self.attention(x)))
        x = x + self.narrow(F.gelu(self.wide(x)))
        return self.classifier(x[:, 0])


class TiedLanguageModel(nn.Module):
    """Token embeddings that are also the weights of the output layer."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, width)
        self.wide = nn.Linear(width, 64)
        self.narrow = nn.Linear(64, width)
        self.out = nn.Linear(width, 50, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        return self.out(x + self.narrow(F.relu(self.wide(x))))


class Encoder(nn.Module):
    """torch's own encoder layer."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.project = nn.Linear(8, width)
        self.layer = nn.TransformerEncoderLayer(width, heads, 64, dropout=0.0, batch_first=True)
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(self.project(x)).mean(1))


class Recent(nn.Module):
    """A residual stream under RMS norm, torch's and one as language models bring it, with a gated layer."""

    class OwnRMSNorm(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.rand(width))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, width)
        self.before = self.OwnRMSNorm(width)
        self.gate, self.up = nn.Linear(width, 64), nn.Linear(width, 64)
        self.down = nn.Linear(64, width)
        self.after = nn.RMSNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        y = self.before(x)
        x = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return self.head(self.after(x))


def tiny_vit() -> nn.Module:
    """torchvision's vision transformer with two layers, of 4 heads and 32 channels."""
    from zoo import torchvision_models

    made: nn.Module = torchvision_models().VisionTransformer(
        image_size=32, patch_size=8, num_layers=2, num_heads=4, hidden_dim=32, mlp_dim=64, num_classes=10
    )
    # Its own head starts at zero, and then no output depends on anything.
    nn.init.normal_(made.get_parameter("heads.head.weight"))
    return made


IMAGE = (2, 3, 16, 16)
NETS = {
    "residual": (Residual, IMAGE),
    "unet": (UNet, IMAGE),
    "grouped": (Grouped, IMAGE),
    "convnext": (ConvNeXtLike, IMAGE),
    "shared": (Shared, IMAGE),
    "super_resolution": (SuperResolution, IMAGE),
    "shuffled": (Shuffled, IMAGE),
    "bert": (BertLike, [((2, 6), "int64")]),
    "tied": (TiedLanguageModel, [((2, 6), "int64")]),
    "recent": (Recent, [((2, 6), "int64")]),
    "encoder": (Encoder, (2, 5, 8)),
    "vit": (tiny_vit, (2, 3, 32, 32)),
}
