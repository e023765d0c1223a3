"""This machine: devices, environment, instruction sets, and the memory that this process holds."""

from __future__ import annotations

import ctypes
import gc
import math
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

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


# Tests replace it by a recorded folder.
_ROOT = Path("/")


def read_environment(device: str = "cpu") -> Environment:
    """Return what this machine is and how busy it is now. `device` is the name of the one that will run the model.

    >>> read_environment().cores >= 1
    True
    """
    import torch

    return Environment(
        cpu=cpu_name(),
        cores=usable_cores(),
        threads=torch.get_num_threads(),
        governor=governor(),
        load_1min=load_1min(),
        memory_bytes=memory_bytes(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=platform.python_version(),
        torch=str(torch.__version__),
        device=device,
    )


def cpu_name() -> str:
    """Return the processor as it calls itself; on boards that only name the board, that."""
    fields = _fields(_text("proc/cpuinfo"))
    board = _text("proc/device-tree/model").strip("\0\n ")
    names = (fields.get("model name"), board, fields.get("Model"), fields.get("Hardware"))
    return next((name for name in names if name), platform.processor() or platform.machine())


def usable_cores() -> int:
    """Return the cores this process may run on, a container's quota included."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _quota_cores()
    return allowed if quota is None else max(1, min(allowed, math.ceil(quota)))


def _quota_cores() -> float | None:
    """Return CPU seconds per second that the control group may use; None where there is no limit."""
    words = _text("sys/fs/cgroup/cpu.max").split()
    if not words:
        words = [_text(f"sys/fs/cgroup/cpu/cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
    if len(words) != 2 or not all(word.isdecimal() for word in words) or int(words[1]) == 0:
        return None
    return int(words[0]) / int(words[1])


def memory_bytes() -> int:
    """Return the memory of the machine, or what a container may use of it."""
    words = _fields(_text("proc/meminfo")).get("MemTotal", "").split()
    if words and words[0].isdecimal():
        total = int(words[0]) * 1024
    else:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0
    limits = (_text(f"sys/fs/cgroup/{name}").strip() for name in ("memory.max", "memory/memory.limit_in_bytes"))
    return min([total, *(int(limit) for limit in limits if limit.isdecimal())])


def best_seconds(run: Callable[[], object], count: int) -> float:
    """Return the least seconds of a call, after one that does not count."""
    run()
    best = float("inf")
    for _ in range(count):
        start = time.perf_counter_ns()
        run()
        best = min(best, (time.perf_counter_ns() - start) / 1e9)
    return best


def copy_bandwidth(size: int = 1 << 27) -> float:
    """Return the bytes per second that a copy reads and writes; the default size fits no cache."""
    import torch

    source, target = torch.ones(size // 8), torch.ones(size // 8)
    inner = max(1, (1 << 20) // size)

    def copy() -> None:
        for _ in range(inner):
            target.copy_(source)

    return size * inner / best_seconds(copy, 5)


def governor() -> str | None:
    """Return how the kernel chooses the clock frequency; None where it does not say."""
    files = _ROOT.glob("sys/devices/system/cpu/cpu[0-9]*/cpufreq/scaling_governor")
    return "+".join(sorted({_text(path).strip() for path in files} - {""})) or None


def load_1min() -> float | None:
    """Return the programs that ran or waited for a core, on average over the last minute."""
    words = _text("proc/loadavg").split()
    if words:
        return float(words[0])
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def machine_cpu_s() -> float | None:
    """Return CPU seconds of all programs since the start, and those a host took away; None if not known."""
    words = _text("proc/stat").partition("\n")[0].split()
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
def cpu_flags() -> frozenset[str]:
    """Return the instruction sets as Linux names them; empty where the system does not say."""
    fields = _fields(_text("proc/cpuinfo"))
    return frozenset((fields.get("flags") or fields.get("Features", "")).split())


def is_fast(precision: str) -> bool | None:
    """Return whether the CPU multiplies this precision natively; None where its flags are not known."""
    if precision == "fp32":
        return True
    return bool(cpu_flags() & _NATIVE_FLAGS[precision]) if cpu_flags() else None


def needs_reduced_range() -> bool:
    """Return whether u8 x s8 products saturate: on x86 without VNNI, where pairs are added in 16 bits.

    Seven-bit weights then keep pair sums in range. ARM adds in 32 bits, with and without its dot product.
    """
    is_x86 = platform.machine().lower() in ("x86_64", "amd64", "i386", "i686")
    return is_x86 and not cpu_flags() & {"avx512_vnni", "avx_vnni", "amx_int8"}


def vector_bytes() -> int:
    """Return the width of a vector register: channels beside a multiple of it leave lanes empty."""
    if "avx512f" in cpu_flags():
        return 64
    return 32 if cpu_flags() & {"avx", "avx2"} else 16


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
        # Not from the current folder, which `-c` puts first: others may be able to write there.
        "import sys; sys.path[:] = filter(None, sys.path); import torch; "
        f"a = torch.ones(64, 64, dtype=torch.{name}); torch.mm(a, a); "
        "torch.conv2d(a.view(1, 16, 16, 16), a.view(-1)[:2304].view(16, 16, 3, 3))"
    )
    code = subprocess.run([sys.executable, "-c", trial], capture_output=True, check=False).returncode
    return signal.Signals(-code).name if code < 0 else None


def _text(path: str | Path) -> str:
    """Return the text of a file of the system; empty where there is none, or it may not be read."""
    try:
        return (_ROOT / path).read_text(encoding="utf-8", errors="replace")
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


# glibc's malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_KEPT_BYTES = 1 << 30
# The most that glibc before 2.35 takes for mmap, and where its own adaptation ends; it trims at twice that.
_LARGEST_ADAPTED_BYTES = 32 << 20

_depth = 0


def _libc() -> Any:
    """Return the C library of this process, if its allocator takes settings; None elsewhere."""
    try:
        library = ctypes.CDLL(None)
        return library if hasattr(library, "mallopt") and hasattr(library, "malloc_trim") else None
    except (OSError, TypeError):
        return None


def _set(library: Any, trim_bytes: int, mmap_bytes: int) -> bool:
    is_taken = bool(library.mallopt(_TRIM_THRESHOLD, trim_bytes))
    sizes = (mmap_bytes, _LARGEST_ADAPTED_BYTES)
    return any(bool(library.mallopt(_MMAP_THRESHOLD, size)) for size in sizes) and is_taken


@contextmanager
def retain_freed_memory() -> Iterator[bool]:
    """Let memory that is freed stay with the process inside; yields whether the C library could be told so.

    Otherwise glibc may give memory back to the system after each forward and fetch it again for the next, page by page,
    or may not: by chance, and for up to twice the time. Every latency of this package is of retained memory.

    glibc has no call that reads the thresholds back, and setting one ends its own adaptation for good. So the process
    keeps 64 MiB for trimming and 32 MiB for mmap afterwards, where that adaptation ends at most, and what is free goes
    back to the system. The alternative, a process of its own for every measurement, costs seconds of imports. Other C
    libraries are not changed.

    >>> with retain_freed_memory() as is_kept:
    ...     isinstance(is_kept, bool)
    True
    """
    global _depth
    library = _libc()
    if library is None:
        yield False
        return
    is_kept = _set(library, _KEPT_BYTES, _KEPT_BYTES)
    _depth += 1
    try:
        yield is_kept
    finally:
        _depth -= 1
        if not _depth:
            _set(library, 2 * _LARGEST_ADAPTED_BYTES, _LARGEST_ADAPTED_BYTES)
            library.malloc_trim(0)


def trim() -> bool:
    """Hand free memory back to the system; False where the C library cannot be told so."""
    library = _libc()
    if library is not None:
        library.malloc_trim(0)
    return library is not None


def resident_bytes(name: str) -> int | None:
    """Return the bytes that this process holds; None where the system does not say.

    Args:
        name: "VmRSS" for now, "VmHWM" for the most since the peak was last reset.
    """
    words = _fields(_text("proc/self/status")).get(name, "").split()
    return int(words[0]) * 1024 if words else None


class ResidentGrowth:
    """How much more a process holds than when this was made; garbage and free memory do not count.

    Make it when the runtime is imported and nothing is loaded.
    """

    def __init__(self) -> None:
        gc.collect()
        trim()
        self._idle_bytes = resident_bytes("VmRSS")

    def peak_while(self, run: Callable[[], object]) -> int | None:
        """Return the most bytes above the idle process while something runs three times; None if not known."""
        gc.collect()
        trim()
        try:
            (_ROOT / "proc/self/clear_refs").write_text("5")  # resets VmHWM
        except OSError:
            return None
        for _ in range(3):
            run()
        peak_bytes = resident_bytes("VmHWM")
        return None if peak_bytes is None or self._idle_bytes is None else max(0, peak_bytes - self._idle_bytes)
