"""Small GGUF and safetensors files, written with the packages that people write them with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from edge_opt.serving.model_source import config_from, import_transformers

Shapes = dict[str, tuple[tuple[int, ...], str]]

# Bytes of zeros are valid blocks of every type: one buffer serves all tensors.
_TYPES: Any = gguf.GGMLQuantizationType


def write_gguf(
    path: Path, architecture: str, numbers: dict[str, Any], tensors: Shapes,
    words: int = 0, split: int = 0,
) -> Path:  # fmt: skip
    """Write a file with tensors of these shapes (rows last) and types; `numbers` are of the architecture."""
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=split)
    for key, value in numbers.items():
        name = key if key.startswith("general.") else f"{architecture}.{key}"
        if isinstance(value, list):
            writer.add_array(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        else:
            writer.add_uint32(name, value)
    if words:
        writer.add_token_list([f"word{number}" for number in range(words)])
    for name, (shape, kind) in tensors.items():
        block, block_bytes = gguf.GGML_QUANT_SIZES[_TYPES[kind]]
        stored = np.zeros((*shape[:-1], shape[-1] // block * block_bytes), np.uint8)
        writer.add_tensor(name, stored, raw_dtype=_TYPES[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def moe_layer(hidden: int, inner: int, experts: int, kind: str = "Q4_K") -> Shapes:
    """The router and the experts of a layer."""
    return {
        "ffn_gate_inp": ((experts, hidden), "F32"), "ffn_gate_exps": ((experts, inner, hidden), kind),
        "ffn_up_exps": ((experts, inner, hidden), kind), "ffn_down_exps": ((experts, hidden, inner), kind),
    }  # fmt: skip


def mla_layer(hidden: int, heads: int, q_rank: int, rank: int, rope: int, nope: int) -> Shapes:
    """The attention of a layer with a latent of keys and values, as llama.cpp stores it since its MLA."""
    return {
        "attn_q_a": ((q_rank, hidden), "Q4_K"), "attn_q_b": ((heads * (nope + rope), q_rank), "Q8_0"),
        "attn_kv_a_mqa": ((rank + rope, hidden), "Q4_K"), "attn_k_b": ((heads, rank, nope), "Q8_0"),
        "attn_v_b": ((heads, nope, rank), "Q8_0"), "attn_output": ((hidden, heads * nope), "Q4_K"),
        "attn_q_a_norm": ((q_rank,), "F32"), "attn_kv_a_norm": ((rank,), "F32"),
    }  # fmt: skip


def decoder(
    hidden: int, inner: int, layers: int, words: int, *, key: int = 0, head: str = "Q6_K", fused: bool = False,
    attention: Shapes | None = None, mlp: Shapes | None = None, more: Shapes | None = None,
) -> Shapes:  # fmt: skip
    """The tensors of a decoder in a mix like Q4_K_M; `key` is the width of all key heads, `head` "" if tied."""
    if attention is None and fused:
        attention = {"attn_qkv": ((hidden + 2 * key, hidden), "Q5_K"), "attn_output": ((hidden, hidden), "Q4_K")}
    elif attention is None:
        attention = {"attn_q": ((hidden, hidden), "Q4_K"), "attn_k": ((key, hidden), "Q4_K"),
                     "attn_v": ((key, hidden), "Q6_K"), "attn_output": ((hidden, hidden), "Q4_K")}  # fmt: skip
    if mlp is None:
        mlp = {"ffn_gate": ((inner, hidden), "Q4_K"), "ffn_up": ((inner, hidden), "Q4_K"),
               "ffn_down": ((hidden, inner), "Q6_K")}  # fmt: skip
    norms: Shapes = {"attn_norm": ((hidden,), "F32"), "ffn_norm": ((hidden,), "F32")}
    tensors: Shapes = {"token_embd.weight": ((words, hidden), "Q4_K" if head else "Q6_K")}
    if head:
        tensors["output.weight"] = ((words, hidden), head)
    tensors["output_norm.weight"] = ((hidden,), "F32")
    for layer in range(layers):
        parts = attention | mlp | norms | (more or {})
        tensors |= {f"blk.{layer}.{kind}.weight": item for kind, item in parts.items()}
    return tensors


def write_folder(folder: Path, configuration: dict[str, Any], shards: int = 1, dtype: str = "bfloat16") -> Path:
    """Write a transformers model of this configuration with random weights, as `save_pretrained` does."""
    import torch

    transformers = import_transformers()
    config = config_from(configuration, "test", transformers)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    size = sum(value.numel() * value.itemsize for value in model.parameters())
    model.save_pretrained(folder, max_shard_size=size // shards + 1 if shards > 1 else "50GB")
    (folder / "generation_config.json").unlink(missing_ok=True)
    assert json.loads((folder / "config.json").read_text())["model_type"]
    return folder
