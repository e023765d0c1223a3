"""Which channels matter least, and how many of them go."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from edge_opt.compress.channels import NONE, ChannelMap, Group
from edge_opt.compress.task import task_of
from edge_opt.errors import InvalidInput, PruningFailed
from edge_opt.records import Importance

KINDS: tuple[Importance, ...] = ("l1", "l2", "taylor", "random")


def unit_scores(
    model: nn.Module, found: ChannelMap, kind: Importance, loader: Iterable[Any] | None, seed: int
) -> np.ndarray:
    """A score per unit. The layers of a unit count alike: each layer's scores are divided by their mean."""
    if kind == "random":
        return np.random.default_rng(seed).random(found.units)
    tensors = dict(model.named_parameters(remove_duplicate=False))
    gradients = _gradients(model, loader) if kind == "taylor" else {}
    total, layers = np.zeros(found.units), np.zeros(found.units)
    for place in found.scored:
        weight = tensors[place.tensor].detach().float()
        if kind == "taylor":
            gradient = gradients.get(place.tensor)
            weight = torch.zeros_like(weight) if gradient is None else weight * gradient.float()
        others = [dim for dim in range(weight.dim()) if dim != place.dim]
        norms = torch.linalg.vector_norm(weight, 2 if kind == "l2" else 1, others).double().cpu().numpy()
        if not np.isfinite(norms).all():
            raise PruningFailed(f"{place.tensor} has weights or gradients that are not finite; they cannot be ranked")
        owner = found.tensors[place]
        mine = owner != NONE
        scores = np.bincount(owner[mine], norms[mine], found.units) / np.maximum(
            np.bincount(owner[mine], minlength=found.units), 1
        )
        present = np.bincount(owner[mine], minlength=found.units) > 0
        mean = scores[present].mean() if present.any() else 0.0
        total += scores / mean if mean > 0 else scores
        layers += present
    return total / np.maximum(layers, 1)


def _gradients(model: nn.Module, loader: Iterable[Any] | None) -> dict[str, torch.Tensor]:
    """Gradients of the loss summed over the batches; the model is a copy, in eval mode."""
    if loader is None:
        raise InvalidInput('importance="taylor" needs data to feel the loss; pass loader= with (inputs, labels)')
    model.zero_grad()
    with torch.enable_grad():
        for batch in task_of().batches(model, loader):
            batch.loss_of(batch.answer(model)).backward()  # type: ignore[no-untyped-call]
    found = {name: parameter.grad for name, parameter in model.named_parameters(remove_duplicate=False)}
    return {name: gradient for name, gradient in found.items() if gradient is not None}


@dataclass(frozen=True, slots=True)
class Ranking:
    """Units with their scores, and how they may be removed."""

    found: ChannelMap
    scores: np.ndarray
    round_to: int
    is_global: bool

    def removed(self, ratios: Mapping[int, float], shifts: Mapping[int, int] | None = None) -> np.ndarray:
        """For each unit whether it goes; `ratios` gives the share of units to remove by number of the group.

        `shifts` lets a group keep so many steps of rounding more, or less.
        """
        gone = np.zeros(self.found.units, dtype=bool)
        wanted = {number: ratio for number, ratio in ratios.items() if not self.found.groups[number].refused}
        for number, leave in (self._left_globally(wanted) if self.is_global else self._left(wanted)).items():
            group = self.found.groups[number]
            kept = rounded(leave, group, self.round_to)
            step = rounding_step(group, self.round_to)
            kept = min(max(kept + (shifts or {}).get(number, 0) * step, step), len(group.units))
            # Stable: among equals the later ones go, whatever the machine.
            order = np.argsort(-self.scores[group.units], kind="stable")
            gone[group.units[order[kept:]]] = True
        return gone

    def _left(self, ratios: dict[int, float]) -> dict[int, float]:
        return {number: len(self.found.groups[number].units) * (1 - ratio) for number, ratio in ratios.items()}

    def _left_globally(self, ratios: dict[int, float]) -> dict[int, float]:
        """Units of all groups with the same ratio ranked together: important groups lose less."""
        left: dict[int, float] = {}
        for ratio in set(ratios.values()):
            numbers = [number for number in ratios if ratios[number] == ratio]
            groups = [self.found.groups[number] for number in numbers]
            owner = np.repeat(numbers, [len(group.units) for group in groups])
            sizes = np.repeat([group.channels_per_unit for group in groups], [len(group.units) for group in groups])
            order = np.argsort(np.concatenate([self.scores[group.units] for group in groups]), kind="stable")
            going = order[: int(np.searchsorted(np.cumsum(sizes[order]), ratio * sizes.sum(), side="right"))]
            for number, group in zip(numbers, groups, strict=True):
                left[number] = len(group.units) - int((owner[going] == number).sum())
        return left


def rounding_step(group: Group, round_to: int) -> int:
    """How many units make a multiple of `round_to` channels; 1 where the group has fewer."""
    step = round_to // int(np.gcd(round_to, group.channels_per_unit))
    return step if step <= len(group.units) else 1


def rounded(left: float, group: Group, round_to: int) -> int:
    """How many units of a group stay: the nearest count whose channels are a multiple of `round_to`; halves stay.

    A group with fewer channels than `round_to` is not rounded. At least one unit stays.

    >>> group = Group("conv", np.arange(32), 1, None)
    >>> rounded(16, group, 8), rounded(19.2, group, 8), rounded(20, group, 8), rounded(0.3, group, 8)
    (16, 16, 24, 8)
    """
    step = rounding_step(group, round_to)
    kept = int(np.floor(left / step + 0.5)) * step
    return min(max(kept, step, 1), len(group.units))
