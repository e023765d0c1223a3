"""One process that variants are forked from, for all sweeps of a test process: to start one takes 10 s of CPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache

import pytest

from edge_opt.run.sweep import PRELOAD
from edge_opt.search.process import Isolation


class Kept(Isolation):
    """Stays when a sweep is over; it ends with the process that started it."""

    def __exit__(self, *error: object) -> None:
        pass


@cache
def _kept() -> Kept:
    return Kept([*PRELOAD, "?edge_opt.compress.exporter_start:start_exporter", "?sklearn.datasets"])


@contextmanager
def kept_nursery() -> Iterator[None]:
    """Within this, sweeps fork from one and the same process, whatever they would have it import."""

    def kept(preload: Sequence[str]) -> Isolation:
        return _kept()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("edge_opt.search.sweep.Isolation", kept)
        yield
