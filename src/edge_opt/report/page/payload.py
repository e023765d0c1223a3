"""The one JSON value that a page draws from."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from edge_opt import units
from edge_opt._support.extras import written_with
from edge_opt._support.json import to_plain
from edge_opt.records.compression import Sensitivity
from edge_opt.records.measurements import Energy, Measurement
from edge_opt.records.profiles import Level, ModelProfile
from edge_opt.records.sweeps import SHARES, Speedup, SweepResult, TrialMetrics
from edge_opt.report.figures import (
    DeviceRoofs,
    Provenance,
    agreements,
    axes_of,
    device_roofs,
    frontiers,
    layer_bars,
    sensitivities,
    timeline,
)
from edge_opt.report.page.verdict import advice, verdict
from edge_opt.report.sweep_files import sweep_rows
from edge_opt.report.sweep_tables import calls, factor_text, speedup_data
from edge_opt.report.table import table

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
    """The figures of a page, those of the model first."""
    found: list[Card] = []
    if profile is not None:
        found += _counted(profile)
        if profile.measurement is not None:
            found += _measured(profile.measurement)
        found += _elsewhere(profile, roofs)
    if sweep is not None:
        found += _swept(sweep)
    return found


def _counted(profile: ModelProfile) -> Iterable[Card]:
    totals, peak = profile.totals, profile.peak
    is_bound = totals.is_lower_bound
    moved = totals.bytes_read + totals.bytes_written
    dense = "" if totals.intensity is None or is_bound else f"{units.ratio(totals.intensity)} FLOPs per byte"
    yield Card(_MODEL, "MACs", totals.macs, "count", "counted", f"{units.count(totals.flops)} FLOPs", is_bound)
    yield Card(_MODEL, "Parameters", totals.params, "count", "counted", units.size(totals.param_bytes))
    yield Card(_MODEL, "Memory traffic", moved, "bytes", "estimated", dense, is_bound)
    yield Card(
        _MODEL,
        "Peak activations",
        peak.live_bytes,
        "bytes",
        "estimated",
        f"{units.size(peak.planner_bytes)} with a planner; without scratch",
    )


def _measured(found: Measurement) -> Iterable[Card]:
    latency, disturbed = found.latency, is_disturbed(found)
    yield Card(
        _HERE,
        "Latency",
        latency.median_s,
        "time",
        "measured",
        calls(latency.batch_size),
        low=latency.median_interval_s.low,
        high=latency.median_interval_s.high,
        is_disturbed=disturbed,
    )
    if found.is_slower_fresh and found.fresh_latency_s is not None:
        first = "a forward that must map its memory first"
        yield Card(_HERE, "Latency, new memory", found.fresh_latency_s, "time", "measured", first)
    each = "samples per second, at the median"
    yield Card(_HERE, "Throughput", latency.throughput, "number", "measured", each, is_disturbed=disturbed)
    if found.memory is not None:
        scratch = f"{units.size(found.memory.scratch_bytes)} of it scratch"
        yield Card(_HERE, "Peak memory", found.memory.peak_bytes, "bytes", "measured", scratch)
    if found.energy is not None:
        yield _energy(_HERE, "Energy per forward", found.energy)


def _energy(group: str, label: str, energy: Energy) -> Card:
    kinds: dict[str, Provenance] = {"proxy": "proxy", "model": "estimated"}
    return Card(group, label, energy.joules, "energy", kinds.get(energy.source, "measured"), energy.note)


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
    yield Card(
        _SWEEP,
        "Best: size",
        best.size_bytes,
        "bytes",
        "measured",
        f"{units.percent(best.params_ratio)} of the parameters",
    )
    if best.energy_j is not None:
        source = best.energy_source
        # A trial has its source with a note behind it, such as "model: fitted to a board".
        kinds: dict[str, Provenance] = {"proxy": "proxy", "model": "estimated"}
        kind = kinds.get(source.partition(":")[0], "measured")
        yield Card(_SWEEP, "Best: energy", best.energy_j, "energy", kind, source)


def _best_score(best: TrialMetrics, label: str) -> Iterable[Card]:
    shown: Format = "share" if best.metric in SHARES else "number"
    low, high = best.accuracy_low, best.accuracy_high
    yield Card(_SWEEP, f"Best: {best.metric}", best.accuracy, shown, "measured", label, low=low, high=high)
    low_s, high_s = best.latency_low_s, best.latency_high_s
    if best.deploy_latency_low_s is not None and best.deploy_latency_high_s is not None:
        low_s, high_s = best.deploy_latency_low_s, best.deploy_latency_high_s
    yield Card(
        _SWEEP,
        "Best: latency",
        best.ranked_latency_s,
        "time",
        "measured",
        calls(best.ranked_batch),
        low=low_s,
        high=high_s,
        is_disturbed=best.is_disturbed,
    )


def _faster(found: Speedup) -> Card:
    """The winner against the baseline, timed in turns: a ratio without its interval is never shown."""
    alone = "" if found.runtime is None else f"; runtime alone {factor_text(found.runtime)}"
    return Card(
        _SWEEP,
        "Best: times as fast",
        found.whole.ratio,
        "factor",
        "measured",
        f"as the baseline, in turns{alone}",
        low=found.whole.low,
        high=found.whole.high,
        is_disturbed=found.is_disturbed,
    )


def is_disturbed(found: Measurement) -> bool:
    """Whether other programs or noise may have changed the times."""
    return found.latency.is_noisy or found.latency.is_contended


FORMAT = "edge_opt.page"
SCHEMA_VERSION = 1
_MOST_POINTS = 1000


def payload(
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
    """What the page shows; a part that nobody gave is None."""
    from edge_opt import __version__

    roofs = device_roofs(profile, devices) if profile else ()
    losses = sensitivities(sensitivity) if sensitivity else None
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
        "sensitivity": {**to_plain(losses), "caption": losses.caption} if losses else None,
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
        "bars": [{**to_plain(found), "caption": found.caption} for found in layer_bars(profile)],
        "timeline": to_plain(timeline(profile)) if profile.trace.ops else None,
        "roofline": _roofline(profile, roofs) if roofs else None,
        "agreements": [{**to_plain(found), "ratio": found.ratio} for found in agreements(profile)],
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
    """One level of the profile, by columns; a column of which no value is known is left out."""
    found = [(column, values) for column, values in table(profile, level) if any(v is not None for v in values)]
    return {
        "columns": [{"name": column.name, "header": column.title, "kind": column.kind} for column, _ in found],
        "values": [values for _, values in found],
    }


def _roofline(profile: ModelProfile, roofs: Sequence[DeviceRoofs]) -> dict[str, Any]:
    """Every layer under every roof. Layers and bytes are the same for all devices; of many layers the largest."""
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
        "bytes": {precision: [found[index].bytes_moved for index in order] for precision, found in work.items()},
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


def _sweep(sweep: SweepResult) -> dict[str, Any]:
    rows = sweep_rows(sweep)
    baseline = sweep_rows(_only_baseline(sweep))[0]
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
        "rows": [{**row, "label": trial.candidate.label} for row, trial in zip(rows, sweep.trials, strict=True)],
        "baseline": {**baseline, "label": f"baseline, {sweep.baseline.candidate.label}"},
        "violations": [[to_plain(found) for found in trial.violations] for trial in sweep.trials],
        "axes": [
            {
                **to_plain(axis),
                "is_share": axis.name == "accuracy" and sweep.metric in SHARES,
                "is_log": axis.is_wide([baseline, *rows]),
            }
            for axis in axes_of(sweep)
        ],
        "frontiers": frontiers(sweep),
    }


def _only_baseline(sweep: SweepResult) -> SweepResult:
    return SweepResult(sweep.name, sweep.baseline, (sweep.baseline,), (), (), None, "")


def standard(value: Any) -> Any:
    """Any value as standard JSON can hold it; what it cannot is written out as text."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): standard(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [standard(item) for item in value]
    return str(value)
