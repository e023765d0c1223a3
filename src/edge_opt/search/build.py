"""Trying one candidate: build and measure, told as it happens."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from edge_opt.records.sweeps import Candidate, SweepResult, Trial
from edge_opt.search.locks import at_work
from edge_opt.search.process import Isolation, Limits, Outcome, Phase


@dataclass(frozen=True, slots=True)
class SweepStarted:
    """The sweep begins: how many candidates there are to be, and those that earlier runs have finished."""

    name: str
    total: int
    known: tuple[Trial, ...]
    workers: int


@dataclass(frozen=True, slots=True)
class PhaseStarted:
    """A candidate is being built or measured; `attempt` counts from 1."""

    candidate: Candidate
    phase: Phase
    attempt: int


@dataclass(frozen=True, slots=True)
class PhaseEnded:
    """A candidate was built or measured, or failed at it; it runs no more."""

    candidate: Candidate
    phase: Phase


@dataclass(frozen=True, slots=True)
class TrialFinished:
    """A candidate has its result, which is in the store by now; `done` counts all that have one."""

    trial: Trial
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Notice:
    """Something that people should know."""

    text: str


@dataclass(frozen=True, slots=True)
class SweepEnded:
    """Every candidate has its result."""

    result: SweepResult


Event = SweepStarted | PhaseStarted | PhaseEnded | TrialFinished | Notice | SweepEnded
Listener = Callable[[Event], None]


_LEAST_PATIENCE = 3


@dataclass(frozen=True, slots=True)
class Order:
    """What is to be done with every candidate. A half whose process crashes is tried `retries` times more.

    One that was killed is given more patience: a process seldom kills itself, and whoever did may do so again.
    """

    job: bytes
    limits: Limits
    retries: int
    preload: tuple[str, ...]

    @property
    def patience(self) -> int:
        """How often something that was killed is tried again."""
        return max(self.retries, _LEAST_PATIENCE) if self.retries else 0

    def run(
        self,
        isolation: Isolation,
        phase: Phase,
        arguments: tuple[Any, ...],
        folder: Path,
        on_retry: Callable[[], object] = lambda: None,
    ) -> Outcome:
        """Half the job, again after a crash: what a signal ended may have been ended from outside.

        An exception, a time or a memory limit is the candidate's own doing, and is not tried again.
        """
        outcome = isolation.run(self.job, phase, arguments, folder, self.limits)
        for retry in range(self.patience):
            if outcome.failure != "crashed" or (retry >= self.retries and not outcome.was_killed):
                break
            on_retry()
            if phase == "build":
                # What the crashed attempt had written is not to be taken for what this one writes.
                emptied(folder)
            outcome = isolation.run(self.job, phase, arguments, folder, self.limits)
        return outcome


class Builders(Protocol):
    """Those who build. `begin` is called before each attempt at a candidate."""

    def batches(self, candidates: Sequence[Candidate]) -> Iterator[Sequence[Candidate]]:
        """The candidates in portions: each is built as a whole before anything of it is measured."""
        ...

    def build(
        self, candidates: Sequence[Candidate], begin: Callable[[Candidate], object]
    ) -> Generator[tuple[Candidate, Outcome], None, None]:
        """Each candidate with what came of it, as they are ready; its files are in its folder by then."""
        ...


WAITING = "waiting to build: another sweep measures on this machine"


class LocalBuilder:
    """Builds on this machine, one candidate after the other."""

    def __init__(
        self,
        order: Order,
        isolation: Isolation,
        folder_of: Callable[[Candidate], Path],
        tell: Listener = lambda _: None,
    ) -> None:
        self._order = order
        self._isolation = isolation
        self._folder_of = folder_of
        self._tell = tell

    def batches(self, candidates: Sequence[Candidate]) -> Iterator[Sequence[Candidate]]:
        return ((candidate,) for candidate in candidates)

    def build(
        self, candidates: Sequence[Candidate], begin: Callable[[Candidate], object]
    ) -> Generator[tuple[Candidate, Outcome], None, None]:
        for candidate in candidates:
            begin(candidate)
            folder = emptied(self._folder_of(candidate))
            with at_work(lambda: self._tell(Notice(WAITING))):
                again = partial(begin, candidate)
                outcome = self._order.run(self._isolation, "build", (candidate, folder), folder, again)
            yield candidate, outcome


def emptied(folder: Path) -> Path:
    """The folder without what an attempt that was ended has left in it."""
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    return folder
