"""measure_energy(): the first meter that works, and why the others did not."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

from edge_opt.errors import InvalidInput, MeterFailed
from edge_opt.measure.energy.bench import Bench, in_thread
from edge_opt.measure.energy.nvml import gpu_of
from edge_opt.measure.energy.registry import Meter, Workload, build, names
from edge_opt.records import Energy, Latency, ModelProfile, Refusal


def measure_energy(
    run: Callable[[], object],
    latency: Latency,
    *,
    energy: str | None = "auto",
    device: str = "cpu",
    power_watts: float | None = None,
    profile: ModelProfile | None = None,
    subtract_idle: bool = False,
    min_time_s: float = 1.0,
    target_precision: float = 0.02,
    root: Path = Path("/"),
    nvml: Any = None,
    now: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
    background: Callable[[Callable[[], None], float], AbstractContextManager[None]] = in_thread,
    read: Callable[[Path], str] = Path.read_text,
) -> tuple[Energy | None, tuple[Refusal, ...]]:
    """Joules per forward with their source, and each meter that was tried in vain with its reason.

    `run` does one forward and returns when it is done. "auto" takes the first meter that sees the device and works
    to the end, then the proxy if `power_watts` is given, then none; a meter that is asked for by name works or raises
    `MeterFailed`. "model" needs `profile` and is never taken unasked. The last five arguments let a recording stand in
    for the machine.
    """
    _check(energy, power_watts, min_time_s, target_precision)
    if energy is None:
        return None, ()
    bench = Bench(root, gpu_of(device), nvml, power_watts, profile, now, sleep, background, read)
    work = Workload(run, latency, min_time_s, target_precision, subtract_idle)
    if energy != "auto":
        chosen = build(next(name for name in names() if name == energy), bench)
        figure, partial_view = chosen.measure(work), _blind(chosen, device)
        return (replace(figure, note=f"{figure.note}; {partial_view}") if partial_view else figure), ()
    refusals: list[Refusal] = []
    for name in names():
        meter = build(name, bench)
        if not meter.is_automatic:
            continue
        reason = meter.refusal or _blind(meter, device)
        if reason is None:
            try:
                return meter.measure(work), tuple(refusals)
            except MeterFailed as failure:
                reason = str(failure)
        refusals.append(Refusal(meter.name, reason))
    return None, tuple(refusals)


def _blind(meter: Meter, device: str) -> str | None:
    kind = device.partition(":")[0]
    if not meter.sees or kind in meter.sees:
        return None
    return f"it counts the energy of {' and '.join(meter.sees)} alone, and the model runs on {device}"


def _check(energy: str | None, power_watts: float | None, min_time_s: float, target_precision: float) -> None:
    if energy not in (None, "auto", *names()):
        raise InvalidInput(f"energy is {energy!r}; it must be 'auto', None or one of {', '.join(names())}")
    if power_watts is not None and not _is_above_zero(power_watts):
        raise InvalidInput(f"power_watts is {power_watts!r}; it must be a number above 0")
    if not _is_above_zero(min_time_s):
        raise InvalidInput(f"min_time_s is {min_time_s!r}; it must be a number above 0")
    if not _is_above_zero(target_precision) or target_precision >= 1:
        raise InvalidInput(f"target_precision is {target_precision!r}; it must lie between 0 and 1")


def _is_above_zero(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf
