"""Jobs for the tests of sweeps: they compute something small and definite, or misbehave on purpose."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edge_opt.records.sweeps import Candidate, TrialMetrics


def figures(candidate: Candidate) -> TrialMetrics:
    """Made-up figures that follow from the candidate alone: more pruning is faster and less accurate."""
    kept = 1 - candidate.pruning - sum(level for _, level in candidate.layer_pruning) / 10
    speedup = {"fp32": 1.0, "fp16": 1.0, "bf16": 1.0, "int8": 2.0}[candidate.precision]
    speedup *= {"torch": 1.0, "onnxruntime": 4.0, "openvino": 5.0}[candidate.runtime]
    accuracy = 0.98 - 0.1 * (1 - kept) ** 2 - 0.002 * (candidate.precision == "int8")
    latency_s = 0.010 * kept / speedup
    return TrialMetrics(
        accuracy=accuracy,
        accuracy_low=accuracy - 0.01,
        accuracy_high=accuracy + 0.01,
        accuracy_drop=0.98 - accuracy,
        latency_s=latency_s,
        latency_low_s=latency_s * 0.95,
        latency_high_s=latency_s * 1.05,
        latency_std_s=latency_s * 0.01,
        latency_p95_s=latency_s * 1.1,
        cpu_latency_s=latency_s,
        batch_size=1,
        throughput=1 / latency_s,
        model_bytes=int(1_000_000 * kept),
        size_bytes=int(1_000_000 * kept),
        peak_memory_bytes=int(3_000_000 * kept),
        energy_j=None,
        energy_source="none",
        macs=int(1e6 * kept),
        params=int(1e5 * kept),
        macs_ratio=kept,
        params_ratio=kept,
        effective_precision=candidate.precision,
    )


@dataclass(frozen=True)
class Arithmetic:
    """Writes a file when it builds and reads it when it measures; notes both in a log."""

    log: Path
    pause_s: float = 0.0

    def build(self, candidate: Candidate, folder: Path) -> Mapping[str, Any]:
        self.note("build", candidate)
        time.sleep(self.pause_s)
        (folder / "model").mkdir()
        (folder / "model" / "weights.bin").write_bytes(candidate.key.encode() * 100)
        return {"accuracy": figures(candidate).accuracy}

    def measure(self, candidate: Candidate, folder: Path, built: Mapping[str, Any]) -> TrialMetrics:
        self.note("measure", candidate)
        time.sleep(self.pause_s)
        assert (folder / "model" / "weights.bin").read_bytes() == candidate.key.encode() * 100
        return replace(figures(candidate), accuracy=built["accuracy"])

    def note(self, phase: str, candidate: Candidate) -> None:
        # One write of less than a page to a file opened for appending is not torn by other processes.
        with self.log.open("a", encoding="utf-8") as file:
            file.write(f"{phase} {candidate.key}\n")


@dataclass(frozen=True)
class Misbehaving:
    """Each level of pruning is a way to fail; 0 is fine."""

    def build(self, candidate: Candidate, folder: Path) -> Mapping[str, Any]:
        level = candidate.pruning
        if level == 0.1:
            raise ValueError("channels must be divisible by 8")
        if level == 0.2:
            hoard = []
            while True:
                hoard.append(bytearray(os.urandom(1) * 8_000_000))
        if level == 0.3:
            print("about to hang")
            time.sleep(3600)
        if level == 0.5:
            os.abort()
        if level == 0.6:
            os._exit(0)
        if level == 0.7:
            return None  # type: ignore[return-value]
        return {}

    def measure(self, candidate: Candidate, folder: Path, built: Mapping[str, Any]) -> TrialMetrics:
        if candidate.pruning == 0.4:
            return replace(figures(candidate), accuracy=math.nan)
        if candidate.pruning == 0.8:
            return {"accuracy": 1.0}  # type: ignore[return-value]
        return figures(candidate)


@dataclass(frozen=True)
class Flaky:
    """Crashes in the first builds of every pruned candidate, and then no more."""

    marks: Path
    crashes: int

    def build(self, candidate: Candidate, folder: Path) -> Mapping[str, Any]:
        marks = self.marks / candidate.key
        marks.mkdir(parents=True, exist_ok=True)
        count = len(list(marks.iterdir()))
        if candidate.pruning > 0 and count < self.crashes:
            (marks / str(count)).touch()
            self.crash()
        return {}

    def crash(self) -> None:
        os.kill(os.getpid(), signal.SIGSEGV)

    def measure(self, candidate: Candidate, folder: Path, built: Mapping[str, Any]) -> TrialMetrics:
        return figures(candidate)


@dataclass(frozen=True)
class ServerKiller(Flaky):
    """Kills the fork server that this process was forked from."""

    def crash(self) -> None:
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)


@dataclass(frozen=True)
class Littering(Flaky):
    """Leaves a file behind before it crashes, and refuses a folder in which there is one."""

    def build(self, candidate: Candidate, folder: Path) -> Mapping[str, Any]:
        assert not (folder / "half").exists()
        (folder / "half").touch()
        return super().build(candidate, folder)


@dataclass(frozen=True)
class Family:
    """Starts a process of its own, as a loader of data does, and says which."""

    note: Path

    def build(self, candidate: Candidate, folder: Path) -> Mapping[str, Any]:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        self.note.write_text(f"{os.getppid()} {child.pid}", encoding="utf-8")
        time.sleep(600)
        return {}

    def measure(self, candidate: Candidate, folder: Path, built: Mapping[str, Any]) -> TrialMetrics:
        return figures(candidate)


@dataclass(frozen=True)
class Patient:
    """Trains for ten minutes beside a process of its own, and says which processes there are."""

    note: Path

    def train(self) -> Mapping[str, Any]:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        self.note.write_text(f"{os.getppid()} {os.getpid()} {child.pid}", encoding="utf-8")
        time.sleep(600)
        return {}


@dataclass(frozen=True)
class Large(Arithmetic):
    """Writes more than a disk takes, if the candidate is pruned."""

    def build(self, candidate: Candidate, folder: Path) -> Mapping[str, Any]:
        if candidate.pruning:
            (folder / "large").write_bytes(bytes(4_000_000))
        return super().build(candidate, folder)
