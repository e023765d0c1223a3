"""A board that times: variants are built here, and timed there, one at a time, by the board's own ONNX Runtime.

The board runs `edge-opt worker ADDRESS`, or `python -m edge_opt.search.board_worker ADDRESS`, which needs numpy, ONNX
Runtime and Dask, and no torch. It joins a Dask scheduler, which is spoken to as those of workers that build are: by
TLS, or on this machine.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import logging
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from edge_opt._support.json import from_plain, to_plain
from edge_opt.errors import EdgeOptError, InvalidInput
from edge_opt.measuring.onnx_timing import TimingOrder, TimingResult, read_result, this_machine, write_order
from edge_opt.records.sweeps import Candidate, TrialMetrics
from edge_opt.search.build import Listener, Notice
from edge_opt.search.locks import alone
from edge_opt.search.process import Outcome
from edge_opt.search.workers import (
    PATIENCE_S,
    Cluster,
    check_versions,
    client_of,
    dask_distributed,
    is_here,
    losses,
    quiet_worker,
)

# What a worker on a board has, and a measurement takes: one at a time.
RESOURCE = "board"
# How often somebody who waits looks whether the board is there.
LOOK_S = 5.0
GONE = "the board is gone; waiting for it to come back"


@dataclass(frozen=True, slots=True)
class Board:
    """The board that has joined a scheduler.

    Attributes:
        cluster: The scheduler, and how it is spoken to.
        machine: The board as it calls itself; times of another are refused.
        limit_s: Seconds that one order may take there; None is no limit.
    """

    cluster: Cluster
    machine: str
    limit_s: float | None = None

    def time(
        self,
        order: TimingOrder,
        files: Mapping[str, bytes],
        inputs: bytes = b"",
        *,
        tell: Listener = lambda _: None,
        on_loss: Callable[[], object] = lambda: None,
    ) -> TimingResult:
        """Have files timed on the board; one that goes away meanwhile is waited for, and times them anew.

        Args:
            order: What is to be timed.
            files: The files, by the names that the order has.
            inputs: Inputs as `packed_inputs` makes them; drawn there where there are none.
            tell: Told when the board is gone.
            on_loss: Called once for each time that the board went away with this order.
        """
        task = (to_plain(order), dict(files), inputs, self.limit_s)
        found = from_plain(TimingResult, self._done(time_there, task, tell, on_loss))
        if found.machine != self.machine:
            raise EdgeOptError(
                f"the times are of {self.machine}, and now {found.machine} has joined; start a sweep of its own for it"
            )
        return found

    def calibrate(
        self, threads: int | None = None, seconds: float = 110.0, *, tell: Listener = lambda _: None
    ) -> bytes:
        """The board's own calibration, as the content of its file; torch must be installed there.

        Args:
            threads: Threads that torch uses there; its own number unless given.
            seconds: Seconds of CPU time at most.
            tell: Told when the board is gone; it is waited for, and begins anew.
        """
        return bytes(self._done(calibrate_there, (threads, seconds), tell, lambda: None))

    def _done(
        self, work: Callable[..., Any], task: tuple[Any, ...], tell: Listener, on_loss: Callable[[], object]
    ) -> Any:
        with _joined(self.cluster) as client:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # a model is large, and is sent once
                future = client.submit(work, *task, pure=False, resources={RESOURCE: 1})
            _wait(client, future, tell)
            for _ in range(losses(client, future)):
                on_loss()
            return _received(future)


class BoardJob(Protocol):
    """A job whose variants can be timed elsewhere."""

    def timing(self, folder: Path, built: Mapping[str, Any]) -> tuple[TimingOrder, dict[str, bytes], bytes]:
        """What is to be timed of a candidate that was built: the order, its file and its inputs."""
        ...

    def metrics(self, built: Mapping[str, Any], found: TimingResult) -> TrialMetrics:
        """The figures of a candidate that was timed elsewhere."""
        ...


@dataclass(frozen=True)
class BoardMeasurer:
    """Measures the candidates of a sweep on a board."""

    board: Board
    job: BoardJob
    tell: Listener

    def measure(
        self, candidate: Candidate, folder: Path, built: Mapping[str, Any], on_retry: Callable[[], object]
    ) -> Outcome:
        """What became of one candidate: its figures, or why it could not be timed."""
        begun = time.monotonic()
        try:
            order, files, inputs = self.job.timing(folder, built)
            found = self.board.time(order, files, inputs, tell=self.tell, on_loss=on_retry)
            return Outcome(to_plain(self.job.metrics(built, found)), None, "", time.monotonic() - begun)
        except InvalidInput as error:
            return Outcome(None, "raised", str(error), time.monotonic() - begun)
        except TimeoutError as error:
            return Outcome(None, "timed out", str(error), time.monotonic() - begun)
        except ChildProcessError as error:
            return Outcome(None, "crashed", str(error), time.monotonic() - begun)


def find_board(address: str, tls_dir: str | Path | None = None, insecure: bool = False) -> Board:
    """The board that has joined the scheduler at an address.

    Args:
        address: Of the Dask scheduler, such as tls://host:8786.
        tls_dir: Folder with ca.pem, cert.pem and key.pem, by which scheduler, board and we know each other.
        insecure: Whether a scheduler on another machine may be spoken to without TLS.
    """
    cluster = Cluster(0, address, Path.cwd(), None if tls_dir is None else Path(tls_dir), insecure)
    with _joined(cluster) as client:
        end = time.monotonic() + PATIENCE_S
        while not (found := _boards_of(client)) and time.monotonic() < end:
            time.sleep(0.2)
        if not found:
            raise EdgeOptError(
                f"no board has joined {address} in {PATIENCE_S:g} s; run `edge-opt worker {address}` on it, with the "
                "same certificates"
            )
        if len(found) > 1:
            raise InvalidInput(
                f"{len(found)} boards have joined {address} ({', '.join(found)}), and their times do not belong into "
                "one table; leave one of them there"
            )
        check_versions(client)
        machine = client.submit(this_machine, pure=False, resources={RESOURCE: 1}).result(timeout=PATIENCE_S)
    return Board(cluster, str(machine))


def packed_inputs(arrays: Sequence[Any]) -> bytes:
    """Arrays as one archive, in their order."""
    import numpy as np

    buffer = io.BytesIO()
    np.savez(buffer, **{f"{index:03d}": value for index, value in enumerate(arrays)})
    return buffer.getvalue()


@contextmanager
def _joined(cluster: Cluster) -> Iterator[Any]:
    from distributed.comm.core import CommClosedError
    from distributed.versions import VersionMismatchWarning

    try:
        # A board has fewer packages than a workstation; what both need in common is checked by itself.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", VersionMismatchWarning)
            with client_of(cluster.scheduler, cluster.security()) as client:
                yield client
    except (CancelledError, CommClosedError) as error:
        raise EdgeOptError(
            f"the Dask scheduler {cluster.scheduler} is gone; run again to go on: what was finished is kept"
        ) from error


def _wait(client: Any, future: Any, tell: Listener) -> None:
    """Until it is done; that the board is gone is said once each time."""
    is_told = False
    while True:
        try:
            dask_distributed().wait([future], timeout=LOOK_S)
            return
        except TimeoutError:
            is_gone = not _boards_of(client)
            if is_gone and not is_told:
                tell(Notice(GONE))
            is_told = is_gone


def _boards_of(client: Any) -> list[str]:
    return list(client.run_on_scheduler(_boards))


def _boards(dask_scheduler: Any = None) -> list[str]:
    return [str(worker.name) for worker in dask_scheduler.workers.values() if worker.resources.get(RESOURCE)]


def _received(future: Any) -> Any:
    from distributed import KilledWorker

    try:
        told = future.result()
    except KilledWorker:
        raise ChildProcessError("the board went away each time it was timed") from None
    if isinstance(told, str):
        raise InvalidInput(told)
    return told


def time_there(order: Mapping[str, Any], files: Mapping[str, bytes], inputs: bytes, limit_s: float | None) -> Any:
    """On the board: time files in a process of their own, and tell what came of it; a refusal is a sentence."""
    with tempfile.TemporaryDirectory(prefix="edge-opt-") as name, alone(lambda: None):
        folder = Path(name)
        command = [sys.executable, "-m", "edge_opt.measuring.onnx_timing", name]
        try:
            write_order(folder, from_plain(TimingOrder, order), files, inputs)
            done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
            if done.returncode < 0:
                raise ChildProcessError(f"ONNX Runtime was ended there by {signal.Signals(-done.returncode).name}")
            if done.returncode:
                raise ChildProcessError(f"nothing came of it there: {(done.stderr.strip().splitlines() or [''])[-1]}")
            return to_plain(read_result(folder))
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"it took longer than {limit_s:g} s there") from None
        except EdgeOptError as error:
            return str(error)


def calibrate_there(threads: int | None, seconds: float) -> Any:
    """On the board: calibrate it in a process of its own; the file's content, or why there is none as a sentence."""
    if find_spec("torch") is None:
        return "the board cannot be calibrated: torch is not installed there; `edge-opt measure-on` times without it"
    with tempfile.TemporaryDirectory(prefix="edge-opt-") as name, alone(lambda: None):
        file = Path(name) / "calibration.json"
        command = [sys.executable, "-m", "edge_opt.cli", "calibrate", "-o", str(file), "--seconds", str(seconds)]
        command += [] if threads is None else ["--threads", str(threads)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode or not file.is_file():
            lines = [line for line in done.stderr.splitlines() if line.strip()]
            said = next((line for line in lines if line.startswith("error: ")), (lines or ["it says nothing"])[-1])
            return f"the board cannot be calibrated: {said.removeprefix('error: ')}"
        return file.read_bytes()


def serve(
    address: str, *, tls_dir: str | Path | None = None, insecure: bool = False, name: str | None = None,
    say: Callable[[str], None] = print,
) -> None:  # fmt: skip
    """On the board: join the scheduler at an address and time what is sent, until Ctrl-C.

    A scheduler that is not there yet, or goes away, is waited for.

    Args:
        address: Of the Dask scheduler, such as tls://host:8786.
        tls_dir: Folder with ca.pem, cert.pem and key.pem.
        insecure: Whether a scheduler on another machine may be joined without TLS; whoever reaches this machine can
            then run code on it.
        name: What the board is called there; its own name unless given.
        say: Told what happens.
    """
    cluster = Cluster(0, address, Path.cwd(), None if tls_dir is None else Path(tls_dir), insecure)
    dask_distributed()
    security = cluster.security()
    logging.getLogger("distributed").setLevel(logging.WARNING)
    say(f"this board: {this_machine()}")
    while True:
        try:
            asyncio.run(_work(address, security, name, say))
            say(f"{address} has closed; waiting for it to come back")
        except KeyboardInterrupt:
            return
        except (OSError, TimeoutError) as error:
            say(f"no Dask scheduler answers at {address} ({error}); trying again")
        try:
            time.sleep(LOOK_S)
        except KeyboardInterrupt:
            return


async def _work(address: str, security: Any, name: str | None, say: Callable[[str], None]) -> None:
    options: dict[str, Any] = {"nthreads": 1, "resources": {RESOURCE: 1}, "memory_limit": 0, "security": security}
    if is_here(address):
        options["host"] = "127.0.0.1"  # nobody else need reach it
    worker = quiet_worker(address, name=name, **options)
    async with worker:
        say(f"joined {address}; waiting for something to time")
        await worker.finished()


def main(arguments: Sequence[str]) -> int:
    """Join a scheduler as a board: `python -m edge_opt.search.board_worker tls://HOST:PORT --tls-dir DIR`."""
    parser = argparse.ArgumentParser(prog="python -m edge_opt.search.board_worker", description=serve.__doc__)
    parser.add_argument("address")
    parser.add_argument("--tls-dir")
    parser.add_argument("--insecure", action="store_true")
    parser.add_argument("--name")
    try:
        serve(**vars(parser.parse_args(arguments)))
    except EdgeOptError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    # Dask sends functions by the name of their module.
    from edge_opt.search import board_worker

    sys.exit(board_worker.main(sys.argv[1:]))
