"""A record as a sheet: a title, tables and notes. The terminal, Markdown, HTML (html.py) and files draw sheets only."""

from __future__ import annotations

import io
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from edge_opt import units
from edge_opt._support.progress import console_width
from edge_opt.records.fields import Kind, kind_of, title_of
from edge_opt.text import markdown, printable, shorten

# A label and a sentence.
Note = tuple[str, str]
_GAP = 2
# Letters of a name that stay beside the deepest guides of a tree.
_NAME_LEAST = 6
OPTIONAL = 10
WIDTH = 100
LABEL_WIDTH = 13
# A comment on a pull request has a limited length.
_MARKDOWN_ROWS = 20


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
class Column:
    """One column of a table.

    `min_width` is how narrow it may get, None: not at all. Columns with the highest `drop_order` are left out first,
    all of them at once, and those with 0 never. From OPTIONAL on, a column is left out before another gets narrower.
    Of texts that are sentences, `cuts_end` leaves out the end.
    """

    header: str
    cells: tuple[Cell, ...]
    justify: Literal["left", "right"] = "right"
    min_width: int | None = None
    drop_order: int = 0
    cuts_end: bool = False

    @property
    def natural(self) -> int:
        return max(cell_len(self.header), max((cell.width for cell in self.cells), default=0))

    @property
    def narrowest(self) -> int:
        if self.min_width is None:
            return self.natural
        deepest = max((cell_len(cell.prefix) + _NAME_LEAST for cell in self.cells), default=0)
        return min(self.natural, max(self.min_width, deepest))


def column(header: str, texts: Iterable[str], drop_order: int = 0) -> Column:
    """Return a column of figures, to the right."""
    return Column(header, tuple(Cell(printable(text)) for text in texts), drop_order=drop_order)


def text_column(header: str, texts: Iterable[str], drop_order: int = 0, min_width: int | None = 12) -> Column:
    """Return a column of names or words, to the left, that may be shortened."""
    return replace(column(header, texts, drop_order), justify="left", min_width=min_width)


def signed(value: float, text: Callable[[float], str]) -> str:
    """Return a difference with its sign."""
    return ("±" if value == 0 else "+" if value > 0 else units.MINUS) + text(abs(value))


Table = tuple[Column, ...]


@dataclass(frozen=True, slots=True)
class Sheet:
    """A record as it is shown: a title, tables, and notes with labels. A table without rows is omitted.

    Notebooks and pages draw the picture as well. `parts` are sheets below it; one that `is_folded` is closed at first
    where the format can fold.
    """

    title: str
    tables: tuple[Table, ...] = ()
    notes: tuple[Note, ...] = ()
    picture: str = ""
    parts: tuple[Sheet, ...] = ()
    is_folded: bool = False

    def __post_init__(self) -> None:
        filled = tuple(columns for columns in self.tables if columns[0].cells)
        object.__setattr__(self, "tables", filled)


Maker = Callable[..., Sheet]
Writer = Callable[..., str]


@dataclass(frozen=True, slots=True)
class View:
    """How one kind of record is shown: its sheet, the one for a terminal, and other files, by suffix."""

    sheet: Maker
    brief: Maker
    files: Mapping[str, Writer]


_views: dict[str, View] = {}


def sheet(
    kind: type, *, brief: Maker | None = None, files: Mapping[str, Writer] | None = None
) -> Callable[[Maker], Maker]:
    """Register how a kind of record becomes a sheet.

    Args:
        kind: Class of the record.
        brief: Makes the sheet that a terminal shows, where it is shorter.
        files: Writes files that are not drawn from the sheet, by suffix; a kind that can be saved has ".json".
    """

    def add(make: Maker) -> Maker:
        _views[kind.__qualname__] = View(make, brief or make, files or {})
        return make

    return add


