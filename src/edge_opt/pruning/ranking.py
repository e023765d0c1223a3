"""Which channels matter least, and how many of them go."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from edge_opt.errors import InvalidInput, PruningFailed
from edge_opt.pruning.coupling import NONE, ChannelMap, Group, TensorDim
from edge_opt.pruning.reconstruction import reconstruction_scores
from edge_opt.records.compression import Importance
from edge_opt.tasks.batches import task_of

KINDS: tuple[Importance, ...] = ("auto", "group", "reconstruction", "taylor", "bn_scale", "l1", "l2", "random")
# Narrow layers are rounded to this at least where widths are chosen for speed: a vector of the smallest CPUs.
LEAST_MULTIPLE = 4
# Those that need to see data, and what for.
NEED_DATA = {"taylor": "data to feel the loss", "reconstruction": "data to see what channels contribute"}


def best_kind(kind: Importance) -> Importance:
    """What "auto" stands for: near the best in benchmarks/pruning_accuracy.py, at a fraction of its time."""
    return "group" if kind == "auto" else kind


def unit_scores(
    model: nn.Module, found: ChannelMap, kind: Importance, loader: Iterable[Any] | None, seed: int
) -> np.ndarray:
    """A score per unit."""
    kind = best_kind(kind)
    if kind == "random":
        return np.random.default_rng(seed).random(found.units)
    if kind in NEED_DATA and loader is None:
        raise InvalidInput(f'importance="{kind}" needs {NEED_DATA[kind]}; pass loader= with (inputs, labels)')
    if kind == "taylor":
        assert loader is not None
        return _felt_by_the_loss(model, found, loader)
    tensors = dict(model.named_parameters(remove_duplicate=False))
    if kind in ("l1", "l2"):
        # The layers of a unit count alike: each layer's scores are divided by their mean.
        lengths = [_entries(tensors[place.tensor], place, 2 if kind == "l2" else 1) for place in found.scored]
        return _over_layers(found, found.scored, lengths, is_levelled=True)
    places = [place for place in found.tensors if _is_weight(place, tensors)]
    lengths = [_entries(tensors[place.tensor], place, 2) ** 2 for place in places]
    scores = _over_layers(found, places, lengths, is_levelled=False)
    if kind == "bn_scale":
        norms = [place for place in places if tensors[place.tensor].dim() == 1]
        scales = [_entries(tensors[place.tensor], place, 1) for place in norms]
        return _where_known(found, norms, _over_layers(found, norms, scales, is_levelled=False), scores)
    if kind == "reconstruction":
        assert loader is not None
        return reconstruction_scores(model, found, loader, scores)
    return scores


def _is_weight(place: TensorDim, tensors: Mapping[str, torch.Tensor]) -> bool:
    """A weight of a layer or the scale of a norm: not a bias, not a statistic, not a position's vector."""
    return place.tensor in tensors and place.tensor.endswith("weight") and tensors[place.tensor].is_floating_point()


def _entries(tensor: torch.Tensor, place: TensorDim, norm: int) -> np.ndarray:
    """The length of what each index of a dimension holds."""
    weight = tensor.detach().float()
    others = [dim for dim in range(weight.dim()) if dim != place.dim]
    found: np.ndarray = (
        (torch.linalg.vector_norm(weight, norm, others) if others else weight.abs()).double().cpu().numpy()
    )
    if not np.isfinite(found).all():
        raise PruningFailed(f"{place.tensor} has weights or gradients that are not finite; they cannot be ranked")
    return found


def _over_layers(
    found: ChannelMap, places: Sequence[TensorDim], lengths: Sequence[np.ndarray], is_levelled: bool
) -> np.ndarray:
    """The mean over the layers of a unit, of the mean over its channels in each; groups are then scaled to mean 1."""
    total, layers = np.zeros(found.units), np.zeros(found.units)
    for place, entries in zip(places, lengths, strict=True):
        owner = found.tensors[place]
        mine = owner != NONE
        counts = np.bincount(owner[mine], minlength=found.units)
        scores = np.bincount(owner[mine], entries[mine], found.units) / np.maximum(counts, 1)
        present = counts > 0
        mean = scores[present].mean() if is_levelled and present.any() else 1.0
        total += scores / mean if mean > 0 else scores
        layers += present
    scores = total / np.maximum(layers, 1)
    return scores if is_levelled else _scaled(found, scores)


