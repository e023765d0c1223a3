"""Measure on a board over ssh: copy files and one script there, run it, and read the result.

The OpenSSH client of this machine does the connecting, with its own configuration: keys, ports, jump hosts, checks of
host keys. It never asks for a password (BatchMode). Nothing of ours listens on a port, here or there.
"""

from __future__ import annotations

import io
import json
import shlex
import subprocess
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.resources import files as package_files
from pathlib import Path
from typing import Any

from edge_opt.errors import EdgeOptError, InvalidInput
from edge_opt.measuring.statistics import latency_of
from edge_opt.records.measurements import Latency

SCRIPT = "board_script.py"
ORDER, INPUTS, RESULT = "order.json", "inputs.npz", "result.json"
MODEL_SUFFIXES = (".onnx", ".tflite")
_MARK = "EDGE-OPT-RESULT "
# Seconds that connecting, copying and importing may take beside the measurement.
_OVERHEAD_S = 120.0
_SSH = ("ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=15", "-o", "ServerAliveInterval=15", "--")

# Runs on the board, in one line of `python3 -c`. A private folder receives the archive and is removed in any case; a
# broken connection is noticed at the latest when the result is written. The result has a mark in front, because the
# start files of a login shell may print something of their own.
_BOOTSTRAP = f"""
import json, os, shutil, signal, subprocess, sys, tarfile, tempfile
for number in (signal.SIGHUP, signal.SIGTERM):
    signal.signal(number, lambda *_: sys.exit(1))
folder = None
reply = {{"code": None, "result": None, "stderr": ""}}
try:
    folder = tempfile.mkdtemp(prefix="edge-opt-")
    with tarfile.open(fileobj=sys.stdin.buffer, mode="r|") as archive:
        archive.extractall(folder)
    limit = float(sys.argv[1]) or None
    done = subprocess.run([sys.executable, *sys.argv[2:]], cwd=folder, timeout=limit,
                          stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    reply["code"], reply["stderr"] = done.returncode, done.stderr.decode(errors="replace")[-2000:]
    path = os.path.join(folder, {RESULT!r})
    if os.path.exists(path):
        with open(path, encoding="utf-8") as file:
            reply["result"] = file.read()
except subprocess.TimeoutExpired:
    reply["timeout"] = True
except OSError as error:
    reply["disk"] = str(error)
finally:
    if folder:
        shutil.rmtree(folder, ignore_errors=True)
print({_MARK!r} + json.dumps(reply))
"""


class BoardUnavailable(EdgeOptError):
    """The board cannot be reached, or lacks what a measurement needs."""


@dataclass(frozen=True, slots=True)
class TimingOrder:
    """A request to time files on a board.

    Attributes:
        files: Names of the files. They take the same inputs and are timed interleaved, one block of each per round.
        sizes: Samples per call; each of these is timed.
        shapes: Shapes of generated inputs by name, where the file leaves a dimension open.
        threads: Threads of the runtime; 0 is all cores.
        min_time_s: Shortest time for each file at each size.
        max_time_s: Longest time.
    """

    files: tuple[str, ...]
    sizes: tuple[int, ...] = (1,)
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    threads: int = 1
    min_time_s: float = 1.0
    max_time_s: float = 5.0


@dataclass(frozen=True, slots=True)
class BoardTiming:
    """The latency of one file at one batch size, timed on a board."""

    file: str
    size: int
    latency: Latency


@dataclass(frozen=True, slots=True)
class BoardResult:
    """The measured times, and the machine.

    Attributes:
        machine: Name, processor, cores and runtime of the board.
        timings: Every file at every size.
        memory_bytes: Growth of resident memory while the first file runs its first size; None if not known.
    """

    machine: str
    timings: tuple[BoardTiming, ...]
    memory_bytes: int | None


