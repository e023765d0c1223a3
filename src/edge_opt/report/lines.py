"""Lines of the terminal's table: which rows to show, in which order, under which label."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from edge_opt import units
from edge_opt.errors import InvalidInput
from edge_opt.records import Level, ModelProfile, OpCost
from edge_opt.report.columns import columns
from edge_opt.report.rows import Row, combined
from edge_opt.report.tables import rows_of
from edge_opt.report.tree import Node, cut, deepest_that_fits, module_tree, walk

_ROWS_AT_MOST = 50


@dataclass(frozen=True, slots=True)
class Line:
    """One line: a row under its label, behind the guides of a tree. The whole and the remainder are no parts."""

    label: str
    row: Row
    guides: str = ""
    is_part: bool = True


@dataclass(frozen=True, slots=True)
class View:
    """The lines to show, and one sentence about those that are not shown."""

    lines: tuple[Line, ...]
    remark: str | None


def _of_cost(pick: Callable[[OpCost], float | None]) -> Callable[[Row], float]:
    return lambda row: (pick(row.cost) or 0.0) if row.cost is not None else 0.0


SORT_KEYS: dict[str, Callable[[Row], float]] = {
    "macs": _of_cost(lambda cost: cost.macs),
    "flops": _of_cost(lambda cost: cost.flops),
    "params": lambda row: row.params,
    "bytes": _of_cost(lambda cost: cost.bytes_moved),
    "activations": lambda row: row.activation_bytes,
    "peak": lambda row: row.peak_live_bytes,
    "intensity": _of_cost(lambda cost: cost.intensity),
    "time": lambda row: row.measured_s or 0.0,
    "predicted": lambda row: (row.predicted.seconds if row.predicted else None) or 0.0,
}


def view(profile: ModelProfile, level: Level, depth: int | None, sort: str | None, top: int | None) -> View:
    """What to show. `top` alone means the most MACs; a depth folds what lies deeper into its ancestor."""
    check_view(level, depth, sort, top)
    if sort == "time" and (profile.measurement is None or profile.measurement.layers is None):
        raise InvalidInput("cannot sort by time: layers were not measured; profile with measure=True, or --measure")
    if sort == "predicted" and (profile.prediction is None or level == "operators"):
        cure = "choose another level" if profile.prediction else "profile with target=, or --target"
        raise InvalidInput(f"cannot sort by predicted: there is no prediction of {level}; {cure}")
    if level == "root":
        return View((), None)
    work = _own_work(profile)
    if level == "modules":
        tree = module_tree(profile)
        if sort is None and top is None:
            return _tree_view(tree, profile.name, depth, work)
        rows = cut(tree, depth)
    else:
        rows = rows_of(profile, level)
    if sort is not None or top is not None:
        rows = sorted(rows, key=SORT_KEYS[sort or "macs"], reverse=True)
    lines = [Line(_label(row, profile.name), row if row.is_leaf else _own(row, work)) for row in rows[:top]]
    if top is not None and len(rows) > top:
        others = replace(combined(rows[top:]), path="", type="", outputs=(), op="", calls=1)
        lines.append(Line(f"… {len(rows) - top} more", others, is_part=False))
    return View(tuple(lines), None)


def check_view(level: str, depth: int | None, sort: str | None, top: int | None) -> None:
    """Refuse what cannot be shown, before any work is done."""
    columns(level)
    if depth is not None and depth < 0:
        raise InvalidInput(f"depth is {depth}; it must be 0 (the model alone) or more")
    if depth is not None and level != "modules":
        raise InvalidInput(f"depth folds the tree of modules, and the level is {level!r}; drop one of the two")
    if top is not None and top < 1:
        raise InvalidInput(f"top is {top}; it must be at least 1")
    if sort is not None and sort not in SORT_KEYS:
        raise InvalidInput(f"cannot sort by {sort!r}; use one of {', '.join(SORT_KEYS)}")


def _label(row: Row, name: str) -> str:
    if row.op:
        return row.op.removeprefix("aten.")
    label = row.path or name
    if not row.is_leaf:
        label += " (own work)"
    if row.call_number > 1:
        label += f" (call {row.call_number})"
    return label if row.calls == 1 else f"{label} ({units.TIMES}{row.calls})"


def _own_work(profile: ModelProfile) -> dict[str, str]:
    """What each module does itself, by path: "attention", or where nothing is multiplied "elementwise, norm"."""
    kinds: dict[str, dict[str, int]] = {}
    for operator in profile.operators:
        if operator.status != "free":
            found = kinds.setdefault(operator.module, {})
            found[operator.kind] = found.get(operator.kind, 0) + operator.cost.macs
    return {
        path: ", ".join(kind for kind, macs in found.items() if macs or not any(found.values()))
        for path, found in kinds.items()
    }


def _own(row: Row, work: dict[str, str]) -> Row:
    return replace(row, type=work.get(row.path, ""), outputs=())


def _tree_view(tree: Node, name: str, depth: int | None, work: dict[str, str]) -> View:
    deepest = max(node.row.depth for node in walk(tree))
    shown = deepest_that_fits(tree, _ROWS_AT_MOST) if depth is None else depth
    remark = None
    if shown < deepest:
        remark = f"Folded at depth {shown} of {deepest}; depth {deepest} shows every module."
    return View(tuple(_branch(tree, name, "", "", shown, work)), remark)


def _branch(node: Node, label: str, guides: str, below: str, depth: int, work: dict[str, str]) -> Iterator[Line]:
    """The node's line and, down to `depth`, those of its children.

    A module with MACs or parameters outside its children gets a line for them, or what stands below would not add up.
    """
    calls = f" ({units.TIMES}{node.row.calls})" if node.row.calls > 1 else ""
    yield Line(label + calls, node.row, guides, is_part=bool(guides))
    if node.row.depth >= depth or not node.children:
        return
    prefix = f"{node.row.path}." if node.row.path else ""
    own = node.own.params > 0 or (node.own.cost is not None and node.own.cost.macs > 0)
    for position, child in enumerate(node.children):
        is_last = position == len(node.children) - 1 and not own
        yield from _branch(
            child,
            child.row.path.removeprefix(prefix),
            below + ("└ " if is_last else "├ "),
            below + ("  " if is_last else "│ "),
            depth,
            work,
        )
    if own:
        yield Line("(own work)", _own(node.own, work), below + "└ ")
