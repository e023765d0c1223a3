"""Sweeps as JSON, rows and CSV, and back; as sheets; what to ship, and its speedup, in words."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge_opt import units
from edge_opt._support.json import dumps_rows, read_document, to_plain
from edge_opt.errors import UnreadableSweep
from edge_opt.records.sweeps import (
    TRIAL_COLUMNS,
    Speedup,
    SpeedupRatio,
    SweepResult,
    TargetFigures,
    TargetWinner,
    Trial,
    TrialMetrics,
    score_text,
)
from edge_opt.report.save import csv_text, read_record
from edge_opt.report.sheets import Note, Sheet, Table, column, sheet, text_column

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
        metrics = trial.metrics
        times = () if metrics is None else (metrics.latency_low_s, metrics.latency_s, metrics.latency_high_s)
        ends = [time for time in times if time is not None]
        if ends != sorted(ends):
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
    faster = _speedup_of(result, trial)
    in_finals = result.finals is not None and result.finals.of(candidate) is not None
    timing = None if metrics is None or metrics.deploy_latency_s is None else "in turns" if in_finals else "alone"
    # Batches are timed one variant after the other; only those of the finals are comparable.
    is_finals_batch = metrics is not None and metrics.batch_size == metrics.deploy_batch
    alone = None if metrics is None or metrics.latency_s is None else "alone"
    return {
        "key": candidate.key,
        "pruning": candidate.pruning,
        "pruning_level": candidate.pruning,
        "layer_pruning": "; ".join(f"{path}={share:g}" for path, share in candidate.layer_pruning),
        "precision": candidate.precision,
        "runtime": candidate.runtime,
        **{column.name: None if metrics is None else column.value(metrics) for column in TRIAL_COLUMNS},
        "deploy_timing": timing,
        "latency_timing": timing if is_finals_batch else alone,
        "speedup": None if faster is None else faster.ratio,
        "speedup_ci95_low": None if faster is None else faster.low,
        "speedup_ci95_high": None if faster is None else faster.high,
        "disturbed": metrics is not None and metrics.is_disturbed,
        "disturbed_times": "" if metrics is None else "; ".join(metrics.disturbed_times),
        **budgets.violations(None if metrics is None else units.megabytes(metrics.model_bytes)),
        "active_budget_mb": budgets.active_mb,
        "accepted": trial.is_accepted,
        "violations": "; ".join(violation.constraint for violation in trial.violations),
        "undecided": "; ".join(item.constraint for item in trial.undecided),
        "probability": trial.probability if trial.undecided else None,
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
    # The columns of another metric replace those of accuracy, and state which direction is better.
    is_other = result.metric != "accuracy"
    behind = {"metric_direction": result.metric_direction} if is_other else {}
    names = [*_row(result, result.baseline, budgets), *behind]
    rows = ([*row.values(), *behind.values()] for row in sweep_rows(result, budgets))
    return csv_text([name.replace("accuracy", result.metric) for name in names], rows)


_SHOWN = 12
_ORDER = ("winner", "accepted", "undecided", "rejected", "failed", "baseline")
_MARKS = {"winner": "→"}


def ranked(result: SweepResult) -> list[tuple[Trial, str]]:
    """Return each candidate with its status in a word: winner, accepted, rejected, failed; then the baseline."""
    on_frontier = {key for _, keys in result.frontiers for key in keys}

    def status(trial: Trial) -> str:
        key = trial.candidate.key
        if key == result.best:
            return "winner"
        return "baseline" if key == result.baseline.candidate.key else trial.verdict.partition(" ")[0]

    def place(trial: Trial) -> tuple[int, bool, float]:
        score = trial.metrics.comparable_score if trial.metrics else 0.0
        return _ORDER.index(status(trial)), trial.candidate.key not in on_frontier, -score

    # A baseline of the space is one of its trials as well.
    every = {trial.candidate.key: trial for trial in (result.baseline, *result.trials)}
    return [(trial, status(trial)) for trial in sorted(every.values(), key=place)]


def _score_cell(metrics: TrialMetrics | None) -> str:
    """Return the score on test data where it is known, else on validation data."""
    if metrics is None:
        return units.DASH
    if metrics.test_accuracy is None:
        return f"{score_text(metrics.accuracy, metrics.metric)} val"
    return f"{score_text(metrics.test_accuracy, metrics.metric)} test"


def _trial_table(result: SweepResult, rows: Sequence[tuple[Trial, str]]) -> Table:
    """Return one row per candidate: score, latency, speedup, size, and its status with the reason."""
    known = [trial.metrics for trial, _ in rows]
    speedups = [_speedup_of(result, trial) for trial, _ in rows]
    level = "95 % CI" if result.target is None else "90 % interval"
    status = (word if word in ("winner", "baseline") and it.metrics else it.verdict for it, word in rows)
    columns = (
        text_column(
            "Candidate", (f"{_MARKS.get(word, ' ')} {it.candidate.title}" for it, word in rows), min_width=None
        ),
        column("Accuracy" if result.metric == "accuracy" else result.metric, map(_score_cell, known)),
        column(
            "Latency" if result.target is None else f"On {result.target}",
            (units.DASH if it is None else per_call(it) + " disturbed" * it.is_disturbed for it in known),
        ),
        # Where this machine decides there is no target.
        *(() if result.target is None else _figure_columns([None if it is None else it.target for it in known])),
        column(f"Speedup ({level})", (units.DASH if it is None else factor_text(it) for it in speedups), 1),
        column("Size", (units.DASH if it is None else units.size(it.size_bytes) for it in known), 2),
        replace(text_column("Status", status, min_width=10), cuts_end=True),
    )
    # The winner is green where the terminal has colors.
    styles = ["green" if word == "winner" else "" for _, word in rows]
    return tuple(
        replace(it, cells=tuple(replace(cell, style=style) for cell, style in zip(it.cells, styles, strict=True)))
        for it in columns
    )


def _speedup_of(result: SweepResult, trial: Trial) -> SpeedupRatio | None:
    """Return the speedup over the baseline: predicted for the target, else as the finals measured it."""
    if trial.metrics is not None and trial.metrics.target is not None:
        return trial.metrics.target.speedup
    timing = None if result.finals is None else result.finals.of(trial.candidate)
    return None if timing is None else timing.speedup


def _figure_columns(figures: Sequence[TargetFigures | None]) -> Table:
    """Return the interval, kind and RAM of each figure of a target."""
    ends = (
        f"{units.duration(it.low)}{units.DASH}{units.duration(it.high)}" if it and it.low and it.high else units.DASH
        for it in figures
    )
    rams = (units.DASH if it is None or it.ram_bytes is None else units.size(it.ram_bytes) for it in figures)
    return (
        column("90 % interval", ends, 2),
        column("Kind", (units.DASH if it is None else it.kind for it in figures), 1),
        column("RAM", rams, 3),
    )


def answer(result: SweepResult, file: str | Path | None = None) -> str:
    """Return what to ship in one sentence: the file or the candidate, speedup, test score before validation, size."""
    if result.best is None:
        return f"Ship nothing yet: {result.recommendation or 'no candidate was accepted'}"
    trial = result.trial(result.best)
    metrics = trial.metrics
    ship = f"Ship `{file}`" if file else f"Ship {trial.candidate.title}"
    if metrics is None:
        return ship
    speed = per_call(metrics) if result.speedup is None else speedup_text(result.speedup)
    if metrics.target is not None:
        speed = f"{target_text(metrics)}{'' if result.speedup is None else f', {speedup_text(result.speedup)}'}"
    value, metric = score_text(metrics.accuracy, metrics.metric), metrics.metric
    scored = f"validation {metric} {value}"
    if metrics.test_accuracy is not None:
        scored = f"test {metric} {score_text(metrics.test_accuracy, metric)} (validation {value})"
    return f"{ship}: {speed}, {scored}, {units.size(metrics.size_bytes)}"


def conclusion(result: SweepResult, file: str | Path | None = None, report: Path | None = None) -> Sheet:
    """Return the end of a run: the candidates in a short table, what to ship and why, and where the report is.

    Args:
        result: The sweep.
        file: The file to ship; the candidate is named where there is none.
        report: The page of the run.
    """
    rows = ranked(result)
    counts = f"{len(result.accepted)} accepted, {len(result.rejected)} rejected, {len(result.failed)} failed"
    more = f"; {_SHOWN} rows of {len(rows)} shown, all in sweep_results.csv" if len(rows) > _SHOWN else ""
    ship, _, figures = answer(result, file).replace("`", "").partition(" ")
    parts = "" if result.speedup is None else breakdown(result.speedup)
    notes = (
        (ship, figures),
        ("Why", result.recommendation if result.best else ""),
        ("Undecided", _undecided_text(result)),
        ("Breakdown" if parts else "Speedup", f"{parts}{'; ' * bool(parts)}{conditions(result)}"),
        ("Constraints", ", ".join(result.constraints)),
        ("Skipped", result.skipping),
        ("Report", "" if report is None else str(report)),
    )
    return Sheet(
        f"{result.name}: {len(result.trials)} candidates, {counts}{more}",
        (_trial_table(result, rows[:_SHOWN]), winner_table(result.winners)),
        tuple(note for note in notes if note[1]),
    )


def winner_table(winners: Sequence[TargetWinner]) -> Table:
    """Return one row per target: what to ship there, its latency with the interval, RAM and status."""
    figures = [it.figures for it in winners]
    times = (units.DASH if it is None or it.seconds is None else units.duration(it.seconds) for it in figures)
    return (
        text_column("Target", (it.target for it in winners), min_width=None),
        text_column("Ship", ("none" if it.candidate is None else it.candidate.title for it in winners), min_width=12),
        column("Latency", times),
        *_figure_columns(figures),
        text_column("Status", (it.status for it in winners), min_width=10),
    )


def _undecided_text(result: SweepResult) -> str:
    """Return the candidates that may keep the budgets, beside the winner, and which one to time on the board."""
    others = [trial for trial in result.undecided if trial.candidate.key != result.best]
    if not others:
        return ""
    listed = (
        f"{trial.candidate.title} ({'unknown' if trial.probability is None else f'{100 * trial.probability:.0f} %'})"
        for trial in others[:3]
    )
    first = result.undecided[0].candidate.key
    decide = f"time {first} on {result.target}: --measure-on USER@HOST, or --set target_times.{first}=MS"
    return f"may keep the budgets: {', '.join(listed)}; to decide, {decide}"


@sheet(SweepResult, brief=conclusion)
def sweep_sheet(result: SweepResult) -> Sheet:
    """Return all candidates of a sweep, the winner and why."""
    return replace(conclusion(result), tables=(_trial_table(result, ranked(result)),))


@sheet(Trial)
def trial_sheet(trial: Trial) -> Sheet:
    """Return one candidate."""
    metrics = trial.metrics
    notes: list[Note] = []
    if metrics is not None:
        notes = [
            (metrics.metric.capitalize(), _score_cell(metrics)),
            ("Latency", per_call(metrics)),
            ("Size", units.size(metrics.size_bytes)),
            ("Peak memory", units.size(metrics.peak_memory_bytes)),
            ("MACs", f"{units.count(metrics.macs)}, {units.percent_of(metrics.macs_ratio)} of the baseline's"),
        ]
    return Sheet(f"{trial.candidate.title}: {trial.verdict}", notes=tuple(notes))


def times(value: float) -> str:
    """Return a factor as people read it.

    >>> times(5.13), times(1.04), times(0.5), times(12.34)
    ('5.1', '1.04', '0.50', '12.3')
    """
    return f"{value:.1f}" if value >= 2 else f"{value:.2f}"


def factor_text(factor: SpeedupRatio) -> str:
    """Return a factor with its interval.

    >>> factor_text(SpeedupRatio(5.13, 4.9, 5.31)), factor_text(SpeedupRatio(1, 1, 1))
    ('5.1× (4.9–5.3)', '1×')
    """
    if factor.low == factor.high == 1:
        return f"1{units.TIMES}"
    return f"{times(factor.ratio)}{units.TIMES} ({times(factor.low)}{units.DASH}{times(factor.high)})"


def speedup_text(speedup: Speedup) -> str:
    """Return the speedup over the baseline: `5.1× faster (95 % CI 4.9–5.3)`; below 1, as a share of its speed."""
    whole = speedup.whole
    if speedup.clock == "predicted" and whole.low == whole.high:
        return "the baseline itself"
    word = "faster" if whole.ratio >= 1 else "the speed of the baseline"
    level = "90 % interval" if speedup.clock == "predicted" else "95 % CI"
    return f"{times(whole.ratio)}{units.TIMES} {word} ({level} {times(whole.low)}{units.DASH}{times(whole.high)})"


def breakdown(speedup: Speedup) -> str:
    """Return the factors of runtime, precision and pruning that were timed; a step that changed nothing is left out."""
    parts = (("runtime", speedup.runtime), ("precision", speedup.precision), ("pruning", speedup.pruning))
    return ", ".join(f"{name} {factor_text(part)}" for name, part in parts if part is not None and part.low < part.high)


def conditions(result: SweepResult) -> str:
    """Return how the speedup was timed; where that was disturbed, the cause and what to do about it."""
    speedup, finals = result.speedup, result.finals
    if speedup is None:
        return ""
    if speedup.clock == "predicted":
        return f"predicted for the target, batch {speedup.batch_size}; the baseline is the unpruned fp32 model there"
    rounds = "" if speedup.is_disturbed else ", least-disturbed rounds"
    clock = "" if speedup.clock == "wall" else ", CPU time as other programs used the cores"
    mark = ""
    if speedup.is_disturbed:
        cause = finals.remarks[-1] if finals is not None and finals.remarks else "the processes did not agree"
        mark = f"; DISTURBED: {cause}; stop other programs and run the same command again: only finals are repeated"
    return f"interleaved measurements{rounds}, batch {speedup.batch_size}{clock}{mark}"


def target_text(metrics: TrialMetrics) -> str:
    """Return the latency on the target with its interval and kind: `12 ms on a-board (90 % interval …, predicted)`."""
    figures = metrics.target
    if figures is None or figures.seconds is None:
        return f"latency on {metrics.target_name} not known"
    ends = ""
    if figures.low is not None and figures.high is not None:
        ends = f"90 % interval {units.duration(figures.low)} to {units.duration(figures.high)}, "
    batch = "" if metrics.ranked_batch == 1 else f", batch {metrics.ranked_batch}"
    return f"{units.duration(figures.seconds)} on {figures.target} ({ends}{figures.kind}{batch})"


def per_call(metrics: TrialMetrics) -> str:
    """Return the time by which candidates are ranked: `310 µs (batch 1)`."""
    return units.per_call(metrics.ranked_latency_s, metrics.ranked_batch)


def speedup_data(speedup: Speedup | None) -> dict[str, Any] | None:
    """Return the speedup and each of its parts for `summary.json`; None where it is not known."""
    if speedup is None:
        return None
    plain = to_plain(speedup)
    whole, is_disturbed = plain.pop("whole"), plain.pop("is_disturbed")
    alone = {"runtime_alone": None if speedup.runtime is None else speedup.runtime.ratio}
    return {**whole, **alone, **plain, "disturbed": is_disturbed, "text": speedup_text(speedup)}
