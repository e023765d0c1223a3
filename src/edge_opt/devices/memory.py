"""Memory that a forward needs at a precision."""

from __future__ import annotations

from collections.abc import Iterator

from edge_opt.devices.passes import ITEMSIZE, floating_itemsize
from edge_opt.records import MemoryNeed, ModelProfile, Precision, Role, Trace


def memory_need(profile: ModelProfile, precision: Precision | None = None) -> MemoryNeed:
    """Weights, buffers, inputs and the peak of live activations, at a precision; None: as the model stands.

    Floating tensors take the precision's size; integers, and what operators hold beside their outputs, are as found.

    >>> import edge_opt as eo
    >>> from torch import nn
    >>> memory_need(eo.profile(nn.Linear(8, 4, bias=False), (2, 8)), "int8")
    MemoryNeed(weight_bytes=32, buffer_bytes=0, input_bytes=16, activation_bytes=8)
    """
    trace, totals = profile.trace, profile.totals
    saved = _saved(trace, precision)

    def of(role: Role) -> int:
        return sum(saved[number] for number, storage in enumerate(trace.storages) if storage.role == role)

    return MemoryNeed(
        weight_bytes=totals.param_bytes - of("parameter"),
        buffer_bytes=totals.buffer_bytes - of("buffer"),
        input_bytes=totals.input_bytes - of("input"),
        activation_bytes=_peak(trace, saved) if any(saved) else profile.peak_activation_bytes,
    )


def _saved(trace: Trace, precision: Precision | None) -> list[int]:
    """Bytes by which each storage is smaller at the precision."""
    saved = [0] * len(trace.storages)
    if precision is None:
        return saved
    for number, dtype in _dtypes(trace):
        size = floating_itemsize(dtype)
        if size:
            nbytes = trace.storages[number].nbytes
            saved[number] = nbytes - nbytes // size * ITEMSIZE[precision]
    return saved


def _dtypes(trace: Trace) -> Iterator[tuple[int, str]]:
    """Storages with the dtype that operators read from them, or wrote; one that nobody touches is absent."""
    for call in trace.ops:
        signature = trace.signatures[call.signature]
        yield from zip(call.reads, (tensor.dtype for tensor in signature.inputs), strict=True)
        if len(call.creates) == len(signature.outputs):
            yield from zip(call.creates, (tensor.dtype for tensor in signature.outputs), strict=True)


def _peak(trace: Trace, saved: list[int]) -> int:
    change = [0] * (len(trace.ops) + 1)
    for storage, saving in zip(trace.storages, saved, strict=True):
        if storage.role == "activation" and storage.born is not None:
            change[storage.born] += saving
            change[len(trace.ops) if storage.died is None else storage.died] -= saving
    peak = saving = 0
    for call in trace.ops:
        saving += change[call.index]
        peak = max(peak, call.live_bytes - saving)
    return peak
