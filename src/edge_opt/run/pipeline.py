"""A run from its configuration to the model to ship: load, train, screen, search, choose, write.

`run()` trains a baseline first; `sweep()` starts from a trained model. Everything after that is the same. Training,
screening, building, measuring and scoring have processes of their own (`edge_opt/search/isolation.py`), and hold the
locks of the machine meanwhile. The lock of the folder is held from the beginning to the end.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from edge_opt._support.deprecation import accept_former_parameters
from edge_opt._support.files import write_whole
from edge_opt._support.json import from_plain
from edge_opt.data import Splits
from edge_opt.errors import EdgeOptError, InvalidConfig, InvalidInput
from edge_opt.loading import ModelLike, resolve_call
from edge_opt.measuring.ssh_board import Board, parse_board
from edge_opt.profiling import profile
from edge_opt.pruning.prune import check_path
from edge_opt.records.compression import Sensitivity
from edge_opt.records.fields import field, record
from edge_opt.records.profiles import ModelProfile
from edge_opt.records.sweeps import Candidate, SweepResult, Trial
from edge_opt.run.artifacts import command_line, write_artifacts
from edge_opt.run.config import (
    GRID,
    RESULT_SCOPES,
    SWEEP_KEYS,
    RunConfig,
    read_config,
    show_settings,
    sweep_settings,
    validated,
)
from edge_opt.run.dependencies import digests, same_twice, sources_of
from edge_opt.run.export_best import export_best
from edge_opt.run.forecast import SkippingPlan, skipping_plan
from edge_opt.run.job import WEIGHTS, Baseline, PipelineJob, preload, run_phase
from edge_opt.run.model_and_data import ModelAndData, ScoreSummary, weights_from
from edge_opt.run.run_summary import check_target, used_rounding
from edge_opt.run.screening import choose_space
from edge_opt.run.target_sweep import (
    TargetFiguring,
    TimeOnTarget,
    targets_by_pair,
    typed_times,
    untimed,
    winners,
)
from edge_opt.run.time_finalists import BOARD_RUNTIMES, REPORT_S, FinalistTimer, finals_seconds, measure_on_board
from edge_opt.runtimes.registry import check_installed
from edge_opt.search.isolation import Phase, keep_fork_servers, limit_user_code
from edge_opt.search.locks import build_lock, folder_lock
from edge_opt.search.space import Space
from edge_opt.search.store import Sources, Store
from edge_opt.search.sweep import Sweep, SweepOptions, candidate_folder
from edge_opt.search.sweep_progress import Listener, Notice, StepStarted
from edge_opt.tasks.batches import LossChoice, first_shape, sized_call
from edge_opt.tasks.batches import example_inputs as call_inputs

EAGER = Candidate(0.0, "fp32", "torch")
TRAINING = "training.json"
_EXPECTED_FINALISTS = 8


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


@accept_former_parameters
def run(
    config: RunConfig | str | os.PathLike[str] | Mapping[str, Any],
    output: str | os.PathLike[str] | None = None,
    *,
    measure_on: str | None = None,
    fresh: bool = False,
    on_event: Listener = lambda _: None,
    command: Sequence[str] | None = None,
    **options: Any,
) -> RunResult:
    """Train a baseline, sweep variants of it, judge them by the budgets, and write everything to a folder.

    Run again on the same folder, it continues where it stopped: nothing is trained or tried twice.

    Args:
        config: The path of a YAML file, a mapping of keys, or a `RunConfig`.
        output: Folder for everything that is written; default: `output_dir` of the configuration.
        measure_on: A board that measures, as `ssh` knows it: USER@HOST.
        fresh: Start over; the earlier table is kept under another name.
        on_event: Called with every event of the run.
        command: The command line, for the record.
        options: How candidates are built: `workers`, `scheduler`, `insecure` and `retry_failed` of `SweepOptions`.
    """
    config = _as_config(config)
    check_target(config)
    config, board = _with_board(config, measure_on)
    root = Path(config.output_dir if output is None else output)
    search = _search_options(config, **options)
    source = ModelAndData.from_config(config)
    source.task()  # an unknown metric or loss is refused before a model is loaded, which may take minutes
    splits, untrained = _loaded(source)
    with limit_user_code(config.time_limit_s, "the first call of model, loss and metric"):
        loss = _check_trainable(source, splits, untrained)
    sources = sources_of(config, splits, untrained, config.model_reference, trains_baseline=True)
    sources |= same_twice(untrained, source)
    state = _Run(
        splits, root, _result_settings(config), sources, search, board, on_event, loss,
        has_target=bool(config.targets),
    )  # fmt: skip
    with state.opened(fresh) as store:
        store.save_metadata("stage", "training")
        trained, score = state.train(source.holding(untrained))
        if config.fair:
            score = state.evaluate(trained)
        model = trained.build()
        profiled = profile(model, trained.example(splits, model), name=type(model).__name__)
        return state.search(store, trained, score, profiled, command or command_line(), config.model_dump())


@accept_former_parameters
def sweep(
    model: ModelLike,
    loaders: Any,
    *,
    output: str | os.PathLike[str],
    inputs: Sequence[int] | None = None,
    workers: int = 0,
    scheduler: str | None = None,
    insecure: bool = False,
    measure_on: str | None = None,
    retry_failed: bool = False,
    fresh: bool = False,
    on_event: Listener = lambda _: None,
    **settings: Any,
) -> SweepResult:
    """Build and measure variants of a trained model under budgets; write the winner and a report to `output`.

    Candidates are built in processes of their own: model and loaders must be picklable, with classes that can be
    imported; otherwise name them, `file.py:factory`. Run again, it continues where it stopped.

    Args:
        model: A trained module, or the reference of a function that makes one: `file.py:factory`.
        loaders: A mapping with `train` and `validation`, and optionally `calibration` and `test`, of loaders of
            (inputs, labels); or the reference of a function that returns one: `file.py:loaders`.
        output: Folder for everything that is written; an interrupted sweep continues from there.
        inputs: Shape of the batch to time; default: the first validation batch.
        workers: Processes that build side by side; 0 and 1 build one after the other.
        scheduler: Address of a Dask scheduler whose workers build instead, such as `tls://host:8786`.
        insecure: Whether a scheduler may be used without encryption, as `tcp://`.
        measure_on: A board that measures, as `ssh` knows it: `user@host`. Variants are built here and timed there.
        retry_failed: Try candidates again that failed in an earlier run.
        fresh: Start over; the earlier table is kept under another name.
        on_event: Called with every event of the sweep.
        settings: Keys of a configuration, each of them below.
    """
    config = sweep_settings(settings)
    check_target(config)
    config, board = _with_board(config, measure_on)
    search = _search_options(config, workers=workers, scheduler=scheduler, insecure=insecure, retry_failed=retry_failed)
    reference = os.fspath(model) if isinstance(model, (str, os.PathLike)) else None
    source = ModelAndData.from_arguments(reference or resolve_call(model)[0], loaders, inputs, config)
    task = source.task()  # an unknown metric or loss is refused before a model is loaded, which may take minutes
    splits, original = _loaded(source)
    # A factory may train, or draw its weights anew, at each call: all processes get the first model.
    source = source.holding(original)
    with limit_user_code(config.time_limit_s, "the first call of model, loss and metric"):
        call = source.call(splits, original)
        shape = first_shape(call)
        if inputs is not None and tuple(shape) != tuple(inputs):
            raise InvalidInput(f"inputs is {tuple(inputs)}, and samples of the data make it {tuple(shape)}")
        task.check(original, splits.validation)
        # A loss that does not fit is refused before anything is trained.
        trains = config.fine_tune_epochs > 0 and (config.prunes or bool(config.train_for_int8) or config.fair)
        loss = task.check(original, splits.train) if trains else None
        profiled = profile(original, call_inputs(call), name=type(original).__name__)
    name = reference or profiled.name
    keys = {key: value for key, value in _result_settings(config).items() if key in SWEEP_KEYS}
    depends_on = {"model": name, "batch_size": shape[0], **keys}
    sources = sources_of(config, splits, original, reference)
    state = _Run(
        splits, Path(output), depends_on, sources, search, board, on_event, loss, draws=False,
        has_target=bool(config.targets),
    )  # fmt: skip
    with state.opened(fresh) as store:
        on_event(StepStarted(f"scoring {name} on validation data"))
        score = state.evaluate(source)
        shown = {**{key: getattr(config, key) for key in SWEEP_KEYS}, "model": name}
        return state.search(store, source, score, profiled, command_line(), shown).result


@record
class _Run:
    """What every step of a run shares."""

    splits: Splits = field("The data.")
    root: Path = field("The folder of the run.")
    settings: Mapping[str, Any] = field("The settings that results depend on.")
    sources: Sources = field("Code and data that results depend on.")
    options: SweepOptions = field("How the candidates are searched.")
    board: Board | None = field("The board that measures; None is this machine.")
    on_event: Listener = field("Called with every event.")
    loss: LossChoice | None = field("What variants are trained with; None where nothing is trained.")
    draws: bool = field("Whether plots are drawn as PNG, too; the page has them in any case.", default=True)
    has_target: bool = field("Whether a target decides.", default=False)

    @property
    def cache(self) -> Path:
        """The folder of pruned and trained models, named after everything that they depend on."""
        return (self.root / "pruned" / digest({**self.settings, "sources": digests(self.sources)})).resolve()

    @contextmanager
    def opened(self, fresh: bool) -> Iterator[Store]:
        """Hold the folder from training to the last file, and open its store."""
        # Where a target decides, builds are the same with and without its board.
        timed_on = {} if self.board is None or self.has_target else {"measured_on": self.board.host}
        with folder_lock(self.root), keep_fork_servers():
            store = Store.open(
                self.root,
                {**self.settings, **timed_on},
                self.sources,
                defaults=RunConfig().subset(*RESULT_SCOPES),
                fresh=fresh,
                on_notice=self._notify,
            )
            if self.loss is not None:
                self._notify(f"loss: {self.loss}")
            with closing(store):
                yield store

    def _notify(self, text: str) -> None:
        self.on_event(Notice(text))

    def run_phase(self, job: PipelineJob, phase: Phase, arguments: tuple[Any, ...], folder: Path) -> Mapping[str, Any]:
        """Run a phase that is not a candidate's, while nothing is measured on this machine."""
        with build_lock(lambda holder: self._notify(f"waiting: {holder}")):
            return run_phase(job, job.source, phase, arguments, folder)

    def evaluate(self, source: ModelAndData) -> ScoreSummary:
        """Return the score of the baseline on validation."""
        outcome = self.run_phase(PipelineJob(source, self.cache), "evaluate", (), self.root / "baseline")
        return ScoreSummary(**outcome["score"])

    def train(self, source: ModelAndData) -> tuple[ModelAndData, ScoreSummary]:
        """Return the trained model and its score: from an earlier run with the same settings, or trained now."""
        config, folder = source.config, self.root / "baseline"
        key = digest({**config.subset("data", "training"), "sources": digests(self.sources)})
        stored = _read_training(folder, key)
        if stored is None:
            name = type(source.build()).__name__
            self.on_event(StepStarted(f"training {name} on {self.splits.name}: {config.epochs} epochs"))
            outcome = self.run_phase(PipelineJob(source, folder), "train", (folder.absolute(),), folder)
            # Written last: with this file, everything is there.
            stored = {"key": key, "score": outcome["score"], "epochs": config.epochs}
            write_whole(folder / TRAINING, json.dumps(stored))
        model = source.build()
        model.load_state_dict(weights_from((folder / WEIGHTS).read_bytes()))
        return source.holding(model), ScoreSummary(**stored["score"])

    def search(
        self,
        store: Store,
        source: ModelAndData,
        score: ScoreSummary,
        profiled: ModelProfile,
        command: Sequence[str],
        shown: Mapping[str, Any],
    ) -> RunResult:
        """Screen, search, choose and write.

        Args:
            store: The results so far.
            source: The baseline.
            score: Its score on validation.
            profiled: Its profile.
            command: The command line, for the record.
            shown: The settings that `reproducibility.json` lists.
        """
        config, model = source.config, source.build()
        baseline = Baseline(score, profiled.totals.macs, profiled.totals.params)
        unscreened = PipelineJob(source, self.cache, baseline)
        store.save_metadata("stage", "screening")
        space, job = choose_space(unscreened, self.root, self.on_event)
        result = self._swept(store, space, job, profiled.name)
        self._check_unchanged(source, model)
        self.on_event(StepStarted("scoring on test data, writing the model and the report", REPORT_S))
        result = self._tested(result, job, store)
        sensitivity = None
        if config.sensitivity:
            self.on_event(StepStarted("sensitivity: changing each layer alone"))
            probed = self.run_phase(unscreened, "probe", (), self.root / "baseline")
            sensitivity = from_plain(Sensitivity, probed)
        if config.targets:
            # The page says what the baseline takes there, in the batch that is deployed, as rows do.
            call = sized_call(source.call(self.splits, model), config.deploy_batch)
            profiled = profile(model, call_inputs(call), name=profiled.name)
        exported = export_best(result, job, store, self.splits, self.root, command, self.loss)
        summary, files = write_artifacts(
            self.root, config, self.splits, profiled, result, space, command, shown, sensitivity, self.loss, self.draws
        )
        return RunResult(self.root, result, summary, (*files, *exported))

    def _swept(self, store: Store, space: Space, job: PipelineJob, name: str) -> SweepResult:
        """Build, measure and compare the candidates of the space."""
        config, board = job.config, self.board
        assert job.baseline is not None
        # In the finals are most candidates of a small space, and the steps between the baseline and the winner.
        after_s = finals_seconds(config, min(space.size, _EXPECTED_FINALISTS) + 1) + REPORT_S
        options = replace(
            self.options, name=name, metric=job.baseline.score.metric, preload=preload(job.source), after_s=after_s
        )
        # On a board or a target the baseline is the same model in the runtime there.
        eager = EAGER if board is None and not config.targets else replace(EAGER, runtime=config.used_runtimes[0])
        timer = FinalistTimer(job, self.root, self.on_event, board)
        wanted = options.candidates(space)
        plan = SkippingPlan(wanted, ())
        if board is None:
            plan = skipping_plan(job, wanted, [*store.trials()], self.root, self.on_event)
        swept = Sweep(job, space, store, self.root, options, self.on_event, plan.order)
        first = None if eager in space else eager
        if not config.targets:
            measurer = None if board is None else partial(measure_on_board, board, job)
            return plan.checked(swept.run(first, compare=timer, measurer=measurer))
        figurings = [TargetFiguring(config, self.root.absolute(), it, eager) for it in targets_by_pair(config)]
        candidates = (eager, *wanted)
        figurings[0].learn(candidates, typed_times(config, candidates))
        is_timed_here = config.host_timing and board is None
        result = swept.run(
            first,
            compare=TimeOnTarget(figurings[0], timer),
            measurer=None if is_timed_here else partial(untimed, job),
            figures=figurings[0],
        )
        there = winners(result, figurings, options.budgets) if len(figurings) > 1 else ()
        why = figurings[0].explanation(result)
        speedup = figurings[0].whole_speedup(result)
        return plan.checked(replace(result, speedup=speedup, winners=there, explanation=why))

    def _check_unchanged(self, source: ModelAndData, model: nn.Module) -> None:
        """Refuse a table in which some rows may be of another model: a file was edited while the sweep ran."""
        now = sources_of(source.config, None, model, source.model if isinstance(source.model, str) else None)
        changed = [name for name in sorted(now) if self.sources.get(name) != now[name]]
        if changed:
            raise EdgeOptError(f"{', '.join(changed[:3])} changed while the sweep ran; run the same command again")

    def _tested(self, result: SweepResult, job: PipelineJob, store: Store) -> SweepResult:
        """Return the result with test scores of what is reported: the baseline and the winner, and no others."""
        if self.splits.test is None:
            return result
        tested: dict[str, Trial] = {}
        for trial in (result.baseline, *result.trials):
            candidate = trial.candidate
            is_reported = candidate.key in (result.baseline.candidate.key, result.best)
            if is_reported and candidate.key not in tested and trial.metrics is not None:
                built = store.build_of(candidate)
                assert built is not None
                folder = candidate_folder(self.root.absolute(), candidate)
                score = self.run_phase(job, "score", (candidate, folder, built.value), folder)["value"]
                tested[candidate.key] = replace(trial, metrics=replace(trial.metrics, test_accuracy=float(score)))
        return replace(
            result,
            baseline=tested.get(result.baseline.candidate.key, result.baseline),
            trials=tuple(tested.get(trial.candidate.key, trial) for trial in result.trials),
        )


