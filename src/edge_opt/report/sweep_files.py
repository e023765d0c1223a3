"""Sweeps as JSON, rows and CSV, and back; as sheets; and how much faster the winner is, in words."""

from __future__ import annotations

import csv
import io
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge_opt import units
from edge_opt._support.json import dumps_rows, read_document, to_plain
from edge_opt.errors import UnreadableSweep
from edge_opt.records.sweeps import SHARES, TRIAL_COLUMNS, Speedup, SpeedupRatio, SweepResult, Trial, TrialMetrics
from edge_opt.report.save import read_record
from edge_opt.report.sheets import Note, Sheet, Table, column, sheet, text_column
from edge_opt.text import html, spreadsheet

if TYPE_CHECKING:
    import pandas as pd


FORMAT = "edge_opt.sweep"
SCHEMA_VERSION = 1
_OBJECTIVES = ("latency", "energy", "memory", "size", "macs", "params", "throughput")


def sweep_document(result: SweepResult) -> str:
    """Return the sweep as JSON that `read_sweep` reads back exactly: one line per candidate.

    >>> import json
    >>> from edge_opt.records.sweeps import Candidate, SweepResult, Trial
    >>> lost = Trial(Candidate(0.0, "fp32", "torch"), "failed", None, "raised", "no data", (), 0.1)
    >>> json.loads(sweep_document(SweepResult("net", lost, (), (), (), None, "")))["format"]
    'edge_opt.sweep'
    """
    plain = {"format": FORMAT, "schema_version": SCHEMA_VERSION, **to_plain(result)}
    return dumps_rows(plain) + "\n"


def read_sweep(text: str, source: str = "the text") -> SweepResult:
    """Return the sweep that `sweep_document` wrote; `source` is what errors call it, such as a file's name."""
    again = "run the sweep again"
    return read_record(SweepResult, text, source, FORMAT, SCHEMA_VERSION, again, _fault_of, UnreadableSweep)


def _fault_of(result: SweepResult) -> str | None:
    """Return what in a sweep does not fit together; None where all does."""
    keys = [trial.candidate.key for trial in result.trials]
    known = set(keys)
    if len(known) < len(keys):
        return "a candidate has two rows"
    if result.best is not None and result.best not in known:
        return f"the best is {result.best!r}, which is not a row"
    for name, members in result.frontiers:
        if not known.issuperset(members):
            return f"the frontier {name!r} names candidates that are not rows"
    for trial in (result.baseline, *result.trials):
        if (trial.status == "done") != (trial.metrics is not None) or (trial.status == "failed") != bool(trial.failure):
            return f"{trial.candidate.label} is {trial.status!r} and has {'no ' * (trial.metrics is None)}figures"
        if trial.metrics is not None and not (
            trial.metrics.latency_low_s <= trial.metrics.latency_s <= trial.metrics.latency_high_s
        ):
            return f"the latency of {trial.candidate.label} is outside its own interval"
    return None


def load_sweep(path: str | os.PathLike[str]) -> SweepResult:
    """Return the sweep of a run: its folder, or the `sweep.json` in it."""
    file = Path(path) / "sweep.json" if Path(path).is_dir() else Path(path)
    text = read_document(file, UnreadableSweep, "`edge-opt run` and `edge-opt sweep` write it", str)
    return read_sweep(text, repr(str(file)))


def frontier_keys(result: SweepResult, objective: str) -> frozenset[str]:
    """Return the keys on the frontier of accuracy and one objective, such as "latency"; empty where none is."""
    others = [name for name in _OBJECTIVES if name != objective]
    for name, keys in result.frontiers:
        if objective in name and not any(other in name for other in others):
            return frozenset(keys)
    return frozenset()


@dataclass(frozen=True, slots=True)
class WeightBudgets:
    """Budgets of the weights in MiB: those that rows are held against, and the one that decides; None: none does."""

    budgets_mb: tuple[float, ...] = ()
    active_mb: float | None = None

    def violations(self, weights_mb: float | None) -> dict[str, bool | None]:
        """Return which budgets are broken, by column; None where the weights are not known.

        >>> WeightBudgets((1.0, 2.0)).violations(1.5)
        {'violates_1.0mb': True, 'violates_2.0mb': False}
        """
        return {
            f"violates_{float(budget)}mb": None if weights_mb is None else weights_mb > budget
            for budget in self.budgets_mb
        }


