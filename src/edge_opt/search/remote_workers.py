"""Build candidates on the workers of a Dask scheduler, which other machines have joined.

A worker builds in a folder of its own and sends the files back, so the machines share nothing but the address of the
scheduler. Workers only build: times of different machines cannot be compared, so the machine of the sweep measures.

Connection, encryption and retries are Dask's. Its configuration (`distributed.comm.tls`) names the certificates.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

from edge_opt import __version__
from edge_opt._support.extras import import_optional
from edge_opt._support.files import write_whole
from edge_opt.errors import EdgeOptError, InvalidInput
from edge_opt.records.sweeps import Candidate
from edge_opt.search.builders import WAITING, JobSpec, Listener, Notice, recreate_folder
from edge_opt.search.isolation import Isolation, Outcome
from edge_opt.search.locks import build_lock

CONNECT_WITHIN_S = 30.0
# The topic of Dask under which workers send notices for the user.
_TOPIC = "edge-opt"
Files = dict[str, bytes]


class RemoteBuilders:
    """Builds on the workers of a scheduler. The connection is open while something is built, and closed otherwise."""

    def __init__(
        self,
        spec: JobSpec,
        folder_of: Callable[[Candidate], Path],
        scheduler: str,
        tell: Listener,
        insecure: bool = False,
    ) -> None:
        check_scheduler(scheduler, insecure)
        self._spec = spec
        self._folder_of = folder_of
        self._scheduler = scheduler
        self._tell = tell
        # A wrong address is reported before anything runs.
        with self._connected():
            pass

    def batches(self, candidates: Sequence[Candidate]) -> Iterator[Sequence[Candidate]]:
        return iter([candidates] if candidates else [])

    def build(
        self, candidates: Sequence[Candidate], begin: Callable[[Candidate], object]
    ) -> Generator[tuple[Candidate, Outcome], None, None]:
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
                        _build_on_worker, self._spec, candidate, pure=False, retries=self._spec.retries_if_killed
                    )
                    futures[future] = candidate
                for future in as_completed(futures):  # type: ignore[no-untyped-call]
                    candidate = futures.pop(future)
                    outcome = self._received(future, candidate)
                    # A released result is not computed again when the worker that holds it is lost.
                    future.release()
                    yield candidate, outcome
        except (CancelledError, CommClosedError, OSError) as error:
            raise EdgeOptError(
                f"the Dask scheduler {self._scheduler} is gone; run again to continue: finished candidates are kept"
            ) from error

    @contextmanager
    def _connected(self) -> Iterator[Any]:
        """Connect to the scheduler; refuse one without workers, or whose workers have another version."""
        distributed = import_optional("distributed", "--scheduler needs", "distributed", "Dask")
        try:
            client = distributed.Client(self._scheduler, timeout=CONNECT_WITHIN_S)
        except (OSError, ValueError, TypeError) as error:
            raise EdgeOptError(
                f"no Dask scheduler answers at {self._scheduler} ({error}); start one with `dask scheduler`"
            ) from error
        with client:
            try:
                client.wait_for_workers(1, CONNECT_WITHIN_S)
            except TimeoutError as error:
                raise EdgeOptError(
                    f"no worker has joined {self._scheduler} in {CONNECT_WITHIN_S:g} s; start one with "
                    f"`dask worker {self._scheduler} --nthreads 1`"
                ) from error
            for worker, version in client.run(_version).items():
                if version != __version__:
                    raise EdgeOptError(
                        f"the worker {worker} has edge_opt {version}, and the sweep has {__version__}; "
                        "install the same version on both"
                    )
            client.subscribe_topic(_TOPIC, lambda event: self._tell(Notice(str(event[1]))))
            yield client

    def _received(self, future: Any, candidate: Candidate) -> Outcome:
        """Write the files of a finished build to its folder, and return its outcome."""
        from distributed import KilledWorker

        try:
            outcome, files = future.result()
        except KilledWorker:
            return Outcome(None, "crashed", "each worker that built it was lost", 0.0)
        except CancelledError:
            raise
        except Exception as error:  # whatever Dask or unpickling on the worker raises
            if isinstance(error, EdgeOptError):
                raise
            raise EdgeOptError(
                f"the workers could not build {candidate.label}: {type(error).__name__}: {error}; run again to continue"
            ) from error
        folder = recreate_folder(self._folder_of(candidate))
        for name, content in files.items():
            write_whole(folder / name, content)
        return cast(Outcome, outcome)


def check_scheduler(address: str, insecure: bool) -> None:
    """Refuse an address that is not one, and a connection without encryption unless `insecure` allows it.

    Whoever can connect to a scheduler can run code on its workers and on the machine of the sweep. On a machine with
    several users that is every user, so a loopback address is no exception.
    """
    parts = urlsplit(address)
    if parts.scheme not in ("tls", "tcp") or not parts.hostname:
        raise InvalidInput(f"the scheduler is {address!r}; write tls://HOST:PORT")
    if parts.scheme == "tcp" and not insecure:
        raise InvalidInput(
            f"{address} has no encryption: whoever can connect to it can run code here. Use tls:// with certificates "
            "in Dask's configuration, or --insecure if you alone can reach it"
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
        build_lock(lambda: worker.log_event(_TOPIC, WAITING)),
    ):
        folder = Path(name)
        outcome = spec.run(_worker_state.isolation, "build", (candidate, folder), folder)
        return outcome, {
            str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
        }


def _version() -> str:
    return __version__
