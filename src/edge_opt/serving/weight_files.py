"""Headers of GGUF and safetensors files: every tensor with its type and bytes. No weight is read, nothing executed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from struct import unpack_from
from typing import Any, Literal

from edge_opt._support.extras import import_optional
from edge_opt._support.json import read_document
from edge_opt.errors import ModelNotFound, first_line

# More than published files have: Gemma's vocabulary takes 18 MB, DeepSeek-V3 has 91 000 tensors in 163 files, and GGUF
# files, which stack experts, have at most some thousands.
_MOST_HEADER_BYTES = 128 << 20
_MOST_JSON_BYTES = 32 << 20
_MOST_TENSORS = 20_000
_MOST_TENSOR_JSON_BYTES = 256 * _MOST_TENSORS
_MOST_FIELDS = 20_000
_MOST_STRINGS = 2_000_000
_MOST_SHARDS = 5_000
_MOST_DIMENSIONS = 8
# Longer arrays are the vocabulary; a list with a number for each layer is shorter.
_MOST_KEPT = 4_096
_SPLIT = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "I16": 16, "U16": 16, "F16": 16,
    "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64, "C64": 64, "F4": 4, "F6_E2M3": 6,
    "F6_E3M2": 6,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a file: the last size of its shape is the length of a row."""

    name: str
    shape: tuple[int, ...]
    type: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class WeightFile:
    """The header of a model's file, or of all its parts.

    `metadata` holds numbers, text and short lists of a GGUF file. `tokens` and `tokenizer_bytes` are those of the
    vocabulary in it; None: not in the file.
    """

    path: Path
    kind: Literal["gguf", "safetensors"]
    tensors: tuple[StoredTensor, ...]
    metadata: Mapping[str, Any]
    disk_bytes: int
    parts: int = 1
    tokens: int | None = None
    tokenizer_bytes: int | None = None

    @property
    def tensor_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def name(self) -> str:
        """The model's name: that of the folder, or of the file without its ending and number."""
        if self.kind == "safetensors":
            return self.path.resolve().name
        split = _SPLIT.fullmatch(self.path.name)
        return split["stem"] if split else self.path.stem


def find_weight_file(source: Any) -> WeightFile | None:
    """Return the header of the file or folder that `source` names; None where it names no weights."""
    try:
        path = Path(source)
        if path.is_file() and path.suffix == ".gguf":
            return read_gguf(_gguf_parts(path))
        if path.is_file() and path.suffix == ".safetensors":
            return read_safetensors(path.parent, [path])
        if not path.is_dir():
            return None
        weights = sorted(path.glob("*.safetensors"))[:_MOST_SHARDS]
        if weights:
            return read_safetensors(path, weights)
        files = [file for file in sorted(path.glob("*.gguf"))[:_MOST_SHARDS] if not file.name.startswith("mmproj")]
    except (OSError, ValueError) as error:  # a NUL in the path is a ValueError
        raise ModelNotFound(f"cannot read {str(source)!r}: {first_line(error)}") from error
    groups = {_stem(file): file for file in reversed(files)}
    if len(groups) > 1:
        names = ", ".join(file.name for file in sorted(groups.values())[:6])
        raise ModelNotFound(f"{str(path)!r} holds several models; pass one of its files: {names}")
    return read_gguf(_gguf_parts(files[0])) if files else None


def _stem(path: Path) -> str:
    split = _SPLIT.fullmatch(path.name)
    return split["stem"] if split else path.name


def _gguf_parts(path: Path) -> list[Path]:
    """Return all parts of a split file, of which any may be named; refuse a set with a part missing."""
    split = _SPLIT.fullmatch(path.name)
    if split is None:
        return [path]
    count = int(split["count"])
    if not 1 <= count <= _MOST_SHARDS:
        raise ModelNotFound(f"{path.name!r} is one of {count} parts; at most {_MOST_SHARDS} are read")
    parts = [path.with_name(f"{split['stem']}-{number:05d}-of-{count:05d}.gguf") for number in range(1, count + 1)]
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        gap = f"{len(missing)} of {count} parts are missing, {missing[0]!r} first"
        raise ModelNotFound(f"{gap}; put them in one folder")
    return parts


def read_gguf(parts: list[Path]) -> WeightFile:
    """Return the header of a GGUF file in one or several parts; the first holds what describes the model."""
    headers = [_read_gguf_part(part) for part in parts]
    first = headers[0]
    tensors = tuple(tensor for header in headers for tensor in header.tensors)
    if len({tensor.name for tensor in tensors}) != len(tensors):
        raise ModelNotFound(f"two parts of {str(parts[0])!r} hold a tensor of the same name; download them again")
    if not isinstance(first.metadata.get("general.architecture"), str):
        raise ModelNotFound(f"{str(parts[0])!r} has no general.architecture, so it is not a model")
    count = first.metadata.get("split.count", 0)
    if isinstance(count, int) and count > len(parts):
        last = f"-00001-of-{count:05d}.gguf"
        raise ModelNotFound(f"{str(parts[0])!r} is one of {count} parts; name them as they were split: NAME{last}")
    if not any(tensor.nbytes for tensor in tensors):
        raise ModelNotFound(f"{str(parts[0])!r} holds no tensors, only a description or a vocabulary; pass the model")
    disk_bytes = sum(part.stat().st_size for part in parts)
    return WeightFile(
        parts[0], "gguf", tensors, first.metadata, disk_bytes, len(parts), first.tokens, first.tokenizer_bytes
    )


