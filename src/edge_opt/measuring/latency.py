"""Latency: warm-up, blocks, several runs in turn, and the watch they are timed with."""

from __future__ import annotations

import gc
import math
import random
import time
from collections.abc import Callable, Mapping
from typing import Any

from edge_opt._support.checks import check_whole
from edge_opt.errors import InvalidInput, MeasurementFailed, first_line
from edge_opt.measuring.machine import CPU, Device, machine_cpu_s, retain_freed_memory, trim, usable_cores
from edge_opt.measuring.statistics import CONTENDED_CORES, latency_of, median, relative_half_width
from edge_opt.records.fields import field, record
from edge_opt.records.measurements import Environment, Latency

# The kernel counts the machine's time in hundredths of a second.
_TELLING_TIME_S = 0.2


@record
class Clock:
    """Where time comes from."""

    wall: Callable[[], float] = field("Gives seconds on the wall clock.", default=time.perf_counter)
    cpu: Callable[[], float] = field("Gives seconds of CPU time that this process used.", default=time.process_time)
    machine: Callable[[], float | None] = field(
        "Gives seconds of CPU time that the whole machine used; None where that is not told.", default=machine_cpu_s
    )


class TimedCall:
    """Something to run many times. `prepare` and `collect` stand around a block of repeats, untimed."""

    def __init__(
        self,
        run: Callable[[], object],
        prepare: Callable[[int], None] = lambda _: None,
        collect: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.run = run
        self.prepare = prepare
        self.collect = collect
        self.repeats = 0

    def once(self) -> object:
        """Run once, untimed, and hand on the result."""
        self.prepare(1)
        try:
            result = self.run()
        except Exception as error:
            raise self._failed(0, error) from error
        finally:
            self.collect(1)
        self.repeats += 1
        return result

    def times(self, count: int) -> None:
        """Run `count` times. Results are dropped at once, as in a loop that serves requests."""
        run = self.run
        number = 0
        try:
            for number in range(count):  # noqa: B007 (tells which one failed)
                run()
        except Exception as error:
            raise self._failed(number, error) from error
        self.repeats += count

    def _failed(self, number: int, error: Exception) -> MeasurementFailed:
        return MeasurementFailed(f"the model failed at repeat {self.repeats + number + 1}: {first_line(error)}")


class Stopwatch:
    """Times blocks on one device."""

    def __init__(self, clock: Clock, device: Device) -> None:
        self.clock = clock
        self.device = device

    def block(self, runner: TimedCall, count: int) -> tuple[float, float]:
        """Return wall and CPU seconds per repeat of one block; garbage is collected between blocks, never inside."""
        wall, cpu, synchronize = self.clock.wall, self.clock.cpu, self.device.synchronize
        runner.prepare(count)
        collects_garbage = gc.isenabled()
        gc.disable()
        try:
            synchronize()
            cpu_start, start = cpu(), wall()
            runner.times(count)
            synchronize()
            end, cpu_end = wall(), cpu()
        finally:
            if collects_garbage:
                gc.enable()
            runner.collect(count)
        return (end - start) / count, (cpu_end - cpu_start) / count

    def watch_others(self) -> Callable[[], float | None]:
        """Return a call that says how many cores other programs kept busy since now; None where it is not known."""
        wall, cpu, machine = self.clock.wall, self.clock.cpu, self.clock.machine
        start_s, own_before_s, all_before_s = wall(), cpu(), machine()

        def busy_cores() -> float | None:
            elapsed_s, own_s, all_s = wall() - start_s, cpu() - own_before_s, machine()
            if all_before_s is None or all_s is None or elapsed_s < _TELLING_TIME_S:
                return None
            return max(0.0, (all_s - all_before_s - own_s) / elapsed_s)

        return busy_cores

    def cost_s(self) -> float:
        """Return the seconds that reading both clocks takes, the smallest of a few."""
        return max(0.0, min(self.block(TimedCall(lambda: None), 1)[0] for _ in range(9)))


_LOOK_S = 0.25


def busy_remark() -> str | None:
    """Look for a moment at what other programs do on this machine, and say so; None where they leave it alone."""
    cores, busy_cores = usable_cores(), Stopwatch(Clock(), CPU).watch_others()
    time.sleep(_LOOK_S)
    others = busy_cores() or 0.0
    return None if others <= CONTENDED_CORES * cores else f"other programs keep {others:.1f} of {cores} cores busy"


def wait_for_quiet(patience_s: float) -> bool:
    """Wait until other programs leave the machine alone; False where they did not within `patience_s`."""
    wall = Clock().wall
    end_s = wall() + patience_s
    while wall() < end_s:
        if busy_remark() is None:
            return True
    return False


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

    def __init__(self, runner: TimedCall) -> None:
        self.runner = runner
        self.length = 1
        self.wall_s: list[float] = []
        self.cpu_s: list[float] = []

    @property
    def spent_s(self) -> float:
        return math.fsum(self.wall_s) * self.length


def measure_latency(run: Callable[[], object] | TimedCall, **options: Any) -> Latency:
    """Return the seconds per call of a function, with an interval.

    Args:
        run: What to time; called without arguments.
        options: As in `interleaved`.

    >>> measure_latency(lambda: sum(range(1000)), min_time_s=0.01).median_s > 0
    True
    """
    return interleaved({"": run}, **options)[""]


_COLD_CALLS = 5


def cold_memory_latency_s(call: TimedCall, max_time_s: float) -> float | None:
    """Return the median seconds of a call that must map its memory first; None where memory cannot be given back.

    Every other time here is of kept memory. Outside of a measurement a process may be anywhere between the two.
    After `max_time_s` no further call is begun.
    """
    stopwatch = Stopwatch(Clock(), CPU)
    seconds: list[float] = []
    while len(seconds) < _COLD_CALLS and (not seconds or sum(seconds) < max_time_s):
        if not trim():
            return None
        seconds.append(stopwatch.block(call, 1)[0])
    return median(seconds)


def interleaved(
    runs: Mapping[str, Callable[[], object] | TimedCall],
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
    """Measure several candidates, a block of each in turn, so that all see the same machine.

    All get the same number of blocks, and blocks of one round share their place in `samples_s`. Memory that is freed
    stays with the process meanwhile, where the C library can be told so.

    Args:
        runs: What to time, by name; each is called without arguments.
        batch_size: Samples in one call, for the throughput.
        min_time_s: Least seconds to measure each of them.
        max_time_s: Most seconds to measure each of them; default: five times the least.
        target_precision: Stop when every median is known to ± this share of itself.
        clock: Where time comes from; the machine's own clocks unless given.
        device: Where the work runs; it is waited for before the clock is read.
        environment: The machine, for remarks on what disturbs it; none are made without.
        progress: Called with the share that is done and a word on it, after each round.
        repeats: Time exactly this many single calls instead of measuring for a time.
        warmup: Calls before those, which are not timed; without `repeats`, warm-up ends by itself.
    """
    if not runs:
        raise InvalidInput("nothing to measure: runs is empty")
    limit_s = longest_time_s(min_time_s, max_time_s, target_precision, batch_size, repeats, warmup)
    stopwatch = Stopwatch(clock or Clock(), device)
    block_s = max(_CLOCK_COSTS_PER_BLOCK * stopwatch.cost_s(), min_time_s / _BLOCKS_WANTED)
    candidates = {name: _Candidate(run if isinstance(run, TimedCall) else TimedCall(run)) for name, run in runs.items()}
    with retain_freed_memory():
        for candidate in candidates.values():
            if progress is not None:
                progress(0.0, "warming up")
            if repeats is None:
                _warm_up(candidate, stopwatch, block_s, min_time_s)
            for _ in range(0 if repeats is None else warmup):
                candidate.runner.once()
        busy_cores = stopwatch.watch_others()
        _take_turns(list(candidates.values()), stopwatch, min_time_s, limit_s, target_precision, repeats, progress)
        others = busy_cores()
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


def _take_turns(
    turn: list[_Candidate], stopwatch: Stopwatch, min_time_s: float, limit_s: float, target_precision: float,
    repeats: int | None, progress: Progress | None,
) -> None:  # fmt: skip
    """Time a block of each in turn, until all are known well enough, time is over, or `repeats` are done."""
    order = random.Random(0)
    look_at = _MIN_BLOCKS
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
                return
            continue
        if spent_s >= limit_s and count >= _WINDOW:
            return
        if spent_s >= min_time_s and count >= look_at:
            if all(relative_half_width(candidate.wall_s) <= target_precision for candidate in turn):
                return
            look_at = math.ceil(count * _LOOK_AGAIN)


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
        before, now = history[-2 * _WINDOW : -_WINDOW], history[-_WINDOW:]
        is_settled = len(before) == _WINDOW and median(now) >= (1 - _STILL_WARMING) * median(before)
        if spent_s >= limit_s or is_settled:
            return


def longest_time_s(
    min_time_s: float,
    max_time_s: float | None,
    target_precision: float,
    batch_size: int | None = None,
    repeats: int | None = None,
    warmup: int = 0,
) -> float:
    """Return how long a measurement may take, after checking every argument."""
    check_whole("repeats", 1 if repeats is None else repeats)
    check_whole("warmup", warmup, 0)
    if batch_size is not None and not batch_size >= 1:
        raise InvalidInput(f"batch_size is {batch_size}; it must be at least 1")
    if not target_precision > 0:
        raise InvalidInput(f"target_precision is {target_precision}; it must be above 0, such as 0.02 for ±2 %")
    if not 0 < min_time_s <= 86_400:
        raise InvalidInput(f"min_time_s is {min_time_s}; it must be a time above 0 s and at most a day, such as 1.0")
    limit_s = 5 * min_time_s if max_time_s is None else max_time_s
    if not min_time_s <= limit_s < math.inf:
        raise InvalidInput(f"max_time_s is {max_time_s}; it must be at least min_time_s, which is {min_time_s}")
    return limit_s
