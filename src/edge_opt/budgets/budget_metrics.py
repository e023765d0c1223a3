"""The figures that a budget can limit, and budgets as people write them: `macs <= 600M`, or in pyproject.toml."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any, Generic, TypeVar, cast

from edge_opt import units
from edge_opt._support.json import read_document
from edge_opt.boards.capacity import peak_memory
from edge_opt.errors import BudgetError, EdgeOptError, InvalidInput
from edge_opt.records.measurements import Interval
from edge_opt.records.predictions import Prediction
from edge_opt.records.profiles import Budget, FigureUnit, Increase, ModelProfile, Relation
from edge_opt.records.sweeps import BY_NAME, SHARES, TRIAL_COLUMNS, TrialColumn, TrialMetrics
from edge_opt.records.training_steps import TrainingCost

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Kind = FigureUnit
S = TypeVar("S")

# As everywhere here, a MB is 2**20 bytes.
_UNITS: Mapping[Kind, Mapping[str, float]] = {
    "bytes": {"bytes": 1, "kb": 2**10, "kib": 2**10, "mb": units.MIB, "gb": 2**30},
    "time": {"s": 1.0, "ms": 1e-3, "us": 1e-6},
    "energy": {"j": 1.0, "mj": 1e-3, "kj": 1e3},
}

# Memory of microcontrollers is said in KiB.
_BINARY = {"kib": 2**10, "mib": units.MIB}


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
    more = _BINARY if kind == "bytes" and name.startswith("target_") else {}
    for unit, scale in {**_UNITS.get(kind, {"": 1.0}), **more}.items():
        # `bytes_moved` has its unit in front.
        full = name if not unit or (name.startswith("bytes") and unit == "bytes") else f"{name}_{unit}"
        yield Metric(full, name, kind, unit, scale, read, interval, **flags)


def _table(*families: Iterator[Metric[S]]) -> Mapping[str, Metric[S]]:
    return MappingProxyType({metric.name: metric for family in families for metric in family})


def _priced(name: str, kind: Kind, read: Callable[[ModelProfile], float]) -> Iterator[Metric[ModelProfile]]:
    """Yield a metric that is only a lower bound where an operator has no cost rule."""

    def interval(profile: ModelProfile) -> Interval | None:
        return Interval(read(profile), math.inf) if profile.totals.is_lower_bound else None

    return _family(name, kind, read, interval)


_FLAGS = {"measurement": "is_measured", "prediction": "is_predicted", "training": "is_trained"}


def _of(
    part: str,
    name: str,
    kind: Kind,
    read: Callable[[Any], float | None],
    interval: Callable[[Any], Interval | None] = lambda _: None,
) -> Iterator[Metric[ModelProfile]]:
    """Yield a metric of a part that a profile may lack: its measurement, prediction or training step."""

    def value(profile: ModelProfile) -> float | None:
        return None if getattr(profile, part) is None else read(getattr(profile, part))

    def bounds(profile: ModelProfile) -> Interval | None:
        return None if getattr(profile, part) is None else interval(getattr(profile, part))

    return _family(name, kind, value, bounds, **{_FLAGS[part]: True})


def _predicted_interval(prediction: Prediction) -> Interval | None:
    if prediction.seconds is None:
        return None
    # An end that is not known is open.
    return Interval(prediction.low or 0.0, math.inf if prediction.high is None else prediction.high)


def _train_flops_interval(step: TrainingCost) -> Interval | None:
    return Interval(step.flops, math.inf) if step.is_lower_bound else None


def _ram_on_target(profile: ModelProfile) -> float | None:
    """Return what one call takes there, as in sweeps: a microcontroller's arena, else the planned peak."""
    from edge_opt.boards.targets import find_spec

    prediction = profile.prediction
    if prediction is None or prediction.mcu is not None:
        return None if prediction is None or prediction.mcu is None else prediction.mcu.arena_bytes
    with suppress(EdgeOptError):  # a calibration, or a file that is gone
        if find_spec(prediction.target).microcontroller is not None:
            return None
    return peak_memory(profile, prediction.precision, lifetimes="planner").total_bytes


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
    _of("training", "train_flops", "count", lambda step: step.flops, _train_flops_interval),
    _of("training", "train_peak_memory", "bytes", lambda step: step.peak_bytes),
    _of("measurement", "latency", "time", lambda run: run.latency.median_s, lambda run: run.latency.median_interval_s),
    _of("measurement", "latency_min", "time", lambda run: run.latency.minimum_s),
    _of("measurement", "latency_p95", "time", lambda run: run.latency.p95_s),
    _of("measurement", "latency_p99", "time", lambda run: run.latency.p99_s),
    _of("measurement", "throughput", "rate", lambda run: run.latency.throughput),
    _of("measurement", "measured_memory", "bytes", lambda run: None if run.memory is None else run.memory.peak_bytes),
    _of("measurement", "energy", "energy", lambda run: None if run.energy is None else run.energy.joules),
    # No energy: a prediction has no interval for it, so a limit next to it would pass for kept.
    _of("prediction", "predicted", "time", lambda prediction: prediction.seconds, _predicted_interval),
    # Layers that leave an NPU for the CPU.
    _of("prediction", "cpu_layers", "count", lambda prediction: prediction.cpu_layers),
    _family("ram", "bytes", lambda profile: _ram_on_target(profile), is_predicted=True),
    # Of a microcontroller: the file with the code of TFLM.
    _of("prediction", "flash", "bytes", lambda prediction: prediction.mcu and prediction.mcu.flash_bytes),
)


