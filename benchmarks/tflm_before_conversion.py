"""The arena before conversion, from a PyTorch model, beside the arena of the file that LiteRT's converter then writes.

    python benchmarks/tflm_before_conversion.py

Needs the extra litert. A conversion takes some seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import litert_torch
import torch
from ai_edge_quantizer import quantizer, recipe
from torch import nn

import edge_opt as eo
from edge_opt.model import SmallCNN

BUILDS = (("cortex-m4", "reference"), ("cortex-m4", "cmsis-nn"), ("cortex-m55", "cmsis-nn"))


def conv(
    inputs: int, outputs: int, kernel: int = 3, stride: int = 1, groups: int = 1, act: type = nn.ReLU
) -> nn.Module:
    layer = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(outputs), act())


def separable(channels: Sequence[int], strides: Sequence[int]) -> list[nn.Module]:
    """Depthwise and pointwise convolutions in turn."""
    layers: list[nn.Module] = []
    for before, after, stride in zip(channels[:-1], channels[1:], strides, strict=True):
        layers += [conv(before, before, stride=stride, groups=before), conv(before, after, 1)]
    return layers


class Inverted(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int, ratio: int) -> None:
        super().__init__()
        inner = inputs * ratio
        self.has_shortcut = stride == 1 and inputs == outputs
        self.body = nn.Sequential(
            conv(inputs, inner, 1, act=nn.ReLU6), conv(inner, inner, 3, stride, inner, nn.ReLU6),
            nn.Conv2d(inner, outputs, 1, bias=False), nn.BatchNorm2d(outputs),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.body(x) if self.has_shortcut else self.body(x)


class Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = conv(inputs, outputs, 3, stride)
        self.second = nn.Sequential(nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs))
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.second(self.first(x)) + self.shortcut(x))


class Pooled(nn.Module):
    """Features, a mean over their places, and a classifier."""

    def __init__(self, *layers: nn.Module, channels: int, classes: int = 10, is_mean: bool = False) -> None:
        super().__init__()
        self.features, self.is_mean = nn.Sequential(*layers), is_mean
        self.head = nn.Linear(channels, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.features(x)
        pooled = x.mean((2, 3)) if self.is_mean else nn.functional.adaptive_avg_pool2d(x, 1).flatten(1)
        return torch.softmax(self.head(pooled), -1)


class Joined(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = conv(3, 16, stride=2), conv(16, 16), conv(32, 32, 1)
        self.pool, self.head = nn.MaxPool2d(3, 2, 1), nn.Linear(32, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        x = self.pool(self.third(torch.cat([x, self.second(x)], 1)))
        return self.head(x.mean((2, 3)))


class Segmenter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.deep, self.up, self.out = conv(3, 8), conv(8, 16), conv(24, 8), nn.Conv2d(8, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.down(x)
        deep = nn.functional.interpolate(self.deep(nn.functional.max_pool2d(x, 2)), scale_factor=2)
        return self.out(self.up(torch.cat([x, deep], 1)))


class Excited(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = conv(3, 16, stride=2, act=nn.Hardswish), conv(16, 24, stride=2)
        self.gate = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(16, 4, 1), nn.ReLU(), nn.Conv2d(4, 16, 1), nn.Sigmoid()
        )
        self.head = nn.Linear(24, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        x = self.last(x * self.gate(x))
        return self.head(nn.functional.adaptive_avg_pool2d(x, 1).flatten(1))


def lenet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(256, 120), nn.ReLU(), nn.Linear(120, 10),
    )  # fmt: skip


def autoencoder() -> nn.Module:
    sizes = (640, 128, 128, 8, 128, 640)
    layers = [nn.Sequential(nn.Linear(a, b), nn.BatchNorm1d(b), nn.ReLU()) for a, b in pairwise(sizes)]
    return nn.Sequential(*layers)


NETS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "SmallCNN": (SmallCNN(), (1, 1, 28, 28)),
    "LeNet": (lenet(), (1, 1, 28, 28)),
    "autoencoder": (autoencoder(), (1, 640)),
    "separable": (Pooled(conv(3, 8, stride=2), *separable((8, 16, 32, 64), (1, 2, 2)), channels=64), (1, 3, 64, 64)),
    "inverted": (
        Pooled(conv(3, 16, stride=2), Inverted(16, 16, 1, 2), Inverted(16, 24, 2, 4), channels=24, is_mean=True),
        (1, 3, 64, 64),
    ),
    "residual": (Pooled(conv(3, 16), Residual(16, 16, 1), Residual(16, 32, 2), channels=32), (1, 3, 32, 32)),
    "keywords": (Pooled(nn.Conv2d(1, 64, (10, 4), 2, (5, 1)), nn.ReLU(), *separable((64, 64, 64), (1, 1)), channels=64),
                 (1, 1, 49, 10)),
    "joined": (Joined(), (1, 3, 48, 48)),
    "segmenter": (Segmenter(), (1, 3, 32, 32)),
    "excited": (Excited(), (1, 3, 48, 48)),
}  # fmt: skip


def converted(model: nn.Module, shape: tuple[int, ...], folder: Path) -> Path:
    """Write the int8 file with a fixed batch."""
    source, path = folder / "float.tflite", folder / "model.tflite"
    litert_torch.convert(model, (torch.randn(shape),)).export(str(source))
    quantized = quantizer.Quantizer(str(source))
    quantized.load_quantization_recipe(recipe.static_wi8_ai8())
    ranges = quantized.calibrate({"serving_default": [{"args_0": torch.randn(shape).numpy()} for _ in range(2)]})
    quantized.quantize(ranges).export_model(str(path), overwrite=True)
    return path


def main() -> None:
    lines = [f"{'net':12} {'core':11} {'kernels':10} {'before':>8} {'file':>8}  difference"]
    for name, (model, shape) in NETS.items():
        with TemporaryDirectory() as folder:
            path = converted(model.eval(), shape, Path(folder))
            for core, kernels in BUILDS:
                before = eo.mcu_memory(model, shape, core=core, kernels=kernels).arena_bytes  # type: ignore[arg-type]
                after = eo.mcu_memory(path, core=core, kernels=kernels).arena_bytes  # type: ignore[arg-type]
                lines.append(f"{name:12} {core:11} {kernels:10} {before:8} {after:8}  {before / after - 1:+.2%}")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
