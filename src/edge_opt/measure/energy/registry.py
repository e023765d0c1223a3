"""The registry of meters: each is built on the bench, and is usable or says why not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from edge_opt.errors import MeterFailed, RuleError
from edge_opt.measure.energy.bench import Bench
from edge_opt.records import Energy, EnergySource, Latency


@dataclass(frozen=True, slots=True)
class Workload:
    """One forward as a call that returns when it is done, how long one takes, and how carefully to meter it."""

    run: Callable[[], object]
    latency: Latency
    min_time_s: float
    target_precision: float
    subtract_idle: bool


Measure = Callable[[Workload], Energy]
Factory = Callable[[Bench], Measure]


@dataclass(frozen=True, slots=True)
class Meter:
    """One way to know the energy of a forward; `refusal` says why it cannot be used here, None when it can.

    `sees` are the types of device whose energy it counts, empty for all; `is_automatic` meters are tried unasked.
    """

    name: EnergySource
    sees: tuple[str, ...]
    is_automatic: bool
    refusal: str | None
    measure: Measure


@dataclass(frozen=True, slots=True)
class _Entry:
    factory: Factory
    sees: tuple[str, ...]
    is_automatic: bool


_ENTRIES: dict[EnergySource, _Entry] = {}


def meter(name: EnergySource, *, sees: tuple[str, ...] = (), is_automatic: bool = True) -> Callable[[Factory], Factory]:
    """Register a meter: a function that finds its sensor on the bench, or raises `MeterFailed` with the reason."""

    def register(factory: Factory) -> Factory:
        if name in _ENTRIES:
            first, second = (f"{known.__module__}.{known.__qualname__}" for known in (_ENTRIES[name].factory, factory))
            raise RuleError(f"the meter {name!r} is registered twice: by {first} and by {second}")
        _ENTRIES[name] = _Entry(factory, sees, is_automatic)
        return factory

    return register


def names() -> list[EnergySource]:
    """The registered meters in the order in which they are tried."""
    ranks = {name: rank for rank, name in enumerate(get_args(EnergySource))}
    return sorted(_ENTRIES, key=lambda name: ranks.get(name, len(ranks)))


def build(name: EnergySource, bench: Bench) -> Meter:
    """The meter of this name on this bench, usable or with its refusal."""
    entry = _ENTRIES[name]
    try:
        return Meter(name, entry.sees, entry.is_automatic, None, entry.factory(bench))
    except MeterFailed as failure:
        reason = str(failure)

    def refuse(_: Workload) -> Energy:
        raise MeterFailed(f"the meter {name!r} cannot be used: {reason}")

    return Meter(name, entry.sees, entry.is_automatic, reason, refuse)


def meters(root: Path = Path("/")) -> tuple[Meter, ...]:
    """Every meter there is, usable on this machine or with the reason why not.

    >>> [meter.name for meter in meters()]
    ['rapl', 'nvml', 'jetson', 'proxy', 'model']
    """
    bench = Bench(root=root)
    return tuple(build(name, bench) for name in names())
