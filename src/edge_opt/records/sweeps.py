"""Records of a sweep: candidates, what became of each, and the ones worth having."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Literal

from edge_opt.records.devices import Precision
from edge_opt.records.predictions import MemoryKind
from edge_opt.records.shown import Record, Shown

TrialStatus = Literal["done", "failed"]
MetricDirection = Literal["higher", "lower"]
# Metrics that lie between 0 and 1.
SHARES = ("accuracy", "top5", "f1", "miou", "auroc")
# Where a batch that is a mapping has its labels; the first of these that it has.
LABELS = ("labels", "label", "y", "targets", "target")
# What a pruned variant must be beside what the user asks for; else it is rejected with these words.
FASTER_THAN_UNPRUNED = "faster than unpruned"
Failure = Literal["raised", "out of memory", "timed out", "crashed", "no result"]


@dataclass(frozen=True, slots=True)
class Candidate(Record):
    """One variant to try.

    Attributes:
        pruning: Share of the channels to remove of every layer, from 0 to below 1.
        precision: Type of the numbers.
        runtime: Who runs it, such as "onnxruntime".
        layer_pruning: Shares for single layers, by path; there they stand in for `pruning`.
    """

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
    def is_pruned(self) -> bool:
        """Whether anything is to be removed at all."""
        return self.pruning > 0 or any(share > 0 for _, share in self.layer_pruning)

    @property
    def label(self) -> str:
        """As people call it: `prune 0.25 int8 onnxruntime`."""
        pruned = "by layer" if self.layer_pruning else f"{self.pruning:g}"
        return f"prune {pruned} {self.precision} {self.runtime}"


@dataclass(frozen=True, slots=True)
class TrialMetrics(Shown):
    """What was found out about one candidate; None where a figure is not known. Accuracies are shares of one.

    Where `metric` names another metric than accuracy, the fields `accuracy`, `accuracy_low`, `accuracy_high` and
    `test_accuracy` hold that one, and `accuracy_drop` is by how much it is worse than the baseline's.

    Attributes:
        accuracy: Accuracy on the validation part, by which candidates are chosen.
        accuracy_low: Lower end of its 95 % interval.
        accuracy_high: Upper end of its 95 % interval.
        accuracy_drop: Accuracy of the eager baseline minus that of the candidate; below zero where it is better.
        latency_s: Median seconds per batch, measured.
        latency_low_s: Lower end of its 95 % interval.
        latency_high_s: Upper end of its 95 % interval.
        latency_std_s: Standard deviation of the samples, in seconds.
        latency_p95_s: 95 in 100 batches take no longer, in seconds.
        cpu_latency_s: Median seconds of CPU time per batch, all threads together.
        batch_size: Samples in one batch.
        throughput: Samples per second at the median latency.
        model_bytes: Bytes of weights and buffers in memory.
        size_bytes: Bytes of the file.
        peak_memory_bytes: Bytes of weights, buffers, inputs and activations alive at once, estimated from shapes.
        energy_j: Joules per batch.
        energy_source: Where the energy comes from, in words.
        macs: MACs of one batch.
        params: Parameters.
        macs_ratio: MACs over those of the baseline.
        params_ratio: Parameters over those of the baseline.
        effective_precision: What its layers really run in, such as "int8+fp32".
        float_layers: Paths of layers that do not run in the precision that was asked for.
        test_accuracy: Accuracy on the test part; found only for candidates that are reported.
        single_latency_s: Median seconds for one sample, measured.
        peak_memory_kind: Whose lifetimes `peak_memory_bytes` counts: an eager run's, or a planner's.
        remarks: What a reader should know.
        accuracy_drop_low: Lower end of the drop's 95 % interval, paired: both answered the same samples.
        accuracy_drop_high: Upper end of that interval.
        deploy_batch: Samples in one call as the model will be used; by its time candidates are ranked.
        deploy_latency_s: Seconds per call of that batch, measured; of finalists, in turns at quiet moments.
        deploy_latency_low_s: Lower end of its 95 % interval.
        deploy_latency_high_s: Upper end of its 95 % interval.
        measured_memory_bytes: Growth of resident memory over the idle process with the runtime loaded: the most while
            batches run, model included.
        train_flops: FLOPs of one step of fine-tuning its float model on a batch, traced; forward and backward.
        train_peak_memory_bytes: Bytes at the fullest moment of that step, from shapes; weights and batch included.
        is_disturbed: Other programs, or noise, disturbed the time it is ranked by, also when it was tried again.
        disturbed_times: Every time that was disturbed so, by its column: `latency_ms` (with it throughput and the proxy
            of energy), `deploy_latency_ms`, `single_latency_ms`.
        answers: Which validation samples it answers right, in order: bits, packed and in base 64. "" where the
            figure is no share of right answers.
        replicates: Its score on samples drawn again and again, the same draws for every candidate; empty where
            `answers` say more.
        metric: What is scored: "accuracy", or the metric that was set.
        metric_direction: Whether a higher or a lower score is better.
        machine: Where it was timed, if that was a board; "" is the machine of the sweep.
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
    peak_memory_kind: MemoryKind | None = None
    remarks: tuple[str, ...] = ()
    accuracy_drop_low: float | None = None
    accuracy_drop_high: float | None = None
    deploy_batch: int | None = None
    deploy_latency_s: float | None = None
    deploy_latency_low_s: float | None = None
    deploy_latency_high_s: float | None = None
    measured_memory_bytes: int | None = None
    train_flops: int | None = None
    train_peak_memory_bytes: int | None = None
    is_disturbed: bool = False
    disturbed_times: tuple[str, ...] = ()
    answers: str = ""
    replicates: tuple[float, ...] = ()
    metric: str = "accuracy"
    metric_direction: MetricDirection = "higher"
    machine: str = ""

    @property
    def merit(self) -> float:
        """The score, turned so that more is better."""
        return self.accuracy if self.metric_direction == "higher" else -self.accuracy

    @property
    def ranked_latency_s(self) -> float:
        """The time by which candidates are ranked: that of the batch that is deployed, where it is known."""
        return self.latency_s if self.deploy_latency_s is None else self.deploy_latency_s

    @property
    def ranked_batch(self) -> int:
        """Samples of the batch whose time that is."""
        return self.batch_size if self.deploy_latency_s is None else self.deploy_batch or 1


