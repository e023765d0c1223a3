"""What each operator costs: pure functions of shapes, in a registry that users can extend."""

from edge_opt.cost import linalg, movement, pointwise, products, training_operators, vision
from edge_opt.cost.rules import Work, clear_prices, cost_rule, free_operators, price, rules

# Importing a module of rules is what fills the registry.
RULES = (linalg, movement, pointwise, products, training_operators, vision)

__all__ = ["RULES", "Work", "clear_prices", "cost_rule", "free_operators", "price", "rules"]
