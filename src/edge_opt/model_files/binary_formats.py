"""Files as bytes: mapped, and as protocol buffers or FlatBuffers, by number and place, without a schema or a copy."""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from edge_opt._support.files import mapped
from edge_opt.errors import ModelNotFound, UnreadableModel, message_of


@contextmanager
def bytes_of(path: str | os.PathLike[str]) -> Iterator[memoryview]:
    """The bytes of a model's file; what goes wrong while they are read is said in one sentence with its name."""
    try:
        yield mapped(Path(path))
    except FileNotFoundError:
        raise ModelNotFound(f"no file {str(path)!r}; the folder is {Path.cwd()}") from None
    except (UnreadableModel, OSError, ValueError) as error:  # an empty file cannot be mapped
        raise UnreadableModel(f"{str(path)!r} cannot be read: {message_of(error)}") from error


_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MOST_VARINT_BYTES = 10
_LONG_RUN_BYTES = 256
_MOST_FIELDS = 200_000  # beside those of the nodes
_MOST_NUMBERS = 16_000_000  # a forest of a million nodes and a half
_ENDS_EARLY = "it ends inside a number, or is no protocol buffer at all"


class Field(NamedTuple):
    """One field of a message.

    Attributes:
        number: Its number in the schema.
        value: An integer for a number, of a floating one its bits; an array of them where the same field comes many
            times in a row; for text, bytes and messages a slice of the file.
    """

    number: int
    value: int | memoryview | np.ndarray[Any, np.dtype[np.uint64]]

    @property
    def whole(self) -> int:
        """The value as a signed integer; of many the last."""
        if isinstance(self.value, memoryview):
            raise UnreadableModel(f"field {self.number} holds bytes where a number belongs")
        value = self.value if isinstance(self.value, int) else int(self.value[-1])
        return value - (1 << 64) if value >> 63 else value

    @property
    def single(self) -> float:
        """The value as a float of 32 bits."""
        found: float = struct.unpack("<f", struct.pack("<I", self.whole & 0xFFFFFFFF))[0]
        return found

    @property
    def view(self) -> memoryview:
        """The value's bytes."""
        if not isinstance(self.value, memoryview):
            raise UnreadableModel(f"field {self.number} holds a number where bytes belong")
        return self.value

    @property
    def text(self) -> str:
        return str(self.view, "utf-8", errors="replace")


class Wire:
    """Reads the messages of one file, and counts their fields: one of tiny fields alone would take minutes."""

    __slots__ = ("_left", "_most", "_numbers")

    def __init__(self) -> None:
        self._left = self._most = _MOST_FIELDS
        self._numbers = _MOST_NUMBERS

    def allow(self, count: int) -> None:
        """Let that many fields more be read: of a node, of a tensor."""
        self._left += count
        self._most += count

    def _count_numbers(self, count: int) -> None:
        self._numbers -= count
        if self._numbers < 0:
            raise UnreadableModel(f"its lists have more than {_MOST_NUMBERS:,} numbers")

    def fields(self, message: memoryview) -> Iterator[Field]:
        """The fields of a message, one after the other; UnreadableModel where the bytes end inside one."""
        position, end, looked_until = 0, len(message), 0
        while position < end:
            start = position
            key = message[position]
            if key < 0x80:
                position += 1
            else:
                key, position = _varint(message, position)
            number, kind = key >> 3, key & 7
            if not number:
                raise UnreadableModel(f"byte {position} starts a field without a number")
            self._left -= 1
            if self._left < 0:
                raise UnreadableModel(f"it has more than {self._most:,} fields, which is too many for its nodes")
            value: int | memoryview | np.ndarray[Any, np.dtype[np.uint64]]
            if kind == _BYTES:
                length, position = _varint(message, position)
                if length > end - position:
                    raise UnreadableModel(f"it ends after {end} bytes, inside a field of {length}")
                value = message[position : position + length]
                position += length
            elif kind == _VARINT:
                value, position = _varint(message, position)
            elif kind in (_FIXED32, _FIXED64):
                length = 4 if kind == _FIXED32 else 8
                value = int.from_bytes(_slice(message, position, length), "little")
                position += length
            else:
                raise UnreadableModel(f"byte {position} starts a field of the unknown kind {kind}")
            # Lists that are not packed: a forest has millions of numbers in a row, each with the key of its field.
            if kind != _BYTES and position < end and message[position] == key and start >= looked_until:
                looked_until = _run_end(message, start, key, kind)
                if looked_until - start > _LONG_RUN_BYTES:
                    value, position = _run(message[start:looked_until], kind), looked_until
                    self._count_numbers(len(value))
            yield Field(number, value)


