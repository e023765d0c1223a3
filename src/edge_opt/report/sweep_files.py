"""Sweeps as JSON, rows and CSV, and back."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge_opt._support.json import dumps_rows, from_plain, to_plain
from edge_opt.errors import UnreadableProfile, UnreadableSweep
from edge_opt.records.sweeps import SpeedupRatio, SweepResult, Trial, TrialMetrics
from edge_opt.text import spreadsheet
from edge_opt.units import megabytes

if TYPE_CHECKING:
    import pandas as pd


FORMAT = "edge_opt.sweep"
SCHEMA_VERSION = 1
_OBJECTIVES = ("latency", "energy", "memory", "size", "macs", "params", "throughput")

Get = Callable[[TrialMetrics], Any]


def sweep_document(result: SweepResult) -> str:
    """The sweep as JSON that `read_sweep` reads back exactly: one line per candidate.

    >>> import json
    >>> from edge_opt.records.sweeps import Candidate, SweepResult, Trial
    >>> lost = Trial(Candidate(0.0, "fp32", "torch"), "failed", None, "raised", "no data", (), 0.1)
    >>> json.loads(sweep_document(SweepResult("net", lost, (), (), (), None, "")))["format"]
    'edge_opt.sweep'
    """
    plain = {"format": FORMAT, "schema_version": SCHEMA_VERSION, **to_plain(result)}
    return dumps_rows(plain) + "\n"


def read_sweep(text: str, source: str = "the text") -> SweepResult:
    """The sweep that `sweep_document` wrote; `source` is what errors call it, such as a file's name."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UnreadableSweep(f"{source} is not JSON, or is cut off ({error}); run the sweep again") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise UnreadableSweep(f'{source} is JSON, but not a sweep: it lacks "format": "{FORMAT}"')
    version = data.pop("schema_version", None)
    if version != SCHEMA_VERSION:
        is_newer = isinstance(version, int) and version > SCHEMA_VERSION
        cure = "upgrade edge-opt to read it" if is_newer else "run the sweep again"
        raise UnreadableSweep(
            f"{source} has schema version {version!r}, and this edge_opt reads {SCHEMA_VERSION}; {cure}"
        )
    try:
        result = from_plain(SweepResult, {key: value for key, value in data.items() if key != "format"})
    except UnreadableProfile as error:
        raise UnreadableSweep(f"{source} is damaged: {error}; run the sweep again") from error
    fault = _contradiction(result)
    if fault is not None:
        raise UnreadableSweep(f"{source} is damaged: {fault}; run the sweep again")
    return result


def _contradiction(result: SweepResult) -> str | None:
    """What in a sweep does not fit together; None where all does."""
    keys = [trial.candidate.key for trial in result.trials]
    known = set(keys)
    if len(known) < len(keys):
        return "a candidate has two rows"
    if result.best is not None and result.best not in known:
        return f"the best is {result.best!r}, which is no row"
    for name, members in result.frontiers:
        if not known.issuperset(members):
            return f"the frontier {name!r} names candidates that are no rows"
    for trial in (result.baseline, *result.trials):
        if (trial.status == "done") != (trial.metrics is not None) or (trial.status == "failed") != bool(trial.failure):
            return f"{trial.candidate.label} is {trial.status!r} and has {'no ' * (trial.metrics is None)}figures"
        if trial.metrics is not None and not (
            trial.metrics.latency_low_s <= trial.metrics.latency_s <= trial.metrics.latency_high_s
        ):
            return f"the latency of {trial.candidate.label} is outside its own interval"
    return None


def load_sweep(path: str | os.PathLike[str]) -> SweepResult:
    """The sweep of a run: its folder, or the `sweep.json` in it."""
    file = Path(path) / "sweep.json" if Path(path).is_dir() else Path(path)
    if not file.is_file():
        raise UnreadableSweep(f"no file {str(file)!r}; `edge-opt run` and `edge-opt sweep` write it")
    try:
        return read_sweep(file.read_text(encoding="utf-8"), repr(str(file)))
    except (OSError, UnicodeDecodeError) as error:
        raise UnreadableSweep(f"cannot read {str(file)!r}: {error}") from error


