"""Run one phase of a job in a process of its own, within limits of time and memory."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pickle
import re
import select
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import IO, Any, Literal, Protocol, cast

from edge_opt import units
from edge_opt._support.extras import import_optional
from edge_opt._support.progress import report_progress
from edge_opt.errors import EdgeOptError, InvalidInput, NotSaved, first_line
from edge_opt.records.fields import field, record
from edge_opt.records.sweeps import Candidate, Failure, TrialMetrics
from edge_opt.search.fork_server import PROGRESS_FILE, WHERE_ARE_YOU, end_group

# train, evaluate, screen, convert and probe concern the baseline; the others a candidate, or several in "compare".
Phase = Literal["train", "evaluate", "screen", "convert", "build", "measure", "compare", "score", "probe"]


class Job(Protocol):
    """The two phases of trying a candidate. Both run in processes of their own, so a job must be picklable.

    A path in a job must exist on every machine that builds; small files are better carried as bytes.
    """

    def build(self, candidate: Candidate, folder: Path) -> Mapping[str, Any]:
        """Make the candidate: prune, fine-tune, convert, score. Files go to `folder`.

        May run on any machine, beside other builds. Returns JSON values, which `measure` receives.
        """
        ...

    def measure(self, candidate: Candidate, folder: Path, built: Mapping[str, Any]) -> TrialMetrics:
        """Time what was built, on the machine of the sweep, with nothing of ours beside it."""
        ...


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one phase; None: no limit. Memory is resident, of the process and its children."""

    memory_bytes: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("memory", self.memory_bytes), ("time", self.seconds)):
            if value is not None and not value > 0:
                raise InvalidInput(f"the {name} limit is {value}; expected a number above 0, or None for no limit")


def pickle_job(job: object) -> bytes:
    """Return the job as other processes receive it; refuse one that they could not load."""
    kind = type(job)
    if kind.__module__ == "__main__" or "<locals>" in kind.__qualname__:
        raise InvalidInput(f"other processes cannot import {kind.__qualname__}; define it at the top of a module")
    try:
        return pickle.dumps(job)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise InvalidInput(f"the job {kind.__qualname__} cannot be sent to another process: {error}") from error


# Reading the memory of a process walks the process table, which disturbs a measurement. It is done less often then.
_POLL_EVERY_S = {"measure": 0.5, "compare": 0.5}
_POLL_BUILDS_EVERY_S = 0.1
_END_WITHIN_S = 2.0
# The kernel ends the server with the sweep while it imports, when it does not read its pipe yet: from before the first
# slow import. Then `serve` asks for a signal instead: the kernel also acts at the end of the thread that started it.
# `-c` looks for modules in the current folder first, where others may be able to write, such as /tmp.
_START = """
import sys
sys.path[:] = filter(None, sys.path)
import ctypes, json, os, signal
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != int(sys.argv[3]):
    sys.exit()
sys.path[:] = json.loads(sys.argv[1])
from edge_opt.search.fork_server import serve
serve(json.loads(sys.argv[2]))
"""


@record
class Outcome:
    """The result of one phase."""

    value: Any = field("What it returned; None after a failure.", default=None)
    failure: Failure | None = field("The kind of failure; None where it succeeded.", default=None)
    reason: str = field("The failure in one sentence.", default="")
    seconds: float = field("Wall time.", default=0.0)
    was_killed: bool = field("Whether it was killed from outside: another attempt may succeed.", default=False)


class _ServerEnded(Exception):
    """The fork server has ended."""


class _StartsThreads(Exception):
    """What a fork server was to prepare starts threads, which its children would lack."""


