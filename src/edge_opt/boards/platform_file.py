"""A platform's file: costs that were fitted to times, with what they rest on; those that ship, read and written."""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np

from edge_opt._support.files import write_named
from edge_opt.boards.class_costs import CLASSES, Costs, KernelConventions, Spread, Vector
from edge_opt.errors import InvalidDevice, InvalidInput
from edge_opt.records.devices import Engine
from edge_opt.records.fields import Record

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FOLDER = Path(__file__).parent / "data" / "fitted"
PRIORS = "priors.toml"
SIBLINGS = "siblings.toml"
CHIPS = "chips.toml"
# Two devices of the table with nearly the same chip differ by one factor of 4 %, and by 7 to 12 % from net to net.
SIBLING_SD = 0.15
Origin = Literal["fitted", "typed", "core"]


@dataclass(frozen=True, eq=False)
class PlatformFamily:
    """Platforms of one kind: what they have in common, and how far times lie from predictions.

    `prior` is what is likely before any time is known, its `seen` the families of nets that have a class; `same_core`
    the covariance of costs between boards that have one core; `conventions` how layers are run. `spread` is that of
    fitted platforms, `typed_spread` that of boards with only a few known times. `ratio_spread` is that of ratios to the
    same board in float; None where costs are not such ratios. Covariances are then those of the ratios.
    """

    name: str
    conventions: KernelConventions
    prior: Costs
    same_core: Vector
    spread: Spread
    typed_spread: Spread
    boards: int
    source: str
    ratio_spread: Spread | None = None


@dataclass(frozen=True, eq=False)
class Platform(Record):
    """A device with an engine, a runtime, a precision and threads, and its fitted costs.

    `name` is all of these together. `threads` is None where they are not known. `day` dates the runtime. `rows` is
    how many nets were timed; `error` the median relative error of nets whose family was held out, `factor` the one
    within which nine of ten of them lie; both None where too few were timed to tell. `noise_ratio` is how much noisier
    its times are than those of others. `origin`: fitted to a table, typed in, or taken from boards with the same core.
    `computes_in` is the type of the arithmetic where that is not `precision`: on ARMv8.2, ncnn takes and returns fp32
    and computes in fp16.
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
    computes_in: str | None = None
    notes: tuple[str, ...] = ()
    contradictions: tuple[str, ...] = ()


@cache
def fitted_platforms(device: str | None = None) -> tuple[Platform, ...]:
    """Return every platform that ships with costs, in the order of their names.

    Args:
        device: only those of this device; default: all.

    >>> len(fitted_platforms()) > 90, fitted_platforms("raspberry-pi-4")[0].device
    (True, 'raspberry-pi-4')
    """
    pattern = "*.toml" if device is None else f"{device}_*.toml"
    paths = (path for path in FOLDER.glob(pattern) if path.name not in (PRIORS, SIBLINGS, CHIPS))
    known = [*map(_shipped, paths)]
    for name in _siblings() if device is None else {device} & _siblings().keys():
        known += _sibling_platforms(name)
    return tuple(sorted(known, key=lambda platform: platform.name))


def timed_engines() -> Mapping[str, str]:
    """Return the engine of each timed device that its platforms are of, by the names of the files; an NPU comes first.

    >>> timed_engines()["galaxy-s23"], timed_engines()["raspberry-pi-5"], timed_engines()["rtx-2060-laptop"]
    ('npu', 'cpu', 'gpu')
    """
    engines: dict[str, set[str]] = {}
    for path in FOLDER.glob("*_*.toml"):
        device, engine = path.name.split("_")[:2]
        engines.setdefault(device, set()).add(engine.partition("-")[0])
    engines |= {device: engines[entry["base"]] for device, entry in _siblings().items()}
    return {device: next(name for name in ("npu", "cpu", "gpu") if name in known) for device, known in engines.items()}


def timed_devices() -> tuple[str, ...]:
    """Return the names of devices that some shipped platform is of, by the names of the files: none of them is read.

    >>> "orange-pi-zero-2" in timed_devices(), "galaxy-s23" in timed_devices()
    (True, True)
    """
    return tuple(sorted(timed_engines()))


@cache
def known_chips() -> Mapping[str, Mapping[str, Any]]:
    """Return chip and RAM, with their sources, of devices that are known by their times; by the device's name."""
    return tomllib.loads((FOLDER / CHIPS).read_text(encoding="utf-8"))


@cache
def _siblings() -> Mapping[str, Mapping[str, Any]]:
    return tomllib.loads((FOLDER / SIBLINGS).read_text(encoding="utf-8"))


def _sibling_platforms(device: str) -> Iterator[Platform]:
    """Yield the platforms of a device from those of another one with the same NPU; inferred ones are less certain."""
    entry = _siblings()[device]
    for base in fitted_platforms(entry["base"]):
        if entry.get("same_times", False):
            name = base.name.replace(base.device, device, 1)
            note = f"the table has the same times for it and {base.device}, which have one chip"
            yield replace(base, name=name, device=device, title=entry["title"], notes=(*base.notes, note))
        else:
            scale, sd = entry.get("scale", 1.0), entry.get("sd", SIBLING_SD)
            why = entry.get("why", "which has the same NPU")
            times = f"{scale:g} times those" if scale != 1 else "those"
            note = f"costs are {times} of {base.device}, {why}"
            yield untimed_platform(base, device, entry["title"], sd, (note, *base.notes), scale)


