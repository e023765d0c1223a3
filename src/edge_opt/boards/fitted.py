"""Fitted platforms: which of them answers for a device, and what a model takes there.

A platform is a device with an engine, a runtime, a precision and threads. Only whole models were timed: a layer's time
follows from the class costs, and only the sum of all layers could be checked.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal

import numpy as np

from edge_opt.boards.catalog import device as device_named
from edge_opt.boards.catalog import normalized
from edge_opt.boards.class_costs import CLASSES, Vector, Workload, workload
from edge_opt.boards.class_fit import OUTSIDE_SHARE
from edge_opt.boards.platform_file import Kind, Platform, fitted_platforms, kinds, load_platform, timed_devices
from edge_opt.errors import InvalidInput, UnknownDevice
from edge_opt.records.devices import Bound, DeviceSpec
from edge_opt.records.display import Record
from edge_opt.records.profiles import ModelProfile

# Outside the fit nothing was held out. Errors there, of attention predicted from convolutions, reach a factor of seven.
OUTSIDE_FACTOR = 7.0
# A class that one family alone has, as ncnn's table has attention, was fitted but never held out.
UNTESTED_FACTOR = 2.5
# How layers such as an LSTM are named among what lies outside.
RECURRENT = "recurrent layers"
_NAME = re.compile(r"[a-z0-9.-]+")
# What the cost of a class stands for: arithmetic, tensors and weights that are read, or the call itself.
_GOES_TO: tuple[Bound, ...] = tuple(
    "compute" if name.endswith("_macs") else "overhead" if name in ("layers", "detections") else "memory"
    for name in CLASSES
)


@dataclass(frozen=True, slots=True)
class LayerTime:
    """One module call's part of the time, in seconds; what is fused into it is counted with it.

    `bound` is what most of it goes to. `is_outside` tells that most of it is in classes that the fit has never seen.
    """

    module: int
    path: str
    kind: str
    seconds: float
    bound: Bound
    is_outside: bool


@dataclass(frozen=True, slots=True)
class FittedEstimate(Record):
    """What a model takes on a platform, in seconds; nine times in ten between `low` and `high`.

    `layers` add up to `seconds`. `outside` names classes and operators that the fit has never seen, where they matter:
    then the interval is as wide as the errors outside were.
    """

    platform: str
    precision: str
    seconds: float
    low: float
    high: float
    bound: Bound
    layers: tuple[LayerTime, ...]
    outside: tuple[str, ...]
    notes: tuple[str, ...]
    basis: Literal["fitted"] = "fitted"


def find_platform(
    device: str, *, runtime: str | None = None, precision: str = "fp32", threads: int | None = None
) -> Platform:
    """The fitted platform of a device: the one that is asked for, or the one that is known best.

    Args:
        device: a device's name, or a platform's full name.
        runtime: such as "ncnn"; any unless given.
        precision: that the model is run in.
        threads: any number unless given; then as `best_known` says.
    """
    name, _, rest = device.partition("/")
    known = platforms_named(name)
    exact = [platform for platform in known if platform.name == device]
    if exact:
        return exact[0]
    if not known or rest:
        close = get_close_matches(device, timed_devices(), n=3)
        raise UnknownDevice(
            f"no platform of {device!r} is fitted; closest: {', '.join(close) or 'none'}. Type in a few times with "
            "fit_platform, or use the device's roofline"
        )
    wanted = [
        platform
        for platform in known
        if (runtime is None or platform.runtime == runtime)
        and platform.precision == precision
        and (threads is None or platform.threads == threads)
    ]
    if not wanted:
        names = ", ".join(platform.name for platform in known)
        raise InvalidInput(f"{device} has no fitted platform with runtime={runtime}, {precision}, threads={threads}; "
                           f"there are {names}")  # fmt: skip
    return best_known(wanted)[0]


def platforms_named(name: str) -> tuple[Platform, ...]:
    """The shipped platforms of a device, the best known first; none where nobody published its times.

    Args:
        name: The device's name, or a platform's full name.
    """
    device = name.partition("/")[0]
    # A file is named after its platform, and glob has a meaning for some characters of a wrong name.
    known = fitted_platforms(device) if _NAME.fullmatch(device) else ()
    if "/" in name:
        return tuple(platform for platform in known if platform.name == name)
    return best_known(known)


def choose_platform(
    known: Sequence[Platform],
    device: DeviceSpec,
    precision: str,
    *,
    engine: str | None,
    runtime: str | None,
    threads: int | None,
) -> Platform | None:
    """The fitted platform that answers for a device; None where its roofline has to. A runtime must be there.

    Args:
        known: Platforms of the device.
        device: Whose own engine is meant, unless a runtime or threads are asked for.
        precision: Type of the numbers.
        engine: Who computes; any that fits unless given.
        runtime: Such as "ncnn"; the best known unless given.
        threads: Any number unless given.
    """
    fixed = engine or (device.engine if runtime is None and threads is None else None)
    wanted = [
        platform
        for platform in known
        if platform.precision == precision
        and fixed in (None, platform.engine)
        and runtime in (None, platform.runtime)
        and threads in (None, platform.threads)
    ]
    if wanted or runtime is None:
        own = [platform for platform in wanted if platform.engine == device.engine]
        return next(iter(best_known(own or wanted)), None)
    if not known:
        raise InvalidInput(
            f"no times of {device.name} are known with any runtime, and {runtime!r} is asked for; leave the runtime "
            "out for its roofline, or type in a few times with fit_platform"
        )
    counted = None if threads is None else f"{threads} thread(s)"
    asked = filter(None, (f"the runtime {runtime!r}", precision, counted, engine))
    raise InvalidInput(
        f"no times of {device.name} are known with {', '.join(asked)}; closest: "
        f"{_closest(known, precision, runtime, threads).name}; `edge-opt devices {device.name}` lists all"
    )


def _closest(known: Sequence[Platform], precision: str, runtime: str, threads: int | None) -> Platform:
    """Of a device's platforms the one that differs least: in its runtime, then precision, then threads."""
    near = get_close_matches(runtime, sorted({platform.runtime for platform in known}), n=1)

    def distance(platform: Platform) -> tuple[object, ...]:
        apart = abs(math.log((platform.threads or 1) / (threads or platform.threads or 1)))
        return platform.runtime not in (runtime, *near), platform.precision != precision, apart

    return min(best_known(known), key=distance)


