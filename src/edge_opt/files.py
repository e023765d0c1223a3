"""Files that are written as a whole: a reader sees the old one or the new one, never half of one."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path


def write_whole(path: str | os.PathLike[str], content: str | bytes) -> Path:
    """Put a file in place, folders included; after an error the old file, if any, is as it was."""
    target = Path(os.path.realpath(path))
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f".{target.name[:100]}.{secrets.token_hex(4)}.tmp")
    try:
        data = content.encode("utf-8", errors="backslashreplace") if isinstance(content, str) else content
        draft.write_bytes(data)
        draft.replace(target)
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise
    return Path(path)
