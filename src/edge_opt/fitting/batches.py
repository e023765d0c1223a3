"""fit_batch(): the largest batch of a model that a memory holds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import nn

from edge_opt import units
from edge_opt.devices.batch import largest_batch
from edge_opt.devices.memory import memory_need
from edge_opt.devices.passes import ITEMSIZE
from edge_opt.devices.targets import Target, find_spec
from edge_opt.errors import InvalidInput
from edge_opt.profiling import profile
from edge_opt.records import BatchFit, MemoryNeed, Precision
from edge_opt.trace.inputs import CallArguments, InputSpec, call_arguments, materialize

MOST = 1 << 16


def fit_batch(
    model: nn.Module,
    shape: Any = None,
    *,
    memory_limit_mb: float | None = None,
    target: Target | None = None,
    kwargs: Mapping[str, Any] | None = None,
    most: int = MOST,
    precision: Precision | None = None,
) -> BatchFit:
    """The largest batch whose weights, buffers, inputs and peak of live activations fit a limit, without running it.

    `shape` is what `profile` takes, without the batch: it is put in front of every input. The limit is given in MiB,
    or is the RAM of a device; of one sold with several sizes, the smallest. All of it counts as free: what an
    operating system or a runtime takes is for the caller to subtract. At a `precision` floating tensors take its size;
    without one they are as the model has them.

    >>> from torch import nn
    >>> fit = fit_batch(nn.Linear(1024, 1024, bias=False), (1024,), memory_limit_mb=5)
    >>> fit.batch, fit.weight_bytes, fit.input_bytes, fit.activation_bytes, fit.shortfall_bytes
    (128, 4194304, 524288, 524288, 8192)
    """
    if isinstance(most, bool) or not isinstance(most, int) or most < 1:
        raise InvalidInput(f"most is {most!r}; it must be a whole number of at least 1")
    if precision is not None and precision not in ITEMSIZE:
        raise InvalidInput(f"precision is {precision!r}; it must be one of {', '.join(ITEMSIZE)}")
    limit_bytes, limit_source = _limit(memory_limit_mb, target)
    needs = needs_by_batch(model, call_arguments(model, shape, kwargs), precision)
    return largest_fit(needs, limit_bytes, limit_source, most)


def needs_by_batch(
    model: nn.Module, arguments: CallArguments, precision: Precision | None
) -> Callable[[int], MemoryNeed]:
    """What a batch needs, as a function that profiles each batch once, however many limits it is asked for."""

    @cache
    def need(batch: int) -> MemoryNeed:
        found = _batched(arguments, batch)
        return memory_need(profile(model, list(found.args) or None, kwargs=found.kwargs), precision)

    return need


def largest_fit(need: Callable[[int], MemoryNeed], limit_bytes: int, limit_source: str, most: int = MOST) -> BatchFit:
    """The largest batch that needs no more than the limit."""
    batch = largest_batch(lambda size: need(size).total_bytes, limit_bytes, most)
    needed = need(max(batch, 1))
    return BatchFit(
        batch=batch,
        limit_bytes=limit_bytes,
        limit_source=limit_source,
        weight_bytes=needed.weight_bytes,
        buffer_bytes=needed.buffer_bytes,
        input_bytes=needed.input_bytes,
        activation_bytes=needed.activation_bytes,
        shortfall_bytes=None if batch == most else need(batch + 1).total_bytes - limit_bytes,
        most=most,
    )


def _limit(memory_limit_mb: float | None, target: Target | None) -> tuple[int, str]:
    if (memory_limit_mb is None) == (target is None):
        what = "neither is given" if target is None else "both are given"
        raise InvalidInput(f"the limit is memory_limit_mb= (MiB) or target= (a device), and {what}; give one of them")
    if memory_limit_mb is not None:
        is_number = isinstance(memory_limit_mb, (int, float)) and not isinstance(memory_limit_mb, bool)
        if not is_number or not math.isfinite(memory_limit_mb) or memory_limit_mb <= 0:
            raise InvalidInput(f"memory_limit_mb is {memory_limit_mb!r}; it must be a number of MiB above zero")
        return int(memory_limit_mb * units.MIB), "memory_limit_mb"
    assert target is not None
    spec = find_spec(target)
    if not spec.ram_bytes:
        raise InvalidInput(f"the RAM of {spec.name} is not known; pass memory_limit_mb= instead of target=")
    sizes = tuple(int(figure.value) for figure in spec.ram_bytes)
    return sizes[0], ram_of(spec.name, sizes)


def ram_of(name: str, sizes: Sequence[int]) -> str:
    """The limit in words: the RAM of a device, with every size that it is sold with."""
    of = f", the smallest of {', '.join(map(units.size, sizes))}" if len(sizes) > 1 else ""
    return f"RAM of {name}{of}"


def _batched(arguments: CallArguments, batch: int) -> CallArguments:
    def with_batch(value: Any) -> InputSpec:
        if isinstance(value, torch.Tensor):
            raise InvalidInput(f"an input is a tensor of shape {tuple(value.shape)}; give its shape without the batch")
        return InputSpec((batch, *value.shape), value.dtype)

    return materialize(arguments, with_batch)
