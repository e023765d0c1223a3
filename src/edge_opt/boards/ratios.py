"""Ratios between variants of one model on one device: far surer than the times themselves.

Two variants share what is odd about a board, a runtime and a network, so that it cancels in their ratio. How much
remains was read off published pairs: fp32 and int8 of one net on one board, and nets of one family on one platform.
`benchmarks/ratios.py` prints the pairs with their errors; only the constants below and the `ratio_spread` of a family
of platforms ship.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from edge_opt.boards.class_costs import ModelWork, Vector
from edge_opt.boards.estimate import predictions
from edge_opt.boards.fused_layers import model_work
from edge_opt.boards.platform_file import Platform, platform_family
from edge_opt.boards.platforms import OUTSIDE_FACTOR, FittedTime, fitted_time
from edge_opt.boards.targets import ResolvedTarget, Target, resolve_target
from edge_opt.errors import InvalidInput
from edge_opt.records.devices import Precision
from edge_opt.records.predictions import LatencyRatio, Prediction, RatioBasis
from edge_opt.records.profiles import ModelProfile

# Two nets of one family on one platform: sd^2 = WIDTH_NOISE^2 + SHARE_SPREAD * distance, with the distance the part of
# the time that the two spend in different classes of work, 0 to 1. WIDTH_QUANTILE of these sd make a 90 % interval.
# From 2600 pairs of eleven sources: cells of NAS-Bench-201 on two devices, width multipliers on STM32 boards, and nets
# of six families in ncnn's table, each family left out of the costs.
WIDTH_NOISE = 0.04
SHARE_SPREAD = 0.08
WIDTH_QUANTILE = 2.08
# Those sources are CPUs, whose times scatter by at most this about their costs; noisier platforms scatter more.
_USUAL_NOISE = 0.1
# Errors of predictions follow Student's t with four degrees of freedom, as the fits take them; its 95th percentile.
_T4_95 = 2.1318


def probability_below(limit: float, value: float, low: float | None, high: float | None) -> float | None:
    """Return the probability that a predicted figure is at most a limit; None if an end of its interval is unknown.

    The logarithm of the figure follows a Student t with four degrees of freedom, as wide as the 90 % interval.

    Args:
        limit: The limit, in the unit of the figure.
        value: The predicted figure.
        low: Lower end of its 90 % interval.
        high: Upper end.

    >>> probability_below(10.0, 10.0, 8.0, 12.5)
    0.5
    >>> round(probability_below(12.5, 10.0, 8.0, 12.5), 2)
    0.95
    """
    if low is None or high is None or not math.isfinite(high) or min(low, value, limit) <= 0:
        return None
    if low == high:
        return float(value <= limit)
    end = high if limit >= value else low
    t = math.log(limit / value) / abs(math.log(end / value)) * _T4_95 if end != value else math.copysign(9.0, limit)
    # The distribution function of Student's t with four degrees of freedom, in closed form.
    scaled = 1 + t * t / 4
    return 0.5 + 0.375 * t / math.sqrt(scaled) * (1 - t * t / scaled / 12)


@dataclass(frozen=True, eq=False)
class VariantOnPlatform:
    """One variant of a model on a fitted platform: what its ratio to another variant follows from."""

    work: ModelWork
    platform: Platform

    @cached_property
    def time(self) -> FittedTime:
        """The seconds, with their interval."""
        return fitted_time(self.work, self.platform)

    def shares(self, platform: Platform) -> Vector:
        """Return the share of each class of work in the time on a platform."""
        return platform.costs.shares(self.work.quantities(platform_family(platform.kind).conventions))


def variant_on(profile: ModelProfile, target: ResolvedTarget) -> VariantOnPlatform | None:
    """Return the variant on the target's platform; None if the target has none, or the model has no known layer."""
    if target.platform is None:
        return None
    work = model_work(profile)
    return VariantOnPlatform(work, target.platform) if work.works else None


def ratio_width(one: VariantOnPlatform, other: VariantOnPlatform) -> tuple[float, RatioBasis]:
    """Return half of the 90 % interval of the ratio of two variants, as a logarithm, and what it rests on.

    Args:
        one: A variant on a platform of the device.
        other: Another variant, on the same platform or on another one of the device.
    """
    independent = math.hypot(one.time.width, other.time.width)
    if one.platform.name == other.platform.name:
        return min(_width_of_nets(one, other, one.platform), independent), "one platform"
    changed, kept = (one, other) if _is_relative(one.platform) else (other, one)
    if _is_relative(changed.platform) and _run_of(one.platform) == _run_of(other.platform):
        spread = platform_family(changed.platform.kind).ratio_spread
        assert spread is not None
        quantities = changed.work.quantities(platform_family(changed.platform.kind).conventions)
        of_precision = spread.width(changed.platform.costs.variance(quantities), changed.platform.noise_ratio)
        width = math.hypot(of_precision, _width_of_nets(one, other, kept.platform))
        return min(width, independent), "two precisions"
    return independent, "independent"


