"""Threads of this process: so many for a while, then as found."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def computing_with(threads: int) -> Iterator[None]:
    """Compute with so many threads inside, the caller's number outside.

    >>> before = torch.get_num_threads()
    >>> with computing_with(1):
    ...     torch.get_num_threads()
    1
    >>> torch.get_num_threads() == before
    True
    """
    found = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(found)
