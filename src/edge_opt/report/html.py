"""What a notebook draws: a profile as a tree with bars, a sweep with its chart, a comparison."""

from __future__ import annotations

from collections.abc import Iterator

from edge_opt import units
from edge_opt.records.profiles import ModelComparison, ModelProfile
from edge_opt.records.sweeps import SweepResult
from edge_opt.report.comparison import cell, comparison_notes, fragment, layers_table, notes, totals_table
from edge_opt.report.sheets import facts_html, strips_html
from edge_opt.report.summary import summary_lines
from edge_opt.report.sweep_tables import fates, ranked, scatter_svg, trial_strips
from edge_opt.report.table import Node, Row, deepest_that_fits, heading, module_tree
from edge_opt.text import html

_SHOWN = 10
_OPEN_ROWS = 40
_MOST_ROWS = 2000

# Rows know their depth, cells their exact value. Sorting keeps every module below its parent.
_TREE_STYLE = """
.edge-opt .tree th button, .edge-opt .tree td button { all: unset; cursor: pointer; }
.edge-opt .tree button:focus-visible { outline: 2px solid; outline-offset: 2px; }
.edge-opt .tree td.fold { text-align: left; }
.edge-opt .tree .bar { display: inline-block; height: .7em; background: #2a9d62; border-radius: 2px; }
.edge-opt .tree td.share { text-align: left; min-width: 8em; }
.edge-opt .tree tr[hidden] { display: none; }
.edge-opt .tree th[aria-sort=descending] button::after { content: " ↓"; }
.edge-opt .tree th[aria-sort=ascending] button::after { content: " ↑"; }
"""
_TREE_SCRIPT = """
for (const table of document.querySelectorAll(".edge-opt table.tree:not([data-ready])")) {
  table.dataset.ready = "yes";
  const body = table.tBodies[0], rows = [...body.rows], path = [], children = new Map([[null, []]]);
  for (const row of rows) {
    const depth = Number(row.dataset.depth), parent = depth ? path[depth - 1] : null;
    path[depth] = row;
    children.set(row, []);
    children.get(parent).push(row);
  }
  const open = new Set(rows.filter((row) => children.get(row).some((below) => !below.hidden)));
  const draw = (column, sign) => {
    const value = (row) => Number(row.cells[column].dataset.value ?? -Infinity);
    const place = (parent, isShown) => {
      const below = [...children.get(parent)];
      if (column !== null) below.sort((one, other) => sign * (value(one) - value(other)));
      for (const row of below) {
        row.hidden = !isShown;
        const fold = row.cells[0].querySelector("button");
        if (fold) fold.setAttribute("aria-expanded", open.has(row));
        if (fold) fold.querySelector("span").textContent = open.has(row) ? "▾ " : "▸ ";
        body.append(row);
        place(row, isShown && open.has(row));
      }
    };
    place(null, true);
  };
  let column = null, sign = -1;
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, index) => head.querySelector("button")?.addEventListener("click", () => {
    sign = column === index ? -sign : -1;
    column = index;
    for (const other of heads) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", sign < 0 ? "descending" : "ascending");
    draw(column, sign);
  }));
  for (const row of rows) row.cells[0].querySelector("button")?.addEventListener("click", () => {
    open.has(row) ? open.delete(row) : open.add(row);
    draw(column, sign);
  });
}
"""


def profile_html(profile: ModelProfile) -> str:
    """The summary of a profile over the tree of its modules, which can be folded and sorted."""
    short = [line for line in summary_lines(profile, is_verbose=False) if line[0] != "More"]
    rest = [line for line in summary_lines(profile) if line not in short]
    more = f"<details><summary>Remarks and sources</summary>{facts_html(tuple(rest))}</details>" if rest else ""
    return fragment(f"<strong>{html(profile.name)}</strong>", facts_html(tuple(short)), _tree(profile), more)


