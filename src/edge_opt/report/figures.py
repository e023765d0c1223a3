"""The data of charts on pages and in pictures."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, Literal

from edge_opt import units
from edge_opt._support.json import from_plain, to_plain
from edge_opt.boards.catalog import device as find_device
from edge_opt.boards.roofline import PRECISIONS, roofline
from edge_opt.errors import InvalidInput, UnknownDevice, UnreadableProfile
from edge_opt.records.compression import LayerSensitivity, Sensitivity
from edge_opt.records.devices import DeviceSpec, Roofline
from edge_opt.records.pareto import ObjectiveInterval, frontier
from edge_opt.records.profiles import ModelProfile
from edge_opt.records.sweeps import SHARES, TRIAL_COLUMNS, SweepResult, TrialColumn
from edge_opt.report.sweep_files import frontier_keys, sweep_rows
from edge_opt.report.table import ProfileRow, in_target_precision, leaf_rows

Provenance = Literal["counted", "estimated", "measured", "proxy", "predicted"]
Unit = Literal["count", "bytes", "time"]
MOST_BARS = 20
_MOST_STEPS = 4000
_WIDE = 5  # a span, largest over smallest


@dataclass(frozen=True, slots=True)
class Bars:
    """Layers by one figure. All of them in order of execution, or the largest first and the others in one number."""

    names: tuple[str, ...]
    values: tuple[float, ...]
    others: int
    others_value: float
    total: float

    @property
    def caption(self) -> str:
        """A description of the chart."""
        if not self.total:
            return "No layer has any."
        top = max(range(len(self.values)), key=lambda index: self.values[index])
        largest, others = (units.percent(value / self.total) for value in (self.values[top], self.others_value))
        rest = f"; {self.others} others together {others}" if self.others else ""
        return f"Largest: {self.names[top]}, {largest} of the total{rest}."


def bars(names: Sequence[str], values: Sequence[float], most: int = MOST_BARS) -> Bars:
    """Return the largest of some named values; the others are added up, never dropped.

    >>> shown = bars(["a", "b", "c"], [1, 5, 2], most=2)
    >>> shown.names, shown.values, shown.others, shown.others_value
    (('b', 'c'), (5, 2), 1, 1)
    """
    order = list(range(len(values)))
    if len(values) > most:
        order = sorted(order, key=lambda index: -values[index])
    shown, rest = order[:most], [values[index] for index in order[most:]]
    # Counts stay whole numbers of any size; seconds are added without a rounding at each step.
    add = math.fsum if any(isinstance(value, float) for value in values) else sum
    largest = tuple(values[index] for index in shown)
    return Bars(tuple(names[index] for index in shown), largest, len(rest), add(rest), add(values))


_COSTS: tuple[tuple[str, str, Unit, Provenance, Callable[[ProfileRow], float]], ...] = (
    ("macs", "Multiply-accumulates", "count", "counted", lambda row: row.cost.macs if row.cost else 0),
    ("bytes", "Bytes read and written", "bytes", "estimated", lambda row: row.cost.bytes_moved if row.cost else 0),
    ("memory", "Activations made", "bytes", "estimated", lambda row: row.activation_bytes),
)


def layer_bars(profile: ModelProfile) -> list[dict[str, Any]]:
    """Return bars of MACs, bytes and activations per layer; of time where it was measured, and of each prediction."""
    rows = leaf_rows(profile)
    costs = list(_COSTS)
    if any(row.measured_s is not None for row in rows):
        costs.append(("time", "Time", "time", "measured", lambda row: max(row.measured_s or 0.0, 0.0)))
    for prediction in profile.predictions:
        times = {layer.module: layer.seconds or 0.0 for layer in prediction.layers}
        metric = f"time:{prediction.target}:{prediction.precision}"
        title = f"Time on {prediction.target} ({prediction.precision})"
        costs.append((metric, title, "time", "predicted", lambda row, times=times: times.get(row.index, 0.0)))  # type: ignore[misc]
    charts = []
    for metric, title, unit, provenance, get in costs:
        kept = [row for row in rows if get(row)]
        shown = bars([layer_name(row, profile) for row in kept], [get(row) for row in kept])
        about = {"metric": metric, "title": title, "unit": unit, "provenance": provenance, "caption": shown.caption}
        charts.append({**about, **to_plain(shown)})
    return charts


def layer_name(row: ProfileRow, profile: ModelProfile) -> str:
    """Return a layer as charts call it: its path, which call of it, or the model's own name."""
    name = row.path or profile.name
    return f"{name} (call {row.call_number})" if row.call_number > 1 else name


