"""Bytes of the cache and FLOPs of a token, by hand."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from edge_opt.records.serving import ServingReport
from edge_opt.serving.llm_report import llm
from edge_opt.serving.serving_costs import distinct_experts
from language_models import config, small_llama

CONTEXT = 1000


def report(name: str, context: int = CONTEXT, **options: object) -> ServingReport:
    return llm(config(name), context=context, prompt=8, **options)  # type: ignore[call-overload,no-any-return]


def gated(hidden: int, inner: int) -> int:
    """MACs of gate, up and down."""
    return 3 * hidden * inner


def attention(hidden: int, query: int, key: int) -> int:
    """MACs of the projections of queries, keys, values and the output; `query` and `key` are heads × head_dim."""
    return hidden * (query + 2 * key) + query * hidden


def scores(query: int, positions: int) -> int:
    """MACs of query · key and weights · value."""
    return 2 * query * positions


def test_llama_2() -> None:
    found = report("llama-2-7b")
    assert found.memory.kv_bytes == 2 * 32 * 32 * 128 * CONTEXT * 2  # keys and values, layers, heads, width, fp16
    layer = attention(4096, 4096, 4096) + gated(4096, 11008) + scores(4096, CONTEXT)
    assert found.decode.flops_per_token == 2 * (32 * layer + 4096 * 32000)
    assert found.memory.weights_bytes == 2 * 6_738_415_616


def test_llama_3_shares_keys_among_four_heads() -> None:
    found = report("llama-3-8b")
    assert found.memory.kv_bytes == 2 * 32 * 8 * 128 * CONTEXT * 2
    layer = attention(4096, 4096, 8 * 128) + gated(4096, 14336) + scores(4096, CONTEXT)
    assert found.decode.flops_per_token == 2 * (32 * layer + 4096 * 128256)


def test_mistral_holds_its_window() -> None:
    found = report("mistral-7b", context=10_000)
    assert found.memory.kv_bytes == 2 * 32 * 8 * 128 * 4096 * 2
    layer = attention(4096, 4096, 1024) + gated(4096, 14336) + scores(4096, 4096)
    assert found.decode.flops_per_token == 2 * (32 * layer + 4096 * 32000)


def test_gemma_2_has_windows_in_every_other_layer() -> None:
    found = report("gemma-2-2b", context=8192)
    assert found.memory.kv_bytes == 2 * 4 * 256 * (13 * 4096 + 13 * 8192) * 2
    layer = attention(2304, 8 * 256, 4 * 256) + gated(2304, 9216)
    both = 13 * scores(2048, 4096) + 13 * scores(2048, 8192)
    assert found.decode.flops_per_token == 2 * (26 * layer + both + 2304 * 256000)


def test_gemma_3_has_windows_in_five_of_six_layers() -> None:
    found = report("gemma-3-1b", context=4096)
    # 26 layers: every sixth is global, so 4; the other 22 see 512 positions.
    assert found.memory.kv_bytes == 2 * 1 * 256 * (22 * 512 + 4 * 4096) * 2
    layer = attention(1152, 4 * 256, 256) + gated(1152, 6912)
    both = 22 * scores(1024, 512) + 4 * scores(1024, 4096)
    assert found.decode.flops_per_token == 2 * (26 * layer + both + 1152 * 262144)


def test_qwen_2_and_3() -> None:
    found = report("qwen2-1.5b")
    assert found.memory.kv_bytes == 2 * 28 * 2 * 128 * CONTEXT * 2
    layer = attention(1536, 1536, 256) + gated(1536, 8960) + scores(1536, CONTEXT)
    assert found.decode.flops_per_token == 2 * (28 * layer + 1536 * 151936)
    found = report("qwen3-0.6b")  # heads of 128 although 1024 / 16 is 64
    assert found.memory.kv_bytes == 2 * 28 * 8 * 128 * CONTEXT * 2
    layer = attention(1024, 2048, 1024) + gated(1024, 3072) + scores(2048, CONTEXT)
    assert found.decode.flops_per_token == 2 * (28 * layer + 1024 * 151936)


def test_mixtral_computes_two_of_eight_experts_and_holds_all() -> None:
    found = report("mixtral-8x7b")
    assert found.memory.kv_bytes == 2 * 32 * 8 * 128 * CONTEXT * 2
    layer = attention(4096, 4096, 1024) + scores(4096, CONTEXT) + 4096 * 8 + 2 * gated(4096, 14336)
    assert found.decode.flops_per_token == 2 * (32 * layer + 4096 * 32000)
    experts = found.part("experts")
    assert experts.weights_bytes == 32 * (8 * gated(4096, 14336) + 8 * 4096) * 2
    assert experts.bytes_per_step == 32 * (2 * gated(4096, 14336) + 8 * 4096) * 2


def test_deepseek_v3_caches_the_latent() -> None:
    found = report("deepseek-v3", runtime="llama.cpp")
    assert found.memory.kv_bytes == 61 * (512 + 64) * CONTEXT * 2
    # Queries through a rank of 1536; keys and values through 512, expanded for 128 heads of 128 + 128.
    heads = 128
    projections = 7168 * 1536 + 1536 * heads * 192 + 7168 * 576 + 512 * heads * 256 + heads * 128 * 7168
    # Scores over the latent and the rotated part, values over the latent.
    latent = heads * CONTEXT * (512 + 64 + 512)
    dense = 3 * gated(7168, 18432)
    mixed = 58 * (7168 * 256 + (8 + 1) * gated(7168, 2048))
    assert found.decode.flops_per_token == 2 * (61 * (projections + latent) + dense + mixed + 7168 * 129280)


def test_phi_3_has_one_projection_for_all_three() -> None:
    found = report("phi-3-mini")
    assert found.memory.kv_bytes == 2 * 32 * 32 * 96 * CONTEXT * 2
    layer = 4 * 3072 * 3072 + gated(3072, 8192) + scores(3072, CONTEXT)
    assert found.decode.flops_per_token == 2 * (32 * layer + 3072 * 32064)


def test_gpt_2_has_two_matrices_and_a_tied_head() -> None:
    found = report("gpt2")
    assert found.memory.kv_bytes == 2 * 12 * 12 * 64 * CONTEXT * 2
    layer = 4 * 768 * 768 + 2 * 768 * 3072 + scores(768, CONTEXT)
    assert found.decode.flops_per_token == 2 * (12 * layer + 768 * 50257)


def test_mamba_has_a_state_that_does_not_grow() -> None:
    short, long = report("mamba-130m", context=16), report("mamba-130m", context=100_000)
    # Per layer: 1536 channels with the last 4 inputs and 16 values of state.
    assert short.memory.kv_bytes == long.memory.kv_bytes == 24 * 1536 * (4 + 16) * 2
    in_out = 768 * 2 * 1536 + 1536 * 768
    small = 1536 * (48 + 2 * 16) + 48 * 1536 + 1536 * 16  # B, C and steps; steps to channels; state · C
    convolution = 1536 * 4 * 2  # four taps, which transformers works out for two positions and keeps one
    assert short.decode.flops_per_token == 2 * (24 * (in_out + small + convolution) + 768 * 50280)
    assert short.decode.tokens_per_s is None


def test_falcon_h1_has_both() -> None:
    found = report("falcon-h1")
    growing = 2 * 6 * 2 * 64 * CONTEXT
    # The convolution sees 1536 channels and one group's B and C of 128; the state is 24 heads of 64 × 128.
    constant = 6 * ((1536 + 2 * 128) * 4 + 24 * 64 * 128)
    assert found.memory.kv_bytes == (growing + constant) * 2


def test_olmoe() -> None:
    found = report("olmoe-1b-7b")
    assert found.memory.kv_bytes == 2 * 16 * 16 * 128 * CONTEXT * 2
    layer = attention(2048, 2048, 2048) + scores(2048, CONTEXT) + 2048 * 64 + 8 * gated(2048, 1024)
    assert found.decode.flops_per_token == 2 * (16 * layer + 2048 * 50304)
    assert found.params == 6_919_161_856


def test_experts_that_a_batch_meets() -> None:
    # One token meets 2 of 8; four tokens miss an expert with (6/8)^4.
    assert distinct_experts(8, 2, 1) == 2
    assert distinct_experts(8, 2, 4) == pytest.approx(8 * (1 - 0.75**4))
    found = report("mixtral-8x7b", batch=4)
    matrices = 32 * gated(4096, 14336) * 2
    expected = matrices * 8 * (1 - 0.75**4) + 32 * 8 * 4096 * 2
    assert found.part("experts").bytes_per_step == pytest.approx(expected, rel=1e-9)


def test_an_embedding_reads_rows_and_a_tied_head_is_streamed_once() -> None:
    apart = llm(small_llama(), context=64, prompt=8, batch=3)
    assert apart.part("embedding").bytes_per_step == 3 * 64 * 2
    assert apart.part("embedding").weights_bytes == 500 * 64 * 2
    tied = llm(small_llama(tie_word_embeddings=True), context=64, prompt=8)
    assert tied.part("head").bytes_per_step == tied.part("head").weights_bytes == 500 * 64 * 2
    assert tied.part("embedding").weights_bytes == 0
    assert tied.params == apart.params - 500 * 64


def test_parts_add_up_to_a_token() -> None:
    found = report("mixtral-8x7b", batch=2)
    assert sum(part.bytes_per_step for part in found.parts) == pytest.approx(2 * found.decode.bytes_per_token, abs=4)
    assert sum(part.flops_per_step for part in found.parts) == 2 * found.decode.flops_per_token
    assert sum(part.weights_bytes for part in found.parts) == found.memory.weights_bytes


def test_attention_across_to_an_encoder_holds_the_prompt() -> None:
    t5 = {"model_type": "t5", "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 3, "num_heads": 4,
          "vocab_size": 100, "is_encoder_decoder": True}  # fmt: skip
    from edge_opt.serving.model_source import config_from, import_transformers

    found = llm(config_from(t5, "t5", import_transformers()), context=50, prompt=20)
    # Three layers of 4 × 16 keys and values: of 50 tokens written, and of 20 read.
    assert found.memory.kv_bytes == 2 * 3 * 64 * (50 + 20) * 2


def test_quantised_cache_and_its_own_format() -> None:
    plain, narrow = report("llama-3-8b"), report("llama-3-8b", kv="q8_0")
    assert narrow.memory.kv_bytes * 32 == plain.memory.kv_bytes // 2 * 34
