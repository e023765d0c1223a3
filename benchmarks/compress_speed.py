"""What int8 and other runtimes bring on real images: speed in one interleaved run, accuracy by a paired test.

    python benchmarks/compress_speed.py [train]

Trains SmallCNN and resnet18 (one channel, 28x28) briefly on Fashion-MNIST, converts them, and measures all candidates
in turn at batch 1 and 128 with one thread. With `train` it stops after training; the weights are kept for the next run.
Prints tables and explanations, writes benchmarks/results/compress_speed.json.
"""

from __future__ import annotations

import sys
import tempfile
from math import comb
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from subjects import torchvision_models
from timing import save
from torch import nn

import edge_opt as eo
from edge_opt import compress
from edge_opt.data.datasets import find_files, read_idx
from edge_opt.measuring.machine import read_environment
from edge_opt.model import SmallCNN

CANDIDATES = [
    ("fp32", "torch"),
    ("fp32", "onnxruntime"),
    ("int8", "onnxruntime"),
    ("fp32", "openvino"),
    ("int8", "openvino"),
]
BATCHES = (1, 128)
BASE = "fp32 torch"
KEPT = Path(tempfile.gettempdir()) / "edge-opt-compress-speed"


def images(part: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Fashion-MNIST as Debian packages it, scaled to mean 0 and deviation 1 of its training part."""
    files = find_files("fashion-mnist", None)
    if files is None:
        raise SystemExit("Fashion-MNIST is not here; as root: apt-get install dataset-fashion-mnist")
    pictures, answers = (file for file in files if file.name.startswith(part))
    pixels, labels = read_idx(pictures, 3)[0].reshape(-1, 1, 28, 28), read_idx(answers, 1)[0]
    return (torch.tensor(pixels) / 255 - 0.286) / 0.353, torch.tensor(labels).long()


def resnet18() -> nn.Module:
    model = torchvision_models().resnet18(weights=None, num_classes=10)
    model.conv1 = nn.Conv2d(1, 64, 7, stride=2, padding=3, bias=False)
    return model


def train(model: nn.Module, x: torch.Tensor, y: torch.Tensor, epochs: int, rate: float) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), rate, weight_decay=1e-3)
    steps = epochs * (len(x) // 128)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps)
    model.train()
    for _ in range(epochs):
        order = torch.randperm(len(x))
        for start in range(0, len(x) - 127, 128):
            chosen = order[start : start + 128]
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[chosen]), y[chosen]).backward()
            optimizer.step()
            schedule.step()
    model.eval()


def correct(runner: compress.Runner, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Which images are classified rightly."""
    return torch.cat([runner(part)[0].argmax(1) for part in x.split(500)]) == y


def mcnemar(first: torch.Tensor, second: torch.Tensor) -> tuple[float, float]:
    """Difference in points, and how likely one as large is by chance, exactly, over images on which they differ."""
    won, lost = int((second & ~first).sum()), int((first & ~second).sum())
    differing = won + lost
    tail = sum(comb(differing, k) for k in range(min(won, lost) + 1)) / 2**differing
    return (won - lost) / len(first) * 100, min(1.0, 2 * tail)


def interval(first: torch.Tensor, second: torch.Tensor) -> list[float]:
    """95 % bootstrap interval of the difference in points, over images."""
    difference = (second.float() - first.float()).numpy() * 100
    generator = np.random.default_rng(0)
    means = [generator.choice(difference, len(difference)).mean() for _ in range(1000)]
    return [float(value) for value in np.percentile(means, [2.5, 97.5])]


def study(name: str, model: nn.Module, x: torch.Tensor, y: torch.Tensor, ranges: list[Any], seconds: float) -> Any:
    exported = compress.export_onnx(model, (1, 1, 28, 28), KEPT / f"{name}.onnx")
    done = {
        f"{precision} {runtime}": compress.convert(
            model, (1, 1, 28, 28), precision, runtime, calibration=ranges, exported=exported
        )
        for precision, runtime in CANDIDATES
    }
    runners = {label: compress.open_runner(item, threads=1) for label, item in done.items()}
    hits = {label: correct(runner, x, y) for label, runner in runners.items()}
    latencies = {
        batch: compress.measure_runners(runners, x[:batch], min_time_s=seconds, max_time_s=3 * seconds)
        for batch in BATCHES
    }
    profile = eo.profile(model, (1, 1, 28, 28), name=name)
    rows = []
    for label, item in done.items():
        points, chance = mcnemar(hits[BASE], hits[label])
        rows.append(
            {
                "model": name,
                "candidate": label,
                "effective_precision": item.effective_precision,
                "accuracy": float(hits[label].float().mean()),
                "points": points,
                "points_interval": interval(hits[BASE], hits[label]),
                "mcnemar_p": chance,
                "size_bytes": item.size_bytes,
                **{
                    f"speedup_{batch}": found[BASE].minimum_s / found[label].minimum_s
                    for batch, found in latencies.items()
                },
                **{
                    f"cpu_speedup_{batch}": found[BASE].cpu_minimum_s / found[label].cpu_minimum_s
                    for batch, found in latencies.items()
                },
                **{f"minimum_s_{batch}": found[label].minimum_s for batch, found in latencies.items()},
                "is_contended": any(found[label].is_contended for found in latencies.values()),
            }
        )
    one = x[:1]
    explained = {
        runtime: eo.explain(
            *(
                compress.ModelVariant(
                    profile,
                    done[f"{precision} {runtime}"],
                    latencies[1][f"{precision} {runtime}"],
                    compress.profile_runner(runners[f"{precision} {runtime}"], one, repeats=200),
                )
                for precision in ("fp32", "int8")
            ),
            paired=True,
        )
        for runtime in ("onnxruntime", "openvino")
    }
    for runner in runners.values():
        runner.close()
    return rows, explained


def main() -> None:
    """Train, convert, measure, and say whether what is asked holds."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    load = read_environment().load_1min
    x, y = images("train")
    tx, ty = images("t10k")
    ranges = list(x[:2048].split(64))
    rows, sentences = [], {}
    for name, model, count, epochs, rate, seconds in (
        ("SmallCNN", SmallCNN(), 30000, 2, 3e-3, 1.0),
        ("resnet18", resnet18(), 20000, 1, 2e-3, 2.0),
    ):
        weights = KEPT / f"{name}.pt"
        if weights.exists():
            model.load_state_dict(torch.load(weights, weights_only=True))
            model.eval()
        else:
            train(model, x[:count], y[:count], epochs, rate)
            KEPT.mkdir(exist_ok=True)
            torch.save(model.state_dict(), weights)
        if "train" in sys.argv:
            continue
        found, explained = study(name, model, tx, ty, ranges, seconds)
        rows += found
        sentences[name] = {runtime: item.sentences for runtime, item in explained.items()}
        table = Table(
            "candidate", "runs in", "accuracy", "points", "95 %", "McNemar p", "x at 1", "x at 128", title=name
        )
        for row in found:
            low, high = row["points_interval"]
            table.add_row(
                row["candidate"], row["effective_precision"], f"{row['accuracy']:.2%}", f"{row['points']:+.2f}",
                f"{low:+.2f} to {high:+.2f}", f"{row['mcnemar_p']:.3f}", f"{row['speedup_1']:.2f}",
                f"{row['speedup_128']:.2f}",
            )  # fmt: skip
        Console(width=120).print(table)
        for runtime, item in explained.items():
            print(f"{name}, int8 against fp32 on {runtime}:\n{item}\n")
    if "train" in sys.argv:
        return
    path = save("compress_speed", rows, threads=1, load_1min=load, explanations=sentences)
    print(f"saved to {path}", file=sys.stderr)


if __name__ == "__main__":
    main()
