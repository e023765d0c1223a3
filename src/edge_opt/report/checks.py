"""Checks as text, Markdown and JUnit."""

from __future__ import annotations

import json
import os
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from xml.etree import ElementTree

from rich.console import Console
from rich.text import Text

from edge_opt import units
from edge_opt._support.files import write_named, writer_for
from edge_opt._support.json import to_plain
from edge_opt.budgets.budget_metrics import PROFILE_METRICS
from edge_opt.records.profiles import CheckedBudget, CheckResult, Contribution
from edge_opt.report.comparison import cell, figure_text, fragment, notes, page, table
from edge_opt.report.terminal import Cell, Strip, print_table, rendered
from edge_opt.text import html, markdown, printable, xml

FORMAT = "edge_opt.check"
Columns = list[tuple[str, list[str]]]
_MARKS = {"holds": "ok", "broken": "FAIL", "undecided": "?", "unknown": "FAIL"}


def save(result: CheckResult, path: str | os.PathLike[str]) -> Path:
    """Write the result and return the path; the file is replaced as a whole, or left as it was."""
    return write_named(path, writer_for(path, _WRITERS)(result))


def document(result: CheckResult) -> str:
    """Everything, as JSON."""
    plain = {"format": FORMAT, "passed": result.passed, **to_plain(result)}
    return json.dumps(plain, indent=1, allow_nan=False) + "\n"


def number(value: float) -> str:
    """A figure in its metric's unit, in full, so that a limit missed by one is seen."""
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.6g}"


def amount(metric: str, value: float | None) -> str:
    """A figure of a metric with its unit, scaled.

    >>> amount("macs", 2_790_000), amount("peak_memory_mb", 0.0238), amount("latency_ms", 12.34)
    ('2.79 M', '24.4 KiB', '12.3 ms')
    """
    known = PROFILE_METRICS.get(metric)
    if value is None or known is None:
        return units.DASH if value is None else number(value)
    return figure_text(known.kind, value * known.scale)


def verdict(result: CheckResult) -> str:
    """The outcome in one sentence."""
    failed, undecided = len(result.failures), sum(found.outcome == "undecided" for found in result.budgets)
    count = f"{len(result.budgets)} budget{'s' * (len(result.budgets) != 1)}"
    open_ones = f", {undecided} undecided" if undecided else ""
    if failed:
        return f"{result.name}: {failed} of {count} not kept{open_ones}"
    return f"{result.name}: within {count}{open_ones}"


def _figure(found: CheckedBudget, *, has_interval: bool = True) -> str:
    metric, value, limit = found.budget.metric, found.value, found.budget.limit
    if value is None:
        return "not known"
    shown = amount(metric, value)
    if shown == amount(metric, limit) and value != limit:
        shown = number(value)
    if has_interval and found.low is not None and found.high is not None:
        if found.high < float("inf"):
            return f"{shown} ({amount(metric, found.low)} to {amount(metric, found.high)})"
        shown += " or more" if found.low == value else f" ({amount(metric, found.low)} or more)"
    return shown


def _limit(found: CheckedBudget) -> str:
    metric, limit = found.budget.metric, found.budget.limit
    if found.baseline is None and found.budget.text.startswith("max increase "):
        return units.DASH  # there is nothing that it could be an increase of
    shown = amount(metric, limit)
    is_exact = found.value is not None and found.value != limit and shown == amount(metric, found.value)
    return f"{found.budget.relation} {number(limit) if is_exact else shown}"


def _over(found: CheckedBudget) -> str:
    """How far the figure is from its limit, relative to it."""
    if found.value is None or not found.budget.limit:
        return ""
    return units.change(found.value / found.budget.limit - 1)


def _growth(found: CheckedBudget) -> str:
    """How far the figure is from the baseline's, relative to it."""
    if found.value is None or not found.baseline:
        return ""
    return units.change(found.value / found.baseline - 1)


