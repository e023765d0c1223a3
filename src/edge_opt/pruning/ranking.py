"""Which channels matter least, how many of them go, and the widths that kernels run fast."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from edge_opt._support.checks import check_whole
from edge_opt.boards.targets import ResolvedTarget
from edge_opt.errors import PruningFailed
from edge_opt.measuring.machine import vector_bytes
from edge_opt.pruning.coupling import NONE, ChannelMap, Group, TensorDim
from edge_opt.pruning.reconstruction import reconstruction_scores
from edge_opt.records.compression import Importance
from edge_opt.records.fields import field, record
from edge_opt.tasks.batches import task_of

RoundTo = int | Literal["auto"]
IMPORTANCES: tuple[Importance, ...] = ("auto", "group", "reconstruction", "taylor", "random")
# Importances that need data, and what for.
NEED_DATA = {"taylor": "data to feel the loss", "reconstruction": "data to see what channels contribute"}
# Narrow layers are rounded to this at least where widths are chosen for speed: a vector of the smallest CPUs.
LEAST_MULTIPLE = 4
# A tile of two vectors; wider machines gain nothing from more than this, and narrow layers would lose too much.
WIDEST = 16
_X86 = ("core-", "xeon", "ryzen", "epyc", "celeron", "pentium", "athlon", "atom", "intel", "x86")


def unit_scores(
    model: nn.Module, channel_map: ChannelMap, importance: Importance, loader: Iterable[Any] | None, seed: int
) -> np.ndarray:
    """Return a score per unit; those with the lowest go first.

    "auto" is "group": near the best in benchmarks/pruning_accuracy.py, at a fraction of its time.
    """
    if importance == "random":
        check_whole("seed", seed, 0)
        return np.random.default_rng(seed).random(channel_map.units)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    # A layer's weight or a norm's scale: not a bias, a statistic, or a position's vector.
    named = [at for at in channel_map.tensors if at.tensor in parameters and at.tensor.endswith("weight")]
    weights = [at for at in named if parameters[at.tensor].is_floating_point()]
    if importance == "taylor":
        assert loader is not None
        changes = _loss_changes(model, parameters, weights, loader)
        return _mean_over_layers(channel_map, weights, changes)
    lengths = [_entry_norms(parameters[at.tensor], at, 2) ** 2 for at in weights]
    scores = _mean_over_layers(channel_map, weights, lengths)
    if importance == "reconstruction":
        assert loader is not None
        return reconstruction_scores(model, channel_map, loader, scores)
    return scores


def _entry_norms(tensor: torch.Tensor, at: TensorDim, norm: int) -> np.ndarray:
    """Return the norm of what each index of a dimension holds."""
    weight = tensor.detach().float()
    others = [dim for dim in range(weight.dim()) if dim != at.dim]
    lengths: torch.Tensor = torch.linalg.vector_norm(weight, norm, others) if others else weight.abs()
    norms: np.ndarray = lengths.double().cpu().numpy()
    if not np.isfinite(norms).all():
        raise PruningFailed(f"{at.tensor} has weights or gradients that are not finite; they cannot be ranked")
    return norms


def _mean_over_layers(
    channel_map: ChannelMap, tensors: Sequence[TensorDim], entry_scores: Sequence[np.ndarray]
) -> np.ndarray:
    """Return the mean over the layers of a unit, of the mean over its channels in each, scaled to mean 1 per group."""
    total, layers = np.zeros(channel_map.units), np.zeros(channel_map.units)
    for at, entries in zip(tensors, entry_scores, strict=True):
        owner = channel_map.tensors[at]
        is_owned = owner != NONE
        counts = np.bincount(owner[is_owned], minlength=channel_map.units)
        total += np.bincount(owner[is_owned], entries[is_owned], channel_map.units) / np.maximum(counts, 1)
        layers += counts > 0
    scores = total / np.maximum(layers, 1)
    for group in channel_map.groups:
        mean = scores[group.units].mean() if len(group.units) else 0.0
        if mean > 0:
            scores[group.units] /= mean
    return scores


def _loss_changes(
    model: nn.Module, parameters: Mapping[str, nn.Parameter], weights: Sequence[TensorDim], loader: Iterable[Any]
) -> list[np.ndarray]:
    """Return the first-order change of the loss without each entry of the weights: weight times gradient.

    Gradients are summed over the batches. The model is a copy in eval mode that nothing else uses.
    """
    with torch.enable_grad():
        for batch in task_of().batches(model, loader):
            batch.loss_of(batch.answer(model)).backward()  # type: ignore[no-untyped-call]
    changes = []
    for at in weights:
        weight = parameters[at.tensor]
        gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad
        changes.append(_entry_norms(weight.detach() * gradient, at, 1))
    return changes


@record
class Ranking:
    """Units with their scores, and how they may be removed."""

    channel_map: ChannelMap = field("The units and their groups.")
    scores: np.ndarray = field("The score of each unit.")
    round_to: int = field("Kept channels are a multiple of this.", default=1)
    is_adaptive: bool = field("Narrow layers are rounded to less.", default=False)

    def removed(self, ratios: Mapping[int, float], shifts: Mapping[int, int] | None = None) -> np.ndarray:
        """Return for each unit whether it goes; `ratios` gives the share of units to remove by number of the group.

        `shifts` lets a group keep that many rounding steps more or less.
        """
        removed = np.zeros(self.channel_map.units, dtype=bool)
        for number, ratio in ratios.items():
            group = self.channel_map.groups[number]
            if group.refused:
                continue
            step = rounding_step(group, self.multiple(group))
            kept = rounded(len(group.units) * (1 - ratio), group, self.multiple(group))
            kept = min(max(kept + (shifts or {}).get(number, 0) * step, step), len(group.units))
            # Stable: among equals the later ones go, whatever the machine.
            order = np.argsort(-self.scores[group.units], kind="stable")
            removed[group.units[order[kept:]]] = True
        return removed

    def multiple(self, group: Group) -> int:
        """Return what a group's channels are rounded to; if widths are chosen for speed, no more than half of them."""
        multiple, channels = self.round_to, len(group.units) * group.channels_per_unit
        while self.is_adaptive and multiple > LEAST_MULTIPLE and 2 * multiple > channels:
            multiple //= 2
        return multiple


