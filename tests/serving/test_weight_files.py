"""GGUF and safetensors files: every byte of their tensors, the cache by hand, and headers that lie."""

from __future__ import annotations

import json
import struct
import time
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import edge_opt as eo
from edge_opt.errors import EdgeOptError, InvalidInput, ModelNotFound
from edge_opt.serving.llm_report import llm
from edge_opt.serving.weight_files import find_weight_file, read_gguf
from language_models import CONFIGS, small_llama
from weight_files import Shapes, decoder, mla_layer, moe_layer, write_folder, write_gguf

# Bytes of a block of 256: Q4_K 144, Q6_K 210; of 32: Q8_0 34, MXFP4 17.
H, F, L, V = 256, 512, 4, 1000
NUMBERS = {"block_count": L, "embedding_length": H, "context_length": 4096, "attention.head_count": 8}


def llama_file(path: Path, split: int = 0) -> Path:
    numbers = {**NUMBERS, "attention.head_count_kv": 4, "rope.freq_base": 5e5, "general.file_type": 15}
    return write_gguf(path, "llama", numbers, decoder(H, F, L, V, key=128), words=V, split=split)


def test_weights_are_the_bytes_of_the_tensors(tmp_path: Path) -> None:
    found: Any = llm(llama_file(tmp_path / "tiny.gguf"), context=512, prompt=64)
    embedding, head = V * 144, V * 210
    layer = (H + 128 + H) * 144 + 128 * 210 + 2 * F * 144 + H * 2 * 210  # q, k and output; v; gate and up; down
    assert found.memory.weights_bytes == embedding + head + H * 4 + L * (layer + 2 * H * 4)
    assert found.memory.weights_bytes == sum(item.stored_bytes for item in found.file.types) == found.file.tensor_bytes
    assert sum(part.weights_bytes for part in found.parts) == found.memory.weights_bytes
    counts = {item.name: item.tensors for item in found.file.types}
    assert counts == {"Q4_K": 5 * L + 1, "Q6_K": 2 * L + 1, "F32": 2 * L + 1}
    assert found.memory.kv_bytes == L * 2 * 128 * 512 * 2  # 4 key heads of 32, in 16 bits
    assert (found.weights, found.runtime, found.file.tokens, found.file.rope_base) == ("q4_k_m", "llama.cpp", V, 5e5)
    assert found.file.tokenizer_bytes > 8 * V and found.max_context == 4096


def test_a_file_costs_what_its_configuration_costs(tmp_path: Path) -> None:
    sizes = {"hidden_size": H, "intermediate_size": F, "num_hidden_layers": L, "vocab_size": V}
    traced: Any = llm(small_llama(**sizes, num_attention_heads=8, num_key_value_heads=4), context=512, prompt=64)
    found: Any = llm(llama_file(tmp_path / "tiny.gguf"), context=512, prompt=64)
    assert (found.params, found.active_params) == (traced.params, traced.active_params)
    assert found.decode.flops_per_token == traced.decode.flops_per_token
    assert found.prefill.flops == traced.prefill.flops and found.memory.kv_bytes == traced.memory.kv_bytes


def test_any_part_of_a_split_file_names_all(tmp_path: Path) -> None:
    whole: Any = llm(llama_file(tmp_path / "one.gguf"), context=64)
    (tmp_path / "parts").mkdir()
    llama_file(tmp_path / "parts" / "m.gguf", split=10)
    names = sorted(file.name for file in (tmp_path / "parts").iterdir())
    assert len(names) == 4 and names[0] == "m-00001-of-00004.gguf"
    for path in (tmp_path / "parts" / names[2], tmp_path / "parts"):
        found: Any = llm(path, context=64)
        assert found.memory.weights_bytes == whole.memory.weights_bytes and found.file.parts == 4
        assert found.model == "m" and found.file.tokens == V
    (tmp_path / "parts" / names[1]).unlink()
    with pytest.raises(ModelNotFound, match="1 of 4 parts are missing, 'm-00002"):
        llm(tmp_path / "parts")


