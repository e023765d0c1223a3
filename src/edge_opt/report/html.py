"""HTML without scripts, and what a notebook shows."""

from __future__ import annotations

from edge_opt import units
from edge_opt.records import ModelComparison, ModelProfile, SweepResult, Trial
from edge_opt.records.sweeps import SHARES
from edge_opt.report.comparison import cell, comparison_notes, fragment, layers_table, notes, table, totals_table
from edge_opt.report.summary import summary_lines
from edge_opt.report.table import heading, leaf_rows
from edge_opt.text import html

_SHOWN = 10


def profile_html(profile: ModelProfile) -> str:
    """The summary of a profile over its largest layers."""
    rows = sorted(leaf_rows(profile), key=lambda row: row.cost.macs if row.cost else 0, reverse=True)
    has_times = any(row.measured_s is not None for row in rows)
    body = [
        [
            cell(row.path or profile.name, "name"),
            cell(row.type, "name"),
            cell(units.count(row.params)),
            cell(("≥ " if row.unpriced else "") + units.count(row.cost.macs) if row.cost else "?"),
            cell(units.size(row.cost.bytes_moved) if row.cost else "?"),
            cell(units.size(row.peak_live_bytes)),
            *([cell(units.DASH if row.measured_s is None else units.duration(row.measured_s))] if has_times else []),
        ]
        for row in rows[:_SHOWN]
    ]
    shown = ["type", "params", "macs", "bytes_moved", "peak_live_bytes", *(["measured_s"] if has_times else [])]
    headers = ["Layer", *map(heading, shown)]
    facts = [[cell(label, "name"), cell(sentence, "name")] for label, sentence in summary_lines(profile)]
    more = [f"<p>{len(rows) - _SHOWN} more layers; to_dataframe() has all</p>"] if len(rows) > _SHOWN else []
    return fragment(
        f"<strong>{html(profile.name)}</strong>", table(["", ""], facts), table(headers, body, names=2), *more
    )


def sweep_html(result: SweepResult) -> str:
    """The candidates of a sweep: those on a frontier first, then accepted, rejected and failed ones."""
    on_frontier = {key for _, keys in result.frontiers for key in keys}
    fate = {trial.candidate.key: _fate(trial) for trial in result.trials}
    order = {"accepted": 0, "rejected": 1, "failed": 2}
    trials = sorted(
        result.trials,
        key=lambda trial: (
            order[fate[trial.candidate.key]],
            trial.candidate.key not in on_frontier,
            -(trial.metrics.merit if trial.metrics else 0.0),
        ),
    )
    rows = [_trial_row(trial, fate.get(trial.candidate.key, "baseline")) for trial in (result.baseline, *trials)]
    counts = f"{len(result.accepted)} accepted, {len(result.rejected)} rejected, {len(result.failed)} failed"
    headers = [
        "Candidate",
        "",
        "Accuracy" if result.metric == "accuracy" else html(result.metric),
        "Latency",
        "Size",
        "Peak",
        "Energy",
        "Why",
    ]
    return fragment(
        f"<strong>{html(result.name)}</strong><p>{counts}</p>",
        f"<p>{html(result.recommendation)}</p>" if result.recommendation else "",
        table(headers, rows),
    )


def _fate(trial: Trial) -> str:
    return "failed" if trial.status == "failed" else "rejected" if trial.violations else "accepted"


def _trial_row(trial: Trial, fate: str) -> list[str]:
    metrics = trial.metrics
    why = trial.reason or ", ".join(violation.constraint for violation in trial.violations)
    figures = (
        [units.DASH] * 5
        if metrics is None
        else [
            units.percent(metrics.accuracy) if metrics.metric in SHARES else f"{metrics.accuracy:.4g}",
            units.per_call(metrics.ranked_latency_s, metrics.ranked_batch),
            units.size(metrics.size_bytes),
            units.size(metrics.peak_memory_bytes),
            units.DASH if metrics.energy_j is None else f"{units.energy(metrics.energy_j)} ({metrics.energy_source})",
        ]
    )
    return [cell(trial.candidate.label, "name"), cell(fate), *map(cell, figures), cell(why, "name")]


def comparison_html(comparison: ModelComparison) -> str:
    """The totals of a comparison, and the layers that differ most."""
    title = f"<strong>{html(' → '.join(comparison.names))}</strong>"
    if comparison.is_empty:
        return fragment(title, "<p>no differences</p>")
    layers = [layers_table(comparison, top=_SHOWN)] if comparison.layers else []
    return fragment(title, totals_table(comparison), notes(comparison_notes(comparison)), *layers)
