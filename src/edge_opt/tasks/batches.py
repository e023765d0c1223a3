"""A task: how a batch becomes a call, what is scored, and what is trained on."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from edge_opt._support.output_tensors import flat_tensors, map_tensors
from edge_opt.errors import EdgeOptError, InvalidInput, MeasurementFailed, ModelNotFound, first_line
from edge_opt.loading import find_object, parse_reference
from edge_opt.records.sweeps import LABELS, MetricDirection
from edge_opt.tasks.metrics import RESAMPLES, Metric, Score, class_scores, first_tensor, metric_of, reference_name
from edge_opt.trace.inputs import CallArguments, call_arguments, map_arguments

Loss = Callable[[Any, Any], torch.Tensor]
Forward = Callable[[Any, Any], Any]
Collate = Callable[[Any], Any]


def numbers_loss(function: Callable[..., torch.Tensor]) -> Loss:
    """A loss of numbers, refused where outputs and targets would be spread over each other."""

    def loss(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
        values = first_tensor(outputs)
        if values.shape != targets.shape and values.numel() == targets.numel() and len(values) == len(targets):
            values = values.reshape(targets.shape)
        if values.shape != targets.shape:
            raise InvalidInput(
                f"outputs {tuple(values.shape)} and targets {tuple(targets.shape)} are not of one shape; "
                "set loss to cross_entropy for classes, or to a function of your own: file.py:f"
            )
        return function(values, targets.to(values.dtype))

    return loss


def classifier_loss(output: Any, labels: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of scores (samples, classes, ...) or (samples, ..., classes); labels below 0 are ignored."""
    scores, truth = class_scores("a classifier", first_tensor(output), labels)
    return F.cross_entropy(scores.flatten(0, 1), truth.flatten().clamp(min=-1), ignore_index=-1)


LOSSES: Mapping[str, Loss] = {
    "cross_entropy": classifier_loss,
    "mse": numbers_loss(F.mse_loss),
    "l1": numbers_loss(F.l1_loss),
    "smooth_l1": numbers_loss(F.smooth_l1_loss),
    "huber": numbers_loss(F.huber_loss),
    "bce_with_logits": numbers_loss(F.binary_cross_entropy_with_logits),
}
_OF_NUMBERS = ("mae", "rmse", "r2")
_OF_CLASSES = ("accuracy", "top5", "f1", "miou", "perplexity", "wer")


def default_loss(metric: Metric) -> Loss:
    """What is trained on where no loss is set: it follows the metric's task, and for your own metric the targets."""
    if metric.name in _OF_NUMBERS:
        return LOSSES["mse"]
    if metric.name in _OF_CLASSES:
        return classifier_loss

    def loss(outputs: Any, targets: Any) -> torch.Tensor:
        if not isinstance(targets, torch.Tensor):
            raise InvalidInput(f"no loss follows from targets of a {type(targets).__name__}; set loss: file.py:f")
        scores = first_tensor(outputs)
        is_alike = scores.numel() == targets.numel()
        if is_alike and metric.name == "auroc":
            return LOSSES["bce_with_logits"](scores, targets)
        return LOSSES["mse"](scores, targets) if targets.is_floating_point() else classifier_loss(scores, targets)

    return loss


