"""A sweep that a target decides: what each variant takes there, predicted, then corrected by times measured there.

Predictions are those of `eo.profile(target=)`, made from the profile that each build leaves in its folder. They are not
stored: one more target, or a time that was typed in, ranks the same builds anew. Pruned variants are made for the first
target.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from torch import nn

from edge_opt._support.json import to_plain
from edge_opt.boards.capacity import peak_memory
from edge_opt.boards.estimate import predictions
from edge_opt.boards.mcu_memory import MEMORY_UNKNOWN, memory_on
from edge_opt.boards.platform_file import Platform
from edge_opt.boards.ratios import VariantOnPlatform, ratio_width, variant_on
from edge_opt.boards.targets import TFLITE_RUNTIMES, ResolvedTarget, best_known, platforms_of
from edge_opt.budgets import judged
from edge_opt.data import Splits
from edge_opt.errors import EdgeOptError, InvalidInput
from edge_opt.explanation.explain import ModelVariant, explain
from edge_opt.profiling import profile
from edge_opt.records.compression import Explanation
from edge_opt.records.devices import Precision
from edge_opt.records.predictions import Prediction
from edge_opt.records.profiles import Budget, ModelProfile
from edge_opt.records.sweeps import (
    Candidate,
    Finals,
    Speedup,
    SpeedupRatio,
    SweepResult,
    TargetFigures,
    TargetWinner,
    Trial,
)
from edge_opt.report.save import load
from edge_opt.run.config import RunConfig
from edge_opt.run.job import INPUTS, PROFILE, PipelineJob
from edge_opt.run.model_and_data import load_inputs
from edge_opt.run.run_summary import resolve_targets_of
from edge_opt.run.time_finalists import FinalistTimer
from edge_opt.runtimes.registry import installed_runtimes
from edge_opt.search.choose import recommend, reject_slower_than_unpruned, unpruned_steps
from edge_opt.search.isolation import Isolation, Outcome
from edge_opt.search.space import Pair
from edge_opt.search.store import Store
from edge_opt.search.sweep import candidate_folder
from edge_opt.tasks.batches import example_inputs, sized_call

_TYPED = "typed in"


def runtime_here(platform: Platform | None) -> str:
    """Return the runtime of this machine that builds and scores what runs on a platform.

    >>> from edge_opt.boards.targets import resolve_target
    >>> runtime_here(resolve_target("raspberry-pi-4").platform)
    'onnxruntime'
    """
    if platform is None:
        return "onnxruntime"
    if platform.runtime.startswith("torch"):
        return "torch"
    return "litert" if platform.runtime in TFLITE_RUNTIMES else "onnxruntime"


def runtimes_for(config: RunConfig) -> list[str]:
    """Return the runtimes here that build what the targets run, those of the first target's best data first."""
    here = (runtime for target in targets_by_pair(config) for _, runtime in target)
    return [runtime for runtime in dict.fromkeys(here) if runtime in installed_runtimes()] or ["onnxruntime"]


def targets_by_pair(config: RunConfig) -> tuple[Mapping[Pair, ResolvedTarget], ...]:
    """Return each target of a configuration, as it answers in each precision and runtime of this machine.

    A precision without published times is left to the roofline only if all are: a roofline is not comparable with
    costs that were fitted to times. Accelerators without fp32 run float files in fp16.
    """
    wanted: tuple[Precision, ...] = ("fp32", "fp16", *config.precisions)
    every = {precision: resolve_targets_of(config, precision) for precision in wanted}
    targets: list[Mapping[Pair, ResolvedTarget]] = []
    for number in range(len(config.targets)):
        by_precision = {precision: resolved[number] for precision, resolved in every.items()}
        in_fp16 = by_precision["fp16"] if "fp16" in config.precisions else by_precision.pop("fp16")
        if by_precision["fp32"].platform is None and in_fp16.platform is not None:
            by_precision["fp32"] = in_fp16
        has_times = any(target.platform is not None for target in by_precision.values())
        by_pair: dict[Pair, ResolvedTarget] = {}
        for precision, target in by_precision.items():
            for other in (target, *_other_runtimes(target, config)) if target.platform or not has_times else ():
                by_pair.setdefault((precision, _built_with(other)), other)
        built = {runtime for _, runtime in by_pair}
        if config.runtimes == "auto":
            named = [] if built & set(installed_runtimes()) else ["onnxruntime"]
        else:
            named = [] if built & set(config.runtimes) else [*config.runtimes]
        # Nothing that is tried runs there: what the same model takes in a runtime of the target.
        first = {precision: other for (precision, _), other in reversed(by_pair.items())}
        targets.append(by_pair | {(precision, name): other for precision, other in first.items() for name in named})
    return tuple(targets)


