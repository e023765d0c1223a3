"""The HTML page: everything known about a model or a sweep, in one file that needs no network."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from edge_opt._support.extras import missing_extra
from edge_opt._support.files import write_named
from edge_opt._support.json import read_document
from edge_opt.errors import InvalidInput
from edge_opt.records.compression import Sensitivity
from edge_opt.records.profiles import ModelProfile
from edge_opt.records.sweeps import SweepResult
from edge_opt.report.figures import read_sensitivity
from edge_opt.report.page_data import page_data
from edge_opt.report.runs_page import Run, runs_data
from edge_opt.report.save import FORMAT as PROFILE_FORMAT
from edge_opt.report.save import load
from edge_opt.report.sweep_files import FORMAT as SWEEP_FORMAT
from edge_opt.report.sweep_files import load_sweep

_STYLES = ("style.css", "parts.css")
_SCRIPTS = ("units.js", "dom.js", "table.js", "layers.js", "charts.js", "roofline.js", "sweep.js", "runs.js", "page.js")
_PLACE = re.compile(r"\{\{(\w+)\}\}")


def write_page(
    path: str | os.PathLike[str],
    *,
    profile: ModelProfile | None = None,
    sweep: SweepResult | None = None,
    sensitivity: Sensitivity | None = None,
    reproducibility: Mapping[str, Any] | None = None,
    summary: Mapping[str, Any] | None = None,
    extra_profiles: Sequence[ModelProfile] = (),
    devices: Sequence[str] | None = None,
    title: str | None = None,
    file: str | None = None,
) -> Path:
    """Write what is given as one HTML page that needs neither network nor server, and return its path.

    Args:
        path: The file to write.
        profile: What a model costs, layer by layer.
        sweep: Candidates with their results.
        sensitivity: What each layer's change costs.
        reproducibility: What the results rest on: versions, seeds, checksums.
        summary: The summary of a run.
        extra_profiles: Other models, to compare `profile` with.
        devices: Names of devices whose rooflines it shows; default: those of the predictions in `profile`.
        title: Title of the page; made from what is given unless set.
        file: The file to ship, as the page names it.
    """
    data = page_data(
        profile=profile,
        sweep=sweep,
        sensitivity=sensitivity,
        reproducibility=reproducibility,
        summary=summary,
        extra_profiles=extra_profiles,
        devices=devices,
        title=title,
        file=file,
    )
    return write_named(path, page_text(data))


def shipped_file(folder: Path) -> Path | None:
    """Return the model to ship in the folder of a run; None where there is none."""
    files = sorted((folder / "best").glob("model.*"))
    # The weights in float32 beside it are for further training.
    return next((file for file in files if file.suffix != ".safetensors"), None)


def page_text(data: Mapping[str, Any]) -> str:
    """Return the page that shows this data."""
    script = _joined(_SCRIPTS)
    library, packed, packed_bytes = _packed(_plotly())
    parts = {
        "title": html.escape(str(data["title"])),
        "policy": _policy(script, library),
        "style": _joined(_STYLES),
        "data": embedded(data),
        "script": script,
        "plotly": packed,
        "plotly_bytes": str(packed_bytes),
    }
    # One pass, so that nothing inside a part is taken for a place.
    return _PLACE.sub(lambda place: parts[place[1]], _asset("page.html"))


def embedded(data: Any) -> str:
    r"""Return the data as JSON that can stand inside a script element, whatever text is in it.

    >>> embedded({"name": "</script>&"})
    '{"name": "\\u003c/script\\u003e\\u0026"}'
    """
    try:
        text = json.dumps(data, allow_nan=False)
    except ValueError as error:  # only a damaged file has infinity
        raise InvalidInput("a figure of the page is not a finite number; measure the model again") from error
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _policy(*scripts: str) -> str:
    """Return the content security policy: only these scripts may run, and nothing may be fetched."""
    # The browser hashes the exact bytes between the script tags, so the template may add no space or newline there.
    # The block of data needs no hash: its type is JSON, which browsers do not run. Plotly writes inline styles, for
    # which there is no hash in advance; a style cannot fetch anything under `default-src 'none'`.
    hashes = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{value}'" for value in hashes)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; "
        "img-src data: blob:; form-action 'none'; base-uri 'none'"
    )


def _asset(name: str) -> str:
    return (resources.files("edge_opt.report") / "assets" / name).read_text(encoding="utf-8")


def _joined(names: Sequence[str]) -> str:
    return "\n".join(map(_asset, names))


def _plotly() -> Path:
    spec = find_spec("plotly")
    folder = next(iter(spec.submodule_search_locations or []), None) if spec else None
    path = Path(folder or "") / "package_data" / "plotly.min.js"
    if folder is None or not path.is_file():
        raise missing_extra("an HTML report needs", "plotly", "report")
    return path


@cache
def _packed(library: Path) -> tuple[str, str, int]:
    """Return the chart library, and the same packed for the page: a third of its size, with the bytes before padding.

    Packing takes half a second. Base 85 needs six per cent less than base 64.
    """
    text = library.read_text(encoding="utf-8")
    packed = zlib.compress(text.encode(), level=9)
    # "<" could begin a comment in the page, and "," is not in the alphabet; page.js reads it back.
    return text, base64.b85encode(packed, pad=True).decode().replace("<", ","), len(packed)


def _object(path: Path) -> dict[str, Any]:
    data = read_document(path, InvalidInput, "run again, or remove it")
    if not isinstance(data, dict):
        raise InvalidInput(f"{str(path)!r} holds a {type(data).__name__}; expected an object")
    return data


# How the parts of a run are read, by the names of their files.
_READERS: dict[str, Callable[[Path], Any]] = {
    "profile": load,
    "sweep": load_sweep,
    "sensitivity": lambda path: read_sensitivity(_object(path), repr(str(path))),
    "reproducibility": _object,
    "summary": _object,
}
FILES = tuple(f"{name}.json" for name in _READERS)


def write_report(
    source: str | os.PathLike[str],
    path: str | os.PathLike[str] | None = None,
    *,
    devices: Sequence[str] | None = None,
    title: str | None = None,
) -> Path:
    """Write the page of a run folder, or of one profile or sweep; beside it unless `path` says where."""
    origin = Path(source)
    return write_page(path or _page_of(origin), devices=devices, title=title, **_parts(origin))


def _page_of(origin: Path) -> Path:
    return origin / "report.html" if origin.is_dir() else origin.with_suffix(".html")


def _parts(origin: Path) -> dict[str, Any]:
    """Return what a folder or a file holds, read, under the names of `write_page`'s parameters."""
    if origin.is_dir():
        files = _files(origin)
    elif origin.is_file():
        # A single file is a sweep if it says so; else it must be a profile, whose reader explains what is wrong.
        files = {"sweep" if f'"{SWEEP_FORMAT}"' in _text(origin)[:200] else "profile": origin}
    else:
        raise InvalidInput(f"no folder or file {str(origin)!r}; `edge-opt run` and `edge-opt profile -o` write them")
    if not files:
        raise InvalidInput(f"{str(origin)!r} is not a run, and holds none of {', '.join(FILES)}; see `edge-opt run`")
    parts = {name: read(files[name]) for name, read in _READERS.items() if name in files}
    shipped = shipped_file(origin)
    if shipped is not None:
        parts["file"] = f"best/{shipped.name}"
    return parts