@dataclass(frozen=True, slots=True)
class Batch:
    """The arguments of one forward, the labels of its results, and how both meet.

    Attributes:
        args: What the model is called with by position.
        kwargs: What it is called with by name.
        labels: What its answers are held against: a tensor, or a structure of tensors.
        raw: The batch as the loader gave it, on the model's device.
        forward: Calls the model with the raw batch instead of args and kwargs; None where those do.
        loss: What is trained on.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    labels: Any
    raw: Any = field(default=None, repr=False)
    forward: Forward | None = field(default=None, repr=False)
    loss: Loss = field(default=classifier_loss, repr=False)

    def answer(self, model: Any) -> Any:
        """What the model answers."""
        return model(*self.args, **self.kwargs) if self.forward is None else self.forward(model, self.raw)

    def loss_of(self, outputs: Any) -> torch.Tensor:
        """The loss of answers to this batch."""
        found = self.loss(outputs, self.labels)
        if not isinstance(found, torch.Tensor) or found.numel() != 1:
            raise InvalidInput("the loss must be a tensor of one number, such as a mean over the samples")
        return found.reshape(())


@dataclass(frozen=True, slots=True)
class Task:
    """What a model is for: the metric of its answers, the loss it learns by, and how batches reach it."""

    metric: Metric
    loss: Loss
    forward: Forward | None = None
    collate: Collate | None = None

    def batches(self, model: Any, loader: Iterable[Any], most: int | None = None) -> Iterator[Batch]:
        """The batches of a loader, on the model's device, up to `most` of them; none at all is an error."""
        place = _device(model)
        is_empty = True
        for number, raw in enumerate(islice(loader, most)):
            is_empty = False
            yield raw if isinstance(raw, Batch) else self._batch(model, raw, number, place)
        if is_empty:
            raise InvalidInput("the loader has no batches; pass one that yields (inputs, labels)")

    def _batch(self, model: Any, raw: Any, number: int, place: torch.device) -> Batch:
        made = raw if self.collate is None else self.collate(raw)
        inputs, labels = _parted(made, number)
        targets = _moved(_as_tensors(labels), place)
        if self.forward is None:
            call = call_of(model, inputs)
            moved = map_arguments(call, lambda value: value.to(place))
            return Batch(moved.args, moved.kwargs, targets, loss=self.loss)
        return Batch((), {}, targets, _moved(made, place), self.forward, self.loss)

    def call(self, model: nn.Module, raw: Any) -> CallArguments:
        """What the model would be called with for a batch of the loader; it is not called.

        By position where everything is, else by name, as inputs and kwargs of `profile` are read.
        """
        batch = next(self.batches(model, [raw]))
        found = (batch.args, batch.kwargs) if self.forward is None else _asked(self.forward, batch.raw)
        return _in_one_way(model, *found)

    def check(self, model: nn.Module, loader: Iterable[Any]) -> None:
        """Refuse a metric or a loss that does not fit the data and what the model answers, on the first batch."""
        modes = [(module, module.training) for module in model.modules()]
        try:
            model.eval()
            with torch.no_grad():
                batch = next(self.batches(model, loader))
                answer = batch.answer(model)
                batch.loss_of(answer)
                _fits(self.metric, answer, batch.labels)
        finally:
            for module, mode in modes:
                module.training = mode

    def score(self, model: Any, loader: Iterable[Any], resamples: int = RESAMPLES) -> Score:
        """The metric of whatever answers as the model does; a module is in eval mode meanwhile, and then as it was."""
        modes = [(module, module.training) for module in model.modules()] if isinstance(model, nn.Module) else []
        try:
            if isinstance(model, nn.Module):
                model.eval()
            with torch.no_grad():
                answers = ((batch.answer(model), batch.labels) for batch in self.batches(model, loader))
                return self.metric.scored(answers, resamples)
        finally:
            for module, mode in modes:
                module.training = mode


def _fits(metric: Metric, answer: Any, labels: Any) -> None:
    try:
        metric.value(answer, labels)
    except MeasurementFailed:
        # One batch may have no value, such as an R² of one sample, where all of them have.
        return


def task_of(
    metric: Any = "accuracy",
    loss: Any = None,
    forward: Any = None,
    collate: Any = None,
    metric_direction: MetricDirection | None = None,
) -> Task:
    """The task that a user's words mean: names, references as `file.py:f`, or the functions themselves."""
    found = metric_of(_found(metric, "metric"), metric_direction, reference_name(metric))
    return Task(found, loss_of(loss, found), _function(forward, "forward"), _function(collate, "collate"))


@dataclass(frozen=True)
class TaskSettings:
    """A task as a configuration says it: names, references as `file.py:f`, or functions that can be imported."""

    metric: Any = "accuracy"
    metric_direction: MetricDirection | None = None
    loss: Any = None
    forward: Any = None
    collate: Any = None

    def build(self) -> Task:
        """The task itself, in whatever process."""
        return task_of(self.metric, self.loss, self.forward, self.collate, self.metric_direction)


def loss_of(given: Any, metric: Metric) -> Loss:
    """The loss that a user means: a name, a function of (outputs, targets), or that of the metric's task."""
    if given is None:
        return default_loss(metric)
    found = LOSSES.get(given.lower()) if isinstance(given, str) else None
    if found is not None:
        return found
    if isinstance(given, str) and parse_reference(given) is None:
        raise InvalidInput(f"unknown loss {given!r}; losses are {', '.join(LOSSES)}, or your own: file.py:f")
    own = _function(given, "loss")
    assert own is not None
    # torch's own losses take a tensor, and know nothing of what else a model may return.
    is_torch_s = type(own).__module__.startswith("torch.nn") or getattr(own, "__module__", "") == F.__name__
    return (lambda outputs, targets: own(first_tensor(outputs), targets)) if is_torch_s else own


