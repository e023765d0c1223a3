"""Contents of `summary.json` and `reproducibility.json`: keys of the published pipeline and our own."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from subprocess import DEVNULL
from typing import Any

import pandas as pd

from edge_opt import __version__
from edge_opt._support.extras import installed
from edge_opt._support.json import to_plain
from edge_opt.boards.estimate import predictions
from edge_opt.boards.mcu_memory import with_mcu_memory
from edge_opt.boards.targets import ResolvedTarget, resolve_targets
from edge_opt.budgets import TRIAL_METRICS, parse_budget, violations
from edge_opt.data import Splits
from edge_opt.errors import InvalidInput
from edge_opt.hardware import summarize_hardware
from edge_opt.measuring.machine import copy_bandwidth, read_environment
from edge_opt.metrics import Metrics
from edge_opt.pruning.ranking import fast_multiple
from edge_opt.records.devices import SCRATCH_IS_APART, Precision
from edge_opt.records.profiles import ModelProfile
from edge_opt.records.sweeps import SweepResult, Trial, TrialMetrics
from edge_opt.report.sweep_files import WeightBudgets, speedup_data, sweep_rows
from edge_opt.run.config import RunConfig
from edge_opt.run.model_and_data import torch_threads
from edge_opt.search.choose import recommend
from edge_opt.search.locks import measurement_lock
from edge_opt.search.space import Space
from edge_opt.tasks.batches import LossChoice

PACKAGES = ("torch", "numpy", "pandas", "onnx", "onnxruntime", "onnxscript", "openvino", "safetensors",
            "scikit-learn", "distributed", "pydantic")  # fmt: skip
DEFAULT_CONSTRAINTS = (
    "budgets were not given, so the default judges too: accuracy_drop <= 0.01; "
    "`budgets: []` leaves active_memory_budget_mb alone to decide, as the published pipeline did"
)
NOT_SCALED = (
    "latencies of the baseline and of the rows are as measured here; the deployment part is for the device's clock "
    "(latency_multiplier = 1 / cpu_frequency_scale)"
)


def build_summary(
    config: RunConfig,
    splits: Splits,
    profile: ModelProfile,
    result: SweepResult,
    space: Space,
    hardware: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the content of `summary.json`; `profile` is the baseline's, `hardware` comes from `hardware_summary`."""
    best = None if result.best is None else result.trial(result.best)
    baseline = result.baseline.metrics
    machine = None if baseline is None else baseline.machine or None
    is_default = "budgets" not in config.model_fields_set and config.metric_name == "accuracy"
    return {
        "name": result.name,
        "measured_on": machine,
        "dataset": splits.name,
        "metric": result.metric,
        "metric_direction": result.metric_direction,
        **_published_study(config, result),
        "baseline": {**_published_baseline(result.baseline, config), **trial_summary(result.baseline)},
        "best": None if best is None else trial_summary(best) | {"speedup": speedup_data(result.speedup)},
        "recommendation": result.recommendation,
        "constraints": list(result.constraints),
        "counts": {
            "tried": len(result.trials),
            "accepted": len(result.accepted),
            "rejected": len(result.rejected),
            "failed": len(result.failed),
            "skipped": sum(not item.is_built for item in result.skipped),
        },
        "skipped": [to_plain(item) | {"label": item.candidate.label} for item in result.skipped],
        "slower_than_unpruned": [trial.candidate.label for trial in result.slower],
        "comparison": _comparison(result),
        "excluded": [asdict(item) for item in space.excluded],
        "memory_budgets": [_memory_budget(result, budget_mb) for budget_mb in config.memory_budgets_mb],
        "frontiers": {name: list(keys) for name, keys in result.frontiers},
        # Batches and a stream with the baseline, and the hardware summary; the best candidate beside it.
        "deployment": {
            **(_simulated(result.baseline, config) or {}),
            **hardware,
            "best": None if best is None else _simulated(best, config),
        },
        "target": _on_target(profile),
        "winners": [to_plain(winner) for winner in result.winners],
        "notes": [
            f"{result.metric} is on validation, by which the winner is chosen; test_{result.metric} is on the test "
            "part",
            f"latency is measured {f'on {machine}' if machine else 'here'}, with memory that is kept between calls; "
            "peak memory is an estimate from shapes, and measured memory the growth of the process over the idle "
            "runtime",
            "speedups compare finalists, timed interleaved in several processes; other times are of different moments",
            SCRATCH_IS_APART,
            *([DEFAULT_CONSTRAINTS] if is_default else []),
            NOT_SCALED,
        ],
    }


