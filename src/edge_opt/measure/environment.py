"""The machine and the process, as far as they matter to a measurement: read from /proc and /sys, or from Python."""

from __future__ import annotations

import math
import os
import platform
from pathlib import Path

import torch

from edge_opt.records import Environment

_ROOT = Path("/")


def read_environment(device: str = "cpu", root: Path = _ROOT) -> Environment:
    """What this machine is and how busy it is now. `device` is the name of the one that will run the model.

    >>> read_environment().cores >= 1
    True
    """
    return Environment(
        cpu=cpu_name(root),
        cores=usable_cores(root),
        threads=torch.get_num_threads(),
        governor=governor(root),
        load_1min=load_1min(root),
        memory_bytes=memory_bytes(root),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=platform.python_version(),
        torch=str(torch.__version__),
        device=device,
    )


def cpu_name(root: Path = _ROOT) -> str:
    """The processor as it calls itself; on boards that only name the board, that."""
    fields = _fields(_text(root / "proc/cpuinfo"))
    board = _text(root / "proc/device-tree/model").strip("\0\n ")
    names = (fields.get("model name"), board, fields.get("Model"), fields.get("Hardware"))
    return next((name for name in names if name), platform.processor() or platform.machine())


def usable_cores(root: Path = _ROOT) -> int:
    """Cores this process may run on, a container's quota included."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _quota_cores(root)
    return allowed if quota is None else max(1, min(allowed, math.ceil(quota)))


def _quota_cores(root: Path) -> float | None:
    """CPU seconds per second that the control group may use; None where there is no limit."""
    groups = root / "sys/fs/cgroup"
    words = _text(groups / "cpu.max").split()
    if not words:
        words = [_text(groups / f"cpu/cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
    if len(words) != 2 or not all(word.isdecimal() for word in words) or int(words[1]) == 0:
        return None
    return int(words[0]) / int(words[1])


def memory_bytes(root: Path = _ROOT) -> int:
    """Memory of the machine, or what a container may use of it."""
    words = _fields(_text(root / "proc/meminfo")).get("MemTotal", "").split()
    if words and words[0].isdecimal():
        total = int(words[0]) * 1024
    else:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0
    limits = (_text(root / "sys/fs/cgroup" / name).strip() for name in ("memory.max", "memory/memory.limit_in_bytes"))
    return min([total, *(int(limit) for limit in limits if limit.isdecimal())])


def governor(root: Path = _ROOT) -> str | None:
    """How the kernel chooses the clock frequency; None where it does not say."""
    files = sorted((root / "sys/devices/system/cpu").glob("cpu[0-9]*/cpufreq/scaling_governor"))
    names = {name for name in (_text(path).strip() for path in files) if name}
    return "+".join(sorted(names)) or None


def load_1min(root: Path = _ROOT) -> float | None:
    """Programs that ran or waited for a core, on average over the last minute."""
    words = _text(root / "proc/loadavg").split()
    if words:
        return float(words[0])
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def machine_cpu_s(root: Path = _ROOT) -> float | None:
    """CPU seconds that all programs of the machine used since it started, and a host took away; None if not told."""
    words = _text(root / "proc/stat").partition("\n")[0].split()
    if len(words) < 9 or words[0] != "cpu":
        return None
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, words[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _text(path: Path) -> str:
    """The file's text; empty where this system does not have it or does not let us read it."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _fields(text: str) -> dict[str, str]:
    """`name : value` lines; of a repeated name the first."""
    fields: dict[str, str] = {}
    for line in text.splitlines():
        name, separator, value = line.partition(":")
        if separator:
            fields.setdefault(name.strip(), value.strip())
    return fields
