"""The fork server: a process that has imported what jobs need, and forks one child per request.

A fork takes milliseconds, a new interpreter with torch takes seconds. The standard library's `forkserver` was rejected:
it imports the user's `__main__` again, and it outlives a parent that is killed. This server ends with the pipe to its
parent and takes the running child along.

It must fork before torch starts threads: a forked child has only the thread that called fork, and would wait for
locks that the missing threads hold. So the server imports modules and runs nothing else.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import faulthandler
import gc
import importlib
import json
import os
import pickle
import select
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from io import TextIOWrapper
from pathlib import Path
from typing import Any, NoReturn, cast

from edge_opt._support.files import write_whole
from edge_opt._support.json import to_plain
from edge_opt._support.progress import progress_to
from edge_opt.records.sweeps import TrialMetrics

_PR_SET_PDEATHSIG = 1
_PARENT_ENDED = signal.SIGUSR2
WHERE_ARE_YOU = signal.SIGUSR1


def serve(preload: list[str]) -> None:
    """Fork a child for each request on stdin, one at a time, and write its exit status to stdout.

    A request that is a list imports more: the value of `sys.path`, and names as in `preload`.

    Args:
        preload: Modules to import; `module:function` is also called, with the text behind a blank. A name with a
            question mark in front only saves time: if it fails, children run without it. One with a tilde does so
            too, and is imported while a child trains or scores, which do not need it.
    """
    # Requests and replies use duplicated descriptors, and 0 and 1 point elsewhere: whatever an imported module prints
    # would otherwise be read as a reply.
    requests = os.fdopen(os.dup(0), "rb")
    replies = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    os.dup2(2, 1)
    # The wakeup descriptor turns SIGCHLD into a readable pipe, so one select waits for the end of the child and for
    # the end of the parent. Without it, waitpid would block while the parent dies.
    woken, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(waker)
    parent = os.getppid()
    signal.signal(_PARENT_ENDED, lambda *_: _end_orphan(parent))
    request: Any = [[*sys.path], preload]
    while True:
        if isinstance(request, list):
            sys.path[:] = request[0]
            reply = _import_all(request[1])
            # From now on with a signal that `_end_orphan` answers: it also comes when a thread of the parent ends.
            _end_with_parent(_PARENT_ENDED)
            _end_orphan(parent)
            _reply(replies, reply)
            if "ready" not in reply:
                return
        else:
            *child, needs_all = request
            if needs_all:
                _import_later(len(_later))
            _fork(tuple(child), requests.fileno(), replies, woken, waker)
        try:
            # Paths and bytes only: what a job is made of is unpickled in the child.
            request = pickle.load(requests)
        except (EOFError, pickle.UnpicklingError):
            os._exit(0)  # the parent has closed the pipe, or died while it wrote; to end as usual takes a second


# What is to be imported while a child runs, and that child.
_later: list[str] = []
_children: list[int] = []


def _import_later(count: int) -> None:
    """Import that many of the names that wait for it."""
    _import_all([_later.pop(0) for _ in range(count)])


def _import_all(names: list[str]) -> dict[str, Any]:
    """Import modules, and call functions; return the reply."""
    _later.extend(f"?{name[1:]}" for name in names if name.startswith("~"))
    for name in names:
        if name.startswith("~"):
            continue
        threads = _threads()
        called, _, argument = name.removeprefix("?").partition(" ")
        try:
            module, _, function = called.partition(":")
            # What a library that only saves time complains of while it is imported concerns no user.
            with _silent() if name.startswith("?") and not function else contextlib.nullcontext():
                imported = importlib.import_module(module)
            if function:
                getattr(imported, function)(*([argument] if argument else []))
        except Exception as error:
            if name.startswith("?"):
                continue
            return {"refused": f"cannot import {name}: {type(error).__name__}: {error}"}
        # Imported libraries take care of that themselves; what code of the user's starts does not.
        if argument and _has_more_threads(threads):
            # A forked child would lack these threads: the parent starts a server that does without this name.
            return {"leave_out": name}
    # Imported objects live as long as the process. Frozen, they are not visited by the garbage collector of a child,
    # which would write to their headers and copy every page that holds one.
    gc.collect()
    gc.freeze()
    return {"ready": os.getpid()}


def _fork(request: tuple[str, str, bytes], requests: int, replies: int, woken: int, waker: int) -> None:
    """Run one request in a child, and reply with its exit status."""
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        for number in (requests, replies, woken, waker):
            os.close(number)
        _run_child(request, parent)
    # Both sides call setpgid: the first one wins, and the group exists before anything may kill it.
    with contextlib.suppress(OSError):
        os.setpgid(pid, pid)
    _children.append(pid)
    _reply(replies, {"pid": pid})
    _reply(replies, {"status": _wait(pid, requests, woken)})
    _children.clear()


def _end_orphan(parent: int) -> None:
    """End this process and its child if its parent has ended.

    The kernel tells when the thread that started this process ends, which the parent may survive.
    """
    if os.getppid() != parent:
        for pid in _children:
            end_group(pid)
        os._exit(0)


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Send what is written to stderr nowhere, also by libraries that do not go through Python."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _threads() -> int:
    """Return the threads of this process as the kernel counts them; 1 where it does not tell."""
    try:
        return sum(1 for _ in Path("/proc/self/task").iterdir())
    except OSError:
        return 1


def _has_more_threads(count: int) -> bool:
    """Return whether this process has more threads than that, and keeps them."""
    for _ in range(20):
        if _threads() <= count:
            return False
        time.sleep(0.02)
    return True


def _reply(replies: int, message: dict[str, Any]) -> None:
    """Write one line of JSON to the parent; end if the parent is gone."""
    try:
        os.write(replies, json.dumps(message).encode() + b"\n")
    except BrokenPipeError:
        sys.exit(0)


def _wait(pid: int, requests: int, woken: int) -> int:
    """Return the exit status of a child.

    The parent sends nothing while a child runs, so a readable request pipe means that the parent is gone.
    """
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            end_group(pid)
            return status
        if _later:
            _import_later(1)
            continue
        readable, _, _ = select.select([requests, woken], [], [])
        if woken in readable:
            os.read(woken, 1024)
        elif requests in readable:
            end_group(pid)
            os._exit(0)


def end_group(pid: int) -> None:
    """Kill a child and every process that it started."""
    with contextlib.suppress(OSError):
        os.killpg(pid, signal.SIGKILL)


def _run_child(request: tuple[str, str, bytes], parent: int) -> NoReturn:
    """Run the job in the child, write its result to a file, and end the process.

    It ends with `os._exit`: a normal exit would run the atexit handlers that the server registered while importing.
    """
    try:
        os.setpgid(0, 0)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(_PARENT_ENDED, signal.SIG_DFL)
        _end_with_parent(signal.SIGKILL)
        # The parent may have died between fork and prctl; then no signal will come.
        if os.getppid() != parent:
            os._exit(1)
        _prefer_as_oom_victim()
        result, log, payload = request
        number = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.dup2(number, 1)
        os.dup2(number, 2)
        # A killed child flushes nothing. Line buffering keeps its last messages in the log.
        cast(TextIOWrapper, sys.stdout).reconfigure(line_buffering=True)
        faulthandler.enable(2)
        # The parent sends it before it ends a child that takes too long: the log then says where the child was.
        faulthandler.register(WHERE_ARE_YOU, 2, all_threads=False)
        with progress_to(_ProgressFile(Path(result).with_name(PROGRESS_FILE))):
            Path(result).write_text(json.dumps(_outcome(payload)), encoding="utf-8")
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(0)


def _outcome(payload: bytes) -> dict[str, Any]:
    """Run one phase of the job; return its value or its failure as JSON values."""
    try:
        job, phase, arguments = pickle.loads(payload)
        value = getattr(pickle.loads(job), phase)(*arguments)
        wanted: type[Any] = TrialMetrics if phase == "measure" else Mapping
        if not isinstance(value, wanted):
            return {"missing": f"{phase} returned {type(value).__name__}, not {wanted.__name__}"}
        plain = to_plain(value) if isinstance(value, TrialMetrics) else dict(cast(Any, value))
        json.dumps(plain)
        return {"value": plain}
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        text = traceback.format_exception_only(error)[-1].strip()
        refused = disk_refusal(error)
        if refused is not None:
            return {"not_saved": refused}
        return {"raised": text, "is_memory": isinstance(error, MemoryError) or "t allocate memory" in text}


# A child writes what `report_progress` says into this file of its folder; the sweep shows it.
PROGRESS_FILE = ".progress"
_WRITE_EVERY_S = 0.5


class _ProgressFile:
    """A display that writes steps to a file, not more often than somebody would read it."""

    def __init__(self, path: Path) -> None:
        self._path, self._written_at = path, -_WRITE_EVERY_S

    def __call__(self, step: str, share: float | None) -> None:
        now = time.monotonic()
        if now - self._written_at >= _WRITE_EVERY_S:
            self._written_at = now
            # Progress that cannot be written must not cost the result.
            with contextlib.suppress(OSError):
                write_whole(self._path, json.dumps([step, share]))


_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)


def disk_refusal(error: BaseException | None) -> str | None:
    """Return the message of a full or read-only disk if that is what an error comes from, else None.

    Libraries wrap such an error, or repeat only its text.

    >>> disk_refusal(OSError(errno.ENOSPC, "No space left on device", "/x")), disk_refusal(ValueError("3"))
    ("[Errno 28] No space left on device: '/x'", None)
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        is_known = isinstance(error, OSError) and error.errno in _DISK
        if is_known or any(os.strerror(number) in str(error) for number in _DISK):
            return str(error)
        error = error.__cause__ or error.__context__
    return None


def _end_with_parent(number: int) -> None:
    """Ask the kernel for a signal when the parent dies, or with 0 for none (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def _prefer_as_oom_victim() -> None:
    """Let the kernel kill this process, not the sweep, when memory runs out."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
