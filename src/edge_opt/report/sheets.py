"""A record as a sheet: a title, a table and sentences below it, as text and as HTML."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from rich.text import Text

from edge_opt import units
from edge_opt.records.fields import Kind, kind_of, title_of
from edge_opt.report.comparison import cell, fragment, table
from edge_opt.report.terminal import LABEL_WIDTH, Strip, print_sentences, print_table, rendered
from edge_opt.text import html, printable

Fact = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Sheet:
    """What people see of a record. Tables have one column per strip; a picture is drawn in notebooks only."""

    title: str
    tables: tuple[tuple[Strip, ...], ...] = ()
    facts: tuple[Fact, ...] = ()
    picture: str = ""


_sheets: dict[str, Callable[[Any], Sheet]] = {}
_texts: dict[str, Callable[[Any], str]] = {}
_pages: dict[str, Callable[[Any], str]] = {}


def sheet(kind: type) -> Callable[[Callable[[Any], Sheet]], Callable[[Any], Sheet]]:
    """Register how a kind of record becomes a sheet."""

    def add(make: Callable[[Any], Sheet]) -> Callable[[Any], Sheet]:
        _sheets[kind.__qualname__] = make
        return make

    return add


def own_view(kind: type, text: Callable[[Any], str] | None = None, page: Callable[[Any], str] | None = None) -> None:
    """Register what a kind of record is printed or drawn as, where that is more than a sheet."""
    if text is not None:
        _texts[kind.__qualname__] = text
    if page is not None:
        _pages[kind.__qualname__] = page


def record_text(record: Any, width: int | None = None) -> str:
    """A record as a short table for the terminal."""
    _load()
    name = type(record).__qualname__
    if name in _texts and width is None:
        return _texts[name](record)
    return sheet_text(sheet_of(record), width)


def record_html(record: Any) -> str:
    """A record as HTML that stands in a notebook and fetches nothing."""
    _load()
    name = type(record).__qualname__
    return _pages[name](record) if name in _pages else sheet_html(sheet_of(record))


def _load() -> None:
    """The views register themselves when they are imported, which is when the first record is shown."""
    from edge_opt.report import record_sheets

    _ = record_sheets


def sheet_of(record: Any) -> Sheet:
    """A record's sheet; of one that has none of its own, its fields with their units."""
    make = _sheets.get(type(record).__qualname__)
    return plain_sheet(record) if make is None else make(record)


def sheet_text(found: Sheet, width: int | None = None) -> str:
    """The sheet for a terminal; without a width, for the one there is, or 100 columns."""

    def draw(console: Any) -> None:
        if found.title:
            for line in Text(printable(found.title)).wrap(console, console.width):
                console.print(line, soft_wrap=True)
        for strips in found.tables:
            print_table(console, strips)
        widest = max((len(label) for label, _ in found.facts), default=0)
        print_sentences(console, found.facts, label_width=max(LABEL_WIDTH, widest + 2))

    return rendered(draw, width=width)


def sheet_html(found: Sheet) -> str:
    """The sheet for a notebook."""
    parts = [f"<strong>{html(found.title)}</strong>"] if found.title else []
    return fragment(*parts, found.picture, *map(strips_html, found.tables), facts_html(found.facts))


def strips_html(strips: Sequence[Strip]) -> str:
    """The columns of a terminal's table as one of HTML; there is room for all of them."""
    names = sum(strip.justify == "left" for strip in strips)
    ordered = sorted(strips, key=lambda strip: strip.justify != "left")
    rows = (
        [
            cell(strip.cells[place].prefix + strip.cells[place].text, "name" if strip.justify == "left" else "")
            for strip in ordered
        ]
        for place in range(len(strips[0].cells))
    )
    return table([strip.header for strip in ordered], rows, names=names)


def facts_html(facts: tuple[Fact, ...]) -> str:
    """Labels with their sentences, as a table."""
    rows = [
        [cell(label, "name"), f'<td class="name fact"><div>{html(sentence)}</div></td>'] for label, sentence in facts
    ]
    return table(["", ""], rows) if rows else ""


_FORMATS: dict[Kind, Callable[[float], str]] = {
    "bytes": units.size,
    "time": units.duration,
    "energy": units.energy,
    "count": units.count,
    "ratio": units.ratio,
    "share": units.percent,
}


def plain_sheet(record: Any) -> Sheet:
    """Return a record as its fields, in order; None is left out, and many items are counted."""
    facts = []
    for field in fields(record):
        value = getattr(record, field.name)
        if value is not None and value != () and value != "":
            facts.append((title_of(field), _field_text(kind_of(field), value)))
    return Sheet(type(record).__qualname__, facts=tuple(facts))


def _field_text(kind: Kind, value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (int, float)):
        return _FORMATS[kind](value) if kind else f"{value:.6g}" if isinstance(value, float) else str(value)
    if isinstance(value, tuple) and value and not all(isinstance(item, str) for item in value):
        return f"{len(value)} of kind {type(value[0]).__qualname__}"
    if isinstance(value, tuple):
        return ", ".join(value)
    return value if isinstance(value, str) else repr(value)
