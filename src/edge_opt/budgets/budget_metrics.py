"""The figures that a budget can limit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Generic, TypeVar

from edge_opt import units
from edge_opt.boards.capacity import peak_memory
from edge_opt.errors import InvalidInput
from edge_opt.records.measurements import Interval, Latency
from edge_opt.records.profiles import FigureUnit, ModelProfile
from edge_opt.records.sweeps import SHARES, TrialMetrics
from edge_opt.records.training_steps import TrainingCost

Kind = FigureUnit
S = TypeVar("S")

# As everywhere here, a MB is 2**20 bytes.
_UNITS: Mapping[Kind, Mapping[str, float]] = {
    "bytes": {"bytes": 1, "kb": 2**10, "mb": units.MIB, "gb": 2**30},
    "time": {"s": 1.0, "ms": 1e-3, "us": 1e-6},
    "energy": {"j": 1.0, "mj": 1e-3, "kj": 1e3},
}


@dataclass(frozen=True, slots=True)
class Metric(Generic[S]):
    """One figure of a profile or of a trial. `read` gives it in bytes, seconds, joules; None where it is not known.

    `family` is the name without its unit, and `unit` is that unit, "" for counts and shares. `interval` is how well a
    figure is known: a measured or predicted one, or one that is only a lower bound. `is_signed` says that
    it can be below zero, `is_trained` that it is one of a training step, which is traced for it.
    """

    name: str
    family: str
    kind: Kind
    unit: str
    scale: float
    read: Callable[[S], float | None]
    interval: Callable[[S], Interval | None]
    is_signed: bool = False
    is_measured: bool = False
    is_predicted: bool = False
    is_trained: bool = False

    def value(self, subject: S) -> float | None:
        """Return the figure in the metric's own unit."""
        figure = self.read(subject)
        return None if figure is None else figure / self.scale

    def bounds(self, subject: S) -> Interval | None:
        """Return the interval of the figure in the metric's own unit; None where it is exact or its noise unknown."""
        interval = self.interval(subject)
        return None if interval is None else Interval(interval.low / self.scale, interval.high / self.scale)


def _family(
    name: str,
    kind: Kind,
    read: Callable[[S], float | None],
    interval: Callable[[S], Interval | None] = lambda _: None,
    **flags: bool,
) -> Iterator[Metric[S]]:
    """Yield the metric in each unit of its kind: latency_s, latency_ms, latency_us."""
    for unit, scale in _UNITS.get(kind, {"": 1.0}).items():
        # `bytes_moved` has its unit in front.
        full = name if not unit or (name.startswith("bytes") and unit == "bytes") else f"{name}_{unit}"
        yield Metric(full, name, kind, unit, scale, read, interval, **flags)


def _table(*families: Iterator[Metric[S]]) -> Mapping[str, Metric[S]]:
    return MappingProxyType({metric.name: metric for family in families for metric in family})


def _priced(name: str, kind: Kind, read: Callable[[ModelProfile], float]) -> Iterator[Metric[ModelProfile]]:
    """Yield a metric that is only a lower bound where an operator has no price."""

    def interval(profile: ModelProfile) -> Interval | None:
        return Interval(read(profile), math.inf) if profile.totals.is_lower_bound else None

    return _family(name, kind, read, interval)


def _latency(pick: Callable[[Latency], float]) -> Callable[[ModelProfile], float | None]:
    return lambda profile: None if profile.measurement is None else pick(profile.measurement.latency)


def _latency_interval(profile: ModelProfile) -> Interval | None:
    return None if profile.measurement is None else profile.measurement.latency.median_interval_s


def _measured_memory(profile: ModelProfile) -> float | None:
    if profile.measurement is None or profile.measurement.memory is None:
        return None
    return profile.measurement.memory.peak_bytes


def _energy(profile: ModelProfile) -> float | None:
    if profile.measurement is None or profile.measurement.energy is None:
        return None
    return profile.measurement.energy.joules


def _predicted(profile: ModelProfile) -> float | None:
    return None if profile.prediction is None else profile.prediction.seconds


def _predicted_interval(profile: ModelProfile) -> Interval | None:
    prediction = profile.prediction
    if prediction is None or prediction.seconds is None:
        return None
    # An end that is not known is open.
    return Interval(prediction.low or 0.0, math.inf if prediction.high is None else prediction.high)


def _trained(name: str, kind: Kind, read: Callable[[TrainingCost], int]) -> Iterator[Metric[ModelProfile]]:
    """Yield a figure of a training step."""

    def value(profile: ModelProfile) -> float | None:
        return None if profile.training is None else read(profile.training)

    def interval(profile: ModelProfile) -> Interval | None:
        step = profile.training
        return Interval(read(step), math.inf) if step and step.is_lower_bound and kind == "count" else None

    return _family(name, kind, value, interval, is_trained=True)


