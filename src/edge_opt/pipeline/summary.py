"""The summary of a run: what came out, for people and for programs that read JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from edge_opt import units
from edge_opt.budget import TRIAL_METRICS, parse_budget, violations
from edge_opt.pipeline.deployment import simulate_deployment
from edge_opt.records import SweepResult, Trial
from edge_opt.search.recommending import recommend


def trial_summary(trial: Trial | None) -> dict[str, Any] | None:
    """One candidate with its figures; None where there is no candidate."""
    if trial is None:
        return None
    return {
        "key": trial.candidate.key,
        "label": trial.candidate.label,
        "accepted": trial.is_accepted,
        "violations": [asdict(item) | {"excess": item.excess} for item in trial.violations],
        "metrics": None if trial.metrics is None else asdict(trial.metrics),
        "reason": trial.reason,
    }


def memory_budgets(result: SweepResult, budgets_mb: Sequence[float]) -> list[dict[str, Any]]:
    """What each memory budget alone would accept, and what would then be recommended."""
    found = []
    for budget_mb in budgets_mb:
        budget = parse_budget(f"peak_memory_mb <= {budget_mb:g}", TRIAL_METRICS)
        fitting = [
            trial for trial in result.trials if trial.metrics is not None and not violations(trial.metrics, [budget])
        ]
        kept = [trial for trial in fitting if trial.is_accepted]
        best, why = recommend(kept) if kept else (None, "nothing fits that also keeps the constraints")
        found.append(
            {
                "memory_budget_mb": budget_mb,
                "fitting": [trial.candidate.label for trial in fitting],
                "accepted": [trial.candidate.label for trial in kept],
                "best": best,
                "recommendation": why,
            }
        )
    return found


def deployment_summary(
    result: SweepResult, hardware: Mapping[str, Any], cpu_frequency_scale: float, stream_interval_ms: float
) -> dict[str, Any]:
    """Batches and a stream with the baseline, merged with the hardware summary; the best candidate beside it."""

    def simulated(trial: Trial | None) -> dict[str, Any] | None:
        metrics = None if trial is None else trial.metrics
        if metrics is None or metrics.single_latency_s is None:
            return None
        return asdict(
            simulate_deployment(
                metrics.latency_s,
                metrics.single_latency_s,
                batch_size=metrics.batch_size,
                cpu_frequency_scale=cpu_frequency_scale,
                stream_interval_s=stream_interval_ms / 1e3,
            )
        )

    best = None if result.best is None else result.trial(result.best)
    return {**(simulated(result.baseline) or {}), **hardware, "best": simulated(best)}


def conclusion(result: SweepResult) -> list[str]:
    """The end of a run in a few lines: the baseline, the winner and why, and how the others fared."""
    lines = [f"baseline  {_figures(result.baseline)}"]
    if result.best is not None:
        best = result.trial(result.best)
        lines.append(f"best      {best.candidate.label}: {_figures(best, result.baseline)}")
    lines.append(f"why       {result.recommendation}")
    counts = f"{len(result.accepted)} accepted, {len(result.rejected)} rejected, {len(result.failed)} failed"
    return [*lines, f"tried     {len(result.trials)} candidates: {counts}"]


def _figures(trial: Trial, other: Trial | None = None) -> str:
    metrics = trial.metrics
    if metrics is None:
        return f"{trial.failure}: {trial.reason}"
    test = "" if metrics.test_accuracy is None else f", {metrics.test_accuracy:.4f} on test"
    text = (
        f"accuracy {metrics.accuracy:.4f} on validation{test}; {units.duration(metrics.latency_s)} per batch of "
        f"{metrics.batch_size}; {units.size(metrics.size_bytes)} on disk"
    )
    if other is None or other.metrics is None:
        return text
    faster = other.metrics.latency_s / metrics.latency_s
    smaller = other.metrics.size_bytes / metrics.size_bytes
    return f"{text} ({faster:.1f} times as fast, {smaller:.1f} times as small)"