def best_known(platforms: Sequence[Platform]) -> tuple[Platform, ...]:
    """Platforms in the order in which they answer for a device: the CPU before other engines, fp32 before the rest.

    Then the runtime whose held-out error is the lowest with any number of threads. Of that runtime all the big cores
    come first, as people run it, then most threads, then little cores. Errors do not choose the threads: one thread is
    always predicted best, and nobody who asks for a board means a quarter of it.

    Args:
        platforms: Those to choose from, of one device.
    """

    def knowledge(platform: Platform) -> float:
        errors = (
            other.error
            for other in platforms
            if (other.engine, other.precision, other.runtime) == (platform.engine, platform.precision, platform.runtime)
        )
        return min((error for error in errors if error is not None), default=math.inf)

    def rank(platform: Platform) -> tuple[object, ...]:
        threads = platform.threads or 0
        # One thread on a big core is not all of them.
        cores = 2 if platform.cores == "little" else 0 if platform.cores == "big" and threads > 1 else 1
        is_other = platform.precision != "fp32"
        return (
            platform.engine != "cpu", is_other, platform.precision, knowledge(platform), cores, -threads, platform.name
        )  # fmt: skip

    return tuple(sorted(platforms, key=rank))


def estimate_fitted(profile: ModelProfile | Workload, platform: Platform) -> FittedEstimate:
    """What a model takes on a fitted platform, with an interval that held nine times in ten when it was tested.

    Args:
        profile: of the model, for the batch that is asked for.
        platform: one of `fitted_platforms()`, or what `fit_platform` returned.

    >>> import edge_opt as eo
    >>> from edge_opt.model import SmallCNN
    >>> found = estimate_fitted(eo.profile(SmallCNN(), (1, 1, 28, 28)), find_platform("raspberry-pi-4", threads=1))
    >>> found.basis, found.low < found.seconds < found.high
    ('fitted', True)
    """
    work = profile if isinstance(profile, Workload) else workload(profile)
    if not work.works:
        raise InvalidInput(f"{work.name} has no layer that computes; there is nothing to estimate")
    kind = kinds()[platform.kind]
    parts = work.layer_quantities(kind.habits) * np.exp(platform.costs.mean) / 1000
    by_module: dict[int, Vector] = {}
    for item, spent in zip(work.works, parts, strict=True):
        by_module[item.module] = by_module.get(item.module, np.zeros(len(CLASSES))) + spent
    width, outside = interval(work, platform)
    layers = tuple(_layer(profile, number, by_module[number], outside) for number in sorted(by_module))
    seconds = math.fsum(layer.seconds for layer in layers)
    return FittedEstimate(
        platform=platform.name,
        precision=platform.precision,
        seconds=seconds,
        low=seconds / math.exp(width),
        high=seconds * math.exp(width),
        bound=_bound(parts.sum(axis=0)),
        layers=layers,
        outside=outside,
        notes=tuple(_notes(platform, width, outside)),
    )