def frontier_keys(result: SweepResult, objective: str) -> frozenset[str]:
    """Keys of the candidates on the frontier of accuracy and one objective, such as "latency"; empty where none is."""
    others = [name for name in _OBJECTIVES if name != objective]
    for name, keys in result.frontiers:
        if objective in name and not any(other in name for other in others):
            return frozenset(keys)
    return frozenset()


def _speedups(result: SweepResult) -> dict[str, SpeedupRatio]:
    """How many times as fast as the baseline each finalist is, by the candidate's key."""
    return {} if result.finals is None else {item.candidate.key: item.speedup for item in result.finals.finalists}


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


def _is_proxy(metrics: TrialMetrics) -> bool:
    return metrics.energy_source.startswith("proxy")


# Names and units are those of the published pipeline's files; what it did not have stands behind.
_METRICS: tuple[tuple[str, Get], ...] = (
    ("accuracy", lambda m: m.accuracy),
    ("accuracy_ci95_low", lambda m: m.accuracy_low),
    ("accuracy_ci95_high", lambda m: m.accuracy_high),
    ("accuracy_drop", lambda m: m.accuracy_drop),
    ("accuracy_drop_ci95_low", lambda m: m.accuracy_drop_low),
    ("accuracy_drop_ci95_high", lambda m: m.accuracy_drop_high),
    ("test_accuracy", lambda m: m.test_accuracy),
    ("latency_ms", lambda m: m.latency_s * 1e3),
    ("latency_median_ms", lambda m: m.latency_s * 1e3),
    ("latency_ci95_low_ms", lambda m: m.latency_low_s * 1e3),
    ("latency_ci95_high_ms", lambda m: m.latency_high_s * 1e3),
    ("latency_std_ms", lambda m: m.latency_std_s * 1e3),
    ("latency_p95_ms", lambda m: m.latency_p95_s * 1e3),
    ("cpu_latency_ms", lambda m: m.cpu_latency_s * 1e3),
    ("single_latency_ms", lambda m: _milliseconds(m.single_latency_s)),
    ("deploy_batch", lambda m: m.deploy_batch),
    ("deploy_latency_ms", lambda m: _milliseconds(m.deploy_latency_s)),
    ("deploy_latency_ci95_low_ms", lambda m: _milliseconds(m.deploy_latency_low_s)),
    ("deploy_latency_ci95_high_ms", lambda m: _milliseconds(m.deploy_latency_high_s)),
    ("batch_size", lambda m: m.batch_size),
    ("throughput_sps", lambda m: m.throughput),
    ("model_memory_mb", lambda m: megabytes(m.model_bytes)),
    ("memory_mb", lambda m: megabytes(m.model_bytes)),
    ("estimated_runtime_memory_mb", lambda m: megabytes(m.peak_memory_bytes)),
    ("peak_memory_mb", lambda m: megabytes(m.peak_memory_bytes)),
    ("measured_memory_mb", lambda m: None if m.measured_memory_bytes is None else megabytes(m.measured_memory_bytes)),
    ("train_flops", lambda m: m.train_flops),
    (
        "train_peak_memory_mb",
        lambda m: None if m.train_peak_memory_bytes is None else megabytes(m.train_peak_memory_bytes),
    ),
    ("size_mb", lambda m: megabytes(m.size_bytes)),
    ("energy_j", lambda m: m.energy_j),
    ("energy_proxy_j", lambda m: m.energy_j if _is_proxy(m) else None),
    ("energy_proxy_note", lambda m: m.energy_source if _is_proxy(m) else None),
    ("energy_source", lambda m: m.energy_source),
    ("macs", lambda m: m.macs),
    ("params", lambda m: m.params),
    ("macs_ratio", lambda m: m.macs_ratio),
    ("params_ratio", lambda m: m.params_ratio),
    ("machine", lambda m: m.machine or None),
    ("effective_precision", lambda m: m.effective_precision),
    ("float_layers", lambda m: "; ".join(m.float_layers)),
    ("remarks", lambda m: "; ".join(m.remarks)),
)
_WHOLE = ("batch_size", "deploy_batch", "train_flops", "macs", "params")
_TEXT = ("energy_proxy_note", "energy_source", "machine", "effective_precision", "float_layers", "remarks")


