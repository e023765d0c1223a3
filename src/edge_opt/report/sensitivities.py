"""Sensitivity of layers: how much a model loses when only one of them is changed, as a table of layers and changes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edge_opt.errors import InvalidInput

_PATHS = ("path", "layer", "module")
_CHANGES = ("change", "precision", "method", "kind")
_LOSSES = (
    ("accuracy_drop", "Accuracy lost"),
    ("output_error", "Relative error of the output"),
    ("drop", "Accuracy lost"),
    ("error", "Error"),
)
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


def sensitivities(found: Mapping[str, Any]) -> Sensitivities:
    """Read a sensitivity: rows under "layers", or a mapping of layers to a loss or to losses by change.

    >>> sensitivities({"layers": [{"path": "conv1", "precision": "int8", "accuracy_drop": 0.02}]}).losses
    ((0.02,),)
    >>> sensitivities({"conv1": {"prune 0.5": 0.1}, "fc": {"int8": 0.2}}).losses
    ((0.1, None), (None, 0.2))
    """
    rows = next((found[key] for key in ("layers", "rows") if isinstance(found.get(key), list)), None)
    measure, cells = _from_rows(rows) if rows is not None else ("Accuracy lost", _from_mapping(found))
    layers = tuple(dict.fromkeys(layer for layer, _ in cells))
    changes = tuple(dict.fromkeys(change for _, change in cells))
    return Sensitivities(
        measure, layers, changes, tuple(tuple(cells.get((layer, change)) for change in changes) for layer in layers)
    )


def _from_rows(rows: Sequence[Any]) -> tuple[str, dict[tuple[str, str], float | None]]:
    measured = [(name, title) for name, title in _LOSSES if any(isinstance(row, dict) and name in row for row in rows)]
    if rows and not measured:
        raise _unreadable(f"no row has {' or '.join(name for name, _ in _LOSSES)}")
    name, title = measured[0] if measured else _LOSSES[0]
    cells = {}
    for row in rows:
        path = next((row[key] for key in _PATHS if key in row), None) if isinstance(row, dict) else None
        if not isinstance(path, str):
            raise _unreadable(f"{str(row)[:60]!r} has no path")
        cells[path, _change(row)] = _number(row.get(name))
    return title, cells


def _change(row: Mapping[str, Any]) -> str:
    pruning = row.get("pruning")
    named = [str(row[key]) for key in _CHANGES if row.get(key) not in (None, "")]
    if isinstance(pruning, (int, float)) and pruning:
        return f"prune {pruning:g}"
    return named[0] if named else "changed"


def _from_mapping(found: Mapping[str, Any]) -> dict[tuple[str, str], float | None]:
    cells = {}
    for layer, losses in found.items():
        for change, loss in (losses if isinstance(losses, Mapping) else {"changed": losses}).items():
            cells[str(layer), str(change)] = _number(loss)
    return cells


def _number(value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _unreadable(f"{str(value)[:60]!r} is no number")
    return float(value) if math.isfinite(value) else None


def _unreadable(problem: str) -> InvalidInput:
    return InvalidInput(
        f'this is no sensitivity: {problem}; expected {{"layers": [{{"path": …, "precision": …, "accuracy_drop": …}}]}}'
    )
