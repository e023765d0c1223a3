"""Sweep candidates side by side: their figures, layers being unknown."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from edge_opt.errors import InvalidInput
from edge_opt.records import (
    ComparedFigure,
    Comparison,
    FigureUnit,
    Interval,
    ModelComparison,
    SweepResult,
    Trial,
    TrialMetrics,
    Verdict,
)

_NAMED_AT_MOST = 12

_TOTALS: tuple[tuple[str, str, FigureUnit, bool, Callable[[TrialMetrics], float | None]], ...] = (
    ("accuracy", "Accuracy", "share", False, lambda trial: trial.accuracy),
    ("latency_s", "Latency, measured", "time", True, lambda trial: trial.latency_s),
    ("throughput", "Samples per second", "rate", True, lambda trial: trial.throughput),
    ("size_bytes", "Size of the file", "bytes", False, lambda trial: trial.size_bytes),
    ("peak_memory_bytes", "Peak memory", "bytes", False, lambda trial: trial.peak_memory_bytes),
    ("energy_j", "Energy", "energy", True, lambda trial: trial.energy_j),
    ("params", "Parameters", "count", False, lambda trial: trial.params),
    ("macs", "MACs", "count", False, lambda trial: trial.macs),
)


def compare_trials(trials: Sequence[Trial]) -> ModelComparison:
    """Candidates of a sweep against the first of them."""
    if len(trials) < 2:
        raise InvalidInput(f"{len(trials)} candidate{'s' * (len(trials) != 1)} cannot be compared; give at least two")
    found = [_metrics(trial) for trial in trials]
    totals = (
        ComparedFigure(name, title, unit, is_measured, tuple(read(metrics) for metrics in found))
        for name, title, unit, is_measured, read in _TOTALS
    )
    batches = {metrics.batch_size for metrics in found}
    return ModelComparison(
        names=tuple(trial.candidate.label for trial in trials),
        layers=(),
        totals=tuple(figure for figure in totals if any(value is not None for value in figure.values)),
        latencies=tuple(_verdict(found[0], other) for other in found[1:]),
        is_lower_bound=(False,) * len(trials),
        remarks=(f"latencies are of batches of {sorted(batches)}",) if len(batches) > 1 else (),
    )


def find_trial(result: SweepResult, name: str) -> Trial:
    """A candidate by its key or the beginning of it, by its label, or as "baseline" or "best"."""
    if name == "baseline":
        return result.baseline
    if name == "best":
        if result.best is None:
            raise InvalidInput(f"the sweep {result.name!r} has no best candidate, for none was accepted; name another")
        return result.trial(result.best)
    labels = {trial.candidate.key: trial.candidate.label for trial in (result.baseline, *result.trials)}
    wanted = " ".join(name.split())
    found = [key for key, label in labels.items() if wanted in (key, label)]
    found = found or [key for key in labels if wanted and key.startswith(wanted)]
    if len(found) == 1:
        return result.trial(found[0])
    known = "; ".join(f"{key} ({labels[key]})" for key in (found or list(labels))[:_NAMED_AT_MOST])
    problem = "may be any of several" if found else "is no candidate"
    raise InvalidInput(f"{name!r} {problem} of the sweep {result.name!r}; write baseline, best, or one of: {known}")


def _metrics(trial: Trial) -> TrialMetrics:
    if trial.metrics is None:
        raise InvalidInput(
            f"the candidate {trial.candidate.label!r} has no figures: it {trial.failure or 'failed'} ({trial.reason}); "
            "compare candidates that ran"
        )
    return trial.metrics


def _verdict(old: TrialMetrics, new: TrialMetrics) -> Comparison | None:
    """A difference that the two intervals leave room for; samples are not kept, so it is a careful one."""
    if min(old.latency_low_s, new.latency_low_s) <= 0:
        return None
    ratio = Interval(new.latency_low_s / old.latency_high_s, new.latency_high_s / old.latency_low_s)
    verdict: Verdict = "slower" if ratio.low > 1 else "faster" if ratio.high < 1 else "equal"
    return Comparison(verdict, new.latency_s / old.latency_s, ratio, "wall")
