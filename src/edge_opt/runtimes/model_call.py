"""A model's call taken apart into flat tensors with names, and batches read for it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten_with_path, tree_leaves, tree_unflatten

from edge_opt import units
from edge_opt._support.checks import check_whole
from edge_opt._support.output_tensors import flat_tensors
from edge_opt._support.unchanged import unchanged
from edge_opt.errors import InvalidInput
from edge_opt.quantization.onnx_files import Tensors
from edge_opt.trace.inputs import call_on, on_device
from edge_opt.trace.module_calls import module_paths

_TENSOR = object()


class Flat(nn.Module):
    """A model that takes its tensors one after the other and returns a tuple of tensors, whatever its own structures.

    With a `dtype` floating inputs are cast to it and outputs back to float32, so that all precisions look alike.
    """

    def __init__(self, model: nn.Module, spec: TreeSpec, leaves: list[Any], dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.model = model
        self._spec, self._leaves, self._dtype = spec, leaves, dtype

    def forward(self, *tensors: torch.Tensor) -> Tensors:
        waiting = iter(tensors)
        leaves = [self._cast(next(waiting), self._dtype) if leaf is _TENSOR else leaf for leaf in self._leaves]
        args, kwargs = tree_unflatten(leaves, self._spec)
        back = None if self._dtype is None else torch.float32
        return tuple(self._cast(tensor, back) for tensor in flat_tensors(self.model(*args, **kwargs)))

    @staticmethod
    def _cast(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
        return tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)


@dataclass(frozen=True, slots=True)
class Subject:
    """A model with the arguments of one call, taken apart into tensors with names."""

    model: nn.Module
    names: tuple[str, ...]
    tensors: Tensors
    spec: TreeSpec
    leaves: tuple[Any, ...]

    @property
    def name(self) -> str:
        return type(self.model).__name__

    def flat(self, dtype: torch.dtype | None = None, model: nn.Module | None = None) -> Flat:
        """The model, or a copy of it, behind flat tensors."""
        return Flat(self.model if model is None else model, self.spec, list(self.leaves), dtype)

    def read(self, batch: Any, what: str = "the batch") -> Tensors:
        """The model's tensors from one batch of a loader: a tensor, a mapping, or a tuple with labels behind."""
        if isinstance(batch, (tuple, list)) and batch and isinstance(batch[0], Mapping):
            batch = batch[0]
        if isinstance(batch, Mapping):
            missing = [name for name in self.names if name not in batch]
            if missing:
                raise InvalidInput(f"{what} has no {missing[0]!r}; it has {', '.join(map(str, batch))}")
            found = [batch[name] for name in self.names]
        else:
            found = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, (torch.Tensor, np.ndarray))]
        if len(found) < len(self.names):
            raise InvalidInput(
                f"{what} has {len(found)} tensors; the model takes {len(self.names)}: {', '.join(self.names)}"
            )
        # What stands behind the inputs are labels.
        return tuple(
            self._fitting(torch.as_tensor(value), name, example, what)
            for value, name, example in zip(found, self.names, self.tensors, strict=False)
        )

    def _fitting(self, value: torch.Tensor, name: str, example: torch.Tensor, what: str) -> torch.Tensor:
        fits = value.dim() == example.dim() and value.shape[1:] == example.shape[1:]
        if not fits or value.is_floating_point() != example.is_floating_point():
            expected = f"N{units.TIMES}{units.shape(example.shape[1:])}" if example.dim() > 1 else "N"
            raise InvalidInput(
                f"{what}: input {name!r} is {units.shape(value.shape)} of {_dtype(value)}; "
                f"the model takes {expected} of {_dtype(example)}"
            )
        return value.detach().to("cpu", example.dtype)

    def outputs(self, tensors: Tensors) -> Tensors:
        """What the original returns, as flat tensors."""
        with undisturbed(self.model):
            found = tuple(tensor.detach().cpu().clone() for tensor in self.flat()(*(t.clone() for t in tensors)))
        if not found:
            raise InvalidInput(f"{self.name} answers with no tensor; return tensors, or structures that hold some")
        return found


