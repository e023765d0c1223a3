"""sweep(): pruning x precision x runtime for a model of the user's."""

from __future__ import annotations

import hashlib
import inspect
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from edge_opt.data import Splits
from edge_opt.data.datasets import splits_of
from edge_opt.errors import EdgeOptError, InvalidInput
from edge_opt.measuring.machine import usable_cores
from edge_opt.profiling import profile
from edge_opt.records.sweeps import Candidate, SweepResult, Trial
from edge_opt.run.config import (
    GRID,
    SWEEP_KEYS,
    TASK_KEYS,
    RunConfig,
    settings_help,
    settings_parameters,
    sweep_settings,
    task_name,
)
from edge_opt.run.contest import Referee
from edge_opt.run.dependencies import code_sources, data_sources, first_weights, plain, weights_source
from edge_opt.run.findings import findings, hand_over
from edge_opt.run.job import Bench, PipelineJob, Reference, Subject, Tuning, absolute
from edge_opt.run.outputs import command_line
from edge_opt.run.scores import figure_of
from edge_opt.run.screening import space_of
from edge_opt.search.board_worker import Board, BoardMeasurer, find_board
from edge_opt.search.build import Listener, Notice
from edge_opt.search.process import Limits
from edge_opt.search.space import SamplerName, Space
from edge_opt.search.store import Scope, Source, Sources, Store
from edge_opt.search.sweep import candidate_folder, run_sweep
from edge_opt.tasks.batches import TaskSettings, first_shape
from edge_opt.tasks.batches import example_inputs as call_inputs
from edge_opt.units import MIB

# The space, budgets, limits and the deployment may change between two runs on a folder; these may not.
_TRAINING = ("seed", "dataloader_seed", "dataset", "batch_size", "train_subset", "val_subset", "calibration_batches",
             "epochs", "learning_rate")  # fmt: skip
_VARIANTS = ("fine_tune_epochs", "distillation", "importance", "round_to", "quantization_backend", "min_time_s",
             "deploy_batch", "threads", "power_watts")  # fmt: skip

# x86 adds products of eight bits in sixteen unless it has VNNI: weights get seven bits. None looks at this machine.
REDUCED_RANGE = {"auto": None, "x86": True, "fbgemm": True, "onednn": True, "qnnpack": False}


def training_settings(config: RunConfig) -> dict[str, Any]:
    """The keys that the baseline depends on."""
    keys = {key: getattr(config, key) for key in _TRAINING}
    return {**keys, "model": config.model_reference, **task_settings(config)}


def run_sources(config: RunConfig, splits: Splits, model: nn.Module) -> dict[str, Source]:
    """The code and the data that a run depends on."""
    return {
        **code_sources(config.model_reference, model),
        **first_weights(config.model_reference, config.seed),
        **data_sources(splits, config.seed, train="all", ranking=config.importance == "taylor"),
        **task_sources(config),
    }


def candidate_settings(config: RunConfig) -> dict[str, Any]:
    """What a candidate's figures depend on, beside the model and the data."""
    # Only where it is on, so that folders from before there was such a key go on.
    added = {"train_for_int8": True} if config.train_for_int8 else {}
    return {key: getattr(config, key) for key in _VARIANTS} | added


def digest(settings: Mapping[str, Any]) -> str:
    """A short name for settings; the same for the same ones.

    >>> digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})
    True
    """
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


def task_of(config: RunConfig) -> TaskSettings:
    """What is scored and trained on, the same in every process."""
    given: dict[str, Any] = {key: getattr(config, key) for key in TASK_KEYS}
    found: dict[str, Any] = {key: absolute(value) if isinstance(value, str) else value for key, value in given.items()}
    return TaskSettings(**found)


def task_settings(config: RunConfig) -> dict[str, Any]:
    """What scores and training depend on, where it is not accuracy on (inputs, labels), by name."""
    given = {key: getattr(config, key) for key in TASK_KEYS}
    if given == {key: RunConfig.model_fields[key].default for key in TASK_KEYS}:
        return {}
    return {key: value if value is None or isinstance(value, str) else task_name(value) for key, value in given.items()}