def _files(folder: Path) -> dict[str, Path]:
    return {Path(name).stem: folder / name for name in FILES if (folder / name).is_file()}


def runs_in(source: str | os.PathLike[str]) -> list[Path]:
    """Return the runs and saved profiles in a folder, oldest first; none where it is a run itself, or a file."""
    folder = Path(source)
    if not folder.is_dir() or _files(folder):
        return []

    def is_saved(path: Path) -> bool:
        return path.suffix == ".json" and any(f'"{it}"' in _text(path)[:200] for it in (PROFILE_FORMAT, SWEEP_FORMAT))

    def first_written(run: Path) -> float:
        return min(file.stat().st_mtime for file in (_files(run).values() if run.is_dir() else [run]))

    runs = [item for item in folder.iterdir() if (_files(item) if item.is_dir() else is_saved(item))]
    return sorted(runs, key=lambda run: (first_written(run), run.name))


def write_runs(
    sources: Sequence[str | os.PathLike[str]],
    path: str | os.PathLike[str] | None = None,
    *,
    devices: Sequence[str] | None = None,
    title: str | None = None,
) -> Path:
    """Write one page over several runs: side by side, what changed, and a link to the page of each.

    A run without a page of its own gets one.

    Args:
        sources: Folders of runs, folders that hold runs, or profiles and sweeps saved as .json; in the order in which
            each is compared with the one before.
        path: The file to write; `runs.html` in the folder that all have in common unless given.
        devices: As for `write_page`, for pages that are written.
        title: Title of the page.
    """
    origins = [run for source in sources for run in (runs_in(source) or [Path(source)])]
    common = Path(os.path.commonpath([origin.resolve().parent for origin in origins]))
    target = Path(path) if path is not None else common / "runs.html"
    runs = []
    for origin in origins:
        parts = _parts(origin)
        page = _page_of(origin)
        if not page.is_file():
            write_page(page, devices=devices, **parts)
        kept = {name: parts.get(name) for name in ("profile", "sweep", "reproducibility")}
        name = os.path.relpath(origin.resolve(), common)
        runs.append(Run(name=name.removesuffix(".json"), source=origin, page=page.resolve(), **kept))
    return write_named(target, page_text(runs_data(runs, target.resolve().parent, title)))


def _text(path: Path) -> str:
    if path.suffix.lower() in (".onnx", ".tflite", ".pt2"):
        raise InvalidInput(f"{str(path)!r} is a model; `edge-opt report {path}` writes its page, and "
                           "`edge-opt compare A B -o page.html` that of two")  # fmt: skip
    return str(read_document(path, InvalidInput, "name a run, a profile or a sweep", str))
