"""Widths that kernels run fast: multiples of channels, from the vectors of the machine that a model is for.

A convolution or product computes its outputs in tiles of two vectors. Channels beside a multiple of that cost as much
as the next multiple, and often more, for they take a slower path: at half the MACs a ResNet took 0.95 / 0.69 / 0.61 /
0.44 of its time for multiples of 1 / 4 / 8 / 16.
"""

from __future__ import annotations

from typing import Literal

from edge_opt.boards.platform_file import Platform
from edge_opt.boards.targets import Found
from edge_opt.measuring.machine import vector_bytes
from edge_opt.records.devices import DeviceSpec

RoundTo = int | Literal["auto"]
# A tile of two vectors; wider machines gain nothing from more than this, and narrow layers would lose too much.
WIDEST = 16
_X86 = ("core-", "xeon", "ryzen", "epyc", "celeron", "pentium", "athlon", "atom", "intel", "x86")
_MICROCONTROLLERS = ("cortex-m", "stm32", "esp32", "rp2040", "nrf5", "arduino-nano", "mcu")


def fast_multiple(target: Found | None = None, precision: str = "fp32") -> int:
    """Channels that fill a tile of two vectors: of this CPU, or of the target.

    Sums of int8 are kept in 32 bits, so int8 fills as many lanes as fp32. 16-bit floats fill twice as many where they
    are computed as such, which is said by asking for them.

    >>> from edge_opt.boards.targets import find_target
    >>> fast_multiple(find_target("raspberry-pi-4")), fast_multiple(find_target("raspberry-pi-4"), "fp16")
    (8, 16)
    """
    lanes = _lanes(target)
    return min(2 * lanes * (2 if precision in ("fp16", "bf16") else 1), WIDEST)


def _lanes(target: Found | None) -> int:
    """32-bit numbers that one vector of the target holds."""
    if target is None or not isinstance(target, (DeviceSpec, Platform)):
        return vector_bytes() // 4
    words = " ".join(str(getattr(target, name, None) or "") for name in ("name", "title", "core")).lower()
    if target.engine != "cpu":
        return 8
    if any(word in words for word in _MICROCONTROLLERS):
        return 2
    return 8 if any(word in words for word in _X86) else 4