def _result_settings(config: RunConfig) -> dict[str, Any]:
    """Return the settings that results depend on; of a target only the widths that are fast there."""
    return {**config.subset(*RESULT_SCOPES), "round_to": used_rounding(config)}


def digest(settings: Mapping[str, Any]) -> str:
    """Return a short name for settings, the same for the same ones.

    >>> digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})
    True
    """
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


def _loaded(source: ModelAndData) -> tuple[Splits, nn.Module]:
    """Load the data and build the model; refuse pruning ratios of layers that it does not have.

    Both may take long for good reasons, such as a download or training: only a limit that was set applies to them.
    """
    config = source.config
    limit_s = config.time_limit_s if "time_limit_s" in config.model_fields_set else None
    with limit_user_code(limit_s, "loading the data"):
        splits = source.splits()
    with limit_user_code(limit_s, "building the model"):
        model = source.build()
    for path in config.layer_pruning:
        check_path(model, path)
    return splits, model


def _as_config(config: RunConfig | str | os.PathLike[str] | Mapping[str, Any]) -> RunConfig:
    if isinstance(config, RunConfig):
        return config
    return validated(config) if isinstance(config, Mapping) else read_config(config)


def _search_options(config: RunConfig, **options: Any) -> SweepOptions:
    """Return how the candidates of a configuration are searched."""
    return SweepOptions(
        constraints=config.all_budgets,
        trials=config.trials,
        seed=config.seed,
        use_ci=config.pareto_use_ci,
        memory_limit_bytes=config.memory_limit_bytes,
        time_limit_s=config.time_limit_s,
        **options,
    )


