"""A grid: columns of plain text, fitted into the width of a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from rich.cells import cell_len
from rich.text import Text

_GAP = 2
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
        # A few letters of a name must stay beside the deepest guides.
        return min(self.natural, max(self.floor, max((cell_len(cell.prefix) + 6 for cell in self.cells), default=0)))


def shortened(text: str, width: int) -> str:
    """The text in at most `width` columns of a terminal; what is left out stands in the middle.

    >>> shortened("encoder.layers.11.self_attn", 15)
    'encoder…lf_attn'
    """
    if cell_len(text) <= width:
        return text
    for kept in range(min(len(text), width) - 1, 0, -1):
        short = f"{text[: kept - kept // 2]}…{text[len(text) - kept // 2 :]}"
        if cell_len(short) <= width:
            return short
    return "…"[:width]


def fitted(strips: Sequence[Strip], width: int) -> list[tuple[Strip, int]]:
    """The columns that fit, with their widths: first the dispensable go, then the flexible give way."""
    kept = list(strips)
    while True:
        last = max(kept, key=lambda strip: strip.rank)
        wanted = [strip.natural if last.rank >= LUXURY else strip.narrowest for strip in kept]
        if not last.rank or sum(wanted) + _GAP * (len(kept) - 1) <= width:
            break
        kept.remove(last)
    widths = [strip.natural for strip in kept]
    excess = sum(widths) + _GAP * (len(kept) - 1) - width
    # From the right: what a row is called matters more than what it is.
    for position in reversed(range(len(kept))):
        give = min(max(excess, 0), widths[position] - kept[position].narrowest)
        widths[position] -= give
        excess -= give
    return list(zip(kept, widths, strict=True))


def grid(strips: Sequence[Strip], width: int) -> Iterator[Text]:
    """The lines of the table, header first. Nothing in them is read as markup."""
    columns = fitted(strips, width)
    header = [_padded(Cell(strip.header, style="bold"), strip, room) for strip, room in columns]
    yield _joined(header)
    yield Text("─" * min(width, sum(room + _GAP for _, room in columns) - _GAP), style="dim")
    for position in range(len(strips[0].cells)):
        yield _joined([_padded(strip.cells[position], strip, room) for strip, room in columns])


def _padded(cell: Cell, strip: Strip, width: int) -> Text:
    text = Text.assemble((cell.prefix, "dim"), (shortened(cell.text, width - cell_len(cell.prefix)), cell.style))
    blank = " " * (width - cell_len(text.plain))
    return Text(blank).append_text(text) if strip.justify == "right" else text.append(blank)


def _joined(cells: list[Text]) -> Text:
    return Text(" " * _GAP).join(cells)
