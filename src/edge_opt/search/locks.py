"""Who may work where: one sweep per folder, and nothing beside a measurement.

Every lock is the kernel's: it goes with its process, in whatever way that ends, so a killed sweep is no obstacle.
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
from pathlib import Path
from typing import NamedTuple, TextIO

from edge_opt.errors import EdgeOptError, FolderInUse

LOCK_NAME = "sweep.lock"
# `owner` holds the lock for an instant when it looks; a run that starts just then tries again.
_TRIES = 5
_PAUSE_S = 0.1


class Owner(NamedTuple):
    """The process that sweeps in a folder."""

    pid: int
    host: str


@contextlib.contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """The folder is ours until the end; one that another process sweeps in is refused with its process id."""
    import fcntl

    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK_NAME).open("a+", encoding="utf-8") as file:
        for attempt in range(_TRIES):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if attempt + 1 < _TRIES:
                    time.sleep(_PAUSE_S)
                    continue
                found = _read_owner(folder)
                who = f"process {found.pid} on {found.host}" if found else "another process"
                raise FolderInUse(
                    f"{folder} is in use: {who} sweeps there; wait for it, end it, or choose another folder"
                ) from None
        file.truncate(0)
        json.dump({"pid": os.getpid(), "host": socket.gethostname()}, file)
        file.flush()
        try:
            yield
        finally:
            # Who it was is for people only: a disk that refuses even this must not hide the error that led here.
            with contextlib.suppress(OSError):
                file.truncate(0)


def owner(folder: Path) -> Owner | None:
    """The process that sweeps in a folder now; None when nobody does."""
    import fcntl

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


@contextlib.contextmanager
def at_work(on_wait: Callable[[], None] = lambda: None) -> Iterator[None]:
    """This machine is busy with a build; nothing is timed on it meanwhile. Builds go side by side."""
    import fcntl

    with _machine_file("gate") as gate, _machine_file("work") as work:
        # Whoever waits to time something holds the gate, so that builds cannot keep it out for ever.
        _lock(gate, fcntl.LOCK_SH, on_wait)
        fcntl.flock(work, fcntl.LOCK_SH)
        fcntl.flock(gate, fcntl.LOCK_UN)
        yield


@contextlib.contextmanager
def alone(on_wait: Callable[[], None]) -> Iterator[None]:
    """This machine is ours for timing: no build of any sweep of this user runs, and none starts."""
    import fcntl

    with _machine_file("gate") as gate, _machine_file("work") as work:
        has_waited = _lock(gate, fcntl.LOCK_EX, on_wait)
        _lock(work, fcntl.LOCK_EX, (lambda: None) if has_waited else on_wait)
        yield


def _lock(file: TextIO, kind: int, on_wait: Callable[[], None]) -> bool:
    """Take a lock, and tell whether it was waited for; that is said before."""
    import fcntl

    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        on_wait()
        fcntl.flock(file, kind)
        return True
    return False


def _machine_file(name: str) -> TextIO:
    """A lock file of this user's on this machine; a link that somebody put in its place is not followed."""
    path = run_folder() / f"{name}.lock"
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600), "a")


def run_folder() -> Path:
    """The folder of this user's locks, which nobody else may enter: in the system's run directory, else in temp."""
    user = os.getuid()
    given = os.environ.get("XDG_RUNTIME_DIR")
    # Without a login, as under cron, the variable is not set, and the directory is there all the same.
    for root in (Path(given) if given else None, Path(f"/run/user/{user}")):
        if root is not None and _is_private(root):
            return _made(root / "edge-opt")
    return _made(Path(tempfile.gettempdir()) / f"edge-opt-{user}")


def _made(folder: Path) -> Path:
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    if not _is_private(folder):
        raise EdgeOptError(
            f"{folder} is to hold the locks of your sweeps, and is not a folder that only you may enter; remove it, or "
            "set XDG_RUNTIME_DIR to a folder of your own with mode 700"
        )
    return folder


def _is_private(folder: Path) -> bool:
    try:
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not stat.S_IMODE(found.st_mode) & 0o077
