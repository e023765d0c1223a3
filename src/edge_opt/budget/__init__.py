"""Budgets as people write them, and whether figures keep within them."""

from edge_opt.budget.judging import violations
from edge_opt.budget.metrics import PROFILE_METRICS, TRIAL_METRICS, Metric
from edge_opt.budget.parsing import parse_budget

__all__ = ["PROFILE_METRICS", "TRIAL_METRICS", "Metric", "parse_budget", "violations"]
