"""The answer as a whole: memory to the byte, speed on a device, side by side, and what is refused."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("transformers")

import edge_opt as eo
from edge_opt.boards.catalog import device
from edge_opt.errors import InvalidInput, ModelNotFound
from edge_opt.records.serving import ServingComparison
from edge_opt.serving.llm_report import llm, peak_bytes
from edge_opt.serving.model_source import import_transformers
from edge_opt.serving.token_trace import filled_cache
from language_models import CONFIGS, config, small_llama

PI = "raspberry-pi-5"


def test_a_70b_is_answered_from_its_configuration() -> None:
    assert llm(config("llama-3-70b"), target=PI, weights="q4_k_m", context=8192).params == 70_553_706_496


def test_decoding_is_bandwidth_over_bytes() -> None:
    found = llm(config("llama-2-7b"), target=PI, weights="q8_0", context=512)
    # 0.58 of 17 GB/s; every weight but the embedding's table in 34 bytes for 32, norms in 4; the cache in fp16.
    matrices = 32 * (4 * 4096 * 4096 + 3 * 4096 * 11008) + 32000 * 4096
    norms = (2 * 32 + 1) * 4096 * 4
    row = 4096 * 34 // 32
    cache = 2 * 32 * 4096 * 512 * 2
    nbytes = matrices * 34 // 32 + norms + row + cache
    assert found.decode.bytes_per_token == nbytes
    operators = 32 * 36 + 17  # each ends with four threads waiting for each other
    assert found.decode.tokens_per_s == pytest.approx(1 / (nbytes / (0.58 * 17e9) + operators * 4 * 0.5e-6))
    assert found.decode.bound == "memory"
    assert found.decode.low is not None and found.decode.high is not None
    assert found.decode.low < found.decode.tokens_per_s < found.decode.high
    assert found.decode_at_start.tokens_per_s is not None
    assert found.energy_per_token is not None and found.energy_per_token.source == "proxy"
    assert found.energy_per_token.joules == pytest.approx(11.0 / found.decode.tokens_per_s)
    assert [point.context for point in found.curve] == [128, 256, 512]


def test_rows_that_fill_no_block_of_256_take_longer_on_a_gpu_that_unpacks_to_floats() -> None:
    narrow = {
        "model_type": "llama", "hidden_size": 96, "intermediate_size": 224, "num_hidden_layers": 1, "vocab_size": 64,
        "num_attention_heads": 3, "num_key_value_heads": 3, "max_position_embeddings": 128,
    }  # fmt: skip
    mixed, plain = llm(narrow, target="apple-m1", weights=["q4_k_m", "q4_0"], context=64, prompt=8).reports
    rate = 0.89 * 68e9
    # Queries, keys, outputs, gate and up become Q5_0 of 5.5 bits; values and down, of the last layer, Q8_0.
    slow = 3 * 96 * 96 + 2 * 224 * 96
    extra = slow * (73 / 2.6e12 - 5.5 / 8 / rate)
    streaming = (mixed.decode.bytes_per_token - plain.decode.bytes_per_token) / rate
    assert mixed.decode.seconds_per_step - plain.decode.seconds_per_step == pytest.approx(streaming + extra)


def test_llama_cpp_passes_over_the_state_of_a_delta_net_again_and_again() -> None:
    small = {
        "model_type": "qwen3_next", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 2,
        "linear_key_head_dim": 16, "linear_value_head_dim": 16, "num_experts": 0, "vocab_size": 64,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 128,
    }  # fmt: skip
    state = {}
    for runtime in ("llama.cpp", "torch"):
        found = llm(small, weights="fp16", runtime=runtime, context=64, prompt=8)
        cache = 2 * 32 * 64 * 2  # keys and values of one head of 32, 64 positions, 16 bits
        state[runtime] = next(part.bytes_per_step for part in found.parts if part.name == "kv") - cache
    # 14 passes over values of 32 bits, and two over those of 16.
    assert state["llama.cpp"] == 14 * state["torch"] > 0


def test_prefill_runs_at_the_matrix_rate() -> None:
    found = llm(config("llama-2-7b"), target=PI, weights="q8_0", context=512, prompt=64).prefill
    layer = 4 * 4096 * 4096 + 3 * 4096 * 11008 + 2 * 64 * 4096
    assert found.flops == 2 * (64 * 32 * layer + 4096 * 32000)  # the head sees the last token only
    assert found.seconds == pytest.approx(found.flops / (0.1 * 614.4e9), rel=0.001)  # and 3 ms of overhead
    assert found.tokens_per_s == pytest.approx(64 / found.seconds)
    assert found.bound == "compute"


def test_half_the_threads_multiply_half_as_fast_and_wait_half_as_long() -> None:
    four, two = (llm(config("qwen2-1.5b"), target=PI, weights="q8_0", context=64, threads=n) for n in (4, 2))
    assert four.prefill.seconds and two.prefill.seconds and four.decode.tokens_per_s and two.decode.tokens_per_s
    assert two.prefill.seconds == pytest.approx(2 * four.prefill.seconds, rel=0.02)
    waits = (28 * 36 + 17) * 2 * 0.5e-6
    assert 1 / four.decode.tokens_per_s - 1 / two.decode.tokens_per_s == pytest.approx(waits)


def test_memory_and_the_verdict() -> None:
    found = llm(config("llama-3-8b"), target=PI, weights="q4_k_m", context=4096).memory
    tensors = found.weights_bytes + found.buffer_bytes + found.kv_bytes + found.input_bytes + found.activation_bytes
    assert found.total_bytes == tensors + found.runtime_bytes
    assert found.fits is False and found.missing_bytes == found.total_bytes - (4 << 30)
    assert found.fitting_ram_bytes == (8 << 30, 16 << 30) and found.limit_bytes == 8 << 30
    per_position = 2 * 32 * 8 * 128 * 2
    spare = (8 << 30) - found.total_bytes
    assert found.longest_context == 4096 + spare // per_position
    assert found.largest_batch is not None and found.largest_batch > 1
    mine = llm(config("llama-3-8b"), target=PI, weights="q4_k_m", context=4096, ram_gib=8).memory
    assert mine.fits is True and mine.missing_bytes == 0


class Watch(TorchDispatchMode):
    """Bytes of every storage that an operator returned and somebody still holds."""

    def __init__(self, held: list[torch.Tensor]) -> None:
        super().__init__()
        self.alive: dict[int, Any] = {}  # a weak reference by address
        self.bytes = self.peak = 0
        for tensor in held:
            self.note(tensor)
        del held, tensor

    def note(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        address, size = storage._cdata, storage.nbytes()
        if address in self.alive:
            return

        def gone(_: Any) -> None:
            del self.alive[address]
            self.bytes -= size

        self.alive[address] = weakref.ref(storage, gone)
        self.bytes += size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for item in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(item, torch.Tensor):
                self.note(item)
        self.peak = max(self.peak, self.bytes)
        return result


@pytest.mark.parametrize(("context", "prompt", "batch"), [(300, 1, 1), (300, 40, 1), (128, 100, 2)])
def test_static_peak_is_the_measured_one_to_the_byte(context: int, prompt: int, batch: int) -> None:
    """A real loop in torch on the CPU: the prompt, then tokens until the context is full."""
    configuration = small_llama()
    static = llm(configuration, weights="fp32", context=context, prompt=prompt, batch=batch).memory
    torch.manual_seed(0)
    model = import_transformers().AutoModelForCausalLM.from_config(configuration).eval()
    own = [*model.parameters(), *model.buffers()]
    prompt_ids, one = torch.zeros(batch, prompt, dtype=torch.int64), torch.zeros(batch, 1, dtype=torch.int64)
    with torch.no_grad():
        with (watch := Watch([*own, prompt_ids])):
            cache = model(input_ids=prompt_ids, use_cache=True, logits_to_keep=1).past_key_values
        del prompt_ids
        peak = watch.peak
        with (watch := Watch([*own, one, *_held(cache)])):
            for _ in range(context - prompt):
                model(input_ids=one, past_key_values=cache, use_cache=True, logits_to_keep=1)
    assert static.total_bytes == max(peak, watch.peak)


def _held(cache: Any) -> list[torch.Tensor]:
    return [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]


def test_the_measured_peak_agrees() -> None:
    configuration = small_llama()
    model = import_transformers().AutoModelForCausalLM.from_config(configuration).eval()
    static = llm(configuration, weights="fp32", context=200, prompt=1).memory
    with torch.no_grad():
        cache = model(input_ids=torch.zeros(1, 4, dtype=torch.int64), use_cache=True).past_key_values
        peak = peak_bytes(model, torch.zeros(1, 1, dtype=torch.int64), lambda: filled_cache(cache, 199))
    assert peak == static.total_bytes


def test_formats_and_targets_side_by_side(tmp_path: Path) -> None:
    found = llm(small_llama(), target=[PI, "apple-m1"], weights=["q8_0", "fp16"], context=128)
    assert isinstance(found, ServingComparison)
    assert [(item.target, item.weights) for item in found.reports] == [
        (PI, "q8_0"), (PI, "fp16"), ("apple-m1", "q8_0"), ("apple-m1", "fp16"),
    ]  # fmt: skip
    assert "apple-m1" in str(found)
    for name in ("out.json", "out.md", "out.txt", "out.html"):
        text = found.save(tmp_path / name).read_text(encoding="utf-8")
        assert "q8_0" in text
    document = json.loads((tmp_path / "out.json").read_text())
    assert document["format"] == "edge_opt.llm" and len(document["reports"]) == 4
    assert document["reports"][0]["memory"]["fits"] is True
    with pytest.raises(InvalidInput, match=r"use one of \.html, \.json, \.md, \.txt"):
        found.save(tmp_path / "out.pdf")


class Tiny(nn.Module):
    """A causal model of nobody's make: one layer, its cache two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.attn = nn.Linear(32, 96, bias=False)
        self.lm_head = nn.Linear(32, 50, bias=False)

    def forward(self, ids: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        query, key, value = self.attn(self.embed(ids)).chunk(3, -1)
        keys, values = torch.cat([keys, key], 1), torch.cat([values, value], 1)
        return self.lm_head(nn.functional.scaled_dot_product_attention(query, keys, values)[:, -1])


def _tiny_inputs(tokens: int, past: int, batch: int) -> dict[str, Any]:
    state = torch.empty(batch, past, 32, device="meta")
    return {"ids": torch.zeros(batch, tokens, dtype=torch.int64), "keys": state, "values": state.clone()}


def test_a_module_of_ones_own() -> None:
    found = llm(Tiny(), weights="fp32", context=100, prompt=10, inputs=_tiny_inputs)
    assert found.memory.kv_bytes == 2 * 32 * 100 * 4
    assert found.decode.flops_per_token == 2 * (32 * 96 + 32 * 50 + 2 * 32 * 100)
    assert found.part("embedding").bytes_per_step == 32 * 4
    with pytest.raises(InvalidInput, match="Tiny is not a transformers model; pass inputs="):
        llm(Tiny())


def test_of_a_model_that_sees_the_text_part_alone_is_counted() -> None:
    text = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128}  # fmt: skip
    eye = {"model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
           "num_attention_heads": 2, "image_size": 28, "patch_size": 14}  # fmt: skip
    found = llm(
        {"model_type": "llava", "text_config": text, "vision_config": eye, "image_token_index": 127}, context=32
    )
    layer = 64 * (64 + 2 * 32 + 64) + 3 * 64 * 96 + 2 * 64
    assert found.params == 2 * layer + 64 + 2 * 128 * 64
    assert any("the text part alone" in remark for remark in found.remarks)


