"""Records saved by the suffix of the file, profiles read back, and figures sent to trackers of experiments."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar, cast

from edge_opt._support import files
from edge_opt._support.json import dumps_rows, from_plain, loads, read_document, to_plain
from edge_opt.errors import EdgeOptError, InvalidInput, UnreadableProfile
from edge_opt.records.profiles import SCHEMA_VERSION, Level, ModelProfile
from edge_opt.report.html import sheet_page
from edge_opt.report.profile_text import notebook_sheet, profile_markdown, profile_sheet, profile_text
from edge_opt.report.sheets import Writer, sheet, sheet_markdown, sheet_text, view_of
from edge_opt.report.table import columns, table
from edge_opt.text import spreadsheet

R = TypeVar("R")
FORMAT = "edge_opt.profile"
# Results come first; the trace, which is most of the file, comes last.
_ORDER = ("format", "schema_version", "name", "mode", "convention", "totals", "peak", "unpriced", "layers")


def writer_for(kind: type, path: str | os.PathLike[str]) -> Writer:
    """Return what writes this kind of record to a file of this name; a suffix that nothing writes is refused."""
    view = view_of(kind)
    drawn: dict[str, Writer] = {
        ".html": lambda record: sheet_page(view.sheet(record)),
        ".md": lambda record: sheet_markdown(view.sheet(record)),
        ".txt": lambda record: sheet_text(view.sheet(record)) + "\n",
    }
    return files.writer_for(path, {**drawn, **view.files})


def save(record: Any, path: str | os.PathLike[str], **options: Any) -> Path:
    """Write a record and return the path; the file is replaced as a whole, or unchanged.

    Args:
        record: The record.
        path: The file; its suffix chooses the format.
        options: What the writer of this kind takes, such as the level of a profile's rows.
    """
    if "level" in options:
        columns(options["level"])  # a wrong level is refused also by formats that hold all levels
    return files.write_named(path, writer_for(type(record), path)(record, **options))


def document(profile: ModelProfile, level: Level = "leaves") -> str:
    """Return everything, as JSON that `load` reads back exactly: one line per layer, operator and storage."""
    plain = {"format": FORMAT, **to_plain(profile)}
    return dumps_rows({key: plain[key] for key in (*_ORDER, *(key for key in plain if key not in _ORDER))}) + "\n"


def _csv(profile: ModelProfile, level: Level = "leaves") -> str:
    """Return exact numbers under the columns' names; an empty cell is a value that is not known or not defined."""
    values = table(profile, level)
    return csv_text([column.name for column, _ in values], zip(*(cells for _, cells in values), strict=True))


