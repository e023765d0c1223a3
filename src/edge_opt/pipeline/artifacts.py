"""Artifacts: every file that a run leaves, each written as a whole."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge_opt.files import write_whole
from edge_opt.hardware import precision_tradeoff_table, save_hardware_artifacts
from edge_opt.records import ModelProfile, Sensitivity, SweepResult
from edge_opt.report.page import write_page
from edge_opt.report.plots import write_sweep_plots
from edge_opt.report.sweeps import frontier_keys, sweep_csv, sweep_dataframe, sweep_document

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Findings:
    """All that a run found out."""

    result: SweepResult
    profile: ModelProfile
    layerwise: pd.DataFrame
    hardware: Mapping[str, Any]
    summary: Mapping[str, Any]
    reproducibility: Mapping[str, Any]
    sensitivity: Sensitivity | None = None


def write_sweep(result: SweepResult, folder: Path) -> list[Path]:
    """The tables and plots of a sweep: all rows, failures if any, both frontiers, three clouds of points."""
    errors = folder / "sweep_errors.csv"
    # Of an earlier run, with other failures.
    errors.unlink(missing_ok=True)
    tables = {"sweep_results.csv": result}
    if result.failed:
        tables[errors.name] = _only(result, result.failed)
    for objective in ("latency", "energy"):
        keys = frontier_keys(result, objective)
        chosen = tuple(trial for trial in result.trials if trial.candidate.key in keys)
        tables[f"pareto_frontier_{objective}.csv"] = _only(result, chosen)
    written = [write_whole(folder / name, sweep_csv(part)) for name, part in tables.items()]
    written.append(write_whole(folder / "sweep.json", sweep_document(result)))
    return [*written, *write_sweep_plots(result, folder)]


def _only(result: SweepResult, trials: tuple[Any, ...]) -> SweepResult:
    return replace(result, trials=trials)


def write_artifacts(found: Findings, folder: Path) -> list[Path]:
    """Everything of a run but the model to ship; the page comes last, when all that it shows is there."""
    finished = replace(found.result, trials=tuple(t for t in found.result.trials if t.metrics is not None))
    tradeoffs = precision_tradeoff_table(sweep_dataframe(finished))
    written = [
        *write_sweep(found.result, folder),
        *save_hardware_artifacts(folder, found.layerwise, tradeoffs, found.hardware),
        found.profile.save(folder / "profile.json"),
        write_json(folder / "summary.json", found.summary),
        write_json(folder / "reproducibility.json", found.reproducibility),
    ]
    if found.sensitivity is not None:
        written.append(write_json(folder / "sensitivity.json", found.sensitivity.to_dict()))
    page = write_page(
        folder / "report.html",
        profile=found.profile,
        sweep=found.result,
        sensitivity=found.sensitivity,
        reproducibility=found.reproducibility,
        summary=found.summary,
    )
    return [*written, page]


def write_json(path: Path, content: Mapping[str, Any]) -> Path:
    """JSON for people to read; a value that JSON cannot hold is an error, not a guess."""
    return write_whole(path, json.dumps(content, indent=1, allow_nan=False) + "\n")
