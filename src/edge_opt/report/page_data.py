"""The one JSON value that a page draws from: cards, tables, charts, and what to take away first, in sentences."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from edge_opt import units
from edge_opt._support.extras import written_with
from edge_opt._support.json import to_plain
from edge_opt.records.compression import Sensitivity
from edge_opt.records.measurements import Energy, Measurement
from edge_opt.records.profiles import Level, ModelProfile
from edge_opt.records.sweeps import SHARES, TRIAL_COLUMNS, Speedup, SweepResult, Trial, TrialMetrics
from edge_opt.report.figures import (
    DeviceRoofs,
    Provenance,
    axes_data,
    device_roofs,
    frontiers,
    layer_bars,
    layer_name,
    predictions_and_measurement,
    sensitivity_data,
    timeline,
)
from edge_opt.report.sweep_files import (
    breakdown,
    calls,
    conditions,
    factor_text,
    per_call,
    speedup_data,
    speedup_text,
    sweep_rows,
)
from edge_opt.report.table import leaf_rows, table
from edge_opt.text import shorten

_MODEL, _HERE, _ELSEWHERE, _SWEEP = "The model", "Measured here", "Elsewhere", "The sweep"
Format = Literal["count", "bytes", "time", "share", "energy", "number", "factor"]


@dataclass(frozen=True, slots=True)
class Card:
    """One figure of a group, unscaled.

    `note` is the small print under it; `is_lower_bound` puts a ≥ before it; `low` and `high` are its interval, whose
    upper end may be open. `is_disturbed` marks a time that other programs or noise may have changed.
    """

    group: str
    label: str
    value: float
    format: Format
    provenance: Provenance
    note: str
    is_lower_bound: bool = False
    low: float | None = None
    high: float | None = None
    is_disturbed: bool = False


def cards(profile: ModelProfile | None, sweep: SweepResult | None, roofs: Sequence[DeviceRoofs]) -> list[Card]:
    """Return the figures of a page, those of the model first."""
    shown: list[Card] = []
    if profile is not None:
        shown += _counted(profile)
        if profile.measurement is not None:
            shown += _measured(profile.measurement)
        shown += _elsewhere(profile, roofs)
    if sweep is not None:
        shown += _swept(sweep)
    return shown


def _counted(profile: ModelProfile) -> Iterable[Card]:
    totals, peak = profile.totals, profile.peak
    is_bound = totals.is_lower_bound
    moved = totals.bytes_read + totals.bytes_written
    dense = "" if totals.intensity is None or is_bound else f"{units.ratio(totals.intensity)} FLOPs per byte"
    planned = f"{units.size(peak.planner_bytes)} with a planner; without scratch"
    yield Card(_MODEL, "MACs", totals.macs, "count", "counted", f"{units.count(totals.flops)} FLOPs", is_bound)
    yield Card(_MODEL, "Parameters", totals.params, "count", "counted", units.size(totals.param_bytes))
    yield Card(_MODEL, "Memory traffic", moved, "bytes", "estimated", dense, is_bound)
    yield Card(_MODEL, "Peak activations", peak.live_bytes, "bytes", "estimated", planned)


def _measured(measured: Measurement) -> Iterable[Card]:
    latency, disturbed = measured.latency, is_disturbed(measured)
    ends = latency.median_interval_s
    median = Card(_HERE, "Latency", latency.median_s, "time", "measured", calls(latency.batch_size))
    yield replace(median, low=ends.low, high=ends.high, is_disturbed=disturbed)
    if measured.is_slower_fresh and measured.fresh_latency_s is not None:
        first = "a forward that must map its memory first"
        yield Card(_HERE, "Latency, new memory", measured.fresh_latency_s, "time", "measured", first)
    each = "samples per second, at the median"
    yield Card(_HERE, "Throughput", latency.throughput, "number", "measured", each, is_disturbed=disturbed)
    if measured.memory is not None:
        scratch = f"{units.size(measured.memory.scratch_bytes)} of it scratch"
        yield Card(_HERE, "Peak memory", measured.memory.peak_bytes, "bytes", "measured", scratch)
    if measured.energy is not None:
        yield _energy(_HERE, "Energy per forward", measured.energy)


def _energy(group: str, label: str, energy: Energy) -> Card:
    return Card(group, label, energy.joules, "energy", _energy_kind(energy.source), energy.note)


def _energy_kind(source: str) -> Provenance:
    """Return what kind of figure an energy is; a trial has its source with a note behind it: "model: fitted"."""
    kinds: dict[str, Provenance] = {"proxy": "proxy", "model": "estimated"}
    return kinds.get(source.partition(":")[0], "measured")


def _elsewhere(profile: ModelProfile, roofs: Sequence[DeviceRoofs]) -> Iterable[Card]:
    for prediction in profile.predictions:
        if prediction.seconds is not None:
            label, note = f"On {prediction.target}", f"{prediction.precision}, {prediction.basis}"
            low, high = prediction.low, prediction.high
            yield Card(_ELSEWHERE, label, prediction.seconds, "time", "predicted", note, low=low, high=high)
        for energy in prediction.energies[:1]:
            yield _energy(_ELSEWHERE, f"Energy on {prediction.target}", energy)
    if roofs and not profile.predictions:
        roof = roofs[0].main
        if roof.total.seconds is not None:
            note = f"at best, {roof.precision}, {roof.total.bound}-bound"
            yield Card(_ELSEWHERE, f"On {roofs[0].spec.title}", roof.total.seconds, "time", "estimated", note)


def _swept(sweep: SweepResult) -> Iterable[Card]:
    note = f"of {len(sweep.trials)}; {len(sweep.rejected)} rejected, {len(sweep.failed)} failed"
    yield Card(_SWEEP, "Accepted candidates", len(sweep.accepted), "count", "counted", note)
    best = sweep.trial(sweep.best).metrics if sweep.best else None
    if sweep.best is None or best is None:
        return
    yield from _best_score(best, sweep.trial(sweep.best).candidate.label)
    if sweep.speedup is not None:
        yield _faster(sweep.speedup)
    if best.measured_memory_bytes is not None:
        note = "growth of the process over the idle runtime"
        yield Card(_SWEEP, "Best: memory", best.measured_memory_bytes, "bytes", "measured", note)
    smaller = f"{units.percent(best.params_ratio)} of the parameters"
    yield Card(_SWEEP, "Best: size", best.size_bytes, "bytes", "measured", smaller)
    if best.energy_j is not None:
        kind = _energy_kind(best.energy_source)
        yield Card(_SWEEP, "Best: energy", best.energy_j, "energy", kind, best.energy_source)


def _best_score(best: TrialMetrics, label: str) -> Iterable[Card]:
    shown: Format = "share" if best.metric in SHARES else "number"
    low, high = best.accuracy_low, best.accuracy_high
    yield Card(_SWEEP, f"Best: {best.metric}", best.accuracy, shown, "measured", label, low=low, high=high)
    latency = Card(_SWEEP, "Best: latency", best.ranked_latency_s, "time", "measured", calls(best.ranked_batch))
    yield replace(latency, low=best.ranked_low_s, high=best.ranked_high_s, is_disturbed=best.is_disturbed)


def _faster(speedup: Speedup) -> Card:
    """Return the winner against the baseline, timed in turns: a ratio without its interval is never shown."""
    alone = "" if speedup.runtime is None else f"; runtime alone {factor_text(speedup.runtime)}"
    note = f"as the baseline, in turns{alone}"
    ratio = Card(_SWEEP, "Best: times as fast", speedup.whole.ratio, "factor", "measured", note)
    return replace(ratio, low=speedup.whole.low, high=speedup.whole.high, is_disturbed=speedup.is_disturbed)


def is_disturbed(measured: Measurement) -> bool:
    """Return whether other programs or noise may have changed the times."""
    return measured.latency.is_noisy or measured.latency.is_contended


FORMAT = "edge_opt.page"
SCHEMA_VERSION = 1
_MOST_POINTS = 1000


def page_data(
    *,
    profile: ModelProfile | None = None,
    sweep: SweepResult | None = None,
    sensitivity: Sensitivity | None = None,
    reproducibility: Mapping[str, Any] | None = None,
    summary: Mapping[str, Any] | None = None,
    extra_profiles: Sequence[ModelProfile] = (),
    devices: Sequence[str] | None = None,
    title: str | None = None,
) -> dict[str, Any]:
    """Return what the page shows; a part that nobody gave is None."""
    from edge_opt import __version__

    roofs = device_roofs(profile, devices) if profile else ()
    losses = sensitivity_data(sensitivity) if sensitivity else None
    measurement = profile.measurement if profile else None
    return {
        "format": FORMAT,
        "schema_version": SCHEMA_VERSION,
        "edge_opt": __version__,
        "title": title or (profile.name if profile else sweep.name if sweep else "edge_opt"),
        "verdict": verdict(profile, sweep, roofs),
        "advice": [list(item) for item in advice(profile, sweep, roofs, losses)],
        "cards": [to_plain(card) for card in cards(profile, sweep, roofs)],
        "profile": _profile(profile, roofs) if profile else None,
        "sweep": _sweep(sweep) if sweep else None,
        "sensitivity": losses,
        "environment": to_plain(measurement.environment) if measurement else None,
        "written": written_with(),
        "reproducibility": standard(reproducibility) if reproducibility else None,
        "summary": standard(summary) if summary else None,
        "others": [_totals(other) for other in ((profile, *extra_profiles) if profile else extra_profiles)]
        if extra_profiles
        else [],
    }


def _profile(profile: ModelProfile, roofs: Sequence[DeviceRoofs]) -> dict[str, Any]:
    return {
        **_totals(profile),
        "mode": profile.mode,
        "convention": profile.convention,
        "unpriced": [to_plain(item) for item in profile.unpriced],
        "notes": list(profile.trace.notes),
        "tables": {level: _table(profile, level) for level in ("modules", "leaves")},
        "bars": layer_bars(profile),
        "timeline": timeline(profile) if profile.trace.ops else None,
        "roofline": _roofline(profile, roofs) if roofs else None,
        "agreements": predictions_and_measurement(profile),
    }


def _totals(profile: ModelProfile) -> dict[str, Any]:
    measurement = profile.measurement
    return {
        "name": profile.name,
        "totals": to_plain(profile.totals),
        "peak": to_plain(profile.peak),
        "coverage": profile.coverage,
        "latency_s": measurement.latency.median_s if measurement else None,
        "is_disturbed": is_disturbed(measurement) if measurement else False,
    }


def _table(profile: ModelProfile, level: Level) -> dict[str, Any]:
    """Return one level of the profile, by columns; a column of which no value is known is left out."""
    known = [(column, values) for column, values in table(profile, level) if any(v is not None for v in values)]
    return {
        "columns": [{"name": column.name, "header": column.title, "kind": column.kind} for column, _ in known],
        "values": [values for _, values in known],
    }


def _roofline(profile: ModelProfile, roofs: Sequence[DeviceRoofs]) -> dict[str, Any]:
    """Return every layer under every roof; of many layers the largest. Layers are the same for all devices."""
    first = roofs[0].main.layers
    largest = sorted(range(len(first)), key=lambda index: -(first[index].flops + first[index].bytes_moved))
    order = sorted(largest[:_MOST_POINTS])
    times = profile.measurement.layers if profile.measurement else None
    measured = {layer.module: layer.seconds for layer in times.layers} if times else {}
    work = {roof.precision: roof.layers for device in roofs for roof in device.roofs}
    return {
        "layers": len(first),
        "names": [first[index].path or profile.name for index in order],
        "kinds": [first[index].kind for index in order],
        "flops": [first[index].flops for index in order],
        "bytes": {precision: [layers[index].bytes_moved for index in order] for precision, layers in work.items()},
        "measured_s": [measured.get(first[index].module or 0) for index in order] if measured else None,
        "devices": [_device(device, order) for device in roofs],
    }


def _device(device: DeviceRoofs, order: Sequence[int]) -> dict[str, Any]:
    bandwidth = device.main.bandwidth
    return {
        "name": device.spec.name,
        "title": device.spec.title,
        "engine": device.main.engine,
        "bandwidth": to_plain(bandwidth) if bandwidth else None,
        "roofs": [
            {
                "precision": roof.precision,
                "peak": to_plain(roof.peak_flops_per_s) if roof.peak_flops_per_s else None,
                "knee": roof.knee_flops_per_byte,
                "seconds": [roof.layers[index].seconds for index in order],
                "bounds": [roof.layers[index].bound for index in order],
                "total": to_plain(roof.total),
                "fused_s": roof.fused_total.seconds,
                "remarks": list(roof.remarks),
            }
            for roof in device.roofs
        ],
    }


# Columns of the candidates that are no figures: in front of the figures, and behind them.
_FIRST = (
    ("label", "Candidate", "text"), ("state", "Status", "text"), ("speedup", "Times as fast", "number"),
    ("disturbed", "Disturbed", "flag"), ("disturbed_times", "Disturbed times", "text"),
)  # fmt: skip
_LAST = (("violations", "Breaks", "text"), ("key", "Key", "text"))
# Figures in milliseconds or MiB have their unit in the header; the page scales the others.
_PAGE_KINDS = {"time": "number", "bytes": "number", "rate": "number"}


def _candidate_columns(sweep: SweepResult) -> list[dict[str, str]]:
    """Return the columns of the table of candidates: those of the files that have a title."""
    figures = []
    for column in TRIAL_COLUMNS:
        title, kind = column.title, _PAGE_KINDS.get(column.kind, column.kind)
        if "accuracy" in column.name and sweep.metric != "accuracy":
            title = title.replace("Accuracy", sweep.metric).replace("accuracy", sweep.metric)
            kind = kind if sweep.metric in SHARES else "number"
        if title:
            unit = f", {column.unit}" if column.unit and column.kind in _PAGE_KINDS else ""
            figures.append((column.name, title + unit, kind))
    return [{"name": name, "header": header, "kind": kind} for name, header, kind in (*_FIRST, *figures, *_LAST)]


def _sweep(sweep: SweepResult) -> dict[str, Any]:
    rows = sweep_rows(sweep)
    [baseline] = sweep_rows(SweepResult(sweep.name, sweep.baseline, (sweep.baseline,), (), (), None, ""))
    return {
        "name": sweep.name,
        "metric": {
            "title": "Accuracy" if sweep.metric == "accuracy" else sweep.metric,
            "is_share": sweep.metric in SHARES,
            "direction": sweep.metric_direction,
        },
        "constraints": list(sweep.constraints),
        "best": sweep.best,
        "speedup": speedup_data(sweep.speedup),
        "columns": _candidate_columns(sweep),
        "rows": [{**row, "label": trial.candidate.label} for row, trial in zip(rows, sweep.trials, strict=True)],
        "baseline": {**baseline, "label": f"baseline, {sweep.baseline.candidate.label}"},
        "violations": [[to_plain(item) for item in trial.violations] for trial in sweep.trials],
        "axes": axes_data(sweep, [baseline, *rows]),
        "frontiers": frontiers(sweep),
    }


def standard(value: Any) -> Any:
    """Return any value as standard JSON can hold it; what it cannot is written out as text."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): standard(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [standard(item) for item in value]
    return str(value)


