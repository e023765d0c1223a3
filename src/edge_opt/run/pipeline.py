"""A run from its configuration to the model to ship: load, train, screen, search, choose, write.

`run()` trains a baseline first; `sweep()` starts from a trained model. Everything after that is the same. Training,
screening, building, measuring and scoring have processes of their own (`edge_opt/search/isolation.py`), and hold the
locks of the machine meanwhile. The lock of the folder is held from the beginning to the end.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from edge_opt._support.files import write_whole
from edge_opt._support.json import from_plain
from edge_opt.data import Splits
from edge_opt.data.datasets import splits_of
from edge_opt.errors import EdgeOptError, InvalidConfig, InvalidInput, MeasurementFailed
from edge_opt.loading import absolute_reference
from edge_opt.measuring.ssh_board import Board, parse_board
from edge_opt.profiling import profile
from edge_opt.records.compression import Sensitivity
from edge_opt.records.profiles import ModelProfile
from edge_opt.records.sweeps import Candidate, SweepResult, Trial
from edge_opt.run.artifacts import command_line, write_artifacts
from edge_opt.run.board_measuring import BOARD_RUNTIMES, BoardMeasurer
from edge_opt.run.config import GRID, RESULT_SCOPES, SWEEP_KEYS, RunConfig, settings_help, settings_parameters
from edge_opt.run.config_file import sweep_settings
from edge_opt.run.dependencies import digests, same_twice, sources_of
from edge_opt.run.export_best import export_best
from edge_opt.run.job import WEIGHTS, Baseline, PipelineJob
from edge_opt.run.model_and_data import ModelAndData, weights_from
from edge_opt.run.run_summary import build_report, check_target
from edge_opt.run.scores import ScoreSummary
from edge_opt.run.screening import choose_space
from edge_opt.run.time_finalists import FinalistTimer
from edge_opt.search.builders import Listener, Notice
from edge_opt.search.isolation import Isolation, Limits, Phase, keep_fork_servers, pickle_job, start_fork_server
from edge_opt.search.locks import build_lock, folder_lock
from edge_opt.search.space import Space
from edge_opt.search.store import Sources, Store
from edge_opt.search.sweep import Sweep, SweepOptions, candidate_folder
from edge_opt.tasks.batches import example_inputs as call_inputs
from edge_opt.tasks.batches import first_shape
from edge_opt.units import MIB

EAGER = Candidate(0.0, "fp32", "torch")
TRAINING = "training.json"
# What every phase needs, imported once in the process that children are forked from.
_PRELOAD = ("torch", "edge_opt.run.job", "edge_opt.runtimes.convert", "edge_opt.pruning.prune")
# Packages that take long to import, and that models and data bring along.
_BROUGHT_ALONG = ("sklearn.datasets", "scipy", "pandas", "torchvision", "timm", "transformers")


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How a command carries a run out; none of it changes a result, but for the machine that measures.

    Attributes:
        workers: Processes that build side by side; 0 and 1 build one after the other.
        scheduler: Address of a Dask scheduler whose workers build instead.
        insecure: Whether a scheduler may be used without encryption.
        measure_on: A board that measures, as `ssh` knows it: USER@HOST.
        retry_failed: Whether candidates that failed in an earlier run are tried again.
        fresh: Whether to start over; the earlier table is kept under another name.
    """

    workers: int = 0
    scheduler: str | None = None
    insecure: bool = False
    measure_on: str | None = None
    retry_failed: bool = False
    fresh: bool = False


@dataclass(frozen=True)
class RunResult:
    """The result of a run, its folder, and the files it wrote."""

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
    on_event: Listener = lambda _: None,
    command: Sequence[str] | None = None,
    **options: Any,
) -> RunResult:
    """Train a baseline, sweep variants of it, judge them by the constraints, and write everything to a folder.

    Run again on the same folder, it continues where it stopped: nothing is trained or tried twice.

    Args:
        config: The configuration, as `edge_opt.run.config.read_config` returns it.
        folder: Where everything is written; `output_dir` of the configuration unless given.
        on_event: Called with every event of the run.
        command: The command line, for the record.
        options: Fields of `RunOptions`.
    """
    chosen = RunOptions(**options)
    config, board = _with_board(config, chosen)
    root = Path(config.output_dir if folder is None else folder)
    check_target(config)
    source = ModelAndData(absolute_reference(config.model_reference), data_options(config), config)
    splits, untrained = source.splits(), source.build()
    _check_trainable(source, splits, untrained)
    settings = config.subset(*RESULT_SCOPES)
    sources = sources_of(config, splits, untrained, config.model_reference, trains_baseline=True)
    sources |= same_twice(untrained, source)
    with _opened(root, settings, sources, chosen, board, on_event) as store:
        store.keep_fact("stage", "training")
        trained, score = _train(source.holding(untrained), root / "baseline", sources, on_event)
        model = trained.build()
        job = _job(trained, score, profile(model, trained.example(splits, model)), root, settings, sources)
        state = _Run(job, splits, store, root, chosen, board, sources, on_event)
        return state.search(model, command or command_line(), config.model_dump())


