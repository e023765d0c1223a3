"""The catalogue: every device there is a file for, ours and the user's, by name."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from edge_opt.devices.spec import normalized, spec_from
from edge_opt.errors import InvalidDevice, UnknownDevice
from edge_opt.records import DeviceSpec

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
    """One device: by name or alias, or from a file of your own (.toml or .json).

    >>> device("Raspberry Pi 4").bandwidth("datasheet").value
    9600000000.0
    """
    if isinstance(name, DeviceSpec):
        return name
    if not isinstance(name, (str, os.PathLike)):
        raise UnknownDevice(f"a device is a name, a file or a DeviceSpec; got {name!r}")
    if not isinstance(name, str) or Path(name).suffix.lower() in SUFFIXES:
        return load_device(name)
    found = _by_name(devices())
    wanted = normalized(name)
    if wanted not in found:
        close = get_close_matches(wanted, found, n=3, cutoff=0.5)
        names = (
            list(dict.fromkeys(found[match].name for match in close)) or sorted({s.name for s in found.values()})[:5]
        )
        raise UnknownDevice(
            f"no device named {name!r}; {'closest' if close else 'there is'}: {', '.join(names)}. `edge-opt devices` "
            f"lists all; to add one, put a TOML file in {user_folder()}, or pass its path"
        )
    return found[wanted]


def load_device(path: str | os.PathLike[str]) -> DeviceSpec:
    """The device that a TOML or JSON file describes; both have the same keys."""
    file = Path(path)
    if file.suffix.lower() not in SUFFIXES:
        raise InvalidDevice(f"{str(path)!r} is not a device file; it must end in {' or '.join(SUFFIXES)}")
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UnknownDevice(f"no file {str(path)!r}; `edge-opt devices` lists what is there without one") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidDevice(f"cannot read {str(path)!r}: {error}") from error
    return _parsed(text, str(path))


def user_folder() -> Path:
    """Where the user's own device files are looked for; it need not exist."""
    if sys.platform == "win32":
        base = Path(os.environ.get("APPDATA") or Path.home() / "AppData" / "Roaming")
    elif sys.platform == "darwin" and "XDG_CONFIG_HOME" not in os.environ:
        base = Path.home() / "Library" / "Application Support"
    else:
        base = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return base / "edge-opt" / "devices"


def _parsed(text: str, origin: str) -> DeviceSpec:
    is_json = origin.lower().endswith(".json")
    try:
        data: Any = json.loads(text) if is_json else tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        language = "JSON" if is_json else "TOML"
        raise InvalidDevice(f"{origin} is not {language}, or is cut off: {error}") from error
    if not isinstance(data, Mapping):
        raise InvalidDevice(f"{origin} holds a {type(data).__name__}; a device is a table with a name and figures")
    return spec_from(data, origin)


@cache
def _bundled() -> tuple[DeviceSpec, ...]:
    files = (resources.files("edge_opt.devices") / "data").iterdir()
    return tuple(_parsed(file.read_text(encoding="utf-8"), file.name) for file in files if file.name.endswith(".toml"))


def _own() -> Iterator[DeviceSpec]:
    folder = user_folder()
    if folder.is_dir():
        for path in sorted(folder.iterdir()):
            if path.suffix.lower() in SUFFIXES:
                yield load_device(path)


def _by_name(specs: tuple[DeviceSpec, ...]) -> dict[str, DeviceSpec]:
    """Devices by name and alias; two that share one are an error that names both files."""
    found: dict[str, DeviceSpec] = {}
    for spec in specs:
        for name in (spec.name, *spec.aliases):
            other = found.setdefault(name, spec)
            if other is not spec:
                raise InvalidDevice(f"two devices are called {name!r}: {other.origin} and {spec.origin}; rename one")
    return found
