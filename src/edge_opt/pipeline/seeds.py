"""Several seeds: one run each, then put together."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

from edge_opt.config import RunConfig
from edge_opt.errors import InvalidInput
from edge_opt.files import write_whole
from edge_opt.pipeline.aggregation import aggregate, flat
from edge_opt.pipeline.artifacts import write_json
from edge_opt.pipeline.run import RunResult

Runner = Callable[[RunConfig, Path], RunResult]


def run_seeds(config: RunConfig, seeds: Sequence[int], folder: Path, run_one: Runner) -> dict[int, RunResult]:
    """One run per seed in `folder/seed-N`; means with intervals over seeds in `aggregate.csv` and `aggregate.json`."""
    if len(set(seeds)) < len(seeds) or any(seed < 0 for seed in seeds):
        raise InvalidInput(f"seeds are {list(seeds)}; they must be different whole numbers, not below 0")
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
