"""Fine-tuning with AdamW, a cosine schedule, distillation, and int8 simulated while training."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from edge_opt._support.checks import check_whole
from edge_opt._support.progress import stderr_console
from edge_opt._support.unchanged import unchanged
from edge_opt.errors import InvalidInput, TrainingFailed
from edge_opt.measuring.machine import needs_reduced_range
from edge_opt.quantization.fake_quantization import rounding_layers
from edge_opt.records.compression import EpochRecord, FineTuned
from edge_opt.records.sweeps import MetricDirection
from edge_opt.tasks.batches import Task, task_of
from edge_opt.tasks.metrics import first_tensor
from edge_opt.trace.module_calls import module_paths

Validate = Callable[[nn.Module], float]


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
    metric: Any = "accuracy",
    metric_direction: MetricDirection | None = None,
    loss: Any = None,
    forward: Any = None,
    collate: Any = None,
    seed: int = 0,
    progress: bool | Callable[[int, int, float], None] = True,
    precision: str | None = None,
) -> FineTuned:
    """Train a copy of the model with AdamW and a cosine schedule, and return its best epoch. Frozen parameters stay.

    Args:
        model: The model; it is not modified.
        loader: Batches of (inputs, labels), or mappings with `labels` among their keys.
        epochs: Passes over the loader.
        learning_rate: Rate of the first step; it falls to zero with every step, also over a single epoch.
        teacher: A model to learn from, too: its answers are part of the loss.
        distillation_weight: Share w of the teacher in the loss: (1 - w) times the loss plus w times the divergence of
            classes, or the mean squared distance of numbers.
        temperature: By how much the answers of both are softened before they are compared; above 1 shows small ones.
        validate: A loader, for the metric, or a function of the model, higher is better; without it the last epoch is
            kept.
        metric: What `validate` is scored by: accuracy, top5, f1, miou, mae, rmse, r2, auroc, perplexity, wer, or a
            function of (outputs, targets).
        metric_direction: Whether a "higher" or a "lower" metric is better; a function of your own must say it.
        loss: What is trained on: cross_entropy, mse, l1, smooth_l1, huber, bce_with_logits, or a function of (outputs,
            targets); the metric's task decides unless given.
        forward: A function of (model, batch) that returns the outputs; without it the batch's inputs are passed.
        collate: A function that makes a batch of what the loader yields, such as a list of samples.
        seed: Decides the random numbers drawn in training.
        progress: Whether to show a bar on a terminal; or a function that gets epoch, step and loss after each step.
        precision: "int8" trains for static int8: layers round weights and inputs as it does, while they learn and while
            they are scored. The trained copy is in float, for `convert`. None trains in float.

    >>> from edge_opt.model import SmallCNN
    >>> batch = torch.zeros(4, 1, 28, 28), torch.zeros(4, dtype=torch.int64)
    >>> tuned = finetune(SmallCNN(), [batch], epochs=2, learning_rate=1e-3, validate=[batch], progress=False)
    >>> [record.epoch for record in tuned.history], tuned.history[-1].score
    ([0, 1, 2], 1.0)
    """
    _check(epochs, learning_rate, distillation_weight, temperature)
    if precision not in (None, "int8"):
        raise InvalidInput(f"precision is {precision!r}; models are trained for int8, or in float without it")
    student = copy.deepcopy(model)
    trained = [parameter for parameter in student.parameters() if parameter.requires_grad]
    if not trained and epochs:
        raise InvalidInput("every parameter of the model is frozen; there is nothing to train")
    task = task_of(metric, loss, forward, collate, metric_direction)
    score = _score(validate, task)
    sign = -1.0 if task.metric.direction == "lower" and not callable(validate) else 1.0
    with unchanged([], training=False), _teaching(teacher), _at(precision, student), _bar(progress, epochs) as advance:
        torch.manual_seed(seed)
        history = [EpochRecord(0, None, None if score is None else score(student))]
        best, best_state = 0, _state(student)
        lesson = _Lesson(task, teacher, distillation_weight, temperature)
        schedule = _CosineSchedule(trained, learning_rate, epochs, len(loader) if isinstance(loader, Sized) else None)
        for epoch in range(1, epochs + 1):
            mean, schedule.steps_per_epoch = _epoch(student, loader, epoch, schedule, lesson, advance)
            history.append(EpochRecord(epoch, mean, None if score is None else score(student)))
            latest, record = history[-1].score, history[best].score
            if latest is None or record is None or sign * latest > sign * record:
                best, best_state = epoch, _state(student)
        student.load_state_dict(best_state)
    for original, module in zip(model.modules(), student.modules(), strict=True):
        module.training = original.training
    return FineTuned(student, tuple(history), best)


@dataclass(frozen=True, slots=True)
class _Lesson:
    """What is trained on: a task, and what a teacher adds to it."""

    task: Task
    teacher: nn.Module | None
    weight: float
    temperature: float


class _CosineSchedule:
    """AdamW whose rate falls at every step from the one given to none, along half a cosine over all epochs.

    While nobody knows how many steps an epoch has, in the first one of a loader without a length, the rate stays.
    """

    def __init__(self, parameters: list[nn.Parameter], learning_rate: float, epochs: int, steps: int | None) -> None:
        self.optimizer = torch.optim.AdamW(parameters, lr=learning_rate)
        self.epochs = epochs
        self.steps_per_epoch = steps
        self._schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self._factor)
        self._steps = 0

    def _factor(self, step: int) -> float:
        done = min(step / (self.steps_per_epoch * self.epochs), 1.0) if self.steps_per_epoch else 0.0
        return (1 + math.cos(math.pi * done)) / 2

    def step(self, loss: torch.Tensor) -> None:
        """Go one step down the slope of the loss."""
        if self._steps:
            self._schedule.step()
        self._steps += 1
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()


def _epoch(
    student: nn.Module,
    loader: Iterable[Any],
    epoch: int,
    schedule: _CosineSchedule,
    lesson: _Lesson,
    advance: Callable[[int, int, float], None],
) -> tuple[float, int]:
    """Train on one pass over the loader; return the mean loss and the number of steps."""
    student.train()
    total, steps = 0.0, 0
    with torch.enable_grad():
        for batch in lesson.task.batches(student, loader):
            steps += 1
            output = batch.answer(student)
            loss = batch.loss_of(output)
            if lesson.teacher is not None:
                with torch.no_grad():
                    taught = first_tensor(batch.answer(lesson.teacher))
                apart = _divergence(first_tensor(output), taught, batch.labels, lesson.temperature)
                loss = (1 - lesson.weight) * loss + lesson.weight * apart
            value = float(loss.detach())
            if not math.isfinite(value):
                raise TrainingFailed(f"the loss is {value} in epoch {epoch}, step {steps}; lower the learning rate")
            schedule.step(loss)
            total += value
            advance(epoch, steps, total / steps)
    return total / steps, steps


def _divergence(student: torch.Tensor, teacher: torch.Tensor, labels: Any, temperature: float) -> torch.Tensor:
    """Return the divergence of the softened outputs, scaled so that gradients do not shrink with the temperature.

    For outputs that are numbers, not scores of classes, it is the mean squared distance.
    """
    if student.shape != teacher.shape:
        raise InvalidInput(f"the teacher answers {tuple(teacher.shape)}, the model {tuple(student.shape)}")
    is_numbers = isinstance(labels, torch.Tensor) and labels.is_floating_point()
    if is_numbers or student.dim() < 2 or student.shape[1] < 2:
        return F.mse_loss(student, teacher)
    is_last = isinstance(labels, torch.Tensor) and student.dim() > 2 and labels.shape == student.shape[:-1]
    answers = [F.log_softmax(each / temperature, dim=-1 if is_last else 1) for each in (student, teacher)]
    return F.kl_div(answers[0], answers[1], reduction="batchmean", log_target=True) * temperature**2


def accuracy(model: nn.Module, loader: Iterable[Any]) -> float:
    """Return the accuracy of a classifier, in eval mode; the mode of the model is restored.

    Args:
        model: The classifier.
        loader: Batches of (inputs, labels).
    """
    return task_of().score(model, loader, resamples=0).value


def _score(validate: Validate | Iterable[Any] | None, task: Task) -> Validate | None:
    if validate is None:
        return None
    if callable(validate):
        return validate
    return lambda model: task.score(model, validate, resamples=0).value


def _state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


@contextmanager
def _teaching(teacher: nn.Module | None) -> Iterator[None]:
    """Put the teacher in eval mode while the model learns from it."""
    if teacher is None:
        yield
        return
    with unchanged(list(module_paths(teacher)), training=False):
        yield


@contextmanager
def _at(precision: str | None, student: nn.Module) -> Iterator[None]:
    """Let the student compute in a precision; None: as it is."""
    if precision is None:
        yield
        return
    with rounding_layers(student, needs_reduced_range()):
        yield


@contextmanager
def _bar(
    progress: bool | Callable[[int, int, float], None], epochs: int
) -> Iterator[Callable[[int, int, float], None]]:
    """Show a progress bar on a terminal's stderr, and nothing elsewhere; or call the given function."""
    if callable(progress):
        yield progress
        return
    stream = sys.__stderr__
    if not progress or stream is None or not stream.isatty():
        yield lambda epoch, step, loss: None
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("fine-tuning"), BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=stderr_console(), transient=True) as bar:
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
