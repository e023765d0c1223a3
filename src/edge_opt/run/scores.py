"""The score of a variant, with its interval."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from edge_opt.compress.scoring import Score
from edge_opt.errors import InvalidInput, MeasurementFailed
from edge_opt.records.sweeps import MetricDirection

_Z95 = 1.959963984540054


@dataclass(frozen=True, slots=True)
class Figure:
    """What a variant scored, as plain values that any process and JSON can hold.

    Attributes:
        value: The metric over all samples.
        low: Lower end of its 95 % interval.
        high: Upper end of its 95 % interval.
        samples: Samples it was reckoned over.
        metric: Its name.
        direction: Whether higher or lower is better.
        replicates: The metric on samples drawn again and again, the same draws for every variant.
    """

    value: float
    low: float
    high: float
    samples: int
    metric: str = "accuracy"
    direction: MetricDirection = "higher"
    replicates: tuple[float, ...] = field(default=(), repr=False, compare=False)

    def drop(self, other: Figure) -> float:
        """By how much another is worse."""
        return self.value - other.value if self.direction == "higher" else other.value - self.value


def figure_of(score: Score) -> Figure:
    """A score as plain values."""
    metric, (low, high) = score.metric, score.interval
    drawn = tuple(float(value) for value in score.resamples)
    return Figure(score.value, low, high, score.samples, metric.name, metric.direction, drawn)


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Right answers among all, with Wilson's 95 % interval, which has a width also where all are right."""

    correct: int
    samples: int

    @property
    def share(self) -> float:
        return self.correct / self.samples

    @property
    def interval(self) -> tuple[float, float]:
        """Where the true share lies, 19 times in 20.

        >>> [round(bound, 4) for bound in Accuracy(95, 100).interval]
        [0.8882, 0.9785]
        """
        p, n, z2 = self.share, self.samples, _Z95**2
        center = (p + z2 / (2 * n)) / (1 + z2 / n)
        half = _Z95 / (1 + z2 / n) * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n))
        # Rounding must not put the share outside its own interval.
        return max(0.0, min(center - half, p)), min(1.0, max(center + half, p))


def accuracy_of(run: Callable[..., Any], batches: Iterable[Any]) -> Accuracy:
    """Top-1 accuracy of whatever answers batches of (inputs…, labels) with scores (samples, classes).

    >>> accuracy_of(lambda x: x, [(torch.eye(3), torch.tensor([0, 1, 0]))])
    Accuracy(correct=2, samples=3)
    """
    correct = samples = 0
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
        correct += int((scores.argmax(axis=1) == truth).sum())
        samples += len(truth)
    if not samples:
        raise InvalidInput("the loader has no batches; accuracy needs at least one")
    return Accuracy(correct, samples)


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
