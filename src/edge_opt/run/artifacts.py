"""Files of a run: tables, plots, JSON and the page; and the lines at its end."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge_opt import __version__, units
from edge_opt._support.extras import installed
from edge_opt._support.files import write_whole
from edge_opt.budgets import TRIAL_METRICS, parse_budget, violations
from edge_opt.errors import InvalidInput
from edge_opt.hardware import precision_tradeoff_table, save_hardware_artifacts
from edge_opt.measuring.machine import read_environment
from edge_opt.records.compression import Sensitivity
from edge_opt.records.profiles import ModelProfile
from edge_opt.records.sweeps import SweepResult, Trial
from edge_opt.report.page import write_page
from edge_opt.report.png import write_sweep_plots
from edge_opt.report.sweep_files import (
    NO_BUDGETS,
    WeightBudgets,
    frontier_keys,
    sweep_csv,
    sweep_dataframe,
    sweep_document,
)
from edge_opt.report.sweep_tables import bought, conditions, headline, per_call, times
from edge_opt.run.export_best import plain_metrics
from edge_opt.run.legacy_keys import stale_metadata
from edge_opt.search.choose import recommend

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class RunReport:
    """Everything that the files of a run contain."""

    result: SweepResult
    profile: ModelProfile
    layerwise: pd.DataFrame
    hardware: Mapping[str, Any]
    summary: Mapping[str, Any]
    reproducibility: Mapping[str, Any]
    sensitivity: Sensitivity | None = None
    budgets: WeightBudgets = NO_BUDGETS
    quantization: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def write_sweep(result: SweepResult, folder: Path, budgets: WeightBudgets = NO_BUDGETS) -> list[Path]:
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
    written = [write_whole(folder / name, sweep_csv(part, budgets)) for name, part in tables.items()]
    written.append(write_whole(folder / "sweep.json", sweep_document(result)))
    return [*written, *write_sweep_plots(result, folder)]


def _only(result: SweepResult, trials: tuple[Any, ...]) -> SweepResult:
    return replace(result, trials=trials)


def write_artifacts(report: RunReport, folder: Path) -> list[Path]:
    """Everything of a run but the model to ship; the page comes last, when all that it shows is there."""
    finished = replace(report.result, trials=tuple(t for t in report.result.trials if t.metrics is not None))
    metric = report.result.metric
    tradeoffs = precision_tradeoff_table(sweep_dataframe(finished)).rename(
        columns=lambda name: name.replace("accuracy", metric)
    )
    written = [
        *write_sweep(report.result, folder, report.budgets),
        *save_hardware_artifacts(folder, report.layerwise, tradeoffs, report.hardware),
        report.profile.save(folder / "profile.json"),
        write_json(folder / "summary.json", report.summary),
        write_json(folder / "reproducibility.json", report.reproducibility),
    ]
    for stale in stale_metadata(folder, list(report.quantization)):
        stale.unlink()
    written += [write_json(folder / name, content) for name, content in report.quantization.items()]
    if report.sensitivity is not None:
        written.append(write_json(folder / "sensitivity.json", report.sensitivity.to_dict()))
    page = write_page(
        folder / "report.html",
        profile=report.profile,
        sweep=report.result,
        sensitivity=report.sensitivity,
        reproducibility=report.reproducibility,
        summary=report.summary,
    )
    return [*written, page]


def write_json(path: Path, content: Mapping[str, Any]) -> Path:
    """JSON for people to read; a value that JSON cannot hold is an error, not a guess."""
    return write_whole(path, json.dumps(content, indent=1, allow_nan=False) + "\n")


@dataclass(frozen=True, slots=True)
class Deployment:
    """A simulation, not a measurement: measured time over the ratio of clocks, as if all of it were computing.

    `stream_throughput_sps` is how many single samples the device can do each second, items over time as published;
    `stream_served_sps` is how many of those that arrive it serves. Utilisation of the stream is the share of time that
    the device is busy, 1 at most; where it does not keep up, samples are lost or wait, and `stream_backlog_sps` says
    how many each second.
    """

    cpu_frequency_scale: float
    latency_multiplier: float
    batch_size: int
    batch_latency_ms: float
    batch_throughput_sps: float
    stream_interval_ms: float
    stream_latency_ms: float
    stream_avg_latency_ms: float
    stream_throughput_sps: float
    stream_served_sps: float
    stream_utilization: float
    stream_keeps_up: bool
    stream_backlog_sps: float
    note: str = "simulated: measured latency here / cpu_frequency_scale"


def simulate_deployment(
    batch_latency_s: float,
    single_latency_s: float,
    *,
    batch_size: int,
    cpu_frequency_scale: float = 1.0,
    stream_interval_s: float = 0.01,
) -> Deployment:
    """Batches and a stream of single samples on a device whose clock is `cpu_frequency_scale` times the one here.

    >>> half = simulate_deployment(0.004, 0.001, batch_size=32, cpu_frequency_scale=0.5, stream_interval_s=0.01)
    >>> half.batch_latency_ms, half.batch_throughput_sps, half.stream_utilization
    (8.0, 4000.0, 0.2)
    """
    values = (batch_latency_s, single_latency_s, batch_size, cpu_frequency_scale, stream_interval_s)
    if not all(0 < value < float("inf") for value in values):
        raise InvalidInput(f"latencies, batch size, scale and interval must all be above 0, and are {values}")
    batch_s, single_s = batch_latency_s / cpu_frequency_scale, single_latency_s / cpu_frequency_scale
    offered, possible = 1 / stream_interval_s, 1 / single_s
    return Deployment(
        cpu_frequency_scale=cpu_frequency_scale,
        latency_multiplier=1 / cpu_frequency_scale,
        batch_size=batch_size,
        batch_latency_ms=batch_s * 1e3,
        batch_throughput_sps=batch_size / batch_s,
        stream_interval_ms=stream_interval_s * 1e3,
        stream_latency_ms=single_s * 1e3,
        stream_avg_latency_ms=single_s * 1e3,
        stream_throughput_sps=possible,
        stream_served_sps=min(offered, possible),
        stream_utilization=min(single_s / stream_interval_s, 1.0),
        stream_keeps_up=single_s <= stream_interval_s,
        stream_backlog_sps=max(offered - possible, 0.0),
    )


PACKAGES = ("torch", "numpy", "pandas", "onnx", "onnxruntime", "onnxscript", "openvino", "safetensors",
            "scikit-learn", "optuna", "distributed", "pydantic")  # fmt: skip


def reproducibility(
    config: Mapping[str, Any], checksums: Sequence[tuple[str, str]], sizes: Mapping[str, int], command: Sequence[str]
) -> dict[str, Any]:
    """Everything the result depends on, as JSON holds it; measured times depend on the machine's load, too."""
    return {
        "config": dict(config),
        "seeds": {"seed": config.get("seed"), "dataloader_seed": config.get("dataloader_seed")},
        "versions": {"edge_opt": __version__, "python": platform.python_version(), **versions()},
        "machine": asdict(read_environment()),
        "data": {"sha256": dict(checksums), "samples": dict(sizes)},
        "command": list(command),
        "commit": commit(Path.cwd()),
        "note": "same seed, same table; measured times and what follows from them aside",
    }


