"""Devices from TOML or JSON, each figure with its source."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from difflib import get_close_matches
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, cast, get_args

from edge_opt._support.checks import is_number
from edge_opt._support.files import config_folder
from edge_opt._support.json import loads, read_document
from edge_opt.errors import InvalidDevice, UnknownDevice
from edge_opt.records.devices import (
    Bandwidth,
    DeviceSpec,
    Engine,
    Figure,
    FigureKind,
    KnownLatency,
    Microcontroller,
    Peak,
    Power,
    RamBank,
)

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ENGINES: tuple[str, ...] = get_args(Engine)
KINDS: tuple[str, ...] = get_args(FigureKind)
PAPER_METHODS = ("datasheet", "quoted")
# traffic: bytes read plus bytes written; stream_copy counts so too; memcpy and memset count a byte once.
# decode: what a published run of a language model streamed, by any runtime or by llama.cpp.
MEASURED_METHODS = ("traffic", "stream_copy", "memcpy", "memset", "read", "write", "decode", "llama_cpp_decode")
PEAK_PRECISIONS = ("fp64", "fp32", "fp16", "bf16", "int8", "int8_sparse")
POWER_STATES = ("idle", "load", "tdp", "lowest_mode", "highest_mode")
_KEYS = (
    "name", "title", "engine", "aliases", "note", "cores", "fast_cores", "fast_share", "clock_hz", "ram_bytes",
    "flash_bytes", "overhead_s", "bandwidth_bytes_per_s", "measured_bandwidth_bytes_per_s", "peak_ops_per_s", "power_w",
    "latency_s", "microcontroller",
)  # fmt: skip
_SINGLE_FIGURES = ("cores", "fast_cores", "fast_share", "clock_hz", "flash_bytes", "overhead_s")
_CONTROLLER_KEYS = ("core", "source", "extension", "executes_in_place", "ram_banks", "external_ram_bytes")
_FIGURE_KEYS = ("value", "source", "kind", "low", "high")
# What may stand beside the seconds of a published time.
_RUN_KEYS: dict[str, type | tuple[type, ...]] = {
    "runtime": str,
    "version": str,
    "day": str,
    "precision": str,
    "threads": int,
    "clock_hz": (int, float),
}
_EXAMPLE = '{ value = 9.6e9, source = "data sheet, table 3", kind = "vendor" }'
SUFFIXES = (".toml", ".json")
_NAME = re.compile(r"[a-z0-9]+([.-][a-z0-9]+)*")


def normalized(name: str) -> str:
    """Return a device's name, as people write it, in the form that files use.

    >>> normalized("Raspberry Pi 4"), normalized("jetson_nano")
    ('raspberry-pi-4', 'jetson-nano')
    """
    return re.sub(r"[\s_]+", "-", name.strip().lower())


class _Fault(Exception):
    """An error in a device's file, and what to write instead."""


def spec_from(data: Mapping[str, Any], origin: str) -> DeviceSpec:
    """Return the device that a file describes; `origin` is the file's name, for errors and for the record.

    A figure without a source is refused, as is one that is not positive. A file must give a bandwidth, or say why
    there is none.

    >>> bandwidth = {"datasheet": {"value": 9.6e9, "source": "data sheet", "kind": "vendor"}}
    >>> spec_from({"name": "board", "engine": "cpu", "bandwidth_bytes_per_s": bandwidth}, "board.toml").title
    'board'
    """
    try:
        return _spec(data, origin)
    except _Fault as fault:
        raise InvalidDevice(f"{origin}: {fault}") from None


def _spec(data: Mapping[str, Any], origin: str) -> DeviceSpec:
    _check_keys(data, _KEYS, "")
    name, engine = _text(data, "name"), _text(data, "engine")
    if name is None or not _NAME.fullmatch(name):
        problem = "name is missing" if name is None else f"name is {name!r}"
        raise _Fault(f"{problem}; write it in small letters, digits and hyphens, such as my-board-2")
    if engine not in ENGINES:
        problem = f"engine is {'missing' if engine is None else repr(engine)}"
        raise _Fault(f"{problem}; name what runs a model unless told otherwise: {', '.join(ENGINES)}")
    aliases = data.get("aliases", [])
    if not isinstance(aliases, list) or not all(isinstance(alias, str) and alias.strip() for alias in aliases):
        raise _Fault(f'aliases is {aliases!r}; write a list of names, such as ["pi4", "rpi4"]')
    singles = {key: _figure(data[key], key, key == "overhead_s") if key in data else None for key in _SINGLE_FIGURES}
    _check_fast_cores(singles["cores"], singles["fast_cores"], singles["fast_share"])
    bandwidths, bandwidth_unknown = _bandwidths(data)
    return DeviceSpec(
        name=name,
        title=_text(data, "title") or name,
        engine=cast(Engine, engine),
        aliases=tuple(map(normalized, aliases)),
        **singles,
        ram_bytes=_sizes(data, "ram_bytes"),
        bandwidths=bandwidths,
        bandwidth_unknown=bandwidth_unknown,
        peaks=tuple(Peak(*peak) for peak in _by_engine(data, "peak_ops_per_s", PEAK_PRECISIONS)),
        powers=tuple(Power(state, figure) for state, figure in _figures(data, "power_w", POWER_STATES)),
        latencies=tuple(_latencies(data)),
        note=_text(data, "note") or "",
        origin=origin,
        microcontroller=_microcontroller(data) if "microcontroller" in data else None,
    )


