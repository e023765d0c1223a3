"""What each operator costs: pure functions of shapes, in a registry that users can extend."""

from edge_opt.cost import attention, dense, movement, pointwise, recurrent
from edge_opt.cost.registry import Work, clear_prices, cost_rule, free_operators, price, rules

__all__ = ["Work", "attention", "clear_prices", "cost_rule", "dense", "free_operators", "movement", "pointwise", "price",
           "recurrent", "rules"]  # fmt: skip
