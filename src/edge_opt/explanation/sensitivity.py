"""Measure the effect of changing each layer alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from edge_opt._support.checks import check_one_of
from edge_opt._support.progress import report_progress, show_progress
from edge_opt._support.unchanged import unchanged
from edge_opt.loading import ModelLike, check_can_change, resolve_call
from edge_opt.pruning.coupling import NONE
from edge_opt.pruning.plan import PruningPlan, askable_layers, make_plan, working_copy
from edge_opt.pruning.prune import check_path, check_share
from edge_opt.pruning.recipe import apply_spec
from edge_opt.quantization.fake_quantization import at_precision, watching
from edge_opt.records.compression import Importance, LayerSensitivity, Sensitivity
from edge_opt.records.sweeps import MetricDirection
from edge_opt.tasks.batches import Batch, Task, task_of
from edge_opt.tasks.metrics import count_samples, first_tensor, takes_model

PRECISIONS = ("int8", "fp16", "bf16")


OfModel = Callable[[nn.Module], float]


def sensitivity(
    model: ModelLike,
    loader: Iterable[Any],
    *,
    layers: Sequence[str] | None = None,
    prune: Sequence[float] = (0.25, 0.5),
    precisions: Sequence[str] = ("int8",),
    metric: Any = "accuracy",
    metric_direction: MetricDirection | None = None,
    loss: Any = None,
    forward: Any = None,
    collate: Any = None,
    batches: int | None = None,
    importance: Importance = "auto",
) -> Sensitivity:
    """Measure how accuracy and outputs change when one layer alone is pruned or quantized.

    Pruning is real: the layer and those coupled with it lose their least important channels. Quantization is simulated
    in floating point: weights per channel, inputs per tensor between their smallest and largest value.

    Args:
        model: A module, which is not modified, or its reference, as in `profile`.
        loader: Batches of (inputs, labels); they are kept in memory.
        layers: Paths of the layers to change, with everything inside them; default: all.
        prune: Shares of channels to remove.
        precisions: Types of the numbers to simulate.
        metric: Quality metric: accuracy, top5, f1, miou, mae, rmse, r2, auroc, perplexity, wer, a function of
            (outputs, targets), or a function of the model alone, higher is better.
        metric_direction: Whether a "higher" or a "lower" metric is better; needed for a function whose name is unknown.
        loss: Loss for `importance="taylor"`: a name or a function, as in `finetune`.
        forward: A function of (model, batch) that returns the outputs; without it the batch's inputs are passed.
        collate: A function that makes a batch of what the loader yields, such as a list of samples.
        batches: How many batches to use; default: all.
        importance: How channels are ranked, as in `prune`.

    >>> from edge_opt.model import SmallCNN
    >>> batch = torch.randn(8, 1, 28, 28), torch.zeros(8, dtype=torch.int64)
    >>> result = sensitivity(SmallCNN(), [batch], prune=(0.5,))
    >>> [(row.path, row.change, row.amount) for row in result.rows]
    [('conv1', 'prune', '0.5'), ('conv1', 'quantize', 'int8'), ('conv2', 'prune', '0.5'),
     ('conv2', 'quantize', 'int8'), ('classifier', 'quantize', 'int8')]
    """
    module, *_ = resolve_call(model)
    check_can_change(module, "changed layer by layer")
    for share in prune:
        check_share("a ratio in prune", share)
    for precision in precisions:
        check_one_of("precision", precision, PRECISIONS)
    for path in layers or ():
        check_path(module, path)
    own = metric if callable(metric) and takes_model(metric) else None
    task = task_of("accuracy" if own or metric is None else metric, loss, forward, collate, metric_direction)
    with show_progress(), unchanged([], training=False), torch.no_grad():
        base = working_copy(module)
        report_progress("sensitivity: reading batches")
        data = list(task.batches(base, loader, batches))
        trial = _Trial.begin(base, data, task, own)
        chosen = {path: layer for path, layer in trial.layers.items() if layers is None or _is_within(path, layers)}
        plan = _plan(module, data, task, importance) if prune else None
        rows: list[LayerSensitivity] = []
        untouched: list[tuple[str, str]] = []
        cache: dict[bytes, dict[str, Any]] = {}
        for number, (path, layer) in enumerate(chosen.items(), start=1):
            report_progress(f"sensitivity: layer {number} of {len(chosen)}, {path}")
            if plan is not None:
                rows += _pruned_rows(trial, plan, path, prune, cache, untouched)
            for precision in precisions:
                with at_precision(layer, precision, trial.bounds.get(path)):
                    rows.append(trial.row(path, precision, trial.outcome(trial.base), None, "simulated"))
    return Sensitivity(
        metric=task.metric.name if own is None else getattr(own, "__name__", "metric"),
        baseline=trial.baseline,
        samples=sum(count_samples(batch.labels) for batch in data),
        rows=tuple(rows),
        unchanged=tuple(dict.fromkeys(untouched)),
        direction=task.metric.direction,
    )


def _is_within(path: str, modules: Iterable[str]) -> bool:
    return any(path == name or path.startswith(f"{name}.") for name in modules)


def _plan(model: nn.Module, data: list[Batch], task: Task, importance: Importance) -> PruningPlan:
    with torch.enable_grad():
        call = task.call(model, data[0])
        return make_plan(model, list(call.args) or None, call.kwargs, importance=importance, data=data)


@dataclass(frozen=True, slots=True)
class _Trial:
    """The unchanged model with its outputs, which variants are compared with."""

    base: nn.Module
    data: list[Batch]
    task: Task
    own: OfModel | None
    layers: dict[str, nn.Module]
    bounds: dict[str, tuple[float, float]]
    outputs: list[torch.Tensor]
    baseline: float

    @classmethod
    def begin(cls, base: nn.Module, data: list[Batch], task: Task, own: OfModel | None) -> _Trial:
        layers: dict[str, nn.Module] = askable_layers(base)
        with watching(layers) as bounds:
            answers = [batch.answer(base) for batch in data]
        baseline = _score(answers, data, task) if own is None else float(own(base))
        return cls(base, data, task, own, layers, bounds, [first_tensor(answer) for answer in answers], baseline)

    def outcome(self, variant: nn.Module) -> dict[str, Any]:
        """Return how a changed model does: the fields of a row that follow from its outputs."""
        answers = [batch.answer(variant) for batch in self.data]
        outputs = [first_tensor(answer) for answer in answers]
        pairs = list(zip(outputs, self.outputs, strict=True))
        distance = sum(float((after.double() - before.double()).square().sum()) for after, before in pairs)
        length = sum(float(before.double().square().sum()) for _, before in pairs)
        changed = [a.argmax(1) != b.argmax(1) for a, b in pairs if a.dim() > 1 and a.shape[1] > 1]
        score = _score(answers, self.data, self.task) if self.own is None else float(self.own(variant))
        return {
            "score": score,
            "score_change": score - self.baseline,
            "output_error": (distance / length) ** 0.5 if length else 0.0,
            "disagreement": float(torch.cat([each.flatten() for each in changed]).double().mean()) if changed else None,
        }

    def row(self, path: str, amount: str, outcome: dict[str, Any], removed: float | None, note: str) -> Any:
        return LayerSensitivity(
            path=path,
            kind=type(self.layers[path]).__name__,
            change="quantize" if removed is None else "prune",
            amount=amount,
            removed=removed,
            note=note,
            **outcome,
        )


def _pruned_rows(
    trial: _Trial,
    plan: PruningPlan,
    path: str,
    shares: Sequence[float],
    cache: dict[bytes, dict[str, Any]],
    untouched: list[tuple[str, str]],
) -> Iterator[LayerSensitivity]:
    owner = plan.owners[path]
    numbers = plan.channel_map.groups_of(owner)
    refused = [plan.channel_map.groups[number].refused for number in numbers if plan.channel_map.groups[number].refused]
    if not numbers or len(refused) == len(numbers):
        untouched.append((path, f"not pruned: {refused[0] if refused else 'the dependency graph never reached it'}"))
        return
    coupled = [other for other, units in plan.owners.items() if other != path and np.isin(units, owner).any()]
    for share in shares:
        removed = plan.ranking.removed(dict.fromkeys(numbers, share))
        key = removed.tobytes()
        if key not in cache:
            cache[key] = trial.outcome(apply_spec(trial.base, plan.spec(removed)))
        gone = float(removed[owner[owner != NONE]].sum()) / len(owner)
        note = f"together with {', '.join(coupled)}" if coupled else ""
        yield trial.row(path, f"{share:g}", cache[key], gone, note)


def _score(answers: list[Any], data: list[Batch], task: Task) -> float:
    pairs = zip(answers, (batch.labels for batch in data), strict=True)
    return task.metric.scored(pairs, resamples=0).value
