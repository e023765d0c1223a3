"""What a model costs, noted and checked when its training starts: a callback for Lightning, one for Hugging Face."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from edge_opt.budgets.check import check
from edge_opt.errors import MissingExtra, TrainingFailed
from edge_opt.profiling import profile
from edge_opt.records.profiles import ModelProfile
from edge_opt.report.save import figures


def lightning_callback(
    inputs: Any = None, *, kwargs: Mapping[str, Any] | None = None, budgets: Sequence[str] = ()
) -> Any:
    """A callback for Lightning's Trainer: the figures go to its loggers, and training does not start over budget.

    Args:
        inputs: As in `profile`; the shape of one call.
        kwargs: Arguments of the model by name.
        budgets: Limits such as "macs <= 600M"; training is refused where one is not kept.
    """

    class CostCallback(_base(("lightning.pytorch", "pytorch_lightning"), "Callback", "lightning")):  # type: ignore[misc]
        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            found = _checked(pl_module, inputs, kwargs, budgets)
            for logger in trainer.loggers:
                logger.log_metrics({f"cost/{name}": value for name, value in figures(found)}, step=0)

    return CostCallback()


def trainer_callback(
    inputs: Any = None, *, kwargs: Mapping[str, Any] | None = None, budgets: Sequence[str] = ()
) -> Any:
    """A callback for Hugging Face's Trainer: the figures go to its history, and training does not start over budget.

    Args:
        inputs: As in `profile`; the shape of one call.
        kwargs: Arguments of the model by name.
        budgets: Limits such as "macs <= 600M"; training is refused where one is not kept.
    """

    class CostCallback(_base(("transformers",), "TrainerCallback", "transformers")):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            found = _checked(given["model"], inputs, kwargs, budgets)
            state.log_history.append({"step": 0, **{f"cost/{name}": value for name, value in figures(found)}})

    return CostCallback()


def _base(modules: Sequence[str], name: str, package: str) -> Any:
    """The class to inherit from, of the first of these modules that is there."""
    for module in modules:
        try:
            return getattr(import_module(module), name)
        except ModuleNotFoundError:
            continue
    raise MissingExtra(f"this callback needs {package}, which is not installed; run `pip install {package}`")


def _checked(model: Any, inputs: Any, kwargs: Mapping[str, Any] | None, budgets: Sequence[str]) -> ModelProfile:
    found = profile(model, inputs, kwargs=kwargs)
    if budgets:
        result = check(found, *budgets)
        if not result.passed:
            raise TrainingFailed(
                "training does not start, because a budget is not kept: "
                + "; ".join(f"{one.budget.metric} is {one.value}" for one in result.failures)
            )
    return found
