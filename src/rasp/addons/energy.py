"""The column `energy`, in pJ: a speculative estimate from operations and bytes, not a measurement.

Every operation is priced as a multiplication. Every 32-bit word that is read or written comes from the cache four
times in five, and from main memory once. Figures are those of a 45 nm process.
"""

from __future__ import annotations

import math

from rasp.columns import Column, add_column
from rasp.report import Row
from rasp.tree import Node

MULTIPLY_PJ = {"float32": 4.5, "float16": 1.1, "int32": 3.1, "int16": 0.8}
SRAM_PJ = 5
DRAM_PJ = 640
WORD_PJ = 0.8 * SRAM_PJ + 0.2 * DRAM_PJ
WORD_BYTES = 4


def energy_pj(row: Row) -> float:
    """Energy of a row; NaN where it computes in a type that has no figure."""
    return sum(_node_pj(node) for node in row.parts)


def _node_pj(node: Node) -> float:
    words = (node.own.bytes_read + node.own.bytes_written) / WORD_BYTES
    if not node.own.flops:
        return words * WORD_PJ
    return MULTIPLY_PJ.get(node.dtype or "", math.nan) * node.own.flops + words * WORD_PJ


add_column(Column("energy", energy_pj, "compute", is_default=False))
