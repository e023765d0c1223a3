"""What lies between operators: Python, and the calls of modules, as the reference models show it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edge_opt.records import ReferenceRun

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Overheads:
    """Seconds per operator and per module call beside what operators take themselves; never below zero."""

    operator_s: float
    module_s: float


def fit_overheads(runs: Sequence[ReferenceRun]) -> Overheads:
    """The overheads that close the gap between the operators of each run and the whole of it.

    Runs count by their share of overhead: in a long one, noise is larger than all of it. Absolute deviations, not
    squares, are made small, so that a disturbed run does not decide.
    """
    rows = np.array([[run.operators, run.modules] for run in runs], dtype=float)
    gaps = np.array([run.seconds - run.operators_s for run in runs])
    weights = np.array([1.0 / run.seconds for run in runs])
    best = Overheads(0.0, 0.0)
    least = float(np.sum(np.abs(weights * gaps)))
    # With two figures, the non-negative solution is among: both, either alone, none.
    for columns in ([0, 1], [0], [1]):
        figures = np.zeros(2)
        figures[columns] = _least_deviations(rows[:, columns] * weights[:, None], gaps * weights)
        error = float(np.sum(np.abs(weights * (gaps - rows @ figures))))
        if (figures >= 0).all() and error < least:
            best, least = Overheads(float(figures[0]), float(figures[1])), error
    return best


def _least_deviations(rows: Array, targets: Array) -> Array:
    """The solution with the least absolute deviations, by least squares that weigh far ones down."""
    weights = np.ones(len(targets))
    found = np.zeros(rows.shape[1])
    for _ in range(30):
        root = np.sqrt(weights)
        found = np.linalg.lstsq(rows * root[:, None], targets * root, rcond=None)[0]
        weights = 1.0 / np.maximum(np.abs(targets - rows @ found), 1e-6)
    return found
