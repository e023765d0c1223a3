"""A model's call taken apart into flat tensors with names, and batches read for it."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten_with_path, tree_leaves, tree_unflatten

from edge_opt import units
from edge_opt._support.checks import check_whole
from edge_opt._support.unchanged import preserve_rng, unchanged, without_fast_path
from edge_opt.errors import InvalidInput
from edge_opt.quantization.onnx_files import Tensors
from edge_opt.trace.inputs import call_on, flat_tensors, on_device
from edge_opt.trace.module_calls import module_paths

_TENSOR = object()


class FlatModel(nn.Module):
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
class ModelCall:
    """A model with the arguments of one call, taken apart into tensors with names.

    `model` is a copy of the caller's in eval mode, so that a conversion runs it freely. A model that cannot be copied
    is the caller's own, and every run restores it: `is_copy` says which.
    """

    model: nn.Module
    names: tuple[str, ...]
    tensors: Tensors
    spec: TreeSpec
    leaves: tuple[Any, ...]
    is_copy: bool = True

    @property
    def name(self) -> str:
        return type(self.model).__name__

    def flat(self, dtype: torch.dtype | None = None, model: nn.Module | None = None) -> FlatModel:
        """Return the model, or a copy of it, behind flat tensors."""
        return FlatModel(self.model if model is None else model, self.spec, list(self.leaves), dtype)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run the model inside, without gradients; the caller's random numbers and own model are unchanged after."""
        with torch.no_grad(), without_fast_path(), preserve_rng():
            if self.is_copy:
                yield
                return
            with _values_unchanged(self.model), unchanged(list(module_paths(self.model)), training=False):
                yield

    def outputs(self, tensors: Tensors) -> Tensors:
        """Return what the original returns, as flat tensors."""
        with self.running():
            outputs = tuple(tensor.detach().cpu().clone() for tensor in self.flat()(*(t.clone() for t in tensors)))
        if not outputs:
            raise InvalidInput(f"{self.name} answers with no tensor; return tensors, or structures that hold some")
        return outputs

    def read(self, batch: Any, what: str = "the batch") -> Tensors:
        """Return the model's tensors from one batch of a loader: a tensor, a mapping, or a tuple with labels behind."""
        if isinstance(batch, (tuple, list)) and batch and isinstance(batch[0], Mapping):
            batch = batch[0]
        if isinstance(batch, Mapping):
            missing = [name for name in self.names if name not in batch]
            if missing:
                raise InvalidInput(f"{what} has no {missing[0]!r}; it has {', '.join(map(str, batch))}")
            values = [batch[name] for name in self.names]
        else:
            values = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, (torch.Tensor, np.ndarray))]
        if len(values) < len(self.names):
            raise InvalidInput(
                f"{what} has {len(values)} tensors; the model takes {len(self.names)}: {', '.join(self.names)}"
            )
        # Values after the inputs are labels.
        return tuple(
            self._fitting(torch.as_tensor(value), name, example, what)
            for value, name, example in zip(values, self.names, self.tensors, strict=False)
        )

    def _fitting(self, value: torch.Tensor, name: str, example: torch.Tensor, what: str) -> torch.Tensor:
        fits = value.dim() == example.dim() and value.shape[1:] == example.shape[1:]
        if not fits or value.is_floating_point() != example.is_floating_point():
            expected = f"N{units.TIMES}{units.shape(example.shape[1:])}" if example.dim() > 1 else "N"
            raise InvalidInput(
                f"{what}: input {name!r} is {units.shape(value.shape)} of {str(value.dtype).removeprefix('torch.')}; "
                f"the model takes {expected} of {str(example.dtype).removeprefix('torch.')}"
            )
        return value.detach().to("cpu", example.dtype)


def model_call(model: nn.Module, inputs: Any, kwargs: Mapping[str, Any] | None = None) -> ModelCall:
    """Return the call of a copy of the model on the CPU; tensors are the caller's, or random ones for shapes."""
    arguments = call_on(model, inputs, kwargs, "cpu")
    leaves, spec = tree_flatten_with_path((arguments.args, arguments.kwargs))
    tensors = [(path, leaf) for path, leaf in leaves if isinstance(leaf, torch.Tensor)]
    if not tensors:
        raise InvalidInput("the example inputs hold no tensor; pass a shape such as (1, 3, 224, 224), or tensors")
    names = _names(model, [path for path, _ in tensors])
    kept_leaves = tuple(_TENSOR if isinstance(leaf, torch.Tensor) else leaf for _, leaf in leaves)
    copied, is_copy = _eval_copy(model)
    return ModelCall(copied, names, tuple(tensor for _, tensor in tensors), spec, kept_leaves, is_copy)


def flat_call(model: nn.Module, tensors: Tensors, names: tuple[str, ...]) -> ModelCall:
    """Return the call of a module of ours that takes tensors one after the other and has no state."""
    leaves, spec = tree_flatten_with_path((tensors, {}))
    return ModelCall(model, names, tensors, spec, (_TENSOR,) * len(leaves))