def hardware_summary(layerwise: pd.DataFrame, config: RunConfig, result: SweepResult) -> dict[str, Any]:
    """Return how the baseline uses the machine that timed it; the roofline is that of the configured device."""
    metrics = result.baseline.metrics
    if metrics is None or metrics.latency_s is None:
        return {}
    with torch_threads(config.used_threads), measurement_lock():
        # The memory bandwidth of this machine says nothing about a board.
        machine_gbps = None if metrics.machine else copy_bandwidth() / 1e9
    return summarize_hardware(
        layerwise, metrics.latency_s * 1e3, config.memory_bandwidth_gbps, config.peak_compute_gmacs, machine_gbps
    )


def trial_summary(trial: Trial) -> dict[str, Any]:
    """Return one candidate with its figures, without the answers to single samples."""
    return {
        "key": trial.candidate.key,
        "label": trial.candidate.label,
        "accepted": trial.is_accepted,
        "violations": [asdict(item) | {"excess": item.excess} for item in trial.violations],
        "metrics": None if trial.metrics is None else plain_metrics(trial.metrics),
        "reason": trial.reason,
    }


def plain_metrics(metrics: TrialMetrics) -> dict[str, Any]:
    """Return the figures of a candidate without the answers to single samples, which `sweep.json` keeps."""
    kept = {name: value for name, value in asdict(metrics).items() if name not in ("answers", "replicates")}
    return {name.replace("accuracy", metrics.metric): value for name, value in kept.items()}


def _memory_budget(result: SweepResult, budget_mb: float) -> dict[str, Any]:
    """Return what a budget of the weights alone would accept, and what would then be recommended."""
    budget = parse_budget(f"model_mb <= {budget_mb:g}", TRIAL_METRICS)
    ran = [(trial, trial.metrics) for trial in result.trials if trial.metrics is not None]
    fitting = [trial for trial, metrics in ran if not violations(metrics, [budget])]
    accepted = [trial for trial in fitting if trial.is_accepted]
    best, why = None, "no candidate fits that also satisfies the constraints"
    if accepted:
        best, why = recommend(accepted, result.finals)
    return {
        "memory_budget_mb": budget_mb,
        "fitting": [trial.candidate.label for trial in fitting],
        "accepted": [trial.candidate.label for trial in accepted],
        "best": best,
        "recommendation": why,
    }


def _simulated(trial: Trial, config: RunConfig) -> dict[str, Any] | None:
    metrics = trial.metrics
    if metrics is None or metrics.single_latency_s is None or metrics.latency_s is None:
        return None
    return simulate_deployment(
        metrics.latency_s,
        metrics.single_latency_s,
        batch_size=metrics.batch_size,
        cpu_frequency_scale=config.cpu_frequency_scale,
        stream_interval_s=config.stream_interval_ms / 1e3,
    )


