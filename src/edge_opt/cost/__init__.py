"""What each operator costs: pure functions of shapes, in a registry that users can extend."""

from edge_opt.cost import (
    dense,
    detection,
    gradients,
    indexing,
    linalg,
    losses,
    movement,
    pointwise,
    quantized,
    resampling,
    sorting,
    sparse,
)
from edge_opt.cost.rules import Work, clear_prices, cost_rule, free_operators, price, rules

# Importing a module of rules is what fills the registry.
RULES = (
    dense, detection, gradients, indexing, linalg, losses, movement, pointwise, quantized, resampling, sorting, sparse,
)  # fmt: skip

__all__ = ["RULES", "Work", "clear_prices", "cost_rule", "free_operators", "price", "rules"]
