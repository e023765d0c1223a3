"""Predict which candidates of a sweep can keep its latency budgets; those that cannot are not built.

Models are pruned without training, which takes a moment, and profiled. What they take is predicted for the target that
decides, or for this machine where it is calibrated for the runtime (`edge-opt calibrate --runtime`). A candidate that
misses a budget with 95 % confidence is skipped. A random tenth of these is built all the same and tells how right that
was. The others are built in the order of their promise.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edge_opt import units
from edge_opt._support.json import from_plain, to_plain
from edge_opt.boards.estimate import predictions
from edge_opt.boards.targets import ResolvedTarget, resolve_target
from edge_opt.budgets import parse_budgets, trial_metrics
from edge_opt.errors import EdgeOptError, InvalidInput
from edge_opt.profiling import profile
from edge_opt.records.profiles import Budget, ModelProfile
from edge_opt.records.sweeps import Candidate, SkippedCandidate, SweepResult, Trial
from edge_opt.run.config import RunConfig
from edge_opt.run.job import PipelineJob, run_phase
from edge_opt.run.target_sweep import computed_in, targets_by_pair
from edge_opt.run.variants import pruned_model
from edge_opt.search.space import Pair
from edge_opt.search.sweep_progress import Listener, Notice
from edge_opt.tasks.batches import example_inputs, sized_call

# Of the skipped candidates, the share that is built all the same.
CHECKED_SHARE = 0.1
_LATENCIES = ("target_latency_ms", "deploy_latency_ms", "latency_ms", "single_latency_ms")


@dataclass(frozen=True)
class SkippingPlan:
    """The candidates to build in their order, and those that are skipped."""

    order: tuple[Candidate, ...]
    skipped: tuple[SkippedCandidate, ...]

    def checked(self, result: SweepResult) -> SweepResult:
        """Return the result with the skipped candidates; those that were built to check say whether it was right."""
        trials = {trial.candidate.key: trial for trial in result.trials}
        skipped = tuple(_with_result(item, trials.get(item.candidate.key)) for item in self.skipped)
        return replace(result, skipped=skipped)


def _with_result(item: SkippedCandidate, trial: Trial | None) -> SkippedCandidate:
    if not item.is_built or trial is None or trial.metrics is None:
        return item
    return replace(item, is_right=any(violation.metric == item.metric for violation in trial.violations))


def latency_budgets(config: RunConfig) -> tuple[Budget, ...]:
    """Return the budgets that a prediction can decide: ceilings of the target's latency, or of this machine's."""
    budgets = parse_budgets(config.all_budgets, trial_metrics(config.metric_name))
    wanted = _LATENCIES[:1] if config.targets else _LATENCIES[1:]
    return tuple(budget for budget in budgets if budget.metric in wanted and budget.is_ceiling)


def skipping_plan(
    job: PipelineJob, candidates: Sequence[Candidate], known: Sequence[str], root: Path, on_event: Listener
) -> SkippingPlan:
    """Return the candidates in the order of their promise, without those that miss a latency budget for certain.

    Args:
        job: The sweep's job.
        candidates: Its candidates.
        known: Keys of candidates that are finished; these are never skipped.
        root: The folder of the run.
        on_event: Told how many are skipped, and why nothing could be predicted.
    """
    config = job.config
    nothing = SkippingPlan(tuple(candidates), ())
    waiting = [candidate for candidate in candidates if candidate.key not in known]
    if not config.skip or len(config.targets) > 1 or not latency_budgets(config) or len(waiting) < 2:
        return nothing
    try:
        plain = run_phase(ForecastJob(job, tuple(waiting)), job.source, "screen", (), root / "forecast")
    except EdgeOptError as error:
        on_event(Notice(f"no candidate is skipped: {error}"))
        return nothing
    if plain["reason"]:
        on_event(Notice(f"no candidate is skipped: {plain['reason']}"))
    forecasts = [from_plain(SkippedCandidate, item) for item in plain["forecasts"]]
    plan = plan_of(candidates, forecasts, config.seed)
    if plan.skipped:
        built = sum(item.is_built for item in plan.skipped)
        count = f"{len(plan.skipped) - built} of {len(candidates)} candidates"
        why = "their predicted latency misses a budget with 95 % confidence"
        on_event(Notice(f"{count} are skipped: {why}; {built} such are built all the same, to check"))
    return plan


def plan_of(candidates: Sequence[Candidate], forecasts: Sequence[SkippedCandidate], seed: int) -> SkippingPlan:
    """Return what is built and what is skipped, by what is predicted for each candidate's tightest budget.

    The fastest is built even if it misses. A tenth of the others that miss, drawn at random, is built as well.
    """
    by_key = {item.candidate.key: item for item in forecasts}
    missing = sorted((item for item in forecasts if item.low_s > item.limit_s), key=lambda item: item.seconds)
    if forecasts and len(missing) == len(candidates):
        missing = missing[1:]
    count = math.ceil(CHECKED_SHARE * len(missing))
    drawn = {item.candidate.key for item in random.Random(seed).sample(missing, count)}
    skipped = tuple(replace(item, is_built=item.candidate.key in drawn) for item in missing)
    gone = {item.candidate.key for item in skipped if not item.is_built}

    def promise(candidate: Candidate) -> tuple[float, ...]:
        """Sort candidates that should keep the budget first, by pruning: less of it loses less accuracy."""
        item = by_key.get(candidate.key)
        if item is None:
            return 1.0, 0.0
        is_within = item.seconds <= item.limit_s
        return (0.0, candidate.pruning, item.seconds) if is_within else (2.0, item.seconds)

    order = sorted((candidate for candidate in candidates if candidate.key not in gone), key=promise)
    return SkippingPlan(tuple(order), skipped)


@dataclass(frozen=True)
class ForecastJob:
    """The predictions as a job with a process of its own."""

    job: PipelineJob
    candidates: tuple[Candidate, ...]

    def screen(self) -> Mapping[str, Any]:
        """Return a forecast of each candidate that can be predicted, for its tightest latency budget."""
        config, source = self.job.config, self.job.source
        splits = source.splits()
        parent = self.job.variant(splits, Candidate(0.0, "fp32", "torch")).model
        profiles: dict[tuple[Any, ...], ModelProfile] = {}
        decides = targets_by_pair(config)[0] if config.targets else None
        targets: dict[Pair, ResolvedTarget] = {}  # a calibration is read, and learned from, once
        reasons: dict[str, None] = {}
        forecasts: list[SkippedCandidate] = []
        budgets = latency_budgets(config)
        for candidate in self.candidates:
            try:
                pair = candidate.precision, candidate.runtime
                if pair not in targets:
                    targets[pair] = _target(config, decides, pair)
                for budget in budgets:
                    key = _profile_key(config, candidate, budget)
                    if key not in profiles:
                        model = pruned_model(source, splits, parent, candidate)[0].eval()
                        call = source.call(splits, model)
                        inputs = example_inputs(call if key[-1] is None else sized_call(call, key[-1]))
                        profiles[key] = profile(model, inputs)
                forecasts += _tightest(candidate, targets[pair], config, budgets, profiles)
            except EdgeOptError as error:
                reasons[str(error)] = None
        return {
            "forecasts": [to_plain(item) for item in forecasts],
            "reason": "; ".join([*reasons][:1]) if not forecasts else "",
        }


def _target(config: RunConfig, decides: Mapping[Pair, ResolvedTarget] | None, pair: Pair) -> ResolvedTarget:
    """Return what predicts a precision and runtime: the target that decides, else this machine as it was calibrated."""
    precision, runtime = pair
    if decides is None:
        return resolve_target("host", precision, runtime=runtime, threads=config.used_threads)
    if pair not in decides:
        raise InvalidInput(f"no time of the target in {precision} with {runtime} is known")
    return decides[pair]


def _profile_key(config: RunConfig, candidate: Candidate, budget: Budget) -> tuple[Any, ...]:
    """Return what a profile depends on: the pruning and the batch, None for that of the data."""
    batch = {"latency_ms": None, "single_latency_ms": 1}.get(budget.metric, config.deploy_batch)
    return candidate.pruning, candidate.layer_pruning, batch


def _tightest(
    candidate: Candidate, target: ResolvedTarget, config: RunConfig, budgets: Sequence[Budget],
    profiles: Mapping[tuple[Any, ...], ModelProfile],
) -> list[SkippedCandidate]:  # fmt: skip
    """Return the forecast for the budget that the candidate misses most, or keeps with the least room, if any."""
    forecasts = []
    for budget in budgets:
        profiled = profiles[_profile_key(config, candidate, budget)]
        [it] = predictions(profiled, [target], computed_in(target, candidate.precision), config.target_threads)
        if it.seconds is not None and it.low is not None and it.high is not None:
            reason = (
                f"{budget.text}: predicted {units.duration(it.seconds)} on {it.target}, 95 % confident of more than "
                f"{units.duration(it.low)}"
            )
            limit_s = budget.limit / 1e3
            forecasts.append(SkippedCandidate(candidate, budget.metric, it.seconds, it.low, it.high, limit_s, reason))
    return sorted(forecasts, key=lambda item: item.low_s / item.limit_s)[-1:]
