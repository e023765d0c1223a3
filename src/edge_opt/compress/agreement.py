"""How far a converted model agrees with the original, on the same inputs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from edge_opt.compress.runtimes import Runner
from edge_opt.compress.subject import Subject, Tensors
from edge_opt.errors import ConversionFailed
from edge_opt.records import Agreement


def agreement(subject: Subject, runner: Runner, batches: Sequence[Tensors], source: str) -> Agreement:
    """Differences over all outputs and batches; a converted output that is not finite is a failure, not a figure."""
    largest, total, magnitude, elements = 0.0, 0.0, 0.0, 0
    same, scored, samples = 0, 0, 0
    for batch in batches:
        expected, found = subject.outputs(batch), runner(*batch)
        _check(expected, found, runner)
        for ours, theirs in zip(expected, found, strict=True):
            difference = (ours.double() - theirs.double()).abs()
            largest = max(largest, float(difference.max()) if difference.numel() else 0.0)
            total += float(difference.sum())
            magnitude += float(ours.double().abs().sum())
            elements += ours.numel()
        samples += batch[0].shape[0] if batch[0].dim() else 1
        first = expected[0]
        if first.dim() == 2 and first.shape[1] > 1:
            same += int((first.argmax(1) == found[0].argmax(1)).sum())
            scored += first.shape[0]
    return Agreement(
        max_difference=largest,
        mean_difference=total / max(1, elements),
        scale=magnitude / max(1, elements),
        top1=same / scored if scored else None,
        samples=samples,
        batches=len(batches),
        source=source,
    )


def _check(expected: Tensors, found: Tensors, runner: Runner) -> None:
    shapes, theirs = [tuple(t.shape) for t in expected], [tuple(t.shape) for t in found]
    if shapes != theirs:
        raise ConversionFailed(f"{runner.runtime} returns shapes {theirs}; the original returns {shapes}")
    for number, (ours, other) in enumerate(zip(expected, found, strict=True)):
        if other.is_floating_point() and not bool(torch.isfinite(other).all()) and bool(torch.isfinite(ours).all()):
            raise ConversionFailed(
                f"output {number} of the converted model has NaN or infinity where the original has numbers; "
                "values left the range of the precision: use bf16 or fp32, or spare the layers that overflow"
            )