def view_of(kind: type) -> View:
    """Return how a kind of record is shown; a kind that is not registered shows its fields with their units."""
    # The sheets register themselves. Imported here, because they are needed only when a record is shown.
    from edge_opt.report import record_sheets

    _ = record_sheets
    return _views.get(kind.__qualname__) or View(plain_sheet, plain_sheet, {})


def sheet_of(record: Any, *, is_brief: bool = False) -> Sheet:
    """Return the sheet of a record, or the one for a terminal."""
    view = view_of(type(record))
    return view.brief(record) if is_brief else view.sheet(record)


def record_text(record: Any, width: int | None = None) -> str:
    """Return a record as a short table for the terminal."""
    return sheet_text(sheet_of(record, is_brief=True), width)


def record_html(record: Any) -> str:
    """Return a record as HTML for a notebook, without requests."""
    from edge_opt.report.html import sheet_html

    return sheet_html(sheet_of(record))


def record_document(record: Any) -> str:
    """Return a record as JSON."""
    return view_of(type(record)).files[".json"](record)


def plain_sheet(record: Any) -> Sheet:
    """Return a record as its fields, in order; None is left out, and many items are counted."""
    values = [(field, getattr(record, field.name)) for field in fields(record)]
    notes = (
        (title_of(field), _field_text(kind_of(field), value))
        for field, value in values
        if value is not None and value != () and value != ""
    )
    return Sheet(type(record).__qualname__, notes=tuple(notes))


def _field_text(kind: Kind, value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (int, float)):
        return units.FORMATS[kind](value) if kind else f"{value:.6g}" if isinstance(value, float) else str(value)
    if isinstance(value, tuple) and value and not all(isinstance(item, str) for item in value):
        return f"{len(value)} of kind {type(value[0]).__qualname__}"
    if isinstance(value, tuple):
        return ", ".join(value)
    return value if isinstance(value, str) else repr(value)


def fitted(columns: Sequence[Column], width: int) -> list[tuple[Column, int]]:
    """Return the columns that fit, with their widths: some are left out, then others get narrower.

    Whatever the width, no line is longer: at last columns go from the right, all but the first.
    """
    kept = list(columns)
    while len(kept) > 1:
        last = max(column.drop_order for column in kept)
        wanted = [column.natural if last >= OPTIONAL else column.narrowest for column in kept]
        if sum(wanted) + _GAP * (len(kept) - 1) <= width:
            break
        kept = [column for column in kept if column.drop_order != last] if last else kept[:-1]
    widths = [column.natural for column in kept]
    excess = sum(widths) + _GAP * (len(kept) - 1) - width
    # From the right: what a row is called matters more than what it is.
    for position in reversed(range(len(kept))):
        give = min(max(excess, 0), widths[position] - kept[position].narrowest)
        widths[position] -= give
        excess -= give
    widths[0] -= max(excess, 0)
    return list(zip(kept, widths, strict=True))


def grid(columns: Sequence[Column], width: int) -> Iterator[Text]:
    """Yield the lines of the table, header first. Nothing in them is read as markup."""
    shown = [(_shortened(column, room), room) for column, room in fitted(columns, width)]
    header = [_padded(Cell(shorten(it.header, room, cell_len), style="bold"), it, room) for it, room in shown]
    yield Text(" " * _GAP).join(header)
    yield Text("─" * min(width, sum(room + _GAP for _, room in shown) - _GAP), style="dim")
    for row in range(len(columns[0].cells)):
        yield Text(" " * _GAP).join(_padded(column.cells[row], column, room) for column, room in shown)


def _shortened(column: Column, width: int) -> Column:
    """Return the column with every text short enough; deep guides of a tree give way to the name behind them."""
    if column.natural <= width:
        return column
    cells = []
    for cell in column.cells:
        prefix = cell.prefix[max(0, len(cell.prefix) - max(0, width - _NAME_LEAST)) :]
        text = shorten(cell.text, width - cell_len(prefix), cell_len, cuts_end=column.cuts_end)
        cells.append(Cell(text, prefix, cell.style))
    return replace(column, cells=tuple(cells))


