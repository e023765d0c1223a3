"""Checks of budgets as sheets, JSON and JUnit."""

from __future__ import annotations

from collections.abc import Iterator
from xml.etree import ElementTree

from edge_opt import units
from edge_opt._support.json import dumps_document, to_plain
from edge_opt.budgets.budget_metrics import PROFILE_METRICS
from edge_opt.records.profiles import CheckedBudget, CheckResult, Contribution
from edge_opt.report.comparison import figure_text
from edge_opt.report.sheets import Cell, Column, Sheet, column, sheet, text_column
from edge_opt.text import lines, printable

FORMAT = "edge_opt.check"
_MARKS = {"holds": "ok", "broken": "FAIL", "undecided": "?", "unknown": "FAIL"}


def document(result: CheckResult) -> str:
    """Return everything, as JSON."""
    return dumps_document(FORMAT, 1, {"passed": result.passed, **to_plain(result)})


def number(value: float) -> str:
    """Return a figure in its metric's unit, in full, so that a limit missed by one is seen."""
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.6g}"


def amount(metric: str, value: float | None) -> str:
    """Return a figure of a metric with its unit, scaled.

    >>> amount("macs", 2_790_000), amount("peak_memory_mb", 0.0238), amount("latency_ms", 12.34)
    ('2.79 M', '24.4 KiB', '12.3 ms')
    """
    known = PROFILE_METRICS.get(metric)
    if value is None or known is None:
        return units.DASH if value is None else number(value)
    return figure_text(known.kind, value * known.scale)


def verdict(result: CheckResult) -> str:
    """Return the outcome in one sentence."""
    failed, undecided = len(result.failures), sum(it.outcome == "undecided" for it in result.budgets)
    count = f"{len(result.budgets)} budget{'s' * (len(result.budgets) != 1)}"
    open_ones = f", {undecided} undecided" if undecided else ""
    if failed:
        return f"{result.name}: {failed} of {count} not kept{open_ones}"
    return f"{result.name}: within {count}{open_ones}"


def _value(budget: CheckedBudget) -> str:
    metric, value, limit = budget.budget.metric, budget.value, budget.budget.limit
    if value is None:
        return "not known"
    shown = amount(metric, value)
    if shown == amount(metric, limit) and value != limit:
        shown = number(value)
    is_lower_bound = budget.low == value and budget.high == float("inf")
    return f"{shown} or more" if is_lower_bound else shown


def _interval(budget: CheckedBudget) -> str:
    """Return how well the value is known; nothing where it is exact or only a lower bound."""
    metric, low, high = budget.budget.metric, budget.low, budget.high
    if budget.value is None or low is None or high is None or (low == budget.value and high == float("inf")):
        return ""
    return f"{amount(metric, low)} " + (f"to {amount(metric, high)}" if high < float("inf") else "or more")


def _limit(budget: CheckedBudget) -> str:
    metric, limit = budget.budget.metric, budget.budget.limit
    if budget.baseline is None and budget.budget.text.startswith("max increase "):
        return units.DASH  # there is nothing that it could be an increase of
    shown = amount(metric, limit)
    is_exact = budget.value is not None and budget.value != limit and shown == amount(metric, budget.value)
    return f"{budget.budget.relation} {number(limit) if is_exact else shown}"


def _change(value: float | None, base: float | None) -> str:
    return "" if value is None or not base else units.change(value / base - 1)


def _is_growth(budget: CheckedBudget) -> bool:
    return any(layer.baseline is not None and layer.value > layer.baseline for layer in budget.layers)


def _part(metric: str, layer: Contribution | None) -> str:
    """Return a layer's part in a figure, and what it was."""
    if layer is None:
        return ""
    now = amount(metric, layer.value)
    return now if layer.baseline is None else f"{amount(metric, layer.baseline)} → {now}"