MQA = {**NUMBERS, "attention.head_count_kv": 1, "attention.key_length": 64, "attention.value_length": 64}
WINDOW = {**NUMBERS, "block_count": 6, "attention.head_count_kv": 4, "attention.key_length": 32,
          "attention.value_length": 32, "attention.sliding_window": 128}  # fmt: skip
MLA = {**NUMBERS, "attention.head_count_kv": 1, "attention.kv_lora_rank": 64, "attention.q_lora_rank": 96,
       "rope.dimension_count": 32, "attention.key_length": 96, "attention.value_length": 64,
       "attention.key_length_mla": 96, "attention.value_length_mla": 64, "expert_count": 8,
       "expert_used_count": 2}  # fmt: skip
EXPERTS = {**NUMBERS, "attention.head_count_kv": 4, "expert_count": 8, "expert_used_count": 2}
GPT_OSS = {**EXPERTS, "attention.sliding_window": 128}
QWEN3 = {**NUMBERS, "attention.head_count_kv": 2, "attention.key_length": 64, "attention.value_length": 64}
QK_NORMS = {"attn_q_norm": ((64,), "F32"), "attn_k_norm": ((64,), "F32")}
# Architecture, numbers, tensors, and the values of the cache at 512 positions, by hand.
FILES: dict[str, tuple[str, dict[str, Any], Shapes, int]] = {
    "MHA": ("llama", NUMBERS, decoder(H, F, L, V, key=H), L * 2 * H * 512),
    "GQA": ("llama", {**NUMBERS, "attention.head_count_kv": 2}, decoder(H, F, L, V, key=64), L * 2 * 64 * 512),
    "MQA": ("llama", MQA, decoder(H, F, L, V, key=64), L * 2 * 64 * 512),
    "Qwen3, tied": ("qwen3", QWEN3, decoder(H, F, L, V, key=128, head="", more=QK_NORMS), L * 2 * 128 * 512),
    "Phi, fused": ("phi3", {**NUMBERS, "attention.head_count_kv": 4},
                   decoder(H, F, L, V, key=128, fused=True), L * 2 * 128 * 512),
    # Five of six layers see 128 positions.
    "Gemma 3": ("gemma3", WINDOW, decoder(H, F, 6, V, key=128, head=""), 2 * 128 * (5 * 128 + 512)),
    "Mixtral": ("llama", EXPERTS, decoder(H, F, L, V, key=128, mlp=moe_layer(H, F, 8)), L * 2 * 128 * 512),
    "GPT-OSS": ("gpt-oss", GPT_OSS, decoder(H, F, L, V, key=128, mlp=moe_layer(H, F, 8, "MXFP4")),
                2 * 128 * (2 * 128 + 2 * 512)),
    # The latent of 64 and the rotary part of 32, once for keys and values.
    "DeepSeek": ("deepseek2", MLA, decoder(H, F, L, V, attention=mla_layer(H, 8, 96, 64, 32, 64),
                                           mlp=moe_layer(H, F, 8)), L * (64 + 32) * 512),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_the_cache_of_an_architecture_is_that_of_the_hand_formula(tmp_path: Path, name: str) -> None:
    architecture, numbers, tensors, values = FILES[name]
    path = write_gguf(tmp_path / "m.gguf", architecture, numbers, tensors)
    found: Any = llm(path, target="apple-m1", context=512, prompt=64)
    header = find_weight_file(path)
    assert header is not None and found.memory.weights_bytes == header.tensor_bytes
    assert found.memory.kv_bytes == values * 2
    assert found.decode.tokens_per_s > 0 and not any("taken to be read whole" in text for text in found.remarks)
    if "expert_count" in numbers:
        # Three matrices of each of 8 experts, of which two are met.
        experts = L * 3 * 8 * H * F
        assert found.params - found.active_params == pytest.approx(experts * 6 / 8 + V * H)
        streamed = found.part("experts").bytes_per_step
        assert 0.25 <= streamed / found.part("experts").weights_bytes < 0.27  # and the router


def test_a_mixtral_file_costs_what_its_configuration_costs(tmp_path: Path) -> None:
    architecture, numbers, tensors, _ = FILES["Mixtral"]
    found: Any = llm(write_gguf(tmp_path / "m.gguf", architecture, numbers, tensors), context=512, prompt=64)
    sizes = {"hidden_size": H, "intermediate_size": F, "num_hidden_layers": L, "vocab_size": V,
             "num_attention_heads": 8, "num_key_value_heads": 4}  # fmt: skip
    traced: Any = llm({**CONFIGS["mixtral-8x7b"], **sizes}, weights="q4_k_m", context=512, prompt=64)
    assert (found.params, found.active_params) == (traced.params, traced.active_params)
    assert found.decode.flops_per_token == traced.decode.flops_per_token


SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": 300, "max_position_embeddings": 512}  # fmt: skip
FOLDERS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **SMALL},
    "qwen3": {"model_type": "qwen3", **SMALL, "head_dim": 16, "tie_word_embeddings": True},
    "gemma3": {"model_type": "gemma3_text", **SMALL, "head_dim": 16, "sliding_window": 32},
    "phi3": {"model_type": "phi3", **SMALL, "pad_token_id": 0},
    "mistral": {"model_type": "mistral", **SMALL, "sliding_window": 32},
    "mixtral": {"model_type": "mixtral", **SMALL, "num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek": {"model_type": "deepseek_v3", **SMALL, "num_key_value_heads": 4, "moe_intermediate_size": 32,
                 "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "q_lora_rank": 32,
                 "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
                 "first_k_dense_replace": 1},
    "gpt-oss": {"model_type": "gpt_oss", **SMALL, "head_dim": 16, "num_local_experts": 4, "sliding_window": 32,
                "num_experts_per_tok": 2, "layer_types": ["sliding_attention", "full_attention"]},
}  # fmt: skip


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_is_its_configuration_with_the_bytes_of_its_files(tmp_path: Path, name: str) -> None:
    folder = write_folder(tmp_path / name, FOLDERS[name], shards=2)
    found: Any = llm(folder, context=64, prompt=8)
    sizes = 0
    for file in folder.glob("*.safetensors"):
        content = file.read_bytes()
        header = json.loads(content[8 : 8 + struct.unpack("<Q", content[:8])[0]])
        sizes += sum(item["data_offsets"][1] - item["data_offsets"][0] for key, item in header.items() if key[0] != "_")
    assert found.memory.weights_bytes == sizes and (found.weights, found.file.parts >= 2) == ("bf16", True)
    traced: Any = llm(folder / "config.json", weights="bf16", context=64, prompt=8)
    # A file also holds the router's buffer of DeepSeek, one value for each expert.
    assert 0 <= found.params - traced.params <= 4 and 0 <= found.active_params - traced.active_params <= 4
    assert found.memory.kv_bytes == traced.memory.kv_bytes
    assert found.decode.bytes_per_token == pytest.approx(traced.decode.bytes_per_token, rel=1e-3)
    assert not any("taken to be read whole" in text for text in found.remarks)


