"""Whatever a user names as a target: a device by its figures, a platform by its costs, a machine by its calibration."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from edge_opt.boards.calibration_file import calibrated_device, load_calibration
from edge_opt.boards.catalog import SUFFIXES, is_platform_file, is_shipped, normalized, unknown_device
from edge_opt.boards.catalog import device as find_device
from edge_opt.boards.fitted import platforms_named
from edge_opt.boards.platform_file import Platform, load_platform, timed_devices
from edge_opt.errors import InvalidInput, UnknownDevice
from edge_opt.records.devices import DeviceSpec
from edge_opt.records.predictions import Calibration

HOST = "host"
Target = str | os.PathLike[str] | DeviceSpec | Calibration | Platform
Found = DeviceSpec | Calibration | Platform


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
    """One target: "host" or a calibration file is a machine that was measured, a platform has costs, else a device.

    A device that is not in the catalogue, but of which times are published, is one without figures.

    >>> find_target("raspberry-pi-4").name, find_target("orange-pi-zero-2").name
    ('raspberry-pi-4', 'orange-pi-zero-2')
    """
    if isinstance(target, (Calibration, Platform)):
        return target
    if target == HOST:
        return load_calibration()
    if isinstance(target, (str, os.PathLike)):
        if _is_calibration_file(Path(target)):
            return load_calibration(target)
        if is_platform_file(Path(target)):
            return load_platform(target)
    try:
        return find_device(target)
    except UnknownDevice:
        if not isinstance(target, str) or Path(target).suffix.lower() in SUFFIXES:
            raise
        known = platforms_named(normalized(target))
        if not known:
            raise unknown_device(target, timed_devices()) from None
    exact = [platform for platform in known if platform.name == normalized(str(target))]
    return exact[0] if exact else _without_figures(known[0])


def find_spec(target: Target) -> DeviceSpec:
    """The figures of a target; those of a machine that was calibrated are the measured ones."""
    found = find_target(target)
    if isinstance(found, Calibration):
        return calibrated_device(found)
    if isinstance(found, DeviceSpec):
        return found
    try:
        return find_device(found.device)
    except UnknownDevice:
        return _without_figures(found)


def published(spec: DeviceSpec) -> tuple[Platform, ...]:
    """The platforms that answer for a device as the catalogue has it, or that is known by its times alone."""
    known = platforms_named(spec.name)
    return known if known and (is_shipped(spec) or spec == _without_figures(known[0])) else ()


def _without_figures(platform: Platform) -> DeviceSpec:
    """A device of which nothing but times is known."""
    return DeviceSpec(
        name=platform.device, title=platform.title, engine=platform.engine, aliases=(), cores=None, clock_hz=None,
        ram_bytes=(), flash_bytes=None, bandwidths=(), bandwidth_unknown="only times of whole models are known of it",
        peaks=(), powers=(), overhead_s=None, latencies=(), note="", origin=platform.source,
    )  # fmt: skip


def _is_calibration_file(path: Path) -> bool:
    """Whether a JSON file bears a calibration's mark; what is wrong with a file is for its own reader to say."""
    if path.suffix.lower() != ".json":
        return False
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(data, Mapping) and "schema" in data
