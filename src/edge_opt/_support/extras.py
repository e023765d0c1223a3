"""Optional packages: importing them, and the command that installs a missing one."""

from __future__ import annotations

import platform
from datetime import datetime, timezone
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from edge_opt.errors import MissingExtra, first_line


def missing_extra(what: str, package: str, extra: str, why: str = "") -> MissingExtra:
    """Return the error for an optional package that is absent or broken.

    Args:
        what: Who needs it, with the verb: "charts need", "the dataset 'digits' needs".
        package: Its name as people know it.
        extra: The extra of edge-opt that brings it.
        why: What is wrong with it where it is there but broken.

    >>> print(missing_extra("charts need", "matplotlib", "plots"))
    charts need matplotlib, which is not installed; run `pip install '.[plots]'` in a clone of edge-opt
    """
    state = f"cannot be imported ({why})" if why else "is not installed"
    return MissingExtra(f"{what} {package}, which {state}; run `pip install '.[{extra}]'` in a clone of edge-opt")


def import_optional(module: str, what: str, extra: str, package: str | None = None) -> Any:
    """Import a module; where it is absent or broken, raise MissingExtra with the command that installs it.

    Args:
        module: Its dotted name.
        what: Who needs it, with the verb; it starts the sentence.
        extra: The extra of edge-opt that brings it.
        package: Its name as people know it; the module's first part where that is the same.

    >>> import_optional("math", "this example needs", "run").tau > 6
    True
    """
    top = module.partition(".")[0]
    try:
        return import_module(module)
    # A build for other hardware fails in its own ways: OSError for a library, RuntimeError for an operator.
    except Exception as error:
        is_absent = isinstance(error, ModuleNotFoundError) and (error.name or top).partition(".")[0] == top
        raise missing_extra(what, package or top, extra, "" if is_absent else first_line(error)) from error


# Packages that are imported under another name than pip knows.
_PIP_NAMES = {"PIL": "pillow", "cv2": "opencv-python", "sklearn": "scikit-learn", "skimage": "scikit-image",
              "yaml": "pyyaml", "bs4": "beautifulsoup4", "google": "protobuf"}  # fmt: skip


def pip_name(module: str | None) -> str:
    """Return what pip installs for a module.

    >>> pip_name("PIL.Image"), pip_name("timm")
    ('pillow', 'timm')
    """
    top = (module or "").partition(".")[0]
    return _PIP_NAMES.get(top, top)


def installed(package: str) -> str | None:
    """Return the installed version of a package without importing it; None if it is not installed.

    >>> installed("no such package") is None
    True
    """
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def written_with() -> dict[str, str]:
    """Return the versions, system and time with which a page is written; measurements name their own machine.

    >>> sorted(written_with())
    ['Python', 'edge-opt', 'system', 'torch', 'written']
    """
    from edge_opt import __version__

    return {
        "edge-opt": __version__,
        "torch": installed("torch") or "not installed",
        "Python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "written": f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC",
    }
