"""Run folders: which of a run's files are there, read for a page."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from edge_opt.errors import InvalidInput
from edge_opt.report.page.html import write_page
from edge_opt.report.sensitivities import read_sensitivity
from edge_opt.report.sweeps import load_sweep
from edge_opt.report.writers import load

_PARTS = ("sensitivity", "reproducibility", "summary")
FILES = ("profile.json", "sweep.json", *(f"{name}.json" for name in _PARTS))


def write_report(
    source: str | os.PathLike[str],
    path: str | os.PathLike[str] | None = None,
    *,
    devices: Sequence[str] | None = None,
    title: str | None = None,
) -> Path:
    """Write the page of a run folder, or of one profile or sweep; beside it unless `path` says where."""
    origin = Path(source)
    if origin.is_dir():
        found = _read_folder(origin)
        target = origin / "report.html"
    elif origin.is_file():
        found = {_kind_of(origin): origin}
        target = origin.with_suffix(".html")
    else:
        raise InvalidInput(f"no folder or file {str(source)!r}; `edge-opt run` and `edge-opt profile -o` write them")
    parts: dict[str, Any] = {name: _object(found[name]) for name in _PARTS if name in found}
    if "sensitivity" in parts:
        parts["sensitivity"] = read_sensitivity(parts["sensitivity"], repr(str(found["sensitivity"])))
    if "profile" in found:
        parts["profile"] = load(found["profile"])
    if "sweep" in found:
        parts["sweep"] = load_sweep(found["sweep"])
    return write_page(path or target, devices=devices, title=title, **parts)


def _read_folder(folder: Path) -> dict[str, Path]:
    found = {Path(name).stem: folder / name for name in FILES if (folder / name).is_file()}
    if not found:
        raise InvalidInput(
            f"{str(folder)!r} is not a run: it has none of {', '.join(FILES)}; `edge-opt run` writes such a folder"
        )
    return found


def _kind_of(path: Path) -> str:
    """A single file is a sweep if it says so; else it must be a profile, whose reader explains what is wrong."""
    return "sweep" if '"edge_opt.sweep"' in _text(path)[:200] else "profile"


def _object(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(_text(path))
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{str(path)!r} is not JSON, or is cut off ({error}); run again, or remove it") from error
    if not isinstance(data, dict):
        raise InvalidInput(f"{str(path)!r} holds a {type(data).__name__}; expected an object")
    return data


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"cannot read {str(path)!r}: {error}") from error