def test_a_state_that_does_not_grow_is_the_models_own() -> None:
    rwkv = {"model_type": "rwkv", "hidden_size": 64, "num_hidden_layers": 3, "vocab_size": 128, "context_length": 256}
    short, long = (llm(rwkv, weights="fp32", context=size, prompt=8) for size in (16, 64))
    assert short.memory.kv_bytes == long.memory.kv_bytes == 3 * 64 * 5 * 4  # five vectors per layer
    griffin = {"model_type": "recurrent_gemma", "num_hidden_layers": 3, "hidden_size": 64, "vocab_size": 128,
               "intermediate_size": 96, "lru_width": 64, "num_attention_heads": 2}  # fmt: skip
    with pytest.raises(InvalidInput, match="'recurrent_gemma' hands out nothing of what it remembers"):
        llm(griffin, context=16, prompt=4)


def test_a_folder_and_a_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIGS["qwen3-0.6b"]}))
    found = llm(tmp_path, context=64)
    assert found.model == tmp_path.name and found.params == llm(str(tmp_path / "config.json"), context=64).params


REFUSED: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
    ("no/such/folder", {}, ModelNotFound, "no folder and no file 'no/such/folder'; a language model is hf:"),
    (3, {}, InvalidInput, "a language model is hf:ORG/NAME.*this is a int"),
    ("llama-2-7b", {"context": 9000}, InvalidInput, "the maximum of .* is 8192 .no RoPE scaling."),
    ("llama-3-8b", {"context": 200_000}, InvalidInput, "131072 .RoPE scaling llama3, factor 8, from 8192"),
    ("llama-2-7b", {"context": 8, "prompt": 9}, InvalidInput, "prompt is 9 tokens and context 8"),
    ("llama-2-7b", {"context": 0}, InvalidInput, "context is 0; it must be a whole number of at least 1"),
    ("llama-2-7b", {"weights": "q4_k_m", "runtime": "torch"}, InvalidInput, "torch has no weights in q4_k_m"),
    ("llama-2-7b", {"weights": []}, InvalidInput, "no weight format or no target is given"),
    ("llama-2-7b", {"target": "rp2040"}, InvalidInput, "the bandwidth of rp2040 is unknown"),
    ("llama-2-7b", {"kv": "q3"}, InvalidInput, "no format 'q3' for the key-value cache"),
    ("llama-2-7b", {"engine": "tpu"}, InvalidInput, "engine is 'tpu'"),
    ("llama-2-7b", {"threads": 8, "target": PI}, InvalidInput, "threads is 8, and raspberry-pi-5 has 4 cores"),
    ("llama-2-7b", {"threads": 2, "target": "apple-m1"}, InvalidInput, "apple-m1 runs the model on its gpu"),
    ("llama-2-7b", {"weights": "q4_0", "measure": True}, InvalidInput, "torch runs no weights in q4_0"),
]