def task_sources(config: RunConfig) -> dict[str, Source]:
    """The code of the user's own metric, loss, forward and collate."""
    found: dict[str, Source] = {}
    for value in (getattr(config, key) for key in TASK_KEYS):
        if isinstance(value, str) and ":" in value:
            found |= code_sources(value)
        elif callable(value) and hasattr(value, "__module__"):
            found |= code_sources(f"{value.__module__}:{getattr(value, '__qualname__', type(value).__name__)}")
    return found


def data_options(config: RunConfig) -> dict[str, Any]:
    """The configuration as `load_splits` takes it, the same in every process."""
    keys = ("batch_size", "seed", "dataloader_seed", "train_subset", "val_subset", "calibration_batches",
            "num_workers", "download")  # fmt: skip
    folder = None if config.data_dir is None else str(Path(config.data_dir).resolve())
    found = {"dataset": absolute(config.dataset), "data_dir": folder, "has_samples": config.collate is not None}
    return {key: getattr(config, key) for key in keys} | found


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
            train_for_int8=config.train_for_int8,
        ),
        "bench": Bench(config.threads, config.min_time_s, config.power_watts, config.deploy_batch),
        "calibration_batches": config.calibration_batches,
        "reduce_range": REDUCED_RANGE[config.quantization_backend],
        "build_threads": config.build_threads or usable_cores(),
    }


def board_of(config: RunConfig, measure_on: str | None, builders: Mapping[str, Any]) -> tuple[RunConfig, Board | None]:
    """The board that times, and the configuration with what it can run; both as they were where nothing is asked.

    A board has ONNX Runtime alone. Levels found by times of this machine would be the wrong ones there, so `auto` is a
    grid.
    """
    if measure_on is None:
        return config, None
    if measure_on == builders["scheduler"]:
        raise InvalidInput(f"{measure_on} would build on the board, too; give the board a scheduler of its own")
    if "runtimes" in config.model_fields_set and config.runtimes != ["onnxruntime"]:
        raise InvalidInput(
            f"runtimes are {', '.join(config.runtimes)}, and a board has onnxruntime alone; leave the rest"
        )
    board = find_board(measure_on, builders["tls_dir"], builders["insecure"])
    levels = [*GRID] if config.pruning_levels == "auto" else config.pruning_levels
    fitting = config.model_copy(update={"runtimes": ["onnxruntime"], "pruning_levels": levels})
    return fitting, replace(board, limit_s=config.time_limit_s)


def timed_by(board: Board | None) -> dict[str, str]:
    """What times depend on: the board, if one takes them. Times of two machines have no table in common."""
    return {} if board is None else {"measured_on": board.machine}


# What candidates need, imported once in the process that they are forked from.
PRELOAD = ("torch", "edge_opt.run.job", "edge_opt.runtimes.convert", "edge_opt.pruning.prune")
# Packages that take long to import and that models and data bring along.
_BROUGHT_ALONG = ("sklearn.datasets", "scipy", "pandas", "torchvision", "timm", "transformers")
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
    builders: Mapping[str, Any] = field(default_factory=dict)
    retry_failed: bool = False
    fresh: bool = False
    board: Board | None = None


def search_of(
    config: RunConfig, builders: Mapping[str, Any], *, retry_failed: bool = False, fresh: bool = False,
    board: Board | None = None,
) -> Search:  # fmt: skip
    """The configuration as a way through the space; who builds is said by the command."""
    limit_mb = config.memory_limit_mb
    return Search(
        sampler=config.sampler,
        trials=config.trials,
        seed=config.seed,
        use_ci=config.pareto_use_ci,
        memory_limit_bytes=None if limit_mb is None else int(limit_mb * MIB),
        time_limit_s=config.time_limit_s,
        builders=builders,
        retry_failed=retry_failed,
        fresh=fresh,
        board=board,
    )


