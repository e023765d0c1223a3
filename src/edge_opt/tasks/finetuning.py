"""Fine-tuning with AdamW, a cosine schedule, distillation, and int8 simulated while training."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Sized
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from edge_opt._support.checks import check_positive, check_whole, is_number
from edge_opt._support.progress import report_progress, show_progress
from edge_opt._support.unchanged import unchanged
from edge_opt.errors import InvalidInput, TrainingFailed
from edge_opt.measuring.machine import needs_reduced_range
from edge_opt.quantization.fake_quantization import rounding_layers
from edge_opt.records.compression import EpochRecord, FineTuned
from edge_opt.records.sweeps import MetricDirection
from edge_opt.tasks.batches import Batch, Task, eval_mode, task_of
from edge_opt.tasks.metrics import first_tensor

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
        teacher: A model whose outputs are part of the loss (distillation).
        distillation_weight: Share w of the teacher in the loss: (1 - w) times the loss plus w times the divergence of
            classes, or the mean squared distance of numbers.
        temperature: Divides the scores of both models before they are compared; above 1 softens them.
        validate: A loader, for the metric, or a function of the model, higher is better; without it the last epoch is
            kept.
        metric: Quality metric of `validate`: accuracy, top5, f1, miou, mae, rmse, r2, auroc, perplexity, wer, or a
            function of (outputs, targets).
        metric_direction: Whether a "higher" or a "lower" metric is better; needed for a function whose name is unknown.
        loss: Loss: cross_entropy, mse, l1, smooth_l1, huber, bce_with_logits, or a function of (outputs,
            targets); the metric's task decides unless given.
        forward: A function of (model, batch) that returns the outputs; without it the batch's inputs are passed.
        collate: A function that makes a batch of what the loader yields, such as a list of samples.
        seed: Seed of the random numbers in training.
        progress: Whether to show each step on a terminal; or a function that gets epoch, step and loss after each one.
        precision: "int8" trains for static int8: layers round weights and inputs as it does, while they learn and while
            they are scored. The trained copy is in float, for `convert`. None trains in float.

    >>> from edge_opt.model import SmallCNN
    >>> batch = torch.zeros(4, 1, 28, 28), torch.zeros(4, dtype=torch.int64)
    >>> tuned = finetune(SmallCNN(), [batch], epochs=2, learning_rate=1e-3, validate=[batch], progress=False)
    >>> [record.epoch for record in tuned.history], tuned.history[-1].score
    ([0, 1, 2], 1.0)
    """
    check_whole("epochs", epochs, least=0)
    lesson = _Lesson(
        task_of(metric, loss, forward, collate, metric_direction), teacher, distillation_weight, temperature, validate
    )
    if precision not in (None, "int8"):
        raise InvalidInput(f"precision is {precision!r}; models are trained for int8, or in float without it")
    student = copy.deepcopy(model)
    rounding = nullcontext() if precision is None else rounding_layers(student, needs_reduced_range())
    teaching = unchanged([] if teacher is None else list(teacher.modules()), training=False)
    with show_progress() if progress is True else nullcontext(), teaching, rounding:
        torch.manual_seed(seed)
        steps_per_epoch = len(loader) if isinstance(loader, Sized) else None
        schedule = _CosineSchedule(student, learning_rate, epochs, steps_per_epoch)
        history = [EpochRecord(0, None, lesson.score(student))]
        best, best_state = 0, copy.deepcopy(student.state_dict())
        for epoch in range(1, epochs + 1):
            mean, schedule.steps_per_epoch = _epoch(student, loader, epoch, schedule, lesson, progress)
            history.append(EpochRecord(epoch, mean, lesson.score(student)))
            if lesson.is_better(history[-1].score, history[best].score):
                best, best_state = epoch, copy.deepcopy(student.state_dict())
        student.load_state_dict(best_state)
    _lay_out(student, torch.contiguous_format)
    for original, module in zip(model.modules(), student.modules(), strict=True):
        module.training = original.training
    return FineTuned(student, tuple(history), best)


