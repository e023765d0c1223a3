"""Check budgets against figures, profiles and models."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal

from edge_opt._support.checks import check_one_of
from edge_opt._support.deprecation import accept_former_parameters
from edge_opt.budgets.budget_metrics import PROFILE_METRICS, Metric, parse_budget, parse_increase, trial_metrics
from edge_opt.errors import InvalidInput
from edge_opt.loading import ModelLike, load_model
from edge_opt.model_comparison import align, compared_latency, layer_figures, profiled_differently
from edge_opt.records.devices import SCRATCH_IS_APART, Precision
from edge_opt.records.measurements import Comparison, Interval
from edge_opt.records.profiles import (
    Budget,
    CheckedBudget,
    CheckResult,
    Contribution,
    Increase,
    ModelProfile,
    Outcome,
)
from edge_opt.records.sweeps import TrialMetrics, Undecided, Violation

if TYPE_CHECKING:
    from edge_opt.boards.targets import Target


def violations(metrics: TrialMetrics, budgets: Iterable[Budget]) -> tuple[Violation, ...]:
    """Return the budgets that do not hold; one whose figure is not known does not hold, and its value is None.

    A figure of a target breaks a budget if its whole interval does.
    """
    return judged(metrics, budgets)[0]


def judged(metrics: TrialMetrics, budgets: Iterable[Budget]) -> tuple[tuple[Violation, ...], tuple[Undecided, ...]]:
    """Return the budgets that do not hold, and those that the interval of a figure of the target leaves open."""
    figures = trial_metrics(metrics.metric)
    broken: list[Violation] = []
    undecided: list[Undecided] = []
    for budget in budgets:
        metric = figures[budget.metric]
        value = metric.value(metrics)
        ends = {None if value is None else budget.holds(value)}
        if value is not None and metric.family == "target_latency":
            from edge_opt.boards.ratios import probability_below

            interval = (metrics.target_low_s, metrics.target_high_s)
            low, high = (None if end is None else end / metric.scale for end in interval)
            ends = {budget.holds(low or 0.0), budget.holds(math.inf if high is None else high)}
            if len(ends) == 2:
                below = probability_below(budget.limit, value, low, high)
                chance = below if below is None or budget.is_ceiling else 1 - below
                undecided.append(Undecided(budget.text, budget.metric, value, budget.limit, chance))
        if True not in ends:
            broken.append(Violation(budget.text, budget.metric, value, budget.limit))
    return tuple(broken), tuple(undecided)


_MAX_CONTRIBUTORS = 5

# The part of a layer in a figure of the whole, where known; peaks do not add up, but the highest is where to look.
_PARTS = {name: name for name in ("macs", "flops", "params", "bytes_moved", "unpriced")} | {
    "param": "param_bytes", "size": "param_bytes", "activation": "activation_bytes",
    "peak_activation": "peak_live_bytes", "latency": "measured_s", "predicted": "predicted_s",
}  # fmt: skip


def check_profile(
    profile: ModelProfile,
    budgets: Sequence[Budget],
    *,
    baseline: ModelProfile | None = None,
    increases: Sequence[Increase] = (),
    latency: Comparison | None = None,
    on_undecided: Literal["pass", "fail"] = "pass",
) -> CheckResult:
    """Check every budget and, against a baseline, every allowed increase; `latency` compares both latencies."""
    checked = [_checked(profile, budget, baseline) for budget in budgets]
    if baseline is not None:
        checked += [_checked_increase(profile, increase, baseline, latency) for increase in increases]
    notes = () if baseline is None else profiled_differently([baseline, profile])
    names = [item.budget.metric for item in checked]
    if any(name.startswith(("peak_memory", "planned_memory", "train_peak_memory")) for name in names):
        notes = (*notes, SCRATCH_IS_APART)
    return CheckResult(profile.name, None if baseline is None else baseline.name, tuple(checked), on_undecided, notes)


def _checked_increase(
    profile: ModelProfile, increase: Increase, baseline: ModelProfile, latency: Comparison | None
) -> CheckedBudget:
    """Check an allowed increase, which is a budget whose limit follows from the baseline."""
    metric, text = PROFILE_METRICS[increase.metric], f"max increase {increase.text}"
    before = _baseline_value(metric, profile, baseline)
    if before is None:
        budget = Budget(metric.name, "<=", 0.0, text)
        reason = f"the baseline has no {metric.name}{_predicted_for(metric, profile)}; {_hint(metric, baseline)}"
        return CheckedBudget(budget, "unknown", metric.value(profile), None, None, None, reason, ())
    limit = before * (1 + increase.share) if increase.share is not None else before + (increase.amount or 0.0)
    bounds = None
    if metric.family == "latency" and latency is not None:
        bounds = Interval(before * latency.ratio_interval.low, before * latency.ratio_interval.high)
    return _checked(profile, Budget(metric.name, "<=", limit, text), baseline, bounds)


def _checked(
    profile: ModelProfile, budget: Budget, baseline: ModelProfile | None, bounds: Interval | None = None
) -> CheckedBudget:
    """Check one budget; `bounds` replaces the figure's own interval."""
    metric = PROFILE_METRICS[budget.metric]
    value, before = metric.value(profile), _baseline_value(metric, profile, baseline)
    if value is None:
        reason = f"the profile has no {metric.name}; {_hint(metric, profile)}"
        return CheckedBudget(budget, "unknown", None, None, None, before, reason, ())
    bounds = bounds or metric.bounds(profile)
    low, high = (None, None) if bounds is None else (bounds.low, bounds.high)
    ends = {budget.holds(value if low is None else low), budget.holds(value if high is None else high)}
    outcome: Outcome = "undecided" if len(ends) == 2 else "holds" if ends == {True} else "broken"
    reason = _undecided_reason(metric, profile) if outcome == "undecided" else ""
    layers = () if outcome == "holds" or not budget.is_ceiling else tuple(_top_contributors(profile, metric, baseline))
    return CheckedBudget(budget, outcome, value, low, high, before, reason, layers)


