"""The run: from a configuration to the model to ship, for one seed or several."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import edge_opt as eo
from edge_opt._support.files import write_whole
from edge_opt.compress import finetune
from edge_opt.data import Splits, load_splits
from edge_opt.data.datasets import seeded
from edge_opt.errors import InvalidConfig, InvalidInput
from edge_opt.explanation.sensitivity import sensitivity
from edge_opt.loading import load_model
from edge_opt.records.compression import Sensitivity
from edge_opt.records.sweeps import SweepResult, TrialMetrics
from edge_opt.run.config import GRID, RunConfig
from edge_opt.run.dependencies import code_sources, plain
from edge_opt.run.findings import check_target, findings, hand_over
from edge_opt.run.job import PipelineJob, Reference, Subject, absolute, computing_with, weights_from, weights_of
from edge_opt.run.outputs import command_line, write_json
from edge_opt.run.scores import Figure, figure_of
from edge_opt.run.screening import space_of
from edge_opt.run.sweep import (
    board_of,
    candidate_settings,
    data_options,
    digest,
    job_options,
    preload,
    run_sources,
    search_of,
    sweep_space,
    task_of,
    timed_by,
    training_settings,
)
from edge_opt.search.build import Listener, Notice
from edge_opt.search.locks import folder_lock
from edge_opt.search.process import begin_nursery, nurseries_kept
from edge_opt.search.store import Store

WEIGHTS = "model.safetensors"
FACTS = "training.json"


@dataclass(frozen=True, slots=True)
class Trained:
    """The baseline, in eval mode, with its weights as bytes and its score on validation."""

    model: nn.Module
    weights: bytes
    accuracy: Figure


def baseline(config: RunConfig, splits: Splits, folder: Path, key: str, tell: Callable[[str], None]) -> Trained:
    """The trained model of a configuration: from the folder if an earlier run left it there under the same key."""
    with seeded(config.seed):
        model = load_model(config.model_reference).model
    kept = _kept(folder, key)
    if kept is not None:
        model.load_state_dict(weights_from(kept[0]))
        return Trained(model.eval(), *kept)
    check_device(config.device)
    tell(f"training {type(model).__name__} on {splits.name}: {config.epochs} epochs")
    tuned = finetune(
        model.to(config.device),
        splits.train,
        epochs=config.epochs,
        learning_rate=config.learning_rate,
        seed=config.seed,
        **vars(task_of(config)),
    )
    model = tuned.model.cpu().eval()
    weights, accuracy = weights_of(model), figure_of(task_of(config).build().score(model, splits.validation))
    write_whole(folder / WEIGHTS, weights)
    # Written last: with it, everything is there.
    facts = {"key": key, "score": asdict(accuracy), "epochs": config.epochs}
    write_whole(folder / FACTS, json.dumps(facts))
    return Trained(model, weights, accuracy)


def check_model(config: RunConfig, splits: Splits) -> nn.Module:
    """The model as it is made; one that does not fit the data or the metric is refused before training."""
    task = task_of(config)
    with seeded(config.seed):
        model = load_model(config.model_reference).model
        eo.profile(model, Subject(model, splits, task=task).example(splits, model))
        task.build().check(model, splits.validation)
    return model


def check_device(name: str) -> None:
    """Refuse a device that torch does not see here."""
    kind, _, index = name.partition(":")
    count = {"cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}.get(kind, 1)
    if int(index or 0) >= count:
        raise InvalidConfig(f"device is {name!r}, and torch sees {count} of that kind here; write device: cpu")


def _kept(folder: Path, key: str) -> tuple[bytes, Figure] | None:
    try:
        facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
        if facts["key"] != key:
            return None
        return (folder / WEIGHTS).read_bytes(), Figure(**facts["score"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


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
    tls_dir: str | Path | None = None,
    insecure: bool = False,
    measure_on: str | None = None,
    retry_failed: bool = False,
    fresh: bool = False,
    on_event: Listener = lambda _: None,
    command: Sequence[str] | None = None,
) -> RunResult:
    """Train a baseline, sweep variants of it, judge them by the constraints, and write everything to a folder.

    Run again on the same folder, it goes on where it was, and trains and tries nothing twice. With `measure_on`, the
    board that has joined the scheduler at that address times the variants.
    """
    builders = {"workers": workers, "scheduler": scheduler, "tls_dir": tls_dir, "insecure": insecure}
    config, board = board_of(config, measure_on, builders)
    root = Path(config.output_dir if folder is None else folder)
    check_target(config)
    splits = load_splits(**data_options(config))
    model = check_model(config, splits)
    settings = {**training_settings(config), **candidate_settings(config)}
    sources = run_sources(config, splits, model)
    # Held for the whole run: training, the sweep and the files that come after it.
    with folder_lock(root / "baseline"), nurseries_kept():
        timed = {**settings, **timed_by(board)}
        Store.open(root, timed, sources, fresh=fresh, on_notice=lambda text: on_event(Notice(text))).close()
        key = digest({**training_settings(config), "sources": plain(sources)})
        depends_on = digest({**settings, "sources": plain(sources)})
        options = job_options(config)
        if _kept(root / "baseline", key) is None:
            # What builds variants imports for seconds, beside the training.
            begin_nursery(preload(config.runtimes, prunes=config.pruning_levels != [0.0]))
        with computing_with(options["build_threads"]):
            trained = baseline(config, splits, root / "baseline", key, lambda text: on_event(Notice(text)))
        task = task_of(config)
        subject = Subject(absolute(config.model_reference), data_options(config), task=task).holding(trained.model)
        example = subject.example(splits, trained.model)
        profile = eo.profile(trained.model, example, name=type(trained.model).__name__)
        job = PipelineJob(
            subject,
            Reference(trained.accuracy, profile.totals.macs, profile.totals.params),
            (root / "pruned" / depends_on).resolve(),
            **options,
        )
        space, job = space_of(config, job, splits, root, depends_on, lambda text: on_event(Notice(text)))
        result = sweep_space(
            job,
            space,
            splits,
            folder=root,
            constraints=config.budgets,
            settings=settings,
            sources=sources,
            code=partial(code_sources, config.model_reference, model),
            search=search_of(config, builders, retry_failed=retry_failed, board=board),
            name=profile.name,
            on_event=on_event,
        )
        found = findings(
            config,
            splits,
            profile,
            result,
            space,
            command or command_line(),
            config.model_dump(),
            (lambda: _sensitivity(trained, splits, config)) if config.sensitivity else None,
        )
        files = hand_over(found, job, splits, root)
    return RunResult(root, result, found.summary, tuple(files))


def _sensitivity(trained: Trained, splits: Splits, config: RunConfig) -> Sensitivity:
    """What each layer alone costs on validation."""
    named = GRID if config.pruning_levels == "auto" else config.pruning_levels
    levels = [level for level in named if level > 0]
    precisions = [name for name in config.precisions if name != "fp32"]
    return sensitivity(
        trained.model,
        splits.validation,
        prune=levels,
        precisions=precisions,
        importance=config.importance,
        **vars(task_of(config)),
    )


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


Runner = Callable[[RunConfig, Path], RunResult]


def run_seeds(config: RunConfig, seeds: Sequence[int], folder: Path, run_one: Runner) -> dict[int, RunResult]:
    """One run per seed in `folder/seed-N`; means with intervals over seeds in `aggregate.csv` and `aggregate.json`.

    Levels that are `auto` are those of a grid: each seed would find one of its own, with nothing to average.
    """
    if len(set(seeds)) < len(seeds) or any(seed < 0 for seed in seeds):
        raise InvalidInput(f"seeds are {list(seeds)}; they must be different whole numbers, not below 0")
    if config.pruning_levels == "auto":
        config = config.model_copy(update={"pruning_levels": [*GRID]})
    with nurseries_kept():
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
