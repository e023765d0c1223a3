"""A profile on a time line: Chrome's trace events, which Perfetto and chrome://tracing show."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from edge_opt.errors import InvalidInput
from edge_opt.records import ModelProfile

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
