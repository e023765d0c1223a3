"""The process that child processes are forked from: it has imported what they need, and nothing has run in it.

Forking from it costs milliseconds where a new interpreter with torch takes seconds. It outlives no parent: when the
pipe from there closes, it ends the running child and itself.
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
import struct
import sys
import traceback
from collections.abc import Mapping
from io import TextIOWrapper
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, cast

from edge_opt._support.json import to_plain
from edge_opt.records.sweeps import TrialMetrics

_LENGTH = struct.Struct("!Q")
_PR_SET_PDEATHSIG = 1


def frame(content: bytes) -> bytes:
    """A message with its length in front.

    >>> frame(b"ab")[-3:]
    b'\\x02ab'
    """
    return _LENGTH.pack(len(content)) + content


def serve(preload: list[str]) -> None:
    """Fork a child for each request on stdin, one at a time, and tell its fate on stdout.

    `module:function` is also called. What has a question mark in front only saves time: where it fails, children go
    without.
    """
    requests = os.fdopen(os.dup(0), "rb", buffering=0)
    replies = os.dup(1)
    # What imports print must not be taken for a reply.
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    os.dup2(2, 1)
    woken, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(waker)
    for name in preload:
        try:
            module, _, function = name.removeprefix("?").partition(":")
            found = importlib.import_module(module)
            if function:
                getattr(found, function)()
        except Exception as error:
            if name.startswith("?"):
                continue
            _tell(replies, {"refused": f"cannot import {name}: {type(error).__name__}: {error}"})
            return
    # What is imported stays: no child is to search it for garbage, and copy its pages by doing so.
    gc.collect()
    gc.freeze()
    _tell(replies, {"ready": os.getpid()})
    while (request := _receive(requests)) is not None:
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            for number in (requests.fileno(), replies, woken, waker):
                os.close(number)
            _work(request, parent)
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)
        _tell(replies, {"pid": pid})
        _tell(replies, {"status": _wait(pid, requests.fileno(), woken)})


def _receive(stream: BinaryIO) -> bytes | None:
    header = _exactly(stream, _LENGTH.size)
    return None if header is None else _exactly(stream, _LENGTH.unpack(header)[0])


def _exactly(stream: BinaryIO, count: int) -> bytes | None:
    content = bytearray()
    while len(content) < count:
        part = stream.read(count - len(content))
        if not part:
            return None
        content += part
    return bytes(content)


def _tell(replies: int, message: dict[str, Any]) -> None:
    try:
        os.write(replies, json.dumps(message).encode() + b"\n")
    except BrokenPipeError:
        sys.exit(0)


def _wait(pid: int, requests: int, woken: int) -> int:
    """The exit status of a child. Nobody sends while it runs, so a readable pipe is a parent that is gone."""
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            end_group(pid)
            return status
        readable, _, _ = select.select([requests, woken], [], [])
        if woken in readable:
            os.read(woken, 1024)
        elif requests in readable:
            end_group(pid)
            sys.exit(0)


def end_group(pid: int) -> None:
    """End a child with whatever it has started."""
    with contextlib.suppress(OSError):
        os.killpg(pid, signal.SIGKILL)


def _work(request: bytes, parent: int) -> NoReturn:
    """Be the child: run the job, leave its result in a file, and go."""
    try:
        os.setpgid(0, 0)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        _die_with(parent)
        _be_first_to_go()
        result, log, payload = pickle.loads(request)
        number = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.dup2(number, 1)
        os.dup2(number, 2)
        # A child that is killed flushes nothing; line by line, its last words are in the log.
        cast(TextIOWrapper, sys.stdout).reconfigure(line_buffering=True)
        faulthandler.enable(2)
        Path(result).write_text(json.dumps(_outcome(payload)), encoding="utf-8")
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(0)


def _outcome(payload: bytes) -> dict[str, Any]:
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


_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)


def disk_refusal(error: BaseException | None) -> str | None:
    """What a disk said that takes no more, where that is what an error comes from; None where it is not.

    Libraries wrap such an error, or give its text alone.

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


def _die_with(parent: int) -> None:
    """Ask the kernel to end this process with its parent, where it can."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def _be_first_to_go() -> None:
    """When the machine runs out of memory, the kernel should take this process and not the sweep."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
