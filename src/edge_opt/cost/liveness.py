"""Liveness along the tape: the peak of an eager run, and the lowest a memory planner could reach."""

from __future__ import annotations

from edge_opt.records import PeakMemory, Trace


def peak_memory(trace: Trace) -> PeakMemory:
    """Most activation bytes alive at once, at which operator, in which module."""
    if not trace.ops:
        return PeakMemory(0, None, "", 0)
    at_peak = max(trace.ops, key=lambda call: call.live_bytes)
    return PeakMemory(at_peak.live_bytes, at_peak.index, trace.modules[at_peak.module].path, planner_bound(trace))


def planner_bound(trace: Trace) -> int:
    """The peak when each activation is dropped right after the last operator that uses it; results are kept."""
    last_use = [0] * len(trace.storages)
    for call in trace.ops:
        for number in (*call.reads, *call.creates):
            last_use[number] = call.index
    change = [0] * (len(trace.ops) + 1)
    for number, storage in enumerate(trace.storages):
        if storage.role == "activation" and storage.born is not None:
            change[storage.born] += storage.nbytes
            if storage.died is not None:
                change[last_use[number] + 1] -= storage.nbytes
    peak = alive = 0
    for step in change:
        alive += step
        peak = max(peak, alive)
    return peak
