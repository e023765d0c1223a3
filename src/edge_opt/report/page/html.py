"""One self-contained HTML file: the template with its style, its scripts, the chart library and the data inside."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from edge_opt.errors import InvalidInput, MissingExtra
from edge_opt.files import write_whole
from edge_opt.records import ModelProfile, Sensitivity, SweepResult
from edge_opt.report.page.payload import payload

_STYLES = ("style.css", "parts.css")
_SCRIPTS = ("units.js", "dom.js", "table.js", "layers.js", "charts.js", "roofline.js", "sweep.js", "page.js")
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
) -> Path:
    """Write what is given as one HTML page that needs neither network nor server, and return its path.

    `devices` are those whose rooflines it can show; a usual few unless given.
    """
    text = page_text(
        payload(
            profile=profile,
            sweep=sweep,
            sensitivity=sensitivity,
            reproducibility=reproducibility,
            summary=summary,
            extra_profiles=extra_profiles,
            devices=devices,
            title=title,
        )
    )
    try:
        return write_whole(path, text)
    except OSError as error:
        raise InvalidInput(f"cannot write {str(path)!r}: {error.strerror or error}") from error


def page_text(data: Mapping[str, Any]) -> str:
    """The page that shows this data."""
    script = _joined(_SCRIPTS)
    library = _plotly()
    parts = {
        "title": html.escape(str(data["title"])),
        "policy": _policy(script, library),
        "style": _joined(_STYLES),
        "data": embedded(data),
        "script": script,
        "plotly": library,
    }
    # One pass, so that nothing inside a part is taken for a place.
    return _PLACE.sub(lambda found: parts[found[1]], _asset("page.html"))


def embedded(data: Any) -> str:
    r"""The data as JSON that can stand inside a script element, whatever text is in it.

    >>> embedded({"name": "</script>&"})
    '{"name": "\\u003c/script\\u003e\\u0026"}'
    """
    text = json.dumps(data, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _policy(*scripts: str) -> str:
    """Only these scripts may run, and nothing may be fetched: held by the browser, not by our good intentions."""
    hashes = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{value}'" for value in hashes)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; "
        "img-src data: blob:; form-action 'none'; base-uri 'none'"
    )


def _asset(name: str) -> str:
    return (resources.files("edge_opt.report.page") / "assets" / name).read_text(encoding="utf-8")


def _joined(names: Sequence[str]) -> str:
    return "\n".join(map(_asset, names))


def _plotly() -> str:
    spec = find_spec("plotly")
    folder = next(iter(spec.submodule_search_locations or []), None) if spec else None
    path = Path(folder or "") / "package_data" / "plotly.min.js"
    if folder is None or not path.is_file():
        raise MissingExtra("an HTML report needs plotly; run `pip install 'edge-opt[report]'`")
    return path.read_text(encoding="utf-8")
