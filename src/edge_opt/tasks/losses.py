"""Losses by name, by reference, or those that follow from a metric."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import functional as F

from edge_opt.errors import EdgeOptError, InvalidInput, ModelNotFound, first_line
from edge_opt.loading import find_object, parse_reference
from edge_opt.tasks.metrics import QualityMetric, class_scores, first_tensor

Loss = Callable[[Any, Any], torch.Tensor]


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


def default_loss(metric: QualityMetric) -> Loss:
    """Return the loss where none is set: it follows the metric's task, and for a user's metric the targets."""
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