def _read_gguf_part(path: Path) -> Any:
    """Return the header of one GGUF file."""
    problem = f"cannot read {str(path)!r}"
    with path.open("rb") as file:
        start = file.read(24)
    if len(start) < 24 or start[:4] != b"GGUF":
        raise ModelNotFound(f"{problem}: it is not a GGUF file, or is cut off; download it again")
    is_big = not int.from_bytes(start[4:8], "little") & 0xFFFF
    counts = unpack_from(">QQ" if is_big else "<QQ", start, 8)
    if counts[0] > _MOST_TENSORS or counts[1] > _MOST_FIELDS:
        limits = f"at most {_MOST_TENSORS} and {_MOST_FIELDS} are read"
        raise ModelNotFound(f"{problem}: its header claims {counts[0]} tensors and {counts[1]} fields; {limits}")
    try:
        return _gguf_header()(path)
    # What the package raises on a file that is cut off or not what it claims.
    except (ValueError, KeyError, IndexError, TypeError, OverflowError, OSError) as error:
        raise ModelNotFound(f"{problem}: {first_line(error)}; download it again") from error


@cache
def _gguf_header() -> type[Any]:
    """Return a reader of the gguf package that keeps to the header.

    The package's own one makes arrays of every word of the vocabulary, follows counts beyond the end of the file, and
    maps the weights. This one checks each read, passes over the vocabulary, and stops before the weights.
    """
    gguf = import_optional("gguf", "GGUF files need", "llm")
    import numpy as np

    types = gguf.GGUFValueType

    class GgufHeader(gguf.GGUFReader):  # type: ignore[misc,name-defined]
        tokens: int | None = None
        tokenizer_bytes: int | None = None

        def __init__(self, path: Path) -> None:
            self._strings = 0
            super().__init__(path)
            self.metadata = {name: value for name, value in self._values() if value is not None}
            words = self.fields.get("tokenizer.ggml.tokens")
            if words is not None and words.types[0] == types.ARRAY:
                self.tokens = int(words.parts[4][0])
                vocabulary = (item for name, item in self.fields.items() if name.startswith("tokenizer."))
                self.tokenizer_bytes = sum(int(part.nbytes) for item in vocabulary for part in item.parts[3:])
            del self.data  # the file is closed with it

        def _values(self) -> Iterator[tuple[str, Any]]:
            for name, item in self.fields.items():
                is_list = item.types[0] == types.ARRAY
                if is_list and (item.types[-1] == types.STRING or item.parts[-1].size > _MOST_KEPT):
                    continue
                yield name, item.parts[-1].tolist() if is_list else item.contents()

        def _get(self, offset: int, dtype: Any, count: Any = 1, override_order: Any = None) -> Any:
            kind = np.dtype(dtype)
            end = int(offset) + kind.itemsize * int(count)
            if end > min(self.data.size, _MOST_HEADER_BYTES):
                where = "the end of the file" if end > self.data.size else f"{_MOST_HEADER_BYTES >> 20} MiB"
                raise ValueError(f"its header reaches beyond {where}")
            order = kind.newbyteorder(self.byte_order if override_order is None else override_order)
            return np.frombuffer(self.data, order, int(count), int(offset))

        def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[Any]]:
            if raw_type != types.ARRAY:
                return super()._get_field_parts(orig_offs, raw_type)  # type: ignore[no-any-return]
            kind, count = self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)
            item = types(kind[0])
            if item == types.ARRAY:
                raise ValueError("a list in its header holds lists")
            start = orig_offs + 12
            if item == types.STRING:
                self._strings += int(count[0])
                end = _past_strings(memoryview(self.data), start, int(count[0]), self._strings, self.byte_order)
                values = self._get(start, np.uint8, end - start)
            else:
                values = self._get(start, self.gguf_scalar_to_np[item], count[0])
            return 12 + int(values.nbytes), [kind, count, values], [2], [types.ARRAY, item]

        def _build_tensors(self, start_offs: int, fields: list[Any]) -> None:
            self.tensors = _gguf_tensors(gguf, [item.parts for item in fields], start_offs, self.data.size)

    return GgufHeader


def _past_strings(buffer: memoryview, start: int, count: int, total: int, byte_order: str) -> int:
    """Return the offset behind a list of strings; `total` are those of all lists up to here."""
    if total > _MOST_STRINGS:
        raise ValueError(f"its lists hold more than {_MOST_STRINGS} strings")
    length, limit = "<Q" if byte_order == "I" else ">Q", min(len(buffer), _MOST_HEADER_BYTES)
    offset = start
    for _ in range(count):
        if offset + 8 > limit:
            raise ValueError("its header reaches beyond the end of the file")
        offset += 8 + unpack_from(length, buffer, offset)[0]
    return offset


