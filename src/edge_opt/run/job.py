"""One candidate of a run: converted, verified, scored and timed; `edge_opt/run/variants.py` prunes and trains."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from edge_opt._support.files import write_whole
from edge_opt._support.json import from_plain, to_plain
from edge_opt.boards.capacity import lifetimes_of, peak_memory
from edge_opt.compress import Runner, convert, export_onnx, finetune, measure_runner, open_runner
from edge_opt.data import Splits
from edge_opt.data.datasets import seeded
from edge_opt.errors import Disagrees, EdgeOptError, InvalidInput, MeasurementFailed
from edge_opt.explanation.sensitivity import sensitivity
from edge_opt.measuring.energy import measure_energy
from edge_opt.measuring.latency import wait_for_quiet
from edge_opt.measuring.machine import ResidentGrowth
from edge_opt.measuring.statistics import relative_half_width
from edge_opt.profiling import profile
from edge_opt.records.conversions import Converted, Exported
from edge_opt.records.fields import field, record
from edge_opt.records.measurements import Latency
from edge_opt.records.profiles import ModelProfile
from edge_opt.records.sweeps import Candidate, TrialMetrics
from edge_opt.run.config import GRID, RunConfig
from edge_opt.run.model_and_data import (
    ModelAndData,
    ScoreSummary,
    load_call,
    load_inputs,
    save_call,
    summarize_score,
    torch_threads,
    weights_of,
)
from edge_opt.run.variants import (
    FACTS,
    INT8_LOSS,
    Variant,
    read_variant,
    scale_of,
    trains_for_int8,
    variant_key,
    variant_of,
)
from edge_opt.runtimes.agreement import sized
from edge_opt.runtimes.litert import export_tflite
from edge_opt.runtimes.model_call import model_call
from edge_opt.runtimes.registry import find_runtime
from edge_opt.search.builders import JobSpec
from edge_opt.search.isolation import Isolation, Limits, Phase, pickle_job
from edge_opt.search.locks import exclusive
from edge_opt.tasks.batches import RunnerAsModule, example_inputs, sized_call
from edge_opt.trace.inputs import CallArguments
from edge_opt.training_steps.step_report import training_step

WEIGHTS = "model.safetensors"
PRUNED = "pruned"
INPUTS = "inputs.safetensors"
PROFILE = "profile.json"
# A quiet machine is waited for this many times as long as a measurement takes at least.
QUIET_WITHIN = 5.0
# Metrics that are known when a candidate is built.
BUILT_METRICS = ("model_bytes", "size_bytes", "peak_memory_bytes", "peak_memory_kind", "train_flops",
                 "train_peak_memory_bytes", "macs", "params", "effective_precision")  # fmt: skip
# What every phase needs, imported once in the process that children are forked from.
_PRELOAD = ("torch", "edge_opt.run.job", "edge_opt.runtimes.convert", "edge_opt.pruning.prune")
# Packages that take long to import, and that models and data bring along.
_BROUGHT_ALONG = ("sklearn.datasets", "scipy", "pandas", "torchvision", "timm", "transformers")


@record
class Baseline:
    """The eager, unpruned model that the others are compared with."""

    score: ScoreSummary = field("Its score on validation.")
    macs: int = field("MACs of one batch.")
    params: int = field("Its parameters.")


@record
class PipelineJob:
    """The phases of a run that have a process of their own: train, screen, build, measure, score, probe."""

    source: ModelAndData = field("Model, data and configuration.")
    cache: Path = field("Folder of pruned and fine-tuned models.")
    baseline: Baseline | None = field("What others are compared with; None while it is trained.", default=None)

    @property
    def config(self) -> RunConfig:
        return self.source.config

    @property
    def root(self) -> Path:
        """The folder of the run: the cache is two folders below it."""
        return self.cache.parent.parent

    def train(self, folder: Path) -> Mapping[str, Any]:
        """Train the baseline; write its weights to the folder, and return its score on validation."""
        config, splits = self.config, self.source.splits()
        with torch_threads(config.used_build_threads), seeded(config.seed):
            tuned = finetune(
                self.source.build().to(config.device),
                splits.train,
                epochs=config.epochs,
                learning_rate=config.learning_rate,
                seed=config.seed,
                **config.task,
            )
            model = tuned.model.cpu().eval()
            score = summarize_score(self.source.task().score(model, splits.validation))
        write_whole(folder / WEIGHTS, weights_of(model))
        return {"score": asdict(score)}

    def evaluate(self) -> Mapping[str, Any]:
        """Score the baseline on validation: the model as it is, or with `fair` trained as long as variants are."""
        splits = self.source.splits()
        with torch_threads(self.config.used_build_threads):
            model = self.variant(splits, Candidate(0.0, "fp32", "torch")).model
            score = self.source.task().score(model, splits.validation)
        return {"score": asdict(summarize_score(score))}

    def variant(self, splits: Splits, candidate: Candidate, rounds: bool | None = None) -> Variant:
        """Return the pruned and trained model of a candidate; made now if it is not in the cache."""
        baseline = None if self.baseline is None else self.baseline.score
        return variant_of(self.source, splits, candidate, self.cache, baseline, rounds)

    def probe(self) -> Mapping[str, Any]:
        """Measure how sensitive the score is to pruning and quantizing each layer alone."""
        config = self.config
        levels = GRID if config.pruning_levels == "auto" else config.pruning_levels
        with torch_threads(config.used_build_threads):
            result = sensitivity(
                self.source.build(),
                self.source.splits().validation,
                prune=[level for level in levels if level > 0],
                precisions=[name for name in config.precisions if name != "fp32"],
                importance=config.importance,
                **config.task,
            )
        return cast("Mapping[str, Any]", to_plain(result))

    def score(self, candidate: Candidate, folder: Path, built: Mapping[str, Any]) -> Mapping[str, Any]:
        """Score a candidate on the test part, as it was built."""
        part = self.source.splits().test
        assert part is not None
        model, call = self.model(candidate, folder), load_call(folder / INPUTS)
        with torch_threads(self.config.used_build_threads), self.runner(candidate, folder, built) as runner:
            return asdict(summarize_score(self.source.task().score(RunnerAsModule(runner, model, call), part)))

    def build(self, candidate: Candidate, folder: Path) -> Mapping[str, Any]:
        """Make the candidate and score it; the files that `measure` needs stay in the folder."""
        # The same number of threads on every machine: sums by more threads round differently.
        with torch_threads(self.config.used_build_threads):
            return self._build(candidate, folder)

    def _build(self, candidate: Candidate, folder: Path) -> Mapping[str, Any]:
        splits = self.source.splits()
        rounds = trains_for_int8(candidate, self.config)
        variant, remarks = self.variant(splits, candidate), list[str]()
        config, score = self.config, None
        may_train = candidate.precision == "int8" and config.train_for_int8 == "auto" and config.fine_tune_epochs > 0
        try:
            built = self._converted(candidate, variant, splits, folder, rounds=rounds)
            score = self._score(candidate, built, variant, splits)
            problem = self._lost_to_int8(candidate, variant, score) if may_train else ""
        except Disagrees as error:
            if not may_train:
                raise
            # Without the remedies, which training replaces.
            problem = f"plain int8 was refused: {str(error).partition('. ')[0]}"
        if problem or score is None:
            # In a folder of its own: what is measured is one of the two.
            aside = folder / "trained"
            rounded = self.variant(splits, candidate, rounds=True)
            again = self._converted(candidate, rounded, splits, aside, rounds=True)
            trained = self._score(candidate, again, rounded, splits)
            remarks = [f"{problem}; trained with int8 rounding it scores {trained.value:.4g}"]
            if score is None or score.drop(trained) < 0:
                variant, score = rounded, trained
                shutil.copytree(aside, folder, dirs_exist_ok=True)
                built = replace(again, path=str(folder / Path(again.path).relative_to(aside)))
            shutil.rmtree(aside)
        if variant.folder is not None:
            shutil.copytree(variant.folder, folder / PRUNED)
        call = self.source.call(splits, variant.model)
        save_call(folder / INPUTS, call)
        # Predictions for a target are of the deployed batch; they are made from this profile, for any target.
        deployed_profile(built, variant.model, sized_call(call, self.config.deploy_batch)).save(folder / PROFILE)
        return self._facts(candidate, variant, built, score, example_inputs(call), remarks)

    def _converted(
        self, candidate: Candidate, variant: Variant, splits: Splits, folder: Path, rounds: bool
    ) -> Converted:
        call = self.source.call(splits, variant.model)
        exported = self.exported(candidate, variant.model, call, rounds)
        return self.convert(candidate, variant.model, splits, call, folder, exported=exported)

    def _score(self, candidate: Candidate, converted: Converted, variant: Variant, splits: Splits) -> ScoreSummary:
        source = self.source
        if self.baseline is not None and candidate == Candidate(0.0, "fp32", "torch"):
            return self.baseline.score
        call = source.call(splits, variant.model)
        with open_runner(converted, threads=self.config.used_threads) as runner:
            scored = source.task().score(RunnerAsModule(runner, variant.model, call), splits.validation)
        return summarize_score(scored)

    def _lost_to_int8(self, candidate: Candidate, variant: Variant, score: ScoreSummary) -> str:
        """Return what plain int8 lost of its float model's score, where that is too much; else ""."""
        value = variant.score
        if value is None and not candidate.is_pruned and self.baseline is not None:
            value = self.baseline.score.value
        if value is None:
            return ""
        lost = value - score.value if score.direction == "higher" else score.value - value
        is_much = lost > INT8_LOSS * scale_of(score.metric, value)
        return f"plain int8 lost {lost:.4g} of {score.metric} and scores {score.value:.4g}" if is_much else ""

    def _facts(
        self,
        candidate: Candidate,
        variant: Variant,
        converted: Converted,
        score: ScoreSummary,
        inputs: Any,
        remarks: Sequence[str],
    ) -> Mapping[str, Any]:
        """Return what is known of a candidate once it is built."""
        profiled = profile(variant.model, inputs)
        memory = peak_memory(
            profiled,
            lifetimes=lifetimes_of(candidate.runtime),
            layers={layer.path: layer.precision for layer in converted.layers},
        )
        train_flops = train_peak_memory_bytes = None
        # A step that cannot be traced has no known cost.
        with suppress(EdgeOptError):
            step = training_step(variant.model, inputs, optimizer="adamw")
            train_flops, train_peak_memory_bytes = step.flops, step.peak_bytes
        return {
            "score": asdict(score),
            "size_bytes": converted.size_bytes,
            "model_bytes": memory.weight_bytes + memory.buffer_bytes,
            "peak_memory_bytes": memory.total_bytes,
            "peak_memory_kind": memory.kind,
            "train_flops": train_flops,
            "train_peak_memory_bytes": train_peak_memory_bytes,
            "macs": profiled.totals.macs,
            "params": profiled.totals.params,
            "effective_precision": converted.effective_precision,
            "float_layers": [layer.path for layer in converted.kept_layers],
            "file": Path(converted.path).name,
            "remarks": [*variant.remarks, *remarks, *converted.remarks],
        }

    def exported(self, candidate: Candidate, model: nn.Module, call: CallArguments, rounds: bool) -> Exported | None:
        """Return the float file of a pruning level, exported once for all candidates that start from it."""
        runtime = find_runtime(candidate.runtime)
        if runtime.suffix not in ("onnx", "tflite") or candidate.precision not in ("fp32", "int8"):
            return None
        folder = self.cache / f"{variant_key(candidate, self.config, rounds)}-{runtime.suffix}"
        path, facts = folder / f"{type(model).__name__}.fp32.{runtime.suffix}", folder / FACTS
        with exclusive(folder):
            if not facts.is_file():
                folder.mkdir(parents=True, exist_ok=True)
                try:
                    if runtime.runs_onnx:
                        exported = export_onnx(model, example_inputs(call), path)
                    else:
                        inputs = example_inputs(sized_call(call, self.config.deploy_batch))
                        exported = export_tflite(model_call(model, inputs), path, fixed_batch=True)
                except EdgeOptError:
                    return None  # converting reports the reason, in the row of the candidate
                write_whole(facts, json.dumps(to_plain(exported)))
        return from_plain(Exported, json.loads(facts.read_text(encoding="utf-8")))

    def convert(
        self,
        candidate: Candidate,
        model: nn.Module,
        splits: Splits,
        call: CallArguments,
        folder: Path,
        **options: Any,
    ) -> Converted:
        """Return a model as the candidate's runtime runs it in its precision; `options` are those of `convert`."""
        # Files of edge runtimes have one batch size, that of the deployment.
        may_fix_batch = find_runtime(candidate.runtime).may_fix_batch
        settings = {
            "calibration": self.source.calibration(splits, model) if candidate.precision == "int8" else None,
            "calibration_batches": self.config.calibration_batches,
            "reduce_range": self.config.reduce_range,
            "output": folder,
            "fixed_batch": may_fix_batch,
        }
        return convert(
            model,
            example_inputs(sized_call(call, self.config.deploy_batch) if may_fix_batch else call),
            candidate.precision,
            candidate.runtime,
            **{**settings, **options},
        )

    def measure(self, candidate: Candidate, folder: Path, built: Mapping[str, Any]) -> TrialMetrics:
        """Time what was built, in batches, in the deployed batch and in single samples; measure its memory."""
        config, inputs = self.config, load_inputs(folder / INPUTS)
        batch_size = len(inputs[0])
        # Imported before the memory baseline is taken: the memory of the model counts, not that of its runtime.
        importlib.import_module(find_runtime(candidate.runtime).package)
        growth = ResidentGrowth()
        with self.runner(candidate, folder, built) as runner:
            memory_bytes = growth.peak_while(lambda: runner(*inputs))
            times = {
                size: self._timed(runner, sized([tuple(inputs)], size))
                for size in dict.fromkeys((batch_size, config.deploy_batch, 1))
            }
            energy = self._energy(lambda: runner(*inputs), times[batch_size])
        return self.metrics(built, batch_size, times, memory_bytes, energy)

    def metrics(
        self,
        built: Mapping[str, Any],
        batch_size: int,
        times: Mapping[int, Latency],
        memory_bytes: int | None = None,
        energy: tuple[float | None, str] = (None, "not measured"),
    ) -> TrialMetrics:
        """Return the metrics of a candidate, from its build and its latency at each batch size that was timed."""
        assert self.baseline is not None
        deploy_batch, baseline = self.config.deploy_batch, self.baseline
        batch, deployed = times.get(batch_size), times.get(deploy_batch)
        noted = (remark for latency in (batch, deployed) if latency is not None for remark in latency.remarks)
        sizes = {"latency_ms": batch_size, "deploy_latency_ms": deploy_batch, "single_latency_ms": 1}
        score = ScoreSummary(**built["score"])
        drop = baseline.score.paired_drop(score)
        known: dict[str, Any] = {name: built.get(name) for name in BUILT_METRICS}
        return TrialMetrics(
            accuracy=score.value,
            accuracy_low=score.low,
            accuracy_high=score.high,
            accuracy_drop=baseline.score.drop(score),
            accuracy_drop_low=None if drop is None else drop[0],
            accuracy_drop_high=None if drop is None else drop[1],
            metric=score.metric,
            metric_direction=score.direction,
            replicates=tuple(score.replicates),
            latency_s=None if batch is None else batch.median_s,
            latency_low_s=None if batch is None else batch.median_interval_s.low,
            latency_high_s=None if batch is None else batch.median_interval_s.high,
            latency_std_s=None if batch is None else batch.std_s,
            latency_p95_s=None if batch is None else batch.p95_s,
            cpu_latency_s=None if batch is None else batch.cpu_median_s,
            batch_size=batch_size,
            throughput=None if batch is None else batch.throughput,
            measured_memory_bytes=memory_bytes,
            energy_j=energy[0],
            energy_source=energy[1],
            macs_ratio=built["macs"] / max(baseline.macs, 1),
            params_ratio=built["params"] / max(baseline.params, 1),
            float_layers=tuple(built["float_layers"]),
            **known,
            single_latency_s=times[1].median_s if 1 in times else None,
            deploy_batch=deploy_batch,
            deploy_latency_s=None if deployed is None else deployed.median_s,
            deploy_latency_low_s=None if deployed is None else deployed.median_interval_s.low,
            deploy_latency_high_s=None if deployed is None else deployed.median_interval_s.high,
            is_disturbed=deployed is not None and is_disturbed(deployed),
            disturbed_times=tuple(name for name, size in sizes.items() if size in times and is_disturbed(times[size])),
            answers=score.answers,
            remarks=(*built["remarks"], *dict.fromkeys(noted)),
        )

    def _timed(self, runner: Runner, inputs: Sequence[torch.Tensor]) -> Latency:
        """Return the latency of these inputs; a disturbed measurement is repeated when the machine is quieter."""
        options = {"min_time_s": self.config.min_time_s, "max_time_s": 2 * self.config.min_time_s}
        first = measure_runner(runner, *inputs, **options)
        if not is_disturbed(first):
            return first
        wait_for_quiet(QUIET_WITHIN * self.config.min_time_s)
        second = measure_runner(runner, *inputs, **options)
        return min((second, first), key=lambda each: (is_disturbed(each), relative_half_width(each.samples_s)))

    def _energy(self, forward: Callable[[], object], latency: Latency) -> tuple[float | None, str]:
        """Return the joules of one batch and their source: a meter where there is one, else the given power."""
        config = self.config
        energy, _ = measure_energy(forward, latency, power_watts=config.power_watts, min_time_s=config.min_time_s)
        if energy is None:
            return None, "not known"
        if energy.source == "proxy":
            return energy.joules, proxy_source(config)
        return energy.joules, f"{energy.source}: {energy.note}"

    def runner(self, candidate: Candidate, folder: Path, built: Mapping[str, Any]) -> AbstractContextManager[Runner]:
        """Open what was built."""
        threads = self.config.used_threads
        if find_runtime(candidate.runtime).runs_modules:
            return open_runner(self.eager(candidate, folder), threads=threads)
        path = built_file(folder, built)
        return open_runner(path, candidate.runtime, threads=threads, precision=candidate.precision)

    def eager(self, candidate: Candidate, folder: Path) -> Converted:
        """Return the candidate's model as torch runs it."""
        # Its files are not needed. The folder is removed here, because our processes end without clean-up.
        with tempfile.TemporaryDirectory() as scratch:
            model, inputs = self.model(candidate, folder), example_inputs(load_call(folder / INPUTS))
            return convert(model, inputs, candidate.precision, candidate.runtime, output=scratch)

    def model(self, candidate: Candidate, folder: Path) -> torch.nn.Module:
        """Return the candidate's model in float32, pruned and trained as it is."""
        pruned = folder / PRUNED
        return read_variant(self.source, pruned).model if pruned.is_dir() else self.source.build()


