"""Platforms: a device with an engine, a runtime, a precision and threads, whose costs were fitted to times of nets.

All that are known, what a model takes on one with its interval, and a platform of your own from a few typed times. The
times may be of any nets and any runtime: they condition what is known of boards in general, or of one that is alike
(`like`), by the same fit that made the shipped platforms. Only whole models were timed: a layer's time follows from the
class costs, and only the sum of all layers could be checked.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import cast

import numpy as np

from edge_opt._support.checks import check_one_of, check_threads
from edge_opt.boards.catalog import devices
from edge_opt.boards.class_costs import CLASSES, Costs, LayerWork, ModelWork, Vector, fit_costs
from edge_opt.boards.fused_layers import model_work
from edge_opt.boards.placement import HAND_OVER_FACTOR, departures
from edge_opt.boards.platform_file import Platform, PlatformFamily, fitted_platforms, platform_family
from edge_opt.boards.roofline import HALF_PRECISIONS, EngineLimits, used_bandwidth
from edge_opt.boards.targets import HOST, Target, find_spec, named_target, platforms_of, select_platform
from edge_opt.calibration.calibration_file import host_file, load_calibration
from edge_opt.errors import InvalidInput
from edge_opt.records.devices import Bound, DeviceSpec, KnownLatency, Precision
from edge_opt.records.fields import Record, field, record
from edge_opt.records.predictions import Basis, Calibration, Departure, LayerPrediction, Prediction
from edge_opt.records.profiles import ModelProfile

# Precisions that the roofline of a device is listed in.
_LISTED: tuple[Precision, ...] = ("fp32", "fp16", "int8")
# From this share of the time on, classes that no fitted row has make a prediction one that lies outside the fit.
OUTSIDE_SHARE = 0.25
# Outside the fit nothing was held out. Errors there, of attention predicted from convolutions, reach a factor of seven.
OUTSIDE_FACTOR = 7.0
# On an NPU, errors outside reach a factor of 25 (Sequencer2D's LSTMs): from this share on there is no time at all.
REFUSED_SHARE = 0.5
# A class that one family alone has, as ncnn's table has attention, was fitted but never held out.
UNTESTED_FACTOR = 2.5
# How layers such as an LSTM are named among what lies outside.
RECURRENT = "recurrent layers"
# The meaning of each class's cost: arithmetic, reading tensors and weights, or the call itself.
_BOUNDS: tuple[Bound, ...] = ("compute", "memory", "overhead")
_BOUND_OF_CLASS = np.array(
    [0 if name.endswith("_macs") else 2 if name in ("layers", "detections") else 1 for name in CLASSES]
)
# A number is said to contradict the others when it lies this much further off than nine in ten would.
_CONTRADICTION = 1.6
# The clock and the build of a similar board may differ: by a common factor above 1.35 in one of three cases.
_LIKE_SCALE_SD = 0.3
_DEFAULT_KINDS = {"int8": "ncnn-cpu-int8"}

# Layers of torchvision's nets for one image of 224 x 224, written by scripts/write_bundled_nets.py.
NETS = Path(__file__).parent / "data" / "bundled_nets.json"


@record
class KnownPlatform(Record):
    """One platform and what its times rest on."""

    name: str = field(
        'Device, engine with threads, runtime and precision; it works as a target where `basis` is "fitted".'
    )
    device: str = field("Name of the device.")
    engine: str = field("Who computes.")
    runtime: str | None = field("Runtime of the model; None if not known, as with a roofline.")
    day: str | None = field("Date of the runtime, as precise as known; None where there is none.")
    precision: str | None = field("Type of the numbers; None where there is no time in any.")
    threads: int | None = field("Of the runtime; None where they are not known.")
    basis: Basis | None = field('"fitted", "calibrated" or "roofline"; None where there is no time at all.')
    error: float | None = field(
        "Median relative error of nets that were held out, 0.1 is 10 %; None where it is not known."
    )
    factor: float | None = field("Nine in ten of those nets lie within this factor; None where it is not known.")
    rows: int = field("Times that it was fitted to; 0 for a roofline.")
    source: str = field("Where the times or figures are from, or why there is no time.")
    computes_in: str | None = field("Type of the arithmetic where it is another one; None: `precision`.", default=None)


def platforms(device: Target | None = None) -> tuple[KnownPlatform, ...]:
    """Return every platform with published times, and every device without, with their sources and errors.

    Args:
        device: One device, by name or alias; default: all of them, and this host if it was calibrated.

    >>> [item.runtime for item in platforms("stm32h747")]
    ['st-edge-ai', 'tflm', 'tflm-reference', 'tinyengine']
    >>> platforms("hailo-8")[0].basis is None
    True
    """
    if device is not None:
        spec = find_spec(device)
        return (*map(_fitted, platforms_of(spec)), *_by_figures(spec))
    by_figures = (item for spec in devices() for item in _by_figures(spec))
    # Microcontrollers without a time of their own have the platforms of a board with the same core.
    by_core = (it for spec in devices() if spec.microcontroller for it in platforms_of(spec) if it.origin == "core")
    fitted = {platform.name: platform for platform in (*fitted_platforms(), *by_core)}
    known = [*map(_fitted, fitted.values()), *by_figures, *_calibrated_host()]
    return tuple(sorted(known, key=lambda item: (item.device, item.basis != "fitted", item.name)))


@dataclass(frozen=True, eq=False)
class ComparedTime:
    """A published time of a device beside what its platform predicts; None where the net or a platform is not known."""

    published: KnownLatency
    platform: Platform | None
    predicted: FittedTime | None

    @property
    def ratio(self) -> float | None:
        """Published time over the predicted one."""
        return None if self.predicted is None else self.published.figure.value / self.predicted.seconds

    @property
    def is_inside(self) -> bool | None:
        """Whether the published time lies in the 90 % interval of the prediction."""
        time = self.predicted
        return None if time is None else time.low <= self.published.figure.value <= time.high


def compared_times(spec: DeviceSpec) -> tuple[ComparedTime, ...]:
    """Return each published time of a device with the prediction of the platform of its runtime and threads.

    >>> from edge_opt.boards.catalog import device
    >>> {item.platform.name for item in compared_times(device("raspberry-pi-4"))}
    {'raspberry-pi-4/cpu-4/ncnn/fp32'}
    """
    known, compared = platforms_of(spec), []
    for time in spec.latencies:
        platform = select_platform(known, time.precision or "fp32", runtime=time.runtime, threads=time.threads)
        net = bundled_nets().get(time.model)
        predicted = None if platform is None or net is None else fitted_time(net, platform)
        compared.append(ComparedTime(time, platform, predicted))
    return tuple(compared)


def _fitted(platform: Platform) -> KnownPlatform:
    return KnownPlatform(
        name=platform.name, device=platform.device, engine=platform.engine, runtime=platform.runtime, day=platform.day,
        precision=platform.precision, threads=platform.threads, basis="fitted", error=platform.error,
        factor=platform.factor, rows=platform.rows, source=platform.source, computes_in=platform.computes_in,
    )  # fmt: skip


def _by_figures(spec: DeviceSpec) -> Iterator[KnownPlatform]:
    """Yield the precisions that a roofline answers in; a device that answers in none says why, unless it was timed."""
    if used_bandwidth(spec, spec.engine) is None:
        if not platforms_of(spec):
            why = spec.bandwidth_unknown or f"the bandwidth of its {spec.engine} is not known"
            yield _roofline(spec, None, None, f"no time: {why}; type in a few times with fit_platform")
        return
    for precision in _LISTED:
        roof = EngineLimits(spec, spec.engine, precision, may_widen=True)
        if roof.peak is None and precision in HALF_PRECISIONS:
            continue
        if roof.peak is None:
            source = "what memory takes alone, without an upper end: no peak is known"
        else:
            source = roof.peak.source + (f" (computes in {roof.computes_in})" * (roof.computes_in != precision))
        yield _roofline(spec, precision, "roofline", source)


def _roofline(spec: DeviceSpec, precision: str | None, basis: Basis | None, source: str) -> KnownPlatform:
    name = "/".join(part for part in (spec.name, spec.engine, basis, precision) if part)
    return KnownPlatform(name, spec.name, spec.engine, None, None, precision, None, basis, None, None, 0, source)


def _calibrated_host() -> Iterator[KnownPlatform]:
    if host_file().exists():
        own = load_calibration()
        yield KnownPlatform(
            name=f"{HOST}/cpu-{own.machine.threads}/torch/fp32", device=HOST, engine="cpu", runtime="torch",
            day=own.created[:10], precision="fp32", threads=own.machine.threads, basis="calibrated",
            error=own.whole_deviation, factor=None, rows=len(own.samples), source=f"calibration of {own.machine.cpu}",
        )  # fmt: skip


@dataclass(frozen=True, eq=False)
class FittedTime:
    """Seconds of a model on a platform, with a 90 % interval from `low` to `high`.

    `width` is half of the interval as a logarithm. `by_module` has the seconds of each module call, by class of work:
    what is fused into a layer is counted with it. `outside` names classes and operators that the fit has never seen,
    where they matter: then the interval is as wide as errors were outside. `unseen_share` is their part of the time,
    as far as it can be told.
    """

    seconds: float
    width: float
    by_module: Mapping[int, Vector]
    outside: tuple[str, ...]
    unseen_share: float = 0.0

    @property
    def low(self) -> float:
        return self.seconds / math.exp(self.width)

    @property
    def high(self) -> float:
        return self.seconds * math.exp(self.width)


def fitted_time(work: ModelWork, platform: Platform) -> FittedTime:
    """Return what a model, with the batch that it was read with, takes on a platform."""
    if not work.works:
        raise InvalidInput(f"{work.name} has no layer that computes; there is nothing to estimate")
    quantities = work.layer_quantities(platform_family(platform.kind).conventions)
    by_layer: Vector = quantities * np.exp(platform.costs.mean) / 1000
    by_module: dict[int, Vector] = {module: np.zeros(len(CLASSES)) for module in sorted({w.module for w in work.works})}
    for item, seconds in zip(work.works, by_layer, strict=True):
        by_module[item.module] += seconds
    # Weights of recurrent layers are read again in every step, and no time of such a model is published.
    recurrent, unknown = (
        float(by_layer[chosen].sum() / by_layer.sum())
        for chosen in ([item.is_recurrent for item in work.works], [item.is_outside for item in work.works])
    )
    width, outside = _interval(work, platform, quantities.sum(axis=0), recurrent >= OUTSIDE_SHARE)
    unseen = max(recurrent, unknown, float(platform.costs.shares(quantities.sum(axis=0))[_seen(platform) == 0].sum()))
    return FittedTime(math.fsum(float(row.sum()) for row in by_module.values()), width, by_module, outside, unseen)


def estimate_fitted(profile: ModelProfile, work: ModelWork, platform: Platform, target: str) -> Prediction:
    """Return the prediction of a profiled model on a platform, layer by layer; layers add up to the whole.

    `work` is what `model_work` reads of the profile, `target` the platform's name in the result.
    """
    leaving = departures(profile, platform)
    time = _with_hand_overs(fitted_time(work, platform), leaving)
    if platform.engine == "npu" and time.unseen_share >= REFUSED_SHARE:
        return _refused(profile, platform, time, target)
    engines = {module: item.engine for item in leaving for module in item.modules}
    is_outside = np.array([name in time.outside for name in CLASSES])
    layers = []
    for number, row in time.by_module.items():
        module, seconds = profile.trace.modules[number], float(row.sum())
        is_unseen = float(row @ is_outside) > seconds / 2
        layers.append(
            LayerPrediction(
                number, module.path, module.kind, seconds, None, None, _bound(row), is_unseen,
                engine=engines.get(number, platform.engine),
            )
        )  # fmt: skip
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
        computes_in=platform.computes_in,
        engine=platform.engine,
        departures=leaving,
    )


def _with_hand_overs(time: FittedTime, leaving: Sequence[Departure]) -> FittedTime:
    """Return the time with what layers outside the NPU take: it counts as overhead of those layers."""
    if not any(seconds for item in leaving for seconds in item.seconds):
        return time
    by_module = {number: row.copy() for number, row in time.by_module.items()}
    for item in leaving:
        for number, seconds in zip(item.modules, item.seconds, strict=True):
            by_module.setdefault(number, np.zeros(len(CLASSES)))[CLASSES.index("layers")] += seconds
    total_s = math.fsum(float(row.sum()) for row in by_module.values())
    return replace(time, seconds=total_s, width=max(time.width, math.log(HAND_OVER_FACTOR)), by_module=by_module)


def _refused(profile: ModelProfile, platform: Platform, time: FittedTime, target: str) -> Prediction:
    """Return a prediction without a time, which names the work that was never measured there."""
    modules = [(number, profile.trace.modules[number]) for number in time.by_module]
    layers = (LayerPrediction(number, it.path, it.kind, None, None, None, "unknown") for number, it in modules)
    why = f"outside what was measured there: {', '.join(time.outside)} take {time.unseen_share:.0%} of the time"
    return Prediction(
        target=target, basis="fitted", precision=cast(Precision, platform.precision), seconds=None, low=None,
        high=None, bound="unknown", layers=tuple(layers), outside=time.outside, energies=(),
        remarks=(why, evidence(platform)), engine=platform.engine,
    )  # fmt: skip


def _seen(platform: Platform) -> Vector:
    """Return how many families of nets every class was fitted with; a net that was typed in counts as one."""
    return platform_family(platform.kind).prior.seen + (platform.costs.seen if platform.origin == "typed" else 0)


def _interval(work: ModelWork, platform: Platform, row: Vector, is_recurrent: bool) -> tuple[float, tuple[str, ...]]:
    """Return half of the 90 % interval, as a logarithm, and the classes and operators that lie outside the fit."""
    family = platform_family(platform.kind)
    spread = family.spread if platform.origin == "fitted" else family.typed_spread
    width = spread.width(platform.costs.variance(row), platform.noise_ratio)
    seen = _seen(platform)
    shares = platform.costs.shares(row)
    names = tuple(name for name, share, count in zip(CLASSES, shares, seen, strict=True) if share > 0.05 and count < 2)
    if is_recurrent:
        return max(width, math.log(OUTSIDE_FACTOR)), (*work.outside, RECURRENT, *names)
    if work.outside or float(shares[seen == 0].sum()) >= OUTSIDE_SHARE:
        return max(width, math.log(OUTSIDE_FACTOR)), (*work.outside, *names)
    if float(shares[seen < 2].sum()) >= OUTSIDE_SHARE:
        return max(width, math.log(UNTESTED_FACTOR)), names
    return width, ()


def _bound(spent: Vector) -> Bound:
    """Return what most of the time goes to, from seconds by class."""
    return _BOUNDS[int(np.argmax(np.bincount(_BOUND_OF_CLASS, spent)))]


def _remarks(platform: Platform, time: FittedTime) -> Sequence[str]:
    remarks = [
        f"platform {platform.name}: {evidence(platform)}; 90 % interval: a factor of {math.exp(time.width):.2f}",
        "times of layers follow from class costs; only whole models could be checked",
    ]
    if platform.computes_in:
        remarks.append(f"{platform.runtime} computes in {platform.computes_in} on this core unless told otherwise")
    if time.outside:
        remarks.append(f"outside the fit, so that the interval is wide: {', '.join(time.outside)}")
    remarks += [f"a typed time contradicts the others: {text}" for text in platform.contradictions]
    return [*remarks, *platform.notes]


def evidence(platform: Platform) -> str:
    """Return the evidence of a platform in one line: rows, runtime with its date, threads, held-out error and source.

    >>> from edge_opt.boards.targets import resolve_target
    >>> evidence(resolve_target("raspberry-pi-4", runtime="ncnn", threads=1).platform).split(";")[0]
    'fitted to 23 published times (ncnn of 2023-06-15, 1 thread)'
    """
    day = f" of {platform.day}" if platform.day else ""
    threads = "" if platform.threads is None else f", {platform.threads} thread{'s' * (platform.threads != 1)}"
    with_what = f"({platform.runtime}{day}{threads})"
    if platform.origin == "core":
        like = next(iter(platform.notes), "costs of a board with the same core")
        return f"no fit of its own: {like} {with_what}; source: {platform.source}"
    if platform.origin != "fitted":
        return f"from {platform.rows} typed time{'s' * (platform.rows != 1)} {with_what}"
    error = (
        "too few for a held-out error"
        if platform.error is None
        else f"median error {platform.error:.1%} on held-out model families"
    )
    return f"fitted to {platform.rows} published times {with_what}; {error}; source: {platform.source}"


Timed = tuple[ModelProfile | ModelWork, float]


@dataclass(frozen=True, slots=True)
class Suggestion(Record):
    """A net whose time would tell most, and the factor of the mean 90 % interval before and after it is known."""

    name: str
    factor_now: float
    factor_then: float


def fit_platform(
    name: str,
    times: Sequence[Timed],
    *,
    like: Platform | str | None = None,
    threads: int | None = None,
    precision: str = "fp32",
    runtime: str = "typed",
) -> Platform:
    """Fit a platform to a few times: profiles of nets, and the seconds that each took on the board.

    Three to eight nets are enough; with one, the interval is wide and a note says so. Times that contradict each other
    by more than their noise are named in `contradictions`; the fit gives them less weight, but keeps them.

    Args:
        name: Name of the board.
        times: pairs of a profile (of the batch that was timed) and seconds, more than zero. None at all needs `like`.
        like: a platform, its file, or the name of a device that has one: the board is taken to have the same core.
        threads: Threads that the models were timed with. Chooses among the platforms of `like`.
        precision: Precision that the models ran in.
        runtime: Runtime that ran them, as a note.

    >>> import edge_opt as eo
    >>> from edge_opt.model import SmallCNN
    >>> profile = eo.profile(SmallCNN(), (1, 1, 28, 28))
    >>> mine = fit_platform("my-board", [(profile, 400e-6)], like="raspberry-pi-5", threads=4)
    >>> eo.estimate(profile, mine).basis
    'fitted'
    """
    check_one_of("precision", precision, ("fp32", "int8"))
    check_threads(threads)
    works = [(work_of(profile), float(seconds)) for profile, seconds in times]
    for work, seconds in works:
        if not 1e-9 < seconds < 1e6:
            raise InvalidInput(f"the time of {work.name} is {seconds:g} s; it must be from a nanosecond to 1e6 s")
    if not works and like is None:
        raise InvalidInput("no time is given; type in at least one, or say which device the board is like=")
    base = None if like is None else _platform_like(like, precision, threads)
    family = platform_family(base.kind if base is not None else _DEFAULT_KINDS.get(precision, "ncnn-cpu"))
    prior = family.prior
    if base is not None:
        # A board that is like another has its costs, with the spread between boards of one core.
        spread = base.costs.covariance + family.same_core + _LIKE_SCALE_SD**2
        prior = Costs(base.costs.mean, spread, base.costs.seen)
    notes = [] if base is None else [f"taken to be like {base.name}"]
    if not works:
        notes.append("no time was typed in: all of it is what boards with that core take")
    elif len(works) == 1:
        notes.append("one time only, so the interval is wide; three to eight make it narrower")
    return Platform(
        name=name, device=name, title=name, engine="cpu" if base is None else base.engine, cores="all",
        runtime=runtime, day="", precision=precision, threads=threads, core=None if base is None else base.core,
        ghz=None, kind=family.name, costs=_fit(works, family, prior), rows=len(works), error=None, factor=None,
        noise_ratio=1.0, source="typed in", origin="typed" if works else "core", notes=tuple(notes),
        contradictions=tuple(_contradictions(works, family, prior)),
    )  # fmt: skip


@cache
def bundled_nets() -> Mapping[str, ModelWork]:
    """Return nets of torchvision that can be named without it, by their names there, for one image of 224 x 224.

    >>> "resnet18" in bundled_nets()
    True
    """

    def layer(values: Sequence[object]) -> LayerWork:
        return LayerWork(*(tuple(value) if isinstance(value, list) else value for value in values))  # type: ignore[arg-type]

    data = json.loads(NETS.read_text(encoding="utf-8"))
    return {name: ModelWork(name, tuple(map(layer, layers))) for name, layers in data.items()}


def work_of(profile: ModelProfile | ModelWork) -> ModelWork:
    """Return the layers of a profile; bundled nets are lists of layers already."""
    return profile if isinstance(profile, ModelWork) else model_work(profile)


def _platform_like(like: Platform | str, precision: str, threads: int | None) -> Platform:
    """Return the platform that a board is like: the one that is named, or the best-known one of a device."""
    named = named_target(like)
    if isinstance(named, Platform):
        return named
    known = () if isinstance(named, Calibration) else platforms_of(named)
    platform = select_platform(known, precision, threads=threads)
    if platform is None:
        names = ", ".join(platform.name for platform in known) or "none"
        raise InvalidInput(
            f"{named.name} has no fitted platform in {precision}, threads={threads}; there are: {names}. Name another "
            "device with like=, or leave it out"
        )
    return platform


def _fit(works: Sequence[tuple[ModelWork, float]], family: PlatformFamily, prior: Costs) -> Costs:
    rows = np.array([work.quantities(family.conventions) for work, _ in works]).reshape(-1, len(CLASSES))
    return fit_costs(rows, np.array([1000 * seconds for _, seconds in works]), prior, family.conventions.noise)


def _contradictions(works: Sequence[tuple[ModelWork, float]], family: PlatformFamily, prior: Costs) -> list[str]:
    """Name times that the others speak against, the worst first; each is left out before the next is looked for."""
    agreeing, contradictions = list(works), []
    while len(agreeing) > 1:
        scores = [_against(agreeing, number, family, prior) for number in range(len(agreeing))]
        worst = int(np.argmax([abs(error) / width for error, width in scores]))
        error, width = scores[worst]
        if abs(error) <= _CONTRADICTION * width:
            break
        work, seconds = agreeing.pop(worst)
        relation = "more" if error > 0 else "less"
        contradictions.append(
            f"{work.name}: {1000 * seconds:.4g} ms is {math.exp(abs(error)):.3g} times {relation} than the other times "
            f"say, and {math.exp(width):.2g} is their noise"
        )
    return contradictions


def _against(
    works: Sequence[tuple[ModelWork, float]], number: int, family: PlatformFamily, prior: Costs
) -> tuple[float, float]:
    """Return the error of one time, predicted from the others, and half of the interval of that prediction."""
    others = [pair for position, pair in enumerate(works) if position != number]
    costs = _fit(others, family, prior)
    row = works[number][0].quantities(family.conventions)
    error = math.log(1000 * works[number][1]) - costs.log_time(row)
    return error, family.typed_spread.width(costs.variance(row))


def suggest_next(platform: Platform, candidates: Sequence[ModelProfile | ModelWork]) -> tuple[Suggestion, ...]:
    """Rank nets by what their time would tell: those that shrink the interval of all candidates most come first.

    A time of net j with shares s of the classes turns the covariance C of the costs into C - Cs s'C / (s'Cs + noise^2),
    whatever the time is; so the gain is known beforehand.

    Args:
        platform: what is known by now.
        candidates: profiles of nets that could be timed, at least one.
    """
    if not candidates:
        raise InvalidInput("there are no candidates; pass profiles of models that could be timed")
    family = platform_family(platform.kind)
    works = [work_of(candidate) for candidate in candidates]
    shares = np.array([platform.costs.shares(work.quantities(family.conventions)) for work in works])
    now = _mean_width(shares, platform.costs.covariance, family)
    suggestions = []
    for work, share in zip(works, shares, strict=True):
        reach = platform.costs.covariance @ share
        then = platform.costs.covariance - np.outer(reach, reach) / (
            float(share @ reach) + family.typed_spread.noise**2
        )
        suggestions.append(Suggestion(work.name, math.exp(now), math.exp(_mean_width(shares, then, family))))
    return tuple(sorted(suggestions, key=lambda item: item.factor_then))


def _mean_width(shares: Vector, covariance: Vector, family: PlatformFamily) -> float:
    variances = np.maximum(np.einsum("nk,kl,nl->n", shares, covariance, shares), 0.0)
    return float(np.mean([family.typed_spread.width(variance) for variance in variances]))