def _details(budget: CheckedBudget) -> Iterator[str]:
    """Yield why one budget is not kept, line by line."""
    metric = budget.budget.metric
    if budget.value is not None:
        interval = f" ({_interval(budget)})" if _interval(budget) else ""
        over = _change(budget.value, budget.budget.limit)
        yield f"{metric} is {_value(budget)}{interval}; the limit is {_limit(budget)}" + (f" ({over})" if over else "")
    if budget.baseline is not None:
        grown = _change(budget.value, budget.baseline)
        yield f"the baseline had {amount(metric, budget.baseline)}" + (f" ({grown})" if grown else "")
    if budget.reason:
        yield budget.reason
    if budget.layers:
        yield "layers that grew most:" if _is_growth(budget) else "largest layers:"
        yield from (f"  {layer.path} ({layer.kind}): {_part(metric, layer)}" for layer in budget.layers)


def as_junit(result: CheckResult) -> str:
    """Return JUnit XML: each budget is a test case; an undecided one that may pass is skipped."""
    undecided = [it for it in result.budgets if it.outcome == "undecided" and it not in result.failures]
    counts = {"tests": len(result.budgets), "failures": len(result.failures), "errors": 0, "skipped": len(undecided)}
    attributes = {name: str(count) for name, count in counts.items()}
    root = ElementTree.Element("testsuites", {"name": "edge-opt check", **attributes})
    suite = ElementTree.SubElement(root, "testsuite", {"name": lines(printable(result.name)), **attributes})
    for budget in result.budgets:
        names = {"classname": f"edge-opt.{printable(result.name)}", "name": printable(budget.budget.text)}
        case = ElementTree.SubElement(suite, "testcase", names)
        if budget.outcome == "holds":
            continue
        why = list(_details(budget))
        tag = "failure" if budget in result.failures else "skipped"
        element = ElementTree.SubElement(case, tag, {"message": lines(printable(why[0] if why else budget.outcome))})
        if tag == "failure":
            element.set("type", budget.outcome)
        element.text = lines("\n".join(map(printable, why)))
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


@sheet(CheckResult, files={".json": document, ".xml": as_junit})
def check_sheet(result: CheckResult) -> Sheet:
    """Return one line per budget, why some do not hold, and the layers behind those that are not kept."""
    budgets = result.budgets
    marks = ["FAIL" if it in result.failures else _MARKS[it.outcome] for it in budgets]
    intervals = [_interval(it) for it in budgets]
    columns = [
        Column("", tuple(Cell(mark, style="red" if mark == "FAIL" else "") for mark in marks), "left"),
        text_column("Budget", (it.budget.text for it in budgets), min_width=16),
        column("Value", map(_value, budgets)),
        *([column("Interval", intervals, 4)] if any(intervals) else []),
        column("Limit", map(_limit, budgets)),
        column("Over", (_change(it.value, it.budget.limit) for it in budgets), 2),
    ]
    if any(it.baseline is not None for it in budgets):
        columns.append(column("Baseline", (amount(it.budget.metric, it.baseline) for it in budgets), 3))
        columns.append(column("Growth", (_change(it.value, it.baseline) for it in budgets), 1))
    reasons = ((it.outcome.capitalize(), f"{it.budget.text}: {it.reason}") for it in budgets if it.reason)
    notes = (*reasons, *(("Note", remark) for remark in result.remarks))
    return Sheet(verdict(result), (tuple(columns),), notes, parts=tuple(_blamed(result)))


def _blamed(result: CheckResult) -> Iterator[Sheet]:
    """Yield the layers behind budgets that are not kept, each layer once: those that grew, then the largest."""
    for is_growth, title in ((True, "layers that grew most"), (False, "largest layers")):
        budgets = [it for it in result.budgets if it.layers and _is_growth(it) == is_growth]
        if not budgets:
            continue
        layers = list(dict.fromkeys((layer.path, layer.kind) for it in budgets for layer in it.layers))
        columns = [
            text_column("Layer", (path for path, _ in layers), min_width=16),
            text_column("Type", (kind for _, kind in layers), 1, None),
        ]
        for metric in dict.fromkeys(it.budget.metric for it in budgets):
            same = (it for it in budgets if it.budget.metric == metric)
            parts = {(layer.path, layer.kind): layer for it in same for layer in it.layers}
            columns.append(column(metric, (_part(metric, parts.get(layer)) for layer in layers), len(columns)))
        yield Sheet(title, (tuple(columns),))