@dataclass(frozen=True, slots=True)
class Board:
    """A machine that is reached over ssh.

    Attributes:
        host: As `ssh` takes it: a name of its configuration, HOST or USER@HOST.
        python: The Python that has numpy and the runtime; the path of one in a virtual environment, for instance.
        limit_s: Time limit of one request in seconds; None: no limit.
    """

    host: str
    python: str = "python3"
    limit_s: float | None = 600.0

    def check(self) -> str:
        """Connect once, and return a description of the machine."""
        return _describe(self._timed(TimingOrder(()), {}, b""))

    def time(self, order: TimingOrder, files: Mapping[str, bytes], inputs: bytes = b"") -> BoardResult:
        """Time files on the board.

        Args:
            order: What to time.
            files: The content of each file that the order names.
            inputs: Inputs as `pack_inputs` returns them; generated on the board where there are none.
        """
        unknown = [name for name in files if Path(name).name != name or not name.endswith(MODEL_SUFFIXES)]
        if unknown:
            raise InvalidInput(f"{unknown[0]!r} cannot be timed on a board; expected a file with {MODEL_SUFFIXES}")
        reply = self._timed(order, files, inputs)
        timings = tuple(
            BoardTiming(
                item["file"],
                item["size"],
                latency_of(item["wall_s"], item["cpu_s"], batch_size=item["size"], cores_of_others=item["busy_cores"]),
            )
            for item in reply["timings"]
        )
        return BoardResult(_describe(reply), timings, reply["memory_bytes"])

    def calibrate(self, threads: int | None = None, seconds: float = 110.0) -> bytes:
        """Calibrate the board with its own edge_opt and torch, and return the calibration file.

        Args:
            threads: Threads of torch there; default: its own number.
            seconds: CPU seconds it may take.
        """
        options = [] if threads is None else ["--threads", str(threads)]
        arguments = ["-m", "edge_opt.cli", "calibrate", "-o", RESULT, "--seconds", str(seconds), *options]
        reply = self._run({}, arguments, None)
        if reply["code"] or reply["result"] is None:
            lines = [line for line in reply["stderr"].splitlines() if line.strip()] or ["no message"]
            message = next((line for line in lines if line.startswith("error: ")), lines[-1]).removeprefix("error: ")
            raise BoardUnavailable(
                f"{self.host} cannot be calibrated: {message}; it needs edge-opt and torch in {self.python}"
            )
        return str(reply["result"]).encode()

    def _timed(self, order: TimingOrder, files: Mapping[str, bytes], inputs: bytes) -> dict[str, Any]:
        plain = {**asdict(order), "inputs": INPUTS if inputs else None}
        script = package_files("edge_opt.measuring").joinpath(SCRIPT).read_bytes()
        content = {**files, SCRIPT: script, ORDER: json.dumps(plain).encode(), **({INPUTS: inputs} if inputs else {})}
        reply = self._run(content, [SCRIPT, ORDER, RESULT], self.limit_s)
        if reply["result"] is None:
            lines = reply["stderr"].strip().splitlines() or ["no message"]
            code = reply["code"]
            ended = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
            raise ChildProcessError(f"the measurement on {self.host} ended with {ended}: {lines[-1]}")
        result: dict[str, Any] = json.loads(reply["result"])
        if result.get("install"):
            raise BoardUnavailable(
                f"{self.host}: {result['error']}; run there: {self.python} -m pip install {result['install']}"
            )
        if "error" in result:
            raise InvalidInput(f"{self.host}: {result['error']}")
        return result

    def _run(self, content: Mapping[str, bytes], arguments: Sequence[str], limit_s: float | None) -> dict[str, Any]:
        """Send files, run Python there with these arguments, and return the exit code and the result file."""
        command = shlex.join([self.python, "-c", _BOOTSTRAP, str(limit_s or 0), *arguments])
        wait_s = None if limit_s is None else limit_s + _OVERHEAD_S
        try:
            done = subprocess.run(
                [*_SSH, self.host, command], input=_archive(content), capture_output=True, timeout=wait_s, check=False
            )
        except FileNotFoundError as error:
            raise BoardUnavailable(
                "there is no OpenSSH client on this machine; install it, for instance: apt-get install openssh-client"
            ) from error
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"{self.host} did not answer within {wait_s:g} s") from None
        lines = done.stdout.decode(errors="replace").splitlines()
        marked = next((line for line in reversed(lines) if line.startswith(_MARK)), None)
        if marked is None:
            raise self._failure(done.returncode, done.stderr.decode(errors="replace"))
        reply: dict[str, Any] = json.loads(marked.removeprefix(_MARK))
        if "disk" in reply:
            raise BoardUnavailable(f"{self.host} cannot store the files: {reply['disk']}; free some space there")
        if reply.get("timeout"):
            raise TimeoutError(f"the measurement on {self.host} took longer than {limit_s:g} s")
        return reply

    def _failure(self, code: int, stderr: str) -> BoardUnavailable:
        """Explain why no result came back."""
        said = (stderr.strip().splitlines() or ["no message"])[-1]
        if code == 255:
            return BoardUnavailable(
                f"cannot connect to {self.host}: {said}; test it with `ssh -o BatchMode=yes {self.host} true`"
            )
        if code in (126, 127):
            return BoardUnavailable(
                f"{self.host} has no {self.python}; install Python there, or name one as HOST:PATH/TO/python"
            )
        return BoardUnavailable(f"nothing came back from {self.host} (exit code {code}): {said}")


def parse_board(address: str, limit_s: float | None = 600.0) -> Board:
    """Return the board at an address: HOST, USER@HOST, or either with `:PYTHON` for a Python of its own.

    >>> parse_board("pi@raspberrypi"), parse_board("pi@[::1]:venv/bin/python").python
    (Board(host='pi@raspberrypi', python='python3', limit_s=600.0), 'venv/bin/python')
    """
    if "://" in address:
        raise InvalidInput(f"{address!r} is not an ssh host; boards are reached over ssh: write USER@HOST")
    start = address.find("]") + 1
    host, _, python = address[start:].partition(":")
    host = (address[:start] + host).replace("[", "").replace("]", "")
    if not host or host.startswith("-") or not address.isprintable():
        raise InvalidInput(f"{address!r} is not an ssh host; write USER@HOST, or a name of your ssh configuration")
    return Board(host, python or "python3", limit_s)


def pack_inputs(arrays: Sequence[Any]) -> bytes:
    """Return arrays as one archive, in their order."""
    import numpy as np

    buffer = io.BytesIO()
    np.savez(buffer, **{f"{index:03d}": value for index, value in enumerate(arrays)})
    return buffer.getvalue()


def _archive(content: Mapping[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, data in content.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()


def _describe(reply: Mapping[str, Any]) -> str:
    machine = reply["machine"]
    cores = machine["cores"]
    parts = [machine["cpu"], f"{cores} core{'s' * (cores > 1)}", reply["runtime"]]
    return f"{machine['name']} ({', '.join(part for part in parts if part)})"
