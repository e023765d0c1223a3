"""What happens in a sweep, told as it happens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from edge_opt.records import Candidate, SweepResult, Trial
from edge_opt.search.jobs import Phase


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
