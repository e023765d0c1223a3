"""check(): whether a model keeps within its budgets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal

from edge_opt.budget.checks import check_profile
from edge_opt.budget.metrics import PROFILE_METRICS
from edge_opt.budget.parsing import parse_budget, parse_increase
from edge_opt.comparing import Subject, as_profile, compared_latency
from edge_opt.errors import InvalidInput
from edge_opt.records import Budget, CheckResult, Increase, ModelProfile, Precision

if TYPE_CHECKING:
    from edge_opt.devices.targets import Target


def check(
    subject: Subject,
    *budgets: str | Budget,
    inputs: Any = None,
    kwargs: Mapping[str, Any] | None = None,
    baseline: ModelProfile | str | PathLike[str] | None = None,
    max_increase: Mapping[str, str | float] | Sequence[str] | None = None,
    on_undecided: Literal["pass", "fail"] = "pass",
    measure: bool | Mapping[str, Any] | None = None,
    target: Target | None = None,
    precision: Precision = "fp32",
) -> CheckResult:
    """Whether a profile, a saved one, or a model with its `inputs` keeps within every budget.

    `max_increase` says how much figures may grow over the baseline: `{"peak_memory": "5%"}`, a number being a share.
    A measured or predicted figure whose interval holds the limit is undecided. A model is measured if a budget needs
    it; `predicted_ms` is what it, and the baseline, would take on `target`.

    >>> from torch import nn
    >>> check(nn.Linear(16, 8), "macs <= 1k", "params <= 100", inputs=(1, 16)).failures[0].budget.text
    'params <= 100'
    """
    if on_undecided not in ("pass", "fail"):
        raise InvalidInput(f"on_undecided is {on_undecided!r}; it must be 'pass' or 'fail'")
    limits = [parse_budget(item if isinstance(item, str) else item.text, PROFILE_METRICS) for item in budgets]
    increases = _increases(max_increase)
    if not limits and not increases:
        raise InvalidInput("there is no budget to check; give at least one, such as 'macs <= 600M'")
    if precision != "fp32" and target is None:
        raise InvalidInput(f"precision is {precision!r}, and there is no target to predict for; add target=")
    if increases and baseline is None:
        raise InvalidInput("max_increase needs a baseline to increase from; give a saved profile as baseline")
    before = None if baseline is None else as_profile(baseline, target=target, precision=precision)
    names = [*(limit.metric for limit in limits), *(increase.metric for increase in increases)]
    needed = any(PROFILE_METRICS[name].is_measured for name in names) if measure is None else measure
    profile = as_profile(subject, inputs, kwargs, measure=needed, target=target, precision=precision)
    return check_profile(
        profile,
        limits,
        baseline=before,
        increases=increases,
        latency=None if before is None else compared_latency(before, profile),
        on_undecided=on_undecided,
    )


def _increases(given: Mapping[str, str | float] | Sequence[str] | None) -> list[Increase]:
    if given is None:
        return []
    if not isinstance(given, Mapping):
        return [parse_increase(text) for text in ([given] if isinstance(given, str) else given)]
    texts = (value if isinstance(value, str) else f"{value * 100:.12g}%" for value in given.values())
    return [parse_increase(f"{name}={text}") for name, text in zip(given, texts, strict=True)]
