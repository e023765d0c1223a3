"""Speeds of language models that people published, beside ours; what devices left out say of the fit.

    python benchmarks/llm_rates.py [FOLDER] [ROWS.csv ...]

Rows are those of benchmarks/data/llm_rows.csv, of FOLDER (see llm_decode.py), and of tables with the same columns that
are not part of this project. "device left out": share of the bandwidth, overhead per operator and share of the peak are
fitted again to the other devices of the family; its intervals are the family's.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from llm_decode import ALIASES, CONFIGURATIONS, GEMMA3, LLAMA, QWEN2, QWEN3, _sizes
from llm_decode import rows as folder_rows
from scipy.optimize import minimize

from edge_opt.boards.catalog import device
from edge_opt.serving.llm_report import _Request, _served
from edge_opt.serving.serving_costs import Serving, decode_cost, prefill_cost, speed_of
from edge_opt.serving.token_rates import GpuFamily, gpu_family, unpack_rate

DATA = Path(__file__).parent / "data" / "llm_rows.csv"
LLAMA_3 = {**LLAMA, "max_position_embeddings": 131072}
MISTRAL = {"model_type": "mistral", "head_dim": 128, "sliding_window": None}
MODELS: dict[str, dict[str, Any]] = {
    "llama-2-7b": {**LLAMA, **_sizes(4096, 11008, 32, 32, 32, 32000)},
    "llama-2-70b": {**LLAMA, **_sizes(8192, 28672, 80, 64, 8, 32000)},
    "llama-3-8b": {**LLAMA_3, **_sizes(4096, 14336, 32, 32, 8, 128256)},
    "llama-3-70b": {**LLAMA_3, **_sizes(8192, 28672, 80, 64, 8, 128256)},
    "mistral-7b": {**MISTRAL, **_sizes(4096, 14336, 32, 32, 8, 32768)},
    "mistral-nemo": {**MISTRAL, **_sizes(5120, 14336, 40, 32, 8, 131072)},
    "mistral-small-24b": {**MISTRAL, **_sizes(5120, 32768, 40, 32, 8, 131072)},
    "phi-4": {"model_type": "phi3", **_sizes(5120, 17920, 40, 40, 10, 100352), "pad_token_id": 0},
    "gemma-3-27b": {**GEMMA3, **_sizes(5376, 21504, 62, 32, 16, 262208), "head_dim": 128, "sliding_window": 1024},
    "qwen3-14b": {**QWEN3, **_sizes(5120, 17408, 40, 40, 8, 151936)},
    "qwen3-32b": {**QWEN3, **_sizes(5120, 25600, 64, 64, 8, 151936)},
    "qwen2.5-32b": {**QWEN2, **_sizes(5120, 27648, 64, 40, 8, 152064)},
    "gpt-oss-20b": {
        "model_type": "gpt_oss", **_sizes(2880, 2880, 24, 64, 8, 201088), "head_dim": 64, "num_local_experts": 32,
        "num_experts_per_tok": 4, "sliding_window": 128,
    },
    "llama-3.2-3b": CONFIGURATIONS["llama3.2:3b"],
    "qwen2.5-0.5b": {**QWEN2, **_sizes(896, 4864, 24, 14, 2, 151936), "tie_word_embeddings": True},
    "qwen2.5-1.5b": CONFIGURATIONS["Qwen2.5-1.5B"],
    "qwen2.5-7b": CONFIGURATIONS["Qwen2.5-7B"],
    "qwen2.5-14b": CONFIGURATIONS["Qwen2.5-14B"],
    "qwen3-30b-a3b": CONFIGURATIONS["Qwen3-30B-A3B-2507"],
}  # fmt: skip


@cache
def served(model: str, weights: str, runtime: str, context: int, prompt: int, batch: int) -> Serving:
    source = MODELS.get(model) or CONFIGURATIONS[ALIASES.get(model, model)]
    return _served(source, None, model, _Request(context, prompt, batch, None, runtime, None, None, None))(weights)


@dataclass(frozen=True)
class Published:
    """One published speed: of decoding, or of reading a prompt."""

    kind: str
    device: str
    model: str
    weights: str
    runtime: str
    speed: float
    serving: Serving = field(repr=False)

    @cached_property
    def family(self) -> GpuFamily | None:
        return gpu_family(device(self.device))

    @cached_property
    def ours(self) -> tuple[float, float, float]:
        """Our speed, and the ends of its interval."""
        speed = speed_of(device(self.device), self.serving.form, None, None, self.runtime)
        if self.kind == "prompt":
            cost = prefill_cost(self.serving, speed)
            tokens = self.serving.prompt
            return cost.tokens_per_s or 0.0, tokens / (cost.high or 1e9), tokens / (cost.low or 1e9)
        decode = decode_cost(self.serving, speed, self.serving.context)
        return decode.tokens_per_s or 0.0, decode.low or 0.0, decode.high or 1e9

    @cached_property
    def streams(self) -> tuple[np.ndarray, np.ndarray, float, float]:
        """Bytes and seconds of unpacking by tensor, and the bytes of other weights and of the cache."""
        parts, unpacked = self.serving.step_bytes(self.serving.context), unpack_rate(device(self.device), "gpu")
        pairs = np.array(list(self.serving.slow_weights()) if unpacked else []).reshape(-1, 2)
        slow = pairs[:, 0], pairs[:, 1] / (unpacked or 1.0)
        return *slow, sum(parts.values()) - parts["kv"] - slow[0].sum(), parts["kv"]

    def seconds(self, share: float, wait: float) -> float:
        """Seconds of a decoding step with another share of the bandwidth and another overhead."""
        sheet = device(self.device).bandwidth("datasheet")
        assert sheet is not None and self.family is not None
        rate = share * sheet.value
        slow, unpacking_s, weights, cached = self.streams
        busy = np.maximum(slow / rate, unpacking_s).sum() + weights / rate + cached / rate / self.family.cache_share
        return float(busy) + self.serving.model.decode.operators * wait


def published(folder: Path | None, tables: Sequence[Path]) -> Iterator[Published]:
    for path in (DATA, *tables):
        with path.open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                context, prompt, batch = int(row["context"]), int(row["prompt"]), int(row["batch"])
                run = row["device"], row["model"], row["weights"], row["runtime"]
                what = row["model"], row["weights"], row["runtime"]
                if row["decode_tok_s"]:
                    kind = "decode" if batch == 1 else "batch"
                    yield Published(kind, *run, float(row["decode_tok_s"]), served(*what, context, 8, batch))
                if row["prefill_tok_s"]:
                    yield Published("prompt", *run, float(row["prefill_tok_s"]), served(*what, prompt, prompt, 1))
    for item in folder_rows(folder) if folder else ():
        if item.target == "apple-m1" and ALIASES.get(item.model, item.model) in CONFIGURATIONS:
            runtime, form = "mlx" if "mlx" in item.weights else "llama.cpp", item.weights.lower()
            run = item.target, item.model, form, runtime
            yield Published("decode", *run, item.tokens_per_s, served(item.model, form, runtime, 128, 8, 1))
            if item.prefill_tokens_per_s:
                prompt = served(item.model, form, runtime, 128, 128, 1)
                yield Published("prompt", *run, item.prefill_tokens_per_s, prompt)


def bounded(values: Any) -> tuple[float, float]:
    """Return share and overhead within what kernels reach: few devices alone would tell any share."""
    return min(max(abs(float(values[0])), 0.7), 0.95), abs(float(values[1])) * 1e-6


def fitted(rows: Sequence[Published]) -> tuple[float, float]:
    """Return the share of the bandwidth and the overhead per operator with the least absolute log errors.

    Each device counts with the root of its rows.
    """
    counts = {row.device: sum(other.device == row.device for other in rows) for row in rows}

    def loss(values: Any) -> float:
        share, wait = bounded(values)
        logs = ((abs(np.log(row.seconds(share, wait) * row.speed)), counts[row.device]) for row in rows)
        return float(sum(log / count**0.5 for log, count in logs))

    best = minimize(loss, (0.85, 2.0), method="Nelder-Mead", options={"maxiter": 150})
    return bounded(best.x)


def left_out(rows: Sequence[Published]) -> Iterator[tuple[float, bool]]:
    """Yield predicted over published speed, the family fitted without the row's device, and whether it is inside."""
    for name in sorted({row.device for row in rows}):
        rest, own = [row for row in rows if row.device != name], [row for row in rows if row.device == name]
        if not rest:
            continue
        is_decode = own[0].kind == "decode"
        share, wait = fitted(rest) if is_decode else (0.0, 0.0)
        scale = median(row.speed / row.ours[0] for row in rest)
        for row in own:
            speed = 1 / row.seconds(share, wait) if is_decode else scale * row.ours[0]
            low, high = (end / row.ours[0] * speed for end in row.ours[1:])
            yield speed / row.speed, low <= row.speed <= high


