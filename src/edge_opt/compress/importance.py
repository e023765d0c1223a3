"""How much each unit of channels matters, by its weights or by what the loss would feel."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import nn

from edge_opt.compress.batches import classifier_loss, read_batches
from edge_opt.compress.channels import NONE, ChannelMap
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
        for batch in read_batches(model, loader):
            classifier_loss(model(*batch.args, **batch.kwargs), batch.labels).backward()  # type: ignore[no-untyped-call]
    found = {name: parameter.grad for name, parameter in model.named_parameters(remove_duplicate=False)}
    return {name: gradient for name, gradient in found.items() if gradient is not None}
