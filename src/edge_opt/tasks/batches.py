"""The task of a model: its loss and metric, and how batches of a loader become calls of the model, labels and sizes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from edge_opt.errors import EdgeOptError, InvalidInput, MeasurementFailed, ModelNotFound, first_line
from edge_opt.loading import find_object, parse_reference
from edge_opt.records.fields import field, record
from edge_opt.records.sweeps import LABELS, MetricDirection
from edge_opt.tasks.metrics import QualityMetric, class_scores, first_tensor, metric_of, reference_name
from edge_opt.tasks.paired_scores import RESAMPLES, Score
from edge_opt.trace.inputs import CallArguments, call_arguments, flat_tensors, map_arguments, map_tensors

Loss = Callable[[Any, Any], torch.Tensor]
Forward = Callable[[Any, Any], Any]
Collate = Callable[[Any], Any]


def numbers_loss(function: Callable[..., torch.Tensor]) -> Loss:
    """Return a loss of numbers, refused where outputs and targets would be broadcast."""

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
    """Return the cross-entropy of (samples, classes, ...) or (samples, ..., classes); labels below 0 are ignored."""
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


@record
class LossChoice:
    """The loss of a training, and why it was chosen."""

    name: str = field("Its name, or where it is defined.")
    reason: str = field("Why it was chosen.")
    suggestion: str = field("What may fit better; empty where nothing is known to.", default="")

    def __str__(self) -> str:
        return f"{self.name}, {self.reason}" + (f"; {self.suggestion}" if self.suggestion else "")


def default_loss_name(metric: QualityMetric, outputs: Any, targets: Any) -> tuple[str, str]:
    """Return the loss where none is set, and the reason: the metric's task, or for a user's metric the targets."""
    if metric.name in _OF_NUMBERS:
        return "mse", f"because the metric {metric.name} compares numbers"
    if metric.name in _OF_CLASSES:
        return "cross_entropy", f"because the metric {metric.name} scores classes"
    if not isinstance(targets, torch.Tensor):
        raise InvalidInput(f"no loss follows from targets of a {type(targets).__name__}; set loss: file.py:f")
    if metric.name == "auroc" and first_tensor(outputs).numel() == targets.numel():
        return "bce_with_logits", "because the metric auroc scores two classes by one output"
    if targets.is_floating_point():
        return "mse", "because targets are floating-point numbers"
    return "cross_entropy", "because targets are whole numbers, which are classes"


def loss_choice(loss: Any, metric: QualityMetric, outputs: Any, targets: Any) -> LossChoice:
    """Return which loss a task trains with, and why; suggest the usual one where targets are 0 and 1.

    Args:
        loss: As the user set it; None where the task decides.
        metric: The quality metric.
        outputs: The model's answer to one batch.
        targets: The labels of that batch.

    >>> mask = torch.tensor([[0.0, 1.0]])
    >>> loss_choice("MSE", metric_of("mae"), 5 * mask - 3, mask).suggestion[:34]
    'targets are 0 and 1, and outputs a'
    """
    if loss is None:
        name, reason = default_loss_name(metric, outputs, targets)
    else:
        is_named = isinstance(loss, str) and loss.lower() in LOSSES
        name, reason = loss.lower() if is_named else reference_name(loss), "as set by loss"
    suggestion = ""
    if name in ("mse", "l1", "smooth_l1", "huber") and _is_binary(targets):
        values = first_tensor(outputs)
        if bool(((values < 0) | (values > 1)).any()):
            suggestion = "targets are 0 and 1, and outputs are logits: set loss to bce_with_logits if so trained"
    return LossChoice(name, reason, suggestion)


def _is_binary(targets: Any) -> bool:
    """Return whether targets are floating-point zeros and ones, both of them."""
    if not isinstance(targets, torch.Tensor) or not targets.is_floating_point() or not targets.numel():
        return False
    return bool(((targets == 0) | (targets == 1)).all()) and 0 < float(targets.mean()) < 1


def default_loss(metric: QualityMetric) -> Loss:
    """Return the loss where none is set, which the first targets may decide."""

    def loss(outputs: Any, targets: Any) -> torch.Tensor:
        name, _ = default_loss_name(metric, outputs, targets)
        return LOSSES[name](first_tensor(outputs) if metric.name not in _OF_CLASSES else outputs, targets)

    return loss


def find_loss(loss: Any, metric: QualityMetric) -> Loss:
    """Return the loss that a user means: a name, a function of (outputs, targets), or that of the metric's task."""
    if loss is None:
        return default_loss(metric)
    named = LOSSES.get(loss.lower()) if isinstance(loss, str) else None
    if named is not None:
        return named
    if isinstance(loss, str) and parse_reference(loss) is None:
        raise InvalidInput(f"unknown loss {loss!r}; losses are {', '.join(LOSSES)}, or your own: file.py:f")
    own = find_function(loss, "loss")
    assert own is not None
    # torch's own losses take a tensor, and know nothing of what else a model may return.
    is_of_torch = type(own).__module__.startswith("torch.nn") or getattr(own, "__module__", "") == F.__name__
    return (lambda outputs, targets: own(first_tensor(outputs), targets)) if is_of_torch else own


