"""Tables and sentences that fit a terminal: columns go or give way, and of names what tells them apart stays."""

from __future__ import annotations

import io
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, takewhile
from typing import Literal

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from edge_opt import units
from edge_opt._support.progress import console_width
from edge_opt.text import printable

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
    """The lines of the table, header first. Nothing in them is read as markup, and no two names become one."""
    columns = [(_shortened(strip, room), room) for strip, room in fitted(strips, width)]
    header = [_padded(Cell(shortened(strip.header, room), style="bold"), strip, room) for strip, room in columns]
    yield _joined(header)
    yield Text("─" * min(width, sum(room + _GAP for _, room in columns) - _GAP), style="dim")
    for position in range(len(strips[0].cells)):
        yield _joined([_padded(strip.cells[position], strip, room) for strip, room in columns])


def _shortened(strip: Strip, width: int) -> Strip:
    """The column with every text short enough, what differs still different; deep guides give way to their name."""
    if strip.natural <= width:
        return strip
    prefixes = [cell.prefix[max(0, len(cell.prefix) - max(0, width - _NAME_LEAST)) :] for cell in strip.cells]
    rooms = [width - cell_len(prefix) for prefix in prefixes]
    texts = told_apart([cell.text for cell in strip.cells], rooms)
    cells = (Cell(text, prefix, cell.style) for text, prefix, cell in zip(texts, prefixes, strip.cells, strict=True))
    return replace(strip, cells=tuple(cells))


def _padded(cell: Cell, strip: Strip, width: int) -> Text:
    text = Text.assemble((cell.prefix, "dim"), (cell.text, cell.style))
    blank = " " * (width - cell_len(text.plain))
    return Text(blank).append_text(text) if strip.justify == "right" else text.append(blank)


def _joined(cells: list[Text]) -> Text:
    return Text(" " * _GAP).join(cells)


_LEFT_OUT = "…"
# Where a name may be cut: before a part such as `.q_proj`, `/conv` or ` (call 2)`.
_PART = re.compile(r"(?<=[./\s])(?=[^./\s])")


def shortened(text: str, width: int) -> str:
    """The text in at most `width` columns of a terminal: its last parts whole, where they fit, and its first letters.

    >>> shortened("model.encoder.layers.11.self_attn.q_proj", 24)
    'mode…11.self_attn.q_proj'
    >>> shortened("encoder.layers.11.self_attn", 15)
    'en…11.self_attn'
    """
    if cell_len(text) <= width:
        return text
    cuts = [match.start() for match in _PART.finditer(text)]
    tail = next((text[cut:] for cut in cuts if cell_len(text[cut:]) + len(_LEFT_OUT) <= width), "")
    return _head(text, width - cell_len(tail) - len(_LEFT_OUT)) + _LEFT_OUT + tail if tail else _halved(text, width)


def cut_behind(text: str, width: int) -> str:
    """A sentence in at most `width` columns; its end is left out.

    >>> cut_behind("one two three", 8)
    'one two…'
    """
    return text if cell_len(text) <= width else _head(text, width - len(_LEFT_OUT)).rstrip() + _LEFT_OUT


def told_apart(texts: Sequence[str], rooms: Sequence[int]) -> list[str]:
    """Each text in as many columns as it has room for; texts that differ stay different.

    >>> told_apart(["encoder.layers.0.attention.query", "encoder.layers.1.attention.query"], [14, 14])
    ['…0…ntion.query', '…1…ntion.query']
    """
    wanted = list(dict.fromkeys(zip(texts, rooms, strict=True)))
    short = {item: shortened(*item) for item in wanted}
    for clash in _clashes(short):
        before, behind = _common([text for text, _ in clash])
        for text, room in clash:
            short[text, room] = _around(text, before, behind, room)
    # The last resort, in a column too narrow for what differs: a number.
    for clash in _clashes(short):
        for number, (text, room) in enumerate(clash, start=1):
            mark = f"~{number}"
            short[text, room] = (shortened(text, room - len(mark)) if room > len(mark) else "") + mark
    return [short[item] for item in zip(texts, rooms, strict=True)]


