"""What would make a training step smaller, each tried on a trace; and layers to checkpoint for a budget."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import accumulate as accumulate_sums
from typing import Any

import torch
from torch import nn

from edge_opt._support.checks import check_positive
from edge_opt._support.progress import report_progress
from edge_opt.errors import EdgeOptError
from edge_opt.records.training_steps import CheckpointChoice, Remedy, TrainingStep
from edge_opt.trace.inputs import CallArguments, InputSpec, map_arguments
from edge_opt.training_steps.optimizers import find_optimizer
from edge_opt.training_steps.step_report import checked_model, memory_and_flops, peak_of, plan_of
from edge_opt.training_steps.step_trace import StepPlan

_LEAST_SAVING = 0.01


def what_would_help(
    step: TrainingStep, model: nn.Module, arguments: CallArguments, plan: StepPlan, accumulate: int
) -> tuple[Remedy, ...]:
    """Every remedy that saves at least one per cent, largest first; what the model refuses is left out."""
    found: list[Remedy] = []
    for change, tried, call, batches in _tries(model, arguments, plan, accumulate):
        report_progress(f"trying what would help: {change}")
        try:
            peak_bytes, flops = peak_of(model, call, tried, batches)
        except EdgeOptError:
            continue
        if peak_bytes <= (1 - _LEAST_SAVING) * step.peak_bytes:
            found.append(Remedy(change, peak_bytes, flops))
    return tuple(sorted(found, key=lambda remedy: remedy.peak_bytes))


def _tries(
    model: nn.Module, arguments: CallArguments, plan: StepPlan, accumulate: int
) -> Iterator[tuple[str, StepPlan, CallArguments, int]]:
    blocks = repeated_blocks(model)
    if blocks and not plan.checkpoint:
        listed = ", ".join(repr(path) for path in blocks[:2]) + (", …" if len(blocks) > 2 else "")
        yield f"checkpoint=[{listed}] ({len(blocks)} blocks)", replace(plan, checkpoint=blocks), arguments, accumulate
    for name in ("sgd", "adafactor", "adamw-8bit"):
        make = find_optimizer(name)[1]
        yield f'optimizer="{name}"', replace(plan, optimizer=make), arguments, accumulate
    if plan.autocast is None:
        yield 'autocast="bf16"', replace(plan, autocast=torch.bfloat16), arguments, accumulate
    half = _halved(arguments)
    if half is not None:
        yield "half the batch", plan, half, accumulate
        yield (
            "half the batch, accumulate twice as often",
            replace(plan, has_second_batch=True, adds_up=True),
            half,
            2 * accumulate,
        )
    last = _last_layers(model)
    if last:
        trains = {id(p): name.startswith(f"{last}.") and plan.trains[id(p)] for name, p in model.named_parameters()}
        if any(trains.values()):
            yield f"frozen: all but {last!r}", replace(plan, trains=trains), arguments, accumulate


def repeated_blocks(model: nn.Module) -> tuple[str, ...]:
    """Paths of the blocks that a model is built of: children of lists and sequences that have children themselves."""
    found = [
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        if isinstance(module, (nn.ModuleList, nn.Sequential))
        for name, child in module.named_children()
        if any(True for _ in child.children())
    ]
    # A block inside a block is recomputed with it.
    return tuple(path for path in found if not any(path.startswith(f"{other}.") for other in found))


def _last_layers(model: nn.Module) -> str | None:
    """The last child of the model that has parameters: what is trained when the rest is taken as it is."""
    owning = [name for name, child in model.named_children() if any(True for _ in child.parameters())]
    return owning[-1] if len(owning) > 1 else None


def _halved(arguments: CallArguments) -> CallArguments | None:
    def half(value: Any) -> Any:
        dtype = value.dtype if isinstance(value, InputSpec) else str(value.dtype).removeprefix("torch.")
        return InputSpec((value.shape[0] // 2, *value.shape[1:]), dtype)

    try:
        return map_arguments(arguments, half)
    except (EdgeOptError, IndexError):  # a batch of one, or an input without a batch
        return None


def fewest_checkpoints(
    model: nn.Module, inputs: Any = None, *, budget_mb: float, kwargs: Mapping[str, Any] | None = None, **options: Any
) -> CheckpointChoice:
    """Find few blocks of a model to checkpoint so that a training step fits a budget, and what that costs.

    In each round the blocks that hold most at the peak are added, as few as could be enough; a trace of the whole step
    then says where its new peak is. Where no other block holds anything at the
    peak, the answer does not fit.

    Args:
        model: The model.
        inputs: As in `training_step`.
        budget_mb: Most MiB of the peak, weights and batch included.
        kwargs: Arguments of the model by name.
        options: `loss`, `optimizer`, `frozen`, `autocast`, `accumulate` and `set_to_none`, as in `training_step`.

    >>> block = lambda: nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    >>> net = nn.Sequential(*(block() for _ in range(4)))
    >>> choice = fewest_checkpoints(net, (256, 64), budget_mb=0.9, optimizer="sgd")
    >>> choice.fits, choice.paths, choice.flops - choice.flops_before  # one linear layer again: 2 x 256·64·64
    (True, ('0',), 2097152)
    """
    check_positive("budget_mb", budget_mb)
    budget_bytes = int(budget_mb * 2**20)
    model, arguments = checked_model(model, inputs, kwargs)
    plan, accumulate = plan_of(model, **options), options.get("accumulate", 1)
    blocks = repeated_blocks(model)
    chosen: tuple[str, ...] = ()
    memory, flops_before = memory_and_flops(model, arguments, plan, accumulate)
    peak_bytes = before_bytes = memory.peak().memory.total
    flops = flops_before
    while peak_bytes > budget_bytes:
        held = memory.held_at_peak([path for path in blocks if path not in chosen])
        largest = sorted((path for path in held if held[path]), key=lambda path: -held[path])
        if not largest:
            break
        sums = accumulate_sums(held[path] for path in largest)
        enough = next((n for n, total in enumerate(sums, 1) if total >= peak_bytes - budget_bytes), len(largest))
        chosen = (*chosen, *largest[:enough])
        report_progress(f"checkpoints: {len(chosen)} chosen")
        memory, flops = memory_and_flops(model, arguments, replace(plan, checkpoint=chosen), accumulate)
        peak_bytes = memory.peak().memory.total
    return CheckpointChoice(chosen, peak_bytes, before_bytes, flops, flops_before, budget_bytes)
