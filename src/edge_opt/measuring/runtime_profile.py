"""Map profiles that runtimes write onto the modules of a model."""

from __future__ import annotations

import csv
import json
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from edge_opt._support.files import check_regular
from edge_opt.errors import InvalidInput, UnreadableProfile
from edge_opt.measuring.statistics import latency_of, median
from edge_opt.records.fields import field, record
from edge_opt.records.measurements import Environment, Interval, LayerLatencies, LayerLatency, Measurement
from edge_opt.records.profiles import ModelProfile

FORMS = ("ONNX Runtime's profiling JSON, trtexec --exportProfile, the CSV of TFLite's benchmark_model, or a CSV of "
         "ExecuTorch's Inspector")  # fmt: skip
_MOST_NAMED = 5
Finder = Callable[[str, str], str | None]


@record
class ProfileEntry:
    """One entry of a runtime's profile, mostly a kernel."""

    name: str = field("As the runtime calls it.")
    samples_s: tuple[float, ...] = field("Its seconds in each run, or one figure for all runs.")
    path: str = field('Path of its module where the runtime itself knows it; "" elsewhere.', default="")
    op: str = field('What it computes, where the runtime says so, such as "Conv".', default="")
    kind: str = field('The type that it computes in, in the runtime\'s own words; "" if unknown.', default="")
    aliases: tuple[str, ...] = field("Names of the nodes in it, if the runtime reports them.", default=())

    @property
    def seconds(self) -> float:
        return median(self.samples_s)


@record
class RuntimeProfile:
    """The contents of a runtime's profile."""

    runtime: str = field("Who wrote it.")
    kernels: tuple[ProfileEntry, ...] = field("Its entries, in the order of execution.")
    runs_s: tuple[float, ...] = field("Seconds of each whole run; empty where the file does not say.")

    @property
    def whole_s(self) -> float:
        """Seconds of one run: the middle one, else the sum of the entries."""
        return median(self.runs_s) if self.runs_s else sum(kernel.seconds for kernel in self.kernels)


def read_runtime_profile(path: str | os.PathLike[str]) -> RuntimeProfile:
    """Read what a runtime measured from the file it wrote; the content says which runtime.

    Args:
        path: The file, as `FORMS` lists them.
    """
    try:
        check_regular(Path(path))
        text = Path(path).read_text(encoding="utf-8", errors="replace")
    except (OSError, ValueError) as error:
        raise UnreadableProfile(f"cannot read {str(path)!r}: {getattr(error, 'strerror', None) or error}") from error
    try:
        profile = _read(text)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise UnreadableProfile(f"{str(path)!r} is cut off or damaged ({type(error).__name__}: {error})") from error
    if profile is None or not profile.kernels:
        raise UnreadableProfile(f"{str(path)!r} is not a profile of a known runtime; it may be {FORMS}")
    return profile


def _read(text: str) -> RuntimeProfile | None:
    if text.lstrip()[:1] in ("[", "{"):
        data = json.loads(text)
        if isinstance(data, dict):
            return None
        if any(isinstance(item, dict) and "averageMs" in item for item in data):
            return _tensorrt(data)
        return read_onnxruntime(data)
    lines = text.splitlines()
    if any("avg_ms" in line or "avg ms" in line for line in lines):
        return _tflite(lines)
    return _executorch(lines)