def sweep_space(
    job: PipelineJob,
    space: Space,
    splits: Splits,
    *,
    folder: Path,
    constraints: Sequence[str],
    settings: Mapping[str, Any],
    sources: Sources,
    code: Callable[[], Sources],
    search: Search,
    name: str,
    on_event: Listener,
) -> SweepResult:
    """Every candidate tried; the eager baseline and the winner also scored on the test part, where there is one."""
    metric = job.reference.accuracy.metric
    limits: dict[str, Any] = {
        "folder": folder,
        "metric": metric,
        "settings": {**settings, **timed_by(search.board)},
        "sources": sources,
        "retry_failed": search.retry_failed,
        "memory_limit_bytes": search.memory_limit_bytes,
        "time_limit_s": search.time_limit_s,
        "preload": preload(space.runtimes, any(space.pruning_levels) or bool(space.layer_pruning)),
    }
    # On a board the baseline is the same model in the runtime there.
    plain = EAGER if search.board is None else replace(EAGER, runtime="onnxruntime")
    result = run_sweep(
        job,
        space,
        constraints=constraints,
        objectives=(metric, "deploy_latency_ms"),
        baseline=None if plain in space else plain,
        name=name,
        sampler=search.sampler,
        trials=search.trials,
        seed=search.seed,
        use_ci=search.use_ci,
        fresh=search.fresh,
        on_event=on_event,
        **search.builders,
        compare=Referee(job, folder, Limits(search.memory_limit_bytes, None), on_event, search.board),
        measurer=None if search.board is None else BoardMeasurer(search.board, job, on_event),
        **limits,
    )
    _check_unchanged(sources, code())
    return _tested(result, job, splits, folder)


def _check_unchanged(before: Sources, code: Sources) -> None:
    """Refuse a table in which some rows may be those of another model: its file was edited while the sweep ran."""
    changed = [name for name in sorted(code) if before.get(name) != code[name]]
    if changed:
        raise EdgeOptError(
            f"{', '.join(changed[:3])} changed while the sweep ran; run the same again: what depends on that is found "
            "anew"
        )


def preload(runtimes: Iterable[str], prunes: bool) -> list[str]:
    """What candidates will import: the exporter for any runtime but torch, and what model and data imported here."""
    exporting = ["?edge_opt.runtimes.exporter_start:start_exporter"] if set(runtimes) - {"torch"} else []
    pruning = ["?torch_pruning"] if prunes else []
    return [*PRELOAD, *exporting, *pruning, *(f"?{name}" for name in _BROUGHT_ALONG if name in sys.modules)]


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
    return job.score(candidate, origin, built.value, splits.test).value


def sweep(
    model: nn.Module | str,
    loaders: Any,
    *,
    folder: str | Path,
    example_inputs: Sequence[int] | None = None,
    workers: int = 0,
    scheduler: str | None = None,
    tls_dir: str | Path | None = None,
    insecure: bool = False,
    measure_on: str | None = None,
    retry_failed: bool = False,
    fresh: bool = False,
    on_event: Listener = lambda _: None,
    **settings: Any,
) -> SweepResult:
    """Every variant of a trained model, measured and judged by constraints; the winner, tables and a page in `folder`.

    Candidates are built in processes of their own: model and loaders must be picklable, with classes one can import;
    else name them, `file.py:factory`. Run again, it goes on. The settings are a configuration's keys and defaults.

    Args:
        model: A trained model, or the reference of a function that makes one: `file.py:factory`.
        loaders: A mapping with `train` and `validation`, and if you like `calibration` and `test`, of loaders of
            (inputs, labels); or the reference of a function that returns one: `file.py:loaders`.
        folder: Where everything is written; a sweep that was ended goes on from there.
        example_inputs: Shape of the batch to time; the first validation batch unless given.
        workers: Processes that build side by side; 0 builds one after the other.
        scheduler: Address of a Dask scheduler whose workers build instead, such as `tls://host:8786`.
        tls_dir: Folder with ca.pem, cert.pem and key.pem, by which scheduler, workers and we know each other.
        insecure: Whether a scheduler on another machine may be spoken to without TLS, as `tcp://`.
        measure_on: Address of a Dask scheduler that a board has joined with `edge-opt worker`: variants are built here
            and timed there, in ONNX Runtime.
        retry_failed: Try candidates again that failed in an earlier run.
        fresh: Start over; the earlier table is kept aside.
        on_event: Called with everything that happens, as it happens.
        settings: Keys of a configuration, each of them below.
    """
    root = Path(folder)
    builders = {"workers": workers, "scheduler": scheduler, "tls_dir": tls_dir, "insecure": insecure}
    config, board = board_of(sweep_settings(settings), measure_on, builders)
    subject = _subject(model, loaders, example_inputs, config)
    splits, original = subject.splits(), subject.build()
    # A factory may train, or draw its weights anew, each time: all processes get the first model.
    subject = subject.holding(original)
    call = subject.call(splits, original)
    _check_shape(example_inputs, first_shape(call))
    task = subject.task.build()
    scored = figure_of(task.score(original, splits.validation))
    if _trains(config):
        task.check(original, splits.train)
    profiled = profile(original, call_inputs(call))
    depends_on = _depends_on(config, model if isinstance(model, str) else profiled.name, first_shape(call)[0])
    code = partial(_code, config, model if isinstance(model, str) else None, original)
    sources = {**code(), "weights": weights_source(original), **_data_of(config, splits)}
    key = digest({**depends_on, "sources": plain(sources)})
    job = PipelineJob(
        subject,
        Reference(scored, profiled.totals.macs, profiled.totals.params),
        (root / "pruned" / key).resolve(),
        **job_options(config),
    )
    space, job = space_of(config, job, splits, root, key, lambda text: on_event(Notice(text)))
    result = sweep_space(
        job,
        space,
        splits,
        folder=root,
        constraints=config.budgets,
        settings=depends_on,
        sources=sources,
        code=code,
        search=search_of(config, builders, retry_failed=retry_failed, fresh=fresh, board=board),
        name=profiled.name,
        on_event=on_event,
    )
    told = {**{key: getattr(config, key) for key in SWEEP_KEYS}, "model": depends_on["model"]}
    hand_over(findings(config, splits, profiled, result, space, command_line(), told), job, splits, root)
    return result


