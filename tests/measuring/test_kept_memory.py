"""Kept memory: what a forward frees stays with the process, and what a process holds is told."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from edge_opt.measuring import latency, machine
from edge_opt.measuring.latency import Clock, TimedCall, cold_memory_latency_s, wait_for_quiet
from edge_opt.measuring.machine import ResidentGrowth, resident_bytes, retain_freed_memory

linux = pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
MIB = 1 << 20


def faults_of(count: int, nbytes: int) -> int:
    """Pages that are fetched while a block of memory is made and dropped so many times."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(count):
        torch.ones(nbytes, dtype=torch.uint8)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@linux
def test_memory_that_is_freed_is_not_fetched_again() -> None:
    pages = 64 * MIB // 4096
    with retain_freed_memory() as is_kept:
        if not is_kept:
            pytest.skip("this C library cannot be told")
        faults_of(2, 64 * MIB)
        # Another place for the block may be new a few times; given back each time, all ten would be.
        assert faults_of(10, 64 * MIB) <= 5 * pages


@linux
def test_a_call_with_new_memory_fetches_all_of_it_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    # Faults stand in for seconds. A huge page is fetched at once: 16 MiB are 8 of them at least, and up to 4096 pages.
    faults = Clock(wall=lambda: float(resource.getrusage(resource.RUSAGE_SELF).ru_minflt))
    monkeypatch.setattr(latency, "Clock", lambda: faults)
    pages = cold_memory_latency_s(TimedCall(lambda: torch.ones(16 * MIB, dtype=torch.uint8)), 1e9)
    assert pages is None or pages >= 8


# In a process of its own, as sweeps use it: in one that has run for minutes, each block may land on other free pages.
GROWTH_OF_48_MIB = """
import torch
from edge_opt.measuring.machine import ResidentGrowth

torch.ones(1)
growth = ResidentGrowth()
weights = torch.ones(32 << 20, dtype=torch.uint8)
print(growth.peak_while(lambda: torch.ones(16 << 20, dtype=torch.uint8)))
"""


@linux
def test_growth_is_what_runs_hold_above_the_idle_process() -> None:
    told = subprocess.run([sys.executable, "-c", GROWTH_OF_48_MIB], check=True, capture_output=True, text=True)
    # 32 MiB that stay and 16 MiB while it runs; a few MiB are the allocator's own
    assert 48 * MIB * 0.95 < int(told.stdout) < 72 * MIB


def test_a_system_that_tells_nothing_is_not_guessed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_ROOT", tmp_path)
    assert resident_bytes("VmRSS") is None
    assert ResidentGrowth().peak_while(lambda: None) is None


def test_a_quiet_moment_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    wall, busy = [0.0], [0.0]

    def sleep(seconds: float) -> None:
        wall[0] += seconds
        # others keep one core busy for the first second, then none
        busy[0] = min(wall[0], 1.0)

    clock = Clock(lambda: wall[0], lambda: 0.0, lambda: busy[0])
    monkeypatch.setattr(latency, "Clock", lambda: clock)
    monkeypatch.setattr(latency, "usable_cores", lambda: 1)
    monkeypatch.setattr("time.sleep", sleep)
    assert wait_for_quiet(5.0)
    assert 1.0 <= wall[0] <= 1.5
    wall[0] = busy[0] = 0.0
    assert not wait_for_quiet(0.5)