def _other_runtimes(target: ResolvedTarget, config: RunConfig) -> list[ResolvedTarget]:
    """Return the target with each other platform of its precision and engine; as many threads come first."""
    own = target.platform
    if own is None or target.calibration or config.target_runtime or target.name == own.name:
        return []
    known = [
        platform
        for platform in best_known(platforms_of(target.spec))
        if (platform.precision, platform.engine) == (own.precision, own.engine)
        and config.target_threads in (None, platform.threads)
    ]
    known.sort(key=lambda platform: platform.threads != own.threads)
    return [replace(target, platform=platform) for platform in known]


def _built_with(target: ResolvedTarget) -> str:
    # TFLM runs the file that LiteRT's converter writes.
    is_tflm = target.spec.microcontroller is not None and "litert" in installed_runtimes()
    return "litert" if is_tflm else runtime_here(target.platform)


def computed_in(target: ResolvedTarget, precision: Precision) -> Precision:
    """Return the precision that a file of a precision is computed in there."""
    is_half = precision == "fp32" and target.platform is not None and target.platform.precision == "fp16"
    return "fp16" if is_half else precision


Name = TypeVar("Name")


def times_on_target(
    job: PipelineJob, splits: Splits, models: Mapping[Name, nn.Module], pairs: Sequence[Pair]
) -> dict[tuple[Name, Pair], float]:
    """Return predicted seconds of models on the first target; a precision without a time there is left out."""
    there, times = targets_by_pair(job.config)[0], {}
    for name, model in models.items():
        call = sized_call(job.source.call(splits, model), job.config.deploy_batch)
        profiled = profile(model, example_inputs(call))
        for pair in pairs:
            target = there.get(pair)
            if target is not None:
                precision = computed_in(target, pair[0])
                [predicted] = predictions(profiled, [target], precision, job.config.target_threads)
                if predicted.seconds is not None:
                    times[name, pair] = predicted.seconds
    return times


@dataclass(frozen=True)
class MeasuredThere:
    """A time that was measured on the target, in seconds, with its interval."""

    seconds: float
    low: float
    high: float
    where: str