def summary(name: str, found: Sequence[tuple[float, bool]]) -> None:
    if found:
        errors = [abs(ratio - 1) for ratio, _ in found]
        inside = sum(is_inside for _, is_inside in found) / len(found)
        print(f"  {name}: {len(found)} rows, median error {median(errors):.1%}, 90 % within "
              f"{np.quantile(errors, 0.9):.0%}, in the interval {inside:.0%}")  # fmt: skip


def key(row: Published) -> tuple[str, str]:
    return row.family.name if row.family else "CPU", row.runtime


def main(folder: Path | None, tables: Sequence[Path]) -> None:
    distinct = {(row.kind, row.device, row.model, row.weights, row.speed): row for row in published(folder, tables)}
    table = [row for row in distinct.values() if row.ours[0]]
    print(f"{'kind':7} {'device':18} {'model':24} {'format':9} {'runtime':9} published     ours   error")
    for row in table:
        ours, low, high = row.ours
        outside = "" if low <= row.speed <= high else "  outside"
        print(f"{row.kind:7} {row.device:18} {row.model:24} {row.weights:9} {row.runtime:9} {row.speed:9.1f} "
              f"{ours:8.1f} {ours / row.speed - 1:+7.1%}{outside}")  # fmt: skip
    for kind in ("decode", "batch", "prompt"):
        print(f"\n{kind}")
        for group in (None, *sorted({key(row) for row in table if row.kind == kind})):
            rows = [row for row in table if row.kind == kind and group in (None, key(row))]
            name = "all" if group is None else " ".join(group)
            summary(name, [(row.ours[0] / row.speed, row.ours[1] <= row.speed <= row.ours[2]) for row in rows])
            if group is not None and group[0] != "CPU" and group[1] == "llama.cpp" and kind != "batch":
                summary(f"{name}, device left out", list(left_out(rows)))


if __name__ == "__main__":
    arguments = [Path(item) for item in sys.argv[1:]]
    folders = [item for item in arguments if item.is_dir()]
    main(folders[0] if folders else None, [item for item in arguments if item.is_file()])