def deployed_profile(built: Converted, model: nn.Module, call: CallArguments) -> ModelProfile:
    """Return the profile of a call: of the file that ships, so that both have one answer, else of the module."""
    by_position = not call.kwargs and all(isinstance(value, torch.Tensor) for value in call.args)
    if by_position and Path(built.path).suffix in (".onnx", ".tflite"):
        # Inputs of an int8 file are bytes, so that shapes are given. A file that fixes another batch, or that cannot be
        # read, is described by its module.
        shapes = [tuple(value.shape) if torch.is_floating_point(value) else value for value in call.args]
        with suppress(EdgeOptError):
            return profile(built.path, shapes)
    return profile(model, example_inputs(call))


def preload(source: ModelAndData) -> list[str]:
    """Return what phases will import: the exporter for any runtime but torch, and what model and data need.

    Data that a function of the user's loads is loaded once, in the process that children are forked from.
    """
    config = source.config
    exporting = ["~edge_opt.runtimes.export:start_exporter"] if set(config.used_runtimes) - {"torch"} else []
    # It is imported in seconds, by each process that writes a file for LiteRT.
    exporting += ["~litert_torch"] if "litert" in config.used_runtimes else []
    pruning = ["?torch_pruning"] if config.prunes else []
    brought = [f"?{name}" for name in _BROUGHT_ALONG if name in sys.modules]
    return [*_PRELOAD, *exporting, *pruning, *brought, *source.shared_data()]


