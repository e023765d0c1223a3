"""Mixed precision by sensitivity: the few layers that hurt most stay in float until the budget is met."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn

from edge_opt.errors import ConversionFailed
from edge_opt.quantization.fake_quantization import at_precision, watching
from edge_opt.records.conversions import KeptFloatTrial

# Without a bound of the caller's: half of what int8 may differ by.
AUTO_BOUND = 0.1
_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def ranked_layers(model: nn.Module, outputs: Callable[[], Sequence[torch.Tensor]]) -> list[str]:
    """Return the paths of layers with weights, worst first: by the change of the outputs when it alone runs in int8.

    `outputs` runs the model on one batch; the caller keeps the model unchanged around this function.
    """
    modules = model.named_modules()
    layers: dict[str, nn.Module] = {path: module for path, module in modules if path and isinstance(module, _LAYERS)}
    bounds: dict[str, tuple[float, float]] = {}
    harm: dict[str, float] = {}
    with watching(layers, bounds):
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

    enough = next((count for count in _doubling(len(ranked)) if suffices(count)), None)
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


def _doubling(layers: int) -> Iterator[int]:
    """Numbers of layers to spare: none, one, two, four, ..., all but one."""
    count = 0
    while count < layers - 1:
        yield count
        count = 2 * count or 1
    if layers:
        yield layers - 1
