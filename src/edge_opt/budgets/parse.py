"""`macs <= 600M`, or a table of pyproject.toml, to Budget."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, cast

from edge_opt.budgets.budget_metrics import PROFILE_METRICS, TRIAL_METRICS, Metric
from edge_opt.errors import BudgetError, InvalidInput
from edge_opt.records.profiles import Budget, Increase, Relation

# Every group matches, if only the empty string: its position is where the caret of an error points.
_NAME = re.compile(r"\s*(?P<name>[A-Za-z_]\w*|)")
_LIMIT = re.compile(
    r"\s*(?P<relation><=|>=|[<>≤≥=]|)"
    r"\s*(?P<number>-?(?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?|)"
    r"\s*(?P<suffix>\S*)"
    r"\s*(?P<rest>.*)",
    re.DOTALL,
)
_PREFIXES = {"k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_RELATIONS: dict[str, Relation] = {"<=": "<=", "<": "<", ">=": ">=", ">": ">", "≤": "<=", "≥": ">="}
_KNOWN: Mapping[str, Metric[Any]] = {**TRIAL_METRICS, **PROFILE_METRICS}


def parse_budget(text: str, metrics: Mapping[str, Metric[Any]] = _KNOWN) -> Budget:
    """Return the budget that a text states; the limit is in the unit that the metric's name says.

    Counts take k, M, G and T, shares take %. `metrics` are the names to choose from, such as `PROFILE_METRICS`.

    >>> parse_budget("macs <= 600M").limit
    600000000.0
    >>> parse_budget("accuracy_drop < 1.5%")
    Budget(metric='accuracy_drop', relation='<', limit=0.015, text='accuracy_drop < 1.5%')
    """
    name = _match(_NAME, text, 0)
    metric = metrics.get(name["name"])
    if metric is None:
        raise BudgetError(text, name.start("name"), unknown_metric(name["name"], metrics))
    return Budget(metric.name, *parse_limit(text, metric, name.end()), text)


def parse_limit(text: str, metric: Metric[Any], start: int = 0) -> tuple[Relation, float]:
    """Return the relation and the limit from `start` on: what follows the name, or a value in a table.

    >>> parse_limit("<= 20", PROFILE_METRICS["latency_ms"])
    ('<=', 20.0)
    """
    limit = _match(_LIMIT, text, start)
    if limit["relation"] not in _RELATIONS:
        raise BudgetError(text, limit.start("relation"), "expected <=, <, >= or >")
    value = _value(limit, metric)
    if limit["rest"]:
        raise BudgetError(text, limit.start("rest"), "expected nothing more; write one budget at a time")
    return _RELATIONS[limit["relation"]], value


def parse_increase(text: str, metrics: Mapping[str, Metric[Any]] = PROFILE_METRICS) -> Increase:
    """Return how much a figure may grow, as in `peak_memory=5%` or `params=10k`; an amount is in the metric's unit.

    >>> parse_increase("peak_memory=5%")
    Increase(metric='peak_memory_mb', share=0.05, amount=None, text='peak_memory=5%')
    """
    match = _match(_NAME, text, 0)
    name = match["name"]
    # A name without its unit is the metric in the unit that people use.
    usual = (metric for metric in metrics.values() if metric.family == name and metric.unit in ("mb", "ms", "j"))
    metric = metrics.get(name) or next(usual, None)
    if metric is None:
        raise BudgetError(text, match.start("name"), unknown_metric(name, metrics))
    increase = _match(_LIMIT, text, match.end())
    if increase["relation"] != "=":
        raise BudgetError(text, increase.start("relation"), "expected =, as in peak_memory=5%")
    if increase["number"] and increase["suffix"] == "%" and not increase["rest"]:
        return Increase(metric.name, _number(increase) / 100, None, text)
    if metric.name != name:
        problem = f"expected a percentage; for an amount, say the unit, as in {metric.name}=1"
        raise BudgetError(text, increase.start("suffix"), problem)
    amount = _value(increase, metric)
    if increase["rest"]:
        raise BudgetError(text, increase.start("rest"), "expected nothing more")
    return Increase(metric.name, None, amount, text)


def unknown_metric(name: str, metrics: Mapping[str, Metric[Any]]) -> str:
    """Return the message for a name that is not a metric: the closest ones, or that it lacks its unit."""
    usual = ("macs", "params", "latency_ms", "peak_memory_mb", "size_mb", "energy_j", "accuracy", "accuracy_drop")
    some = ", ".join(known for known in usual if known in metrics)
    if not name:
        return f"expected the name of a metric, such as {some}"
    with_unit = [metric.name for metric in metrics.values() if metric.family == name]
    close = with_unit or get_close_matches(name.lower(), metrics, n=3, cutoff=0.5)
    return f"unknown metric {name!r}; {'closest: ' + ', '.join(close) if close else 'metrics are ' + some}"


def _match(pattern: re.Pattern[str], text: str, start: int) -> re.Match[str]:
    return cast("re.Match[str]", pattern.match(text, start))  # both patterns match any text


def _number(limit: re.Match[str]) -> float:
    if not limit["number"]:
        raise BudgetError(limit.string, limit.start("number"), "expected a number")
    value = float(limit["number"].replace("_", ""))
    if not math.isfinite(value):
        raise BudgetError(limit.string, limit.start("number"), "expected a number that is not beyond all bounds")
    return value


def _value(limit: re.Match[str], metric: Metric[Any]) -> float:
    """Return the number with its suffix, in the metric's unit, if the metric can have that value."""
    value = _number(limit)
    suffix = limit["suffix"]
    if suffix == "%" and metric.kind == "share":
        value /= 100
    elif suffix in _PREFIXES and metric.kind in ("count", "rate"):
        value *= _PREFIXES[suffix]
    elif suffix not in ("", *_unit_spellings(metric)):
        raise BudgetError(limit.string, limit.start("suffix"), _expected_after_number(metric))
    problem = None
    if not math.isfinite(value):
        problem = "expected a number that is not beyond all bounds"
    elif value < 0 and not metric.is_signed:
        problem = f"expected a number that is not negative: {metric.name} never is"
    elif metric.kind == "share" and abs(value) > 1 and not metric.family.endswith("_ratio"):
        problem = f"expected a share of one, such as 0.9 or 90%: {metric.name} is never more"
    if problem is not None:
        raise BudgetError(limit.string, limit.start("number"), problem)
    return value