Advice = tuple[str, str]
_NAMED = 3
_WORTH_SAYING = 0.05
_STANDS_OUT = 0.1
_CURES = {
    "memory": "Prune channels, move fewer bytes with fp16 or int8, and fuse layers so that data is used more often.",
    "compute": "Prune channels where MACs are, or use a precision or an engine that computes faster.",
    "overhead": "Fuse layers and use fewer, larger operators; a larger batch helps too.",
}


def verdict(profile: ModelProfile | None, sweep: SweepResult | None, roofs: Sequence[DeviceRoofs]) -> list[str]:
    """Return the whole page in a few sentences: a paragraph about the model, one about the sweep."""
    paragraphs = [" ".join(_of_profile(profile, roofs))] if profile else []
    return [*paragraphs, _of_sweep(sweep)] if sweep else paragraphs


def _of_profile(profile: ModelProfile, roofs: Sequence[DeviceRoofs]) -> Iterable[str]:
    totals = profile.totals
    bound = "at least " if totals.is_lower_bound else ""
    shapes = ", ".join(units.shape(shape) for shape in profile.trace.modules[0].input_shapes)
    yield (
        f"{shorten(profile.name, 80)} does {bound}{units.count(totals.macs)} MACs"
        f"{f' on {shapes}' if shapes else ''} with {units.count(totals.params)} parameters "
        f"({units.size(totals.param_bytes)}), and its activations need {units.size(profile.peak.live_bytes)} "
        "at their peak."
    )
    if profile.measurement is not None:
        latency = profile.measurement.latency
        noisy = ", on a noisy machine" if latency.is_noisy or latency.is_contended else ""
        yield f"Measured here it takes {units.duration(latency.median_s)}{noisy}."
    prediction = profile.prediction
    if prediction is not None and prediction.seconds is not None:
        yield (
            f"On {prediction.target} it is predicted to take {units.duration(prediction.seconds)} "
            f"in {prediction.precision}, bound by {prediction.bound}."
        )
    elif roofs:
        roof = roofs[0].main
        if roof.total.seconds is not None:
            yield (
                f"On {roofs[0].spec.title} it is {roof.total.bound}-bound: {units.duration(roof.total.seconds)} "
                f"at best in {roof.precision}."
            )


