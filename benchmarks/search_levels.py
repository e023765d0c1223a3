"""What a run finds with levels of its own choice (`auto`), against the grid 0, 0.25, 0.5: on Fashion-MNIST.

    python benchmarks/search_levels.py [NET ...] [--seeds 1]

Both start from the same trained net and make their levels with the run's own functions, in one process. Every level is
converted to fp32 and int8 for ONNX Runtime and scored on the validation part; a winner is the fastest that is not shown
to be less accurate than the most accurate of its side. CPU seconds are those of cutting, screening, fine-tuning,
converting and scoring. Times: all variants in turns, one thread, one sample a call, the least CPU time of the blocks.
The difference of the winners on the 10 000 test images, which no choice saw, is paired, with Newcombe's interval.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pruning_accuracy import NETS, trained
from timing import save
from torch import nn

from edge_opt import compress
from edge_opt.data import Splits, load_splits
from edge_opt.errors import EdgeOptError, message_of
from edge_opt.model import SmallCNN
from edge_opt.profiling import profile
from edge_opt.records import Candidate
from edge_opt.run.job import PipelineJob, Reference, Subject, Tuning, variant_of
from edge_opt.run.scores import figure_of
from edge_opt.run.screening import screen
from edge_opt.search.paired import paired_shares

ALL_NETS: dict[str, Callable[[], nn.Module]] = {"SmallCNN": SmallCNN, **NETS}
GRID = (0.0, 0.25, 0.5)
PAIRS: list[Any] = [("fp32", "onnxruntime"), ("int8", "onnxruntime")]
DATA = {"batch_size": 64, "train_subset": 4000, "val_subset": 2500, "calibration_batches": 8}
TUNING = Tuning(fine_tune_epochs=1, learning_rate=1e-3)
Answers = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Entry:
    """A variant in ONNX Runtime, and which images of the validation part it answers rightly."""

    runner: compress.Runner
    validation: Answers


def answers(runner: compress.Runner, part: Any) -> Answers:
    return np.asarray(torch.cat([runner(x)[0].argmax(1) == y for x, y in part]))


def entries(job: PipelineJob, splits: Splits, levels: Sequence[float], stack: ExitStack) -> dict[str, Entry]:
    """Every level in every precision; what is refused is left out and told."""
    found = {}
    for level in levels:
        model = variant_of(job.subject, splits, Candidate(level, "fp32", "torch"), job.tuning, job.cache).model
        for precision, runtime in PAIRS:
            calibration = job.subject.calls(splits, model) if precision == "int8" else None
            try:
                done = compress.convert(model, (1, 1, 28, 28), precision, runtime, calibration=calibration)
            except EdgeOptError as error:
                print(f"prune {level:g} {precision}: {message_of(error)}")
                continue
            runner = stack.enter_context(compress.open_runner(done, threads=1))
            found[f"prune {level:g} {precision}"] = Entry(runner, answers(runner, splits.validation))
    return found


def winner(found: dict[str, Entry], us: dict[str, float]) -> str:
    """The fastest that is not shown to be less accurate than the most accurate: the rule of a run."""
    best = max(found.values(), key=lambda entry: entry.validation.mean())
    near = [name for name, each in found.items() if paired_shares(each.validation, best.validation).high >= 0]
    return min(near, key=lambda name: us[name])


def compared(net: str, seed: int) -> list[dict[str, Any]]:
    """One row for the grid, one for levels of its own choice."""
    splits = load_splits("fashion-mnist", seed=seed, **DATA)  # type: ignore[arg-type]
    assert splits.test is not None
    model = trained(ALL_NETS[net], list(splits.train), seed)
    subject = Subject(model, splits)
    totals = profile(model, (1, 1, 28, 28)).totals
    reference = Reference(figure_of(subject.task.build().score(model, splits.validation)), totals.macs, totals.params)
    rows: list[dict[str, Any]] = []
    sides: dict[str, dict[str, Entry]] = {}
    with ExitStack() as stack:
        for side in ("grid", "auto"):
            cache = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            job = PipelineJob(subject, reference, cache, TUNING)
            start, said, levels = time.process_time(), "", list(GRID)
            if side == "auto":
                screening = screen(job, splits, PAIRS)
                said, levels = str(screening), screening.chosen
            sides[side] = entries(job, splits, levels, stack)
            rows.append({"net": net, "seed": seed, "levels": side, "cpu_s": time.process_time() - start, "said": said})
        runners = {f"{side} {name}": each.runner for side, found in sides.items() for name, each in found.items()}
        one = next(iter(splits.test))[0][:1]
        timed = compress.measure_runners(runners, one, min_time_s=0.4, max_time_s=0.8)
        us = {name: min(latency.cpu_samples_s) * 1e6 for name, latency in timed.items()}
        right = {}
        for row in rows:
            side = row["levels"]
            mine = {name: us[f"{side} {name}"] for name in sides[side]}
            row["winner"] = winner(sides[side], mine)
            row["us"] = mine[row["winner"]]
            row["all"] = {
                name: {"us": mine[name], "validation": float(each.validation.mean())}
                for name, each in sides[side].items()
            }
            right[side] = answers(sides[side][row["winner"]].runner, splits.test)
            change = paired_shares(right[side], right["grid"])
            row |= {
                "accuracy": float(right[side].mean()), "points": change.value * 100, "points_low": change.low * 100,
                "points_high": change.high * 100,
            }  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("nets", nargs="*")
    parser.add_argument("--seeds", type=int, default=1)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    print("| net, seed | levels | winner | µs | test accuracy | change, points (95 %) | CPU s |")
    print("|---" * 7 + "|")
    for seed in range(asked.seeds):
        for net in asked.nets or list(ALL_NETS):
            for row in compared(net, seed):
                rows.append(row)
                change = f"{row['points']:+.2f} ({row['points_low']:+.2f} to {row['points_high']:+.2f})"
                print(
                    f"| {net}, {seed} | {row['levels']} | {row['winner']} | {row['us']:.1f} | {row['accuracy']:.4f} "
                    f"| {change} | {row['cpu_s']:.0f} |",
                    flush=True,
                )
                print(f"<!-- {row['said']} {row['all']} -->", flush=True)
    if not asked.nets:
        print(f"saved {save('search_levels', rows, data=DATA, grid=GRID).name}")


if __name__ == "__main__":
    main()
