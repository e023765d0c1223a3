"""Pruned, converted and probed models as tables."""

from __future__ import annotations

from dataclasses import asdict, fields, replace
from typing import TYPE_CHECKING, Any

from edge_opt import units
from edge_opt._support.json import to_plain
from edge_opt.records.compression import (
    LayerSensitivity,
    PruneCheck,
    Pruned,
    PruneRequest,
    PruneResult,
    Sensitivity,
    Shortfall,
)
from edge_opt.records.conversions import Agreement, Converted
from edge_opt.report.figures import change_of
from edge_opt.report.sheets import Sheet
from edge_opt.report.terminal import Cell, Strip
from edge_opt.text import printable

if TYPE_CHECKING:
    import pandas as pd


def conversion_sheet(done: Converted) -> Sheet:
    """What was asked, what runs, agreement, size and remarks.

    Layers that run in what was asked are counted; the others stand one by one with their reason.
    """
    kept = done.kept_layers
    strips = (
        Strip("Layer", tuple(Cell(printable(it.path or "(the model itself)")) for it in kept), "left", floor=12),
        Strip("Operator", tuple(Cell(printable(layer.op)) for layer in kept), "left", floor=8, rank=1),
        Strip("Runs in", tuple(Cell(layer.precision) for layer in kept), "left"),
        Strip("Why", tuple(Cell(printable(layer.reason)) for layer in kept), "left", floor=20, rank=2),
    )
    share = f", {done.size_bytes / done.original_bytes * 100:.0f} % of {units.size(done.original_bytes)} before"
    return Sheet(
        f"{done.precision} on {done.runtime}: runs in {done.effective_precision}, "
        f"{len(done.layers) - len(kept)} of {len(done.layers)} layers as asked",
        (strips,) if kept else (),
        (
            ("Agreement", agreement_text(done.agreement).removeprefix("agreement ")),
            ("Size", units.size(done.size_bytes) + (share if done.original_bytes else "")),
            *(("Note", remark) for remark in done.remarks),
        ),
    )


def agreement_text(found: Agreement) -> str:
    """How far two models agree, in one line."""
    top1 = "" if found.top1 is None else f"same top-1 for {units.percent(found.top1)}, "
    share = found.relative_difference
    relative = "" if share is None else f"; at most {units.percent(share)} of the mean output"
    unseen = "".join(f"; {units.percent(entry.difference)} on {entry.source}" for entry in found.unseen)
    samples = f"{found.samples} sample{'s' * (found.samples != 1)}"
    return (
        f"agreement on {samples} of {found.source}: {top1}largest difference {found.max_difference:.3g}, "
        f"mean {found.mean_difference:.3g}{relative}{unseen}"
    )


def conversion_document(done: Converted) -> dict[str, Any]:
    """Everything but the module, as plain values."""
    return {name: value for name, value in to_plain(replace(done, model=None)).items() if name != "model"}


SHOWN = 12


def pruned_text(asked: PruneRequest, achieved: PruneResult, shortfalls: tuple[Shortfall, ...]) -> str:
    """What was asked, what remains, and where it falls short and why."""
    first, *rest = pruned_facts(asked, achieved, shortfalls)
    lines = [f"{label}: {text}" if label == "short" else f"{label:<9} {text}" for label, text in rest]
    return "\n".join([": ".join(first), *lines])


def pruned_facts(
    asked: PruneRequest, achieved: PruneResult, shortfalls: tuple[Shortfall, ...]
) -> list[tuple[str, str]]:
    """The same, each with its label."""

    def shown(before: str, after: str, share: float) -> str:
        return f"{before:>8} → {after:>8}  {units.percent(share):>6} remain"

    counts = (
        ("channels", achieved.channels_before, achieved.channels, achieved.channels_ratio),
        ("params", achieved.params_before, achieved.params, achieved.params_ratio),
        ("MACs", achieved.macs_before, achieved.macs, achieved.macs_ratio),
    )
    facts = [("asked", request_text(asked))]
    facts += [(what, shown(units.count(old), units.count(new), share)) for what, old, new, share in counts]
    if achieved.latency_s is not None and achieved.latency_before_s is not None:
        before_s, after_s = units.duration(achieved.latency_before_s), units.duration(achieved.latency_s)
        facts.append(("latency", shown(before_s, after_s, achieved.latency_ratio or 0.0)))
    return [*facts, *(("short", line) for line in shortfall_lines(shortfalls))]


def request_text(asked: PruneRequest) -> str:
    """The request as people say it."""
    parts = []
    if asked.ratio is not None:
        parts.append(f"{units.percent(asked.ratio)} of every layer removed")
    if asked.macs_target is not None:
        parts.append(f"{units.percent(asked.macs_target)} of the MACs to remain")
    if asked.latency_target is not None:
        parts.append(f"{units.percent(asked.latency_target)} of the latency to remain")
    parts += [f"{units.percent(share)} of {printable(path)} removed" for path, share in asked.layers]
    rounding = f", channels rounded to {asked.round_to}" if asked.round_to > 1 else ""
    if asked.is_round_auto:
        rounding = ", channels rounded to fast widths"
    return f"{', '.join(parts)}, by {asked.importance}{rounding}"