class _ServerProcess:
    """A running fork server. It accepts requests once it has replied that it is ready."""

    def __init__(self, preload: Sequence[str]) -> None:
        self._preload = [*preload]
        self._unready = 1  # replies to requests for imports that were not read yet
        arguments = [json.dumps([str(path) for path in sys.path]), json.dumps(self._preload), str(os.getpid())]
        # A session of its own: Ctrl-C at the terminal is for the sweep, which ends its children itself.
        self.process = subprocess.Popen(
            [sys.executable, "-c", _START, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        self._requests = cast("IO[bytes]", self.process.stdin)
        self.replies = cast("IO[bytes]", self.process.stdout)

    def add(self, preload: Sequence[str]) -> None:
        """Let it import what it has not yet; of data that functions load, it holds one sweep's only."""
        holds_data = any(" " in name for name in self._preload)
        known = {*self._preload, *_left_out}
        missing = [name for name in preload if name not in known and not (holds_data and " " in name)]
        if missing:
            self._preload += missing
            self._unready += 1
            # Whether it has ended is seen where its reply is waited for.
            with contextlib.suppress(OSError):
                self.send(pickle.dumps([[str(path) for path in sys.path], missing]))

    def wait_until_ready(self) -> None:
        """Wait until everything is imported; refuse what could not be."""
        while self._unready:
            try:
                reply = self.reply()
            except _ServerEnded:
                raise EdgeOptError(f"the process that is to import {', '.join(self._preload)} ended at once") from None
            if "leave_out" in reply:
                raise _StartsThreads(reply["leave_out"])
            if "refused" in reply:
                raise InvalidInput(f"the job cannot run in a process of its own: {reply['refused']}")
            self._unready -= 1

    def send(self, content: bytes) -> None:
        """Write all of a request; an unbuffered pipe may take less at a time."""
        rest = memoryview(content)
        while rest:
            rest = rest[self._requests.write(rest) :]

    def reply(self) -> dict[str, Any]:
        """Read one reply."""
        line = self.replies.readline()
        if not line:
            raise _ServerEnded
        return cast("dict[str, Any]", json.loads(line))

    def end(self) -> None:
        with contextlib.suppress(OSError):
            self._requests.close()
        if self._unready:
            # It is importing, and does not read its requests.
            self.process.kill()
        try:
            self.process.wait(_END_WITHIN_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.replies.close()


# What starts threads, so that no fork server prepares it again.
_left_out: set[str] = set()
# Fork servers that wait for the next sweep; None outside of `keep_fork_servers`.
_waiting: list[_ServerProcess] | None = None
_waiting_lock = threading.Lock()


@contextlib.contextmanager
def keep_fork_servers(*preload: str) -> Iterator[None]:
    """Keep fork servers from one sweep to the next inside; end them afterwards.

    With names, one starts at once and imports them while this process imports the same and reads data.
    """
    global _waiting
    if _waiting is not None:
        yield
        return
    _waiting = [_ServerProcess(preload)] if preload and hasattr(os, "fork") else []
    try:
        yield
    finally:
        servers, _waiting = _waiting, None
        for server in servers:
            server.end()


class Isolation:
    """Runs phases of jobs one at a time, each in a fresh process that has `preload` imported already."""

    def __init__(self, preload: Sequence[str] = ()) -> None:
        if not hasattr(os, "fork"):
            raise InvalidInput("sweeps need a system that can fork a process: Linux, macOS or WSL")
        self._preload = list(preload)
        self._server: _ServerProcess | None = None

    def __enter__(self) -> Isolation:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None and _waiting is not None and self._server is not None:
            _waiting.append(self._server)
            self._server = None
        self.close()

    def close(self) -> None:
        """End whatever runs. The next run starts a new fork server."""
        server, self._server = self._server, None
        if server is not None:
            server.end()

    def interrupt(self) -> None:
        """Kill what runs, from another thread; the thread that waits for it gets an outcome "crashed".

        Only the process is killed here. Closing its pipes would pull them away under the thread that reads them.
        """
        server = self._server  # the other thread may set it to None at any moment
        if server is not None:
            server.process.kill()

    def run(self, job: bytes, phase: Phase, arguments: tuple[Any, ...], folder: Path, limits: Limits) -> Outcome:
        """Run `job.build(*arguments)` or another phase of a pickled job. What it prints goes to a log in `folder`."""
        if limits.memory_bytes is not None:
            _psutil()
        folder.mkdir(parents=True, exist_ok=True)
        result, log, progress = (folder / name for name in (f".{phase}.json", f"{phase}.log", PROGRESS_FILE))
        for file in (result, log, progress):
            file.unlink(missing_ok=True)
        begun = time.monotonic()
        needs_all = phase not in ("train", "evaluate")
        request = pickle.dumps((str(result), str(log), pickle.dumps((job, phase, arguments)), needs_all))
        outcome = self._watch(request, phase, limits, progress, log) or _read_result(result, phase)
        for file in (result, progress):
            file.unlink(missing_ok=True)
        if outcome.failure == "crashed":
            # A child that cannot even write its result looks like one that crashed.
            check_space(folder)
            outcome = replace(outcome, reason=f"{outcome.reason}; see {log.name}")
        return replace(outcome, seconds=time.monotonic() - begun)

    def _watch(self, request: bytes, phase: Phase, limits: Limits, progress: Path, log: Path) -> Outcome | None:
        """Wait for the child; return how it failed, or None where it ended by itself with exit code 0."""
        server = self._started()
        begun = time.monotonic()
        pid = None
        try:
            server.send(request)
            pid = int(server.reply()["pid"])
            ending: Outcome | None = None
            poll_s = _POLL_EVERY_S.get(phase, _POLL_BUILDS_EVERY_S)
            while not select.select([server.replies], [], [], poll_s)[0]:
                with contextlib.suppress(OSError, ValueError):
                    report_progress(*json.loads(progress.read_text(encoding="utf-8")))
                if ending is None:
                    ending = _beyond(limits, phase, pid, time.monotonic() - begun)
                    if ending is not None:
                        if ending.failure == "timed out":
                            ending = replace(ending, reason=ending.reason + _position(pid, log))
                        end_group(pid)
            code = os.waitstatus_to_exitcode(int(server.reply()["status"]))
        except (OSError, _ServerEnded):
            server.process.kill()
            self.close()
            if pid is not None:
                # The kernel kills the child with its server; processes that the child started are left to us.
                end_group(pid)
            reason = f"the process that {phase}s are forked from was ended from outside"
            return Outcome(failure="crashed", reason=reason, was_killed=True)
        except BaseException:
            self.close()
            raise
        if ending is not None or code == 0:
            return ending
        if code == -signal.SIGKILL:
            how = "ended by SIGKILL, which the sweep did not send; the kernel does that when memory runs out"
        else:
            how = f"ended by {signal.Signals(-code).name}" if code < 0 else f"over with exit code {code} and no result"
        return Outcome(failure="crashed", reason=f"{phase} was {how}", was_killed=code == -signal.SIGKILL)

    def _started(self) -> _ServerProcess:
        """Return a fork server that accepts requests and has our modules: ours, one that waits, or a new one."""
        if self._server is not None and self._server.process.poll() is None:
            return self._server
        self.close()
        with _waiting_lock:
            waiting = next((server for server in _waiting or () if server.process.poll() is None), None)
            if waiting is not None:
                cast("list[_ServerProcess]", _waiting).remove(waiting)
        self._server = waiting or _ServerProcess(self._preload)
        try:
            self._server.add(self._preload)
            self._server.wait_until_ready()
        except _StartsThreads as error:
            self.close()
            self._preload.remove(str(error))
            _left_out.add(str(error))
            return self._started()
        except BaseException:
            self.close()
            raise
        return self._server


def _beyond(limits: Limits, phase: Phase, pid: int, seconds: float) -> Outcome | None:
    """Return the failure of a phase that is beyond its limits, else None."""
    if limits.seconds is not None and seconds > limits.seconds:
        return Outcome(None, "timed out", f"{phase} took longer than the limit of {limits.seconds:g} s")
    if limits.memory_bytes is not None and resident_bytes(pid) > limits.memory_bytes:
        limit = units.size(limits.memory_bytes)
        return Outcome(None, "out of memory", f"{phase} used more memory than the limit of {limit}")
    return None


_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>\S+)')
_NOT_THE_USERS = (str(Path(__file__).parents[1]), sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"))


def _position(pid: int, log: Path) -> str:
    """Return where in the user's code a child is, from the traceback that it writes to its log when asked; "" if none.

    faulthandler writes it inside the signal handler, so it also works for a child that hangs in compiled code.
    """
    with contextlib.suppress(OSError):
        os.kill(pid, WHERE_ARE_YOU)
        time.sleep(0.2)
        for frame in _FRAME.finditer(log.read_text(encoding="utf-8", errors="replace")):
            if not frame["file"].startswith((*_NOT_THE_USERS, "<")):
                return f", in {frame['name']} ({Path(frame['file']).name}, line {frame['line']})"
    return ""


class _TimeIsUp(BaseException):
    """Raised by the timer. Not an Exception, which code of the user may catch."""


@contextlib.contextmanager
def limit_user_code(seconds: float | None, what: str) -> Iterator[None]:
    """Interrupt code of the user that takes longer than the limit, and refuse what it raises in one sentence."""
    try:
        with _time_limit(seconds, what):
            yield
    except EdgeOptError:
        raise
    except Exception as error:
        raise InvalidInput(f"{what} raised {first_line(error)}") from error


@contextlib.contextmanager
def _time_limit(seconds: float | None, what: str) -> Iterator[None]:
    """Interrupt code of the user that runs in this process and takes longer than the limit.

    A signal reaches Python code, sleeps and locks, not a loop inside compiled code; and the main thread only, so
    elsewhere there is no limit.
    """
    if seconds is None or threading.current_thread() is not threading.main_thread():
        yield
        return

    def raise_at(_: int, frame: FrameType | None) -> None:
        while frame is not None and frame.f_code.co_filename.startswith((*_NOT_THE_USERS, "<")):
            frame = frame.f_back
        where = "" if frame is None else f", in {frame.f_code.co_name} (line {frame.f_lineno})"
        raise _TimeIsUp(f"{what} took longer than time_limit_s, {seconds:g} s{where}")

    former = signal.signal(signal.SIGALRM, raise_at)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    except _TimeIsUp as error:
        raise InvalidInput(f"{error}; end it sooner, or raise time_limit_s") from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)


def resident_bytes(pid: int) -> int:
    """Return the memory that a process and its children hold; 0 once it is gone.

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


def _read_result(result: Path, phase: Phase) -> Outcome:
    """Read what a child has written."""
    try:
        written = json.loads(result.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return Outcome(None, "crashed", f"{phase} was over without a result")
    if "not_saved" in written:
        raise _no_space(result.parent, written["not_saved"])
    if "missing" in written:
        return Outcome(None, "no result", written["missing"])
    if "raised" in written:
        failure: Failure = "out of memory" if written["is_memory"] else "raised"
        return Outcome(None, failure, f"{phase}: {written['raised']}")
    return Outcome(written["value"])


# More than a child writes as its result and to its log.
_PROBE = bytes(64 * 1024)


def check_space(folder: Path) -> None:
    """Refuse a folder on a full disk: that is not the fault of a candidate, and must not become its row."""
    probe = folder / ".probe"
    try:
        probe.write_bytes(_PROBE)
    except OSError as error:
        if error.errno != errno.ENOENT:
            raise _no_space(folder, str(error)) from error
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()


def _no_space(folder: Path, message: str) -> NotSaved:
    problem = f"cannot write to {folder}: {message}; free some space or allow writing there"
    return NotSaved(f"{problem}, and run again to continue: finished candidates are kept")
