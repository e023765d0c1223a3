"""The search for the largest batch within a limit."""

from __future__ import annotations

from collections.abc import Callable


def largest_batch(bytes_at: Callable[[int], int], limit_bytes: int, most: int) -> int:
    """The largest batch of at most `most` that needs no more than the limit; 0 where even one does not fit.

    More samples must not need less. Memory is nearly linear in the batch, so a line through the last two batches
    tried says where to look; each guess is checked, and bisection has the last word.

    >>> largest_batch(lambda batch: 100 + 7 * batch, limit_bytes=1000, most=4096)
    128
    """
    fitting, too_large = 0, most + 1
    tried: dict[int, int] = {}
    guess = 1
    while too_large - fitting > 1:
        tried[guess] = bytes_at(guess)
        if tried[guess] <= limit_bytes:
            fitting = guess
        else:
            too_large = guess
        guess = _next_guess(tried, limit_bytes, fitting, too_large)
    return fitting


def _next_guess(tried: dict[int, int], limit_bytes: int, fitting: int, too_large: int) -> int:
    """A batch between what fits and what does not: by the line at first, halfway once the line has had its chance."""
    middle = (fitting + too_large) // 2
    if len(tried) < 2:
        return min(2, middle) or 1
    if len(tried) > 6:
        return middle
    (first, low), (last, high) = sorted(tried.items())[-2:]
    if high <= low:
        return middle
    on_the_line = first + (limit_bytes - low) * (last - first) // (high - low)
    return min(max(on_the_line, fitting + 1), too_large - 1)
