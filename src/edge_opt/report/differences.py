"""Differences in words: which layers to show, and what a comparison comes to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from string import ascii_uppercase

from edge_opt import units
from edge_opt.errors import InvalidInput
from edge_opt.records import ComparedLayer, FigureUnit, LayerFigures, ModelComparison

_FORMATS: dict[FigureUnit, Callable[[float], str]] = {
    "count": units.count,
    "bytes": units.size,
    "time": units.duration,
    "energy": units.energy,
    "share": lambda value: f"{value * 100:.2f}%",
    "rate": lambda value: f"{value:.4g}",
}
# With less in common than this, a table of differences says little.
_RELATED = 0.25


@dataclass(frozen=True, slots=True)
class LayerFigure:
    """One figure of a layer: its key for sorting, its title, its unit, and how to read it."""

    key: str
    title: str
    unit: FigureUnit
    read: Callable[[LayerFigures], float | None]


LAYER_FIGURES = (
    LayerFigure("macs", "MACs", "count", lambda layer: layer.macs),
    LayerFigure("params", "Params", "count", lambda layer: layer.params),
    LayerFigure("time", "Time", "time", lambda layer: layer.measured_s),
    LayerFigure("bytes", "Moved", "bytes", lambda layer: layer.bytes_moved),
    LayerFigure("peak", "Peak", "bytes", lambda layer: layer.peak_live_bytes),
    LayerFigure("activations", "Activations", "bytes", lambda layer: layer.activation_bytes),
    LayerFigure("flops", "FLOPs", "count", lambda layer: layer.flops),
)
SORT_KEYS = tuple(figure.key for figure in LAYER_FIGURES)


def letter(model: int) -> str:
    """What a model is called in a header: A is the baseline.

    >>> letter(0), letter(1), letter(27)
    ('A', 'B', 'AB')
    """
    before = letter(model // 26 - 1) if model >= 26 else ""
    return before + ascii_uppercase[model % 26]


def text(unit: FigureUnit, value: float | None) -> str:
    """A figure with its unit; a dash where it is not known."""
    return units.DASH if value is None else _FORMATS[unit](value)


def signed(unit: FigureUnit, difference: float | None) -> str:
    """A difference with its sign and unit."""
    if difference is None:
        return units.DASH
    sign = "±" if difference == 0 else "+" if difference > 0 else units.MINUS
    return sign + _FORMATS[unit](abs(difference))


def known_figures(comparison: ModelComparison) -> tuple[LayerFigure, ...]:
    """The figures that at least one layer has."""
    layers = [layer for row in comparison.layers for layer in row.layers if layer is not None]
    return tuple(figure for figure in LAYER_FIGURES if any(figure.read(layer) is not None for layer in layers))


def check_choice(sort: str | None, top: int | None) -> None:
    """Refuse what cannot be shown, before any work is done."""
    if sort is not None and sort not in SORT_KEYS:
        raise InvalidInput(f"cannot sort by {sort!r}; use one of {', '.join(SORT_KEYS)}")
    if top is not None and top < 1:
        raise InvalidInput(f"top is {top}; it must be at least 1")


def chosen_rows(
    comparison: ModelComparison, sort: str | None = None, top: int | None = None, *, everything: bool = False
) -> tuple[ComparedLayer, ...]:
    """The layers that differ, or all of them: in order, or by the size of the difference, largest first."""
    check_choice(sort, top)
    rows = [row for row in comparison.layers if everything or not row.is_same]
    if sort is not None or top is not None:
        figure = next(figure for figure in LAYER_FIGURES if figure.key == (sort or "macs"))
        rows.sort(key=lambda row: largest_difference(row, figure), reverse=True)
    return tuple(rows[:top])


def largest_difference(row: ComparedLayer, figure: LayerFigure) -> float:
    """How far any model is from the baseline in one figure; a layer that is not there has none of it."""
    values = [0.0 if layer is None else figure.read(layer) or 0.0 for layer in row.layers]
    return max(abs(value - values[0]) for value in values)


def label(row: ComparedLayer) -> str:
    """The layer's path; where it was renamed, the old and the new one."""
    names = list(dict.fromkeys(layer.label or "(the model itself)" for layer in row.layers if layer is not None))
    return " → ".join(names)


def kind(row: ComparedLayer) -> str:
    """The layer's type; where it was replaced, the old and the new one."""
    return " → ".join(dict.fromkeys(layer.kind for layer in row.layers if layer is not None))


def changes(row: ComparedLayer) -> str:
    """What became of the layer in each model; of several, in those where something did."""
    found = [(letter(model), row.change(model)) for model in range(1, len(row.layers))]
    if len(found) == 1:
        return found[0][1]
    return ", ".join(f"{name} {change}" for name, change in found if change not in ("same", "absent"))


def relations(comparison: ModelComparison) -> list[str]:
    """How much each model has in common with the first, in one sentence each; none where no layers are known."""
    sentences = []
    first = comparison.names[0]
    for model, name in enumerate(comparison.names[1:], start=1):
        share = comparison.aligned_share(model)
        if share is None:
            continue
        aligned = comparison.aligned(model)
        most = max(comparison.layer_count(0), comparison.layer_count(model))
        what = f"{aligned} of {most} layers align"
        if aligned == 0:
            sentences.append(
                f"{first} and {name} have nothing in common: {what}; the totals are all there is to compare"
            )
        elif share < _RELATED:
            sentences.append(f"{first} and {name} are hardly related: only {what}")
        else:
            sentences.append(f"{what}{_counts(comparison, model)}")
    return sentences


def _counts(comparison: ModelComparison, model: int) -> str:
    found = [row.change(model) for row in comparison.layers]
    counted = ((what, sum(change == what for change in found)) for what in ("changed", "renamed", "added", "removed"))
    parts = [f"{number} {what}" for what, number in counted if number]
    return f": {', '.join(parts)}" if parts else ", none of them changed"


def verdicts(comparison: ModelComparison) -> list[str]:
    """What was shown about each model's latency, with the interval that it rests on."""
    sentences = []
    for name, found in zip(comparison.names[1:], comparison.latencies, strict=True):
        if found is None:
            continue
        low, high = units.change(found.ratio_interval.low - 1), units.change(found.ratio_interval.high - 1)
        what = "no difference in latency was shown" if found.verdict == "equal" else f"{found.verdict} than the first"
        clock = ", by CPU time" if found.clock == "cpu" else ""
        sentences.append(f"{name}: {what} ({units.change(found.ratio - 1)}, 95 % interval {low} to {high}{clock})")
    return sentences


def notes(comparison: ModelComparison) -> list[str]:
    """Everything to say under the tables."""
    unpriced = [name for name, bound in zip(comparison.names, comparison.is_lower_bound, strict=True) if bound]
    bounds = [f"{', '.join(unpriced)}: operators are unpriced, so the work is a lower bound"] if unpriced else []
    return [*relations(comparison), *verdicts(comparison), *bounds, *comparison.remarks]
