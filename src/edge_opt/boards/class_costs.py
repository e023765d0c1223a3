"""Classes of work: a model as some twenty quantities, each of which has one cost on a platform.

The time of a model is taken as the sum of quantities times costs. A quantity is an amount of one class of work, such as
the MACs of 1x1 convolutions; `fused_layers` reads the layers of a profile. A platform's costs are fitted to published
times by `BoardStack`, which derives how.

Three choices make the quantities fit what runtimes do:

* Layers are counted as a runtime would run them: batch norms and simple activations (ReLU and its kin, sigmoid) that
  follow a convolution or linear layer are part of it.
* A convolution of 3x3 with stride 1 is computed in tiles (Winograd). Its output counts in whole tiles of 4x4, so 7x7
  counts as 8x8.
* Tensors that fit a cache are almost free to pass on. A tensor of n elements counts as n * n / (n + c), with c the
  runtime's `cache_elements`: all of a large tensor, little of a small one, and all of every tensor where c is 0.

What a runtime does with groups and caches is in `KernelConventions`, so that one definition serves all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edge_opt.errors import InvalidInput
from edge_opt.records.fields import Record

Vector = NDArray[np.float64]
WorkKind = Literal["conv", "linear", "product", "elementwise", "activation", "pool", "move", "join", "detection"]

CLASSES: tuple[str, ...] = (
    "conv3x3_macs", "conv3x3_elements", "conv1x1_macs", "conv1x1_elements", "conv_macs", "conv_elements",
    "first_macs", "first_elements", "depthwise_macs", "depthwise_elements", "grouped_macs", "linear_weights",
    "product_macs", "attention_macs", "weights", "elementwise_elements", "pooled_elements", "moved_elements",
    "layers", "detections",
)  # fmt: skip
# Counts are in millions, so that costs are in ms per million, but for these, which are counted one by one.
_COUNTED = ("layers", "detections")
_UNIT = np.array([1.0 if name in _COUNTED else 1e-6 for name in CLASSES])
_AT = {name: position for position, name in enumerate(CLASSES)}
_PASSING = {
    "elementwise": "elementwise_elements", "activation": "elementwise_elements", "pool": "pooled_elements"
}  # fmt: skip

# Scale of relative residuals and degrees of freedom of their distribution. Two people who time the same board are
# 1.4 to 9 % apart after one common factor.
NOISE = 0.1
FREEDOM = 4.0
TILE = 4
# Convolutions larger than 1x1 read their weights anew for every few outputs. From flash outside the chip a MAC then
# costs this much more: YOLOv2-tiny and YOLOv8n on an STM32H747, which no cost was fitted to, take 1.8 and 1.6 times
# what they would (ST's model zoo). 1x1 convolutions read them once: MobileNets of four and six megabytes take no
# longer.
OUTSIDE_FLASH = 1.75
# A layer that reads this many channels or fewer is an image's or a sound's first: no kernel can fill its lanes.
FIRST_CHANNELS = 4


@dataclass(frozen=True, slots=True)
class KernelConventions:
    """How a family of runtimes and processors runs layers, as far as quantities depend on it.

    `cache_elements`: a tensor of this many elements counts half. 6e5 is right for phones and boards, 0 for
    microcontrollers. `splits_groups`: whether a convolution in groups is run as that many convolutions, each a call of
    its own, as ncnn does; otherwise its MACs are a class of their own. `flash_weights`: a model with more weights than
    these reads them from memory outside the chip; 0 where there is no such difference. `lanes`: activations are stored
    in blocks of this many channels, and an array of multipliers, which takes two blocks at a time, computes every
    product with weights; 1 where there is none. `call_layers`: handing a model over to the engine takes as long as this
    many layers. `free`: kinds of layers that take no time of their own: a concatenation whose parts are written in
    place, or an activation that the layer before computes. `noise`: the scale of residuals in a fit; NPUs have a
    larger one, as a sum of class costs describes their compilers less well.
    """

    cache_elements: float = 6e5
    splits_groups: bool = True
    flash_weights: float = 0.0
    lanes: int = 1
    call_layers: int = 0
    free: tuple[str, ...] = ()
    noise: float = NOISE


class LayerWork(NamedTuple):
    """One layer as a runtime runs it, what is fused into it included.

    `module` is the number of the module call it belongs to, or its position where there are no modules. `reads` and
    `writes` are elements of activations, `channels` those that one filter reads, `filters` those that are written (0:
    not known); `kernel` is empty unless it is a convolution; `rows` is how many vectors a
    linear layer is applied to. `is_attention` marks products of two activations, `is_recurrent` what goes step by step,
    `is_constant` what follows from weights alone, such as a table of relative positions, `is_outside` what no class
    describes.
    """

    kind: WorkKind
    module: int
    macs: int = 0
    weights: int = 0
    reads: int = 0
    writes: int = 0
    channels: int = 0
    groups: int = 1
    kernel: tuple[int, ...] = ()
    stride: int = 1
    places: tuple[int, ...] = ()
    rows: int = 1
    is_attention: bool = False
    is_recurrent: bool = False
    filters: int = 0
    is_constant: bool = False
    is_outside: bool = False


def as_linear(work: LayerWork, batch: int) -> LayerWork:
    """Return the convolution, or a linear layer where it is 1x1 on a single place, as squeeze-and-excitation has them.

    Such a layer is applied to `batch` vectors.
    """
    if work.groups == 1 and prod(work.kernel) == 1 and prod(work.places) == 1:
        return work._replace(kind="linear", rows=batch, kernel=(), places=())
    return work


@dataclass(frozen=True, slots=True)
class ModelWork(Record):
    """A model as a list of layers, and the operators that no class describes."""

    name: str
    works: tuple[LayerWork, ...]
    outside: tuple[str, ...] = ()

    def quantities(self, conventions: KernelConventions) -> Vector:
        """Return the amounts of every class in the model, in the order of CLASSES: millions, but layers one by one.

        Args:
            conventions: how the runtime runs layers; a platform's record has them.
        """
        total: Vector = self.layer_quantities(conventions).sum(axis=0)
        return total

    def layer_quantities(self, conventions: KernelConventions) -> Vector:
        """Return the same for each layer: one row per entry of `works`; the first has what a call takes."""
        if not self.works:
            return np.zeros((1, len(CLASSES)))
        is_outside = 0 < conventions.flash_weights < sum(work.weights for work in self.works)
        rows = np.array([_quantities(work, conventions, is_outside) for work in self.works])
        rows[0, _AT["layers"]] += conventions.call_layers  # the model is handed over with its first layer
        return rows


def _quantities(work: LayerWork, conventions: KernelConventions, is_outside: bool) -> Vector:
    """Return one layer's amounts of every class; `is_outside`: its weights are read from flash outside the chip."""
    if is_outside and work.kind == "conv" and prod(work.kernel) > 1 and work.groups == 1:
        work = work._replace(macs=round(OUTSIDE_FLASH * work.macs))
    has_array = conventions.lanes > 1
    if has_array:
        work = _in_blocks(work, conventions.lanes)
    if work.kind in conventions.free or (has_array and work.is_constant):  # compiled ahead of time, which folds it
        return np.zeros(len(CLASSES))
    amounts: dict[str, float] = {"layers": 1}
    passed = _passed(work.reads, conventions.cache_elements) + _passed(work.writes, conventions.cache_elements)
    if work.kind == "conv":
        kind = _conv_class(work)
        tiles = _tile_share(work.places) if kind == "conv3x3" and not has_array else 1.0
        is_grouped = work.groups > 1 and kind != "depthwise"
        # An array of multipliers computes every dense kernel in the same way, and so linear layers below.
        dense = "conv1x1" if has_array and kind in ("conv3x3", "conv") else kind
        macs = "grouped_macs" if is_grouped and not conventions.splits_groups else f"{dense}_macs"
        amounts |= {macs: work.macs * tiles, f"{kind}_elements": passed, "weights": work.weights}
        if is_grouped and conventions.splits_groups:
            amounts["layers"] = work.groups
    elif work.kind == "linear" and work.rows == 1:
        amounts["linear_weights"] = work.weights
    elif work.kind == "linear":
        amounts |= {"conv1x1_macs" if has_array else "product_macs": work.macs, "weights": work.weights}
    elif work.kind == "product":
        amounts["attention_macs"] = work.macs
    elif work.kind == "detection":
        amounts["detections"] = 1
    else:
        amounts[_PASSING.get(work.kind, "moved_elements")] = passed
    row = np.zeros(len(CLASSES))
    for name, value in amounts.items():
        row[_AT[name]] = value
    scaled: Vector = row * _UNIT
    return scaled