def _trial_family(column: TrialColumn, metric: str) -> Iterator[Metric[TrialMetrics]]:
    """Yield a figure of a trial that can be limited; scores have the name of the metric that is scored."""
    is_score = "accuracy" in column.metric
    kind: Kind = cast(Kind, column.kind)
    if is_score and metric not in SHARES:
        kind = "count"

    def interval(trial: TrialMetrics) -> Interval | None:
        if not column.low:
            return None
        low, high = BY_NAME[column.low].read(trial), BY_NAME[column.high].read(trial)
        return None if low is None or high is None else Interval(low, high)

    is_signed = is_score and (kind != "share" or column.metric == "accuracy_drop")
    name = column.metric.replace("accuracy", metric)
    return _family(name, kind, column.read, interval, is_signed=is_signed)


def _trial_table(metric: str) -> Mapping[str, Metric[TrialMetrics]]:
    return _table(*(_trial_family(column, metric) for column in TRIAL_COLUMNS if column.metric))


TRIAL_METRICS = _trial_table("accuracy")


@cache
def trial_metrics(metric: str = "accuracy") -> Mapping[str, Metric[TrialMetrics]]:
    """Return the figures of a trial where another metric than accuracy is scored; constraints then use its name.

    >>> sorted(set(trial_metrics("mae")) - set(TRIAL_METRICS))
    ['mae', 'mae_drop', 'test_mae']
    """
    if metric == "accuracy":
        return TRIAL_METRICS
    taken = {name for other in TRIAL_METRICS.values() for name in (other.name, other.family)}
    taken -= {name for name in taken if "accuracy" in name}
    clash = next((name for name in (metric, f"{metric}_drop", f"test_{metric}") if name in taken), None)
    if clash is not None:
        raise InvalidInput(f"a metric cannot be called {metric!r}: {clash} means something else; rename the function")
    return _trial_table(metric)