def versions() -> dict[str, str | None]:
    """Installed packages that results depend on; None for those that are not here."""
    return {name: installed(name) for name in PACKAGES}


def commit(folder: Path) -> str | None:
    """The commit that is checked out in a folder, with `+changes` where files differ; None outside of git."""
    try:
        head = _git(folder, "rev-parse", "HEAD")
        return f"{head}+changes" if _git(folder, "status", "--porcelain", "--untracked-files=no") else head
    except (OSError, subprocess.SubprocessError):
        return None


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
        timeout=10,
        stdin=subprocess.DEVNULL,
    )
    return done.stdout.strip()


def command_line() -> list[str]:
    """The command as it was given."""
    program = Path(sys.argv[0]).name
    return ["edge-opt" if program == "__main__.py" else program, *sys.argv[1:]]


def trial_summary(trial: Trial | None) -> dict[str, Any] | None:
    """One candidate with its figures; None where there is no candidate. Answers to single samples are left out."""
    if trial is None:
        return None
    return {
        "key": trial.candidate.key,
        "label": trial.candidate.label,
        "accepted": trial.is_accepted,
        "violations": [asdict(item) | {"excess": item.excess} for item in trial.violations],
        "metrics": plain_metrics(trial.metrics),
        "reason": trial.reason,
    }


