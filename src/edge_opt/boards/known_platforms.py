"""What is known of every platform: fitted to times, calibrated, or a roofline only, with its error and source."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from edge_opt.boards.catalog import devices
from edge_opt.boards.platform_file import Platform, fitted_platforms
from edge_opt.boards.roofline import EngineLimits, used_bandwidth
from edge_opt.boards.targets import HOST, find_spec, platforms_of
from edge_opt.calibration.calibration_file import host_file, load_calibration
from edge_opt.records.devices import DeviceSpec, Precision
from edge_opt.records.display import Record
from edge_opt.records.predictions import Basis

_ASKED: tuple[Precision, ...] = ("fp32", "fp16", "int8")


@dataclass(frozen=True, slots=True)
class KnownPlatform(Record):
    """One platform and what its times rest on.

    Attributes:
        name: Device, engine with threads, runtime and precision; it works as a target where `basis` is "fitted".
        device: Name of the device.
        engine: Who computes.
        runtime: What runs the model; None where nobody says, as with a roofline.
        day: Date of the runtime, as precise as known; None where there is none.
        precision: Type of the numbers; None where there is no time in any.
        threads: Of the runtime; None where they are not known.
        basis: "fitted", "calibrated" or "roofline"; None where there is no time at all.
        error: Median relative error of nets that were held out, 0.1 is 10 %; None where it is not known.
        factor: Nine in ten of those nets lie within this factor; None where it is not known.
        rows: Times that it was fitted to; 0 for a roofline.
        source: Where the times or figures are from, or why there is no time.
    """

    name: str
    device: str
    engine: str
    runtime: str | None
    day: str | None
    precision: str | None
    threads: int | None
    basis: Basis | None
    error: float | None
    factor: float | None
    rows: int
    source: str


def platforms(device: str | None = None) -> tuple[KnownPlatform, ...]:
    """Every platform there is a time for, and every device there is none for, with what it rests on.

    Args:
        device: Name or alias of one device; all of them, and this host if it was calibrated, unless given.

    >>> [item.basis for item in platforms("stm32h747")]
    ['fitted']
    >>> platforms("hailo-8")[0].basis is None
    True
    """
    if device is not None:
        spec = find_spec(device)
        return (*fitted_known(spec), *by_figures(spec))
    specs = devices()
    found = [*map(_fitted, fitted_platforms()), *(item for spec in specs for item in by_figures(spec)), *_host()]
    return tuple(sorted(found, key=lambda item: (item.device, item.basis != "fitted", item.name)))


def fitted_known(spec: DeviceSpec) -> tuple[KnownPlatform, ...]:
    """The platforms of a device that were fitted, the best known first.

    Args:
        spec: The device.
    """
    return tuple(map(_fitted, platforms_of(spec)))


def _fitted(platform: Platform) -> KnownPlatform:
    return KnownPlatform(
        name=platform.name, device=platform.device, engine=platform.engine, runtime=platform.runtime, day=platform.day,
        precision=platform.precision, threads=platform.threads, basis="fitted", error=platform.error,
        factor=platform.factor, rows=platform.rows, source=platform.source,
    )  # fmt: skip


def by_figures(spec: DeviceSpec) -> Iterator[KnownPlatform]:
    """The precisions that a roofline answers in; a device that answers in none says why, unless it was timed.

    Args:
        spec: The device.
    """
    for precision in _ASKED if used_bandwidth(spec, spec.engine) is not None else ():
        roof = EngineLimits(spec, spec.engine, precision, may_widen=True)
        if roof.peak is None:
            source = "what memory takes alone, without an upper end: no peak is known"
        else:
            source = roof.peak.source + (f" (computes in {roof.computes_in})" * (roof.computes_in != precision))
        yield _roofline(spec, precision, "roofline", source)
    if used_bandwidth(spec, spec.engine) is None and not platforms_of(spec):
        why = spec.bandwidth_unknown or f"the bandwidth of its {spec.engine} is not known"
        yield _roofline(spec, None, None, f"no time: {why}; type in a few times with fit_platform")


def _roofline(spec: DeviceSpec, precision: str | None, basis: Basis | None, source: str) -> KnownPlatform:
    name = "/".join(part for part in (spec.name, spec.engine, basis, precision) if part)
    return KnownPlatform(name, spec.name, spec.engine, None, None, precision, None, basis, None, None, 0, source)


def _host() -> Iterator[KnownPlatform]:
    if host_file().exists():
        own = load_calibration()
        yield KnownPlatform(
            name=f"{HOST}/cpu-{own.machine.threads}/torch/fp32", device=HOST, engine="cpu", runtime="torch",
            day=own.created[:10], precision="fp32", threads=own.machine.threads, basis="calibrated",
            error=own.whole_deviation, factor=None, rows=len(own.samples), source=f"calibration of {own.machine.cpu}",
        )  # fmt: skip
