"""Records of budgets: what a figure may be at most or at least."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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
