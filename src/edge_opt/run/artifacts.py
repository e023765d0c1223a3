"""Files of a run: tables, plots, JSON and the page."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pandas as pd

from edge_opt._support.files import write_whole
from edge_opt.data import Splits
from edge_opt.hardware import layer_estimates, precision_tradeoff_table, save_hardware_artifacts
from edge_opt.records.compression import Sensitivity
from edge_opt.records.profiles import ModelProfile
from edge_opt.records.sweeps import SweepResult
from edge_opt.report.page import write_report
from edge_opt.report.png import write_sweep_plots
from edge_opt.report.sweep_files import (
    WeightBudgets,
    frontier_keys,
    sweep_csv,
    sweep_dataframe,
    sweep_document,
)
from edge_opt.run.config import RunConfig
from edge_opt.run.run_summary import (
    build_summary,
    hardware_summary,
    quantization_metadata,
    reproducibility,
    with_target,
)
from edge_opt.search.space import Space
from edge_opt.tasks.batches import LossChoice


def write_artifacts(
    folder: Path,
    config: RunConfig,
    splits: Splits,
    profile: ModelProfile,
    result: SweepResult,
    space: Space,
    command: Sequence[str],
    settings: Mapping[str, Any],
    sensitivity: Sensitivity | None = None,
    loss: LossChoice | None = None,
    draws: bool = True,
) -> tuple[dict[str, Any], list[Path]]:
    """Write everything of a run but the model to ship; return the summary, and the files.

    `profile` is the baseline's, and `settings` are those that `reproducibility.json` lists. `draws`: also plots as PNG.
    """
    profile = with_target(profile, config)
    layerwise = pd.DataFrame([asdict(item) for item in layer_estimates(profile)])
    hardware = hardware_summary(layerwise, config, result)
    summary = build_summary(config, splits, profile, result, space, hardware)
    finished = replace(result, trials=tuple(trial for trial in result.trials if trial.metrics is not None))
    tradeoffs = precision_tradeoff_table(sweep_dataframe(finished)).rename(
        columns=lambda name: name.replace("accuracy", result.metric)
    )
    repeated = reproducibility(config, settings, splits, command, profile.name, loss)
    documents = {
        "summary.json": summary,
        "reproducibility.json": repeated,
        **quantization_metadata(result, config),
        **({} if sensitivity is None else {"sensitivity.json": sensitivity.to_dict()}),
    }
    for earlier in folder.glob("quantization_metadata_p*_int8.json"):
        # Of an earlier run with other levels, which the files of this one do not replace.
        if earlier.name not in documents:
            earlier.unlink()
    written = [
        *_write_sweep(result, folder, WeightBudgets(tuple(config.memory_budgets_mb), config.active_memory_budget_mb)),
        *(write_sweep_plots(result, folder) if draws else ()),
        *save_hardware_artifacts(folder, layerwise, tradeoffs, hardware, draws),
        profile.save(folder / "profile.json"),
        *(write_json(folder / name, content) for name, content in documents.items()),
    ]
    # The page comes last, when all that it shows is there.
    return summary, [*written, write_report(folder)]


def _write_sweep(result: SweepResult, folder: Path, budgets: WeightBudgets) -> list[Path]:
    """Write the tables of a sweep: all rows, failures if any, and both frontiers."""
    errors = folder / "sweep_errors.csv"
    # Of an earlier run, with other failures.
    errors.unlink(missing_ok=True)
    tables = {"sweep_results.csv": result.trials}
    if result.failed:
        tables[errors.name] = result.failed
    for objective in ("latency", "energy"):
        keys = frontier_keys(result, objective)
        rows = tuple(trial for trial in result.trials if trial.candidate.key in keys)
        tables[f"pareto_frontier_{objective}.csv"] = rows
    contents = {name: sweep_csv(replace(result, trials=rows), budgets) for name, rows in tables.items()}
    contents["sweep.json"] = sweep_document(result)
    return [write_whole(folder / name, content) for name, content in contents.items()]


def write_json(path: Path, content: Mapping[str, Any]) -> Path:
    """Write JSON for people to read; a value that JSON cannot hold is an error, not a guess."""
    return write_whole(path, json.dumps(content, indent=1, allow_nan=False) + "\n")


def command_line() -> list[str]:
    """Return the command as it was given."""
    program = Path(sys.argv[0]).name
    return ["edge-opt" if program == "__main__.py" else program, *sys.argv[1:]]
