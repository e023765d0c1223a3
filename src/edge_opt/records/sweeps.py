"""Records of a sweep: candidates, their status and figures, and the columns of these figures.

CSV files, constraints, charts, the table of the page and docs/columns.md read the declarations of the columns.
"""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any, Literal

from edge_opt import units
from edge_opt.records.candidates import Candidate as Candidate
from edge_opt.records.candidates import SkippedCandidate as SkippedCandidate
from edge_opt.records.compression import Explanation
from edge_opt.records.fields import Record, Shown, by_name, field, record
from edge_opt.records.predictions import MemoryKind

TrialStatus = Literal["done", "failed"]
MetricDirection = Literal["higher", "lower"]
# Metrics that lie between 0 and 1; functions of users have the names from dice on.
SHARES = ("accuracy", "top5", "f1", "miou", "auroc", "dice", "iou", "jaccard", "precision", "recall")


def score_text(value: float, metric: str) -> str:
    """Return a value of a metric; a share of one as a percentage.

    >>> score_text(0.9722, "accuracy"), score_text(0.54854, "mae")
    ('97.2 %', '0.5485')
    """
    return f"{100 * value:.1f} %" if metric in SHARES else f"{value:.4g}"


# Where a batch that is a mapping has its labels; the first of these that it has.
LABELS = ("labels", "label", "y", "targets", "target")
# A pruned variant must also satisfy this; otherwise it is rejected with these words.
FASTER_THAN_UNPRUNED = "faster than unpruned"
Failure = Literal["raised", "out of memory", "timed out", "crashed", "no result"]
# Begins the remark on a variant whose training was left out.
MADE_WORSE = "fine-tuning made it worse: check the loss"


@record
class SpeedupRatio(Record):
    """A speedup with its interval: from interleaved measurements, or predicted for a target."""

    ratio: float = field("Time of the reference over time of this variant; above 1 is faster.")
    low: float = field("Lower end of its interval: 95 % where it was measured, 90 % where it was predicted.")
    high: float = field("Upper end of that interval.")


TargetKind = Literal["predicted", "measured"]


@record
class TargetFigures(Record):
    """What a variant takes on the target of a sweep; None where a figure is not known."""

    target: str = field("Name of the target.")
    platform: str = field("What the latency rests on: a platform, a calibration, a roofline or a measurement.")
    kind: TargetKind = field("Whether the latency was predicted, or measured there.")
    seconds: float | None = field("Seconds per call of the deployed batch.")
    low: float | None = field("Lower end of the 90 % interval.")
    high: float | None = field("Upper end of that interval.")
    ram_bytes: int | None = field("Estimated peak memory of one call.")
    flash_bytes: int | None = field("Bytes of the file.")
    energy_j: float | None = field("Joules per call; None where the power is not known.")
    speedup: SpeedupRatio | None = field("Over the baseline there; None: not known.", default=None)
    remarks: tuple[str, ...] = field("What a reader should know.", default=())


