"""Targets: whatever a user names to predict for, found, checked, and asked."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from edge_opt.devices.catalog import device as find_device
from edge_opt.devices.estimate import estimate
from edge_opt.errors import InvalidInput
from edge_opt.records import DeviceSpec, ModelProfile, Precision, Prediction

Target = str | os.PathLike[str] | DeviceSpec


def find_targets(target: Target | Sequence[Target]) -> tuple[DeviceSpec, ...]:
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


def find_target(target: Target) -> DeviceSpec:
    """One target."""
    return find_device(target)


def predicted(profile: ModelProfile, targets: Sequence[DeviceSpec], precision: Precision) -> tuple[Prediction, ...]:
    """What the model would take on each target."""
    return tuple(estimate(profile, target, precision) for target in targets)


def ram_sizes(target: DeviceSpec) -> tuple[int, ...]:
    """Every size of RAM that a target has or is sold with, smallest first; empty where none is known."""
    return tuple(int(figure.value) for figure in target.ram_bytes)
