"""A sweep for people: candidates as tables, those worth having first, and how much faster the winner is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from edge_opt import units
from edge_opt.records.sweeps import SHARES, Speedup, SpeedupRatio, SweepResult, Trial, TrialMetrics
from edge_opt.report.sheets import Fact, Sheet
from edge_opt.report.terminal import Cell, Strip
from edge_opt.text import html, printable

_SHOWN = 12
_ORDER = {"accepted": 0, "rejected": 1, "failed": 2}
_COLORS = {"accepted": "#2a9d62", "rejected": "#c98a1b", "failed": "#888", "baseline": "currentColor"}


def fate_of(trial: Trial) -> str:
    """What became of a candidate, in a word."""
    return "failed" if trial.status == "failed" else "rejected" if trial.violations else "accepted"


def fates(result: SweepResult) -> str:
    """How many candidates were accepted, rejected and failed."""
    return f"{len(result.accepted)} accepted, {len(result.rejected)} rejected, {len(result.failed)} failed"


def ranked(result: SweepResult) -> list[tuple[Trial, str]]:
    """The baseline, then those on a frontier, then accepted, rejected and failed ones, each with its fate."""
    on_frontier = {key for _, keys in result.frontiers for key in keys}

    def place(trial: Trial) -> tuple[int, bool, float]:
        score = trial.metrics.comparable_score if trial.metrics else 0.0
        return _ORDER[fate_of(trial)], trial.candidate.key not in on_frontier, -score

    # A baseline of the space is one of its trials, too.
    others = (trial for trial in result.trials if trial.candidate.key != result.baseline.candidate.key)
    return [(result.baseline, "baseline"), *((trial, fate_of(trial)) for trial in sorted(others, key=place))]


def score_text(trial: Trial) -> str:
    """Its score, a share of one as a percentage."""
    metrics = trial.metrics
    if metrics is None:
        return units.DASH
    return units.percent(metrics.accuracy) if metrics.metric in SHARES else f"{metrics.accuracy:.4g}"


def why_not(trial: Trial) -> str:
    """Why a candidate failed, or which constraints it breaks."""
    return trial.reason or ", ".join(violation.constraint for violation in trial.violations)


def trial_strips(rows: Sequence[tuple[Trial, str]], metric: str) -> tuple[Strip, ...]:
    """One row per candidate: score, time, size, and why it is not accepted."""

    def figures(header: str, texts: list[str], rank: int = 0) -> Strip:
        return Strip(header, tuple(map(Cell, texts)), rank=rank)

    known = [trial.metrics for trial, _ in rows]
    return (
        Strip("Candidate", tuple(Cell(printable(trial.candidate.label)) for trial, _ in rows), "left", floor=16),
        figures("", [fate for _, fate in rows]),
        figures("Accuracy" if metric == "accuracy" else printable(metric), [score_text(trial) for trial, _ in rows]),
        figures("Latency", [units.DASH if m is None else units.duration(m.ranked_latency_s) for m in known]),
        figures("Size", [units.DASH if m is None else units.size(m.size_bytes) for m in known], 1),
        figures("Peak", [units.DASH if m is None else units.size(m.peak_memory_bytes) for m in known], 2),
        Strip("Why", tuple(Cell(printable(why_not(trial))) for trial, _ in rows), "left", floor=10, rank=3),
    )


def sweep_sheet(result: SweepResult) -> Sheet:
    """The candidates of a sweep, the winner and why."""
    rows = ranked(result)
    facts: list[Fact] = [("More", f"{len(rows) - _SHOWN} candidates")] if len(rows) > _SHOWN else []
    if result.best is not None:
        facts.append(("Best", result.trial(result.best).candidate.label))
    facts.append(("Why", result.recommendation))
    return Sheet(
        f"{result.name}: {len(result.trials)} candidates, {fates(result)}",
        (trial_strips(rows[:_SHOWN], result.metric),),
        tuple(facts),
        scatter_svg(result),
    )


def trial_sheet(trial: Trial) -> Sheet:
    """One candidate."""
    metrics = trial.metrics
    facts: list[Fact] = [("Why", why_not(trial))] if why_not(trial) else []
    if metrics is not None:
        facts = [
            (metrics.metric, score_text(trial)),
            ("Latency", per_call(metrics)),
            ("Size", units.size(metrics.size_bytes)),
            ("Peak", units.size(metrics.peak_memory_bytes)),
            ("Work", f"{units.count(metrics.macs)} MACs, {units.percent_of(metrics.macs_ratio)} of the baseline's"),
            *facts,
        ]
    return Sheet(f"{trial.candidate.label}: {fate_of(trial)}", facts=tuple(facts))


_WIDTH, _HEIGHT, _EDGE = 600, 260, 46


def scatter_svg(result: SweepResult) -> str:
    """Score over latency as a picture: a point per candidate, the frontier as a line; "" with fewer than two points."""
    points = [(trial, fate) for trial, fate in ranked(result) if trial.metrics is not None]
    if len(points) < 2:
        return ""
    latencies = [_latency(trial) for trial, _ in points]
    scores = [trial.metrics.accuracy for trial, _ in points if trial.metrics is not None]
    # Factors are what latencies differ by; within a factor of 5 a plain axis is easier to read.
    scale = math.log if max(latencies) > 5 * min(latencies) else float
    left, right = scale(min(latencies)), scale(max(latencies))
    bottom, top = min(scores), max(scores)

    def at(trial: Trial) -> tuple[float, float]:
        assert trial.metrics is not None
        across = (scale(_latency(trial)) - left) / (right - left or 1.0)
        up = (trial.metrics.accuracy - bottom) / (top - bottom or 1.0)
        return _EDGE + across * (_WIDTH - 2 * _EDGE), _HEIGHT - _EDGE - up * (_HEIGHT - 2 * _EDGE)

    keys = {key for name, keys in result.frontiers[:1] for key in keys}
    line = sorted(at(trial) for trial, _ in points if trial.candidate.key in keys)
    drawn = "".join(_dot(*at(trial), trial, fate, trial.candidate.key == result.best) for trial, fate in points)
    kind = ", logarithmic" if scale is math.log else ""
    ends = (units.duration(min(latencies)), units.duration(max(latencies)))
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" style="max-width:100%" role="img" '
        f'aria-label="{html(result.metric)} over latency" font-size="11" fill="currentColor">'
        f'<polyline points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in line)}" fill="none" stroke="#2a9d62"/>{drawn}'
        f'<path d="M{_EDGE} {_EDGE / 2}V{_HEIGHT - _EDGE / 2}H{_WIDTH - _EDGE / 2}" fill="none" stroke="currentColor" '
        f'opacity=".4"/><text x="{_EDGE}" y="{_HEIGHT - 6}">{ends[0]}</text>'
        f'<text x="{_WIDTH / 2}" y="{_HEIGHT - 6}" text-anchor="middle">latency per call{kind}</text>'
        f'<text x="{_WIDTH - _EDGE}" y="{_HEIGHT - 6}" text-anchor="end">{ends[1]}</text>'
        f'<text x="4" y="{_EDGE}">{top:.4g}</text><text x="4" y="{_HEIGHT - _EDGE}">{bottom:.4g}</text>'
        f'<text x="4" y="14">{html(result.metric)}</text></svg>'
    )


def _latency(trial: Trial) -> float:
    return trial.metrics.ranked_latency_s if trial.metrics else 0.0


def _dot(x: float, y: float, trial: Trial, fate: str, is_best: bool) -> str:
    title = f"{trial.candidate.label}: {fate}, {score_text(trial)}, {units.duration(_latency(trial))}"
    ring = ' stroke="currentColor" stroke-width="2"' if is_best else ""
    return (
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{7 if is_best else 5}" fill="{_COLORS[fate]}"{ring}>'
        f"<title>{html(title)}</title></circle>"
    )


def times(value: float) -> str:
    """A factor as people read it.

    >>> times(5.13), times(1.04), times(0.5), times(12.34)
    ('5.1', '1.04', '0.50', '12.3')
    """
    return f"{value:.1f}" if value >= 2 else f"{value:.2f}"


def factor_text(factor: SpeedupRatio) -> str:
    """A factor with its interval.

    >>> factor_text(SpeedupRatio(5.13, 4.9, 5.31))
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

    def data(factor: SpeedupRatio | None) -> dict[str, float] | None:
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
