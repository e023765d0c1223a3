"""Trials as JSON and back, exactly: what the store keeps and what processes tell each other."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, cast

from edge_opt.records import Candidate, Trial, TrialMetrics


def plain_candidate(candidate: Candidate) -> dict[str, Any]:
    """A candidate as JSON holds it.

    >>> candidate_from(plain_candidate(Candidate(0.5, "int8", "onnxruntime", (("conv1", 0.25),)))).layer_pruning
    (('conv1', 0.25),)
    """
    return asdict(candidate)


def candidate_from(plain: dict[str, Any]) -> Candidate:
    """The candidate that `plain_candidate` took apart."""
    return Candidate(**_with_tuples(plain))


def plain_metrics(metrics: TrialMetrics) -> dict[str, Any]:
    """Figures as JSON holds them."""
    return asdict(metrics)


def metrics_from(plain: dict[str, Any]) -> TrialMetrics:
    """The figures that `plain_metrics` took apart."""
    return TrialMetrics(**_with_tuples(plain))


def plain_trial(trial: Trial) -> dict[str, Any]:
    """A trial as JSON holds it, without its violations: those follow from the constraints of the day."""
    plain = asdict(trial)
    del plain["violations"]
    return plain


def trial_from(plain: dict[str, Any]) -> Trial:
    """The trial that `plain_trial` took apart."""
    metrics = plain["metrics"]
    parts = {
        "candidate": candidate_from(plain["candidate"]),
        "metrics": None if metrics is None else metrics_from(metrics),
        "violations": (),
    }
    return Trial(**{**plain, **parts})


def _with_tuples(plain: dict[str, Any]) -> dict[str, Any]:
    return {name: _tuples(value) for name, value in plain.items()}


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in cast("list[Any]", value)) if isinstance(value, list | tuple) else value
