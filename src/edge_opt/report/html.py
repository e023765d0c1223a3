"""Sheets as HTML: in notebooks, and as pages that need nothing else."""

from __future__ import annotations

from collections.abc import Iterator

from edge_opt._support.extras import written_with
from edge_opt.report.sheets import Cell, Column, Sheet, Table
from edge_opt.text import html

_OPEN_ROWS = 50

# Colors that follow what is around them: a notebook or a page, light or dark.
_TABLE_STYLE = """
.edge-opt { font: 14px/1.45 system-ui, sans-serif; overflow-x: auto; }
.edge-opt table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: .6em 0; }
.edge-opt th, .edge-opt td { padding: .2em .7em; text-align: right; background: none; color: inherit;
  border: 0; border-bottom: 1px solid rgba(128, 128, 128, .3); white-space: nowrap; }
.edge-opt th.name, .edge-opt td.name { text-align: left; }
.edge-opt td.name > div { width: max-content; max-width: 26em; white-space: normal; overflow-wrap: anywhere;
  unicode-bidi: isolate; }
.edge-opt td.note > div { max-width: 56em; }
.edge-opt .tree button { all: unset; cursor: pointer; }
.edge-opt .tree button:focus-visible { outline: 2px solid; outline-offset: 2px; }
.edge-opt .tree tr[hidden] { display: none; }
.edge-opt .red { color: #b3261e; } .edge-opt .green { color: #1a7f37; } .edge-opt .dim { opacity: .6; }
@media (max-width: 40em) { .edge-opt { font-size: 12px; } .edge-opt th, .edge-opt td { padding: .2em .4em; } }
@media (prefers-color-scheme: dark) { .edge-opt .red { color: #ff8a80; } .edge-opt .green { color: #6fdd8b; } }
"""
_PAGE_STYLE = """
:root { color-scheme: light dark; }
body { margin: 0 auto; max-width: 80em; padding: 1.5em; background: Canvas; color: CanvasText; }
h1 { font-size: 1.4em; overflow-wrap: anywhere; unicode-bidi: isolate; } h2 { font-size: 1.1em; }
.written { font: 13px/1.45 system-ui, sans-serif; opacity: .7; margin-top: 2em; }
@media print { body { max-width: none; } }
"""
# Rows of a tree know their depth; a button hides the deeper rows that follow, or shows the next level of them.
_TREE_SCRIPT = """
for (const table of document.querySelectorAll(".edge-opt table.tree:not([data-ready])")) {
  table.dataset.ready = "yes";
  const rows = [...table.tBodies[0].rows], depth = (row) => Number(row.dataset.depth);
  const mark = (row, sign) => row.querySelector("button span")?.replaceChildren(sign);
  rows.forEach((row, place) => row.querySelector("button")?.addEventListener("click", () => {
    const end = rows.findIndex((other, after) => after > place && depth(other) <= depth(row));
    const below = rows.slice(place + 1, end < 0 ? undefined : end), isOpen = !below[0].hidden;
    for (const other of below) { other.hidden = isOpen || depth(other) > depth(row) + 1; mark(other, "▸ "); }
    mark(row, isOpen ? "▸ " : "▾ ");
  }));
}
"""


def sheet_html(shown: Sheet) -> str:
    """Return the sheet for a notebook."""
    title = f"<strong>{html(shown.title)}</strong>" if shown.title else ""
    return _fragment(title, shown)


def sheet_page(shown: Sheet) -> str:
    """Return the sheet as one page that needs nothing else, and may load nothing else."""
    versions = written_with()
    when = versions.pop("written")
    written = f"Written with {', '.join(f'{name} {value}' for name, value in versions.items())} on {when}."
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{html(shown.title)}</title><style>{_PAGE_STYLE}</style></head>\n"
        f"<body><main>\n<h1>{html(shown.title)}</h1>\n{_fragment('', shown)}\n</main>\n"
        f'<p class="written">{html(written)}</p></body></html>\n'
    )


def _fragment(title: str, shown: Sheet) -> str:
    return f'<div class="edge-opt"><style>{_TABLE_STYLE}</style>\n' + "\n".join([title, *_parts(shown)]) + "\n</div>"


def _parts(shown: Sheet) -> Iterator[str]:
    yield shown.picture
    for columns in shown.tables:
        # Guides in front of names make a tree of a table.
        yield (_tree if any(cell.prefix for cell in columns[0].cells) else _table)(columns)
    if shown.notes:
        rows = (
            f'<tr><td class="name">{html(label)}</td><td class="name note"><div>{html(sentence)}</div></td></tr>'
            for label, sentence in shown.notes
        )
        yield f"<table><tbody>{''.join(rows)}</tbody></table>"
    for part in shown.parts:
        inside = "\n".join(_parts(part))
        title = html(part.title)
        yield (
            f"<details><summary>{title}</summary>{inside}</details>" if part.is_folded else f"<h2>{title}</h2>{inside}"
        )


def _table(columns: Table) -> str:
    rows = (
        f"<tr>{''.join(map(_cell, columns, row))}</tr>"
        for row in zip(*(column.cells for column in columns), strict=True)
    )
    return _framed(columns, "\n".join(rows))


def _framed(columns: Table, rows: str, attributes: str = "") -> str:
    names = {"left": ' class="name"', "right": ""}
    head = "".join(f'<th scope="col"{names[column.justify]}>{html(column.header)}</th>' for column in columns)
    return f"<table{attributes}><thead><tr>{head}</tr></thead>\n<tbody>{rows}</tbody></table>"


def _cell(column: Column, cell: Cell) -> str:
    text = html(cell.prefix + cell.text)
    color = cell.style if cell.style in ("red", "green", "dim") else ""
    if column.justify == "left":
        return f'<td class="{f"name {color}".rstrip()}"><div>{text}</div></td>'
    return f'<td class="{color}">{text}</td>' if color else f"<td>{text}</td>"


def _tree(columns: Table) -> str:
    """Return a table whose rows fold below their parents; as many levels are open as fit a screen."""
    names, *others = columns
    depths = [len(cell.prefix) // 2 for cell in names.cells]
    opened = max((depth for depth in depths if sum(it <= depth for it in depths) <= _OPEN_ROWS), default=1) or 1
    rows = []
    for place, (name, depth) in enumerate(zip(names.cells, depths, strict=True)):
        has_children = depths[place + 1 : place + 2] > [depth]
        sign = "▾ " if depth < opened else "▸ "
        text = (
            f'<button type="button"><span>{sign}</span>{html(name.text)}</button>' if has_children else html(name.text)
        )
        cells = "".join(_cell(column, column.cells[place]) for column in others)
        hidden = " hidden" * (depth > opened)
        rows.append(
            f'<tr data-depth="{depth}"{hidden}><td class="name" style="padding-left:{0.7 + 1.2 * depth:.1f}em">{text}'
            f"</td>{cells}</tr>"
        )
    return _framed(columns, "\n".join(rows), ' class="tree"') + f"<script>(() => {{{_TREE_SCRIPT}}})();</script>"
