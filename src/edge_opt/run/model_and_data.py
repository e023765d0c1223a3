"""A model and its data, as every process of a run can rebuild them."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten, treespec_dumps, treespec_loads

from edge_opt._support.extras import import_optional
from edge_opt._support.files import write_whole
from edge_opt.data import Splits, load_splits
from edge_opt.data.datasets import seeded
from edge_opt.errors import InvalidInput
from edge_opt.loading import import_source, load_model
from edge_opt.run.config import RunConfig
from edge_opt.tasks.batches import FlatCalls, Task, example_inputs, first_shape, joined_calls, sized_call, task_of
from edge_opt.trace.inputs import CallArguments, flat_tensors

STRUCTURE = "inputs.json"


@contextmanager
def torch_threads(threads: int) -> Iterator[None]:
    """Compute with so many threads inside, and with the caller's number outside.

    >>> before = torch.get_num_threads()
    >>> with torch_threads(1):
    ...     torch.get_num_threads()
    1
    >>> torch.get_num_threads() == before
    True
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True)
class ModelAndData:
    """A model and its data, as every process can rebuild them.

    Attributes:
        model: A reference, or a picklable model.
        data: The arguments of `load_splits`, or picklable parts.
        config: The configuration; its task says how the model is called and scored.
        pickled_model: What the reference returned, pickled; empty where it cannot be pickled.
        weights: The state of the model, for a reference whose model cannot be pickled: the factory runs again.
        batch_size: Samples in the batch that is profiled and timed; None is the first validation batch.
    """

    model: str | nn.Module
    data: Mapping[str, Any] | Splits
    config: RunConfig = field(default_factory=RunConfig)
    pickled_model: bytes = field(default=b"", repr=False)
    weights: bytes = field(default=b"", repr=False)
    batch_size: int | None = None

    def build(self) -> nn.Module:
        """Return the model, a new one each time, in eval mode."""
        if isinstance(self.model, nn.Module):
            return copy.deepcopy(self.model).eval()
        if self.pickled_model:
            import_source(self.model)
            return cast("nn.Module", pickle.loads(self.pickled_model)).eval()
        with seeded(self.config.seed):
            model = load_model(self.model).model
        if self.weights:
            model.load_state_dict(weights_from(self.weights))
        return model.eval()

    def holding(self, model: nn.Module) -> ModelAndData:
        """Return a copy that builds this model instead of calling the factory again."""
        if isinstance(self.model, nn.Module):
            return replace(self, model=model)
        try:
            holder = replace(self, pickled_model=pickle.dumps(model))
            holder.build()
        except Exception:  # whatever a class of the user's raises: its weights can be carried instead
            return replace(self, weights=weights_of(model))
        return holder

    def splits(self) -> Splits:
        """Return the four parts of the data, the same in every process."""
        return self.data if isinstance(self.data, Splits) else load_splits(**self.data)

    def task(self) -> Task:
        """Return the task: how the model is called, scored and trained."""
        return task_of(**self.config.task)

    def call(self, splits: Splits, model: nn.Module) -> CallArguments:
        """Return the arguments of one call with validation samples, for profiling and timing."""
        task = self.task()
        joined: CallArguments | None = None
        for raw in splits.validation:
            call = task.call(model, raw)
            joined = call if joined is None else joined_calls(joined, call)
            if self.batch_size is None or first_shape(joined)[0] >= self.batch_size:
                break
        if joined is None:
            raise InvalidInput("the validation part has no batches; at least one is needed")
        return joined if self.batch_size is None else sized_call(joined, self.batch_size)

    def example(self, splits: Splits, model: nn.Module) -> Any:
        """Return that call as `profile`, `prune` and `convert` take their inputs."""
        return example_inputs(self.call(splits, model))

    def samples(
        self, part: Iterable[Any], model: nn.Module, most: int
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the first samples of a part: the tensors of the inputs, and those of the labels."""
        task = self.task()
        raw = next(iter(part))
        call, batch = task.call(model, raw), next(task.batches(model, [raw]))
        count = min(most, first_shape(call)[0])
        first = sized_call(call, count)
        inputs = [leaf for leaf in tree_leaves((first.args, first.kwargs)) if isinstance(leaf, torch.Tensor)]
        return inputs, [leaf[:count] if leaf.dim() else leaf for leaf in flat_tensors(batch.labels)]

    def calibration(self, splits: Splits, model: nn.Module) -> FlatCalls:
        """Return the calibration part as flat tensors, in the order of the model's inputs."""
        return FlatCalls(self.task(), model, splits.calibration)


def weights_of(model: nn.Module) -> bytes:
    """Return a model's state as safetensors; a shared tensor is written once for each name."""
    state = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in model.state_dict().items()}
    content: bytes = safetensors().save(state)
    return content


def weights_from(content: bytes) -> dict[str, torch.Tensor]:
    """Return the state that `weights_of` wrote; nothing in it is executed."""
    state: dict[str, torch.Tensor] = safetensors().load(content)
    return state


def safetensors() -> Any:
    """Import safetensors for torch, or say how to install it."""
    return import_optional("safetensors.torch", "a run needs", "run")


def save_call(path: Path, call: CallArguments) -> None:
    """Write the tensors of a call, in the order in which runners take them, and their structure beside them."""
    leaves, spec = tree_flatten((list(call.args), call.kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    others = [None if isinstance(leaf, torch.Tensor) else [leaf] for leaf in leaves]
    write_whole(path, safetensors().save({f"{index}": value.contiguous() for index, value in enumerate(tensors)}))
    write_whole(path.with_name(STRUCTURE), json.dumps({"spec": treespec_dumps(spec), "leaves": others}))


def load_call(path: Path) -> CallArguments:
    """Return the call that `save_call` wrote."""
    structure = json.loads(path.with_name(STRUCTURE).read_text(encoding="utf-8"))
    tensors = iter(load_inputs(path))
    leaves = [next(tensors) if other is None else other[0] for other in structure["leaves"]]
    args, kwargs = tree_unflatten(leaves, treespec_loads(structure["spec"]))
    return CallArguments(tuple(args), kwargs)


def load_inputs(path: Path) -> list[torch.Tensor]:
    """Return the tensors that `save_call` wrote."""
    tensors = weights_from(path.read_bytes())
    return [tensors[f"{index}"] for index in range(len(tensors))]
