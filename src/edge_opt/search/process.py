"""Half a job in a process of its own, within limits."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pickle
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Literal, Protocol, cast

from edge_opt import units
from edge_opt._support.extras import import_optional
from edge_opt.errors import EdgeOptError, InvalidInput, NotSaved
from edge_opt.records.sweeps import Candidate, Failure, TrialMetrics
from edge_opt.search.nursery import end_group, frame

Phase = Literal["build", "measure", "compare"]


class Job(Protocol):
    """The two halves of trying a candidate. Both run in processes of their own, so a job must be picklable.

    What a job refers to by path must be there on every machine that builds; small files are better carried as bytes.
    """

    def build(self, candidate: Candidate, folder: Path) -> Mapping[str, Any]:
        """Make the candidate: prune, fine-tune, convert, find its accuracy. Files go to `folder`.

        May run on any machine, beside other builds. The result is what JSON can hold; `measure` gets it back.
        """
        ...

    def measure(self, candidate: Candidate, folder: Path, built: Mapping[str, Any]) -> TrialMetrics:
        """Time what was built; runs on the machine of the sweep, alone."""
        ...


@dataclass(frozen=True, slots=True)
class Limits:
    """What one half of a job may use; None is no limit. Memory is resident, of the process and its children."""

    memory_bytes: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("memory", self.memory_bytes), ("time", self.seconds)):
            if value is not None and not value > 0:
                raise InvalidInput(f"the {name} limit is {value}; expected a number above 0, or None for no limit")


def packed(job: object) -> bytes:
    """The job as other processes can receive it, or the reason why they cannot."""
    kind = type(job)
    if kind.__module__ == "__main__" or "<locals>" in kind.__qualname__:
        raise InvalidInput(
            f"the job's class {kind.__qualname__} cannot be imported by another process; "
            "define it at the top of a module, not in the script that is run or in a function"
        )
    try:
        return pickle.dumps(job)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise InvalidInput(f"the job {kind.__qualname__} cannot be sent to another process: {error}") from error


# A look costs a walk over the process table; while something is timed, it is taken less often.
_LOOK_EVERY_S = {"build": 0.1, "measure": 0.5, "compare": 0.5}
_PATIENCE_S = 2.0
_START = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from edge_opt.search.nursery import serve
serve(json.loads(sys.argv[2]))
"""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of half a job: its value, or a failure with its reason, and whether it was killed from outside."""

    value: Any
    failure: Failure | None
    reason: str
    seconds: float
    was_killed: bool = False


class _Nursery:
    """The process that children are forked from, and what it imports; it listens once it has said that it is ready."""

    def __init__(self, preload: Sequence[str]) -> None:
        self.preload = tuple(preload)
        self.is_ready = False
        # A session of its own: Ctrl-C at the terminal is for the sweep, which ends its children itself.
        self.process = subprocess.Popen(
            [sys.executable, "-c", _START, json.dumps([str(path) for path in sys.path]), json.dumps(self.preload)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )

    def serves(self, preload: Sequence[str]) -> bool:
        """Whether it runs and imports what is asked for; names with a question mark in front only save time."""
        return self.process.poll() is None and {name for name in preload if name[:1] != "?"} <= {*self.preload}

    def end(self) -> None:
        with contextlib.suppress(OSError):
            _pipe(self.process.stdin).close()
        try:
            self.process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            # It is still importing, and does not listen yet.
            self.process.kill()
            self.process.wait()
        _pipe(self.process.stdout).close()


# Those that wait for a sweep; None outside of `nurseries_kept`.
_waiting: list[_Nursery] | None = None


@contextlib.contextmanager
def nurseries_kept() -> Iterator[None]:
    """Inside, sweeps fork from one process one after the other, and it may be begun before the first needs it."""
    global _waiting
    if _waiting is not None:
        yield
        return
    _waiting = []
    try:
        yield
    finally:
        waiting, _waiting = _waiting, None
        for nursery in waiting:
            nursery.end()


def begin_nursery(preload: Sequence[str]) -> None:
    """Let a process import what the next sweep needs, while this one does something else.

    Args:
        preload: As for `Isolation`. Only inside of `nurseries_kept`, and where none waits that would do.
    """
    if _waiting is not None and hasattr(os, "fork") and not any(item.serves(preload) for item in _waiting):
        _waiting.append(_Nursery(preload))


def _taken(preload: Sequence[str]) -> _Nursery:
    """One that waits and would do, or a new one."""
    fitting = [item for item in _waiting or () if item.serves(preload)]
    if _waiting is None or not fitting:
        return _Nursery(preload)
    _waiting.remove(fitting[0])
    return fitting[0]


class Isolation:
    """Runs halves of jobs, each in a fresh process that has `preload` imported already. One at a time."""

    def __init__(self, preload: Sequence[str] = ()) -> None:
        if not hasattr(os, "fork"):
            raise InvalidInput("sweeps need a system that can fork a process: Linux, macOS or WSL")
        self._preload = list(preload)
        self._nursery: _Nursery | None = None

    def __enter__(self) -> Isolation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None and _waiting is not None and self._nursery is not None:
            _waiting.append(self._nursery)
            self._nursery = None
        self.close()

    def close(self) -> None:
        """End whatever runs. The next run starts anew."""
        nursery, self._nursery = self._nursery, None
        if nursery is not None:
            nursery.end()

    def run(self, job: bytes, phase: Phase, arguments: tuple[Any, ...], folder: Path, limits: Limits) -> Outcome:
        """Half a packed job: `job.build(*arguments)` or `job.measure(*arguments)`. What it prints goes to a log."""
        if limits.memory_bytes is not None:
            _psutil()
        folder.mkdir(parents=True, exist_ok=True)
        result = folder / f".{phase}.json"
        result.unlink(missing_ok=True)
        log = folder / f"{phase}.log"
        log.unlink(missing_ok=True)
        begun = time.monotonic()
        payload = pickle.dumps((job, phase, arguments))
        ending = self._watch(pickle.dumps((str(result), str(log), payload)), phase, limits)
        value, failure, reason = ending if ending[1] is not None else _read(result, phase)
        result.unlink(missing_ok=True)
        if failure == "crashed":
            # A child that cannot even leave its result looks like one that crashed.
            check_space(folder)
            reason = f"{reason}; see {log.name}"
        was_killed = failure == "crashed" and (_KILLED in reason or _LOST in reason)
        return Outcome(value, failure, reason, time.monotonic() - begun, was_killed)

    def _watch(self, request: bytes, phase: Phase, limits: Limits) -> tuple[None, Failure | None, str]:
        """How the child ended: None where it ended by itself and in order."""
        nursery = self._started().process
        begun = time.monotonic()
        pid = None
        try:
            _send(_pipe(nursery.stdin), frame(request))
            pid = int(self._reply()["pid"])
            ending: tuple[None, Failure | None, str] = (None, None, "")
            while not select.select([_pipe(nursery.stdout)], [], [], _LOOK_EVERY_S[phase])[0]:
                if ending[1] is None:
                    ending = _beyond(limits, phase, pid, time.monotonic() - begun)
                    if ending[1] is not None:
                        end_group(pid)
            code = os.waitstatus_to_exitcode(int(self._reply()["status"]))
        except (OSError, _Gone):
            nursery.kill()
            self.close()
            if pid is not None:
                # The kernel ends the child with its nursery; what the child had started is left to us.
                end_group(pid)
            return None, "crashed", f"the process that {phase}s are forked from {_LOST}"
        except BaseException:
            self.close()
            raise
        return ending if ending[1] is not None or code == 0 else (None, "crashed", f"{phase} was {_ended_by(code)}")

    def _started(self) -> _Nursery:
        if self._nursery is not None and self._nursery.process.poll() is None:
            return self._nursery
        self.close()
        self._nursery = nursery = _taken(self._preload)
        if nursery.is_ready:
            return nursery
        try:
            reply = self._reply()
        except _Gone:
            self.close()
            raise EdgeOptError(f"the process that is to import {', '.join(self._preload)} ended at once") from None
        except BaseException:
            self.close()
            raise
        if "refused" in reply:
            self.close()
            raise InvalidInput(f"the job cannot run in a process of its own: {reply['refused']}")
        nursery.is_ready = True
        return nursery

    def _reply(self) -> dict[str, Any]:
        line = _pipe(cast(_Nursery, self._nursery).process.stdout).readline()
        if not line:
            raise _Gone
        return cast("dict[str, Any]", json.loads(line))


class _Gone(Exception):
    """The process at the other end of the pipe has ended."""


def _pipe(stream: IO[bytes] | None) -> IO[bytes]:
    return cast("IO[bytes]", stream)


def _send(stream: IO[bytes], content: bytes) -> None:
    """Write all of it; an unbuffered pipe may take less at a time."""
    rest = memoryview(content)
    while rest:
        rest = rest[stream.write(rest) :]


def _beyond(limits: Limits, phase: Phase, pid: int, seconds: float) -> tuple[None, Failure | None, str]:
    if limits.seconds is not None and seconds > limits.seconds:
        return None, "timed out", f"{phase} took longer than the limit of {limits.seconds:g} s"
    if limits.memory_bytes is not None and resident_bytes(pid) > limits.memory_bytes:
        limit = units.size(limits.memory_bytes)
        return None, "out of memory", f"{phase} used more memory than the limit of {limit}"
    return None, None, ""


def resident_bytes(pid: int) -> int:
    """Memory that a process and its children hold; 0 once it is gone.

    >>> resident_bytes(os.getpid()) > 2**20
    True
    """
    psutil = _psutil()
    total = 0
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for member in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                total += member.memory_info().rss
    return total


def _psutil() -> Any:
    return import_optional("psutil", "a memory limit needs", "run")


_LOST = "was ended from outside"
_KILLED = "ended by SIGKILL, which the sweep did not send"


def _ended_by(code: int) -> str:
    if code == -signal.SIGKILL:
        return f"{_KILLED}; the kernel does that when memory runs out"
    return f"ended by {signal.Signals(-code).name}" if code < 0 else f"over with exit code {code} and no result"


def _read(result: Path, phase: Phase) -> tuple[Any, Failure | None, str]:
    """What a child left behind."""
    try:
        outcome = json.loads(result.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None, "crashed", f"{phase} was over without a result"
    if "not_saved" in outcome:
        raise _no_room(result.parent, outcome["not_saved"])
    if "missing" in outcome:
        return None, "no result", outcome["missing"]
    if "raised" in outcome:
        return None, "out of memory" if outcome["is_memory"] else "raised", f"{phase}: {outcome['raised']}"
    return outcome["value"], None, ""


# More than what a child leaves as its result and in its log.
_PROBE = bytes(64 * 1024)


def check_space(folder: Path) -> None:
    """Refuse a folder whose disk takes no more: that is no candidate's fault, and must not become its row."""
    probe = folder / ".probe"
    try:
        probe.write_bytes(_PROBE)
    except OSError as error:
        if error.errno != errno.ENOENT:
            raise _no_room(folder, str(error)) from error
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()


def _no_room(folder: Path, said: str) -> NotSaved:
    return NotSaved(
        f"cannot write to {folder}: {said}; free some space or allow writing there, and run again to go on: "
        "what was finished is kept"
    )
