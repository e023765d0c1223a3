"""Memory of language models that people published, beside ours.

    python benchmarks/llm_memory.py [FOLDER]

MLX's peak memory in benchmarks/data/llm_memory.csv (1e9 bytes), and of FOLDER (see llm_decode.py) the rows of the Apple
M1: the peak of MLX, and the resident memory of llama.cpp in GiB.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from llm_decode import ALIASES, CONFIGURATIONS, _read
from llm_rates import served

from edge_opt.boards.catalog import device

DATA = Path(__file__).parent / "data" / "llm_memory.csv"
# mlx_lm.benchmark writes 128 tokens after its longest prompt, llama-bench reads and writes by turns.
LENGTHS = {"mlx": (640, 512), "llama.cpp": (512, 512)}


def rows(folder: Path | None) -> Iterator[tuple[str, str, str, str, int, int, float]]:
    """Yield device, model, format, runtime, context, prompt and the published bytes."""
    with DATA.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            lengths = int(row["context"]), int(row["prompt"])
            yield row["device"], row["model"], row["weights"], "mlx", *lengths, float(row["peak_gb"]) * 1e9
    for row in _read(folder / "llm_apple_m1.csv.gz") if folder else ():
        model = ALIASES.get(row["model_id"], row["model_id"])
        if model not in CONFIGURATIONS:
            continue
        is_mlx = row["quant"] == "4bit"
        runtime, weights = ("mlx", "mlx-4bit") if is_mlx else ("llama.cpp", row["quant"])
        published = float(row["peak_rss_gb"]) * (1e9 if is_mlx else 2**30)
        yield "apple-m1", model, weights, runtime, *LENGTHS[runtime], published


def main(folder: Path | None) -> None:
    errors: dict[str, list[float]] = {}
    for name, model, weights, runtime, context, prompt, published in rows(folder):
        ours = served(model, weights, runtime, context, prompt, 1).memory((), device(name)).total_bytes
        errors.setdefault(runtime, []).append(ours / published - 1)
        print(f"{name:14} {model:24} {weights:9} {runtime:9} {published / 1e9:7.3f} {ours / 1e9:7.3f} "
              f"{errors[runtime][-1]:+6.1%}")  # fmt: skip
    for runtime, found in errors.items():
        inside = sum(abs(error) <= 0.03 for error in found)
        print(f"{runtime}: {len(found)} rows, median error {median(map(abs, found)):.1%}, within 3 % {inside}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
