"""What would make a training step smaller, each tried on a trace; and the fewest layers to checkpoint for a budget."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate as accumulate_sums
from typing import Any

import torch
from torch import nn

from edge_opt._support.checks import check_positive
from edge_opt._support.waiting import doing
from edge_opt.errors import EdgeOptError
from edge_opt.records.training_steps import CheckpointChoice, Remedy, TrainingStep
from edge_opt.trace.inputs import CallArguments, InputSpec, map_arguments
from edge_opt.training_steps.optimizers import find_optimizer
from edge_opt.training_steps.step_report import checked_model, memory_and_flops, peak_of, plan_of
from edge_opt.training_steps.step_trace import StepPlan

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
    """The fewest blocks of a model to checkpoint so that a training step fits a budget, and what that costs.

    In each round, the blocks that hold most at the peak are added, as few as could be enough; a trace of the whole step
    then says where its peak is. What blocks hold at the first peak bounds what any set of them can save, so the answer
    says whether it is known to be the smallest.

    Args:
        model: The model.
        inputs: As in `training_step`.
        budget_mb: Most MiB of the peak, weights and batch included.
        kwargs: Arguments of the model by name.
        options: `loss`, `optimizer`, `frozen`, `autocast`, `accumulate` and `set_to_none`, as in `training_step`.

    >>> block = lambda: nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    >>> net = nn.Sequential(*(block() for _ in range(4)))
    >>> found = fewest_checkpoints(net, (256, 64), budget_mb=0.9, optimizer="sgd")
    >>> found.fits, found.paths, found.flops - found.flops_before  # one linear layer again: 2 x 256·64·64
    (True, ('0',), 2097152)
    """
    check_positive("budget_mb", budget_mb)
    budget_bytes = int(budget_mb * 2**20)
    model, arguments = checked_model(model, inputs, kwargs)
    plan = plan_of(model, **options)
    search = _Search(model, arguments, plan, options.get("accumulate", 1), budget_bytes)
    before_bytes, flops_before = search.peak_bytes, search.flops
    blocks = repeated_blocks(model)
    fewest = _enough(search.held(blocks), before_bytes - budget_bytes) if before_bytes > budget_bytes else 0
    if fewest is None:
        search.take(blocks)  # not enough, and the least there is
    while search.excess > 0 and (held := search.held([path for path in blocks if path not in search.chosen])):
        largest = sorted(held, key=lambda path: -held[path])
        search.take((*search.chosen, *largest[: _enough(held, search.excess)]))
    if search.excess > 0 and fewest is not None:
        search.one_by_one(blocks[:_MOST_CANDIDATES])
    for path in search.chosen if search.excess <= 0 and len(search.chosen) > (fewest or 0) + 1 else ():
        search.drop(path)
    is_smallest = search.excess <= 0 and len(search.chosen) == fewest
    return CheckpointChoice(
        search.chosen, search.peak_bytes, before_bytes, search.flops, flops_before, budget_bytes, is_smallest
    )


class _Search:
    """A set of blocks to checkpoint, with the memory of a step that does so."""

    def __init__(
        self, model: nn.Module, arguments: CallArguments, plan: StepPlan, accumulate: int, budget_bytes: int
    ) -> None:
        self._subject = model, arguments, plan, accumulate
        self._budget_bytes = budget_bytes
        self.take(())

    def take(self, chosen: tuple[str, ...]) -> None:
        """Checkpoint these."""
        model, arguments, plan, accumulate = self._subject
        doing(f"checkpoints: {len(chosen)} chosen")
        self.chosen = chosen
        self._memory, self.flops = memory_and_flops(model, arguments, replace(plan, checkpoint=chosen), accumulate)
        self.peak_bytes = self._memory.peak().memory.total

    def drop(self, path: str) -> None:
        """Do without a block, where the budget is kept without it."""
        before = self.chosen
        self.take(tuple(other for other in before if other != path))
        if self.excess > 0:
            self.take(before)

    def one_by_one(self, blocks: Sequence[str]) -> None:
        """Begin anew, and add in each round the block that lowers the peak most.

        For budgets where what holds most at the peak is computed again at another moment that is too full.
        """
        self.take(())
        while self.excess > 0 and (left := [path for path in blocks if path not in self.chosen]):
            chosen, peaks = self.chosen, {}
            for path in left:
                self.take((*chosen, path))
                peaks[path] = self.peak_bytes
            self.take((*chosen, min(left, key=peaks.__getitem__)))

    @property
    def excess(self) -> int:
        """Bytes above the budget."""
        return self.peak_bytes - self._budget_bytes

    def held(self, paths: Sequence[str]) -> dict[str, int]:
        """Those of the blocks that hold something at the peak, with its bytes."""
        return {path: nbytes for path, nbytes in self._memory.held_at_peak(paths).items() if nbytes}


def _enough(held: Mapping[str, int], excess: int) -> int | None:
    """How many of the largest hold as much as there is too much; None where all together do not."""
    sums = accumulate_sums(sorted(held.values(), reverse=True))
    return next((count for count, total in enumerate(sums, 1) if total >= excess), None)