@dataclass
class TargetFiguring:
    """What the variants of a sweep take on one target.

    `timed` holds what was measured there, by the variant's key, and `candidates` these variants; both grow when
    finalists are timed.
    """

    config: RunConfig
    root: Path
    targets: Mapping[Pair, ResolvedTarget]
    reference: Candidate
    timed: dict[str, MeasuredThere] = field(default_factory=dict)
    candidates: dict[str, Candidate] = field(default_factory=dict)
    _profiles: dict[str, ModelProfile | None] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return next(iter(self.targets.values())).name

    def __call__(self, trial: Trial) -> Trial:
        """Return the trial with what it takes on the target; a failed one as it is."""
        if trial.metrics is None:
            return trial
        figures = self._figures(trial.candidate, trial.metrics.size_bytes)
        # What disturbed a measurement here says nothing about the time there, which ranks.
        return replace(trial, metrics=replace(trial.metrics, target=figures, is_disturbed=False))

    def _profile(self, candidate: Candidate) -> ModelProfile | None:
        """Return the profile of the deployed batch; None where its build left none."""
        key = candidate.key
        if key not in self._profiles:
            try:
                self._profiles[key] = load(candidate_folder(self.root, candidate) / PROFILE)
            except EdgeOptError:
                return None
        return self._profiles[key]

    def _file(self, candidate: Candidate) -> Path | None:
        """Return the file of a build that can be read, as `profile` is given it."""
        files = candidate_folder(self.root, candidate).iterdir()
        return next((path for path in sorted(files) if path.suffix in (".onnx", ".tflite")), None)

    def _target(self, candidate: Candidate) -> ResolvedTarget | None:
        return self.targets.get((candidate.precision, candidate.runtime))

    def prediction(self, candidate: Candidate) -> tuple[Prediction, VariantOnPlatform | None] | None:
        """Return what is predicted before anything was measured; None where the target has no time in its precision."""
        profile, target = self._profile(candidate), self._target(candidate)
        if profile is None or target is None:
            return None
        threads, file = self.config.target_threads, self._file(candidate)
        precision = computed_in(target, candidate.precision)
        [predicted] = predictions(profile, [target], precision, threads, file)
        if precision != candidate.precision:
            remark = f"{target.name} computes it in {precision}; its accuracy was measured in {candidate.precision}"
            predicted = replace(predicted, remarks=(remark, *predicted.remarks))
        return predicted, None if target.calibration is not None else variant_on(profile, target)

    def _figures(self, candidate: Candidate, size_bytes: int) -> TargetFigures:
        answer = self.prediction(candidate)
        ram, flash, *remarks = self._memory(candidate, size_bytes)
        unknown = TargetFigures(self.name, "not known", "predicted", None, None, None, ram, flash, None)
        if answer is None:
            reason = f"no time of {self.name} in {candidate.precision} with a runtime that takes this file is known"
            return replace(unknown, remarks=(reason, *remarks))
        predicted, variant = answer
        platform = predicted.basis if variant is None else variant.platform.name
        # Energies of the table are for comparing variants; power times latency is what a device is known to draw.
        joules = next((energy.joules for energy in predicted.energies if energy.source == "proxy"), None)
        if predicted.seconds is None:
            return replace(unknown, remarks=(*predicted.remarks, *remarks))
        figures = replace(
            unknown, platform=platform, seconds=predicted.seconds, low=predicted.low, high=predicted.high,
            energy_j=joules, remarks=(*predicted.remarks, *remarks),
        )  # fmt: skip
        return replace(self._corrected(candidate, figures, variant), speedup=self.speedup(self.reference, candidate))

    def _memory(self, candidate: Candidate, size_bytes: int) -> tuple[Any, ...]:
        """Return RAM and flash on the target: of a microcontroller its arena, file and code, else peak and file.

        Where those of a microcontroller are not known, the reason follows.
        """
        profile, target = self._profile(candidate), next(iter(self.targets.values()))
        if profile is None:
            return None, size_bytes
        precision, file = candidate.precision, self._file(candidate)
        if target.spec.microcontroller is None:
            return peak_memory(profile, precision, lifetimes="planner").total_bytes, size_bytes
        try:
            memory = memory_on(target, file or profile, precision, self.config.target_runtime)
        except EdgeOptError as error:
            return None, None, f"{MEMORY_UNKNOWN}: {error}"
        return memory.arena_bytes, memory.flash_bytes

    def _corrected(
        self, candidate: Candidate, figures: TargetFigures, variant: VariantOnPlatform | None
    ) -> TargetFigures:
        """Return the figures by what was measured: the time itself, or the prediction times the common factor."""
        if not self.timed or figures.seconds is None:
            return figures
        own = self.timed.get(candidate.key)
        if own is not None:
            energy = None if figures.energy_j is None else figures.energy_j * own.seconds / figures.seconds
            return replace(
                figures, kind="measured", platform=own.where, seconds=own.seconds, low=own.low, high=own.high,
                energy_j=energy,
            )  # fmt: skip
        factor, scatter, anchors = self._anchors
        widths = [ratio_width(variant, anchor)[0] for anchor in anchors] if variant is not None else []
        if not widths:
            return figures
        seconds, width = figures.seconds * factor, math.hypot(min(widths), scatter)
        if figures.low is not None and figures.high is not None:
            # What is known of the board's common factor cannot make a variant less certain.
            width = min(width, math.log(figures.high / figures.low) / 2)
        return replace(
            figures,
            seconds=seconds,
            low=seconds * math.exp(-width),
            high=seconds * math.exp(width),
            energy_j=None if figures.energy_j is None else figures.energy_j * factor,
            remarks=(f"{len(self.timed)} times measured there move predictions by {factor:.3g}", *figures.remarks),
        )

    @cached_property
    def _anchors(self) -> tuple[float, float, list[VariantOnPlatform]]:
        """The factor of measured over predicted times, how much it scatters as a logarithm, and the timed variants."""
        logs: list[float] = []
        widths: list[float] = []
        variants: list[VariantOnPlatform] = []
        for key, timed in self.timed.items():
            answer = self.prediction(self.candidates[key])
            if answer is not None and answer[0].seconds and answer[1] is not None:
                logs.append(math.log(timed.seconds / answer[0].seconds))
                widths.append(math.log(timed.high / timed.low) / 2)
                variants.append(answer[1])
        if not logs:
            return 1.0, 0.0, []
        spread = float(np.std(logs, ddof=1)) * 1.65 if len(logs) > 1 else 0.0
        return math.exp(float(np.mean(logs))), max(spread, float(np.mean(widths))), variants

    def learn(self, candidates: Sequence[Candidate], timed: Mapping[str, MeasuredThere]) -> None:
        """Take over times that were measured on the target."""
        self.candidates.update({candidate.key: candidate for candidate in candidates})
        self.timed.update(timed)
        self.__dict__.pop("_anchors", None)

    def speedup(self, before: Candidate, after: Candidate) -> SpeedupRatio | None:
        """Return the speedup of one variant over another there, with its 90 % interval; None where it is not known."""
        sides = self.prediction(before), self.prediction(after)
        if sides[0] is None or sides[1] is None or not sides[0][0].seconds or not sides[1][0].seconds:
            return None
        ratio = sides[0][0].seconds / sides[1][0].seconds
        one, other = (self.timed.get(it.key) for it in (before, after))
        if one is not None and other is not None:
            ratio, low, high = one.seconds / other.seconds, one.low / other.high, one.high / other.low
            return SpeedupRatio(ratio, min(low, ratio), max(high, ratio))
        variants = sides[0][1], sides[1][1]
        if variants[0] is None or variants[1] is None:
            return None
        width, _ = ratio_width(variants[0], variants[1])
        return SpeedupRatio(ratio, ratio * math.exp(-width), ratio * math.exp(width))

    def explanation(self, result: SweepResult) -> Explanation | None:
        """Return why the winner is not faster there, and what would be; None where it is not predicted."""
        if result.best is None:
            return None
        factor, sides = self._anchors[0], []
        for candidate in (self.reference, result.trial(result.best).candidate):
            profile, target = self._profile(candidate), self._target(candidate)
            if profile is None or target is None:
                return None
            if target.platform is not None:
                # Times measured there move the predictions of layers as they move those of variants.
                costs = target.platform.costs
                platform = replace(target.platform, costs=replace(costs, mean=costs.mean + math.log(factor)))
                target = replace(target, platform=platform)
            variant = ModelVariant(profile, precision=computed_in(target, candidate.precision))
            sides.append(variant.on_target(target, threads=self.config.target_threads))
        if any(side.predicted is None or side.predicted.prediction.seconds is None for side in sides):
            return None
        return explain(*sides)

    def whole_speedup(self, result: SweepResult) -> Speedup | None:
        """Return the winner's predicted speedup over the baseline, and the parts of precision and pruning."""
        if result.best is None:
            return None
        winner = result.trial(result.best).candidate
        whole = self.speedup(self.reference, winner)
        if whole is None:
            return None
        # The baseline runs in the runtime of the target already: that is no part of the speedup.
        in_precision = unpruned_steps(self.reference, winner)[1]
        known = {trial.candidate for trial in result.trials}
        is_split = in_precision in known and in_precision not in (self.reference, winner)
        compared = [self.timed.get(it.key) for it in (self.reference, winner, *([in_precision] if is_split else ()))]
        is_measured = all(it is not None and it.where != _TYPED for it in compared)
        return Speedup(
            whole=whole,
            runtime=None,
            precision=self.speedup(self.reference, in_precision) if is_split else None,
            pruning=self.speedup(in_precision, winner) if is_split else None,
            batch_size=self.config.deploy_batch,
            clock="wall" if is_measured else "predicted",
            is_disturbed=False,
        )