def interval(work: Workload, platform: Platform) -> tuple[float, tuple[str, ...]]:
    """Half of the 90 % interval, as a logarithm, and the classes and operators that lie outside the fit.

    Args:
        work: the model.
        platform: where it is to run.
    """
    kind = kinds()[platform.kind]
    row = work.quantities(kind.habits)
    spread = kind.spread if platform.origin == "fitted" else kind.typed_spread
    width = spread.width(platform.costs.variance(row), platform.noise_ratio)
    shares, seen = platform.costs.shares(row), _families(platform, kind)
    names = tuple(name for name, share, count in zip(CLASSES, shares, seen, strict=True) if share > 0.05 and count < 2)
    if _recurrent_share(work, platform, kind) >= OUTSIDE_SHARE:  # nobody has published a time of such a net
        return max(width, math.log(OUTSIDE_FACTOR)), (*work.outside, RECURRENT, *names)
    if work.outside or float(shares[seen == 0].sum()) >= OUTSIDE_SHARE:
        return max(width, math.log(OUTSIDE_FACTOR)), (*work.outside, *names)
    if float(shares[seen < 2].sum()) >= OUTSIDE_SHARE:
        return max(width, math.log(UNTESTED_FACTOR)), names
    return width, ()


def _recurrent_share(work: Workload, platform: Platform, kind: Kind) -> float:
    """The part of the time that goes to recurrent layers, whose weights are read again in every step."""
    if not any(item.is_recurrent for item in work.works):
        return 0.0
    spent = (work.layer_quantities(kind.habits) * np.exp(platform.costs.mean)).sum(axis=1)
    return float(spent[[item.is_recurrent for item in work.works]].sum() / spent.sum())


def _families(platform: Platform, kind: Kind) -> Vector:
    """How many families of nets every class was fitted with; a net that was typed in counts as one."""
    families: Vector = kind.prior.seen + (platform.costs.seen if platform.origin == "typed" else 0)
    return families


def _layer(profile: ModelProfile | Workload, number: int, spent: Vector, outside: Sequence[str]) -> LayerTime:
    seconds = float(spent.sum())
    unseen = float(sum(part for name, part in zip(CLASSES, spent, strict=True) if name in outside))
    if isinstance(profile, Workload):
        path, kind = str(number), str(next(work.kind for work in profile.works if work.module == number))
    else:
        path, kind = profile.trace.modules[number].path, profile.trace.modules[number].kind
    return LayerTime(number, path, kind, seconds, _bound(spent), unseen > seconds / 2)


def _bound(spent: Vector) -> Bound:
    """What most of the time goes to, from seconds by class."""
    totals: dict[Bound, float] = {}
    for bound, seconds in zip(_GOES_TO, spent, strict=True):
        totals[bound] = totals.get(bound, 0.0) + float(seconds)
    return max(totals, key=lambda bound: totals[bound])


def _notes(platform: Platform, width: float, outside: Sequence[str]) -> list[str]:
    notes = [
        f"platform {platform.name}: {evidence(platform)}; nine times in ten within a factor of {math.exp(width):.2f}",
        "layers follow from the costs of their classes; only the whole could be checked",
    ]
    if outside:
        notes.append(f"outside the fit, so that the interval is wide: {', '.join(outside)}")
    notes += [f"a typed time contradicts the others: {text}" for text in platform.contradictions]
    return [*notes, *platform.notes]


def evidence(platform: Platform) -> str:
    """What a platform rests on, in one line: rows, runtime with its date, threads, held-out error and source.

    Args:
        platform: Fitted or typed in.

    >>> evidence(find_platform("raspberry-pi-4", runtime="ncnn", threads=1)).split(";")[0]
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


def resolved(platform: Platform | str, precision: str = "fp32", threads: int | None = None) -> Platform:
    """The platform that is meant: a record, the name of one, its file, or the best-known one of a device.

    Args:
        platform: What was given.
        precision: That a device's platform must have.
        threads: That a device's platform must have; any unless given.
    """
    if isinstance(platform, Platform):
        return platform
    if platform.endswith(".toml"):
        return load_platform(platform)
    name = normalized(platform)
    if not platforms_named(name):
        with suppress(UnknownDevice):  # an alias; of another name find_platform says what is closest
            name = device_named(name).name
    return find_platform(name, precision=precision, threads=threads)
