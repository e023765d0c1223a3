"""Operators timed alone, in rounds: until one comes again, the others have pushed its weights out of the cache."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch

from edge_opt.devices.calibration.operands import Runnable

T = TypeVar("T")


def rounds(
    runnables: Sequence[Runnable], count: int, rehearsals: Sequence[Runnable | None] | None = None
) -> list[list[float]]:
    """Seconds of each operator in each round; outputs are made anew and dropped, as in a forward.

    A rehearsal is the same operator on other tensors, run just before: it leaves the code in the cache, as the layers
    of a model do for each other, and the weights out of it.
    """
    seconds: list[list[float]] = [[] for _ in runnables]
    clock = time.perf_counter_ns
    with torch.inference_mode():
        for _ in range(count):
            for times, runnable, rehearsal in zip(
                seconds, runnables, rehearsals or [None] * len(runnables), strict=True
            ):
                if rehearsal is not None:
                    rehearsal.run()
                runnable.touch()
                start = clock()
                result = runnable.run()
                times.append((clock() - start) / 1e9)
                del result
    return seconds


def best_seconds(run: Callable[[], object], count: int) -> float:
    """Least seconds of a call, after one that does not count."""
    run()
    best = float("inf")
    for _ in range(count):
        start = time.perf_counter_ns()
        run()
        best = min(best, (time.perf_counter_ns() - start) / 1e9)
    return best


@contextmanager
def undisturbed(threads: int | None) -> Iterator[None]:
    """No garbage collection, the asked number of threads, random numbers restored; then everything as found."""
    found, was_collecting, numbers = torch.get_num_threads(), gc.isenabled(), torch.get_rng_state()
    fast_path = torch.backends.mha.get_fastpath_enabled()
    if threads is not None:
        torch.set_num_threads(threads)
    gc.disable()
    try:
        yield
    finally:
        if was_collecting:
            gc.enable()
        torch.set_num_threads(found)
        torch.set_rng_state(numbers)
        torch.backends.mha.set_fastpath_enabled(fast_path)
