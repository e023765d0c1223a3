"""What it takes to get the same table again: configuration, seeds, versions, machine, data, command, commit."""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from edge_opt import __version__
from edge_opt.measure.environment import read_environment

PACKAGES = ("torch", "numpy", "pandas", "onnx", "onnxruntime", "onnxscript", "openvino", "safetensors",
            "scikit-learn", "optuna", "distributed", "pydantic")  # fmt: skip


def reproducibility(
    config: Mapping[str, Any], checksums: Sequence[tuple[str, str]], sizes: Mapping[str, int], command: Sequence[str]
) -> dict[str, Any]:
    """Everything the result depends on, as JSON holds it; measured times depend on the machine's load, too."""
    return {
        "config": dict(config),
        "seeds": {"seed": config.get("seed"), "dataloader_seed": config.get("dataloader_seed")},
        "versions": {"edge_opt": __version__, "python": platform.python_version(), **versions()},
        "machine": asdict(read_environment()),
        "data": {"sha256": dict(checksums), "samples": dict(sizes)},
        "command": list(command),
        "commit": commit(Path.cwd()),
        "note": "same seed, same table; measured times and what follows from them aside",
    }


def versions() -> dict[str, str | None]:
    """Installed packages that results depend on; None for those that are not here."""
    return {name: _version(name) for name in PACKAGES}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def commit(folder: Path) -> str | None:
    """The commit that is checked out in a folder, with `+changes` where files differ; None outside of git."""
    try:
        head = _git(folder, "rev-parse", "HEAD")
        return f"{head}+changes" if _git(folder, "status", "--porcelain", "--untracked-files=no") else head
    except (OSError, subprocess.SubprocessError):
        return None


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
        timeout=10,
        stdin=subprocess.DEVNULL,
    )
    return done.stdout.strip()


def command_line() -> list[str]:
    """The command as it was given."""
    return [Path(sys.argv[0]).name, *sys.argv[1:]]
