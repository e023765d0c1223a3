"""A machine for the tests of energy meters: recorded sensor files, and a clock that moves only when work is done."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edge_opt.measuring import energy
from edge_opt.records.measurements import Energy, Latency, Refusal

RECORDINGS = Path(__file__).parents[1] / "recordings" / "energy"


class Replay:
    """Sensor files of a recording below `root`.

    A call of `run` takes `forward_s` under `load`, a `sleep` takes its time in `idle`. Both are by file: a counter of
    µJ advances by that many watts, any other file shows the number itself. At `lost_at_s` the file `lost` goes away.
    """

    def __init__(self, root: Path, recording: str | None = None, forward_s: float = 0.01) -> None:
        self.root = root
        self.forward_s = forward_s
        self.load: dict[str, float] = {}
        self.idle: dict[str, float] = {}
        self.lost: str | None = None
        self.lost_at_s = 0.0
        self.now_s = 100.0
        self.runs = 0
        self.ticks: list[tuple[Callable[[], None], float]] = []
        self._fractions: dict[str, float] = {}
        if recording:
            for name, text in json.loads((RECORDINGS / f"{recording}.json").read_text("utf-8"))["files"].items():
                path = root / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(f"{text}\n")

    def run(self) -> None:
        self.runs += 1
        self._pass(self.forward_s, self.load)

    def sleep(self, seconds: float) -> None:
        self._pass(seconds, self.idle)

    def now(self) -> float:
        return self.now_s

    @contextmanager
    def background(self, tick: Callable[[], None], period_s: float) -> Iterator[None]:
        entry = (tick, period_s)
        self.ticks.append(entry)
        try:
            yield
        finally:
            self.ticks.remove(entry)

    def _pass(self, seconds: float, powers: dict[str, float]) -> None:
        end_s = self.now_s + seconds
        period_s = min((period for _, period in self.ticks), default=seconds)
        while self.now_s < end_s - 1e-12:
            step_s = min(period_s, end_s - self.now_s)
            self.now_s += step_s
            for name, watts in powers.items():
                self._write(name, watts, step_s)
            if self.lost is not None and self.now_s >= self.lost_at_s:
                (self.root / self.lost).unlink(missing_ok=True)
            for tick, _ in self.ticks:
                tick()

    def _write(self, name: str, watts: float, seconds: float) -> None:
        path = self.root / name
        if not path.exists():
            return
        if path.name != "energy_uj":
            path.write_text(f"{watts}\n")
            return
        limit_uj = int((path.parent / "max_energy_range_uj").read_text())
        exact_uj = int(path.read_text()) + self._fractions.get(name, 0.0) + watts * seconds * 1e6
        self._fractions[name] = exact_uj % 1
        path.write_text(f"{int(exact_uj) % limit_uj}\n")

    @contextmanager
    def in_place(self, nvml: Any = None) -> Iterator[None]:
        """Let the meters read this instead of the real machine."""
        with pytest.MonkeyPatch.context() as patches:
            patches.setattr(energy, "_ROOT", self.root)
            patches.setattr(energy, "time", SimpleNamespace(perf_counter=self.now, sleep=self.sleep))
            patches.setattr(energy, "in_thread", self.background)
            if nvml is not None:
                patches.setattr(energy, "import_module", lambda _: nvml)
            yield

    def metered(
        self, run: Callable[[], object], latency: Latency, nvml: Any = None, **options: Any
    ) -> tuple[Energy | None, tuple[Refusal, ...]]:
        """Return what `measure_energy` says of this machine."""
        with self.in_place(nvml):
            return energy.measure_energy(run, latency, **options)


class NvmlError(Exception):
    """What a recorded NVML raises."""


class RecordedNvml:
    """The part of `pynvml` that the meter calls, on a replayed GPU that draws `watts`.

    It answers only between nvmlInit and nvmlShutdown, as the real one does.
    """

    NVMLError = NvmlError

    def __init__(self, machine: Replay, watts: float, has_counter: bool = True, has_power: bool = True) -> None:
        self.machine = machine
        self.watts = watts
        self.has_counter = has_counter
        self.has_power = has_power
        self.sessions = 0
        self.has_driver = True
        self.lost_at_s = float("inf")
        self.asked: list[int | str] = []

    def nvmlInit(self) -> None:
        if not self.has_driver:
            raise NvmlError("Driver Not Loaded")
        self.sessions += 1

    def nvmlShutdown(self) -> None:
        self.sessions -= 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        self.asked.append(index)
        if index > 1:
            raise NvmlError("Invalid Argument")
        return "handle"

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        self.asked.append(uuid)
        return "handle"

    def nvmlDeviceGetName(self, handle: str) -> bytes:
        return b"Tesla V100"

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
        self._check(self.has_counter)
        return 7_000_000 + int(self.watts * (self.machine.now_s - 100) * 1000 + 1e-6)

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        self._check(self.has_power)
        return round(self.watts * 1000)

    def _check(self, is_supported: bool) -> None:
        if self.sessions < 1:
            raise NvmlError("Uninitialized")
        if not is_supported:
            raise NvmlError("Not Supported")
        if self.machine.now_s >= self.lost_at_s:
            raise NvmlError("GPU is lost")