def resolve(value: Any, what: str) -> Any:
    """Return what a reference names, built with its arguments if it has some; anything else as it is."""
    parsed = parse_reference(value) if isinstance(value, str) else None
    if parsed is None:
        return value
    try:
        named = find_object(parsed)
        return named(**parsed.arguments) if parsed.arguments or inspect.isclass(named) else named
    except ModelNotFound as error:
        raise InvalidInput(f"{what}: {error}") from error
    except EdgeOptError:
        raise
    except Exception as error:
        raise InvalidInput(f"{what} {value!r} raised {first_line(error)}") from error


def find_function(value: Any, what: str) -> Any:
    """Return the function that a user means; None where there is none."""
    function = resolve(value, what)
    if inspect.isclass(function):
        function = function()
    if function is not None and not callable(function):
        raise InvalidInput(f"{what} is {value!r}; it must be a function, or name one: file.py:f")
    return function


@record
class Batch:
    """The arguments of one forward, the labels of its results, and how both meet."""

    args: tuple[Any, ...] = field("What the model is called with by position.")
    kwargs: dict[str, Any] = field("What it is called with by name.")
    labels: Any = field("What its answers are compared with: a tensor, or a structure of tensors.")
    raw: Any = field("The batch as the loader gave it, on the model's device.", default=None)
    forward: Forward | None = field("Calls the model with the raw batch; None: args and kwargs do.", default=None)
    loss: Loss = field("What is trained on.", default=classifier_loss)

    @property
    def call(self) -> CallArguments:
        """The arguments of the model, also if `forward` calls it."""
        return CallArguments(self.args, self.kwargs) if self.forward is None else _called_with(self.forward, self.raw)

    def answer(self, model: Any) -> Any:
        """Return what the model answers."""
        return model(*self.args, **self.kwargs) if self.forward is None else self.forward(model, self.raw)

    def loss_of(self, outputs: Any) -> torch.Tensor:
        """Return the loss of answers to this batch."""
        loss = self.loss(outputs, self.labels)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise InvalidInput("the loss must be a tensor of one number, such as a mean over the samples")
        return loss.reshape(())


