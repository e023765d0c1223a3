"""Several seeds: one run each, and means with intervals over them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pandas as pd
from scipy.special import stdtrit

from edge_opt._support.files import write_whole
from edge_opt.errors import InvalidInput
from edge_opt.records.sweeps import SweepResult
from edge_opt.run.artifacts import write_json
from edge_opt.run.config import GRID, RunConfig
from edge_opt.run.pipeline import RunResult
from edge_opt.search.isolation import keep_fork_servers

FIGURES = ("accuracy", "test_accuracy", "accuracy_drop", "latency_s", "single_latency_s", "size_bytes",
           "peak_memory_bytes", "energy_j")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean over seeds with its 95 % interval by Student's t; one seed has no interval."""

    mean: float
    low: float | None
    high: float | None
    count: int


def mean_of(values: Sequence[float]) -> Mean:
    """Return the mean and its interval.

    >>> over_three = mean_of([1.0, 2.0, 3.0])
    >>> over_three.mean, round(over_three.high, 3)  # 2 + 4.303 / sqrt(3)
    (2.0, 4.484)
    """
    if not values:
        raise InvalidInput("there is nothing to take a mean of")
    mean, count = fmean(values), len(values)
    if count == 1:
        return Mean(mean, None, None, 1)
    half = float(stdtrit(count - 1, 0.975)) * stdev(values) / math.sqrt(count)
    return Mean(mean, mean - half, mean + half, count)


def aggregate(results: Mapping[int, SweepResult]) -> list[dict[str, Any]]:
    """Return one row per candidate of the first seed: each figure as a `Mean`, and how often it was accepted."""
    rows = []
    first = next(iter(results.values()))
    for candidate in [trial.candidate for trial in first.trials]:
        trials = [trial for result in results.values() for trial in result.trials if trial.candidate == candidate]
        metrics = [trial.metrics for trial in trials if trial.metrics is not None]
        row: dict[str, Any] = {
            "key": candidate.key,
            "label": candidate.label,
            "pruning": candidate.pruning,
            "precision": candidate.precision,
            "runtime": candidate.runtime,
            "seeds": len(trials),
            "finished": len(metrics),
            "accepted": sum(trial.is_accepted for trial in trials),
            "best": sum(result.best == candidate.key for result in results.values()),
        }
        for name in FIGURES:
            known = [value for each in metrics if (value := getattr(each, name)) is not None]
            row[name.replace("accuracy", first.metric)] = mean_of(known) if known else None
        rows.append(row)
    return rows


def flat(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows with `NAME_mean`, `NAME_ci95_low` and `NAME_ci95_high` in place of each mean, for a table."""
    flattened = []
    for row in rows:
        cells: dict[str, Any] = {}
        for name, value in row.items():
            if value is None or isinstance(value, Mean):
                parts = (None, None, None) if value is None else (value.mean, value.low, value.high)
                cells |= dict(zip((f"{name}_mean", f"{name}_ci95_low", f"{name}_ci95_high"), parts, strict=True))
            else:
                cells[name] = value
        flattened.append(cells)
    return flattened


RunOne = Callable[[RunConfig, Path], RunResult]


def run_seeds(config: RunConfig, seeds: Sequence[int], folder: Path, run_one: RunOne) -> dict[int, RunResult]:
    """Do one run per seed in `folder/seed-N`; means with intervals over seeds in `aggregate.csv` and `aggregate.json`.

    Levels that are `auto` are those of a grid: each seed would find one of its own, with nothing to average.
    """
    if len(set(seeds)) < len(seeds) or not all(0 <= seed < 2**63 for seed in seeds):
        raise InvalidInput(f"seeds are {list(seeds)}; they must be different whole numbers, from 0 to 2^63")
    if config.pruning_levels == "auto":
        config = config.model_copy(update={"pruning_levels": [*GRID]})
    with keep_fork_servers():
        done = {seed: run_one(config.model_copy(update={"seed": seed}), folder / f"seed-{seed}") for seed in seeds}
    rows = aggregate({seed: each.result for seed, each in done.items()})
    write_whole(folder / "aggregate.csv", pd.DataFrame(flat(rows)).to_csv(index=False, lineterminator="\n"))
    plain = [{name: asdict(value) if isinstance(value, Mean) else value for name, value in row.items()} for row in rows]
    write_json(folder / "aggregate.json", {"seeds": list(seeds), "candidates": plain})
    return done