def sweep(
    model: nn.Module | str,
    loaders: Any,
    *,
    folder: str | Path,
    example_inputs: Sequence[int] | None = None,
    workers: int = 0,
    scheduler: str | None = None,
    insecure: bool = False,
    measure_on: str | None = None,
    retry_failed: bool = False,
    fresh: bool = False,
    on_event: Listener = lambda _: None,
    **settings: Any,
) -> SweepResult:
    """Try variants of a trained model, measure them and judge them by constraints; the winner and a page in `folder`.

    Candidates are built in processes of their own: model and loaders must be picklable, with classes that can be
    imported; otherwise name them, `file.py:factory`. Run again, it continues where it stopped.

    Args:
        model: A trained model, or the reference of a function that makes one: `file.py:factory`.
        loaders: A mapping with `train` and `validation`, and optionally `calibration` and `test`, of loaders of
            (inputs, labels); or the reference of a function that returns one: `file.py:loaders`.
        folder: Where everything is written; an interrupted sweep continues from there.
        example_inputs: Shape of the batch to time; the first validation batch unless given.
        workers: Processes that build side by side; 0 and 1 build one after the other.
        scheduler: Address of a Dask scheduler whose workers build instead, such as `tls://host:8786`.
        insecure: Whether a scheduler may be used without encryption, as `tcp://`.
        measure_on: A board that measures, as `ssh` knows it: `user@host`. Variants are built here and timed there.
        retry_failed: Try candidates again that failed in an earlier run.
        fresh: Start over; the earlier table is kept under another name.
        on_event: Called with every event of the sweep.
        settings: Keys of a configuration, each of them below.
    """
    root = Path(folder)
    chosen = RunOptions(workers, scheduler, insecure, measure_on, retry_failed, fresh)
    config, board = _with_board(sweep_settings(settings), chosen)
    source = _given(model, loaders, example_inputs, config)
    splits, original = source.splits(), source.build()
    # A factory may train, or draw its weights anew, at each call: all processes get the first model.
    source = source.holding(original)
    call = source.call(splits, original)
    shape = first_shape(call)
    if example_inputs is not None and tuple(shape) != tuple(example_inputs):
        raise InvalidInput(f"example_inputs is {tuple(example_inputs)}, and samples of the data make it {tuple(shape)}")
    task = source.task()
    task.check(original, splits.validation)
    if _trains(config):
        task.check(original, splits.train)
    profiled = profile(original, call_inputs(call))
    named = model if isinstance(model, str) else profiled.name
    keys = {key: value for key, value in config.subset(*RESULT_SCOPES).items() if key in SWEEP_KEYS}
    depends_on = {"model": named, "batch_size": shape[0], **keys}
    sources = sources_of(config, splits, original, model if isinstance(model, str) else None)
    with _opened(root, depends_on, sources, chosen, board, on_event) as store:
        score = _score_given(source, root)
        job = _job(source, score, profiled, root, depends_on, sources)
        state = _Run(job, splits, store, root, chosen, board, sources, on_event)
        shown = {**{key: getattr(config, key) for key in SWEEP_KEYS}, "model": named}
        return state.search(original, command_line(), shown).result


@contextmanager
def _opened(
    root: Path,
    settings: Mapping[str, Any],
    sources: Sources,
    options: RunOptions,
    board: Board | None,
    on_event: Listener,
) -> Iterator[Store]:
    """Hold the folder from training to the last file, and open its store."""
    timed = dict(settings) if board is None else {**settings, "measured_on": board.host}
    defaults = RunConfig().subset(*RESULT_SCOPES)
    with folder_lock(root), keep_fork_servers():
        store = Store.open(
            root,
            timed,
            sources,
            defaults=defaults,
            fresh=options.fresh,
            on_notice=lambda text: on_event(Notice(text)),
        )
        with closing(store):
            yield store