def _scaled(found: ChannelMap, scores: np.ndarray) -> np.ndarray:
    scaled = scores.copy()
    for group in found.groups:
        mean = scores[group.units].mean() if len(group.units) else 0.0
        if mean > 0:
            scaled[group.units] /= mean
    return scaled


def _where_known(
    found: ChannelMap, places: Sequence[TensorDim], scores: np.ndarray, otherwise: np.ndarray
) -> np.ndarray:
    """Scores for the groups all of whose units stand in these tensors, and others for the rest."""
    known = np.zeros(found.units, dtype=bool)
    for place in places:
        owner = found.tensors[place]
        known[owner[owner != NONE]] = True
    result = otherwise.copy()
    for group in found.groups:
        if known[group.units].all():
            result[group.units] = scores[group.units]
    return result


def _felt_by_the_loss(model: nn.Module, found: ChannelMap, loader: Iterable[Any]) -> np.ndarray:
    """What the loss feels of each unit, to first order: weight times gradient, over all layers of the group."""
    tensors = dict(model.named_parameters(remove_duplicate=False))
    gradients = _gradients(model, loader)
    places = [place for place in found.tensors if _is_weight(place, tensors)]
    felt = []
    for place in places:
        gradient = gradients.get(place.tensor)
        weight = tensors[place.tensor]
        felt.append(_entries(torch.zeros_like(weight) if gradient is None else weight.detach() * gradient, place, 1))
    return _over_layers(found, places, felt, is_levelled=False)


def _gradients(model: nn.Module, loader: Iterable[Any]) -> dict[str, torch.Tensor]:
    """Gradients of the loss summed over the batches; the model is a copy, in eval mode."""
    model.zero_grad()
    with torch.enable_grad():
        for batch in task_of().batches(model, loader):
            batch.loss_of(batch.answer(model)).backward()  # type: ignore[no-untyped-call]
    found = {name: parameter.grad for name, parameter in model.named_parameters(remove_duplicate=False)}
    model.zero_grad()
    return {name: gradient for name, gradient in found.items() if gradient is not None}


@dataclass(frozen=True, slots=True)
class Ranking:
    """Units with their scores, and how they may be removed."""

    found: ChannelMap
    scores: np.ndarray
    round_to: int
    is_global: bool
    is_adaptive: bool = False

    def removed(self, ratios: Mapping[int, float], shifts: Mapping[int, int] | None = None) -> np.ndarray:
        """For each unit whether it goes; `ratios` gives the share of units to remove by number of the group.

        `shifts` lets a group keep so many steps of rounding more, or less.
        """
        gone = np.zeros(self.found.units, dtype=bool)
        wanted = {number: ratio for number, ratio in ratios.items() if not self.found.groups[number].refused}
        for number, leave in (self._left_globally(wanted) if self.is_global else self._left(wanted)).items():
            group = self.found.groups[number]
            step = rounding_step(group, self.multiple(group))
            kept = rounded(leave, group, self.multiple(group))
            kept = min(max(kept + (shifts or {}).get(number, 0) * step, step), len(group.units))
            # Stable: among equals the later ones go, whatever the machine.
            order = np.argsort(-self.scores[group.units], kind="stable")
            gone[group.units[order[kept:]]] = True
        return gone

    def multiple(self, group: Group) -> int:
        """What the channels of a group are rounded to; where widths are chosen for speed, no more than half of them."""
        multiple, channels = self.round_to, len(group.units) * group.channels_per_unit
        while self.is_adaptive and multiple > LEAST_MULTIPLE and 2 * multiple > channels:
            multiple //= 2
        return multiple

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
