"""Priors of class costs: what boards of one kind have in common, found from the times of all of them.

The fit of one board is in `edge_opt.boards.class_costs`. Its prior N(m, S) is found by expectation-maximisation over
all boards: m is the mean of their costs' logarithms f, S the mean of (f - m)(f - m)' + H^-1, with H^-1 the covariance
of each fit. With fewer boards than numbers in S, it is shrunk by 8/(8 + boards) towards one common scale and a
diagonal: nine tenths of what boards differ in is one factor.

A class that no row has cannot be learned. It takes the cost of its parent (`PARENTS`), with a spread of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from edge_opt.boards.class_costs import (
    CLASSES,
    NOISE,
    BoardStack,
    Costs,
    Rows,
    Vector,
    rows_with_class,
)
from edge_opt.errors import InvalidInput

# Every class, with the one whose cost it takes where no fitted row has it. None: it stands for itself.
PARENTS: Mapping[str, str | None] = {
    "conv3x3_macs": "conv1x1_macs",
    "conv3x3_elements": "conv1x1_elements",
    "conv1x1_macs": None,
    "conv1x1_elements": None,
    "conv_macs": "conv1x1_macs",
    "conv_elements": "conv1x1_elements",
    "first_macs": "conv_macs",
    "first_elements": "conv_elements",
    "depthwise_macs": "conv_macs",
    "depthwise_elements": "conv1x1_elements",
    "grouped_macs": "conv_macs",
    "linear_weights": "weights",
    "product_macs": "conv1x1_macs",
    "attention_macs": "product_macs",
    "weights": "conv1x1_elements",
    "elementwise_elements": "conv1x1_elements",
    "pooled_elements": "elementwise_elements",
    "moved_elements": "elementwise_elements",
    "layers": None,
    "detections": "layers",
}
# A class that no row has may cost exp(0.6), or 1.8 times, more or less than its parent, one time in three.
INHERITED_SD = 0.6
EM_STEPS = 7
SHRINKAGE = 8.0
_SMALLEST_VARIANCE = 0.02**2

# Costs as they usually stand to each other. Where the rows of a table cannot tell two classes apart, their fit stays
# near these. ns per MAC or element, ms per layer. A depthwise MAC costs about four of a 1x1 convolution, and one of
# Winograd's 3x3 less than half.
TYPICAL: dict[str, float] = {
    "conv3x3_macs": 0.02, "conv3x3_elements": 0.2, "conv1x1_macs": 0.05, "conv1x1_elements": 0.3,
    "conv_macs": 0.08, "conv_elements": 0.3, "first_macs": 0.1, "first_elements": 0.3,
    "depthwise_macs": 0.2, "depthwise_elements": 0.5, "grouped_macs": 0.1, "linear_weights": 0.5,
    "product_macs": 0.05, "attention_macs": 0.1, "weights": 0.3, "elementwise_elements": 0.3,
    "pooled_elements": 0.3, "moved_elements": 0.3, "layers": 0.02, "detections": 5.0,
}  # fmt: skip
# The same for int8 on cores that issue one or two instructions a cycle, in order: cycles per MAC or element, and
# millions of cycles per layer. They follow from the instructions of such kernels. A dual multiply-add does two MACs,
# and loads and widening take the other half of the time; a depthwise MAC is two loads and a multiply; an output is
# scaled, rounded and clamped in some twenty instructions, half of which are counted with its inputs. Arithmetic, not a
# cache, is what takes time: an element costs ten MACs, and a layer no more than three thousand.
IN_ORDER_INT8: dict[str, float] = {
    "conv3x3_macs": 0.9, "conv3x3_elements": 10.0, "conv1x1_macs": 0.9, "conv1x1_elements": 10.0,
    "conv_macs": 0.9, "conv_elements": 10.0, "first_macs": 1.5, "first_elements": 10.0,
    "depthwise_macs": 3.0, "depthwise_elements": 15.0, "grouped_macs": 1.5, "linear_weights": 1.5,
    "product_macs": 1.0, "attention_macs": 1.5, "weights": 0.5, "elementwise_elements": 15.0,
    "pooled_elements": 4.0, "moved_elements": 2.0, "layers": 0.003, "detections": 1.0,
}  # fmt: skip


def fit_prior(
    boards: Sequence[Rows], start: Vector | None = None, noise: float = NOISE
) -> tuple[Costs, tuple[Costs, ...]]:
    """Return what boards have in common, and each board's own costs.

    Args:
        boards: quantities and times in ms of every board, at least three boards.
        start: logarithms of costs to begin at and to stay near where rows say nothing; the usual ones unless given.
            Zeros, where quantities are times already.
        noise: scale of relative residuals.
    """
    if len(boards) < 3:
        raise InvalidInput(f"a prior needs three boards or more, and there are {len(boards)}; fit each with fit_costs")
    has_rows = np.any([np.asarray(rows).sum(axis=0) > 0 for rows, _ in boards], axis=0)
    stack = BoardStack([(np.asarray(rows)[:, has_rows], np.asarray(times)) for rows, times in boards], noise)
    usual = np.log([TYPICAL[name] for name in CLASSES]) if start is None else np.asarray(start)
    means = stack.scaled(np.broadcast_to(usual[has_rows], (len(boards), int(has_rows.sum()))))
    centre, spread, means, covariances = _shared(stack, means)
    seen = _boards_seen(boards, means, has_rows)
    prior = inherited(centre, spread, has_rows, seen)
    fits = [_spread_out(mean, matrix, has_rows) for mean, matrix in zip(means, covariances, strict=True)]
    return prior, tuple(
        Costs(mean, matrix, rows_with_class(np.asarray(rows), mean))
        for (mean, matrix), (rows, _) in zip(fits, boards, strict=True)
    )


def fit_shared(boards: Sequence[Rows]) -> tuple[Costs, tuple[Costs, ...]]:
    """Return what boards have in common, and each board's own costs, where every class has rows.

    Args:
        boards: quantities and times in ms of every board; quantities are times already, so that costs are near one.
    """
    stack = BoardStack(boards)
    size = boards[0][0].shape[1]
    centre, spread, means, covariances = _shared(stack, stack.scaled(np.zeros((len(boards), size))))
    fits = tuple(Costs(mean, matrix, np.ones(size)) for mean, matrix in zip(means, covariances, strict=True))
    return Costs(centre, spread, np.ones(size)), fits


def _shared(stack: BoardStack, means: Vector) -> tuple[Vector, Vector, Vector, Vector]:
    """Centre and spread of the costs of all boards, and those of each; they start from `means`."""
    centre, spread = means.mean(axis=0), _first_spread(means)
    # After seven rounds of expectation-maximisation, costs move by less than their spread.
    for _ in range(EM_STEPS):
        means, covariances = stack.fitted(np.broadcast_to(centre, means.shape), spread, means)
        centre = means.mean(axis=0)
        away = means - centre
        spread = shrunk((away[:, :, None] * away[:, None, :] + covariances).mean(axis=0), len(means))
    return centre, spread, means, covariances


def broad_prior(scale_sd: float = 4.0, class_sd: float = 0.7, typical: Mapping[str, float] = TYPICAL) -> Costs:
    """A prior for platforms that are like no other: costs in their usual proportions, at any speed.

    Args:
        scale_sd: spread of the common factor, as a logarithm; 4 lets it be a thousandth or a thousandfold.
        class_sd: spread of each cost about it; 0.7 is a factor of two.
        typical: costs in their usual proportions, by class. Those of a CPU with caches unless given.
    """
    size = len(CLASSES)
    mean: Vector = np.log(np.array([typical[name] for name in CLASSES]))
    return Costs(mean, np.full((size, size), scale_sd**2) + class_sd**2 * np.eye(size), np.zeros(size))


def inherited(centre: Vector, spread: Vector, has_rows: Vector, seen: Vector) -> Costs:
    """A prior over all classes from one over those that have rows; the others take their parents' costs.

    Args:
        centre: logarithms of costs of the classes that have rows.
        spread: their covariance.
        has_rows: for every class of CLASSES whether it is among them.
        seen: boards or rows that a class was seen in, for every class.
    """
    take, own = _parents_matrix(has_rows)
    return Costs(take @ centre, take @ spread @ take.T + np.diag(own), seen)


def shrunk(spread: Vector, boards: float) -> Vector:
    """A covariance estimated from few boards, pulled towards one common scale and a diagonal.

    Args:
        spread: the estimate.
        boards: from how many boards it is; at eight, half of it is kept.
    """
    size = len(spread)
    off_diagonal = spread[~np.eye(size, dtype=bool)] if size > 1 else np.zeros(1)
    common = max(float(off_diagonal.mean()), 1e-4)
    target = np.full((size, size), common)
    np.fill_diagonal(target, np.maximum(np.diag(spread), common + 1e-3))
    share = SHRINKAGE / (SHRINKAGE + boards)
    pulled: Vector = (1 - share) * spread + share * target + _SMALLEST_VARIANCE * np.eye(size)
    return pulled


def outside_share(costs: Costs, quantities: Vector) -> float:
    """Share of the predicted time in classes that no row of the fit has.

    Args:
        costs: of the platform.
        quantities: of the net.
    """
    return float(costs.shares(quantities)[costs.seen == 0].sum())


def _parents_matrix(has_rows: Vector) -> tuple[Vector, Vector]:
    """Which learned class each class takes its cost from, as a matrix of 0 and 1, and its own variance."""
    learned = [name for name, known in zip(CLASSES, has_rows, strict=True) if known]
    take = np.zeros((len(CLASSES), len(learned)))
    own = np.zeros(len(CLASSES))
    for row, name in enumerate(CLASSES):
        source: str | None = name
        while source is not None and source not in learned:
            source = PARENTS[source]
        if source is None:  # not even the parents have rows: the mean of all that have
            take[row], own[row] = 1 / len(learned), 4 * INHERITED_SD**2
        else:
            take[row, learned.index(source)] = 1.0
            own[row] = 0.0 if source == name else INHERITED_SD**2
    return take, own


def _spread_out(mean: Vector, matrix: Vector, has_rows: Vector) -> tuple[Vector, Vector]:
    """A board's costs over all classes: those without rows follow their parents, as in the prior."""
    take, own = _parents_matrix(has_rows)
    return take @ mean, take @ matrix @ take.T + np.diag(own)


def _first_spread(means: Vector) -> Vector:
    size = means.shape[1]
    return np.full((size, size), float(np.var(means[:, 0])) + 0.1) + np.eye(size)


def _boards_seen(boards: Sequence[Rows], means: Vector, has_rows: Vector) -> Vector:
    counts = np.zeros(len(CLASSES))
    for (rows, _), mean in zip(boards, means, strict=True):
        counts[has_rows] += rows_with_class(np.asarray(rows)[:, has_rows], mean) > 0
    return counts
