"""What a run finds with levels of its own choice (`auto`), against the grid of nine: on Fashion-MNIST.

    python benchmarks/search_levels.py [NET ...] [--seeds 1] [--first 0]

The grid is 0, 0.25 and 0.5 in eager torch, and in fp32 and int8 of ONNX Runtime. Both sides start from the same trained
net and make their levels with the run's own functions, in one process. Every variant is converted, scored on the
validation part and timed; a winner is the fastest that is not shown to be less accurate than the most accurate of its
side. So a side that finds something more accurate raises its own bar: where the winner of `auto` is slower, another row
has the fastest of what `auto` offers that is not shown to be less accurate than the grid's winner. CPU seconds are of
cutting, screening, fine-tuning, converting, scoring and timing. Winners are timed once more, in turns, one thread, one
sample a call, the least CPU time of the blocks. Differences on the 10 000 test images, which no choice saw, are paired,
with Newcombe's interval. Rows are kept in `results/search_levels.json`, net by net.
"""

from __future__ import annotations

import argparse
import json
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
from pruning_accuracy import NETS, RATE, SHAPE, trained
from timing import RESULTS, save
from torch import nn

from edge_opt import compress
from edge_opt.data import Splits, load_splits
from edge_opt.errors import EdgeOptError, message_of
from edge_opt.model import SmallCNN
from edge_opt.profiling import profile
from edge_opt.records.sweeps import Candidate
from edge_opt.run.config import RunConfig
from edge_opt.run.job import Baseline, PipelineJob
from edge_opt.run.model_and_data import ModelAndData, summarize_score
from edge_opt.run.screening import screen
from edge_opt.search.space import Pair
from edge_opt.tasks.paired_scores import paired_shares

ALL_NETS: dict[str, Callable[[], nn.Module]] = {"SmallCNN": SmallCNN, **NETS}
GRID = (0.0, 0.25, 0.5)
PAIRS: list[Pair] = [("fp32", "torch"), ("fp32", "onnxruntime"), ("int8", "onnxruntime")]
DATA = {"batch_size": 64, "train_subset": 4000, "val_subset": 2500, "calibration_batches": 8}
# The rate that the net was trained with, as in a run.
CONFIG = RunConfig(fine_tune_epochs=1, learning_rate=RATE)
MIN_TIME_S = 0.4
AS_ACCURATE = "auto, as accurate as the grid's"
Answers = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Entry:
    """A variant that runs, and which images of the validation part it answers rightly."""

    runner: compress.Runner
    validation: Answers


def answers(runner: compress.Runner, part: Any) -> Answers:
    return np.asarray(torch.cat([runner(x)[0].argmax(1) == y for x, y in part]))


def entries(
    job: PipelineJob, splits: Splits, levels: Sequence[float], pairs: Sequence[Pair], stack: ExitStack
) -> dict[str, Entry]:
    """Every level in every precision and runtime; what is refused is left out and told. A level is exported once."""
    found = {}
    for level in levels:
        try:
            model = job.variant(splits, Candidate(level, "fp32", "torch")).model
        except EdgeOptError as error:
            print(f"<!-- {message_of(error)} -->")
            continue
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        exported = compress.export_onnx(model, SHAPE, folder / "model.onnx")
        for precision, runtime in pairs:
            calibration = job.source.calibration(splits, model) if precision == "int8" else None
            file = exported if runtime == "onnxruntime" else None
            try:
                done = compress.convert(model, SHAPE, precision, runtime, calibration=calibration, exported=file)
            except EdgeOptError as error:
                print(f"prune {level:g} {precision} {runtime}: {message_of(error)}")
                continue
            runner = stack.enter_context(compress.open_runner(done, threads=1))
            found[f"prune {level:g} {precision} {runtime}"] = Entry(runner, answers(runner, splits.validation))
    return found


