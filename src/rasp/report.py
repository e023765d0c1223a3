"""The report: which module calls make up each row of a table."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rasp.tree import Node, Shapes

if TYPE_CHECKING:
    from edge_opt import ModelProfile

REPORT_TYPES = ("tape", "leaves", "all", "node", "root")


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a report: the calls whose own work it sums, labelled as the first of them."""

    name: str
    type: str
    in_shape: Shapes | None
    out_shape: Shapes | None
    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """Rows with their total. The notes say what the rows do not show."""

    model: str
    report_type: str | None
    rows: tuple[Row, ...]
    total: Row
    notes: tuple[str, ...]


def build_report(profile: ModelProfile, root: Node, report_type: str | None, include_root: bool) -> Report:
    """The rows of a report type.

    `tape`: calls of leaf modules in order of execution. A module with children has a line here only for what it does
    itself outside of them, where that is MACs (a functional matmul, attention) or parameters of its own; it stands
    where the module was entered. Its element-wise work, such as a residual add, is in the rows of `all` and `node`.
    `leaves`: the same, with calls of the same module merged.
    `all`: every module that ran, in tree order, each with everything beneath it; calls of one module merged.
    `node`: of these, the modules with children. `root`: the model alone.

    The total of `tape` and `leaves` is the sum of their rows, and that of the others the whole model. A root row
    that was asked for comes first, and is not summed again.
    """
    rows = _rows(root, report_type)
    if include_root and report_type not in (None, "root") and root.children:
        rows = (_row(root, root.walk()), *rows)
    is_by_leaves = report_type in ("tape", "leaves")
    parts = tuple(_shown(root)) if is_by_leaves else tuple(root.walk())
    total = Row("total", "", None, None, parts)
    return Report(root.type, report_type, rows, total, _notes(profile, root, total))


def _rows(root: Node, report_type: str | None) -> tuple[Row, ...]:
    if report_type == "tape":
        return tuple(_row(node, [node]) for node in _shown(root))
    if report_type == "leaves":
        return tuple(_row(calls[0], calls) for calls in _by_module(_shown(root)))
    if report_type == "root":
        return (_row(root, root.walk()),)
    modules = _by_module(node for child in root.children for node in child.walk())
    if report_type == "all":
        return tuple(_subtree_row(calls) for calls in modules)
    if report_type == "node":
        return tuple(_subtree_row(calls) for calls in modules if any(call.children for call in calls))
    return ()


def _shown(root: Node) -> list[Node]:
    """The calls that have a line in a tape."""
    return [node for node in root.walk() if node.is_leaf or node.own.macc or node.params]


def _by_module(nodes: Iterable[Node]) -> list[list[Node]]:
    modules: dict[str, list[Node]] = {}
    for node in nodes:
        modules.setdefault(node.name, []).append(node)
    return list(modules.values())


def _row(first: Node, parts: Iterable[Node]) -> Row:
    return Row(first.name, first.type, first.in_shape, first.out_shape, tuple(parts))


def _subtree_row(calls: list[Node]) -> Row:
    # By index: a module that calls itself must not count the inner call twice.
    parts = {node.index: node for call in calls for node in call.walk()}
    return _row(calls[0], parts.values())


def _notes(profile: ModelProfile, root: Node, total: Row) -> tuple[str, ...]:
    notes = list(profile.trace.notes)
    if profile.unpriced:
        names = ", ".join(sorted({item.op for item in profile.unpriced}))
        notes.append(f"operators without a price: {names}; the figures are lower bounds")
    shown = {node.index for node in total.parts}
    hidden = [node for node in root.walk() if node.index not in shown and (node.own.flops or node.own.bytes_read)]
    if hidden:
        flops = sum(node.own.flops for node in hidden)
        moved = sum(node.own.bytes_read + node.own.bytes_written for node in hidden)
        notes.append(
            f"functional work of modules with children that has no row here: {flops} flops, {moved} bytes in "
            f"{len(hidden)} calls; report_type='all' includes it"
        )
    idle = profile.trace.params - sum(node.params for node in root.walk())
    if idle > 0:
        notes.append(f"{idle} parameters were not read in this run, and are not counted")
    return tuple(notes)