def _in_blocks(work: LayerWork, lanes: int) -> LayerWork:
    """Return the layer as blocks of channels make it: 3 channels move as `lanes`, and multiply as twice as many."""

    def filled(channels: int, block: int) -> float:
        return -(-channels // block) * block / channels if channels else 1.0

    extra = 1.0
    if work.kind == "conv":
        is_depthwise = work.groups > 1 and work.channels <= 2
        extra = filled(work.filters, 2 * lanes) * (1.0 if is_depthwise else filled(work.channels, 2 * lanes))
    return work._replace(
        macs=round(work.macs * extra),
        reads=round(work.reads * filled(work.channels * work.groups, lanes)),
        writes=round(work.writes * filled(work.filters, lanes)),
    )


def _conv_class(work: LayerWork) -> str:
    if work.groups > 1 and work.channels <= 2:
        return "depthwise"
    if work.channels <= FIRST_CHANNELS:
        return "first"
    if prod(work.kernel) == 1:
        return "conv1x1"
    return "conv3x3" if work.kernel == (3, 3) and work.stride == 1 else "conv"


def _passed(elements: int, cache_elements: float) -> float:
    return elements * elements / (elements + cache_elements) if elements else 0.0


def _tile_share(places: Sequence[int]) -> float:
    """Return the outputs that whole tiles compute, over those that are asked for.

    >>> _tile_share((7, 7)) == 8 * 8 / (7 * 7)
    True
    """
    return prod(-(-place // TILE) * TILE for place in places) / prod(places)


_LARGEST_STEP = 2.0

# Quantities of some nets, and the ms that each took.
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
        """Return the logarithm of the predicted time in ms of one net."""
        return float(np.log(np.exp(self.mean) @ quantities))

    def shares(self, quantities: Vector) -> Vector:
        """Return the share of every class in the predicted time."""
        parts: Vector = np.exp(self.mean) * quantities
        shares: Vector = parts / parts.sum()
        return shares

    def variance(self, quantities: Vector) -> float:
        """Return the variance of the logarithm of the predicted time, from that of the costs alone."""
        shares = self.shares(quantities)
        return float(shares @ self.covariance @ shares)


@dataclass(frozen=True, slots=True)
class Spread:
    """How far times lie from predictions, in logarithms: sd^2 = noise^2 + trust * variance of the fit.

    `quantile` of these sd make a 90 % interval. `noise` is the scatter of models about any sum of class costs.
    """

    noise: float
    trust: float
    quantile: float

    def width(self, variance: float, noise_ratio: float = 1.0) -> float:
        """Return half of the interval, as a logarithm.

        Args:
            variance: of the logarithm of the prediction, as `Costs.variance` has it.
            noise_ratio: how much noisier this platform is than others of its kind; 1 where nothing is known.
        """
        return self.quantile * float(np.sqrt((self.noise * noise_ratio) ** 2 + self.trust * variance))


def fit_costs(quantities: Vector, times_ms: Vector, prior: Costs, noise: float = NOISE) -> Costs:
    """Return the costs of one board from the times of some nets, and from the prior where they say nothing.

    Args:
        quantities: one row per net, one column per class.
        times_ms: what each net took, in ms, more than zero. May be empty: then the prior is the answer.
        prior: costs that are likely before any time is known.
        noise: Scale of relative residuals, as `KernelConventions.noise`.
    """
    if not len(times_ms):
        return prior
    means, covariances = BoardStack([(quantities, times_ms)], noise).fitted(prior.mean[None, :], prior.covariance, None)
    return Costs(means[0], covariances[0], rows_with_class(quantities, means[0]))


def rows_with_class(quantities: Vector, mean: Vector) -> Vector:
    """Count the rows that have at least 3 % of their predicted time in each class."""
    parts = quantities * np.exp(mean)
    counts: Vector = (parts >= 0.03 * parts.sum(axis=1, keepdims=True)).sum(axis=0).astype(float)
    return counts


class BoardStack:
    """The fit of class costs to times, for several boards at once: a positive cost per class, with a common prior.

    Board b runs net i in t = sum_k c_k * x_ik, with x the net's quantities and c > 0 the board's costs. Times span four
    decades and errors are relative, so that the fit is of log t, in the logarithms f_k = log c_k:

        r_i = log t_i - log sum_k exp(f_k) x_ik

    Residuals follow a Student t with nu = 4 and a scale s, the noise: a net that a runtime has no good kernel for must
    not bend the costs of all others. Boards are alike, so f has a Gaussian prior N(m, S), and the fit minimizes

        sum_i (nu + 1)/2 * log(1 + (r_i/s)^2 / nu)  +  1/2 * (f - m)' S^-1 (f - m)

    The derivative of -r_i by f_k is J_ik = c_k x_ik / t_i: the share of class k in the predicted time, so rows of J add
    up to 1. A t-distributed residual acts as a Gaussian one with the weight w_i = (nu + 1) / (nu + (r_i/s)^2) / s^2.
    The step of Levenberg and Marquardt solves

        (J'WJ + S^-1 + lambda * diag) step = J'W r - S^-1 (f - m)

    At the minimum H = J'WJ + S^-1 is the curvature, and H^-1 the covariance of f (Laplace). Boards may have different
    numbers of rows: they are padded with rows of weight zero, whose quantities are one, so that their logarithm exists.
    scripts/platform_fit/board_priors.py finds the prior.
    """

    def __init__(self, boards: Sequence[Rows], noise: float = NOISE) -> None:
        self.noise = noise
        longest = max(len(times) for _, times in boards)
        self.x = np.ones((len(boards), longest, boards[0][0].shape[1]))
        self.log_t = np.zeros((len(boards), longest))
        self.is_row = np.zeros((len(boards), longest))
        for number, (rows, times) in enumerate(boards):
            wrong = [time for time in times if not (np.isfinite(time) and time > 0)]
            if wrong:
                raise InvalidInput(f"a time is {wrong[0]:g}; times must be finite and more than zero")
            self.x[number, : len(times)] = rows
            self.log_t[number, : len(times)] = np.log(times)
            self.is_row[number, : len(times)] = 1.0

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
        f: Vector = self.scaled(centre) if start is None else start.copy()
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

    def scaled(self, centre: Vector) -> Vector:
        """Return costs in the given proportions, scaled to each board's median net."""
        residuals = np.where(self.is_row > 0, self.log_t - self._log_time(centre), np.nan)
        scale: Vector = np.nanmedian(residuals, axis=1)
        return centre + scale[:, None]

    def _objective(self, f: Vector, centre: Vector, precision: Vector) -> tuple[Vector, Vector]:
        residuals = self.log_t - self._log_time(f)
        misfit = self.is_row * (FREEDOM + 1) / 2 * np.log1p((residuals / self.noise) ** 2 / FREEDOM)
        away = f - centre
        return misfit.sum(axis=1) + 0.5 * np.einsum("bi,ij,bj->b", away, precision, away), residuals

    def _derivatives(self, f: Vector, residuals: Vector, centre: Vector, precision: Vector) -> tuple[Vector, Vector]:
        parts = self.x * np.exp(f)[:, None, :]
        shares = parts / parts.sum(axis=2, keepdims=True)
        weights = self.is_row * (FREEDOM + 1) / (FREEDOM + (residuals / self.noise) ** 2) / self.noise**2
        weighted = shares * weights[:, :, None]
        curvature = np.matmul(weighted.transpose(0, 2, 1), shares) + precision
        gradient = np.einsum("bnk,bn->bk", weighted, residuals) - (f - centre) @ precision
        return curvature, gradient