def simulate_deployment(
    batch_latency_s: float,
    single_latency_s: float,
    *,
    batch_size: int,
    cpu_frequency_scale: float = 1.0,
    stream_interval_s: float = 0.01,
) -> dict[str, Any]:
    """Return batches and a stream of single samples on a device whose clock is `cpu_frequency_scale` times this one's.

    A simulation, not a measurement: measured time over the ratio of clocks, as if all of it were computing.
    `stream_throughput_sps` is how many single samples the device can do each second, items over time as published;
    `stream_served_sps` is how many of those that arrive it serves. Utilisation of the stream is the share of time that
    the device is busy, 1 at most; where it does not keep up, samples are lost or wait, and `stream_backlog_sps` says
    how many each second.

    >>> half = simulate_deployment(0.004, 0.001, batch_size=32, cpu_frequency_scale=0.5, stream_interval_s=0.01)
    >>> half["batch_latency_ms"], half["batch_throughput_sps"], half["stream_utilization"]
    (8.0, 4000.0, 0.2)
    """
    values = (batch_latency_s, single_latency_s, batch_size, cpu_frequency_scale, stream_interval_s)
    if not all(0 < value < float("inf") for value in values):
        raise InvalidInput(f"latencies, batch size, scale and interval must all be above 0, and are {values}")
    batch_s, single_s = batch_latency_s / cpu_frequency_scale, single_latency_s / cpu_frequency_scale
    offered, possible = 1 / stream_interval_s, 1 / single_s
    return {
        "cpu_frequency_scale": cpu_frequency_scale,
        "latency_multiplier": 1 / cpu_frequency_scale,
        "batch_size": batch_size,
        "batch_latency_ms": batch_s * 1e3,
        "batch_throughput_sps": batch_size / batch_s,
        "stream_interval_ms": stream_interval_s * 1e3,
        "stream_latency_ms": single_s * 1e3,
        "stream_avg_latency_ms": single_s * 1e3,
        "stream_throughput_sps": possible,
        "stream_served_sps": min(offered, possible),
        "stream_utilization": min(single_s / stream_interval_s, 1.0),
        "stream_keeps_up": single_s <= stream_interval_s,
        "stream_backlog_sps": max(offered - possible, 0.0),
        "note": "simulated: measured latency here / cpu_frequency_scale",
    }


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


def check_target(config: RunConfig) -> None:
    """Refuse a target that is not known, or cannot be asked what is asked of it, before anything is trained."""
    asked = {"target_runtime": config.target_runtime, "target_threads": config.target_threads}
    errors = [error for precision in config.precisions if (error := _refusal(config, precision))]
    if len(errors) == len(config.precisions):
        raise errors[0]
    if not config.targets and any(asked.values()):
        name = next(name for name, value in asked.items() if value is not None)
        raise InvalidInput(f"{name} is {asked[name]!r}, and there is no target; set target, or leave {name} out")
    if not config.targets and not config.host_timing:
        raise InvalidInput("host_timing is false, and there is no target; set target, such as raspberry-pi-4")


def resolve_targets_of(config: RunConfig, precision: Precision = "fp32") -> tuple[ResolvedTarget, ...]:
    """Return the targets of a configuration as they answer in a precision; none where it names none."""
    if not config.targets:
        return ()
    if config.target_runtime is not None and _refusal(config, precision):
        # No time with this runtime is known in the precision; another runtime's would answer another question.
        return tuple(replace(target, platform=None) for target in resolve_targets(list(config.targets), precision))
    return _resolved(config, precision)


def _resolved(config: RunConfig, precision: Precision) -> tuple[ResolvedTarget, ...]:
    on_target: dict[str, Any] = {"runtime": config.target_runtime, "threads": config.target_threads}
    return resolve_targets(list(config.targets), precision, **on_target) if config.targets else ()


def _refusal(config: RunConfig, precision: Precision) -> InvalidInput | None:
    """Return why the targets cannot be asked for a precision; None if they can."""
    try:
        _resolved(config, precision)
    except InvalidInput as error:
        return error
    return None


def pruning_target(config: RunConfig) -> ResolvedTarget | None:
    """Return the target that widths are rounded for, which is the first; None where none is, or rounding is set."""
    if not config.targets or config.round_to != "auto":
        return None
    precisions: tuple[Precision, ...] = ("fp32", *config.precisions)
    known = [resolve_targets_of(config, precision)[0] for precision in precisions]
    return next((target for target in known if target.platform is not None), known[0])


def used_rounding(config: RunConfig) -> str | int:
    """Return what widths are rounded to, as far as results depend on it: `auto` with the target that they are for."""
    target = pruning_target(config) if config.prunes else None
    if target is None:
        return config.round_to
    return f"auto {fast_multiple(target)} {target.name if target.platform is None else target.platform.name}"


def with_target(profile: ModelProfile, config: RunConfig) -> ModelProfile:
    """Return the profile with its predictions for the targets of a run, as `eo.profile(target=)` predicts them."""
    targets = resolve_targets_of(config)
    predicted = predictions(profile, targets, "fp32", config.target_threads)
    return replace(profile, predictions=with_mcu_memory(predicted, targets, profile, None, config.target_runtime))