@record
class TrialMetrics(Shown):
    """The measurements of one candidate; None where a value is not known. Accuracies are between 0 and 1.

    Where `metric` names another metric than accuracy, the fields `accuracy`, `accuracy_low`, `accuracy_high` and
    `test_accuracy` hold that one, and `accuracy_drop` is by how much it is worse than the baseline's.
    """

    accuracy: float = field("Accuracy on the validation part, by which candidates are chosen.")
    accuracy_low: float = field("Lower end of its 95 % interval.")
    accuracy_high: float = field("Upper end of its 95 % interval.")
    accuracy_drop: float = field("Accuracy of the eager baseline minus the candidate's.")
    latency_s: float | None = field("Median seconds per batch, measured; None: not timed here.")
    latency_low_s: float | None = field("Lower end of its 95 % interval.")
    latency_high_s: float | None = field("Upper end of its 95 % interval.")
    latency_std_s: float | None = field("Standard deviation of the samples, in seconds.")
    latency_p95_s: float | None = field("95 in 100 batches take no longer, in seconds.")
    cpu_latency_s: float | None = field("Median seconds of CPU time per batch, all threads together.")
    batch_size: int = field("Samples in one batch.")
    throughput: float | None = field("Samples per second at the median latency.")
    model_bytes: int = field("Bytes of weights and buffers in memory.")
    size_bytes: int = field("Bytes of the file.")
    peak_memory_bytes: int = field("Estimated peak of weights, buffers, inputs and activations.")
    energy_j: float | None = field("Joules per batch.")
    energy_source: str = field("Where the energy comes from, in words.")
    macs: int = field("MACs of one batch.")
    params: int = field("Parameters.")
    macs_ratio: float = field("MACs over those of the baseline.")
    params_ratio: float = field("Parameters over those of the baseline.")
    effective_precision: str = field('What its layers really run in, such as "int8+fp32".')
    float_layers: tuple[str, ...] = field("Paths of layers that do not run in the requested precision.", default=())
    test_accuracy: float | None = field("Accuracy on the test data; only for reported candidates.", default=None)
    single_latency_s: float | None = field("Median seconds for one sample, measured.", default=None)
    peak_memory_kind: MemoryKind | None = field("Lifetimes in `peak_memory_bytes`: eager or planned.", default=None)
    remarks: tuple[str, ...] = field("What a reader should know.", default=())
    accuracy_drop_low: float | None = field("Lower end of the drop's paired 95 % interval.", default=None)
    accuracy_drop_high: float | None = field("Upper end of that interval.", default=None)
    deploy_batch: int | None = field("Batch size at deployment; its latency ranks candidates.", default=None)
    deploy_latency_s: float | None = field("Measured seconds per call of that batch.", default=None)
    deploy_latency_low_s: float | None = field("Lower end of its 95 % interval.", default=None)
    deploy_latency_high_s: float | None = field("Upper end of its 95 % interval.", default=None)
    measured_memory_bytes: int | None = field("Peak growth of resident memory over the idle process.", default=None)
    train_flops: int | None = field("FLOPs of one fine-tuning step of the float model.", default=None)
    train_peak_memory_bytes: int | None = field("Estimated peak bytes of that step.", default=None)
    is_disturbed: bool = field("Whether noise disturbed the latency that ranks it, also on retry.", default=False)
    disturbed_times: tuple[str, ...] = field("Columns with disturbed times, such as `deploy_latency_ms`.", default=())
    answers: str = field("Correct validation samples as bits, in base 64; empty: no shares.", default="")
    replicates: tuple[float, ...] = field("Scores on bootstrap samples, the same for every candidate.", default=())
    metric: str = field('What is scored: "accuracy", or the metric that was set.', default="accuracy")
    metric_direction: MetricDirection = field("Whether a higher or a lower score is better.", default="higher")
    machine: str = field('Where it was timed, if that was a board; "" is the machine of the sweep.', default="")
    target: TargetFigures | None = field("What it takes on the target of the sweep; None: no target.", default=None)

    @property
    def comparable_score(self) -> float:
        """The score, turned so that more is better."""
        return self.accuracy if self.metric_direction == "higher" else -self.accuracy

    @property
    def energy_proxy_j(self) -> float | None:
        """The energy where it is power times latency; None where a meter or a model says it, or it is not known."""
        return self.energy_j if self.energy_source.startswith("proxy") else None

    @property
    def energy_proxy_note(self) -> str | None:
        """The assumption behind the energy proxy; None if the energy is not a proxy."""
        return self.energy_source if self.energy_source.startswith("proxy") else None

    @property
    def timed_on(self) -> str | None:
        """The board it was timed on; None where that was the machine of the sweep."""
        return self.machine or None

    @property
    def ranked_latency_s(self) -> float:
        """The time by which candidates are ranked: on the target, else of the deployed batch; infinite: not known."""
        seconds = self._ranked[0]
        return math.inf if seconds is None else seconds

    @property
    def ranked_low_s(self) -> float | None:
        """Lower end of the interval of that time: 90 % on a target, 95 % where it was measured here."""
        return self._ranked[1]

    @property
    def ranked_high_s(self) -> float | None:
        """Upper end of that interval."""
        return self._ranked[2]

    @property
    def _ranked(self) -> tuple[float | None, float | None, float | None]:
        if self.target is not None:
            return self.target.seconds, self.target.low, self.target.high
        if self.deploy_latency_s is None:
            return self.latency_s, self.latency_low_s, self.latency_high_s
        return self.deploy_latency_s, self.deploy_latency_low_s, self.deploy_latency_high_s

    @property
    def ranked_batch(self) -> int:
        """Samples of the batch whose time that is."""
        is_deployed = self.target is not None or self.deploy_latency_s is not None
        return self.deploy_batch or 1 if is_deployed else self.batch_size

    @property
    def target_name(self) -> str | None:
        """The target of the sweep."""
        return None if self.target is None else self.target.target

    @property
    def target_latency_s(self) -> float | None:
        """Seconds per call of the deployed batch on the target; `target_latency_kind` says predicted or measured."""
        return None if self.target is None else self.target.seconds

    @property
    def target_low_s(self) -> float | None:
        """Lower end of its 90 % interval."""
        return None if self.target is None else self.target.low

    @property
    def target_high_s(self) -> float | None:
        """Upper end of its 90 % interval."""
        return None if self.target is None else self.target.high

    @property
    def target_kind(self) -> str | None:
        """Whether the latency on the target was predicted or measured there."""
        return None if self.target is None else self.target.kind

    @property
    def target_platform(self) -> str | None:
        """What the prediction rests on: a platform with its runtime and threads, a calibration, or a roofline."""
        return None if self.target is None else self.target.platform

    @property
    def target_ram_bytes(self) -> int | None:
        """Estimated peak memory of one call on the target: weights, inputs and activations, without the runtime."""
        return None if self.target is None else self.target.ram_bytes

    @property
    def target_flash_bytes(self) -> int | None:
        """Bytes that the file takes on the target."""
        return None if self.target is None else self.target.flash_bytes

    @property
    def target_energy_j(self) -> float | None:
        """Joules per call on the target: its power at work times the latency, where the power is known."""
        return None if self.target is None else self.target.energy_j