def _of_sweep(sweep: SweepResult) -> str:
    tried, failed, accepted = len(sweep.trials), len(sweep.failed), len(sweep.accepted)
    limits = " and ".join(sweep.constraints) or "no constraint"
    if not tried:
        return "The sweep is empty: no candidate was tried."
    if failed == tried:
        return f"All {tried} candidates failed; the first because of: {shorten(sweep.trials[0].reason, 200)}."
    if not accepted:
        return f"None of the {tried} candidates meets {limits}{f'; {failed} failed' if failed else ''}."
    lost = f", {failed} failed" if failed else ""
    if sweep.slower:
        count = len(sweep.slower)
        lost += f", {count} {'is' if count == 1 else 'are'} pruned and not faster than unpruned"
    best = f" {_best(sweep, sweep.trial(sweep.best))}" if sweep.best else ""
    return f"{accepted} of {tried} candidates meet{'s' * (accepted == 1)} {limits}{lost}.{best}"


def _best(sweep: SweepResult, trial: Trial) -> str:
    if trial.metrics is None:
        return f"The best is {trial.candidate.label}."
    metrics = trial.metrics
    is_share = metrics.metric == "accuracy"
    score = f"{units.percent(metrics.accuracy)} accurate" if is_share else f"{metrics.metric} {metrics.accuracy:.4g}"
    figures = f"{score}, {per_call(metrics)}"
    best = f"The best is {trial.candidate.label}: {figures}."
    if sweep.speedup is None:
        return best
    parts = breakdown(sweep.speedup)
    faster = speedup_text(sweep.speedup) + (f" ({parts})" if parts else "")
    return f"{best} Against the baseline it is {faster}; {conditions(sweep.speedup)}."


