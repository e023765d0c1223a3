"""Build the candidates of a sweep: in processes of this machine, or on the workers of a Dask scheduler."""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Event
from typing import Any, ClassVar, cast
from urllib.parse import urlsplit

from edge_opt import __version__
from edge_opt._support.extras import import_optional
from edge_opt._support.files import write_whole
from edge_opt.errors import EdgeOptError, InvalidInput, first_line
from edge_opt.records.fields import field, record
from edge_opt.records.sweeps import Candidate
from edge_opt.search.isolation import Isolation, Limits, Outcome, Phase
from edge_opt.search.locks import build_lock
from edge_opt.search.sweep_progress import Listener, Notice

# A killed process is retried at least this often: a process seldom kills itself, and what killed it may do so again.
_RETRIES_IF_KILLED = 3
# How often the thread of the sweep looks at what its workers reported.
_POLL_S = 0.2
CONNECT_WITHIN_S = 30.0
# The topic of Dask under which workers send notices for the user.
_TOPIC = "edge-opt"
Files = dict[str, bytes]
Built = Generator[tuple[Candidate, Outcome], None, None]
# Calls that threads of workers ask the caller's thread to make.
Calls = SimpleQueue[Callable[[], object]]


@record
class JobSpec:
    """The job of a sweep, and how each of its phases is run."""

    job: bytes = field("The pickled job.")
    limits: Limits = field("Time and memory of one phase.")
    retries: int = field("How often a phase is run again after its process crashed.", default=1)
    preload: tuple[str, ...] = field("Modules that processes start with.", default=())

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


@dataclass(frozen=True)
class LocalBuilders:
    """Builds on this machine, in `workers` processes side by side.

    With one worker, each candidate is measured before the next is built. Otherwise all are built first, because
    nothing may run beside a measurement.

    Each worker is a thread that waits for the process of its own `Isolation`. Everything that touches the store
    happens in the thread of the sweep, because an SQLite connection belongs to one thread.
    """

    spec: JobSpec
    isolation: Isolation
    folder_of: Callable[[Candidate], Path]
    tell: Listener
    workers: int = 1

    @property
    def is_sequential(self) -> bool:
        """Whether each candidate is measured before the next is built, not after all of them."""
        return self.workers == 1

    def build(self, candidates: Sequence[Candidate], begin: Callable[[Candidate], object]) -> Built:
        """Yield each candidate with its outcome when it is ready; its files are in its folder then.

        `begin` is called before each attempt at a candidate, in the thread of the caller.
        """
        waiting = list(reversed(candidates))
        calls: Calls = SimpleQueue()
        stopped = Event()
        running: dict[Future[Outcome], tuple[Candidate, Isolation]] = {}
        with ExitStack() as stack:
            more = range(1, min(self.workers, len(waiting)))
            idle = [self.isolation, *(stack.enter_context(Isolation(self.spec.preload)) for _ in more)]
            pool = stack.enter_context(ThreadPoolExecutor(self.workers))
            try:
                while waiting or running:
                    # No more than can run: whatever has begun is really running.
                    while waiting and idle:
                        candidate, isolation = waiting.pop(), idle.pop()
                        begin(candidate)
                        recreate_folder(self.folder_of(candidate))
                        on_retry = partial(calls.put, partial(begin, candidate))
                        # A copy of the context, so that the thread reports to the display of the sweep.
                        build = partial(self._build, candidate, isolation, calls, on_retry, stopped)
                        future = pool.submit(copy_context().run, build)
                        running[future] = candidate, isolation
                    finished = wait(running, _POLL_S, FIRST_COMPLETED).done
                    while not calls.empty():
                        calls.get()()
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
        self, candidate: Candidate, isolation: Isolation, calls: Calls, on_retry: Callable[[], None], stopped: Event
    ) -> Outcome:
        """Build one candidate, in the thread of a worker."""
        folder = self.folder_of(candidate)
        with build_lock(lambda holder: calls.put(partial(self.tell, Notice(f"waiting to build: {holder}")))):
            return self.spec.run(isolation, "build", (candidate, folder), folder, on_retry, stopped.is_set)


def recreate_folder(folder: Path) -> Path:
    """Return the folder, empty: without files of an attempt that was interrupted."""
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    return folder


