"""How much faster the winner is, in words and as data: one form for console, summary, table, page and card."""

from __future__ import annotations

from typing import Any

from edge_opt import units
from edge_opt.records import Factor, Speedup, SweepResult, TrialMetrics


def times(value: float) -> str:
    """A factor as people read it.

    >>> times(5.13), times(1.04), times(0.5), times(12.34)
    ('5.1', '1.04', '0.50', '12.3')
    """
    return f"{value:.1f}" if value >= 2 else f"{value:.2f}"


def factor_text(factor: Factor) -> str:
    """A factor with its interval.

    >>> factor_text(Factor(5.13, 4.9, 5.31))
    '5.1 × (4.9 to 5.3)'
    """
    return f"{times(factor.ratio)} × ({times(factor.low)} to {times(factor.high)})"


def headline(found: Speedup) -> str:
    """The whole, and what the runtime alone would give: `5.1 × (4.9 to 5.3) as fast; the runtime alone gives 3.2 ×`."""
    alone = "" if found.runtime is None else f"; the runtime alone gives {times(found.runtime.ratio)} ×"
    return f"{factor_text(found.whole)} as fast{alone}"


def bought(found: Speedup) -> str | None:
    """What runtime, precision and pruning bought, one after the other; None where a step could not be timed."""
    parts = (("runtime", found.runtime), ("precision", found.precision), ("pruning", found.pruning))
    if any(part is None for _, part in parts):
        return None
    return ", ".join(f"{name} {factor_text(part)}" for name, part in parts if part is not None)


def conditions(found: Speedup) -> str:
    """How it was timed, and whether that was disturbed."""
    clock = "" if found.clock == "wall" else ", in CPU time"
    if found.is_disturbed:
        mark = "; DISTURBED by other programs or noise, also when tried again"
        return f"timed in turns, {calls(found.batch_size)}{clock}{mark}"
    return f"timed in turns at quiet moments, {calls(found.batch_size)}{clock}"


def calls(batch_size: int) -> str:
    """A call in words.

    >>> calls(1), calls(8)
    ('one sample a call', '8 samples a call')
    """
    return "one sample a call" if batch_size == 1 else f"{batch_size} samples a call"


def per_call(metrics: TrialMetrics) -> str:
    """The time by which candidates are ranked: `0.31 ms per sample`."""
    return units.per_call(metrics.ranked_latency_s, metrics.ranked_batch)


def speedup_data(found: Speedup | None) -> dict[str, Any] | None:
    """The speedup for `summary.json`: `ratio`, `low`, `high`, `runtime_alone`, and each part; None where not known."""
    if found is None:
        return None

    def data(factor: Factor | None) -> dict[str, float] | None:
        return None if factor is None else {"ratio": factor.ratio, "low": factor.low, "high": factor.high}

    return {
        "ratio": found.whole.ratio,
        "low": found.whole.low,
        "high": found.whole.high,
        "runtime_alone": None if found.runtime is None else found.runtime.ratio,
        "runtime": data(found.runtime),
        "precision": data(found.precision),
        "pruning": data(found.pruning),
        "batch_size": found.batch_size,
        "clock": found.clock,
        "disturbed": found.is_disturbed,
        "text": headline(found),
    }


def row_speedups(result: SweepResult) -> dict[str, Factor]:
    """How many times as fast as the baseline each finalist is, by the candidate's key."""
    return {} if result.finals is None else {item.candidate.key: item.speedup for item in result.finals.finalists}
