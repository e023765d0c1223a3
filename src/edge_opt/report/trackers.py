"""Trackers: the figures of a profile, written to TensorBoard, MLflow or Weights & Biases, whichever is handed in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from edge_opt.budgets.budget_metrics import PROFILE_METRICS
from edge_opt.errors import InvalidInput
from edge_opt.records import ModelProfile

_UNITS = ("", "mb", "ms", "j")


def figures(profile: ModelProfile) -> Iterator[tuple[str, float]]:
    """Every figure that is known, once, in the unit that people use: macs, peak_memory_mb, latency_ms."""
    for metric in PROFILE_METRICS.values():
        value = metric.value(profile) if metric.unit in _UNITS else None
        if value is not None:
            yield metric.name, float(value)


def log_to(profile: ModelProfile, writer: Any, step: int = 0, prefix: str = "") -> None:
    """Write the figures, and the table as text, to TensorBoard, mlflow, a (client, run id) or a W&B run."""
    if hasattr(writer, "add_scalar"):
        for name, value in figures(profile):
            writer.add_scalar(prefix + name, value, step)
        # TensorBoard reads Markdown; four spaces keep a table as it is.
        writer.add_text(f"{prefix}profile", "\n".join(f"    {line}" for line in str(profile).splitlines()), step)
        return
    # A run of Weights & Biases, or its module inside one; mlflow has summaries nowhere.
    if hasattr(writer, "log") and hasattr(writer, "summary"):
        found = dict(figures(profile))
        writer.log({prefix + name: value for name, value in found.items()}, step=step)
        writer.summary.update({f"{prefix}profile": str(profile)})
        return
    logger, run = writer if isinstance(writer, tuple) and len(writer) == 2 else (writer, None)
    if not hasattr(logger, "log_metric") or not hasattr(logger, "log_text"):
        raise InvalidInput(
            f"cannot log to a {type(writer).__name__}; give a TensorBoard SummaryWriter, the mlflow module, "
            "(MlflowClient(), run_id), or a run of Weights & Biases"
        )
    target = () if run is None else (run,)
    for name, value in figures(profile):
        logger.log_metric(*target, prefix + name, value, step=step)
    logger.log_text(*target, str(profile), f"{prefix}profile.txt")
