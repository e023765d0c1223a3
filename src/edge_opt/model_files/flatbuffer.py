"""FlatBuffers without a schema: fields of a `.tflite` file by their number, read from the bytes without a copy."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from edge_opt.errors import UnreadableModel

# Tables may point at the same vector again and again: what is read in all is bounded, not only each part of it.
_MOST_READ = 4_000_000
_MOST_TEXT = 1 << 16
_POINTS_OUTSIDE = "it points outside itself; it is cut off or damaged"


class Flatbuffer:
    """The bytes of one file, and how many entries of vectors have been read from it."""

    __slots__ = ("data", "entries")

    def __init__(self, data: memoryview) -> None:
        self.data = data
        self.entries = 0

    def number(self, form: str, position: int) -> Any:
        """Return one number in the form of `struct`, such as "<i"."""
        if position < 0 or position + struct.calcsize(form) > len(self.data):
            raise UnreadableModel(_POINTS_OUTSIDE)
        return struct.unpack_from(form, self.data, position)[0]

    def vector(self, position: int, width: int) -> memoryview:
        """Return the bytes of a vector whose entries have `width` bytes."""
        count = self.number("<I", position)
        start = position + 4
        if start + count * width > len(self.data):
            raise UnreadableModel(_POINTS_OUTSIDE)
        return self.data[start : start + count * width]

    def count(self, entries: int) -> None:
        """Count entries that become Python objects."""
        self.entries += entries
        if self.entries > _MOST_READ:
            raise UnreadableModel(f"its vectors have more than {_MOST_READ:,} entries in all")

    def root(self) -> Table:
        return Table(self, self.number("<I", 0))


class Table:
    """One table: fields by their number in the schema. A field that is absent has its default."""

    __slots__ = ("_fields", "_file", "_length", "_position")

    def __init__(self, file: Flatbuffer, position: int) -> None:
        self._file = file
        self._position = position
        self._fields = position - file.number("<i", position)
        self._length = file.number("<H", self._fields)

    def _position_of(self, number: int) -> int | None:
        """Return where a field lies; None where it is absent."""
        entry = 4 + 2 * number
        if entry + 2 > self._length:
            return None
        offset = self._file.number("<H", self._fields + entry)
        return self._position + offset if offset else None

    def _target(self, number: int) -> int | None:
        """Return where a field points to; None where it is absent."""
        position = self._position_of(number)
        return None if position is None else position + self._file.number("<I", position)

    def number(self, number: int, form: str, default: Any = 0) -> Any:
        """Return a number, in a letter of `struct`: "b", "B", "i", "I", "q", "Q", "f" or "?"."""
        position = self._position_of(number)
        return default if position is None else self._file.number(f"<{form}", position)

    def raw(self, number: int) -> memoryview | None:
        """Return the bytes of a vector of bytes; None where it is absent."""
        target = self._target(number)
        return None if target is None else self._file.vector(target, 1)

    def text(self, number: int) -> str:
        encoded = self.raw(number)
        if encoded is not None and len(encoded) > _MOST_TEXT:
            raise UnreadableModel(f"it has a name of {len(encoded):,} letters")
        self._file.count(1)
        return "" if encoded is None else bytes(encoded).decode("utf-8", "replace")

    def numbers(self, number: int, form: str = "i") -> tuple[Any, ...]:
        """Return a vector of numbers; empty where it is absent."""
        target = self._target(number)
        if target is None:
            return ()
        kind = np.dtype({"i": "<i4", "q": "<i8", "f": "<f4"}[form])
        numbers = np.frombuffer(self._file.vector(target, kind.itemsize), kind)
        self._file.count(len(numbers) + 1)
        return tuple(numbers.tolist())

    def table(self, number: int) -> Table | None:
        target = self._target(number)
        return None if target is None else Table(self._file, target)

    def tables(self, number: int) -> list[Table]:
        """Return a vector of tables; empty where it is absent."""
        target = self._target(number)
        if target is None:
            return []
        offsets = np.frombuffer(self._file.vector(target, 4), "<u4").tolist()
        self._file.count(len(offsets) + 1)
        return [Table(self._file, target + 4 + 4 * index + offset) for index, offset in enumerate(offsets)]
