"""Models that no calibration ever runs: from torchvision, timm and transformers, by family.

There are two sets without a common family. Methods are developed on `UNSEEN`; `SECOND` is looked at once, at the end.
Both were fixed before the methods that they judge.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from subjects import torchvision_models, vision
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


# Sides of the images that some of the models were made for.
_SIDES = {"mobilevit_xxs": 256, "fastvit_t8": 256, "crossvit_tiny_240": 240, "darknet17": 256}


def _timm(name: str) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        torchvision_models()  # timm imports torchvision
        import timm

        model: nn.Module = timm.create_model(name, pretrained=False)
        return model.eval()

    return build


def _transformers(kind: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        torchvision_models()
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
    "timm:fbnetc_100": Unseen("mobile", _timm("fbnetc_100"), _images()),
    "timm:vit_tiny_patch16_224": Unseen("transformer", _timm("vit_tiny_patch16_224"), _images()),
    "timm:resnet26d": Unseen("residual", _timm("resnet26d"), _images()),
    "bert, 4 layers of 512": Unseen(
        "transformer",
        _transformers("Bert", hidden_size=512, num_hidden_layers=4, num_attention_heads=8, intermediate_size=2048),
        _tokens(128),
    ),
    "distilbert": Unseen("transformer", _transformers("DistilBert"), _tokens(64)),
    "gpt2, 6 layers": Unseen("transformer", _transformers("GPT2", n_layer=6, use_cache=False), _tokens(64)),
}

_second = {
    "pooling": ("poolformer_s12",),
    "hybrid": ("levit_128s", "mobilevit_xxs", "efficientformer_l1", "swiftformer_xs", "visformer_tiny",
               "tiny_vit_5m_224", "efficientvit_b0", "coat_lite_tiny", "pit_ti_224"),
    "pyramid": ("pvt_v2_b0", "twins_svt_small", "crossvit_tiny_240"),
    "cross-covariance": ("xcit_nano_12_p16_224",),
    "aggregation": ("dla34", "ese_vovnet19b_dw", "hrnet_w18_small", "selecsls42b", "dpn48b", "hgnetv2_b0"),
    "reparameterized": ("mobileone_s0", "fastvit_t8", "repvit_m0_9"),
    "linear channels": ("rexnet_100",),
    "gated": ("gmlp_ti16_224", "mambaout_femto", "starnet_s1"),
    "mlp": ("resmlp_12_224",),
    "darknet": ("darknet17",),
    "norm-free": ("nf_regnet_b0", "gernet_s"),
}  # fmt: skip

SECOND: dict[str, Unseen] = {
    **{
        f"timm:{name}": Unseen(family, _timm(name), _images(_SIDES.get(name, 224)))
        for family, names in _second.items()
        for name in names
    },
    "albert, 4 layers of 384": Unseen(
        "shared",
        _transformers("Albert", hidden_size=384, num_hidden_layers=4, num_attention_heads=6, intermediate_size=1536),
        _tokens(96),
    ),
    "squeezebert, 4 layers": Unseen("grouped text", _transformers("SqueezeBert", num_hidden_layers=4), _tokens(64)),
    "opt, 4 layers of 512": Unseen(
        "relu text",
        _transformers(
            "OPT",
            hidden_size=512,
            word_embed_proj_dim=512,
            num_hidden_layers=4,
            num_attention_heads=8,
            ffn_dim=2048,
            use_cache=False,
        ),
        _tokens(64),
    ),
}
