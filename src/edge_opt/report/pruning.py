"""A pruning result, in words and as JSON."""

from __future__ import annotations

from typing import Any

from edge_opt import units
from edge_opt.records import Pruned, PruneRequest, PruneResult, Shortfall
from edge_opt.report.codec import to_plain
from edge_opt.report.text import printable

SHOWN = 12


def pruned_text(asked: PruneRequest, achieved: PruneResult, shortfalls: tuple[Shortfall, ...]) -> str:
    """What was asked, what remains, and where it falls short and why."""
    lines = [f"asked: {request_text(asked)}"]
    for what, before, after, share in (
        ("channels", achieved.channels_before, achieved.channels, achieved.channels_ratio),
        ("params", achieved.params_before, achieved.params, achieved.params_ratio),
        ("MACs", achieved.macs_before, achieved.macs, achieved.macs_ratio),
    ):
        lines.append(f"{what:<9} {units.count(before):>8} → {units.count(after):>8}  {units.percent(share):>6} remain")
    if achieved.latency_s is not None and achieved.latency_before_s is not None:
        before_s, after_s = units.duration(achieved.latency_before_s), units.duration(achieved.latency_s)
        share = achieved.latency_ratio or 0.0
        lines.append(f"{'latency':<9} {before_s:>8} → {after_s:>8}  {units.percent(share):>6} remain")
    lines += shortfall_lines(shortfalls)
    return "\n".join(lines)


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
        lines.append(f"short: {names}{more}: {share} removed of {units.percent(falls[0].asked)}: {printable(reason)}")
    hidden = len(lines) - SHOWN
    return lines if hidden <= 0 else [*lines[:SHOWN], f"... and {hidden} more reasons"]


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
