"""What each operator costs: pure functions of shapes, in a registry that users can extend."""

from edge_opt.cost import attention, dense, movement, pointwise, recurrent
from edge_opt.cost.registry import Work, clear_prices, cost_rule, free_operators, price, rules

# Importing a module of rules is what fills the registry.
RULES = (attention, dense, movement, pointwise, recurrent)

__all__ = ["RULES", "Work", "clear_prices", "cost_rule", "free_operators", "price", "rules"]