def untimed_platform(
    base: Platform, device: str, title: str, spread_sd: float, notes: tuple[str, ...], factor: float = 1.0
) -> Platform:
    """Return the platform of a device that nobody has timed: the costs of one that is alike, less certain.

    Args:
        base: The platform that was timed.
        device: Name of the device.
        title: Its name for people.
        spread_sd: Standard deviation of the common factor between such devices, as a logarithm.
        notes: What a reader should know, first whose costs it has.
        factor: Its time over that of the platform that was timed.
    """
    costs = replace(
        base.costs, mean=base.costs.mean + math.log(factor), covariance=base.costs.covariance + spread_sd**2
    )
    return replace(
        base, name=base.name.replace(base.device, device, 1), device=device, title=title, costs=costs, rows=0,
        error=None, factor=None, origin="core", notes=notes,
    )  # fmt: skip


@cache
def family_names() -> tuple[str, ...]:
    """Return the names of all families of platforms."""
    return tuple(_family_texts())


@cache
def platform_family(name: str) -> PlatformFamily:
    """Return what platforms of a family have in common; `name` is as `Platform.kind` has it."""
    data = tomllib.loads(_family_texts()[name])[name]
    return PlatformFamily(
        name=name,
        conventions=KernelConventions(**{**data["habits"], "free": tuple(data["habits"].get("free", ()))}),
        prior=costs_from(data),
        same_core=_matrix(data["same_core"]),
        spread=Spread(**data["spread"]),
        typed_spread=Spread(**data["typed_spread"]),
        boards=data["boards"],
        source=data["source"],
        ratio_spread=Spread(**data["ratio_spread"]) if "ratio_spread" in data else None,
    )


@cache
def _family_texts() -> Mapping[str, str]:
    """Return the part of the prior file of each family: one prediction needs one of the twelve, and TOML is slow."""
    parts = re.split(r"^\[([\w-]+)\]$", (FOLDER / PRIORS).read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {name: f"[{name}]{body}" for name, body in zip(parts[1::2], parts[2::2], strict=True)}


@cache
def _shipped(path: Path) -> Platform:
    return platform_from(tomllib.loads(path.read_text(encoding="utf-8")))


def platform_from(data: Mapping[str, Any]) -> Platform:
    """Return a platform from the contents of its file."""
    values = {field.name: data[field.name] for field in fields(Platform) if field.name in data}
    lists = {key: tuple(data.get(key, ())) for key in ("notes", "contradictions")}
    optional = dict.fromkeys(("threads", "core", "ghz", "error", "factor"))
    return Platform(**{**optional, **values, **lists, "costs": costs_from(data)})


def checked_platform(table: Mapping[str, Any], path: str | os.PathLike[str]) -> Platform:
    """Return the platform of a file's contents, as `save_platform` writes it; one of another version is refused."""
    try:
        platform = platform_from(table)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise InvalidDevice(f"{str(path)!r} is not a platform, or is truncated: {error!r}; write it again") from error
    if platform.kind not in family_names() or platform.costs.covariance.shape != (len(CLASSES), len(CLASSES)):
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
    return write_named(file, platform_text(platform))


def costs_from(data: Mapping[str, Any]) -> Costs:
    """Return costs, with their covariance and how often each class was seen.

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
    """Return the text of a platform's file; what is not known is left out."""
    values = {field.name: getattr(platform, field.name) for field in fields(platform) if field.name != "costs"}
    lines = [f"{key} = {_toml(value)}" for key, value in values.items() if value not in (None, ())]
    return "\n".join([*lines, *costs_lines(platform.costs)]) + "\n"


def costs_lines(costs: Costs, table: str = "") -> list[str]:
    """Return the lines of a file with costs: covariance first, for tables must come last.

    `table` is the name of the table that they are in, with a dot; none at the top of a file.
    """
    lines = matrix_lines("covariance", costs.covariance)
    lines += [f"[{table}costs]  # ns per MAC, element or weight; ms per layer"]
    lines += [f"{name} = {math.exp(value):.4g}" for name, value in zip(CLASSES, costs.mean, strict=True)]
    lines += [f"[{table}seen]  # rows, or families in a prior, with 3 % of their time or more in a class"]
    return lines + [f"{name} = {int(count)}" for name, count in zip(CLASSES, costs.seen, strict=True) if count]


def matrix_lines(name: str, matrix: Vector) -> list[str]:
    """Return the lower half of a symmetric matrix under a key, one row a line; four decimals are kept."""
    rows = [
        ", ".join(f"{value:.4f}".rstrip("0").rstrip(".") for value in matrix[n, : n + 1]) for n in range(len(matrix))
    ]
    return [f"{name} = [", *(f"  [{row}]," for row in rows), "]"]


def _toml(value: str | float | tuple[str, ...]) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return f'"{escaped}"'
    return str(value) if isinstance(value, int) else f"{value:.4g}"
