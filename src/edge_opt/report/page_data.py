"""The one JSON value that a page draws from: cards, tables, charts, and what to take away first, in sentences."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from edge_opt import units
from edge_opt._support.extras import written_with
from edge_opt._support.json import to_plain
from edge_opt.records.compression import Explanation, Sensitivity
from edge_opt.records.measurements import Energy, Measurement
from edge_opt.records.profiles import Level, ModelProfile
from edge_opt.records.sweeps import SHARES, TRIAL_COLUMNS, SweepResult, Trial, TrialMetrics, score_text
from edge_opt.report.figures import (
    DeviceRoofs,
    Provenance,
    axes_data,
    axes_of,
    column_title,
    device_roofs,
    frontiers,
    layer_bars,
    layer_name,
    predictions_and_measurement,
    sensitivity_data,
    timeline,
)
from edge_opt.report.profile_text import fit_of, fits_lines, verdict_sentence
from edge_opt.report.record_sheets import explanation_notes, largest
from edge_opt.report.sweep_files import answer, conclusion, speedup_data, sweep_rows, winner_table
from edge_opt.report.table import in_target_precision, leaf_rows, table
from edge_opt.text import shorten

_WINNER, _MODEL, _HERE, _TARGET = "Winner", "Model", "Measured here", "On the target"
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
    """Return the figures of a page: first those of the winner, by which a reader decides."""
    shown: list[Card] = []
    if sweep is not None:
        shown += _winner(sweep)
    if profile is not None:
        shown += _on_target(profile, roofs)
        if profile.measurement is not None:
            shown += _measured(profile.measurement)
        shown += _counted(profile)
    return shown


def _batch_size(profile: ModelProfile) -> int:
    """Return the first dimension of the first input; 1 where there is none."""
    return next((shape[0] for shape in profile.trace.modules[0].input_shapes if shape), 1)


def _note(*parts: str) -> str:
    return "; ".join(filter(None, parts))


def _counted(profile: ModelProfile) -> Iterable[Card]:
    shown = in_target_precision(profile)
    totals, peak, batch = shown.totals, shown.peak, f"batch {_batch_size(profile)}"
    is_bound = totals.is_lower_bound
    moved = totals.bytes_read + totals.bytes_written
    dense = "" if totals.intensity is None or is_bound else f"{units.ratio(totals.intensity)} FLOPs per byte"
    flops = f"{units.count(totals.flops)} FLOPs"
    planned = f"{units.size(peak.planner_bytes)} with a planner"
    yield Card(_MODEL, "MACs", totals.macs, "count", "counted", _note(batch, flops), is_bound)
    yield Card(_MODEL, "Parameters", totals.params, "count", "counted", units.size(totals.param_bytes))
    yield Card(_MODEL, "Memory traffic", moved, "bytes", "estimated", _note(batch, dense), is_bound)
    yield Card(_MODEL, "Peak activations", peak.live_bytes, "bytes", "estimated", _note(batch, planned))


def _measured(measured: Measurement) -> Iterable[Card]:
    latency, disturbed = measured.latency, is_disturbed(measured)
    ends, batch = latency.median_interval_s, f"batch {latency.batch_size}"
    median = Card(_HERE, "Latency", latency.median_s, "time", "measured", f"{batch}, median")
    yield replace(median, low=ends.low, high=ends.high, is_disturbed=disturbed)
    if measured.is_slower_fresh and measured.fresh_latency_s is not None:
        first = f"{batch}; the first call, which allocates memory"
        yield Card(_HERE, "Latency, new memory", measured.fresh_latency_s, "time", "measured", first)
    each = f"samples per second, {batch}"
    yield Card(_HERE, "Throughput", latency.throughput, "number", "measured", each, is_disturbed=disturbed)
    if measured.memory is not None:
        scratch = f"{batch}; {units.size(measured.memory.scratch_bytes)} of it scratch"
        yield Card(_HERE, "Peak memory", measured.memory.peak_bytes, "bytes", "measured", scratch)
    if measured.energy is not None:
        yield _energy(_HERE, "Energy per sample", measured.energy.joules, latency.batch_size, measured.energy)


def _energy(group: str, label: str, joules: float, batch_size: int, energy: Energy) -> Card:
    kind, note = _energy_kind(energy.source), _note(f"batch {batch_size}", energy.note)
    return Card(group, label, joules / batch_size, "energy", kind, note)


def _energy_kind(source: str) -> Provenance:
    """Return what kind of figure an energy is; a trial has its source with a note behind it: "model: fitted"."""
    kinds: dict[str, Provenance] = {"proxy": "proxy", "model": "estimated"}
    return kinds.get(source.partition(":")[0], "measured")


def _on_target(profile: ModelProfile, roofs: Sequence[DeviceRoofs]) -> Iterable[Card]:
    """Yield the predicted time, whether the memory suffices, and the energy; only of devices that were named."""
    batch = f"batch {_batch_size(profile)}"
    for prediction in profile.predictions:
        if prediction.seconds is not None:
            label, note = f"On {prediction.target}", f"{batch}, {prediction.precision_label}, {prediction.basis}"
            low, high = prediction.low, prediction.high
            yield Card(_TARGET, label, prediction.seconds, "time", "predicted", note, low=low, high=high)
        if prediction.mcu is not None:
            for verdict in prediction.mcu.verdicts:
                label = f"{verdict.memory}: {'fits' if verdict.fits else 'does not fit'}"
                note = verdict_sentence(prediction.mcu, verdict)
                yield Card(_TARGET, label, verdict.needed_bytes, "bytes", "estimated", note)
        elif prediction.ram_bytes:
            fits, needed = fit_of(profile, prediction)
            ram = f"{prediction.target} has {units.sizes(prediction.ram_bytes)} of RAM"
            note = f"{batch}, {prediction.precision}; {ram}"
            yield Card(_TARGET, f"Fits: {fits}", needed, "bytes", "estimated", note)
        for energy in prediction.energies[:1]:
            yield _energy(_TARGET, "Energy per sample", energy.joules, _batch_size(profile), energy)
    if roofs and not profile.predictions:
        roof = roofs[0].main
        if roof.total.seconds is not None:
            note = f"{batch}, {roof.precision}; lower bound, {roof.total.bound}-bound"
            yield Card(_TARGET, f"On {roofs[0].spec.title}", roof.total.seconds, "time", "estimated", note)


def _winner(sweep: SweepResult) -> Iterable[Card]:
    best = sweep.trial(sweep.best).metrics if sweep.best else None
    if best is None:
        return
    yield _score(best)
    if sweep.speedup is not None:
        whole, note = sweep.speedup.whole, f"vs baseline, batch {sweep.speedup.batch_size}"
        source: Provenance = "predicted" if sweep.speedup.clock == "predicted" else "measured"
        ratio = Card(_WINNER, "Speedup", whole.ratio, "factor", source, note)
        yield replace(ratio, low=whole.low, high=whole.high, is_disturbed=sweep.speedup.is_disturbed)
    kind: Provenance = "predicted" if best.target_kind == "predicted" else "measured"
    label, where = "Latency", f"batch {best.ranked_batch}"
    if best.target is not None:
        label, where = f"Latency on {best.target.target}", f"{where}; 90 % interval; {best.target.platform}"
    if math.isfinite(best.ranked_latency_s):
        latency = Card(_WINNER, label, best.ranked_latency_s, "time", kind, where)
        yield replace(latency, low=best.ranked_low_s, high=best.ranked_high_s, is_disturbed=best.is_disturbed)
    if best.target is not None and best.target.ram_bytes is not None:
        yield Card(_WINNER, f"RAM on {best.target.target}", best.target.ram_bytes, "bytes", "estimated", where[:7])
    before = sweep.baseline.metrics
    smaller = "" if before is None else f"baseline {units.size(before.size_bytes)}"
    yield Card(_WINNER, "Size", best.size_bytes, "bytes", "measured", smaller)
    if best.measured_memory_bytes is not None:
        note = f"batch {best.batch_size}; above the idle runtime"
        yield Card(_WINNER, "Memory", best.measured_memory_bytes, "bytes", "measured", note)
    if best.energy_j is not None:
        energy, note = best.energy_j / best.batch_size, f"batch {best.batch_size}; {best.energy_source}"
        yield Card(_WINNER, "Energy per sample", energy, "energy", _energy_kind(best.energy_source), note)


def _score(best: TrialMetrics) -> Card:
    """Return the score on test data; on validation, by which candidates are chosen, where there is no other."""
    shown: Format = "share" if best.metric in SHARES else "number"
    low, high = best.accuracy_low, best.accuracy_high
    if best.test_accuracy is None:
        label = f"Validation {best.metric}"
        return Card(_WINNER, label, best.accuracy, shown, "measured", "95 % CI", low=low, high=high)
    ends = f"{score_text(low, best.metric)}{units.DASH}{score_text(high, best.metric)}"
    note = f"validation {score_text(best.accuracy, best.metric)} (95 % CI {ends})"
    return Card(_WINNER, f"Test {best.metric}", best.test_accuracy, shown, "measured", note)


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
    file: str | None = None,
) -> dict[str, Any]:
    """Return what the page shows; a part that is not given is None, and `file` is the file to ship."""
    from edge_opt import __version__

    roofs = device_roofs(profile, devices) if profile else ()
    losses = sensitivity_data(sensitivity) if sensitivity else None
    measurement = profile.measurement if profile else None
    return {
        "format": FORMAT,
        "schema_version": SCHEMA_VERSION,
        "edge_opt": __version__,
        "title": title or (profile.name if profile else sweep.name if sweep else "edge_opt"),
        "verdict": verdict(profile, sweep, roofs, file),
        "model": " ".join(_of_profile(profile, roofs)) if profile and sweep else None,
        "advice": [list(item) for item in advice(profile, sweep, roofs, losses)],
        "cards": [to_plain(card) for card in cards(profile, sweep, roofs)],
        "profile": _profile(profile, roofs) if profile else None,
        "sweep": _sweep(sweep) if sweep else None,
        "explanation": _explanation(sweep.explanation) if sweep and sweep.explanation else None,
        "sensitivity": losses,
        "environment": to_plain(measurement.environment) if measurement else None,
        "written": written_with(),
        "reproducibility": standard(reproducibility) if reproducibility else None,
        "summary": standard(summary) if summary else None,
        "others": [_totals(other) for other in (profile, *extra_profiles) if other and extra_profiles],
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


# Columns of the candidates beside those of the files: in front of them, and behind them.
_FIRST = (("label", "Candidate", "text"), ("state", "Status", "text"))
_LAST = (
    ("speedup", "Speedup", "number"), ("energy_sample_j", "Energy per sample", "energy"),
    ("pruning", "Pruning ratio", "share"), ("disturbed", "Disturbed", "flag"),
    ("disturbed_times", "Disturbed times", "text"), ("violations", "Violated constraints", "text"),
    ("undecided", "Undecided constraints", "text"), ("probability", "Probability that they hold", "share"),
    ("key", "Key", "text"),
)  # fmt: skip
# Files have milliseconds and MiB; the page scales both to the unit that suits each value.
_PAGE_KINDS = {"time": "ms", "bytes": "mib", "rate": "number"}
# Shown in this order, before the others.
_IN_FRONT = (
    "label",
    "state",
    "test_accuracy",
    "accuracy",
    "target_latency_ms",
    "target_latency_kind",
    "deploy_latency_ms",
    "speedup",
    "size_mb",
    "energy_sample_j",
)


def _candidate_columns(sweep: SweepResult) -> list[dict[str, str]]:
    """Return the columns of the table of candidates: those of the files that have a title, and some of its own."""
    titled = []
    kinds = list({trial.metrics.target_kind for trial in sweep.trials if trial.metrics and trial.metrics.target})
    for column in TRIAL_COLUMNS:
        header, kind = column_title(column, sweep), _PAGE_KINDS.get(column.kind, column.kind)
        if "accuracy" in column.name and sweep.metric not in SHARES:
            kind = "number"
        elif column.name == "accuracy_drop":
            header, kind = f"{header} (points)", "points"
        if column.name == "target_latency_ms" and len(kinds) == 1:
            header = f"{header} ({kinds[0]})"
        if header:
            is_kib = column.unit == "KiB"
            kind, unit = (
                ("number", " (KiB)") if is_kib else (kind, f" ({column.unit})" if column.kind == "rate" else "")
            )
            titled.append((column.name, header + unit, kind))
    every = {it[0]: it for it in (*_FIRST, *titled, *_LAST)}
    ordered = {name: every[name] for name in _IN_FRONT if name in every} | every
    return [{"name": name, "header": header, "kind": kind} for name, header, kind in ordered.values()]


def _sweep(sweep: SweepResult) -> dict[str, Any]:
    rows = sweep_rows(sweep)
    [baseline] = sweep_rows(replace(sweep, trials=(sweep.baseline,), frontiers=()))
    columns = winner_table(sweep.winners)
    winners = [[cell.text for cell in row] for row in zip(*(item.cells for item in columns), strict=True)]

    def with_words(row: Mapping[str, Any], trial: Trial) -> dict[str, Any]:
        energy = None if row["energy_j"] is None else row["energy_j"] / row["batch_size"]
        return {**row, "label": trial.candidate.title, "verdict": trial.verdict, "energy_sample_j": energy}

    return {
        "name": sweep.name,
        "metric": {
            "title": axes_of(sweep)[0].title,
            "is_share": sweep.metric in SHARES,
            "direction": sweep.metric_direction,
        },
        "constraints": list(sweep.constraints),
        "best": sweep.best,
        "speedup": speedup_data(sweep.speedup),
        "columns": _candidate_columns(sweep),
        "rows": [with_words(row, trial) for row, trial in zip(rows, sweep.trials, strict=True)],
        "baseline": with_words(baseline, sweep.baseline),
        # The winner of each target as a table of texts; None where there are not several.
        "winners": {"headers": [item.header for item in columns], "rows": winners} if winners else None,
        "violations": [[to_plain(item) for item in trial.violations] for trial in sweep.trials],
        "axes": axes_data(sweep, [baseline, *rows]),
        "frontiers": frontiers(sweep),
    }


def _explanation(explanation: Explanation) -> dict[str, Any]:
    """Return why the winner is not faster on the target: sentences, and a row for each of the longest layers."""
    rows = largest([row for row in explanation.layers if row.seconds_after], lambda row: row.seconds_after or 0.0)
    return {
        "target": explanation.latency.target if explanation.latency else "",
        "headline": f"{explanation.headline}.",
        "notes": [list(note) for note in explanation_notes(explanation)],
        "rows": [
            [row.path or "(the model itself)", row.seconds_before, row.seconds_after, row.precision, row.bottleneck]
            for row in rows
        ],
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
    "overhead": "Fuse layers, use fewer and larger operators, or a larger batch.",
}


def verdict(
    profile: ModelProfile | None, sweep: SweepResult | None, roofs: Sequence[DeviceRoofs], file: str | None = None
) -> list[str]:
    """Return the answer of the page: of a sweep what to ship and why, else the model in a few sentences."""
    if sweep is not None:
        # The constraints stand above the candidates.
        notes = [f"{label}: {text}." for label, text in conclusion(sweep).notes[1:] if label != "Constraints"]
        return [f"{answer(sweep, file)}.", *([" ".join(notes)] if notes else [])]
    return [" ".join(_of_profile(profile, roofs))] if profile else []


def _of_profile(profile: ModelProfile, roofs: Sequence[DeviceRoofs]) -> Iterable[str]:
    """Yield the sentences about a model: first the named device, then what was measured here, then the counts."""
    shown, prediction = in_target_precision(profile), profile.prediction
    totals = shown.totals
    if prediction is not None and prediction.seconds is not None:
        low, high = prediction.low, prediction.high
        ends = "" if low is None or high is None else f"90 % interval {units.duration(low)} to {units.duration(high)}, "
        time = f"{units.duration(prediction.seconds)} in {prediction.precision_label}"
        yield f"On {prediction.target} it takes {time} ({ends}predicted, bound by {prediction.bound})."
        yield from (f"Fits: {sentence}." for _, sentence in fits_lines(profile)[:1])
    elif roofs:
        roof = roofs[0].main
        if roof.total.seconds is not None:
            least = f"{units.duration(roof.total.seconds)} in {roof.precision} ({roof.total.bound}-bound)"
            yield f"On {roofs[0].spec.title} it takes at least {least}."
    if profile.measurement is not None:
        latency = profile.measurement.latency
        noisy = ", on a noisy machine" if latency.is_noisy or latency.is_contended else ""
        yield f"Measured here: {units.per_call(latency.median_s, latency.batch_size)}{noisy}."
    bound = "at least " if totals.is_lower_bound else ""
    shapes = ", ".join(units.shape(shape) for shape in profile.trace.modules[0].input_shapes)
    yield (
        f"{shorten(profile.name, 80)} has {units.count(totals.params)} parameters ({units.size(totals.param_bytes)}) "
        f"and needs {bound}{units.count(totals.macs)} MACs{f' for an input of {shapes}' if shapes else ''}; peak "
        f"activation memory {units.size(shown.peak.live_bytes)}."
    )


def advice(
    profile: ModelProfile | None,
    sweep: SweepResult | None,
    roofs: Sequence[DeviceRoofs],
    sensitivity: Mapping[str, Any] | None,
) -> list[Advice]:
    """Return what to do, each with its reason; most useful first."""
    items: list[Advice] = []
    if profile is not None:
        items += [*_largest(profile), *_on_device(profile, roofs, sweep), *_memory(profile)]
    if sensitivity is not None and sensitivity["layers"]:
        items.append(("Most sensitive layers", sensitivity["caption"]))
    return [*items, *_mind(profile)] if profile else items


def _mind(profile: ModelProfile) -> Iterable[Advice]:
    if profile.unpriced:
        ops = sorted({item.op for item in profile.unpriced})
        named = ", ".join(ops[:_NAMED]) + (" …" if len(ops) > _NAMED else "")
        yield "Totals are lower bounds", f"No cost rule for {named}; edge_opt.cost_rule adds one."
    if profile.measurement is not None:
        remarks = "; ".join(profile.measurement.latency.remarks)
        if remarks:
            yield "About the measurement", f"{remarks[0].upper()}{remarks[1:]}."


def _largest(profile: ModelProfile) -> Iterable[Advice]:
    if not profile.totals.macs:
        return
    costs = [(row.cost.macs, row) for row in leaf_rows(profile) if row.cost and row.cost.macs]
    # Of few layers only the largest is named: together they are the whole model.
    largest = sorted(costs, key=lambda item: -item[0])[: _NAMED if len(costs) > _NAMED else 1]
    share = sum(macs for macs, _ in largest) / profile.totals.macs
    named = ", ".join(shorten(layer_name(row, profile), 48) for _, row in largest)
    if share < _STANDS_OUT:
        yield "No layer stands out", f"The largest ({named}) have {units.percent(share)} of all MACs together."
        return
    part = f"{named}: {units.percent(share)} of all MACs"
    yield "Largest layers", f"{part}. Pruning and lower precision help there first."


def _on_device(profile: ModelProfile, roofs: Sequence[DeviceRoofs], sweep: SweepResult | None) -> Iterable[Advice]:
    """Yield what helps on the first device; what a sweep measured is not recommended once more from shapes."""
    if not roofs:
        return
    tried = () if sweep is None else [trial.candidate.precision for trial in sweep.trials]
    device, roof = roofs[0], roofs[0].main
    whole, fused = roof.total.seconds, roof.fused_total.seconds
    # The page names what bounds the prediction, so the advice follows it; the roofline answers where there is none.
    prediction = next((item for item in profile.predictions if item.target == device.spec.name and item.seconds), None)
    time = prediction or roof.total
    bound, seconds = time.bound, time.seconds
    if seconds and bound in _CURES:
        layers = (prediction or roof).layers
        share = sum(layer.seconds or 0.0 for layer in layers if layer.bound == bound) / seconds
        spent = "lower bound" if prediction is None or prediction.basis == "roofline" else "predicted time"
        text = f"{units.percent(share)} of the {spent} is in {bound}-bound layers. {_CURES[bound]}"
        yield f"On {device.spec.title}", text
    if sweep is None and whole and fused is not None and 1 - fused / whole > _WORTH_SAYING:
        saved = f"save up to {units.percent(1 - fused / whole)} of the time there; runtimes such as ONNX Runtime do so."
        yield "Fuse", f"Batch norms and activations fused into their convolution {saved}"
    # A page has one time for a precision: beside a prediction, the roofline's best would contradict it.
    if prediction is not None and (prediction.bound == "overhead" or prediction.basis != "roofline"):
        return
    for other in device.roofs[1:]:
        if whole and other.total.seconds and other.precision not in tried:
            best = f"Lower bound {units.duration(other.total.seconds)} on {device.spec.title}"
            yield f"Try {other.precision}", f"{best}; {units.duration(whole)} in {roof.precision}."


def _memory(profile: ModelProfile) -> Iterable[Advice]:
    peak = in_target_precision(profile).peak
    if peak.live_bytes and 1 - peak.planner_bytes / peak.live_bytes > _WORTH_SAYING:
        where = f"The peak of {units.size(peak.live_bytes)} is at {shorten(peak.module or profile.name, 48)}"
        planned = f"a runtime that frees each tensor after its last use needs {units.size(peak.planner_bytes)}."
        yield "Plan memory", f"{where}; {planned}"
