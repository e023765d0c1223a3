"""What a model answers with: its tensors, in whatever structure they stand."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten


def flat_tensors(answer: Any) -> list[torch.Tensor]:
    """Every tensor of an answer, in order: of tuples, of mappings of any class, and of the fields of dataclasses.

    >>> flat_tensors((torch.tensor(1), {"a": SimpleNamespace(b=torch.tensor(2))}))
    [tensor(1), tensor(2)]
    """
    found: list[torch.Tensor] = []
    for leaf in tree_leaves(answer):
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        else:
            found += [tensor for part in _parts(leaf).values() for tensor in flat_tensors(part)]
    return found


def map_tensors(function: Callable[..., Any], *answers: Any) -> Any:
    """Answers that are built alike as one of that structure and class: the function makes each tensor of theirs.

    What is no tensor is that of the first.

    >>> one, two = (SimpleNamespace(scores=torch.tensor([value])) for value in (1, 2))
    >>> map_tensors(lambda a, b: torch.cat([a, b]), one, two)
    namespace(scores=tensor([1, 2]))
    """
    rows, spec = zip(*(tree_flatten(answer)[0] for answer in answers), strict=True), tree_flatten(answers[0])[1]
    return tree_unflatten([_mapped(function, row) for row in rows], spec)


def _mapped(function: Callable[..., Any], row: tuple[Any, ...]) -> Any:
    first = row[0]
    if isinstance(first, torch.Tensor):
        return function(*row)
    parts = [_parts(each) for each in row]
    if not parts[0]:
        return first
    made = copy.copy(first)
    for name in parts[0]:
        value = map_tensors(function, *(each[name] for each in parts))
        if isinstance(first, Mapping):
            made[name] = value
        else:
            # A frozen dataclass refuses the ordinary way.
            object.__setattr__(made, name, value)
    return made


def _parts(value: Any) -> dict[Any, Any]:
    """What stands in a structure that torch does not know: a mapping of another class, a dataclass, a namespace."""
    if isinstance(value, Mapping):
        return dict(value)
    if is_dataclass(value) and not isinstance(value, type):
        return {name: getattr(value, name) for name in value.__dataclass_fields__}
    return dict(vars(value)) if isinstance(value, SimpleNamespace) else {}
