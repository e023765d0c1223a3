"""The report: which module calls make up each row of a table."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rasp.tree import Node, Shapes

if TYPE_CHECKING:
    from edge_opt import ModelProfile
    from edge_opt.records import ModuleMemory

REPORT_TYPES = ("tape", "leaves", "all", "node", "root")


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a report: the calls whose own work it sums, labelled as the first of them.

    Where it was measured: the line's seconds, when it was over, its share of the whole forward, and device memory.
    """

    name: str
    type: str
    in_shape: Shapes | None
    out_shape: Shapes | None
    parts: tuple[Node, ...]
    seconds: float = math.nan
    end_s: float = math.nan
    share: float = math.nan
    memory: ModuleMemory | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """Rows with their total. The notes say what the rows do not show."""

    model: str
    report_type: str | None
    rows: tuple[Row, ...]
    total: Row
    notes: tuple[str, ...]


def build_report(
    profile: ModelProfile, root: Node, report_type: str | None, include_root: bool, whole_s: float = math.nan
) -> Report:
    """The rows of a report type; `whole_s` is the measured latency of the model.

    `tape`: calls of leaf modules in order of execution. A module with children has a line here only for what it does
    itself outside of them, where that is MACs (a functional matmul, attention) or parameters of its own; it stands
    where the module was entered. Its element-wise work, such as a residual add, is in the rows of `all` and `node`.
    `leaves`: the same, with calls of the same module merged.
    `all`: every module that ran, in tree order, each with everything beneath it; calls of one module merged.
    `node`: of these, the modules with children. `root`: the model alone.

    The total of `tape` and `leaves` is the sum of their rows, and that of the others the whole model. A root row
    that was asked for comes first, and is not summed again. Latencies add up to less than the total, which is that of
    the whole forward: what lies between the modules belongs to none.
    """
    rows = _rows(root, report_type)
    if include_root and report_type not in (None, "root") and root.children:
        rows = (_row(root, root.walk()), *rows)
    rows = tuple(_measured(row, root, whole_s) for row in rows)
    is_by_leaves = report_type in ("tape", "leaves")
    parts = tuple(_shown(root)) if is_by_leaves else tuple(root.walk())
    total = Row("total", "", None, None, parts, whole_s, whole_s, 1.0, root.memory)
    return Report(root.type, report_type, rows, total, _notes(profile, root, total))


def _measured(row: Row, root: Node, whole_s: float) -> Row:
    """The row with its time and memory. The whole model takes what its forward takes, not the sum of its modules."""
    is_whole = row.parts[0] is root and len(row.parts) == sum(1 for _ in root.walk())
    seconds = whole_s if is_whole else math.fsum(node.own_s for node in row.parts)
    end_s = whole_s if is_whole else max(node.end_s for node in row.parts)
    return replace(row, seconds=seconds, end_s=end_s, share=seconds / whole_s, memory=_memory(row.parts))


def _memory(parts: tuple[Node, ...]) -> ModuleMemory | None:
    """Memory around the calls of a row; what a call shows includes its children, so only the outermost ones count."""
    inside = {child.index for node in parts for child in node.children}
    known = [node.memory for node in parts if node.memory is not None and node.index not in inside]
    if not known:
        return None
    return replace(
        known[0],
        allocated_bytes=sum(memory.allocated_bytes for memory in known),
        peak_bytes=max(memory.peak_bytes for memory in known),
    )


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