def _mark(result: CheckResult, found: CheckedBudget) -> str:
    return "FAIL" if found in result.failures else _MARKS[found.outcome]


_HEADERS = ("", "Budget", "Value", "Limit", "Over", "Baseline", "Growth")
# What goes first where a terminal is narrow; without a baseline its two columns are not there.
_RANKS = (0, 0, 0, 0, 2, 3, 1)


# Narrower, a table has no room for intervals: what a value is held against matters more.
_LEAST_WITH_INTERVALS = 72


def _columns(result: CheckResult, width: int = _LEAST_WITH_INTERVALS) -> Columns:
    """Each column of the budgets with its texts."""
    has_interval = width >= _LEAST_WITH_INTERVALS
    rows = [
        (
            _mark(result, found), found.budget.text, _figure(found, has_interval=has_interval), _limit(found),
            _over(found), amount(found.budget.metric, found.baseline), _growth(found),
        )
        for found in result.budgets
    ]  # fmt: skip
    has_baseline = any(found.baseline is not None for found in result.budgets)
    kept = len(_HEADERS) if has_baseline else _HEADERS.index("Baseline")
    return [(_HEADERS[place], [row[place] for row in rows]) for place in range(kept)]


def _blamed(result: CheckResult) -> Iterator[tuple[str, Columns]]:
    """The layers behind budgets that are not kept, each layer once: those that grew, then the largest."""
    for is_growth, title in ((True, "layers that grew most"), (False, "largest layers")):
        found = [it for it in result.budgets if it.layers and _is_growth(it) == is_growth]
        if not found:
            continue
        layers = list(dict.fromkeys((layer.path, layer.kind) for it in found for layer in it.layers))
        columns = [("Layer", [path for path, _ in layers]), ("Type", [kind for _, kind in layers])]
        for metric in dict.fromkeys(it.budget.metric for it in found):
            parts = {
                (layer.path, layer.kind): layer for it in found if it.budget.metric == metric for layer in it.layers
            }
            columns.append((metric, [_part(metric, parts.get(layer)) for layer in layers]))
        yield title, columns


def _is_growth(found: CheckedBudget) -> bool:
    return any(layer.baseline is not None and layer.value > layer.baseline for layer in found.layers)


def _part(metric: str, layer: Contribution | None) -> str:
    """A layer's part in a figure, and what it was."""
    if layer is None:
        return ""
    now = amount(metric, layer.value)
    return now if layer.baseline is None else f"{amount(metric, layer.baseline)} → {now}"


def details(found: CheckedBudget) -> Iterator[str]:
    """Why one budget is not kept, line by line."""
    metric = found.budget.metric
    if found.value is not None:
        over = f" ({_over(found)})" if _over(found) else ""
        yield f"{metric} is {_figure(found)}; the limit is {_limit(found)}{over}"
    if found.baseline is not None:
        grown = f" ({_growth(found)})" if _growth(found) else ""
        yield f"the baseline had {amount(metric, found.baseline)}{grown}"
    if found.reason:
        yield found.reason
    if found.layers:
        yield "layers that grew most:" if _is_growth(found) else "largest layers:"
        yield from (f"  {layer.path} ({layer.kind}): {_part(metric, layer)}" for layer in found.layers)


def _reasons(result: CheckResult) -> Iterator[str]:
    """Why budgets are undecided or unknown."""
    return (f"{found.budget.text} is {found.outcome}: {found.reason}" for found in result.budgets if found.reason)


def _strips(columns: Columns, name: int, ranks: Sequence[int]) -> list[Strip]:
    """The columns for a terminal; the one at `name` may be shortened."""
    return [
        Strip(
            header,
            tuple(Cell(printable(text)) for text in texts),
            "left" if place < 2 else "right",
            16 if place == name else None,
            rank,
        )
        for place, ((header, texts), rank) in enumerate(zip(columns, ranks, strict=False))
    ]


