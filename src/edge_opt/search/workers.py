"""Workers: builds spread over the processes of a Dask cluster, here or on other machines.

A worker builds in a folder of its own and sends the files back, so nothing but the scheduler's address is shared. It
only builds: times taken on different machines cannot be compared, so measuring is left to the machine of the sweep.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

from edge_opt import __version__
from edge_opt._support.extras import import_optional
from edge_opt._support.files import write_whole
from edge_opt.errors import EdgeOptError, InvalidInput, first_line
from edge_opt.records.sweeps import Candidate
from edge_opt.search.build import WAITING, Listener, Notice, Order, emptied
from edge_opt.search.certificates import make_certificates, security_from
from edge_opt.search.locks import at_work
from edge_opt.search.process import Isolation, Outcome

PATIENCE_S = 30.0
# Ctrl-C at the terminal reaches workers too; it is for the sweep, which closes them.
_IGNORE_CTRL_C = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"
Files = dict[str, bytes]


@dataclass(frozen=True, slots=True)
class Cluster:
    """Who builds: `workers` processes here, or those of the scheduler at an address; and how they are recognised.

    Certificates for workers here are made for each run, in `folder`; `tls_dir` holds those of a cluster of several
    machines. A scheduler on another machine is spoken to without certificates only if `insecure`.
    """

    workers: int
    scheduler: str | None
    folder: Path
    tls_dir: Path | None = None
    insecure: bool = False

    def __post_init__(self) -> None:
        if self.scheduler is None:
            return
        parts = urlsplit(self.scheduler)
        if parts.scheme not in ("tls", "tcp") or not parts.hostname:
            raise InvalidInput(f"the scheduler is {self.scheduler!r}; write tls://HOST:PORT")
        if parts.scheme == "tls" and self.tls_dir is None and not self.insecure:
            import dask

            if not dask.config.get("distributed.comm.tls.ca-file", None):
                raise InvalidInput(f"{self.scheduler} asks for certificates; name their folder with --tls-dir")
        if parts.scheme == "tcp" and not self.insecure and not is_here(self.scheduler):
            raise InvalidInput(
                f"{self.scheduler} is another machine, and without TLS anybody between can read what is sent there and "
                "run code here; write tls:// with --tls-dir, or --insecure if the network is yours alone"
            )

    def security(self) -> Any:
        """What Dask's client shows to the scheduler; None where Dask's own configuration says it."""
        return None if self.tls_dir is None else security_from(self.tls_dir)


def is_here(address: str) -> bool:
    """Whether an address is one of this machine that no other can reach.

    >>> is_here("tcp://127.0.0.1:8786"), is_here("tcp://192.168.1.4:8786")
    (True, False)
    """
    host = urlsplit(address).hostname or ""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class DaskBuilders:
    """Builds on processes of this machine, or on those of a cluster that runs already.

    The cluster is joined for building only: even idle, two workers and their scheduler take 7 % of a core here, which
    would be work beside a measurement.
    """

    def __init__(
        self,
        order: Order,
        folder_of: Callable[[Candidate], Path],
        cluster: Cluster,
        tell: Listener,
    ) -> None:
        self._order = order
        self._folder_of = folder_of
        self._cluster = cluster
        self._scheduler = cluster.scheduler
        self._tell = tell
        dask_distributed()
        if self._scheduler is not None:
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
            while waiting and len(running) < max(1, sum(answer(client.nthreads).values())):
                candidate = waiting.pop()
                begin(candidate)
                running[client.submit(build_here, self._order, candidate, pure=False)] = candidate
            for future in self._some_done(client, list(running)):
                candidate = running.pop(future)
                for _ in range(losses(client, future)):
                    begin(candidate)
                outcome = self._received(future, candidate)
                # Dask finds a result again that somebody holds when the worker that had it is lost.
                future.release()
                yield candidate, outcome

    @contextmanager
    def _joined(self) -> Iterator[Any]:
        with ExitStack() as stack:
            if self._scheduler is None:
                address, security = stack.enter_context(self._own_cluster()), None
            else:
                address, security = self._scheduler, self._cluster.security()
            client = stack.enter_context(client_of(address, security))
            try:
                client.wait_for_workers(1 if self._scheduler else self._cluster.workers, PATIENCE_S)
            except TimeoutError as error:
                raise EdgeOptError(
                    f"no worker has joined {address} in {PATIENCE_S:g} s; start one with "
                    f"`dask worker {address} --nthreads 1`, with the same certificates"
                ) from error
            check_versions(client)
            client.subscribe_topic(_TOPIC, lambda event: self._tell(Notice(str(event[1]))))
            yield client

    @contextmanager
    def _own_cluster(self) -> Iterator[Any]:
        import dask

        distributed = dask_distributed()

        class Scheduler(distributed.Scheduler):  # type: ignore[misc,name-defined]  # Dask is imported where it is needed
            """Without its web server, which asks nobody for a certificate."""

            def start_http_server(self, *_: Any, **__: Any) -> None:
                pass

        certificates = make_certificates(self._cluster.folder / "tls")
        security = security_from(certificates)
        here = {"host": "127.0.0.1", "protocol": "tls", "security": security}
        worker = {
            "cls": distributed.Nanny,
            "options": {
                **here,
                "nthreads": 1,
                "worker_class": quiet_worker,
                # Builds are watched in their own processes, by the limits of the sweep.
                "memory_limit": 0,
                "silence_logs": logging.CRITICAL,
                "preload": [_IGNORE_CTRL_C],
            },
        }

        def start() -> Any:
            return distributed.SpecCluster(
                scheduler={"cls": Scheduler, "options": {**here, "port": 0}},
                workers=dict.fromkeys(range(self._cluster.workers), worker),
                security=security,
                # Workers report heartbeats that fail while they are being closed.
                silence_logs=logging.CRITICAL,
            )

        try:
            # A lost worker costs its attempt; Dask itself gives the work to another, so many times.
            with (
                dask.config.set({"distributed.scheduler.allowed-failures": self._order.patience}),
                started(start) as cluster,
            ):
                yield cluster
        finally:
            shutil.rmtree(certificates, ignore_errors=True)

    def _some_done(self, client: Any, futures: list[Any]) -> list[Any]:
        distributed = dask_distributed()
        while True:
            try:
                return list(distributed.wait(futures, timeout=PATIENCE_S, return_when="FIRST_COMPLETED").done)
            except TimeoutError:
                if not answer(client.nthreads):
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


_STARTS = 3


def started(start: Callable[[], Any]) -> Any:
    """What `start` makes. A worker that is lost while it starts ends the whole start, so that is tried again.

    >>> started(lambda: "cluster")
    'cluster'
    """
    for _ in range(_STARTS - 1):
        with suppress(RuntimeError, OSError):
            return start()
    try:
        return start()
    except (RuntimeError, OSError) as error:
        raise EdgeOptError(
            f"the workers of this sweep cannot be started ({first_line(error)}); run again to go on: what was finished "
            "is kept"
        ) from error


@contextmanager
def client_of(address: Any, security: Any) -> Iterator[Any]:
    """A client of the scheduler at an address, for as long as it is needed."""
    with ExitStack() as stack:
        stack.enter_context(_hushed())
        try:
            client = stack.enter_context(dask_distributed().Client(address, timeout=PATIENCE_S, security=security))
        except (OSError, ValueError, TypeError) as error:
            raise EdgeOptError(
                f"no Dask scheduler answers at {address} ({error}); start one with `dask scheduler`, with the same "
                "certificates"
            ) from error
        yield client


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


def answer(question: Callable[[], Any]) -> Any:
    """What the scheduler says; one that is gone also shows as a connection that nobody takes."""
    from distributed.comm.core import CommClosedError

    try:
        return question()
    except OSError as error:
        raise CommClosedError(str(error)) from error


def losses(client: Any, future: Any) -> int:
    """How many workers were lost while they built this: Dask gives their work to others by itself."""
    lost = int(answer(lambda: client.run_on_scheduler(_suspicions, key=future.key)))
    return max(0, lost - int(future.status == "error"))


def check_versions(client: Any) -> None:
    """Refuse workers that have another version than ours."""
    for worker, version in client.run(_version).items():
        if version != __version__:
            raise EdgeOptError(
                f"the worker {worker} has edge_opt {version}, and the sweep has {__version__}; "
                "install the same version on both"
            )


def quiet_worker(*arguments: Any, **options: Any) -> Any:
    """A worker without its web server, which asks nobody for a certificate."""
    worker = dask_distributed().Worker(*arguments, **options)
    worker.start_http_server = lambda *_, **__: None
    return worker


# Under which workers say what people should know.
_TOPIC = "edge-opt"
_here = threading.local()


def build_here(order: Order, candidate: Candidate) -> tuple[Outcome, Files]:
    """Build a candidate on this worker: what came of it, and the files it left."""
    from distributed import get_worker

    if getattr(_here, "preload", None) != order.preload:
        _here.isolation, _here.preload = Isolation(order.preload), order.preload
    worker = get_worker()
    with (
        tempfile.TemporaryDirectory(prefix="build-", dir=worker.local_directory) as name,
        at_work(lambda: worker.log_event(_TOPIC, WAITING)),
    ):
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


def dask_distributed() -> Any:
    """Dask, or how to get it."""
    return import_optional("distributed", "workers need", "distributed", "Dask")
