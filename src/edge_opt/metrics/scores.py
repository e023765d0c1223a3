"""Scores: whatever a classifier returns, read as logits that fit their labels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from edge_opt.errors import InvalidInput, MeasurementFailed


def logits_of(output: Any) -> torch.Tensor:
    """The scores in whatever a model returns."""
    if isinstance(output, torch.Tensor):
        return output
    scores = getattr(output, "logits", None)
    if scores is None and isinstance(output, Mapping):
        tensors = [value for value in output.values() if isinstance(value, torch.Tensor)]
        scores = output.get("logits", tensors[0] if len(tensors) == 1 else None)
    if scores is None and isinstance(output, (tuple, list)) and output:
        scores = output[0]
    if not isinstance(scores, torch.Tensor):
        keys = f" of {', '.join(map(str, output))}" if isinstance(output, Mapping) else ""
        raise InvalidInput(f"the model returns a {type(output).__name__}{keys}, without a tensor `logits`")
    return scores


def check_fit(logits: torch.Tensor, labels: torch.Tensor, number: int) -> None:
    """Refuse scores and labels from which no accuracy follows."""
    shapes = f"outputs {tuple(logits.shape)} and labels {tuple(labels.shape)} of batch {number}"
    if logits.ndim != 2 or labels.ndim != 1 or len(logits) != len(labels):
        raise InvalidInput(f"{shapes} do not fit; expected (samples, classes) and (samples,)")
    if not len(labels) or logits.shape[1] < 2:
        raise InvalidInput(f"{shapes}: there must be a sample, and a column for each of two or more classes")
    if labels.is_floating_point() or labels.is_complex():
        raise InvalidInput(
            f"labels of batch {number} are {labels.dtype}; they must be numbers of classes, in an integer type"
        )
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= logits.shape[1]:
        worst = low if low < 0 else high
        raise InvalidInput(f"label {worst} of batch {number} is none of the {logits.shape[1]} classes of the outputs")
    if bool(logits.isnan().any()):
        bad = int(logits.isnan().sum())
        raise MeasurementFailed(f"{bad} of {logits.numel()} outputs of batch {number} are NaN; accuracy has no meaning")