def timed(runners: dict[str, compress.Runner], splits: Splits) -> dict[str, float]:
    """Microseconds of CPU time of each, the least of its blocks, in turns."""
    one = next(iter(splits.validation))[0][:1]
    found = compress.measure_runners(runners, one, min_time_s=MIN_TIME_S, max_time_s=2 * MIN_TIME_S)
    return {name: min(latency.cpu_samples_s) * 1e6 for name, latency in found.items()}


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
    # Exporting takes seconds more the first time in a process, whoever is first.
    with tempfile.TemporaryDirectory() as folder:
        compress.export_onnx(model, SHAPE, f"{folder}/model.onnx")
    source = ModelAndData(model, splits, CONFIG)
    totals = profile(model, SHAPE).totals
    baseline = Baseline(summarize_score(source.task().score(model, splits.validation)), totals.macs, totals.params)
    rows: list[dict[str, Any]] = []
    winners: dict[str, compress.Runner] = {}
    sides: dict[str, dict[str, Entry]] = {}
    with ExitStack() as stack:
        for side in ("grid", "auto"):
            cache = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            job = PipelineJob(source, cache, baseline)
            start, said, levels, pairs = time.process_time(), "", list(GRID), PAIRS
            if side == "auto":
                screening = screen(job, splits, PAIRS)
                said, pairs = str(screening), PAIRS
                levels = [0.0, *(level.share for level in screening.chosen)]
                job = screening.job(job)
            found = entries(job, splits, levels, pairs, stack)
            us = timed({name: each.runner for name, each in found.items()}, splits)
            best = winner(found, us)
            winners[side], sides[side] = found[best].runner, found
            each_one = {
                name: {"us": us[name], "validation": float(each.validation.mean())} for name, each in found.items()
            }
            spent = time.process_time() - start
            rows.append(
                {
                    "net": net,
                    "seed": seed,
                    "levels": side,
                    "winner": best,
                    "cpu_s": spent,
                    "said": said,
                    "all": each_one,
                }
            )
        rows += _as_accurate(rows, sides, winners)
        last = timed(winners, splits)
        right = {side: answers(runner, splits.test) for side, runner in winners.items()}
    for row in rows:
        change = paired_shares(right[row["levels"]], right["grid"])
        row |= {
            "us": last[row["levels"]], "accuracy": float(right[row["levels"]].mean()), "points": change.value * 100,
            "points_low": change.low * 100, "points_high": change.high * 100,
        }  # fmt: skip
    return rows


def _as_accurate(
    rows: Sequence[dict[str, Any]], sides: dict[str, dict[str, Entry]], winners: dict[str, compress.Runner]
) -> list[dict[str, Any]]:
    """Where the winner of `auto` is slower: the fastest it offers that is not shown less accurate than the grid's."""
    grid, auto = rows
    held, offered = sides["grid"][grid["winner"]].validation, sides["auto"]
    able = [name for name, each in offered.items() if paired_shares(each.validation, held).high >= 0]
    best = min(able, key=lambda name: auto["all"][name]["us"], default=auto["winner"])
    if best == auto["winner"] or auto["all"][auto["winner"]]["us"] <= grid["all"][grid["winner"]]["us"]:
        return []
    winners[AS_ACCURATE] = offered[best].runner
    return [{**auto, "levels": AS_ACCURATE, "winner": best, "said": ""}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("nets", nargs="*")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    print("| net, seed | levels | winner | µs | test accuracy | change, points (95 %) | CPU s |")
    print("|---" * 7 + "|")
    for seed in range(asked.first, asked.first + asked.seeds):
        for net in asked.nets or list(ALL_NETS):
            rows = compared(net, seed)
            for row in rows:
                change = f"{row['points']:+.2f} ({row['points_low']:+.2f} to {row['points_high']:+.2f})"
                print(
                    f"| {net}, {seed} | {row['levels']} | {row['winner']} | {row['us']:.1f} | {row['accuracy']:.4f} "
                    f"| {change} | {row['cpu_s']:.0f} |",
                    flush=True,
                )
                print(f"<!-- {row['said']} {row['all']} -->", flush=True)
            others = [row for row in _kept() if (row["net"], row["seed"]) != (net, seed)]
            order = sorted([*others, *rows], key=lambda row: (list(ALL_NETS).index(row["net"]), row["seed"]))
            save("search_levels", order, data=DATA, grid=GRID)


def _kept() -> list[dict[str, Any]]:
    path = RESULTS / "search_levels.json"
    return [*json.loads(path.read_text())["rows"]] if path.exists() else []


if __name__ == "__main__":
    main()
