"""What a model takes on a fitted platform, with its interval.

A platform is a device with an engine, a runtime, a precision and threads. Only whole models were timed: a layer's time
follows from the class costs, and only the sum of all layers could be checked.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from edge_opt.boards.class_costs import CLASSES, ModelWork, Vector
from edge_opt.boards.class_fit import OUTSIDE_SHARE
from edge_opt.boards.platform_file import Platform, platform_family
from edge_opt.errors import InvalidInput
from edge_opt.records.devices import Bound, Precision
from edge_opt.records.predictions import LayerPrediction, Prediction
from edge_opt.records.profiles import ModelProfile

# Outside the fit nothing was held out. Errors there, of attention predicted from convolutions, reach a factor of seven.
OUTSIDE_FACTOR = 7.0
# A class that one family alone has, as ncnn's table has attention, was fitted but never held out.
UNTESTED_FACTOR = 2.5
# How layers such as an LSTM are named among what lies outside.
RECURRENT = "recurrent layers"
# What the cost of a class stands for: arithmetic, tensors and weights that are read, or the call itself.
_BOUND_OF_CLASS: tuple[Bound, ...] = tuple(
    "compute" if name.endswith("_macs") else "overhead" if name in ("layers", "detections") else "memory"
    for name in CLASSES
)


@dataclass(frozen=True, eq=False)
class FittedTime:
    """Seconds of a model on a platform, nine times in ten between `low` and `high`.

    `width` is half of the interval as a logarithm. `by_module` has the seconds of each module call, by class of work:
    what is fused into a layer is counted with it. `outside` names classes and operators that the fit has never seen,
    where they matter: then the interval is as wide as errors were outside.
    """

    width: float
    by_module: Mapping[int, Vector]
    outside: tuple[str, ...]

    @property
    def seconds(self) -> float:
        return math.fsum(float(row.sum()) for row in self.by_module.values())

    @property
    def low(self) -> float:
        return self.seconds / math.exp(self.width)

    @property
    def high(self) -> float:
        return self.seconds * math.exp(self.width)


def fitted_time(work: ModelWork, platform: Platform) -> FittedTime:
    """Return what a model takes on a platform.

    Args:
        work: The model, for the batch that is asked for.
        platform: One of `fitted_platforms()`, or what `fit_platform` returned.
    """
    if not work.works:
        raise InvalidInput(f"{work.name} has no layer that computes; there is nothing to estimate")
    quantities = work.layer_quantities(platform_family(platform.kind).conventions)
    by_layer: Vector = quantities * np.exp(platform.costs.mean) / 1000
    width, outside = _interval(work, platform, quantities, by_layer)
    rows: dict[int, Vector] = {}
    for item, spent in zip(work.works, by_layer, strict=True):
        rows[item.module] = rows.get(item.module, np.zeros(len(CLASSES))) + spent
    return FittedTime(width, {module: rows[module] for module in sorted(rows)}, outside)


def estimate_fitted(profile: ModelProfile, work: ModelWork, platform: Platform, target: str) -> Prediction:
    """Return the prediction of a profiled model on a platform, layer by layer; layers add up to the whole.

    Args:
        profile: Of the model.
        work: Its layers, as `model_work` reads them.
        platform: Where it runs.
        target: Its name in the result.
    """
    time = fitted_time(work, platform)
    is_outside = np.array([name in time.outside for name in CLASSES])
    layers = []
    for number, row in time.by_module.items():
        module, seconds = profile.trace.modules[number], float(row.sum())
        is_unseen = float(row[is_outside].sum()) > seconds / 2
        layers.append(LayerPrediction(number, module.path, module.kind, seconds, None, None, _bound(row), is_unseen))
    return Prediction(
        target=target,
        basis="fitted",
        precision=cast(Precision, platform.precision),
        seconds=time.seconds,
        low=time.low,
        high=None if profile.unpriced else time.high,
        bound=_bound(sum(time.by_module.values(), np.zeros(len(CLASSES)))),
        layers=tuple(layers),
        outside=time.outside,
        energies=(),
        remarks=tuple(_remarks(platform, time)),
    )


def _interval(
    work: ModelWork, platform: Platform, quantities: Vector, by_layer: Vector
) -> tuple[float, tuple[str, ...]]:
    """Return half of the 90 % interval, as a logarithm, and the classes and operators that lie outside the fit."""
    family = platform_family(platform.kind)
    row = quantities.sum(axis=0)
    spread = family.spread if platform.origin == "fitted" else family.typed_spread
    width = spread.width(platform.costs.variance(row), platform.noise_ratio)
    # How many families of nets every class was fitted with; a net that was typed in counts as one.
    seen = family.prior.seen + (platform.costs.seen if platform.origin == "typed" else 0)
    shares = platform.costs.shares(row)
    names = tuple(name for name, share, count in zip(CLASSES, shares, seen, strict=True) if share > 0.05 and count < 2)
    # Weights of recurrent layers are read again in every step, and nobody has published a time of such a net.
    recurrent = by_layer[[item.is_recurrent for item in work.works]].sum() / by_layer.sum()
    if recurrent >= OUTSIDE_SHARE:
        return max(width, math.log(OUTSIDE_FACTOR)), (*work.outside, RECURRENT, *names)
    if work.outside or float(shares[seen == 0].sum()) >= OUTSIDE_SHARE:
        return max(width, math.log(OUTSIDE_FACTOR)), (*work.outside, *names)
    if float(shares[seen < 2].sum()) >= OUTSIDE_SHARE:
        return max(width, math.log(UNTESTED_FACTOR)), names
    return width, ()


def _bound(spent: Vector) -> Bound:
    """Return what most of the time goes to, from seconds by class."""
    totals: dict[Bound, float] = {}
    for bound, seconds in zip(_BOUND_OF_CLASS, spent, strict=True):
        totals[bound] = totals.get(bound, 0.0) + float(seconds)
    return max(totals, key=lambda bound: totals[bound])


def _remarks(platform: Platform, time: FittedTime) -> Sequence[str]:
    remarks = [
        f"platform {platform.name}: {evidence(platform)}; nine times in ten within a factor of "
        f"{math.exp(time.width):.2f}",
        "layers follow from the costs of their classes; only the whole could be checked",
    ]
    if time.outside:
        remarks.append(f"outside the fit, so that the interval is wide: {', '.join(time.outside)}")
    remarks += [f"a typed time contradicts the others: {text}" for text in platform.contradictions]
    return [*remarks, *platform.notes]


def evidence(platform: Platform) -> str:
    """Return what a platform rests on, in one line: rows, runtime with its date, threads, held-out error and source.

    Args:
        platform: Fitted or typed in.

    >>> from edge_opt.boards.targets import resolve_target
    >>> evidence(resolve_target("raspberry-pi-4", runtime="ncnn", threads=1).platform).split(";")[0]
    'fitted to 23 published times (ncnn of 2023-06-15, 1 thread)'
    """
    day = f" of {platform.day}" if platform.day else ""
    threads = "" if platform.threads is None else f", {platform.threads} thread{'s' * (platform.threads != 1)}"
    with_what = f"({platform.runtime}{day}{threads})"
    if platform.origin == "core":
        return f"no time of it is known: costs of a board with the same core {with_what}; source: {platform.source}"
    if platform.origin != "fitted":
        return f"from {platform.rows} typed time{'s' * (platform.rows != 1)} {with_what}"
    error = (
        "too few to hold any out"
        if platform.error is None
        else f"nets whose family was held out are {platform.error:.1%} off in the middle"
    )
    return f"fitted to {platform.rows} published times {with_what}; {error}; source: {platform.source}"
