"""RAPL: the energy counters of x86 processors, read from powercap."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from edge_opt.errors import MeterFailed
from edge_opt.measure.energy.bench import Bench
from edge_opt.measure.energy.registry import Measure, meter
from edge_opt.measure.energy.sensing import Sensor, sensed

# Intel SDM vol. 3B, 15.10: counters move about every millisecond, in steps of 61 µJ unless the unit register differs.
UPDATE_S = 1e-3
STEP_J = 61e-6


@meter("rapl", sees=("cpu",))
def rapl(bench: Bench) -> Measure:
    """Packages and their memory. Memory is a sub-zone by name only: its joules are not in the package's.

    Cores and graphics are in the package, and `psys` holds everything once more; none of them is added.
    """
    zones = _zones(bench)
    names = " + ".join(sorted(zones.values()))
    sensor = Sensor("rapl", f"RAPL counters {names}", UPDATE_S, STEP_J, partial(_opened, bench, tuple(zones)))
    return partial(sensed, sensor, bench)


def _zones(bench: Bench) -> dict[Path, str]:
    """The zones that add up to the processor and its memory, with their names."""
    powercap = bench.root / "sys/class/powercap"
    found: dict[Path, str] = {}
    for zone in sorted(powercap.glob("intel-rapl:*")):
        name = bench.text(zone / "name") or ""
        if not name.startswith(("package", "dram")):
            continue
        try:
            bench.number(zone / "energy_uj")
            bench.number(zone / "max_energy_range_uj")
        except MeterFailed as failure:
            if isinstance(failure.__cause__, PermissionError):
                raise MeterFailed(
                    f"{zone} is readable by root alone; until the next boot, "
                    f"`sudo chmod a+r {powercap}/intel-rapl:*/*energy*_uj` opens it"
                ) from failure
            continue
        found[zone] = name
    if not any(name.startswith("package") for name in found.values()):
        raise MeterFailed(
            f"no package counter in {powercap}; virtual machines and processors other than x86 have none, "
            "elsewhere `sudo modprobe intel_rapl_msr` may bring it"
        )
    return found


@contextmanager
def _opened(bench: Bench, zones: tuple[Path, ...]) -> Iterator[Callable[[], float]]:
    ranges_uj = {zone: bench.number(zone / "max_energy_range_uj") for zone in zones}
    last_uj = {zone: bench.number(zone / "energy_uj") for zone in zones}
    total_uj = 0

    def joules() -> float:
        nonlocal total_uj
        for zone in zones:
            now_uj = bench.number(zone / "energy_uj")
            total_uj += _step_uj(zone, last_uj[zone], now_uj, ranges_uj[zone])
            last_uj[zone] = now_uj
        return total_uj / 1e6

    yield joules


def _step_uj(zone: Path, before_uj: int, now_uj: int, range_uj: int) -> int:
    """How far the counter went, across its wrap-around."""
    if now_uj >= before_uj:
        return now_uj - before_uj
    step_uj = now_uj - before_uj + range_uj
    # A counter that was reset also goes back; but then the step would be most of its range, which is hours of work.
    if not 0 <= step_uj <= range_uj / 2:
        raise MeterFailed(
            f"{zone / 'energy_uj'} went back from {before_uj} to {now_uj} µJ, which is no wrap-around at {range_uj} µJ"
        )
    return step_uj
