"""What recording layers adds to a forward: the same model with and without the recorder, in turn, in one session.

    python benchmarks/layer_overhead.py [SECONDS]

Prints a table and writes benchmarks/results/layer_overhead.json. One thread: two that wait for each other on a shared
machine would show the machine.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from subjects import bert, vision
from timing import save
from torch import nn

import edge_opt
from edge_opt.measuring.latency import interleaved
from edge_opt.measuring.layers import LayerRecorder, layer_latencies, recording_cost
from edge_opt.measuring.machine import read_environment
from edge_opt.measuring.session import Caller, ready
from edge_opt.measuring.statistics import compare_latencies
from edge_opt.model import SmallCNN
from edge_opt.trace.inputs import call_on

ALLOWED = 1.10


def cases() -> dict[str, tuple[Callable[[], nn.Module], Any]]:
    picture = (1, 3, 224, 224)
    return {
        "resnet18": (vision("resnet18"), picture),
        "mobilenet_v2": (vision("mobilenet_v2"), picture),
        "swin_t": (vision("swin_t"), picture),
        "bert-base": (bert, {"input_ids": ((1, 128), "int64")}),
        "SmallCNN, the extreme": (SmallCNN, (1, 1, 28, 28)),
    }


def overhead(model: nn.Module, inputs: Any, seconds: float) -> dict[str, Any]:
    """Recorded over plain latency with its interval, and how the layers close."""
    profile = edge_opt.profile(model, inputs)
    caller = Caller(model, call_on(model, inputs, None, "cpu"))
    recorder = LayerRecorder(model, profile.trace.modules)
    with ready(model, profile.trace, training=False, threads=1):
        found = interleaved(
            {"plain": caller.runner(), "recorded": caller.runner(recorder)},
            min_time_s=seconds,
            max_time_s=seconds,
            environment=read_environment(),
        )
    plain, recorded = found["plain"], found["recorded"]
    blocks = recorder.blocks[-len(recorded.samples_s) :]
    cost = recording_cost()
    layers = layer_latencies(profile.layers, plain, recorded, blocks, cost)
    ratio = compare_latencies(plain, recorded, paired=True)
    return {
        "calls": len(profile.trace.modules),
        "ratio": ratio.ratio,
        "ratio_low": ratio.ratio_interval.low,
        "ratio_high": ratio.ratio_interval.high,
        "clock": ratio.clock,
        "minimum_ratio": recorded.minimum_s / plain.minimum_s,
        "rounds": len(plain.samples_s),
        "plain_median_s": plain.median_s,
        "plain_cpu_median_s": plain.cpu_median_s,
        "between_layers_share": layers.between_layers_s / layers.whole_s,
        "recorded_over_whole": layers.recorded_s / plain.median_s,
        "cost_per_call_s": cost.inside_s + cost.in_caller_s,
    }


def main() -> None:
    """Measure every case and say whether each stays within the bound."""
    torch.manual_seed(0)
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 20.0
    load = read_environment().load_1min
    rows = [{"model": name, **overhead(build(), inputs, seconds)} for name, (build, inputs) in cases().items()]
    table = Table("model", "calls", "recorded / plain", "95 % interval", "clock", "fastest", "between", "parts / whole")
    for row in rows:
        table.add_row(
            row["model"],
            str(row["calls"]),
            f"{row['ratio']:.3f}",
            f"{row['ratio_low']:.3f} to {row['ratio_high']:.3f}",
            row["clock"],
            f"{row['minimum_ratio']:.3f}",
            f"{row['between_layers_share']:.1%}",
            f"{row['recorded_over_whole']:.3f}",
        )
    Console(width=120).print(table)
    path = save("layer_overhead", rows, seconds=seconds, load_1min=load, allowed=ALLOWED)
    print(f"saved to {path}", file=sys.stderr)


if __name__ == "__main__":
    main()
