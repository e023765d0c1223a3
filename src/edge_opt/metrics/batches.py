"""Batches: whatever a loader yields, read as the arguments of one forward and the labels of its results."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from edge_opt.errors import InvalidInput

LABELS = ("labels", "label", "y")


@dataclass(frozen=True, slots=True)
class Batch:
    """The arguments of one forward and the labels of its results."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    labels: torch.Tensor


def read(model: nn.Module, raw: Any, number: int, device: torch.device, dtype: torch.dtype | None) -> Batch:
    """A batch as arguments and labels, on the device and in the type of the model.

    Inputs by name go as keywords where `forward` knows all of them; else one alone goes as it is, several as a mapping.
    """
    inputs, labels = _parted(raw, number)
    try:
        found = torch.as_tensor(labels, device=device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidInput(f"labels of batch {number} are not numbers of classes: {error}") from error
    found = found.reshape(-1) if found.ndim == 2 and found.shape[1] == 1 else found
    moved = [_moved(value, device, dtype) for value in inputs]
    if len(moved) == 1 and isinstance(moved[0], dict):
        if _knows(model, moved[0]):
            return Batch((), moved[0], found)
        if len(moved[0]) == 1:
            moved = list(moved[0].values())
    return Batch(tuple(moved), {}, found)


def _parted(raw: Any, number: int) -> tuple[list[Any], Any]:
    """Inputs and labels of a batch as the loader gave it."""
    if isinstance(raw, (tuple, list)) and len(raw) > 1:
        return list(raw[:-1]), raw[-1]
    is_named = isinstance(raw, Mapping)
    for key in LABELS if is_named else ():
        if key in raw:
            return [{name: value for name, value in raw.items() if name != key}], raw[key]
    what = f"a mapping of {', '.join(map(str, raw))}" if is_named else f"a {type(raw).__name__}"
    raise InvalidInput(f"batch {number} is {what}, without labels; use (inputs, labels), or a key of {LABELS}")


def _knows(model: nn.Module, names: Iterable[str]) -> bool:
    try:
        parameters = inspect.signature(model.forward).parameters.values()
    except (TypeError, ValueError):
        return False
    by_name = {each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)}
    return set(names) <= by_name or any(each.kind is each.VAR_KEYWORD for each in parameters)


def _moved(value: Any, device: torch.device, dtype: torch.dtype | None) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device, dtype) if dtype and value.is_floating_point() else value.to(device)
    if isinstance(value, Mapping):
        return {key: _moved(item, device, dtype) for key, item in value.items()}
    if isinstance(value, PackedSequence):
        packed: Any = value  # its stubs know neither of the two
        return packed.to(device=device, dtype=dtype or value.data.dtype)
    if isinstance(value, (tuple, list)):
        items = [_moved(item, device, dtype) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value