def _microcontroller(data: Mapping[str, Any]) -> Microcontroller:
    key = "microcontroller"
    table = _table(data, key)
    _check_keys(table, _CONTROLLER_KEYS, key)
    core, source = _text(table, "core"), _text(table, "source")
    if core is None or source is None:
        raise _Fault(f'{key} needs a core and its source, such as core = "cortex-m4", source = "data sheet"')
    executes = table.get("executes_in_place", True)
    if not isinstance(executes, bool):
        raise _Fault(f"{key}.executes_in_place is {executes!r}; write true or false")
    external = table.get("external_ram_bytes")
    return Microcontroller(
        core=core,
        source=source,
        extension=_text(table, "extension") or "",
        executes_in_place=executes,
        ram_banks=tuple(RamBank(name, figure) for name, figure in _figures(table, "ram_banks", None, key)),
        external_ram_bytes=None if external is None else _figure(external, f"{key}.external_ram_bytes"),
    )


def _latencies(data: Mapping[str, Any]) -> Iterator[KnownLatency]:
    """Yield the published times of models; what is known of a run stands beside the seconds."""
    key = "latency_s"
    for model, entry in _table(data, key).items():
        run = {name: entry[name] for name in _RUN_KEYS if isinstance(entry, Mapping) and name in entry}
        for name, value in run.items():
            if not isinstance(value, _RUN_KEYS[name]) or not value:
                example = 'runtime = "ncnn", day = "2022-01-17", clock_hz = 1.5e9, threads = 4'
                raise _Fault(f"{key}.{model}.{name} is {value!r}; write such as {example}")
        figure = {name: value for name, value in entry.items() if name not in run} if run else entry
        yield KnownLatency(model, _figure(figure, _joined(key, model)), **run)


def _check_fast_cores(cores: Figure | None, fast: Figure | None, share: Figure | None) -> None:
    if (fast is None) != (share is None):
        raise _Fault(
            "only one of fast_cores and fast_share is there; write how many are fast, and their share of the peak"
        )
    if fast is not None and share is not None and not (cores and fast.value < cores.value and share.value < 1):
        raise _Fault("fast_cores or fast_share is not a part of the whole; let fast_cores < cores, and fast_share < 1")


def _bandwidths(data: Mapping[str, Any]) -> tuple[tuple[Bandwidth, ...], str | None]:
    """Return the data-sheet and the measured bandwidths, and the reason if a file says there are none."""
    key = "bandwidth_bytes_per_s"
    table = dict(_table(data, key))
    reason = table.pop("unknown", None)
    measured = _by_engine(data, "measured_bandwidth_bytes_per_s", MEASURED_METHODS)
    bandwidths = (
        *(Bandwidth(method, None, figure) for method, figure in _figures({key: table}, key, PAPER_METHODS)),
        *(Bandwidth(method, engine, figure) for engine, method, figure in measured),
    )
    if reason is not None and (not isinstance(reason, str) or not reason.strip()):
        raise _Fault(f"{key}.unknown is {reason!r}; write why there is no figure, in quotes")
    if reason is None and not bandwidths:
        raise _Fault(
            f"{key} is missing; write datasheet = {_EXAMPLE} under [{key}], or unknown = 'why' if there is no figure: "
            "a roofline then says unknown"
        )
    if reason is not None and bandwidths:
        raise _Fault(f"{key}.unknown is set, and there are figures; drop one or the other")
    return bandwidths, reason


def _check_keys(table: Mapping[str, Any], allowed: Collection[str], path: str) -> None:
    for key in table:
        if key not in allowed:
            close = get_close_matches(key, allowed, n=1)
            cure = f"did you mean {close[0]}?" if close else f"allowed here: {', '.join(allowed)}"
            raise _Fault(f"unknown key {_joined(path, key)}; {cure}")