@dataclass(frozen=True)
class RemoteBuilders:
    """Builds on the workers of a Dask scheduler, which other machines have joined.

    A worker builds in a folder of its own and sends the files back, so the machines share nothing but the address of
    the scheduler. Workers only build: times of different machines cannot be compared, so the machine of the sweep
    measures. Encryption and retries are Dask's; its configuration (`distributed.comm.tls`) names the certificates.

    The connection is open while something is built, and closed otherwise.
    """

    spec: JobSpec
    folder_of: Callable[[Candidate], Path]
    scheduler: str
    tell: Listener
    insecure: bool = False
    is_sequential: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_scheduler(self.scheduler, self.insecure)
        # A wrong address is reported before anything runs.
        with self._connected():
            pass

    def build(self, candidates: Sequence[Candidate], begin: Callable[[Candidate], object]) -> Built:
        if not candidates:
            return
        from distributed import as_completed
        from distributed.comm.core import CommClosedError

        try:
            with self._connected() as client:
                futures = {}
                for candidate in candidates:
                    begin(candidate)
                    future = client.submit(
                        _build_on_worker, self.spec, candidate, pure=False, retries=self.spec.retries_if_killed
                    )
                    futures[future] = candidate
                for future in as_completed(futures):  # type: ignore[no-untyped-call]
                    candidate = futures.pop(future)
                    outcome = self._received(future, candidate)
                    # A released result is not computed again when the worker that holds it is lost.
                    future.release()
                    yield candidate, outcome
        except (CancelledError, CommClosedError, OSError) as error:
            raise EdgeOptError(f"the Dask scheduler {self.scheduler} is gone; run again to continue") from error

    @contextmanager
    def _connected(self) -> Iterator[Any]:
        """Connect to the scheduler; refuse one without workers, or whose workers have another version."""
        distributed = import_optional("distributed", "--scheduler needs", "distributed", "Dask")
        try:
            client = distributed.Client(self.scheduler, timeout=CONNECT_WITHIN_S)
        except (OSError, ValueError, TypeError) as error:
            raise EdgeOptError(f"no Dask scheduler answers at {self.scheduler} ({error}); start one") from error
        with client:
            try:
                client.wait_for_workers(1, CONNECT_WITHIN_S)
            except TimeoutError as error:
                start = f"`dask worker {self.scheduler} --nthreads 1`"
                raise EdgeOptError(f"no worker has joined in {CONNECT_WITHIN_S:g} s; start one: {start}") from error
            for worker, version in client.run(_version).items():
                if version != __version__:
                    raise EdgeOptError(f"the worker {worker} has edge_opt {version}; install {__version__} there")
            client.subscribe_topic(_TOPIC, lambda event: self.tell(Notice(str(event[1]))))
            yield client

    def _received(self, future: Any, candidate: Candidate) -> Outcome:
        """Write the files of a finished build to its folder, and return its outcome."""
        from distributed import KilledWorker
        from distributed.comm.core import CommClosedError

        try:
            outcome, files = future.result()
        except KilledWorker:
            return Outcome(failure="crashed", reason="each worker that built it was lost")
        except (CancelledError, CommClosedError, EdgeOptError):
            raise
        except Exception as error:  # whatever Dask or unpickling on the worker raises
            raise EdgeOptError(f"workers could not build {candidate.label}: {first_line(error)}; run again") from error
        folder = recreate_folder(self.folder_of(candidate))
        for name, content in files.items():
            write_whole(folder / name, content)
        return cast(Outcome, outcome)


# Candidates are built here one after the other, here side by side, or on other machines.
Builders = LocalBuilders | RemoteBuilders


def check_scheduler(address: str, insecure: bool) -> None:
    """Refuse an address that is not one, and a connection without encryption unless `insecure` allows it.

    Anyone who can connect to a scheduler can run code on its workers and on the machine of the sweep. On a machine with
    several users that is every user, so a loopback address is not safe either.
    """
    parts = urlsplit(address)
    if parts.scheme not in ("tls", "tcp") or not parts.hostname:
        raise InvalidInput(f"the scheduler is {address!r}; write tls://HOST:PORT")
    if parts.scheme == "tcp" and not insecure:
        raise InvalidInput(
            f"{address} has no encryption, so anyone who connects can run code; use tls://, or add --insecure"
        )


_worker_state = threading.local()


def _build_on_worker(spec: JobSpec, candidate: Candidate) -> tuple[Outcome, Files]:
    """Build a candidate on this worker; return the outcome and the files."""
    from distributed import get_worker

    if getattr(_worker_state, "preload", None) != spec.preload:
        _worker_state.isolation, _worker_state.preload = Isolation(spec.preload), spec.preload
    worker = get_worker()
    with (
        tempfile.TemporaryDirectory(prefix="build-", dir=worker.local_directory) as name,
        build_lock(lambda holder: worker.log_event(_TOPIC, f"waiting to build: {holder}")),
    ):
        folder = Path(name)
        outcome = spec.run(_worker_state.isolation, "build", (candidate, folder), folder)
        return outcome, {
            str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
        }


def _version() -> str:
    return __version__