# Every group matches, if only the empty string: its position is where the caret of an error points.
_BUDGET = re.compile(
    r"\s*(?P<name>[A-Za-z_]\w*|)"
    r"\s*(?P<relation><=|>=|[<>≤≥=]|)"
    r"\s*(?P<number>-?(?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?|)"
    r"\s*(?P<suffix>\S*)"
    r"\s*(?P<rest>.*)",
    re.DOTALL,
)
_PREFIXES = {"k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
# A difference of percentages is in points.
_HUNDREDTHS = ("%", "point", "points", "pp")
_RELATIONS: dict[str, Relation] = {"<=": "<=", "<": "<", ">=": ">=", ">": ">", "≤": "<=", "≥": ">="}
_KNOWN: Mapping[str, Metric[Any]] = {**TRIAL_METRICS, **PROFILE_METRICS}
# The names that figures of a target have in sweeps, and those that they have in a profile.
_OF_TARGET = (("target_latency_", "predicted_"), ("target_ram_", "ram_"), ("target_flash_", "flash_"))


def parse_budget(text: str, metrics: Mapping[str, Metric[Any]] = _KNOWN) -> Budget:
    """Return the budget that a text states; the limit is in the unit that the metric's name says.

    Counts take k, M, G and T, shares take % or points, sizes take any unit of sizes, such as MiB. A share of 1 or more
    without its unit is refused: 1 may mean 1 % or all. `metrics` are the names to choose from, such as
    `PROFILE_METRICS`.

    >>> parse_budget("size_mb <= 512 KiB").limit
    0.5
    >>> parse_budget("macs <= 600M").limit
    600000000.0
    >>> parse_budget("accuracy_drop < 1.5%")
    Budget(metric='accuracy_drop', relation='<', limit=0.015, text='accuracy_drop < 1.5%')
    """
    parts = _match(text)
    # A profile has `ram_kib` of its target; in a sweep the same figure stands beside those of this machine.
    other = next((own + parts["name"].removeprefix(name) for name, own in _OF_TARGET if name in parts["name"]), "")
    metric = metrics.get(parts["name"]) or metrics.get(f"target_{parts['name']}") or metrics.get(other)
    if metric is None:
        raise BudgetError(text, parts.start("name"), _unknown_metric(parts["name"], metrics))
    if parts["relation"] not in _RELATIONS:
        raise BudgetError(text, parts.start("relation"), "expected <=, <, >= or >")
    return Budget(metric.name, _RELATIONS[parts["relation"]], _value(parts, metric), text)


def parse_budgets(texts: Iterable[str | Budget], metrics: Mapping[str, Metric[Any]] = _KNOWN) -> tuple[Budget, ...]:
    """Return the budgets that texts state; refuse two that no figure can keep at once."""
    budgets = tuple(parse_budget(text, metrics) if isinstance(text, str) else text for text in texts)
    for least, most in product(budgets, repeat=2):
        low, high = metrics.get(least.metric), metrics.get(most.metric)
        is_pair = least.relation[0] == ">" and most.relation[0] == "<"
        if low is None or high is None or low.family != high.family or not is_pair:
            continue
        gap = least.limit * low.scale - most.limit * high.scale
        if gap > 0 or (gap == 0 and "=" not in least.relation[1:] + most.relation[1:]):
            raise InvalidInput(f"no figure can keep both {least.text!r} and {most.text!r}; drop one of them")
    return budgets


def parse_increase(text: str, metrics: Mapping[str, Metric[Any]] = PROFILE_METRICS) -> Increase:
    """Return how much a figure may grow, as in `peak_memory=5%` or `params=10k`; an amount is in the metric's unit.

    >>> parse_increase("peak_memory=5%")
    Increase(metric='peak_memory_mb', share=0.05, amount=None, text='peak_memory=5%')
    """
    parts = _match(text)
    name = parts["name"]
    # A name without its unit is the metric in the unit that people use.
    usual = (metric for metric in metrics.values() if metric.family == name and metric.unit in ("mb", "ms", "j"))
    metric = metrics.get(name) or next(usual, None)
    if metric is None:
        raise BudgetError(text, parts.start("name"), _unknown_metric(name, metrics))
    if parts["relation"] != "=":
        raise BudgetError(text, parts.start("relation"), "expected =, as in peak_memory=5%")
    if parts["number"] and parts["suffix"] == "%" and not parts["rest"]:
        return Increase(metric.name, _number(parts) / 100, None, text)
    if metric.name != name:
        problem = f"expected a percentage; for an amount, say the unit, as in {metric.name}=1"
        raise BudgetError(text, parts.start("suffix"), problem)
    return Increase(metric.name, None, _value(parts, metric), text)


def _unknown_metric(name: str, metrics: Mapping[str, Metric[Any]]) -> str:
    """Return the message for a name that is not a metric: the closest ones, or that it lacks its unit."""
    usual = "macs params latency_ms peak_memory_mb size_mb energy_j accuracy accuracy_drop train_peak_memory_mb".split()
    some = ", ".join(known for known in usual if known in metrics)
    if not name:
        return f"expected the name of a metric, such as {some}"
    with_unit = [metric.name for metric in metrics.values() if metric.family == name]
    close = with_unit or get_close_matches(name.lower(), metrics, n=2, cutoff=0.5)
    return f"unknown metric {name!r}; {'closest: ' + ', '.join(close) if close else 'metrics are ' + some}"


def _match(text: str) -> re.Match[str]:
    return cast("re.Match[str]", _BUDGET.match(text))  # the pattern matches any text


def _number(parts: re.Match[str]) -> float:
    if not parts["number"]:
        problem = "expected a number; an increase over a baseline is --max-increase macs=10%"
        raise BudgetError(parts.string, parts.start("number"), problem)
    value = float(parts["number"].replace("_", ""))
    if not math.isfinite(value):
        raise BudgetError(parts.string, parts.start("number"), "expected a number that is not beyond all bounds")
    return value


def _value(parts: re.Match[str], metric: Metric[Any]) -> float:
    """Return the number with its suffix, in the metric's unit, if the metric can have that value."""
    value = _number(parts)
    suffix, unit = parts["suffix"], metric.unit
    # The metric's own unit may be repeated; not as MJ, which is a billion mJ.
    spellings = {"energy": ("", unit, f"{unit[:-1]}J")}
    # Tables print sizes as KiB, MiB and GiB, which is what KB, MB and GB mean here.
    byte_unit = "bytes" if suffix in ("B", "b") else suffix.lower().replace("ib", "b")
    if suffix in _HUNDREDTHS and metric.kind == "share":
        value /= 100
    elif metric.kind == "bytes" and byte_unit in _UNITS["bytes"]:
        value *= _UNITS["bytes"][byte_unit] / metric.scale
    elif suffix in _PREFIXES and metric.kind in ("count", "rate"):
        value *= _PREFIXES[suffix]
    elif suffix not in spellings.get(metric.kind, ("", unit)):
        expected = "k, M, G or T, or the end of the number"
        if unit:
            expected = f"the end of the number: {metric.name} is in {unit} already"
        elif metric.kind == "share":
            expected = "%, points or the end of the number"
        raise BudgetError(parts.string, parts.start("suffix"), f"expected {expected}")
    problem = None
    if not math.isfinite(value):
        problem = "expected a number that is not beyond all bounds"
    elif value < 0 and not metric.is_signed:
        problem = f"expected a number that is not negative: {metric.name} never is"
    elif metric.kind == "share" and not metric.family.endswith("_ratio"):
        problem = _share_problem(value, parts, metric)
    if problem is not None:
        raise BudgetError(parts.string, parts.start("number"), problem)
    if parts["rest"]:
        raise BudgetError(parts.string, parts.start("rest"), "expected nothing more; write one budget at a time")
    return value


def _share_problem(value: float, parts: re.Match[str], metric: Metric[Any]) -> str | None:
    """Return why a number cannot be a share of one; 1 without a unit may mean 1 % or all."""
    if not parts["suffix"] and abs(value) >= 1:
        typed = parts["number"]
        spellings = f"{typed}%, {typed} point{'s' * (value != 1)} or {value / 100:.12g}"
        return f"{metric.name} is a share of one; write {spellings}"
    return f"expected at most 100%: {metric.name} is never more" if abs(value) > 1 else None


TABLE = "[tool.edge-opt.budgets]"


def configured_budgets(folder: Path) -> tuple[Budget, ...]:
    """Return the budgets in the pyproject.toml of a folder or of the nearest one above it; none without a table."""
    paths = (parent / "pyproject.toml" for parent in (folder, *folder.parents))
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        return ()
    data: Any = read_document(path, InvalidInput, "budgets are in its table tool.edge-opt.budgets", tomllib.loads)
    for step in ("tool", "edge-opt", "budgets"):
        data = data.get(step, {}) if isinstance(data, dict) else {}
    if not isinstance(data, dict):
        raise InvalidInput(f'{str(path)!r}: {TABLE} is not a table; write lines such as macs = "<= 600M" under it')
    where = f"{str(path)!r}, {TABLE}"
    budgets = []
    for name, value in data.items():
        if not isinstance(value, str):
            raise InvalidInput(f'{where}: {name} is {value!r}; write a limit in quotes, such as {name} = "<= {value}"')
        try:
            budgets.append(parse_budget(f"{name} {value.strip()}", PROFILE_METRICS))
        except BudgetError as error:
            raise InvalidInput(f"{where}: {error}") from error
    return tuple(budgets)