def _text(data: Mapping[str, Any], key: str) -> str | None:
    value = data.get(key)
    if value is not None and (not isinstance(value, str) or not value.strip()):
        raise _Fault(f"{key} is {value!r}; write text in quotes")
    return value


def _table(data: Mapping[str, Any], key: str, path: str = "") -> Mapping[str, Any]:
    table = data.get(key, {})
    if not isinstance(table, Mapping):
        raise _Fault(f"{_joined(path, key)} is {table!r}; write a table, such as [{_joined(path, key)}]")
    return table


def _by_engine(data: Mapping[str, Any], key: str, allowed: tuple[str, ...]) -> Iterator[tuple[Engine, str, Figure]]:
    """Yield the figures of a table that has one table for each engine."""
    table = _table(data, key)
    _check_keys(table, ENGINES, key)
    for engine in table:
        for name, figure in _figures(table, engine, allowed, key):
            yield cast(Engine, engine), name, figure


def _figures(
    data: Mapping[str, Any], key: str, allowed: tuple[str, ...] | None, path: str = ""
) -> list[tuple[str, Figure]]:
    table = _table(data, key, path)
    if allowed is not None:
        _check_keys(table, allowed, _joined(path, key))
    return [(name, _figure(value, _joined(path, key, name))) for name, value in table.items()]


def _sizes(data: Mapping[str, Any], key: str) -> tuple[Figure, ...]:
    """Return a figure whose value may be a list: one size per variant of the device, smallest first."""
    if key not in data:
        return ()
    entry = data[key]
    if not isinstance(entry, Mapping) or not isinstance(entry.get("value"), list):
        return (_figure(entry, key),)
    if not entry["value"]:
        raise _Fault(f"{key}.value is an empty list; write one size per variant, or leave the key out")
    sizes = [_figure({**entry, "value": value}, key) for value in entry["value"]]
    return tuple(sorted(sizes, key=lambda figure: figure.value))


def _figure(entry: Any, path: str, may_be_zero: bool = False) -> Figure:
    if not isinstance(entry, Mapping):
        raise _Fault(f"{path} is {entry!r}; every figure carries its source; write {path} = {_EXAMPLE}")
    _check_keys(entry, _FIGURE_KEYS, path)
    value, low, high = (_number(entry, key, path, may_be_zero) for key in ("value", "low", "high"))
    if value is None:
        raise _Fault(f"{path} has no value; write {path} = {_EXAMPLE}, or leave it out: then it is unknown")
    source, kind = entry.get("source"), entry.get("kind")
    if not isinstance(source, str) or not source.strip():
        raise _Fault(f'{path} has no source; say where the number is from: source = "..."; no source, no number')
    if kind not in KINDS:
        problem = "no kind" if kind is None else f"the kind {kind!r}"
        raise _Fault(f"{path} has {problem}; say how its source knows: {', '.join(KINDS)}")
    if not (low or value) <= value <= (high or value):
        raise _Fault(f"{path}.value is {value:g}, outside its own range; let low <= value <= high")
    return Figure(value, source, cast(FigureKind, kind), low, high)


def _number(entry: Mapping[str, Any], key: str, path: str, may_be_zero: bool) -> float | None:
    value = entry.get(key)
    if value is None:
        return None
    if not is_number(value) or value < 0 or (value == 0 and not may_be_zero):
        bound = "zero or more" if may_be_zero else "more than zero"
        raise _Fault(f"{path}.{key} is {value!r}; write a number, {bound}, or leave it out: then it is unknown")
    return float(value)


def _joined(*parts: str) -> str:
    return ".".join(part for part in parts if part)


def devices() -> tuple[DeviceSpec, ...]:
    """Return every known device, sorted by name: the catalog's, and those in the user's own folder.

    >>> [spec.name for spec in devices() if spec.name.startswith("raspberry")]
    ['raspberry-pi-4', 'raspberry-pi-5', 'raspberry-pi-zero-2-w']
    """
    specs = tuple(sorted((*_bundled(), *_own()), key=lambda spec: spec.name))
    _by_name(specs)
    return specs


