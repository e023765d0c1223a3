"""The summary under a table: totals with their units, the peak, what is not covered."""

from __future__ import annotations

from collections import Counter

from edge_opt import units
from edge_opt.records import ModelProfile
from edge_opt.report.measured import measured_lines
from edge_opt.report.predicted import predicted_lines

_NAMED_AT_MOST = 5


def summary_lines(profile: ModelProfile) -> list[tuple[str, str]]:
    """Labels with one sentence each. With unpriced operators every total says that it is a lower bound."""
    totals = profile.totals
    bound = "≥ " if totals.is_lower_bound else ""
    read, written = units.size(totals.bytes_read), units.size(totals.bytes_written)
    is_known = totals.intensity is not None and not totals.is_lower_bound
    intensity = f"; {units.ratio(totals.intensity)} FLOPs per byte" if is_known else ""
    lines = [
        (
            "Compute",
            f"{bound}{units.count(totals.macs)} MACs, {bound}{units.count(totals.flops)} FLOPs "
            f"({bound}{units.count(totals.other_ops)} of them outside MACs)",
        ),
        ("Parameters", _parameters(profile)),
        ("Traffic", f"{bound}{read} read, {bound}{written} written{intensity}"),
        ("Peak memory", _peak(profile)),
        ("Coverage", _coverage(profile)),
    ]
    if profile.measurement is not None:
        lines += measured_lines(profile.measurement)
    lines += predicted_lines(profile.predictions)
    if profile.unpriced:
        lines.append(("Unpriced", _unpriced(profile)))
    if profile.convention != "edge_opt":
        lines.append(("Convention", f"counted as {profile.convention} counts"))
    if profile.mode == "train":
        lines.append(("Mode", "train: dropout and batch statistics as in training; the backward pass is not included"))
    return lines + [("Note", note) for note in profile.trace.notes]


def _parameters(profile: ModelProfile) -> str:
    totals = profile.totals
    buffers = f"; buffers {units.size(totals.buffer_bytes)}" if totals.buffer_bytes else ""
    if not totals.params:
        return f"none{buffers}"
    trainable = "all" if totals.trainable_params == totals.params else units.count(totals.trainable_params)
    return f"{units.count(totals.params)} ({units.size(totals.param_bytes)}), {trainable} trainable{buffers}"


def _peak(profile: ModelProfile) -> str:
    peak = profile.peak
    if peak.op_index is None:
        return "no operator ran"
    where = peak.module or "the model's own forward"
    return (
        f"{units.size(peak.live_bytes)} of activations, at {where} (planner bound {units.size(peak.planner_bytes)}); "
        f"inputs {units.size(profile.totals.input_bytes)}"
    )


def _coverage(profile: ModelProfile) -> str:
    total, missing = len(profile.trace.ops), sum(item.count for item in profile.unpriced)
    if not missing:
        return f"100% of {total} operators"
    return f"{units.percent(profile.coverage)}: {total - missing} of {total} operators"


def _unpriced(profile: ModelProfile) -> str:
    counts: Counter[str] = Counter()
    for item in profile.unpriced:
        counts[item.op] += item.count
    named = [op if count == 1 else f"{op} {units.TIMES}{count}" for op, count in counts.most_common(_NAMED_AT_MOST)]
    if len(counts) > len(named):
        named.append(f"and {len(counts) - len(named)} more")
    total = sum(counts.values())
    return f"{total} operator{'s' * (total != 1)} unpriced: {', '.join(named)} — totals are lower bounds"
