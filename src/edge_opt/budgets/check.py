"""Budgets held against figures, profiles and models."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal

from edge_opt.budgets.budget_metrics import PROFILE_METRICS, Metric, trial_metrics
from edge_opt.budgets.parse import parse_budget, parse_increase
from edge_opt.errors import InvalidInput
from edge_opt.model_comparison import Subject, align, as_profile, compared_latency, layer_figures, profiled_differently
from edge_opt.records.devices import SCRATCH_IS_APART, Precision
from edge_opt.records.measurements import Comparison, Interval
from edge_opt.records.profiles import (
    Budget,
    CheckedBudget,
    CheckResult,
    Contribution,
    Increase,
    LayerFigures,
    ModelProfile,
    Outcome,
)
from edge_opt.records.sweeps import TrialMetrics, Violation

if TYPE_CHECKING:
    from edge_opt.boards.targets import Target


def violations(metrics: TrialMetrics, budgets: Iterable[Budget]) -> tuple[Violation, ...]:
    """The budgets that do not hold; one whose figure is not known does not hold either, and its value is None."""
    figures = trial_metrics(metrics.metric)
    found = ((budget, figures[budget.metric].value(metrics)) for budget in budgets)
    return tuple(
        Violation(budget.text, budget.metric, value, budget.limit)
        for budget, value in found
        if value is None or not budget.holds(value)
    )


_NAMED_AT_MOST = 5
# What is asked of a target where nothing is.
_NOWHERE = {"precision": "fp32", "runtime": None, "threads": None}

# The part of a layer in a figure of the whole, where known; peaks do not add up, but the highest is where to look.
_PARTS: dict[str, Callable[[LayerFigures], float | None]] = {
    "macs": lambda layer: layer.macs,
    "flops": lambda layer: layer.flops,
    "params": lambda layer: layer.params,
    "param": lambda layer: layer.param_bytes,
    "size": lambda layer: layer.param_bytes,
    "activation": lambda layer: layer.activation_bytes,
    "peak_activation": lambda layer: layer.peak_live_bytes,
    "bytes_moved": lambda layer: layer.bytes_moved,
    "unpriced": lambda layer: layer.unpriced,
    "latency": lambda layer: layer.measured_s,
    "predicted": lambda layer: layer.predicted_s,
}


def check_profile(
    profile: ModelProfile,
    budgets: Sequence[Budget],
    *,
    baseline: ModelProfile | None = None,
    increases: Sequence[Increase] = (),
    latency: Comparison | None = None,
    on_undecided: Literal["pass", "fail"] = "pass",
) -> CheckResult:
    """Every budget and, against a baseline, every allowed increase; `latency` is the noise-aware comparison of both."""
    found = [_checked(profile, budget, baseline) for budget in budgets]
    if baseline is not None:
        found += [_increased(profile, increase, baseline, latency) for increase in increases]
    return CheckResult(
        profile.name,
        None if baseline is None else baseline.name,
        tuple(found),
        on_undecided,
        (*(() if baseline is None else profiled_differently([baseline, profile])), *_left_out(budgets, increases)),
    )


def _left_out(budgets: Sequence[Budget], increases: Sequence[Increase]) -> tuple[str, ...]:
    """What a verdict on memory does not know."""
    names = [*(budget.metric for budget in budgets), *(increase.metric for increase in increases)]
    is_about_memory = any(name.startswith(("peak_memory", "planned_memory", "train_peak_memory")) for name in names)
    return (SCRATCH_IS_APART,) if is_about_memory else ()


def _checked(profile: ModelProfile, budget: Budget, baseline: ModelProfile | None) -> CheckedBudget:
    metric = PROFILE_METRICS[budget.metric]
    before = None if baseline is None else _earlier(metric, profile, baseline)
    return _judged(profile, metric, budget, metric.bounds(profile), before, baseline)


def _increased(
    profile: ModelProfile, increase: Increase, baseline: ModelProfile, latency: Comparison | None
) -> CheckedBudget:
    """An allowed increase is a budget whose limit follows from the baseline."""
    metric, text = PROFILE_METRICS[increase.metric], f"max increase {increase.text}"
    before = _earlier(metric, profile, baseline)
    if before is None:
        budget = Budget(metric.name, "<=", 0.0, text)
        reason = f"the baseline has no {metric.name}{_where(metric, profile)}; {_cure(metric, baseline)}"
        return CheckedBudget(budget, "unknown", metric.value(profile), None, None, None, reason, ())
    limit = before * (1 + increase.share) if increase.share is not None else before + (increase.amount or 0.0)
    bounds = metric.bounds(profile)
    if metric.family == "latency" and latency is not None:
        bounds = Interval(before * latency.ratio_interval.low, before * latency.ratio_interval.high)
    budget = Budget(metric.name, "<=", limit, text)
    return _judged(profile, metric, budget, bounds, before, baseline)


def _judged(
    profile: ModelProfile,
    metric: Metric[ModelProfile],
    budget: Budget,
    bounds: Interval | None,
    before: float | None,
    baseline: ModelProfile | None,
) -> CheckedBudget:
    value = metric.value(profile)
    if value is None:
        reason = f"the profile has no {metric.name}; {_cure(metric, profile)}"
        return CheckedBudget(budget, "unknown", None, None, None, before, reason, ())
    low, high = (value, value) if bounds is None else (bounds.low, bounds.high)
    ends = {budget.holds(low), budget.holds(high)}
    outcome: Outcome = "undecided" if len(ends) == 2 else "holds" if ends == {True} else "broken"
    reason = _doubt(metric, profile) if outcome == "undecided" else ""
    layers = () if outcome == "holds" or not budget.is_ceiling else tuple(_blamed(profile, metric, baseline))
    return CheckedBudget(
        budget,
        outcome,
        value,
        None if bounds is None else low,
        None if bounds is None else high,
        before,
        reason,
        layers,
    )


def _earlier(metric: Metric[ModelProfile], profile: ModelProfile, baseline: ModelProfile) -> float | None:
    """The baseline's figure; one that was predicted for something else is none."""
    is_other = metric.is_predicted and _where(metric, profile) != _where(metric, baseline)
    return None if is_other else metric.value(baseline)


