"""Sensitivity of layers: how much a model loses when only one of them is changed, as a table of layers and changes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from edge_opt.errors import InvalidInput, UnreadableProfile
from edge_opt.records import LayerSensitivity, Sensitivity
from edge_opt.report.codec import from_plain

_NAMED = 3


@dataclass(frozen=True, slots=True)
class Sensitivities:
    """Loss by layer and change; None where a change was not tried on a layer."""

    measure: str
    layers: tuple[str, ...]
    changes: tuple[str, ...]
    losses: tuple[tuple[float | None, ...], ...]

    @property
    def caption(self) -> str:
        """The layers that lose most, in words."""
        worst = {
            layer: max((loss for loss in row if loss is not None), default=-math.inf)
            for layer, row in zip(self.layers, self.losses, strict=True)
        }
        ranked = sorted((layer for layer in worst if worst[layer] > -math.inf), key=lambda layer: -worst[layer])
        named = ", ".join(f"{layer[:60]} ({worst[layer]:.3g})" for layer in ranked[:_NAMED])
        return f"{self.measure} is largest at {named}." if named else "Nothing is known."


def sensitivities(found: Sensitivity) -> Sensitivities:
    """What each layer loses under each change; a score that rose is a loss below zero.

    >>> from edge_opt.records import LayerSensitivity, Sensitivity
    >>> row = LayerSensitivity("conv1", "Conv2d", "prune", "0.5", 0.75, -0.125, 0.1, None, 0.5, "")
    >>> sensitivities(Sensitivity("accuracy", 0.875, 64, (row,), ())).losses
    ((0.125,),)
    """
    cells = {(row.path, change_of(row)): _loss(row) for row in found.rows}
    layers = tuple(dict.fromkeys(path for path, _ in cells))
    changes = tuple(dict.fromkeys(change for _, change in cells))
    losses = tuple(tuple(cells.get((layer, change)) for change in changes) for layer in layers)
    return Sensitivities(f"{found.metric[:1].upper()}{found.metric[1:]} lost", layers, changes, losses)


def read_sensitivity(plain: Mapping[str, Any], source: str = "the document") -> Sensitivity:
    """The sensitivity whose `to_dict()` this is; `source` is what errors call it, such as a file's name."""
    try:
        return from_plain(Sensitivity, plain)
    except UnreadableProfile as error:
        raise InvalidInput(
            f"{source} is no sensitivity: {error}; expected what eo.sensitivity(...).to_dict() gives"
        ) from error


def change_of(row: LayerSensitivity) -> str:
    """As people call it: `prune 0.5`, `int8`."""
    return f"prune {row.amount}" if row.change == "prune" else row.amount


def _loss(row: LayerSensitivity) -> float | None:
    return 0.0 - row.score_change if math.isfinite(row.score_change) else None
