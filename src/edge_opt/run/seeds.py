"""Several seeds: one run each, and means with intervals over them."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any

from edge_opt._support.files import write_whole
from edge_opt.errors import InvalidInput
from edge_opt.records.sweeps import SweepResult, TrialMetrics
from edge_opt.run.artifacts import write_json
from edge_opt.run.config import GRID, RunConfig
from edge_opt.run.pipeline import RunResult
from edge_opt.search.isolation import keep_fork_servers

# Student's t at 97.5 % by degrees of freedom; beyond the table, the one before is used: a little wide, never narrow.
_T975 = {
    1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262, 10: 2.228, 12: 2.179,
    15: 2.131, 20: 2.086, 30: 2.042, 60: 2.000, 120: 1.980,
}  # fmt: skip

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
    """The mean and how far it is known.

    >>> found = mean_of([1.0, 2.0, 3.0])
    >>> found.mean, round(found.high, 3)  # 2 + 4.303 / sqrt(3)
    (2.0, 4.484)
    """
    count = len(values)
    if not count:
        raise InvalidInput("there is nothing to take a mean of")
    mean = math.fsum(values) / count
    if count == 1:
        return Mean(mean, None, None, 1)
    std = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count - 1))
    factor = next(t for freedom, t in sorted(_T975.items(), reverse=True) if freedom <= count - 1)
    half = factor * std / math.sqrt(count)
    return Mean(mean, mean - half, mean + half, count)


def aggregate(results: Mapping[int, SweepResult]) -> list[dict[str, Any]]:
    """One row per candidate that every seed tried: each figure as mean and interval, and how often it was accepted."""
    rows = []
    first = next(iter(results.values()))
    for trial in first.trials:
        candidate = trial.candidate
        found = [other for result in results.values() for other in result.trials if other.candidate == candidate]
        metrics = [other.metrics for other in found if other.metrics is not None]
        row: dict[str, Any] = {
            "key": candidate.key,
            "label": candidate.label,
            "pruning": candidate.pruning,
            "precision": candidate.precision,
            "runtime": candidate.runtime,
            "seeds": len(found),
            "finished": len(metrics),
            "accepted": sum(other.is_accepted for other in found),
            "best": sum(result.best == candidate.key for result in results.values()),
        }
        rows.append(row | {name.replace("accuracy", first.metric): _mean(metrics, name) for name in FIGURES})
    return rows


def _mean(metrics: Sequence[TrialMetrics], name: str) -> Mean | None:
    known = [value for each in metrics if (value := getattr(each, name)) is not None]
    return mean_of(known) if known else None


def flat(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows with `NAME_mean`, `NAME_ci95_low` and `NAME_ci95_high` in place of each mean, for a table."""
    flattened, means = [], {name for row in rows for name, value in row.items() if value is None or is_dataclass(value)}
    for row in rows:
        cells: dict[str, Any] = {}
        for name, value in row.items():
            if name not in means:
                cells[name] = value
                continue
            parts = (None, None, None) if value is None else (value.mean, value.low, value.high)
            cells |= dict(zip((f"{name}_mean", f"{name}_ci95_low", f"{name}_ci95_high"), parts, strict=True))
        flattened.append(cells)
    return flattened


RunOne = Callable[[RunConfig, Path], RunResult]


def run_seeds(config: RunConfig, seeds: Sequence[int], folder: Path, run_one: RunOne) -> dict[int, RunResult]:
    """One run per seed in `folder/seed-N`; means with intervals over seeds in `aggregate.csv` and `aggregate.json`.

    Levels that are `auto` are those of a grid: each seed would find one of its own, with nothing to average.
    """
    if len(set(seeds)) < len(seeds) or any(seed < 0 for seed in seeds):
        raise InvalidInput(f"seeds are {list(seeds)}; they must be different whole numbers, not below 0")
    if config.pruning_levels == "auto":
        config = config.model_copy(update={"pruning_levels": [*GRID]})
    with keep_fork_servers():
        found = {seed: run_one(config.model_copy(update={"seed": seed}), folder / f"seed-{seed}") for seed in seeds}
    rows = aggregate({seed: done.result for seed, done in found.items()})
    write_whole(folder / "aggregate.csv", _csv(flat(rows)))
    write_json(folder / "aggregate.json", {"seeds": list(seeds), "candidates": [_plain(row) for row in rows]})
    return found


def _csv(rows: Sequence[Mapping[str, Any]]) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def _plain(row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
        for name, value in row.items()
    }