def _job(
    source: ModelAndData,
    score: ScoreSummary,
    profiled: ModelProfile,
    root: Path,
    settings: Mapping[str, Any],
    sources: Sources,
) -> PipelineJob:
    """Return the job of all candidates. Its cache is named after everything that pruned models depend on."""
    cache = root / "pruned" / digest({**settings, "sources": digests(sources)})
    return PipelineJob(source, cache.resolve(), Baseline(score, profiled.totals.macs, profiled.totals.params))


def digest(settings: Mapping[str, Any]) -> str:
    """Return a short name for settings, the same for the same ones.

    >>> digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})
    True
    """
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


def _with_board(config: RunConfig, options: RunOptions) -> tuple[RunConfig, Board | None]:
    """Return the board that measures, and the configuration with what it can run.

    `auto` decides by times of this machine, which say nothing about a board: a grid of pruning ratios replaces it.
    """
    if options.measure_on is None:
        return config, None
    board = parse_board(options.measure_on, config.time_limit_s)
    if "runtimes" not in config.model_fields_set:
        config = config.model_copy(update={"runtimes": ["onnxruntime"]})
    refused = [name for name in config.runtimes if name not in BOARD_RUNTIMES]
    if refused:
        raise InvalidInput(
            f"{refused[0]} cannot be measured on a board; runtimes there are {', '.join(BOARD_RUNTIMES)}"
        )
    board.check()
    levels = [*GRID] if config.pruning_levels == "auto" else config.pruning_levels
    return config.model_copy(update={"pruning_levels": levels}), board


