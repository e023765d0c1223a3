"""A record as a sheet: a title, tables and sentences, for terminals, notebooks, pages, Markdown and JSON files."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from edge_opt import units
from edge_opt._support.files import write_named, writer_for
from edge_opt.records.fields import Kind, kind_of, title_of
from edge_opt.report.comparison import cell, fragment, page, table
from edge_opt.report.terminal import LABEL_WIDTH, Strip, print_sentences, print_table, rendered
from edge_opt.text import html, markdown, markdown_table, printable

Fact = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Sheet:
    """What people see of a record: a title, tables with one column per strip, and labelled sentences.

    Notebooks and pages draw the picture as well. `parts` are sheets of their own below it, in files only.
    """

    title: str
    tables: tuple[tuple[Strip, ...], ...] = ()
    facts: tuple[Fact, ...] = ()
    picture: str = ""
    parts: tuple[Sheet, ...] = ()


Maker = Callable[[Any], Sheet]
_sheets: dict[str, Maker] = {}
_briefs: dict[str, Maker] = {}
_documents: dict[str, Callable[[Any], str]] = {}
_texts: dict[str, Callable[[Any], str]] = {}
_pages: dict[str, Callable[[Any], str]] = {}


def sheet(
    kind: type, *, brief: Maker | None = None, document: Callable[[Any], str] | None = None
) -> Callable[[Maker], Maker]:
    """Register how a kind of record becomes a sheet; terminals show the brief one, where there is one.

    Args:
        kind: Class of the record.
        brief: Makes the sheet that a terminal shows, with the first remarks only.
        document: Writes the record as JSON; a kind without it cannot be saved.
    """

    def add(make: Maker) -> Maker:
        _sheets[kind.__qualname__] = make
        _briefs[kind.__qualname__] = brief or make
        if document is not None:
            _documents[kind.__qualname__] = document
        return make

    return add


def own_view(kind: type, text: Callable[[Any], str] | None = None, page: Callable[[Any], str] | None = None) -> None:
    """Register what a kind of record is printed or drawn as, where that is more than a sheet."""
    if text is not None:
        _texts[kind.__qualname__] = text
    if page is not None:
        _pages[kind.__qualname__] = page


def record_text(record: Any, width: int | None = None) -> str:
    """Return a record as a short table for the terminal."""
    _load()
    name = type(record).__qualname__
    if name in _texts and width is None:
        return _texts[name](record)
    return sheet_text(sheet_of(record, is_brief=True), width)


def record_html(record: Any) -> str:
    """Return a record as HTML that stands in a notebook and fetches nothing."""
    _load()
    name = type(record).__qualname__
    return _pages[name](record) if name in _pages else sheet_html(sheet_of(record))


def record_document(record: Any) -> str:
    """Return a record as JSON."""
    _load()
    return _documents[type(record).__qualname__](record)


_FILES: dict[str, Callable[[Any], str]] = {
    ".json": record_document,
    ".html": lambda record: sheet_page(sheet_of(record)),
    ".md": lambda record: sheet_markdown(sheet_of(record)),
    ".txt": lambda record: sheet_text(sheet_of(record)) + "\n",
}


def check_suffix(path: str | os.PathLike[str]) -> None:
    """Refuse a file name whose ending no renderer has, before any work is done."""
    writer_for(path, _FILES)


def save_record(record: Any, path: str | os.PathLike[str]) -> Path:
    """Write a record as .json, .html, .md or .txt, by the name's ending, and return the path."""
    return write_named(path, writer_for(path, _FILES)(record))


def _load() -> None:
    """Import the sheets of all records: they register themselves, which is needed when the first record is shown."""
    from edge_opt.report import record_sheets

    _ = record_sheets


def sheet_of(record: Any, *, is_brief: bool = False) -> Sheet:
    """Return a record's sheet; of one that has none of its own, its fields with their units."""
    _load()
    make = (_briefs if is_brief else _sheets).get(type(record).__qualname__)
    return plain_sheet(record) if make is None else make(record)


def print_sheet(console: Console, shown: Sheet) -> None:
    """Print the sheet on a terminal."""
    if shown.title:
        for line in Text(printable(shown.title)).wrap(console, console.width):
            console.print(line, soft_wrap=True)
    for strips in shown.tables:
        print_table(console, strips)
    widest = max((len(label) for label, _ in shown.facts), default=0)
    print_sentences(console, shown.facts, label_width=max(LABEL_WIDTH, widest + 2))
    for part in shown.parts:
        console.print()
        print_sheet(console, part)


def sheet_text(shown: Sheet, width: int | None = None) -> str:
    """Return the sheet for a terminal; without a width, for the one there is, or 100 columns."""
    return rendered(lambda console: print_sheet(console, shown), width=width)


def sheet_markdown(shown: Sheet, level: int = 1) -> str:
    """Return the sheet as Markdown: title, tables, sentences as a list, then its parts."""
    lines = [f"{'#' * level} {markdown(shown.title)}", ""]
    for strips in shown.tables:
        texts = [[cell.prefix + cell.text for cell in strip.cells] for strip in strips]
        lines += [*markdown_table([strip.header for strip in strips], zip(*texts, strict=True)), ""]
    lines += [f"- **{label}**: {markdown(sentence)}" for label, sentence in shown.facts]
    return "\n".join([*lines, "", *(sheet_markdown(part, level + 1) for part in shown.parts)])


def sheet_html(shown: Sheet) -> str:
    """Return the sheet for a notebook."""
    title = f"<strong>{html(shown.title)}</strong>" if shown.title else ""
    return fragment(title, *_html_parts(shown))


def sheet_page(shown: Sheet) -> str:
    """Return the sheet as one HTML page that needs nothing else."""
    return page(shown.title, *_html_parts(shown))


def _html_parts(shown: Sheet) -> Iterator[str]:
    yield shown.picture
    yield from map(strips_html, shown.tables)
    yield facts_html(shown.facts)
    for part in shown.parts:
        yield f"<h2>{html(part.title)}</h2>"
        yield from _html_parts(part)


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