NO_BUDGETS = WeightBudgets()


def sweep_rows(result: SweepResult, budgets: WeightBudgets = NO_BUDGETS) -> list[dict[str, Any]]:
    """Return one row per candidate, in order; None where a figure is not known, as after a failure.

    `memory_mb` is the weights, as in the published files, and `peak_memory_mb` everything alive at once.
    `energy_proxy_j` holds power times latency only; the value of a meter or a model is only in `energy_j`, and
    `energy_source` says which it is.
    """
    return [_row(result, trial, budgets) for trial in result.trials]


def _row(result: SweepResult, trial: Trial, budgets: WeightBudgets) -> dict[str, Any]:
    candidate, metrics = trial.candidate, trial.metrics
    finalists = () if result.finals is None else result.finals.finalists
    faster = next((item.speedup for item in finalists if item.candidate.key == candidate.key), None)
    return {
        "key": candidate.key,
        "pruning": candidate.pruning,
        "pruning_level": candidate.pruning,
        "layer_pruning": "; ".join(f"{path}={share:g}" for path, share in candidate.layer_pruning),
        "precision": candidate.precision,
        "runtime": candidate.runtime,
        **{column.name: None if metrics is None else column.value(metrics) for column in TRIAL_COLUMNS},
        "deploy_timing": None if metrics is None else "alone" if faster is None else "in turns",
        "speedup": None if faster is None else faster.ratio,
        "speedup_ci95_low": None if faster is None else faster.low,
        "speedup_ci95_high": None if faster is None else faster.high,
        "disturbed": metrics is not None and metrics.is_disturbed,
        "disturbed_times": "" if metrics is None else "; ".join(metrics.disturbed_times),
        **budgets.violations(None if metrics is None else units.megabytes(metrics.model_bytes)),
        "active_budget_mb": budgets.active_mb,
        "accepted": trial.is_accepted,
        "violations": "; ".join(violation.constraint for violation in trial.violations),
        "on_latency_frontier": candidate.key in frontier_keys(result, "latency"),
        "on_energy_frontier": candidate.key in frontier_keys(result, "energy"),
        "is_best": candidate.key == result.best,
        "status": trial.status,
        "failure": trial.failure,
        "reason": trial.reason,
        "error": trial.reason if trial.status == "failed" else "",
        "seconds": trial.seconds,
        "attempts": trial.attempts,
    }


def sweep_dataframe(result: SweepResult, budgets: WeightBudgets = NO_BUDGETS) -> pd.DataFrame:
    """Return the rows as a DataFrame; it has its columns also when nothing was tried."""
    import pandas as pd

    names = list(_row(result, result.baseline, budgets))
    frame = pd.DataFrame(sweep_rows(result, budgets), columns=names)
    # A column without a known value would have the type object, which has no mean.
    numbers = {
        column.name: "Int64" if column.kind in ("count", "number") else "float64"
        for column in TRIAL_COLUMNS
        if column.kind != "text"
    }
    numbers |= dict.fromkeys(("speedup", "speedup_ci95_low", "speedup_ci95_high"), "float64")
    return frame.astype(numbers | {"accepted": bool})


def sweep_csv(result: SweepResult, budgets: WeightBudgets = NO_BUDGETS) -> str:
    """Return the rows as CSV: exact numbers, empty where one is not known, no text that a spreadsheet would run."""
    out = io.StringIO()
    lines = csv.writer(out, lineterminator="\n")
    # The columns of another metric replace those of accuracy, and state which direction is better.
    is_other = result.metric != "accuracy"
    behind = {"metric_direction": result.metric_direction} if is_other else {}
    names = [*_row(result, result.baseline, budgets), *behind]
    lines.writerow([name.replace("accuracy", result.metric) for name in names])
    for row in sweep_rows(result, budgets):
        cells = [*row.values(), *behind.values()]
        lines.writerow([spreadsheet(value) if isinstance(value, str) else value for value in cells])
    return out.getvalue()


