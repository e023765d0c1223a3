"""The same trace under the counting of other tools, and the difference by cause."""

from edge_opt.cost.conventions import flop_counter, fvcore, ptflops, rasp, thop
from edge_opt.cost.conventions.ledger import Entry
from edge_opt.cost.conventions.reconciliation import (
    CONVENTIONS,
    Convention,
    ConventionCount,
    count,
    reconcile,
    under_convention,
)

# Importing a tool's module is what fills the registry.
TOOLS = (flop_counter, fvcore, ptflops, rasp, thop)

__all__ = [
    "CONVENTIONS",
    "TOOLS",
    "Convention",
    "ConventionCount",
    "Entry",
    "count",
    "reconcile",
    "under_convention",
]