@record
class Violation(Record):
    """A constraint that does not hold."""

    constraint: str = field("The constraint as it was written.")
    metric: str = field("Name of the figure with its unit.")
    value: float | None = field("The figure in that unit; None where it is not known.")
    limit: float = field("The limit in that unit.")

    def __str__(self) -> str:
        if self.constraint == FASTER_THAN_UNPRUNED:
            return f"not {FASTER_THAN_UNPRUNED}"
        # Figures of a target are predicted, estimated or measured; their columns say which.
        how = "it is" if self.metric.startswith("target_") else "measured"
        return f"{self.constraint}, {'unknown' if self.value is None else f'{how} {self.value:.4g}'}"

    @property
    def excess(self) -> float | None:
        """By how much the value is beyond the limit; None where the value is not known."""
        return None if self.value is None else abs(self.value - self.limit)


@record
class Undecided(Record):
    """A constraint that a predicted figure may hold or not: its limit lies inside the figure's interval."""

    constraint: str = field("The constraint as it was written.")
    metric: str = field("Name of the figure with its unit.")
    value: float = field("The predicted figure in that unit.")
    limit: float = field("The limit in that unit.")
    probability: float | None = field("Probability that it holds; None: an end of the interval is not known.")

    def __str__(self) -> str:
        likely = "" if self.probability is None else f", holds with {100 * self.probability:.0f} %"
        return f"{self.constraint}, predicted {self.value:.4g}{likely}"