@dataclass(frozen=True, slots=True)
class Violation(Record):
    """A constraint that does not hold.

    Attributes:
        constraint: The constraint as it was written.
        metric: Name of the figure with its unit.
        value: The figure in that unit; None where it is not known.
        limit: The limit in that unit.
    """

    constraint: str
    metric: str
    value: float | None
    limit: float

    def __str__(self) -> str:
        return self.constraint if self.value is None else f"{self.constraint} (it is {self.value:.4g})"

    @property
    def excess(self) -> float | None:
        """By how much the value is beyond the limit; None where the value is not known."""
        return None if self.value is None else abs(self.value - self.limit)


@dataclass(frozen=True, slots=True)
class Trial(Shown):
    """What became of one candidate: figures, or the reason why there are none.

    Attributes:
        candidate: The candidate.
        status: Whether it ran to its end.
        metrics: What was found; None where it failed.
        failure: How it failed; None where it did not.
        reason: Why it failed, in words; "" where it did not.
        violations: Constraints that do not hold.
        seconds: How long building and measuring took.
        attempts: How often it was tried.
    """

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
class Factor(Record):
    """How many times as fast one thing is as another, timed in turns at quiet moments.

    Attributes:
        ratio: The one's calls per second over the other's; 2 is twice as fast.
        low: Lower end of its 95 % interval.
        high: Upper end of its 95 % interval.
    """

    ratio: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Finalist(Record):
    """One variant of the last comparison.

    Attributes:
        candidate: The variant; it need not be of the space, such as the baseline in the winner's runtime.
        seconds: Seconds per call.
        low: Lower end of its 95 % interval.
        high: Upper end of its 95 % interval.
        std_s: Standard deviation of the samples, in seconds.
        p95_s: 95 in 100 samples take no longer, in seconds.
        speedup: How many times as fast as the baseline it is.
        logs: Logarithms of the seconds in consecutive parts of the session, the same parts for all finalists.
    """

    candidate: Candidate
    seconds: float
    low: float
    high: float
    std_s: float
    p95_s: float
    speedup: Factor
    logs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Finals(Shown):
    """The baseline and the candidates worth having, timed in turns, in several processes: only these are compared.

    Attributes:
        batch_size: Samples in one call: the batch that is deployed.
        threads: Threads that each used.
        clock: "wall", or "cpu" where other programs disturbed the machine: CPU time of the process then.
        sessions: In how many processes they were timed, in turns in each; one that was disturbed is tried again.
        is_disturbed: Too few of them were undisturbed: intervals may be too narrow.
        remarks: What disturbed it, and which variants could not be timed.
        finalists: The variants, the baseline first.
    """

    batch_size: int
    threads: int
    clock: Literal["wall", "cpu"]
    sessions: int
    is_disturbed: bool
    remarks: tuple[str, ...]
    finalists: tuple[Finalist, ...]

    def of(self, candidate: Candidate) -> Finalist | None:
        """What was found of a candidate; None where it was no finalist.

        Args:
            candidate: The candidate.
        """
        return next((item for item in self.finalists if item.candidate == candidate), None)


