"""A model, its data and its score, as every process of a run can rebuild them."""

from __future__ import annotations

import copy
import inspect
import json
import pickle
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten, treespec_dumps, treespec_loads

from edge_opt._support.extras import import_optional
from edge_opt._support.files import write_whole
from edge_opt.data import Splits, load_splits
from edge_opt.data.datasets import seeded, splits_of
from edge_opt.errors import InvalidInput
from edge_opt.loading import absolute_reference, check_can_change, import_source, load_model
from edge_opt.records.fields import Record, field, record
from edge_opt.records.sweeps import MetricDirection
from edge_opt.run.config import RunConfig
from edge_opt.search.choose import packed_answers, paired
from edge_opt.tasks.batches import FlatCalls, Task, example_inputs, first_shape, joined_calls, sized_call, task_of
from edge_opt.tasks.paired_scores import Score
from edge_opt.trace.inputs import CallArguments, flat_tensors

STRUCTURE = "inputs.json"


@contextmanager
def torch_threads(threads: int) -> Iterator[None]:
    """Compute with this many threads inside, and restore the caller's number.

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


@record
class ModelAndData(Record):
    """A model and its data, as every process can rebuild them."""

    model: str | nn.Module = field("A reference, or a picklable model.")
    data: Mapping[str, Any] | Splits = field("The arguments of `load_splits`, or picklable parts.")
    config: RunConfig = field("The configuration; its task says how the model is called and scored.", factory=RunConfig)
    pickled_model: bytes = field("What the reference returned, pickled; empty where it cannot be pickled.", default=b"")
    weights: bytes = field("Its state, where a factory runs again because its model cannot be pickled.", default=b"")
    batch_size: int | None = field("Samples of the timed batch; None: the first validation batch.", default=None)
    data_key: str = field(
        "Names the data in forked processes: data of another run, which may differ, has another.",
        factory=lambda: secrets.token_hex(8),
        compare=False,
    )

    @classmethod
    def from_config(cls, config: RunConfig) -> ModelAndData:
        """Return the model and the data that a configuration names."""
        keys = ("batch_size", "seed", "dataloader_seed", "train_subset", "val_subset", "calibration_batches",
                "num_workers", "download")  # fmt: skip
        data = {
            **{key: getattr(config, key) for key in keys},
            "dataset": absolute_reference(config.dataset),
            "data_dir": None if config.data_dir is None else str(Path(config.data_dir).resolve()),
            "parts_are_datasets": config.collate is not None,
        }
        return cls(absolute_reference(config.model_reference), data, config)

    @classmethod
    def from_arguments(
        cls, model: nn.Module | str, loaders: Any, inputs: Sequence[int] | None, config: RunConfig
    ) -> ModelAndData:
        """Return the model and the data of `eo.sweep`; refuse what other processes cannot import."""
        for key, value in config.task.items():
            # Of an object, its class.
            own = value if inspect.isroutine(value) or inspect.isclass(value) else type(value)
            if not _is_importable(own):
                name = own.__qualname__.rpartition(".")[2]
                raise InvalidInput(f"{key} is {name}, which other processes cannot import; pass 'file.py:f'")
        if isinstance(model, nn.Module):
            check_can_change(model, "swept")
        for path, module in model.named_modules() if isinstance(model, nn.Module) else ():
            if not _is_importable(type(module)):
                where = f"module {path!r}" if path else "the model"
                kind = type(module).__qualname__
                raise InvalidInput(f"{where} is a {kind}, which other processes cannot import; pass 'file.py:factory'")
        options: dict[str, Any] = {
            "calibration_batches": config.calibration_batches,
            "seed": config.seed,
            "parts_are_datasets": config.collate is not None,
        }
        data: Mapping[str, Any] | Splits
        if isinstance(loaders, str):
            data = {"dataset": absolute_reference(loaders), **options}
        else:
            data = splits_of(loaders, "loaders", **options)
        model = absolute_reference(model) if isinstance(model, str) else model
        return cls(model, data, config, batch_size=None if inputs is None else int(inputs[0]))

    def build(self) -> nn.Module:
        """Return the model, a new one each time, in eval mode."""
        if isinstance(self.model, nn.Module):
            return copy.deepcopy(self.model).eval()
        if self.pickled_model:
            import_source(self.model)
            return cast("nn.Module", pickle.loads(self.pickled_model)).eval()
        with seeded(self.config.seed):
            model = load_model(self.model).model
            check_can_change(model, "swept")
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
        if isinstance(self.data, Splits):
            return self.data
        return _shared.get(self.data_key) or load_splits(**self.data)

    def shared_data(self) -> list[str]:
        """Return what the fork server calls so that its children have the data: `splits` finds it there."""
        if isinstance(self.data, Splits):
            return []
        return [f"?{__name__}:share_splits {json.dumps([self.data_key, self.data])}"]

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


# The data of this process and of those forked from it, by its key.
_shared: dict[str, Splits] = {}


def share_splits(text: str) -> None:
    """Load data for all processes that are forked from this one; the text is its key and what `load_splits` takes."""
    # A thread that exists when a process is forked is missing in the child: torch must not start any.
    torch.set_num_threads(1)
    key, arguments = json.loads(text)
    _shared[key] = load_splits(**arguments)


def _is_importable(kind: Any) -> bool:
    """Return whether other processes can import a class or a function."""
    name = getattr(kind, "__qualname__", "")
    is_local = "<locals>" in name or "<lambda>" in name
    return getattr(kind, "__module__", None) != "__main__" and not is_local


@record
class ScoreSummary(Record):
    """The score of a variant, as plain values that any process and JSON can hold."""

    value: float = field("The metric over all samples.")
    low: float = field("Lower end of its 95 % interval.")
    high: float = field("Upper end of its 95 % interval.")
    samples: int = field("Samples it was computed over.")
    metric: str = field("Its name.", default="accuracy")
    direction: MetricDirection = field("Whether higher or lower is better.", default="higher")
    answers: str = field("Packed right answers; empty where the metric has none.", default="", compare=False)
    replicates: tuple[float, ...] = field("The metric on resamples; empty with `answers`.", default=(), compare=False)

    def drop(self, other: ScoreSummary) -> float:
        """Return by how much another is worse; below zero where it is better."""
        return self.value - other.value if self.direction == "higher" else other.value - self.value

    def paired_drop(self, other: ScoreSummary) -> tuple[float, float] | None:
        """Return the 95 % interval of that drop; None where the two scores are not paired."""
        difference = paired(self.value - other.value, self, other) if self.samples == other.samples else None
        if difference is None:
            return None
        is_higher_better = self.direction == "higher"
        return (difference.low, difference.high) if is_higher_better else (-difference.high, -difference.low)


def summarize_score(score: Score) -> ScoreSummary:
    """Return a score as plain values."""
    right = score.right_answers
    answers = "" if right is None else packed_answers(right)
    resamples = () if answers else tuple(float(value) for value in score.resamples)
    name, direction = score.metric.name, score.metric.direction
    return ScoreSummary(score.value, *score.interval, score.samples, name, direction, answers, resamples)


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
