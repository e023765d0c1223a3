"""A heap that keeps its memory, so that timings do not depend on what the process did before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from edge_opt.records import Trace

_MIB = 1 << 20
# glibc takes up to 32 MiB from its heap once it has seen a block of that size freed; larger ones where a hole is free.
_FAMILIAR_BYTES = 31 * _MIB
_PIECE_BYTES = 16 * _MIB
_LID_BYTES = 4 * _MIB
_SPARE_BYTES = 64 * _MIB


def hole_for(trace: Trace) -> int:
    """Bytes that a forward takes at most, and as many again for what operators take while they run."""
    return 2 * max((call.live_bytes for call in trace.ops), default=0) + _SPARE_BYTES


@contextmanager
def kept_heap(nbytes: int) -> Iterator[None]:
    """Let tensors be made in a hole of the heap that was written before, of this many bytes.

    Otherwise the C library may give memory back to the system after each forward and fetch it again for the next,
    page by page, or may not: by chance, and for more than twice the time. Weights and inputs should be there before,
    so that the hole is in one piece. Elsewhere than on glibc this does no harm.
    """
    for _ in range(2):
        torch.zeros(_FAMILIAR_BYTES, dtype=torch.uint8)
    pieces = [torch.zeros(_PIECE_BYTES, dtype=torch.uint8) for _ in range(max(1, nbytes // _PIECE_BYTES))]
    # The heap shrinks from its end only, and this lies there.
    lid = torch.zeros(_LID_BYTES, dtype=torch.uint8)
    pieces.clear()
    try:
        yield
    finally:
        del lid
