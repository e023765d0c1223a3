"""Keys and files of the published pipeline, as its users read them: from what a run found, beside our own."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from edge_opt.metrics import Metrics
from edge_opt.records.sweeps import SweepResult, Trial
from edge_opt.report.sweep_files import WeightBudgets, sweep_rows
from edge_opt.run.config import RunConfig

DEFAULT_CONSTRAINTS = (
    "constraints were not given, so the default judges too: accuracy_drop <= 0.01; "
    "`constraints: []` leaves active_memory_budget_mb alone to decide, as the published pipeline did"
)
NOT_SCALED = (
    "latencies of the baseline and of the rows are as measured here; the deployment part is for the device's clock "
    "(latency_multiplier = 1 / cpu_frequency_scale)"
)


def weight_budgets(config: RunConfig) -> WeightBudgets:
    """The budgets of a configuration."""
    return WeightBudgets(tuple(config.memory_budgets_mb), config.active_memory_budget_mb)


def baseline_keys(baseline: Trial, budgets: WeightBudgets) -> dict[str, Any]:
    """The baseline's figures, which budgets its weights break, and whether they keep the active one.

    They are those of its row: what is told twice is told the same.
    """
    if baseline.metrics is None:
        return {}
    only = SweepResult("", baseline, (baseline,), (), (), None, "")
    [row] = sweep_rows(only)
    weights_mb = row["model_memory_mb"]
    figures = {item.name: row[item.name] for item in fields(Metrics)}
    return {
        **figures,
        **budgets.violations(weights_mb),
        "accepted_under_active_budget": budgets.active_mb is None or weights_mb <= budgets.active_mb,
        "published_metrics": figures,
    }


def study_keys(config: RunConfig, result: SweepResult) -> dict[str, Any]:
    """The settings that the rows were judged by, how many there are, and the best of those accepted.

    A row is accepted or rejected: one that failed is rejected, too.
    """
    found = [trial.metrics for trial in result.accepted if trial.metrics is not None]
    best = max(found, key=lambda metrics: metrics.comparable_score, default=None)
    return {
        "memory_budgets_mb": list(config.memory_budgets_mb),
        "active_memory_budget_mb": config.active_memory_budget_mb,
        "cpu_frequency_scale": config.cpu_frequency_scale,
        "latency_multiplier": 1 / config.cpu_frequency_scale,
        "study_rows": len(result.trials),
        "accepted_rows": len(result.accepted),
        "rejected_rows": len(result.trials) - len(result.accepted),
        f"best_{result.metric}_accepted": best and best.accuracy,
        "lowest_latency_ms_accepted": min((metrics.latency_s * 1e3 for metrics in found), default=None),
    }


def notes(config: RunConfig) -> list[str]:
    """What a user of the published pipeline must know of this run."""
    is_said = "constraints" in config.model_fields_set or config.metric_name != "accuracy"
    said = [] if is_said else [DEFAULT_CONSTRAINTS]
    return [*said, NOT_SCALED]


def reproducibility_keys(
    config: RunConfig, model: str, versions: Mapping[str, str | None], commit: str | None
) -> dict[str, Any]:
    """Machine, packages, seeds and device under their published names."""
    return {
        "packages": {name: found for name, found in versions.items() if found is not None},
        "cpu": {
            "processor": platform.processor(),
            "machine": platform.machine(),
            "platform": platform.platform(),
        },
        "git_commit_hash": commit,
        "seed": config.seed,
        "dataloader_seed": config.seed if config.dataloader_seed is None else config.dataloader_seed,
        "device_requested": config.device,
        "device_resolved": config.device,
        "model": model,
    }


def quantization_metadata(result: SweepResult, config: RunConfig) -> dict[str, dict[str, Any]]:
    """What int8 came to at each pruning level, by file name: one entry for each runtime that was tried."""
    levels: dict[float, list[Trial]] = {}
    for trial in result.trials:
        if trial.candidate.precision == "int8" and not trial.candidate.layer_pruning:
            levels.setdefault(trial.candidate.pruning, []).append(trial)
    return {
        f"quantization_metadata_p{level}_int8.json": {
            "pruning_level": level,
            "precision": "int8",
            "backend": config.quantization_backend,
            "calibration_batches": config.calibration_batches,
            "runtimes": {trial.candidate.runtime: _conversion(trial) for trial in trials},
        }
        for level, trials in levels.items()
    }


def _conversion(trial: Trial) -> dict[str, Any]:
    metrics = trial.metrics
    if metrics is None:
        return {"status": trial.status, "error": trial.reason}
    return {
        "status": trial.status,
        "effective_precision": metrics.effective_precision,
        "float_layers": list(metrics.float_layers),
        "model_memory_mb": metrics.model_bytes / 2**20,
        "size_mb": metrics.size_bytes / 2**20,
        "remarks": list(metrics.remarks),
    }


def stale_metadata(folder: Path, written: Sequence[str]) -> list[Path]:
    """Metadata of an earlier run with other levels, which the files of this one do not replace."""
    return [path for path in folder.glob("quantization_metadata_p*_int8.json") if path.name not in written]
