"""Fitted platforms: costs that were fitted to published times, read from files, and what a model takes there.

A platform is a device with an engine, a runtime, a precision and threads. Only whole models were timed: a layer's time
follows from the class costs, and only the sum of all layers could be checked.
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np

from edge_opt._support.files import write_whole
from edge_opt.boards.catalog import device as device_named
from edge_opt.boards.catalog import normalized
from edge_opt.boards.class_costs import CLASSES, Habits, Vector, Workload, workload
from edge_opt.boards.class_fit import OUTSIDE_SHARE, Costs, Spread
from edge_opt.errors import InvalidDevice, InvalidInput, UnknownDevice
from edge_opt.records import Bound, DeviceSpec, Engine, ModelProfile

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FOLDER = Path(__file__).parent / "data" / "fitted"
PRIORS = "priors.toml"
# Outside the fit nothing was held out. Errors there, of attention predicted from convolutions, reach a factor of seven.
OUTSIDE_FACTOR = 7.0
# A class that one family alone has, as ncnn's table has attention, was fitted but never held out.
UNTESTED_FACTOR = 2.5
Origin = Literal["fitted", "typed", "core"]
_NAME = re.compile(r"[a-z0-9.-]+")
# What the cost of a class stands for: arithmetic, tensors and weights that are read, or the call itself.
_GOES_TO: tuple[Bound, ...] = tuple(
    "compute" if name.endswith("_macs") else "overhead" if name in ("layers", "detections") else "memory"
    for name in CLASSES
)


@dataclass(frozen=True, eq=False)
class Kind:
    """Platforms of one kind: what they have in common, and how far times lie from predictions.

    `prior` is what is likely before any time is known, its `seen` the families of nets that have a class; `same_core`
    the covariance of costs between boards that have one core; `habits` how layers are run. `spread` is that of fitted
    platforms, `typed_spread` that of boards of which only a few times are known. `carried` is the share of a net's
    error on one board that it has on another, which `transfer` uses, and `carried_noise` what remains then, as a
    logarithm.
    """

    name: str
    habits: Habits
    prior: Costs
    same_core: Vector
    spread: Spread
    typed_spread: Spread
    boards: int
    carried: float
    carried_noise: float
    source: str


@dataclass(frozen=True, eq=False)
class Platform:
    """A device with an engine, a runtime, a precision and threads, and its fitted costs.

    `name` is all of these together. `threads` is None where they are not known. `day` dates the runtime. `rows` is
    how many nets were timed; `error` the median relative error of nets whose family was held out, `factor` the one
    within which nine of ten of them lie; both None where too few were timed to tell. `noise_ratio` is how much noisier
    its times are than those of others. `origin`: fitted to a table, typed in, or taken from boards with the same core.
    """

    name: str
    device: str
    title: str
    engine: Engine
    cores: str
    runtime: str
    day: str
    precision: str
    threads: int | None
    core: str | None
    ghz: float | None
    kind: str
    costs: Costs
    rows: int
    error: float | None
    factor: float | None
    noise_ratio: float
    source: str
    origin: Origin = "fitted"
    notes: tuple[str, ...] = ()
    contradictions: tuple[str, ...] = ()


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
class FittedEstimate:
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


def fitted_platforms(device: str | None = None) -> tuple[Platform, ...]:
    """Every platform that ships with costs, in the order of their names.

    Args:
        device: only those of this device; all unless given.

    >>> len(fitted_platforms()) > 90, fitted_platforms("raspberry-pi-4")[0].device
    (True, 'raspberry-pi-4')
    """
    pattern = "*.toml" if device is None else f"{device}_*.toml"
    paths = (path for path in FOLDER.glob(pattern) if path.name != PRIORS)
    found = (_shipped(path) for path in paths)
    return tuple(sorted(found, key=lambda platform: platform.name))


def find_platform(
    device: str, *, runtime: str | None = None, precision: str = "fp32", threads: int | None = None
) -> Platform:
    """The fitted platform of a device: the one that is asked for, or the one that is known best.

    Args:
        device: a device's name, or a platform's full name.
        runtime: such as "ncnn"; any unless given.
        precision: that the model is run in.
        threads: any number unless given; then most, because that is what people run.
    """
    name, _, rest = device.partition("/")
    known = platforms_named(name)
    exact = [platform for platform in known if platform.name == device]
    if exact:
        return exact[0]
    if not known or rest:
        close = get_close_matches(device, sorted({platform.device for platform in fitted_platforms()}), n=3)
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
    return min(wanted, key=_rank)


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
    return tuple(sorted(known, key=_rank))


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
        return min(wanted, key=lambda platform: (platform.engine != device.engine, _rank(platform)), default=None)
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
        return platform.runtime not in (runtime, *near), platform.precision != precision, apart, _rank(platform)

    return min(known, key=distance)


def _rank(platform: Platform) -> tuple[float, ...]:
    return (platform.engine != "cpu", platform.cores == "little", -(platform.threads or 0), platform.error or 9.0)


@cache
def kinds() -> Mapping[str, Kind]:
    """What platforms of each kind have in common, by the kind's name."""
    data = tomllib.loads((FOLDER / PRIORS).read_text(encoding="utf-8"))
    return {name: kind_from(name, entry) for name, entry in data.items()}


