"""What happens on another machine: devices with their figures, rooflines, batches that fit.

The package can be called: `edge_opt.devices()` is the list of devices, whether or not a module in here was imported
before. Python binds a package to its own name in its parent, which would otherwise hide the function of that name.
"""

import sys
from types import ModuleType

from edge_opt.devices.catalog import devices as list_devices
from edge_opt.records import DeviceSpec


class _Devices(ModuleType):
    def __call__(self) -> tuple[DeviceSpec, ...]:
        return list_devices()


devices = sys.modules[__name__]
devices.__class__ = _Devices