@dataclass(frozen=True, slots=True)
class _Lesson:
    """The objective of training: a task, the loss of a teacher, and the score that epochs are compared by."""

    task: Task
    teacher: nn.Module | None
    weight: float
    temperature: float
    validate: Validate | Iterable[Any] | None

    def __post_init__(self) -> None:
        check_positive("temperature", self.temperature)
        if not (is_number(self.weight) and 0 <= self.weight <= 1):
            raise InvalidInput(f"distillation_weight is {self.weight!r}; it must be a number from 0 to 1")

    def score(self, student: nn.Module) -> float | None:
        """Return the student's score on the validation data; None without such data."""
        if self.validate is None:
            return None
        if callable(self.validate):
            return self.validate(student)
        return self.task.score(student, self.validate, resamples=0).value

    def is_better(self, score: float | None, best: float | None) -> bool:
        """Return whether an epoch is better than the best one before; without scores the last one is."""
        if score is None or best is None:
            return True
        return score < best if self.task.metric.direction == "lower" and not callable(self.validate) else score > best

    def loss(self, batch: Batch, student: nn.Module) -> torch.Tensor:
        """Return the loss of the student's answers to a batch."""
        output = batch.answer(student)
        loss = batch.loss_of(output)
        if self.teacher is None:
            return loss
        with torch.no_grad():
            taught = first_tensor(batch.answer(self.teacher))
        apart = _divergence(first_tensor(output), taught, batch.labels, self.temperature)
        return (1 - self.weight) * loss + self.weight * apart


class _CosineSchedule:
    """AdamW whose rate falls at every step from the one given to none, along half a cosine over all epochs.

    In the first epoch of a loader without a length, the number of steps is unknown, and the rate stays.
    """

    def __init__(self, model: nn.Module, learning_rate: float, epochs: int, steps: int | None) -> None:
        check_positive("learning_rate", learning_rate)
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if not parameters:
            raise InvalidInput("every parameter of the model is frozen; there is nothing to train")
        # One call for all parameters: on small networks a loop over them takes a tenth of the time of a step.
        is_fused = all(parameter.is_floating_point() for parameter in parameters)
        self.optimizer = torch.optim.AdamW(parameters, lr=learning_rate, fused=is_fused)
        self.learning_rate, self.epochs, self.steps_per_epoch = learning_rate, epochs, steps
        self._steps = 0

    def step(self, loss: torch.Tensor) -> None:
        """Go one step down the slope of the loss."""
        done = min(self._steps / (self.steps_per_epoch * self.epochs), 1.0) if self.steps_per_epoch else 0.0
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate * ((1 + math.cos(math.pi * done)) / 2)
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
    progress: bool | Callable[[int, int, float], None],
) -> tuple[float, int]:
    """Train on one pass over the loader; return the mean loss and the number of steps."""
    student.train()
    total, steps = 0.0, 0
    with torch.enable_grad():
        for steps, batch in enumerate(lesson.task.batches(student, loader), start=1):
            if epoch == steps == 1:
                _use_fast_layout(student, batch)
            loss = lesson.loss(batch, student)
            value = float(loss.detach())
            if not math.isfinite(value):
                raise TrainingFailed(f"the loss is {value} in epoch {epoch}, step {steps}; lower the learning rate")
            schedule.step(loss)
            total += value
            if callable(progress):
                progress(epoch, steps, total / steps)
            elif progress:
                known = schedule.steps_per_epoch
                share = None if known is None else (epoch - 1 + steps / max(known, steps)) / schedule.epochs
                report_progress(f"epoch {epoch} of {schedule.epochs}, loss {total / steps:.4f}", share)
    return total / steps, steps


def _use_fast_layout(student: nn.Module, batch: Batch) -> None:
    """Lay out convolutions with channels last: a step takes 0.5 to 0.8 of the time on a CPU.

    Outputs of layers then have this layout as well, which code that calls `view` on them may refuse.
    """
    _lay_out(student, torch.channels_last)
    try:
        with eval_mode(student), torch.no_grad():
            batch.answer(student)
    except RuntimeError:
        _lay_out(student, torch.contiguous_format)


def _lay_out(model: nn.Module, layout: torch.memory_format) -> None:
    """Give the weights of two-dimensional convolutions a memory layout, in place."""
    for parameter in model.parameters():
        if parameter.dim() == 4:
            parameter.data = parameter.data.contiguous(memory_format=layout)


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