@dataclass(frozen=True, slots=True)
class Speedup(Record):
    """How many times as fast the winner is as the baseline, and what bought it. The three parts multiply to the whole.

    Attributes:
        whole: The winner against the baseline.
        runtime: What its runtime alone buys: the baseline in the winner's runtime. None where it could not be timed.
        precision: What its precision buys on top of that.
        pruning: What pruning buys on top of both.
        batch_size: Samples in one call.
        clock: Whose seconds are compared, as in `Finals`.
        is_disturbed: As in `Finals`.
    """

    whole: Factor
    runtime: Factor | None
    precision: Factor | None
    pruning: Factor | None
    batch_size: int
    clock: Literal["wall", "cpu"]
    is_disturbed: bool


@dataclass(frozen=True, slots=True)
class SweepResult(Shown):
    """Every candidate with its result.

    Attributes:
        name: Name of the sweep.
        baseline: What the others are compared with.
        trials: What became of each candidate.
        constraints: The constraints as they were written.
        frontiers: Objectives with commas between, and the keys of the candidates that no other beats in all of them.
        best: Key of the candidate to ship; None where none was accepted.
        recommendation: Why that one, in a sentence.
        finals: The last comparison, by which the winner was found; None where there was none.
        speedup: How much faster the winner is than the baseline; None where that was not compared.
    """

    name: str
    baseline: Trial
    trials: tuple[Trial, ...]
    constraints: tuple[str, ...]
    frontiers: tuple[tuple[str, tuple[str, ...]], ...]
    best: str | None
    recommendation: str
    finals: Finals | None = None
    speedup: Speedup | None = None

    def _brief(self) -> str:
        best = next((f"best {it.candidate.label}" for it in self.trials if it.candidate.key == self.best), "no winner")
        counts = f"{len(self.accepted)} accepted, {len(self.rejected)} rejected, {len(self.failed)} failed"
        return f"{self.name}: {len(self.trials)} candidates, {counts}; {best}"

    @property
    def metric(self) -> str:
        """Name of what the candidates score."""
        return next((trial.metrics.metric for trial in (self.baseline, *self.trials) if trial.metrics), "accuracy")

    @property
    def metric_direction(self) -> MetricDirection:
        """Whether a higher or a lower score is better."""
        ran = (trial.metrics for trial in (self.baseline, *self.trials) if trial.metrics)
        return next((metrics.metric_direction for metrics in ran), "higher")

    @property
    def accepted(self) -> tuple[Trial, ...]:
        return tuple(trial for trial in self.trials if trial.is_accepted)

    @property
    def rejected(self) -> tuple[Trial, ...]:
        return tuple(trial for trial in self.trials if trial.status == "done" and trial.violations)

    @property
    def slower(self) -> tuple[Trial, ...]:
        """Pruned variants that are not faster than the unpruned model in the same precision and runtime."""
        return tuple(
            trial for trial in self.trials if any(item.constraint == FASTER_THAN_UNPRUNED for item in trial.violations)
        )

    @property
    def failed(self) -> tuple[Trial, ...]:
        return tuple(trial for trial in self.trials if trial.status == "failed")

    def trial(self, key: str) -> Trial:
        """The trial of a candidate.

        Args:
            key: Its `Candidate.key`.
        """
        return next(trial for trial in (self.baseline, *self.trials) if trial.candidate.key == key)


@dataclass(frozen=True, slots=True)
class SweepStatus(Shown):
    """How far a sweep is.

    Attributes:
        folder: Where the sweep is.
        name: Name of the sweep.
        total: Candidates to try; None until a run has planned it.
        done: Candidates that have figures.
        failed: Candidates that failed.
        accepted: Candidates that keep every constraint.
        pid: Process that runs it now; None where none does.
        host: Machine of that process; None where none runs it.
        unfinished: Labels of candidates that were begun and have no result.
        best: Key of the best candidate so far; None where none was accepted.
        recommendation: Why that one, in a sentence.
    """

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