def shortfall_lines(shortfalls: tuple[Shortfall, ...]) -> list[str]:
    """One line per layer that lost less than asked; layers with the same reason share one."""
    by_reason: dict[str, list[Shortfall]] = {}
    for fall in shortfalls:
        by_reason.setdefault(fall.reason, []).append(fall)
    lines = []
    for reason, falls in by_reason.items():
        names = ", ".join(printable(fall.path) for fall in falls[:3])
        more = f" and {len(falls) - 3} more" if len(falls) > 3 else ""
        share = units.percent(sum(fall.achieved for fall in falls) / len(falls))
        lines.append(f"{names}{more}: {share} removed of {units.percent(falls[0].asked)}: {printable(reason)}")
    hidden = len(lines) - SHOWN
    return lines if hidden <= 0 else [*lines[:SHOWN], f"and {hidden} more reasons"]


def pruned_document(pruned: Pruned) -> dict[str, Any]:
    """Everything but the model and its recipe, as JSON holds it."""
    achieved = pruned.achieved
    shares = {
        "macs_ratio": achieved.macs_ratio,
        "params_ratio": achieved.params_ratio,
        "channels_ratio": achieved.channels_ratio,
        "latency_ratio": achieved.latency_ratio,
    }
    return {
        "asked": to_plain(pruned.asked),
        "achieved": {**to_plain(achieved), **shares},
        "shortfalls": [to_plain(fall) for fall in pruned.shortfalls],
        "check": to_plain(pruned.check),
    }


def pruned_sheet(pruned: Pruned) -> Sheet:
    """The layers that lost most channels, asked and achieved; the totals, and where it falls short."""
    every = pruned.achieved.layers
    most = sorted(range(len(every)), key=lambda n: every[n].before - every[n].after, reverse=True)[:SHOWN]
    layers = [every[n] for n in sorted(most)]
    strips = (
        Strip("Layer", tuple(Cell(printable(each.path)) for each in layers), "left", floor=12),
        Strip("Kind", tuple(Cell(printable(each.kind)) for each in layers), "left", rank=1),
        Strip("Before", tuple(Cell(str(each.before)) for each in layers)),
        Strip("After", tuple(Cell(str(each.after)) for each in layers)),
        Strip("Asked", tuple(Cell(units.percent(each.asked)) for each in layers)),
        Strip("Removed", tuple(Cell(units.percent(each.achieved)) for each in layers)),
    )
    asked, *facts = pruned_facts(pruned.asked, pruned.achieved, pruned.shortfalls)
    if len(every) > SHOWN:
        rest = f"{len(every) - SHOWN} layers that lost fewer channels: --json, or .achieved.layers in Python"
        facts.insert(0, ("more", rest))
    return Sheet(": ".join(asked), (strips,) if layers else (), (*facts, ("proved", proof_text(pruned.check))))


def proof_text(check: PruneCheck) -> str:
    """What was run to prove the pruned model."""
    error = check.silenced_error
    silenced = "" if error is None else f"; equal to the original with those channels silenced, within {error:.1g}"
    return f"forward, backward ({check.gradients} gradients){silenced}"


def sensitivity_dataframe(found: Sensitivity) -> pd.DataFrame:
    """One row per layer and change, in the model's order."""
    import pandas as pd

    names = [field.name for field in fields(LayerSensitivity)]
    return pd.DataFrame([asdict(row) for row in found.rows], columns=names)


def sensitivity_sheet(found: Sensitivity) -> Sheet:
    """The table, what hurts most on top, and which layers to spare."""
    rows = found.worst_first()

    def points(row: LayerSensitivity) -> str:
        return f"{row.score_change * 100:+.2f}" if found.metric == "accuracy" else f"{row.score_change:+.4g}"

    strips = (
        Strip("Layer", tuple(Cell(printable(row.path)) for row in rows), "left", floor=12),
        Strip("Kind", tuple(Cell(row.kind) for row in rows), "left", rank=2),
        Strip("Change", tuple(Cell(change_of(row)) for row in rows), "left"),
        Strip(_unit(found.metric), tuple(Cell(points(row)) for row in rows)),
        Strip("Output error", tuple(Cell(f"{row.output_error:.2g}") for row in rows)),
        Strip("Other answers", tuple(Cell(_share(row.disagreement)) for row in rows), rank=1),
    )
    baseline = units.percent(found.baseline) if found.metric == "accuracy" else f"{found.baseline:.4g}"
    by_reason: dict[str, list[str]] = {}
    for path, reason in found.unchanged:
        by_reason.setdefault(reason, []).append(printable(path))
    return Sheet(
        f"{found.metric} of the whole model: {baseline} on {found.samples} samples; quantization is simulated",
        (strips,) if rows else (),
        (
            ("Spare", spare_sentence(found)),
            *(("Not changed", f"{', '.join(paths)}: {reason}") for reason, paths in by_reason.items()),
        ),
    )


def spare_sentence(found: Sensitivity) -> str:
    """Which layers to leave alone, and what they would cost."""
    parts = []
    for change, verb in (("prune", "pruned"), ("quantize", "quantized")):
        spared = found.spare(change)  # type: ignore[arg-type]
        if spared:
            parts.append(f"when {verb}: {', '.join(map(printable, spared))}")
    return f"spare these, they lose most {'; '.join(parts)}" if parts else "no layer loses anything on these samples"


def _unit(metric: str) -> str:
    return "Points" if metric == "accuracy" else printable(metric)


def _share(value: float | None) -> str:
    return units.DASH if value is None else units.percent(value)
