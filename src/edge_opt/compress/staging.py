"""Files that appear only when all of them are good: written aside, then moved into place."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from edge_opt.errors import ConversionFailed


@contextmanager
def staging(folder: str | os.PathLike[str]) -> Iterator[Path]:
    """A folder beside the target, on the same disk, that is gone afterwards, whatever happened."""
    target = Path(folder)
    try:
        target.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target, prefix=".edge-opt-", ignore_cleanup_errors=True) as aside:
            yield Path(aside)
    except OSError as error:
        what = error.strerror or str(error)
        raise ConversionFailed(
            f"cannot write to {str(target)!r}: {what}; free some space or choose another folder. Nothing was left there"
        ) from error


def publish(files: list[Path], folder: str | os.PathLike[str]) -> list[Path]:
    """Move finished files into place; the last one is the one that names the others."""
    placed = []
    for file in files:
        target = Path(folder) / file.name
        file.replace(target)
        placed.append(target)
    return placed


def own_folder() -> Path:
    """A folder for files that nobody asked to keep; it goes when the process ends."""
    folder = Path(tempfile.mkdtemp(prefix="edge-opt-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def with_data(path: Path) -> list[Path]:
    """An ONNX file and the weights beside it, weights first: the file must never name data that is not there yet."""
    data = path.with_name(f"{path.name}.data")
    return [data, path] if data.exists() else [path]


def size_of(path: Path) -> int:
    """Bytes on disk, weights beside the file included."""
    return sum(file.stat().st_size for file in with_data(path))
