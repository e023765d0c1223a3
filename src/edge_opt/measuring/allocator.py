"""The C library's allocator: freed memory retained while something is timed, and what a process holds."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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


def give_back() -> None:
    """Collect garbage, and hand free memory back to the system where the C library can."""
    gc.collect()
    trim()


def trim() -> bool:
    """Hand free memory back to the system; False where the C library cannot be told so."""
    library = _libc()
    if library is not None:
        library.malloc_trim(0)
    return library is not None


_PROC = Path("/proc/self")


def resident_bytes(name: str, proc: Path = _PROC) -> int | None:
    """Return the bytes that this process holds; None where the system does not say.

    Args:
        name: "VmRSS" for now, "VmHWM" for the most since `forget_peak`.
        proc: The folder that the system describes this process in.
    """
    try:
        lines = (proc / "status").read_text(encoding="utf-8", errors="replace").splitlines()
        words = next(line for line in lines if line.startswith(f"{name}:")).split()
        return int(words[1]) * 1024
    except (OSError, StopIteration, ValueError, IndexError):
        return None


def forget_peak(proc: Path = _PROC) -> bool:
    """Let the peak of `resident_bytes` begin anew; False where the system does not let us."""
    try:
        (proc / "clear_refs").write_text("5")
    except OSError:
        return False
    return True


class ResidentGrowth:
    """How much more a process holds than when this was made; garbage and free memory do not count.

    Make it when the runtime is imported and nothing is loaded.
    """

    def __init__(self) -> None:
        give_back()
        self._idle = resident_bytes("VmRSS")

    def peak_while(self, run: Callable[[], object], times: int = 3) -> int | None:
        """Return the most bytes above the idle process while something runs a few times; None if not known."""
        give_back()
        is_new = forget_peak()
        for _ in range(times):
            run()
        peak = resident_bytes("VmHWM")
        return None if not is_new or peak is None or self._idle is None else max(0, peak - self._idle)
