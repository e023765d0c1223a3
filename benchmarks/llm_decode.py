"""Decoding and prefill against published rows: ours, llmfit's fixed efficiency, and the parameter count.

    python benchmarks/llm_decode.py FOLDER

FOLDER holds llm_raspberry_pi_5.csv.gz, llm_raspberry_pi_5_formats.csv.gz and llm_apple_m1.csv.gz, other people's
measurements, which are not part of this project. Nothing here is fitted to them: the shares of the data sheet that
`serving/token_rates.py` uses come from other machines.
"""

from __future__ import annotations

import csv
import gzip
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

from edge_opt.boards.catalog import device
from edge_opt.records.serving import ServingReport
from edge_opt.serving.llm_report import llm
from edge_opt.serving.model_source import import_transformers
from edge_opt.serving.token_rates import PREFILL_SPREAD
from edge_opt.serving.weight_formats import weight_format

CONTEXT = 128  # llama-bench's tg128, from an empty cache, and pp128; the Pi's prompts are of unknown length
LLMFIT_EFFICIENCY = 0.55
SWAPPED = 0.1  # tokens per second, of a model that did not fit with the operating system beside it
LLAMA = {"model_type": "llama", "max_position_embeddings": 8192}
QWEN2 = {"model_type": "qwen2", "max_position_embeddings": 32768}
QWEN3 = {"model_type": "qwen3", "max_position_embeddings": 40960, "head_dim": 128, "vocab_size": 151936}
GEMMA3 = {"model_type": "gemma3_text", "head_dim": 256, "max_position_embeddings": 131072}


def _sizes(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocabulary: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "vocab_size": vocabulary,
    }  # fmt: skip