def memory_budgets(result: SweepResult, budgets_mb: Sequence[float]) -> list[dict[str, Any]]:
    """What each budget of the weights alone would accept, and what would then be recommended."""
    found = []
    for budget_mb in budgets_mb:
        budget = parse_budget(f"model_mb <= {budget_mb:g}", TRIAL_METRICS)
        fitting = [
            trial for trial in result.trials if trial.metrics is not None and not violations(trial.metrics, [budget])
        ]
        kept = [trial for trial in fitting if trial.is_accepted]
        best, why = recommend(kept, result.finals) if kept else (None, "nothing fits that also keeps the constraints")
        found.append(
            {
                "memory_budget_mb": budget_mb,
                "fitting": [trial.candidate.label for trial in fitting],
                "accepted": [trial.candidate.label for trial in kept],
                "best": best,
                "recommendation": why,
            }
        )
    return found


def deployment_summary(
    result: SweepResult, hardware: Mapping[str, Any], cpu_frequency_scale: float, stream_interval_ms: float
) -> dict[str, Any]:
    """Batches and a stream with the baseline, merged with the hardware summary; the best candidate beside it."""

    def simulated(trial: Trial | None) -> dict[str, Any] | None:
        metrics = None if trial is None else trial.metrics
        if metrics is None or metrics.single_latency_s is None:
            return None
        return asdict(
            simulate_deployment(
                metrics.latency_s,
                metrics.single_latency_s,
                batch_size=metrics.batch_size,
                cpu_frequency_scale=cpu_frequency_scale,
                stream_interval_s=stream_interval_ms / 1e3,
            )
        )

    best = None if result.best is None else result.trial(result.best)
    return {**(simulated(result.baseline) or {}), **hardware, "best": simulated(best)}


def conclusion(result: SweepResult) -> list[str]:
    """The end of a run in a few lines: the baseline, the winner and why, and how the others fared."""
    lines = [f"baseline  {_figures(result.baseline)}"]
    if result.best is not None:
        best = result.trial(result.best)
        lines.append(f"best      {best.candidate.label}: {_figures(best)}")
        lines += _comparison(result, best)
    lines.append(f"why       {result.recommendation}")
    if result.constraints:
        lines.append(f"{'kept ' if result.best else 'asked'}     {', '.join(result.constraints)}")
    if result.slower:
        names = ", ".join(trial.candidate.label for trial in result.slower)
        lines.append(f"slower    not faster than unpruned, and not offered: {names}")
    counts = f"{len(result.accepted)} accepted, {len(result.rejected)} rejected, {len(result.failed)} failed"
    return [*lines, f"tried     {len(result.trials)} candidates: {counts}"]


def _comparison(result: SweepResult, best: Trial) -> list[str]:
    """The winner against the baseline: speed as it was compared, and what bought it; size."""
    found, before, after = result.speedup, result.baseline.metrics, best.metrics
    if before is None or after is None:
        return []
    smaller = f"{times(before.size_bytes / after.size_bytes)} × as small"
    if found is None:
        return [f"against   {smaller}"]
    parts = bought(found)
    lines = [f"against   {headline(found)}; {smaller} ({conditions(found)})"]
    return lines if parts is None else [*lines, f"bought by {parts}"]


def _figures(trial: Trial) -> str:
    metrics = trial.metrics
    if metrics is None:
        return f"{trial.failure}: {trial.reason}"
    test = "" if metrics.test_accuracy is None else f", {metrics.test_accuracy:.4f} on test"
    mark = " (disturbed)" if metrics.is_disturbed else ""
    return (
        f"{metrics.metric} {metrics.accuracy:.4f} on validation{test}; {per_call(metrics)}{mark}; "
        f"{units.size(metrics.size_bytes)} on disk"
    )
