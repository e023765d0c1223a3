"""Rounding to int8 in torch, as static quantization rounds: to train with it, and to see what each layer loses by it.

Mixed precision follows from the latter: the few layers that lose most stay in float until the budget is met.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils.parametrize import is_parametrized

from edge_opt.errors import ConversionFailed, InvalidInput
from edge_opt.records.conversions import KeptFloatTrial


def channel_dim(layer: nn.Module) -> int:
    """Return the dimension of a layer's weight that counts its outputs."""
    return 1 if isinstance(layer, _ConvNd) and layer.transposed else 0


def quantized_weight(weight: torch.Tensor, channel_dim: int, largest: int = 127) -> torch.Tensor:
    """Return weights rounded to 8 bits, symmetric, with a scale for each channel; `largest` is 64 for 7 bits.

    >>> quantized_weight(torch.tensor([[127.0, 0.4], [1.27, 0.0]]), 0)
    tensor([[127.0000,   0.0000],
            [  1.2700,   0.0000]])
    """
    others = [dim for dim in range(weight.dim()) if dim != channel_dim]
    scale = weight.abs().amax(others, keepdim=True) / largest
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    return (weight / scale).round().clamp(-largest, largest) * scale


def quantized_activation(x: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """Return values rounded to 256 steps between two bounds; 0 is one of the steps, and values outside are clipped."""
    low, high = min(low, 0.0), max(high, 0.0)
    scale = (high - low) / 255 or 1.0
    zero = round(-low / scale)
    return ((x / scale).round().clamp(-zero, 255 - zero)) * scale


@contextmanager
def rounding_layers(model: nn.Module, is_reduced: bool) -> Iterator[None]:
    """Let convolutions and linear layers compute with rounded weights and inputs; gradients pass straight through.

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
            # An attribute of the instance hides the parameter of that name.
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
    """Return the rounded value, with the gradient of the one before."""
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
    """Run the layer as if it had that precision: its weights rounded, and its input as it arrives."""
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
def watching(layers: dict[str, nn.Module]) -> Iterator[dict[str, _RANGE]]:
    """Note the smallest and largest value that arrives at each layer, by its path."""
    bounds: dict[str, _RANGE] = {}

    def note(path: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        for value in args:
            if isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel():
                low, high = (float(each) for each in value.detach().aminmax())
                known = bounds.get(path, (low, high))
                bounds[path] = min(known[0], low), max(known[1], high)

    hooks = [layer.register_forward_pre_hook(partial(note, path)) for path, layer in layers.items()]
    try:
        yield bounds
    finally:
        for hook in hooks:
            hook.remove()


# Without a bound of the caller's: half of what int8 may differ by.
AUTO_BOUND = 0.1
_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def ranked_layers(model: nn.Module, outputs: Callable[[], Sequence[torch.Tensor]]) -> list[str]:
    """Return the paths of layers with weights, worst first: by the change of the outputs when it alone runs in int8.

    `outputs` runs the model on one batch; the caller keeps the model unchanged around this function.
    """
    modules = model.named_modules()
    layers: dict[str, nn.Module] = {path: module for path, module in modules if path and isinstance(module, _LAYERS)}
    harm: dict[str, float] = {}
    with watching(layers) as bounds:
        expected = [tensor.double() for tensor in outputs()]
    for path, layer in layers.items():
        with at_precision(layer, "int8", bounds.get(path)):
            rounded = [tensor.double() for tensor in outputs()]
        harm[path] = sum(float((a - b).abs().mean()) for a, b in zip(expected, rounded, strict=True))
    return sorted(layers, key=lambda path: -harm[path])


def keep_float_until_it_agrees(
    ranked: list[str], attempt: Callable[[tuple[str, ...]], tuple[KeptFloatTrial, str | None]], bound: float
) -> tuple[tuple[str, ...], tuple[KeptFloatTrial, ...]]:
    """Return the shortest head of the ranking that, kept in float, brings the rest within the bound, and all attempts.

    Doubling finds a number that suffices, bisection the smallest one. All in float would be no int8 at all, and raises.
    `attempt` converts with these layers in float; its second result says what differs too much, if so.
    """
    points: dict[int, KeptFloatTrial] = {}
    problems: list[str] = []

    def suffices(count: int) -> bool:
        points[count], problem = attempt(tuple(ranked[:count]))
        problems.extend([problem] if problem else [])
        return problem is None

    # None, one, two, four, ..., all but one.
    last = max(0, len(ranked) - 1)
    doubling = [0, *(2**power for power in range(last.bit_length()))]
    counts = [*(count for count in doubling if count < last), last]
    enough = next((count for count in counts if suffices(count)), None)
    if enough is None:
        raise ConversionFailed(
            f"int8 does not come within {bound:g} of the original while any layer is in int8: {problems[-1]}; "
            "calibrate on more data, choose another scheme, or set allow= to what may differ"
        )
    low = max((count for count in points if count < enough), default=enough)
    while enough - low > 1:
        middle = (low + enough) // 2
        low, enough = (low, middle) if suffices(middle) else (middle, enough)
    return tuple(ranked[:enough]), tuple(points[count] for count in sorted(points))