def csv_text(names: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    """Return rows as CSV: exact numbers, empty where one is not known, no text that a spreadsheet would run."""
    out = io.StringIO()
    lines = csv.writer(out, lineterminator="\n")
    lines.writerow(names)
    lines.writerows([spreadsheet(it) if isinstance(it, str) else it for it in row] for row in rows)
    return out.getvalue()


def _html(profile: ModelProfile, level: Level = "leaves") -> str:
    """Return one page with tables and charts of every level, to be opened in a browser."""
    from edge_opt.report.page import page_text
    from edge_opt.report.page_data import page_data

    return page_text(page_data(profile=profile))


def load(path: str | os.PathLike[str]) -> ModelProfile:
    """Read a profile that `save` wrote as .json; it equals the one that was saved.

    Args:
        path: The file.
    """
    text = read_document(path, UnreadableProfile, "`edge-opt profile -o FILE.json` writes a profile", str)
    again = "profile the model again"
    return read_record(ModelProfile, text, repr(str(path)), FORMAT, SCHEMA_VERSION, again, _fault_of)


def read_record(
    kind: type[R],
    text: str,
    source: str,
    document_format: str,
    version: int,
    cure: str,
    fault_of: Callable[[R], str | None] = lambda record: None,
    refusal: type[EdgeOptError] = UnreadableProfile,
    unversioned: bool = False,
) -> R:
    """Return the record of a JSON document; one that is cut off, of another kind or version, or damaged is refused.

    Args:
        kind: Class of the record.
        text: The document.
        source: What errors call it, such as the name of its file.
        document_format: What the document must name as its format.
        version: The schema version that can be read.
        cure: What to do about a file that cannot be read.
        fault_of: Says what in a record does not fit together, if anything.
        refusal: The error to raise.
        unversioned: Whether documents without a schema version are read too, as 0.2 wrote them.
    """
    try:
        data = loads(text)
    except ValueError as error:
        raise refusal(f"{source} is not JSON, or is cut off ({error}); {cure}") from error
    if not isinstance(data, dict) or data.pop("format", None) != document_format:
        what = document_format.rpartition(".")[2]
        raise refusal(f'{source} is JSON, but not a {what}: it lacks "format": "{document_format}"')
    written = data.get("schema_version", version if unversioned else None)
    if written != version:
        is_newer = isinstance(written, int) and written > version
        cure = "upgrade edge-opt to read it" if is_newer else cure
        raise refusal(f"{source} has schema version {written!r}, and this edge_opt reads {version}; {cure}")
    names = {item.name for item in fields(cast(Any, kind))}
    try:
        record = from_plain(kind, {key: it for key, it in data.items() if key != "schema_version" or key in names})
        fault = fault_of(record)
    except UnreadableProfile as error:
        fault = str(error)
    if fault is not None:
        raise refusal(f"{source} is damaged: {fault}; {cure}")
    return record


def _fault_of(profile: ModelProfile) -> str | None:
    """Return what in a profile does not belong together, before a table stumbles over it; None where all does."""
    trace = profile.trace
    if not trace.modules or len(profile.layers) != len(trace.modules) or len(profile.prices) != len(trace.signatures):
        return "it has not one layer per module and one price per signature"
    for name in ("macs", "other_ops", "bytes_read", "bytes_written"):
        if getattr(profile.totals, name) != sum(getattr(layer.cost, name) for layer in profile.layers):
            return f"totals.{name} is not the sum of its layers"
    tensors_read = [len(signature.inputs) for signature in trace.signatures]
    for position, call in enumerate(trace.ops):
        is_called = 0 <= call.module < len(trace.modules) and 0 <= call.signature < len(trace.signatures)
        if not is_called or max((-1, *call.reads, *call.creates)) >= len(trace.storages):
            return f"trace.ops[{position}] points at something that is not there"
        if len(call.reads) != tensors_read[call.signature]:
            return f"trace.ops[{position}].reads has not one storage per tensor of its signature"
    for position, prediction in enumerate(profile.predictions):
        if any(not 0 <= layer.module < len(trace.modules) for layer in prediction.layers):
            return f"predictions[{position}] names a layer that is not there"
    return None


def time_line(profile: ModelProfile, level: Level = "leaves") -> str:
    """Return the measured layers of one forward on a time line, for ui.perfetto.dev and chrome://tracing.

    It has events of Chrome's trace format, with the memory below them. A module contains its children; its own work
    comes first. Operators have no row: only layers were measured.
    """
    measured = profile.measurement
    if measured is None or measured.layers is None:
        raise InvalidInput("a time line needs the measured times of layers; profile with measure=True")
    seconds = {layer.module: layer.seconds for layer in measured.layers.layers}
    begins_us: list[float] = []
    ends_us: list[float] = []
    now = 0.0
    for layer in profile.layers:
        begins_us.append(now)
        now += seconds.get(layer.call.index, 0.0) * 1e6
        ends_us.append(now)
        parent = layer.call.parent
        while parent is not None:
            ends_us[parent] = now
            parent = profile.trace.modules[parent].parent
    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "measured here"}}]
    for layer, begin, end in zip(profile.layers, begins_us, ends_us, strict=True):
        # Viewers count in whole nanoseconds; Perfetto drops a span that ends later than the one around it by a
        # rounding, so begin and end are rounded, not the duration.
        start_us = round(begin, 3)
        call, cost = layer.call, layer.cost
        events.append({
            "ph": "X", "name": call.path or profile.name, "cat": call.kind, "pid": 1, "tid": 1, "ts": start_us,
            "dur": round(round(end, 3) - start_us, 3),
            "args": {"class": call.kind, "parameters": call.params, "macs": cost.macs, "bytes_moved": cost.bytes_moved},
        })  # fmt: skip
        memory = {"bytes": layer.peak_live_bytes}
        events.append({"ph": "C", "name": "peak activations", "pid": 1, "ts": start_us, "args": memory})
    other = {"model": profile.name, "made by": "edge-opt"}
    trace = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}
    return json.dumps(trace, indent=1, allow_nan=False) + "\n"


_PROFILE_FILES: dict[str, Writer] = {
    ".json": document,
    ".csv": _csv,
    ".md": profile_markdown,
    ".txt": profile_text,
    ".html": _html,
    ".trace.json": time_line,
}
sheet(ModelProfile, brief=profile_sheet, files=_PROFILE_FILES)(notebook_sheet)


_UNITS = ("", "mb", "ms", "j")


def figures(profile: ModelProfile) -> Iterator[tuple[str, float]]:
    """Yield every figure that is known, once, in the unit that people use: macs, peak_memory_mb, latency_ms."""
    from edge_opt.budgets.budget_metrics import PROFILE_METRICS

    for metric in PROFILE_METRICS.values():
        value = metric.value(profile) if metric.unit in _UNITS else None
        if value is not None:
            yield metric.name, float(value)


def log_to(profile: ModelProfile, writer: Any, step: int = 0, prefix: str = "") -> None:
    """Write the figures, and the table as text, to TensorBoard, mlflow, a (client, run id) or a W&B run."""
    if hasattr(writer, "add_scalar"):
        for name, value in figures(profile):
            writer.add_scalar(prefix + name, value, step)
        # TensorBoard reads Markdown; four spaces keep a table as it is.
        writer.add_text(f"{prefix}profile", "\n".join(f"    {line}" for line in str(profile).splitlines()), step)
        return
    # A run of Weights & Biases, or its module inside one; mlflow has summaries nowhere.
    if hasattr(writer, "log") and hasattr(writer, "summary"):
        writer.log({prefix + name: value for name, value in figures(profile)}, step=step)
        writer.summary.update({f"{prefix}profile": str(profile)})
        return
    logger, run = writer if isinstance(writer, tuple) and len(writer) == 2 else (writer, None)
    if not hasattr(logger, "log_metric") or not hasattr(logger, "log_text"):
        known = "a TensorBoard SummaryWriter, the mlflow module, (MlflowClient(), run_id), or a run of Weights & Biases"
        raise InvalidInput(f"cannot log to a {type(writer).__name__}; give {known}")
    target = () if run is None else (run,)
    for name, value in figures(profile):
        logger.log_metric(*target, prefix + name, value, step=step)
    logger.log_text(*target, str(profile), f"{prefix}profile.txt")