def _gguf_tensors(gguf: Any, described: Iterable[list[Any]], start: int, file_bytes: int) -> list[StoredTensor]:
    """Return the tensors that a header describes; refuse those that are not in the file."""
    tensors = []
    for _, name, _, sizes, number, offset in described:
        shape = tuple(reversed(sizes[:_MOST_DIMENSIONS].tolist()))
        kind = gguf.GGMLQuantizationType(number[0])
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        if len(sizes) > _MOST_DIMENSIONS or not shape or shape[-1] % block:
            raise ValueError(f"a tensor has the shape {shape}, which {kind.name} cannot hold")
        nbytes = prod(shape) // block * block_bytes
        if start + int(offset[0]) + nbytes > file_bytes:
            raise ValueError("its tensors reach beyond the end of the file")
        tensors.append(StoredTensor(bytes(name).decode(), shape, kind.name, nbytes))
    if len({tensor.name for tensor in tensors}) != len(tensors):
        raise ValueError("two of its tensors have one name")
    return tensors


def read_safetensors(folder: Path, files: list[Path]) -> WeightFile:
    """Return the headers of a folder's safetensors files: those of its index, or all of them."""
    index = sorted(folder.glob("*.safetensors.index.json"))
    expected: set[str] = set()
    if index and (len(files) > 1 or "-of-" in files[0].name):
        if index[0].stat().st_size > _MOST_JSON_BYTES:
            raise ModelNotFound(f"{str(index[0])!r} has more than {_MOST_JSON_BYTES >> 20} MiB; it is not an index")
        content = read_document(index[0], ModelNotFound, "download it again")
        listed = content.get("weight_map") if isinstance(content, Mapping) else None
        if not isinstance(listed, Mapping) or not all(isinstance(item, str) for item in listed.values()):
            raise ModelNotFound(f"{str(index[0])!r} has no weight_map, so it is not an index of safetensors")
        expected, names = set(listed), sorted(set(listed.values()))
        strange = next((name for name in names if Path(name).name != name), None)
        if strange is not None:
            raise ModelNotFound(f"{str(index[0])!r} names {strange!r}, which is not a file beside it")
        files = [folder / name for name in names]
    elif any(file.name.startswith("model") for file in files):
        # The same weights a second time, as the model's makers store them, and adapters of them.
        files = [file for file in files if file.name.startswith("model")]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        gap = f"{len(missing)} of {len(files)} files are missing in {str(folder)!r}"
        raise ModelNotFound(f"{gap}, {missing[0]!r} first; download them again")
    tensors = tuple(_all_tensors(files))
    absent = expected - {tensor.name for tensor in tensors}
    if absent:
        raise ModelNotFound(f"{str(index[0])!r} names {min(absent)!r}, which no file holds; download them again")
    disk_bytes = sum(file.stat().st_size for file in files)
    return WeightFile(folder, "safetensors", tensors, {}, disk_bytes, len(files))


def _all_tensors(files: Iterable[Path]) -> Iterator[StoredTensor]:
    names: set[str] = set()
    for file in files:
        for tensor in _safetensors_header(file):
            if tensor.name in names:
                again = f"two files hold {tensor.name!r}, {str(file)!r} the second time"
                raise ModelNotFound(f"{again}; remove one of them")
            names.add(tensor.name)
            yield tensor


def _safetensors_header(path: Path) -> list[StoredTensor]:
    safetensors = import_optional("safetensors", "safetensors files need", "llm")
    problem = f"cannot read {str(path)!r}"
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
    length = int.from_bytes(start, "little")
    if len(start) < 8 or length > min(size - 8, _MOST_TENSOR_JSON_BYTES):
        raise ModelNotFound(f"{problem}: its header of {length} bytes reaches beyond the file, or is too long")
    try:
        with safetensors.safe_open(path, framework="numpy") as opened:
            names = opened.keys()
            if len(names) > _MOST_TENSORS:
                raise ValueError(f"its header describes {len(names)} tensors; at most {_MOST_TENSORS} are read")
            slices = ((name, opened.get_slice(name)) for name in names)
            tensors = [_safetensor(name, item.get_shape(), item.get_dtype()) for name, item in slices]
    except (safetensors.SafetensorError, OSError, ValueError, KeyError, OverflowError) as error:
        raise ModelNotFound(f"{problem}: {first_line(error)}; download it again") from error
    if sum(tensor.nbytes for tensor in tensors) != size - 8 - length:
        raise ModelNotFound(f"{problem}: its tensors do not fill the file; download it again")
    return tensors


def _safetensor(name: str, shape: list[int], kind: str) -> StoredTensor:
    if kind not in _BITS:
        raise ValueError(f"a tensor has the unknown type {kind}")
    return StoredTensor(name, tuple(shape), kind, prod(shape) * _BITS[kind] // 8)
