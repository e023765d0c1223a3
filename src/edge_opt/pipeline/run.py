"""run(): from a configuration to the model to ship."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

import edge_opt as eo
from edge_opt.compress.sensitivity import sensitivity
from edge_opt.config import RunConfig
from edge_opt.data import Splits, load_splits
from edge_opt.devices.catalog import device
from edge_opt.devices.roofline import roofline
from edge_opt.hardware import layer_estimates, summarize_hardware
from edge_opt.measure.environment import usable_cores
from edge_opt.metrics import collect_metrics
from edge_opt.pipeline.artifacts import Findings, write_artifacts
from edge_opt.pipeline.core import Search, sweep_space
from edge_opt.pipeline.job import PipelineJob, Reference
from edge_opt.pipeline.reproducibility import command_line, reproducibility
from edge_opt.pipeline.settings import (
    REDUCED_RANGE,
    bench,
    data_options,
    digest,
    space,
    sweep_settings,
    training_settings,
    tuning,
)  # fmt: skip
from edge_opt.pipeline.shipping import ship
from edge_opt.pipeline.subject import Subject, absolute
from edge_opt.pipeline.summary import deployment_summary, memory_budgets, trial_summary
from edge_opt.pipeline.threads import computing_with
from edge_opt.pipeline.training import Trained, baseline
from edge_opt.records import ModelProfile, Sensitivity, SweepResult
from edge_opt.search.events import Listener, Notice
from edge_opt.search.locks import folder_lock
from edge_opt.search.store import Store
from edge_opt.search.sweep import candidate_folder
from edge_opt.units import MIB


@dataclass(frozen=True)
class RunResult:
    """What a run found, where it is, and the files it wrote."""

    folder: Path
    result: SweepResult
    summary: Mapping[str, Any]
    files: tuple[Path, ...]

    @property
    def report(self) -> Path:
        return self.folder / "report.html"


def run(
    config: RunConfig,
    folder: str | Path | None = None,
    *,
    workers: int = 0,
    scheduler: str | None = None,
    fresh: bool = False,
    on_event: Listener = lambda _: None,
    command: Sequence[str] | None = None,
) -> RunResult:
    """Train a baseline, sweep variants of it, judge them by the constraints, and write everything to a folder.

    Run again on the same folder, it goes on where it was, and trains and tries nothing twice.
    """
    root = Path(config.output_dir if folder is None else folder)
    if config.target is not None:
        device(config.target)
    splits = load_splits(**data_options(config))
    settings = sweep_settings(config, splits)
    # Held for the whole run: training, the sweep and the files that come after it.
    with folder_lock(root / "baseline"):
        Store.open(root, settings, fresh=fresh, on_notice=lambda text: on_event(Notice(text))).close()
        key = digest(training_settings(config, splits))
        threads = config.build_threads or usable_cores()
        with computing_with(threads):
            trained = baseline(config, splits, root / "baseline", key, lambda text: on_event(Notice(text)))
        subject = Subject(absolute(config.model_reference), data_options(config), trained.weights)
        example = subject.example(splits)
        profile = eo.profile(trained.model, example, name=type(trained.model).__name__)
        job = PipelineJob(
            subject,
            Reference(trained.accuracy, profile.totals.macs, profile.totals.params),
            (root / "pruned" / digest(settings)).resolve(),
            tuning(config),
            bench(config),
            config.calibration_batches,
            REDUCED_RANGE[config.quantization_backend],
            threads,
        )
        result = sweep_space(
            job,
            space(config),
            splits,
            folder=root,
            constraints=config.budgets,
            settings=settings,
            search=_search(config, workers, scheduler),
            name=profile.name,
            on_event=on_event,
        )
        found = _findings(config, splits, trained, profile, result, command or command_line())
        files = write_artifacts(found, root)
        if result.best is not None:
            best = result.trial(result.best)
            files += ship(best, job, candidate_folder(root, best.candidate), splits, root / "best")
    return RunResult(root, result, found.summary, tuple(files))


def _search(config: RunConfig, workers: int, scheduler: str | None) -> Search:
    limit = config.memory_limit_mb
    return Search(
        sampler=config.sampler,
        trials=config.trials,
        seed=config.seed,
        use_ci=config.pareto_use_ci,
        memory_limit_bytes=None if limit is None else int(limit * MIB),
        time_limit_s=config.time_limit_s,
        workers=workers,
        scheduler=scheduler,
    )


def _findings(
    config: RunConfig,
    splits: Splits,
    trained: Trained,
    profile: ModelProfile,
    result: SweepResult,
    command: Sequence[str],
) -> Findings:
    with computing_with(bench(config).used_threads):
        metrics = collect_metrics(
            trained.model,
            splits.validation,
            "cpu",
            config.power_watts,
            "fp32",
            benchmark_repeats=config.benchmark_repeats,
            benchmark_trials=config.benchmark_trials,
            benchmark_warmup=config.benchmark_warmup,
        )
    layerwise = pd.DataFrame([dataclasses.asdict(item) for item in layer_estimates(profile)])
    hardware = summarize_hardware(
        layerwise, metrics.latency_ms, config.memory_bandwidth_gbps, config.peak_compute_gmacs
    )
    best = None if result.best is None else result.trial(result.best)
    summary = {
        "name": result.name,
        "dataset": splits.name,
        "baseline": {**(trial_summary(result.baseline) or {}), "published_metrics": dataclasses.asdict(metrics)},
        "best": trial_summary(best),
        "recommendation": result.recommendation,
        "constraints": list(result.constraints),
        "counts": {
            "tried": len(result.trials),
            "accepted": len(result.accepted),
            "rejected": len(result.rejected),
            "failed": len(result.failed),
        },
        "excluded": [dataclasses.asdict(item) for item in space(config).excluded],
        "memory_budgets": memory_budgets(result, config.memory_budgets_mb),
        "frontiers": {name: list(keys) for name, keys in result.frontiers},
        "deployment": deployment_summary(result, hardware, config.cpu_frequency_scale, config.stream_interval_ms),
        "target": None if config.target is None else _on_target(profile, config.target),
        "notes": [
            "accuracy is on validation, by which the winner is chosen; test_accuracy is on the test part",
            "latency is measured here; peak memory is an estimate from shapes; energy is a proxy",
        ],
    }
    repeated = reproducibility(config.model_dump(), splits.fingerprints(), splits.sizes(), command)
    found = _sensitivity(trained, splits, config) if config.sensitivity else None
    return Findings(result, profile, layerwise, hardware, summary, repeated, found)


def _sensitivity(trained: Trained, splits: Splits, config: RunConfig) -> Sensitivity:
    """What each layer alone costs on validation."""
    levels = [level for level in config.pruning_levels if level > 0]
    precisions = [name for name in config.precisions if name != "fp32"]
    return sensitivity(
        trained.model, splits.validation, prune=levels, precisions=precisions, importance=config.importance
    )


def _on_target(profile: ModelProfile, name: str) -> dict[str, Any]:
    """What the roofline says about the baseline on a device: an estimate, with what it rests on."""
    roof = roofline(profile, name)
    seconds, fused = roof.total.seconds, roof.fused_total.seconds
    return {
        "device": roof.device,
        "precision": roof.precision,
        "estimated_latency_ms": None if seconds is None else seconds * 1e3,
        "estimated_fused_latency_ms": None if fused is None else fused * 1e3,
        "bound": roof.total.bound,
        "remarks": list(roof.remarks),
    }
