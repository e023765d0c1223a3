"""Precision, simulated in floating point: the numbers that a layer would see and hold."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

PRECISIONS = ("int8", "fp16", "bf16")
_HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}
_RANGE = tuple[float, float]


def quantized_weight(weight: torch.Tensor, channel_dim: int) -> torch.Tensor:
    """Weights rounded to 8 bits, symmetric, with a scale for each channel.

    >>> quantized_weight(torch.tensor([[127.0, 0.4], [1.27, 0.0]]), 0)
    tensor([[127.0000,   0.0000],
            [  1.2700,   0.0000]])
    """
    others = [dim for dim in range(weight.dim()) if dim != channel_dim]
    scale = weight.abs().amax(others, keepdim=True) / 127
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    return (weight / scale).round().clamp(-127, 127) * scale


def quantized_activation(x: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """Values rounded to the 256 steps between two bounds, of which 0 is one; what lies outside is cut off."""
    low, high = min(low, 0.0), max(high, 0.0)
    scale = (high - low) / 255 or 1.0
    zero = round(-low / scale)
    return ((x / scale).round().clamp(-zero, 255 - zero)) * scale


@contextmanager
def at_precision(layer: nn.Module, precision: str, bounds: _RANGE | None) -> Iterator[None]:
    """The layer as if it ran at that precision: its weights rounded, and its input as it arrives."""
    weights = [
        parameter
        for name, parameter in layer.named_parameters()
        if name.endswith("weight") and parameter.is_floating_point() and parameter.dim() > 1
    ]
    kept = [weight.detach().clone() for weight in weights]
    dim = 1 if isinstance(layer, _ConvNd) and layer.transposed else 0

    def arriving(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(_rounded(value, precision, bounds) for value in args)

    hook = layer.register_forward_pre_hook(arriving)
    try:
        with torch.no_grad():
            for weight in weights:
                half = _HALVES.get(precision)
                weight.copy_(quantized_weight(weight, dim) if half is None else weight.to(half).to(weight.dtype))
        yield
    finally:
        hook.remove()
        with torch.no_grad():
            for weight, before in zip(weights, kept, strict=True):
                weight.copy_(before)


def _rounded(value: Any, precision: str, bounds: _RANGE | None) -> Any:
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    if precision in _HALVES:
        return value.to(_HALVES[precision]).to(value.dtype)
    return value if bounds is None else quantized_activation(value, *bounds)


@contextmanager
def watching(layers: dict[str, nn.Module], bounds: dict[str, _RANGE]) -> Iterator[None]:
    """Note the smallest and largest value that arrives at each layer."""

    def note(path: str) -> Any:
        def look(module: nn.Module, args: tuple[Any, ...]) -> None:
            for value in args:
                if isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel():
                    low, high = (float(each) for each in value.aminmax())
                    known = bounds.get(path, (low, high))
                    bounds[path] = min(known[0], low), max(known[1], high)

        return look

    hooks = [layer.register_forward_pre_hook(note(path)) for path, layer in layers.items()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
