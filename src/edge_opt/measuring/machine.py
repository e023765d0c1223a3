"""This machine: devices, environment, and whether it is fit to measure on; torch is asked where it must be."""

from __future__ import annotations

import math
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from edge_opt.errors import InvalidInput
from edge_opt.records.measurements import Environment

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Device:
    """A device that is here. Work on an asynchronous one goes on after a call has returned."""

    torch_name: str
    name: str
    is_asynchronous: bool
    synchronize: Callable[[], None]


CPU = Device("cpu", "cpu", False, lambda: None)
DEVICE_TYPES = ("cpu", "cuda", "mps")


def device_count(kind: str) -> int:
    """Return how many devices of a type torch finds here; torch is imported on the first call."""
    import torch

    return int(getattr(torch, kind).device_count())


def find_device(asked: str | torch.device) -> Device:
    """Return the device named `cpu`, `cuda`, `cuda:1` or `mps`.

    >>> find_device("cpu").name
    'cpu'
    """
    kind, _, number = str(asked).partition(":")
    if kind not in DEVICE_TYPES or (number and not number.isdecimal()):
        raise InvalidInput(
            f"unknown device {str(asked)!r}; write one of {', '.join(DEVICE_TYPES)}, or a number as in cuda:1"
        )
    import torch

    index, count = int(number or 0), device_count(kind)
    if count == 0:
        raise InvalidInput(
            f"device {str(asked)!r} was asked for, and torch {torch.__version__} finds no {kind} here; use device='cpu'"
        )
    if index >= count:
        raise InvalidInput(f"device {str(asked)!r} was asked for, and there is only {kind}:0 to {kind}:{count - 1}")
    if kind == "cuda":
        return Device(f"cuda:{index}", torch.cuda.get_device_name(index), True, lambda: torch.cuda.synchronize(index))
    return CPU if kind == "cpu" else Device("mps", "Apple GPU (Metal)", True, torch.mps.synchronize)


_ROOT = Path("/")


def read_environment(device: str = "cpu", root: Path = _ROOT, threads: int | None = None) -> Environment:
    """Return what this machine is and how busy it is now. `device` is the name of the one that will run the model.

    `threads` are those of another runtime than torch, which is then not asked, and need not be there.

    >>> read_environment().cores >= 1, read_environment(threads=2).torch
    (True, '')
    """
    version = ""
    if threads is None:
        import torch

        threads, version = torch.get_num_threads(), str(torch.__version__)
    return Environment(
        cpu=cpu_name(root),
        cores=usable_cores(root),
        threads=threads,
        governor=governor(root),
        load_1min=load_1min(root),
        memory_bytes=memory_bytes(root),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=platform.python_version(),
        torch=version,
        device=device,
    )


def cpu_name(root: Path = _ROOT) -> str:
    """Return the processor as it calls itself; on boards that only name the board, that."""
    fields = _fields(_text(root / "proc/cpuinfo"))
    board = _text(root / "proc/device-tree/model").strip("\0\n ")
    names = (fields.get("model name"), board, fields.get("Model"), fields.get("Hardware"))
    return next((name for name in names if name), platform.processor() or platform.machine())


