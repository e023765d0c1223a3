"""Random numbers: seeded for a while, then as found."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed Python, NumPy and torch, and restore the three afterwards, also after an error.

    >>> with seeded(3):
    ...     first = random.random()
    >>> with seeded(3):
    ...     first == random.random()
    True
    """
    before = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        try:
            yield
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])
