"""What pages and pictures draw, as data."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, Literal

from edge_opt import units
from edge_opt._support.json import from_plain
from edge_opt.boards.catalog import device as find_device
from edge_opt.boards.roofline import PRECISIONS, roofline
from edge_opt.errors import InvalidInput, UnknownDevice, UnreadableProfile
from edge_opt.records.compression import LayerSensitivity, Sensitivity
from edge_opt.records.devices import DeviceSpec, Roofline
from edge_opt.records.profiles import ModelProfile
from edge_opt.records.sweeps import SweepResult
from edge_opt.report.sweep_files import frontier_keys, sweep_rows
from edge_opt.report.table import Row, leaf_rows

Provenance = Literal["counted", "estimated", "measured", "proxy", "predicted"]
Unit = Literal["count", "bytes", "time"]
MOST_BARS = 20
_MOST_STEPS = 4000
_WIDE = 5  # a span, largest over smallest


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
        largest, others = (units.percent(value / self.total) for value in (self.values[top], self.others_value))
        rest = f"; {self.others} others together {others}" if self.others else ""
        return f"Largest: {self.names[top]}, {largest} of the total{rest}."


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
    for prediction in profile.predictions:
        times = {layer.module: layer.seconds or 0.0 for layer in prediction.layers}
        title = f"Time on {prediction.target} ({prediction.precision})"
        metric = f"time:{prediction.target}:{prediction.precision}"
        found.append(of(metric, title, "time", "predicted", lambda row, times=times: times.get(row.index, 0.0)))  # type: ignore[misc]
    return found


def layer_name(row: Row, profile: ModelProfile) -> str:
    """A layer as charts call it: its path, which call of it, or the model's own name."""
    name = row.path or profile.name
    return f"{name} (call {row.call_number})" if row.call_number > 1 else name


@dataclass(frozen=True, slots=True)
class Timeline:
    """Activation bytes alive at each operator; of a long tape the highest of each stretch of `stride` operators.

    The `cuda` figures are what torch's caching allocator would hold there, weights and inputs included, by simulation.
    """

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
    cuda_allocated_bytes: tuple[int, ...]
    cuda_reserved_bytes: tuple[int, ...]
    cuda_note: str