_SHOWN = 12
_ORDER = {"accepted": 0, "rejected": 1, "failed": 2}
_COLORS = {"accepted": "#2a9d62", "rejected": "#c98a1b", "failed": "#888", "baseline": "currentColor"}


def status_of(trial: Trial) -> str:
    """Return the status of a candidate, in a word."""
    return "failed" if trial.status == "failed" else "rejected" if trial.violations else "accepted"


def ranked(result: SweepResult) -> list[tuple[Trial, str]]:
    """Return the baseline, then those on a frontier, then accepted, rejected and failed ones, each with its status."""
    on_frontier = {key for _, keys in result.frontiers for key in keys}

    def place(trial: Trial) -> tuple[int, bool, float]:
        score = trial.metrics.comparable_score if trial.metrics else 0.0
        return _ORDER[status_of(trial)], trial.candidate.key not in on_frontier, -score

    # A baseline that is part of the space is also one of its trials.
    others = (trial for trial in result.trials if trial.candidate.key != result.baseline.candidate.key)
    return [(result.baseline, "baseline"), *((trial, status_of(trial)) for trial in sorted(others, key=place))]


def score_text(trial: Trial) -> str:
    """Return its score, a share of one as a percentage."""
    metrics = trial.metrics
    if metrics is None:
        return units.DASH
    return units.percent(metrics.accuracy) if metrics.metric in SHARES else f"{metrics.accuracy:.4g}"


def why_not(trial: Trial) -> str:
    """Return why a candidate failed, or which constraints it breaks."""
    return trial.reason or ", ".join(violation.constraint for violation in trial.violations)


def _trial_table(rows: Sequence[tuple[Trial, str]], metric: str) -> Table:
    """Return one row per candidate: score, time, size, and why it is not accepted."""
    known = [trial.metrics for trial, _ in rows]
    return (
        text_column("Candidate", (trial.candidate.label for trial, _ in rows), min_width=16),
        column("", (status for _, status in rows)),
        column("Accuracy" if metric == "accuracy" else metric, (score_text(trial) for trial, _ in rows)),
        column("Latency", (units.DASH if it is None else units.duration(it.ranked_latency_s) for it in known)),
        column("Size", (units.DASH if it is None else units.size(it.size_bytes) for it in known), 1),
        column("Peak", (units.DASH if it is None else units.size(it.peak_memory_bytes) for it in known), 2),
        text_column("Why", (why_not(trial) for trial, _ in rows), 3, 10),
    )


def _brief_sweep(result: SweepResult) -> Sheet:
    shown = sweep_sheet(result)
    rows = ranked(result)
    more = [("More", f"{len(rows) - _SHOWN} candidates")] if len(rows) > _SHOWN else []
    return replace(shown, tables=(_trial_table(rows[:_SHOWN], result.metric),), notes=(*more, *shown.notes))


@sheet(SweepResult, brief=_brief_sweep)
def sweep_sheet(result: SweepResult) -> Sheet:
    """Return the candidates of a sweep with their chart, the winner and why."""
    best = [] if result.best is None else [("Best", result.trial(result.best).candidate.label)]
    return Sheet(
        f"{result.name}: {len(result.trials)} candidates, {len(result.accepted)} accepted, "
        f"{len(result.rejected)} rejected, {len(result.failed)} failed",
        (_trial_table(ranked(result), result.metric),),
        (*best, ("Why", result.recommendation)),
        scatter_svg(result),
    )


