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
    """Layers on a time line with the memory under it, for ui.perfetto.dev and chrome://tracing."""
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


Events = list[dict[str, Any]]
_OPERATORS, _MODULES = 1, 2  # tracks


def time_line(profile: ModelProfile) -> dict[str, Any]:
    """The events of one forward: a process for what was measured and one for each target that was predicted for.

    Each has modules, one inside the other, the operators under them, and the bytes of activations alive. The seconds
    of a layer are spread over its operators by what they compute and move; only those of layers are known.
    """
    known = list(_known_seconds(profile))
    if not known:
        raise InvalidInput(
            "a time line needs times, and the profile has none; add target= (--target) or measure= (--measure)"
        )
    events: Events = []
    for process, (name, seconds) in enumerate(known, start=1):
        events += _named(process, name)
        events += _process(profile, process, seconds)
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"model": profile.name, "made by": "edge-opt"}}


def _known_seconds(profile: ModelProfile) -> Iterator[tuple[str, dict[int, float]]]:
    """Seconds of layers by their place in the trace, under the name of where they come from."""
    measured = profile.measurement
    if measured is not None and measured.layers is not None:
        yield "measured here", {layer.module: layer.seconds for layer in measured.layers.layers}
    for prediction in profile.predictions:
        seconds = {layer.module: layer.seconds for layer in prediction.layers if layer.seconds is not None}
        if seconds:
            yield f"predicted on {prediction.target} ({prediction.precision}, {prediction.basis})", seconds


def _named(process: int, name: str) -> Events:
    rows = [("process_name", 0, name), ("thread_name", _MODULES, "modules"), ("thread_name", _OPERATORS, "operators")]
    return [
        {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": text}} for kind, thread, text in rows
    ]


def _process(profile: ModelProfile, process: int, seconds: Mapping[int, float]) -> Events:
    trace = profile.trace
    durations = _operator_seconds(profile, seconds)
    begins: dict[int, float] = {}
    ends: dict[int, float] = {}
    operators: Events = []
    memory: Events = []
    now = 0.0
    for call in trace.ops:
        after = now + durations[call.index] * 1e6
        price = profile.prices[call.signature]
        memory.append({"ph": "C", "name": "activations", "pid": process, "ts": now, "args": {"bytes": call.live_bytes}})
        if price.status != "free":
            operators.append({
                "ph": "X", "name": trace.signatures[call.signature].op, "cat": price.kind, "pid": process,
                "tid": _OPERATORS, **_span(now, after),
                "args": {"module": trace.modules[call.module].path, "macs": price.cost.macs, "flops": price.cost.flops,
                         "bytes_moved": price.cost.bytes_moved},
            })  # fmt: skip
        module: int | None = call.module
        while module is not None:
            begins.setdefault(module, now)
            ends[module] = after
            module = trace.modules[module].parent
        now = after
    memory.append({"ph": "C", "name": "activations", "pid": process, "ts": now, "args": {"bytes": 0}})
    modules: Events = [
        {"ph": "X", "name": trace.modules[place].path or profile.name, "cat": trace.modules[place].kind, "pid": process,
         "tid": _MODULES, **_span(begins[place], ends[place]),
         "args": {"class": trace.modules[place].kind, "parameters": trace.modules[place].params}}
        for place in sorted(begins)
    ]  # fmt: skip
    return [*modules, *operators, *memory]


def _span(begin_us: float, end_us: float) -> dict[str, float]:
    """Begin and duration in whole nanoseconds, which viewers count in: one that ends later than what is around it,
    by a rounding, is dropped by Perfetto."""
    begin, end = round(begin_us, 3), round(end_us, 3)
    return {"ts": begin, "dur": round(end - begin, 3)}


def _operator_seconds(profile: ModelProfile, seconds: Mapping[int, float]) -> list[float]:
    """The seconds of each operator: its share of what its layer computes and moves."""
    weights = [
        float(profile.prices[call.signature].cost.flops + profile.prices[call.signature].cost.bytes_moved)
        for call in profile.trace.ops
    ]
    totals: dict[int, float] = {}
    counts: dict[int, int] = {}
    for call, weight in zip(profile.trace.ops, weights, strict=True):
        totals[call.module] = totals.get(call.module, 0.0) + weight
        counts[call.module] = counts.get(call.module, 0) + 1
    return [
        seconds.get(call.module, 0.0)
        * (weight / totals[call.module] if totals[call.module] else 1 / counts[call.module])
        for call, weight in zip(profile.trace.ops, weights, strict=True)
    ]


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
