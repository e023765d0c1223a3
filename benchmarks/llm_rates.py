"""Speeds of language models that people published, beside ours; what rows and devices left out say of the fit.

    python benchmarks/llm_rates.py [FOLDER]

Rows are those of benchmarks/data/llm_rows.csv, and those of FOLDER (see llm_decode.py). For each family of GPUs the
share of the bandwidth and the overhead per operator are fitted again without each device and without each model.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from llm_decode import ALIASES, CONFIGURATIONS, LLAMA, _sizes
from llm_decode import rows as folder_rows
from scipy.optimize import minimize

from edge_opt.boards.catalog import device
from edge_opt.records.serving import ServingReport
from edge_opt.serving.llm_report import llm
from edge_opt.serving.token_rates import GPU_FAMILIES, GpuFamily, gpu_family

DATA = Path(__file__).parent / "data" / "llm_rows.csv"
LLAMA_3 = {**LLAMA, "max_position_embeddings": 131072}
MODELS: dict[str, dict[str, Any]] = {
    "llama-2-7b": {**LLAMA, **_sizes(4096, 11008, 32, 32, 32, 32000)},
    "llama-2-70b": {**LLAMA, **_sizes(8192, 28672, 80, 64, 8, 32000)},
    "llama-3-8b": {**LLAMA_3, **_sizes(4096, 14336, 32, 32, 8, 128256)},
    "llama-3-70b": {**LLAMA_3, **_sizes(8192, 28672, 80, 64, 8, 128256)},
    "mistral-7b": {"model_type": "mistral", **_sizes(4096, 14336, 32, 32, 8, 32768), "sliding_window": None},
    "llama-3.2-3b": CONFIGURATIONS["llama3.2:3b"],
    "qwen2.5-7b": CONFIGURATIONS["Qwen2.5-7B"],
    "qwen2.5-14b": CONFIGURATIONS["Qwen2.5-14B"],
    "qwen3-30b-a3b": CONFIGURATIONS["Qwen3-30B-A3B-2507"],
}


@dataclass(frozen=True)
class Published:
    """One published row with our report of the same run."""

    device: str
    model: str
    weights: str
    runtime: str
    batch: int
    decode: float | None
    prefill: float | None
    report: ServingReport

    @property
    def family(self) -> GpuFamily | None:
        return gpu_family(device(self.device))

    @property
    def seconds(self) -> float:
        return 1 / (self.decode or 1)

    @property
    def sheet_s(self) -> float:
        """Seconds of a step at the whole bandwidth of the data sheet."""
        sheet = device(self.device).bandwidth("datasheet")
        assert sheet is not None
        return self.report.decode.bytes_per_token / sheet.value


@cache
def operators(model: str) -> int:
    """Return the operators of a step, found from two overheads."""
    from dataclasses import replace

    from edge_opt.records.devices import Figure

    known = device("rtx-4090")
    seconds = []
    for each in (0.0, 1e-3):
        spec = replace(known, overhead_s=Figure(each, "benchmark", "derived"))
        found = llm(MODELS.get(model) or CONFIGURATIONS[ALIASES.get(model, model)], target=spec, weights="q4_0",
                    context=64, prompt=8)  # fmt: skip
        assert isinstance(found, ServingReport)
        seconds.append(found.decode.seconds_per_step or 0.0)
    return round((seconds[1] - seconds[0]) / 1e-3)


@cache
def report(model: str, target: str, weights: str, runtime: str, context: int, prompt: int, batch: int) -> ServingReport:
    source = MODELS.get(model) or CONFIGURATIONS[ALIASES.get(model, model)]
    found = llm(source, target=target, weights=weights, runtime=runtime, context=max(context, prompt), prompt=prompt,
                batch=batch, name=model)  # fmt: skip
    assert isinstance(found, ServingReport)
    return found


def published(folder: Path | None) -> list[Published]:
    table = []
    with DATA.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            context, prompt, batch = int(row["context"]), int(row["prompt"]), int(row["batch"])
            found = report(row["model"], row["device"], row["weights"], row["runtime"], context, prompt, batch)
            speeds = [float(row[key]) if row[key] else None for key in ("decode_tok_s", "prefill_tok_s")]
            table.append(Published(row["device"], row["model"], row["weights"], row["runtime"], batch, *speeds, found))
    for item in folder_rows(folder) if folder else ():
        if item.target != "apple-m1" or ALIASES.get(item.model, item.model) not in CONFIGURATIONS:
            continue
        runtime = "mlx" if "mlx" in item.weights else "llama.cpp"
        found = report(item.model, item.target, item.weights, runtime, 128, 128, 1)
        speeds = [item.tokens_per_s, item.prefill_tokens_per_s]
        table.append(Published(item.target, item.model, item.weights, runtime, 1, *speeds, found))
    return table


def fitted(rows: Sequence[Published]) -> tuple[float, float]:
    """Return the share of the bandwidth and the overhead per operator with the least absolute log errors."""
    sheet = np.array([row.sheet_s for row in rows])
    waits = np.array([operators(row.model) for row in rows])
    seconds = np.array([row.seconds for row in rows])

    def loss(values: Any) -> float:
        return float(np.abs(np.log((sheet / abs(values[0]) + waits * abs(values[1]) * 1e-6) / seconds)).sum())

    starts = [(share, wait) for share in (0.6, 0.9) for wait in (1.0, 4.0)]
    best = min((minimize(loss, start, method="Nelder-Mead") for start in starts), key=lambda result: result.fun)
    return abs(float(best.x[0])), abs(float(best.x[1])) * 1e-6


def left_out(rows: Sequence[Published], key: Callable[[Published], str]) -> list[float]:
    """Return predicted over published speed of each row, the family fitted without its device or its model."""
    ratios = []
    for name in sorted({key(row) for row in rows}):
        rest = [row for row in rows if key(row) != name]
        if len(rest) < 2:
            continue
        share, wait = fitted(rest)
        for row in rows:
            if key(row) == name:
                ratios.append(row.seconds / (row.sheet_s / share + operators(row.model) * wait))
    return ratios


def _summary(name: str, ratios: Sequence[float], inside: Sequence[bool] | None = None) -> None:
    if not ratios:
        return
    errors = [abs(ratio - 1) for ratio in ratios]
    held = "" if inside is None else f", intervals hold {sum(inside) / len(inside):.0%}"
    most = np.quantile(errors, 0.9)
    print(f"  {name}: {len(ratios)} rows, median error {median(errors):.1%}, 90 % within {most:.0%}{held}")


def main(folder: Path | None) -> None:
    table = published(folder)
    print(f"{'device':18} {'model':24} {'format':9} {'runtime':9} published    ours   error")
    for row in table:
        ours = row.report.decode.tokens_per_s or 0.0
        if row.decode:
            print(f"{row.device:18} {row.model:24} {row.weights:9} {row.runtime:9} {row.decode:9.1f} {ours:7.1f} "
                  f"{ours / row.decode - 1:+7.1%}")  # fmt: skip
    print("\nDecoding")
    for family in GPU_FAMILIES:
        rows = [row for row in table if row.family == family and row.decode and row.batch == 1]
        own = [row for row in rows if row.runtime == "llama.cpp"]
        if not rows:
            continue
        share, wait = fitted(own)
        print(f"{family.name}: fitted share {share:.2f}, overhead {wait * 1e6:.1f} µs")
        _decoding("as predicted", rows)
        _summary("device left out", left_out(own, lambda row: row.device))
        _summary("model left out", left_out(own, lambda row: row.model))
    _decoding("all", [row for row in table if row.decode and row.batch == 1])
    _decoding("batches", [row for row in table if row.decode and row.batch > 1])
    print("\nPrompts")
    for family in GPU_FAMILIES:
        _prompts(family.name, [row for row in table if row.family == family])
    _prompts("all", table)


def _decoding(name: str, rows: Sequence[Published]) -> None:
    found = [(row.decode or 0.0, row.report.decode) for row in rows]
    inside = [(cost.low or 0) <= speed <= (cost.high or 1e9) for speed, cost in found]
    _summary(name, [(cost.tokens_per_s or 0) / speed for speed, cost in found], inside)


def _prompts(name: str, rows: Sequence[Published]) -> None:
    found = [(row.prefill, row.report.prefill) for row in rows if row.prefill and row.report.prefill.tokens_per_s]
    ratios = [(cost.tokens_per_s or 0) / (speed or 1) for speed, cost in found]
    spreads = [(cost.high or 1) / (cost.seconds or 1) for _, cost in found]
    _summary(name, ratios, [1 / spread <= ratio <= spread for ratio, spread in zip(ratios, spreads, strict=True)])


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
