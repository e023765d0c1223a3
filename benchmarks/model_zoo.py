"""Many kinds of models that edge users bring: by library, and of one's own, each with the inputs of one call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from subjects import torchvision_models  # it also lets the tests' support be found
from torch import nn
from torch.nn import functional as F

from pruned_nets import UNet


@dataclass(frozen=True, slots=True)
class ZooNet:
    """A model and one call: how it is built, and its inputs, positional or by name."""

    build: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Any, dict[str, Any]]]


def _images(size: int, channels: int = 3) -> Callable[[], tuple[Any, dict[str, Any]]]:
    return lambda: (torch.randn(2, channels, size, size), {})


def _tokens(**extra: Any) -> Callable[[], tuple[Any, dict[str, Any]]]:
    return lambda: (None, {"input_ids": torch.randint(0, 100, (2, 16)), **extra})


def _torchvision(name: str, size: int = 64, part: str = "", **options: Any) -> ZooNet:
    def build() -> nn.Module:
        models: Any = torchvision_models()
        holder = getattr(models, part) if part else models
        if part == "segmentation":
            options.setdefault("weights_backbone", None)
        model: nn.Module = getattr(holder, name)(weights=None, **options)
        return model.eval()

    return ZooNet(build, _images(size))


def _timm(name: str, size: int = 64) -> ZooNet:
    def build() -> nn.Module:
        torchvision_models()  # declares what a CPU build of torchvision lacks; timm imports it
        import timm

        model: nn.Module = timm.create_model(name, pretrained=False)
        return model.eval()

    return ZooNet(build, _images(size))


def _transformer(kind: str, inputs: Callable[[], tuple[Any, dict[str, Any]]], head: str, **options: Any) -> ZooNet:
    def build() -> nn.Module:
        torchvision_models()
        import transformers

        config = getattr(transformers, f"{kind}Config")(**options)
        model: nn.Module = getattr(transformers, f"{kind}{head}")(config)
        return model.eval()

    return ZooNet(build, inputs)


class WhisperEncoder(nn.Module):
    """The encoder of a small whisper."""

    def __init__(self) -> None:
        super().__init__()
        torchvision_models()  # as above
        from transformers import WhisperConfig
        from transformers.models.whisper.modeling_whisper import WhisperEncoder as Encoder

        self.encoder = Encoder(
            WhisperConfig(d_model=64, encoder_layers=2, encoder_attention_heads=4, encoder_ffn_dim=128,
                          num_mel_bins=40, max_source_positions=50)
        )  # fmt: skip

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.encoder(features).last_hidden_state
        return out


def _block(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU())


class Siamese(nn.Module):
    """One net for two images, and their distance."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(_block(3, 16), nn.MaxPool2d(2), _block(16, 32), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(32, 16)

    def forward(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return (self.head(self.body(one)) - self.head(self.body(other))).square().sum(1)


class TwoHeads(nn.Module):
    """One body, a class and a box."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(_block(3, 16), nn.MaxPool2d(2), _block(16, 32), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.classes, self.box = nn.Linear(32, 10), nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        features = self.body(x)
        return {"classes": self.classes(features), "box": self.box(features)}


class Recurrent(nn.Module):
    """Two recurrent layers between linear ones, the last step classified."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.enter = nn.Linear(12, 32)
        self.cell: Any = kind(32, 64, num_layers=2, batch_first=True)
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.cell(F.relu(self.enter(x)))[0][:, -1])
        return out