@record
class Trial(Shown):
    """The result of one candidate: its metrics, or why it has none."""

    candidate: Candidate = field("The candidate.")
    status: TrialStatus = field("Whether it ran to its end.")
    metrics: TrialMetrics | None = field("What was found; None where it failed.")
    failure: Failure | None = field("How it failed; None where it did not.")
    reason: str = field('Why it failed, in words; "" where it did not.')
    violations: tuple[Violation, ...] = field("Constraints that do not hold.")
    seconds: float = field("How long building and measuring took.")
    attempts: int = field("How often it was tried.", default=1)
    undecided: tuple[Undecided, ...] = field("Constraints that a prediction leaves open.", default=())

    @property
    def is_accepted(self) -> bool:
        """It ran, and every constraint holds."""
        return self.status == "done" and not self.violations and not self.undecided

    @property
    def is_undecided(self) -> bool:
        """It ran, no constraint fails, and some are open."""
        return self.status == "done" and not self.violations and bool(self.undecided)

    @property
    def probability(self) -> float | None:
        """The probability that all open constraints hold, taken as independent; None where it is not known."""
        chances = [item.probability for item in self.undecided]
        return None if None in chances else math.prod(chance for chance in chances if chance is not None)

    @property
    def verdict(self) -> str:
        """One word and the reason: `accepted`, `rejected (size_mb <= 1, measured 1.2)`, `failed (timed out: ...)`."""
        if self.status == "failed":
            return f"failed ({self.failure}: {self.reason.replace('edge_opt.errors.', '')})"
        word = "rejected" if self.violations else "undecided" if self.undecided else "accepted"
        remarks = () if self.metrics is None else self.metrics.remarks
        worse = [MADE_WORSE for remark in remarks if remark.startswith(MADE_WORSE)]
        reasons = "; ".join(map(str, (*(self.violations or self.undecided), *worse)))
        batch = 1 if self.metrics is None else self.metrics.batch_size
        if batch > 1 and any(item.metric == "latency_ms" for item in self.violations):
            reasons += f" for the data's batch of {batch}; deploy_latency_ms is that of the deployed batch"
        return f"{word} ({reasons})" if reasons else word


@record
class Finalist(Record):
    """One variant of the last comparison."""

    candidate: Candidate = field("The variant; it may be outside the space, as the baseline is.")
    seconds: float = field("Seconds per call.")
    low: float = field("Lower end of its 95 % interval.")
    high: float = field("Upper end of its 95 % interval.")
    std_s: float = field("Standard deviation of the samples, in seconds.")
    p95_s: float = field("95 in 100 samples take no longer, in seconds.")
    speedup: SpeedupRatio = field("Its speedup over the baseline.")
    logs: tuple[float, ...] = field("Logarithms of seconds by part of the session, aligned across finalists.")


@record
class Finals(Shown):
    """The baseline and the finalists, timed interleaved in several processes. Only these are compared."""

    batch_size: int = field("Samples in one call: the batch that is deployed.")
    threads: int = field("Threads that each used.")
    clock: Literal["wall", "cpu"] = field('"cpu" (CPU time) where other programs disturbed the wall clock.')
    sessions: int = field("Processes that timed them, interleaved; disturbed ones are repeated.")
    is_disturbed: bool = field("Too few of them were undisturbed: intervals may be too narrow.")
    remarks: tuple[str, ...] = field("What disturbed it, and which variants could not be timed.")
    finalists: tuple[Finalist, ...] = field("The variants, the baseline first.")

    def of(self, candidate: Candidate) -> Finalist | None:
        """Return the times of a candidate; None if it was not a finalist.

        Args:
            candidate: The candidate.
        """
        return next((item for item in self.finalists if item.candidate == candidate), None)


@record
class Speedup(Record):
    """Speedup of the winner over the baseline, and its three parts; their product is the whole."""

    whole: SpeedupRatio = field("Speedup of the winner over the baseline.")
    runtime: SpeedupRatio | None = field("Speedup of the runtime alone; None: not timed.")
    precision: SpeedupRatio | None = field("Further speedup of its precision.")
    pruning: SpeedupRatio | None = field("Further speedup of pruning.")
    batch_size: int = field("Samples in one call.")
    clock: Literal["wall", "cpu", "predicted"] = field("Whose seconds are compared, as in `Finals`, or predicted.")
    is_disturbed: bool = field("As in `Finals`.")