def advice(
    profile: ModelProfile | None,
    sweep: SweepResult | None,
    roofs: Sequence[DeviceRoofs],
    sensitivity: Mapping[str, Any] | None,
) -> list[Advice]:
    """Return what to do, each with its reason; most useful first."""
    items: list[Advice] = []
    if sweep is not None and sweep.recommendation:
        items.append(("Recommendation", sweep.recommendation))
    if profile is not None:
        items += [*_largest(profile), *_on_device(profile, roofs), *_memory(profile)]
    if sensitivity is not None and sensitivity["layers"]:
        items.append(("Spare what hurts", sensitivity["caption"]))
    return [*items, *_mind(profile)] if profile else items


def _mind(profile: ModelProfile) -> Iterable[Advice]:
    if profile.unpriced:
        ops = sorted({item.op for item in profile.unpriced})
        named = ", ".join(ops[:_NAMED]) + (" …" if len(ops) > _NAMED else "")
        yield "Totals are lower bounds", f"No price for {named}; edge_opt.cost_rule adds one."
    if profile.measurement is not None:
        remarks = "; ".join(profile.measurement.latency.remarks)
        if remarks:
            yield "About the measurement", f"{remarks[0].upper()}{remarks[1:]}."


def _largest(profile: ModelProfile) -> Iterable[Advice]:
    if not profile.totals.macs:
        return
    rows = sorted(leaf_rows(profile), key=lambda row: -(row.cost.macs if row.cost else 0))[:_NAMED]
    share = sum(row.cost.macs for row in rows if row.cost) / profile.totals.macs
    named = ", ".join(shorten(layer_name(row, profile), 48) for row in rows if row.cost and row.cost.macs)
    if share < _STANDS_OUT:
        yield "No layer stands out", f"The largest ({named}) have {units.percent(share)} of all MACs together."
        return
    yield "Largest layers", f"{named}: {units.percent(share)} of all MACs. Pruning and precision pay there first."


