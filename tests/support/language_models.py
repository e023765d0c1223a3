"""Configurations with the published dimensions of language models."""

from __future__ import annotations

from typing import Any

from edge_opt.serving.model_source import config_from, import_transformers

_LLAMA = {"model_type": "llama", "max_position_embeddings": 8192}
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
         "vocab_size")  # fmt: skip


def sized(*values: int) -> dict[str, int]:
    return dict(zip(SIZES, values, strict=True))


CONFIGS: dict[str, dict[str, Any]] = {
    "llama-2-7b": {**_LLAMA, **sized(4096, 11008, 32, 32, 32, 32000)},
    "llama-3-8b": {
        **_LLAMA, **sized(4096, 14336, 32, 32, 8, 128256), "max_position_embeddings": 131072,
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                         "original_max_position_embeddings": 8192},
    },
    "llama-3-70b": {**_LLAMA, **sized(8192, 28672, 80, 64, 8, 128256)},
    "mistral-7b": {
        "model_type": "mistral", **sized(4096, 14336, 32, 32, 8, 32000), "sliding_window": 4096,
        "max_position_embeddings": 32768,
    },
    "gemma-2-2b": {
        "model_type": "gemma2", **sized(2304, 9216, 26, 8, 4, 256000), "head_dim": 256, "sliding_window": 4096,
    },
    "gemma-3-1b": {
        "model_type": "gemma3_text", **sized(1152, 6912, 26, 4, 1, 262144), "head_dim": 256, "sliding_window": 512,
        "max_position_embeddings": 32768,
    },
    "qwen2-1.5b": {
        "model_type": "qwen2", **sized(1536, 8960, 28, 12, 2, 151936), "tie_word_embeddings": True,
        "max_position_embeddings": 32768,
    },
    "qwen3-0.6b": {
        "model_type": "qwen3", **sized(1024, 3072, 28, 16, 8, 151936), "tie_word_embeddings": True, "head_dim": 128,
        "max_position_embeddings": 40960,
    },
    "mixtral-8x7b": {
        "model_type": "mixtral", **sized(4096, 14336, 32, 32, 8, 32000), "num_local_experts": 8,
        "num_experts_per_tok": 2, "sliding_window": None, "max_position_embeddings": 32768,
    },
    "deepseek-v3": {
        "model_type": "deepseek_v3", **sized(7168, 18432, 61, 128, 128, 129280), "moe_intermediate_size": 2048,
        "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4,
        "first_k_dense_replace": 3, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128, "v_head_dim": 128, "max_position_embeddings": 163840,
    },
    "phi-3-mini": {
        "model_type": "phi3", **sized(3072, 8192, 32, 32, 32, 32064), "sliding_window": 2047,
        "max_position_embeddings": 4096, "pad_token_id": 32000,
    },
    "gpt2": {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024,
             "vocab_size": 50257},
    "mamba-130m": {"model_type": "mamba", "hidden_size": 768, "num_hidden_layers": 24, "state_size": 16,
                   "vocab_size": 50280, "expand": 2, "conv_kernel": 4, "time_step_rank": 48},
    "falcon-h1": {
        "model_type": "falcon_h1", **sized(1024, 2048, 6, 8, 2, 32784), "head_dim": 64, "mamba_d_ssm": 1536,
        "mamba_n_heads": 24, "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 128, "mamba_d_conv": 4,
        "max_position_embeddings": 16384,
    },
    "olmoe-1b-7b": {
        "model_type": "olmoe", **sized(2048, 1024, 16, 16, 16, 50304), "num_experts": 64, "num_experts_per_tok": 8,
    },
}  # fmt: skip


def config(name: str, **changes: Any) -> Any:
    return config_from({**CONFIGS[name], **changes}, name, import_transformers())


def small_llama(**changes: Any) -> Any:
    """Four layers of 64: head_dim 16, two heads share one key head."""
    return config("llama-2-7b", **{**sized(64, 160, 4, 4, 2, 500), "max_position_embeddings": 512, **changes})
