"""Work that forward hands to other threads or processes: run in its own thread, where it can be, or refused."""

from __future__ import annotations

import concurrent.futures
import multiprocessing.process
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from edge_opt.errors import TraceFailed

_tracing = threading.local()
_lock = threading.Lock()
_installed: list[tuple[Any, str, Any]] = []
_users = 0
# They ask the system what machine this is, through a program.
_QUESTIONS = ("platform", "ctypes.util", "uuid", "_osx_support", "multiprocessing.resource_tracker")


class Handoffs:
    """What the forward of one trace gave away, in words."""

    def __init__(self) -> None:
        self.reasons: list[str] = []
        self._clocks = _clocks_of_others()

    def others_worked(self) -> bool:
        """Whether another thread ran meanwhile; where threads have no clocks, whether there is one."""
        now = _clocks_of_others()
        return any(self._clocks.get(thread) != clock or clock is None for thread, clock in now.items())

    def check(self) -> None:
        """Refuse a trace that did not see all of the forward."""
        if self.reasons:
            raise TraceFailed(
                f"forward {self.reasons[0]}; what runs there is not seen by the trace and would count as nothing. "
                "Call it in forward's own thread to profile the model"
            )


def _clocks_of_others() -> dict[int, float | None]:
    """The processor time of each other thread."""
    own = threading.get_ident()
    others = [thread.ident for thread in threading.enumerate() if thread.ident not in (None, own)]
    return {ident: _clock(ident) for ident in others if ident is not None}


def _clock(thread: int) -> float | None:
    try:
        return time.clock_gettime(time.pthread_getcpuclockid(thread))
    except (AttributeError, OSError):  # not on this system, or the thread has just ended
        return None


@contextmanager
def watched() -> Iterator[Handoffs]:
    """Notice work that this thread hands over meanwhile; what other threads do is no concern of ours."""
    outer = getattr(_tracing, "handoffs", None)
    _tracing.handoffs = found = Handoffs()
    _install()
    try:
        yield found
    finally:
        _uninstall()
        _tracing.handoffs = outer


def _install() -> None:
    global _users
    with _lock:
        _users += 1
        if _users > 1:
            return
        for owner, name, wrap in _PLACES:
            original = owner.__dict__[name]
            _installed.append((owner, name, original))
            setattr(owner, name, wrap(original))


def _uninstall() -> None:
    global _users
    with _lock:
        _users -= 1
        if not _users:
            while _installed:
                setattr(*_installed.pop())


def _submit(original: Callable[..., Any]) -> Callable[..., Any]:
    def submit(self: Any, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if getattr(_tracing, "handoffs", None) is None:
            return original(self, fn, *args, **kwargs)
        # In this thread, at once: the operators are recorded, and the caller gets a result that is there already.
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future

    return submit


class _Noticed(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes that an operator ran in a thread."""

    def __init__(self, handoffs: Handoffs) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.handoffs = handoffs

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.handoffs.reasons.append("computes in another thread (threading.Thread)")
        return func(*args, **(kwargs or {}))


def _start_thread(original: Callable[..., Any]) -> Callable[..., Any]:
    def start(self: threading.Thread) -> None:
        handoffs = getattr(_tracing, "handoffs", None)
        if handoffs is not None:
            run = self.run

            def noticed() -> None:
                with _Noticed(handoffs):
                    run()

            self.run = noticed  # type: ignore[method-assign]
        original(self)

    return start


def _start_process(original: Callable[..., Any]) -> Callable[..., Any]:
    def start(self: Any, *args: Any, **kwargs: Any) -> Any:
        handoffs = getattr(_tracing, "handoffs", None)
        callers = [frame.f_globals.get("__name__") for frame in _frames()] if handoffs is not None else []
        if handoffs is not None and not any(name in _QUESTIONS for name in callers):
            handoffs.reasons.append("hands work to another process")
        return original(self, *args, **kwargs)

    return start


def _frames(most: int = 12) -> Iterator[Any]:
    frame: Any = sys._getframe(2)
    while frame is not None and most:
        yield frame
        frame, most = frame.f_back, most - 1


_PLACES: tuple[tuple[Any, str, Callable[[Callable[..., Any]], Callable[..., Any]]], ...] = (
    (concurrent.futures.ThreadPoolExecutor, "submit", _submit),
    (threading.Thread, "start", _start_thread),
    (concurrent.futures.ProcessPoolExecutor, "submit", _start_process),
    (multiprocessing.process.BaseProcess, "start", _start_process),
    (subprocess.Popen, "__init__", _start_process),
)