def read_onnxruntime(events: Sequence[Mapping[str, Any]]) -> RuntimeProfile:
    """Return the kernels of ONNX Runtime's events; the first run, which allocates, counts only where it is alone."""
    runs: list[float] = []
    samples: dict[str, list[float]] = defaultdict(list)
    arguments: dict[str, Mapping[str, Any]] = {}
    for event in sorted(events, key=lambda event: float(event["ts"])):
        name = str(event["name"])
        if event.get("cat") == "Session" and name == "model_run":
            runs.append(float(event["dur"]) / 1e6)
        elif event.get("cat") == "Node" and name.endswith("_kernel_time"):
            key = name.removesuffix("_kernel_time")
            samples[key].append(float(event["dur"]) / 1e6)
            arguments[key] = event.get("args", {})
    count = max(len(runs), 1)
    kernels = []
    for name, values in samples.items():
        op = str(arguments[name].get("op_name", ""))
        # The first input has the type that a kernel runs in, unless the kernel itself rounds it.
        types = [next(iter(entry), "") for entry in arguments[name].get("input_type_shape") or [{}]]
        kind = "int8" if op.startswith("DynamicQuantize") else types[0]
        # A kernel that runs several times in a run counts together.
        each = max(len(values) // count, 1)
        per_run = [sum(values[start : start + each]) for start in range(0, each * min(count, len(values)), each)]
        kernels.append(ProfileEntry(name, tuple(per_run[count > 1 :]), op=op, kind=kind))
    return RuntimeProfile("ONNX Runtime", tuple(kernels), tuple(runs[1:] if count > 1 else runs))


def _tensorrt(entries: Sequence[Mapping[str, Any]]) -> RuntimeProfile:
    kernels = [
        ProfileEntry(str(entry["name"]), (float(entry.get("medianMs", entry["averageMs"])) / 1e3,))
        for entry in entries
        if "averageMs" in entry
    ]
    return RuntimeProfile("TensorRT", tuple(kernels), ())


def _tflite(lines: Sequence[str]) -> RuntimeProfile:
    """Read the table in the order of execution; the one of the runs, not that of the initialization."""
    kernels: list[ProfileEntry] = []
    columns: list[str] = []
    is_runs = not any("Regular Benchmark Runs" in line for line in lines)
    is_ordered = False
    for line in lines:
        is_runs = is_runs or "Regular Benchmark Runs" in line
        if "====" in line:
            is_ordered, columns = "Run Order" in line, []
        cells = next(csv.reader([line], skipinitialspace=True), [])
        cells = [cell.strip() for cell in cells]
        if "node type" in [cell.lower().strip("[]") for cell in cells]:
            columns = [cell.lower().strip("[]").replace(" ", "_") for cell in cells]
        elif columns and is_runs and is_ordered and len(cells) >= len(columns):
            row = dict(zip(columns, cells, strict=False))
            seconds = float(row.get("avg_ms", row.get("avg", "0"))) / 1e3
            name = ",".join(cells[len(columns) - 1 :]).strip("[]").partition("]:")[0]
            kernels.append(ProfileEntry(name or row["node_type"], (seconds,)))
    return RuntimeProfile("TFLite", tuple(kernels), ())


def _executorch(lines: Sequence[str]) -> RuntimeProfile | None:
    rows = list(csv.DictReader(lines))
    if not rows or "event_name" not in rows[0]:
        return None
    columns = [name for name in ("p50 (ms)", "p50", "avg (ms)", "avg") if name in rows[0]]
    if not columns:
        return None
    kernels, runs = [], []
    for row in rows:
        seconds = float(row[columns[0]]) / 1e3
        if row["event_name"] in ("Method::execute", "Method.execute"):
            runs.append(seconds)
        elif row.get("event_block_name", "Execute") == "Execute" and row["event_name"] != "DELEGATE_CALL":
            # torch.export writes the hierarchy of modules as L['self'].layer1.conv; the innermost is the longest.
            paths = re.findall(r"L\['self'\]\.([\w.]+)", row.get("module_hierarchy") or "")
            kernels.append(ProfileEntry(row["event_name"], (seconds,), max(paths, key=len, default="")))
    return RuntimeProfile("ExecuTorch", tuple(kernels), tuple(runs))


def map_runtime_profile(
    profile: ModelProfile, measured: RuntimeProfile, find: Finder | None = None, source: str = ""
) -> ModelProfile:
    """Return the profile with what a runtime measured on its modules, and a remark on what belongs to none.

    Args:
        profile: The profile of the same model.
        measured: What the runtime's file says.
        find: The path of a module by the name of a node of the model's file, or of a value that it makes, and the
            type of the kernel; None for a model that has no such file.
        source: Name of the file, for the remark.
    """
    calls = {call.path: call.index for call in reversed(profile.trace.modules)}
    seconds: dict[int, list[tuple[float, ...]]] = defaultdict(list)
    lost: list[ProfileEntry] = []
    for kernel in measured.kernels:
        candidates = [kernel.path] if kernel.path else _paths(kernel, find, calls)
        module = next((calls[path] for path in candidates if path in calls), None)
        if module is None:
            lost.append(kernel)
        else:
            seconds[module].append(kernel.samples_s)
    if not seconds:
        names = ", ".join(kernel.name for kernel in lost[:_MOST_NAMED])
        raise InvalidInput(
            f"nothing of {source or 'the profile'} belongs to a layer of {profile.name}: it names {names}; "
            "give the .onnx or .tflite file that the runtime ran as the model"
        )
    whole = max(measured.whole_s, sum(median(part) for parts in seconds.values() for part in parts))
    layers = tuple(_layer(profile, module, parts, whole) for module, parts in sorted(seconds.items()))
    remarks = [f"measured by {measured.runtime}, read from {source or 'its profile'}; the machine is not known"]
    if lost:
        share = sum(kernel.seconds for kernel in lost) / whole if whole else 0.0
        named = ", ".join(kernel.name for kernel in lost[:_MOST_NAMED]) + (", ..." if len(lost) > _MOST_NAMED else "")
        remarks.append(
            f"{len(lost)} of {len(measured.kernels)} entries, {share:.1%} of the time, belong to no layer: {named}"
        )
    runs = measured.runs_s or (whole,)
    latency = replace(latency_of(runs, runs), remarks=tuple(remarks), is_noisy=False)
    latencies = LayerLatencies(layers, whole - sum(layer.seconds for layer in layers), whole, 0.0)
    environment = Environment(
        f"not known: {measured.runtime}", 0, 0, None, None, 0, "not known", "", "", measured.runtime
    )
    return replace(profile, measurement=Measurement(latency, latencies, None, None, (), environment))


def _layer(profile: ModelProfile, module: int, parts: Sequence[tuple[float, ...]], whole_s: float) -> LayerLatency:
    call, cost = profile.trace.modules[module], profile.layers[module].cost
    seconds = sum(median(part) for part in parts)
    is_known = seconds > 0 and not profile.layers[module].unpriced
    return LayerLatency(
        module, call.path, call.kind, seconds,
        Interval(sum(min(part) for part in parts), sum(max(part) for part in parts)),
        seconds / whole_s if whole_s else 0.0,
        cost.macs / seconds if is_known else None,
        cost.bytes_moved / seconds if is_known else None,
    )  # fmt: skip


_AROUND = re.compile(r"_(?:nchwc|quant|nchwc_quant|kernel|token_\d+)$")


def _paths(kernel: ProfileEntry, find: Finder | None, calls: Mapping[str, int]) -> Iterator[str]:
    """Yield paths that a runtime's name may mean; of fused nodes, the first that is known."""
    whole = None if find is None else find(kernel.name, kernel.op)
    if whole is not None:
        yield whole
    inside = re.sub(r"^(?:PWN|PointWise|ForeignNode)\(|[\[\]{}()]", "", kernel.name)
    for part in re.split(r"\s*\+\s*|,\s*|;|\s\|\|\s|\.\.\.", inside):
        plain = part.strip()
        for form in dict.fromkeys((plain, _AROUND.sub("", plain))):
            path = None if find is None else find(form, kernel.op)
            if path is not None:
                yield path
            dotted = form.strip("/").replace("/", ".")
            while dotted:
                if dotted in calls:
                    yield dotted
                dotted = dotted.rpartition(".")[0]
