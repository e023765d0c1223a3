"""A profile as text: a tree or a list of its layers, over what there is to say of the whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console
from rich.text import Text

from edge_opt import units
from edge_opt.errors import InvalidInput
from edge_opt.records.costs import OpCost, Shape
from edge_opt.records.predictions import DeviceMemory
from edge_opt.records.profiles import Level, ModelProfile
from edge_opt.report.summary import NO_WORK, summary_lines
from edge_opt.report.table import (
    Node,
    Row,
    columns,
    combined,
    cut,
    deepest_that_fits,
    heading,
    module_tree,
    root_row,
    rows_of,
    walk,
)
from edge_opt.report.terminal import LUXURY, Cell, Strip, grid, print_sentences, rendered
from edge_opt.text import printable

ROWS_AT_MOST = 50


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
    shown = deepest_that_fits(tree, ROWS_AT_MOST) if depth is None else depth
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


_BAR_WIDTH = 5
# What the share beside the MACs is a share of; peaks and intensities do not add up, so they have none.
_SHARES = {
    "macs": "MACs %", "flops": "FLOPs %", "params": "Params %", "bytes": "Moved %", "activations": "Activ. %",
    "time": "Time %", "predicted": "Pred. %",
}  # fmt: skip


def render(
    profile: ModelProfile,
    depth: int | None = None,
    sort: str | None = None,
    top: int | None = None,
    color: bool = False,
    width: int | None = None,
    level: Level = "modules",
    is_verbose: bool = False,
) -> str:
    """The profile as text, as `show` prints it; without a width, for the terminal there is, or 100 columns."""
    options: dict[str, Any] = {"depth": depth, "sort": sort, "top": top, "level": level, "is_verbose": is_verbose}
    return rendered(lambda console: show(profile, console, **options), color=color, width=width)


def show(
    profile: ModelProfile,
    console: Console,
    depth: int | None = None,
    sort: str | None = None,
    top: int | None = None,
    level: Level = "modules",
    is_verbose: bool = False,
) -> None:
    """Print the profile, with every remark on its figures or the first ones only.

    Modules stand as a tree down to `depth`, what lies deeper folded into its ancestor; without a depth, as deep as a
    screen or so holds. `sort` makes it a list, largest first, whose rows add up; `top` keeps the first so many.
    """
    found = view(profile, level, depth, sort, top)
    if found.lines:
        for line in grid(_strips(profile, found.lines, level, sort), console.width):
            console.print(line, soft_wrap=True)
        if found.remark:
            console.print(Text(found.remark, style="dim"))
        console.print()
    print_sentences(console, summary_lines(profile, is_verbose=is_verbose))


def _strips(profile: ModelProfile, lines: Sequence[Line], level: Level, sort: str | None) -> list[Strip]:
    rows = [line.row for line in lines]

    def known(header: str, pick: Callable[[Row], int], text: Callable[[float], str], rank: int = 0) -> Strip:
        return Strip(header, tuple(_number(pick(row), text) for row in rows), rank=rank)

    def priced(header: str, pick: Callable[[OpCost], int], text: Callable[[float], str], rank: int = 0) -> Strip:
        return Strip(header, tuple(_priced(row, pick, text) for row in rows), rank=rank)

    def texts(header: str, pick: Callable[[Row], str], rank: int, floor: int | None = None) -> Strip:
        return Strip(header, tuple(Cell(printable(pick(row)), style="cyan") for row in rows), "left", floor, rank)

    # What the list is sorted by is never left out.
    rank = {"flops": 7, "bytes": 5, "peak": 4, "activations": LUXURY, "intensity": LUXURY + 1} | {sort: 0}
    names = tuple(Cell(printable(line.label), line.guides) for line in lines)
    if level == "operators":
        head = [
            Strip("#", tuple(Cell(str(row.index) if row.op else "", style="dim") for row in rows)),
            Strip("Operator", names, "left", floor=18),
            texts("Kind", lambda row: row.type, rank=2, floor=10),
            texts("Module", lambda row: row.path, rank=1, floor=18),
            texts(heading("out_shape"), lambda row: _output(row.outputs), rank=3),
        ]
    else:
        head = [
            # A tree shows the end of each path behind its guides; a list needs room for whole paths.
            Strip("Module", names, "left", floor=20 if any(line.guides for line in lines) else 34),
            texts("Type", lambda row: row.type, rank=2, floor=12),
            texts(heading("out_shape"), lambda row: _output(row.outputs), rank=3),
            known(heading("params"), lambda row: row.params, units.count),
        ]
    peak = heading("live_bytes" if level == "operators" else "peak_live_bytes")
    return [
        *head,
        *_times(profile, rows, level),
        *_predictions(profile, rows, level),
        priced(heading("macs"), lambda cost: cost.macs, units.count),
        *_shares(profile, lines, sort or "macs"),
        priced(heading("flops"), lambda cost: cost.flops, units.count, rank["flops"]),
        priced(heading("bytes_moved"), lambda cost: cost.bytes_moved, units.size, rank["bytes"]),
        known(peak, lambda row: row.peak_live_bytes, units.size, rank["peak"]),
        known(heading("activation_bytes"), lambda row: row.activation_bytes, units.size, rank["activations"]),
        Strip(heading("intensity"), tuple(map(_intensity, rows)), rank=rank["intensity"]),
    ]


def _times(profile: ModelProfile, rows: Sequence[Row], level: Level) -> list[Strip]:
    """Measured time of each row, where layers were measured."""
    if level == "operators" or profile.measurement is None or profile.measurement.layers is None:
        return []
    cells = (Cell("") if row.measured_s is None else _number(row.measured_s, units.duration) for row in rows)
    return [Strip(heading("measured_s"), tuple(cells))]


def _predictions(profile: ModelProfile, rows: Sequence[Row], level: Level) -> list[Strip]:
    """Time on the first target and what it goes to, where there is one."""
    if level == "operators" or profile.prediction is None:
        return []
    found = [row.predicted or NO_WORK for row in rows]
    times = (Cell("?", style="yellow") if it.seconds is None else _number(it.seconds, units.duration) for it in found)
    bounds = (Cell("" if it.seconds == 0 else it.bound, style="cyan") for it in found)
    return [Strip("Predicted", tuple(times)), Strip("Bound by", tuple(bounds), "left", rank=1)]


def _number(value: float, text: Callable[[float], str], style: str = "") -> Cell:
    return Cell(text(value), style=style if value else "dim")


def _priced(row: Row, pick: Callable[[OpCost], int], text: Callable[[float], str]) -> Cell:
    """A cost; with unpriced operators in it only a lower bound, without any price a question mark."""
    if row.cost is None:
        return Cell("?", style="yellow")
    value = pick(row.cost)
    return Cell(f"≥ {text(value)}", style="yellow") if row.unpriced else _number(value, text)


def _intensity(row: Row) -> Cell:
    """FLOPs per byte; a quotient of two lower bounds bounds nothing."""
    if row.unpriced or row.cost is None:
        return Cell("?", style="yellow")
    return Cell(units.ratio(row.cost.intensity), style="" if row.cost.intensity else "dim")


def _output(shapes: Sequence[Shape]) -> str:
    more = f" +{len(shapes) - 1}" if len(shapes) > 1 else ""
    return units.shape(shapes[0]) + more if shapes else ""


def _shares(profile: ModelProfile, lines: Sequence[Line], key: str) -> list[Strip]:
    """Each row's share of the whole as a number, and as a bar that is full for the largest part."""
    key = key if key in _SHARES else "macs"
    whole = SORT_KEYS[key](root_row(profile))
    if not whole:
        return []
    shares = [SORT_KEYS[key](line.row) / whole for line in lines]
    longest = max((value for line, value in zip(lines, shares, strict=True) if line.is_part), default=0.0) or 1.0
    percents = tuple(Cell(units.percent(value) if value else "") for value in shares)
    bars = tuple(
        Cell(_bar(value / longest) if line.is_part else "", style="green")
        for line, value in zip(lines, shares, strict=True)
    )
    number = Strip(_SHARES[key], percents)
    return [number, Strip("", bars, "left", rank=6)] if any(bar.text for bar in bars) else [number]


def _bar(part: float) -> str:
    halves = round(part * 2 * _BAR_WIDTH)
    return "━" * (halves // 2) + "╸" * (halves % 2)


def device_memory_text(found: DeviceMemory) -> str:
    """Device memory in a few lines: the peaks, where they stand, and what is not in them."""
    unasked = f"{found.fragmentation:.1%} of it asked for by no tensor"
    lines = [
        f"{found.device} memory, {found.source}",
        f"  weights and inputs  {units.size(found.resident_bytes)}",
        f"  requested           {units.size(found.requested_bytes)}",
        f"  allocated           {units.size(found.allocated_bytes)}, at {found.peak_module or 'the forward itself'}",
        f"  reserved            {units.size(found.reserved_bytes)}, {unasked}",
    ]
    return "\n".join([*lines, *(f"note: {note}" for note in found.notes)])
