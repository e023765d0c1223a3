"""Fine-tuning, and a loader's batches parted into inputs and targets."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from edge_opt._support.checks import check_whole
from edge_opt._support.state import as_found
from edge_opt.errors import InvalidInput, TrainingFailed
from edge_opt.records import EpochRecord
from edge_opt.trace.inputs import call_arguments, materialize
from edge_opt.trace.modules import module_paths

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


Validate = Callable[[nn.Module], float]


@dataclass(frozen=True, slots=True)
class FineTuned:
    """A trained copy with the weights of its best epoch.

    Attributes:
        model: The trained copy.
        history: Loss and score of each epoch; epoch 0 is the model as it came.
        best_epoch: Number of the epoch whose weights it has.
    """

    model: nn.Module
    history: tuple[EpochRecord, ...]
    best_epoch: int


def finetune(
    model: nn.Module,
    loader: Iterable[Any],
    *,
    epochs: int,
    learning_rate: float,
    teacher: nn.Module | None = None,
    distillation_weight: float = 0.5,
    temperature: float = 4.0,
    validate: Validate | Iterable[Any] | None = None,
    seed: int = 0,
    progress: bool = True,
) -> FineTuned:
    """A copy of the model trained with AdamW and a cosine schedule, at its best epoch. Frozen parameters stay frozen.

    Args:
        model: The model; it is left as it was.
        loader: Batches of (inputs, labels).
        epochs: Passes over the loader.
        learning_rate: Rate of the first step; it falls to zero with every step, also over a single epoch.
        teacher: A model to learn from, too: its answers are part of the loss.
        distillation_weight: Share w of the teacher in the loss: (1 - w) times cross-entropy plus w times the
            divergence.
        temperature: By how much the answers of both are softened before they are compared; above 1 shows small ones.
        validate: A loader, for accuracy, or a function of the model, higher is better; without it the last epoch is
            kept.
        seed: Decides the random numbers drawn in training.
        progress: Whether to show a bar on a terminal.

    >>> from edge_opt.model import SmallCNN
    >>> batch = torch.zeros(4, 1, 28, 28), torch.zeros(4, dtype=torch.int64)
    >>> tuned = finetune(SmallCNN(), [batch], epochs=2, learning_rate=1e-3, validate=[batch], progress=False)
    >>> [record.epoch for record in tuned.history], tuned.history[-1].score
    ([0, 1, 2], 1.0)
    """
    _check(epochs, learning_rate, distillation_weight, temperature)
    student = copy.deepcopy(model)
    trained = [parameter for parameter in student.parameters() if parameter.requires_grad]
    if not trained and epochs:
        raise InvalidInput("every parameter of the model is frozen; there is nothing to train")
    score = _score(validate)
    with as_found([], training=False), _teaching(teacher), _bar(progress, epochs) as advance:
        torch.manual_seed(seed)
        history = [EpochRecord(0, None, None if score is None else score(student))]
        best, best_state = 0, _state(student)
        optimizer = torch.optim.AdamW(trained, lr=learning_rate) if epochs else None
        steps = len(loader) if isinstance(loader, Sized) else None
        for epoch in range(1, epochs + 1):
            assert optimizer is not None
            pace = _Pace(optimizer, learning_rate, epoch, epochs, steps)
            loss, steps = _epoch(student, loader, pace, teacher, distillation_weight, temperature, advance)
            history.append(EpochRecord(epoch, loss, None if score is None else score(student)))
            latest, record = history[-1].score, history[best].score
            if latest is None or record is None or latest > record:
                best, best_state = epoch, _state(student)
        student.load_state_dict(best_state)
    _restore_modes(model, student)
    return FineTuned(student, tuple(history), best)


@dataclass(frozen=True, slots=True)
class _Pace:
    """The steps of one epoch, with a rate that falls at every step from the one given to none, along half a cosine.

    Where nobody knows how many steps an epoch has, the rate stays as it is during the first.
    """

    optimizer: torch.optim.Optimizer
    learning_rate: float
    epoch: int
    epochs: int
    steps: int | None

    def step(self, number: int, loss: torch.Tensor) -> None:
        """Go the step with this number, from 0, down the slope of the loss."""
        within = min(number / self.steps, 1.0) if self.steps else 0.0
        for group in self.optimizer.param_groups:
            done = (self.epoch - 1 + within) / self.epochs
            group["lr"] = self.learning_rate * (1 + math.cos(math.pi * done)) / 2
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()


def _epoch(
    student: nn.Module,
    loader: Iterable[Any],
    pace: _Pace,
    teacher: nn.Module | None,
    weight: float,
    temperature: float,
    advance: Callable[[int, int, float], None],
) -> tuple[float, int]:
    """One pass over the loader; the mean loss and the number of steps."""
    student.train()
    total, steps = 0.0, 0
    with torch.enable_grad():
        for batch in read_batches(student, loader):
            steps += 1
            output = student(*batch.args, **batch.kwargs)
            loss = classifier_loss(output, batch.labels)
            if teacher is not None:
                with torch.no_grad():
                    taught = logits_of(teacher(*batch.args, **batch.kwargs))
                loss = (1 - weight) * loss + weight * _divergence(logits_of(output), taught, temperature)
            value = float(loss.detach())
            if not math.isfinite(value):
                where = f"epoch {pace.epoch}, step {steps}"
                raise TrainingFailed(f"the loss is {value} in {where}; lower the learning rate")
            pace.step(steps - 1, loss)
            total += value
            advance(pace.epoch, steps, total / steps)
    return total / steps, steps


def _divergence(student: torch.Tensor, teacher: torch.Tensor, temperature: float) -> torch.Tensor:
    """How far the softened answers are apart, scaled so that its gradients do not shrink with the temperature."""
    if student.shape != teacher.shape:
        raise InvalidInput(f"the teacher answers {tuple(teacher.shape)}, the model {tuple(student.shape)}")
    answers = [F.log_softmax(each / temperature, dim=1) for each in (student, teacher)]
    return F.kl_div(answers[0], answers[1], reduction="batchmean", log_target=True) * temperature**2


def accuracy(model: nn.Module, loader: Iterable[Any]) -> float:
    """Share of right answers of a classifier, in eval mode; the model is left in the mode it was in.

    Args:
        model: The classifier.
        loader: Batches of (inputs, labels).
    """
    modes = [(module, module.training) for module in model.modules()]
    right = total = 0
    try:
        model.eval()
        with torch.no_grad():
            for batch in read_batches(model, loader):
                guesses = logits_of(model(*batch.args, **batch.kwargs)).argmax(dim=1)
                right += int((guesses == batch.labels).sum())
                total += batch.labels.numel()
    finally:
        for module, mode in modes:
            module.training = mode
    return right / total


def _score(validate: Validate | Iterable[Any] | None) -> Validate | None:
    if validate is None or callable(validate):
        return validate
    return lambda model: accuracy(model, validate)


def _state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def _restore_modes(model: nn.Module, trained: nn.Module) -> None:
    for original, module in zip(model.modules(), trained.modules(), strict=True):
        module.training = original.training


@contextmanager
def _teaching(teacher: nn.Module | None) -> Iterator[None]:
    """The teacher in eval mode while the model learns from it."""
    if teacher is None:
        yield
        return
    with as_found(list(module_paths(teacher)), training=False):
        yield


@contextmanager
def _bar(is_wanted: bool, epochs: int) -> Iterator[Callable[[int, int, float], None]]:
    """A progress bar on a terminal's stderr; nothing elsewhere."""
    stream = sys.__stderr__
    if not is_wanted or stream is None or not stream.isatty():
        yield lambda epoch, step, loss: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("fine-tuning"), BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(file=stream), transient=True) as bar:
        task = bar.add_task("", total=epochs)

        def advance(epoch: int, step: int, loss: float) -> None:
            bar.update(task, completed=epoch - 1, description=f"epoch {epoch}/{epochs}, step {step}, loss {loss:.4f}")

        yield advance


def _check(epochs: int, learning_rate: float, weight: float, temperature: float) -> None:
    check_whole("epochs", epochs, least=0)
    for name, value, high in (
        ("learning_rate", learning_rate, math.inf),
        ("temperature", temperature, math.inf),
        ("distillation_weight", weight, 1.0),
    ):
        low_fits = value >= 0 if name == "distillation_weight" else value > 0
        if isinstance(value, bool) or not low_fits or not value <= high or not math.isfinite(value):
            limits = "from 0 to 1" if name == "distillation_weight" else "above 0"
            raise InvalidInput(f"{name} is {value!r}; it must be a number {limits}")