def _clashes(short: dict[tuple[str, int], str]) -> list[list[tuple[str, int]]]:
    """Texts that differ and look the same."""
    alike: dict[str, dict[str, tuple[str, int]]] = {}
    for item, shown in short.items():
        alike.setdefault(shown, {})[item[0]] = item
    return [list(found.values()) for found in alike.values() if len(found) > 1]


def _common(texts: Sequence[str]) -> tuple[int, int]:
    """How many parts all texts have in common at their beginnings, and how many at their ends."""
    rows = [_PART.split(text) for text in texts]
    most = min(map(len, rows)) - 1
    before = _alike(zip(*rows, strict=False), most)
    return before, _alike(zip(*map(reversed, rows), strict=False), most - before)


def _alike(columns: Iterable[tuple[str, ...]], most: int) -> int:
    """How many of the first columns hold one text each."""
    return sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, islice(columns, max(most, 0))))


def _around(text: str, before: int, behind: int, width: int) -> str:
    """What differs, whole if it fits, between what all have in common, cut as it must be."""
    parts = _PART.split(text)
    end = len(parts) - behind
    head, core, tail = "".join(parts[:before]), "".join(parts[before:end]), "".join(parts[end:])
    room = width - len(_LEFT_OUT) * bool(head)
    if cell_len(core + tail) <= room:
        kept = core + tail
    else:
        short = core.rstrip("./ ")
        if cell_len(short) + len(_LEFT_OUT) > room:
            return shortened(short, width)
        kept = short + _LEFT_OUT + _tail(tail, room - cell_len(short) - len(_LEFT_OUT))
    return (_head(head, room - cell_len(kept)) + _LEFT_OUT if head else "") + kept


def _head(text: str, width: int) -> str:
    """The first letters that fit."""
    return next((text[:kept] for kept in range(max(width, 0), 0, -1) if cell_len(text[:kept]) <= width), "")


def _tail(text: str, width: int) -> str:
    """The last letters that fit."""
    kept = range(min(len(text), max(width, 0)), 0, -1)
    return next((text[-count:] for count in kept if cell_len(text[-count:]) <= width), "")


def _halved(text: str, width: int) -> str:
    """The first and the last letters of a text without parts."""
    for kept in range(min(len(text), width) - 1, 0, -1):
        short = f"{text[: kept - kept // 2]}{_LEFT_OUT}{text[len(text) - kept // 2 :]}"
        if cell_len(short) <= width:
            return short
    return _LEFT_OUT[:width]


WIDTH = 100
LABEL_WIDTH = 13
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


def drawn(console: Console, draw: Callable[[], None]) -> None:
    """Draw; where the terminal knows ASCII only, with the nearest letters that it has."""
    if not console.options.ascii_only:
        draw()
        return
    with console.capture() as printed:
        draw()
    console.file.write(as_ascii(printed.get()))


def as_ascii(text: str) -> str:
    """The text with the nearest letters that ASCII has, and all others written out."""
    return text.translate(_ASCII).encode("ascii", "backslashreplace").decode("ascii")


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


def print_sentences(
    console: Console, lines: Sequence[tuple[str, str]], *, is_cut: bool = False, label_width: int = LABEL_WIDTH
) -> None:
    """Labels with a sentence each, wrapped beside them, or cut to one line each."""
    room = max(console.width - label_width, 20)
    for label, sentence in lines:
        style = "yellow" if label in ("Unpriced", "Note") else ""
        shown = printable(sentence)
        parts = [cut_behind(shown, room)] if is_cut else wrapped(shown, room)
        for position, part in enumerate(parts):
            head = (label if position == 0 else "").ljust(label_width)
            console.print(Text.assemble((head, "bold"), (part, style)), soft_wrap=True)