def run_phase(
    job: object,
    source: ModelAndData,
    phase: Phase,
    arguments: tuple[Any, ...],
    folder: Path,
    seconds: float | None = None,
) -> Mapping[str, Any]:
    """Run a phase that is not a candidate's in a process of its own; what it prints is in a log in the folder.

    It has the memory limit of the configuration. The time limit is that of one candidate, and does not apply unless
    it is passed as `seconds`.
    """
    with Isolation(preload(source)) as isolation:
        limits = Limits(source.config.memory_limit_bytes, seconds)
        outcome = JobSpec(pickle_job(job), limits).run(isolation, phase, arguments, folder)
    if outcome.failure is not None:
        raise MeasurementFailed(f"{outcome.failure}: {outcome.reason}; its output is in {folder / f'{phase}.log'}")
    value: Mapping[str, Any] = outcome.value
    return value


def proxy_source(config: RunConfig) -> str:
    """Return the source of an energy that is the given power times the latency."""
    return f"proxy: {config.power_watts:g} W given, times the median latency"


def built_file(folder: Path, built: Mapping[str, Any]) -> Path:
    """Return the file of a build; refuse a folder from which it was removed."""
    path = folder / str(built["file"])
    if not path.is_file():
        raise InvalidInput(f"{path} was removed after it was built; start over with --fresh")
    return path


def is_disturbed(latency: Latency) -> bool:
    """Return whether other programs or noise disturbed a measurement."""
    return latency.is_contended or latency.is_noisy
