"""Record how this machine disturbs a latency: the same model against itself, for the tests of `compare_latencies`.

    python benchmarks/record_noise.py tests/recordings/latency_noise.json

Each session measures one model twice, a block of each in turn. Times are kept in microseconds, wall and CPU.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch

from edge_opt.measuring.latency import Clock, Stopwatch, interleaved
from edge_opt.measuring.machine import CPU, read_environment
from edge_opt.model import SmallCNN

SESSIONS = 100
SECONDS = 1.0
ROUNDS = 60


def session(threads: int) -> dict[str, object]:
    """One A/A session: load before it, cores that others used meanwhile, and the first rounds of both sides."""
    torch.manual_seed(0)
    torch.set_num_threads(threads)
    model, x = SmallCNN(32, 64).eval(), torch.randn(32, 1, 28, 28)
    stopwatch, load = Stopwatch(Clock(), CPU), os.getloadavg()[0]
    busy_cores = stopwatch.watch_others()
    with torch.inference_mode():
        sides = interleaved({"a": lambda: model(x), "b": lambda: model(x)}, min_time_s=SECONDS, max_time_s=SECONDS)
    others = busy_cores()
    return {"load": round(load, 2), "others": None if others is None else round(others, 2)} | {
        name: {
            "wall_us": [round(sample * 1e6) for sample in side.samples_s[:ROUNDS]],
            "cpu_us": [round(sample * 1e6) for sample in side.cpu_samples_s[:ROUNDS]],
        }
        for name, side in sides.items()
    }


def main() -> None:
    """Record one and two threads in turn, so that both see quiet and busy moments."""
    sets: dict[str, list[dict[str, object]]] = {"1 thread": [], "2 threads": []}
    for number in range(SESSIONS):
        for threads, sessions in enumerate(sets.values(), start=1):
            sessions.append(session(threads))
        others = [sessions[-1]["others"] for sessions in sets.values()]
        print(f"{number + 1}/{SESSIONS}  cores of others: {others}", file=sys.stderr)
    machine = read_environment()
    text = {"recorded": time.strftime("%Y-%m-%d"), "cpu": machine.cpu, "cores": machine.cores, "torch": machine.torch}
    Path(sys.argv[1]).write_text(json.dumps(text | {"sets": sets}, separators=(",", ":")) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
