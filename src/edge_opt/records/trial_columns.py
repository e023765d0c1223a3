"""The figures of a trial, each declared once, and which trials no other beats in some of them.

CSV files, constraints, charts, the table of the page and docs/columns.md read the declarations.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, Literal, NamedTuple

from edge_opt import units
from edge_opt.records.fields import Record, field, record
from edge_opt.records.sweeps import TrialMetrics

ColumnKind = Literal["text", "number", "count", "share", "rate", "bytes", "time", "energy"]
_DESCRIPTIONS = {item.name: item.metadata["description"] for item in fields(TrialMetrics)}
_UNITS = {"_ms": "ms", "_mb": "MiB", "_j": "J", "_sps": "samples/s"}


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
        return value * 1e3 if self.kind == "time" else units.megabytes(value)


# Names, units and order are those of the published pipeline's files; what it did not have stands behind. Some figures
# have two names there.
# fmt: off
TRIAL_COLUMNS = (
    TrialColumn("accuracy", "accuracy", "share", "Accuracy", "accuracy", "higher",
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
    TrialColumn("latency_p95_ms", "latency_p95_s", "time", "Latency, 95th percentile", "latency_p95", "lower"),
    TrialColumn("cpu_latency_ms", "cpu_latency_s", "time", "", "cpu_latency"),
    TrialColumn("single_latency_ms", "single_latency_s", "time", "", "single_latency"),
    TrialColumn("deploy_batch", "deploy_batch", "number", "Deployed batch"),
    TrialColumn("deploy_latency_ms", "deploy_latency_s", "time", "Latency as deployed", "deploy_latency", "lower",
                "deploy_latency_ci95_low_ms", "deploy_latency_ci95_high_ms"),
    TrialColumn("deploy_latency_ci95_low_ms", "deploy_latency_low_s", "time"),
    TrialColumn("deploy_latency_ci95_high_ms", "deploy_latency_high_s", "time"),
    TrialColumn("batch_size", "batch_size", "number", "Batch"),
    TrialColumn("throughput_sps", "throughput", "rate", "Throughput", "throughput", "higher"),
    TrialColumn("model_memory_mb", "model_bytes", "bytes", "", "model"),
    TrialColumn("memory_mb", "model_bytes", "bytes", "Weights"),
    TrialColumn("estimated_runtime_memory_mb", "peak_memory_bytes", "bytes"),
    TrialColumn("peak_memory_mb", "peak_memory_bytes", "bytes", "Peak memory, estimated", "peak_memory", "lower"),
    TrialColumn("measured_memory_mb", "measured_memory_bytes", "bytes", "Memory, measured", "measured_memory", "lower"),
    TrialColumn("train_flops", "train_flops", "count", "FLOPs of a fine-tuning step", "train_flops"),
    TrialColumn("train_peak_memory_mb", "train_peak_memory_bytes", "bytes", "Peak of a fine-tuning step",
                "train_peak_memory"),
    TrialColumn("size_mb", "size_bytes", "bytes", "Size on disk", "size", "lower"),
    TrialColumn("energy_j", "energy_j", "energy", "Energy", "energy", "lower"),
    TrialColumn("energy_proxy_j", "energy_proxy_j", "energy"),
    TrialColumn("energy_proxy_note", "energy_proxy_note", "text"),
    TrialColumn("energy_source", "energy_source", "text", "Energy from"),
    TrialColumn("macs", "macs", "count", "MACs", "macs", "lower"),
    TrialColumn("params", "params", "count", "Params", "params", "lower"),
    TrialColumn("macs_ratio", "macs_ratio", "share", "", "macs_ratio"),
    TrialColumn("params_ratio", "params_ratio", "share", "", "params_ratio"),
    TrialColumn("machine", "timed_on", "text"),
    TrialColumn("effective_precision", "effective_precision", "text", "Runs as"),
    TrialColumn("float_layers", "float_layers", "text"),
    TrialColumn("remarks", "remarks", "text", "Remarks"),
)
# fmt: on
BY_NAME = {column.name: column for column in TRIAL_COLUMNS}


class ObjectiveInterval(NamedTuple):
    """A figure with the interval it lies in; the less, the better."""

    low: float
    value: float
    high: float


Point = tuple[ObjectiveInterval, ...]


def dominates(one: Point, other: Point) -> bool:
    """Return whether `one` is no worse in value and both ends on every objective, and on some wholly better.

    On some objective even the worse end of `one` is better than the better end of `other`. For exact figures this is
    the ordinary dominance. Equal points do not dominate each other, and nothing dominates or is dominated by NaN.

    >>> fast, slow = (ObjectiveInterval(1.0, 1.0, 1.0),), (ObjectiveInterval(2.0, 2.0, 2.0),)
    >>> dominates(fast, slow), dominates(slow, fast), dominates(fast, fast)
    (True, False, False)
    >>> dominates((ObjectiveInterval(0.9, 1.0, 1.1),), (ObjectiveInterval(1.0, 1.2, 1.4),))  # better, but not surely so
    False
    """
    pairs = list(zip(one, other, strict=True))
    return all(x <= y for a, b in pairs for x, y in zip(a, b, strict=True)) and any(a.high < b.low for a, b in pairs)


def frontier(points: Sequence[Point]) -> tuple[int, ...]:
    """Return the indices of the points that no other dominates, in their order; a point with NaN is never among them.

    >>> exact = lambda *values: tuple(ObjectiveInterval(v, v, v) for v in values)
    >>> frontier([exact(1, 3), exact(2, 2), exact(3, 3), exact(2, 2), exact(math.nan, 0)])
    (0, 1, 3)
    """
    known = [index for index, point in enumerate(points) if not any(math.isnan(x) for span in point for x in span)]
    kept: list[int] = []
    # Whoever dominates has values that come earlier in this order, and dominance is transitive: what is kept suffices.
    for index in sorted(known, key=lambda index: [span.value for span in points[index]]):
        if not any(dominates(points[other], points[index]) for other in kept):
            kept.append(index)
    return tuple(sorted(kept))
