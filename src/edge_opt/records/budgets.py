"""Records of budgets: what a figure may be at most or at least, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from pathlib import Path

Outcome = Literal["holds", "broken", "undecided", "unknown"]
Relation = Literal["<=", "<", ">=", ">"]


@dataclass(frozen=True, slots=True)
class Budget:
    """A limit on one figure, in the unit that the metric's name says; `text` is how it was written."""

    metric: str
    relation: Relation
    limit: float
    text: str

    @property
    def is_ceiling(self) -> bool:
        """The figure may not be more; otherwise it may not be less."""
        return self.relation in ("<=", "<")

    def holds(self, value: float) -> bool:
        """Whether a value in the metric's unit keeps within the budget; NaN never does."""
        if self.relation == "<=":
            return value <= self.limit
        if self.relation == "<":
            return value < self.limit
        return value >= self.limit if self.relation == ">=" else value > self.limit


@dataclass(frozen=True, slots=True)
class Increase:
    """By how much a figure may grow over a baseline: a share of it, or an amount in the metric's unit."""

    metric: str
    share: float | None
    amount: float | None
    text: str


@dataclass(frozen=True, slots=True)
class Contribution:
    """One layer's part in a figure, in the metric's unit; `baseline` is what it was before, None without one."""

    path: str
    kind: str
    value: float
    baseline: float | None


@dataclass(frozen=True, slots=True)
class CheckedBudget:
    """One budget and what came of it. `low` and `high` are how well the figure is known, None where it is exact.

    "undecided": the limit lies between them. "unknown": there is no figure, so that the budget cannot hold.
    `layers` are those that grew most over the baseline, without one the largest; only of budgets that do not hold.
    """

    budget: Budget
    outcome: Outcome
    value: float | None
    low: float | None
    high: float | None
    baseline: float | None
    reason: str
    layers: tuple[Contribution, ...]


@dataclass(frozen=True, slots=True)
class CheckResult:
    """Every budget with its outcome; undecided ones pass or fail as `on_undecided` says, unknown ones fail."""

    name: str
    baseline_name: str | None
    budgets: tuple[CheckedBudget, ...]
    on_undecided: Literal["pass", "fail"]
    remarks: tuple[str, ...] = ()

    @property
    def failures(self) -> tuple[CheckedBudget, ...]:
        """The budgets for which the check fails."""
        failing = ("broken", "unknown", "undecided") if self.on_undecided == "fail" else ("broken", "unknown")
        return tuple(found for found in self.budgets if found.outcome in failing)

    @property
    def passed(self) -> bool:
        return not self.failures

    def save(self, path: str | Path) -> Path:
        """Write the result; the suffix chooses the format: .json (everything), .md, .xml (JUnit), .html or .txt."""
        from edge_opt.report.checked import save

        return save(self, path)

    def __str__(self) -> str:
        from edge_opt.report.checked import render

        return render(self)

    def _repr_html_(self) -> str:
        from edge_opt.report.checked import check_html

        return check_html(self)
