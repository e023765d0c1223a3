"""Two candidates on the same samples: how far their scores differ, with an interval.

Both answered the same questions, so a sample on which they agree says nothing about the difference. Two intervals side
by side do not know that: they overlap where the pairs are clear, and part where they are not.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from edge_opt.measuring.statistics import wilson
from edge_opt.records import TrialMetrics

_CONFIDENCE = (2.5, 97.5)


class Difference(NamedTuple):
    """One score minus another, with its 95 % interval, how it was found, and on how many samples (0: not known)."""

    value: float
    low: float
    high: float
    method: str
    samples: int


def packed_answers(is_right: Sequence[bool] | NDArray[np.bool_]) -> str:
    """Which samples were answered right, as short text.

    >>> packed_answers([True, False, True]), unpacked_answers(packed_answers([True, False, True])).tolist()
    ('3:oA==', [True, False, True])
    """
    bits = np.asarray(is_right, dtype=bool)
    return f"{len(bits)}:{base64.b64encode(np.packbits(bits).tobytes()).decode()}"


def unpacked_answers(text: str) -> NDArray[np.bool_]:
    """What `packed_answers` packed; nothing where there is nothing."""
    count, _, content = text.partition(":")
    if not count:
        return np.zeros(0, dtype=bool)
    bits = np.frombuffer(base64.b64decode(content), dtype=np.uint8)
    return np.unpackbits(bits, count=int(count)).astype(bool)


def paired_shares(one: NDArray[np.bool_], other: NDArray[np.bool_]) -> Difference:
    """The difference of two shares of right answers to the same samples, with Newcombe's interval.

    Newcombe, Statistics in Medicine 17 (1998), method 10: Wilson's intervals of both shares, put together with the
    correlation of the pairs, which is counted with a correction for continuity.

    >>> right = np.array([True] * 48 + [False] * 2), np.array([True] * 36 + [False] * 12 + [True] * 2)
    >>> [round(value, 4) for value in paired_shares(*right)[:3]]  # 36 both, 12 and 2 one alone, 0 none
    [0.2, 0.0569, 0.3404]
    """
    n = len(one)
    both, first, second = int((one & other).sum()), int((one & ~other).sum()), int((~one & other).sum())
    neither = n - both - first - second
    p1, p2 = (both + first) / n, (both + second) / n
    (low1, high1), (low2, high2) = wilson(both + first, n), wilson(both + second, n)
    margins = (both + first) * (second + neither) * (both + second) * (first + neither)
    excess = both * neither - first * second
    corrected = max(excess - n / 2, 0.0) if excess > 0 else float(excess)
    correlation = corrected / math.sqrt(margins) if margins else 0.0

    def reach(a: float, b: float) -> float:
        return math.sqrt(max(0.0, a * a - 2 * correlation * a * b + b * b))

    value = (first - second) / n
    return Difference(
        value, value - reach(p1 - low1, high2 - p2), value + reach(high1 - p1, p2 - low2), "Newcombe's paired", n
    )


def difference(one: TrialMetrics, other: TrialMetrics) -> Difference:
    """The score of one minus that of another; paired where both tell their answers, else from their own intervals."""
    mine, theirs = unpacked_answers(one.answers), unpacked_answers(other.answers)
    if len(mine) and len(mine) == len(theirs):
        return paired_shares(mine, theirs)
    value = one.accuracy - other.accuracy
    # A slow metric is not drawn as often everywhere; the first draws are the same.
    count = min(len(one.replicates), len(other.replicates))
    if count:
        drawn = np.subtract(one.replicates[:count], other.replicates[:count])
        low, high = np.nanpercentile(drawn, _CONFIDENCE)
        return Difference(value, min(float(low), value), max(float(high), value), "a paired bootstrap's", 0)
    # Newcombe's square and add: what two intervals say of a difference when nothing is known of the pairs.
    return Difference(
        value,
        value - math.hypot(one.accuracy - one.accuracy_low, other.accuracy_high - other.accuracy),
        value + math.hypot(one.accuracy_high - one.accuracy, other.accuracy - other.accuracy_low),
        "unpaired",
        0,
    )
