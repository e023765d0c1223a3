"""Every record that people meet, as a short table: what is printed of it, and what a notebook draws."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from edge_opt import units
from edge_opt.records.compression import Explanation, FineTuned, Pruned, Sensitivity
from edge_opt.records.conversions import Agreement, Converted, RunnerProfile
from edge_opt.records.costs import Reconciliation
from edge_opt.records.devices import BatchFit, DeviceSpec, Roofline
from edge_opt.records.measurements import Comparison, Diagnosis, Facility, Latency, LayerLatencies, Measurement
from edge_opt.records.predictions import Calibration, DeviceMemory, MemoryNeed, Prediction, TargetComparison
from edge_opt.records.profiles import CheckResult, ModelComparison, ModelProfile
from edge_opt.records.serving import ServingComparison, ServingReport
from edge_opt.records.sweeps import SweepResult, SweepStatus, Trial
from edge_opt.records.training_steps import TrainingStep
from edge_opt.report import checks, comparison, profile_text, results, serving_tables, target_tables, training_tables
from edge_opt.report.html import comparison_html, profile_html, sweep_html
from edge_opt.report.sheets import Fact, Sheet, own_view, sheet
from edge_opt.report.summary import energy_sentence, measured_lines, prediction_sentence
from edge_opt.report.sweep_tables import sweep_sheet, trial_sheet
from edge_opt.report.terminal import Cell, Strip
from edge_opt.text import printable

_SHOWN = 12


def column(header: str, texts: Iterable[str], *, is_name: bool = False, rank: int = 0) -> Strip:
    """One column of texts; names stand to the left and may be shortened."""
    cells = tuple(Cell(printable(text)) for text in texts)
    return Strip(header, cells, "left", 12, rank) if is_name else Strip(header, cells, rank=rank)


def notes(remarks: Iterable[str]) -> tuple[Fact, ...]:
    """Remarks as facts."""
    return tuple(("Note", remark) for remark in remarks)


def largest(rows: Sequence[Any], key: Callable[[Any], float]) -> list[Any]:
    """The first rows by a figure, largest first."""
    return sorted(rows, key=key, reverse=True)[:_SHOWN]


def others(rows: Sequence[Any], what: str = "layers") -> Iterator[Fact]:
    """How many rows are not shown."""
    if len(rows) > _SHOWN:
        yield "More", f"{len(rows) - _SHOWN} {what} that are smaller"


@sheet(BatchFit)
def _batch(found: BatchFit) -> Sheet:
    title = f"batch {found.batch} fits" if found.fits else "not even one sample fits"
    more = found.shortfall_bytes
    limit = f"{units.size(found.limit_bytes)} ({found.limit_source})"
    facts: list[Fact] = [
        ("Needs", f"{units.size(found.total_bytes)} of {limit}"),
        ("Of that", _parts(found)),
    ]
    if found.reserved_bytes is not None:
        facts.append(("Reserved", f"{units.size(found.reserved_bytes)} by the allocator of {found.allocator}"))
    facts.append(
        ("One more", f"the search ended at {found.most}" if more is None else f"would need {units.size(more)} more")
    )
    return Sheet(title, facts=(*facts, ("Note", found.remark)))


def _parts(need: Any) -> str:
    buffers = f"buffers {units.size(need.buffer_bytes)}, " if need.buffer_bytes else ""
    return (
        f"weights {units.size(need.weight_bytes)}, {buffers}inputs {units.size(need.input_bytes)}, "
        f"activations {units.size(need.activation_bytes)}"
    )


@sheet(MemoryNeed)
def _memory(found: MemoryNeed) -> Sheet:
    return Sheet(f"{units.size(found.total_bytes)} at the peak ({found.kind})", facts=(("Of that", _parts(found)),))


@sheet(Prediction)
def _prediction(found: Prediction) -> Sheet:
    known = [layer for layer in found.layers if layer.seconds]
    rows = largest(known, lambda layer: layer.seconds or 0.0)
    whole = found.seconds or sum(layer.seconds or 0.0 for layer in known) or 1.0
    strips = (
        column("Layer", (layer.path or "(the model itself)" for layer in rows), is_name=True),
        column("Type", (layer.kind for layer in rows), is_name=True, rank=2),
        column("Predicted", (units.duration(layer.seconds or 0.0) for layer in rows)),
        column("Share", (units.percent((layer.seconds or 0.0) / whole) for layer in rows)),
        column("Bound by", (layer.bound for layer in rows), rank=1),
    )
    energies = [("Energy", energy_sentence(energy)) for energy in found.energies[:1]]
    facts = (*others(known), *energies, *notes(found.remarks))
    return Sheet(prediction_sentence(found), (strips,) if rows else (), tuple(facts))


@sheet(Roofline)
def _roofline(found: Roofline) -> Sheet:
    rows = largest(found.fused_layers, lambda point: point.seconds or point.flops)
    total = found.fused_total
    strips = (
        column("Layer", (point.path or point.kind for point in rows), is_name=True),
        column("FLOPs", (units.count(point.flops) for point in rows)),
        column("Moved", (units.size(point.bytes_moved) for point in rows), rank=2),
        column("FLOPs/byte", (units.ratio(point.intensity) for point in rows), rank=1),
        column("At least", (_seconds(point.seconds) for point in rows)),
        column("Bound by", (point.bound for point in rows)),
    )
    knee = found.knee_flops_per_byte
    facts: list[Fact] = [("Fused", f"{_seconds(total.seconds)} at least, bound by {total.bound}")]
    facts.append(("Unfused", f"{_seconds(found.total.seconds)} at least, bound by {found.total.bound}"))
    if knee is not None:
        facts.append(("Knee", f"compute is the limit from {units.ratio(knee)} FLOPs per byte on"))
    if found.bandwidth is not None:
        facts.append(("Bandwidth", f"{units.count(found.bandwidth.bytes_per_s)}B/s: {found.bandwidth.reading}"))
    title = f"{total.kind} under the roof of {found.device} ({found.engine}, {found.precision})"
    return Sheet(title, (strips,) if rows else (), (*others(found.fused_layers), *facts, *notes(found.remarks)))


def _seconds(value: float | None) -> str:
    return "not known" if value is None else units.duration(value)


@sheet(Measurement)
def _measurement(found: Measurement) -> Sheet:
    rows = [] if found.layers is None else largest(found.layers.layers, lambda layer: layer.seconds)
    where = found.environment
    machine = ("Machine", f"{where.cpu}, {where.threads} of {where.cores} cores, {where.device}")
    count = () if found.layers is None else found.layers.layers
    facts = (*others(count), *measured_lines(found), machine)
    return Sheet("measured here", (_timed(rows),) if rows else (), facts)


def _timed(rows: Sequence[Any]) -> tuple[Strip, ...]:
    return (
        column("Layer", (layer.path or "(the model itself)" for layer in rows), is_name=True),
        column("Type", (layer.kind for layer in rows), is_name=True, rank=1),
        column("Time", (units.duration(layer.seconds) for layer in rows)),
        column("Share", (units.percent(layer.share) for layer in rows)),
    )


@sheet(LayerLatencies)
def _layers(found: LayerLatencies) -> Sheet:
    rows = largest(found.layers, lambda layer: layer.seconds)
    between = ("Between", f"{units.duration(found.between_layers_s)} in no layer")
    title = f"{units.duration(found.whole_s)} in {len(found.layers)} layers"
    return Sheet(title, (_timed(rows),) if rows else (), (*others(found.layers), between))


@sheet(Latency)
def _latency(found: Latency) -> Sheet:
    low, high = units.duration(found.median_interval_s.low), units.duration(found.median_interval_s.high)
    figures = (("Minimum", found.minimum_s), ("Mean", found.mean_s), ("p95", found.p95_s), ("p99", found.p99_s))
    facts = (*((name, units.duration(value)) for name, value in figures), *notes(found.remarks))
    return Sheet(f"{units.per_call(found.median_s, found.batch_size)} (95 % interval {low} to {high})", facts=facts)


@sheet(Comparison)
def _compared(found: Comparison) -> Sheet:
    ends = f"{found.ratio_interval.low:.3f} to {found.ratio_interval.high:.3f}"
    what = "no difference was shown" if found.verdict == "equal" else found.verdict
    return Sheet(f"{what}: {found.ratio:.3f} × the time (95 % interval {ends}, {found.clock} time)")


@sheet(Agreement)
def _agreement(found: Agreement) -> Sheet:
    return Sheet(results.agreement_text(found))


@sheet(RunnerProfile)
def _runner(found: RunnerProfile) -> Sheet:
    rows = largest(found.kernels, lambda kernel: kernel.seconds or 0.0)
    strips = (
        column("Kernel", (kernel.name for kernel in rows), is_name=True),
        column("Operator", (kernel.op for kernel in rows), is_name=True, rank=1),
        column("Runs in", (kernel.precision for kernel in rows)),
        column("Time", (_seconds(kernel.seconds) for kernel in rows)),
    )
    title = (
        f"{found.runtime}: {len(found.kernels)} kernels, {units.duration(found.seconds)} in {found.repeats} runs' mean"
    )
    return Sheet(title, (strips,) if rows else (), tuple(others(found.kernels, "kernels")))


@sheet(Calibration)
def _calibration(found: Calibration) -> Sheet:
    machine = found.machine
    rows = found.peaks
    strips = (
        column("Work", (peak.work for peak in rows), is_name=True),
        column("Precision", (peak.precision for peak in rows)),
        column("Reached", (f"{units.count(peak.ops_per_s)}OP/s" for peak in rows)),
    )
    fastest = max((item.bytes_per_s for item in found.bandwidths), default=0.0)
    facts = (
        ("Machine", f"{machine.cpu}, {machine.threads} threads, torch {machine.torch}"),
        ("Copy", f"{units.count(fastest)}B/s within the caches"),
        ("Overhead", f"{units.duration(found.overhead_per_operator_s)} per operator"),
        ("Samples", f"{len(found.samples)} operators, {len(found.references)} runs of models"),
        ("Error", f"{units.percent(found.whole_deviation)} off on models that were held out"),
    )
    title = f"calibration of {found.name}, {found.created}"
    return Sheet(title, (strips,) if rows else (), (*facts, *notes(found.remarks)))


@sheet(Reconciliation)
def _reconciled(found: Reconciliation) -> Sheet:
    rows = found.causes[:_SHOWN]
    strips = (
        column("Cause", (cause.cause for cause in rows), is_name=True),
        column("Difference", (_signed(cause.difference) for cause in rows)),
    )
    title = f"{units.count(found.ours)} {found.unit} by us, {units.count(found.theirs)} by {found.convention}"
    return Sheet(title, (strips,) if rows else ())


def _signed(value: float) -> str:
    return f"{'+' if value > 0 else units.MINUS if value < 0 else '±'}{units.count(abs(value))}"


@sheet(SweepStatus)
def _status(found: SweepStatus) -> Sheet:
    first, state, best = status_lines(found)
    return Sheet(first, facts=(("State", state), ("Best", best)))


def status_lines(found: SweepStatus) -> Iterator[str]:
    """How far a sweep is, in lines; `edge-opt status` prints the same."""
    left = "" if found.left is None else f", {found.left} left"
    yield f"{found.name}: {found.done} done ({found.accepted} accepted), {found.failed} failed{left}"
    if found.is_running:
        doing = ", ".join(found.unfinished) or found.stage or "between two candidates"
        yield f"running as process {found.pid} on {found.host}: {doing}"
    elif found.left:
        was = f"; {', '.join(found.unfinished)} was cut short" if found.unfinished else ""
        yield f"not running{was}; run the same again to go on"
    else:
        yield "not running"
    yield f"so far: {found.recommendation}" if found.left else found.recommendation


@sheet(Diagnosis)
def _diagnosis(found: Diagnosis) -> Sheet:
    where, noise, again = found.environment, found.noise, found.repetition.ratio_interval
    load = "not known" if where.load_1min is None else f"{where.load_1min:.2f}"
    half_width = (noise.median_interval_s.high - noise.median_interval_s.low) / 2 / noise.median_s
    facts = (
        ("Machine", f"{where.cpu} ({found.cpu_capability}), {where.cores} cores, {units.size(where.memory_bytes)}"),
        ("System", f"{where.system}, Python {where.python}"),
        ("Threads", f"{where.threads} inside an operator, {found.interop_threads} between operators"),
        ("Governor", where.governor or "not known: this kernel does not show it"),
        ("Load", f"{load} in the last minute"),
        ("Versions", ", ".join(f"{name} {number or 'not installed'}" for name, number in found.versions)),
        *(("Devices", _facility(device)) for device in found.devices),
        *(("Energy meters", _facility(meter)) for meter in found.meters),
        ("Noise", _noise_verdict(noise)),
        ("Median", f"known to ±{units.percent(half_width)} after {len(noise.samples_s)} blocks"),
        ("Slow tail", f"p99 is {noise.p99_s / noise.median_s:.2f} × the median"),
        ("Repeated", f"took {again.low:.3f} to {again.high:.3f} × as long ({found.repetition.clock} time)"),
        *notes(noise.remarks),
    )
    return Sheet("what a measurement here would rest on", facts=facts)


def _facility(facility: Facility) -> str:
    return f"{facility.name}: {facility.refusal or 'usable'}"


def _noise_verdict(noise: Latency) -> str:
    if noise.is_contended:
        return "busy: other programs run here, and latencies measured now are those of a shared machine"
    return "noisy: expect wide intervals" if noise.is_noisy else "quiet: good to measure on"


@sheet(Converted)
def _converted(done: Converted) -> Sheet:
    return results.conversion_sheet(done)


@sheet(Pruned)
def _pruned(pruned: Pruned) -> Sheet:
    return results.pruned_sheet(pruned)


@sheet(FineTuned)
def _fine_tuned(tuned: FineTuned) -> Sheet:
    def text(value: float | None) -> str:
        return units.DASH if value is None else f"{value:.4g}"

    strips = (
        column("Epoch", (str(it.epoch) for it in tuned.history)),
        column("Loss", (text(it.loss) for it in tuned.history)),
        column("Score", (text(it.score) for it in tuned.history)),
    )
    title = f"{type(tuned.model).__name__}, with the weights of epoch {tuned.best_epoch}; 0 is before training"
    return Sheet(title, (strips,) if tuned.history else ())


@sheet(Sensitivity)
def _sensitivity(found: Sensitivity) -> Sheet:
    return results.sensitivity_sheet(found)


@sheet(Explanation)
def _explanation(found: Explanation) -> Sheet:
    rows = largest([row for row in found.layers if row.seconds_after is not None], lambda row: row.seconds_after or 0.0)
    strips = (
        column("Layer", (row.path or "(the model itself)" for row in rows), is_name=True),
        column("Before", (_seconds(row.seconds_before) for row in rows)),
        column("After", (_seconds(row.seconds_after) for row in rows)),
        column("Runs in", (row.precision or units.DASH for row in rows), rank=1),
        column("Held by", (row.bottleneck for row in rows), rank=2),
    )
    return Sheet(found.headline, (strips,) if rows else (), tuple(("Because", r.sentence) for r in found.reasons))


@sheet(DeviceMemory)
def _device_memory(found: DeviceMemory) -> Sheet:
    first, *rest = profile_text.device_memory_text(found).splitlines()
    return Sheet(first, facts=tuple(("", line.strip()) for line in rest))


@sheet(DeviceSpec)
def _device(spec: DeviceSpec) -> Sheet:
    return target_tables.device_sheet(spec)


sheet(TargetComparison, brief=target_tables.brief_target_sheet)(target_tables.target_sheet)
sheet(
    ServingReport,
    brief=lambda report: serving_tables.serving_sheet(report, is_brief=True),
    document=lambda report: serving_tables.serving_document([report]),
)(serving_tables.serving_sheet)
sheet(
    ServingComparison,
    brief=lambda found: serving_tables.comparison_sheet(found, is_brief=True),
    document=lambda found: serving_tables.serving_document(found.reports),
)(serving_tables.comparison_sheet)
sheet(TrainingStep, brief=training_tables.brief_training_sheet, document=training_tables.training_document)(
    training_tables.training_sheet
)
sheet(SweepResult)(sweep_sheet)
sheet(Trial)(trial_sheet)

own_view(ModelProfile, profile_text.render, profile_html)
own_view(ModelComparison, comparison.render, comparison_html)
own_view(CheckResult, checks.render, checks.check_html)
own_view(SweepResult, page=sweep_html)
own_view(Pruned, lambda pruned: results.pruned_text(pruned.asked, pruned.achieved, pruned.shortfalls))
own_view(DeviceMemory, profile_text.device_memory_text)
own_view(Explanation, lambda found: "\n".join([found.headline, *(f"- {r.sentence}" for r in found.reasons)]))
