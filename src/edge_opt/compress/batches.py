"""Batches: whatever a loader yields, read as the arguments of one forward and the labels of its results."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from edge_opt.errors import InvalidInput
from edge_opt.trace.inputs import call_arguments, materialize

LABELS = ("labels", "label", "y")


@dataclass(frozen=True, slots=True)
class Batch:
    """The arguments of one forward and the labels of its results."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    labels: torch.Tensor


def read_batches(model: nn.Module, loader: Iterable[Any], most: int | None = None) -> Iterator[Batch]:
    """The batches of a loader, on the model's device, up to `most` of them; none at all is an error."""
    place = next((tensor.device for tensor in (*model.parameters(), *model.buffers())), torch.device("cpu"))
    is_empty = True
    for number, raw in enumerate(islice(loader, most)):
        is_empty = False
        if isinstance(raw, Batch):
            yield raw
            continue
        inputs, labels = _parted(raw, number)
        call = materialize(call_arguments(model, inputs, None), lambda value: value.to(place))
        yield Batch(call.args, call.kwargs, torch.as_tensor(labels, device=place))
    if is_empty:
        raise InvalidInput("the loader has no batches; pass one that yields (inputs, labels)")


def _parted(raw: Any, number: int) -> tuple[Any, Any]:
    """Inputs and labels of a batch as the loader gave it."""
    if isinstance(raw, (tuple, list)) and len(raw) > 1:
        return list(raw[:-1]), raw[-1]
    for key in LABELS if isinstance(raw, Mapping) else ():
        if key in raw:
            return {name: value for name, value in raw.items() if name != key}, raw[key]
    what = f"a mapping of {', '.join(map(str, raw))}" if isinstance(raw, Mapping) else f"a {type(raw).__name__}"
    raise InvalidInput(f"batch {number} is {what}, without labels; use (inputs, labels), or a key of {LABELS}")


def logits_of(output: Any) -> torch.Tensor:
    """The scores in whatever a model returns."""
    found = output
    if isinstance(output, Mapping):
        found = output.get("logits", next(iter(output.values()), None))
    elif not isinstance(output, torch.Tensor):
        found = getattr(output, "logits", output[0] if isinstance(output, (tuple, list)) and output else None)
    if not isinstance(found, torch.Tensor):
        raise InvalidInput(f"the model returns a {type(output).__name__} without a tensor of scores")
    return found


def classifier_loss(output: Any, labels: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of a classifier's scores, (samples, classes, ...), with labels (samples, ...)."""
    scores = logits_of(output)
    expected = (scores.shape[0], *scores.shape[2:]) if scores.dim() > 1 else None
    if tuple(labels.shape) != expected or labels.is_floating_point():
        raise InvalidInput(
            f"outputs {tuple(scores.shape)} and labels {tuple(labels.shape)} of {labels.dtype} do not fit; "
            "expected (samples, classes) and whole numbers (samples,)"
        )
    return F.cross_entropy(scores, labels)
