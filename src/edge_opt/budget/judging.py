"""Judging: which budgets the figures of a trial break."""

from __future__ import annotations

from collections.abc import Iterable

from edge_opt.budget.metrics import TRIAL_METRICS
from edge_opt.records import Budget, TrialMetrics, Violation


def violations(metrics: TrialMetrics, budgets: Iterable[Budget]) -> tuple[Violation, ...]:
    """The budgets that do not hold; one whose figure is not known does not hold either, and its value is None."""
    found = ((budget, TRIAL_METRICS[budget.metric].value(metrics)) for budget in budgets)
    return tuple(
        Violation(budget.text, budget.metric, value, budget.limit)
        for budget, value in found
        if value is None or not budget.holds(value)
    )