def typed_times(config: RunConfig, candidates: Sequence[Candidate]) -> dict[str, MeasuredThere]:
    """Return the times of the configuration by the key of their variant; one that names no variant is refused."""
    timed: dict[str, MeasuredThere] = {}
    for name, milliseconds in config.target_times.items():
        wanted = " ".join(name.split())
        own = [it for it in candidates if wanted in (it.key, it.label, it.title)]
        if not own:
            known = "; ".join(f"{it.key} ({it.label})" for it in candidates[:8])
            raise InvalidInput(f"target_times names {name!r}, which is not a variant of this sweep; there are: {known}")
        seconds = milliseconds / 1e3
        # One typed number says nothing about its noise: two people who time one board are up to 9 % apart.
        timed[own[0].key] = MeasuredThere(seconds, seconds / 1.05, seconds * 1.05, _TYPED)
    return timed


def winners(
    result: SweepResult, figurings: Sequence[TargetFiguring], budgets: Sequence[Budget]
) -> tuple[TargetWinner, ...]:
    """Return the winner of each target: the same builds, judged by what they take there."""
    chosen = []
    for figuring in figurings:
        rows = []
        for trial in map(figuring, result.trials):
            broken, undecided = ((), ()) if trial.metrics is None else judged(trial.metrics, budgets)
            rows.append(replace(trial, violations=broken, undecided=undecided))
        kept = reject_slower_than_unpruned(rows)
        best, why = recommend(kept)
        own = next((trial for trial in kept if trial.candidate.key == best), None)
        status = "none"
        if own is not None:
            chance = f" ({100 * own.probability:.0f} %)" if own.undecided and own.probability is not None else ""
            status = "accepted" if own.is_accepted else f"undecided{chance}"
        figures = None if own is None or own.metrics is None else own.metrics.target
        chosen.append(TargetWinner(figuring.name, None if own is None else own.candidate, figures, status, why))
    return tuple(chosen)


@dataclass(frozen=True)
class TimeOnTarget:
    """Times the finalists of a target's sweep on the board; the figures of all variants follow."""

    figuring: TargetFiguring
    timer: FinalistTimer

    def __call__(self, result: SweepResult, isolation: Isolation, store: Store) -> Finals | None:
        """Time the finalists, interleaved, and correct the predictions by it. There are no finals of this machine."""
        if self.timer.board is None:
            return None
        finals = self.timer(result, isolation, store)
        if finals is not None:
            where = f"measured on {self.timer.board.host}"
            timed = {
                item.candidate.key: MeasuredThere(item.seconds, item.low, item.high, where) for item in finals.finalists
            }
            self.figuring.learn([item.candidate for item in finals.finalists], timed)
        return None


def untimed(job: PipelineJob, candidate: Candidate, folder: Path, built: Mapping[str, Any]) -> Outcome:
    """Return the figures of a variant that is not timed on this machine."""
    batch_size = len(load_inputs(folder / INPUTS)[0])
    return Outcome(to_plain(job.metrics(built, batch_size, {})))
