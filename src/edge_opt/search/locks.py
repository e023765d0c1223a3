"""Locks: one sweep per folder, and nothing of ours beside a measurement.

All of them are `flock` locks. The kernel releases them when their process ends, however it ends, so a killed sweep
never blocks the next one.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import NamedTuple, TextIO

from edge_opt.errors import EdgeOptError, FolderInUse

try:
    import fcntl
except ImportError as error:
    raise EdgeOptError(
        "edge-opt run and sweep need Linux, macOS or WSL: they fork processes and lock files, which this system does "
        "not support; profile, check, compare and convert work here"
    ) from error

LOCK_NAME = "sweep.lock"
# `owner` holds the lock for an instant when it looks; a run that starts just then tries again.
_TRIES = 5
_PAUSE_S = 0.1
# The folder that this process works in, for others that wait for it.
_working_in: Path | None = None


@contextlib.contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Let one process at a time work on a folder; the kernel releases the lock also when the process is killed."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


class Owner(NamedTuple):
    """The process that works in a folder."""

    pid: int
    host: str


@contextlib.contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder; refuse a folder that another process works in, with its process id."""
    global _working_in
    folder.mkdir(parents=True, exist_ok=True)
    # "a+", because "w" would erase the name of the owner before the lock is held.
    with (folder / LOCK_NAME).open("a+", encoding="utf-8") as file:
        for attempt in range(_TRIES):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if attempt + 1 < _TRIES:
                    time.sleep(_PAUSE_S)
                    continue
                holder = _read_owner(folder)
                who = f"process {holder.pid} on {holder.host}" if holder else "another process"
                raise FolderInUse(f"{folder} is in use: {who} works there; choose another folder, or wait") from None
        file.truncate(0)
        json.dump({"pid": os.getpid(), "host": socket.gethostname()}, file)
        file.flush()
        earlier, _working_in = _working_in, folder.resolve()
        try:
            yield
        finally:
            _working_in = earlier
            # Who it was is for people only: a disk that refuses even this must not hide the error that led here.
            with contextlib.suppress(OSError):
                file.truncate(0)


def owner(folder: Path) -> Owner | None:
    """Return the process that works in a folder now, or None."""
    try:
        with (folder / LOCK_NAME).open("r", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return None
    except BlockingIOError:
        return _read_owner(folder)
    return None


def _read_owner(folder: Path) -> Owner | None:
    try:
        return Owner(**json.loads((folder / LOCK_NAME).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


# Called before waiting, with who holds the lock.
OnWait = Callable[[str], None]


@contextlib.contextmanager
def build_lock(on_wait: OnWait = lambda _: None, folder: Path | None = None) -> Iterator[None]:
    """Keep measurements of this user off this machine meanwhile. Builds may run side by side.

    Others that wait are told `folder`, the folder of the sweep; that of `folder_lock` unless given.
    """
    with _machine_file("gate") as gate, _machine_file("work") as work:
        # flock is unfair: as long as builds overlap, a measurement that waits for the work lock would never get it.
        # So a measurement takes the gate first, and new builds wait at the gate.
        _lock(gate, fcntl.LOCK_SH, work, on_wait)
        fcntl.flock(work, fcntl.LOCK_SH)
        fcntl.flock(gate, fcntl.LOCK_UN)
        with _signed(work, "builds", folder):
            yield


@contextlib.contextmanager
def measurement_lock(on_wait: OnWait = lambda _: None, folder: Path | None = None) -> Iterator[None]:
    """Keep builds of all sweeps of this user off this machine meanwhile; the arguments are those of `build_lock`."""
    with _machine_file("gate") as gate, _machine_file("work") as work:
        has_waited = _lock(gate, fcntl.LOCK_EX, work, on_wait)
        _lock(work, fcntl.LOCK_EX, work, (lambda _: None) if has_waited else on_wait)
        with _signed(work, "measures", folder):
            yield


def _lock(file: TextIO, kind: int, work: TextIO, on_wait: OnWait) -> bool:
    """Take a lock; call `on_wait` before waiting for it, and return whether it was waited for."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        on_wait(_holder(work))
        fcntl.flock(file, kind)
        return True
    return False


@contextlib.contextmanager
def _signed(work: TextIO, what: str, folder: Path | None) -> Iterator[None]:
    """Write into the lock file who holds it, for those who wait: a line each, as builds go side by side."""
    line = json.dumps([what, str(folder or _working_in or ""), os.getpid(), f"{datetime.now():%H:%M:%S}"]) + "\n"
    # Who it is is for people only: a disk that is full must not stop the work.
    with contextlib.suppress(OSError):
        if what == "measures":  # nobody else works: lines of killed processes go
            work.truncate(0)
        work.write(line)
        work.flush()
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            work.seek(0)
            others = work.read().replace(line, "", 1)
            work.truncate(0)
            work.write(others)
            work.flush()


def _holder(work: TextIO) -> str:
    """Return who holds the lock of this machine, its folder and since when; of several builds, the first."""
    for _ in range(_TRIES):  # who takes the lock signs it an instant later
        with contextlib.suppress(OSError, ValueError):
            work.seek(0)
            for what, folder, pid, since in map(json.loads, work.read().splitlines()):
                if _is_running(pid):
                    who = f"the sweep in {folder or 'another folder'} (process {pid})"
                    return f"{who} {what} on this machine since {since}"
        time.sleep(_PAUSE_S)
    return "another sweep works on this machine"


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _machine_file(name: str) -> TextIO:
    """Open a lock file of this user on this machine."""
    # O_NOFOLLOW: in a shared temporary directory somebody could place a link to a file of ours.
    # O_CLOEXEC: a child that inherits the descriptor would keep the lock after its parent has ended.
    path = run_folder() / f"{name}.lock"
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600), "a+")


def run_folder() -> Path:
    """Return the folder of this user's locks, private to the user: in the system's run directory, else at home."""
    user = os.getuid()
    runtime_dir = os.environ.get("XDG_RUNTIME_DIR")
    # Without a login, as under cron, the variable is not set, and the directory is there all the same.
    for root in (Path(runtime_dir) if runtime_dir else None, Path(f"/run/user/{user}")):
        if root is not None and _is_private(root):
            return _create_private(root / "edge-opt")
    # In a shared temporary directory another user could take a name that we need. Homes may be shared by machines.
    with contextlib.suppress(OSError, RuntimeError):
        folder = Path.home() / ".cache" / "edge-opt" / f"run-{socket.gethostname()}"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return _create_private(folder)
    # An account without a home: others could take a name that can be predicted.
    folders = sorted(folder for folder in Path(tempfile.gettempdir()).glob("edge-opt-run-*") if _is_private(folder))
    return folders[0] if folders else Path(tempfile.mkdtemp(prefix="edge-opt-run-"))


def _create_private(folder: Path) -> Path:
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    if not _is_private(folder):
        raise EdgeOptError(f"{folder} is not a folder that only you may enter; remove it, or set XDG_RUNTIME_DIR")
    return folder


def _is_private(folder: Path) -> bool:
    try:
        status = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not stat.S_IMODE(status.st_mode) & 0o077