@record
class TargetWinner(Record):
    """The candidate to ship to one of several targets."""

    target: str = field("Name of the target.")
    candidate: Candidate | None = field("The candidate; None where none keeps the budgets there.")
    figures: TargetFigures | None = field("What it takes there.")
    status: str = field('"accepted", "undecided" with the probability that it keeps the budgets, or "none".')
    recommendation: str = field("Why that one, in a sentence.")


@record
class SweepResult(Shown):
    """Every candidate with its result."""

    name: str = field("Name of the sweep.")
    baseline: Trial = field("What the others are compared with.")
    trials: tuple[Trial, ...] = field("The result of each candidate.")
    constraints: tuple[str, ...] = field("The constraints as they were written.")
    frontiers: tuple[tuple[str, tuple[str, ...]], ...] = field("Objectives, and their Pareto-optimal candidates.")
    best: str | None = field("Key of the candidate to ship; None where none was accepted.")
    recommendation: str = field("Why that one, in a sentence.")
    finals: Finals | None = field("The final comparison that chose the winner; None: there was none.", default=None)
    speedup: Speedup | None = field("Speedup of the winner over the baseline; None: not compared.", default=None)
    winners: tuple[TargetWinner, ...] = field("The winner of each target, where there are several.", default=())
    explanation: Explanation | None = field(
        "Why the winner is not faster on the target; None: no target, or not known.", default=None
    )
    skipped: tuple[SkippedCandidate, ...] = field("Predicted to miss a latency budget.", default=())

    @property
    def skipping(self) -> str:
        """How many candidates were skipped, and how right that was where they were built all the same; "" if none."""
        if not self.skipped:
            return ""
        checked = [item for item in self.skipped if item.is_right is not None]
        right = sum(bool(item.is_right) for item in checked)
        unbuilt = sum(not item.is_built for item in self.skipped)
        text = f"{unbuilt} skipped, predicted to miss a latency budget with 95 % confidence"
        return f"{text}; of {len(checked)} built all the same {right} missed it" if checked else text

    def _brief(self) -> str:
        best = next((f"best {it.candidate.title}" for it in self.trials if it.candidate.key == self.best), "no winner")
        counts = f"{len(self.accepted)} accepted, {len(self.rejected)} rejected, {len(self.failed)} failed"
        counts += f", {self.skipping}" if self.skipped else ""
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
    def undecided(self) -> tuple[Trial, ...]:
        """Candidates that may keep the budgets: the most likely first."""
        open_ones = [trial for trial in self.trials if trial.is_undecided]
        return tuple(sorted(open_ones, key=lambda trial: -(trial.probability or 0.0)))

    @property
    def target(self) -> str | None:
        """The target that decides; None where the times of this machine do."""
        return next((trial.metrics.target_name for trial in (self.baseline, *self.trials) if trial.metrics), None)

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
        """Return the trial of a candidate.

        Args:
            key: Its `Candidate.key`.
        """
        return by_name("trial", key, ((trial.candidate.key, trial) for trial in (self.baseline, *self.trials)))


@record
class SweepStatus(Shown):
    """How far a sweep is."""

    folder: str = field("Where the sweep is.")
    name: str = field("Name of the sweep.")
    total: int | None = field("Candidates to try; None until a run has planned it.")
    done: int = field("Candidates that have figures.")
    failed: int = field("Candidates that failed.")
    accepted: int = field("Candidates that keep every constraint.")
    pid: int | None = field("Process that runs it now; None where none does.")
    host: str | None = field("Machine of that process; None where none runs it.")
    unfinished: tuple[str, ...] = field("Labels of candidates that were begun and have no result.")
    best: str | None = field("Key of the best candidate so far; None where none was accepted.")
    recommendation: str = field("Why that one, in a sentence.")
    stage: str = field("What the run does before its first candidate: training or screening.", default="")

    @property
    def left(self) -> int | None:
        """Candidates without a result yet."""
        return None if self.total is None else max(0, self.total - self.done - self.failed)

    @property
    def is_running(self) -> bool:
        return self.pid is not None


