"""FlatBuffers as bytes: tables and vectors by their place in a file, without a schema compiler and without a copy."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from edge_opt.errors import UnreadableModel

# Tables may point at the same vector again and again: what is read in all is bounded, not only each part of it.
_MOST_READ = 4_000_000
_MOST_TEXT = 1 << 16
_ENDS_EARLY = "it points outside itself; it is cut off or damaged"


class Flatbuffer:
    """The bytes of one file, and how many entries of vectors have been read from it."""

    __slots__ = ("data", "entries")

    def __init__(self, data: memoryview) -> None:
        self.data = data
        self.entries = 0

    def number(self, form: str, position: int) -> Any:
        """One number in the form of `struct`, such as "<i"."""
        if position < 0 or position + struct.calcsize(form) > len(self.data):
            raise UnreadableModel(_ENDS_EARLY)
        return struct.unpack_from(form, self.data, position)[0]

    def vector(self, position: int, width: int) -> memoryview:
        """The bytes of a vector whose entries have `width` bytes."""
        count = self.number("<I", position)
        start = position + 4
        if start + count * width > len(self.data):
            raise UnreadableModel(_ENDS_EARLY)
        return self.data[start : start + count * width]

    def counted(self, entries: int) -> None:
        """Note entries that become Python objects."""
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

    def _place(self, number: int) -> int | None:
        entry = 4 + 2 * number
        if entry + 2 > self._length:
            return None
        offset = self._file.number("<H", self._fields + entry)
        return self._position + offset if offset else None

    def _target(self, number: int) -> int | None:
        """Where a field points to."""
        place = self._place(number)
        return None if place is None else place + self._file.number("<I", place)

    def number(self, number: int, form: str, default: Any = 0) -> Any:
        """A number, in a letter of `struct`: "b", "B", "i", "I", "q", "Q", "f" or "?"."""
        place = self._place(number)
        return default if place is None else self._file.number(f"<{form}", place)

    def raw(self, number: int) -> memoryview | None:
        """The bytes of a vector of bytes; None where it is absent."""
        target = self._target(number)
        return None if target is None else self._file.vector(target, 1)

    def text(self, number: int) -> str:
        found = self.raw(number)
        if found is not None and len(found) > _MOST_TEXT:
            raise UnreadableModel(f"it has a name of {len(found):,} letters")
        self._file.counted(1)
        return "" if found is None else bytes(found).decode("utf-8", "replace")

    def numbers(self, number: int, form: str = "i") -> tuple[Any, ...]:
        """A vector of numbers; empty where it is absent."""
        target = self._target(number)
        if target is None:
            return ()
        kind = np.dtype({"i": "<i4", "q": "<i8", "f": "<f4"}[form])
        found = self._file.vector(target, kind.itemsize)
        self._file.counted(len(found) // kind.itemsize + 1)
        return tuple(np.frombuffer(found, kind).tolist())

    def table(self, number: int) -> Table | None:
        target = self._target(number)
        return None if target is None else Table(self._file, target)

    def tables(self, number: int) -> list[Table]:
        """A vector of tables; empty where it is absent."""
        target = self._target(number)
        if target is None:
            return []
        offsets = np.frombuffer(self._file.vector(target, 4), "<u4").tolist()
        self._file.counted(len(offsets) + 1)
        return [Table(self._file, target + 4 + 4 * place + offset) for place, offset in enumerate(offsets)]