def _found(given: Any, what: str) -> Any:
    """What a reference names, made with its arguments if it has some; anything else as it is."""
    parsed = parse_reference(given) if isinstance(given, str) else None
    if parsed is None:
        return given
    try:
        found = find_object(parsed)
        return found(**parsed.arguments) if parsed.arguments or inspect.isclass(found) else found
    except ModelNotFound as error:
        raise InvalidInput(f"{what}: {error}") from error
    except EdgeOptError:
        raise
    except Exception as error:
        raise InvalidInput(f"{what} {given!r} raised {first_line(error)}") from error


def _function(given: Any, what: str) -> Any:
    found = _found(given, what)
    if inspect.isclass(found):
        found = found()
    if found is not None and not callable(found):
        raise InvalidInput(f"{what} is {given!r}; it must be a function, or name one: file.py:f")
    return found


def _parted(raw: Any, number: int) -> tuple[Any, Any]:
    """Inputs and labels of a batch as the loader gave it."""
    if isinstance(raw, (tuple, list)) and len(raw) > 1:
        return (raw[0] if len(raw) == 2 and isinstance(raw[0], Mapping) else list(raw[:-1])), raw[-1]
    for key in LABELS if isinstance(raw, Mapping) else ():
        if key in raw:
            return {name: value for name, value in raw.items() if name != key}, _next_tokens(raw, raw[key])
    what = f"a mapping of {', '.join(map(str, raw))}" if isinstance(raw, Mapping) else f"a {type(raw).__name__}"
    raise InvalidInput(
        f"batch {number} is {what}, without labels; use (inputs, labels), or a key of {LABELS}; "
        "collate= can make such a batch"
    )


def _next_tokens(raw: Mapping[str, Any], labels: Any) -> Any:
    """Labels of a causal language model are its inputs: what position t is held against stands at t + 1."""
    tokens = raw.get("input_ids")
    if not isinstance(tokens, torch.Tensor) or not isinstance(labels, torch.Tensor) or tokens.shape != labels.shape:
        return labels
    asked = labels >= 0
    if labels.dim() != 2 or labels.is_floating_point() or not bool((tokens == labels)[asked].all()):
        return labels
    return torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], -100)], 1)


def call_of(model: Any, inputs: Any) -> CallArguments:
    """How the model is called with a batch's inputs: as `profile` reads them, with what Hugging Face batches add.

    Keys that forward does not know are left out where it knows others. Inputs that stand in a tuple of their own are
    spread where forward has so many parameters.
    """
    parameters = _parameters(model)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    if isinstance(inputs, Mapping):
        names = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        known = {key: value for key, value in inputs.items() if key in names}
        if known and not takes_any:
            return call_arguments(model, known, None)
        tensors = {key: value for key, value in inputs.items() if any(map(_is_tensor, tree_leaves(value)))}
        return call_arguments(model, tensors if takes_any else dict(inputs), None)
    if isinstance(inputs, list) and len(inputs) == 1 and isinstance(inputs[0], (tuple, list)):
        places = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        required = [p for p in places if p.default is p.empty]
        if len(required) <= len(inputs[0]) <= len(places) and len(inputs[0]) > 1:
            inputs = list(inputs[0])
    return call_arguments(model, inputs, None)


def _parameters(model: Any) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(getattr(model, "forward", model)).parameters.values())
    except (TypeError, ValueError):
        return []


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _as_tensors(labels: Any) -> Any:
    """Labels as tensors: a list of numbers is one, a structure of tensors stays what it is."""
    if any(map(_is_tensor, tree_leaves(labels))):
        return labels
    try:
        return torch.as_tensor(labels)
    except (TypeError, ValueError, RuntimeError):
        return labels


def _moved(value: Any, place: torch.device) -> Any:
    return map_arguments(CallArguments((value,), {}), lambda tensor: tensor.to(place)).args[0]


def _device(model: Any) -> torch.device:
    tensors = (*model.parameters(), *model.buffers()) if isinstance(model, nn.Module) else ()
    return next((tensor.device for tensor in tensors), torch.device("cpu"))


class _Called(BaseException):
    """A model was called with these arguments. No Exception: the user's code must not catch it."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.arguments = args, kwargs


def _asked(forward: Forward, raw: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What `forward` calls the model with."""

    def probe(*args: Any, **kwargs: Any) -> Any:
        raise _Called(args, kwargs)

    try:
        forward(probe, raw)
    except _Called as called:
        return called.arguments
    except EdgeOptError:
        raise
    except Exception as error:
        raise InvalidInput(
            f"forward raised {first_line(error)}; it must call the model as a whole: model(...)"
        ) from error
    raise InvalidInput("forward never calls the model; it must return what model(...) answers to the batch")