def _baseline_value(metric: Metric[ModelProfile], profile: ModelProfile, baseline: ModelProfile | None) -> float | None:
    """Return the baseline's figure; None without one, or where it was predicted for another target or precision."""
    if baseline is None or _predicted_for(metric, profile) != _predicted_for(metric, baseline):
        return None
    return metric.value(baseline)


def _predicted_for(metric: Metric[ModelProfile], profile: ModelProfile) -> str:
    prediction = profile.prediction
    if prediction is None or not metric.is_predicted:
        return ""
    return f" for {prediction.target} ({prediction.precision}, {prediction.basis})"


def _undecided_reason(metric: Metric[ModelProfile], profile: ModelProfile) -> str:
    """Return why a budget is undecided, and what would decide it."""
    if metric.is_measured:
        return "the limit lies inside the interval; measure for longer, or on a quieter machine"
    if not metric.is_predicted:
        return "operators are unpriced, so the figure is a lower bound; edge_opt.cost_rule adds a price"
    is_rough = profile.prediction is not None and profile.prediction.basis in ("roofline", "fitted")
    return f"the limit lies inside the prediction's interval; {'calibrate the target' if is_rough else 'measure there'}"


def _hint(metric: Metric[ModelProfile], profile: ModelProfile) -> str:
    if metric.is_measured:
        return "profile with --measure, or measure=True in Python"
    if metric.is_trained:
        return "check the model itself: a saved profile has no training step"
    if not metric.is_predicted:
        return "profile the model again"
    prediction = profile.prediction
    if prediction is not None and prediction.seconds is None:
        return f"{prediction.target} gives no time: {next(iter(prediction.remarks), 'a figure is missing')}"
    if prediction is not None and metric.name == "cpu_layers":
        return f"{prediction.target} was not predicted on an NPU; name one, such as -t galaxy-s24 --precision int8"
    return "add --target, or target= in Python"


