"""Build candidates in local processes, and the events of a sweep."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol

from edge_opt.records.sweeps import Candidate, SweepResult, Trial
from edge_opt.search.isolation import Isolation, Limits, Outcome, Phase
from edge_opt.search.locks import build_lock


@dataclass(frozen=True, slots=True)
class SweepStarted:
    """The sweep begins, with so many candidates; `known` were finished by earlier runs."""

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
    """A candidate was built or measured, or failed."""

    candidate: Candidate
    phase: Phase


@dataclass(frozen=True, slots=True)
class TrialFinished:
    """A candidate has its result, which is stored already; `done` counts all finished candidates."""

    trial: Trial
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Notice:
    """A message for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class SweepEnded:
    """Every candidate has its result."""

    result: SweepResult


Event = SweepStarted | PhaseStarted | PhaseEnded | TrialFinished | Notice | SweepEnded
Listener = Callable[[Event], None]


# A killed process is retried at least this often: a process seldom kills itself, and what killed it may do so again.
_RETRIES_IF_KILLED = 3


@dataclass(frozen=True, slots=True)
class JobSpec:
    """The job of a sweep, and how each of its phases is run.

    Attributes:
        job: The pickled job.
        limits: Time and memory of one phase.
        retries: How often a phase is run again after its process crashed.
        preload: Modules that processes start with.
    """

    job: bytes
    limits: Limits
    retries: int
    preload: tuple[str, ...]

    @property
    def retries_if_killed(self) -> int:
        """How often a phase is run again after its process was killed."""
        return max(self.retries, _RETRIES_IF_KILLED) if self.retries else 0

    def run(
        self,
        isolation: Isolation,
        phase: Phase,
        arguments: tuple[Any, ...],
        folder: Path,
        on_retry: Callable[[], object] = lambda: None,
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> Outcome:
        """Run a phase, and run it again after a crash, because a signal may have come from outside.

        An exception and a limit are caused by the candidate itself, and are not retried.
        """
        outcome = isolation.run(self.job, phase, arguments, folder, self.limits)
        for retry in range(self.retries_if_killed):
            if outcome.failure != "crashed" or is_stopped() or (retry >= self.retries and not outcome.was_killed):
                break
            on_retry()
            if phase == "build":
                # Files of the crashed attempt must not be taken for files of this one.
                recreate_folder(folder)
            outcome = isolation.run(self.job, phase, arguments, folder, self.limits)
        return outcome


class Builders(Protocol):
    """Builds candidates: here one after the other, here side by side, or on other machines."""

    def batches(self, candidates: Sequence[Candidate]) -> Iterator[Sequence[Candidate]]:
        """Split the candidates; each batch is built as a whole before any of it is measured."""
        ...

    def build(
        self, candidates: Sequence[Candidate], begin: Callable[[Candidate], object]
    ) -> Generator[tuple[Candidate, Outcome], None, None]:
        """Yield each candidate with its outcome when it is ready; its files are in its folder then.

        `begin` is called before each attempt at a candidate, in the thread of the caller.
        """
        ...


WAITING = "waiting to build: another sweep measures on this machine"


class LocalBuilders:
    """Builds on this machine, in `workers` processes side by side.

    With one worker, each candidate is measured before the next is built. Otherwise all are built first, because
    nothing may run beside a measurement.

    Each worker is a thread that waits for the process of its own `Isolation`. Everything that touches the store
    happens in the thread of the sweep, because an SQLite connection belongs to one thread.
    """

    def __init__(
        self,
        spec: JobSpec,
        isolation: Isolation,
        folder_of: Callable[[Candidate], Path],
        tell: Listener = lambda _: None,
        workers: int = 1,
    ) -> None:
        self._spec = spec
        self._isolation = isolation
        self._folder_of = folder_of
        self._tell = tell
        self._workers = workers

    def batches(self, candidates: Sequence[Candidate]) -> Iterator[Sequence[Candidate]]:
        if self._workers == 1:
            return ((candidate,) for candidate in candidates)
        return iter([candidates] if candidates else [])

    def build(
        self, candidates: Sequence[Candidate], begin: Callable[[Candidate], object]
    ) -> Generator[tuple[Candidate, Outcome], None, None]:
        waiting = list(reversed(candidates))
        events: SimpleQueue[Candidate | Notice] = SimpleQueue()
        stopped = threading.Event()
        running: dict[Future[Outcome], tuple[Candidate, Isolation]] = {}
        with ExitStack() as stack:
            more = range(1, min(self._workers, len(waiting)))
            idle = [self._isolation, *(stack.enter_context(Isolation(self._spec.preload)) for _ in more)]
            pool = stack.enter_context(ThreadPoolExecutor(self._workers))
            try:
                while waiting or running:
                    # No more than can run: whatever has begun is really running.
                    while waiting and idle:
                        candidate, isolation = waiting.pop(), idle.pop()
                        begin(candidate)
                        recreate_folder(self._folder_of(candidate))
                        future = pool.submit(self._build, candidate, isolation, events, stopped)
                        running[future] = candidate, isolation
                    finished = wait(running, _POLL_S, FIRST_COMPLETED).done
                    self._handle(events, begin)
                    for future in finished:
                        candidate, isolation = running.pop(future)
                        idle.append(isolation)
                        yield candidate, future.result()
            finally:
                # Also after Ctrl-C and errors: no process may be left running when this returns.
                stopped.set()
                while wait(running, 0, FIRST_COMPLETED).not_done:
                    for _, isolation in running.values():
                        isolation.interrupt()
                    wait(running, _POLL_S)

    def _build(
        self,
        candidate: Candidate,
        isolation: Isolation,
        events: SimpleQueue[Candidate | Notice],
        stopped: threading.Event,
    ) -> Outcome:
        """Build one candidate, in the thread of a worker."""
        folder = self._folder_of(candidate)
        with build_lock(lambda: events.put(Notice(WAITING))):
            return self._spec.run(
                isolation, "build", (candidate, folder), folder, lambda: events.put(candidate), stopped.is_set
            )

    def _handle(self, events: SimpleQueue[Candidate | Notice], begin: Callable[[Candidate], object]) -> None:
        """Pass on what the threads reported: a notice, or that a candidate is attempted again."""
        while not events.empty():
            event = events.get()
            if isinstance(event, Notice):
                self._tell(event)
            else:
                begin(event)


# How often the thread of the sweep looks at what its workers reported.
_POLL_S = 0.2


def recreate_folder(folder: Path) -> Path:
    """Return the folder, empty: without files of an attempt that was interrupted."""
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    return folder
