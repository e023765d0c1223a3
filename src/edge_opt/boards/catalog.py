"""Devices from TOML or JSON, each figure with its source."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from difflib import get_close_matches
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, NoReturn, cast, get_args

from edge_opt._support.checks import is_number
from edge_opt._support.files import config_folder
from edge_opt.errors import InvalidDevice, UnknownDevice
from edge_opt.records.devices import Bandwidth, DeviceSpec, Engine, Figure, FigureKind, KnownLatency, Peak, Power

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
    "latency_s",
)  # fmt: skip
_FIGURE_KEYS = ("value", "source", "kind", "low", "high")
_EXAMPLE = '{ value = 9.6e9, source = "data sheet, table 3", kind = "vendor" }'
_NAME = re.compile(r"[a-z0-9]+([.-][a-z0-9]+)*")


def normalized(name: str) -> str:
    """A device's name as people write it, in the form that files use.

    >>> normalized("Raspberry Pi 4"), normalized("jetson_nano")
    ('raspberry-pi-4', 'jetson-nano')
    """
    return re.sub(r"[\s_]+", "-", name.strip().lower())


def spec_from(data: Mapping[str, Any], origin: str) -> DeviceSpec:
    """The device that a file describes; `origin` is the file's name, for errors and for the record.

    A figure without a source is refused, as is one that is not positive. A file must give a bandwidth, or say why
    there is none.

    >>> bandwidth = {"datasheet": {"value": 9.6e9, "source": "data sheet", "kind": "vendor"}}
    >>> spec_from({"name": "board", "engine": "cpu", "bandwidth_bytes_per_s": bandwidth}, "board.toml").title
    'board'
    """
    return _File(origin).spec(data)


class _File:
    """One file being read; every complaint names it."""

    def __init__(self, origin: str) -> None:
        self.origin = origin

    def refuse(self, problem: str, cure: str) -> NoReturn:
        raise InvalidDevice(f"{self.origin}: {problem}; {cure}")

    def spec(self, data: Mapping[str, Any]) -> DeviceSpec:
        self.check_keys(data, _KEYS, "")
        name = self.text(data, "name")
        if name is None or not _NAME.fullmatch(name):
            self.refuse(
                "name is missing" if name is None else f"name is {name!r}",
                "write it in small letters, digits and hyphens, such as my-board-2",
            )
        engine = self.text(data, "engine")
        if engine not in ENGINES:
            self.refuse(
                f"engine is {'missing' if engine is None else repr(engine)}",
                f"name what runs a model unless told otherwise: {', '.join(ENGINES)}",
            )
        bandwidths = (*self.paper_bandwidths(data), *self.measured_bandwidths(data))
        return DeviceSpec(
            name=name,
            title=self.text(data, "title") or name,
            engine=cast(Engine, engine),
            aliases=self.aliases(data),
            cores=self.optional(data, "cores"),
            **self.fast_cores(data),
            clock_hz=self.optional(data, "clock_hz"),
            ram_bytes=self.sizes(data, "ram_bytes"),
            flash_bytes=self.optional(data, "flash_bytes"),
            bandwidths=bandwidths,
            bandwidth_unknown=self.unknown_bandwidth(data, has_figures=bool(bandwidths)),
            peaks=self.peaks(data),
            powers=tuple(Power(state, figure) for state, figure in self.figures(data, "power_w", POWER_STATES)),
            overhead_s=self.optional(data, "overhead_s", may_be_zero=True),
            latencies=tuple(KnownLatency(model, figure) for model, figure in self.figures(data, "latency_s", None)),
            note=self.text(data, "note") or "",
            origin=self.origin,
        )

    def fast_cores(self, data: Mapping[str, Any]) -> dict[str, Figure | None]:
        found = {key: self.optional(data, key) for key in ("fast_cores", "fast_share")}
        cores = self.optional(data, "cores")
        fast, share = found["fast_cores"], found["fast_share"]
        if (fast is None) != (share is None):
            self.refuse(
                "only one of fast_cores and fast_share is there", "write how many are fast, and their share of the peak"
            )
        if fast is not None and share is not None and not (cores and fast.value < cores.value and share.value < 1):
            self.refuse(
                "fast_cores or fast_share is not a part of the whole", "let fast_cores < cores, and fast_share < 1"
            )
        return found

    def check_keys(self, table: Mapping[str, Any], allowed: Collection[str], place: str) -> None:
        for key in table:
            if key not in allowed:
                close = get_close_matches(key, allowed, n=1)
                self.refuse(
                    f"unknown key {_joined(place, key)}",
                    f"did you mean {close[0]}?" if close else f"allowed here: {', '.join(allowed)}",
                )

    def text(self, data: Mapping[str, Any], key: str) -> str | None:
        value = data.get(key)
        if value is not None and (not isinstance(value, str) or not value.strip()):
            self.refuse(f"{key} is {value!r}", "write text in quotes")
        return value

    def aliases(self, data: Mapping[str, Any]) -> tuple[str, ...]:
        found = data.get("aliases", [])
        if not isinstance(found, list) or not all(isinstance(alias, str) and alias.strip() for alias in found):
            self.refuse(f"aliases is {found!r}", 'write a list of names, such as ["pi4", "rpi4"]')
        return tuple(normalized(alias) for alias in found)

    def table(self, data: Mapping[str, Any], key: str, place: str = "") -> Mapping[str, Any]:
        found = data.get(key, {})
        if not isinstance(found, Mapping):
            self.refuse(f"{_joined(place, key)} is {found!r}", f"write a table, such as [{_joined(place, key)}]")
        return found

    def figures(
        self, data: Mapping[str, Any], key: str, allowed: tuple[str, ...] | None, place: str = ""
    ) -> list[tuple[str, Figure]]:
        table = self.table(data, key, place)
        if allowed is not None:
            self.check_keys(table, allowed, _joined(place, key))
        return [(name, self.figure(value, _joined(place, key, name))) for name, value in table.items()]

    def optional(self, data: Mapping[str, Any], key: str, may_be_zero: bool = False) -> Figure | None:
        return self.figure(data[key], key, may_be_zero) if key in data else None

    def sizes(self, data: Mapping[str, Any], key: str) -> tuple[Figure, ...]:
        """A figure whose value may be a list: one size per variant of the device, smallest first."""
        if key not in data:
            return ()
        entry = data[key]
        if not isinstance(entry, Mapping) or not isinstance(entry.get("value"), list):
            return (self.figure(entry, key),)
        if not entry["value"]:
            self.refuse(f"{key}.value is an empty list", "write one size per variant, or leave the key out")
        found = [self.figure({**entry, "value": value}, key) for value in entry["value"]]
        return tuple(sorted(found, key=lambda figure: figure.value))

    def figure(self, entry: Any, place: str, may_be_zero: bool = False) -> Figure:
        if not isinstance(entry, Mapping):
            self.refuse(f"{place} is {entry!r}", f"every figure carries its source; write {place} = {_EXAMPLE}")
        self.check_keys(entry, _FIGURE_KEYS, place)
        value = self.number(entry, "value", place, may_be_zero)
        if value is None:
            self.refuse(f"{place} has no value", f"write {place} = {_EXAMPLE}, or leave it out: then it is unknown")
        source, kind = entry.get("source"), entry.get("kind")
        if not isinstance(source, str) or not source.strip():
            self.refuse(f"{place} has no source", 'say where the number is from: source = "..."; no source, no number')
        if kind not in KINDS:
            self.refuse(
                f"{place} has {'no kind' if kind is None else f'the kind {kind!r}'}",
                f"say how its source knows: {', '.join(KINDS)}",
            )
        low = self.number(entry, "low", place, may_be_zero)
        high = self.number(entry, "high", place, may_be_zero)
        if not (low or value) <= value <= (high or value):
            self.refuse(f"{place}.value is {value:g}, outside its own range", "let low <= value <= high")
        return Figure(value, source, cast(FigureKind, kind), low, high)

    def number(self, entry: Mapping[str, Any], key: str, place: str, may_be_zero: bool) -> float | None:
        value = entry.get(key)
        if value is None:
            return None
        if not is_number(value) or value < 0 or (value == 0 and not may_be_zero):
            bound = "zero or more" if may_be_zero else "more than zero"
            self.refuse(f"{place}.{key} is {value!r}", f"write a number, {bound}, or leave it out: then it is unknown")
        return float(value)

    def paper_bandwidths(self, data: Mapping[str, Any]) -> tuple[Bandwidth, ...]:
        key = "bandwidth_bytes_per_s"
        table = {name: value for name, value in self.table(data, key).items() if name != "unknown"}
        return tuple(Bandwidth(name, None, figure) for name, figure in self.figures({key: table}, key, PAPER_METHODS))

    def measured_bandwidths(self, data: Mapping[str, Any]) -> tuple[Bandwidth, ...]:
        key = "measured_bandwidth_bytes_per_s"
        return tuple(
            Bandwidth(method, engine, figure)
            for engine, table in self.by_engine(data, key)
            for method, figure in self.figures(table, engine, MEASURED_METHODS, key)
        )

    def peaks(self, data: Mapping[str, Any]) -> tuple[Peak, ...]:
        key = "peak_ops_per_s"
        return tuple(
            Peak(engine, precision, figure)
            for engine, table in self.by_engine(data, key)
            for precision, figure in self.figures(table, engine, PEAK_PRECISIONS, key)
        )

    def by_engine(self, data: Mapping[str, Any], key: str) -> list[tuple[Engine, Mapping[str, Any]]]:
        table = self.table(data, key)
        self.check_keys(table, ENGINES, key)
        return [(cast(Engine, engine), table) for engine in table]

    def unknown_bandwidth(self, data: Mapping[str, Any], has_figures: bool) -> str | None:
        key = "bandwidth_bytes_per_s"
        reason = self.table(data, key).get("unknown")
        if reason is not None and (not isinstance(reason, str) or not reason.strip()):
            self.refuse(f"{key}.unknown is {reason!r}", "write why there is no figure, in quotes")
        if reason is None and not has_figures:
            self.refuse(
                f"{key} is missing",
                f"write datasheet = {_EXAMPLE} under [{key}], or unknown = 'why' if there is no figure: "
                "a roofline then says unknown",
            )
        if reason is not None and has_figures:
            self.refuse(f"{key}.unknown is set, and there are figures", "drop one or the other")
        return reason


def _joined(*parts: str) -> str:
    return ".".join(part for part in parts if part)


if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SUFFIXES = (".toml", ".json")


def devices() -> tuple[DeviceSpec, ...]:
    """Every known device, sorted by name: the catalogue's, and those in the user's own folder.

    >>> [spec.name for spec in devices() if spec.name.startswith("raspberry")]
    ['raspberry-pi-4', 'raspberry-pi-5', 'raspberry-pi-zero-2-w']
    """
    found = tuple(sorted((*_bundled(), *_own()), key=lambda spec: spec.name))
    _by_name(found)
    return found


def device(name: str | os.PathLike[str] | DeviceSpec) -> DeviceSpec:
    """One device of the catalogue, or of your own.

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
        return load_device(name)
    wanted = normalized(name)
    own = tuple(_own())
    if not own and wanted in _bundled_names():
        return _bundled_device(wanted)  # an alias needs all files, a name its own alone
    found = _by_name((*_bundled(), *own))
    if wanted not in found:
        raise unknown_device(name)
    return found[wanted]


