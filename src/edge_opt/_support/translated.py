"""Errors of other libraries as ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from edge_opt.errors import ConversionFailed, EdgeOptError, first_line


@contextmanager
def translated(
    message: str,
    kind: type[EdgeOptError] = ConversionFailed,
    *,
    remedy: str = "",
    describe: Callable[[BaseException], str] = first_line,
    passed: tuple[type[Exception], ...] = (OSError,),
) -> Iterator[None]:
    """Raise what a library raises inside as one of our errors: its classes differ by version and have no common base.

    Args:
        message: What failed; the library's own words follow.
        kind: The class to raise.
        remedy: What to do, behind the library's words.
        describe: Returns the library's words.
        passed: Errors that are raised as they are, beside ours: a full disk is no fault of the library.

    >>> with translated("cannot read '2x'"):
    ...     int("2x")
    Traceback (most recent call last):
    edge_opt.errors.ConversionFailed: cannot read '2x': ValueError: invalid literal for int() with base 10: '2x'
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, (EdgeOptError, *passed)):
            raise
        raise kind(f"{message}: {describe(error)}{remedy}") from error
