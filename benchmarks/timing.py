"""Timing for benchmarks: CPU seconds, candidates in turns, the minimum of repeats. Only ratios in one run count."""

from __future__ import annotations

import gc
import json
import os
import platform
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


def interleaved(candidates: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Least CPU seconds of each candidate, taken in turns."""
    best = dict.fromkeys(candidates, float("inf"))
    for _ in range(repeats):
        for name, run in candidates.items():
            gc.collect()
            gc.disable()
            start = time.process_time()
            run()
            best[name] = min(best[name], time.process_time() - start)
            gc.enable()
    return best


def save(name: str, rows: list[dict[str, Any]], **facts: Any) -> Path:
    """Write a result with the machine it was measured on."""
    machine = {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"machine": machine, **facts, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    return path


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