# Figures of a trial, each declared once

ColumnKind = Literal["text", "number", "count", "share", "rate", "bytes", "time", "energy"]
_DESCRIPTIONS = {item.name: item.metadata["description"] for item in fields(TrialMetrics)}
_UNITS = {"_ms": "ms", "_mb": "MiB", "_kib": "KiB", "_j": "J", "_sps": "samples/s"}


@record
class TrialColumn(Record):
    """One figure of a trial."""

    name: str = field("Its column in files; the last part is its unit.")
    source: str = field("Field or property of `TrialMetrics`, in bytes, seconds or joules.")
    kind: ColumnKind = field("What it is.")
    title: str = field("What people read above it; a column without one is in files only.", default="")
    metric: str = field('Its name in constraints, without a unit; "" where it cannot be limited.', default="")
    better: Literal["higher", "lower", ""] = field('Which way is better; "" where no chart has it.', default="")
    low: str = field('Column of the lower end of its 95 % interval; "" where it has none.', default="")
    high: str = field("Column of the upper end.", default="")

    @property
    def unit(self) -> str:
        """The unit in which files and charts have it; "" for counts, shares and text."""
        return next((unit for ending, unit in _UNITS.items() if self.name.endswith(ending)), "")

    @property
    def help(self) -> str:
        """The description of the field."""
        text = _DESCRIPTIONS.get(self.source) or getattr(TrialMetrics, self.source).__doc__
        return str(text)

    def read(self, metrics: TrialMetrics) -> Any:
        """Return the figure in bytes, seconds or joules; None where it is not known.

        Args:
            metrics: What was found out about the trial.
        """
        return getattr(metrics, self.source)

    def value(self, metrics: TrialMetrics) -> Any:
        """Return the figure as files have it: in milliseconds and MiB, several texts as one.

        Args:
            metrics: What was found out about the trial.
        """
        value = self.read(metrics)
        if isinstance(value, tuple):
            return "; ".join(value)
        if value is None or self.kind not in ("time", "bytes"):
            return value
        if self.kind == "time":
            return value * 1e3
        return value / 1024 if self.name.endswith("_kib") else units.megabytes(value)


