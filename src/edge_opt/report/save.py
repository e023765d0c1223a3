"""Profiles saved: as files by their suffix, on a time line, and to trackers of experiments."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from edge_opt._support import files
from edge_opt._support.json import dumps_rows, from_plain, to_plain
from edge_opt.errors import InvalidInput, UnreadableProfile
from edge_opt.records.profiles import SCHEMA_VERSION, Level, ModelProfile
from edge_opt.report.profile_text import render
from edge_opt.report.summary import summary_lines
from edge_opt.report.table import columns, table
from edge_opt.text import markdown, spreadsheet

FORMAT = "edge_opt.profile"
# What people look for comes first; the trace, which is most of the file, last.
_ORDER = ("format", "schema_version", "name", "mode", "convention", "totals", "peak", "unpriced", "layers")

Writer = Callable[[ModelProfile, Level], str]
W = TypeVar("W", bound=Writer)
_writers: dict[str, Writer] = {}


def writer(suffix: str) -> Callable[[W], W]:
    """Register a function that turns a profile into the text of a file with this suffix."""

    def register(function: W) -> W:
        known = _writers.setdefault(suffix, function)
        if known is not function:
            raise InvalidInput(f"{suffix} has two writers: {known.__qualname__} and {function.__qualname__}; keep one")
        return function

    return register


def writers() -> Mapping[str, Writer]:
    """Every registered writer by suffix; read-only."""
    return MappingProxyType(_writers)


def writer_for(path: str | os.PathLike[str]) -> Writer:
    """The writer that the path's suffix chooses."""
    return files.writer_for(path, _writers)


def save(profile: ModelProfile, path: str | os.PathLike[str], level: Level = "leaves") -> Path:
    """Write the profile and return the path. The file is replaced as a whole, or left as it was."""
    columns(level)  # a wrong level is refused for every format, also for those that hold all levels
    return files.write_named(path, writer_for(path)(profile, level))


@writer(".json")
def document(profile: ModelProfile, level: Level = "leaves") -> str:
    """Everything, as JSON that `load` reads back exactly: one line per layer, operator and storage."""
    plain = {"format": FORMAT, **to_plain(profile)}
    return dumps_rows({key: plain[key] for key in (*_ORDER, *(key for key in plain if key not in _ORDER))}) + "\n"


@writer(".csv")
def _csv(profile: ModelProfile, level: Level) -> str:
    """Exact numbers under the columns' names; an empty cell is a value that is not known or not defined."""
    found = table(profile, level)
    cells = [[spreadsheet(value) if isinstance(value, str) else value for value in values] for _, values in found]
    out = io.StringIO()
    lines = csv.writer(out, lineterminator="\n")
    lines.writerow([column.name for column, _ in found])
    lines.writerows(zip(*cells, strict=True))
    return out.getvalue()


@writer(".md")
def _markdown(profile: ModelProfile, level: Level) -> str:
    """A table for people, with the summary under it."""
    found = table(profile, level)
    cells = [[markdown(column.text(value)) for value in values] for column, values in found]
    header = [markdown(column.title) for column, _ in found]
    rule = ["---" if column.kind in ("text", "flag") else "--:" for column, _ in found]
    lines = [f"| {' | '.join(line)} |" for line in (header, rule, *zip(*cells, strict=True))]
    notes = [f"- **{label}:** {markdown(text)}" for label, text in summary_lines(profile)]
    return "\n".join([f"# {markdown(profile.name)}", "", *lines, "", *notes, ""])


@writer(".txt")
def _text(profile: ModelProfile, level: Level) -> str:
    """What the terminal shows, at full depth."""
    depth = len(profile.layers) if level == "modules" else None
    return render(profile, level=level, depth=depth, width=120) + "\n"


@writer(".html")
def _html(profile: ModelProfile, level: Level) -> str:
    """One page with tables and charts of every level, to be opened in a browser."""
    from edge_opt.report.page.page import page_text
    from edge_opt.report.page.payload import payload

    return page_text(payload(profile=profile))


@writer(".trace.json")
def _time_line(profile: ModelProfile, level: Level) -> str:
    """Measured layers on a time line with the memory under it, for ui.perfetto.dev and chrome://tracing."""
    return json.dumps(time_line(profile), indent=1, allow_nan=False) + "\n"


