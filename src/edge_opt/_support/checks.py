"""Checks of arguments: one message for each kind of mistake, the same everywhere."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, TypeGuard

from edge_opt.errors import InvalidInput


def is_number(value: Any) -> TypeGuard[float]:
    """Return whether a value is a finite real number; True and False are not.

    >>> is_number(0.5), is_number(float("inf")), is_number(True), is_number("1")
    (True, False, False, False)
    """
    # A comparison, not math.isfinite: an integer of hundreds of digits is no float.
    is_real = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_real and abs(value) <= sys.float_info.max


def is_whole(value: Any, least: int = 1) -> TypeGuard[int]:
    """Return whether a value is an integer of at least `least`; True and False are not.

    >>> is_whole(3), is_whole(0), is_whole(0, least=0), is_whole(True)
    (True, False, True, False)
    """
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def check_whole(name: str, value: Any, least: int = 1) -> None:
    """Raise InvalidInput unless the value is an integer of at least `least` that a machine can count to."""
    if is_whole(value, least) and value >= 2**63:
        raise InvalidInput(f"{name} must be below 2^63")
    if not is_whole(value, least):
        raise InvalidInput(f"{name} is {value!r}; it must be a whole number of at least {least}")


def check_threads(threads: Any) -> None:
    """Raise InvalidInput unless this is None or a number of threads that a process can start."""
    if threads is not None:
        check_whole("threads", threads)
        if threads > 1024:  # torch cannot be told more than 2^31, and OpenMP ends the process where it cannot start one
            raise InvalidInput(f"threads is {threads}; at most 1024 are allowed")


def check_positive(name: str, value: Any, of: str = "a number") -> None:
    """Raise InvalidInput unless the value is a finite number above zero that a machine can have.

    `of` describes it in the message, such as "a number of MiB".
    """
    if not is_number(value) or not 0 < value < 1e15:
        raise InvalidInput(f"{name} is {value!r}; it must be {of} above 0")


def check_one_of(name: str, value: Any, allowed: Iterable[str]) -> None:
    """Raise InvalidInput unless the value is one of the allowed words.

    >>> check_one_of("mode", "evil", ("eval", "train"))
    Traceback (most recent call last):
    edge_opt.errors.InvalidInput: mode is 'evil'; it must be one of eval, train
    """
    words = tuple(allowed)
    if not isinstance(value, str) or value not in words:
        raise InvalidInput(f"{name} is {value!r}; it must be one of {', '.join(words)}")