def timeline(profile: ModelProfile, most: int = _MOST_STEPS) -> Timeline:
    """Memory over the tape; weights, buffers and inputs are apart, in `resident_bytes`."""
    trace, totals = profile.trace, profile.totals
    stride = max(1, -(-len(trace.ops) // most))
    highest = [
        max(trace.ops[start : start + stride], key=lambda call: call.live_bytes)
        for start in range(0, len(trace.ops), stride)
    ]
    on_cuda = profile.device_memory("cuda")
    stretches = [on_cuda.tape[start : start + stride] for start in range(0, len(on_cuda.tape), stride)]
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
        tuple(max(point.allocated_bytes for point in stretch) for stretch in stretches),
        tuple(max(point.reserved_bytes for point in stretch) for stretch in stretches),
        on_cuda.notes[0],
    )


@dataclass(frozen=True, slots=True)
class PredictionError:
    """A prediction beside the measurement, for each layer and the whole model; only where both are known."""

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
    def ratio(self) -> float:
        """Predicted over measured; 1.1 is ten percent too slow, where the target is this machine."""
        return self.predicted_s / self.measured_s


def agreements(profile: ModelProfile) -> list[PredictionError]:
    """Predictions that can be held against the measurement."""
    if profile.measurement is None:
        return []
    layers = profile.measurement.layers
    measured = {layer.module: layer.seconds for layer in layers.layers} if layers else {}
    found = []
    for prediction in profile.predictions:
        if prediction.seconds is None:
            continue
        pairs = [
            (layer, layer.seconds, measured[layer.module])
            for layer in prediction.layers
            if layer.seconds is not None and measured.get(layer.module, 0.0) > 0
        ]
        found.append(
            PredictionError(
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


@dataclass(frozen=True, slots=True)
class Axis:
    """One figure of a candidate. `low` and `high` name the columns of its interval, "" where there is none."""

    name: str
    title: str
    unit: str
    is_better_high: bool
    low: str = ""
    high: str = ""

    def is_wide(self, rows: Iterable[Mapping[str, Any]]) -> bool:
        """Whether the rows span so much that only a logarithmic scale shows them all; scores stay on a plain one.

        >>> axis_named("latency_ms").is_wide([{"latency_ms": 1.0}, {"latency_ms": 5.5}, {"latency_ms": None}])
        True
        """
        known = [row[self.name] for row in rows if row[self.name] is not None]
        return self.name != "accuracy" and bool(known) and min(known) > 0 and max(known) > _WIDE * min(known)


AXES = (
    Axis("accuracy", "Accuracy", "", True, "accuracy_ci95_low", "accuracy_ci95_high"),
    Axis(
        "deploy_latency_ms",
        "Latency as deployed",
        "ms",
        False,
        "deploy_latency_ci95_low_ms",
        "deploy_latency_ci95_high_ms",
    ),
    Axis("latency_ms", "Latency", "ms", False, "latency_ci95_low_ms", "latency_ci95_high_ms"),
    Axis("latency_p95_ms", "Latency, 95th percentile", "ms", False),
    Axis("throughput_sps", "Throughput", "samples/s", True),
    Axis("peak_memory_mb", "Peak memory, estimated", "MiB", False),
    Axis("measured_memory_mb", "Memory, measured", "MiB", False),
    Axis("size_mb", "Size on disk", "MiB", False),
    Axis("energy_j", "Energy", "J", False),
    Axis("macs", "MACs", "", False),
    Axis("params", "Parameters", "", False),
)
_RECORDED = {"deploy_latency_ms": "latency", "latency_ms": "latency", "energy_j": "energy"}


def axes_of(result: SweepResult) -> tuple[Axis, ...]:
    """The axes of a sweep; where another metric is scored, the axis of accuracy has its title and direction."""
    if result.metric == "accuracy":
        return AXES
    return (replace(AXES[0], title=result.metric, is_better_high=result.metric_direction == "higher"), *AXES[1:])


def axis_named(name: str) -> Axis:
    """The axis of that name."""
    return next(axis for axis in AXES if axis.name == name)


def frontier(rows: Sequence[Mapping[str, Any]], x: Axis, y: Axis) -> list[int]:
    """Positions of the rows that no other beats in both figures, by x; rows that lack one are left out.

    >>> rows = [{"accuracy": a, "latency_ms": t} for a, t in ((0.9, 5), (0.8, 6), (0.7, 2))]
    >>> frontier(rows, axis_named("latency_ms"), axis_named("accuracy"))
    [2, 0]
    """
    known = [index for index, row in enumerate(rows) if row[x.name] is not None and row[y.name] is not None]

    def cost(index: int) -> tuple[float, float]:
        across, up = rows[index][x.name], rows[index][y.name]
        return (-across if x.is_better_high else across, -up if y.is_better_high else up)

    kept: list[int] = []
    for index in sorted(known, key=cost):
        # Twins are both kept: neither beats the other.
        if not kept or cost(index)[1] < cost(kept[-1])[1] or cost(index) == cost(kept[-1]):
            kept.append(index)
    return sorted(kept, key=lambda index: (rows[index][x.name], rows[index][y.name]))


def frontiers(result: SweepResult) -> dict[str, list[int]]:
    """The frontier of every two axes, as positions among the trials, under "x|y" in the order of AXES.

    The sweep's own frontiers, which may allow for intervals, where it has them; else the accepted candidates that
    none of the accepted beats in both.
    """
    rows = sweep_rows(result)
    place = {row["key"]: index for index, row in enumerate(rows)}
    accepted = [index for index, row in enumerate(rows) if row["accepted"]]
    is_deployed = any("deploy" in name for name, _ in result.frontiers)
    ranked = "deploy_latency_ms" if is_deployed else "latency_ms"
    found = {}
    for first, second in combinations(axes_of(result), 2):
        recorded: Iterable[str] = ()
        if first.name == "accuracy" and second.name in (ranked, "energy_j"):
            recorded = frontier_keys(result, _RECORDED[second.name])
        # Sweeps of earlier versions have rejected candidates on their frontiers.
        kept = [place[key] for key in recorded if key in place and rows[place[key]]["accepted"]]
        kept = [index for index in kept if rows[index][second.name] is not None]
        if not kept:
            kept = [accepted[index] for index in frontier([rows[index] for index in accepted], first, second)]
        # A row that nobody knows a figure of has no place on its axis.
        kept = [index for index in kept if rows[index][second.name] is not None]
        found[f"{first.name}|{second.name}"] = sorted(kept, key=lambda index, by=second.name: rows[index][by])  # type: ignore[misc]
    return found


_NAMED = 3


@dataclass(frozen=True, slots=True)
class Sensitivities:
    """Loss by layer and change; None where a change was not tried on a layer."""

    measure: str
    layers: tuple[str, ...]
    changes: tuple[str, ...]
    losses: tuple[tuple[float | None, ...], ...]

    @property
    def caption(self) -> str:
        """The layers that lose most, in words."""
        worst = {
            layer: max((loss for loss in row if loss is not None), default=-math.inf)
            for layer, row in zip(self.layers, self.losses, strict=True)
        }
        ranked = sorted((layer for layer in worst if worst[layer] > -math.inf), key=lambda layer: -worst[layer])
        named = ", ".join(f"{layer[:60]} ({worst[layer]:.3g})" for layer in ranked[:_NAMED])
        return f"{self.measure} is largest at {named}." if named else "Nothing is known."


def sensitivities(found: Sensitivity) -> Sensitivities:
    """What each layer loses under each change; a score that rose is a loss below zero.

    >>> from edge_opt.records.compression import LayerSensitivity, Sensitivity
    >>> row = LayerSensitivity("conv1", "Conv2d", "prune", "0.5", 0.75, -0.125, 0.1, None, 0.5, "")
    >>> sensitivities(Sensitivity("accuracy", 0.875, 64, (row,), ())).losses
    ((0.125,),)
    """
    cells = {(row.path, change_of(row)): _loss(row) for row in found.rows}
    layers = tuple(dict.fromkeys(path for path, _ in cells))
    changes = tuple(dict.fromkeys(change for _, change in cells))
    losses = tuple(tuple(cells.get((layer, change)) for change in changes) for layer in layers)
    return Sensitivities(f"{found.metric[:1].upper()}{found.metric[1:]} lost", layers, changes, losses)


def read_sensitivity(plain: Mapping[str, Any], source: str = "the document") -> Sensitivity:
    """The sensitivity whose `to_dict()` this is; `source` is what errors call it, such as a file's name."""
    try:
        return from_plain(Sensitivity, plain)
    except UnreadableProfile as error:
        raise InvalidInput(
            f"{source} is no sensitivity: {error}; expected what eo.sensitivity(...).to_dict() gives"
        ) from error


def change_of(row: LayerSensitivity) -> str:
    """As people call it: `prune 0.5`, `int8`."""
    return f"prune {row.amount}" if row.change == "prune" else row.amount


def _loss(row: LayerSensitivity) -> float | None:
    return 0.0 - row.score_change if math.isfinite(row.score_change) else None


# Devices whose bandwidth and peak are known, from small to large.
DEVICES = ("raspberry-pi-4", "raspberry-pi-5", "jetson-nano", "intel-n100", "desktop-ddr4", "apple-m1")


@dataclass(frozen=True, slots=True)
class DeviceRoofs:
    """A device with a roofline for each precision whose peak is known; the first is the one to look at first."""

    spec: DeviceSpec
    roofs: tuple[Roofline, ...]

    @property
    def main(self) -> Roofline:
        return self.roofs[0]


def device_roofs(profile: ModelProfile, names: Sequence[str] | None = None) -> tuple[DeviceRoofs, ...]:
    """The devices named, or those that were predicted for and a usual few; a device without figures has no roofs."""
    if profile.convention != "edge_opt":
        return ()
    specs = {spec.name: spec for spec in (_predicted(profile) if names is None else ())}
    for name in DEVICES if names is None else names:
        spec = find_device(name)
        specs.setdefault(spec.name, spec)
    found = (DeviceRoofs(spec, tuple(_roofs(profile, spec))) for spec in specs.values())
    return tuple(item for item in found if item.roofs)


def _roofs(profile: ModelProfile, spec: DeviceSpec) -> Iterable[Roofline]:
    for precision in PRECISIONS:
        if spec.peak(spec.engine, precision) is not None:
            roof = roofline(profile, spec, precision)
            if roof.knee_flops_per_byte is not None:
                yield roof


def _predicted(profile: ModelProfile) -> Iterable[DeviceSpec]:
    for prediction in profile.predictions:
        try:
            yield find_device(prediction.target)
        except UnknownDevice:  # a calibration of some machine is no catalogue device
            continue
