"""Files that appear whole, or not at all; and files looked into without being read."""

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


def by_suffix(path: str | os.PathLike[str], writers: Mapping[str, Writer]) -> Writer:
    """What writes a file of that name; an ending that nobody writes is refused."""
    found = writers.get(Path(path).suffix.lower())
    if found is None:
        raise InvalidInput(f"cannot write {str(path)!r}; the name must end in {', '.join(writers)}")
    return found


def writer_for(path: str | os.PathLike[str], writers: Mapping[str, Writer]) -> Writer:
    """The writer that the suffix chooses, a double one such as `.trace.json` first."""
    suffixes = [suffix.lower() for suffix in Path(path).suffixes]
    suffix = next((one for one in ("".join(suffixes[-2:]), *suffixes[-1:]) if one in writers), "".join(suffixes[-1:]))
    if suffix not in writers:
        what = f"the suffix {suffix!r}" if suffix else "no suffix"
        raise InvalidInput(f"cannot write {str(path)!r}: it has {what}; use one of {', '.join(sorted(writers))}")
    return writers[suffix]


def write_named(path: str | os.PathLike[str], content: str, refusal: type[EdgeOptError] = InvalidInput) -> Path:
    """`write_whole` for a file that a user named: where it cannot be written, one sentence says why."""
    try:
        return write_whole(path, content)
    except OSError as error:
        raise refusal(f"cannot write {str(path)!r}: {error.strerror or error}") from error


def write_whole(path: str | os.PathLike[str], content: str | bytes) -> Path:
    """Put a file in place, folders included; after an error the old file, if any, is as it was."""
    target = Path(os.path.realpath(path))
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f".{target.name[:100]}.{secrets.token_hex(4)}.tmp")
    try:
        data = content.encode("utf-8", errors="backslashreplace") if isinstance(content, str) else content
        draft.write_bytes(data)
        draft.replace(target)
    except BaseException as error:
        with contextlib.suppress(OSError):
            draft.unlink()
        if isinstance(error, OSError):  # of the file that was asked for, not of the draft; a full disk names none
            error.filename, error.filename2 = str(path), None
        raise
    return Path(path)


def check_writable(path: str | os.PathLike[str]) -> None:
    """Refuse a file that cannot be written, before work that takes long; nothing is left there."""
    try:
        folder = Path(os.path.realpath(path)).parent
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise InvalidInput(f"cannot write {str(path)!r}: {error.strerror or error}") from error


def mapped(path: Path) -> memoryview:
    """The bytes of a file, which are read from the disk where somebody looks at them; ValueError for an empty one.

    A pipe or a device is refused before it is opened: opening it could wait for ever.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError("it is a folder, a pipe or a device, and no file")
    with path.open("rb") as handle:
        # The map goes when the last slice of it goes.
        return memoryview(mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ))


@contextlib.contextmanager
def staging(folder: str | os.PathLike[str], failure: type[EdgeOptError] = ConversionFailed) -> Iterator[Path]:
    """A folder beside the target, on the same disk, that is gone afterwards, whatever happened."""
    target = Path(folder)
    is_new = not target.exists()
    try:
        target.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target, prefix=".edge-opt-", ignore_cleanup_errors=True) as aside:
            yield Path(aside)
    except OSError as error:
        what = error.strerror or str(error)
        if is_new:
            with contextlib.suppress(OSError):
                target.rmdir()
        raise failure(
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
    """A folder for files that nobody asked to keep; it goes when the process ends."""
    folder = Path(tempfile.mkdtemp(prefix="edge-opt-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