def _eval_copy(model: nn.Module) -> tuple[nn.Module, bool]:
    """Return a copy of the model in eval mode; the model itself where it cannot be copied, and whether it is a copy.

    Modes are set on each module: a model's own `train()` may fuse or merge weights.
    """
    on_cpu = on_device(model, "cpu")
    if on_cpu is model:
        try:
            with preserve_rng():
                on_cpu = copy.deepcopy(model)
        except Exception:  # tensors with a history, locks, open files
            return model, False
    for module in on_cpu.modules():
        module.training = False
    return on_cpu, True


@contextmanager
def _values_unchanged(model: nn.Module) -> Iterator[None]:
    tensors = [*model.parameters(), *model.buffers()]
    copies = [tensor.detach().clone() for tensor in tensors]
    try:
        yield
    finally:
        for tensor, before in zip(tensors, copies, strict=True):
            if not torch.equal(tensor, before):
                tensor.copy_(before)


def _names(model: nn.Module, paths: list[Any]) -> tuple[str, ...]:
    """Return input names as forward calls them; inside a structure the key is appended."""
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


def output_names(count: int) -> tuple[str, ...]:
    """Return the names that outputs get in every file."""
    return ("output",) if count == 1 else tuple(f"output_{number}" for number in range(count))


@dataclass(frozen=True, slots=True)
class BatchAttempt:
    """Tensors to export a model with, which of them have a free batch, and the fixed batch; None where it is free."""

    tensors: Tensors
    is_free: tuple[bool, ...]
    batch: int | None

    def dynamic_shapes(self, dim: Any) -> Any:
        """Return the shapes as torch.export takes them, with `dim` for the batch; None where all are fixed."""
        return (tuple({0: dim} if free else None for free in self.is_free),) if self.batch is None else None


def batch_attempts(call: ModelCall) -> tuple[BatchAttempt, BatchAttempt]:
    """Return how to export a model: for any batch, and for the example's own where that fails.

    torch.export takes a batch of one for a constant, so that the first attempt has at least two samples.
    """
    count = call.tensors[0].shape[0] if call.tensors[0].dim() else 1
    is_batched = tuple(tensor.dim() > 0 and tensor.shape[0] == count for tensor in call.tensors)
    doubled = tuple(
        torch.cat([tensor, tensor]) if batched and count == 1 else tensor
        for tensor, batched in zip(call.tensors, is_batched, strict=True)
    )
    fixed = BatchAttempt(call.tensors, (False,) * len(call.tensors), count)
    return BatchAttempt(doubled, is_batched, None), fixed


def in_batches_of(batches: list[Tensors], size: int | None) -> list[Tensors]:
    """Return the same samples in batches of the only size that a file takes; as they are where it takes any."""
    if size is None:
        return batches
    pieces = [
        tuple(t[start : start + size] if t.dim() and len(t) == len(batch[0]) else t for t in batch)
        for batch in batches
        for start in range(0, len(batch[0]) - size + 1, size)
    ]
    return pieces or batches


# So many batches are made of larger ones at most: each is a call.
_FIXED_BATCHES = 64


@dataclass(frozen=True, slots=True)
class LabeledBatches:
    """Batches of a model, the class of each sample where they have labels, and where they come from."""

    tensors: list[Tensors]
    labels: list[torch.Tensor | None]
    source: str

    @classmethod
    def read(
        cls, call: ModelCall, batches: Iterable[Any], max_batches: int | None, what: str, source: str
    ) -> LabeledBatches:
        """Return the first batches of a loader, checked against the model's inputs; `what` names them in errors."""
        if isinstance(batches, (torch.Tensor, np.ndarray, Mapping)):
            batches = [batches]
        if max_batches is not None:
            check_whole("calibration_batches", max_batches)
        tensors: list[Tensors] = []
        labels: list[torch.Tensor | None] = []
        for number, batch in enumerate(islice(batches, max_batches), start=1):
            tensors.append(call.read(batch, f"{what} batch {number}"))
            labels.append(_classes(batch, len(call.names)))
        if not tensors:
            raise InvalidInput(f"the {what} loader is empty; give at least one batch of inputs")
        return cls(tensors, labels, source)

    def of_size(self, size: int | None) -> LabeledBatches:
        """Return the same samples, with their labels, in batches of the only size that a file takes."""
        if size is None or all(len(batch[0]) == size for batch in self.tensors if batch[0].dim()):
            return self
        # Labels go through the same cuts as one input more; batches without labels get numbers that none can have.
        marked = [
            (*batch, torch.full((len(batch[0]),), -1) if classes is None else classes)
            for batch, classes in zip(self.tensors, self.labels, strict=True)
        ]
        pieces = in_batches_of(marked, size)[:_FIXED_BATCHES]
        labels = [None if bool((piece[-1] < 0).all()) else piece[-1] for piece in pieces]
        return LabeledBatches([piece[:-1] for piece in pieces], labels, self.source)


def _classes(batch: Any, inputs: int) -> torch.Tensor | None:
    """Return what stands behind the inputs of a batch if it is a class for each sample."""
    leaves = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, (torch.Tensor, np.ndarray))]
    if not isinstance(batch, (tuple, list)) or len(leaves) != inputs + 1:
        return None
    classes = torch.as_tensor(leaves[-1])
    is_class = classes.dim() == 1 and not classes.is_floating_point() and len(leaves[0]) == len(classes)
    return classes.detach().cpu() if is_class else None
