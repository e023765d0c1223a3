"""Columns, rows and their printed form."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from edge_opt._support.files import write_whole
from edge_opt.cost.conventions.rasp import Count
from edge_opt.errors import InvalidInput
from edge_opt.records.fields import Record
from edge_opt.text import markdown, markdown_table, printable, spreadsheet
from rasp.tree import Measured, ModuleNode, Shapes

if TYPE_CHECKING:
    import pandas as pd

    from edge_opt import ModelProfile
    from edge_opt.records.measurements import ModuleMemory


Need = Literal["compute", "timing", "memory"]


@dataclass(frozen=True, slots=True)
class StatColumn:
    """A column: how its value follows from a row, and which argument of `stat` it needs to be on."""

    name: str
    value: Callable[[StatRow], Any]
    needs: Need | None = None
    is_default: bool = True
    is_label: bool = False


_columns: dict[str, StatColumn] = {}


def add_column(column: StatColumn) -> None:
    """Register a column. The same one again, as when its module is reloaded, takes its own place."""
    known = _columns.get(column.name, column)
    origins = [f"{item.value.__module__}.{item.value.__qualname__}" for item in (known, column)]
    if origins[0] != origins[1]:
        raise InvalidInput(f"column {column.name!r} is defined twice: {origins[0]} and {origins[1]}")
    _columns[column.name] = column


def columns() -> Mapping[str, StatColumn]:
    """Return every known column by name; read-only."""
    return MappingProxyType(_columns)


def split_names(value: str | Iterable[str] | None) -> tuple[str, ...]:
    """Return names as the caller wrote them: a sequence, or one comma-separated string.

    >>> split_names("data, sum"), split_names(["macc"]), split_names(None)
    (('data', 'sum'), ('macc',), ())
    """
    if value is None:
        return ()
    names = value.split(",") if isinstance(value, str) else list(value)
    if any(not isinstance(name, str) for name in names):
        raise InvalidInput(f"names must be strings, and these are {names!r}")
    return tuple(name.strip() for name in names)


def choose_columns(
    on: set[Need],
    report_fields: str | Iterable[str] | None = None,
    includes: str | Iterable[str] | None = None,
    excludes: str | Iterable[str] | None = None,
) -> tuple[StatColumn, ...]:
    """Return the columns of one report: `report_fields` and then `includes`, without `excludes`.

    Without `report_fields` they are the defaults, and `includes` stand among them where the published table has them.
    """
    asked = dict.fromkeys((*split_names(report_fields), *split_names(includes)))
    unwanted = split_names(excludes)
    for name in (*asked, *unwanted):
        if name not in _columns:
            hint = "; `import rasp.addons.energy` adds it" if name == "energy" else ""
            raise InvalidInput(f"unknown column {name!r}{hint}; known are {', '.join(_columns)}")
    for name in asked:
        needs = _columns[name].needs
        if needs is not None and needs not in on:
            raise InvalidInput(f"column {name!r} needs {needs}=True; turn it on, or leave the column out")
    if report_fields is None:
        defaults = [c.name for c in _columns.values() if c.is_default and (c.needs is None or c.needs in on)]
        asked = dict.fromkeys(sorted((*defaults, *asked), key=list(_columns).index))
    chosen = tuple(_columns[name] for name in asked if name not in unwanted)
    if not chosen:
        raise InvalidInput("no column is left: report_fields and includes name none that excludes keeps")
    return chosen


# In the published order, which reports follow; columns of add-ons come after.
for _column in (
    StatColumn("name", lambda row: row.name, is_label=True),
    StatColumn("type", lambda row: row.type, is_label=True),
    StatColumn("in_shape", lambda row: row.in_shape, is_label=True),
    StatColumn("out_shape", lambda row: row.out_shape, is_label=True),
    StatColumn("params", lambda row: sum(node.params for node in row.parts)),
    StatColumn("lat", lambda row: row.seconds * 1e3, "timing"),
    StatColumn("net_lat", lambda row: row.net_s * 1e3, "timing"),
    StatColumn("lat[%]", lambda row: row.share * 100, "timing"),
    StatColumn("end_lat", lambda row: row.end_s * 1e3, "timing", is_default=False),
    StatColumn("flops", lambda row: row.work.flops, "compute"),
    # Work over time of the calls themselves: children have time and work of their own.
    StatColumn(
        "FLOPS",
        lambda row: sum(node.own.flops for node in row.heads) / row.net_s if row.net_s else math.nan,
        "timing",
    ),
    StatColumn("mem_r", lambda row: row.work.bytes_read, "compute"),
    StatColumn("mem_w", lambda row: row.work.bytes_written, "compute"),
    StatColumn("mem_rw", lambda row: row.work.bytes_read + row.work.bytes_written, "compute"),
    StatColumn("macc", lambda row: row.work.macc, "compute", is_default=False),
    StatColumn("net_dev_mem", lambda row: row.memory and row.memory.before_bytes, "memory"),
    StatColumn("dev_mem_alloc", lambda row: row.memory and row.memory.allocated_bytes, "memory"),
    StatColumn("dev_max_mem_alloc", lambda row: row.memory and row.memory.peak_bytes, "memory"),
):
    add_column(_column)


REPORT_TYPES = ("tape", "leaves", "all", "nodes", "node", "root")


@dataclass(frozen=True, slots=True)
class StatRow(Record):
    """One line of a report: the calls whose own work it sums, labelled as the first of them.

    `heads` are the calls of the module itself, `parts` also what lies beneath them. `seconds` is the time of the heads
    with everything beneath them, `share` that of `net_s` in the net seconds of all rows. NaN is not measured.
    """

    name: str
    type: str
    in_shape: Shapes | None
    out_shape: Shapes | None
    parts: tuple[ModuleNode, ...]
    heads: tuple[ModuleNode, ...]
    seconds: float
    end_s: float
    share: float
    memory: ModuleMemory | None

    @property
    def work(self) -> Count:
        """The work of all parts."""
        return sum((node.own for node in self.parts), Count())

    @property
    def net_s(self) -> float:
        """The seconds of the heads without those of their children."""
        return _seconds(self.heads)


@dataclass(frozen=True, slots=True)
class Report(Record):
    """Rows and their total, as values by column, and notes. `memory_source` says where device memory is from."""

    model: str
    report_type: str | None
    columns: tuple[StatColumn, ...]
    rows: tuple[dict[str, Any], ...]
    total: dict[str, Any]
    notes: tuple[str, ...]
    memory_source: str


def build_report(
    profile: ModelProfile,
    root: ModuleNode,
    measured: Measured,
    columns: tuple[StatColumn, ...],
    report_type: str | None,
    include_root: bool,
) -> Report:
    """Return the rows of a report type, with what was measured.

    `tape`: calls of leaf modules in order of execution. A module with children has a line here only for what it does
    itself outside of them, where that is MACs (a functional matmul, attention) or parameters of its own; it stands
    where the module was entered. Its element-wise work, such as a residual add, is in the rows of `all` and `nodes`.
    `leaves`: the same, with calls of the same module merged.
    `all`: every module that ran, in tree order, each with everything beneath it; calls of one module merged.
    `nodes`: of these, the modules with children. `node` and `root`: the model alone, in one line.

    The total of `tape` and `leaves` is the sum of their rows, and that of the others the whole model. A root row
    that was asked for comes first, and is not summed again. `lat` of the total is that of the whole forward, also
    where the rows are not all of it.
    """
    is_by_leaves = report_type in ("tape", "leaves")
    every = tuple(root.walk())
    counted = _tape(root) if is_by_leaves else every
    whole_s, net_s = measured.whole_s, _seconds(counted)

    def row(calls: Sequence[ModuleNode], with_children: bool) -> StatRow:
        # By index: a module that calls itself must not count the inner call twice.
        beneath = {node.index: node for call in calls for node in call.walk()}
        parts = tuple(beneath.values()) if with_children else tuple(calls)
        # The whole model takes the time of its forward, not the sum of its modules.
        is_whole = parts[0] is root and len(parts) == len(every)
        first = calls[0]
        return StatRow(
            first.name, first.type, first.in_shape, first.out_shape, parts, tuple(calls),
            seconds=whole_s if is_whole else _seconds(beneath.values()),
            end_s=whole_s if is_whole else max(node.end_s for node in parts),
            share=_seconds(calls) / net_s if net_s else math.nan,
            memory=_memory(parts),
        )  # fmt: skip

    rows = [row(calls, with_children=not is_by_leaves) for calls in _calls_by_row(root, report_type)]
    if include_root and report_type not in (None, "root", "node") and root.children:
        rows.insert(0, row([root], with_children=True))
    total = StatRow("total", "", None, None, counted, counted, whole_s, whole_s, 1.0, root.memory)
    *values, total_values = ({column.name: column.value(row) for column in columns} for row in (*rows, total))
    notes = (*_notes(profile, root, counted), *measured.notes)
    return Report(root.type, report_type, columns, tuple(values), total_values, notes, measured.memory_source)


def _calls_by_row(root: ModuleNode, report_type: str | None) -> list[list[ModuleNode]]:
    if report_type is None:
        return []
    if report_type in ("root", "node"):
        return [[root]]
    if report_type == "tape":
        return [[node] for node in _tape(root)]
    nodes = _tape(root) if report_type == "leaves" else (node for child in root.children for node in child.walk())
    modules: dict[str, list[ModuleNode]] = {}
    for node in nodes:
        modules.setdefault(node.name, []).append(node)
    return [calls for calls in modules.values() if report_type != "nodes" or any(call.children for call in calls)]


def _tape(root: ModuleNode) -> tuple[ModuleNode, ...]:
    """Return the calls that have a line in a tape."""
    return tuple(node for node in root.walk() if node.is_leaf or node.own.macc or node.params)


def _seconds(nodes: Iterable[ModuleNode]) -> float:
    """Return their own seconds in all; NaN where none was timed. Calls too deep to be timed are part of one above."""
    known = [node.own_s for node in nodes if not math.isnan(node.own_s)]
    return math.fsum(known) if known else math.nan


def _memory(parts: tuple[ModuleNode, ...]) -> ModuleMemory | None:
    """Return the memory around the calls of a row; a call's includes its children's, so only the outermost count."""
    inside = {child.index for node in parts for child in node.children}
    known = [node.memory for node in parts if node.memory is not None and node.index not in inside]
    if not known:
        return None
    return replace(
        known[0],
        allocated_bytes=sum(memory.allocated_bytes for memory in known),
        peak_bytes=max(memory.peak_bytes for memory in known),
    )


def _notes(profile: ModelProfile, root: ModuleNode, counted: Iterable[ModuleNode]) -> tuple[str, ...]:
    notes = list(profile.trace.notes)
    if profile.unpriced:
        names = ", ".join(sorted({item.op for item in profile.unpriced}))
        notes.append(f"operators without a price: {names}; the figures are lower bounds")
    shown = {node.index for node in counted}
    hidden = [node for node in root.walk() if node.index not in shown and (node.own.flops or node.own.bytes_read)]
    if hidden:
        flops = sum(node.own.flops for node in hidden)
        moved = sum(node.own.bytes_read + node.own.bytes_written for node in hidden)
        work = f"{flops} flops, {moved} bytes in {len(hidden)} calls; report_type='all' includes it"
        notes.append(f"functional work of modules with children that has no row here: {work}")
    idle = profile.trace.params - sum(node.params for node in root.walk())
    if idle > 0:
        notes.append(f"{idle} parameters were not read in this run, and are not counted")
    return tuple(notes)


def dataframe(report: Report) -> pd.DataFrame:
    """Return one line per row and a last one, labelled `total`; `.attrs` has the notes and the source of memory."""
    import pandas as pd

    rows = (*report.rows, report.total)
    index = pd.Index([*range(len(report.rows)), "total"], dtype=object, name="index")
    table = pd.DataFrame({name: [row[name] for row in rows] for name in report.total}, index=index)
    table.attrs["notes"] = report.notes
    table.attrs["device_memory"] = report.memory_source
    return table


_NOT_A_SUM = ("lat[%]", "end_lat", "net_dev_mem")


def round_value(value: float, binary: bool = False, prec: int = 2) -> str:
    """Return a number with the prefix K, M, G or T.

    Args:
        value: The number.
        binary: Prefixes are powers of 1024 instead of 1000, as for bytes; off, as for counts.
        prec: How many decimals are kept; 2, as in the published tables.

    >>> round_value(327_140_000), round_value(2048, binary=True), round_value(7)
    ('327.14M', '2.0K', '7')
    """
    step = 1024 if binary else 1000
    for power, prefix in ((4, "T"), (3, "G"), (2, "M"), (1, "K")):
        if value >= step**power:
            return f"{round(value / step**power, prec)}{prefix}"
    return str(round(value, prec))


def total_lines(report: Report) -> list[str]:
    """Return the figures of the total in words: "Total params: 3.5M"."""
    lines = []
    for column in report.columns:
        value = report.total[column.name]
        if column.is_label or column.name in _NOT_A_SUM or value is None or _is_unknown(value):
            continue
        is_bytes = "mem" in column.name
        unit = "Byte" if is_bytes else "ms" if "lat" in column.name else ""
        lines.append(f"Total {column.name}: {round_value(value, is_bytes)} {unit}".rstrip())
    return lines


def render_text(report: Report) -> str:
    """Return the table in aligned columns, the totals in words beneath it, and the notes."""
    totals_and_notes = [*total_lines(report), *(f"note: {printable(note)}" for note in report.notes)]
    if report.report_type is None:
        return "\n".join(totals_and_notes)
    lines = [[printable(cell) for cell in line] for line in _cells(report)]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    labels = {column.name for column in report.columns if column.is_label}
    sides = ["<" if name in labels else ">" for name in ("index", *report.total)]
    layout = "  ".join(f"{{:{side}{width}}}" for side, width in zip(sides, widths, strict=True))
    aligned = [layout.format(*line).rstrip() for line in lines]
    return "\n".join([*aligned, "=" * len(aligned[0]), *totals_and_notes])


def render_markdown(report: Report) -> str:
    """Return the table as Markdown, with its notes beneath."""
    header, *lines = _cells(report)
    notes = (f"\nNote: {markdown(note)}" for note in report.notes)
    return "\n".join([*markdown_table(header, lines), *notes]) + "\n"


def _cells(report: Report) -> list[list[str]]:
    lines = [["index", *report.total]]
    for label, row in (*enumerate(report.rows), ("total", report.total)):
        lines.append([str(label), *map(_cell, row.values())])
    return lines


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return "unknown" if math.isnan(value) else f"{value:.6g}"
    return "" if value is None else str(value)


def _is_unknown(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)


def render_json(report: Report) -> str:
    """Return the table as JSON; a figure that is not known is null."""

    def plain(row: dict[str, Any]) -> dict[str, Any]:
        return {name: None if _is_unknown(value) else value for name, value in row.items()}

    content = {
        "model": report.model,
        "report_type": report.report_type,
        "rows": [plain(row) for row in report.rows],
        "total": plain(report.total),
        "notes": report.notes,
        "device_memory": report.memory_source,
    }
    return json.dumps(content, indent=1, allow_nan=False) + "\n"


_RENDERERS: Mapping[str, Callable[[Report], str]] = {
    ".csv": lambda report: _as_csv(dataframe(report)),
    ".json": render_json,
    ".md": render_markdown,
    ".txt": lambda report: render_text(report) + "\n",
}


def report_file(save_path: str | os.PathLike[str], name: str) -> Path:
    """Return the file to write; a path without a suffix is a folder, and `name` the file in it."""
    path = Path(save_path)
    if path.is_dir() or not path.suffix:
        return path / name
    if path.suffix.lower() not in _RENDERERS:
        raise InvalidInput(f"save_path ends in {path.suffix!r}; use {', '.join(_RENDERERS)}, or no suffix for a folder")
    return path


def save(report: Report, save_path: str | os.PathLike[str]) -> Path:
    """Write the table and return its path; in a folder, the file is named after the model."""
    path = report_file(save_path, f"{report.model}_{report.report_type}.csv")
    return write_whole(path, _RENDERERS[path.suffix.lower()](report))


def save_report(report: pd.DataFrame, save_path: str | os.PathLike[str]) -> Path:
    """Write a table that `stat` returned as CSV, and return its path; folders are made.

    Args:
        report: What `stat(..., returns="data")` gave.
        save_path: The file; without a suffix a folder, in which it is called report.csv.
    """
    path = report_file(save_path, "report.csv")
    if path.suffix.lower() != ".csv":
        raise InvalidInput(f"save_path is {str(path)!r}; a table is saved as .csv (stat(save_path=) writes the others)")
    return write_whole(path, _as_csv(report))


def _as_csv(table: pd.DataFrame) -> str:
    safe = table.map(lambda value: spreadsheet(value) if isinstance(value, str) else value)
    return safe.to_csv(lineterminator="\n")


def load_report(path: str | os.PathLike[str]) -> pd.DataFrame:
    """Read a saved table; shapes are text in it, as in the file.

    Args:
        path: A .csv or .json file that `stat(save_path=)` or `save_report` wrote.
    """
    import pandas as pd

    file = Path(path)
    try:
        if file.suffix.lower() == ".json":
            content = json.loads(file.read_text(encoding="utf-8"))
            table = pd.DataFrame([*content["rows"], content["total"]])
            table.index = pd.Index([*range(len(content["rows"])), "total"], dtype=object, name="index")
            return table
        converters: dict[str, Callable[[str], Any]] = {
            "name": str,
            "index": lambda text: int(text) if text.isdigit() else text,
        }
        table = pd.read_csv(file, converters=converters)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidInput(f"{str(path)!r} is not a report of rasp: {error}") from error
    return table.set_index("index") if "index" in table.columns else table