def test_a_folder_tells_its_window_rope_and_vocabulary(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "gemma3", FOLDERS["gemma3"])
    (folder / "tokenizer.json").write_text("x" * 1234)
    summary = llm(folder, context=64, prompt=8).file  # type: ignore[union-attr]
    assert (summary.window, summary.rope_base, summary.tokens, summary.tokenizer_bytes) == (32, 1e6, 300, 1234)
    folder = write_folder(tmp_path / "llama", {**FOLDERS["llama"], "rope_theta": 5e5})
    summary = llm(folder, context=64, prompt=8).file  # type: ignore[union-attr]
    assert (summary.window, summary.rope_base, summary.tokenizer_bytes) == (None, 5e5, None)


def test_a_format_that_contradicts_the_file_is_refused(tmp_path: Path) -> None:
    path = llama_file(tmp_path / "tiny.gguf")
    assert llm(path, weights="Q4_K_M", context=64).weights == "q4_k_m"  # type: ignore[union-attr]
    with pytest.raises(InvalidInput, match=r"weights is 'q8_0', and tiny.gguf holds q4_k_m; drop weights="):
        llm(path, weights="q8_0")
    with pytest.raises(InvalidInput, match=r"gguf files in q4_k_m are run by llama.cpp"):
        llm(path, runtime="torch")
    folder = write_folder(tmp_path / "f", FOLDERS["llama"])
    with pytest.raises(InvalidInput, match="holds bf16"):
        llm(folder, weights="q4_k_m")


