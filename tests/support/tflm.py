"""TFLM's own recording interpreter, from the package `tflite-micro`, in a process of its own."""

from __future__ import annotations

import multiprocessing
import os
import re
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

try:
    from tflite_micro.python.tflite_micro import runtime
except ImportError as error:
    raise ImportError("these tests need TFLM: pip install --no-deps --pre tflite-micro") from error


# A small model that comes with the package.
SINE = Path(runtime.__file__).with_name("sine_float.tflite")


class Recorded(NamedTuple):
    """What the interpreter reports; None where it could not be made with this arena."""

    total: int
    head: int
    tail: int


def recorded(path: str | Path, arena_bytes: int = 1 << 22) -> Recorded | None:
    """What TFLM allocates. An arena that is too small may end the process, so it is another one."""
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_record, args=(Path(path).read_bytes(), arena_bytes, send))
    process.start()
    send.close()
    try:
        text: str | None = receive.recv()
    except EOFError:
        text = None
    process.join()
    numbers = re.findall(r"Arena allocation \w+ (\d+) bytes", text or "")
    return Recorded(*map(int, numbers)) if numbers else None


def _record(model: bytes, arena_bytes: int, send: Any) -> None:
    with tempfile.TemporaryFile() as log:
        os.dup2(log.fileno(), 2)  # the allocations are printed there by C++
        try:
            runtime.Interpreter.from_bytes(model, arena_size=arena_bytes).print_allocations()
        finally:
            log.seek(0)
            send.send(log.read().decode())
