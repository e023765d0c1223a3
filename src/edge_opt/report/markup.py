"""Markup: tables and small pages in HTML, without scripts and without anything from elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from edge_opt import units
from edge_opt.records import ComparedLayer, ModelComparison
from edge_opt.report import differences as words
from edge_opt.report.differences import LayerFigure, chosen_rows, known_figures
from edge_opt.report.text import html

# Colors that follow what is around them: a notebook or a page, light or dark.
_TABLE_STYLE = """
.edge-opt { font: 14px/1.45 system-ui, sans-serif; overflow-x: auto; }
.edge-opt table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: .6em 0; }
.edge-opt th, .edge-opt td { padding: .2em .7em; text-align: right; background: none; color: inherit;
  border: 0; border-bottom: 1px solid rgba(128, 128, 128, .3); white-space: nowrap; }
.edge-opt th.name, .edge-opt td.name { text-align: left; }
.edge-opt td.name > div { width: max-content; max-width: 26em; white-space: normal; overflow-wrap: anywhere;
  unicode-bidi: isolate; }
.edge-opt li { white-space: pre-wrap; overflow-wrap: anywhere; }
.edge-opt .more { color: #b3261e; } .edge-opt .less { color: #1a7f37; } .edge-opt .quiet { opacity: .6; }
@media (prefers-color-scheme: dark) { .edge-opt .more { color: #ff8a80; } .edge-opt .less { color: #6fdd8b; } }
"""
_PAGE_STYLE = """
:root { color-scheme: light dark; }
body { margin: 0 auto; max-width: 80em; padding: 1.5em; background: Canvas; color: CanvasText; }
h1 { font-size: 1.4em; overflow-wrap: anywhere; unicode-bidi: isolate; } h2 { font-size: 1.1em; }
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
        f"<body><main>\n<h1>{html(title)}</h1>\n{fragment(*parts)}\n</main></body></html>\n"
    )


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
        cells = [cell(figure.title, "name"), cell(words.text(figure.unit, figure.values[0]))]
        for model in range(1, len(names)):
            difference = figure.difference(model)
            cells += [
                cell(words.text(figure.unit, figure.values[model])),
                cell(words.signed(figure.unit, difference), _direction(difference)),
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
    headers = ["Layer", "Type", "", *(f"{figure.title} {words.letter(n)}" for figure in figures for n in models)]
    rows = [
        [
            cell(words.label(row), "name"),
            cell(words.kind(row), "name"),
            cell(words.changes(row)),
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
        return cell(words.text(figure.unit, value), "quiet" if model and value == old else "")
    return cell(f"{words.text(figure.unit, value)} {units.change((value - old) / old)}", _direction(value - old))


def comparison_page(comparison: ModelComparison) -> str:
    """The comparison as one HTML file: totals, what to say about them, then every layer."""
    title = " → ".join(comparison.names)
    if comparison.is_empty:
        return page(title, "<p>No differences.</p>", totals_table(comparison), notes(words.notes(comparison)))
    parts = [totals_table(comparison), notes(words.notes(comparison))]
    legend = ", ".join(f"{words.letter(n)} is {name}" for n, name in enumerate(comparison.names))
    changed, count = len(chosen_rows(comparison)), len(comparison.layers)
    if changed:
        parts += [f"<h2>Layers that differ: {changed} of {count}</h2><p>{html(legend)}</p>", layers_table(comparison)]
    if count > changed:
        every = layers_table(comparison, everything=True)
        parts.append(f"<details><summary>All {count} layers</summary>{every}</details>")
    return page(title, *parts)
