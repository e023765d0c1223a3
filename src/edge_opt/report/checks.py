"""Checks as text, Markdown and JUnit."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from xml.etree import ElementTree

from edge_opt import units
from edge_opt._support.files import write_whole
from edge_opt._support.json import to_plain
from edge_opt.errors import InvalidInput
from edge_opt.records import CheckedBudget, CheckResult, Contribution
from edge_opt.report.comparison import cell, fragment, notes, page, table
from edge_opt.text import html, markdown, printable, xml

FORMAT = "edge_opt.check"
_MARKS = {"holds": "ok", "broken": "FAIL", "undecided": "?", "unknown": "FAIL"}


def save(result: CheckResult, path: str | os.PathLike[str]) -> Path:
    """Write the result and return the path; the file is replaced as a whole, or left as it was."""
    suffix = Path(path).suffix.lower()
    if suffix not in _WRITERS:
        what = f"the suffix {suffix!r}" if suffix else "no suffix"
        raise InvalidInput(f"cannot write {str(path)!r}: it has {what}; use one of {', '.join(sorted(_WRITERS))}")
    return write(path, _WRITERS[suffix](result))


def write(path: str | os.PathLike[str], content: str) -> Path:
    """Put the file in place, or say why that cannot be."""
    try:
        return write_whole(path, content)
    except OSError as error:
        raise InvalidInput(f"cannot write {str(path)!r}: {error.strerror or error}") from error


def document(result: CheckResult) -> str:
    """Everything, as JSON."""
    plain = {"format": FORMAT, "passed": result.passed, **to_plain(result)}
    return json.dumps(plain, indent=1, allow_nan=False) + "\n"


def number(value: float | None) -> str:
    """A figure in its metric's unit: whole numbers in full, so that a limit missed by one is seen."""
    if value is None:
        return units.DASH
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.6g}"


def verdict(result: CheckResult) -> str:
    """The outcome in one sentence."""
    failed, undecided = len(result.failures), sum(found.outcome == "undecided" for found in result.budgets)
    count = f"{len(result.budgets)} budget{'s' * (len(result.budgets) != 1)}"
    open_ones = f", {undecided} undecided" if undecided else ""
    if failed:
        return f"{result.name}: {failed} of {count} not kept{open_ones}"
    return f"{result.name}: within {count}{open_ones}"


def _figure(found: CheckedBudget) -> str:
    if found.value is None:
        return "not known"
    shown = number(found.value)
    if found.low is not None and found.high is not None:
        if found.high < float("inf"):
            return f"{shown} ({number(found.low)} to {number(found.high)})"
        shown += " or more" if found.low == found.value else f" ({number(found.low)} or more)"
    return shown


def _limit(found: CheckedBudget) -> str:
    return f"{found.budget.relation} {number(found.budget.limit)}"


def _excess(found: CheckedBudget) -> str:
    """How far the figure is from its limit, relative to it."""
    if found.value is None or not found.budget.limit:
        return ""
    return f" ({units.change(found.value / found.budget.limit - 1)})"


def _layer(layer: Contribution) -> str:
    if layer.baseline is None:
        return f"{layer.path} ({layer.kind}): {number(layer.value)}"
    grown = layer.value - layer.baseline
    sign = "+" if grown >= 0 else units.MINUS
    return f"{layer.path} ({layer.kind}): {number(layer.baseline)} → {number(layer.value)} ({sign}{number(abs(grown))})"


def _title(found: CheckedBudget) -> str:
    """What the layers under a budget are."""
    is_growth = any(layer.baseline is not None and layer.value > layer.baseline for layer in found.layers)
    return "layers that grew most" if is_growth else "largest layers"


def details(found: CheckedBudget) -> Iterator[str]:
    """Why a budget is not kept, line by line."""
    if found.value is not None:
        yield f"{found.budget.metric} is {_figure(found)}; the limit is {_limit(found)}{_excess(found)}"
    if found.baseline is not None:
        yield f"the baseline had {number(found.baseline)}"
    if found.reason:
        yield found.reason
    if found.layers:
        yield f"{_title(found)}:"
        yield from (f"  {_layer(layer)}" for layer in found.layers)


def render(result: CheckResult) -> str:
    """The result as text: one line per budget, and under those that do not hold, why."""
    width = max(len(printable(found.budget.text)) for found in result.budgets)
    lines = []
    for found in result.budgets:
        name = printable(found.budget.text).ljust(width)
        mark = "FAIL" if found in result.failures else _MARKS[found.outcome]
        if found.outcome == "holds":
            lines.append(f"{mark:4}  {name}  {_figure(found)}")
            continue
        lines.append(f"{mark:4}  {name}  {found.outcome}")
        lines += [f"        {printable(line)}" for line in details(found)]
    return "\n".join([*lines, *(f"note: {printable(remark)}" for remark in result.remarks), printable(verdict(result))])


def as_markdown(result: CheckResult) -> str:
    """For a pull request: one line per budget; what is to blame folded under it."""
    mark = "✅" if result.passed else "❌"
    lines = [f"### {mark} {markdown(verdict(result))}", "", "| | Budget | Value | Limit | Baseline |"]
    lines.append("| --- | --- | --: | --: | --: |")
    for found in result.budgets:
        sign = "❌" if found in result.failures else "✅" if found.outcome == "holds" else "❔"
        cells = (found.budget.text, _figure(found), _limit(found), number(found.baseline))
        lines.append(f"| {sign} | {' | '.join(map(markdown, cells))} |")
    for found in result.budgets:
        if found.outcome != "holds":
            why = [f"- {markdown(line.strip())}" for line in details(found)]
            summary = html(f"{found.budget.text}: {found.outcome}")
            lines += ["", f"<details><summary>{summary}</summary>", "", *why, "", "</details>"]
    return "\n".join([*lines, "", *(f"- {markdown(remark)}" for remark in result.remarks)]).rstrip() + "\n"


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
    rows = [
        [
            cell(found.budget.text, "name"),
            cell(found.outcome, "more" if found in result.failures else "quiet" if found.outcome == "holds" else ""),
            cell(_figure(found)),
            cell(_limit(found)),
            cell(number(found.baseline)),
        ]
        for found in result.budgets
    ]
    yield table(["Budget", "", "Value", "Limit", "Baseline"], rows)
    for found in result.budgets:
        if found.outcome != "holds":
            yield f"<p><strong>{html(found.budget.text)}</strong></p>" + notes(details(found))
    yield notes(result.remarks)


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
