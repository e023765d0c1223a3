"""How far back each operand was last touched, in bytes: what decides whether a cache still has it."""

from __future__ import annotations

from edge_opt.records import Trace


def read_distances(trace: Trace) -> list[tuple[int, ...]]:
    """For each operator call, one distance per tensor it reads: bytes moved since that tensor's storage was touched.

    The model is taken to run again and again, so that weights were last touched in the forward before. Bytes touched
    twice in between count twice, which only matters where everything is near anyway.
    """
    touched: dict[int, int] = {}
    clock = 0
    found: list[tuple[int, ...]] = []
    # The first round only finds out where each storage was last touched.
    for _ in range(2):
        found = []
        for call in trace.ops:
            signature = trace.signatures[call.signature]
            found.append(tuple(clock - touched.get(storage, 0) for storage in call.reads))
            if signature.is_view:
                continue
            moved = dict(zip(call.reads, (tensor.nbytes for tensor in signature.inputs), strict=True))
            moved.update((storage, trace.storages[storage].nbytes) for storage in call.creates)
            for storage, nbytes in moved.items():
                clock += nbytes
                touched[storage] = clock
    return found
