"""Models that no calibration ever runs: from torchvision, timm and transformers, by family."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from subjects import vision
from torch import nn


@dataclass(frozen=True, slots=True)
class Unseen:
    """One model: which family of references resembles it, how it is built, and its inputs for a batch size."""

    family: str
    build: Callable[[], nn.Module]
    inputs: Callable[[int], Any]


def _images(size: int = 224) -> Callable[[int], Any]:
    return lambda batch: torch.randn(batch, 3, size, size)


def _tokens(length: int) -> Callable[[int], Any]:
    return lambda batch: {"input_ids": torch.randint(0, 1000, (batch, length))}


def _timm(name: str) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import timm

        model: nn.Module = timm.create_model(name, pretrained=False)
        return model.eval()

    return build


def _transformers(kind: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        model: nn.Module = getattr(transformers, f"{kind}Model")(getattr(transformers, f"{kind}Config")(**options))
        return model.eval()

    return build


_vision = {
    "residual": ("resnet18", "resnet50", "resnext50_32x4d", "regnet_y_400mf", "regnet_x_800mf"),
    "mobile": ("mobilenet_v2", "mobilenet_v3_small", "mobilenet_v3_large", "efficientnet_b0", "mnasnet1_0",
               "shufflenet_v2_x1_0"),
    "dense": ("densenet121",),
    "branches": ("squeezenet1_1", "googlenet"),
    "plain": ("alexnet", "vgg11"),
    "transformer": ("vit_b_32",),
    "windows": ("swin_t",),
    "last-norm": ("convnext_tiny",),
}  # fmt: skip

UNSEEN: dict[str, Unseen] = {
    **{name: Unseen(family, vision(name), _images()) for family, names in _vision.items() for name in names},
    "timm:deit_tiny_patch16_224": Unseen("transformer", _timm("deit_tiny_patch16_224"), _images()),
    "timm:mixer_s32_224": Unseen("transformer", _timm("mixer_s32_224"), _images()),
    "timm:ghostnet_100": Unseen("mobile", _timm("ghostnet_100"), _images()),
    "timm:repvgg_a0": Unseen("plain", _timm("repvgg_a0"), _images()),
    "timm:edgenext_x_small": Unseen("last-norm", _timm("edgenext_x_small"), _images(256)),
    "bert, 4 layers of 512": Unseen(
        "transformer",
        _transformers("Bert", hidden_size=512, num_hidden_layers=4, num_attention_heads=8, intermediate_size=2048),
        _tokens(128),
    ),
    "distilbert": Unseen("transformer", _transformers("DistilBert"), _tokens(64)),
    "gpt2, 6 layers": Unseen("transformer", _transformers("GPT2", n_layer=6, use_cache=False), _tokens(64)),
}
