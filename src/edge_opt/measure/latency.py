"""Latency of a callable: warm-up until it is stable, then blocks of repeats, several candidates in turn."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping

from edge_opt.errors import InvalidInput
from edge_opt.measure.device import CPU, Device
from edge_opt.measure.statistics import latency_of, median, relative_half_width
from edge_opt.measure.stopwatch import Clock, Runner, Stopwatch, cores_of_others
from edge_opt.records import Environment, Latency

# Told after each round: the share of the longest time that is over, and how far it came.
Progress = Callable[[float, str], None]

# A block this many times longer than reading the clocks hides them: 0.1 %.
_CLOCK_COSTS_PER_BLOCK = 1000
# Short runs are put together so that the shortest measurement still has about this many blocks.
_BLOCKS_WANTED = 200
_MIN_BLOCKS = 5
# The interval is looked at again when there are this many times more samples; a look costs some milliseconds.
_LOOK_AGAIN = 1.3
# Warm-up ends when a window of blocks is no longer faster than the one before by more than this.
_STILL_WARMING = 0.03
_WINDOW = 3


class _Candidate:
    """A runner with its block length and the blocks timed so far, in seconds per repeat."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.length = 1
        self.wall_s: list[float] = []
        self.cpu_s: list[float] = []

    @property
    def spent_s(self) -> float:
        return math.fsum(self.wall_s) * self.length


def measure_latency(
    run: Callable[[], object] | Runner,
    *,
    batch_size: int = 1,
    min_time_s: float = 1.0,
    max_time_s: float | None = None,
    target_precision: float = 0.02,
    clock: Clock | None = None,
    device: Device = CPU,
    environment: Environment | None = None,
    progress: Progress | None = None,
) -> Latency:
    """Seconds per call of `run`, with an interval; see `interleaved` for what the arguments mean.

    >>> measure_latency(lambda: sum(range(1000)), min_time_s=0.01).median_s > 0
    True
    """
    return interleaved(
        {"": run},
        batch_size=batch_size,
        min_time_s=min_time_s,
        max_time_s=max_time_s,
        target_precision=target_precision,
        clock=clock,
        device=device,
        environment=environment,
        progress=progress,
    )[""]


def interleaved(
    runs: Mapping[str, Callable[[], object] | Runner],
    *,
    batch_size: int = 1,
    min_time_s: float = 1.0,
    max_time_s: float | None = None,
    target_precision: float = 0.02,
    clock: Clock | None = None,
    device: Device = CPU,
    environment: Environment | None = None,
    progress: Progress | None = None,
    repeats: int | None = None,
    warmup: int = 0,
) -> dict[str, Latency]:
    """Latency of several candidates, a block of each in turn, so that all see the same machine.

    Each is run for `min_time_s` at least, and on until its median is known to ± `target_precision` (a share of it) or
    `max_time_s` (five times the least) is over. All get the same number of blocks, and blocks of one round share their
    place in `samples_s`. With `repeats` it is exactly that many single runs instead, after `warmup` untimed ones.
    """
    if not runs:
        raise InvalidInput("nothing to measure: runs is empty")
    limit_s = longest_time_s(min_time_s, max_time_s, target_precision, batch_size)
    stopwatch = Stopwatch(clock or Clock(), device)
    check_repeats(repeats, warmup)
    block_s = max(_CLOCK_COSTS_PER_BLOCK * stopwatch.cost_s(), min_time_s / _BLOCKS_WANTED)
    candidates = {name: _Candidate(run if isinstance(run, Runner) else Runner(run)) for name, run in runs.items()}
    for candidate in candidates.values():
        if progress is not None:
            progress(0.0, "warming up")
        if repeats is None:
            _warm_up(candidate, stopwatch, block_s, min_time_s)
        for _ in range(0 if repeats is None else warmup):
            candidate.runner.once()
    turn = list(candidates.values())
    order = random.Random(0)
    look_at = _MIN_BLOCKS
    usage = stopwatch.usage()
    while True:
        for candidate in turn:
            wall_s, cpu_s = stopwatch.block(candidate.runner, candidate.length)
            candidate.wall_s.append(wall_s)
            candidate.cpu_s.append(cpu_s)
        # A fixed order falls into step with the scheduler's time slices: the same run came out 5 % faster than itself.
        order.shuffle(turn)
        count, spent_s = len(turn[0].wall_s), min(candidate.spent_s for candidate in turn)
        done = spent_s / limit_s if repeats is None else count / repeats
        if progress is not None:
            progress(min(1.0, done), f"{count} blocks")
        if repeats is not None:
            if count >= repeats:
                break
            continue
        if spent_s >= limit_s and count >= _WINDOW:
            break
        if spent_s >= min_time_s and count >= look_at:
            if all(relative_half_width(candidate.wall_s) <= target_precision for candidate in turn):
                break
            look_at = math.ceil(count * _LOOK_AGAIN)
    others = cores_of_others(usage, stopwatch.usage())
    return {
        name: latency_of(
            candidate.wall_s,
            candidate.cpu_s,
            batch_size=batch_size,
            target_precision=target_precision,
            environment=environment,
            waits_for_device=device.is_asynchronous,
            cores_of_others=others,
        )
        for name, candidate in candidates.items()
    }


def _warm_up(candidate: _Candidate, stopwatch: Stopwatch, block_s: float, limit_s: float) -> None:
    """Run until times no longer fall, or `limit_s` is over; on the way find how many repeats fill a block."""
    spent_s = 0.0
    history: list[float] = []
    while True:
        wall_s, _ = stopwatch.block(candidate.runner, candidate.length)
        spent_s += wall_s * candidate.length
        if wall_s * candidate.length < block_s / 2:
            # Ten times at most: a first run is often slow, but a clock that stood still says nothing.
            fitting = math.ceil(block_s / wall_s) if wall_s > 0 else candidate.length * 10
            candidate.length = min(max(fitting, candidate.length + 1), candidate.length * 10)
            history.clear()
        else:
            history.append(wall_s)
        if spent_s >= limit_s or _is_settled(history):
            return


def check_repeats(repeats: int | None, warmup: int) -> None:
    """Refuse counts that make no sense; without `repeats` it is time that decides."""
    for name, value, least in (("repeats", 1 if repeats is None else repeats, 1), ("warmup", warmup, 0)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise InvalidInput(f"{name} is {value!r}; it must be a whole number of at least {least}")


def _is_settled(history: list[float]) -> bool:
    before, now = history[-2 * _WINDOW : -_WINDOW], history[-_WINDOW:]
    return len(before) == _WINDOW and median(now) >= (1 - _STILL_WARMING) * median(before)


def longest_time_s(min_time_s: float, max_time_s: float | None, target_precision: float, batch_size: int = 1) -> float:
    """How long a measurement may take, once every argument makes sense."""
    if not batch_size >= 1:
        raise InvalidInput(f"batch_size is {batch_size}; it must be at least 1")
    if not target_precision > 0:
        raise InvalidInput(f"target_precision is {target_precision}; it must be above 0, such as 0.02 for ±2 %")
    if not 0 < min_time_s < math.inf:
        raise InvalidInput(f"min_time_s is {min_time_s}; it must be a time above 0 s, such as 1.0")
    limit_s = 5 * min_time_s if max_time_s is None else max_time_s
    if not min_time_s <= limit_s < math.inf:
        raise InvalidInput(f"max_time_s is {max_time_s}; it must be at least min_time_s, which is {min_time_s}")
    return limit_s
