"""Tables: a profile at one level, as columns of values or as a DataFrame."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from edge_opt.records import Level, ModelProfile
from edge_opt.report.columns import Column, columns
from edge_opt.report.rows import Row, leaf_rows, operator_rows, root_row
from edge_opt.report.tree import module_rows

if TYPE_CHECKING:
    import pandas as pd


def rows_of(profile: ModelProfile, level: Level) -> list[Row]:
    """The rows of one level; leaves, operators and the root add up to the totals, modules include their children."""
    if level == "leaves":
        return leaf_rows(profile)
    if level == "modules":
        return module_rows(profile)
    if level == "operators":
        return operator_rows(profile)
    return [root_row(profile)]


def table(profile: ModelProfile, level: Level) -> list[tuple[Column, list[Any]]]:
    """Each column of the level with its values, exact and unscaled."""
    wanted = [column for column in columns(level) if profile.predictions or not column.is_predicted]
    rows = rows_of(profile, level)
    return [(column, [column.get(row, profile) for row in rows]) for column in wanted]


def dataframe(profile: ModelProfile, level: Level = "leaves") -> pd.DataFrame:
    """The profile as a DataFrame of exact numbers.

    Integers of the operator level are of the nullable type Int64: an operator without a rule has no cost, not 0.
    """
    import pandas as pd

    integer = "Int64" if level == "operators" else "int64"

    def series(column: Column, values: list[Any]) -> pd.Series[Any]:
        if column.kind in ("ratio", "share", "time", "energy"):
            return pd.Series(values, dtype="float64")
        if not column.is_integer:
            return pd.Series(values, dtype="bool" if column.kind == "flag" else "str")
        try:
            return pd.Series(values, dtype=integer)
        except OverflowError:  # beyond 2**63 only Python's own integers are exact
            return pd.Series(values, dtype="object")

    return pd.DataFrame({column.name: series(column, values) for column, values in table(profile, level)})
