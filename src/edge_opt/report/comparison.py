"""Comparisons as text, Markdown, HTML and JSON."""

from __future__ import annotations

import csv
import io
import json
import os
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import ascii_uppercase

from rich.console import Console
from rich.text import Text

from edge_opt import units
from edge_opt._support import files
from edge_opt._support.extras import written_with
from edge_opt._support.json import from_plain, to_plain
from edge_opt.errors import InvalidInput, UnreadableProfile
from edge_opt.records.profiles import ComparedLayer, FigureUnit, LayerFigures, ModelComparison
from edge_opt.report.table import heading
from edge_opt.report.terminal import Cell, Strip, paper_width, print_table, rendered
from edge_opt.text import html, markdown, printable, spreadsheet

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
    LayerFigure("macs", heading("macs"), "count", lambda layer: layer.macs),
    LayerFigure("params", heading("params"), "count", lambda layer: layer.params),
    LayerFigure("time", heading("measured_s"), "time", lambda layer: layer.measured_s),
    LayerFigure("bytes", heading("bytes_moved"), "bytes", lambda layer: layer.bytes_moved),
    LayerFigure("peak", heading("peak_live_bytes"), "bytes", lambda layer: layer.peak_live_bytes),
    LayerFigure("activations", heading("activation_bytes"), "bytes", lambda layer: layer.activation_bytes),
    LayerFigure("flops", heading("flops"), "count", lambda layer: layer.flops),
)
SORT_KEYS = tuple(figure.key for figure in LAYER_FIGURES)


