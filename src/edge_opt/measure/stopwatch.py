"""The stopwatch: wall and CPU seconds of a block of runs, and what the rest of the machine did meanwhile."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from edge_opt.errors import MeasurementFailed
from edge_opt.measure.device import Device
from edge_opt.measure.environment import machine_cpu_s

# The kernel counts the machine's time in hundredths of a second.
_TELLING_TIME_S = 0.2


@dataclass(frozen=True, slots=True)
class Clock:
    """Where time comes from: seconds on the wall, and seconds of CPU that this process and the whole machine used."""

    wall: Callable[[], float] = time.perf_counter
    cpu: Callable[[], float] = time.process_time
    machine: Callable[[], float | None] = machine_cpu_s


class Usage(NamedTuple):
    """Seconds on the wall, of this process and of the whole machine; the last is None where it is not told."""

    wall_s: float
    cpu_s: float
    machine_s: float | None


def cores_of_others(before: Usage, after: Usage) -> float | None:
    """Cores that other programs kept busy meanwhile; None where that is not told, or the time was too short to tell."""
    wall_s = after.wall_s - before.wall_s
    if before.machine_s is None or after.machine_s is None or wall_s < _TELLING_TIME_S:
        return None
    return max(0.0, (after.machine_s - before.machine_s - (after.cpu_s - before.cpu_s)) / wall_s)


@dataclass(slots=True)
class Tally:
    """How often something ran; runners of the same model share one."""

    repeats: int = 0


class Runner:
    """Something to run many times. `prepare` and `collect` stand around a block of repeats, untimed."""

    def __init__(
        self,
        run: Callable[[], object],
        prepare: Callable[[int], None] | None = None,
        collect: Callable[[int], None] | None = None,
        tally: Tally | None = None,
    ) -> None:
        self.run = run
        self.prepare = prepare
        self.collect = collect
        self.tally = tally or Tally()

    def once(self) -> object:
        """Run once, untimed, and hand on the result."""
        if self.prepare is not None:
            self.prepare(1)
        try:
            result = self.run()
        except Exception as error:
            raise self._failed(0, error) from error
        finally:
            if self.collect is not None:
                self.collect(1)
        self.tally.repeats += 1
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
        self.tally.repeats += count

    def _failed(self, number: int, error: Exception) -> MeasurementFailed:
        first_line = next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")
        return MeasurementFailed(
            f"the model failed at repeat {self.tally.repeats + number + 1}: {type(error).__name__}: {first_line}"
        )


class Stopwatch:
    """Times blocks on one device."""

    def __init__(self, clock: Clock, device: Device) -> None:
        self.clock = clock
        self.device = device

    def block(self, runner: Runner, count: int) -> tuple[float, float]:
        """Wall and CPU seconds per repeat of one block; garbage is collected between blocks, never inside."""
        wall, cpu, synchronize = self.clock.wall, self.clock.cpu, self.device.synchronize
        if runner.prepare is not None:
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
            if runner.collect is not None:
                runner.collect(count)
        return (end - start) / count, (cpu_end - cpu_start) / count

    def usage(self) -> Usage:
        """What was used up to now."""
        return Usage(self.clock.wall(), self.clock.cpu(), self.clock.machine())

    def cost_s(self) -> float:
        """Seconds that reading both clocks takes, the smallest of a few."""
        return max(0.0, min(self.block(Runner(lambda: None), 1)[0] for _ in range(9)))
