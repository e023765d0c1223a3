"""Callbacks for Lightning and Hugging Face that log and check a model's costs when its training starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from edge_opt.budgets.check import check
from edge_opt.errors import MissingExtra, TrainingFailed
from edge_opt.profiling import profile
from edge_opt.report.save import figures


def lightning_callback(
    inputs: Any = None, *, kwargs: Mapping[str, Any] | None = None, budgets: Sequence[str] = ()
) -> Any:
    """Return a callback for Lightning's Trainer that logs costs and refuses to train a model over budget.

    Args:
        inputs: As in `profile`; the shape of one call.
        kwargs: Arguments of the model by name.
        budgets: Limits such as "macs <= 600M"; training is refused where one is not kept.
    """

    class LightningCostCallback(_base(("lightning.pytorch", "pytorch_lightning"), "Callback", "lightning")):  # type: ignore[misc]
        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            costs = _checked(pl_module, inputs, kwargs, budgets)
            for logger in trainer.loggers:
                logger.log_metrics(costs, step=0)

    return LightningCostCallback()


def trainer_callback(
    inputs: Any = None, *, kwargs: Mapping[str, Any] | None = None, budgets: Sequence[str] = ()
) -> Any:
    """Return a callback for Hugging Face's Trainer that logs costs and refuses to train a model over budget.

    Args:
        inputs: As in `profile`; the shape of one call.
        kwargs: Arguments of the model by name.
        budgets: Limits such as "macs <= 600M"; training is refused where one is not kept.
    """

    class TrainerCostCallback(_base(("transformers",), "TrainerCallback", "transformers")):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            state.log_history.append({"step": 0, **_checked(others["model"], inputs, kwargs, budgets)})

    return TrainerCostCallback()


def _base(modules: Sequence[str], name: str, package: str) -> Any:
    """Return the class to inherit from, of the first module that is installed."""
    for module in modules:
        try:
            return getattr(import_module(module), name)
        except ModuleNotFoundError:
            continue
    raise MissingExtra(f"this callback needs {package}, which is not installed; run `pip install {package}`")


def _checked(model: Any, inputs: Any, kwargs: Mapping[str, Any] | None, budgets: Sequence[str]) -> dict[str, float]:
    """Return the costs by their names in a log; raise TrainingFailed if a budget is exceeded."""
    costs = profile(model, inputs, kwargs=kwargs)
    if budgets:
        result = check(costs, *budgets)
        if not result.passed:
            raise TrainingFailed(
                "training does not start, because a budget is not kept: "
                + "; ".join(f"{failure.budget.metric} is {failure.value}" for failure in result.failures)
            )
    return {f"cost/{name}": value for name, value in figures(costs)}
