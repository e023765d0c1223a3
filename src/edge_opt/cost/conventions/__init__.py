"""The same trace under the counting of other tools, and the difference by cause."""

# Importing a module of tools fills the registry.
from edge_opt.cost.conventions import other_tools, rasp
from edge_opt.cost.conventions.counting import CONVENTIONS, count, find_convention, reconcile, under_convention

TOOLS = (other_tools, rasp)

__all__ = ["CONVENTIONS", "TOOLS", "count", "find_convention", "reconcile", "under_convention"]
