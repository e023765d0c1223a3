"""Targets: whatever a user names, found: a device by its figures, or a machine by its calibration."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from edge_opt.devices.calibration_files import load_calibration
from edge_opt.devices.catalog import device as find_device
from edge_opt.errors import InvalidInput
from edge_opt.records import Bandwidth, Calibration, DeviceSpec, Figure, Peak, Precision

HOST = "host"
Target = str | os.PathLike[str] | DeviceSpec | Calibration
Found = DeviceSpec | Calibration


def find_targets(target: Target | Sequence[Target]) -> tuple[Found, ...]:
    """Every target that was named, in order; one that is named twice is refused, for its figures would be the same."""
    named: Sequence[Any] = target if isinstance(target, (list, tuple)) else [target]
    if not named:
        raise InvalidInput("no target is given; name a device, such as raspberry-pi-4, or 'host'")
    found = tuple(find_target(item) for item in named)
    names = [item.name for item in found]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InvalidInput(f"the target {twice} is given twice; keep one of them")
    return found


def find_target(target: Target) -> Found:
    """One target: "host" or a calibration file is a machine that was measured, anything else a device.

    >>> find_target("raspberry-pi-4").name
    'raspberry-pi-4'
    """
    if isinstance(target, Calibration):
        return target
    if target == HOST:
        return load_calibration()
    if isinstance(target, (str, os.PathLike)) and _is_calibration_file(Path(target)):
        return load_calibration(target)
    return find_device(target)


def find_spec(target: Target) -> DeviceSpec:
    """The figures of a target; those of a machine that was calibrated are the measured ones."""
    found = find_target(target)
    return found if isinstance(found, DeviceSpec) else to_device(found)


def to_device(calibration: Calibration) -> DeviceSpec:
    """A calibrated machine as a device: its bandwidth, the best it reaches at each precision, overhead and RAM."""
    machine = calibration.machine
    source = f"calibration of {calibration.created}, {machine.cpu}, threads: {machine.threads}, torch {machine.torch}"

    def measured(value: float) -> Figure:
        return Figure(value, source, "measured")

    def peaks() -> Iterator[Peak]:
        for precision in get_args(Precision):
            best = max((peak.ops_per_s for peak in calibration.peaks if peak.precision == precision), default=None)
            if best is not None:
                yield Peak("cpu", precision, measured(best))

    return DeviceSpec(
        name=calibration.name,
        title=f"{calibration.name}, {machine.cpu}",
        engine="cpu",
        aliases=(),
        cores=measured(machine.cores),
        clock_hz=None,
        ram_bytes=(measured(machine.memory_bytes),),
        flash_bytes=None,
        bandwidths=(Bandwidth("traffic", "cpu", measured(calibration.memory_bytes_per_s)),),
        bandwidth_unknown=None,
        peaks=tuple(peaks()),
        powers=(),
        overhead_s=measured(calibration.overhead_per_operator_s),
        latencies=(),
        note="Figures as measured by a calibration, with that many threads.",
        origin="calibration",
    )


def _is_calibration_file(path: Path) -> bool:
    """Whether a JSON file bears a calibration's mark; what is wrong with a file is for its own reader to say."""
    if path.suffix.lower() != ".json":
        return False
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(data, Mapping) and "schema" in data
