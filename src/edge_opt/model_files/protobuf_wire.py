"""Protocol buffers as bytes on the wire: fields with their numbers, in order, without a schema or a copy."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

from edge_opt.errors import UnreadableModel

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MOST_VARINT_BYTES = 10


class Field(NamedTuple):
    """One field of a message.

    Attributes:
        number: Its number in the schema.
        value: An integer for a number, of a floating one its bits; for text, bytes and messages a slice of the file.
    """

    number: int
    value: int | memoryview

    @property
    def whole(self) -> int:
        """The value as a signed integer."""
        if isinstance(self.value, memoryview):
            raise UnreadableModel(f"field {self.number} holds bytes where a number belongs")
        return self.value - (1 << 64) if self.value >> 63 else self.value

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


def fields(message: memoryview) -> Iterator[Field]:
    """The fields of a message, one after the other; UnreadableModel where the bytes end inside one."""
    position, end = 0, len(message)
    while position < end:
        key, position = _varint(message, position)
        number, kind = key >> 3, key & 7
        value: int | memoryview
        if kind == _VARINT:
            value, position = _varint(message, position)
        elif kind == _BYTES:
            length, position = _varint(message, position)
            value = _slice(message, position, length)
            position += length
        elif kind in (_FIXED32, _FIXED64):
            length = 4 if kind == _FIXED32 else 8
            value = int.from_bytes(_slice(message, position, length), "little")
            position += length
        else:
            raise UnreadableModel(f"byte {position} starts a field of the unknown kind {kind}")
        if not number:
            raise UnreadableModel(f"byte {position} starts a field without a number")
        yield Field(number, value)


def whole_numbers(field: Field) -> list[int]:
    """The integers of a repeated field: one, or many that are packed into bytes."""
    if not isinstance(field.value, memoryview):
        return [field.whole]
    found, position = [], 0
    while position < len(field.value):
        value, position = _varint(field.value, position)
        found.append(value - (1 << 64) if value >> 63 else value)
    return found


def singles(field: Field) -> list[float]:
    """The 32-bit floats of a repeated field: one, or many that are packed into bytes."""
    if not isinstance(field.value, memoryview):
        return [field.single]
    if len(field.value) % 4:
        raise UnreadableModel(f"field {field.number} has {len(field.value)} bytes of floats, which is no multiple of 4")
    return list(struct.unpack(f"<{len(field.value) // 4}f", field.value))


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
    raise UnreadableModel("it ends inside a number, or is no protocol buffer at all")