@cache
def _shipped(path: Path) -> Platform:
    return platform_from(tomllib.loads(path.read_text(encoding="utf-8")))


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
    if work.outside or float(shares[seen == 0].sum()) >= OUTSIDE_SHARE:
        return max(width, math.log(OUTSIDE_FACTOR)), (*work.outside, *names)
    if float(shares[seen < 2].sum()) >= OUTSIDE_SHARE:
        return max(width, math.log(UNTESTED_FACTOR)), names
    return width, ()


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


def transfer(
    seconds: float, profile: ModelProfile | Workload, source: Platform | str, target: Platform | str
) -> tuple[float, float, float]:
    """A latency known on one platform, said for another: seconds there, and the ends of its 90 % interval.

    What a net took on the source beyond its estimate there is carried over in part: some of it is the net's own, some
    the board's. How much was measured on nets that were held out.

    Args:
        seconds: what the model took on the source.
        profile: of the model, as it was run.
        source: where it was timed: a platform, its name or file, or a device, whose best-known platform is taken.
        target: where it is to run, likewise.

    >>> import edge_opt as eo
    >>> from edge_opt.model import SmallCNN
    >>> profile = eo.profile(SmallCNN(), (1, 1, 28, 28))
    >>> found, low, high = transfer(400e-6, profile, source="raspberry-pi-4", target="raspberry-pi-5")
    >>> low < found < high
    True
    """
    source, target = resolved(source), resolved(target)
    if not (math.isfinite(seconds) and seconds > 0):
        raise InvalidInput(f"seconds is {seconds:g}; it must be finite and more than zero")
    work = profile if isinstance(profile, Workload) else workload(profile)
    there, here = estimate_fitted(work, target), estimate_fitted(work, source)
    kind = kinds()[target.kind]
    # Another runtime has other kernels: nothing of one net's peculiarity is known to carry over.
    carried = kind.carried if source.kind == target.kind else 0.0
    found = there.seconds * (seconds / here.seconds) ** carried
    variance = target.costs.variance(work.quantities(kind.habits))
    width = interval(work, target)[0]
    if carried:
        width = min(width, Spread(kind.carried_noise, kind.spread.trust, kind.spread.quantile).width(variance))
    return found, found / math.exp(width), found * math.exp(width)


def kind_from(name: str, data: Mapping[str, Any]) -> Kind:
    """A kind as its entry in the prior file has it.

    Args:
        name: of the kind.
        data: the entry.
    """
    return Kind(
        name=name,
        habits=Habits(**data["habits"]),
        prior=costs_from(data),
        same_core=_matrix(data["same_core"]),
        spread=Spread(**data["spread"]),
        typed_spread=Spread(**data["typed_spread"]),
        boards=data["boards"],
        carried=data["carried"],
        carried_noise=data["carried_noise"],
        source=data["source"],
    )


def platform_from(data: Mapping[str, Any]) -> Platform:
    """A platform as its file has it.

    Args:
        data: the file's contents.
    """
    texts = ("name", "device", "title", "cores", "runtime", "day", "precision", "kind", "source")
    return Platform(
        **{key: str(data[key]) for key in texts},
        engine=cast(Engine, data["engine"]),
        threads=data.get("threads"),
        core=data.get("core"),
        ghz=data.get("ghz"),
        costs=costs_from(data),
        rows=data["rows"],
        error=data.get("error"),
        factor=data.get("factor"),
        noise_ratio=data["noise_ratio"],
        origin=cast(Origin, data.get("origin", "fitted")),
        notes=tuple(data.get("notes", ())),
        contradictions=tuple(data.get("contradictions", ())),
    )


