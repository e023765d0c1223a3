"""Locks that end with their process: one sweep per folder, and no timing beside other work on a machine."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, TextIO

from edge_opt.errors import FolderInUse

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
    """The folder is ours until the end; one that another process sweeps in is refused with its process id.

    The kernel drops the lock when its process ends, in whatever way, so a killed sweep is no obstacle.
    """
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
def at_work() -> Iterator[None]:
    """This machine is busy with a build; nothing is timed on it meanwhile. Builds go side by side."""
    import fcntl

    with _machine_file("gate") as gate, _machine_file("work") as work:
        # Whoever waits to time something holds the gate, so that builds cannot keep it out for ever.
        fcntl.flock(gate, fcntl.LOCK_SH)
        fcntl.flock(work, fcntl.LOCK_SH)
        fcntl.flock(gate, fcntl.LOCK_UN)
        yield


@contextlib.contextmanager
def alone(on_wait: Callable[[], None]) -> Iterator[None]:
    """This machine is ours for timing: no build of any sweep of this user runs, and none starts."""
    import fcntl

    with _machine_file("gate") as gate, _machine_file("work") as work:
        try:
            fcntl.flock(gate, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.flock(work, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(gate, fcntl.LOCK_EX)
            fcntl.flock(work, fcntl.LOCK_EX)
        yield


def _machine_file(name: str) -> TextIO:
    return (Path(tempfile.gettempdir()) / f"edge-opt-{os.getuid()}-{name}.lock").open("a", encoding="utf-8")
