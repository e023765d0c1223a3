"""Records of a sweep: candidates, what became of each, and the ones worth having."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Literal

from edge_opt.records.hardware import Precision

TrialStatus = Literal["done", "failed"]
Failure = Literal["raised", "out of memory", "timed out", "crashed", "no result"]


@dataclass(frozen=True, slots=True)
class Candidate:
    """One variant to try: a share of channels to prune, overall or by layer, a precision, and who runs it."""

    pruning: float
    precision: Precision
    runtime: str
    layer_pruning: tuple[tuple[str, float], ...] = ()

    @property
    def key(self) -> str:
        """The same for equal candidates, whatever the order of their layers."""
        content = [self.pruning, self.precision, self.runtime, sorted(self.layer_pruning)]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]

    @property
    def label(self) -> str:
        """As people call it: `prune 0.25 int8 onnxruntime`."""
        pruned = "by layer" if self.layer_pruning else f"{self.pruning:g}"
        return f"prune {pruned} {self.precision} {self.runtime}"


@dataclass(frozen=True, slots=True)
class TrialMetrics:
    """What was found out about one candidate; None where a figure is not known. Accuracies are shares of one.

    `accuracy` is on the validation part, by which candidates are chosen; `test_accuracy` is only for those reported.
    Latencies are measured; `energy_j` says in `energy_source` where it comes from.
    """

    accuracy: float
    accuracy_low: float
    accuracy_high: float
    accuracy_drop: float
    latency_s: float
    latency_low_s: float
    latency_high_s: float
    latency_std_s: float
    latency_p95_s: float
    cpu_latency_s: float
    batch_size: int
    throughput: float
    model_bytes: int
    size_bytes: int
    peak_memory_bytes: int
    energy_j: float | None
    energy_source: str
    macs: int
    params: int
    macs_ratio: float
    params_ratio: float
    effective_precision: str
    float_layers: tuple[str, ...] = ()
    test_accuracy: float | None = None
    single_latency_s: float | None = None
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Violation:
    """A constraint that does not hold, value and limit in `metric`'s unit; a value of None is not known."""

    constraint: str
    metric: str
    value: float | None
    limit: float

    @property
    def excess(self) -> float | None:
        """By how much the value is beyond the limit; None where the value is not known."""
        return None if self.value is None else abs(self.value - self.limit)


@dataclass(frozen=True, slots=True)
class Trial:
    """What became of one candidate: figures, or the reason why there are none."""

    candidate: Candidate
    status: TrialStatus
    metrics: TrialMetrics | None
    failure: Failure | None
    reason: str
    violations: tuple[Violation, ...]
    seconds: float
    attempts: int = 1

    @property
    def is_accepted(self) -> bool:
        """It ran, and every constraint holds."""
        return self.status == "done" and not self.violations


@dataclass(frozen=True, slots=True)
class SweepResult:
    """Every candidate with its fate. `frontiers` maps a pair or set of objectives to the keys of what is on it."""

    name: str
    baseline: Trial
    trials: tuple[Trial, ...]
    constraints: tuple[str, ...]
    frontiers: tuple[tuple[str, tuple[str, ...]], ...]
    best: str | None
    recommendation: str

    @property
    def accepted(self) -> tuple[Trial, ...]:
        return tuple(trial for trial in self.trials if trial.is_accepted)

    @property
    def rejected(self) -> tuple[Trial, ...]:
        return tuple(trial for trial in self.trials if trial.status == "done" and trial.violations)

    @property
    def failed(self) -> tuple[Trial, ...]:
        return tuple(trial for trial in self.trials if trial.status == "failed")

    def trial(self, key: str) -> Trial:
        """The trial of a candidate by its key."""
        return next(trial for trial in (self.baseline, *self.trials) if trial.candidate.key == key)

    def _repr_html_(self) -> str:
        from edge_opt.report.notebook import sweep_html

        return sweep_html(self)


@dataclass(frozen=True, slots=True)
class SweepStatus:
    """How far a sweep is. `total` is None until a run has planned it; `pid` and `host` are of the run going on."""

    folder: str
    name: str
    total: int | None
    done: int
    failed: int
    accepted: int
    pid: int | None
    host: str | None
    unfinished: tuple[str, ...]
    best: str | None
    recommendation: str

    @property
    def left(self) -> int | None:
        """Candidates without a result yet."""
        return None if self.total is None else max(0, self.total - self.done - self.failed)

    @property
    def is_running(self) -> bool:
        return self.pid is not None