def _unit_spellings(metric: Metric[Any]) -> tuple[str, ...]:
    """Return the spellings of the metric's own unit, which may be repeated; not MJ, which is a billion mJ."""
    unit = metric.unit
    if metric.kind == "energy":
        return (unit, f"{unit[:-1]}J")
    return (unit, unit.upper(), f"{unit[:1]}B") if metric.kind == "bytes" else (unit,)


def _expected_after_number(metric: Metric[Any]) -> str:
    if metric.unit:
        return f"expected the end of the number: {metric.name} is in {metric.unit} already"
    if metric.kind == "share":
        return "expected % or the end of the number"
    return "expected k, M, G or T, or the end of the number"


if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TABLE = "[tool.edge-opt.budgets]"


def configured_budgets(folder: Path) -> tuple[Budget, ...]:
    """Return the budgets in the pyproject.toml of a folder or of the nearest one above it; none without a table."""
    paths = (parent / "pyproject.toml" for parent in (folder, *folder.parents))
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        return ()
    try:
        data: Any = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidInput(f"cannot read {str(path)!r}: {error}") from error
    for step in ("tool", "edge-opt", "budgets"):
        data = data.get(step, {}) if isinstance(data, dict) else {}
    if not isinstance(data, dict):
        raise InvalidInput(f'{str(path)!r}: {TABLE} is not a table; write lines such as macs = "<= 600M" under it')
    return tuple(_budget(path, name, value) for name, value in data.items())


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