@dataclass(frozen=True, slots=True)
class Task:
    """A task: the metric of the outputs, the loss, and how the model is called with a batch."""

    metric: QualityMetric
    loss: Loss
    forward: Forward | None = None
    collate: Collate | None = None
    asked_loss: Any = None

    def batches(self, model: Any, loader: Iterable[Any], most: int | None = None) -> Iterator[Batch]:
        """Yield the batches of a loader, on the model's device, up to `most` of them; none at all is an error."""
        device = _device(model)
        for number, raw in enumerate(_some(islice(loader, most))):
            yield raw if isinstance(raw, Batch) else self._batch(model, raw, number, device)

    def _batch(self, model: Any, raw: Any, number: int, device: torch.device) -> Batch:
        collated = raw if self.collate is None else self.collate(raw)
        inputs, labels = split_batch(collated)
        if labels is None:
            keys = f"mapping of {', '.join(map(str, collated))}" if isinstance(collated, Mapping) else None
            raise InvalidInput(
                f"batch {number} is a {keys or type(collated).__name__}, without labels; use (inputs, labels), or a "
                f"key of {LABELS}; collate= can make such a batch"
            )
        targets = _moved(_as_tensors(labels), device)
        if self.forward is None:
            call = _on(call_of(model, inputs), device)
            return Batch(call.args, call.kwargs, targets, loss=self.loss)
        return Batch((), {}, targets, _moved(collated, device), self.forward, self.loss)

    def call(self, model: nn.Module, raw: Any) -> CallArguments:
        """Return what the model would be called with for a batch of the loader; it is not called.

        By position where everything is, else by name, as inputs and kwargs of `profile` are read.
        """
        return _in_one_way(model, next(self.batches(model, [raw])).call)

    def check(self, model: nn.Module, loader: Iterable[Any]) -> LossChoice:
        """Refuse a metric or a loss that does not fit the data and what the model answers, on the first batch.

        Returns which loss it is, and why.
        """
        with eval_mode(model), torch.no_grad():
            batch = next(self.batches(model, loader))
            answer = batch.answer(model)
            batch.loss_of(answer)
            choice = loss_choice(self.asked_loss, self.metric, answer, batch.labels)
            # One batch may have no value, such as an R² of one sample, where all of them have.
            with suppress(MeasurementFailed):
                self.metric.value(answer, batch.labels)
        return choice

    def score(self, model: Any, loader: Iterable[Any], resamples: int = RESAMPLES) -> Score:
        """Return the metric of whatever answers as the model does; a module is in eval mode meanwhile."""
        with eval_mode(model), torch.no_grad():
            answers = ((batch.answer(model), batch.labels) for batch in self.batches(model, loader))
            return self.metric.scored(answers, resamples)


@contextmanager
def eval_mode(model: Any) -> Iterator[None]:
    """Put a module in eval mode and restore the mode of each of its parts; anything else is not changed."""
    modes = [(module, module.training) for module in model.modules()] if isinstance(model, nn.Module) else []
    try:
        for module, _ in modes:
            module.training = False
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def task_of(
    metric: Any = "accuracy",
    loss: Any = None,
    forward: Any = None,
    collate: Any = None,
    metric_direction: MetricDirection | None = None,
) -> Task:
    """Return the task of names, of references as `file.py:f`, or of the functions themselves."""
    measured = metric_of(resolve(metric, "metric"), metric_direction, reference_name(metric))
    functions = find_function(forward, "forward"), find_function(collate, "collate")
    return Task(measured, find_loss(loss, measured), *functions, asked_loss=loss)


def split_batch(raw: Any) -> tuple[Any, Any]:
    """Return inputs and labels of a batch as the loader gave it; labels are None where it has none."""
    if isinstance(raw, (tuple, list)) and len(raw) > 1:
        return (raw[0] if len(raw) == 2 and isinstance(raw[0], Mapping) else list(raw[:-1])), raw[-1]
    for key in LABELS if isinstance(raw, Mapping) else ():
        if key in raw:
            return {name: value for name, value in raw.items() if name != key}, _next_tokens(raw, raw[key])
    return raw, None


def input_calls(model: nn.Module, loader: Iterable[Any], most: int | None = None) -> Iterator[CallArguments]:
    """Yield the calls of a loader's batches, with or without labels, on the model's device; none is an error."""
    device = _device(model)
    for raw in _some(islice(loader, most)):
        yield raw.call if isinstance(raw, Batch) else _on(call_of(model, split_batch(raw)[0]), device)


