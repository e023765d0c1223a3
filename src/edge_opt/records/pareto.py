"""The Pareto front of points whose figures have intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple


class ObjectiveInterval(NamedTuple):
    """A figure with the interval it lies in; the less, the better."""

    low: float
    value: float
    high: float


Point = tuple[ObjectiveInterval, ...]


def dominates(one: Point, other: Point) -> bool:
    """Return whether `one` is no worse in value and both ends on every objective, and on some wholly better.

    On some objective even the worse end of `one` is better than the better end of `other`. For exact figures this is
    the ordinary dominance. Equal points do not dominate each other, and nothing dominates or is dominated by NaN.

    >>> fast, slow = (ObjectiveInterval(1.0, 1.0, 1.0),), (ObjectiveInterval(2.0, 2.0, 2.0),)
    >>> dominates(fast, slow), dominates(slow, fast), dominates(fast, fast)
    (True, False, False)
    >>> dominates((ObjectiveInterval(0.9, 1.0, 1.1),), (ObjectiveInterval(1.0, 1.2, 1.4),))  # not significantly
    False
    """
    pairs = list(zip(one, other, strict=True))
    return all(x <= y for a, b in pairs for x, y in zip(a, b, strict=True)) and any(a.high < b.low for a, b in pairs)


def frontier(points: Sequence[Point]) -> tuple[int, ...]:
    """Return the indices of the points that no other dominates, in their order; a point with NaN is never among them.

    >>> exact = lambda *values: tuple(ObjectiveInterval(v, v, v) for v in values)
    >>> frontier([exact(1, 3), exact(2, 2), exact(3, 3), exact(2, 2), exact(math.nan, 0)])
    (0, 1, 3)
    """
    known = [index for index, point in enumerate(points) if not any(math.isnan(x) for span in point for x in span)]
    kept: list[int] = []
    # A dominating point comes earlier in this order, and dominance is transitive: comparing with kept points suffices.
    for index in sorted(known, key=lambda index: [span.value for span in points[index]]):
        if not any(dominates(points[other], points[index]) for other in kept):
            kept.append(index)
    return tuple(sorted(kept))
