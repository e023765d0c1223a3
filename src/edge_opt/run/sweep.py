"""sweep(): pruning x precision x runtime for a model of the user's."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from edge_opt.data import Splits
from edge_opt.data.datasets import splits_of
from edge_opt.errors import InvalidInput
from edge_opt.loading import parse_reference
from edge_opt.measuring.machine import usable_cores
from edge_opt.profiling import profile
from edge_opt.records import Candidate, SweepResult, Trial
from edge_opt.run.config import SWEEP_KEYS, RunConfig, settings_help, settings_parameters, sweep_settings
from edge_opt.run.job import Bench, PipelineJob, Reference, Subject, Tuning, absolute, weights_of
from edge_opt.run.outputs import write_sweep
from edge_opt.run.scores import accuracy_of
from edge_opt.run.screening import levels_of
from edge_opt.search.build import Listener, Notice
from edge_opt.search.space import SamplerName, Space
from edge_opt.search.store import Store
from edge_opt.search.sweep import candidate_folder, run_sweep
from edge_opt.units import MIB

# The space, budgets, limits and the deployment may change between two runs on a folder; these may not.
_TRAINING = ("seed", "dataloader_seed", "dataset", "batch_size", "train_subset", "val_subset", "calibration_batches",
             "epochs", "learning_rate")  # fmt: skip
_VARIANTS = ("fine_tune_epochs", "distillation", "importance", "round_to", "quantization_backend", "min_time_s",
             "threads", "power_watts")  # fmt: skip

# x86 adds products of eight bits in sixteen unless it has VNNI: weights get seven bits. None looks at this machine.
REDUCED_RANGE = {"auto": None, "x86": True, "fbgemm": True, "onednn": True, "qnnpack": False}


def training_settings(config: RunConfig, splits: Splits) -> dict[str, Any]:
    """What the baseline depends on: keys, the data itself, and the model's file."""
    found: dict[str, Any] = {key: getattr(config, key) for key in _TRAINING}
    return {
        **found,
        "model": config.model_reference,
        "model_sha256": _file_digest(config.model_reference),
        "data_sha256": dict(splits.fingerprints()),
    }


def candidate_settings(config: RunConfig) -> dict[str, Any]:
    """What a candidate's figures depend on, beside the model and the data."""
    return {key: getattr(config, key) for key in _VARIANTS}


def digest(settings: Mapping[str, Any]) -> str:
    """A short name for settings; the same for the same ones.

    >>> digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})
    True
    """
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


def _file_digest(reference: str) -> str | None:
    parsed = parse_reference(reference)
    path = Path(parsed.source) if parsed else Path(reference)
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def data_options(config: RunConfig) -> dict[str, Any]:
    """The configuration as `load_splits` takes it, the same in every process."""
    keys = ("batch_size", "seed", "dataloader_seed", "train_subset", "val_subset", "calibration_batches",
            "num_workers", "download")  # fmt: skip
    folder = None if config.data_dir is None else str(Path(config.data_dir).resolve())
    return {key: getattr(config, key) for key in keys} | {"dataset": absolute(config.dataset), "data_dir": folder}


def job_options(config: RunConfig) -> dict[str, Any]:
    """How candidates are made and timed, as `PipelineJob` takes it."""
    return {
        "tuning": Tuning(
            importance=config.importance,
            round_to=config.round_to,
            fine_tune_epochs=config.fine_tune_epochs,
            learning_rate=config.learning_rate,
            distillation=config.distillation,
            device=config.device,
            seed=config.seed,
        ),
        "bench": Bench(config.threads, config.min_time_s, config.power_watts),
        "calibration_batches": config.calibration_batches,
        "reduce_range": REDUCED_RANGE[config.quantization_backend],
        "build_threads": config.build_threads or usable_cores(),
    }


def space_of(config: RunConfig, levels: Sequence[float]) -> Space:
    """Everything the configuration allows at these levels; eager torch first, because the baseline is that."""
    runtimes = sorted(config.runtimes, key=lambda name: name != "torch")
    return Space(levels, config.precisions, runtimes, config.layer_pruning)


# What candidates need, imported once in the process that they are forked from.
PRELOAD = ("torch", "edge_opt.run.job", "edge_opt.compress.convert", "edge_opt.compress.prune")
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


def search_of(config: RunConfig, workers: int = 0, scheduler: str | None = None, fresh: bool = False) -> Search:
    """The configuration as a way through the space; who builds is said by the command."""
    limit_mb = config.memory_limit_mb
    return Search(
        sampler=config.sampler,
        trials=config.trials,
        seed=config.seed,
        use_ci=config.pareto_use_ci,
        memory_limit_bytes=None if limit_mb is None else int(limit_mb * MIB),
        time_limit_s=config.time_limit_s,
        workers=workers,
        scheduler=scheduler,
        fresh=fresh,
    )


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


