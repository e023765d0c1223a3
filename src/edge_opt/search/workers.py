"""Workers: builds spread over the processes of a Dask cluster, here or on other machines.

A worker builds in a folder of its own and sends the files back, so nothing but the scheduler's address is shared. It
only builds: times taken on different machines cannot be compared, so measuring is left to the machine of the sweep.
"""

from __future__ import annotations

import logging
import tempfile
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast

from edge_opt import __version__
from edge_opt._support.extras import optional
from edge_opt._support.files import write_whole
from edge_opt.errors import EdgeOptError
from edge_opt.records import Candidate
from edge_opt.search.build import Listener, Notice, Order, emptied
from edge_opt.search.locks import at_work
from edge_opt.search.process import Isolation, Outcome

_PATIENCE_S = 30.0
# Ctrl-C at the terminal reaches workers too; it is for the sweep, which closes them.
_IGNORE_CTRL_C = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"
Files = dict[str, bytes]


class DaskBuilders:
    """Builds on `workers` processes of this machine, or on those of the cluster at `scheduler`.

    The cluster is joined for building only: even idle, two workers and their scheduler take 7 % of a core here, which
    would be work beside a measurement.
    """

    def __init__(
        self,
        order: Order,
        folder_of: Callable[[Candidate], Path],
        workers: int,
        scheduler: str | None,
        tell: Listener,
    ) -> None:
        self._order = order
        self._folder_of = folder_of
        self._workers = workers
        self._scheduler = scheduler
        self._tell = tell
        _distributed()
        if scheduler is not None:
            # A wrong address is known before anything has run.
            with self._joined():
                pass

    def batches(self, candidates: Sequence[Candidate]) -> Iterator[Sequence[Candidate]]:
        return iter([candidates] if candidates else [])

    def build(
        self, candidates: Sequence[Candidate], begin: Callable[[Candidate], object]
    ) -> Generator[tuple[Candidate, Outcome], None, None]:
        if not candidates:
            return
        from distributed.comm.core import CommClosedError

        with self._joined() as client:
            try:
                yield from self._build(client, list(reversed(candidates)), begin)
            except (CancelledError, CommClosedError) as error:
                raise EdgeOptError(
                    f"the Dask scheduler {self._scheduler or 'of this sweep'} is gone; run again to go on: "
                    "what was finished is kept"
                ) from error

    def _build(
        self, client: Any, waiting: list[Candidate], begin: Callable[[Candidate], object]
    ) -> Iterator[tuple[Candidate, Outcome]]:
        running: dict[Any, Candidate] = {}
        while waiting or running:
            # No more than can run: what is begun is then what really runs.
            while waiting and len(running) < max(1, sum(_answer(client.nthreads).values())):
                candidate = waiting.pop()
                begin(candidate)
                running[client.submit(build_here, self._order, candidate, pure=False)] = candidate
            for future in self._some_done(client, list(running)):
                candidate = running.pop(future)
                for _ in range(_losses(client, future)):
                    begin(candidate)
                yield candidate, self._received(future, candidate)

    @contextmanager
    def _joined(self) -> Iterator[Any]:
        with ExitStack() as stack:
            stack.enter_context(_hushed())
            address = stack.enter_context(self._own_cluster()) if self._scheduler is None else self._scheduler
            try:
                client = stack.enter_context(_distributed().Client(address, timeout=_PATIENCE_S))
            except (OSError, ValueError) as error:
                raise EdgeOptError(
                    f"no Dask scheduler answers at {address} ({error}); start one with `dask scheduler`"
                ) from error
            try:
                client.wait_for_workers(1 if self._scheduler else self._workers, _PATIENCE_S)
            except TimeoutError as error:
                raise EdgeOptError(
                    f"no worker has joined {address} in {_PATIENCE_S:g} s; start one with "
                    f"`dask worker {address} --nthreads 1`"
                ) from error
            _check_versions(client)
            yield client

    @contextmanager
    def _own_cluster(self) -> Iterator[Any]:
        import dask

        # A lost worker costs its attempt; Dask itself gives the work to another, so many times.
        with (
            dask.config.set({"distributed.scheduler.allowed-failures": self._order.retries}),
            _distributed().LocalCluster(
                n_workers=self._workers,
                threads_per_worker=1,
                processes=True,
                # Builds are watched in their own processes, by the limits of the sweep.
                memory_limit=0,
                dashboard_address=None,
                # Workers report heartbeats that fail while they are being closed.
                silence_logs=logging.CRITICAL,
                preload=[_IGNORE_CTRL_C],
            ) as cluster,
        ):
            yield cluster

    def _some_done(self, client: Any, futures: list[Any]) -> list[Any]:
        distributed = _distributed()
        while True:
            try:
                return list(distributed.wait(futures, timeout=_PATIENCE_S, return_when="FIRST_COMPLETED").done)
            except TimeoutError:
                if not _answer(client.nthreads):
                    self._tell(Notice("no worker is left; waiting for one to join"))

    def _received(self, future: Any, candidate: Candidate) -> Outcome:
        from distributed import KilledWorker

        try:
            outcome, files = future.result()
        except KilledWorker:
            return Outcome(None, "crashed", "each worker that built it was lost", 0.0)
        except Exception as error:
            if isinstance(error, EdgeOptError):
                raise
            raise EdgeOptError(
                f"the workers could not build {candidate.label}: {type(error).__name__}: {error}; run again to go on"
            ) from error
        folder = emptied(self._folder_of(candidate))
        for name, content in files.items():
            write_whole(folder / name, content)
        return cast(Outcome, outcome)


@contextmanager
def _hushed() -> Iterator[None]:
    """Dask's client does not log what becomes an error of ours."""
    logger = logging.getLogger("distributed.client")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


def _answer(question: Callable[[], Any]) -> Any:
    """What the scheduler says; one that is gone also shows as a connection that nobody takes."""
    from distributed.comm.core import CommClosedError

    try:
        return question()
    except OSError as error:
        raise CommClosedError(str(error)) from error


def _losses(client: Any, future: Any) -> int:
    """How many workers were lost while they built this: Dask gives their work to others by itself."""
    losses = int(_answer(lambda: client.run_on_scheduler(_suspicions, key=future.key)))
    return max(0, losses - int(future.status == "error"))


def _check_versions(client: Any) -> None:
    for worker, version in client.run(_version).items():
        if version != __version__:
            raise EdgeOptError(
                f"the worker {worker} has edge_opt {version}, and the sweep has {__version__}; "
                "install the same version on both"
            )


_here = threading.local()


def build_here(order: Order, candidate: Candidate) -> tuple[Outcome, Files]:
    """Build a candidate on this worker: what came of it, and the files it left."""
    from distributed import get_worker

    if getattr(_here, "preload", None) != order.preload:
        _here.isolation, _here.preload = Isolation(order.preload), order.preload
    scratch = get_worker().local_directory
    with tempfile.TemporaryDirectory(prefix="build-", dir=scratch) as name, at_work():
        folder = Path(name)
        outcome = order.run(_here.isolation, "build", (candidate, folder), folder)
        return outcome, {
            str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
        }


def _version() -> str:
    return __version__


def _suspicions(key: str, dask_scheduler: Any = None) -> int:
    task = dask_scheduler.tasks.get(key)
    return 0 if task is None else int(task.suspicious)


def _distributed() -> Any:
    return optional("distributed", "workers need", "distributed", "Dask")