@pytest.mark.parametrize(("source", "options", "error", "sentence"), REFUSED)
def test_what_cannot_be_used_is_one_sentence(
    source: Any, options: dict[str, Any], error: type[Exception], sentence: str
) -> None:
    model = config(source) if source in CONFIGS else source
    with pytest.raises(error, match=sentence) as caught:
        llm(model, **{"prompt": 4, **options})
    assert "\n" not in str(caught.value)


def test_configurations_that_lead_nowhere(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    for text, sentence in (
        ("{", "it is not JSON, or is cut off"),
        ("{}", "has no model_type"),
        ('{"model_type": "gpt99"}', "is of type 'gpt99', which transformers .* does not know"),
        ('{"model_type": "bert"}', "a model of type 'bert' is an encoder only"),
        ('{"model_type": "vit"}', "a model of type 'vit' is no language model"),
    ):
        path.write_text(text)
        with pytest.raises((ModelNotFound, InvalidInput), match=sentence):
            llm(path)
    with pytest.raises(ModelNotFound, match=r"no file .*config.json"):
        llm(tmp_path / "elsewhere.json")


def test_a_name_that_the_cache_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub import errors

    def missing(*_: Any, **__: Any) -> str:
        raise errors.LocalEntryNotFoundError("offline")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", missing)
    with pytest.raises(ModelNotFound, match="'org/name' is not in the local Hugging Face cache, and the Hub cannot"):
        llm("hf:org/name")
    with pytest.raises(ModelNotFound, match="is not a name on the Hub"):
        llm("hf:a/b/c")


def test_measuring_runs_the_loop_here_and_its_prompt_counts() -> None:
    found = llm(small_llama(), weights="fp32", context=64, prompt=60, measure=True)
    assert found.measured is not None
    assert found.measured.decode_tokens_per_s > 0 and found.measured.tokens >= 5
    assert found.measured.peak_bytes == found.memory.total_bytes


def test_measuring_keeps_the_mode_of_the_users_model() -> None:
    model = import_transformers().AutoModelForCausalLM.from_config(small_llama()).train()
    assert llm(model, weights="fp32", context=16, prompt=4, measure=True).measured is not None
    assert all(module.training for module in model.modules())


def test_the_public_api_has_it() -> None:
    assert eo.llm is llm
    assert device(PI).name == PI


QWEN3_4B = {"model_type": "qwen3", "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
            "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 151936, "head_dim": 128,
            "tie_word_embeddings": True}  # fmt: skip
GEMMA3_4B = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
             "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 262208, "head_dim": 256,
             "sliding_window": 1024}  # fmt: skip