def _where(metric: Metric[ModelProfile], profile: ModelProfile) -> str:
    found = profile.prediction
    return f" for {found.target} ({found.precision}, {found.basis})" if metric.is_predicted and found else ""


def _doubt(metric: Metric[ModelProfile], profile: ModelProfile) -> str:
    """Why neither holds, and what would decide it."""
    if metric.is_measured:
        return "the limit lies inside the interval; measure for longer, or on a quieter machine"
    if not metric.is_predicted:
        return "operators are unpriced, so the figure is a lower bound; edge_opt.cost_rule adds a price"
    is_rough = profile.prediction is not None and profile.prediction.basis in ("roofline", "fitted")
    return f"the limit lies inside the prediction's interval; {'calibrate the target' if is_rough else 'measure there'}"


def _cure(metric: Metric[ModelProfile], profile: ModelProfile) -> str:
    if metric.is_measured:
        return "profile with measure=True, or --measure"
    if metric.is_trained:
        return "check the model itself, for a saved profile does not know its training step"
    if not metric.is_predicted:
        return "profile the model again"
    found = profile.prediction
    if found is not None and found.seconds is None:
        return f"{found.target} gives no time: {next(iter(found.remarks), 'a figure is missing')}"
    return "profile with target=…, or --target"


def _blamed(
    profile: ModelProfile, metric: Metric[ModelProfile], baseline: ModelProfile | None
) -> Iterator[Contribution]:
    """The layers that grew most over the baseline; without one, or where none grew, the largest."""
    read = _part(profile, metric.family, baseline)
    if read is None:
        return
    parts = list(_parts(profile, baseline, read, metric.scale))
    grown = sorted((part for part in parts if _growth(part) > 0), key=_growth, reverse=True)
    largest = sorted((part for part in parts if part.value > 0), key=lambda part: part.value, reverse=True)
    yield from (grown or largest)[:_NAMED_AT_MOST]


def _part(
    profile: ModelProfile, family: str, baseline: ModelProfile | None
) -> Callable[[LayerFigures], float | None] | None:
    """How to read a layer's part in a figure; memory is its weights or its peak, whichever matters more."""
    if family not in ("peak_memory", "planned_memory"):
        return _PARTS.get(family)
    weights, live = profile.totals.param_bytes, profile.peak.live_bytes
    if baseline is not None:
        weights, live = weights - baseline.totals.param_bytes, live - baseline.peak.live_bytes
    return _PARTS["param" if weights > live else "peak_activation"]


def _growth(part: Contribution) -> float:
    return 0.0 if part.baseline is None else part.value - part.baseline


def _parts(
    profile: ModelProfile,
    baseline: ModelProfile | None,
    read: Callable[[LayerFigures], float | None],
    scale: float,
) -> Iterator[Contribution]:
    new = layer_figures(profile)
    old = () if baseline is None else layer_figures(baseline)
    for before, after in align(old, new):
        value = None if after is None else read(new[after])
        if after is None or value is None:
            continue
        # A layer that was not there had none of it.
        earlier = None if baseline is None else 0.0 if before is None else read(old[before])
        known = None if earlier is None else earlier / scale
        yield Contribution(new[after].label or profile.name, new[after].kind, value / scale, known)


