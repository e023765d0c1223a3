"""What lies between operators: Python, and the calls of modules, as the reference models show it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from edge_opt.records import ReferenceRun


@dataclass(frozen=True, slots=True)
class Overheads:
    """Seconds per operator and per module call beside what operators take themselves; never below zero."""

    operator_s: float
    module_s: float


def fit_overheads(runs: Sequence[ReferenceRun]) -> Overheads:
    """The overheads that close the gap between the operators of each run and the whole of it.

    Runs count by their share of overhead: in a long one, noise is larger than all of it.
    """
    rows = np.array([[run.operators, run.modules] for run in runs], dtype=float)
    gaps = np.array([run.seconds - run.operators_s for run in runs])
    weights = np.array([1.0 / run.seconds for run in runs])
    best = Overheads(0.0, 0.0)
    least = float(np.sum((weights * gaps) ** 2))
    # With two figures, the non-negative solution is among: both, either alone, none.
    for columns in ([0, 1], [0], [1]):
        found, *_ = np.linalg.lstsq(rows[:, columns] * weights[:, None], gaps * weights, rcond=None)
        figures = np.zeros(2)
        figures[columns] = found
        error = float(np.sum((weights * (gaps - rows @ figures)) ** 2))
        if (figures >= 0).all() and error < least:
            best, least = Overheads(float(figures[0]), float(figures[1])), error
    return best
