"""Numbers as text with units: the only place where bytes become MB and seconds become ms."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

MIB = 1024 * 1024
TIMES = "\N{MULTIPLICATION SIGN}"
DASH = "\N{EN DASH}"
MINUS = "\N{MINUS SIGN}"

_COUNT_STEPS = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_BYTE_STEPS = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def _prefixed(value: float, steps: Iterable[tuple[float, str]]) -> str:
    """Return the value with the largest prefix or unit that it reaches; "" where it reaches none."""
    for divisor, suffix in steps:
        number = value / divisor
        if abs(value) >= divisor:
            return f"{number:.{2 if abs(number) < 10 else 1 if abs(number) < 100 else 0}f} {suffix}"
    return ""


def count(value: float) -> str:
    """Return a count with a decimal prefix.

    >>> count(4089184256), count(999), count(0)
    ('4.09 G', '999', '0')
    """
    return _prefixed(value, _COUNT_STEPS) or (f"{value:.0f}" if float(value).is_integer() else f"{value:.2f}")


def size(nbytes: float) -> str:
    """Return bytes with a binary prefix.

    >>> size(102228128), size(512)
    ('97.5 MiB', '512 B')
    """
    return _prefixed(nbytes, _BYTE_STEPS) or f"{nbytes:.0f} B"


def sizes(several: Sequence[float], last: str = " or ") -> str:
    """Return sizes as a list, with one unit where they share it.

    >>> sizes([2**30, 2**31, 2**33]), sizes([2**29, 2**30]), sizes([2**34, 2**35], DASH)
    ('1, 2 or 8 GiB', '512 MiB or 1 GiB', '16–32 GiB')
    """
    texts = [size(nbytes).partition(" ") for nbytes in several]
    numbers = [f"{float(number):g}" for number, _, _ in texts]
    suffixes = [suffix for _, _, suffix in texts]
    is_shared = len(set(suffixes)) == 1
    named = [
        number if is_shared and index < len(numbers) - 1 else f"{number} {suffix}"
        for index, (number, suffix) in enumerate(zip(numbers, suffixes, strict=True))
    ]
    return last.join([part for part in (", ".join(named[:-1]), *named[-1:]) if part])


_TIME_STEPS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))


def duration(seconds: float) -> str:
    """Return seconds with the unit that fits.

    >>> duration(0.0123), duration(2.5e-6), duration(0)
    ('12.3 ms', '2.50 µs', '0 s')
    """
    return _prefixed(seconds, _TIME_STEPS) or "0 s"


_SCALES = {"count": _COUNT_STEPS, "bytes": _BYTE_STEPS, "time": _TIME_STEPS}
_UNSCALED = {"count": (1.0, ""), "bytes": (1.0, "B"), "time": (1.0, "s")}


def axis(largest: float, kind: Literal["count", "bytes", "time"]) -> tuple[float, str]:
    """Return the divisor and the unit with which an axis up to `largest` has short numbers.

    >>> axis(5_000_000, "count"), axis(3 * 2**20, "bytes"), axis(0.004, "time")
    ((1000000.0, 'M'), (1048576, 'MiB'), (0.001, 'ms'))
    """
    return next((step for step in _SCALES[kind] if largest >= step[0]), _UNSCALED[kind])


_ENERGY_STEPS = ((1.0, "J"), (1e-3, "mJ"), (1e-6, "µJ"), (1e-9, "nJ"))


def energy(joules: float) -> str:
    """Return joules with the unit that fits.

    >>> energy(0.0123), energy(2.5), energy(0)
    ('12.3 mJ', '2.50 J', '0 J')
    """
    return _prefixed(joules, _ENERGY_STEPS) or ("0 J" if not joules else f"{joules:.2g} J")


def megabytes(nbytes: float) -> float:
    """Convert bytes to MiB."""
    return nbytes / MIB


def percent(share: float) -> str:
    """Return a share as a percentage, never rounded to 0 % or 100 %.

    >>> percent(0.1234), percent(0.0001), percent(0), percent(0.9999), percent(1)
    ('12.3%', '<0.1%', '0.0%', '>99.9%', '100.0%')
    """
    if 0 < share < 0.0005:
        return "<0.1%"
    return ">99.9%" if 0.9995 <= share < 1 else f"{share * 100:.1f}%"


def change(share: float | None) -> str:
    """Return a relative difference as a signed percentage, never rounded to 0 %; a dash if it is not defined.

    >>> change(-0.5), change(0.00001), change(0), change(None)
    ('−50.0%', '+<0.1%', '±0%', '–')
    """
    if share is None or math.isnan(share):
        return DASH
    return "±0%" if share == 0 else f"{'+' if share > 0 else MINUS}{percent_of(abs(share))}"


def percent_of(size: float) -> str:
    """Return one size relative to another as a percentage, which may exceed 100 %.

    >>> percent_of(0.9999), percent_of(12.5), percent_of(0.0002)
    ('100.0%', '1250%', '<0.1%')
    """
    if 0 < size < 0.0005:
        return "<0.1%"
    return f"{size * 100:.1f}%" if size < 10 else f"{size * 100:.0f}%"


def ratio(value: float | None) -> str:
    """Return a ratio of two costs, or a dash if it is not defined."""
    if value is None or math.isnan(value):
        return DASH
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def per_call(seconds: float, batch_size: int) -> str:
    """Return the time of a call with its batch size.

    >>> per_call(3.1e-4, 1), per_call(0.004, 32)
    ('310 µs (batch 1)', '4.00 ms (batch 32)')
    >>> per_call(math.inf, 1)  # no time is known
    'not known'
    """
    return "not known" if math.isinf(seconds) else f"{duration(seconds)} (batch {batch_size})"


def shape(dims: Sequence[int], times: str = TIMES) -> str:
    """Return a shape as text; `times="x"` is the form of files and of the command line.

    >>> shape((1, 3, 224, 224)), shape(()), shape((1, 128), times="x")
    ('1×3×224×224', 'scalar', '1x128')
    """
    return times.join(map(str, dims)) if len(dims) else "scalar"


# How a figure of each kind is written for people.
FORMATS: Mapping[str, Callable[[Any], str]] = {
    "text": str,
    "flag": lambda value: "yes" if value else "no",
    "number": str,
    "count": count,
    "bytes": size,
    "ratio": ratio,
    "share": percent,
    "time": duration,
    "energy": energy,
    "rate": lambda value: f"{value:.4g}",
}