def _with_board(config: RunConfig, measure_on: str | None) -> tuple[RunConfig, Board | None]:
    """Return the board that measures, and the configuration with what it can run.

    `auto` decides by times of this machine, which say nothing about a board: a grid of pruning ratios replaces it.
    """
    if measure_on is None:
        check_installed(config.used_runtimes)
        return config, None
    board = parse_board(measure_on, config.time_limit_s)
    if config.runtimes == "auto":
        config = config.model_copy(update={"runtimes": ["onnxruntime"]})
    check_installed(config.used_runtimes)
    refused = [name for name in config.used_runtimes if name not in BOARD_RUNTIMES]
    if refused:
        raise InvalidInput(f"{refused[0]} cannot be measured on a board; choose from {', '.join(BOARD_RUNTIMES)}")
    board.check()
    is_searched = config.pruning_levels == "auto" and not config.targets
    levels = [*GRID] if is_searched else config.pruning_levels
    return config.model_copy(update={"pruning_levels": levels}), board


def _check_trainable(source: ModelAndData, splits: Splits, model: nn.Module) -> LossChoice:
    """Refuse a device that is not here, and a model that does not fit the data or the metric; return the loss."""
    kind, _, index = source.config.device.partition(":")
    count = {"cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}.get(kind, 1)
    if int(index or 0) >= count:
        raise InvalidConfig(f"device is {source.config.device!r}, and torch sees {count} of them; write device: cpu")
    profile(model, source.example(splits, model))
    source.task().check(model, splits.validation)
    return source.task().check(model, splits.train)


def _read_training(folder: Path, key: str) -> dict[str, Any] | None:
    """Return what an earlier run with the same key noted of its training, if its weights are there."""
    try:
        facts: dict[str, Any] = json.loads((folder / TRAINING).read_text(encoding="utf-8"))
        return facts if facts["key"] == key and (folder / WEIGHTS).is_file() else None
    except (OSError, ValueError, KeyError):
        return None


show_settings(sweep, SWEEP_KEYS)