def load_platform(path: str | os.PathLike[str]) -> Platform:
    """The platform that a file describes, as `save_platform` writes it.

    Args:
        path: A .toml file.
    """
    try:
        platform = platform_from(tomllib.loads(Path(path).read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise InvalidDevice(f"{str(path)!r} is no platform, or is cut off: {error!r}; write it again") from error
    if platform.kind not in kinds() or platform.costs.covariance.shape != (len(CLASSES), len(CLASSES)):
        raise InvalidDevice(f"{str(path)!r} is of another version of edge-opt; write it again with `edge-opt board`")
    return platform


def save_platform(platform: Platform, path: str | os.PathLike[str]) -> Path:
    """Write a platform to a file that works wherever a target is named, and return its path.

    Args:
        platform: What `fit_platform` returned.
        path: A file that ends in .toml.
    """
    file = Path(path)
    if file.suffix.lower() != ".toml":
        raise InvalidInput(f"a platform is saved as TOML, and the file is {str(path)!r}; let its name end in .toml")
    try:
        return write_whole(file, platform_text(platform))
    except OSError as error:
        raise InvalidInput(f"cannot write {str(path)!r}: {error.strerror or error}") from error


def costs_from(data: Mapping[str, Any]) -> Costs:
    """Costs, with their covariance and how often each class was seen.

    Args:
        data: `costs` by class, `seen` by class, and `covariance` as the rows of its lower half.
    """
    values = np.array([float(data["costs"][name]) for name in CLASSES])
    seen = np.array([float(data["seen"].get(name, 0)) for name in CLASSES])
    return Costs(np.log(values), _matrix(data["covariance"]), seen)


def _matrix(rows: Sequence[Sequence[float]]) -> Vector:
    size = len(rows)
    matrix = np.zeros((size, size))
    for number, row in enumerate(rows):
        matrix[number, : number + 1] = row
        matrix[: number + 1, number] = row
    return matrix


def platform_text(platform: Platform) -> str:
    """A platform's file.

    Args:
        platform: what to write.
    """
    texts = "name device title engine cores runtime day precision kind source origin".split()
    lines = [f"{key} = {_quoted(getattr(platform, key))}" for key in texts]
    for key in ("threads", "core", "ghz", "rows", "error", "factor", "noise_ratio"):
        value = getattr(platform, key)
        if value is not None:
            lines.append(f"{key} = {_quoted(value) if isinstance(value, str) else _number(value)}")
    for key in ("notes", "contradictions"):
        if getattr(platform, key):
            lines.append(f"{key} = [{', '.join(_quoted(text) for text in getattr(platform, key))}]")
    return "\n".join([*lines, *costs_lines(platform.costs)]) + "\n"


def costs_lines(costs: Costs, table: str = "") -> list[str]:
    """Lines of a file with costs: covariance first, for tables must come last.

    Args:
        costs: what to write.
        table: name of the table that they are in, with a dot; none at the top of a file.
    """
    lines = matrix_lines("covariance", costs.covariance)
    lines += [f"[{table}costs]  # ns per MAC, element or weight; ms per layer"]
    lines += [f"{name} = {math.exp(value):.4g}" for name, value in zip(CLASSES, costs.mean, strict=True)]
    lines += [f"[{table}seen]  # rows, or families in a prior, with 3 % of their time or more in a class"]
    return lines + [f"{name} = {int(count)}" for name, count in zip(CLASSES, costs.seen, strict=True) if count]


def matrix_lines(name: str, matrix: Vector) -> list[str]:
    """The lower half of a symmetric matrix, one row a line.

    Args:
        name: of the key.
        matrix: what to write; four decimals are kept.
    """
    rows = [
        ", ".join(f"{value:.4f}".rstrip("0").rstrip(".") for value in matrix[n, : n + 1]) for n in range(len(matrix))
    ]
    return [f"{name} = [", *(f"  [{row}]," for row in rows), "]"]


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.4g}"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
