"""A served language model as a sheet and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from edge_opt import units
from edge_opt._support.json import dumps_document, to_plain
from edge_opt.records.serving import (
    SERVING_FORMAT,
    ServingComparison,
    ServingReport,
    ServingSplit,
    WeightFileSummary,
)
from edge_opt.report.sheets import Note, Sheet, Table, column, sheet, text_column

VERSION = 1
_FIRST_REMARKS = 2
Reports = Sequence[ServingReport]


def serving_document(reports: Reports) -> str:
    """Return the reports as JSON; sums and verdicts that the records work out are written out."""

    def plain(report: ServingReport) -> dict[str, Any]:
        derived = ("total_bytes", "fits", "fitting_ram_bytes", "missing_bytes")
        memory = to_plain(report.memory) | {name: getattr(report.memory, name) for name in derived}
        return {**to_plain(report), "memory": memory}

    # 0.2 wrote "version".
    return dumps_document(SERVING_FORMAT, VERSION, {"version": VERSION, "reports": [plain(it) for it in reports]})


@sheet(
    ServingReport,
    brief=lambda report: replace(serving_sheet(report), notes=tuple(_notes(report, _FIRST_REMARKS))),
    files={".json": lambda report: serving_document([report])},
)
def serving_sheet(report: ServingReport) -> Sheet:
    """Return one report: its parts, its speed over the context, and every remark."""
    parts, points = report.parts, report.curve
    moved = sum(part.bytes_per_step for part in parts) or 1
    parts_table = (
        text_column("Part", (part.name for part in parts), min_width=None),
        column("Held", (units.size(part.weights_bytes) for part in parts)),
        column("Streamed per step", (units.size(part.bytes_per_step) for part in parts)),
        column("Share", (units.percent(part.bytes_per_step / moved) for part in parts)),
        column("FLOPs per step", (units.count(part.flops_per_step) for part in parts)),
    )
    curve_table = (
        column("Context", (str(point.context) for point in points)),
        column("Cache", (units.size(point.kv_bytes) for point in points)),
        column("Tokens/s", (_rate(point.tokens_per_s) for point in points)),
    )
    return Sheet(report.model, (parts_table, curve_table), tuple(_notes(report)), _chart(report))


def _brief_comparison(comparison: ServingComparison) -> Sheet:
    first, asked, *remarks = _comparison_notes(comparison.reports)
    count = len(remarks)
    more = [("Note", f"--json shows {count} remark{'s' * (count != 1)} and sources")] if count else []
    return Sheet(comparison.reports[0].model, (_comparison_table(comparison.reports),), (first, asked, *more))


@sheet(
    ServingComparison,
    brief=_brief_comparison,
    files={".json": lambda comparison: serving_document(comparison.reports)},
)
def comparison_sheet(comparison: ServingComparison) -> Sheet:
    """Return several reports side by side, each with its own sheet below it."""
    parts = (
        replace(serving_sheet(it), title=f"{it.weights} on {it.target or 'no target'}") for it in comparison.reports
    )
    notes = _comparison_notes(comparison.reports)
    return Sheet(
        comparison.reports[0].model, (_comparison_table(comparison.reports),), tuple(notes), parts=tuple(parts)
    )


def _comparison_table(reports: Reports) -> Table:
    prefills = [report.prefill.seconds for report in reports]
    energies = [report.energy_per_token for report in reports]
    return (
        text_column("Target", (report.target or units.DASH for report in reports)),
        text_column("Weights", (report.weights for report in reports), min_width=None),
        column("Memory", (units.size(report.memory.total_bytes) for report in reports), 1),
        column("Fits", map(_verdict, reports)),
        column("First token", (units.DASH if it is None else units.duration(it) for it in prefills), 3),
        column("Tokens/s", (_rate(report.decode.tokens_per_s) for report in reports)),
        column("Interval", map(_interval, reports), 2),
        column("At start", (_rate(report.decode_at_start.tokens_per_s) for report in reports), 6),
        column("Bits", (f"{report.bits_per_weight:.2f}" for report in reports), 7),
        column("Energy", (units.DASH if it is None else units.energy(it.joules) for it in energies), 4),
    )


def _comparison_notes(reports: Reports) -> list[Note]:
    """Return the model, what was asked, remarks that hold for all, and where each target's bandwidth is known from."""
    common = (remark for remark in reports[0].remarks if all(remark in other.remarks for other in reports))
    sources = (f"{it.target}: {it.bandwidth_source}" for it in reports if it.target is not None)
    remarks = [("Note", remark) for remark in (*dict.fromkeys(common), *dict.fromkeys(sources))]
    return [("Model", _title(reports[0])), ("Asked", _asked(reports[0])), *remarks]


