"""Mixed precision by sensitivity: the few layers that hurt most stay in float until the budget is met."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import torch
from torch import nn

from edge_opt._support.output_tensors import flat_tensors
from edge_opt.compress.agreement import trouble_of
from edge_opt.compress.export import Subject, Tensors, undisturbed
from edge_opt.errors import ConversionFailed
from edge_opt.explanation.sensitivity import at_precision, watching
from edge_opt.records.conversions import Agreement, SparedPoint

# Without a bound of the caller's: half of what int8 may differ by.
AUTO_BOUND = 0.1
_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def ranked_layers(subject: Subject, batch: Tensors) -> list[str]:
    """Paths of layers with weights, worst first: by the change of the outputs when that layer alone runs in int8."""
    modules = subject.model.named_modules()
    layers: dict[str, nn.Module] = {path: module for path, module in modules if path and isinstance(module, _LAYERS)}
    bounds: dict[str, tuple[float, float]] = {}
    harm: dict[str, float] = {}
    with ExitStack() as stack:
        stack.enter_context(undisturbed(subject.model))
        with watching(layers, bounds):
            expected = _outputs(subject, batch)
        for path, layer in layers.items():
            with at_precision(layer, "int8", bounds.get(path)):
                found = _outputs(subject, batch)
            harm[path] = sum(float((a - b).abs().mean()) for a, b in zip(expected, found, strict=True))
    return sorted(layers, key=lambda path: -harm[path])


def _outputs(subject: Subject, batch: Tensors) -> list[torch.Tensor]:
    return [t.double() for t in flat_tensors(subject.flat()(*(tensor.clone() for tensor in batch)))]


def spare_until_it_agrees(
    ranked: list[str], attempt: Callable[[tuple[str, ...]], Agreement], bound: float, single: float | None = None
) -> tuple[tuple[str, ...], tuple[SparedPoint, ...]]:
    """The shortest head of the ranking that, kept in float, brings the rest within the bound; with what each try gave.

    Doubling finds a number that suffices, bisection the smallest one. All in float would be no int8 at all, and raises.
    `single` is how far a single sample may differ, as in `trouble_of`.
    """
    points: dict[int, SparedPoint] = {}
    problems: list[str] = []

    def suffices(count: int) -> bool:
        found = attempt(tuple(ranked[:count]))
        worst = found.relative_difference
        points[count] = SparedPoint(tuple(ranked[:count]), worst or 0.0, found.top1, found.accuracy)
        trouble = trouble_of(found, bound, single)
        problems.extend([trouble[1]] if trouble else [])
        return trouble is None

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
