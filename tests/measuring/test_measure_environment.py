"""The machine, read from recorded folders."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from edge_opt.measuring.machine import (
    cpu_name,
    crash_of,
    governor,
    load_1min,
    machine_cpu_s,
    memory_bytes,
    read_environment,
    usable_cores,
)

PI = {
    "proc/cpuinfo": "processor\t: 0\nBogoMIPS\t: 108.00\n\nHardware\t: BCM2711\nModel\t\t: Pi 4 B Rev 1.4\n",
    "proc/device-tree/model": "Raspberry Pi 4 Model B Rev 1.4\0",
    "proc/meminfo": "MemTotal:        3885396 kB\nMemFree:  100 kB\n",
    "proc/loadavg": "0.42 1.90 1.51 2/94 9072\n",
    "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "ondemand\n",
    "sys/devices/system/cpu/cpu1/cpufreq/scaling_governor": "ondemand\n",
}
PC = {
    "proc/cpuinfo": "processor : 0\nmodel name : Some CPU @ 3 GHz\n\nprocessor : 1\nmodel name : Another\n",
    "proc/meminfo": "MemTotal:       16000000 kB\n",
    "sys/fs/cgroup/cpu.max": "50000 100000\n",
    "sys/fs/cgroup/memory.max": "1073741824\n",
}


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine whose system says nothing."""
    monkeypatch.setattr("edge_opt.measuring.machine._ROOT", tmp_path)
    return tmp_path


def record(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def test_a_board_is_called_by_its_own_name(root: Path) -> None:
    record(root, PI)
    assert cpu_name() == "Raspberry Pi 4 Model B Rev 1.4"
    assert (governor(), load_1min(), memory_bytes()) == ("ondemand", 0.42, 3885396 * 1024)


def test_a_container_has_what_its_group_allows(root: Path) -> None:
    record(root, PC)
    assert cpu_name() == "Some CPU @ 3 GHz"
    assert (usable_cores(), memory_bytes()) == (1, 2**30)
    assert governor() is None


@pytest.mark.parametrize(("quota", "cores"), [("-1", None), ("100000", 1), ("max", None)])
def test_the_older_kind_of_group_is_read_too(root: Path, quota: str, cores: int | None) -> None:
    files = {"sys/fs/cgroup/cpu/cpu.cfs_quota_us": quota, "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n"}
    unlimited = usable_cores()
    record(root, files)
    assert usable_cores() == (cores or unlimited)


def test_cores_with_different_governors_name_both(root: Path) -> None:
    record(root, PI | {"sys/devices/system/cpu/cpu1/cpufreq/scaling_governor": "performance\n"})
    assert governor() == "ondemand+performance"


def test_the_machines_time_is_all_but_idling(root: Path) -> None:
    line = "cpu  1000 20 300 99999 888 4 50 6 0 0\ncpu0 1 2 3 4 5 6 7 8 0 0\n"
    busy = 1000 + 20 + 300 + 4 + 50 + 6  # user, nice, system, two kinds of interrupts, taken by the host
    assert machine_cpu_s() is None
    record(root, {"proc/stat": line})
    assert machine_cpu_s() == busy / os.sysconf("SC_CLK_TCK")


def test_a_machine_that_says_nothing_still_has_an_environment() -> None:
    found = read_environment("cpu")
    assert found.cpu
    assert found.governor is None
    assert found.cores >= 1
    assert found.memory_bytes > 0
    assert found.load_1min == pytest.approx(os.getloadavg()[0], abs=5)


def test_the_process_is_part_of_it() -> None:
    found = read_environment("a device")
    assert (found.threads, found.torch, found.device) == (torch.get_num_threads(), torch.__version__, "a device")


def test_a_type_that_computes_here_ends_no_process() -> None:
    assert crash_of(torch.float64) is None


def test_a_process_that_is_ended_is_told_by_its_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dying = tmp_path / "python"
    dying.write_text("#!/bin/sh\nkill -ILL $$\n", encoding="utf-8")
    dying.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(dying))
    assert crash_of.__wrapped__(torch.bfloat16) == "SIGILL"