def unknown_device(name: str, others: Collection[str] = ()) -> UnknownDevice:
    """The error for a name that no device has; it names the closest ones.

    Args:
        name: What was asked for.
        others: Names that are known beside the catalogue's.

    >>> str(unknown_device("orange-pi-zero2", ["orange-pi-zero-2"])).partition(",")[0]
    "no device named 'orange-pi-zero2'; closest: orange-pi-zero-2"
    """
    found = {alias: spec.name for alias, spec in _by_name(devices()).items()} | {other: other for other in others}
    close = get_close_matches(normalized(name), found, n=3, cutoff=0.5)
    names = list(dict.fromkeys(found[match] for match in close)) or sorted(set(found.values()))[:5]
    if (file := Path(f"{name}.toml")).is_file():
        return UnknownDevice(f"no device named {name!r}; there is a file of that name here: write {str(file)!r}")
    return UnknownDevice(
        f"no device named {name!r}; {'closest' if close else 'there is'}: {', '.join(names)}. `edge-opt devices` "
        f"lists all; to add one, put a TOML file in {user_folder()}, or pass its path"
    )


def load_device(path: str | os.PathLike[str]) -> DeviceSpec:
    """Read the device that a TOML or JSON file describes; both have the same keys."""
    file = Path(path)
    if file.suffix.lower() not in SUFFIXES:
        raise InvalidDevice(f"{str(path)!r} is not a device file; it must end in {' or '.join(SUFFIXES)}")
    return spec_from(read_table(file), str(path))