def _top_contributors(
    profile: ModelProfile, metric: Metric[ModelProfile], baseline: ModelProfile | None
) -> list[Contribution]:
    """Return the layers that grew most over the baseline; without one, or where none grew, the largest."""
    family = metric.family
    if family in ("peak_memory", "planned_memory"):
        # Memory is a layer's weights or its peak, whichever matters more.
        weights, live = profile.totals.param_bytes, profile.peak.live_bytes
        if baseline is not None:
            weights, live = weights - baseline.totals.param_bytes, live - baseline.peak.live_bytes
        family = "param" if weights > live else "peak_activation"
    if family not in _PARTS:
        return []
    read = attrgetter(_PARTS[family])
    contributions = []
    new = layer_figures(profile)
    old = () if baseline is None else layer_figures(baseline)
    for before, after in align(old, new):
        value = None if after is None else read(new[after])
        if after is None or value is None:
            continue
        # A layer that was not there contributed nothing.
        earlier = None if baseline is None else 0.0 if before is None else read(old[before])
        earlier = None if earlier is None else earlier / metric.scale
        layer = new[after]
        contributions.append(Contribution(layer.label or profile.name, layer.kind, value / metric.scale, earlier))
    grown = [layer for layer in contributions if layer.baseline is not None and layer.value > layer.baseline]
    if grown:
        grown.sort(key=lambda layer: layer.value - (layer.baseline or 0.0), reverse=True)
        return grown[:_MAX_CONTRIBUTORS]
    largest = sorted((layer for layer in contributions if layer.value > 0), key=lambda layer: -layer.value)
    return largest[:_MAX_CONTRIBUTORS]