def _in_one_way(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallArguments:
    """Arguments all by position, or all by name where some are."""
    if not args or not kwargs:
        return CallArguments(args, kwargs)
    try:
        bound = inspect.signature(getattr(model, "forward", model)).bind(*args, **kwargs).arguments
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"the model cannot be called as forward= does: {first_line(error)}") from error
    return CallArguments((), dict(bound))


class StandIn:
    """A runner that is called as the model it was made of, and answers in its structure."""

    def __init__(self, run: Callable[..., Any], model: nn.Module, example: CallArguments) -> None:
        self._run, self._model, self._example = run, model, example
        modes = [(module, module.training) for module in model.modules()]
        try:
            with torch.no_grad():
                self._answer = model.eval()(*example.args, **example.kwargs)
        finally:
            for module, mode in modes:
                module.training = mode
        self.forward = model.forward  # its signature says how a batch is read

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = _in_one_way(self._model, args, kwargs)
        given = _as_in((self._example.args, self._example.kwargs), (call.args, call.kwargs))
        found = self._run(*(leaf for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor)))
        tensors = flat_tensors(found)
        if len(tensors) != len(flat_tensors(self._answer)):
            return tuple(tensors)
        waiting = iter(tensors)
        return map_tensors(lambda _: next(waiting), self._answer)


def _as_in(example: Any, value: Any) -> Any:
    """The value with its mappings in the order of the example's."""
    if isinstance(example, Mapping) and isinstance(value, Mapping):
        missing = [key for key in example if key not in value]
        if missing:
            raise InvalidInput(f"a batch has no {missing[0]!r}, which the first batch has")
        return {key: _as_in(example[key], value[key]) for key in example}
    if isinstance(example, (tuple, list)) and isinstance(value, (tuple, list)) and len(example) == len(value):
        return [_as_in(*pair) for pair in zip(example, value, strict=True)]
    return value


def example_inputs(call: CallArguments) -> Any:
    """A call as `profile`, `prune` and `convert` take their inputs: a list by position, a mapping by name."""
    return call.kwargs if call.kwargs else list(call.args)


def samples_of(call: CallArguments) -> int:
    """Samples of a call: the length of its first tensor."""
    first = next((leaf for leaf in tree_leaves((call.args, call.kwargs)) if _is_tensor(leaf) and leaf.dim()), None)
    if first is None:
        raise InvalidInput("inputs of a batch must be tensors whose first dimension is the sample")
    return len(first)


def first_shape(call: CallArguments) -> tuple[int, ...]:
    """Shape of a call's first tensor."""
    samples_of(call)
    return next(tuple(leaf.shape) for leaf in tree_leaves((call.args, call.kwargs)) if _is_tensor(leaf) and leaf.dim())


def joined_calls(one: CallArguments, other: CallArguments) -> CallArguments:
    """The samples of two calls in one."""
    size = samples_of(one)

    def joined(first: Any, second: Any) -> Any:
        is_sampled = _is_tensor(first) and first.dim() and len(first) == size
        return torch.cat([first, second]) if is_sampled else first

    return _each(joined, one, CallArguments(*_as_in((one.args, one.kwargs), (other.args, other.kwargs))))


def sized_call(call: CallArguments, size: int) -> CallArguments:
    """A call with so many samples: the first ones, or all of them again and again."""
    count = samples_of(call)
    repeats = -(-size // count)

    def cut(leaf: Any) -> Any:
        is_sampled = _is_tensor(leaf) and leaf.dim() and len(leaf) == count
        return torch.cat([leaf] * repeats)[:size].clone() if is_sampled else leaf

    return _each(cut, call)


def _each(function: Callable[..., Any], *calls: CallArguments) -> CallArguments:
    """A function applied to the leaves of calls that are built alike."""
    leaves, spec = tree_flatten((tuple(calls[0].args), calls[0].kwargs))
    others = [tree_leaves((tuple(call.args), call.kwargs)) for call in calls[1:]]
    args, kwargs = tree_unflatten([function(*row) for row in zip(leaves, *others, strict=True)], spec)
    return CallArguments(args, kwargs)


class FlatCalls:
    """A loader's batches as the flat tensors of the model's inputs, at each pass."""

    def __init__(self, task: Task, model: nn.Module, loader: Iterable[Any]) -> None:
        self._task, self._model, self._loader = task, model, loader

    def __iter__(self) -> Iterator[tuple[torch.Tensor, ...]]:
        first: CallArguments | None = None
        for raw in self._loader:
            call = self._task.call(self._model, raw)
            first = first or call
            yield tuple(filter(_is_tensor, tree_leaves(_as_in((first.args, first.kwargs), (call.args, call.kwargs)))))
