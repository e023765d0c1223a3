"""compare_targets(): one model on several targets, side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from edge_opt.devices.memory import memory_need
from edge_opt.devices.targets import Target, find_spec, find_targets
from edge_opt.errors import InvalidInput, TraceFailed
from edge_opt.fitting.batches import MOST, largest_fit, needs_by_batch, ram_of
from edge_opt.profiling import profile
from edge_opt.records import BatchFit, MemoryNeed, Precision, Prediction, TargetComparison, TargetFit
from edge_opt.trace.inputs import InputSpec, call_arguments, materialize


def compare_targets(
    model: nn.Module,
    inputs: Any = None,
    targets: Target | Sequence[Target] = (),
    *,
    precision: Precision = "fp32",
    kwargs: Mapping[str, Any] | None = None,
    name: str | None = None,
    most: int = MOST,
) -> TargetComparison:
    """A model on several targets: does it fit the RAM, how long it takes, what binds it, its energy, the largest batch.

    `inputs` and `targets` are what `profile` takes; the first dimension of every input is the batch. All of a device's
    RAM counts as free: an operating system and a runtime take their part of it. The batch is searched up to `most`.

    >>> from edge_opt.model import SmallCNN
    >>> found = compare_targets(SmallCNN(), (1, 1, 28, 28), ["raspberry-pi-4", "rp2040"])
    >>> [(fit.prediction.target, fit.fits, fit.prediction.bound) for fit in found.targets]
    [('raspberry-pi-4', True, 'compute'), ('rp2040', True, 'unknown')]
    """
    wanted = find_targets(targets)
    profiled = profile(model, inputs, kwargs=kwargs, name=name, target=wanted, precision=precision)
    memory = memory_need(profiled, precision)
    needs = needs_by_batch(model, materialize(call_arguments(model, inputs, kwargs), _without_batch), precision)
    fits = (
        _fit(prediction, memory, tuple(int(size.value) for size in find_spec(target).ram_bytes), needs, most)
        for prediction, target in zip(profiled.predictions, wanted, strict=True)
    )
    shapes = profiled.trace.modules[0].input_shapes
    return TargetComparison(profiled.name, shapes, precision, memory, tuple(fits))


def _fit(
    prediction: Prediction, memory: MemoryNeed, sizes: tuple[int, ...], needs: Callable[[int], MemoryNeed], most: int
) -> TargetFit:
    batch: BatchFit | None = None
    remarks: tuple[str, ...] = ()
    if not sizes:
        remarks = (f"the RAM of {prediction.target} is unknown, so whether the model fits is too",)
    else:
        try:
            batch = largest_fit(needs, sizes[0], ram_of(prediction.target, sizes), most)
        except (TraceFailed, InvalidInput) as error:
            remarks = (f"the largest batch is unknown, for the model refuses another batch: {error}",)
    needed = memory.total_bytes
    return TargetFit(prediction, needed <= sizes[0] if sizes else None, needed, sizes, batch, remarks)


def _without_batch(value: Any) -> InputSpec:
    """An input by its shape behind the batch."""
    is_tensor = isinstance(value, torch.Tensor)
    dtype = str(value.dtype).removeprefix("torch.") if is_tensor else value.dtype
    return InputSpec(tuple(value.shape[1:]), dtype)