def test_a_header_of_hundreds_of_shards_is_read_in_two_seconds(tmp_path: Path) -> None:
    # 300 sparse files with 100 tensors of 14 MB each: 425 GB, of which nothing but headers is on the disk.
    size = 2 * 1024 * 6912
    names: dict[str, str] = {}
    for shard in range(300):
        header: dict[str, Any] = {f"model.layers.{shard}.experts.{item}.w1.weight": {
            "dtype": "BF16", "shape": [1024, 6912], "data_offsets": [item * size, (item + 1) * size]}
            for item in range(100)}  # fmt: skip
        text = json.dumps(header).encode()
        path = tmp_path / f"model-{shard + 1:05d}-of-00300.safetensors"
        with path.open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            file.truncate(8 + len(text) + 100 * size)
        names |= dict.fromkeys(header, path.name)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    start = time.process_time()
    found = find_weight_file(tmp_path)
    assert time.process_time() - start < 2
    assert found is not None and found.tensor_bytes == 300 * 100 * size > 400e9 and found.parts == 300


def gguf_bytes(tensors: int = 0, fields: int = 0, rest: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, fields) + rest


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def one_tensor(name: str, width: int) -> bytes:
    architecture = text("general.architecture") + struct.pack("<I", 8) + text("llama")
    layers = text("llama.block_count") + struct.pack("<II", 4, 1)
    tensor = text(name) + struct.pack("<IQQIQ", 2, width, 4, 0, 0)
    return gguf_bytes(1, 2, architecture + layers + tensor + bytes(32 + 16 * width))