def _trains(config: RunConfig) -> bool:
    """Whether some candidate is trained: then a loss that does not fit is told now, not in each of their rows."""
    levels = config.pruning_levels
    is_cut = levels == "auto" or any(levels) or bool(config.layer_pruning)
    return config.fine_tune_epochs > 0 and (is_cut or config.train_for_int8)


def _depends_on(config: RunConfig, model: str, batch_size: int) -> dict[str, Any]:
    """The settings that the rows of a sweep depend on."""
    return {
        "model": model,
        "batch_size": batch_size,
        **task_settings(config),
        **{key: getattr(config, key) for key in ("seed", "calibration_batches", "learning_rate")},
        **candidate_settings(config),
    }


def _data_of(config: RunConfig, splits: Splits) -> Sources:
    train: Scope = "all" if config.train_for_int8 else "pruned"
    return data_sources(splits, config.seed, train=train, ranking=config.importance == "taylor")


def _code(config: RunConfig, reference: str | None, model: nn.Module) -> Sources:
    return {**code_sources(reference, model), **task_sources(config)}


def _check_shape(wanted: Sequence[int] | None, found: Sequence[int]) -> None:
    if wanted is not None and tuple(found) != tuple(wanted):
        raise InvalidInput(f"example_inputs is {tuple(wanted)}, and samples of the data make it {tuple(found)}")


def _subject(model: nn.Module | str, loaders: Any, example_inputs: Sequence[int] | None, config: RunConfig) -> Subject:
    task = _sendable_task(task_of(config))
    data = (
        {"dataset": absolute(loaders)} | _data_settings(config)
        if isinstance(loaders, str)
        else splits_of(loaders, "loaders", **_data_settings(config))
    )
    batch_size = None if example_inputs is None else int(example_inputs[0])
    sent = absolute(model) if isinstance(model, str) else _sendable(model)
    return Subject(sent, data, batch_size=batch_size, task=task)


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


def _data_settings(config: RunConfig) -> dict[str, Any]:
    """How a user's own parts are read."""
    keys = ("calibration_batches", "seed")
    return {key: getattr(config, key) for key in keys} | {"has_samples": config.collate is not None}


def _sendable_task(task: TaskSettings) -> TaskSettings:
    """Refuse functions that other processes cannot import."""
    for key, value in vars(task).items():
        _check_importable(key, value)
    return task


def _check_importable(key: str, given: Any) -> None:
    """Refuse a function that other processes cannot import."""
    kind = given if inspect.isroutine(given) or inspect.isclass(given) else type(given)
    where, name = getattr(kind, "__module__", None), getattr(kind, "__qualname__", "")
    if where == "__main__" or "<locals>" in name or "<lambda>" in name:
        raise InvalidInput(
            f"{key} is {name.rpartition('.')[2]}, which other processes cannot import; put it into a file and pass "
            "'file.py:f'"
        )
