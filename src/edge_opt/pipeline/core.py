"""The sweep itself, as both a configured run and `edge_opt.sweep` do it: a job on a space, then the test part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edge_opt.data import Splits
from edge_opt.pipeline.job import PipelineJob
from edge_opt.pipeline.scores import accuracy_of
from edge_opt.records import Candidate, SweepResult, Trial
from edge_opt.search.events import Listener
from edge_opt.search.space import SamplerName, Space
from edge_opt.search.store import Store
from edge_opt.search.sweep import candidate_folder, run_sweep

# What candidates need, imported once in the process that they are forked from.
PRELOAD = ("torch", "edge_opt.pipeline.job", "edge_opt.compress.converting", "edge_opt.compress.pruning")
EAGER = Candidate(0.0, "fp32", "torch")


@dataclass(frozen=True)
class Search:
    """How a space is gone through: who chooses, how many, within what limits, and who builds."""

    sampler: SamplerName = "grid"
    trials: int | None = None
    seed: int = 0
    use_ci: bool = False
    memory_limit_bytes: int | None = None
    time_limit_s: float | None = None
    workers: int = 0
    scheduler: str | None = None
    fresh: bool = False


def sweep_space(
    job: PipelineJob,
    space: Space,
    splits: Splits,
    *,
    folder: Path,
    constraints: Sequence[str],
    settings: Mapping[str, Any],
    search: Search,
    name: str,
    on_event: Listener,
) -> SweepResult:
    """Every candidate tried; the eager baseline and the winner also scored on the test part, where there is one."""
    limits: dict[str, Any] = {
        "folder": folder,
        "settings": settings,
        "memory_limit_bytes": search.memory_limit_bytes,
        "time_limit_s": search.time_limit_s,
        "preload": _importable(PRELOAD),
    }
    baseline, fresh = None, search.fresh
    if EAGER not in space:
        alone = run_sweep(job, Space([0.0], ["fp32"], ["torch"]), name="baseline", fresh=fresh, **limits)
        baseline, fresh = alone.baseline, False
    result = run_sweep(
        job,
        space,
        constraints=constraints,
        baseline=baseline,
        name=name,
        sampler=search.sampler,
        trials=search.trials,
        seed=search.seed,
        use_ci=search.use_ci,
        workers=search.workers,
        scheduler=search.scheduler,
        fresh=fresh,
        on_event=on_event,
        **limits,
    )
    return _tested(result, job, splits, folder)


def _importable(names: Sequence[str]) -> list[str]:
    """Those of the modules that are installed; without onnxruntime a sweep of eager torch still runs."""
    from importlib.util import find_spec

    wanted = ("onnx", "onnxruntime", "onnxscript", "sklearn.datasets")
    optional = [name for name in wanted if find_spec(name.partition(".")[0])]
    return [*names, *optional]


def _tested(result: SweepResult, job: PipelineJob, splits: Splits, folder: Path) -> SweepResult:
    """The result with test accuracies for what is reported: the baseline and the winner. No other is looked at."""
    if splits.test is None:
        return result
    reported = {result.baseline.candidate.key, result.best}
    known: dict[str, Trial] = {}
    for trial in (result.baseline, *result.trials):
        key = trial.candidate.key
        if key in reported and key not in known and trial.metrics is not None:
            share = _test_accuracy(trial.candidate, job, splits, folder)
            known[key] = replace(trial, metrics=replace(trial.metrics, test_accuracy=share))
    return replace(
        result,
        baseline=known.get(result.baseline.candidate.key, result.baseline),
        trials=tuple(known.get(trial.candidate.key, trial) for trial in result.trials),
    )


def _test_accuracy(candidate: Candidate, job: PipelineJob, splits: Splits, folder: Path) -> float:
    origin = candidate_folder(folder, candidate)
    store = Store.look(folder)
    try:
        built = store.build_of(candidate)
    finally:
        store.close()
    assert built is not None and splits.test is not None
    with job.runner(candidate, origin, built.value) as runner:
        return accuracy_of(runner, splits.test).share