def rounding_step(group: Group, round_to: int) -> int:
    """Return how many units make a multiple of `round_to` channels; 1 where the group has fewer."""
    step = round_to // int(np.gcd(round_to, group.channels_per_unit))
    return step if step <= len(group.units) else 1


def rounded(units: float, group: Group, round_to: int) -> int:
    """Return how many units of a group stay: the nearest count whose channels are a multiple of `round_to`.

    Halves stay. A group with fewer channels than `round_to` is not rounded. At least one unit stays.

    >>> group = Group("conv", np.arange(32), 1, None)
    >>> rounded(16, group, 8), rounded(19.2, group, 8), rounded(20, group, 8), rounded(0.3, group, 8)
    (16, 16, 24, 8)
    """
    step = rounding_step(group, round_to)
    kept = int(np.floor(units / step + 0.5)) * step
    return min(max(kept, step, 1), len(group.units))


def fast_multiple(target: ResolvedTarget | None = None) -> int:
    """Return the channels that fill a tile of two vectors, of this CPU or of the target: a width that kernels run fast.

    A convolution or product computes its outputs in tiles of two vectors. Channels beside a multiple of that cost as
    much as the next multiple, and often more, because they take a slower path: at half the MACs a ResNet took 0.95 /
    0.69 / 0.61 / 0.44 of its time for multiples of 1 / 4 / 8 / 16. Sums of int8 are kept in 32 bits, so int8 fills as
    many lanes as fp32.

    >>> from edge_opt.boards.targets import resolve_target
    >>> fast_multiple(resolve_target("raspberry-pi-4"))
    8
    """
    return min(2 * _lanes(target), WIDEST)


def _lanes(target: ResolvedTarget | None) -> int:
    """Return how many 32-bit numbers one vector of the target holds."""
    if target is None or target.calibration is not None:
        return vector_bytes() // 4
    core = None if target.platform is None else target.platform.core
    words = f"{target.name} {target.spec.title} {core or ''}".lower()
    if (target.platform or target.spec).engine != "cpu":
        return 8
    if target.spec.microcontroller is not None or (target.platform is not None and "mcu" in target.platform.kind):
        return 2
    return 8 if any(word in words for word in _X86) else 4
