"""`macs <= 600M`, or a table of pyproject.toml, to Budget."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn, cast

from edge_opt.budgets.budget_metrics import PROFILE_METRICS, TRIAL_METRICS, Metric
from edge_opt.errors import BudgetError, InvalidInput
from edge_opt.records.profiles import Budget, Increase, Relation

_NAME = re.compile(r"[A-Za-z_]\w*")
_RELATION = re.compile(r"<=|>=|[<>≤≥]")
_NUMBER = re.compile(r"-?(?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_WORD = re.compile(r"\S*")
_BLANK = re.compile(r"\s*")
_PREFIXES = {"k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_SPELLED = {"≤": "<=", "≥": ">="}
_KNOWN: Mapping[str, Metric[Any]] = {**TRIAL_METRICS, **PROFILE_METRICS}


def parse_budget(text: str, metrics: Mapping[str, Metric[Any]] = _KNOWN) -> Budget:
    """The budget that a text states; the limit is in the unit that the metric's name says.

    Counts take k, M, G and T, shares take %. `metrics` are the names to choose from, such as `PROFILE_METRICS`.

    >>> parse_budget("macs <= 600M").limit
    600000000.0
    >>> parse_budget("accuracy_drop < 1.5%")
    Budget(metric='accuracy_drop', relation='<', limit=0.015, text='accuracy_drop < 1.5%')
    """
    start = _end(_BLANK, text, 0)
    name = _NAME.match(text, start)
    if name is None:
        _refuse(text, start, f"expected the name of a metric, such as {_some(metrics)}")
    metric = metrics.get(name[0])
    if metric is None:
        _refuse(text, start, unknown_metric(name[0], metrics))
    limit = parse_limit(text, metric, name.end())
    return Budget(metric.name, *limit, text)


def parse_limit(text: str, metric: Metric[Any], start: int = 0) -> tuple[Relation, float]:
    """The relation and the limit from `start` on: what follows the name, or stands in a table under it.

    >>> parse_limit("<= 20", PROFILE_METRICS["latency_ms"])
    ('<=', 20.0)
    """
    start = _end(_BLANK, text, start)
    relation = _RELATION.match(text, start)
    if relation is None:
        _refuse(text, start, "expected <=, <, >= or >")
    value, end = _quantity(text, _end(_BLANK, text, relation.end()), metric)
    end = _end(_BLANK, text, end)
    if end < len(text):
        _refuse(text, end, "expected nothing more; write one budget at a time")
    return cast(Relation, _SPELLED.get(relation[0], relation[0])), value


def parse_increase(text: str, metrics: Mapping[str, Metric[Any]] = PROFILE_METRICS) -> Increase:
    """How much a figure may grow, as in `peak_memory=5%` or `params=10k`; an amount is in the metric's unit.

    >>> parse_increase("peak_memory=5%")
    Increase(metric='peak_memory_mb', share=0.05, amount=None, text='peak_memory=5%')
    """
    start = _end(_BLANK, text, 0)
    name = _NAME.match(text, start)
    if name is None:
        _refuse(text, start, f"expected the name of a metric, such as {_some(metrics)}")
    metric = metrics.get(name[0]) or _usual(name[0], metrics)
    if metric is None:
        _refuse(text, start, unknown_metric(name[0], metrics))
    equals = _end(_BLANK, text, name.end())
    if not text.startswith("=", equals):
        _refuse(text, equals, "expected =, as in peak_memory=5%")
    start = _end(_BLANK, text, equals + 1)
    number = _NUMBER.match(text, start)
    end = _end(_BLANK, text, number.end()) if number is not None else start
    if number is not None and text[end:].strip() == "%":
        share = float(number[0].replace("_", "")) / 100
        if not math.isfinite(share):
            _refuse(text, start, "expected a number that is not beyond all bounds")
        return Increase(metric.name, share, None, text)
    if metric.name != name[0]:
        _refuse(text, end, f"expected a percentage; for an amount, say the unit, as in {metric.name}=1")
    amount, end = _quantity(text, start, metric)
    end = _end(_BLANK, text, end)
    if end < len(text):
        _refuse(text, end, "expected nothing more")
    return Increase(metric.name, None, amount, text)


def _usual(family: str, metrics: Mapping[str, Metric[Any]]) -> Metric[Any] | None:
    """The metric of a family in the unit that people use."""
    return next(
        (metric for metric in metrics.values() if metric.family == family and metric.unit in ("mb", "ms", "j")), None
    )


def unknown_metric(name: str, metrics: Mapping[str, Metric[Any]]) -> str:
    """What to say about a name that is no metric: the closest ones, or that it lacks its unit."""
    units_of = [metric.name for metric in metrics.values() if metric.family == name]
    close = units_of or get_close_matches(name.lower(), metrics, n=3, cutoff=0.5)
    return f"unknown metric {name!r}; {'closest: ' + ', '.join(close) if close else 'metrics are ' + _some(metrics)}"


def _quantity(text: str, start: int, metric: Metric[Any]) -> tuple[float, int]:
    number = _NUMBER.match(text, start)
    if number is None:
        _refuse(text, start, "expected a number")
    digits = number[0].replace("_", "")
    end = _end(_BLANK, text, number.end())
    suffix = cast("re.Match[str]", _WORD.match(text, end))[0]
    factor = _factor(suffix, metric)
    if factor is None:
        _refuse(text, end, _expected_after(metric))
    value = float(digits) / 100 if suffix == "%" else float(digits) * factor
    if not math.isfinite(value):
        _refuse(text, start, "expected a number that is not beyond all bounds")
    if value < 0 and not metric.is_signed:
        _refuse(text, start, f"expected a number that is not negative: {metric.name} never is")
    if metric.kind == "share" and abs(value) > 1 and not metric.family.endswith("_ratio"):
        _refuse(text, start, f"expected a share of one, such as 0.9 or 90%: {metric.name} is never more")
    return value, end + len(suffix)


def _factor(suffix: str, metric: Metric[Any]) -> float | None:
    """What the suffix multiplies by; None for one that does not belong behind this metric."""
    if suffix in ("", *_spellings(metric)):
        return 1.0
    if suffix == "%" and metric.kind == "share":
        return 0.01
    return _PREFIXES.get(suffix) if metric.kind in ("count", "rate") else None


def _spellings(metric: Metric[Any]) -> tuple[str, ...]:
    """The metric's own unit, which may be said again; MJ is not among them, being a billion mJ."""
    unit = metric.unit
    if metric.kind == "energy":
        return (unit, f"{unit[:-1]}J")
    return (unit, unit.upper(), f"{unit[:1]}B") if metric.kind == "bytes" else (unit,)


