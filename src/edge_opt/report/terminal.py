"""The view for a terminal: a tree of modules or a sorted list, with a summary under it."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.text import Text

from edge_opt import units
from edge_opt.records import Level, ModelProfile, OpCost, Shape
from edge_opt.report.grid import LUXURY, Cell, Strip, grid
from edge_opt.report.lines import SORT_KEYS, Line, View, view
from edge_opt.report.predicted import NO_WORK
from edge_opt.report.rows import Row, root_row
from edge_opt.report.summary import summary_lines
from edge_opt.report.text import printable

WIDTH = 100
_BAR_WIDTH = 5
_LABEL_WIDTH = 13
_ASCII = str.maketrans(
    {
        units.TIMES: "x",
        units.DASH: "-",
        "│": "|",
        "├": "|",
        "└": "`",
        "─": "-",
        "━": "=",
        "╸": "-",
        "≥": ">=",
        "—": "-",
        "…": "~",
    }
)
# What the share beside the MACs is a share of; peaks and intensities do not add up, so they have none.
_SHARES = {
    "macs": "MACs %", "flops": "FLOPs %", "params": "Params %", "bytes": "Moved %", "activations": "Activ. %",
    "time": "Time %", "predicted": "Pred. %",
}  # fmt: skip


def rendered(draw: Callable[[Console], None], color: bool = False, width: int | None = None) -> str:
    """What is drawn on a console, as text; without a width, for 100 columns."""
    out = io.StringIO()
    console = Console(
        file=out,
        width=width or WIDTH,
        force_terminal=color,
        color_system="standard" if color else None,
        legacy_windows=False,
    )
    draw(console)
    return "\n".join(line.rstrip() for line in out.getvalue().rstrip().splitlines())


def drawn(console: Console, draw: Callable[[], None]) -> None:
    """Draw; where the terminal knows ASCII only, with the nearest letters that it has."""
    if not console.options.ascii_only:
        draw()
        return
    with console.capture() as printed:
        draw()
    console.file.write(printed.get().translate(_ASCII).encode("ascii", "backslashreplace").decode("ascii"))


def print_sentences(console: Console, lines: Sequence[tuple[str, str]]) -> None:
    """Labels with a sentence each, wrapped beside them."""
    for label, sentence in lines:
        style = "yellow" if label in ("Unpriced", "Note") else ""
        parts = textwrap.wrap(printable(sentence), max(console.width - _LABEL_WIDTH, 20), break_on_hyphens=False)
        for position, part in enumerate(parts):
            head = (label if position == 0 else "").ljust(_LABEL_WIDTH)
            console.print(Text.assemble((head, "bold"), (part, style)), soft_wrap=True)


def render(
    profile: ModelProfile,
    depth: int | None = None,
    sort: str | None = None,
    top: int | None = None,
    color: bool = False,
    width: int | None = None,
    level: Level = "modules",
) -> str:
    """The profile as text, as `show` prints it; without a width, for 100 columns."""
    return rendered(
        lambda console: show(profile, console, depth=depth, sort=sort, top=top, level=level), color=color, width=width
    )


def show(
    profile: ModelProfile,
    console: Console,
    depth: int | None = None,
    sort: str | None = None,
    top: int | None = None,
    level: Level = "modules",
) -> None:
    """Print the profile.

    Modules stand as a tree down to `depth`, what lies deeper folded into its ancestor; without a depth, as deep as a
    screen or so holds. `sort` makes it a list, largest first, whose rows add up; `top` keeps the first so many.
    """
    found = view(profile, level, depth, sort, top)
    drawn(console, lambda: _print(profile, console, found, level, sort))


def _print(profile: ModelProfile, console: Console, found: View, level: Level, sort: str | None) -> None:
    if found.lines:
        for line in grid(_strips(profile, found.lines, level, sort), console.width):
            console.print(line, soft_wrap=True)
        if found.remark:
            console.print(Text(found.remark, style="dim"))
        console.print()
    print_sentences(console, summary_lines(profile))


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
            Strip("Operator", names, "left", floor=18),
            texts("Kind", lambda row: row.type, rank=2, floor=10),
            texts("Module", lambda row: row.path, rank=1, floor=18),
            texts("Output", lambda row: _output(row.outputs), rank=3),
        ]
    else:
        head = [
            Strip("Module", names, "left", floor=20),
            texts("Type", lambda row: row.type, rank=2, floor=12),
            texts("Output", lambda row: _output(row.outputs), rank=3),
            known("Params", lambda row: row.params, units.count),
        ]
    return [
        *head,
        *_times(profile, rows, level),
        *_predictions(profile, rows, level),
        priced("MACs", lambda cost: cost.macs, units.count),
        *_shares(profile, lines, sort or "macs"),
        priced("FLOPs", lambda cost: cost.flops, units.count, rank["flops"]),
        priced("Moved", lambda cost: cost.bytes_moved, units.size, rank["bytes"]),
        known("Live" if level == "operators" else "Peak", lambda row: row.peak_live_bytes, units.size, rank["peak"]),
        known("Activations", lambda row: row.activation_bytes, units.size, rank["activations"]),
        Strip("FLOPs/byte", tuple(map(_intensity, rows)), rank=rank["intensity"]),
    ]


def _times(profile: ModelProfile, rows: Sequence[Row], level: Level) -> list[Strip]:
    """Measured time of each row, where layers were measured."""
    if level == "operators" or profile.measurement is None or profile.measurement.layers is None:
        return []
    cells = (Cell("") if row.measured_s is None else _number(row.measured_s, units.duration) for row in rows)
    return [Strip("Time", tuple(cells))]


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