# Names, units and order are those of the published pipeline's files; what it did not have stands behind. Some figures
# have two names there.
# fmt: off
TRIAL_COLUMNS = (
    TrialColumn("accuracy", "accuracy", "share", "Validation accuracy", "accuracy", "higher",
                "accuracy_ci95_low", "accuracy_ci95_high"),
    TrialColumn("accuracy_ci95_low", "accuracy_low", "share"),
    TrialColumn("accuracy_ci95_high", "accuracy_high", "share"),
    TrialColumn("accuracy_drop", "accuracy_drop", "share", "Accuracy drop", "accuracy_drop", "",
                "accuracy_drop_ci95_low", "accuracy_drop_ci95_high"),
    TrialColumn("accuracy_drop_ci95_low", "accuracy_drop_low", "share"),
    TrialColumn("accuracy_drop_ci95_high", "accuracy_drop_high", "share"),
    TrialColumn("test_accuracy", "test_accuracy", "share", "Test accuracy", "test_accuracy"),
    TrialColumn("latency_ms", "latency_s", "time", "Latency", "latency", "lower",
                "latency_ci95_low_ms", "latency_ci95_high_ms"),
    TrialColumn("latency_median_ms", "latency_s", "time"),
    TrialColumn("latency_ci95_low_ms", "latency_low_s", "time"),
    TrialColumn("latency_ci95_high_ms", "latency_high_s", "time"),
    TrialColumn("latency_std_ms", "latency_std_s", "time"),
    TrialColumn("latency_p95_ms", "latency_p95_s", "time", "Latency (95th percentile)", "latency_p95", "lower"),
    TrialColumn("cpu_latency_ms", "cpu_latency_s", "time", "", "cpu_latency"),
    TrialColumn("single_latency_ms", "single_latency_s", "time", "", "single_latency"),
    TrialColumn("deploy_batch", "deploy_batch", "number", "Batch size"),
    TrialColumn("deploy_latency_ms", "deploy_latency_s", "time", "Latency", "deploy_latency", "lower",
                "deploy_latency_ci95_low_ms", "deploy_latency_ci95_high_ms"),
    TrialColumn("deploy_latency_ci95_low_ms", "deploy_latency_low_s", "time"),
    TrialColumn("deploy_latency_ci95_high_ms", "deploy_latency_high_s", "time"),
    TrialColumn("batch_size", "batch_size", "number", "Batch size of the data"),
    TrialColumn("throughput_sps", "throughput", "rate", "Throughput", "throughput", "higher"),
    TrialColumn("model_memory_mb", "model_bytes", "bytes", "", "model"),
    TrialColumn("memory_mb", "model_bytes", "bytes", "Weights"),
    TrialColumn("estimated_runtime_memory_mb", "peak_memory_bytes", "bytes"),
    TrialColumn("peak_memory_mb", "peak_memory_bytes", "bytes", "Peak memory (estimated)", "peak_memory", "lower"),
    TrialColumn("measured_memory_mb", "measured_memory_bytes", "bytes", "Memory (measured)", "measured_memory",
                "lower"),
    TrialColumn("train_flops", "train_flops", "count", "FLOPs of a fine-tuning step", "train_flops"),
    TrialColumn("train_peak_memory_mb", "train_peak_memory_bytes", "bytes", "Peak of a fine-tuning step",
                "train_peak_memory"),
    TrialColumn("size_mb", "size_bytes", "bytes", "Size", "size", "lower"),
    TrialColumn("energy_j", "energy_j", "energy", "Energy", "energy", "lower"),
    TrialColumn("energy_proxy_j", "energy_proxy_j", "energy"),
    TrialColumn("energy_proxy_note", "energy_proxy_note", "text"),
    TrialColumn("energy_source", "energy_source", "text", "Energy source"),
    TrialColumn("target", "target_name", "text"),
    TrialColumn("target_latency_ms", "target_latency_s", "time", "Latency on the target", "target_latency", "lower",
                "target_latency_low_ms", "target_latency_high_ms"),
    TrialColumn("target_latency_low_ms", "target_low_s", "time"),
    TrialColumn("target_latency_high_ms", "target_high_s", "time"),
    TrialColumn("target_latency_kind", "target_kind", "text", "Kind of that latency"),
    TrialColumn("target_platform", "target_platform", "text", "Rests on"),
    TrialColumn("target_ram_kib", "target_ram_bytes", "bytes", "RAM on the target (estimated)", "target_ram", "lower"),
    TrialColumn("target_flash_kib", "target_flash_bytes", "bytes", "Flash on the target", "target_flash", "lower"),
    TrialColumn("target_energy_j", "target_energy_j", "energy", "Energy on the target (estimated)", "target_energy",
                "lower"),
    TrialColumn("macs", "macs", "count", "MACs", "macs", "lower"),
    TrialColumn("params", "params", "count", "Parameters", "params", "lower"),
    TrialColumn("macs_ratio", "macs_ratio", "share", "", "macs_ratio"),
    TrialColumn("params_ratio", "params_ratio", "share", "", "params_ratio"),
    TrialColumn("machine", "timed_on", "text"),
    TrialColumn("effective_precision", "effective_precision", "text", "Precision in use"),
    TrialColumn("float_layers", "float_layers", "text"),
    TrialColumn("remarks", "remarks", "text", "Remarks"),
)
# fmt: on
BY_NAME = {column.name: column for column in TRIAL_COLUMNS}