def usable_cores(root: Path = _ROOT) -> int:
    """Return the cores this process may run on, a container's quota included."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _quota_cores(root)
    return allowed if quota is None else max(1, min(allowed, math.ceil(quota)))


def _quota_cores(root: Path) -> float | None:
    """Return CPU seconds per second that the control group may use; None where there is no limit."""
    groups = root / "sys/fs/cgroup"
    words = _text(groups / "cpu.max").split()
    if not words:
        words = [_text(groups / f"cpu/cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
    if len(words) != 2 or not all(word.isdecimal() for word in words) or int(words[1]) == 0:
        return None
    return int(words[0]) / int(words[1])


def memory_bytes(root: Path = _ROOT) -> int:
    """Return the memory of the machine, or what a container may use of it."""
    words = _fields(_text(root / "proc/meminfo")).get("MemTotal", "").split()
    if words and words[0].isdecimal():
        total = int(words[0]) * 1024
    else:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0
    limits = (_text(root / "sys/fs/cgroup" / name).strip() for name in ("memory.max", "memory/memory.limit_in_bytes"))
    return min([total, *(int(limit) for limit in limits if limit.isdecimal())])


def governor(root: Path = _ROOT) -> str | None:
    """Return how the kernel chooses the clock frequency; None where it does not say."""
    files = sorted((root / "sys/devices/system/cpu").glob("cpu[0-9]*/cpufreq/scaling_governor"))
    names = {name for name in (_text(path).strip() for path in files) if name}
    return "+".join(sorted(names)) or None


def load_1min(root: Path = _ROOT) -> float | None:
    """Return the programs that ran or waited for a core, on average over the last minute."""
    words = _text(root / "proc/loadavg").split()
    if words:
        return float(words[0])
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def machine_cpu_s(root: Path = _ROOT) -> float | None:
    """Return CPU seconds of all programs since the start, and those a host took away; None if not known."""
    words = _text(root / "proc/stat").partition("\n")[0].split()
    if len(words) < 9 or words[0] != "cpu":
        return None
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, words[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


_NATIVE_FLAGS = {
    "fp16": {"avx512_fp16", "amx_fp16", "fphp", "asimdhp"},
    "bf16": {"avx512_bf16", "amx_bf16", "bf16"},
    "int8": {"avx512_vnni", "avx_vnni", "amx_int8", "asimddp"},
}


@cache
def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Return the instruction sets as Linux names them; empty where the system does not say."""
    fields = _fields(_text(cpuinfo))
    return frozenset((fields.get("flags") or fields.get("Features", "")).split())


def is_fast(precision: str, flags: frozenset[str] | None = None) -> bool | None:
    """Return whether the CPU multiplies this precision natively; None where its flags are not known."""
    known_flags = cpu_flags() if flags is None else flags
    if precision == "fp32":
        return True
    return None if not known_flags else bool(known_flags & _NATIVE_FLAGS[precision])


def needs_reduced_range(flags: frozenset[str] | None = None, machine: str | None = None) -> bool:
    """Return whether u8 x s8 products saturate: on x86 without VNNI, where pairs are added in 16 bits.

    Seven-bit weights then keep pair sums in range. ARM adds in 32 bits, with and without its dot product.

    >>> needs_reduced_range(frozenset({"avx2"}), "x86_64"), needs_reduced_range(frozenset({"avx_vnni"}), "x86_64")
    (True, False)
    >>> needs_reduced_range(frozenset(), "aarch64")
    False
    """
    known_flags = cpu_flags() if flags is None else flags
    is_x86 = (machine or platform.machine()).lower() in ("x86_64", "amd64", "i386", "i686")
    return is_x86 and not known_flags & {"avx512_vnni", "avx_vnni", "amx_int8"}


def vector_bytes(flags: frozenset[str] | None = None, machine: str | None = None) -> int:
    """Return the width of a vector register: channels beside a multiple of it leave lanes empty.

    >>> vector_bytes(frozenset({"avx2"}), "x86_64"), vector_bytes(frozenset(), "aarch64")
    (32, 16)
    """
    known_flags = cpu_flags() if flags is None else flags
    if "avx512f" in known_flags:
        return 64
    return 32 if "avx2" in known_flags or "avx" in known_flags else 16


@cache
def crash_of(dtype: torch.dtype) -> str | None:
    """Return the signal that ends a process which computes in this type here; None where it computes.

    Some virtual machines announce matrix units (AMX) and do not let programs use them: a product in bfloat16 is then an
    illegal instruction. The kernel answers it with SIGILL, which no `except` can catch, and a signal handler would
    return to the same instruction. So another process tries first. float32 computes everywhere and is not tried.
    """
    name = str(dtype).removeprefix("torch.")
    if name == "float32":
        return None
    trial = (
        f"import torch; a = torch.ones(64, 64, dtype=torch.{name}); torch.mm(a, a); "
        "torch.conv2d(a.view(1, 16, 16, 16), a.view(-1)[:2304].view(16, 16, 3, 3))"
    )
    code = subprocess.run([sys.executable, "-c", trial], capture_output=True, check=False).returncode
    return signal.Signals(-code).name if code < 0 else None


def _text(path: Path) -> str:
    """Return the file's text; empty where this system does not have it or does not let us read it."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _fields(text: str) -> dict[str, str]:
    """Return `name : value` lines; of a repeated name the first."""
    fields: dict[str, str] = {}
    for line in text.splitlines():
        name, separator, value = line.partition(":")
        if separator:
            fields.setdefault(name.strip(), value.strip())
    return fields