def check(
    subject: Subject,
    *budgets: str | Budget,
    inputs: Any = None,
    kwargs: Mapping[str, Any] | None = None,
    baseline: Subject | None = None,
    max_increase: Mapping[str, str | float] | Sequence[str] | None = None,
    on_undecided: Literal["pass", "fail"] = "pass",
    measure: bool | Mapping[str, Any] | None = None,
    target: Target | None = None,
    precision: Precision = "fp32",
    runtime: str | None = None,
    threads: int | None = None,
    optimizer: Any = "adamw",
) -> CheckResult:
    """Whether a model keeps within every budget.

    A measured or predicted figure whose interval holds the limit is undecided.

    Args:
        subject: A profile, the path of a saved one, or a model with its `inputs`.
        budgets: Limits such as "macs <= 600M" or "latency_ms <= 20".
        inputs: As in `profile`, for a model.
        kwargs: Arguments of the model by name.
        baseline: A profile, the path of a saved one, or a model that takes the same inputs, to compare with. Two models
            are timed in turn in this process, so that a busy machine disturbs both alike.
        max_increase: How much figures may grow over the baseline: `{"peak_memory": "5%"}`; a number is a share.
        on_undecided: Whether budgets that are undecided "pass" or "fail".
        measure: Whether to run the model, or the options of `measure`; None runs it if a budget needs it.
        target: Where `predicted_ms` is predicted for, of the model and the baseline.
        precision: Type of the numbers on the target.
        runtime: What runs the model on the target, such as "ncnn"; the best-known one unless given.
        threads: Of the runtime on the target, as in `profile`; those to measure with are in `measure`.
        optimizer: Of the training step that `train_flops` and `train_peak_memory_mb` speak of, as in `training_step`.

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
    there: dict[str, Any] = {"precision": precision, "runtime": runtime, "threads": threads}
    if target is None and there != _NOWHERE:
        name = next(name for name, value in there.items() if value != _NOWHERE[name])
        raise InvalidInput(
            f"{name} is {there[name]!r}, and there is no target to predict for; add target= (--target). Memory in "
            "another precision is eo.fit_batch(model, shape, memory_limit_mb=..., precision=...)"
        )
    if increases and baseline is None:
        raise InvalidInput("max_increase needs a baseline to increase from; give a saved profile as baseline")
    before = None if baseline is None else as_profile(baseline, inputs, kwargs, target=target, **there)
    names = [*(limit.metric for limit in limits), *(increase.metric for increase in increases)]
    needed = any(PROFILE_METRICS[name].is_measured for name in names) if measure is None else measure
    is_paired = needed is not False and _is_model(baseline) and _is_model(subject)
    now = False if is_paired else needed
    profile = as_profile(subject, inputs, kwargs, measure=now, target=target, **there)
    if any(PROFILE_METRICS[name].is_trained for name in names):
        profile = _with_training(profile, subject, inputs, kwargs, optimizer)
        before = None if before is None else _with_training(before, baseline, inputs, kwargs, optimizer)
    latency = None if before is None else compared_latency(before, profile)
    if before is not None and is_paired:
        options = dict(needed) if isinstance(needed, Mapping) else {}
        shares = [one.share for one in increases if PROFILE_METRICS[one.metric].family == "latency"]
        options["limit"] = None if not shares or shares[0] is None else 1 + shares[0]
        before, profile, latency = _timed_in_turn((baseline, before), (subject, profile), inputs, kwargs, options)
    return check_profile(
        profile,
        limits,
        baseline=before,
        increases=increases,
        latency=latency,
        on_undecided=on_undecided,
    )


def _is_model(subject: Any) -> bool:
    return subject is not None and not isinstance(subject, (str, PathLike, ModelProfile))


def _with_training(
    profile: ModelProfile, subject: Any, inputs: Any, kwargs: Mapping[str, Any] | None, optimizer: Any
) -> ModelProfile:
    """The profile with what a training step of its model takes; a saved profile stays as it is."""
    if not _is_model(subject):
        return profile
    from edge_opt.training_steps.step_report import training_step

    return replace(profile, training=training_step(subject, inputs, kwargs=kwargs, optimizer=optimizer).cost)


def _timed_in_turn(
    baseline: tuple[Any, ModelProfile], change: tuple[Any, ModelProfile], inputs: Any, kwargs: Mapping[str, Any] | None,
    options: dict[str, Any],
) -> tuple[ModelProfile, ModelProfile, Comparison]:  # fmt: skip
    """Both profiles with what was measured, a block of each model in turn, and how they compare."""
    from edge_opt.measuring.session import measure_pair

    known = {
        key: options[key] for key in ("min_time_s", "max_time_s", "threads", "progress", "limit") if key in options
    }
    profiles = (baseline[1], change[1])
    before, after, verdict = measure_pair(baseline[0], change[0], inputs, kwargs=kwargs, profiles=profiles, **known)
    return replace(profiles[0], measurement=before), replace(profiles[1], measurement=after), verdict


def _increases(given: Mapping[str, str | float] | Sequence[str] | None) -> list[Increase]:
    if given is None:
        return []
    if not isinstance(given, Mapping):
        return [parse_increase(text) for text in ([given] if isinstance(given, str) else given)]
    texts = (value if isinstance(value, str) else f"{value * 100:.12g}%" for value in given.values())
    return [parse_increase(f"{name}={text}") for name, text in zip(given, texts, strict=True)]
