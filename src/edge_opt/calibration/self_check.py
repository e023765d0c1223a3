"""A self-check: whole nets that were held out, the factor that is common to their predictions, and what is left."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from functools import lru_cache
from itertools import product

import numpy as np
import torch

from edge_opt._support.progress import report_progress
from edge_opt.calibration.calibration_file import host_file, save_calibration
from edge_opt.calibration.operator_bench import kept_heap, undisturbed
from edge_opt.calibration.predict import forward_seconds
from edge_opt.calibration.quiet_clock import ReferenceKernel, SampleClock
from edge_opt.calibration.reference_networks import CHECKS, Reference
from edge_opt.errors import EdgeOptError
from edge_opt.measuring.machine import read_environment
from edge_opt.records.predictions import Calibration, CheckedNet, SelfCheck
from edge_opt.trace import trace

_TURNS = 3
_RUNS = 3
# Below this many nets their spread says too little, and the errors of cross-validation count as well.
_FEWEST = 6
# Nine in ten of Student's t with so many degrees of freedom are within this; 1.645 in the limit.
STUDENT = {1: 6.31, 2: 2.92, 3: 2.35, 4: 2.13, 5: 2.02, 6: 1.94, 7: 1.90, 8: 1.86, 9: 1.83, 10: 1.81}
# A calibration older than this, or of a machine of another speed, is checked again before it is used.
FRESH_FOR = timedelta(days=1)
SPEED_TOLERANCE = 0.03
CARRY_SECONDS = 5.0
_LOOK_EVERY_S = 60
_CARRIED_NETS = 5
_HEAP_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class _RunningNet:
    name: str
    call: Callable[[], object]
    predicted_s: float


def now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def checked(calibration: Calibration, stop: Callable[[], bool], kernel: ReferenceKernel, clock: SampleClock,
            nets: Sequence[tuple[Reference, int]] | None = None) -> Calibration:  # fmt: skip
    """Return the calibration with the factor that whole nets have in common; `stop` says that time is over.

    Args:
        calibration: The machine; the factor that it has already is replaced.
        stop: Asked before each net; the first net of each kind is timed in any case.
        kernel: Timed beside each net.
        clock: For wall and CPU time.
        nets: The nets with their batches; default: all of them, batch by batch.
    """
    plain = replace(calibration, check=None)
    chosen = nets or [(net, net.batches[place]) for place in (0, 1) for net in CHECKS]
    running: list[_RunningNet] = []
    times: dict[str, float] = {}
    with kept_heap(_HEAP_BYTES), torch.inference_mode():
        for turn, place in product(range(_TURNS), range(len(chosen))):
            if stop() and (turn or place >= 2):
                break
            net, batch = chosen[place]
            report_progress(f"calibrating: self-check {turn + 1}, {net.name}, batch {batch}")
            if not turn:
                running.append(_running(net, batch, plain))
            item = running[place]
            least = _turn(item.call, kernel, clock)
            times[item.name] = min(least, times.get(item.name, math.inf))
    checks = tuple(CheckedNet(item.name, times[item.name], item.predicted_s) for item in running)
    check = summary(checks, kernel.best_s, calibration.whole_deviation)
    return replace(calibration, check=with_cross_validation(check, calibration.whole_deviation))


def _running(net: Reference, batch: int, calibration: Calibration) -> _RunningNet:
    torch.manual_seed(0)
    model, x = net.build().eval(), net.inputs(batch)
    predicted_s = forward_seconds(trace(model, x), calibration)
    model(x)
    return _RunningNet(f"{net.name}, batch {batch}", lambda: model(x), predicted_s)


def _turn(call: Callable[[], object], kernel: ReferenceKernel, clock: SampleClock) -> float:
    # The first run brings the weights of this net back into the cache after the others.
    def timed() -> list[float]:
        call()
        return [clock.least_s(call, _RUNS)]

    return kernel.quiet_round(timed, 1)[0][0]


def summary(nets: tuple[CheckedNet, ...], reference_s: float, whole_deviation: float) -> SelfCheck:
    """Return the common factor of some nets with its interval, and the errors that are left.

    The error of each net is taken with the factor of the others. Where nets are few, the deviation that
    cross-validation has found counts as much as four more nets.

    >>> nets = tuple(CheckedNet(str(number), 1.1, 1.0) for number in range(8))
    >>> check = summary(nets, 1e-3, 0.05)
    >>> round(check.factor, 3), round(check.expected_error, 3)
    (1.1, 0.0)
    """
    logs = np.log([net.seconds / net.predicted_s for net in nets])
    count = len(logs)
    factor = float(np.median(logs))
    left = np.array([logs[i] - np.median(np.delete(logs, i)) for i in range(count)]) if count > 1 else np.zeros(0)
    squares = float((left**2).sum())
    weight = 0 if count >= _FEWEST else 4
    deviation = math.sqrt((squares + weight * whole_deviation**2) / max(1, len(left) + weight))
    spread = float(np.std(logs, ddof=1)) if count > 1 else whole_deviation
    # A median of normal errors is 1.25 times as uncertain as their mean.
    half = STUDENT.get(count - 1, 1.7) * 1.25 * spread / math.sqrt(count)
    return SelfCheck(
        created=now(),
        factor=math.exp(factor),
        low=math.exp(factor - half),
        high=math.exp(factor + half),
        expected_error=float(np.median(np.abs(np.expm1(left)))) if len(left) else whole_deviation,
        deviation=deviation,
        reference_s=reference_s,
        nets=nets,
    )


def with_cross_validation(check: SelfCheck, deviation: float) -> SelfCheck:
    """Return a self-check with the larger of its own error and the deviation that cross-validation gives.

    The nets of the self-check are relatives of the reference models. Cross-validation, which leaves reference models
    out, tells more about other nets. The median of an error whose logarithm is normal is 0.6745 of its deviation.
    """
    deviation = max(check.deviation, deviation)
    expected_error = max(check.expected_error, math.expm1(0.6745 * deviation))
    return replace(check, deviation=deviation, expected_error=expected_error)


def carried(calibration: Calibration) -> Calibration:
    """Return this host's calibration as it holds today: checked again where it is old or the machine's speed differs.

    The check takes at most five seconds. Its factor is kept in the host's file, so that it is not repeated. A
    calibration of another kind of machine, or without a check of its own, is returned as it is.
    """
    reasons = tuple(_stale(calibration))
    if not reasons:
        return calibration
    start = time.perf_counter()
    threads = calibration.machine.threads
    with undisturbed(threads):
        clock = SampleClock(threads)
        kernel = ReferenceKernel(clock)
        nets = [(net, 1) for net in CHECKS[:_CARRIED_NETS]]
        # A third of the time is for the nets that have been begun.
        again = checked(calibration, lambda: time.perf_counter() - start > CARRY_SECONDS * 2 / 3, kernel, clock, nets)
    assert again.check is not None and calibration.check is not None
    factor = again.check.factor
    note = (
        f"checked again on {again.check.created[:10]} by {len(again.check.nets)} whole nets, because "
        f"{' and '.join(reasons)}: times are {factor / calibration.factor - 1:+.1%} to the calibration's"
    )
    deviation = math.hypot(calibration.check.deviation, again.check.factor_deviation)
    check = replace(again.check, expected_error=calibration.check.expected_error, deviation=deviation, note=note)
    # What the check saw of torch holds for the other runtimes: it is the speed of the machine.
    change = factor / calibration.factor
    runtimes = tuple(
        replace(it, check=replace(it.check, factor=it.check.factor * change)) for it in calibration.runtimes
    )
    result = replace(calibration, check=check, runtimes=runtimes)
    with suppress(EdgeOptError):
        save_calibration(result, host_file())
    return result


def _stale(calibration: Calibration) -> Iterator[str]:
    """Yield why a calibration should be checked again; nothing where it holds, or where a check cannot tell."""
    check, here, there = calibration.check, read_environment(), calibration.machine
    if check is None or (here.cpu, here.cores, here.torch) != (there.cpu, there.cores, there.torch):
        return
    if datetime.now(timezone.utc) - datetime.fromisoformat(check.created) > FRESH_FOR:
        yield f"it is of {check.created[:10]}"
    speed = check.reference_s / _reference_seconds(there.threads, int(time.monotonic() // _LOOK_EVERY_S)) - 1
    if abs(speed) > SPEED_TOLERANCE:
        yield f"the machine is {abs(speed):.0%} {'faster' if speed > 0 else 'slower'} now"


@lru_cache(maxsize=4)
def _reference_seconds(threads: int, period: int) -> float:
    """Return the best time of the reference kernel now: to learn it takes 0.15 s, so it is done once in a period."""
    with undisturbed(threads):
        return ReferenceKernel(SampleClock(threads)).best_s