def _tree(profile: ModelProfile) -> str:
    tree = module_tree(profile)
    nodes = list(_below(tree, ""))
    opened = deepest_that_fits(tree, _OPEN_ROWS)
    whole = profile.totals.macs
    has_times = profile.measurement is not None and profile.measurement.layers is not None
    rows = "\n".join(
        f'<tr data-depth="{node.row.depth}"{" hidden" * (node.row.depth > opened)}>'
        f"{''.join(_tree_cells(node, name or profile.name, whole, has_times, node.row.depth < opened))}</tr>"
        for node, name in nodes[:_MOST_ROWS]
    )
    columns = ["params", "macs", "bytes_moved", "peak_live_bytes", *(["measured_s"] if has_times else [])]
    titles = [*map(heading, columns), "MACs %"]
    head = "".join(f'<th scope="col"><button type="button">{html(title)}</button></th>' for title in titles)
    more = len(nodes) - _MOST_ROWS
    rest = f"<p>{more} more modules; to_dataframe() has all</p>" if more > 0 else ""
    return (
        f'<style>{_TREE_STYLE}</style><table class="tree"><thead><tr><th scope="col" class="name">Module</th>'
        f'<th scope="col" class="name">Type</th>{head}</tr></thead>\n<tbody>{rows}</tbody></table>{rest}'
        f"<script>(() => {{{_TREE_SCRIPT}}})();</script>"
    )


def _below(node: Node, above: str) -> Iterator[tuple[Node, str]]:
    """The node and all below it, parents first, each with its name inside its parent."""
    path = node.row.path
    yield node, path.removeprefix(f"{above}.") if above else path
    for child in node.children:
        yield from _below(child, path)


def _tree_cells(node: Node, name: str, whole: int, has_times: bool, is_open: bool) -> Iterator[str]:
    row = node.row
    calls = f" ({units.TIMES}{row.calls})" if row.calls > 1 else ""
    sign = "▾ " if is_open else "▸ "
    shown = f'<button type="button"><span>{sign}</span>{html(name)}</button>' if node.children else html(name)
    indent = f"padding-left:{0.7 + 1.2 * row.depth:.1f}em"
    yield f'<td class="fold" style="{indent}" title="{html(row.path)}">{shown}{calls}</td>'
    yield cell(row.type, "name")
    yield _figure(row.params, units.count(row.params))
    bound = "≥ " if row.unpriced else ""
    macs = row.cost.macs if row.cost else None
    moved = row.cost.bytes_moved if row.cost else None
    yield _figure(macs, "?" if macs is None else bound + units.count(macs))
    yield _figure(moved, "?" if moved is None else bound + units.size(moved))
    yield _figure(row.peak_live_bytes, units.size(row.peak_live_bytes))
    if has_times:
        yield _figure(row.measured_s, units.DASH if row.measured_s is None else units.duration(row.measured_s))
    yield _share(row, whole)


def _figure(value: float | None, text: str) -> str:
    return f"<td>{html(text)}</td>" if value is None else f'<td data-value="{value!r}">{html(text)}</td>'


def _share(row: Row, whole: int) -> str:
    share = row.cost.macs / whole if row.cost and whole else 0.0
    bar = f'<span class="bar" style="width:{5 * share:.2f}em"></span> {units.percent(share)}' if share else ""
    return f'<td class="share" data-value="{share!r}">{bar}</td>'


def sweep_html(result: SweepResult) -> str:
    """The candidates of a sweep with their chart: those on a frontier first, then accepted, rejected, failed ones."""
    return fragment(
        f"<strong>{html(result.name)}</strong><p>{fates(result)}</p>",
        f"<p>{html(result.recommendation)}</p>" if result.recommendation else "",
        scatter_svg(result),
        strips_html(trial_strips(ranked(result), result.metric)),
    )


def comparison_html(comparison: ModelComparison) -> str:
    """The totals of a comparison, and the layers that differ most."""
    title = f"<strong>{html(' → '.join(comparison.names))}</strong>"
    if comparison.is_empty:
        return fragment(title, "<p>no differences</p>")
    layers = [layers_table(comparison, top=_SHOWN)] if comparison.layers else []
    return fragment(title, totals_table(comparison), notes(comparison_notes(comparison)), *layers)
