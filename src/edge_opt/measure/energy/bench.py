"""The bench: everything a meter may draw on, so that a recording can stand in for each part of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge_opt.errors import MeterFailed
from edge_opt.records import ModelProfile


@contextmanager
def in_thread(tick: Callable[[], None], period_s: float) -> Iterator[None]:
    """Call `tick` every `period_s` from a thread of its own until the block ends."""
    is_over = threading.Event()

    def loop() -> None:
        while not is_over.wait(period_s):
            tick()

    thread = threading.Thread(target=loop, name="edge_opt-power-sampler", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


@dataclass(frozen=True, slots=True)
class Bench:
    """The machine's files, NVML and time, and what the caller knows: watts and a profile.

    `gpu` is an index in NVML's order or a UUID; `nvml` is the module `pynvml`, imported when it is None.
    """

    root: Path = Path("/")
    gpu: int | str = 0
    nvml: Any = None
    power_watts: float | None = None
    profile: ModelProfile | None = None
    now: Callable[[], float] = time.perf_counter
    sleep: Callable[[float], None] = time.sleep
    background: Callable[[Callable[[], None], float], AbstractContextManager[None]] = in_thread
    read: Callable[[Path], str] = Path.read_text

    def number(self, path: Path) -> int:
        """The whole number in a sensor's file."""
        try:
            return int(self.read(path))
        except (OSError, ValueError) as error:
            raise MeterFailed(f"{path} cannot be read ({error})") from error

    def text(self, path: Path) -> str | None:
        """The stripped text of a sensor's file, None where there is none."""
        try:
            return self.read(path).strip()
        except OSError:
            return None