@accept_former_parameters
def check(
    model: ModelLike | ModelProfile,
    *budgets: str | Budget,
    inputs: Any = None,
    kwargs: Mapping[str, Any] | None = None,
    baseline: ModelLike | ModelProfile | None = None,
    max_increase: Mapping[str, str | float] | Sequence[str] | None = None,
    on_undecided: Literal["pass", "fail"] = "pass",
    measure: bool | Mapping[str, Any] | None = None,
    target: Target | None = None,
    precision: Precision | None = None,
    runtime: str | None = None,
    threads: int | None = None,
    optimizer: Any = "adamw",
    trust: bool = False,
) -> CheckResult:
    """Check whether a model keeps within every budget.

    A budget is undecided if the interval of a measured or predicted value contains the limit.

    Args:
        model: A profile, or a model as `profile` takes it: a module with its `inputs`, a reference or a file.
        budgets: Limits such as "macs <= 600M" or "latency_ms <= 20".
        inputs: As in `profile`, for a model.
        kwargs: Arguments of the model by name.
        baseline: What to compare with: a profile, or a model that takes the same inputs. Two models are measured
            interleaved in this process, so that a busy machine disturbs both alike.
        max_increase: How much figures may grow over the baseline: `{"peak_memory": "5%"}`; a number is a share.
        on_undecided: Whether budgets that are undecided "pass" or "fail".
        measure: Whether to run the model, or the options of `measure`; None runs it if a budget needs it.
        target: Target of `predicted_ms`, for the model and the baseline.
        precision: Type of the numbers on the target; default: int8 for a file that computes in int8, else fp32.
        runtime: Runtime on the target, such as "ncnn"; default: the one with the most accurate data.
        threads: Threads of the runtime on the target, as in `profile`; those to measure with are in `measure`.
        optimizer: Optimizer for `train_flops` and `train_peak_memory_mb`, as in `training_step`.
        trust: Whether a .pt2 file may be opened, which can execute code from it.

    >>> from torch import nn
    >>> check(nn.Linear(16, 8), "macs <= 1k", "params <= 100", inputs=(1, 16)).failures[0].budget.text
    'params <= 100'
    """
    check_one_of("on_undecided", on_undecided, ("pass", "fail"))
    limits = [parse_budget(item if isinstance(item, str) else item.text, PROFILE_METRICS) for item in budgets]
    increases = _increases(max_increase)
    if not limits and not increases:
        raise InvalidInput("there is no budget to check; give at least one, such as 'macs <= 600M'")
    on_target: dict[str, Any] = {"precision": precision, "runtime": runtime, "threads": threads}
    changed = [name for name, value in on_target.items() if value is not None]
    if target is None and changed:
        raise InvalidInput(f"{changed[0]}={on_target[changed[0]]!r} requires target=, such as target='raspberry-pi-4'")
    if increases and baseline is None:
        raise InvalidInput("max_increase needs a baseline to increase from; give a saved profile as baseline")
    from edge_opt.profiling import profile_or_saved

    subject, other = _loaded(model, trust), _loaded(baseline, trust)
    before = None if other is None else profile_or_saved(other, inputs, kwargs, target=target, **on_target)
    names = [*(limit.metric for limit in limits), *(increase.metric for increase in increases)]
    needed = any(PROFILE_METRICS[name].is_measured for name in names) if measure is None else measure
    is_paired = needed is not False and _is_model(other) and _is_model(subject)
    now = False if is_paired else needed
    profile = profile_or_saved(subject, inputs, kwargs, measure=now, target=target, **on_target)
    if any(PROFILE_METRICS[name].is_trained for name in names):
        profile = _with_training(profile, subject, inputs, kwargs, optimizer)
        before = None if before is None else _with_training(before, other, inputs, kwargs, optimizer)
    latency = None if before is None else compared_latency(before, profile)
    if before is not None and is_paired:
        from edge_opt.measuring.session import measure_pair

        names_of_pair = ("min_time_s", "max_time_s", "threads", "progress")
        options = {name: needed[name] for name in names_of_pair if isinstance(needed, Mapping) and name in needed}
        shares = [increase.share for increase in increases if PROFILE_METRICS[increase.metric].family == "latency"]
        first, second, latency = measure_pair(
            other, subject, inputs, kwargs=kwargs, profiles=(before, profile),
            limit=None if not shares or shares[0] is None else 1 + shares[0], **options,
        )  # fmt: skip
        before, profile = replace(before, measurement=first), replace(profile, measurement=second)
    return check_profile(
        profile, limits, baseline=before, increases=increases, latency=latency, on_undecided=on_undecided
    )


def _loaded(model: Any, trust: bool) -> Any:
    """Return a saved profile or the model of a reference, read once for all figures; anything else as it is."""
    from edge_opt.profiling import saved_profile

    saved = saved_profile(model)
    if saved is not None:
        return saved
    return load_model(model, trust=trust) if isinstance(model, (str, PathLike)) else model


def _is_model(model: Any) -> bool:
    return model is not None and not isinstance(model, ModelProfile)


def _with_training(
    profile: ModelProfile, model: Any, inputs: Any, kwargs: Mapping[str, Any] | None, optimizer: Any
) -> ModelProfile:
    """Return the profile with the cost of a training step of its model; a saved profile is returned unchanged."""
    if not _is_model(model):
        return profile
    from edge_opt.training_steps.step_report import training_step

    return replace(profile, training=training_step(model, inputs, kwargs=kwargs, optimizer=optimizer).cost)


def _increases(limits: Mapping[str, str | float] | Sequence[str] | None) -> list[Increase]:
    if limits is None:
        return []
    if not isinstance(limits, Mapping):
        return [parse_increase(text) for text in ([limits] if isinstance(limits, str) else limits)]
    texts = {name: value if isinstance(value, str) else f"{value * 100:.12g}%" for name, value in limits.items()}
    return [parse_increase(f"{name}={text}") for name, text in texts.items()]