@pytest.mark.parametrize(
    ("sizes", "weights", "target", "prompt", "published"),
    [
        # Peak memory by mlx_lm.benchmark: mlx_lm/BENCHMARKS.md and pull 1569 of ml-explore/mlx-lm.
        (QWEN3_4B, "bf16", "apple-m4-max", 2048, 9.02e9),
        (QWEN3_4B, "mlx-8bit", "apple-m4-max", 2048, 5.254e9),
        (QWEN3_4B, "mlx-4bit", "apple-m4-max", 2048, 3.35e9),
        (QWEN3_4B, "mlx-4bit", "apple-m3-pro", 2048, 3.30e9),
        # github.com/enescingoz/mac-llm-bench. The file holds the tied head a second time.
        (GEMMA3_4B, "mlx-4bit", "apple-m5", 512, 3.15e9),
    ],
)
def test_mlx_holds_what_is_published(
    sizes: dict[str, Any], weights: str, target: str, prompt: int, published: float
) -> None:
    found = llm(sizes, target, weights, context=prompt + 128, prompt=prompt, runtime="mlx")
    assert found.memory.total_bytes == pytest.approx(published, rel=0.02)


def test_mlx_holds_what_the_operators_under_way_write() -> None:
    sizes = {"model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1,
             "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64}  # fmt: skip
    memory = llm(sizes, "apple-m1", "mlx-4bit", context=100, prompt=65).memory
    # The last token of a prompt is a step of its own. One command buffer holds all 19 operators: two norms, queries and
    # keys, rotated as well, values, attention and its output, gate, up and down.
    width = 256 + (256 + 128) * 2 + 128 + 256 + 256 + 256 + 512 + 512 + 256
    # The cache has 2 × 128 values in 16 bits for 256 positions at least, of which the context takes 100.
    assert memory.kv_bytes == 2 * 128 * 2 * 100
    assert memory.activation_bytes == 64 * width * 2 + 2 * 128 * 2 * (256 - 100)


def test_the_longest_context_with_mlx_fits_when_asked_for() -> None:
    limits = {**QWEN3_4B, "max_position_embeddings": 262144}
    longest = llm(limits, "apple-m1", "mlx-4bit", context=2048).memory.longest_context
    assert longest is not None and 2048 < longest < 262144
    memory = llm(limits, "apple-m1", "mlx-4bit", context=longest).memory
    assert memory.fits and memory.total_bytes > 0.99 * 8 * 2**30


def test_torch_is_held_up_by_launches_and_vllm_is_not() -> None:
    # Qwen2.5-0.5B in bf16 on an A100: 47.40 tokens/s with transformers, 311.55 with vLLM (QwenLM/Qwen2.5, docs).
    sizes = {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
             "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True}  # fmt: skip
    for runtime, speed in (("torch", 47.40), ("vllm", 311.55)):
        found = llm({"model_type": "qwen2", **sizes}, "a100-80gb", "bf16", context=1024, prompt=8, runtime=runtime)
        assert found.decode.tokens_per_s == pytest.approx(speed, rel=0.15), runtime
        assert found.decode.bound == "overhead"
