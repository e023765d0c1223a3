"""sensitivity(): what a model loses when one layer alone is pruned or quantized."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from edge_opt.compress.batches import Batch, logits_of, read_batches
from edge_opt.compress.channels import NONE
from edge_opt.compress.outcome import askable_layers
from edge_opt.compress.plan import Plan, make_plan, working_copy
from edge_opt.compress.pruning import check_path, check_share
from edge_opt.compress.simulation import PRECISIONS, at_precision, watching
from edge_opt.compress.spec import apply_spec
from edge_opt.errors import InvalidInput
from edge_opt.records import Importance, LayerSensitivity, PruneRequest, Sensitivity
from edge_opt.trace.guard import as_found

Metric = Callable[[nn.Module], float]


def sensitivity(
    model: nn.Module,
    loader: Iterable[Any],
    *,
    layers: Sequence[str] | None = None,
    prune: Sequence[float] = (0.25, 0.5),
    precisions: Sequence[str] = ("int8",),
    metric: Metric | None = None,
    batches: int | None = None,
    importance: Importance = "l1",
) -> Sensitivity:
    """What the model loses when one layer alone is pruned, or quantized: accuracy, and how far its outputs move.

    Each layer in `layers` (all unless given) really loses the shares in `prune`, along with the layers it is coupled
    with; quantization is simulated. `metric` is a function of the model, higher is better; without it, accuracy on
    the loader's (inputs, labels). `batches` is how many to use, all unless given; they are kept in memory.

    >>> from edge_opt.model import SmallCNN
    >>> batch = torch.randn(8, 1, 28, 28), torch.zeros(8, dtype=torch.int64)
    >>> found = sensitivity(SmallCNN(), [batch], prune=(0.5,))
    >>> [(row.path, row.change, row.amount) for row in found.rows]
    [('conv1', 'prune', '0.5'), ('conv1', 'quantize', 'int8'), ('conv2', 'prune', '0.5'),
     ('conv2', 'quantize', 'int8'), ('classifier', 'quantize', 'int8')]
    """
    for share in prune:
        check_share("a ratio in prune", share)
    for precision in precisions:
        if precision not in PRECISIONS:
            raise InvalidInput(f"precision is {precision!r}; simulated are {', '.join(PRECISIONS)}")
    for path in layers or ():
        check_path(model, path)
    with as_found([], training=False), torch.no_grad():
        base = working_copy(model)
        data = list(read_batches(base, loader, batches))
        trial = _Trial.begin(base, data, metric)
        chosen = {path: layer for path, layer in trial.layers.items() if layers is None or _is_chosen(path, layers)}
        plan = _plan(model, data, importance) if prune else None
        rows: list[LayerSensitivity] = []
        unchanged: list[tuple[str, str]] = []
        cache: dict[bytes, _Outcome] = {}
        for path, layer in chosen.items():
            if plan is not None:
                rows += _pruned_rows(trial, plan, path, prune, cache, unchanged)
            rows += [_quantized_row(trial, path, layer, precision) for precision in precisions]
    return Sensitivity(
        metric="accuracy" if metric is None else getattr(metric, "__name__", "metric"),
        baseline=trial.baseline,
        samples=sum(len(batch.labels) for batch in data),
        rows=tuple(rows),
        unchanged=tuple(dict.fromkeys(unchanged)),
    )


def _is_chosen(path: str, layers: Sequence[str]) -> bool:
    return any(path == each or path.startswith(f"{each}.") for each in layers)


def _plan(model: nn.Module, data: list[Batch], importance: Importance) -> Plan:
    request = PruneRequest(0.0, (), None, None, importance, 1, (), False, 0)
    with torch.enable_grad():
        return make_plan(model, list(data[0].args) or None, data[0].kwargs, request, data)


@dataclass(frozen=True, slots=True)
class _Outcome:
    """How a changed model does: its score, the distance of its outputs, the share of other first answers."""

    score: float
    error: float
    disagreement: float | None


@dataclass(frozen=True, slots=True)
class _Trial:
    """The unchanged model with its outputs, which variants are compared with."""

    base: nn.Module
    data: list[Batch]
    metric: Metric | None
    layers: dict[str, nn.Module]
    bounds: dict[str, tuple[float, float]]
    outputs: list[torch.Tensor]
    baseline: float

    @classmethod
    def begin(cls, base: nn.Module, data: list[Batch], metric: Metric | None) -> _Trial:
        layers: dict[str, nn.Module] = askable_layers(base)
        bounds: dict[str, tuple[float, float]] = {}
        with watching(layers, bounds):
            outputs = [logits_of(base(*batch.args, **batch.kwargs)) for batch in data]
        baseline = _accuracy(outputs, data) if metric is None else float(metric(base))
        return cls(base, data, metric, layers, bounds, outputs, baseline)

    def outcome(self, variant: nn.Module) -> _Outcome:
        outputs = [logits_of(variant(*batch.args, **batch.kwargs)) for batch in self.data]
        pairs = list(zip(outputs, self.outputs, strict=True))
        distance = sum(float((after.double() - before.double()).square().sum()) for after, before in pairs)
        length = sum(float(before.double().square().sum()) for _, before in pairs)
        changed = [(after.argmax(1) != before.argmax(1)) for after, before in pairs if after.dim() > 1]
        return _Outcome(
            score=_accuracy(outputs, self.data) if self.metric is None else float(self.metric(variant)),
            error=(distance / length) ** 0.5 if length else 0.0,
            disagreement=float(torch.cat([each.flatten() for each in changed]).double().mean()) if changed else None,
        )

    def row(self, path: str, amount: str, outcome: _Outcome, removed: float | None, note: str = "") -> LayerSensitivity:
        return LayerSensitivity(
            path=path,
            kind=type(self.layers[path]).__name__,
            change="quantize" if removed is None else "prune",
            amount=amount,
            score=outcome.score,
            score_change=outcome.score - self.baseline,
            output_error=outcome.error,
            disagreement=outcome.disagreement,
            removed=removed,
            note=note,
        )


def _pruned_rows(
    trial: _Trial,
    plan: Plan,
    path: str,
    shares: Sequence[float],
    cache: dict[bytes, _Outcome],
    unchanged: list[tuple[str, str]],
) -> Iterator[LayerSensitivity]:
    owner, group_of = plan.owners[path], plan.found.group_of()
    numbers = dict.fromkeys(group_of[owner[owner != NONE]].tolist())
    refused = [plan.found.groups[number].refused for number in numbers if plan.found.groups[number].refused]
    if not numbers or len(refused) == len(numbers):
        unchanged.append((path, f"not pruned: {refused[0] if refused else 'the dependency graph never reached it'}"))
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


def _quantized_row(trial: _Trial, path: str, layer: nn.Module, precision: str) -> LayerSensitivity:
    with at_precision(layer, precision, trial.bounds.get(path)):
        return trial.row(path, precision, trial.outcome(trial.base), None, "simulated")


def _accuracy(outputs: list[torch.Tensor], data: list[Batch]) -> float:
    right = total = 0
    for scores, batch in zip(outputs, data, strict=True):
        expected = (scores.shape[0], *scores.shape[2:]) if scores.dim() > 1 else None
        if tuple(batch.labels.shape) != expected:
            raise InvalidInput(
                f"outputs {tuple(scores.shape)} and labels {tuple(batch.labels.shape)} give no accuracy; pass metric="
            )
        right += int((scores.argmax(1) == batch.labels).sum())
        total += batch.labels.numel()
    return right / total
