"""Tables and sentences that fit a terminal: columns are dropped by priority, names are shortened in the middle."""

from __future__ import annotations

import io
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from edge_opt._support.progress import console_width
from edge_opt.text import printable, shorten

_GAP = 2
# Letters of a name that stay beside the deepest guides of a tree.
_NAME_LEAST = 6
LUXURY = 10


@dataclass(frozen=True, slots=True)
class Cell:
    """Text behind a fixed prefix, such as the guides of a tree; only the text is ever shortened."""

    text: str
    prefix: str = ""
    style: str = ""

    @property
    def width(self) -> int:
        return cell_len(self.prefix) + cell_len(self.text)


@dataclass(frozen=True, slots=True)
class Strip:
    """One column. `floor` is how narrow it may get, None: not at all. The highest `rank` is left out first, 0 never;
    from LUXURY on, it is left out rather than that another column gives way.
    """

    header: str
    cells: tuple[Cell, ...]
    justify: Literal["left", "right"] = "right"
    floor: int | None = None
    rank: int = 0

    @property
    def natural(self) -> int:
        return max(cell_len(self.header), max((cell.width for cell in self.cells), default=0))

    @property
    def narrowest(self) -> int:
        if self.floor is None:
            return self.natural
        deepest = max((cell_len(cell.prefix) + _NAME_LEAST for cell in self.cells), default=0)
        return min(self.natural, max(self.floor, deepest))


def fitted(strips: Sequence[Strip], width: int) -> list[tuple[Strip, int]]:
    """The columns that fit, with their widths: first the dispensable go, then the flexible give way.

    Whatever the width, no line is longer: at last columns go from the right, all but the first.
    """
    kept = list(strips)
    while len(kept) > 1:
        last = max(kept, key=lambda strip: strip.rank)
        wanted = [strip.natural if last.rank >= LUXURY else strip.narrowest for strip in kept]
        if sum(wanted) + _GAP * (len(kept) - 1) <= width:
            break
        kept.remove(last if last.rank else kept[-1])
    widths = [strip.natural for strip in kept]
    excess = sum(widths) + _GAP * (len(kept) - 1) - width
    # From the right: what a row is called matters more than what it is.
    for position in reversed(range(len(kept))):
        give = min(max(excess, 0), widths[position] - kept[position].narrowest)
        widths[position] -= give
        excess -= give
    widths[0] -= max(excess, 0)
    return list(zip(kept, widths, strict=True))


def grid(strips: Sequence[Strip], width: int) -> Iterator[Text]:
    """The lines of the table, header first. Nothing in them is read as markup."""
    columns = [(_shortened(strip, room), room) for strip, room in fitted(strips, width)]
    header = [
        _padded(Cell(shorten(strip.header, room, cell_len), style="bold"), strip, room) for strip, room in columns
    ]
    yield _joined(header)
    yield Text("─" * min(width, sum(room + _GAP for _, room in columns) - _GAP), style="dim")
    for position in range(len(strips[0].cells)):
        yield _joined([_padded(strip.cells[position], strip, room) for strip, room in columns])


def _shortened(strip: Strip, width: int) -> Strip:
    """Return the column with every text short enough; deep guides of a tree give way to the name behind them."""
    if strip.natural <= width:
        return strip
    cells = []
    for cell in strip.cells:
        prefix = cell.prefix[max(0, len(cell.prefix) - max(0, width - _NAME_LEAST)) :]
        cells.append(Cell(shorten(cell.text, width - cell_len(prefix), cell_len), prefix, cell.style))
    return replace(strip, cells=tuple(cells))


def _padded(cell: Cell, strip: Strip, width: int) -> Text:
    text = Text.assemble((cell.prefix, "dim"), (cell.text, cell.style))
    blank = " " * (width - cell_len(text.plain))
    return Text(blank).append_text(text) if strip.justify == "right" else text.append(blank)


def _joined(cells: list[Text]) -> Text:
    return Text(" " * _GAP).join(cells)


WIDTH = 100
LABEL_WIDTH = 13


def paper_width(otherwise: int = WIDTH) -> int:
    """Columns of the terminal that is printed to; elsewhere, as in a notebook or a file, the number given."""
    is_terminal = sys.stdout is not None and sys.stdout.isatty()
    return console_width(otherwise) if is_terminal else otherwise


def rendered(draw: Callable[[Console], None], color: bool = False, width: int | None = None) -> str:
    """What is drawn on a console, as text; without a width, for the terminal there is, or 100 columns."""
    out = io.StringIO()
    console = Console(
        file=out,
        width=width or paper_width(),
        force_terminal=color,
        color_system="standard" if color else None,
        legacy_windows=False,
    )
    draw(console)
    return "\n".join(line.rstrip() for line in out.getvalue().rstrip().splitlines())


def print_table(console: Console, strips: Sequence[Strip]) -> None:
    """A table as wide as the console allows, and an empty line."""
    for line in grid(strips, console.width):
        console.print(line, soft_wrap=True)
    console.print()


# A number and its unit stay on one line.
_UNIT = re.compile(r"(?<=\d) (?=(?:[KMGT]iB|B|ns|µs|ms|s|nJ|µJ|mJ|J|W|GB/s)\b)")
_BOUND = "\N{NO-BREAK SPACE}"


def wrapped(sentence: str, width: int) -> list[str]:
    """The sentence in lines of at most this width; a figure is not parted from its unit."""
    lines = textwrap.wrap(_UNIT.sub(_BOUND, sentence), width, break_on_hyphens=False)
    return [line.replace(_BOUND, " ") for line in lines]


def print_sentences(console: Console, lines: Sequence[tuple[str, str]], label_width: int = LABEL_WIDTH) -> None:
    """Print labels with a sentence each, wrapped beside them."""
    room = max(console.width - label_width, 20)
    for label, sentence in lines:
        style = "yellow" if label in ("Unpriced", "Note") else ""
        for position, part in enumerate(wrapped(printable(sentence), room)):
            head = (label if position == 0 else "").ljust(label_width)
            console.print(Text.assemble((head, "bold"), (part, style)), soft_wrap=True)
