"""What this CPU computes fast: read from its flags."""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path

_FAST = {
    "fp16": {"avx512_fp16", "amx_fp16", "fphp", "asimdhp"},
    "bf16": {"avx512_bf16", "amx_bf16", "bf16"},
    "int8": {"avx512_vnni", "avx_vnni", "amx_int8", "asimddp"},
}


@cache
def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """The instruction sets as Linux names them; empty where the system does not say."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return frozenset()
    words = (line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Features")))
    return frozenset(next(words, []))


def is_fast(precision: str, flags: frozenset[str] | None = None) -> bool | None:
    """Whether the CPU multiplies this precision natively; None where its flags are not known."""
    found = cpu_flags() if flags is None else flags
    if precision == "fp32":
        return True
    return None if not found else bool(found & _FAST[precision])


def needs_reduced_range(flags: frozenset[str] | None = None, machine: str | None = None) -> bool:
    """Whether u8 x s8 products saturate: on x86 without VNNI, where pairs are added in 16 bits.

    Seven-bit weights then keep pair sums in range. ARM adds in 32 bits, with and without its dot product.

    >>> needs_reduced_range(frozenset({"avx2"}), "x86_64"), needs_reduced_range(frozenset({"avx_vnni"}), "x86_64")
    (True, False)
    >>> needs_reduced_range(frozenset(), "aarch64")
    False
    """
    found = cpu_flags() if flags is None else flags
    is_x86 = (machine or platform.machine()).lower() in ("x86_64", "amd64", "i386", "i686")
    return is_x86 and not found & {"avx512_vnni", "avx_vnni", "amx_int8"}


def vector_bytes(flags: frozenset[str] | None = None, machine: str | None = None) -> int:
    """Width of a vector register: channels beside a multiple of it leave lanes empty.

    >>> vector_bytes(frozenset({"avx2"}), "x86_64"), vector_bytes(frozenset(), "aarch64")
    (32, 16)
    """
    found = cpu_flags() if flags is None else flags
    if "avx512f" in found:
        return 64
    return 32 if "avx2" in found or "avx" in found else 16
