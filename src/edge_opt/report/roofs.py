"""Rooflines for pages and pictures: the only module of `report` that asks the device catalogue, free of torch too."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from edge_opt.devices.catalog import device as find_device
from edge_opt.devices.roofline import PRECISIONS, roofline
from edge_opt.errors import UnknownDevice
from edge_opt.records import DeviceSpec, ModelProfile, Roofline
from edge_opt.report.series import predictions_of

# Devices whose bandwidth and peak are known, from small to large.
DEVICES = ("raspberry-pi-4", "raspberry-pi-5", "jetson-nano", "intel-n100", "desktop-ddr4", "apple-m1")


@dataclass(frozen=True, slots=True)
class DeviceRoofs:
    """A device with a roofline for each precision whose peak is known; the first is the one to look at first."""

    spec: DeviceSpec
    roofs: tuple[Roofline, ...]

    @property
    def main(self) -> Roofline:
        return self.roofs[0]


def device_roofs(profile: ModelProfile, names: Sequence[str] | None = None) -> tuple[DeviceRoofs, ...]:
    """The devices named, or those that were predicted for and a usual few; a device without figures has no roofs."""
    if profile.convention != "edge_opt":
        return ()
    specs = {spec.name: spec for spec in (_predicted(profile) if names is None else ())}
    for name in DEVICES if names is None else names:
        spec = find_device(name)
        specs.setdefault(spec.name, spec)
    found = (DeviceRoofs(spec, tuple(_roofs(profile, spec))) for spec in specs.values())
    return tuple(item for item in found if item.roofs)


def _roofs(profile: ModelProfile, spec: DeviceSpec) -> Iterable[Roofline]:
    for precision in PRECISIONS:
        if spec.peak(spec.engine, precision) is not None:
            roof = roofline(profile, spec, precision)
            if roof.knee_flops_per_byte is not None:
                yield roof


def _predicted(profile: ModelProfile) -> Iterable[DeviceSpec]:
    for prediction in predictions_of(profile):
        try:
            yield find_device(prediction.target)
        except UnknownDevice:  # a calibration of some machine is no catalogue device
            continue