def _is_relative(platform: Platform) -> bool:
    """Return whether a platform's costs are ratios to those of the same board in float."""
    return platform_family(platform.kind).ratio_spread is not None


def _run_of(platform: Platform) -> tuple[object, ...]:
    """Return what two precisions of one run have in common."""
    return platform.device, platform.engine, platform.cores, platform.runtime, platform.threads


def _width_of_nets(one: VariantOnPlatform, other: VariantOnPlatform, platform: Platform) -> float:
    """Return half of the interval of the ratio of two nets on one platform; 0 for the same net."""
    if one.work.works == other.work.works:
        return 0.0
    distance = float(np.abs(one.shares(platform) - other.shares(platform)).sum()) / 2
    noise = max(1.0, platform_family(platform.kind).spread.noise / _USUAL_NOISE) * platform.noise_ratio
    width = WIDTH_QUANTILE * noise * math.sqrt(WIDTH_NOISE**2 + SHARE_SPREAD * distance)
    is_outside = bool(one.time.outside or other.time.outside)
    # A class that no time is known of may cost seven times as much: that part of the difference is as uncertain.
    return math.hypot(width, math.log(OUTSIDE_FACTOR) * distance) if is_outside else width


def latency_ratio(
    before: ModelProfile,
    after: ModelProfile,
    target: Target,
    *,
    precision: Precision = "fp32",
    before_precision: Precision | None = None,
    runtime: str | None = None,
    threads: int | None = None,
) -> LatencyRatio:
    """Estimate how much faster or slower one variant of a model is than another on a target, with a 90 % interval.

    Both times are those of `estimate`. The interval is that of the ratio: much narrower than those of the times, if
    both variants run on one platform or on the same platform in two precisions.

    Args:
        before: The variant to compare with.
        after: The other variant; the same profile, to compare two precisions.
        target: As in `estimate`.
        precision: Precision of `after` on the target.
        before_precision: Precision of `before`; default: that of `after`.
        runtime: Runtime there; default: the one with the most accurate data.
        threads: Threads of the runtime; default: those of the most accurate data.

    >>> import edge_opt as eo
    >>> from edge_opt.model import SmallCNN
    >>> net = eo.profile(SmallCNN(), (1, 1, 28, 28))
    >>> ratio = eo.latency_ratio(net, net, "raspberry-pi-4", precision="int8", before_precision="fp32")
    >>> ratio.basis, ratio.low < ratio.ratio < ratio.high
    ('two precisions', True)
    """
    options: dict[str, Any] = {"runtime": runtime, "threads": threads}
    one = predict_variant(before, target, before_precision or precision, **options)
    return ratio_of(one, predict_variant(after, target, precision, **options))


@dataclass(frozen=True, eq=False)
class PredictedVariant:
    """A variant of a model on a target: what answers for it there, and the answer; `variant` needs a platform."""

    profile: ModelProfile
    target: ResolvedTarget
    prediction: Prediction
    variant: VariantOnPlatform | None


def predict_variant(
    profile: ModelProfile,
    target: Target,
    precision: Precision,
    *,
    runtime: str | None = None,
    threads: int | None = None,
) -> PredictedVariant:
    """Return what a variant takes on a target, as `profile(target=)` says; the arguments are those of `estimate`."""
    resolved = resolve_target(target, precision, runtime=runtime, threads=threads, model=profile)
    [prediction] = predictions(profile, [resolved], precision, threads)
    variant = None if resolved.calibration else variant_on(profile, resolved)
    return PredictedVariant(profile, resolved, prediction, variant)


def ratio_of(before: PredictedVariant, after: PredictedVariant) -> LatencyRatio:
    """Return the latency of one predicted variant over that of another, with the interval of the ratio."""
    first, second = before.prediction, after.prediction
    if first.seconds is None or second.seconds is None:
        missing = first if first.seconds is None else second
        raise InvalidInput(f"no time in {missing.precision} is known for {missing.target}: {missing.remarks[0]}")
    if before.variant is not None and after.variant is not None:
        width, basis = ratio_width(before.variant, after.variant)
    else:
        width, basis = math.hypot(_log_width(first), _log_width(second)), "independent"
    return LatencyRatio(
        target=second.target,
        before_s=first.seconds,
        after_s=second.seconds,
        low=second.seconds / first.seconds * math.exp(-width),
        high=second.seconds / first.seconds * math.exp(width),
        basis=basis,
    )


def _log_width(prediction: Prediction) -> float:
    """Return half of the interval of a prediction as a logarithm; infinite if an end is not known."""
    if prediction.seconds is None or not prediction.low or prediction.high is None:
        return math.inf
    return math.log(prediction.high / prediction.low) / 2
