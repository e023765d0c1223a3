"""Rounding to int8 in torch, as static quantisation rounds: to see what it does to a model, and to train with it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils.parametrize import is_parametrized

from edge_opt.errors import InvalidInput


def channel_dim(layer: nn.Module) -> int:
    """The dimension of a layer's weight that counts its outputs."""
    return 1 if isinstance(layer, _ConvNd) and layer.transposed else 0


def quantized_weight(weight: torch.Tensor, channel_dim: int, largest: int = 127) -> torch.Tensor:
    """Weights rounded to 8 bits, symmetric, with a scale for each channel; `largest` is 64 for 7 bits.

    >>> quantized_weight(torch.tensor([[127.0, 0.4], [1.27, 0.0]]), 0)
    tensor([[127.0000,   0.0000],
            [  1.2700,   0.0000]])
    """
    others = [dim for dim in range(weight.dim()) if dim != channel_dim]
    scale = weight.abs().amax(others, keepdim=True) / largest
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    return (weight / scale).round().clamp(-largest, largest) * scale


def quantized_activation(x: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """Values rounded to the 256 steps between two bounds, of which 0 is one; what lies outside is cut off."""
    low, high = min(low, 0.0), max(high, 0.0)
    scale = (high - low) / 255 or 1.0
    zero = round(-low / scale)
    return ((x / scale).round().clamp(-zero, 255 - zero)) * scale


@contextmanager
def rounding_layers(model: nn.Module, is_reduced: bool) -> Iterator[None]:
    """Convolutions and linear layers compute with rounded weights and inputs inside; gradients pass straight through.

    These are the tensors that static int8 rounds before a layer. A batch norm that is folded into a convolution later
    scales whole channels, and their rounding with them, so it changes nothing of it. The range of an input is that of
    its batch. Weights themselves stay in float: what is learned is where they are rounded from.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, (_ConvNd, nn.Linear))]
    if not layers:
        raise InvalidInput("the model has no convolution or linear layer whose rounding could be trained for")

    largest = 64 if is_reduced else 127

    def before(layer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if not is_parametrized(layer, "weight"):
            # An attribute of the instance stands in front of the parameter of that name.
            layer.__dict__["weight"] = _rounded_weight(layer.weight, channel_dim(layer), largest)
        return tuple(_arriving(value) for value in args)

    def after(layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        layer.__dict__.pop("weight", None)

    with ExitStack() as stack:
        for layer in layers:
            if is_parametrized(layer, "weight"):
                # Its weight is computed, as by weight_norm: rounding is one step more.
                steps: Any = layer.parametrizations["weight"]  # type: ignore[index]
                steps.append(_Rounded(channel_dim(layer), largest))
                stack.callback(steps.__delitem__, -1)
            stack.callback(layer.register_forward_pre_hook(before).remove)
            stack.callback(layer.register_forward_hook(after, always_call=True).remove)
        yield


class _Rounded(nn.Module):
    """The last step of a weight that is computed: rounded."""

    def __init__(self, channel_dim: int, largest: int) -> None:
        super().__init__()
        self._channel_dim, self._largest = channel_dim, largest

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return _rounded_weight(weight, self._channel_dim, self._largest)


def _rounded_weight(weight: Any, channel_dim: int, largest: int) -> torch.Tensor:
    return _straight_through(weight, quantized_weight(weight, channel_dim, largest))


def _straight_through(value: torch.Tensor, rounded: torch.Tensor) -> torch.Tensor:
    """The rounded value, with the gradient of the one before."""
    return value + (rounded - value).detach()


def _arriving(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or not value.numel():
        return value
    low, high = (float(end) for end in value.detach().aminmax())
    return _straight_through(value, quantized_activation(value.detach(), low, high))


_HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}
_RANGE = tuple[float, float]


@contextmanager
def at_precision(layer: nn.Module, precision: str, bounds: _RANGE | None) -> Iterator[None]:
    """The layer as if it ran at that precision: its weights rounded, and its input as it arrives."""
    weights = [
        parameter
        for name, parameter in layer.named_parameters()
        if name.endswith("weight") and parameter.is_floating_point() and parameter.dim() > 1
    ]
    kept = [weight.detach().clone() for weight in weights]
    dim = channel_dim(layer)

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
                    low, high = (float(each) for each in value.detach().aminmax())
                    known = bounds.get(path, (low, high))
                    bounds[path] = min(known[0], low), max(known[1], high)

        return look

    hooks = [layer.register_forward_pre_hook(note(path)) for path, layer in layers.items()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