def read_table(path: Path) -> Mapping[str, Any]:
    """Read what a TOML or JSON file holds, of a device, a platform or a calibration."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UnknownDevice(f"no file {str(path)!r}; `edge-opt devices` lists what is there without one") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidDevice(f"cannot read {str(path)!r}: {error}") from error
    is_json = path.suffix.lower() == ".json"
    try:
        data: Any = json.loads(text) if is_json else tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        language = "JSON" if is_json else "TOML"
        raise InvalidDevice(f"{path} is not {language}, or is cut off: {error}") from error
    if not isinstance(data, Mapping):
        raise InvalidDevice(f"{path} holds a {type(data).__name__}; a device is a table with a name and figures")
    return data


def is_platform_table(table: Mapping[str, Any]) -> bool:
    """Return whether a file's contents are a fitted platform, such as `edge-opt board` writes, and no device."""
    return "costs" in table and "covariance" in table


def is_shipped(spec: DeviceSpec) -> bool:
    """Whether a device is as the catalogue has it; one that was changed, or is a user's own, is not."""
    return spec.name in _bundled_names() and spec == _bundled_device(spec.name)


def user_folder() -> Path:
    """Return where the user's own device files are looked for; it need not exist."""
    return config_folder() / "devices"


def _bundled() -> tuple[DeviceSpec, ...]:
    return tuple(map(_bundled_device, _bundled_names()))


@cache
def _bundled_names() -> tuple[str, ...]:
    """Return the names of the catalogue's devices: each file is named after its device."""
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
    """Devices by name and alias; two that share one are an error that names both files."""
    found: dict[str, DeviceSpec] = {}
    for spec in specs:
        for name in (spec.name, *spec.aliases):
            other = found.setdefault(name, spec)
            if other is not spec:
                raise InvalidDevice(f"two devices are called {name!r}: {other.origin} and {spec.origin}; rename one")
    return found