def _some(batches: Iterable[Any]) -> Iterator[Any]:
    """Yield the batches; none at all is an error."""
    is_empty = True
    for batch in batches:
        is_empty = False
        yield batch
    if is_empty:
        raise InvalidInput("the loader has no batches; pass one that yields (inputs, labels)")


def _next_tokens(raw: Mapping[str, Any], labels: Any) -> Any:
    """Shift the labels of a causal language model, which are its inputs: position t is compared with token t + 1."""
    tokens = raw.get("input_ids")
    if not isinstance(tokens, torch.Tensor) or not isinstance(labels, torch.Tensor) or tokens.shape != labels.shape:
        return labels
    asked = labels >= 0
    if labels.dim() != 2 or labels.is_floating_point() or not bool((tokens == labels)[asked].all()):
        return labels
    return torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], -100)], 1)


def call_of(model: Any, inputs: Any) -> CallArguments:
    """Return how the model is called with a batch's inputs: as `profile` reads them, with what Hugging Face adds.

    Keys that forward does not know are left out where it knows others. Inputs that stand in a tuple of their own are
    unpacked if forward has that many parameters.
    """
    parameters: list[inspect.Parameter] = []
    with suppress(TypeError, ValueError):  # a model of C does not tell
        parameters = list(inspect.signature(getattr(model, "forward", model)).parameters.values())
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    if isinstance(inputs, Mapping):
        names = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        known = {key: value for key, value in inputs.items() if key in names}
        if known and not takes_any:
            return call_arguments(model, known, None)
        tensors = {key: value for key, value in inputs.items() if any(map(_is_tensor, tree_leaves(value)))}
        return call_arguments(model, tensors if takes_any else dict(inputs), None)
    if isinstance(inputs, list) and len(inputs) == 1 and isinstance(inputs[0], (tuple, list)):
        positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        required = [p for p in positional if p.default is p.empty]
        if len(required) <= len(inputs[0]) <= len(positional) and len(inputs[0]) > 1:
            inputs = list(inputs[0])
    return call_arguments(model, inputs, None)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _as_tensors(labels: Any) -> Any:
    """Return labels as tensors: a list of numbers is one, a structure of tensors stays what it is."""
    if any(map(_is_tensor, tree_leaves(labels))):
        return labels
    try:
        return torch.as_tensor(labels)
    except (TypeError, ValueError, RuntimeError):
        return labels


def _moved(value: Any, device: torch.device) -> Any:
    return _on(CallArguments((value,), {}), device).args[0]


def _on(call: CallArguments, device: torch.device) -> CallArguments:
    return map_arguments(call, lambda tensor: tensor.to(device))


def _device(model: Any) -> torch.device:
    tensors = (*model.parameters(), *model.buffers()) if isinstance(model, nn.Module) else ()
    return next((tensor.device for tensor in tensors), torch.device("cpu"))


class _Called(BaseException):
    """A model was called with these arguments. No Exception: the user's code must not catch it."""

    def __init__(self, call: CallArguments) -> None:
        super().__init__()
        self.call = call


def _called_with(forward: Forward, raw: Any) -> CallArguments:
    """Return what `forward` calls the model with."""

    def probe(*args: Any, **kwargs: Any) -> Any:
        raise _Called(CallArguments(args, kwargs))

    try:
        forward(probe, raw)
    except _Called as called:
        return called.call
    except EdgeOptError:
        raise
    except Exception as error:
        raise InvalidInput(
            f"forward raised {first_line(error)}; it must call the model as a whole: model(...)"
        ) from error
    raise InvalidInput("forward never calls the model; it must return what model(...) answers to the batch")


def _in_one_way(model: Any, call: CallArguments) -> CallArguments:
    """Return arguments all by position, or all by name where some are."""
    if not call.args or not call.kwargs:
        return call
    try:
        bound = inspect.signature(getattr(model, "forward", model)).bind(*call.args, **call.kwargs).arguments
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"the model cannot be called as forward= does: {first_line(error)}") from error
    return CallArguments((), dict(bound))