TIED = {"tie_word_embeddings": True}
PHI4 = {
    "model_type": "phi3", **_sizes(3072, 8192, 32, 24, 8, 200064), **TIED, "partial_rotary_factor": 0.75,
    "max_position_embeddings": 131072, "original_max_position_embeddings": 4096, "sliding_window": 262144,
    "pad_token_id": 199999,
}  # fmt: skip
# Published dimensions, by the name that the rows use.
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "gemma-2-9b": {"model_type": "gemma2", **_sizes(3584, 14336, 42, 16, 8, 256000), "head_dim": 256},
    "DeepSeek-V2-Lite": {
        "model_type": "deepseek_v2", **_sizes(2048, 10944, 27, 16, 16, 102400), "moe_intermediate_size": 1408,
        "n_shared_experts": 2, "n_routed_experts": 64, "num_experts_per_tok": 6, "q_lora_rank": None,
        "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
        "first_k_dense_replace": 1,
    },
    "Qwen2.5-14B": {**QWEN2, **_sizes(5120, 13824, 48, 40, 8, 152064)},
    "Qwen2.5-7B": {**QWEN2, **_sizes(3584, 18944, 28, 28, 4, 152064)},
    "Qwen2.5-3B": {**QWEN2, **_sizes(2048, 11008, 36, 16, 2, 151936), **TIED},
    "Qwen2.5-1.5B": {**QWEN2, **_sizes(1536, 8960, 28, 12, 2, 151936), **TIED},
    "Phi-3-mini-128k-instruct": {
        "model_type": "phi3", **_sizes(3072, 8192, 32, 32, 32, 32064), "sliding_window": 262144, "pad_token_id": 32000,
    },
    "mpt-7b-instruct": {
        "model_type": "mpt", "d_model": 4096, "n_heads": 32, "n_layers": 32, "vocab_size": 50432, "expansion_ratio": 4,
        "max_seq_len": 2048,
    },
    "stable-code-instruct-3b": {
        "model_type": "stablelm", **_sizes(2560, 6912, 32, 32, 32, 50304), "partial_rotary_factor": 0.25,
        "max_position_embeddings": 16384,
    },
    "Qwen3-30B-A3B-2507": {
        "model_type": "qwen3_moe", **_sizes(2048, 6144, 48, 32, 4, 151936), "head_dim": 128,
        "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "max_position_embeddings": 262144,
    },
    "llama3.2:3b": {**LLAMA, **_sizes(3072, 8192, 28, 24, 8, 128256), **TIED, "head_dim": 128},
    "llama-3.2-1b": {**LLAMA, **_sizes(2048, 8192, 16, 32, 8, 128256), **TIED, "head_dim": 64},
    "llama2:13b": {**LLAMA, **_sizes(5120, 13824, 40, 40, 40, 32000)},
    "gemma-3-1b": {**GEMMA3, **_sizes(1152, 6912, 26, 4, 1, 262144), "sliding_window": 512},
    "gemma-3-4b": {**GEMMA3, **_sizes(2560, 10240, 34, 8, 4, 262208), "sliding_window": 1024},
    "gemma-3-12b": {**GEMMA3, **_sizes(3840, 15360, 48, 16, 8, 262208), "sliding_window": 1024},
    "qwen3-0.6b": {**QWEN3, **_sizes(1024, 3072, 28, 16, 8, 151936), **TIED},
    "qwen3-1.7b": {**QWEN3, **_sizes(2048, 6144, 28, 16, 8, 151936), **TIED},
    "qwen3-4b": {**QWEN3, **_sizes(2560, 9728, 36, 32, 8, 151936), **TIED},
    "qwen3-8b": {**QWEN3, **_sizes(4096, 12288, 36, 32, 8, 151936)},
    "phi-4-mini": PHI4,
    # Of these two families the dimensions are not from a model card: they give the published files' sizes within 2 %.
    "qwen3.5-4b": {"model_type": "qwen3_5_text", "hidden_size": 2560, "intermediate_size": 9216, **TIED},
    "qwen3.5-9b": {"model_type": "qwen3_5_text"},
    "gemma-4-e2b": {
        "model_type": "gemma4_text", **_sizes(1536, 6144, 35, 8, 1, 262144), "num_kv_shared_layers": 20,
        "use_double_wide_mlp": True, "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
    },
    "gemma-4-e4b": {
        "model_type": "gemma4_text", **_sizes(2560, 10240, 42, 8, 2, 262144), "num_kv_shared_layers": 18,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 7,
    },
}  # fmt: skip
ALIASES = {
    "dolphin-2.9.2-qwen2-7b": "Qwen2.5-7B", "Qwen2.5-Omni-3B": "Qwen2.5-3B", "Qwen2.5-1.5B-Instruct": "Qwen2.5-1.5B",
    "deepseek-r1-distill-7b": "Qwen2.5-7B", "llama-3.2-3b": "llama3.2:3b", "phi-4-mini-reasoning": "phi-4-mini",
    "Qwen3-0.6B-4bit": "qwen3-0.6b", "Qwen3-8B-4bit": "qwen3-8b", "gemma-3-1b-it-4bit": "gemma-3-1b",
    "Qwen3.5-4B-4bit": "qwen3.5-4b",
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One published speed."""

    target: str
    model: str
    weights: str
    tokens_per_s: float
    note: str
    params: float | None
    ram_bytes: int | None = None
    threads: int | None = None
    prefill_tokens_per_s: float | None = None


def rows(folder: Path) -> Iterator[Row]:
    """Every row that has a decoding speed; those that swapped are left to the question of memory."""
    for item in _read(folder / "llm_raspberry_pi_5.csv.gz"):
        weights = "2.70bpw" if "bpw" in item["quant"] else item["quant"]
        params = float(item["params_b"]) * 1e9
        size = re.search(r"(\d+)GB", item["device"])
        ram = int(size[1]) << 30 if size else None
        prefill = float(item["prefill_tok_s"]) if item["prefill_tok_s"] else None
        decode = float(item["decode_tok_s"])
        yield Row("raspberry-pi-5", item["model"], weights, decode, item["notes"], params, ram, None, prefill)
    for item in _read(folder / "llm_raspberry_pi_5_formats.csv.gz"):
        threads = int(item["threads"])
        note = f"{threads} threads"
        yield Row("raspberry-pi-5", item["model"], item["format"], float(item["tok_s"]), note, 1.54e9, None, threads)
    for item in _read(folder / "llm_apple_m1.csv.gz"):
        weights = "mlx-4bit" if item["quant"] == "4bit" else item["quant"]
        params = None if item["params"] == "?" else float(item["params"].removesuffix("B")) * 1e9
        decode, prefill = float(item["tg128"]), float(item["pp128"])
        yield Row("apple-m1", item["model_id"], weights, decode, item["power"], params, None, None, prefill)


def _read(path: Path) -> Iterator[dict[str, str]]:
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        yield from csv.DictReader(file)


@cache
def report(model: str, target: str, weights: str, threads: int | None) -> ServingReport | None:
    configuration = CONFIGURATIONS.get(ALIASES.get(model, model))
    if configuration is None:
        return None
    transformers = import_transformers()
    config = transformers.CONFIG_MAPPING[configuration["model_type"]].from_dict(dict(configuration))
    return llm(config, target=target, weights=weights, context=CONTEXT, prompt=CONTEXT, threads=threads, name=model)


def main(folder: Path) -> None:
    table: list[tuple[Row, ServingReport, float, float]] = []
    left_out: list[str] = []
    for row in rows(folder):
        found = report(row.model, row.target, row.weights, row.threads)
        if found is None:
            left_out.append(f"{row.model} {row.weights}: no dimensions here")
            continue
        spare = None if row.ram_bytes is None else row.ram_bytes - found.memory.total_bytes
        if spare is not None and (spare < 0 or row.tokens_per_s < SWAPPED):
            verdict = (
                f"does not fit, {-spare / 2**30:.1f} GiB missing" if spare < 0 else f"{spare / 2**30:.1f} GiB spare"
            )
            left_out.append(f"{row.model} {row.weights}: we say {verdict}; published {row.tokens_per_s:g} tokens/s")
            continue
        sheet = device(row.target).bandwidth("datasheet")
        assert sheet is not None
        # llmfit: bandwidth over the size of the whole file, at a fixed efficiency; and the same with nothing taken off.
        bits = weight_format(row.weights)[0].bits
        size = (row.params or found.params) * bits / 8
        table.append((row, found, LLMFIT_EFFICIENCY * sheet.value / size, sheet.value / size))
    print(f"{'model':26} {'format':9} {'target':15} published    ours   error  interval        llmfit  params")
    for row, found, llmfit, by_params in table:
        decode = found.decode
        assert decode.tokens_per_s is not None and decode.low is not None and decode.high is not None
        inside = "in " if decode.low <= row.tokens_per_s <= decode.high else "OUT"
        print(
            f"{row.model[:26]:26} {row.weights:9} {row.target:15} {row.tokens_per_s:9.2f} {decode.tokens_per_s:7.2f} "
            f"{_error(decode.tokens_per_s, row):+7.1%} {decode.low:5.1f}-{decode.high:5.1f} {inside} "
            f"{_error(llmfit, row):+7.0%} {_error(by_params, row):+7.0%}  {row.note[:28]}"
        )
    for target in ("raspberry-pi-5", "apple-m1", ""):
        chosen = [item for item in table if target in item[0].target]
        _summary(target or "both", chosen)
        if any(item[0].threads == 2 for item in chosen):
            _summary(f"{target or 'both'}, rows on all cores", [item for item in chosen if item[0].threads != 2])
    _prefill([(row, found) for row, found, _, _ in table])
    print("left out:", *left_out, sep="\n  ")


def _prefill(table: list[tuple[Row, ServingReport]]) -> None:
    """Reading a prompt: tokens per second beside the published ones."""
    print(f"\n{'prefill':26} {'format':9} {'target':15} published    ours   error")
    errors: dict[str, list[float]] = {}
    for row, found in table:
        ours = found.prefill.tokens_per_s
        if row.prefill_tokens_per_s is None or ours is None:
            continue
        ratio = ours / row.prefill_tokens_per_s
        errors.setdefault(row.target, []).append(ratio)
        print(
            f"{row.model[:26]:26} {row.weights:9} {row.target:15} {row.prefill_tokens_per_s:9.2f} {ours:7.2f} "
            f"{ratio - 1:+7.1%}"
        )
    for target, ratios in errors.items():
        inside = sum(1 / PREFILL_SPREAD <= ratio <= PREFILL_SPREAD for ratio in ratios) / len(ratios)
        print(
            f"{target}: {len(ratios)} prompts, median error {median(abs(ratio - 1) for ratio in ratios):.1%}, "
            f"within a factor of {PREFILL_SPREAD:g} {inside:.0%}"
        )


def _error(predicted: float, row: Row) -> float:
    return predicted / row.tokens_per_s - 1


def _summary(name: str, table: list[tuple[Row, ServingReport, float, float]]) -> None:
    ours = [abs(_error(found.decode.tokens_per_s or 0.0, row)) for row, found, _, _ in table]
    inside = sum((found.decode.low or 0) <= row.tokens_per_s <= (found.decode.high or 0) for row, found, _, _ in table)
    llmfit = median(abs(_error(item, row)) for row, _, item, _ in table)
    by_params = median(abs(_error(item, row)) for row, _, _, item in table)
    print(
        f"{name}: {len(table)} rows, median error {median(ours):.1%}, within 15 % {_share(ours):.0%}, intervals hold "
        f"{inside / len(table):.0%}; llmfit's formula {llmfit:.0%}, parameter count {by_params:.0%}"
    )


def _share(errors: list[float]) -> float:
    return sum(error <= 0.15 for error in errors) / len(errors)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    main(Path(sys.argv[1]))
