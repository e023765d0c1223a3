"""idx files, plain or compressed: the format of MNIST and its successors."""

from __future__ import annotations

import gzip
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edge_opt.errors import DataNotFound

Bytes = npt.NDArray[np.uint8]
_UNSIGNED_BYTE = 0x08


def read_idx(path: Path, dimensions: int) -> Bytes:
    """The array of unsigned bytes in an idx file; a damaged or foreign file is named with what is wrong with it."""
    return parse_idx(content_of(path), dimensions, path)


def content_of(path: Path) -> bytes:
    """The bytes of a file, unpacked if its name ends in .gz."""
    try:
        raw = path.read_bytes()
        return gzip.decompress(raw) if path.suffix == ".gz" else raw
    except OSError as error:  # gzip.BadGzipFile is one, too
        raise DataNotFound(f"{path} cannot be read: {error}; get the file again") from error
    except (EOFError, zlib.error) as error:
        raise DataNotFound(f"{path} is damaged or cut short ({error}); get the file again") from error


def parse_idx(content: bytes, dimensions: int, path: Path) -> Bytes:
    """The array that the bytes of an idx file describe; `path` is for the error.

    >>> parse_idx(bytes([0, 0, 8, 1, 0, 0, 0, 2, 7, 9]), 1, Path("labels")).tolist()
    [7, 9]
    """
    header = 4 * (1 + dimensions)
    if len(content) < header or content[:3] != bytes([0, 0, _UNSIGNED_BYTE]) or content[3] != dimensions:
        found = content[:4].hex() or "nothing"
        raise DataNotFound(
            f"{path} is not an idx file of bytes in {dimensions} dimensions: it starts with {found}, "
            f"and 0000080{dimensions} was expected"
        )
    shape = struct.unpack(f">{dimensions}I", content[4:header])
    wanted: Any = int(np.prod(shape, dtype=np.int64))
    if len(content) - header != wanted:
        raise DataNotFound(
            f"{path} should hold {wanted} values ({' x '.join(map(str, shape))}) and holds {len(content) - header}; "
            "get the file again"
        )
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape)
