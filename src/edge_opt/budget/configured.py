"""Budgets of a project: the table `[tool.edge-opt.budgets]` in its pyproject.toml."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from edge_opt.budget.metrics import PROFILE_METRICS
from edge_opt.budget.parsing import parse_limit, unknown_metric
from edge_opt.errors import BudgetError, InvalidInput
from edge_opt.records import Budget

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
