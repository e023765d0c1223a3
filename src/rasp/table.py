"""The table of a report: as a DataFrame, as text, as a file."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge_opt.errors import InvalidInput
from edge_opt.files import write_whole
from edge_opt.text import markdown, printable, spreadsheet
from rasp.columns import Column
from rasp.report import Report, Row

if TYPE_CHECKING:
    import pandas as pd

SUFFIXES = (".csv", ".json", ".md", ".txt")


def dataframe(report: Report, columns: Sequence[Column]) -> pd.DataFrame:
    """One line per row, and the last one, labelled `total`; the notes are in `.attrs["notes"]`."""
    import pandas as pd

    rows = (*report.rows, report.total)
    index = pd.Index([*range(len(report.rows)), "total"], dtype=object, name="index")
    table = pd.DataFrame({column.name: [column.value(row) for row in rows] for column in columns}, index=index)
    table.attrs["notes"] = report.notes
    return table


def total_values(report: Report, columns: Sequence[Column]) -> dict[str, Any]:
    """The figures of the total, by column."""
    return {column.name: column.value(report.total) for column in columns if not column.is_label}


def render_text(report: Report, columns: Sequence[Column]) -> str:
    """The table in aligned columns, with its notes beneath."""
    header, *lines = ([printable(cell) for cell in line] for line in _cells(report, columns))
    widths = [max(len(line[place]) for line in (header, *lines)) for place in range(len(header))]
    is_left = [False, *(column.is_label for column in columns)]
    aligned = [
        "  ".join(
            cell.ljust(width) if left else cell.rjust(width)
            for cell, width, left in zip(line, widths, is_left, strict=True)
        ).rstrip()
        for line in (header, *lines)
    ]
    return "\n".join([*aligned, *(f"note: {printable(note)}" for note in report.notes)])


def render_markdown(report: Report, columns: Sequence[Column]) -> str:
    """The table as Markdown, with its notes beneath."""
    header, *lines = _cells(report, columns)
    cells = (" | ".join(map(markdown, line)) for line in lines)
    table = [" | ".join(header), "|".join(["---"] * len(header)), *cells]
    return "\n".join([*table, *(f"\nNote: {markdown(note)}" for note in report.notes)]) + "\n"


def render_json(report: Report, columns: Sequence[Column]) -> str:
    """The table with names; a figure that is not known is null."""

    def plain(row: Row) -> dict[str, Any]:
        values = {column.name: column.value(row) for column in columns}
        return {name: None if _is_unknown(value) else value for name, value in values.items()}

    content = {
        "model": report.model,
        "report_type": report.report_type,
        "rows": [plain(row) for row in report.rows],
        "total": plain(report.total),
        "notes": report.notes,
    }
    return json.dumps(content, indent=1, allow_nan=False) + "\n"


def check_save_path(save_path: str | os.PathLike[str]) -> Path:
    """The path, or a refusal where no format follows from its suffix."""
    path = Path(save_path)
    if path.suffix and path.suffix.lower() not in SUFFIXES and not path.is_dir():
        raise InvalidInput(
            f"save_path {str(path)!r} ends in {path.suffix!r}; use {', '.join(SUFFIXES)}, or no suffix for a folder"
        )
    return path


def save(report: Report, columns: Sequence[Column], save_path: str | os.PathLike[str]) -> Path:
    """Write the table and return its path; without a suffix this is a folder, and the file is named after the model."""
    path = check_save_path(save_path)
    if path.is_dir() or not path.suffix:
        path = path / f"{report.model}_{report.report_type}.csv"
    suffix = path.suffix.lower()
    if suffix == ".csv":
        text = dataframe(report, columns).map(_safe).to_csv(lineterminator="\n")
    elif suffix == ".json":
        text = render_json(report, columns)
    elif suffix == ".md":
        text = render_markdown(report, columns)
    else:
        text = render_text(report, columns) + "\n"
    return write_whole(path, text)


def _cells(report: Report, columns: Sequence[Column]) -> list[list[str]]:
    lines = [["index", *(column.name for column in columns)]]
    for label, row in (*enumerate(report.rows), ("total", report.total)):
        lines.append([str(label), *(_cell(column.value(row)) for column in columns)])
    return lines


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return "unknown" if math.isnan(value) else f"{value:.6g}"
    return str(value)


def _safe(value: Any) -> Any:
    return spreadsheet(value) if isinstance(value, str) else value


def _is_unknown(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)
