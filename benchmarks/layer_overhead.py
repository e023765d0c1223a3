"""What recording layers adds to a forward: the same model with and without the recorder, in turn, in one session.

    python benchmarks/layer_overhead.py [SECONDS]

Prints a table and writes benchmarks/results/layer_overhead.json. One thread: two that wait for each other on a shared
machine would show the machine.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from types import ModuleType

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import edge_opt
from edge_opt.measure.device import CPU
from edge_opt.measure.environment import read_environment
from edge_opt.measure.latency import interleaved
from edge_opt.measure.layers import layer_latencies
from edge_opt.measure.recorder import Recorder, recording_cost
from edge_opt.measure.session import Caller, call_on, ready
from edge_opt.measure.statistics import compare_latencies
from edge_opt.model import SmallCNN

RESULTS = Path(__file__).resolve().parent / "results" / "layer_overhead.json"
ALLOWED = 1.10


def torchvision_models() -> ModuleType:
    """torchvision.models as the tests import it."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
    found: ModuleType = import_module("zoo").torchvision_models()
    return found


def bert() -> nn.Module:
    from transformers import BertConfig, BertModel

    return BertModel(BertConfig())


def cases() -> dict[str, tuple[nn.Module, object]]:
    vision = torchvision_models()
    image = (1, 3, 224, 224)
    return {
        "resnet18": (vision.resnet18(), image),
        "mobilenet_v2": (vision.mobilenet_v2(), image),
        "swin_t": (vision.swin_t(), image),
        "bert-base, 128 tokens": (bert(), {"input_ids": ((1, 128), "int64")}),
        "SmallCNN, for the extreme": (SmallCNN(), (1, 1, 28, 28)),
    }


def overhead(model: nn.Module, inputs: object, seconds: float) -> dict[str, object]:
    """Recorded over plain latency with its interval, and how the layers close."""
    profile = edge_opt.profile(model, inputs)
    caller = Caller(model, call_on(model, inputs, None, CPU))
    recorder = Recorder(model, profile.trace.modules)
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
    total_s = math.fsum(row.seconds for row in layers.layers) + layers.between_layers_s
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
        "closing_error": abs(total_s / layers.whole_s - 1),
        "cost_per_call_s": cost.inside_s + cost.in_caller_s,
    }


def main() -> None:
    """Measure every case and say whether each stays within the bound."""
    torch.manual_seed(0)
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 20.0
    environment = read_environment()
    results = {name: overhead(model, inputs, seconds) for name, (model, inputs) in cases().items()}
    table = Table(
        "model", "calls", "recorded / plain", "95 % interval", "clock", "fastest", "between layers", "closing"
    )
    for name, row in results.items():
        table.add_row(
            name,
            str(row["calls"]),
            f"{row['ratio']:.3f}",
            f"{row['ratio_low']:.3f} to {row['ratio_high']:.3f}",
            str(row["clock"]),
            f"{row['minimum_ratio']:.3f}",
            f"{row['between_layers_share']:.1%}",
            f"{row['closing_error']:.0e}",
        )
    Console(width=120).print(table)
    RESULTS.parent.mkdir(exist_ok=True)
    document = {"environment": asdict(environment), "seconds": seconds, "allowed": ALLOWED, "models": results}
    RESULTS.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    print(f"saved to {RESULTS}", file=sys.stderr)


if __name__ == "__main__":
    main()
