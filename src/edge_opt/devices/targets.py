"""Targets: whatever a user names, found: a device by its figures, or a machine by its calibration."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from edge_opt.devices.calibrated import calibrated_device
from edge_opt.devices.calibration_files import load_calibration
from edge_opt.devices.catalog import device as find_device
from edge_opt.errors import InvalidInput
from edge_opt.records import Calibration, DeviceSpec

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
    return found if isinstance(found, DeviceSpec) else calibrated_device(found)


def _is_calibration_file(path: Path) -> bool:
    """Whether a JSON file bears a calibration's mark; what is wrong with a file is for its own reader to say."""
    if path.suffix.lower() != ".json":
        return False
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(data, Mapping) and "schema" in data
