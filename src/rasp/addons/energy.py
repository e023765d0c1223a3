"""The column `energy`, in pJ: a speculative estimate from operations and bytes, not a measurement.

Every operation is priced as a multiplication. Every 32-bit word that is read or written comes from the cache four
times in five, and from main memory once. Figures are those of a 45 nm process.
"""

from __future__ import annotations

from edge_opt.cost.conventions.rasp import energy_pj as count_pj
from rasp.table import StatColumn, StatRow, add_column


def energy_pj(row: StatRow) -> float:
    """Energy of a row; NaN where it computes in a type that has no figure."""
    return sum(count_pj(node.own, node.dtype) for node in row.parts)


add_column(StatColumn("energy", energy_pj, "compute", is_default=False))
