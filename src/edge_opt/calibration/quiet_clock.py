"""Times on a machine that does other work as well: CPU time beside wall time, and a reference kernel beside samples."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import torch

# A reference kernel that takes this much longer than its best says that the machine is disturbed at that moment.
DISTURBED = 1.08
# How long the reference kernel is repeated at first, to know its best.
_LEARN_S = 0.15
_SIDE = 128  # three matrices of this side are in the cache of one core


class SampleClock:
    """Times calls by the wall, or by their CPU time where another program took the core away meanwhile.

    With one thread a call computes as long as its CPU time, however often it is interrupted. With more threads the CPU
    time of a call is not its latency, and only the wall counts. CPU time is read by a system call, which takes longer
    than a short operator, so both clocks are read, the wall inside.
    """

    def __init__(self, threads: int | None = None) -> None:
        self.has_cpu = (threads or torch.get_num_threads()) == 1
        self.cost_ns = 0
        self.cost_ns = min(self.span(lambda: None)[1] for _ in range(200)) if self.has_cpu else 0

    def span(self, run: Callable[[], object]) -> tuple[int, int, object]:
        """Return nanoseconds of wall and of CPU that a call took, and what it returned."""
        if not self.has_cpu:
            start = time.perf_counter_ns()
            result = run()
            wall = time.perf_counter_ns() - start
            return wall, wall, result
        start_cpu = time.process_time_ns()
        start = time.perf_counter_ns()
        result = run()
        wall = time.perf_counter_ns() - start
        return wall, time.process_time_ns() - start_cpu - self.cost_ns, result

    def nanoseconds(self, run: Callable[[], object]) -> int:
        """Return the nanoseconds of one call, interruptions left out where that is possible."""
        wall, cpu, _ = self.span(run)
        return max(1, min(wall, cpu))

    def least_s(self, run: Callable[[], object], count: int) -> float:
        """Return the least seconds of some calls."""
        return min(self.nanoseconds(run) for _ in range(count)) / 1e9


class ReferenceKernel:
    """A product of small matrices, timed beside samples: how slow the machine is now beside its best."""

    def __init__(self, clock: SampleClock) -> None:
        self._clock = clock
        self._tensors = [torch.rand(_SIDE, _SIDE) for _ in range(3)]
        self.best_s = math.inf
        end = time.perf_counter() + _LEARN_S
        while time.perf_counter() < end:
            self.slowness()

    def slowness(self) -> float:
        """Return the time of the kernel now over its best time so far; 1 on an undisturbed machine."""
        a, b, out = self._tensors
        with torch.inference_mode():
            now_s = self._clock.least_s(lambda: torch.mm(a, b, out=out), 5)
        self.best_s = min(self.best_s, now_s)
        return now_s / self.best_s

    def quiet_round(self, run: Callable[[], Sequence[float]], repeats: int) -> tuple[list[float], bool]:
        """Return the times of a round over the machine's slowness beside it, and whether the round was disturbed.

        A disturbed round is repeated; where all were, the least disturbed one counts.
        """
        best: tuple[float, list[float]] = (math.inf, [])
        for _ in range(1 + repeats):
            before = self.slowness()
            times = run()
            after = self.slowness()
            slowness = math.sqrt(before * after)
            if slowness < best[0]:
                best = (slowness, [value / slowness for value in times])
            if max(before, after) <= DISTURBED:
                break
        return best[1], best[0] > DISTURBED
