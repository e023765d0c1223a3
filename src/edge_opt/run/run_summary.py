"""The summary of a run: `summary.json`, and what `reproducibility.json` lists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import pandas as pd

from edge_opt.boards.estimate import predictions
from edge_opt.boards.targets import resolve_target
from edge_opt.calibration.calibrate import memory_bandwidth
from edge_opt.data import Splits
from edge_opt.errors import InvalidInput
from edge_opt.hardware import layer_estimates, summarize_hardware
from edge_opt.records.compression import Sensitivity
from edge_opt.records.devices import SCRATCH_IS_APART
from edge_opt.records.profiles import ModelProfile
from edge_opt.records.sweeps import SweepResult
from edge_opt.report.sweep_tables import speedup_data
from edge_opt.run.artifacts import (
    RunReport,
    deployment_summary,
    memory_budgets,
    reproducibility,
    trial_summary,
)
from edge_opt.run.config import RunConfig
from edge_opt.run.legacy_keys import (
    baseline_keys,
    notes,
    quantization_metadata,
    reproducibility_keys,
    study_keys,
    weight_budgets,
)
from edge_opt.run.model_and_data import torch_threads
from edge_opt.search.locks import measurement_lock
from edge_opt.search.space import Space


def build_report(
    config: RunConfig,
    splits: Splits,
    profile: ModelProfile,
    result: SweepResult,
    space: Space,
    command: Sequence[str],
    settings: Mapping[str, Any],
    sensitivity: Sensitivity | None = None,
) -> RunReport:
    """Return everything that the files of a run contain.

    Args:
        config: The configuration.
        splits: The data.
        profile: The baseline's profile.
        result: The result of the sweep.
        space: The candidates.
        command: The command line.
        settings: The settings that the result depends on.
        sensitivity: Of each layer, where it was measured.
    """
    layerwise = pd.DataFrame([asdict(item) for item in layer_estimates(profile)])
    hardware = _hardware(layerwise, config, result)
    best = None if result.best is None else result.trial(result.best)
    budgets = weight_budgets(config)
    shown = trial_summary(best)
    summary = {
        "name": result.name,
        "measured_on": None if result.baseline.metrics is None else result.baseline.metrics.machine or None,
        "dataset": splits.name,
        "metric": result.metric,
        "metric_direction": result.metric_direction,
        **study_keys(config, result),
        "baseline": {**baseline_keys(result.baseline, budgets), **(trial_summary(result.baseline) or {})},
        "best": None if shown is None else shown | {"speedup": speedup_data(result.speedup)},
        "recommendation": result.recommendation,
        "constraints": list(result.constraints),
        "counts": {
            "tried": len(result.trials),
            "accepted": len(result.accepted),
            "rejected": len(result.rejected),
            "failed": len(result.failed),
        },
        "slower_than_unpruned": [trial.candidate.label for trial in result.slower],
        "comparison": _comparison(result),
        "excluded": [asdict(item) for item in space.excluded],
        "memory_budgets": memory_budgets(result, config.memory_budgets_mb),
        "frontiers": {name: list(keys) for name, keys in result.frontiers},
        "deployment": deployment_summary(result, hardware, config.cpu_frequency_scale, config.stream_interval_ms),
        "target": None if config.target is None else on_target(profile, config),
        "notes": [
            f"{result.metric} is on validation, by which the winner is chosen; test_{result.metric} is on the test "
            "part",
            f"latency is measured {_where(result)}, with memory that is kept between calls; peak memory is an estimate "
            "from shapes, "
            "and measured memory the growth of the process over the idle runtime",
            "speedups are of finalists timed in turns, by the fastest blocks in each of several processes; other times "
            "are of their own moments",
            SCRATCH_IS_APART,
            *notes(config),
        ],
    }
    repeated = reproducibility(settings, splits.fingerprints(), splits.sizes(), command)
    repeated |= reproducibility_keys(config, profile.name, repeated["versions"], repeated["commit"])
    metadata = quantization_metadata(result, config)
    return RunReport(result, profile, layerwise, hardware, summary, repeated, sensitivity, budgets, metadata)


def _hardware(layerwise: pd.DataFrame, config: RunConfig, result: SweepResult) -> Mapping[str, Any]:
    """How the baseline uses the machine that it was timed on; the roofline is that of the configured device."""
    metrics = result.baseline.metrics
    if metrics is None:
        return {}
    with torch_threads(config.used_threads), measurement_lock(lambda: None):
        # The memory bandwidth of this machine says nothing about a board.
        machine_gbps = None if metrics.machine else memory_bandwidth() / 1e9
    return summarize_hardware(
        layerwise, metrics.latency_s * 1e3, config.memory_bandwidth_gbps, config.peak_compute_gmacs, machine_gbps
    )


def _comparison(result: SweepResult) -> dict[str, Any] | None:
    finals = result.finals
    if finals is None:
        return None
    return {
        "batch_size": finals.batch_size,
        "threads": finals.threads,
        "clock": finals.clock,
        "sessions": finals.sessions,
        "disturbed": finals.is_disturbed,
        "remarks": list(finals.remarks),
        "finalists": [
            {
                "key": item.candidate.key,
                "label": item.candidate.label,
                "latency_ms": item.seconds * 1e3,
                "latency_low_ms": item.low * 1e3,
                "latency_high_ms": item.high * 1e3,
                "speedup": asdict(item.speedup),
            }
            for item in finals.finalists
        ],
    }


def _where(result: SweepResult) -> str:
    metrics = result.baseline.metrics
    return f"on {metrics.machine}" if metrics is not None and metrics.machine else "here"


def check_target(config: RunConfig) -> None:
    """Refuse a target that is not known, or cannot be asked what is asked of it, before anything is trained."""
    asked = {"target_runtime": config.target_runtime, "target_threads": config.target_threads}
    if config.target is not None:
        resolve_target(config.target, runtime=config.target_runtime, threads=config.target_threads)
    elif any(asked.values()):
        name = next(name for name, value in asked.items() if value is not None)
        raise InvalidInput(f"{name} is {asked[name]!r}, and there is no target; set target, or leave {name} out")


def on_target(profile: ModelProfile, config: RunConfig) -> dict[str, Any]:
    """What the baseline would take on the target, as `eo.profile(target=)` says it, with what it rests on."""
    target = resolve_target(config.target or "", runtime=config.target_runtime, threads=config.target_threads)
    [prediction] = predictions(profile, [target], "fp32", config.target_threads)

    def milliseconds(seconds: float | None) -> float | None:
        return None if seconds is None else seconds * 1e3

    return {
        "device": prediction.target,
        "precision": prediction.precision,
        "basis": prediction.basis,
        "estimated_latency_ms": milliseconds(prediction.seconds),
        "estimated_latency_low_ms": milliseconds(prediction.low),
        "estimated_latency_high_ms": milliseconds(prediction.high),
        "bound": prediction.bound,
        "remarks": list(prediction.remarks),
    }
