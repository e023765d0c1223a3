"""Summary cards: one figure each, with its unit and where it comes from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from edge_opt import units
from edge_opt.records import Energy, Measurement, ModelProfile, SweepResult
from edge_opt.report.roofs import DeviceRoofs
from edge_opt.report.series import Provenance, predictions_of

_MODEL, _HERE, _ELSEWHERE, _SWEEP = "The model", "Measured here", "Elsewhere", "The sweep"
Format = Literal["count", "bytes", "time", "share", "joules", "number"]


@dataclass(frozen=True, slots=True)
class Card:
    """One figure of a group, unscaled. `note` is the small print under it; `is_lower_bound` puts a ≥ before it."""

    group: str
    label: str
    value: float
    format: Format
    provenance: Provenance
    note: str
    is_lower_bound: bool = False


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
        f"{units.size(peak.planner_bytes)} with a planner",
    )


def _measured(found: Measurement) -> Iterable[Card]:
    latency = found.latency
    low, high = units.duration(latency.median_interval_s.low), units.duration(latency.median_interval_s.high)
    yield Card(_HERE, "Latency", latency.median_s, "time", "measured", f"{low} to {high}, batch {latency.batch_size}")
    yield Card(_HERE, "Throughput", latency.throughput, "number", "measured", "samples per second, at the median")
    if found.memory is not None:
        scratch = f"{units.size(found.memory.scratch_bytes)} of it scratch"
        yield Card(_HERE, "Peak memory", found.memory.peak_bytes, "bytes", "measured", scratch)
    if found.energy is not None:
        yield _energy("Energy per forward", found.energy)


def _energy(label: str, energy: Energy) -> Card:
    kinds: dict[str, Provenance] = {"proxy": "proxy", "model": "estimated"}
    return Card(_HERE, label, energy.joules, "joules", kinds.get(energy.source, "measured"), energy.note)


def _elsewhere(profile: ModelProfile, roofs: Sequence[DeviceRoofs]) -> Iterable[Card]:
    for prediction in predictions_of(profile):
        if prediction.seconds is not None:
            low, high = prediction.low, prediction.high
            between = "" if low is None or high is None else f"{units.duration(low)} to {units.duration(high)}, "
            note = f"{between}{prediction.precision}, {prediction.basis}"
            yield Card(_ELSEWHERE, f"On {prediction.target}", prediction.seconds, "time", "predicted", note)
    if roofs and not predictions_of(profile):
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
    label = sweep.trial(sweep.best).candidate.label
    between = f"{units.percent(best.accuracy_low)} to {units.percent(best.accuracy_high)}, {label}"
    yield Card(_SWEEP, "Best: accuracy", best.accuracy, "share", "measured", between)
    interval = f"{units.duration(best.latency_low_s)} to {units.duration(best.latency_high_s)}, batch {best.batch_size}"
    yield Card(_SWEEP, "Best: latency", best.latency_s, "time", "measured", interval)
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
        kind: Provenance = "proxy" if source.startswith("proxy") else "estimated" if source == "model" else "measured"
        yield Card(_SWEEP, "Best: energy", best.energy_j, "joules", kind, source)