@dataclass(frozen=True, slots=True)
class WeightBudgets:
    """Budgets of the weights in MiB: those that rows are held against, and the one that decides; None: none does."""

    budgets_mb: tuple[float, ...] = ()
    active_mb: float | None = None

    def violations(self, weights_mb: float | None) -> dict[str, bool | None]:
        """Which budgets are broken, by column; None where the weights are not known.

        >>> WeightBudgets((1.0, 2.0)).violations(1.5)
        {'violates_1.0mb': True, 'violates_2.0mb': False}
        """
        return {
            f"violates_{float(budget)}mb": None if weights_mb is None else weights_mb > budget
            for budget in self.budgets_mb
        }


NO_BUDGETS = WeightBudgets()


def sweep_rows(result: SweepResult, budgets: WeightBudgets = NO_BUDGETS) -> list[dict[str, Any]]:
    """One row per candidate, in order; None where a figure is not known, as after a failure.

    `memory_mb` is the weights, as in the published files, and `peak_memory_mb` everything alive at once.
    `energy_proxy_j` holds power times latency only; what a meter or a model said stands in `energy_j` alone, and
    `energy_source` says which it is.
    """
    return [_row(result, trial, budgets) for trial in result.trials]


def _row(result: SweepResult, trial: Trial, budgets: WeightBudgets) -> dict[str, Any]:
    candidate, metrics = trial.candidate, trial.metrics
    faster = _speedups(result).get(candidate.key)
    return {
        "key": candidate.key,
        "pruning": candidate.pruning,
        "pruning_level": candidate.pruning,
        "layer_pruning": "; ".join(f"{path}={share:g}" for path, share in candidate.layer_pruning),
        "precision": candidate.precision,
        "runtime": candidate.runtime,
        **{name: None if metrics is None else get(metrics) for name, get in _METRICS},
        "deploy_timing": None if metrics is None else "alone" if faster is None else "in turns",
        "speedup": None if faster is None else faster.ratio,
        "speedup_ci95_low": None if faster is None else faster.low,
        "speedup_ci95_high": None if faster is None else faster.high,
        "disturbed": metrics is not None and metrics.is_disturbed,
        "disturbed_times": "" if metrics is None else "; ".join(metrics.disturbed_times),
        **budgets.violations(None if metrics is None else megabytes(metrics.model_bytes)),
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
    """The rows as a DataFrame; it has its columns also when nothing was tried."""
    import pandas as pd

    names = list(_row(result, result.baseline, budgets))
    frame = pd.DataFrame(sweep_rows(result, budgets), columns=names)
    # A column of which nothing is known would be one of objects, which have no mean.
    numbers = {name: "Int64" if name in _WHOLE else "float64" for name, _ in _METRICS if name not in _TEXT}
    numbers |= dict.fromkeys(("speedup", "speedup_ci95_low", "speedup_ci95_high"), "float64")
    return frame.astype(numbers | {"accepted": bool})


def sweep_csv(result: SweepResult, budgets: WeightBudgets = NO_BUDGETS) -> str:
    """The rows as CSV: exact numbers, an empty cell where one is not known, no text that a spreadsheet would run."""
    out = io.StringIO()
    lines = csv.writer(out, lineterminator="\n")
    # Where another metric is scored, its columns stand in for those of accuracy, and say which way is better.
    is_other = result.metric != "accuracy"
    behind = {"metric_direction": result.metric_direction} if is_other else {}
    names = [*_row(result, result.baseline, budgets), *behind]
    lines.writerow([name.replace("accuracy", result.metric) for name in names])
    for row in sweep_rows(result, budgets):
        cells = [*row.values(), *behind.values()]
        lines.writerow([spreadsheet(value) if isinstance(value, str) else value for value in cells])
    return out.getvalue()