def _expected_after(metric: Metric[Any]) -> str:
    if metric.unit:
        return f"expected the end of the number: {metric.name} is in {metric.unit} already"
    if metric.kind == "share":
        return "expected % or the end of the number"
    return "expected k, M, G or T, or the end of the number"


def _some(metrics: Mapping[str, Metric[Any]]) -> str:
    usual = ("macs", "params", "latency_ms", "peak_memory_mb", "size_mb", "energy_j", "accuracy", "accuracy_drop")
    return ", ".join(name for name in usual if name in metrics)


def _end(pattern: re.Pattern[str], text: str, start: int) -> int:
    return cast("re.Match[str]", pattern.match(text, start)).end()


def _refuse(text: str, position: int, problem: str) -> NoReturn:
    raise BudgetError(text, position, problem)


if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TABLE = "[tool.edge-opt.budgets]"


def configured_budgets(folder: Path) -> tuple[Budget, ...]:
    """The budgets in the pyproject.toml of a folder or of the nearest one above it; none where there is no table."""
    path = next((place / "pyproject.toml" for place in (folder, *folder.parents) if _is_project(place)), None)
    if path is None:
        return ()
    try:
        data: Any = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidInput(f"cannot read {str(path)!r}: {error}") from error
    for step in ("tool", "edge-opt", "budgets"):
        data = data.get(step, {}) if isinstance(data, dict) else {}
    if not isinstance(data, dict):
        raise InvalidInput(f'{str(path)!r}: {TABLE} is no table; write lines such as macs = "<= 600M" under it')
    return tuple(_budget(path, name, value) for name, value in data.items())


def _is_project(folder: Path) -> bool:
    return (folder / "pyproject.toml").is_file()


def _budget(path: Path, name: str, value: Any) -> Budget:
    where = f"{str(path)!r}, {TABLE}"
    if name not in PROFILE_METRICS:
        raise InvalidInput(f"{where}: {unknown_metric(name, PROFILE_METRICS)}")
    if not isinstance(value, str):
        raise InvalidInput(f'{where}: {name} is {value!r}; write a limit in quotes, such as {name} = "<= {value}"')
    try:
        relation, limit = parse_limit(value, PROFILE_METRICS[name])
    except BudgetError as error:
        raise InvalidInput(f"{where}: {name}: {error}") from error
    return Budget(name, relation, limit, f"{name} {value.strip()}")