def _on_target(profile: ModelProfile) -> dict[str, Any] | None:
    """Return what the baseline would take on the target, with the basis of the prediction; None without a target."""
    prediction = profile.prediction
    if prediction is None:
        return None

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


def _published_baseline(baseline: Trial, config: RunConfig) -> dict[str, Any]:
    """Return the baseline's figures, which budgets its weights break, and whether they keep the active one.

    They are those of its row.
    """
    if baseline.metrics is None:
        return {}
    budgets = WeightBudgets(tuple(config.memory_budgets_mb), config.active_memory_budget_mb)
    [row] = sweep_rows(SweepResult("", baseline, (baseline,), (), (), None, ""))
    weights_mb = row["model_memory_mb"]
    figures = {item.name: row[item.name] for item in fields(Metrics)}
    return {
        **figures,
        **budgets.violations(weights_mb),
        "accepted_under_active_budget": budgets.active_mb is None or weights_mb <= budgets.active_mb,
        "published_metrics": figures,
    }


def _published_study(config: RunConfig, result: SweepResult) -> dict[str, Any]:
    """Return the settings that the rows were judged by, how many there are, and the best of those accepted.

    A row is accepted or rejected; a failed one is rejected.
    """
    accepted = [trial.metrics for trial in result.accepted if trial.metrics is not None]
    best = max(accepted, key=lambda metrics: metrics.comparable_score, default=None)
    return {
        "memory_budgets_mb": list(config.memory_budgets_mb),
        "active_memory_budget_mb": config.active_memory_budget_mb,
        "cpu_frequency_scale": config.cpu_frequency_scale,
        "latency_multiplier": 1 / config.cpu_frequency_scale,
        "study_rows": len(result.trials),
        "accepted_rows": len(result.accepted),
        "rejected_rows": len(result.trials) - len(result.accepted),
        f"best_{result.metric}_accepted": best and best.accuracy,
        "lowest_latency_ms_accepted": min((it.latency_s * 1e3 for it in accepted if it.latency_s), default=None),
    }


def quantization_metadata(result: SweepResult, config: RunConfig) -> dict[str, dict[str, Any]]:
    """Return the result of int8 at each pruning level, by file name: one entry for each runtime that was tried."""
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


def reproducibility(
    config: RunConfig,
    settings: Mapping[str, Any],
    splits: Splits,
    command: Sequence[str],
    model: str,
    loss: LossChoice | None = None,
) -> dict[str, Any]:
    """Return everything the result depends on, as JSON holds it; measured times also depend on the machine's load.

    `settings` are those that are listed as the configuration: a sweep has fewer than a run.
    """
    versions = {name: installed(name) for name in PACKAGES}
    python = {"edge_opt": __version__, "python": platform.python_version()}
    checked_out = commit(Path.cwd())
    return {
        "config": dict(settings),
        "seeds": {"seed": settings.get("seed"), "dataloader_seed": settings.get("dataloader_seed")},
        "versions": {**python, **versions},
        "machine": asdict(read_environment()),
        "loss": None if loss is None else str(loss),
        "data": {"sha256": dict(splits.fingerprints()), "samples": dict(splits.sizes())},
        "command": list(command),
        "commit": checked_out,
        "note": "same seed, same table; measured times and what follows from them aside",
        # The same under the names of the published pipeline.
        "packages": {**python, **{name: version for name, version in versions.items() if version is not None}},
        "cpu": {
            "processor": platform.processor(),
            "machine": platform.machine(),
            "platform": platform.platform(),
        },
        "git_commit_hash": checked_out,
        "seed": config.seed,
        "dataloader_seed": config.seed if config.dataloader_seed is None else config.dataloader_seed,
        "device_requested": config.device,
        "device_resolved": config.device,
        "model": model,
    }


def commit(folder: Path) -> str | None:
    """Return the commit that is checked out in a folder, with `+changes` where files differ; None outside of git."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.check_output(command, text=True, timeout=10, stderr=DEVNULL, stdin=DEVNULL).strip()

    try:
        head = git("rev-parse", "HEAD")
        return f"{head}+changes" if git("status", "--porcelain", "--untracked-files=no") else head
    except (OSError, subprocess.SubprocessError):
        return None
