"""A served language model as a table, a JSON document and a page."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from edge_opt import units
from edge_opt._support.json import to_plain
from edge_opt.records.serving import SERVING_FORMAT, ServingComparison, ServingReport
from edge_opt.report.sheets import Sheet
from edge_opt.report.summary import short_first
from edge_opt.report.terminal import Cell, Strip

VERSION = 1
Reports = Sequence[ServingReport]


def serving_sheet(report: ServingReport, *, is_brief: bool = False) -> Sheet:
    """Return one report: its parts, its speed over the context, and every remark or the first ones only."""
    lines = list(sentences(report))
    tables = (tuple(part_strips(report)), tuple(curve_strips(report)))
    return Sheet(report.model, tables, tuple(short_first(lines) if is_brief else lines), _chart(report))


def comparison_sheet(found: ServingComparison, *, is_brief: bool = False) -> Sheet:
    """Return several reports side by side; each with its own sheet below it, unless it is to be brief."""
    strips, facts = comparison_parts(found.reports)
    model = found.reports[0].model
    if not is_brief:
        parts = (
            replace(serving_sheet(it), title=f"{it.weights} on {it.target or 'no target'}") for it in found.reports
        )
        return Sheet(model, (tuple(strips),), tuple(facts), parts=tuple(parts))
    hidden = len(facts) - 2
    more = [("Note", f"-v shows {hidden} remark{'s' * (hidden != 1)} and sources")] if hidden else []
    return Sheet(model, (tuple(strips),), (*facts[:2], *more))


def comparison_parts(reports: Reports) -> tuple[list[Strip], list[tuple[str, str]]]:
    """Several reports side by side: the columns, and what holds for all of them."""
    headers, rows = _side_by_side(reports)
    columns = tuple(zip(*rows, strict=True))
    strips = [
        Strip(header, tuple(map(Cell, cells)), "left" if place < 2 else "right", 12 if not place else None, rank)
        for place, (header, cells, rank) in enumerate(zip(headers, columns, _RANKS, strict=True))
    ]
    remarks = [("Note", remark) for remark in (*_shared_remarks(reports), *_sources(reports))]
    return strips, [("Model", _title(reports[0])), ("Asked", _asked(reports[0])), *remarks]


def sentences(report: ServingReport) -> Iterator[tuple[str, str]]:
    """What there is to say of a report, each with its label."""
    memory, decode, start, prefill = report.memory, report.decode, report.decode_at_start, report.prefill
    yield "Model", f"{_title(report)}; {report.weights} is {report.bits_per_weight:.2f} bits per weight on average"
    yield "Asked", _asked(report)
    yield (
        "Memory",
        (
            f"{units.size(memory.total_bytes)}: weights {units.size(memory.weights_bytes)}, cache "
            f"{units.size(memory.kv_bytes)} ({report.kv}), activations {units.size(memory.activation_bytes)}"
        ),
    )
    if report.target is not None:
        yield "Fits", fits_in_words(report)
        yield "Prompt", _prompt(report)
    if decode.tokens_per_s is not None:
        yield (
            "Decoding",
            (
                f"{_rate(decode.tokens_per_s)} tokens/s ({_interval(report)}) at {decode.context} positions, "
                f"{_rate(start.tokens_per_s)} after the prompt; bound by {decode.bound}"
            ),
        )
        yield "Bandwidth", f"{(report.bandwidth_bytes_per_s or 0) / 1e9:.3g} GB/s: {report.bandwidth_source}"
    yield (
        "Per token",
        (
            f"{units.size(decode.bytes_per_token)} streamed, {units.count(decode.flops_per_token)} FLOPs; the prompt "
            f"takes {units.count(prefill.flops)} FLOPs"
        ),
    )
    if report.energy_per_token is not None:
        yield "Energy", f"{units.energy(report.energy_per_token.joules)} per token; {report.energy_per_token.note}"
    yield from _extras(report)
    for remark in report.remarks:
        yield "Note", remark


def _extras(report: ServingReport) -> Iterator[tuple[str, str]]:
    measured = report.measured
    if measured is not None:
        peak = "" if measured.peak_bytes is None else f"; tensors held {units.size(measured.peak_bytes)} at most"
        yield (
            "Measured",
            (
                f"here in {measured.runtime}, {measured.weights}, threads: {measured.threads}: first token after "
                f"{units.duration(measured.prefill_s)}, then {_rate(measured.decode_tokens_per_s)} tokens/s{peak}"
            ),
        )


def _title(report: ServingReport) -> str:
    active = f", {units.count(report.active_params)} met by a token" if report.active_params < report.params else ""
    return f"{report.model}: {units.count(report.params)} parameters{active}"


def _asked(report: ServingReport) -> str:
    where = "no target" if report.target is None else f"{report.target} ({report.engine})"
    return f"{where}, {report.runtime}, prompt {report.prompt}, context {report.context}, batch {report.batch}" + (
        f"; the model was made for {report.max_context} positions" if report.max_context else ""
    )


def fits_in_words(report: ServingReport) -> str:
    """Whether it fits, in which sizes of RAM, or what is missing; then how long and how many would."""
    memory = report.memory
    if memory.fits is None:
        return "not known, for the target's RAM is not"
    enough, sizes = memory.fitting_ram_bytes, ", ".join(map(units.size, memory.ram_bytes))
    if memory.fits:
        verdict = f"yes, in {sizes}"
    elif enough:
        verdict = f"not in {units.size(memory.ram_bytes[0])} ({units.size(memory.missing_bytes or 0)} missing), "
        verdict += f"but in {', '.join(map(units.size, enough))}"
    else:
        verdict = f"no: {units.size(memory.total_bytes - memory.ram_bytes[-1])} missing of {sizes}"
    return (
        f"{verdict}; {units.size(memory.limit_bytes or 0)} hold a context of {memory.longest_context} at this batch, "
        f"and a batch of {memory.largest_batch} at this context"
    )


def _prompt(report: ServingReport) -> str:
    prefill = report.prefill
    if prefill.seconds is None or prefill.low is None or prefill.high is None:
        return f"{prefill.tokens} tokens; no time, for the target's rate is not known"
    return (
        f"{prefill.tokens} tokens in {units.duration(prefill.seconds)} ({units.duration(prefill.low)} to "
        f"{units.duration(prefill.high)}), {_rate(prefill.tokens_per_s)} tokens/s; bound by {prefill.bound}"
    )


def _rate(tokens_per_s: float | None) -> str:
    return units.DASH if tokens_per_s is None else f"{tokens_per_s:.3g}"


def _interval(report: ServingReport) -> str:
    decode = report.decode
    if decode.low is None:
        return units.DASH
    return f"at least {_rate(decode.low)}" if decode.high is None else f"{_rate(decode.low)} to {_rate(decode.high)}"


def part_strips(report: ServingReport) -> list[Strip]:
    rows = report.parts
    moved = sum(part.bytes_per_step for part in rows) or 1
    return [
        Strip("Part", tuple(Cell(part.name) for part in rows), "left"),
        Strip("Held", tuple(Cell(units.size(part.weights_bytes)) for part in rows)),
        Strip("Streamed per step", tuple(Cell(units.size(part.bytes_per_step)) for part in rows)),
        Strip("Share", tuple(Cell(units.percent(part.bytes_per_step / moved)) for part in rows)),
        Strip("FLOPs per step", tuple(Cell(units.count(part.flops_per_step)) for part in rows)),
    ]


def curve_strips(report: ServingReport) -> list[Strip]:
    points = report.curve
    return [
        Strip("Context", tuple(Cell(str(point.context)) for point in points)),
        Strip("Cache", tuple(Cell(units.size(point.kv_bytes)) for point in points)),
        Strip("Tokens/s", tuple(Cell(_rate(point.tokens_per_s)) for point in points)),
    ]


# What goes first where a terminal is narrow.
_RANKS = (0, 0, 1, 0, 3, 0, 2, 6, 7, 4)
_HEADERS = ("Target", "Weights", "Memory", "Fits", "First token", "Tokens/s", "Interval", "At start", "Bits", "Energy")


def _side_by_side(reports: Reports) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    def row(report: ServingReport) -> tuple[str, ...]:
        memory, prefill, energy = report.memory, report.prefill, report.energy_per_token
        return (
            report.target or units.DASH,
            report.weights,
            units.size(memory.total_bytes),
            _verdict(report),
            units.DASH if prefill.seconds is None else units.duration(prefill.seconds),
            _rate(report.decode.tokens_per_s),
            _interval(report),
            _rate(report.decode_at_start.tokens_per_s),
            f"{report.bits_per_weight:.2f}",
            units.DASH if energy is None else units.energy(energy.joules),
        )

    return _HEADERS, [row(report) for report in reports]


def _verdict(report: ServingReport) -> str:
    memory = report.memory
    if memory.fits is None:
        return units.DASH
    if memory.fitting_ram_bytes:
        return f"in {units.size(memory.fitting_ram_bytes[0])}"
    return f"{units.size(memory.total_bytes - memory.ram_bytes[-1])} missing"


def _shared_remarks(reports: Reports) -> list[str]:
    """Remarks that hold for all, and those of a report by its name."""
    common = [remark for remark in reports[0].remarks if all(remark in other.remarks for other in reports)]
    return list(dict.fromkeys(common))


def _sources(reports: Reports) -> list[str]:
    """Where each target's bandwidth is known from."""
    return list(dict.fromkeys(f"{it.target}: {it.bandwidth_source}" for it in reports if it.target is not None))


def serving_document(reports: Reports) -> str:
    """The reports as JSON; sums and verdicts that the records work out are written out."""

    def plain(report: ServingReport) -> dict[str, Any]:
        found: dict[str, Any] = to_plain(report)
        memory = report.memory
        found["memory"] |= {
            "total_bytes": memory.total_bytes,
            "fits": memory.fits,
            "fitting_ram_bytes": list(memory.fitting_ram_bytes),
            "missing_bytes": memory.missing_bytes,
        }
        return found

    document = {"format": SERVING_FORMAT, "version": VERSION, "reports": [plain(report) for report in reports]}
    return json.dumps(document, indent=1, allow_nan=False) + "\n"


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