def _padded(cell: Cell, column: Column, width: int) -> Text:
    text = Text.assemble((cell.prefix, "dim"), (cell.text, cell.style))
    blank = " " * (width - cell_len(text.plain))
    return Text(blank).append_text(text) if column.justify == "right" else text.append(blank)


# A number and its unit stay on one line.
_UNIT = re.compile(r"(?<=\d) (?=(?:[KMGT]iB|B|ns|µs|ms|s|nJ|µJ|mJ|J|W|GB/s)\b)")
_BOUND = "\N{NO-BREAK SPACE}"


def wrapped(sentence: str, width: int) -> list[str]:
    """Return the sentence in lines of at most this width; a figure is not parted from its unit."""
    lines = textwrap.wrap(_UNIT.sub(_BOUND, sentence), width, break_on_hyphens=False)
    return [line.replace(_BOUND, " ") for line in lines]


def print_sheet(console: Console, shown: Sheet) -> None:
    """Print the sheet on a terminal: title, tables as wide as the console allows, notes beside their labels."""
    if shown.title:
        for line in Text(printable(shown.title)).wrap(console, console.width):
            console.print(line, soft_wrap=True)
    for columns in shown.tables:
        for line in grid(columns, console.width):
            console.print(line, soft_wrap=True)
        console.print()
    label_width = max([LABEL_WIDTH, *(len(label) + 2 for label, _ in shown.notes)])
    for label, sentence in shown.notes:
        style = "yellow" if label in ("Unpriced", "Note") else ""
        for position, text in enumerate(wrapped(printable(sentence), max(console.width - label_width, 20))):
            head = (label if position == 0 else "").ljust(label_width)
            console.print(Text.assemble((head, "bold"), (text, style)), soft_wrap=True)
    for part in shown.parts:
        if shown.notes:
            console.print()
        print_sheet(console, part)


def paper_width() -> int:
    """Return the columns of the terminal that is printed to; elsewhere, as in a notebook or a file, 100."""
    is_terminal = sys.stdout is not None and sys.stdout.isatty()
    return console_width(WIDTH) if is_terminal else WIDTH


def sheet_text(shown: Sheet, width: int | None = None, *, color: bool = False) -> str:
    """Return the sheet as text; the default width is that of the terminal, else 100 columns."""
    out = io.StringIO()
    console = Console(
        file=out,
        width=width or paper_width(),
        force_terminal=color,
        color_system="standard" if color else None,
        legacy_windows=False,
    )
    print_sheet(console, shown)
    return "\n".join(line.rstrip() for line in out.getvalue().rstrip().splitlines())


def sheet_markdown(shown: Sheet) -> str:
    """Return the sheet as Markdown for a pull request: title, tables, notes as a list, parts folded."""
    return "\n".join([f"### {markdown(shown.title)}", "", *_markdown_lines(shown)])


def _markdown_lines(shown: Sheet, most_rows: int | None = None) -> Iterator[str]:
    for columns in shown.tables:
        yield _markdown_row(column.header for column in columns)
        yield _markdown_row("---" if column.justify == "left" else "--:" for column in columns)
        rows = list(zip(*(column.cells for column in columns), strict=True))
        for row in rows[:most_rows]:
            texts = (markdown(cell.prefix + cell.text) for cell in row)
            yield _markdown_row(
                f"**{text}**" if cell.style == "red" else text for text, cell in zip(texts, row, strict=True)
            )
        if most_rows and len(rows) > most_rows:
            yield f"\n… and {len(rows) - most_rows} more"
        yield ""
    yield from (f"- **{label}**: {markdown(sentence)}" for label, sentence in shown.notes)
    yield ""
    for part in shown.parts:
        lines = _markdown_lines(part, _MARKDOWN_ROWS)
        yield "\n".join([f"<details><summary>{markdown(part.title)}</summary>", "", *lines, "</details>", ""])


def _markdown_row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
