"""What would make a training step smaller, each tried on a trace; and the fewest layers to checkpoint for a budget."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from edge_opt._support.checks import check_positive
from edge_opt._support.waiting import doing
from edge_opt.backward.optimizers import find_optimizer
from edge_opt.backward.step_report import checked_model, peak_of, plan_of
from edge_opt.backward.step_trace import StepPlan
from edge_opt.errors import EdgeOptError
from edge_opt.records import CheckpointChoice, Remedy, TrainingStep
from edge_opt.trace.inputs import CallArguments, InputSpec, materialize

_LEAST_SAVING = 0.01
_MOST_CANDIDATES = 48


def what_would_help(
    step: TrainingStep, model: nn.Module, arguments: CallArguments, plan: StepPlan, accumulate: int
) -> tuple[Remedy, ...]:
    """Every remedy that saves at least one per cent, largest first; what the model refuses is left out."""
    found: list[Remedy] = []
    for change, tried, call, batches in _tries(model, arguments, plan, accumulate):
        doing(f"trying what would help: {change}")
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
        make = find_optimizer(name, None, None)[1]
        yield f'optimizer="{name}"', replace(plan, optimizer=make), arguments, accumulate
    half = _halved(arguments)
    if half is not None:
        yield (
            "half the batch, accumulate twice as often",
            replace(plan, has_second_batch=True, adds_up=True),
            half,
            2 * accumulate,
        )
    last = _last_layers(model)
    if last:
        trains = {id(p): name.startswith(last) and plan.trains[id(p)] for name, p in model.named_parameters()}
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
        return materialize(arguments, half)
    except (EdgeOptError, IndexError):  # a batch of one, or an input without a batch
        return None


def fewest_checkpoints(
    model: nn.Module, inputs: Any = None, *, budget_mb: float, kwargs: Mapping[str, Any] | None = None, **options: Any
) -> CheckpointChoice:
    """The fewest blocks of a model to checkpoint so that a training step fits a budget, and what that costs.

    Blocks are added one by one, in each round the one that lowers the peak most; a round that lowers nothing takes the
    block that keeps most. Every peak is that of a trace of the whole step.

    Args:
        model: The model.
        inputs: As in `training_step`.
        budget_mb: Most MiB of the peak, weights and batch included.
        kwargs: Arguments of the model by name.
        options: `loss`, `optimizer`, `frozen`, `autocast` and `accumulate`, as in `training_step`.

    >>> block = lambda: nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    >>> net = nn.Sequential(*(block() for _ in range(4)))
    >>> found = fewest_checkpoints(net, (256, 64), budget_mb=0.9, optimizer="sgd")
    >>> found.fits, found.paths, found.flops - found.flops_before  # one linear layer again: 2 x 256·64·64
    (True, ('0',), 2097152)
    """
    check_positive("budget_mb", budget_mb)
    budget_bytes = int(budget_mb * 2**20)
    model, arguments = checked_model(model, inputs, kwargs)
    accumulate = options.get("accumulate", 1)
    plan = plan_of(model, **options)
    before_bytes, flops_before = peak_bytes, flops = peak_of(model, arguments, plan, accumulate)
    chosen: tuple[str, ...] = ()
    left = list(repeated_blocks(model))[:_MOST_CANDIDATES]
    while peak_bytes > budget_bytes and left:
        doing(f"checkpoints: {len(chosen)} chosen, {len(left)} blocks left to try")
        tried = {
            path: peak_of(model, arguments, replace(plan, checkpoint=(*chosen, path)), accumulate) for path in left
        }
        best = min(left, key=lambda path: tried[path])
        chosen, (peak_bytes, flops) = (*chosen, best), tried[best]
        left.remove(best)
    return CheckpointChoice(chosen, peak_bytes, before_bytes, flops, flops_before, budget_bytes)
