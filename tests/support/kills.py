"""Sweeps whose processes are killed at random moments, and what must hold afterwards.

A victim is the sweep itself, a fork server, a forked child, or a Dask scheduler. Whatever ends, a stored result is
never computed again, and no process stays.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from edge_opt.search.store import Store
from sweep_control import address_in, finished, lines
from sweep_process import space_of

HERE = Path(__file__).parent
PATIENCE_S = 120.0
_LOOK_FOR_S = 10.0
_END_WITHIN_S = 3.0


def role_of(process: psutil.Process) -> str | None:
    """What a process below a sweep is; None for one that only helps others to start."""
    try:
        words = " ".join(process.cmdline())
        parent = process.parent()
        if "edge_opt.search.fork_server" in words:
            is_forked = parent is not None and "edge_opt.search.fork_server" in " ".join(parent.cmdline())
            return "child" if is_forked else "fork_server"
        return None
    except psutil.Error:
        return None


class KilledSweep:
    """One folder that is swept until it is whole, however often something of it is killed."""

    def __init__(self, folder: Path, chance: random.Random, *, workers: int = 0, pause_s: float = 0.05) -> None:
        folder.mkdir(parents=True)
        self.folder, self.log = folder / "out", folder / "log"
        self.kills: Counter[str] = Counter()
        self.levels: int | None = None
        self._chance, self._workers, self._pause_s = chance, workers, pause_s
        self._seen: list[tuple[set[str], set[str], int]] = []
        self._options: list[str] = []
        self._said = folder / "said"
        self._processes: dict[int, psutil.Process] = {}

    def run(self, roles: tuple[str, ...], kills: int) -> None:
        """Kill so many, then let the sweep come to its end, and hold it to what must hold."""
        process = self._start()
        while self.kills.total() < kills:
            if process.poll() is not None:
                if self._is_whole():
                    break
                process = self._start()
                continue
            victim, role = self._victim(process.pid, self._chance.choice(roles))
            if victim is None:
                continue
            self._remember()
            try:
                victim.kill()
            except psutil.NoSuchProcess:
                continue
            self.kills[role] += 1
            if role == "parent":
                process.wait(PATIENCE_S)
                self._nobody_is_left()
                process = self._start()
        if process.wait(PATIENCE_S) != 0:
            assert self._start().wait(PATIENCE_S) == 0, self._said.read_text(encoding="utf-8")
        self.check()

    def check(self) -> None:
        """Every candidate has its row, none failed, nothing that was kept was found again, nobody is left."""
        self._nobody_is_left()
        store = Store.open_readonly(self.folder)
        trials = store.trials()
        store.close()
        assert len(trials) == space_of(self.levels).size
        failed = [trial for trial in trials.values() if trial.status != "done"]
        assert not failed, failed
        said = lines(self.log)
        for done, built, position in self._seen:
            again = [line for line in said[position:] if line.split()[1] in done]
            again += [line for line in said[position:] if line.startswith("build") and line.split()[1] in built]
            assert not again, again

    @contextmanager
    def cluster(self) -> Iterator[subprocess.Popen[bytes]]:
        """Start a scheduler and a worker as people do; builds go there meanwhile."""
        with dask_cluster(self.log.parent, workers=1) as (address, scheduler):
            self._options = ["--scheduler", address]
            try:
                yield scheduler
            finally:
                self._options = []

    def run_until_scheduler_is_killed(self) -> None:
        """Builds on the workers of a scheduler, which is killed in mid-build: that is said, and the sweep ends."""
        with self.cluster() as scheduler:
            process = self._start()
            deadline = time.monotonic() + PATIENCE_S
            # The baseline's two lines are of this machine; the third is the first of a worker.
            while len(lines(self.log)) < 3 and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.01)
            time.sleep(self._chance.uniform(0, 0.2))
            self._remember()
            scheduler.kill()
            self.kills["scheduler"] += 1
            assert process.wait(PATIENCE_S) == (0 if self._is_whole() else 2)
            self._nobody_is_left()

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, str(HERE / "sweep_process.py"), str(self.folder), str(self.log), str(self._pause_s)]
        command += [str(0 if self._options else self._workers), *self._options]
        if self.levels is not None:
            command += ["--levels", str(self.levels)]
        with self._said.open("ab") as said:
            process = subprocess.Popen(command, stderr=said)
        self._processes[process.pid] = psutil.Process(process.pid)
        return process

    def _victim(self, sweep: int, wanted: str) -> tuple[psutil.Process | None, str]:
        """A process of that role, at a random moment of its life; None where there is none in good time."""
        deadline = time.monotonic() + _LOOK_FOR_S
        # The sweep itself is there from the start: at any moment of its first seconds.
        time.sleep(self._chance.uniform(0, 2.0 if wanted == "parent" else 0.2))
        while time.monotonic() < deadline:
            victim = self._found(sweep, wanted)
            if victim is not None:
                time.sleep(self._chance.uniform(0, 0.1))
                return victim, wanted
            if not psutil.pid_exists(sweep) or psutil.Process(sweep).status() == psutil.STATUS_ZOMBIE:
                break
            time.sleep(0.01)
        return None, wanted

    def _found(self, sweep: int, wanted: str) -> psutil.Process | None:
        try:
            below = psutil.Process(sweep).children(recursive=True)
        except psutil.NoSuchProcess:
            return None
        for process in below:
            self._processes[process.pid] = process
        if wanted == "parent":
            return self._processes[sweep]
        found = [process for process in below if role_of(process) == wanted]
        return self._chance.choice(found) if found else None

    def _remember(self) -> None:
        """What is in the store by now must not run after this line of the log."""
        done, built = finished(self.folder), set[str]()
        if done:
            store = Store.open_readonly(self.folder)
            built = {key for (key,) in store._execute("SELECT key FROM builds")}
            store.close()
        self._seen.append((done, built, len(lines(self.log))))

    def _is_whole(self) -> bool:
        return len(finished(self.folder)) == space_of(self.levels).size

    def _nobody_is_left(self) -> None:
        _, alive = psutil.wait_procs(list(self._processes.values()), timeout=_END_WITHIN_S)
        assert not alive, alive
        self._processes.clear()


@contextmanager
def dask_cluster(folder: Path, workers: int) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Start a scheduler and workers as people do, each a process of its own."""
    address = folder / "scheduler.json"
    address.unlink(missing_ok=True)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "env": environment, "cwd": folder}
    local = ["--host", "127.0.0.1", "--no-dashboard", "--scheduler-file", str(address)]
    dask = [sys.executable, "-m", "dask"]
    commands = [[*dask, "scheduler", "--port", "0", *local]]
    commands += [[*dask, "worker", "--nthreads", "1", "--no-nanny", *local]] * workers
    processes = [subprocess.Popen(command, **quiet) for command in commands]  # type: ignore[call-overload]
    try:
        yield address_in(address), processes[0]
    finally:
        # Asked to close at the same time, Dask's processes may wait for each other.
        for process in processes:
            process.kill()
            process.wait(PATIENCE_S)
