"""Sensing: a workload run in front of a sensor for as long as its resolution asks, then joules per forward."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from edge_opt.errors import MeterFailed
from edge_opt.measure.energy.bench import Bench
from edge_opt.measure.energy.registry import Workload
from edge_opt.records import Energy, EnergySource

# A sensor that has not moved after this many windows is stuck.
PATIENCE = 5
BLOCKS = 10


@dataclass(frozen=True, slots=True)
class Sensor:
    """A sensor of energy: what it counts, how often and in which steps it moves.

    `opened()` is a context that yields a call: joules so far, from any origin.
    """

    name: EnergySource
    counts: str
    update_s: float
    step_j: float
    opened: Callable[[], AbstractContextManager[Callable[[], float]]]


def sensed(sensor: Sensor, bench: Bench, work: Workload) -> Energy:
    """Joules per forward by this sensor.

    The window is so long that neither one missed update nor one step is more than `target_precision` of it.
    """
    window_s = max(work.min_time_s, sensor.update_s / work.target_precision)
    least_j = sensor.step_j / work.target_precision
    block = math.ceil(window_s / BLOCKS / max(work.latency.median_s, 1e-9))
    with sensor.opened() as joules:
        idle_watts = _idle_watts(joules, bench, window_s) if work.subtract_idle else None
        forwards, start_j, start_s = 0, joules(), bench.now()
        used_j = elapsed_s = 0.0
        while elapsed_s < window_s or used_j < least_j or not used_j:
            if elapsed_s > PATIENCE * window_s:
                raise MeterFailed(f"{sensor.counts} moved by {used_j:.3g} J in {elapsed_s:.1f} s of work; it is stuck")
            for _ in range(block):
                work.run()
            forwards += block
            used_j, elapsed_s = joules() - start_j, bench.now() - start_s
    if idle_watts is not None and used_j <= idle_watts * elapsed_s:
        raise MeterFailed(
            f"{sensor.counts} took {used_j / elapsed_s:.3g} W under work and {idle_watts:.3g} W before it; "
            "the machine was not idle: end other work, or leave idle power in"
        )
    net_j = used_j - (idle_watts or 0.0) * elapsed_s
    extent = "all that ran beside the model included" if idle_watts is None else f"{idle_watts:.3g} W idle subtracted"
    note = f"measured: {sensor.counts}, {forwards} forwards in {elapsed_s:.2f} s, {extent}"
    return Energy(net_j / forwards, sensor.name, note, idle_watts)


def _idle_watts(joules: Callable[[], float], bench: Bench, window_s: float) -> float:
    start_j, start_s = joules(), bench.now()
    bench.sleep(window_s)
    return (joules() - start_j) / (bench.now() - start_s)


class PowerIntegral:
    """Joules from samples of power, by trapezoids; safe to sample from two threads."""

    def __init__(self, watts: Callable[[], float], now: Callable[[], float]) -> None:
        self._watts = watts
        self._now = now
        self._lock = threading.Lock()
        self._failure: MeterFailed | None = None
        self._last_s, self._last_watts, self._joules = now(), watts(), 0.0

    def sample(self) -> None:
        """Take one sample; a failure is kept for `joules`, which somebody listens to."""
        with self._lock:
            if self._failure is None:
                try:
                    watts = self._watts()
                except MeterFailed as failure:
                    self._failure = failure
                    return
                moment_s = self._now()
                self._joules += (watts + self._last_watts) / 2 * (moment_s - self._last_s)
                self._last_s, self._last_watts = moment_s, watts

    def joules(self) -> float:
        """Joules up to now."""
        self.sample()
        if self._failure is not None:
            raise self._failure
        return self._joules


@contextmanager
def integrated(watts: Callable[[], float], bench: Bench, period_s: float) -> Iterator[Callable[[], float]]:
    """Sample power in the background; yields the call that tells the joules so far."""
    integral = PowerIntegral(watts, bench.now)
    with bench.background(integral.sample, period_s):
        yield integral.joules
