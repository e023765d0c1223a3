"""Budgets as text, and checks of profiles and models against them."""

from edge_opt.budgets.budget_metrics import (
    PROFILE_METRICS,
    TRIAL_METRICS,
    Metric,
    parse_budget,
    parse_budgets,
    trial_metrics,
)
from edge_opt.budgets.check import judged, violations

__all__ = [
    "PROFILE_METRICS",
    "TRIAL_METRICS",
    "Metric",
    "judged",
    "parse_budget",
    "parse_budgets",
    "trial_metrics",
    "violations",
]