def _check_trainable(source: ModelAndData, splits: Splits, model: nn.Module) -> None:
    """Refuse a device that is not here, and a model that does not fit the data or the metric, before training."""
    kind, _, index = source.config.device.partition(":")
    count = {"cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}.get(kind, 1)
    if int(index or 0) >= count:
        raise InvalidConfig(
            f"device is {source.config.device!r}, and torch sees {count} of that kind here; write device: cpu"
        )
    profile(model, source.example(splits, model))
    source.task().check(model, splits.validation)


def _train(
    source: ModelAndData, folder: Path, sources: Sources, on_event: Listener
) -> tuple[ModelAndData, ScoreSummary]:
    """Return the trained model and its score: from an earlier run with the same settings, or trained now."""
    config = source.config
    key = digest({**config.subset("data", "training"), "sources": digests(sources)})
    facts = _read_training(folder, key)
    if facts is None:
        # What builds variants takes seconds to import. It does so while the baseline trains.
        start_fork_server(preload(config.runtimes, config.pruning_levels != [0.0]))
        on_event(Notice(f"training {type(source.build()).__name__} on {source.splits().name}: {config.epochs} epochs"))
        outcome = _run_phase(PipelineJob(source, folder), "train", (folder.absolute(),), folder)
        # Written last: with this file, everything is there.
        facts = {"key": key, "score": outcome["score"], "epochs": config.epochs}
        write_whole(folder / TRAINING, json.dumps(facts))
    model = source.build()
    model.load_state_dict(weights_from((folder / WEIGHTS).read_bytes()))
    return source.holding(model), ScoreSummary(**facts["score"])


def _read_training(folder: Path, key: str) -> dict[str, Any] | None:
    """Return what an earlier run with the same key noted of its training, if its weights are there."""
    try:
        facts: dict[str, Any] = json.loads((folder / TRAINING).read_text(encoding="utf-8"))
        return facts if facts["key"] == key and (folder / WEIGHTS).is_file() else None
    except (OSError, ValueError, KeyError):
        return None


def _score_given(source: ModelAndData, root: Path) -> ScoreSummary:
    outcome = _run_phase(PipelineJob(source, root), "evaluate", (), root / "baseline")
    return ScoreSummary(**outcome["score"])


def _run_phase(job: PipelineJob, phase: Phase, arguments: tuple[Any, ...], folder: Path) -> Mapping[str, Any]:
    """Run a phase that is not a candidate's in a process of its own, while nothing is measured on this machine.

    It has the memory limit of the configuration. The time limit is that of one candidate, and does not apply.
    """
    config = job.config
    limits = Limits(_limit_bytes(config), None)
    with build_lock(), Isolation(preload(config.runtimes, config.pruning_levels != [0.0])) as isolation:
        outcome = isolation.run(pickle_job(job), phase, arguments, folder, limits)
    if outcome.failure is not None:
        raise MeasurementFailed(f"{outcome.failure}: {outcome.reason}; its output is in {folder / f'{phase}.log'}")
    value: Mapping[str, Any] = outcome.value
    return value


def _limit_bytes(config: RunConfig) -> int | None:
    return None if config.memory_limit_mb is None else int(config.memory_limit_mb * MIB)


def preload(runtimes: Iterable[str], prunes: bool) -> list[str]:
    """Return what candidates will import: the exporter for any runtime but torch, and what model and data need."""
    exporting = ["?edge_opt.runtimes.exporter_start:start_exporter"] if set(runtimes) - {"torch"} else []
    pruning = ["?torch_pruning"] if prunes else []
    return [*_PRELOAD, *exporting, *pruning, *(f"?{name}" for name in _BROUGHT_ALONG if name in sys.modules)]


@dataclass(frozen=True)
class _Run:
    """A run whose baseline is known: what remains is to screen, search, choose and write."""

    job: PipelineJob
    splits: Splits
    store: Store
    root: Path
    options: RunOptions
    board: Board | None
    sources: Sources
    on_event: Listener

    def search(self, model: nn.Module, command: Sequence[str], shown: Mapping[str, Any]) -> RunResult:
        """Screen, search, choose and write.

        Args:
            model: The baseline's model.
            command: The command line, for the record.
            shown: The settings that `reproducibility.json` lists.
        """
        config = self.job.config
        profiled = profile(model, self.job.source.example(self.splits, model), name=type(model).__name__)
        self.store.keep_fact("stage", "screening")
        modules = preload(config.runtimes, prunes=True)
        space, job = choose_space(self.job, self.root, modules, lambda text: self.on_event(Notice(text)))
        result = self._swept(space, job, profiled.name)
        self._check_unchanged(model)
        result = self._tested(result, job)
        sensitivity = self._sensitivity() if config.sensitivity else None
        report = build_report(config, self.splits, profiled, result, space, command, shown, sensitivity)
        files = write_artifacts(report, self.root)
        files += export_best(result, job, self.store, self.splits, self.root)
        return RunResult(self.root, result, report.summary, tuple(files))

    def _swept(self, space: Space, job: PipelineJob, name: str) -> SweepResult:
        """Build, measure and compare the candidates of the space."""
        config, options, board = self.job.config, self.options, self.board
        assert job.baseline is not None
        metric = job.baseline.score.metric
        chosen = SweepOptions(
            name=name,
            metric=metric,
            constraints=config.budgets,
            objectives=(metric, "deploy_latency_ms"),
            sampler=config.sampler,
            trials=config.trials,
            seed=config.seed,
            use_ci=config.pareto_use_ci,
            workers=options.workers,
            scheduler=options.scheduler,
            insecure=options.insecure,
            memory_limit_bytes=_limit_bytes(config),
            time_limit_s=config.time_limit_s,
            retry_failed=options.retry_failed,
            preload=preload(space.runtimes, any(space.pruning_levels) or bool(space.layer_pruning)),
        )
        # On a board the baseline is the same model in the runtime there.
        eager = EAGER if board is None else replace(EAGER, runtime=config.runtimes[0])
        limits = Limits(chosen.memory_limit_bytes, None)
        return Sweep(job, space, self.store, self.root, chosen, self.on_event).run(
            None if eager in space else eager,
            compare=FinalistTimer(job, self.root, limits, self.on_event, board),
            measurer=None if board is None else BoardMeasurer(board, job),
        )

    def _check_unchanged(self, model: nn.Module) -> None:
        """Refuse a table in which some rows may be of another model: a file was edited while the sweep ran."""
        reference = self.job.source.model if isinstance(self.job.source.model, str) else None
        now = sources_of(self.job.config, None, model, reference)
        changed = [name for name in sorted(now) if self.sources.get(name) != now[name]]
        if changed:
            raise EdgeOptError(
                f"{', '.join(changed[:3])} changed while the sweep ran; run the same command again: what depends on "
                "it is measured again"
            )

    def _tested(self, result: SweepResult, job: PipelineJob) -> SweepResult:
        """Return the result with test scores of what is reported: the baseline and the winner, and no others."""
        if self.splits.test is None:
            return result
        reported = {result.baseline.candidate.key, result.best}
        tested: dict[str, Trial] = {}
        for trial in (result.baseline, *result.trials):
            key = trial.candidate.key
            if key in reported and key not in tested and trial.metrics is not None:
                share = self._test_score(trial.candidate, job)
                tested[key] = replace(trial, metrics=replace(trial.metrics, test_accuracy=share))
        return replace(
            result,
            baseline=tested.get(result.baseline.candidate.key, result.baseline),
            trials=tuple(tested.get(trial.candidate.key, trial) for trial in result.trials),
        )

    def _test_score(self, candidate: Candidate, job: PipelineJob) -> float:
        built = self.store.build_of(candidate)
        assert built is not None
        folder = candidate_folder(self.root.absolute(), candidate)
        return float(_run_phase(job, "score", (candidate, folder, built.value), folder)["value"])

    def _sensitivity(self) -> Sensitivity:
        return from_plain(Sensitivity, _run_phase(self.job, "probe", (), self.root / "baseline"))


def data_options(config: RunConfig) -> dict[str, Any]:
    """Return the configuration as `load_splits` takes it, the same in every process."""
    keys = ("batch_size", "seed", "dataloader_seed", "train_subset", "val_subset", "calibration_batches",
            "num_workers", "download")  # fmt: skip
    return {
        **{key: getattr(config, key) for key in keys},
        "dataset": absolute_reference(config.dataset),
        "data_dir": None if config.data_dir is None else str(Path(config.data_dir).resolve()),
        "parts_are_datasets": config.collate is not None,
    }


def _trains(config: RunConfig) -> bool:
    """Return whether some candidate is trained, so that a loss that does not fit is refused at the start."""
    levels = config.pruning_levels
    is_pruned = levels == "auto" or any(levels) or bool(config.layer_pruning)
    return config.fine_tune_epochs > 0 and (is_pruned or config.train_for_int8)


def _given(
    model: nn.Module | str, loaders: Any, example_inputs: Sequence[int] | None, config: RunConfig
) -> ModelAndData:
    """Return what a sweep was given; refuse what other processes cannot import."""
    for key, value in config.task.items():
        _check_importable(key, value)
    options: dict[str, Any] = {
        "calibration_batches": config.calibration_batches,
        "seed": config.seed,
        "parts_are_datasets": config.collate is not None,
    }
    named = isinstance(loaders, str)
    data = {"dataset": absolute_reference(loaders), **options} if named else splits_of(loaders, "loaders", **options)
    batch_size = None if example_inputs is None else int(example_inputs[0])
    if isinstance(model, nn.Module):
        _check_classes(model)
    return ModelAndData(
        absolute_reference(model) if isinstance(model, str) else model, data, config, batch_size=batch_size
    )


def _check_classes(model: nn.Module) -> None:
    """Refuse a model with a class that other processes cannot import."""
    for path, module in model.named_modules():
        kind = type(module)
        if kind.__module__ == "__main__" or "<locals>" in kind.__qualname__:
            where = f"module {path!r}" if path else "the model"
            raise InvalidInput(
                f"{where} is a {kind.__qualname__}, which other processes cannot import; put the class into a file "
                "and pass 'file.py:factory'"
            )


def _check_importable(key: str, value: Any) -> None:
    """Refuse a function that other processes cannot import."""
    kind = value if inspect.isroutine(value) or inspect.isclass(value) else type(value)
    module, name = getattr(kind, "__module__", None), getattr(kind, "__qualname__", "")
    if module == "__main__" or "<locals>" in name or "<lambda>" in name:
        raise InvalidInput(
            f"{key} is {name.rpartition('.')[2]}, which other processes cannot import; put it into a file and pass "
            "'file.py:f'"
        )


def _with_settings(function: Callable[..., SweepResult], keys: Sequence[str]) -> None:
    """Show every setting that a function takes by keyword in its signature and its help."""
    signature = inspect.signature(function)
    own = [parameter for parameter in signature.parameters.values() if parameter.kind is not parameter.VAR_KEYWORD]
    typed: Any = function
    typed.__signature__ = signature.replace(parameters=[*own, *settings_parameters(keys)])
    function.__doc__ = f"{(function.__doc__ or '').rstrip()}\n{settings_help(keys)}\n    "


_with_settings(sweep, SWEEP_KEYS)