def letter(model: int) -> str:
    """What a model is called in a header: A is the baseline.

    >>> letter(0), letter(1), letter(27)
    ('A', 'B', 'AB')
    """
    before = letter(model // 26 - 1) if model >= 26 else ""
    return before + ascii_uppercase[model % 26]


def figure_text(unit: FigureUnit, value: float | None) -> str:
    """A figure with its unit; a dash where it is not known."""
    return units.DASH if value is None else _FORMATS[unit](value)


def signed_figure(unit: FigureUnit, difference: float | None) -> str:
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


def row_label(row: ComparedLayer) -> str:
    """The layer's path; where it was renamed, the old and the new one."""
    names = list(dict.fromkeys(layer.label or "(the model itself)" for layer in row.layers if layer is not None))
    return " → ".join(names)


def row_kind(row: ComparedLayer) -> str:
    """The layer's type; where it was replaced, the old and the new one."""
    return " → ".join(dict.fromkeys(layer.kind for layer in row.layers if layer is not None))


def row_changes(row: ComparedLayer) -> str:
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


def comparison_notes(comparison: ModelComparison) -> list[str]:
    """Everything to say under the tables."""
    unpriced = [name for name, bound in zip(comparison.names, comparison.is_lower_bound, strict=True) if bound]
    bounds = [f"{', '.join(unpriced)}: operators are unpriced, so the work is a lower bound"] if unpriced else []
    return [*relations(comparison), *verdicts(comparison), *bounds, *comparison.remarks]


# Colors that follow what is around them: a notebook or a page, light or dark.
_TABLE_STYLE = """
.edge-opt { font: 14px/1.45 system-ui, sans-serif; overflow-x: auto; }
.edge-opt table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: .6em 0; }
.edge-opt th, .edge-opt td { padding: .2em .7em; text-align: right; background: none; color: inherit;
  border: 0; border-bottom: 1px solid rgba(128, 128, 128, .3); white-space: nowrap; }
.edge-opt th.name, .edge-opt td.name { text-align: left; }
.edge-opt td.name > div { width: max-content; max-width: 26em; white-space: normal; overflow-wrap: anywhere;
  unicode-bidi: isolate; }
.edge-opt td.fact > div { max-width: 56em; }
.edge-opt li { white-space: pre-wrap; overflow-wrap: anywhere; }
.edge-opt .more { color: #b3261e; } .edge-opt .less { color: #1a7f37; } .edge-opt .quiet { opacity: .6; }
@media (prefers-color-scheme: dark) { .edge-opt .more { color: #ff8a80; } .edge-opt .less { color: #6fdd8b; } }
"""
_PAGE_STYLE = """
:root { color-scheme: light dark; }
body { margin: 0 auto; max-width: 80em; padding: 1.5em; background: Canvas; color: CanvasText; }
h1 { font-size: 1.4em; overflow-wrap: anywhere; unicode-bidi: isolate; } h2 { font-size: 1.1em; }
.written { font: 13px/1.45 system-ui, sans-serif; opacity: .7; margin-top: 2em; }
@media print { body { max-width: none; } }
"""
NAME = ' class="name"'


def cell(content: str, style: str = "") -> str:
    """One cell; `content` is text, `style` a class: "name" for what is to be read, not compared."""
    if style == "name":
        return f'<td class="name"><div>{html(content)}</div></td>'
    return f'<td class="{style}">{html(content)}</td>' if style else f"<td>{html(content)}</td>"


def table(headers: Sequence[str], rows: Iterable[Sequence[str]], names: int = 1) -> str:
    """A table of cells that are marked up already, under headers that are text; the first columns are names."""
    head = "".join(
        f'<th scope="col"{NAME if place < names else ""}>{html(header)}</th>' for place, header in enumerate(headers)
    )
    body = "\n".join(f"<tr>{''.join(row)}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table>"


def fragment(*parts: str) -> str:
    """Parts as one piece that can stand in a notebook."""
    return f'<div class="edge-opt"><style>{_TABLE_STYLE}</style>\n' + "\n".join(parts) + "\n</div>"


def page(title: str, *parts: str) -> str:
    """Parts as one page that needs nothing else, and may load nothing else."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{html(title)}</title><style>{_PAGE_STYLE}</style></head>\n"
        f"<body><main>\n<h1>{html(title)}</h1>\n{fragment(*parts)}\n</main>\n"
        f'<p class="written">{html(_written())}</p></body></html>\n'
    )


def _written() -> str:
    found = written_with()
    when = found.pop("written")
    return f"Written with {', '.join(f'{name} {value}' for name, value in found.items())} on {when}."


def notes(sentences: Iterable[str]) -> str:
    """Sentences as a list."""
    items = "".join(f"<li>{html(sentence)}</li>" for sentence in sentences)
    return f"<ul>{items}</ul>" if items else ""


def totals_table(comparison: ModelComparison) -> str:
    """Figures of the whole, one line each."""
    names = comparison.names
    headers = ["Total", names[0], *(part for name in names[1:] for part in (name, "difference", "change"))]
    rows = []
    for figure in comparison.totals:
        cells = [cell(figure.title, "name"), cell(figure_text(figure.unit, figure.values[0]))]
        for model in range(1, len(names)):
            difference = figure.difference(model)
            cells += [
                cell(figure_text(figure.unit, figure.values[model])),
                cell(signed_figure(figure.unit, difference), _direction(difference)),
                cell(units.change(figure.relative(model)), _direction(difference)),
            ]
        rows.append(cells)
    return table(headers, rows)


def _direction(difference: float | None) -> str:
    return "quiet" if not difference else "more" if difference > 0 else "less"


def layers_table(comparison: ModelComparison, top: int | None = None, *, everything: bool = False) -> str:
    """Layers that differ, or all, one line each, with their figures in every model."""
    figures = known_figures(comparison)
    models = range(len(comparison.names))
    headers = ["Layer", "Type", "", *(f"{figure.title} {letter(n)}" for figure in figures for n in models)]
    rows = [
        [
            cell(row_label(row), "name"),
            cell(row_kind(row), "name"),
            cell(row_changes(row)),
            *(_layer_cell(row, figure, n) for figure in figures for n in models),
        ]
        for row in chosen_rows(comparison, top=top, everything=everything)
    ]
    return table(headers, rows, names=2)


def _layer_cell(row: ComparedLayer, figure: LayerFigure, model: int) -> str:
    layer, first = row.layers[model], row.layers[0]
    value = None if layer is None else figure.read(layer)
    old = None if first is None else figure.read(first)
    if value is None or model == 0 or not old or value == old:
        return cell(figure_text(figure.unit, value), "quiet" if model and value == old else "")
    return cell(f"{figure_text(figure.unit, value)} {units.change((value - old) / old)}", _direction(value - old))


def comparison_page(comparison: ModelComparison) -> str:
    """The comparison as one HTML file: totals, what to say about them, then every layer."""
    title = " → ".join(comparison.names)
    if comparison.is_empty:
        return page(title, "<p>No differences.</p>", totals_table(comparison), notes(comparison_notes(comparison)))
    parts = [totals_table(comparison), notes(comparison_notes(comparison))]
    legend = ", ".join(f"{letter(n)} is {name}" for n, name in enumerate(comparison.names))
    changed, count = len(chosen_rows(comparison)), len(comparison.layers)
    if changed:
        parts += [f"<h2>Layers that differ: {changed} of {count}</h2><p>{html(legend)}</p>", layers_table(comparison)]
    if count > changed:
        every = layers_table(comparison, everything=True)
        parts.append(f"<details><summary>All {count} layers</summary>{every}</details>")
    return page(title, *parts)


FORMAT = "edge_opt.comparison"
_SHOWN_IN_A_REQUEST = 20
_WIDTH = 120


def save(comparison: ModelComparison, path: str | os.PathLike[str]) -> Path:
    """Write the comparison and return the path; the file is replaced as a whole, or left as it was."""
    return files.write_named(path, writer_for(path)(comparison))


def writer_for(path: str | os.PathLike[str]) -> Callable[[ModelComparison], str]:
    """The writer that the path's suffix chooses."""
    return files.writer_for(path, _WRITERS)


def document(comparison: ModelComparison) -> str:
    """Everything, as JSON that `load_comparison` reads back exactly."""
    return json.dumps({"format": FORMAT, **to_plain(comparison)}, indent=1, allow_nan=False) + "\n"


def load_comparison(path: str | os.PathLike[str]) -> ModelComparison:
    """Read a comparison that `save` wrote as .json; it equals the one that was saved."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UnreadableProfile(
            f"cannot read {str(path)!r}: {error}; comparison.save('NAME.json') writes one"
        ) from error
    if not isinstance(data, dict) or data.pop("format", None) != FORMAT:
        raise UnreadableProfile(f'{str(path)!r} is not a comparison: it lacks "format": "{FORMAT}"')
    return from_plain(ModelComparison, data)


def as_csv(comparison: ModelComparison) -> str:
    """One line per layer, every layer; exact numbers of each model, and the differences from the first."""
    out = io.StringIO()
    lines = csv.writer(out, lineterminator="\n")
    others = range(1, len(comparison.names))
    figures = [
        f"{figure.key}_{what}"
        for figure in LAYER_FIGURES
        for what in (*(letter(n) for n in range(len(comparison.names))), *(f"difference_{letter(n)}" for n in others))
    ]
    heads = [f"{what}_{letter(n)}" for n in range(len(comparison.names)) for what in ("path", "type")]
    lines.writerow([*heads, *(f"change_{letter(n)}" for n in others), *figures])
    for row in comparison.layers:
        names = [
            spreadsheet(text) for layer in row.layers for text in (("", "") if layer is None else _path_and_kind(layer))
        ]
        numbers: list[float | None] = []
        for figure in LAYER_FIGURES:
            values = [None if layer is None else figure.read(layer) for layer in row.layers]
            numbers += [*values, *(_difference(values[0], values[n]) for n in others)]
        lines.writerow([*names, *(row.change(n) for n in others), *numbers])
    return out.getvalue()


def _path_and_kind(layer: LayerFigures) -> tuple[str, str]:
    return layer.label, layer.kind


def _difference(old: float | None, new: float | None) -> float | None:
    return None if old is None or new is None else new - old


def as_markdown(comparison: ModelComparison) -> str:
    """For a pull request: totals in one table, the layers that changed most folded under it."""
    names = [markdown(name) for name in comparison.names]
    lines = [f"### {' → '.join(names)}", ""]
    if comparison.is_empty:
        return "\n".join([*lines, "No differences.", ""])
    head = ["", names[0], *(part for name in names[1:] for part in (name, "change"))]
    lines += [_line(head), _line(["---", *["--:"] * (len(head) - 1)])]
    for figure in comparison.totals:
        cells = [f"**{figure.title}**", figure_text(figure.unit, figure.values[0])]
        for model in range(1, len(names)):
            cells += [figure_text(figure.unit, figure.values[model]), units.change(figure.relative(model))]
        lines.append(_line(cells))
    lines += ["", *(f"- {markdown(note)}" for note in comparison_notes(comparison)), ""]
    return "\n".join([*lines, *_folded(comparison)])


def _folded(comparison: ModelComparison) -> Iterator[str]:
    rows = chosen_rows(comparison, top=_SHOWN_IN_A_REQUEST)
    if not rows:
        return
    changed = len(chosen_rows(comparison))
    largest = f"; the {len(rows)} that differ most" if len(rows) < changed else ""
    yield f"<details><summary>{changed} layer{'s' * (changed != 1)} differ{largest}</summary>\n"
    figures = [figure for figure in known_figures(comparison) if figure.key in ("macs", "params", "time", "peak")]
    yield _line(["Layer", "Type", "", *(figure.title for figure in figures)])
    yield _line(["---", "---", "---", *("--:" for _ in figures)])
    for row in rows:
        texts = [row_label(row), row_kind(row), row_changes(row)]
        yield _line([*map(markdown, texts), *(_arrow(row, figure) for figure in figures)])
    yield "\n</details>\n"


def _arrow(row: ComparedLayer, figure: LayerFigure) -> str:
    """The figure in each model, with the change of the last."""
    values = [None if layer is None else figure.read(layer) for layer in row.layers]
    shown = list(dict.fromkeys(figure_text(figure.unit, value) for value in values))
    old, new = values[0], values[-1]
    change = f" ({units.change((new - old) / old)})" if old and new is not None and old != new else ""
    return " → ".join(shown) + change


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def render(comparison: ModelComparison, width: int | None = None) -> str:
    """The comparison as text, as `show` prints it; without a width, for the terminal there is, or 120 columns."""
    return rendered(lambda console: show(comparison, console), width=width or paper_width(_WIDTH))


def show(
    comparison: ModelComparison,
    console: Console,
    *,
    sort: str | None = None,
    top: int | None = None,
    everything: bool = False,
) -> None:
    """Print the layers that differ, or all, then the totals, then what is to be said about them."""
    rows = chosen_rows(comparison, sort, top, everything=everything)
    for model, name in enumerate(comparison.names):
        shown = f"{letter(model)}  {printable(name)}"
        for part in textwrap.wrap(shown, console.width, subsequent_indent="   ", break_on_hyphens=False):
            console.print(Text.assemble((part[:2], "bold"), part[2:]), soft_wrap=True)
    console.print()
    if comparison.is_empty and not everything:
        console.print(Text("no differences"))
        return
    figures = _shown_figures(comparison, rows, sort, console.width)
    shown_rows = rows if everything else tuple(row for row in rows if _has_any(row, figures))
    if shown_rows:
        print_table(console, _layer_strips(comparison, shown_rows, figures))
    print_table(console, _total_strips(comparison))
    hidden = len(rows) - len(shown_rows)
    aside = [f"{hidden} more layers differ in none of these figures; --all shows them"] if hidden else []
    for note in (*comparison_notes(comparison), *aside):
        for part in textwrap.wrap(printable(note), console.width, break_on_hyphens=False):
            console.print(Text(part), soft_wrap=True)


def _has_any(row: ComparedLayer, figures: Sequence[LayerFigure]) -> bool:
    """Whether one of the figures is more than nothing in one of the models: rows of 0 → 0 say nothing."""
    return any(figure.read(layer) for figure in figures for layer in row.layers if layer is not None)


def _names(rows: tuple[ComparedLayer, ...]) -> list[Strip]:
    def texts(header: str, pick: Callable[[ComparedLayer], str], floor: int | None, rank: int) -> Strip:
        return Strip(header, tuple(Cell(printable(pick(row))) for row in rows), "left", floor, rank)

    return [texts("Layer", row_label, 30, 0), texts("Type", row_kind, 10, 2), texts("", row_changes, None, 1)]


def _figure_strips(comparison: ModelComparison, rows: tuple[ComparedLayer, ...], figure: LayerFigure) -> list[Strip]:
    return [
        Strip(f"{figure.title} {letter(model)}", tuple(_cell(row, figure, model) for row in rows))
        for model in range(len(comparison.names))
    ]


def _shown_figures(
    comparison: ModelComparison, rows: tuple[ComparedLayer, ...], sort: str | None, width: int
) -> list[LayerFigure]:
    """What the list is sorted by comes first, and is shown whatever the width; then as many figures as fit."""
    chosen: list[LayerFigure] = []
    strips = _names(rows)
    for figure in sorted(known_figures(comparison), key=lambda figure: figure.key != sort):
        strips += _figure_strips(comparison, rows, figure)
        if chosen and sum(strip.narrowest + 2 for strip in strips) - 2 > width:
            break
        chosen.append(figure)
    return chosen


def _layer_strips(
    comparison: ModelComparison, rows: tuple[ComparedLayer, ...], figures: Sequence[LayerFigure]
) -> list[Strip]:
    return [*_names(rows), *(strip for figure in figures for strip in _figure_strips(comparison, rows, figure))]


def _cell(row: ComparedLayer, figure: LayerFigure, model: int) -> Cell:
    layer, baseline = row.layers[model], row.layers[0]
    value = None if layer is None else figure.read(layer)
    old = None if baseline is None else figure.read(baseline)
    if value is None or layer is None:
        return Cell(units.DASH, style="dim")
    shown = (
        f"{'≥ ' * bool(layer.unpriced and figure.key in ('macs', 'flops', 'bytes'))}{figure_text(figure.unit, value)}"
    )
    if model == 0 or not old or value == old:
        return Cell(shown, style="dim" if model and value == old else "")
    return Cell(f"{shown} {units.change((value - old) / old)}", style="red" if value > old else "green")


def _total_strips(comparison: ModelComparison) -> list[Strip]:
    figures = [figure for figure in comparison.totals if any(figure.values)]
    strips = [Strip("Total", tuple(Cell(figure.title) for figure in figures), "left", floor=12)]
    for model in range(len(comparison.names)):
        cells = tuple(Cell(figure_text(figure.unit, figure.values[model])) for figure in figures)
        strips.append(Strip(letter(model), cells))
        if model:
            differences = (signed_figure(figure.unit, figure.difference(model)) for figure in figures)
            strips.append(Strip(f"{letter(model)} − A", tuple(map(Cell, differences)), rank=1))
            strips.append(Strip("", tuple(Cell(units.change(figure.relative(model))) for figure in figures)))
    return strips


_WRITERS: dict[str, Callable[[ModelComparison], str]] = {
    ".json": document,
    ".csv": as_csv,
    ".md": as_markdown,
    ".html": comparison_page,
    ".txt": lambda comparison: render(comparison) + "\n",
}