def load(path: str | os.PathLike[str]) -> ModelProfile:
    """Read a profile that `save` wrote as .json; it equals the one that was saved.

    Args:
        path: The file.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UnreadableProfile(f"no file {str(path)!r}; profile.save('NAME.json') writes one") from None
    except OSError as error:
        raise UnreadableProfile(f"cannot read {str(path)!r}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise UnreadableProfile(
            f"{str(path)!r} is not JSON, or is cut off ({error}); save the profile again as .json"
        ) from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise UnreadableProfile(
            f'{str(path)!r} is JSON, but not a profile: it lacks "format": "{FORMAT}"; '
            "profile.save('NAME.json') writes one"
        )
    version = data.get("schema_version")
    if version != SCHEMA_VERSION:
        is_newer = isinstance(version, int) and version > SCHEMA_VERSION
        cure = "upgrade edge-opt to read it" if is_newer else "profile the model again"
        raise UnreadableProfile(
            f"{str(path)!r} has schema version {version!r}, and this edge_opt reads {SCHEMA_VERSION}; {cure}"
        )
    try:
        profile = from_plain(ModelProfile, {key: value for key, value in data.items() if key != "format"})
        _check_references(profile)
    except UnreadableProfile as error:
        raise UnreadableProfile(f"{str(path)!r} is damaged: {error}; save the profile again") from error
    return profile


def _check_references(profile: ModelProfile) -> None:
    """Refuse a profile whose parts do not belong together, before a table stumbles over it."""
    trace = profile.trace
    if not trace.modules or len(profile.layers) != len(trace.modules) or len(profile.prices) != len(trace.signatures):
        raise UnreadableProfile("it has not one layer per module and one price per signature")
    for name in ("macs", "other_ops", "bytes_read", "bytes_written"):
        if getattr(profile.totals, name) != sum(getattr(layer.cost, name) for layer in profile.layers):
            raise UnreadableProfile(f"totals.{name} is not the sum of its layers")
    for position, call in enumerate(trace.ops):
        storages = (-1, *call.reads, *call.creates)
        if (
            not 0 <= call.module < len(trace.modules)
            or not 0 <= call.signature < len(trace.signatures)
            or max(storages) >= len(trace.storages)
        ):
            raise UnreadableProfile(f"trace.ops[{position}] points at something that is not there")
    for position, prediction in enumerate(profile.predictions):
        if any(not 0 <= layer.module < len(trace.modules) for layer in prediction.layers):
            raise UnreadableProfile(f"predictions[{position}] names a layer that is not there")


def time_line(profile: ModelProfile) -> dict[str, Any]:
    """Return the measured layers of one forward as events of Chrome's trace format, with the memory below them.

    A module contains its children; its own work comes first. Operators have no row: only layers were measured.
    """
    measured = profile.measurement
    if measured is None or measured.layers is None:
        raise InvalidInput("a time line needs the measured times of layers; profile with measure=True (--measure)")
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
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"model": profile.name, "made by": "edge-opt"}}


_UNITS = ("", "mb", "ms", "j")


def figures(profile: ModelProfile) -> Iterator[tuple[str, float]]:
    """Every figure that is known, once, in the unit that people use: macs, peak_memory_mb, latency_ms."""
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
        found = dict(figures(profile))
        writer.log({prefix + name: value for name, value in found.items()}, step=step)
        writer.summary.update({f"{prefix}profile": str(profile)})
        return
    logger, run = writer if isinstance(writer, tuple) and len(writer) == 2 else (writer, None)
    if not hasattr(logger, "log_metric") or not hasattr(logger, "log_text"):
        raise InvalidInput(
            f"cannot log to a {type(writer).__name__}; give a TensorBoard SummaryWriter, the mlflow module, "
            "(MlflowClient(), run_id), or a run of Weights & Biases"
        )
    target = () if run is None else (run,)
    for name, value in figures(profile):
        logger.log_metric(*target, prefix + name, value, step=step)
    logger.log_text(*target, str(profile), f"{prefix}profile.txt")