PROFILE_METRICS: Mapping[str, Metric[ModelProfile]] = _table(
    _priced("macs", "count", lambda profile: profile.totals.macs),
    _priced("flops", "count", lambda profile: profile.totals.flops),
    _priced("other_ops", "count", lambda profile: profile.totals.other_ops),
    _family("params", "count", lambda profile: profile.totals.params),
    _family("trainable_params", "count", lambda profile: profile.totals.trainable_params),
    _family("layers", "count", lambda profile: sum(layer.call.is_leaf for layer in profile.layers)),
    _family("operators", "count", lambda profile: len(profile.trace.ops)),
    _family("unpriced", "count", lambda profile: sum(item.count for item in profile.unpriced)),
    _family("coverage", "share", lambda profile: profile.coverage),
    _family("param", "bytes", lambda profile: profile.totals.param_bytes),
    _family("size", "bytes", lambda profile: profile.totals.param_bytes + profile.totals.buffer_bytes),
    _family("model", "bytes", lambda profile: profile.totals.param_bytes + profile.totals.buffer_bytes),
    _family("input", "bytes", lambda profile: profile.totals.input_bytes),
    _family("activation", "bytes", lambda profile: profile.totals.activation_bytes),
    _family("peak_activation", "bytes", lambda profile: profile.peak.live_bytes),
    _family("peak_memory", "bytes", lambda profile: peak_memory(profile).total_bytes),
    _family("planned_memory", "bytes", lambda profile: peak_memory(profile, lifetimes="planner").total_bytes),
    _priced("bytes_read", "bytes", lambda profile: profile.totals.bytes_read),
    _priced("bytes_written", "bytes", lambda profile: profile.totals.bytes_written),
    _priced("bytes_moved", "bytes", lambda profile: profile.totals.bytes_read + profile.totals.bytes_written),
    _trained("train_flops", "count", lambda step: step.flops),
    _trained("train_peak_memory", "bytes", lambda step: step.peak_bytes),
    _family("latency", "time", _latency(lambda latency: latency.median_s), _latency_interval, is_measured=True),
    _family("latency_min", "time", _latency(lambda latency: latency.minimum_s), is_measured=True),
    _family("latency_p95", "time", _latency(lambda latency: latency.p95_s), is_measured=True),
    _family("latency_p99", "time", _latency(lambda latency: latency.p99_s), is_measured=True),
    _family("throughput", "rate", _latency(lambda latency: latency.throughput), is_measured=True),
    _family("measured_memory", "bytes", _measured_memory, is_measured=True),
    _family("energy", "energy", _energy, is_measured=True),
    # No energy: a prediction has no interval for it, so a limit next to it would pass for kept.
    _family("predicted", "time", _predicted, _predicted_interval, is_predicted=True),
)


def _interval(low: float | None, high: float | None) -> Interval | None:
    return None if low is None or high is None else Interval(low, high)


def _scores(name: str, kind: Kind) -> Iterator[Metric[TrialMetrics]]:
    """Yield the score of a metric, how much worse it is than the baseline's, and the score on the test part."""
    is_signed = kind != "share"
    yield from _family(
        name,
        kind,
        lambda trial: trial.accuracy,
        lambda trial: Interval(trial.accuracy_low, trial.accuracy_high),
        is_signed=is_signed,
    )
    yield from _family(
        f"{name}_drop",
        kind,
        lambda trial: trial.accuracy_drop,
        lambda trial: _interval(trial.accuracy_drop_low, trial.accuracy_drop_high),
        is_signed=True,
    )
    yield from _family(f"test_{name}", kind, lambda trial: trial.test_accuracy, is_signed=is_signed)


TRIAL_METRICS: Mapping[str, Metric[TrialMetrics]] = _table(
    _scores("accuracy", "share"),
    _family(
        "latency",
        "time",
        lambda trial: trial.latency_s,
        lambda trial: Interval(trial.latency_low_s, trial.latency_high_s),
    ),
    _family("latency_p95", "time", lambda trial: trial.latency_p95_s),
    _family("cpu_latency", "time", lambda trial: trial.cpu_latency_s),
    _family("single_latency", "time", lambda trial: trial.single_latency_s),
    _family(
        "deploy_latency",
        "time",
        lambda trial: trial.deploy_latency_s,
        lambda trial: _interval(trial.deploy_latency_low_s, trial.deploy_latency_high_s),
    ),
    _family("throughput", "rate", lambda trial: trial.throughput),
    _family("peak_memory", "bytes", lambda trial: trial.peak_memory_bytes),
    _family("measured_memory", "bytes", lambda trial: trial.measured_memory_bytes),
    _family("train_flops", "count", lambda trial: trial.train_flops),
    _family("train_peak_memory", "bytes", lambda trial: trial.train_peak_memory_bytes),
    _family("model", "bytes", lambda trial: trial.model_bytes),
    _family("size", "bytes", lambda trial: trial.size_bytes),
    _family("energy", "energy", lambda trial: trial.energy_j),
    _family("macs", "count", lambda trial: trial.macs),
    _family("params", "count", lambda trial: trial.params),
    _family("macs_ratio", "share", lambda trial: trial.macs_ratio),
    _family("params_ratio", "share", lambda trial: trial.params_ratio),
)


@cache
def trial_metrics(metric: str = "accuracy") -> Mapping[str, Metric[TrialMetrics]]:
    """Return the figures of a trial where another metric than accuracy is scored; constraints then use its name.

    >>> sorted(set(trial_metrics("mae")) - set(TRIAL_METRICS))
    ['mae', 'mae_drop', 'test_mae']
    """
    if metric == "accuracy":
        return TRIAL_METRICS
    scores = {score.name: score for score in _scores(metric, "share" if metric in SHARES else "count")}
    others = {name: other for name, other in TRIAL_METRICS.items() if "accuracy" not in name}
    families = {other.family for other in others.values()}
    taken = [name for name in scores if name in others or name in families]
    if taken:
        raise InvalidInput(
            f"a metric cannot be called {metric!r}: {taken[0]} means something else; rename the function"
        )
    return MappingProxyType({**scores, **others})
