"""Comparisons of models as sheets, JSON and CSV."""

from __future__ import annotations

import os
from collections.abc import Sequence
from string import ascii_uppercase
from typing import Any

from edge_opt import units
from edge_opt._support.json import dumps_document, read_document, to_plain
from edge_opt.errors import UnreadableProfile
from edge_opt.records.profiles import ComparedFigure, ComparedLayer, FigureUnit, LayerFigures, ModelComparison
from edge_opt.report.save import csv_text, read_record
from edge_opt.report.sheets import Cell, Column, Note, Sheet, Table, column, sheet, signed, text_column
from edge_opt.report.table import COLUMNS, SORT_COLUMNS, check_choice
from edge_opt.text import printable

FORMAT, SCHEMA_VERSION = "edge_opt.comparison", 1
# Figures of a layer, by the words of `--sort`; they are fields of `LayerFigures` and columns of a profile.
SORT_KEYS = ("macs", "params", "time", "bytes", "peak", "activations", "flops")
# Layers with none of these are not listed on a terminal: rows of 0 → 0 say little.
_MAIN_KEYS = ("macs", "params", "time")
# With less in common than this, a table of differences says little.
_RELATED = 0.25
# More layers than this of different architectures are summed up by type.
_SUMMARIZED = 12


def letter(model: int) -> str:
    """Return what a model is called in a header: A is the baseline.

    >>> letter(0), letter(1), letter(27)
    ('A', 'B', 'AB')
    """
    before = letter(model // 26 - 1) if model >= 26 else ""
    return before + ascii_uppercase[model % 26]


def figure_text(unit: FigureUnit, value: float | None) -> str:
    """Return a figure with its unit; a dash where it is not known."""
    if value is None:
        return units.DASH
    # Limits on shares differ in the second digit, such as a coverage of 99.95 %.
    return f"{value * 100:.2f}%" if unit == "share" else units.FORMATS[unit](value)


def _value(layer: LayerFigures | None, key: str) -> float | None:
    return None if layer is None else getattr(layer, SORT_COLUMNS[key])


def _known_keys(comparison: ModelComparison) -> list[str]:
    layers = [layer for row in comparison.layers for layer in row.layers]
    return [key for key in SORT_KEYS if any(_value(layer, key) is not None for layer in layers)]


def chosen_rows(
    comparison: ModelComparison, sort: str | None = None, top: int | None = None, *, everything: bool = False
) -> tuple[ComparedLayer, ...]:
    """Return the layers that differ, or all of them: in order, or by the size of the difference, largest first."""
    check_choice(SORT_KEYS, sort, top)

    def largest_difference(row: ComparedLayer) -> float:
        # A layer that is not there has none of the figure.
        values = [_value(layer, sort or "macs") or 0.0 for layer in row.layers]
        return max(abs(value - values[0]) for value in values)

    rows = [row for row in comparison.layers if everything or not row.is_same]
    if sort is not None or top is not None:
        rows.sort(key=largest_difference, reverse=True)
    return tuple(rows[:top])


def row_label(row: ComparedLayer) -> str:
    """Return the layer's path; where it was renamed, the old and the new one."""
    names = list(dict.fromkeys(layer.label or "(the model itself)" for layer in row.layers if layer is not None))
    return " → ".join(names)


def row_kind(row: ComparedLayer) -> str:
    """Return the layer's type; where it was replaced, the old and the new one."""
    return " → ".join(dict.fromkeys(layer.kind for layer in row.layers if layer is not None))


def row_changes(row: ComparedLayer) -> str:
    """Return how each model changed the layer; of several models, only those that changed it."""
    changes = [(letter(model), row.change(model)) for model in range(1, len(row.layers))]
    if len(changes) == 1:
        return changes[0][1]
    return ", ".join(f"{name} {change}" for name, change in changes if change not in ("same", "absent"))


def _relations(comparison: ModelComparison) -> list[Note]:
    """Return how much each model has in common with the first; nothing where no layers are known."""
    sentences = []
    first = comparison.names[0]
    for model, name in enumerate(comparison.names[1:], start=1):
        share = comparison.aligned_share(model)
        if share is None:
            continue
        aligned = comparison.aligned(model)
        what = f"{aligned} of {max(comparison.layer_count(0), comparison.layer_count(model))} layers align"
        if aligned == 0:
            what = f"{first} and {name} have nothing in common: {what}; the totals are all there is to compare"
        elif share < _RELATED:
            what = f"{first} and {name} are hardly related: only {what}"
        else:
            changes = [row.change(model) for row in comparison.layers]
            parts = [f"{changes.count(it)} {it}" for it in ("changed", "renamed", "added", "removed") if it in changes]
            what += f": {', '.join(parts)}" if parts else ", none of them changed"
        sentences.append(("Layers", what))
    return sentences


def _verdicts(comparison: ModelComparison) -> list[Note]:
    """Return what was shown about each model's latency, with the interval that it rests on."""
    sentences = []
    for name, latency in zip(comparison.names[1:], comparison.latencies, strict=True):
        if latency is None:
            continue
        low, high = units.change(latency.ratio_interval.low - 1), units.change(latency.ratio_interval.high - 1)
        verdict = f"{latency.verdict} than the first"
        what = "no difference in latency was shown" if latency.verdict == "equal" else verdict
        clock = ", by CPU time" if latency.clock == "cpu" else ""
        difference = f"{units.change(latency.ratio - 1)}, 95 % interval {low} to {high}{clock}"
        sentences.append(("Latency", f"{name}: {what} ({difference})"))
    return sentences


def _notes(comparison: ModelComparison) -> tuple[Note, ...]:
    """Return everything to say under the tables."""
    unpriced = [name for name, bound in zip(comparison.names, comparison.is_lower_bound, strict=True) if bound]
    bounds = [f"{', '.join(unpriced)}: operators are unpriced, so the work is a lower bound"] if unpriced else []
    remarks = (("Note", remark) for remark in (*bounds, *comparison.remarks))
    return (*_relations(comparison), *_verdicts(comparison), *remarks)


def _title(comparison: ModelComparison) -> str:
    return " → ".join(f"{letter(model)}: {name}" for model, name in enumerate(comparison.names))


def shown_comparison(
    comparison: ModelComparison, sort: str | None = None, top: int | None = None, *, everything: bool = False
) -> Sheet:
    """Return the layers that differ, or all, then the totals, then what is to be said about them."""
    rows = chosen_rows(comparison, sort, top, everything=everything)
    if comparison.is_empty and not everything:
        return Sheet(_title(comparison), notes=(("Result", "no differences"),))
    keys = [key for key in _known_keys(comparison) if key in (*_MAIN_KEYS, sort)]
    listed = [row for row in rows if everything or any(_value(layer, key) for layer in row.layers for key in keys)]
    hidden = len(rows) - len(listed)
    titles = " or ".join(COLUMNS[SORT_COLUMNS[key]].title for key in keys)
    more = [("More", f"{hidden} layers differ, but have no {titles}: --all shows them")] if hidden else []
    layers = _layer_table(comparison, listed, sort)
    # Few layers of different architectures align.
    shares = [comparison.aligned_share(model) for model in range(1, len(comparison.names))]
    are_unrelated = any(share is not None and share < _RELATED for share in shares)
    if are_unrelated and not (everything or top or sort) and len(listed) > _SUMMARIZED:
        more = [("More", f"{len(rows)} layers differ: --all lists them, --top 10 the largest")]
        layers = _types(comparison)
    tables = (layers, _totals_table(comparison))
    return Sheet(_title(comparison), tables, (*_notes(comparison), *more))


def _types(comparison: ModelComparison) -> Table:
    """Return one row per type of layer with the sums of each model: a summary of different architectures."""
    by_kind: dict[str, list[list[Any]]] = {}
    for row in comparison.layers:
        for model, layer in enumerate(row.layers):
            if layer is not None and any(_value(layer, key) for key in _MAIN_KEYS):
                by_kind.setdefault(layer.kind, [[] for _ in comparison.names])[model].append(layer)

    def total(layers: Sequence[Any], key: str) -> float:
        return sum(_value(layer, key) or 0 for layer in layers)

    kinds = sorted(by_kind.items(), key=lambda item: -max(total(layers, "macs") for layers in item[1]))
    columns = [text_column("Type", (kind for kind, _ in kinds))]
    for model in range(len(comparison.names)):
        columns.append(column(f"Layers {letter(model)}", (str(len(models[model])) for _, models in kinds)))
    for key in (key for key in _known_keys(comparison) if key in _MAIN_KEYS):
        title, text = COLUMNS[SORT_COLUMNS[key]].title, COLUMNS[SORT_COLUMNS[key]].text
        for model in range(len(comparison.names)):
            sums = (text(total(models[model], key)) for _, models in kinds)
            columns.append(column(f"{title} {letter(model)}", sums))
    return tuple(columns)


def document(comparison: ModelComparison) -> str:
    """Return everything, as JSON that `load_comparison` reads back exactly."""
    return dumps_document(FORMAT, SCHEMA_VERSION, to_plain(comparison))


def load_comparison(path: str | os.PathLike[str]) -> ModelComparison:
    """Read a comparison that `save` wrote as .json; it equals the one that was saved."""
    text = read_document(path, UnreadableProfile, "comparison.save('NAME.json') writes one", str)
    again = "compare the models again"
    return read_record(ModelComparison, text, repr(str(path)), FORMAT, SCHEMA_VERSION, again, unversioned=True)


def as_csv(comparison: ModelComparison) -> str:
    """Return one line per layer, every layer; exact numbers of each model, and the differences from the first."""
    others = range(1, len(comparison.names))
    figures = [
        f"{key}_{what}"
        for key in SORT_KEYS
        for what in (*(letter(n) for n in range(len(comparison.names))), *(f"difference_{letter(n)}" for n in others))
    ]
    heads = [f"{what}_{letter(n)}" for n in range(len(comparison.names)) for what in ("path", "type")]
    rows: list[list[Any]] = []
    for row in comparison.layers:
        cells: list[Any] = []
        for layer in row.layers:
            cells += ["", ""] if layer is None else [layer.label, layer.kind]
        cells += [row.change(n) for n in others]
        for key in SORT_KEYS:
            values = [_value(layer, key) for layer in row.layers]
            old = values[0]
            cells += [*values, *(None if old is None or new is None else new - old for new in values[1:])]
        rows.append(cells)
    return csv_text([*heads, *(f"change_{letter(n)}" for n in others), *figures], rows)


@sheet(ModelComparison, brief=shown_comparison, files={".json": document, ".csv": as_csv})
def comparison_sheet(comparison: ModelComparison) -> Sheet:
    """Return the totals, what to say about them, and every layer: those that differ most first, the others folded."""
    changed = chosen_rows(comparison, "macs")
    same = [row for row in comparison.layers if row.is_same]
    count = len(comparison.layers)
    parts = [Sheet(f"Layers that differ: {len(changed)} of {count}", (_layer_table(comparison, changed),))]
    parts.append(Sheet(f"Layers that are the same: {len(same)}", (_layer_table(comparison, same),), is_folded=True))
    empty = [("Result", "no differences")] if comparison.is_empty else []
    return Sheet(
        _title(comparison),
        (_totals_table(comparison),),
        (*empty, *_notes(comparison)),
        parts=tuple(part for part in parts if part.tables),
    )


def _layer_table(comparison: ModelComparison, rows: Sequence[ComparedLayer], sort: str | None = None) -> Table:
    """Return one row per layer; a figure of all models is shown or left out together, the one sorted by first."""
    figures = (
        Column(
            f"{COLUMNS[SORT_COLUMNS[key]].title} {letter(model)}",
            tuple(_cell(row, key, model) for row in rows),
            drop_order=2 + place if place else 0,
        )
        for place, key in enumerate(sorted(_known_keys(comparison), key=lambda key: key != sort))
        for model in range(len(comparison.names))
    )
    names = (
        text_column("Layer", map(row_label, rows), min_width=30),
        text_column("Type", map(row_kind, rows), 2, 10),
        text_column("Status", map(row_changes, rows), 1, None),
    )
    return (*names, *figures)


def _cell(row: ComparedLayer, key: str, model: int) -> Cell:
    layer, old, value = row.layers[model], _value(row.layers[0], key), _value(row.layers[model], key)
    if value is None or layer is None:
        return Cell(units.DASH, style="dim")
    bound = "≥ " * bool(layer.unpriced and key in ("macs", "flops", "bytes"))
    text = bound + COLUMNS[SORT_COLUMNS[key]].text(value)
    if model == 0 or not old or value == old:
        return Cell(text, style="dim" if model and value == old else "")
    return Cell(f"{text} {units.change((value - old) / old)}", style=_style(value - old))


def _totals_table(comparison: ModelComparison) -> Table:
    figures = [figure for figure in comparison.totals if any(figure.values)]
    columns = [text_column("Total", (printable(figure.title) for figure in figures))]
    for model in range(len(comparison.names)):
        columns.append(column(letter(model), (figure_text(figure.unit, figure.values[model]) for figure in figures)))
        if model:
            columns.append(column(f"{letter(model)} − A", (_difference(figure, model) for figure in figures), 1))
            changes = (Cell(units.change(it.relative(model)), style=_style(it.difference(model))) for it in figures)
            columns.append(Column("Change", tuple(changes)))
    return tuple(columns)


def _difference(figure: ComparedFigure, model: int) -> str:
    difference = figure.difference(model)
    return units.DASH if difference is None else signed(difference, lambda size: figure_text(figure.unit, size))


def _style(difference: float | None) -> str:
    return "dim" if not difference else "red" if difference > 0 else "green"