class RunnerAsModule:
    """A runner that is called as the model it was made of, and answers in its structure."""

    def __init__(self, run: Callable[..., Any], model: nn.Module, example: CallArguments) -> None:
        self._run, self._model, self._example = run, model, example
        with eval_mode(model), torch.no_grad():
            self._answer = model(*example.args, **example.kwargs)
        self.forward = model.forward  # its signature says how a batch is read

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        outputs = flat_tensors(self._run(*_flat(_in_one_way(self._model, CallArguments(args, kwargs)), self._example)))
        if len(outputs) != len(flat_tensors(self._answer)):
            return tuple(outputs)
        remaining = iter(outputs)
        return map_tensors(lambda _: next(remaining), self._answer)


def _flat(call: CallArguments, example: CallArguments) -> tuple[torch.Tensor, ...]:
    """Return the tensors of a call, in the order of the example's."""
    arguments = _as_in((example.args, example.kwargs), (call.args, call.kwargs))
    return tuple(filter(_is_tensor, tree_leaves(arguments)))


def _as_in(example: Any, value: Any) -> Any:
    """Return the value with its mappings in the order of the example's."""
    if isinstance(example, Mapping) and isinstance(value, Mapping):
        missing = [key for key in example if key not in value]
        if missing:
            raise InvalidInput(f"a batch has no {missing[0]!r}, which the first batch has")
        return {key: _as_in(example[key], value[key]) for key in example}
    if isinstance(example, (tuple, list)) and isinstance(value, (tuple, list)) and len(example) == len(value):
        return [_as_in(*pair) for pair in zip(example, value, strict=True)]
    return value


def example_inputs(call: CallArguments) -> Any:
    """Return a call as `profile`, `prune` and `convert` take inputs: a list by position, a mapping by name."""
    return call.kwargs if call.kwargs else list(call.args)


def first_shape(call: CallArguments) -> tuple[int, ...]:
    """Return the shape of a call's first tensor, whose first dimension is the sample."""
    for leaf in tree_leaves((call.args, call.kwargs)):
        if _is_tensor(leaf) and leaf.dim():
            return tuple(leaf.shape)
    raise InvalidInput("inputs of a batch must be tensors whose first dimension is the sample")


def joined_calls(first: CallArguments, second: CallArguments) -> CallArguments:
    """Return the samples of two calls in one."""
    size = first_shape(first)[0]

    def joined(leaf: Any, other: Any) -> Any:
        is_sampled = _is_tensor(leaf) and leaf.dim() and len(leaf) == size
        return torch.cat([leaf, other]) if is_sampled else leaf

    leaves, spec = tree_flatten((tuple(first.args), first.kwargs))
    others = tree_leaves(_as_in((first.args, first.kwargs), (second.args, second.kwargs)))
    return CallArguments(*tree_unflatten([joined(*pair) for pair in zip(leaves, others, strict=True)], spec))


def sized_call(call: CallArguments, size: int) -> CallArguments:
    """Return a call with this many samples: the first ones, repeated if there are too few."""
    count = first_shape(call)[0]
    repeats = -(-size // count)

    def cut(leaf: Any) -> Any:
        is_sampled = _is_tensor(leaf) and leaf.dim() and len(leaf) == count
        return torch.cat([leaf] * repeats)[:size].clone() if is_sampled else leaf

    return CallArguments(*tree_map(cut, (tuple(call.args), call.kwargs)))


class FlatCalls:
    """A loader's batches as the flat tensors of the model's inputs, at each pass."""

    def __init__(self, task: Task, model: nn.Module, loader: Iterable[Any]) -> None:
        self._task, self._model, self._loader = task, model, loader

    def __iter__(self) -> Iterator[tuple[torch.Tensor, ...]]:
        first: CallArguments | None = None
        for raw in self._loader:
            call = self._task.call(self._model, raw)
            first = first or call
            yield _flat(call, first)
