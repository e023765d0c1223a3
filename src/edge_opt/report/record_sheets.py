"""The sheets of records that have no module of their own; importing it registers the sheets of all records."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from edge_opt import units
from edge_opt._support.json import to_plain
from edge_opt.records.compression import (
    Explanation,
    FineTuned,
    HelpfulChange,
    Pruned,
    PruneRequest,
    Sensitivity,
    Shortfall,
)
from edge_opt.records.conversions import Agreement, Converted, RunnerProfile
from edge_opt.records.costs import Reconciliation
from edge_opt.records.devices import BatchFit, Roofline
from edge_opt.records.measurements import Comparison, Diagnosis, Latency, LayerLatencies, Measurement
from edge_opt.records.predictions import Calibration, DeviceMemory, LatencyRatio, MemoryNeed, Prediction, SelfCheck
from edge_opt.records.sweeps import SweepStatus
from edge_opt.report import (
    check_sheets,
    comparison,
    save,
    serving_tables,
    sweep_files,
    target_tables,
    training_tables,
)
from edge_opt.report.figures import change_of
from edge_opt.report.profile_text import energy_sentence, measured_lines, prediction_sentence
from edge_opt.report.sheets import Note, Sheet, Table, column, sheet, signed, text_column
from edge_opt.report.target_tables import memory_parts

# They register the sheets of their records when they are imported.
_ = (check_sheets, comparison, save, serving_tables, sweep_files, target_tables, training_tables)
_SHOWN = 12


def remarks(sentences: Iterable[str]) -> tuple[Note, ...]:
    """Return remarks as notes."""
    return tuple(("Note", sentence) for sentence in sentences)


def largest(rows: Sequence[Any], key: Callable[[Any], float]) -> list[Any]:
    """Return the first rows by a figure, largest first."""
    return sorted(rows, key=key, reverse=True)[:_SHOWN]


def others(rows: Sequence[Any], what: str = "layers") -> Iterator[Note]:
    """Yield how many rows are not shown."""
    if len(rows) > _SHOWN:
        yield "More", f"{len(rows) - _SHOWN} {what} that are smaller"


@sheet(BatchFit)
def _batch(fit: BatchFit) -> Sheet:
    title = f"batch {fit.batch} fits" if fit.fits else "not even one sample fits"
    more = fit.shortfall_bytes
    limit = f"{units.size(fit.limit_bytes)} ({fit.limit_source})"
    notes = [("Needs", f"{units.size(fit.total_bytes)} of {limit}"), ("Of that", memory_parts(fit))]
    if fit.reserved_bytes is not None:
        notes.append(("Reserved", f"{units.size(fit.reserved_bytes)} by the allocator of {fit.allocator}"))
    next_one = f"the search ended at {fit.most}" if more is None else f"would need {units.size(more)} more"
    return Sheet(title, notes=(*notes, ("One more", next_one), ("Note", fit.remark)))


@sheet(MemoryNeed)
def _memory(need: MemoryNeed) -> Sheet:
    return Sheet(f"{units.size(need.total_bytes)} at the peak ({need.kind})", notes=(("Of that", memory_parts(need)),))


@sheet(Prediction)
def _prediction(prediction: Prediction) -> Sheet:
    known = [layer for layer in prediction.layers if layer.seconds]
    rows = largest(known, lambda layer: layer.seconds or 0.0)
    whole = prediction.seconds or sum(layer.seconds or 0.0 for layer in known) or 1.0
    columns = (
        text_column("Layer", (layer.path or "(the model itself)" for layer in rows)),
        text_column("Type", (layer.kind for layer in rows), 2),
        column("Predicted", (units.duration(layer.seconds or 0.0) for layer in rows)),
        column("Share", (units.percent((layer.seconds or 0.0) / whole) for layer in rows)),
        column("Bound by", (layer.bound for layer in rows), 1),
    )
    energies = [("Energy", energy_sentence(energy)) for energy in prediction.energies[:1]]
    notes = (*others(known), *energies, *remarks(prediction.remarks))
    return Sheet(prediction_sentence(prediction), (columns,), tuple(notes))


@sheet(LatencyRatio)
def _latency_ratio(ratio: LatencyRatio) -> Sheet:
    title = f"{ratio.ratio:.2f} × the time on {ratio.target}, 90 % interval {ratio.low:.2f} to {ratio.high:.2f}"
    notes = (
        ("Before", units.duration(ratio.before_s)),
        ("After", units.duration(ratio.after_s)),
        ("Rests on", ratio.basis),
    )
    return Sheet(title, notes=notes)


@sheet(Roofline)
def _roofline(roof: Roofline) -> Sheet:
    rows = largest(roof.fused_layers, lambda point: point.seconds or point.flops)
    total = roof.fused_total
    columns = (
        text_column("Layer", (point.path or point.kind for point in rows)),
        column("FLOPs", (units.count(point.flops) for point in rows)),
        column("Moved", (units.size(point.bytes_moved) for point in rows), 2),
        column("FLOPs/byte", (units.ratio(point.intensity) for point in rows), 1),
        column("At least", (_seconds(point.seconds) for point in rows)),
        column("Bound by", (point.bound for point in rows)),
    )
    knee = roof.knee_flops_per_byte
    notes: list[Note] = [("Fused", f"{_seconds(total.seconds)} at least, bound by {total.bound}")]
    notes.append(("Unfused", f"{_seconds(roof.total.seconds)} at least, bound by {roof.total.bound}"))
    if knee is not None:
        notes.append(("Knee", f"compute is the limit from {units.ratio(knee)} FLOPs per byte on"))
    if roof.bandwidth is not None:
        notes.append(("Bandwidth", f"{units.count(roof.bandwidth.bytes_per_s)}B/s: {roof.bandwidth.reading}"))
    title = f"{total.kind} under the roof of {roof.device} ({roof.engine}, {roof.precision})"
    return Sheet(title, (columns,), (*others(roof.fused_layers), *notes, *remarks(roof.remarks)))


def _seconds(value: float | None) -> str:
    return "not known" if value is None else units.duration(value)


@sheet(Measurement)
def _measurement(measured: Measurement) -> Sheet:
    layers = () if measured.layers is None else measured.layers.layers
    where = measured.environment
    machine = ("Machine", f"{where.cpu}, {where.threads} of {where.cores} cores, {where.device}")
    return Sheet("measured here", (_timed(layers),), (*others(layers), *measured_lines(measured), machine))


def _timed(layers: Sequence[Any]) -> Table:
    rows = largest(layers, lambda layer: layer.seconds)
    return (
        text_column("Layer", (layer.path or "(the model itself)" for layer in rows)),
        text_column("Type", (layer.kind for layer in rows), 1),
        column("Time", (units.duration(layer.seconds) for layer in rows)),
        column("Share", (units.percent(layer.share) for layer in rows)),
    )


@sheet(LayerLatencies)
def _layers(layers: LayerLatencies) -> Sheet:
    between = ("Between", f"{units.duration(layers.between_layers_s)} in no layer")
    title = f"{units.duration(layers.whole_s)} in {len(layers.layers)} layers"
    return Sheet(title, (_timed(layers.layers),), (*others(layers.layers), between))


@sheet(Latency)
def _latency(latency: Latency) -> Sheet:
    low, high = units.duration(latency.median_interval_s.low), units.duration(latency.median_interval_s.high)
    figures = (("Minimum", latency.minimum_s), ("Mean", latency.mean_s), ("p95", latency.p95_s), ("p99", latency.p99_s))
    notes = (*((name, units.duration(value)) for name, value in figures), *remarks(latency.remarks))
    return Sheet(f"{units.per_call(latency.median_s, latency.batch_size)} (95 % interval {low} to {high})", notes=notes)


@sheet(Comparison)
def _compared(compared: Comparison) -> Sheet:
    ends = f"{compared.ratio_interval.low:.3f} to {compared.ratio_interval.high:.3f}"
    what = "no difference was shown" if compared.verdict == "equal" else compared.verdict
    return Sheet(f"{what}: {compared.ratio:.3f} × the time (95 % interval {ends}, {compared.clock} time)")


@sheet(RunnerProfile)
def _runner(profile: RunnerProfile) -> Sheet:
    rows = largest(profile.kernels, lambda kernel: kernel.seconds or 0.0)
    columns = (
        text_column("Kernel", (kernel.name for kernel in rows)),
        text_column("Operator", (kernel.op for kernel in rows), 1),
        column("Runs in", (kernel.precision for kernel in rows)),
        column("Time", (_seconds(kernel.seconds) for kernel in rows)),
    )
    mean = f"{units.duration(profile.seconds)} in {profile.repeats} runs' mean"
    title = f"{profile.runtime}: {len(profile.kernels)} kernels, {mean}"
    return Sheet(title, (columns,), tuple(others(profile.kernels, "kernels")))


def _checks(name: str, check: SelfCheck) -> list[tuple[str, str]]:
    """Return what the whole nets of a self-check say: the expected error, and the common factor that was taken out."""
    interval = f"{check.low:.3f} to {check.high:.3f}"
    error = units.percent(check.expected_error)
    return [
        (f"Expected error, {name}", f"{error} in the median ({len(check.nets)} whole nets held out)"),
        (f"Common factor, {name}", f"{check.factor:.3f} (90 % interval {interval}), taken out"),
    ]


@sheet(Calibration)
def _calibration(calibration: Calibration) -> Sheet:
    machine = calibration.machine
    rows = calibration.peaks
    columns = (
        text_column("Work", (peak.work for peak in rows)),
        column("Precision", (peak.precision for peak in rows)),
        column("Reached", (f"{units.count(peak.ops_per_s)}OP/s" for peak in rows)),
    )
    fastest = max((item.bytes_per_s for item in calibration.bandwidths), default=0.0)
    notes = (
        ("Machine", f"{machine.cpu}, {machine.threads} threads, torch {machine.torch}"),
        ("Copy", f"{units.count(fastest)}B/s within the caches"),
        ("Overhead", f"{units.duration(calibration.overhead_per_operator_s)} per operator"),
        ("Samples", f"{len(calibration.samples)} operators, {len(calibration.references)} runs of models"),
        ("Error", f"{units.percent(calibration.whole_deviation)} off on models that were held out"),
        *(() if calibration.check is None else _checks("torch/fp32", calibration.check)),
        *(note for item in calibration.runtimes for note in _checks(item.name, item.check)),
    )
    title = f"calibration of {calibration.name}, {calibration.created}"
    return Sheet(title, (columns,), (*notes, *remarks(calibration.remarks)))


@sheet(Reconciliation)
def _reconciled(reconciled: Reconciliation) -> Sheet:
    rows = reconciled.causes[:_SHOWN]
    columns = (
        text_column("Cause", (cause.cause for cause in rows)),
        column("Difference", (signed(cause.difference, units.count) for cause in rows)),
    )
    ours, theirs = units.count(reconciled.ours), units.count(reconciled.theirs)
    title = f"{ours} {reconciled.unit} by us, {theirs} by {reconciled.convention}"
    return Sheet(title, (columns,))


@sheet(SweepStatus)
def _status(progress: SweepStatus) -> Sheet:
    left = "" if progress.left is None else f", {progress.left} left"
    state = "not running"
    if progress.is_running:
        doing = ", ".join(progress.unfinished) or progress.stage or "between two candidates"
        state = f"running as process {progress.pid} on {progress.host}: {doing}"
    elif progress.left:
        was = f"; {', '.join(progress.unfinished)} was cut short" if progress.unfinished else ""
        state = f"not running{was}; run the same again to go on"
    best = f"so far: {progress.recommendation}" if progress.left else progress.recommendation
    title = f"{progress.name}: {progress.done} done ({progress.accepted} accepted), {progress.failed} failed{left}"
    return Sheet(title, notes=(("State", state), ("Best", best)))


@sheet(Diagnosis)
def _diagnosis(diagnosis: Diagnosis) -> Sheet:
    where, noise, again = diagnosis.environment, diagnosis.noise, diagnosis.repetition.ratio_interval
    load = "not known" if where.load_1min is None else f"{where.load_1min:.2f}"
    verdict = "noisy: expect wide intervals" if noise.is_noisy else "quiet: good to measure on"
    if noise.is_contended:
        verdict = "busy: other programs run here, and latencies measured now are those of a shared machine"
    half_width = (noise.median_interval_s.high - noise.median_interval_s.low) / 2 / noise.median_s
    notes = (
        ("Machine", f"{where.cpu} ({diagnosis.cpu_capability}), {where.cores} cores, {units.size(where.memory_bytes)}"),
        ("System", f"{where.system}, Python {where.python}"),
        ("Threads", f"{where.threads} inside an operator, {diagnosis.interop_threads} between operators"),
        ("Governor", where.governor or "not known: this kernel does not show it"),
        ("Load", f"{load} in the last minute"),
        ("Versions", ", ".join(f"{name} {number or 'not installed'}" for name, number in diagnosis.versions)),
        *(("Devices", f"{it.name}: {it.refusal or 'usable'}") for it in diagnosis.devices),
        *(("Energy meters", f"{it.name}: {it.refusal or 'usable'}") for it in diagnosis.meters),
        ("Noise", verdict),
        ("Median", f"known to ±{units.percent(half_width)} after {len(noise.samples_s)} blocks"),
        ("Slow tail", f"p99 is {noise.p99_s / noise.median_s:.2f} × the median"),
        ("Repeated", f"took {again.low:.3f} to {again.high:.3f} × as long ({diagnosis.repetition.clock} time)"),
        *remarks(noise.remarks),
    )
    return Sheet("what a measurement here would rest on", notes=notes)


@sheet(Converted)
def conversion_sheet(done: Converted) -> Sheet:
    """Return what was asked, what runs, agreement, size and remarks.

    Layers that run in what was asked are counted; the others stand one by one with their reason.
    """
    kept = done.kept_layers
    columns = (
        text_column("Layer", (it.path or "(the model itself)" for it in kept), 0, 12),
        text_column("Operator", (layer.op for layer in kept), 1, 8),
        text_column("Runs in", (layer.precision for layer in kept), 0, None),
        text_column("Why", (layer.reason for layer in kept), 2, 20),
    )
    share = f", {done.size_bytes / done.original_bytes * 100:.0f} % of {units.size(done.original_bytes)} before"
    return Sheet(
        f"{done.precision} on {done.runtime}: runs in {done.effective_precision}, "
        f"{len(done.layers) - len(kept)} of {len(done.layers)} layers as asked",
        (columns,),
        (
            ("Agreement", agreement_text(done.agreement).removeprefix("agreement ")),
            ("Size", units.size(done.size_bytes) + (share if done.original_bytes else "")),
            *remarks(done.remarks),
        ),
    )


def agreement_text(agreement: Agreement) -> str:
    """Return how far two models agree, in one line."""
    top1 = "" if agreement.top1 is None else f"same top-1 for {units.percent(agreement.top1)}, "
    share = agreement.relative_difference
    relative = "" if share is None else f"; at most {units.percent(share)} of the mean output"
    unseen = "".join(f"; {units.percent(entry.difference)} on {entry.source}" for entry in agreement.unseen)
    samples = f"{agreement.samples} sample{'s' * (agreement.samples != 1)}"
    differences = f"largest difference {agreement.max_difference:.3g}, mean {agreement.mean_difference:.3g}"
    return f"agreement on {samples} of {agreement.source}: {top1}{differences}{relative}{unseen}"


@sheet(Agreement)
def _agreement(agreement: Agreement) -> Sheet:
    return Sheet(agreement_text(agreement))


def conversion_document(done: Converted) -> dict[str, Any]:
    """Return everything but the module, as plain values."""
    return {name: value for name, value in to_plain(replace(done, model=None)).items() if name != "model"}


def _pruned_notes(pruned: Pruned) -> list[Note]:
    """Return what remains of channels, parameters, MACs and latency, and which layers lost less than asked and why."""
    achieved = pruned.achieved

    def shown(before: str, after: str, share: float) -> str:
        return f"{before:>8} → {after:>8}  {units.percent(share):>6} remain"

    counts = (
        ("Channels", achieved.channels_before, achieved.channels, achieved.channels_ratio),
        ("Params", achieved.params_before, achieved.params, achieved.params_ratio),
        ("MACs", achieved.macs_before, achieved.macs, achieved.macs_ratio),
    )
    notes = [(what, shown(units.count(old), units.count(new), share)) for what, old, new, share in counts]
    if achieved.latency_s is not None and achieved.latency_before_s is not None:
        before_s, after_s = units.duration(achieved.latency_before_s), units.duration(achieved.latency_s)
        notes.append(("Latency", shown(before_s, after_s, achieved.latency_ratio or 0.0)))
    return [*notes, *(("Short", line) for line in _shortfall_lines(pruned.shortfalls))]


def _request_text(asked: PruneRequest) -> str:
    """Return the request as people say it."""
    shares = [
        (asked.ratio, "every layer removed"),
        (asked.macs_target, "the MACs to remain"),
        (asked.latency_target, "the latency to remain"),
        *((share, f"{path} removed") for path, share in asked.layers),
    ]
    parts = [f"{units.percent(share)} of {what}" for share, what in shares if share is not None]
    rounding = f", channels rounded to {asked.round_to}" if asked.round_to > 1 else ""
    if asked.is_round_auto:
        rounding = ", channels rounded to fast widths"
    return f"{', '.join(parts)}, by {asked.importance}{rounding}"


def _shortfall_lines(shortfalls: tuple[Shortfall, ...]) -> list[str]:
    """Return one line per layer that lost less than asked; layers with the same reason share one."""
    by_reason: dict[str, list[Shortfall]] = {}
    for fall in shortfalls:
        by_reason.setdefault(fall.reason, []).append(fall)
    lines = []
    for reason, falls in by_reason.items():
        names = ", ".join(fall.path for fall in falls[:3])
        more = f" and {len(falls) - 3} more" if len(falls) > 3 else ""
        share = units.percent(sum(fall.achieved for fall in falls) / len(falls))
        lines.append(f"{names}{more}: {share} removed of {units.percent(falls[0].asked)}: {reason}")
    hidden = len(lines) - _SHOWN
    return lines if hidden <= 0 else [*lines[:_SHOWN], f"and {hidden} more reasons"]


@sheet(Pruned)
def pruned_sheet(pruned: Pruned) -> Sheet:
    """Return the layers that lost most channels, asked and achieved; the totals, and where it falls short."""
    every = pruned.achieved.layers
    most = sorted(range(len(every)), key=lambda n: every[n].before - every[n].after, reverse=True)[:_SHOWN]
    layers = [every[n] for n in sorted(most)]
    columns = (
        text_column("Layer", (each.path for each in layers)),
        text_column("Kind", (each.kind for each in layers), 1, None),
        column("Before", (str(each.before) for each in layers)),
        column("After", (str(each.after) for each in layers)),
        column("Asked", (units.percent(each.asked) for each in layers)),
        column("Removed", (units.percent(each.achieved) for each in layers)),
    )
    notes = _pruned_notes(pruned)
    if len(every) > _SHOWN:
        rest = f"{len(every) - _SHOWN} layers that lost fewer channels: --json, or .achieved.layers in Python"
        notes.insert(0, ("More", rest))
    error = pruned.check.silenced_error
    silenced = "" if error is None else f"; equal to the original with those channels silenced, within {error:.1g}"
    proof = f"forward, backward ({pruned.check.gradients} gradients){silenced}"
    asked = f"asked: {_request_text(pruned.asked)}"
    return Sheet(asked, (columns,), (*notes, ("Proved", proof)))


@sheet(Sensitivity)
def sensitivity_sheet(sensitivity: Sensitivity) -> Sheet:
    """Return the table, most sensitive layers first, and which layers to leave unchanged."""
    rows = sensitivity.worst_first()
    is_accuracy = sensitivity.metric == "accuracy"
    changes = (f"{row.score_change * 100:+.2f}" if is_accuracy else f"{row.score_change:+.4g}" for row in rows)
    shares = (row.disagreement for row in rows)
    columns = (
        text_column("Layer", (row.path for row in rows)),
        text_column("Kind", (row.kind for row in rows), 2, None),
        text_column("Change", map(change_of, rows), min_width=None),
        column("Points" if is_accuracy else sensitivity.metric, changes),
        column("Output error", (f"{row.output_error:.2g}" for row in rows)),
        column("Other answers", (units.DASH if share is None else units.percent(share) for share in shares), 1),
    )
    baseline = units.percent(sensitivity.baseline) if is_accuracy else f"{sensitivity.baseline:.4g}"
    whole = f"{sensitivity.metric} of the whole model: {baseline} on {sensitivity.samples} samples"
    sensitive = []
    for change, verb in (("prune", "pruned"), ("quantize", "quantized")):
        paths = sensitivity.spare(change)  # type: ignore[arg-type]
        if paths:
            sensitive.append(f"when {verb}: {', '.join(paths)}")
    advice = f"do not change these, they lose most {'; '.join(sensitive)}"
    if not sensitive:
        advice = "no layer loses accuracy on these samples"
    by_reason: dict[str, list[str]] = {}
    for path, reason in sensitivity.unchanged:
        by_reason.setdefault(reason, []).append(path)
    unchanged = (("Not changed", f"{', '.join(paths)}: {reason}") for reason, paths in by_reason.items())
    title = f"{whole}; quantization is simulated"
    return Sheet(title, (columns,), (("Advice", advice), *unchanged))


@sheet(FineTuned)
def _fine_tuned(tuned: FineTuned) -> Sheet:
    def text(value: float | None) -> str:
        return units.DASH if value is None else f"{value:.4g}"

    columns = (
        column("Epoch", (str(it.epoch) for it in tuned.history)),
        column("Loss", (text(it.loss) for it in tuned.history)),
        column("Score", (text(it.score) for it in tuned.history)),
    )
    title = f"{type(tuned.model).__name__}, with the weights of epoch {tuned.best_epoch}; 0 is before training"
    return Sheet(title, (columns,))


@sheet(Explanation)
def _explanation(explanation: Explanation) -> Sheet:
    rows = largest(
        [row for row in explanation.layers if row.seconds_after is not None], lambda row: row.seconds_after or 0.0
    )
    columns = (
        text_column("Layer", (row.path or "(the model itself)" for row in rows)),
        column("Before", (_seconds(row.seconds_before) for row in rows)),
        column("After", (_seconds(row.seconds_after) for row in rows)),
        column("Runs in", (row.precision or units.DASH for row in rows), 1),
        column("Held by", (row.bottleneck for row in rows), 2),
    )
    return Sheet(explanation.headline, (columns,), explanation_notes(explanation))


def explanation_notes(explanation: Explanation) -> tuple[Note, ...]:
    """Return the reasons, what would help, and what predictions rest on, each with its label."""
    reasons = [("Rests on" if it.topic == "prediction" else "Because", it.sentence) for it in explanation.reasons]
    helpful = [("Would help", _helpful_sentence(change)) for change in explanation.helpful]
    # Stable, so that reasons keep their order.
    return tuple(sorted([*reasons, *helpful], key=lambda note: ["Because", "Would help", "Rests on"].index(note[0])))


def _helpful_sentence(change: HelpfulChange) -> str:
    latency = change.latency
    gain = f"{1 / latency.ratio:.2f}{units.TIMES} as fast (90 % interval {1 / latency.high:.2f}–{1 / latency.low:.2f})"
    return f"{change.sentence}: {units.duration(latency.after_s)}, {gain}"


@sheet(DeviceMemory)
def _device_memory(memory: DeviceMemory) -> Sheet:
    unasked = f"{memory.fragmentation:.1%} of it asked for by no tensor"
    notes = (
        ("Weights and inputs", units.size(memory.resident_bytes)),
        ("Requested", units.size(memory.requested_bytes)),
        ("Allocated", f"{units.size(memory.allocated_bytes)}, at {memory.peak_module or 'the forward itself'}"),
        ("Reserved", f"{units.size(memory.reserved_bytes)}, {unasked}"),
    )
    return Sheet(f"{memory.device} memory, {memory.source}", notes=(*notes, *remarks(memory.notes)))