DEEP = text("a") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 5000
HOSTILE = {
    "empty": b"",
    "another file": b"PK\x03\x04" * 20,
    "cut off": gguf_bytes(1, 1, text("general.architecture")[:9]),
    "10^9 tensors": gguf_bytes(10**9, 0),
    "10^18 fields": gguf_bytes(0, 10**18),
    "a name longer than the file": gguf_bytes(0, 1, struct.pack("<Q", 2**62)),
    "a list longer than the file": gguf_bytes(0, 1, text("a") + struct.pack("<IIQ", 9, 4, 2**60)),
    "strings without end": gguf_bytes(0, 1, text("a") + struct.pack("<IIQ", 9, 8, 2**60)),
    "lists in lists": gguf_bytes(0, 1, DEEP),
    "an unknown type": gguf_bytes(0, 1, text("a") + struct.pack("<I", 77)),
    "no architecture": gguf_bytes(0, 0),
    "a tensor beyond the file": gguf_bytes(1, 0, text("a") + struct.pack("<IQQIQ", 2, 2**40, 2**20, 0, 0)),
    "200 000 tensors": gguf_bytes(200_000, 0, (text("a") + struct.pack("<IQIQ", 1, 1, 0, 0)) * 200_000),
    # A vocabulary alone was answered with 0 bytes and 0 FLOPs.
    "no tensors": gguf_bytes(0, 1, text("general.architecture") + struct.pack("<I", 8) + text("llama")),
    "one of 65535 parts": gguf_bytes(
        0,
        2,
        text("general.architecture")
        + struct.pack("<I", 8)
        + text("llama")
        + text("split.count")
        + struct.pack("<IH", 2, 65535),
    ),
    "no elements": one_tensor("token_embd.weight", 0),
    "as many sizes as fit": gguf_bytes(1, 0, text("a") + struct.pack("<I", 2**31)),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_gguf_header_ends_in_one_sentence(tmp_path: Path, name: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(HOSTILE[name])
    start = time.process_time()
    with pytest.raises(EdgeOptError) as caught:
        llm(path)
    assert time.process_time() - start < 1 and "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_a_context_of_no_positions_is_not_known(tmp_path: Path) -> None:
    # It was "the maximum is 0; ask for less".
    fields = {"llama.block_count": 1, "llama.context_length": 0, "llama.attention.head_count": 1}
    rest = text("general.architecture") + struct.pack("<I", 8) + text("llama")
    rest += b"".join(text(name) + struct.pack("<II", 4, value) for name, value in fields.items())
    rest += text("token_embd.weight") + struct.pack("<IQQIQ", 2, 32, 8, 0, 0)
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes(1, 4, rest) + b"\0" * 2000)
    found: Any = llm(path)
    assert found.max_context is None and found.context == 4096


def test_a_layer_with_a_number_of_6000_digits_is_no_layer(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(one_tensor(f"blk.{'9' * 6000}.attn_q.weight", 4))
    assert llm(path).params == 4 * 4


def test_the_limit_of_a_header_holds_in_a_file_of_terabytes(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    for kind in (8, 4):  # strings, numbers
        with path.open("wb") as file:
            file.write(gguf_bytes(0, 1, text("a") + struct.pack("<IIQ", 9, kind, 10**9)))
            file.truncate(1 << 40)
        start = time.process_time()
        with pytest.raises(ModelNotFound):
            read_gguf([path])
        assert time.process_time() - start < 1


MANY = (
    "{" + ",".join(f'"t{i}":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}' for i in range(300_000)) + "}"
).encode()
HEADERS = {
    "300 000 tensors": struct.pack("<Q", len(MANY)) + MANY,
    "beyond the file": struct.pack("<Q", 2**40) + b"{}",
    "not JSON": struct.pack("<Q", 4) + b"[[[[",
    "deep": struct.pack("<Q", 60_000) + b"[" * 60_000,
    "tensor beyond": struct.pack("<Q", 61) + b'{"a":{"dtype":"F32","shape":[1000],"data_offsets":[0,4000]}}   ',
    "no tensors": struct.pack("<Q", 2) + b"{}",
    "of another model": struct.pack("<Q", 54) + b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}  x',
    "overflow": struct.pack("<Q", 81)
    + b'{"a":{"dtype":"F32","shape":[9999999999,9999999999,99],"data_offsets":[0,40]}}   ',
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_hostile_safetensors_header_ends_in_one_sentence(tmp_path: Path, name: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(HEADERS[name])
    (tmp_path / "config.json").write_text(json.dumps(FOLDERS["llama"]))
    start = time.process_time()
    with pytest.raises(ModelNotFound) as caught:
        llm(tmp_path)
    assert time.process_time() - start < 1 and "\n" not in str(caught.value)


def test_an_index_names_files_beside_it_and_tensors_that_exist(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "f", FOLDERS["llama"], shards=2)
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    for change, message in (
        ({"x": "../../etc/passwd"}, "not a file beside it"),
        ({"x": "model-00009-of-00009.safetensors"}, "files are missing"),
        ({"x": sorted(content["weight_map"].values())[0]}, "names 'x', which no file holds"),
    ):
        index.write_text(json.dumps({"weight_map": content["weight_map"] | change}))
        with pytest.raises(ModelNotFound, match=message):
            llm(folder)
    index.write_text(json.dumps(content))
    first = min(folder.glob("model-*.safetensors"))
    assert llm(first).memory.weights_bytes == llm(folder).memory.weights_bytes
    for path in folder.glob("model-*.safetensors"):
        if path != first:
            path.unlink()
    with pytest.raises(ModelNotFound, match="files are missing"):
        llm(folder)
    index.write_text("[]")
    with pytest.raises(ModelNotFound, match="has no weight_map"):
        llm(folder)


def test_a_folder_is_a_model_wherever_one_is_taken(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**FOLDERS["llama"], "architectures": ["LlamaForCausalLM"]}))
    ids = torch.zeros(1, 8, dtype=torch.int64)
    profile = eo.profile(str(tmp_path), ids)
    assert profile.name == tmp_path.name
    # Two layers of attention and MLP, the head, and scores: 8 tokens.
    matrices = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96) + 300 * 64
    scores = 2 * 2 * 4 * 16 * 8
    assert profile.totals.macs == pytest.approx(8 * (matrices + scores), rel=0.01)