def render(result: CheckResult, width: int | None = None) -> str:
    """The result as text: one line per budget, why some do not hold, and the layers to blame, each once."""

    def draw(console: Console) -> None:
        print_table(console, _strips(_columns(result, console.width), 1, _RANKS))
        for title, columns in _blamed(result):
            console.print(Text(f"{title}:"))
            print_table(console, _strips(columns, 0, tuple(range(len(columns)))))
        for sentence in (*_reasons(result), *(f"note: {remark}" for remark in result.remarks), verdict(result)):
            for line in textwrap.wrap(printable(sentence), console.width, break_on_hyphens=False):
                console.print(Text(line), soft_wrap=True)

    return rendered(draw, width=width)


def as_markdown(result: CheckResult) -> str:
    """For a pull request: one line per budget; what is to blame folded under it, each layer once."""
    signs = {"ok": "✅", "FAIL": "❌", "?": "❔"}
    lines = [f"### {'✅' if result.passed else '❌'} {markdown(verdict(result))}", ""]
    columns = _columns(result)
    columns[0] = ("", [signs[mark] for mark in columns[0][1]])
    lines += _markdown_table(columns)
    lines += ["", *(f"- {markdown(reason)}" for reason in _reasons(result))]
    for title, blamed in _blamed(result):
        lines += ["", f"<details><summary>{html(title)}</summary>", "", *_markdown_table(blamed), "", "</details>"]
    return "\n".join([*lines, "", *(f"- {markdown(remark)}" for remark in result.remarks)]).rstrip() + "\n"


def _markdown_table(columns: Columns) -> Iterator[str]:
    yield "| " + " | ".join(header for header, _ in columns) + " |"
    yield "| " + " | ".join("---" if place < 2 else "--:" for place in range(len(columns))) + " |"
    for row in zip(*(texts for _, texts in columns), strict=True):
        yield "| " + " | ".join(map(markdown, row)) + " |"


def as_junit(result: CheckResult) -> str:
    """JUnit XML: each budget is a test case; an undecided one that may pass is skipped."""
    undecided = [found for found in result.budgets if found.outcome == "undecided" and found not in result.failures]
    counts = {"tests": len(result.budgets), "failures": len(result.failures), "errors": 0, "skipped": len(undecided)}
    attributes = {name: str(count) for name, count in counts.items()}
    root = ElementTree.Element("testsuites", {"name": "edge-opt check", **attributes})
    suite = ElementTree.SubElement(root, "testsuite", {"name": xml(printable(result.name)), **attributes})
    for found in result.budgets:
        names = {"classname": f"edge-opt.{printable(result.name)}", "name": printable(found.budget.text)}
        case = ElementTree.SubElement(suite, "testcase", names)
        if found.outcome == "holds":
            continue
        why = list(details(found))
        tag = "failure" if found in result.failures else "skipped"
        element = ElementTree.SubElement(case, tag, {"message": xml(printable(why[0] if why else found.outcome))})
        if tag == "failure":
            element.set("type", found.outcome)
        element.text = xml("\n".join(map(printable, why)))
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _parts(result: CheckResult) -> Iterator[str]:
    yield _html_table(_columns(result))
    for title, columns in _blamed(result):
        yield f"<p><strong>{html(title)}</strong></p>" + _html_table(columns)
    yield notes((*_reasons(result), *result.remarks))


def _html_table(columns: Columns) -> str:
    rows = (
        [cell(text, "name" if place < 2 else "more" if text == "FAIL" else "") for place, text in enumerate(row)]
        for row in zip(*(texts for _, texts in columns), strict=True)
    )
    return table([header for header, _ in columns], rows, names=2)


def check_html(result: CheckResult) -> str:
    """The result for a notebook."""
    return fragment(f"<strong>{html(verdict(result))}</strong>", *_parts(result))


_WRITERS: dict[str, Callable[[CheckResult], str]] = {
    ".json": document,
    ".md": as_markdown,
    ".xml": as_junit,
    ".html": lambda result: page(verdict(result), *_parts(result)),
    ".txt": lambda result: render(result) + "\n",
}
