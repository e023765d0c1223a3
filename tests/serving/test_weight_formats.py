"""Bits of each format, and sizes of files that people have."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edge_opt.errors import InvalidInput
from edge_opt.serving.weight_formats import (
    BLOCK_TYPES,
    WEIGHT_FORMATS,
    WeightTensor,
    cache_bytes_per_value,
    described,
    tensor_bytes,
    tensor_type,
    weight_format,
)


def llama(hidden: int, inner: int, layers: int, key: int, vocabulary: int, sharing: int) -> tuple[WeightTensor, ...]:
    """The tensors of a Llama, as transformers names them."""
    found = [("model.embed_tokens.weight", (vocabulary, hidden)), ("lm_head.weight", (vocabulary, hidden))]
    for layer in range(layers):
        place = f"model.layers.{layer}"
        found += [
            (f"{place}.self_attn.q_proj.weight", (hidden, hidden)),
            (f"{place}.self_attn.k_proj.weight", (key, hidden)),
            (f"{place}.self_attn.v_proj.weight", (key, hidden)),
            (f"{place}.self_attn.o_proj.weight", (hidden, hidden)),
            (f"{place}.mlp.gate_proj.weight", (inner, hidden)),
            (f"{place}.mlp.up_proj.weight", (inner, hidden)),
            (f"{place}.mlp.down_proj.weight", (hidden, inner)),
            (f"{place}.input_layernorm.weight", (hidden,)),
            (f"{place}.post_attention_layernorm.weight", (hidden,)),
        ]
    return described([*found, ("model.norm.weight", (hidden,))], sharing)


# Sizes of TheBloke's GGUF files of Llama-2-7B, in 1e9 bytes as the Hub shows them.
LLAMA_2 = {
    "q3_k_s": 2.95, "q3_k_m": 3.30, "q3_k_l": 3.60, "q4_0": 3.83, "q4_k_s": 3.86, "q4_k_m": 4.08, "q5_0": 4.65,
    "q5_k_s": 4.65, "q5_k_m": 4.78, "q6_k": 5.53, "q8_0": 7.16,
}  # fmt: skip
# What `llama-quantize --help` says of Llama-3-8B, in GiB.
LLAMA_3 = {
    "q2_k": 2.96, "q3_k_s": 3.41, "q3_k_m": 3.74, "q3_k_l": 4.03, "q4_0": 4.34, "q4_1": 4.78, "q4_k_s": 4.37,
    "q4_k_m": 4.58, "q5_0": 5.21, "q5_1": 5.65, "q5_k_s": 5.21, "q5_k_m": 5.33, "q6_k": 6.14, "q8_0": 7.96,
    "fp16": 14.96,
}  # fmt: skip


@pytest.mark.parametrize(("name", "size"), LLAMA_2.items())
def test_files_of_llama_2(name: str, size: float) -> None:
    tensors = llama(4096, 11008, 32, 4096, 32000, sharing=1)
    assert sum(tensor_bytes(tensor, WEIGHT_FORMATS[name]) for tensor in tensors) / 1e9 == pytest.approx(size, abs=0.006)


@pytest.mark.parametrize(("name", "size"), LLAMA_3.items())
def test_files_of_llama_3(name: str, size: float) -> None:
    tensors = llama(4096, 14336, 32, 1024, 128256, sharing=4)
    found = sum(tensor_bytes(tensor, WEIGHT_FORMATS[name]) for tensor in tensors) / 2**30
    assert found == pytest.approx(size, rel=0.004)  # a file holds the vocabulary as well


# Sizes of bartowski's GGUF files of Mixtral-8x22B, in 1e9 bytes: its attention is stored wider beside eight experts.
MIXTRAL = {
    "q2_k": 52.10, "iq3_xs": 58.22, "q3_k_s": 61.49, "iq3_s": 61.49, "iq3_m": 64.49, "q3_k_m": 67.78, "q3_k_l": 72.57,
    "q4_k_s": 80.47, "q4_k_m": 85.58, "q5_k_s": 96.97, "q5_k_m": 99.96,
}  # fmt: skip


@pytest.mark.parametrize(("name", "size"), MIXTRAL.items())
def test_files_of_mixtral(name: str, size: float) -> None:
    dense = [tensor for tensor in llama(6144, 16384, 56, 1024, 32000, sharing=6) if ".mlp." not in tensor.name]
    experts = []
    for layer in range(56):
        place = f"model.layers.{layer}.mlp"
        experts += [
            (f"{place}.experts.gate_up_proj", (8, 32768, 6144)),
            (f"{place}.experts.down_proj", (8, 6144, 16384)),
            (f"{place}.gate.weight", (8, 6144)),
        ]
    named = [(tensor.name, tensor.shape) for tensor in dense] + experts
    found = sum(tensor_bytes(tensor, WEIGHT_FORMATS[name]) for tensor in described(named, sharing=6, experts=8))
    assert found / 1e9 == pytest.approx(size, rel=0.001)


def test_values_of_80_layers_are_stored_wider() -> None:
    values = WeightTensor("model.layers.40.self_attn.v_proj.weight", (1024, 8192), "attn_v", 40, 80, sharing=8)
    assert tensor_type(values, WEIGHT_FORMATS["q4_k_m"]).name == "Q5_K"
    assert tensor_type(replace(values, layers=64), WEIGHT_FORMATS["q3_k_m"]).name == "Q4_K"


def test_bits_carry_the_scales() -> None:
    # Q4_0: 32 weights of 4 bits and one half; Q6_K: 256 of 6 bits, 16 scales of 8 and one half.
    assert BLOCK_TYPES["Q4_0"].bits == (32 * 4 + 16) / 32 == 4.5
    assert BLOCK_TYPES["Q6_K"].bits == (256 * 6 + 16 * 8 + 16) / 256 == 6.5625
    assert BLOCK_TYPES["Q8_0"].bits == (32 * 8 + 16) / 32 == 8.5
    assert BLOCK_TYPES["MXFP4"].bits == (32 * 4 + 8) / 32 == 4.25
    # int4 in groups: a half of scale and a zero of 4 bits for each.
    assert weight_format("int4")[0].bits == 4 + 20 / 128
    assert weight_format("int4-g32")[0].bits == 4 + 20 / 32
    assert weight_format("2.7bpw")[0].bits == pytest.approx(2.7)


def test_embedding_head_and_norms_stay_wider() -> None:
    form = WEIGHT_FORMATS["q4_k_m"]
    embedding, head, *_, norm = llama(512, 1024, 8, 512, 1000, sharing=1)
    assert tensor_type(embedding, form).name == "Q4_K"
    assert tensor_type(embedding, form, is_tied=True).name == "Q6_K"
    assert tensor_type(head, form).name == "Q6_K"
    assert tensor_type(norm, form).name == "F32"
    int4 = weight_format("int4")[0]
    assert tensor_type(embedding, int4).bits == tensor_type(head, int4).bits == 16


def test_rows_that_fill_no_block_take_the_next_type() -> None:
    # 1152 = 4.5 × 256, as in Gemma-3-1B.
    narrow = WeightTensor("model.layers.3.self_attn.q_proj.weight", (1024, 1152), "attn_q", 3, 26)
    assert tensor_type(narrow, WEIGHT_FORMATS["q4_k_m"]).name == "Q5_0"
    assert tensor_type(WeightTensor("x", (4, 10), "matrix", 0, 1), WEIGHT_FORMATS["q4_0"]).name == "F16"


def test_the_runtime_has_to_have_the_format() -> None:
    assert weight_format("q4_k_m")[1] == "llama.cpp"
    assert weight_format("fp16")[1] == "torch"
    assert weight_format("fp16", "llama.cpp")[1] == "llama.cpp"
    with pytest.raises(InvalidInput, match=r"torch has no weights in q4_k_m; it has fp32, fp16, bf16, fp8, int8, int4"):
        weight_format("q4_k_m", "torch")
    with pytest.raises(InvalidInput, match="no weight format named 'q4_k_n'; closest: q4_k_s"):
        weight_format("q4_k_n")
    with pytest.raises(InvalidInput, match="runtime is 'ollama'"):
        weight_format("fp16", "ollama")
    with pytest.raises(InvalidInput, match="no format 'q2_k' for the key-value cache"):
        cache_bytes_per_value("q2_k")