def sweep(
    model: nn.Module | str,
    loaders: Any,
    *,
    folder: str | Path,
    example_inputs: Sequence[int] | None = None,
    workers: int = 0,
    scheduler: str | None = None,
    fresh: bool = False,
    on_event: Listener = lambda _: None,
    **settings: Any,
) -> SweepResult:
    """Every variant of a trained model, measured and judged by constraints; tables and plots go to `folder`.

    Candidates are built in processes of their own: the model and the loaders must be picklable, with classes that can
    be imported; else name them, `file.py:factory`. Run again with the same folder, it goes on. The settings are keys
    of a run's configuration, with the same names and defaults.

    Args:
        model: A trained model, or the reference of a function that makes one: `file.py:factory`.
        loaders: A mapping with `train` and `validation`, and if you like `calibration` and `test`, of loaders of
            (inputs, labels); or the reference of a function that returns one: `file.py:loaders`.
        folder: Where everything is written; a sweep that was ended goes on from there.
        example_inputs: Shape of the batch to time; the first validation batch unless given.
        workers: Processes that build side by side; 0 builds one after the other.
        scheduler: Address of a Dask scheduler whose workers build instead, such as `tcp://host:8786`.
        fresh: Start over; the earlier table is kept aside.
        on_event: Called with everything that happens, as it happens.
        settings: Keys of a configuration, each of them below.
    """
    config, root = sweep_settings(settings), Path(folder)
    data = (
        {"dataset": absolute(loaders), "seed": config.seed, "calibration_batches": config.calibration_batches}
        if isinstance(loaders, str)
        else splits_of(loaders, "loaders", config.calibration_batches)
    )
    batch_size = None if example_inputs is None else int(example_inputs[0])
    subject = Subject(absolute(model) if isinstance(model, str) else _sendable(model), data, batch_size=batch_size)
    splits, original = subject.splits(), subject.build()
    example = subject.example(splits)
    if example_inputs is not None and tuple(example[0].shape) != tuple(example_inputs):
        raise InvalidInput(
            f"example_inputs is {tuple(example_inputs)}, and samples of the data make it {tuple(example[0].shape)}"
        )
    profiled, weights = profile(original, example), weights_of(original)
    depends_on = {
        "model": model if isinstance(model, str) else profiled.name,
        "weights_sha256": hashlib.sha256(weights).hexdigest(),
        "data_sha256": dict(splits.fingerprints()),
        "batch_size": len(example[0]),
        **{key: getattr(config, key) for key in ("seed", "calibration_batches", "learning_rate")},
        **candidate_settings(config),
    }
    job = PipelineJob(
        # A factory may draw its weights anew each time: all processes get those of the first.
        replace(subject, weights=weights) if isinstance(model, str) else subject,
        Reference(accuracy_of(original, splits.validation), profiled.totals.macs, profiled.totals.params),
        (root / "pruned" / digest(depends_on)).resolve(),
        **job_options(config),
    )
    levels = levels_of(config, job, splits, root, digest(depends_on), lambda text: on_event(Notice(text)))
    result = sweep_space(
        job,
        space_of(config, levels),
        splits,
        folder=root,
        constraints=config.budgets,
        settings=depends_on,
        search=search_of(config, workers, scheduler, fresh),
        name=profiled.name,
        on_event=on_event,
    )
    write_sweep(result, root)
    return result


def _with_settings(function: Callable[..., SweepResult], keys: Sequence[str]) -> None:
    """Let the signature and the help of a function show every setting that it takes by keyword."""
    shown = inspect.signature(function)
    own = [parameter for parameter in shown.parameters.values() if parameter.kind is not parameter.VAR_KEYWORD]
    typed: Any = function
    typed.__signature__ = shown.replace(parameters=[*own, *settings_parameters(keys)])
    function.__doc__ = f"{(function.__doc__ or '').rstrip()}\n{settings_help(keys)}\n    "


_with_settings(sweep, SWEEP_KEYS)


def _sendable(model: nn.Module) -> nn.Module:
    """Refuse a model that other processes cannot rebuild."""
    for path, module in model.named_modules():
        kind = type(module)
        if kind.__module__ == "__main__" or "<locals>" in kind.__qualname__:
            where = f"module {path!r}" if path else "the model"
            raise InvalidInput(
                f"{where} is a {kind.__qualname__}, which other processes cannot import; put the class into a file "
                "and pass 'file.py:factory'"
            )
    return model
