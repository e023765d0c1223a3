"""Figure data: what a chart of a profile shows, as records; pages and pictures draw the same."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from edge_opt.records import ModelProfile, Prediction
from edge_opt.report.rows import Row, leaf_rows

Provenance = Literal["counted", "estimated", "measured", "proxy", "predicted"]
Unit = Literal["count", "bytes", "time"]
MOST_BARS = 20
_MOST_STEPS = 4000


@dataclass(frozen=True, slots=True)
class Bars:
    """Layers by one figure. All of them in order of execution, or the largest first and the others in one number."""

    metric: str
    title: str
    unit: Unit
    provenance: Provenance
    names: tuple[str, ...]
    values: tuple[float, ...]
    others: int
    others_value: float
    total: float

    @property
    def caption(self) -> str:
        """What the chart shows, in words."""
        if not self.total:
            return "No layer has any."
        top = max(range(len(self.values)), key=lambda index: self.values[index])
        share = self.others_value / self.total
        rest = f"; {self.others} smaller together {share:.0%}" if self.others else ""
        return f"Largest: {self.names[top]}, {self.values[top] / self.total:.0%} of the total{rest}."


def bars(
    names: Sequence[str],
    values: Sequence[float],
    *,
    metric: str = "",
    title: str = "",
    unit: Unit = "count",
    provenance: Provenance = "counted",
    most: int = MOST_BARS,
) -> Bars:
    """The largest of some named values; the others are added up, never dropped.

    >>> found = bars(["a", "b", "c"], [1, 5, 2], most=2)
    >>> found.names, found.values, found.others, found.others_value
    (('b', 'c'), (5, 2), 1, 1)
    """
    order = list(range(len(values)))
    if len(values) > most:
        order = sorted(order, key=lambda index: -values[index])
    shown, others = order[:most], order[most:]
    return Bars(
        metric,
        title,
        unit,
        provenance,
        tuple(names[index] for index in shown),
        tuple(values[index] for index in shown),
        len(others),
        math.fsum(values[index] for index in others) if unit == "time" else sum(values[index] for index in others),
        math.fsum(values) if unit == "time" else sum(values),
    )


_COSTS: tuple[tuple[str, str, Unit, Provenance, Callable[[Row], float]], ...] = (
    ("macs", "Multiply-accumulates", "count", "counted", lambda row: row.cost.macs if row.cost else 0),
    ("bytes", "Bytes read and written", "bytes", "estimated", lambda row: row.cost.bytes_moved if row.cost else 0),
    ("memory", "Activations made", "bytes", "estimated", lambda row: row.activation_bytes),
)


def layer_bars(profile: ModelProfile, most: int = MOST_BARS) -> list[Bars]:
    """Bars of MACs, bytes and activations per layer; of time where it was measured, and of each prediction."""
    rows = leaf_rows(profile)

    def of(metric: str, title: str, unit: Unit, provenance: Provenance, get: Callable[[Row], float]) -> Bars:
        kept = [row for row in rows if get(row)]
        named = [layer_name(row, profile) for row in kept]
        values = [get(row) for row in kept]
        return bars(named, values, metric=metric, title=title, unit=unit, provenance=provenance, most=most)

    found = [of(*cost) for cost in _COSTS]
    if any(row.measured_s is not None for row in rows):
        found.append(of("time", "Time", "time", "measured", lambda row: max(row.measured_s or 0.0, 0.0)))
    for prediction in predictions_of(profile):
        times = {layer.module: layer.seconds or 0.0 for layer in prediction.layers}
        title = f"Time on {prediction.target} ({prediction.precision})"
        metric = f"time:{prediction.target}:{prediction.precision}"
        found.append(of(metric, title, "time", "predicted", lambda row, times=times: times.get(row.index, 0.0)))  # type: ignore[misc]
    return found


def layer_name(row: Row, profile: ModelProfile) -> str:
    """A layer as charts call it: its path, which call of it, or the model's own name."""
    name = row.path or profile.name
    return f"{name} (call {row.call_number})" if row.call_number > 1 else name


def predictions_of(profile: ModelProfile) -> tuple[Prediction, ...]:
    """What was predicted for targets; none where nobody asked."""
    return tuple(getattr(profile, "predictions", ()))


@dataclass(frozen=True, slots=True)
class Timeline:
    """Activation bytes alive at each operator; of a long tape the highest of each stretch of `stride` operators."""

    steps: tuple[int, ...]
    live_bytes: tuple[int, ...]
    operators: tuple[str, ...]
    modules: tuple[str, ...]
    stride: int
    resident_bytes: int
    peak_bytes: int
    peak_step: int | None
    peak_module: str
    planner_bytes: int


def timeline(profile: ModelProfile, most: int = _MOST_STEPS) -> Timeline:
    """Memory over the tape; weights, buffers and inputs are apart, in `resident_bytes`."""
    trace, totals = profile.trace, profile.totals
    stride = max(1, -(-len(trace.ops) // most))
    highest = [
        max(trace.ops[start : start + stride], key=lambda call: call.live_bytes)
        for start in range(0, len(trace.ops), stride)
    ]
    return Timeline(
        tuple(call.index for call in highest),
        tuple(call.live_bytes for call in highest),
        tuple(trace.signatures[call.signature].op for call in highest),
        tuple(trace.modules[call.module].path for call in highest),
        stride,
        totals.param_bytes + totals.buffer_bytes + totals.input_bytes,
        profile.peak.live_bytes,
        profile.peak.op_index,
        profile.peak.module,
        profile.peak.planner_bytes,
    )


@dataclass(frozen=True, slots=True)
class Agreement:
    """A prediction laid beside what was measured, layer by layer and for the whole; only where both are known."""

    target: str
    basis: str
    precision: str
    predicted_s: float
    low_s: float | None
    high_s: float | None
    measured_s: float
    names: tuple[str, ...]
    layer_predicted_s: tuple[float, ...]
    layer_low_s: tuple[float | None, ...]
    layer_high_s: tuple[float | None, ...]
    layer_measured_s: tuple[float, ...]

    @property
    def error(self) -> float:
        """How far the prediction of the whole is off; 0.1 is ten percent too slow."""
        return self.predicted_s / self.measured_s - 1


def agreements(profile: ModelProfile) -> list[Agreement]:
    """Predictions that can be held against the measurement."""
    if profile.measurement is None:
        return []
    layers = profile.measurement.layers
    measured = {layer.module: layer.seconds for layer in layers.layers} if layers else {}
    found = []
    for prediction in predictions_of(profile):
        if prediction.seconds is None:
            continue
        pairs = [
            (layer, layer.seconds, measured[layer.module])
            for layer in prediction.layers
            if layer.seconds is not None and measured.get(layer.module, 0.0) > 0
        ]
        found.append(
            Agreement(
                prediction.target,
                prediction.basis,
                prediction.precision,
                prediction.seconds,
                prediction.low,
                prediction.high,
                profile.measurement.latency.median_s,
                tuple(layer.path or profile.name for layer, _, _ in pairs),
                tuple(predicted for _, predicted, _ in pairs),
                tuple(layer.low for layer, _, _ in pairs),
                tuple(layer.high for layer, _, _ in pairs),
                tuple(seconds for _, _, seconds in pairs),
            )
        )
    return found
