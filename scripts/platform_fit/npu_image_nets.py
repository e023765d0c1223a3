"""More nets of Qualcomm's AI Hub table, which take images: from the dimensions in their papers, named like the table.

Input sizes are those of the table's own packages (github.com/quic/ai-hub-models). Weights do not matter for a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from npu_nets import Bottleneck, NpuNet, conv, yolo_conv
from torch import Tensor, nn
from torch.nn import functional


def image_nets(timm: Any, transformers: Any) -> tuple[NpuNet, ...]:
    """Return the nets; packages are passed in because one of them needs help."""
    detr = transformers.ConditionalDetrConfig(
        use_timm_backbone=True, backbone="resnet50", use_pretrained_backbone=False, num_labels=91
    )
    return (
        NpuNet("deeplab_xception", "", "xception", DeepLabXception, (1, 3, 480, 520)),
        NpuNet("midas", "", "midas", lambda: Midas(timm), (1, 3, 256, 256)),
        NpuNet("srgan", "", "srgan", SrGan, (1, 3, 128, 128)),
        NpuNet("trocr", "encoder", "trocr", lambda: TrOcrEncoder(transformers), (1, 3, 384, 384)),
        NpuNet("u2net_segmentation", "", "u2net", U2Net, (1, 3, 320, 320)),
        NpuNet("yolox", "", "yolox", YoloX, (1, 3, 640, 640)),
        NpuNet(
            "conditional_detr_resnet50", "", "detr",
            lambda: transformers.ConditionalDetrForObjectDetection(detr), (1, 3, 480, 480),
        ),
    )  # fmt: skip


def resized(value: Tensor, like: Tensor) -> Tensor:
    """Return an image at the size of another one, bilinearly."""
    return functional.interpolate(value, size=like.shape[2:], mode="bilinear")


def separable(inner: int, outer: int, stride: int = 1, dilation: int = 1) -> nn.Sequential:
    """A depthwise 3x3 convolution and a 1x1 one, each with batch norm; the activation stands before them."""
    depthwise = conv(inner, inner, 3, stride, groups=inner, dilation=dilation, act=nn.Identity)
    return nn.Sequential(nn.ReLU(), depthwise, conv(inner, outer, act=nn.Identity))


class XceptionBlock(nn.Module):
    """Three separable convolutions; the last one has the stride, and a 1x1 convolution stands beside a wider block."""

    def __init__(self, inner: int, widths: Sequence[int], stride: int = 1, is_residual: bool = False) -> None:
        super().__init__()
        channels = (inner, *widths)
        strides = (1, 1, stride)
        layers = zip(channels, widths, strides, strict=False)
        self.body = nn.Sequential(*(separable(*layer) for layer in layers))
        self.skip = nn.Identity() if is_residual else conv(inner, widths[-1], 1, stride, act=nn.Identity)

    def forward(self, value: Tensor) -> Tensor:
        return self.skip(value) + self.body(value)


class DeepLabXception(nn.Module):
    """DeepLabV3+ (Chen et al. 2018) on Xception-65 with an output stride of 16."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(conv(3, 32, 3, 2), conv(32, 64, 3), XceptionBlock(64, (128,) * 3, 2))
        self.low = XceptionBlock(128, (256,) * 3, 2)
        middle = (XceptionBlock(728, (728,) * 3, is_residual=True) for _ in range(16))
        last = (separable(inner, outer, 1, 2) for inner, outer in ((1024, 1536), (1536, 1536), (1536, 2048)))
        self.high = nn.Sequential(
            XceptionBlock(256, (728,) * 3, 2), *middle, XceptionBlock(728, (728, 1024, 1024)), *last
        )
        branches = (separable(2048, 256, 1, rate) for rate in (6, 12, 18))
        self.branches = nn.ModuleList([conv(2048, 256), *branches])
        self.pooled, self.joined, self.skip = conv(2048, 256), conv(1280, 256), conv(256, 48)
        self.head = nn.Sequential(separable(304, 256), separable(256, 256), nn.Conv2d(256, 21, 1))

    def forward(self, image: Tensor) -> Tensor:
        low = self.low(self.first(image))
        high = self.high(low)
        pooled = self.pooled(high.mean((2, 3), keepdim=True)).expand(-1, -1, *high.shape[2:])
        joined = self.joined(torch.cat([*(branch(high) for branch in self.branches), pooled], 1))
        classes = self.head(torch.cat([resized(joined, low), self.skip(low)], 1))
        return resized(classes, image).argmax(1)