@sheet(Trial)
def trial_sheet(trial: Trial) -> Sheet:
    """Return one candidate."""
    metrics = trial.metrics
    notes: list[Note] = [("Why", why_not(trial))] if why_not(trial) else []
    if metrics is not None:
        notes = [
            (metrics.metric, score_text(trial)),
            ("Latency", per_call(metrics)),
            ("Size", units.size(metrics.size_bytes)),
            ("Peak", units.size(metrics.peak_memory_bytes)),
            ("Work", f"{units.count(metrics.macs)} MACs, {units.percent_of(metrics.macs_ratio)} of the baseline's"),
            *notes,
        ]
    return Sheet(f"{trial.candidate.label}: {status_of(trial)}", notes=tuple(notes))


_WIDTH, _HEIGHT, _EDGE = 600, 260, 46


def scatter_svg(result: SweepResult) -> str:
    """Return score over latency as a picture, the frontier as a line; "" with fewer than two points."""
    points = [(trial, status) for trial, status in ranked(result) if trial.metrics is not None]
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
    drawn = "".join(_dot(*at(trial), trial, status, trial.candidate.key == result.best) for trial, status in points)
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


def _dot(x: float, y: float, trial: Trial, status: str, is_best: bool) -> str:
    title = f"{trial.candidate.label}: {status}, {score_text(trial)}, {units.duration(_latency(trial))}"
    ring = ' stroke="currentColor" stroke-width="2"' if is_best else ""
    return (
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{7 if is_best else 5}" fill="{_COLORS[status]}"{ring}>'
        f"<title>{html(title)}</title></circle>"
    )


def times(value: float) -> str:
    """Return a factor as people read it.

    >>> times(5.13), times(1.04), times(0.5), times(12.34)
    ('5.1', '1.04', '0.50', '12.3')
    """
    return f"{value:.1f}" if value >= 2 else f"{value:.2f}"


def factor_text(factor: SpeedupRatio) -> str:
    """Return a factor with its interval.

    >>> factor_text(SpeedupRatio(5.13, 4.9, 5.31))
    '5.1 × (4.9 to 5.3)'
    """
    return f"{times(factor.ratio)} × ({times(factor.low)} to {times(factor.high)})"


def speedup_text(speedup: Speedup) -> str:
    """Return the whole, and what the runtime alone gives: `5.1 × (4.9 to 5.3) as fast; the runtime alone ...`."""
    alone = "" if speedup.runtime is None else f"; the runtime alone gives {times(speedup.runtime.ratio)} ×"
    return f"{factor_text(speedup.whole)} as fast{alone}"


def breakdown(speedup: Speedup) -> str | None:
    """Return what runtime, precision and pruning bought, one after the other; None where a step could not be timed."""
    parts = (("runtime", speedup.runtime), ("precision", speedup.precision), ("pruning", speedup.pruning))
    if any(part is None for _, part in parts):
        return None
    return ", ".join(f"{name} {factor_text(part)}" for name, part in parts if part is not None)


def conditions(speedup: Speedup) -> str:
    """Return how it was timed, and whether that was disturbed."""
    clock = "" if speedup.clock == "wall" else ", in CPU time"
    if speedup.is_disturbed:
        mark = "; DISTURBED by other programs or noise, also when tried again"
        return f"timed in turns, {calls(speedup.batch_size)}{clock}{mark}"
    return f"timed in turns at quiet moments, {calls(speedup.batch_size)}{clock}"


def calls(batch_size: int) -> str:
    """Return a call in words.

    >>> calls(1), calls(8)
    ('one sample a call', '8 samples a call')
    """
    return "one sample a call" if batch_size == 1 else f"{batch_size} samples a call"


def per_call(metrics: TrialMetrics) -> str:
    """Return the time by which candidates are ranked: `0.31 ms per sample`."""
    return units.per_call(metrics.ranked_latency_s, metrics.ranked_batch)


def speedup_data(speedup: Speedup | None) -> dict[str, Any] | None:
    """Return the speedup and each of its parts for `summary.json`; None where it is not known."""
    if speedup is None:
        return None
    plain = to_plain(speedup)
    whole, is_disturbed = plain.pop("whole"), plain.pop("is_disturbed")
    alone = {"runtime_alone": None if speedup.runtime is None else speedup.runtime.ratio}
    return {**whole, **alone, **plain, "disturbed": is_disturbed, "text": speedup_text(speedup)}
