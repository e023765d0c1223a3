"""Models people really use, from their own packages: counted completely, and exactly."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import edge_opt as eo
from zoo import torchvision_models

SMALL = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 100,
}  # fmt: skip
IDS = {"input_ids": torch.ones(2, 16, dtype=torch.int64)}
PIXELS = {"pixel_values": torch.zeros(1, 3, 224, 224)}


# transformers imports torchvision, which must be made to fit first.
torchvision_models()


def hugging_face(name: str, **options: object) -> nn.Module:
    config = getattr(transformers, f"{name.removesuffix('Model').removesuffix('ForCausalLM')}Config")(**options)
    model: nn.Module = getattr(transformers, name)(config)
    return model.eval()


def reference_macs(model: nn.Module, call: dict[str, torch.Tensor]) -> int:
    """What torch counts in a real run whose attention is taken apart, so that it is seen."""
    backend = torch.nn.attention.SDPBackend.MATH
    with torch.no_grad(), torch.nn.attention.sdpa_kernel(backend), FlopCounterMode(display=False) as counter:
        model(**call)
    return counter.get_total_flops() // 2


@pytest.mark.parametrize(
    ("name", "options", "call"),
    [
        ("BertModel", SMALL, IDS),
        ("DistilBertModel", {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64}, IDS),
        ("LlamaForCausalLM", {**SMALL, "num_key_value_heads": 2}, IDS),
        ("Qwen2ForCausalLM", {**SMALL, "num_key_value_heads": 2}, IDS),
        ("GPT2Model", {"n_embd": 32, "n_layer": 2, "n_head": 4}, IDS),
        ("LayoutLMModel", SMALL, IDS),
        ("DebertaModel", SMALL, IDS),
        ("FNetModel", SMALL, IDS),
        ("MambaForCausalLM", {**SMALL, "state_size": 4}, IDS),
        ("T5Model", {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4},
         {**IDS, "decoder_input_ids": IDS["input_ids"]}),
        ("ViTModel", {k: v for k, v in SMALL.items() if k != "vocab_size"}, PIXELS),
        ("SegformerModel", {}, PIXELS),
        ("WhisperModel", {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
                          "decoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64},
         {"input_features": torch.zeros(1, 80, 3000), "decoder_input_ids": IDS["input_ids"]}),
        ("Wav2Vec2Model", {k: v for k, v in SMALL.items() if k != "vocab_size"},
         {"input_values": torch.zeros(1, 4000)}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_hugging_face_models(name: str, options: dict[str, object], call: dict[str, torch.Tensor]) -> None:
    model = hugging_face(name, **options)
    profile = eo.profile(model, call)
    assert profile.totals.macs == reference_macs(model, call)
    assert profile.coverage == 1.0, profile.unpriced
    assert profile.totals.params == sum(parameter.numel() for parameter in model.parameters())


def test_bert_from_its_dimensions() -> None:
    width, hidden, layers, length, batch = 32, 64, 2, 16, 2
    rows = batch * length
    layer = 4 * rows * width * width + 2 * rows * length * width + 2 * rows * width * hidden
    pooler = batch * width * width
    profile = eo.profile(hugging_face("BertModel", **SMALL), transformers.BatchEncoding(dict(IDS)))
    assert profile.totals.macs == layers * layer + pooler
    attention = [operator for operator in profile.operators if operator.kind == "attention"]
    assert len(attention) == layers  # one fused operator each
    assert not profile.trace.used_real_tensors


def test_grouped_experts_are_counted_by_the_rows_they_get() -> None:
    experts, chosen, rows = 4, 2, 32
    options = {**SMALL, "num_key_value_heads": 2, "num_local_experts": experts, "num_experts_per_tok": chosen}
    model = hugging_face("MixtralForCausalLM", **options)
    counted = {layer.call.path: layer.cost.macs for layer in eo.profile(model, IDS).layers if layer.cost.macs}
    # gate and up together 32 -> 2x64, down 64 -> 32, for each of the two experts a row is sent to
    assert counted["model.layers.0.mlp.experts"] == rows * chosen * (32 * 128 + 64 * 32)
    assert counted["model.layers.0.mlp.gate"] == rows * 32 * experts


def test_a_seven_billion_parameter_llama_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig())
    profile = eo.profile(model, {"input_ids": ((1, 128), "int64")}, kwargs={"use_cache": False})
    linear = 32 * (4 * 4096 * 4096 + 3 * 4096 * 11008)
    attention = 32 * 2 * 128 * 128 * 4096
    assert profile.totals.macs == 128 * linear + attention + 128 * 4096 * 32000
    assert profile.totals.params == 6_738_415_616
    assert profile.coverage == 1.0


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v3_small", "vit_b_16", "swin_t", "maxvit_t", "raft_small"])
def test_torchvision_models_on_the_meta_device(name: str) -> None:
    with torch.device("meta"):
        model = torchvision_models().get_model(name, weights=None).eval()
        shapes = [(1, 3, 128, 128)] * 2 if name == "raft_small" else [(1, 3, 224, 224)]
        inputs = [torch.empty(shape) for shape in shapes]
    profile = eo.profile(model, shapes)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(*inputs)
    assert profile.totals.macs == counter.get_total_flops() // 2
    assert profile.coverage == 1.0, profile.unpriced


@pytest.mark.parametrize(
    "name", ["efficientnet_b0", "mobilevit_s", "poolformer_s12", "levit_128s", "xcit_nano_12_p16_224"]
)
def test_timm_models(name: str) -> None:
    torchvision_models()
    import timm

    model = timm.create_model(name, pretrained=False).eval()
    size = model.default_cfg["input_size"]
    profile = eo.profile(model, (1, *size))
    model.to("meta")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.empty(1, *size, device="meta"))
    assert profile.totals.macs == counter.get_total_flops() // 2
    assert profile.coverage == 1.0, profile.unpriced
