"""A metric's value with its interval, and the difference of two scores on the same samples."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from edge_opt.measuring.statistics import wilson
from edge_opt.records.fields import field, record
from edge_opt.records.sweeps import SHARES

if TYPE_CHECKING:
    from edge_opt.tasks.metrics import QualityMetric

Numbers = npt.NDArray[np.float64]
RightAnswers = npt.NDArray[np.bool_]

RESAMPLES = 1000
# A user's metric may be slow: after this many seconds, the resamples drawn so far are used.
_RESAMPLING_SECONDS = 10.0
_FEWEST_RESAMPLES = 40


@record
class Score:
    """A metric's value over a part of the data, and how sure it is."""

    metric: QualityMetric = field("What was computed.")
    value: float = field("The value over all samples.")
    samples: int = field("How many samples.")
    resamples: Numbers = field(
        "The value over each resample. Equal numbers of samples give equal resamples, so that models are paired."
    )
    per_sample: Numbers | None = field(
        "One number per sample whose mean decides the metric; None where there is no such number."
    )

    @property
    def right_answers(self) -> RightAnswers | None:
        """Which samples were answered right; None where the metric is not a share of right answers."""
        each = self.per_sample
        if self.metric.name not in SHARES or each is None or not np.isin(each, (0.0, 1.0)).all():
            return None
        return each.astype(bool)

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of the value: Wilson's for shares of right answers, else the middle of the resamples.

        >>> import torch
        >>> from edge_opt.tasks.metrics import metric_named
        >>> labels = torch.zeros(100, dtype=torch.int64)
        >>> labels[:5] = 1
        >>> scored = metric_named("accuracy").scored([(torch.tensor([[1.0, 0.0]]).repeat(100, 1), labels)])
        >>> [round(bound, 4) for bound in scored.interval]
        [0.8882, 0.9785]
        """
        right = self.right_answers
        if right is not None:
            return wilson(int(right.sum()), len(right))
        known = self.resamples[np.isfinite(self.resamples)]
        return _middle(known, self.value) if len(known) >= _FEWEST_RESAMPLES else (self.value, self.value)


class PairedDifference(NamedTuple):
    """The first score minus the second on the same samples, with its 95 % interval.

    Both models answered the same questions, so a sample on which they agree says nothing about the difference. Two
    intervals side by side do not use that: they overlap where the pairs are clear, and part where they are not.

    Attributes:
        value: The difference.
        low: Lower end of its interval.
        high: Upper end of its interval.
        method: How the interval was computed.
        samples: How many samples; 0 where that is not known.
    """

    value: float
    low: float
    high: float
    method: str
    samples: int


def paired_difference(
    value: float,
    right_answers: tuple[RightAnswers | None, RightAnswers | None],
    resamples: tuple[Sequence[float] | Numbers, Sequence[float] | Numbers],
) -> PairedDifference | None:
    """Return the difference of two scores on the same samples; None where nothing pairs them.

    Args:
        value: The first score minus the second.
        right_answers: Which samples each model answered right; None or empty where the metric is not such a share.
        resamples: Values of each score over the same resamples.
    """
    first, second = right_answers
    if first is not None and second is not None and len(first) and len(first) == len(second):
        return paired_shares(first, second)
    # A slow metric is not drawn as often everywhere; the first draws are the same.
    count = min(len(resamples[0]), len(resamples[1]))
    draws = np.subtract(resamples[0][:count], resamples[1][:count])
    known = draws[np.isfinite(draws)]
    if not len(known):
        return None
    return PairedDifference(value, *_middle(known, value), "a paired bootstrap's", 0)


def paired_shares(first: RightAnswers, second: RightAnswers) -> PairedDifference:
    """Return the difference of two shares of right answers to the same samples, with Newcombe's interval.

    Newcombe, Statistics in Medicine 17 (1998), method 10: Wilson's intervals of both shares, put together with the
    correlation of the pairs, which is counted with a correction for continuity.

    >>> right = np.array([True] * 48 + [False] * 2), np.array([True] * 36 + [False] * 12 + [True] * 2)
    >>> [round(value, 4) for value in paired_shares(*right)[:3]]  # 36 both, 12 and 2 one alone, 0 none
    [0.2, 0.0569, 0.3404]
    """
    n = len(first)
    both, only_first, only_second = (int(pairs.sum()) for pairs in (first & second, first & ~second, ~first & second))
    neither = n - both - only_first - only_second
    p1, p2 = (both + only_first) / n, (both + only_second) / n
    (low1, high1), (low2, high2) = wilson(both + only_first, n), wilson(both + only_second, n)
    margins = (both + only_first) * (only_second + neither) * (both + only_second) * (only_first + neither)
    excess = both * neither - only_first * only_second
    corrected = max(excess - n / 2, 0.0) if excess > 0 else float(excess)
    correlation = corrected / math.sqrt(margins) if margins else 0.0

    def reach(a: float, b: float) -> float:
        return math.sqrt(max(0.0, a * a - 2 * correlation * a * b + b * b))

    value = (only_first - only_second) / n
    low, high = value - reach(p1 - low1, high2 - p2), value + reach(high1 - p1, p2 - low2)
    return PairedDifference(value, low, high, "Newcombe's paired", n)


def _middle(values: Numbers, value: float) -> tuple[float, float]:
    """Return the middle 95 % of resampled values, widened to the value itself."""
    low, high = np.quantile(values, (0.025, 0.975))
    return min(float(low), value), max(float(high), value)


def resampled(samples: int, count: int, value: Callable[[Numbers], float]) -> Numbers:
    """Return the value for samples drawn with replacement, with the same draws for the same number of samples."""
    generator, values, end = np.random.default_rng(samples), [], time.monotonic() + _RESAMPLING_SECONDS
    for _ in range(count):
        weights = np.bincount(generator.integers(0, samples, samples), minlength=samples).astype(np.float64)
        values.append(value(weights))
        if time.monotonic() > end:
            break
    return np.asarray(values, dtype=np.float64)