class Named(nn.Module):
    """Inputs in a dict: an image and some numbers beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(_block(3, 16), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.numbers = nn.Sequential(nn.Linear(5, 16), nn.ReLU())
        self.head = nn.Linear(32, 3)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        out: torch.Tensor = self.head(torch.cat([self.image(batch["image"]), self.numbers(batch["numbers"])], dim=1))
        return out


def one_dimensional() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(1, 16, 9, stride=4), nn.BatchNorm1d(16), nn.ReLU(),
        nn.Conv1d(16, 32, 5, stride=2), nn.BatchNorm1d(32), nn.ReLU(),
        nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(32, 5),
    )  # fmt: skip


def three_dimensional() -> nn.Module:
    return nn.Sequential(
        nn.Conv3d(1, 16, 3), nn.BatchNorm3d(16), nn.ReLU(), nn.Conv3d(16, 32, 3), nn.BatchNorm3d(32), nn.ReLU(),
        nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(32, 5),
    )  # fmt: skip


def generator() -> nn.Module:
    return nn.Sequential(
        nn.ConvTranspose2d(16, 32, 4), nn.BatchNorm2d(32), nn.ReLU(),
        nn.ConvTranspose2d(32, 16, 4, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.ConvTranspose2d(16, 3, 4, stride=2, padding=1), nn.Tanh(),
    )  # fmt: skip


_SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
NETS: dict[str, ZooNet] = {
    **{
        f"torchvision:{name}": _torchvision(name)
        for name in ("squeezenet1_1", "shufflenet_v2_x1_0", "mnasnet1_0", "efficientnet_b0", "regnet_y_400mf",
                     "convnext_tiny", "swin_t")
    },
    "torchvision:inception_v3": _torchvision("inception_v3", 96, init_weights=False, aux_logits=False),
    **{
        f"torchvision:{name}": _torchvision(name, 64, "segmentation")
        for name in ("lraspp_mobilenet_v3_large", "deeplabv3_mobilenet_v3_large", "fcn_resnet50")
    },
    **{
        f"timm:{name}": _timm(name)
        for name in ("ghostnet_100", "tinynet_e", "mobileone_s0", "repvgg_a0", "resnet50d", "mobilevit_s",
                     "edgenext_xx_small", "hardcorenas_a", "fastvit_t8", "mobilenetv4_conv_small")
    },
    **{
        f"timm:{name}": _timm(name, 224)
        for name in ("levit_128s", "efficientformer_l1", "deit_tiny_patch16_224", "mixer_s32_224")
    },
    "transformers:bert": _transformer("Bert", _tokens(), "ForSequenceClassification", vocab_size=100, **_SMALL),
    "transformers:distilbert": _transformer(
        "DistilBert", _tokens(), "ForSequenceClassification", vocab_size=100, dim=64, n_layers=2, n_heads=4,
        hidden_dim=128,
    ),
    "transformers:vit": _transformer(
        "ViT", lambda: (None, {"pixel_values": torch.randn(2, 3, 32, 32)}), "ForImageClassification", image_size=32,
        patch_size=8, **_SMALL,
    ),
    "transformers:gpt2": _transformer(
        "GPT2", _tokens(use_cache=False), "LMHeadModel", vocab_size=100, n_positions=32, n_embd=64, n_layer=2, n_head=4,
    ),
    "transformers:llama": _transformer(
        "Llama", _tokens(use_cache=False), "ForCausalLM", vocab_size=100, num_key_value_heads=2, **_SMALL,
    ),
    "transformers:whisper encoder": ZooNet(WhisperEncoder, lambda: (torch.randn(2, 40, 100), {})),
    "transformers:wav2vec2": _transformer(
        "Wav2Vec2", lambda: (torch.randn(2, 2000), {}), "ForSequenceClassification", conv_dim=(32, 32, 32),
        conv_kernel=(10, 3, 3), conv_stride=(5, 2, 2), num_feat_extract_layers=3, num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4, classifier_proj_size=32, **_SMALL,
    ),
    "U-Net": ZooNet(UNet, _images(32)),
    "Siamese": ZooNet(Siamese, lambda: ([torch.randn(2, 3, 32, 32), torch.randn(2, 3, 32, 32)], {})),
    "two-headed": ZooNet(TwoHeads, _images(32)),
    "LSTM": ZooNet(lambda: Recurrent(nn.LSTM), lambda: (torch.randn(2, 20, 12), {})),
    "GRU": ZooNet(lambda: Recurrent(nn.GRU), lambda: (torch.randn(2, 20, 12), {})),
    "1-D": ZooNet(one_dimensional, lambda: (torch.randn(2, 1, 400), {})),
    "3-D": ZooNet(three_dimensional, lambda: (torch.randn(2, 1, 12, 12, 12), {})),
    "transposed": ZooNet(generator, lambda: (torch.randn(2, 16, 4, 4), {})),
    "dict-input": ZooNet(
        Named, lambda: (None, {"batch": {"image": torch.randn(2, 3, 16, 16), "numbers": torch.randn(2, 5)}})
    ),
}  # fmt: skip

# On nobody's list: what a tool has to take that was made for no model in particular.
OTHERS: dict[str, ZooNet] = {
    **{
        f"torchvision:{name}": _torchvision(name)
        for name in ("mobilenet_v2", "mobilenet_v3_small", "densenet121", "resnet18", "resnext50_32x4d", "vgg11_bn",
                     "wide_resnet50_2")
    },
    "torchvision:googlenet": _torchvision("googlenet", init_weights=False, aux_logits=False),
    "torchvision:swin_v2_t": _torchvision("swin_v2_t"),
    "torchvision:vit_b_32": _torchvision("vit_b_32", 224),
    "torchvision:maxvit_t": _torchvision("maxvit_t", 224),
    "torchvision:r3d_18": ZooNet(
        _torchvision("r3d_18", part="video").build, lambda: (torch.randn(2, 3, 8, 32, 32), {})
    ),
    **{
        f"timm:{name}": _timm(name)
        for name in ("res2net50_26w_4s", "resnest14d", "dla34", "hrnet_w18_small", "ghostnetv2_100", "rexnet_100",
                     "repvit_m0_9", "starnet_s1", "efficientvit_b0", "convnextv2_atto", "lcnet_050",
                     "mobilenetv4_hybrid_medium", "cs3darknet_s", "vovnet39a", "poolformer_s12", "repghostnet_050",
                     "regnetz_005", "gernet_s", "efficientvit_m0", "semnasnet_050", "skresnet18", "nf_regnet_b0",
                     "xception41", "fbnetc_100", "res2net50_14w_8s", "ese_vovnet19b_dw", "mobilenetv3_small_050",
                     "tf_efficientnet_lite0", "regnetx_002", "selecsls42b", "hgnetv2_b0", "mobilevitv2_050",
                     "mobilenetv1_100", "inception_next_atto", "mambaout_femto", "convmixer_768_32")
    },
    **{
        f"timm:{name}": _timm(name, 224)
        for name in ("pit_ti_224", "gmlp_s16_224", "resmlp_12_224", "xcit_nano_12_p16_224", "cait_xxs24_224",
                     "coat_lite_tiny", "pvt_v2_b0", "tiny_vit_5m_224", "swinv2_cr_tiny_ns_224", "beit_base_patch16_224",
                     "crossvit_tiny_240", "twins_svt_small", "visformer_tiny", "convit_tiny", "mvitv2_tiny")
    },
    "transformers:roberta": _transformer("Roberta", _tokens(), "ForSequenceClassification", vocab_size=100, **_SMALL),
    "transformers:albert": _transformer(
        "Albert", _tokens(), "ForSequenceClassification", vocab_size=100, embedding_size=32, **_SMALL
    ),
    "transformers:electra": _transformer(
        "Electra", _tokens(), "ForSequenceClassification", vocab_size=100, embedding_size=32, **_SMALL
    ),
    "transformers:mpnet": _transformer("MPNet", _tokens(), "ForSequenceClassification", vocab_size=100, **_SMALL),
    "transformers:squeezebert": _transformer(
        "SqueezeBert", _tokens(), "ForSequenceClassification", vocab_size=100, embedding_size=64, **_SMALL
    ),
    "transformers:opt": _transformer(
        "OPT", _tokens(use_cache=False), "ForCausalLM", vocab_size=100, hidden_size=64, num_hidden_layers=2,
        num_attention_heads=4, ffn_dim=128, word_embed_proj_dim=64, max_position_embeddings=64,
    ),
    **{
        f"transformers:{kind.lower()}": _transformer(
            kind, _tokens(use_cache=False), "ForCausalLM", vocab_size=100, num_key_value_heads=2, pad_token_id=0,
            **_SMALL,
        )
        for kind in ("Mistral", "Qwen2", "Qwen3", "Gemma", "Phi3", "SmolLM3")
    },
    "transformers:gpt_neox": _transformer("GPTNeoX", _tokens(use_cache=False), "ForCausalLM", vocab_size=100, **_SMALL),
    "transformers:bloom": _transformer(
        "Bloom", _tokens(use_cache=False), "ForCausalLM", vocab_size=100, hidden_size=64, n_layer=2, n_head=4
    ),
    "transformers:t5 encoder": _transformer(
        "T5", _tokens(), "EncoderModel", vocab_size=100, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4
    ),
    "transformers:dinov2": _transformer(
        "Dinov2", lambda: (None, {"pixel_values": torch.randn(2, 3, 28, 28)}), "ForImageClassification", image_size=28,
        patch_size=7, **_SMALL,
    ),
    "transformers:segformer": _transformer(
        "Segformer", lambda: (None, {"pixel_values": torch.randn(2, 3, 64, 64)}), "ForSemanticSegmentation",
        depths=[1, 1, 1, 1], hidden_sizes=[16, 32, 48, 64], decoder_hidden_size=64,
    ),
    **{
        f"transformers:{kind.lower()}": _transformer(
            kind, lambda: (None, {"pixel_values": torch.randn(2, 3, 64, 64)}), "ForImageClassification", **options
        )
        # With the weights that they start from, outputs are zero.
        for kind, options in (
            ("MobileViTV2", {"initializer_range": 0.1}), ("MobileViT", {"initializer_range": 0.1, "image_size": 64}),
        )
    },
    "transformers:deberta-v2": _transformer(
        "DebertaV2", _tokens(), "ForSequenceClassification", vocab_size=100, relative_attention=True,
        pos_att_type=["p2c", "c2p"], position_buckets=16, **_SMALL,
    ),
    "transformers:mobilebert": _transformer(
        "MobileBert", _tokens(), "ForSequenceClassification", vocab_size=100, hidden_size=64, embedding_size=32,
        num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, intra_bottleneck_size=32,
        true_hidden_size=32,
    ),
    "transformers:convbert": _transformer(
        "ConvBert", _tokens(), "ForSequenceClassification", vocab_size=100, embedding_size=64, conv_kernel_size=5,
        **_SMALL,
    ),
    "transformers:xlm-roberta": _transformer(
        "XLMRoberta", _tokens(attention_mask=torch.ones(2, 16, dtype=torch.int64)), "ForTokenClassification",
        vocab_size=100, **_SMALL,
    ),
    "transformers:fnet": _transformer(
        "FNet", _tokens(), "ForSequenceClassification", vocab_size=100, hidden_size=64, num_hidden_layers=2,
        intermediate_size=128,
    ),
    "transformers:gptj": _transformer(
        "GPTJ", _tokens(use_cache=False), "ForCausalLM", vocab_size=100, n_positions=32, n_embd=64, n_layer=2,
        n_head=4, rotary_dim=16,
    ),
    "transformers:hubert": _transformer(
        "Hubert", lambda: (torch.randn(2, 2000), {}), "ForSequenceClassification", conv_dim=(32, 32, 32),
        conv_kernel=(10, 3, 3), conv_stride=(5, 2, 2), num_feat_extract_layers=3, num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4, classifier_proj_size=32, **_SMALL,
    ),
}  # fmt: skip
ALL_NETS: dict[str, ZooNet] = {**NETS, **OTHERS}