def timeline(profile: ModelProfile, most: int = _MOST_STEPS) -> dict[str, Any]:
    """Return activation bytes alive at each operator; of a long tape the highest of each stretch of operators.

    Weights, buffers and inputs are apart, in `resident_bytes`. The `cuda` figures are what torch's caching allocator
    would hold there, weights and inputs included, by simulation.
    """
    original, profile = profile, in_target_precision(profile)
    trace, totals = profile.trace, profile.totals
    stride = max(1, -(-len(trace.ops) // most))
    highest = [
        max(trace.ops[start : start + stride], key=lambda call: call.live_bytes)
        for start in range(0, len(trace.ops), stride)
    ]
    on_cuda = original.device_memory("cuda")
    stretches = [on_cuda.tape[start : start + stride] for start in range(0, len(on_cuda.tape), stride)]
    return {
        "steps": [call.index for call in highest],
        "live_bytes": [call.live_bytes for call in highest],
        "operators": [trace.signatures[call.signature].op for call in highest],
        "modules": [trace.modules[call.module].path for call in highest],
        "stride": stride,
        "resident_bytes": totals.param_bytes + totals.buffer_bytes + totals.input_bytes,
        "peak_bytes": profile.peak.live_bytes,
        "peak_step": profile.peak.op_index,
        "peak_module": profile.peak.module,
        "planner_bytes": profile.peak.planner_bytes,
        "cuda_allocated_bytes": [max(point.allocated_bytes for point in stretch) for stretch in stretches],
        "cuda_reserved_bytes": [max(point.reserved_bytes for point in stretch) for stretch in stretches],
        "cuda_note": on_cuda.notes[0],
    }


def predictions_and_measurement(profile: ModelProfile) -> list[dict[str, Any]]:
    """Return each prediction beside the measurement, for the whole model and every layer that has both."""
    if profile.measurement is None:
        return []
    layers = profile.measurement.layers
    measured = {layer.module: layer.seconds for layer in layers.layers} if layers else {}
    whole_s = profile.measurement.latency.median_s
    comparisons = []
    for prediction in profile.predictions:
        if prediction.seconds is None:
            continue
        known = [
            layer for layer in prediction.layers if layer.seconds is not None and measured.get(layer.module, 0.0) > 0
        ]
        comparisons.append({
            "target": prediction.target,
            "basis": prediction.basis,
            "precision": prediction.precision,
            "predicted_s": prediction.seconds,
            "low_s": prediction.low,
            "high_s": prediction.high,
            "measured_s": whole_s,
            "names": [layer.path or profile.name for layer in known],
            "layer_predicted_s": [layer.seconds for layer in known],
            "layer_low_s": [layer.low for layer in known],
            "layer_high_s": [layer.high for layer in known],
            "layer_measured_s": [measured[layer.module] for layer in known],
            "ratio": prediction.seconds / whole_s,
        })  # fmt: skip
    return comparisons


def axes_of(result: SweepResult) -> list[TrialColumn]:
    """Return the axes of a sweep with their titles there; the score has the direction of its metric."""
    axes = [replace(column, title=column_title(column, result)) for column in TRIAL_COLUMNS if column.better]
    return [replace(axes[0], better=result.metric_direction), *axes[1:]]


# Figures of one batch of the data.
_OF_THE_BATCH = ("latency_ms", "latency_p95_ms", "throughput_sps", "energy_j", "macs", "peak_memory_mb",
                 "measured_memory_mb", "train_flops", "train_peak_memory_mb")  # fmt: skip


def column_title(column: TrialColumn, result: SweepResult) -> str:
    """Return the title of a figure in a sweep: with the metric that is scored, and the batch size it depends on."""
    title = column.title
    if "accuracy" in column.name and result.metric != "accuracy":
        title = title.replace("Accuracy", result.metric).replace("accuracy", result.metric)
    metrics = next((trial.metrics for trial in (result.baseline, *result.trials) if trial.metrics), None)
    if metrics is None or not title:
        return title
    deployed = metrics.deploy_batch or 1
    if column.name == "deploy_latency_ms":
        return f"{title}, batch {deployed}"
    if column.name in ("latency_ms", "latency_p95_ms", "throughput_sps") and metrics.batch_size != deployed:
        return f"{title}, batch {metrics.batch_size}, timed alone: not comparable"
    return f"{title}, batch {metrics.batch_size}" if column.name in _OF_THE_BATCH else title


def is_wide(axis: str, rows: Iterable[Mapping[str, Any]]) -> bool:
    """Return whether the rows span so much that only a logarithmic scale shows them all; scores stay on a plain one.

    >>> is_wide("latency_ms", [{"latency_ms": 1.0}, {"latency_ms": 5.5}, {"latency_ms": None}])
    True
    """
    known = [row[axis] for row in rows if row[axis] is not None]
    return axis != "accuracy" and bool(known) and min(known) > 0 and max(known) > _WIDE * min(known)


def axes_data(sweep: SweepResult, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the axes of a sweep for a page, with the scale that shows these rows."""
    return [
        {
            "name": axis.name,
            "title": axis.title,
            "unit": axis.unit,
            "is_better_high": axis.better == "higher",
            "low": axis.low,
            "high": axis.high,
            "is_share": axis.kind == "share" and sweep.metric in SHARES,
            "is_log": is_wide(axis.name, rows),
        }
        for axis in axes_of(sweep)
    ]


_RECORDED = {
    "target_latency_ms": "latency",
    "deploy_latency_ms": "latency",
    "latency_ms": "latency",
    "energy_j": "energy",
}


def frontiers(result: SweepResult) -> dict[str, list[int]]:
    """Return the frontier of every two axes, as positions among the trials, under "x|y" in the order of the axes.

    The sweep's own frontiers, which may allow for intervals, where it has them; else the accepted candidates that
    none of the accepted beats in both.
    """
    rows = sweep_rows(result)
    accepted = {row["key"]: index for index, row in enumerate(rows) if row["accepted"]}
    is_deployed = any("deploy" in name for name, _ in result.frontiers)
    ranked = "target_latency_ms" if result.target else "deploy_latency_ms" if is_deployed else "latency_ms"
    kept = {}
    for first, second in combinations(axes_of(result), 2):
        # A row without a known value has no position on the axis.
        places = [it for it in accepted.values() if None not in (rows[it][first.name], rows[it][second.name])]
        on_frontier: list[int] = []
        if first.name == "accuracy" and second.name in (ranked, "energy_j"):
            # Sweeps of earlier versions have rejected candidates on their frontiers.
            recorded = frontier_keys(result, _RECORDED[second.name])
            on_frontier = [accepted[key] for key in recorded if accepted.get(key) in places]
        if not on_frontier:
            points = [(_exact(rows[it], first), _exact(rows[it], second)) for it in places]
            on_frontier = [places[it] for it in frontier(points)]
        kept[f"{first.name}|{second.name}"] = sorted(on_frontier, key=lambda it, by=second.name: rows[it][by])  # type: ignore[misc]
    return kept


def _exact(row: Mapping[str, Any], axis: TrialColumn) -> ObjectiveInterval:
    """Return a figure as the frontier sees it: the less, the better."""
    value = -row[axis.name] if axis.better == "higher" else row[axis.name]
    return ObjectiveInterval(value, value, value)


_NAMED = 3


def sensitivity_data(sensitivity: Sensitivity) -> dict[str, Any]:
    """Return what each layer loses under each change, and the worst in words; a score that rose is below zero.

    >>> from edge_opt.records.compression import LayerSensitivity, Sensitivity
    >>> row = LayerSensitivity("conv1", "Conv2d", "prune", "0.5", 0.75, -0.125, 0.1, None, 0.5, "")
    >>> sensitivity_data(Sensitivity("accuracy", 0.875, 64, (row,), ()))["losses"]
    [[0.125]]
    """
    known = [row for row in sensitivity.rows if math.isfinite(row.score_change)]
    cells = {(row.path, change_of(row)): 0.0 - row.score_change for row in known}
    layers = list(dict.fromkeys(row.path for row in sensitivity.rows))
    changes = list(dict.fromkeys(map(change_of, sensitivity.rows)))
    worst: dict[str, float] = {}
    for (layer, _), loss in cells.items():
        worst[layer] = max(loss, worst.get(layer, -math.inf))
    ranked = sorted(worst, key=lambda layer: -worst[layer])
    named = ", ".join(f"{layer[:60]} ({worst[layer]:.3g})" for layer in ranked[:_NAMED])
    measure = f"{sensitivity.metric[:1].upper()}{sensitivity.metric[1:]} drop"
    return {
        "measure": measure,
        "layers": layers,
        "changes": changes,
        # None where a change was not tried on a layer.
        "losses": [[cells.get((layer, change)) for change in changes] for layer in layers],
        "caption": f"{measure} is largest at {named}." if named else "No layer was measured.",
    }


def read_sensitivity(plain: Mapping[str, Any], source: str = "the document") -> Sensitivity:
    """Return the sensitivity whose `to_dict()` this is; `source` is what errors call it, such as a file's name."""
    try:
        return from_plain(Sensitivity, plain)
    except UnreadableProfile as error:
        raise InvalidInput(f"{source} is not a sensitivity: {error}; give eo.sensitivity(...).to_dict()") from error


def change_of(row: LayerSensitivity) -> str:
    """Return a change as people call it: `pruned 50 %`, `int8`."""
    return f"pruned {100 * float(row.amount):.2g} %" if row.change == "prune" else row.amount


@dataclass(frozen=True, slots=True)
class DeviceRoofs:
    """A device with a roofline for each precision whose peak is known; the first is the one to look at first."""

    spec: DeviceSpec
    roofs: tuple[Roofline, ...]

    @property
    def main(self) -> Roofline:
        return self.roofs[0]


def device_roofs(profile: ModelProfile, names: Sequence[str] | None = None) -> tuple[DeviceRoofs, ...]:
    """Return the devices named, or those predicted for; a device without figures is left out."""
    if profile.convention != "edge_opt":
        return ()
    specs: dict[str, DeviceSpec] = {}
    for target in (prediction.target for prediction in (profile.predictions if names is None else ())):
        with suppress(UnknownDevice):  # a calibrated machine is not in the catalog
            spec = find_device(target)
            specs[spec.name] = spec
    for name in names or ():
        spec = find_device(name)
        specs.setdefault(spec.name, spec)
    devices = []
    for spec in specs.values():
        roofs = [roofline(profile, spec, it) for it in PRECISIONS if spec.peak(spec.engine, it) is not None]
        known = tuple(roof for roof in roofs if roof.knee_flops_per_byte is not None)
        if known:
            devices.append(DeviceRoofs(spec, known))
    return tuple(devices)