def whole_numbers(field: Field) -> list[int]:
    """The integers of a repeated field: one, or many that are packed into bytes."""
    if isinstance(field.value, int):
        return [field.whole]
    if isinstance(field.value, memoryview):
        if len(field.value) > _MOST_NUMBERS:
            raise UnreadableModel(f"field {field.number} has {len(field.value):,} bytes of numbers in a row")
        packed = np.frombuffer(field.value, np.uint8)
        ends = np.flatnonzero(packed < 0x80)
        if len(packed) and (not len(ends) or ends[-1] != len(packed) - 1):
            raise UnreadableModel(_ENDS_EARLY)
        values = _varints(packed, np.concatenate(([0], ends[:-1] + 1)).astype(np.int64), ends)
    else:
        values = field.value
    found: list[int] = values.view(np.int64).tolist()
    return found


def singles(field: Field) -> list[float]:
    """The 32-bit floats of a repeated field: one, or many that are packed into bytes."""
    if isinstance(field.value, int):
        return [field.single]
    found: list[float]
    if isinstance(field.value, memoryview):
        if len(field.value) % 4:
            raise UnreadableModel(
                f"field {field.number} has {len(field.value)} bytes of floats, which is no multiple of 4"
            )
        found = np.frombuffer(field.value, "<f4").tolist()
    else:
        found = field.value.astype(np.uint32).view(np.float32).tolist()
    return found


def _run_end(message: memoryview, start: int, key: int, kind: int) -> int:
    """Where fields of one number, one behind the other, end; the next part of a very long row begins there."""
    value = {_VARINT: rb"[\x80-\xff]{0,9}[\x00-\x7f]", _FIXED32: rb".{4}", _FIXED64: rb".{8}"}[kind]
    found = re.compile(rb"(?:" + re.escape(bytes([key])) + value + rb"){1,65535}", re.DOTALL).match(message, start)
    return found.end() if found else start


def _run(part: memoryview, kind: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """The numbers of a run of fields, each behind its key of one byte."""
    data = np.frombuffer(part, np.uint8)
    if kind != _VARINT:
        width = 4 if kind == _FIXED32 else 8
        values = data.reshape(-1, 1 + width)[:, 1:]
        return np.ascontiguousarray(values).view(f"<u{width}").reshape(-1).astype(np.uint64)
    # Bytes below 0x80 are a key and the end of a number, in turn.
    ends = np.flatnonzero(data < 0x80)
    return _varints(data, ends[::2] + 1, ends[1::2])


def _varints(
    data: np.ndarray[Any, np.dtype[np.uint8]], starts: np.ndarray[Any, Any], ends: np.ndarray[Any, Any]
) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """The numbers whose bytes lie from `starts` to `ends`, both included."""
    lengths = ends - starts + 1
    longest = int(lengths.max(initial=0))
    if longest > _MOST_VARINT_BYTES:
        raise UnreadableModel(_ENDS_EARLY)
    values = np.zeros(len(starts), np.uint64)
    for place in range(longest):
        has = lengths > place
        values[has] |= (data[starts[has] + place].astype(np.uint64) & np.uint64(0x7F)) << np.uint64(7 * place)
    return values


def _slice(message: memoryview, position: int, length: int) -> memoryview:
    if length > len(message) - position:
        raise UnreadableModel(f"it ends after {len(message)} bytes, inside a field of {length}")
    return message[position : position + length]


def _varint(message: memoryview, position: int) -> tuple[int, int]:
    value = shift = 0
    for place in range(position, min(position + _MOST_VARINT_BYTES, len(message))):
        byte = message[place]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, place + 1
        shift += 7
    raise UnreadableModel(_ENDS_EARLY)


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
        """One number in the form of `struct`, such as "<i"."""
        if position < 0 or position + struct.calcsize(form) > len(self.data):
            raise UnreadableModel(_POINTS_OUTSIDE)
        return struct.unpack_from(form, self.data, position)[0]

    def vector(self, position: int, width: int) -> memoryview:
        """The bytes of a vector whose entries have `width` bytes."""
        count = self.number("<I", position)
        start = position + 4
        if start + count * width > len(self.data):
            raise UnreadableModel(_POINTS_OUTSIDE)
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
