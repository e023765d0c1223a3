"""Class costs fitted to times: a positive cost per class, with a prior that boards have in common.

The model. Board b runs net i in t = sum_k c_k * x_ik, with x the net's quantities and c > 0 the board's costs. Times
span four decades and errors are relative, so that the fit is of log t, in the logarithms f_k = log c_k:

    r_i = log t_i - log sum_k exp(f_k) x_ik

Residuals follow a Student t with nu = 4 and a scale of 0.1: a net that a runtime has no good kernel for must not bend
the costs of all others. Boards are alike, so f has a Gaussian prior N(m, S), and the fit minimises

    sum_i (nu + 1)/2 * log(1 + (r_i/s)^2 / nu)  +  1/2 * (f - m)' S^-1 (f - m)

The derivative of -r_i by f_k is J_ik = c_k x_ik / t_i: the share of class k in the predicted time, so rows of J add up
to 1. A t-distributed residual acts as a Gaussian one with the weight w_i = (nu + 1) / (nu + (r_i/s)^2) / s^2, and the
step of Levenberg and Marquardt solves

    (J'WJ + S^-1 + lambda * diag) step = J'W r - S^-1 (f - m)

At the minimum H = J'WJ + S^-1 is the curvature, and H^-1 the covariance of f (Laplace). The prior is found by
expectation-maximisation over all boards: m is the mean of their f, S the mean of (f - m)(f - m)' + H^-1. With fewer
boards than numbers in S, it is shrunk by 8/(8 + boards) towards one common scale and a diagonal: nine tenths of what
boards differ in is one factor. All boards are fitted at once, as stacks of small matrices.

A class that no row has cannot be learned. It takes the cost of its parent (`PARENTS`), with a spread of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from edge_opt.boards.class_costs import CLASSES, PARENTS, Vector
from edge_opt.errors import InvalidInput

# Scale of relative residuals and degrees of freedom of their distribution. Two people who time the same board are
# 1.4 to 9 % apart after one common factor.
NOISE = 0.1
FREEDOM = 4.0
# A class that no row has may cost exp(0.6), or 1.8 times, more or less than its parent, one time in three.
INHERITED_SD = 0.6
# From this share of the time on, classes that no fitted row has make a prediction one that lies outside the fit.
OUTSIDE_SHARE = 0.25
EM_STEPS = 7
SHRINKAGE = 8.0
_SMALLEST_VARIANCE = 0.02**2
_LARGEST_STEP = 2.0

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

Rows = tuple[Vector, Vector]


@dataclass(frozen=True, eq=False)
class Costs:
    """Logarithms of class costs (ms per million, or per layer), and how well they are known.

    `mean` has one entry per class, in the order of CLASSES; `covariance` is theirs. `seen` is how many rows, or boards
    of a prior, had at least 3 % of their time in a class.
    """

    mean: Vector
    covariance: Vector
    seen: Vector

    def log_time(self, quantities: Vector) -> float:
        """Logarithm of the predicted time in ms of one net.

        Args:
            quantities: amounts of every class.
        """
        return float(np.log(np.exp(self.mean) @ quantities))

    def shares(self, quantities: Vector) -> Vector:
        """Share of every class in the predicted time.

        Args:
            quantities: amounts of every class.
        """
        parts: Vector = np.exp(self.mean) * quantities
        shares: Vector = parts / parts.sum()
        return shares

    def variance(self, quantities: Vector) -> float:
        """Variance of the logarithm of the predicted time, from that of the costs alone.

        Args:
            quantities: amounts of every class.
        """
        shares = self.shares(quantities)
        return float(shares @ self.covariance @ shares)


@dataclass(frozen=True, slots=True)
class Spread:
    """How far times lie from predictions, in logarithms: sd^2 = noise^2 + trust * variance of the fit.

    `quantile` of these sd hold nine times in ten. `noise` is the scatter of nets about any sum of class costs.
    """

    noise: float
    trust: float
    quantile: float

    def width(self, variance: float, noise_ratio: float = 1.0) -> float:
        """Half of the interval, as a logarithm.

        Args:
            variance: of the logarithm of the prediction, as `Costs.variance` has it.
            noise_ratio: how much noisier this platform is than others of its kind; 1 where nothing is known.
        """
        return self.quantile * float(np.sqrt((self.noise * noise_ratio) ** 2 + self.trust * variance))


def outside_share(costs: Costs, quantities: Vector) -> float:
    """Share of the predicted time in classes that no row of the fit has.

    Args:
        costs: of the platform.
        quantities: of the net.
    """
    return float(costs.shares(quantities)[costs.seen == 0].sum())


def fit_costs(
    quantities: Vector, times_ms: Vector, prior: Costs, noise: float = NOISE, freedom: float = FREEDOM
) -> Costs:
    """Costs of one board from the times of some nets, and the prior where they say nothing.

    Args:
        quantities: one row per net, one column per class.
        times_ms: what each net took, in ms, more than zero. May be empty: then the prior is the answer.
        prior: costs that are likely before any time is known.
        noise: scale of relative residuals; by default 0.1, which is what two people who time one board differ by.
        freedom: degrees of freedom of the residuals' distribution; 4 leaves room for nets that no kernel fits.
    """
    checked_times(times_ms)
    if not len(times_ms):
        return prior
    stack = _Stack([(np.asarray(quantities, float), np.asarray(times_ms, float))], noise, freedom)
    means, covariances = stack.fitted(prior.mean[None, :], prior.covariance, None)
    return Costs(means[0], covariances[0], _seen(quantities, means[0]))


def fit_prior(
    boards: Sequence[Rows],
    noise: float = NOISE,
    freedom: float = FREEDOM,
    steps: int = EM_STEPS,
    weights: Vector | None = None,
    start: Vector | None = None,
) -> tuple[Costs, tuple[Costs, ...]]:
    """What boards have in common, and each board's own costs.

    Args:
        boards: quantities and times in ms of every board, at least three boards.
        noise: scale of relative residuals, as for `fit_costs`.
        freedom: degrees of freedom, as for `fit_costs`.
        steps: rounds of expectation-maximisation; after seven, costs move by less than their spread.
        weights: how much a board counts for the prior; one each unless given. Several records of one chip may share
            a weight.
        start: logarithms of costs to begin at and to stay near where rows say nothing; the usual ones unless given.
            Zeros, where quantities are times already.
    """
    if len(boards) < 3:
        raise InvalidInput(f"a prior needs three boards or more, and there are {len(boards)}; fit each with fit_costs")
    for _, times in boards:
        checked_times(times)
    has_rows = np.any([np.asarray(rows).sum(axis=0) > 0 for rows, _ in boards], axis=0)
    stack = _Stack([(np.asarray(rows)[:, has_rows], np.asarray(times)) for rows, times in boards], noise, freedom)
    counts = np.ones(len(boards)) if weights is None else np.asarray(weights, float)
    usual = np.log([TYPICAL[name] for name in CLASSES]) if start is None else np.asarray(start)
    means = stack.first_guess(usual[has_rows])
    centre, spread = np.average(means, axis=0, weights=counts), _first_spread(means)
    for _ in range(steps):
        means, covariances = stack.fitted(np.broadcast_to(centre, means.shape), spread, means)
        centre = np.average(means, axis=0, weights=counts)
        away = means - centre
        spread = np.average(away[:, :, None] * away[:, None, :] + covariances, axis=0, weights=counts)
        spread = shrunk(spread, float(counts.sum()))
    seen = _boards_seen(boards, means, has_rows)
    prior = inherited(centre, spread, has_rows, seen)
    fits = [_spread_out(mean, matrix, has_rows) for mean, matrix in zip(means, covariances, strict=True)]
    return prior, tuple(
        Costs(mean, matrix, _seen(rows, mean)) for (mean, matrix), (rows, _) in zip(fits, boards, strict=True)
    )


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


def checked_times(times_ms: Vector) -> None:
    """Refuse times that no run can take.

    Args:
        times_ms: times in ms, or in any other unit.
    """
    wrong = [float(time) for time in np.atleast_1d(times_ms) if not (np.isfinite(time) and time > 0)]
    if wrong:
        raise InvalidInput(f"a time is {wrong[0]:g}; times must be finite and more than zero")


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


def _seen(quantities: Vector, mean: Vector) -> Vector:
    """Rows that have at least 3 % of their predicted time in each class."""
    parts = np.asarray(quantities) * np.exp(mean)
    counts: Vector = (parts >= 0.03 * parts.sum(axis=1, keepdims=True)).sum(axis=0).astype(float)
    return counts


def _boards_seen(boards: Sequence[Rows], means: Vector, has_rows: Vector) -> Vector:
    counts = np.zeros(len(CLASSES))
    for (rows, _), mean in zip(boards, means, strict=True):
        counts[has_rows] += _seen(np.asarray(rows)[:, has_rows], mean) > 0
    return counts


class _Stack:
    """Boards of different numbers of rows, padded to one size, so that all are fitted in one go.

    A padding row has the weight zero and quantities of one, so that its logarithm exists.
    """

    def __init__(self, boards: Sequence[Rows], noise: float, freedom: float) -> None:
        longest = max(len(times) for _, times in boards)
        classes = boards[0][0].shape[1]
        self.noise, self.freedom = noise, freedom
        self.x = np.ones((len(boards), longest, classes))
        self.log_t = np.zeros((len(boards), longest))
        self.is_row = np.zeros((len(boards), longest))
        for number, (rows, times) in enumerate(boards):
            self.x[number, : len(times)] = rows
            self.log_t[number, : len(times)] = np.log(times)
            self.is_row[number, : len(times)] = 1.0

    def first_guess(self, shape: Vector) -> Vector:
        """Costs in the given proportions, scaled to each board's median net."""
        return self._scaled(np.broadcast_to(shape, self.x[:, 0].shape))

    def _log_time(self, f: Vector) -> Vector:
        logs: Vector = np.log((self.x * np.exp(f)[:, None, :]).sum(axis=2))
        return logs

    def fitted(self, centre: Vector, spread: Vector, start: Vector | None) -> tuple[Vector, Vector]:
        """Return the minimum for every board, and the covariance there.

        Every board has a damping of its own. A step that lowers the objective is taken, and the damping divided by
        three; another one is dropped, and the damping multiplied by five, which turns the step towards the gradient and
        shortens it. Steps are clipped to a factor of e^2 in any cost: far from the minimum the curvature is that of
        another place, and one cost would run away before the others have moved.
        """
        precision: Vector = np.asarray(np.linalg.inv(spread), np.float64)
        f: Vector = self._scaled(centre) if start is None else start.copy()
        damping = np.full(len(f), 1e-2)
        value, residuals = self._objective(f, centre, precision)
        for _ in range(60):
            curvature, gradient = self._derivatives(f, residuals, centre, precision)
            diagonal = np.einsum("bii->bi", curvature)
            damped = curvature + damping[:, None, None] * diagonal[:, :, None] * np.eye(f.shape[1])
            step = np.clip(np.linalg.solve(damped, gradient[:, :, None])[:, :, 0], -_LARGEST_STEP, _LARGEST_STEP)
            new_value, new_residuals = self._objective(f + step, centre, precision)
            is_better = new_value <= value
            f = np.where(is_better[:, None], f + step, f)
            value = np.where(is_better, new_value, value)
            residuals = np.where(is_better[:, None], new_residuals, residuals)
            damping = np.where(is_better, np.maximum(damping / 3, 1e-7), np.minimum(damping * 5, 1e6))
            if np.all(np.abs(step) < 1e-3):
                break
        curvature, _ = self._derivatives(f, residuals, centre, precision)
        covariances: Vector = np.asarray(np.linalg.inv(curvature), np.float64)
        return f, covariances

    def _scaled(self, centre: Vector) -> Vector:
        residuals = np.where(self.is_row > 0, self.log_t - self._log_time(centre), np.nan)
        scale: Vector = np.nanmedian(residuals, axis=1)
        return centre + scale[:, None]

    def _objective(self, f: Vector, centre: Vector, precision: Vector) -> tuple[Vector, Vector]:
        residuals = self.log_t - self._log_time(f)
        misfit = self.is_row * (self.freedom + 1) / 2 * np.log1p((residuals / self.noise) ** 2 / self.freedom)
        away = f - centre
        return misfit.sum(axis=1) + 0.5 * np.einsum("bi,ij,bj->b", away, precision, away), residuals

    def _derivatives(self, f: Vector, residuals: Vector, centre: Vector, precision: Vector) -> tuple[Vector, Vector]:
        parts = self.x * np.exp(f)[:, None, :]
        shares = parts / parts.sum(axis=2, keepdims=True)
        weights = self.is_row * (self.freedom + 1) / (self.freedom + (residuals / self.noise) ** 2) / self.noise**2
        weighted = shares * weights[:, :, None]
        curvature = np.matmul(weighted.transpose(0, 2, 1), shares) + precision
        gradient = np.einsum("bnk,bn->bk", weighted, residuals) - (f - centre) @ precision
        return curvature, gradient
