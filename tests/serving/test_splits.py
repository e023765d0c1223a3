"""A model divided between devices: every byte is somewhere, nothing exceeds a limit, and time adds up."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("transformers")

from edge_opt.boards.catalog import device
from edge_opt.errors import InvalidInput
from edge_opt.serving.llm_report import llm
from edge_opt.serving.splits import EXCHANGE_S, parse_split
from language_models import config, sized

CARD = "rtx-3090"
# 16 layers of 4·1024² + 3·1024·4096 weights in 16 bits: 32 MiB each; table and head of 8192 × 1024: 16 MiB each.
MODEL = config("llama-2-7b", **sized(1024, 4096, 16, 16, 16, 8192))
MIB = 1 << 20


def split_of(text: str, **options: Any) -> Any:
    found: Any = llm(
        MODEL, target=CARD, weights="fp16", runtime="llama.cpp", context=512, prompt=64, split=text, **options
    )
    return found, found.split


def test_layers_fill_the_first_device_and_the_rest_goes_on() -> None:
    found, split = split_of("gpu:400MiB,cpu:4GiB")
    gpu, cpu = split.parts
    assert gpu.layers + cpu.layers == 16 and split.missing_bytes == 0 and 0 < gpu.layers < 16
    assert gpu.total_bytes <= 400 * MIB
    assert gpu.weights_bytes + cpu.weights_bytes == found.memory.weights_bytes
    assert gpu.kv_bytes + cpu.kv_bytes == pytest.approx(found.memory.kv_bytes, abs=16)
    # A layer is 32 MiB of matrices, 8 KiB of norms and 2 × 1024 × 512 × 2 bytes of cache: one more would not fit.
    layer = 32 * MIB + 2 * 1024 * 2 + 2 * 1024 * 512 * 2
    assert gpu.total_bytes + layer > 400 * MIB
    seconds = gpu.seconds_per_step + cpu.seconds_per_step + split.link_s
    assert split.tokens_per_s == pytest.approx(1 / seconds) and split.low < split.tokens_per_s < split.high
    assert cpu.seconds_per_step > gpu.seconds_per_step


def test_more_memory_on_the_gpu_is_never_slower() -> None:
    rates = [split_of(f"gpu:{size}MiB,cpu:4GiB")[1].tokens_per_s for size in (200, 400, 800)]
    assert rates == sorted(rates) and rates[0] < rates[-1]


def test_a_model_that_fits_nowhere_says_what_is_missing() -> None:
    _, split = split_of("gpu:200MiB,cpu:100MiB")
    assert split.tokens_per_s is None and split.missing_bytes > 0


def test_a_device_that_is_too_small_for_anything_holds_nothing() -> None:
    _, split = split_of("gpu:1MiB,cpu:4GiB")
    gpu, cpu = split.parts
    assert gpu.total_bytes == gpu.layers == 0 and cpu.layers == 16 and split.tokens_per_s is not None


def test_tensors_between_two_gpus_take_half_the_bytes_and_two_exchanges_per_layer() -> None:
    _, one = split_of("tensor:1*gpu:24GiB")
    _, two = split_of("tensor:2*gpu:24GiB@25")
    assert two.parts[0].weights_bytes == one.parts[0].weights_bytes // 2
    # A ring of two moves the whole vector of 1024 halves over the link, 32 times.
    assert two.link_s == pytest.approx(32 * (EXCHANGE_S + 1024 * 2 / 25e9)) and one.link_s == 0
    _, pipeline = split_of("2*gpu:24GiB")
    assert sum(part.layers for part in pipeline.parts) == 16 and pipeline.way == "layers"


def test_experts_go_to_the_cpu_before_layers_do() -> None:
    mixture = config("mixtral-8x7b", **sized(512, 1024, 4, 8, 8, 1000))
    found: Any = llm(mixture, target=CARD, weights="fp16", runtime="llama.cpp", context=256, prompt=32,
                     split="gpu:50MiB,cpu:4GiB")  # fmt: skip
    split = found.split
    assert split.way == "experts" and split.parts[0].layers == 4 and split.parts[1].expert_layers > 0
    assert sum(part.weights_bytes for part in split.parts) == found.memory.weights_bytes


def test_a_gpu_that_is_too_small_gets_a_split_and_the_best_format_by_itself() -> None:
    found: Any = llm(config("llama-3-8b"), target="rtx-4060", weights="fp16", runtime="llama.cpp", context=4096)
    assert found.memory.fits is False and found.split.parts[0].total_bytes <= 8 << 30
    assert found.best_format == "q6_k"  # 6.14 GiB of weights, 0.5 of cache, 0.25 reserved; q8_0 has 7.96
    fitting: Any = llm(config("llama-3-8b"), target="rtx-4060", weights="q4_k_m", context=4096)
    assert fitting.memory.fits and fitting.split is None


def test_llama_cpp_reserves_logits_on_a_gpu_with_memory_of_its_own() -> None:
    found: Any = llm(config("llama-3-8b"), target="rtx-4090", weights="q4_k_m", context=512)
    assert found.memory.activation_bytes == 512 * (128256 + 4096) * 4  # 258.5 MiB, as its log says


def test_without_flash_attention_a_long_context_takes_longer() -> None:
    plain, fused = (
        llm(MODEL, target=CARD, weights="q8_0", context=2048, flash_attention=is_on) for is_on in (False, True)
    )
    assert plain.decode.tokens_per_s < fused.decode.tokens_per_s  # type: ignore[union-attr,operator]


@pytest.mark.parametrize("text", ["", "gpu:24", "gpu:24GiB;cpu", "99999*gpu", "tensor:gpu:8GiB,cpu:8GiB", "a b:1GiB"])
def test_a_split_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="split"):
        parse_split(text, device(CARD))
    with pytest.raises(InvalidInput, match="pass target="):
        parse_split("gpu:24GiB", None)