def _notes(report: ServingReport, most: int | None = None) -> Iterator[Note]:
    """Yield the notes of a report with their labels, and at most this many remarks."""
    memory, decode, start, prefill = report.memory, report.decode, report.decode_at_start, report.prefill
    yield "Model", f"{_title(report)}; {report.weights} is {report.bits_per_weight:.2f} bits per weight on average"
    yield "Asked", _asked(report)
    cache = f"cache {units.size(memory.kv_bytes)} ({report.kv})"
    held = f"weights {units.size(memory.weights_bytes)}, {cache}, activations {units.size(memory.activation_bytes)}"
    yield "Memory", f"{units.size(memory.total_bytes)}: {held}"
    if report.file is not None:
        yield "File", _file(report.file)
    if report.target is not None:
        yield "Fits", fits_in_words(report)
    if report.best_format is not None and report.best_format != report.weights:
        yield "Format", f"{report.best_format} is the most precise that fits {units.size(memory.ram_bytes[0])}"
    if report.split is not None:
        yield "Split", split_in_words(report.split)
    if report.target is not None:
        yield "Prompt", _prompt(report)
    if decode.tokens_per_s is not None:
        rate = f"{_rate(decode.tokens_per_s)} tokens/s ({_interval(report)}) at {decode.context} positions"
        yield "Decoding", f"{rate}, {_rate(start.tokens_per_s)} after the prompt; bound by {decode.bound}"
        yield "Bandwidth", f"{(report.bandwidth_bytes_per_s or 0) / 1e9:.3g} GB/s: {report.bandwidth_source}"
    streamed = f"{units.size(decode.bytes_per_token)} streamed, {units.count(decode.flops_per_token)} FLOPs"
    yield "Per token", f"{streamed}; the prompt takes {units.count(prefill.flops)} FLOPs"
    if report.energy_per_token is not None:
        yield "Energy", f"{units.energy(report.energy_per_token.joules)} per token; {report.energy_per_token.note}"
    measured = report.measured
    if measured is not None:
        peak = "" if measured.peak_bytes is None else f"; tensors held {units.size(measured.peak_bytes)} at most"
        where = f"here in {measured.runtime}, {measured.weights}, threads: {measured.threads}"
        rate = f"{_rate(measured.decode_tokens_per_s)} tokens/s"
        yield "Measured", f"{where}: first token after {units.duration(measured.prefill_s)}, then {rate}{peak}"
    yield from (("Note", remark) for remark in report.remarks[:most])
    hidden = 0 if most is None else len(report.remarks[most:])
    if hidden:
        yield "More", f"{hidden} remark{'s' * (hidden != 1)}: -o FILE.md has them"


def _title(report: ServingReport) -> str:
    active = f", {units.count(report.active_params)} met by a token" if report.active_params < report.params else ""
    return f"{report.model}: {units.count(report.params)} parameters{active}"


def _asked(report: ServingReport) -> str:
    where = "no target" if report.target is None else f"{report.target} ({report.engine})"
    return f"{where}, {report.runtime}, prompt {report.prompt}, context {report.context}, batch {report.batch}" + (
        f"; maximum context {report.max_context}" if report.max_context else ""
    )


def _file(file: WeightFileSummary) -> str:
    """Return what the header of a file says, in one line."""
    types = ", ".join(f"{item.name} {units.size(item.stored_bytes)}" for item in file.types[:4])
    parts = f" in {file.parts} parts" if file.parts > 1 else ""
    words = "" if file.tokens is None else f"; vocabulary of {file.tokens}"
    sizes = f"{units.size(file.disk_bytes)} on disk, {file.tensors} tensors of {units.size(file.tensor_bytes)}: {types}"
    experts = f"; {file.experts_per_token} of {file.experts} experts" if file.experts else ""
    window = "" if file.window is None else f"; window {file.window}"
    rope = "" if file.rope_base is None else f"; RoPE base {file.rope_base:g}"
    return f"{file.kind}{parts}, {file.architecture}; {sizes}{experts}{window}{rope}{words}"