def subject_of(model: nn.Module, inputs: Any, kwargs: Mapping[str, Any] | None = None) -> Subject:
    """The model on the CPU with example tensors: the caller's, or for shapes random ones."""
    model = on_device(model, "cpu")
    arguments = call_on(model, inputs, kwargs, "cpu")
    found, spec = tree_flatten_with_path((arguments.args, arguments.kwargs))
    tensors = [(path, leaf) for path, leaf in found if isinstance(leaf, torch.Tensor)]
    if not tensors:
        raise InvalidInput("the example inputs hold no tensor; pass a shape such as (1, 3, 224, 224), or tensors")
    leaves = tuple(_TENSOR if isinstance(leaf, torch.Tensor) else leaf for _, leaf in found)
    names = _names(model, [path for path, _ in tensors])
    return Subject(model, names, tuple(tensor for _, tensor in tensors), spec, leaves)


def _names(model: nn.Module, paths: list[Any]) -> tuple[str, ...]:
    """Input names as forward calls them; inside a structure the key is appended."""
    try:
        parameters = list(signature(model.forward).parameters)
    except (TypeError, ValueError):
        parameters = []
    names: list[str] = []
    for kind, *keys in paths:
        words = [str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in keys]
        if kind.idx == 0:
            position = int(words[0])
            words[0] = parameters[position] if position < len(parameters) else f"input_{position}"
        name = re.sub(r"\W", "_", "_".join(words))
        names.append(f"{name}_{len(names)}" if name in names else name)
    return tuple(names)


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Run the model in eval without gradients; then it is as it was, weights and statistics included."""
    kept = [*model.parameters(), *model.buffers()]
    with torch.no_grad():
        copies = [tensor.detach().clone() for tensor in kept]
        try:
            with unchanged(list(module_paths(model)), training=False):
                yield
        finally:
            for tensor, before in zip(kept, copies, strict=True):
                if not torch.equal(tensor, before):
                    tensor.copy_(before)


def read_batches(subject: Subject, batches: Iterable[Any], most: int | None, what: str) -> list[Tensors]:
    """The first `most` batches, checked against the model's inputs."""
    if isinstance(batches, (torch.Tensor, np.ndarray, Mapping)):
        batches = [batches]
    if most is not None:
        check_whole("calibration_batches", most)
    read: list[Tensors] = []
    for number, batch in enumerate(batches):
        if most is not None and number >= most:
            break
        read.append(subject.read(batch, f"{what} batch {number + 1}"))
    if not read:
        raise InvalidInput(f"the {what} loader is empty; give at least one batch of inputs")
    return read


def in_batches_of(batches: list[Tensors], size: int | None) -> list[Tensors]:
    """The same samples in batches of the only size that a file takes; as they are where it takes any."""
    if size is None:
        return batches
    pieces = [
        tuple(t[start : start + size] if t.dim() and len(t) == len(batch[0]) else t for t in batch)
        for batch in batches
        for start in range(0, len(batch[0]) - size + 1, size)
    ]
    return pieces or batches


def labels_of(subject: Subject, batches: Iterable[Any], labels: list[torch.Tensor | None]) -> Iterable[Any]:
    """The batches as they are; what stands behind their inputs, if it is one class per sample, is put into `labels`."""
    if isinstance(batches, (torch.Tensor, np.ndarray, Mapping)):
        batches = [batches]
    for batch in batches:
        leaves = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, (torch.Tensor, np.ndarray))]
        behind = [torch.as_tensor(leaf) for leaf in leaves[len(subject.names) :]]
        one = behind[0] if isinstance(batch, (tuple, list)) and len(behind) == 1 else None
        is_class = one is not None and one.dim() == 1 and not one.is_floating_point() and len(leaves[0]) == len(one)
        labels.append(one.detach().cpu() if one is not None and is_class else None)
        yield batch


def example_batches(subject: Subject) -> tuple[Tensors, list[bool], int]:
    """The example with a batch of at least two, for one of one is taken for a constant; which inputs have a batch."""
    count = subject.tensors[0].shape[0] if subject.tensors[0].dim() else 1
    batched = [tensor.dim() > 0 and tensor.shape[0] == count for tensor in subject.tensors]
    doubled = tuple(
        torch.cat([tensor, tensor]) if is_batched and count == 1 else tensor
        for tensor, is_batched in zip(subject.tensors, batched, strict=True)
    )
    return doubled, batched, count
