"""fit_batch(): the largest batch of a model that a memory holds."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from edge_opt import units
from edge_opt.devices.batch import largest_batch
from edge_opt.devices.catalog import device as find_device
from edge_opt.errors import InvalidInput
from edge_opt.profiling import profile
from edge_opt.records import BatchFit, DeviceSpec, Totals
from edge_opt.trace.inputs import CallArguments, InputSpec, call_arguments, materialize

MOST = 1 << 16


def fit_batch(
    model: nn.Module,
    shape: Any = None,
    *,
    memory_limit_mb: float | None = None,
    target: str | os.PathLike[str] | DeviceSpec | None = None,
    kwargs: Mapping[str, Any] | None = None,
    most: int = MOST,
) -> BatchFit:
    """The largest batch whose weights, buffers, inputs and peak of live activations fit a limit, without running it.

    `shape` is what `profile` takes, without the batch: it is put in front of every input. The limit is given in MiB,
    or is the RAM of a device; of one sold with several sizes, the smallest. All of it counts as free: what an
    operating system or a runtime takes is for the caller to subtract.

    >>> from torch import nn
    >>> fit = fit_batch(nn.Linear(1024, 1024, bias=False), (1024,), memory_limit_mb=5)
    >>> fit.batch, fit.weight_bytes, fit.input_bytes, fit.activation_bytes, fit.shortfall_bytes
    (128, 4194304, 524288, 524288, 8192)
    """
    if isinstance(most, bool) or not isinstance(most, int) or most < 1:
        raise InvalidInput(f"most is {most!r}; it must be a whole number of at least 1")
    limit_bytes, limit_source = _limit(memory_limit_mb, target)
    arguments = call_arguments(model, shape, kwargs)
    needs: dict[int, tuple[Totals, int]] = {}

    def bytes_at(batch: int) -> int:
        found = _batched(arguments, batch)
        profiled = profile(model, list(found.args) or None, kwargs=found.kwargs)
        needs[batch] = (profiled.totals, profiled.peak_activation_bytes)
        return _sum(*needs[batch])

    batch = largest_batch(bytes_at, limit_bytes, most)
    totals, activation_bytes = needs[max(batch, 1)]
    above = needs.get(batch + 1)
    return BatchFit(
        batch=batch,
        limit_bytes=limit_bytes,
        limit_source=limit_source,
        weight_bytes=totals.param_bytes,
        buffer_bytes=totals.buffer_bytes,
        input_bytes=totals.input_bytes,
        activation_bytes=activation_bytes,
        shortfall_bytes=None if above is None else _sum(*above) - limit_bytes,
        most=most,
    )


def _sum(totals: Totals, activation_bytes: int) -> int:
    return totals.param_bytes + totals.buffer_bytes + totals.input_bytes + activation_bytes


def _limit(memory_limit_mb: float | None, target: str | os.PathLike[str] | DeviceSpec | None) -> tuple[int, str]:
    if (memory_limit_mb is None) == (target is None):
        what = "neither is given" if target is None else "both are given"
        raise InvalidInput(f"the limit is memory_limit_mb= (MiB) or target= (a device), and {what}; give one of them")
    if memory_limit_mb is not None:
        is_number = isinstance(memory_limit_mb, (int, float)) and not isinstance(memory_limit_mb, bool)
        if not is_number or not math.isfinite(memory_limit_mb) or memory_limit_mb <= 0:
            raise InvalidInput(f"memory_limit_mb is {memory_limit_mb!r}; it must be a number of MiB above zero")
        return int(memory_limit_mb * units.MIB), "memory_limit_mb"
    assert target is not None
    spec = find_device(target)
    if not spec.ram_bytes:
        raise InvalidInput(f"the RAM of {spec.name} is not known; pass memory_limit_mb= instead of target=")
    sizes = [int(figure.value) for figure in spec.ram_bytes]
    of = f", the smallest of {', '.join(map(units.size, sizes))}" if len(sizes) > 1 else ""
    return sizes[0], f"RAM of {spec.name}{of}"


def _batched(arguments: CallArguments, batch: int) -> CallArguments:
    def with_batch(value: Any) -> InputSpec:
        if isinstance(value, torch.Tensor):
            raise InvalidInput(f"an input is a tensor of shape {tuple(value.shape)}; give its shape without the batch")
        return InputSpec((batch, *value.shape), value.dtype)

    return materialize(arguments, with_batch)