def split_in_words(split: ServingSplit) -> str:
    """Return what each device holds and how fast they are together."""
    places = []
    for part in split.parts:
        experts = f", experts of {part.expert_layers}" if part.expert_layers and split.way == "experts" else ""
        places.append(f"{part.device} {part.layers} layers{experts} ({units.size(part.total_bytes)})")
    if split.way == "tensor":
        places = [f"{len(split.parts)} × {split.parts[0].device}, {units.size(split.parts[0].total_bytes)} each"]
    if split.tokens_per_s is None:
        return f"{'; '.join(places)}; {units.size(split.missing_bytes)} fit nowhere"
    interval = f"{_rate(split.low)} to {_rate(split.high)}"
    return f"{'; '.join(places)}: {_rate(split.tokens_per_s)} tokens/s ({interval})"


def fits_in_words(report: ServingReport) -> str:
    """Return whether it fits, in which sizes of RAM, or what is missing; then how long and how many would."""
    memory = report.memory
    if memory.fits is None:
        return "not known: the target's RAM is not known"
    enough, sizes = memory.fitting_ram_bytes, ", ".join(map(units.size, memory.ram_bytes))
    if memory.fits:
        verdict = f"yes, in {sizes}"
    elif enough:
        verdict = f"not in {units.size(memory.ram_bytes[0])} ({units.size(memory.missing_bytes or 0)} missing), "
        verdict += f"but in {', '.join(map(units.size, enough))}"
    else:
        verdict = f"no: {units.size(memory.total_bytes - memory.ram_bytes[-1])} missing of {sizes}"
    context = f"{units.size(memory.limit_bytes or 0)} hold a context of {memory.longest_context} at this batch"
    return f"{verdict}; {context}, and a batch of {memory.largest_batch} at this context"


def _prompt(report: ServingReport) -> str:
    prefill = report.prefill
    if prefill.seconds is None or prefill.low is None or prefill.high is None:
        return f"{prefill.tokens} tokens; no time: the target's rate is not known"
    seconds, low, high = map(units.duration, (prefill.seconds, prefill.low, prefill.high))
    rate = f"{_rate(prefill.tokens_per_s)} tokens/s"
    return f"{prefill.tokens} tokens in {seconds} ({low} to {high}), {rate}; bound by {prefill.bound}"


def _rate(tokens_per_s: float | None) -> str:
    return units.DASH if tokens_per_s is None else f"{tokens_per_s:.3g}"


def _interval(report: ServingReport) -> str:
    decode = report.decode
    if decode.low is None:
        return units.DASH
    return f"at least {_rate(decode.low)}" if decode.high is None else f"{_rate(decode.low)} to {_rate(decode.high)}"


def _verdict(report: ServingReport) -> str:
    memory = report.memory
    if memory.fits is None:
        return units.DASH
    if memory.fitting_ram_bytes:
        return f"in {units.size(memory.fitting_ram_bytes[0])}"
    return f"{units.size(memory.total_bytes - memory.ram_bytes[-1])} missing"


def _chart(report: ServingReport) -> str:
    """Return tokens per second over context as a line; the table below it holds the numbers."""
    points = [(point.context, point.tokens_per_s) for point in report.curve if point.tokens_per_s is not None]
    if len(points) < 2:
        return ""
    widest, highest = points[-1][0], max(rate for _, rate in points)
    line = " ".join(f"{10 + 580 * size / widest:.1f},{150 - 130 * rate / highest:.1f}" for size, rate in points)
    return (
        '<svg viewBox="0 0 600 170" role="img" aria-label="tokens per second over context" width="600" height="170">'
        '<line x1="10" y1="150" x2="590" y2="150" stroke="currentColor"/>'
        f'<polyline points="{line}" fill="none" stroke="teal" stroke-width="2"/>'
        f'<text x="10" y="14" font-size="12" fill="currentColor">{_rate(highest)} tokens/s</text>'
        f'<text x="590" y="166" font-size="12" text-anchor="end" fill="currentColor">{widest} positions</text></svg>'
    )