class ResidualUnit(nn.Module):
    """Two 3x3 convolutions with activations before them, added to their input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(*(nn.Sequential(nn.ReLU(), nn.Conv2d(width, width, 3, padding=1)) for _ in range(2)))

    def forward(self, value: Tensor) -> Tensor:
        return value + self.body(value)


class Midas(nn.Module):
    """MiDaS 2.1 small (Ranftl et al. 2020): EfficientNet-Lite3 and four fusions."""

    def __init__(self, timm: Any) -> None:
        super().__init__()
        self.body = timm.create_model("tf_efficientnet_lite3", features_only=True, out_indices=(1, 2, 3, 4))
        widths = (64, 128, 256, 512)
        inner = zip((32, 48, 136, 384), widths, strict=True)
        self.entry = nn.ModuleList(nn.Conv2d(channels, width, 3, padding=1, bias=False) for channels, width in inner)
        self.skips = nn.ModuleList(ResidualUnit(width) for width in widths[:3])
        self.units = nn.ModuleList(ResidualUnit(width) for width in widths)
        self.exits = nn.ModuleList(nn.Conv2d(width, max(64, width // 2), 1) for width in widths)
        self.before = nn.Conv2d(64, 32, 3, padding=1)
        self.after = nn.Sequential(nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 1, 1), nn.ReLU())

    def forward(self, image: Tensor) -> Tensor:
        levels = [entry(level) for entry, level in zip(self.entry, self.body(image), strict=True)]
        value = levels[3]
        for number in (3, 2, 1, 0):
            if number < 3:
                value = value + self.skips[number](levels[number])
            value = self.exits[number](self._doubled(self.units[number](value)))
        return self.after(self._doubled(self.before(value)))

    @staticmethod
    def _doubled(value: Tensor) -> Tensor:
        return functional.interpolate(value, scale_factor=2.0, mode="bilinear")


class SrGan(nn.Module):
    """SRGAN's generator (Ledig et al. 2017): sixteen residual blocks, four times the size."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 64, 9, padding=4), nn.PReLU())
        self.body = nn.ModuleList(
            nn.Sequential(conv(64, 64, 3, act=nn.PReLU), conv(64, 64, 3, act=nn.Identity)) for _ in range(16)
        )
        self.joined = conv(64, 64, 3, act=nn.Identity)
        larger = (nn.Sequential(nn.Conv2d(64, 256, 3, padding=1), nn.PixelShuffle(2), nn.PReLU()) for _ in range(2))
        self.last = nn.Sequential(*larger, nn.Conv2d(64, 3, 9, padding=4))

    def forward(self, image: Tensor) -> Tensor:
        first = value = self.first(image)
        for block in self.body:
            value = value + block(value)
        return self.last(first + self.joined(value))


class TrOcrEncoder(nn.Module):
    """The encoder of TrOCR small (Li et al. 2021), with keys and values of the decoder's six layers."""

    def __init__(self, transformers: Any) -> None:
        super().__init__()
        self.body = transformers.DeiTModel(
            transformers.DeiTConfig(hidden_size=384, num_attention_heads=6, intermediate_size=1536, image_size=384)
        )
        self.keys_values = nn.ModuleList(nn.Linear(384, 256) for _ in range(12))

    def forward(self, image: Tensor) -> list[Tensor]:
        states = self.body(pixel_values=image).last_hidden_state
        heads = (layer(states).view(1, -1, 8, 32) for layer in self.keys_values)
        return [head.transpose(1, 2).contiguous() for head in heads]


class ResidualU(nn.Module):
    """A U-Net of `depth` levels inside a block; with `is_dilated` it keeps its size (Qin et al. 2020)."""

    def __init__(self, depth: int, inner: int, middle: int, outer: int, is_dilated: bool = False) -> None:
        super().__init__()
        rates = [2**level if is_dilated else 1 for level in range(depth - 1)]
        self.first, self.is_dilated = conv(inner, outer, 3), is_dilated
        sides = [outer] + [middle] * (depth - 2)
        self.down = nn.ModuleList(conv(side, middle, 3, dilation=rate) for side, rate in zip(sides, rates, strict=True))
        self.lowest = conv(middle, middle, 3, dilation=2 * rates[-1] if is_dilated else 2)
        self.up = nn.ModuleList(
            conv(2 * middle, side, 3, dilation=rate) for side, rate in zip(sides, rates, strict=True)
        )

    def forward(self, value: Tensor) -> Tensor:
        value = first = self.first(value)
        kept = []
        for layer in self.down:
            if kept and not self.is_dilated:
                value = functional.max_pool2d(value, 2, 2, ceil_mode=True)
            value = layer(value)
            kept.append(value)
        value = self.lowest(value)
        for layer, skip in zip(reversed(self.up), reversed(kept), strict=True):
            value = value if value.shape == skip.shape else resized(value, skip)
            value = layer(torch.cat([value, skip], 1))
        return first + value


