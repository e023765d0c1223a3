"""Checks: whether a profile keeps within its budgets, and which layers are to blame where it does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from edge_opt.budget.metrics import PROFILE_METRICS, Metric
from edge_opt.compare import align, layer_figures
from edge_opt.compare.models import profiled_differently
from edge_opt.records import (
    Budget,
    CheckedBudget,
    CheckResult,
    Comparison,
    Contribution,
    Increase,
    Interval,
    LayerFigures,
    ModelProfile,
    Outcome,
)

_NAMED_AT_MOST = 5

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
        () if baseline is None else profiled_differently([baseline, profile]),
    )


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
    is_rough = profile.prediction is not None and profile.prediction.basis == "roofline"
    return f"the limit lies inside the prediction's interval; {'calibrate the target' if is_rough else 'measure there'}"


def _cure(metric: Metric[ModelProfile], profile: ModelProfile) -> str:
    if metric.is_measured:
        return "profile with measure=True, or --measure"
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