def device(name: str | os.PathLike[str] | DeviceSpec) -> DeviceSpec:
    """Return one device of the catalog, or your own.

    Args:
        name: Its name or an alias, or a file that describes it (.toml or .json).

    >>> device("Raspberry Pi 4").bandwidth("datasheet").value
    9600000000.0
    """
    if isinstance(name, DeviceSpec):
        return name
    if not isinstance(name, (str, os.PathLike)):
        raise UnknownDevice(f"a device is a name, a file or a DeviceSpec; got {name!r}")
    if not isinstance(name, str) or Path(name).suffix.lower() in SUFFIXES:
        file = Path(name)
        if file.suffix.lower() not in SUFFIXES:
            raise InvalidDevice(f"{str(name)!r} is not a device file; it must end in {' or '.join(SUFFIXES)}")
        return spec_from(read_table(file), str(name))
    wanted = normalized(name)
    own = tuple(_own())
    if not own and wanted in _bundled_names():
        return _bundled_device(wanted)  # an alias needs all files, a name its own alone
    known = _by_name((*_bundled(), *own))
    if wanted not in known:
        raise unknown_device(name)
    return known[wanted]


def unknown_device(name: str, others: Collection[str] = ()) -> UnknownDevice:
    """Return the error for a name that no device has; it names the closest ones.

    Args:
        name: What was asked for.
        others: Names that are known beside the catalog's.

    >>> str(unknown_device("orange-pi-zero2", ["orange-pi-zero-2"])).partition(",")[0]
    "no device named 'orange-pi-zero2'; closest: orange-pi-zero-2"
    """
    known = {alias: spec.name for alias, spec in _by_name(devices()).items()} | {other: other for other in others}
    close = get_close_matches(normalized(name), known, n=3, cutoff=0.5)
    names = list(dict.fromkeys(known[match] for match in close)) or sorted(set(known.values()))[:5]
    if (file := Path(f"{name}.toml")).is_file():
        return UnknownDevice(f"no device named {name!r}; there is a file of that name here: write {str(file)!r}")
    return UnknownDevice(
        f"no device named {name!r}; {'closest' if close else 'there is'}: {', '.join(names)}. `edge-opt devices` "
        f"lists all; to add one, put a TOML file in {user_folder()}, or pass its path"
    )


def read_table(path: Path) -> Mapping[str, Any]:
    """Read what a TOML or JSON file holds, of a device, a platform or a calibration."""
    if not path.exists():
        raise UnknownDevice(f"no file {str(path)!r}; `edge-opt devices` lists what is there without one")
    parse = loads if path.suffix.lower() == ".json" else _load_toml
    data: Any = read_document(path, InvalidDevice, "`edge-opt devices` lists what is there without one", parse)
    if not isinstance(data, Mapping):
        raise InvalidDevice(f"{path} holds a {type(data).__name__}; a device is a table with a name and figures")
    return data


def _load_toml(text: str) -> Any:
    # The parser's memory grows with the square of the parts of a key such as a.b.c.
    if any(part.count(".") > 100 for part in re.split(r"[=,\n{]", text)):
        raise ValueError("a key has more than 100 parts")
    return tomllib.loads(text)


def is_platform_table(table: Mapping[str, Any]) -> bool:
    """Return whether a file's contents are a fitted platform, such as `edge-opt board` writes, and no device."""
    return "costs" in table and "covariance" in table


def is_shipped(spec: DeviceSpec) -> bool:
    """Return whether a device is as the catalog has it; one that was changed, or is a user's own, is not."""
    return spec.name in _bundled_names() and spec == _bundled_device(spec.name)


def user_folder() -> Path:
    """Return where the user's own device files are looked for; it need not exist."""
    return config_folder() / "devices"


def _bundled() -> tuple[DeviceSpec, ...]:
    return tuple(map(_bundled_device, _bundled_names()))


@cache
def _bundled_names() -> tuple[str, ...]:
    """Return the names of the catalog's devices: each file is named after its device."""
    files = (resources.files("edge_opt.boards") / "data").iterdir()
    return tuple(sorted(file.name.removesuffix(".toml") for file in files if file.name.endswith(".toml")))


@cache
def _bundled_device(name: str) -> DeviceSpec:
    file = resources.files("edge_opt.boards") / "data" / f"{name}.toml"
    return spec_from(tomllib.loads(file.read_text(encoding="utf-8")), file.name)


def _own() -> Iterator[DeviceSpec]:
    folder = user_folder()
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.suffix.lower() in SUFFIXES:
            table = read_table(path)
            if not is_platform_table(table):
                yield spec_from(table, str(path))


def _by_name(specs: tuple[DeviceSpec, ...]) -> dict[str, DeviceSpec]:
    """Return devices by name and alias; two that share one are an error that names both files."""
    by_name: dict[str, DeviceSpec] = {}
    for spec in specs:
        for name in (spec.name, *spec.aliases):
            other = by_name.setdefault(name, spec)
            if other is not spec:
                raise InvalidDevice(f"two devices are called {name!r}: {other.origin} and {spec.origin}; rename one")
    return by_name