class U2Net(nn.Module):
    """U-squared-Net (Qin et al. 2020), with its six maps joined."""

    def __init__(self) -> None:
        super().__init__()
        plan = [(7, 3, 32, 64), (6, 64, 32, 128), (5, 128, 64, 256), (4, 256, 128, 512)]
        self.down = nn.ModuleList([*(ResidualU(*block) for block in plan), ResidualU(4, 512, 256, 512, True)])
        self.lowest = ResidualU(4, 512, 256, 512, True)
        back = [(4, 1024, 128, 256), (5, 512, 64, 128), (6, 256, 32, 64), (7, 128, 16, 64)]
        self.up = nn.ModuleList([ResidualU(4, 1024, 256, 512, True), *(ResidualU(*block) for block in back)])
        self.sides = nn.ModuleList(nn.Conv2d(width, 1, 3, padding=1) for width in (512, 512, 256, 128, 64, 64))
        self.last = nn.Conv2d(6, 1, 1)

    def forward(self, image: Tensor) -> Tensor:
        value, kept = image, []
        for block in self.down:
            value = block(value)
            kept.append(value)
            value = functional.max_pool2d(value, 2, 2, ceil_mode=True)
        levels = [self.lowest(value)]
        for block in self.up:
            skip = kept.pop()
            levels.append(block(torch.cat([resized(levels[-1], skip), skip], 1)))
        maps = [resized(side(level), image) for side, level in zip(self.sides, levels, strict=True)]
        return self.last(torch.cat(maps, 1)).sigmoid()


class CrossStage(nn.Module):
    """Half of the channels through bottlenecks of a 1x1 and a 3x3 convolution, and both halves joined."""

    def __init__(self, inner: int, outer: int, count: int, is_residual: bool = False) -> None:
        super().__init__()
        half = outer // 2
        self.first, self.beside, self.last = yolo_conv(inner, half), yolo_conv(inner, half), yolo_conv(outer, outer)
        self.body = nn.Sequential(*(Bottleneck(half, is_residual, 1) for _ in range(count)))

    def forward(self, value: Tensor) -> Tensor:
        return self.last(torch.cat([self.body(self.first(value)), self.beside(value)], 1))


class YoloX(nn.Module):
    """YOLOX-S (Ge et al. 2021), its boxes decoded."""

    def __init__(self) -> None:
        super().__init__()
        self.first = yolo_conv(12, 32, 3)
        plan = ((32, 64, 1), (64, 128, 3), (128, 256, 3))
        self.stages = nn.ModuleList(
            nn.Sequential(yolo_conv(inner, outer, 3, 2), CrossStage(outer, outer, count, True))
            for inner, outer, count in plan
        )
        self.deepest, self.reduced = yolo_conv(256, 512, 3, 2), yolo_conv(512, 256)
        self.pyramid = nn.Sequential(yolo_conv(1024, 512), CrossStage(512, 512, 1))
        self.lateral = nn.ModuleList([yolo_conv(512, 256), yolo_conv(256, 128)])
        self.up = nn.ModuleList([CrossStage(512, 256, 1), CrossStage(256, 128, 1)])
        self.smaller = nn.ModuleList([yolo_conv(128, 128, 3, 2), yolo_conv(256, 256, 3, 2)])
        self.down = nn.ModuleList([CrossStage(256, 256, 1), CrossStage(512, 512, 1)])
        self.stems = nn.ModuleList(yolo_conv(width, 128) for width in (128, 256, 512))
        self.scores = nn.ModuleList(self._head(80) for _ in range(3))
        self.boxes = nn.ModuleList(self._head(5) for _ in range(3))

    @staticmethod
    def _head(outer: int) -> nn.Sequential:
        return nn.Sequential(yolo_conv(128, 128, 3), yolo_conv(128, 128, 3), nn.Conv2d(128, outer, 1))

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        corners = [image[..., row::2, column::2] for column in (0, 1) for row in (0, 1)]
        value, kept = self.first(torch.cat(corners, 1)), []
        for stage in self.stages:
            value = stage(value)
            kept.append(value)
        value = self.reduced(self.deepest(value))
        pooled = [functional.max_pool2d(value, size, 1, size // 2) for size in (5, 9, 13)]
        high = self.lateral[0](self.pyramid(torch.cat([value, *pooled], 1)))
        middle = self.lateral[1](self.up[0](torch.cat([functional.interpolate(high, scale_factor=2.0), kept[2]], 1)))
        low = self.up[1](torch.cat([functional.interpolate(middle, scale_factor=2.0), kept[1]], 1))
        middle = self.down[0](torch.cat([self.smaller[0](low), middle], 1))
        high = self.down[1](torch.cat([self.smaller[1](middle), high], 1))
        stems = [stem(level) for stem, level in zip(self.stems, (low, middle, high), strict=True)]
        scores = torch.cat([head(stem).flatten(2) for head, stem in zip(self.scores, stems, strict=True)], 2)
        boxes = torch.cat([head(stem).flatten(2) for head, stem in zip(self.boxes, stems, strict=True)], 2)
        centre, size, seen = boxes.transpose(1, 2).split((2, 2, 1), 2)
        best, classes = (scores.transpose(1, 2).sigmoid() * seen.sigmoid()).max(2)
        return torch.cat([centre - size.exp() / 2, centre + size.exp() / 2], 2), best, classes
