"""Pruning ratios of single layers for a budget on the RAM of a microcontroller.

A ratio for all layers removes MACs. The arena is as large as what lives at its peak, often the results of one or two
early layers. These lose channels first, step by step, until the arena of the int8 file is within the budget.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from torch import nn

from edge_opt.boards.mcu_memory import memory_on
from edge_opt.budgets import parse_budgets, trial_metrics
from edge_opt.errors import EdgeOptError
from edge_opt.pruning.plan import PruningPlan, make_plan, pruning_context
from edge_opt.records.microcontrollers import McuMemory
from edge_opt.records.profiles import ModelProfile
from edge_opt.records.sweeps import Candidate
from edge_opt.run.config import RunConfig
from edge_opt.run.job import PipelineJob, run_phase
from edge_opt.run.run_summary import pruning_target
from edge_opt.run.target_sweep import targets_by_pair
from edge_opt.search.sweep_progress import Listener, Notice
from edge_opt.tasks.batches import example_inputs, sized_call

STEP = 1 / 16
HIGHEST = 0.75


def layers_for_ram(job: PipelineJob, root: Path, on_event: Listener) -> dict[str, list[float]]:
    """Return pruning ratios of single layers: those of the configuration, else what a budget on RAM asks for."""
    config = job.config
    budgets = parse_budgets(config.all_budgets, trial_metrics(config.metric_name))
    limits = [budget for budget in budgets if budget.metric == "target_ram_kib" and budget.is_ceiling]
    targets = targets_by_pair(config)[:1] if limits and config.prunes and not config.layer_pruning else ()
    if not any(target.spec.microcontroller for there in targets for target in there.values()):
        return config.layer_pruning
    smallest = min(limits, key=lambda budget: budget.limit)
    plain = run_phase(PeakJob(job, smallest.limit * 1024), job.source, "screen", (), root / "peak")
    if plain["remark"]:
        on_event(Notice(f"{smallest.text}: {plain['remark']}"))
    return {path: [ratio] for path, ratio in plain["ratios"].items()}


@dataclass(frozen=True)
class PeakJob:
    """The search for ratios, as a job with a process of its own."""

    job: PipelineJob
    limit_bytes: float

    def screen(self) -> Mapping[str, object]:
        """Return the ratios by path, and what to tell the user."""
        job, config = self.job, self.job.config
        there = targets_by_pair(config)[0]
        precision: Literal["int8", "fp32"] = "int8" if "int8" in config.precisions else "fp32"
        target = there.get((precision, "litert")) or next(iter(there.values()))
        splits = job.source.splits()
        parent = job.variant(splits, Candidate(0.0, "fp32", "torch")).model
        call = sized_call(job.source.call(splits, parent), config.deploy_batch)

        def memory_of(profile: ModelProfile) -> McuMemory:
            return memory_on(target, profile, precision, config.target_runtime)

        try:
            with pruning_context():
                ratios = ratios_at_peak(_plan(parent, example_inputs(call), config), memory_of, self.limit_bytes)
        except EdgeOptError as error:
            return {"ratios": {}, "remark": f"layers at the peak of the arena are not known: {error}"}
        if ratios is None:
            return {"ratios": {}, "remark": f"layers at the peak cannot lose enough, up to {HIGHEST:.0%} each"}
        pruned = ", ".join(f"{path} {ratio:.0%}" for path, ratio in ratios.items())
        return {"ratios": ratios, "remark": f"layers at the peak of the arena lose {pruned}" if ratios else ""}


def _plan(model: nn.Module, inputs: Any, config: RunConfig) -> PruningPlan:
    """Return the plan of a model with its widths rounded as those of the variants, for the target."""
    plan = make_plan(model, inputs, seed=config.seed, target=pruning_target(config))
    return plan.with_rounding(config.round_to)


def ratios_at_peak(
    plan: PruningPlan, memory_of: Callable[[ModelProfile], McuMemory], limit_bytes: float
) -> dict[str, float] | None:
    """Return ratios of layers with which the arena is within the limit; None where no ratios are enough.

    Each step takes a sixteenth of the channels of the largest tensor at the peak that can lose some.

    Args:
        plan: The model, with its channels followed.
        memory_of: Memory of a variant by its profile.
        limit_bytes: The arena may not be larger.
    """
    ratios: dict[str, float] = {}
    memory = memory_of(plan.before)
    while memory.arena_bytes > limit_bytes:
        paths = (_layer_of(plan, part.name, ratios) for part in memory.peak_tensors)
        path = next((path for path in paths if path is not None), None)
        if path is None:
            return None
        ratios[path] = ratios.get(path, 0.0) + STEP
        variant = replace(plan, layer_ratios=ratios)
        memory = memory_of(variant.costs(variant.removed(None)))
    return ratios


def _layer_of(plan: PruningPlan, tensor: str, ratios: Mapping[str, float]) -> str | None:
    """Return the layer that decides how many channels a tensor has; None where it cannot lose more."""
    paths = [path for path in plan.owners if path == tensor or path.startswith(f"{tensor}.")]
    if not paths:
        return None
    groups = {path: set(plan.channel_map.groups_of(plan.owners[path])) for path in (*ratios, paths[-1])}
    wanted = groups[paths[-1]]
    if any(plan.channel_map.groups[number].refused for number in wanted):
        return None
    # Coupled layers lose the same channels, and one of them is named.
    path = next((path for path in ratios if groups[path] & wanted), paths[-1])
    return path if ratios.get(path, 0.0) + STEP <= HIGHEST else None
