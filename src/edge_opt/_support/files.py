"""Write files completely or not at all, and read large files without loading them."""

from __future__ import annotations

import atexit
import contextlib
import mmap
import os
import secrets
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from edge_opt.errors import ConversionFailed, EdgeOptError, InvalidInput

Writer = TypeVar("Writer")


def writer_for(path: str | os.PathLike[str], writers: Mapping[str, Writer]) -> Writer:
    """Return the writer for the path's suffix; a double suffix such as `.trace.json` is looked up first."""
    suffixes = [suffix.lower() for suffix in Path(path).suffixes]
    for suffix in ("".join(suffixes[-2:]), *suffixes[-1:]):
        if suffix in writers:
            return writers[suffix]
    problem = f"the suffix {suffixes[-1]!r}" if suffixes else "no suffix"
    raise InvalidInput(f"cannot write {str(path)!r}: it has {problem}; use one of {', '.join(sorted(writers))}")


def write_named(path: str | os.PathLike[str], content: str, refusal: type[EdgeOptError] = InvalidInput) -> Path:
    """Write a file that a user named, completely or not at all; raise `refusal` where it cannot be written."""
    try:
        return write_whole(path, content)
    except (OSError, ValueError) as error:  # a NUL in the path is a ValueError
        raise refusal(f"cannot write {str(path)!r}: {getattr(error, 'strerror', None) or error}") from error


def write_whole(path: str | os.PathLike[str], content: str | bytes) -> Path:
    """Write a file and its folders; after an error the old file, if any, is unchanged.

    The new content replaces the old file in one rename, which survives `kill -9`. It is not forced to the disk before
    (no fsync), so a power failure may lose it: results can be computed again, and syncing each file costs seconds;
    `sync_folder` does it for what a sweep records. What is not a regular file, such as /dev/stdout or a pipe, is
    written to and stays what it is.
    """
    target = Path(os.path.realpath(path))
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f".{target.name[:100]}.{secrets.token_hex(4)}.tmp")
    try:
        data = content.encode("utf-8", errors="backslashreplace") if isinstance(content, str) else content
        if target.exists() and not target.is_file():
            with Path(path).open("wb", buffering=0) as device:
                device.write(data)
        else:
            draft.write_bytes(data)
            draft.replace(target)
    except BaseException as error:
        with contextlib.suppress(OSError):
            draft.unlink()
        if isinstance(error, OSError):
            # The error names the file that the caller asked for, not the draft; of a full disk it names none.
            error.filename, error.filename2 = str(path), None
        raise
    return Path(path)


def check_writable(path: str | os.PathLike[str]) -> None:
    """Refuse a path that cannot be written, before work that takes long; leave nothing there."""
    try:
        folder = Path(os.path.realpath(path)).parent
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise InvalidInput(f"cannot write {str(path)!r}: {error.strerror or error}") from error


def sync_folder(folder: Path) -> None:
    """Force the files of a folder and its own entry to the disk, so that they survive a power failure."""
    for path in (*folder.rglob("*"), folder, folder.parent):
        if path.is_dir() or path.is_file():
            number = os.open(path, os.O_RDONLY)
            try:
                os.fsync(number)
            finally:
                os.close(number)


def check_regular(path: Path) -> None:
    """Raise OSError for a pipe or a device: opening one could wait forever, and reading the other never end."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError("it is a folder, a pipe or a device, not a file")


def mapped(path: Path) -> memoryview:
    """Return the bytes of a file, read from the disk only where they are used; raise ValueError if it is empty."""
    check_regular(path)
    with path.open("rb") as handle:
        # The mapping is closed when its last slice is freed.
        return memoryview(mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ))


@contextlib.contextmanager
def staging(folder: str | os.PathLike[str], failure: type[EdgeOptError] = ConversionFailed) -> Iterator[Path]:
    """Yield a folder inside the target, on the same disk, and delete it afterwards."""
    target = Path(folder)
    is_new = not target.exists()
    try:
        target.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target, prefix=".edge-opt-", ignore_cleanup_errors=True) as aside:
            yield Path(aside)
    except OSError as error:
        if error.errno is None:  # of the caller's own code, not of a disk
            raise
        what = error.strerror or str(error)
        if is_new:
            with contextlib.suppress(OSError):
                target.rmdir()
        raise failure(
            f"cannot write to {str(target)!r}: {what}; free some space or choose another folder. Nothing was left there"
        ) from error


def publish(files: list[Path], folder: str | os.PathLike[str]) -> list[Path]:
    """Move finished files into the folder in this order, so that a file that names others comes last."""
    return [file.replace(Path(folder) / file.name) for file in files]


def config_folder() -> Path:
    """Return the folder of the user's own device files and calibrations; it need not exist."""
    if sys.platform == "win32":
        base = Path(os.environ.get("APPDATA") or Path.home() / "AppData" / "Roaming")
    elif sys.platform == "darwin" and "XDG_CONFIG_HOME" not in os.environ:
        base = Path.home() / "Library" / "Application Support"
    else:
        base = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return base / "edge-opt"


def own_folder() -> Path:
    """Return a new folder for temporary files; it is deleted when the process ends."""
    folder = Path(tempfile.mkdtemp(prefix="edge-opt-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
