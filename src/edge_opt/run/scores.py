"""Accuracy of a variant, with its interval and its answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from edge_opt.errors import InvalidInput, MeasurementFailed
from edge_opt.search.paired import packed_answers, wilson


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Right answers among all, with Wilson's 95 % interval; `answers` are those of each sample, "" where not kept."""

    correct: int
    samples: int
    answers: str = field(default="", repr=False, compare=False)

    @property
    def share(self) -> float:
        return self.correct / self.samples

    @property
    def interval(self) -> tuple[float, float]:
        """Where the true share lies, 19 times in 20.

        >>> [round(bound, 4) for bound in Accuracy(95, 100).interval]
        [0.8882, 0.9785]
        """
        return wilson(self.correct, self.samples)


def accuracy_of(run: Callable[..., Any], batches: Iterable[Any]) -> Accuracy:
    """Top-1 accuracy of whatever answers batches of (inputs…, labels) with scores (samples, classes).

    >>> accuracy_of(lambda x: x, [(torch.eye(3), torch.tensor([0, 1, 0]))])
    Accuracy(correct=2, samples=3)
    """
    right: list[np.ndarray[Any, Any]] = []
    for number, (*inputs, labels) in enumerate(batches):
        scores = _scores(run(*inputs))
        truth = torch.as_tensor(labels).reshape(-1).cpu().numpy()
        if scores.ndim != 2 or len(scores) != len(truth):
            raise InvalidInput(
                f"outputs {scores.shape} and labels {truth.shape} of batch {number} do not fit; "
                "expected (samples, classes) and (samples,)"
            )
        if np.isnan(scores).any():
            raise MeasurementFailed(f"outputs of batch {number} are NaN; accuracy has no meaning")
        right.append(scores.argmax(axis=1) == truth)
    answers = np.concatenate(right) if right else np.zeros(0, dtype=bool)
    if not len(answers):
        raise InvalidInput("the loader has no batches; accuracy needs at least one")
    return Accuracy(int(answers.sum()), len(answers), packed_answers(answers))


def _scores(output: Any) -> np.ndarray[Any, Any]:
    """The first tensor of whatever a model or a runtime returns."""
    while isinstance(output, (tuple, list)) and output:
        output = output[0]
    if isinstance(output, dict):
        output = output.get("logits", next(iter(output.values()), None))
    output = getattr(output, "logits", output)
    if isinstance(output, torch.Tensor):
        output = output.detach().float().cpu().numpy()
    if not isinstance(output, np.ndarray):
        raise InvalidInput(f"the model returns a {type(output).__name__}; expected scores (samples, classes)")
    return output