def _on_device(profile: ModelProfile, roofs: Sequence[DeviceRoofs]) -> Iterable[Advice]:
    if not roofs:
        return
    device, roof = roofs[0], roofs[0].main
    whole, fused = roof.total.seconds, roof.fused_total.seconds
    # The page names what bounds the prediction, so the advice follows it; the roofline answers where there is none.
    prediction = next((item for item in profile.predictions if item.target == device.spec.name and item.seconds), None)
    bound, seconds, layers = (
        (roof.total.bound, whole, [(item.bound, item.seconds) for item in roof.layers])
        if prediction is None
        else (prediction.bound, prediction.seconds, [(item.bound, item.seconds) for item in prediction.layers])
    )
    if seconds and bound in _CURES:
        share = sum(part or 0.0 for kind, part in layers if kind == bound) / seconds
        spent = "time at best" if prediction is None or prediction.basis == "roofline" else "predicted time"
        yield (
            f"On {device.spec.title}",
            f"{units.percent(share)} of the {spent} goes to {bound}-bound layers. {_CURES[bound]}",
        )
    if whole and fused is not None and 1 - fused / whole > _WORTH_SAYING:
        yield (
            "Fuse",
            "Batch norms and activations in the same pass as their convolution save "
            f"{units.percent(1 - fused / whole)} of the time at best there; runtimes such as ONNX Runtime do so.",
        )
    # A page has one time for a precision: beside a prediction, the roofline's best would contradict it.
    if prediction is not None and (prediction.bound == "overhead" or prediction.basis != "roofline"):
        return
    for other in device.roofs[1:]:
        if whole and other.total.seconds:
            yield (
                f"Try {other.precision}",
                f"{units.duration(other.total.seconds)} at best on {device.spec.title}, against "
                f"{units.duration(whole)} in {roof.precision}.",
            )


def _memory(profile: ModelProfile) -> Iterable[Advice]:
    peak = profile.peak
    if peak.live_bytes and 1 - peak.planner_bytes / peak.live_bytes > _WORTH_SAYING:
        yield (
            "Plan memory",
            f"The peak of {units.size(peak.live_bytes)} stands at {shorten(peak.module or profile.name, 48)}; "
            f"a runtime that drops each tensor after its last use needs {units.size(peak.planner_bytes)}.",
        )
