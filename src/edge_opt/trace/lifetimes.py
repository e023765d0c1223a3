"""Lifetimes: which storages exist, when each is born and dies, and how many bytes are alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from edge_opt.records.costs import Role, Shape, StorageInfo


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has a shape and strides: it is neither sparse nor nested."""
    return tensor.layout is torch.strided and not tensor.is_nested


def stored_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of what is stored: of a sparse tensor its values and indices, of a nested one its rows."""
    if tensor.layout is torch.jagged:
        return nbytes_of(tensor.values())
    return int(tensor.untyped_storage().nbytes()) if tensor.is_nested else nbytes_of(tensor)


def shape_of(tensor: torch.Tensor) -> Shape:
    """Return a tensor's shape; that of a nested tensor has its rows one after the other."""
    try:
        shape: tuple[Any, ...] = tuple(tensor.shape)
    except RuntimeError:  # nested
        shape = (None,)
    if all(size.__class__ is int for size in shape):
        return shape
    if tensor.layout is torch.jagged:
        return tuple(tensor.values().shape)
    with _disable_current_modes():  # this query is not part of the model
        sizes = tensor._nested_tensor_size().tolist()
    is_even = all(size[1:] == sizes[0][1:] for size in sizes)
    return (sum(size[0] for size in sizes), *sizes[0][1:]) if sizes and is_even else (sum(map(prod, sizes)),)


def empty_meta_like(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same shape, strides and type without values."""
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


class _StorageRef(weakref.ref):  # type: ignore[type-arg]
    """A weak reference to a storage that knows its address, number and size.

    A storage is known by `_cdata`, the address of the C++ object. That is an identity only as long as the object lives:
    the next storage may get the same address. The reference tells when it dies, because torch keeps one Python object
    per C++ storage and lets it go with the storage ("PyObject preservation"). If a later torch made a wrapper for each
    call of `untyped_storage()`, every storage would seem to die at once, and tests/trace/test_memory_estimate.py would
    fail.
    """

    __slots__ = ("address", "nbytes", "number")
    address: int
    nbytes: int
    number: int


_STRIDED = torch.strided


def is_sparse(tensor: torch.Tensor) -> bool:
    """Return whether a tensor stores its values and their indices apart, and so has no storage of its own."""
    return tensor.layout is not _STRIDED and tensor.layout is not torch.jagged


def sparse_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors behind a sparse one: its values, then its indices."""
    if tensor.layout is torch.sparse_coo:
        return [tensor._values(), tensor._indices()]
    by_rows = tensor.layout in (torch.sparse_csr, torch.sparse_bsr)
    indices = (tensor.crow_indices, tensor.col_indices) if by_rows else (tensor.ccol_indices, tensor.row_indices)
    return [tensor.values(), *(part() for part in indices)]


def storage_of(tensor: torch.Tensor) -> Any:
    """Return the storage by which a tensor is known; that of its values for a sparse one."""
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return sparse_parts(tensor)[0].untyped_storage()


# Elements that share a byte where weights are stored; torch itself gives each a byte of its own.
_PER_BYTE = {getattr(torch, name): count for name, count in (("int4", 2), ("uint4", 2), ("int2", 4), ("uint2", 4))}


def packed_bytes(elements: int, tensor: torch.Tensor) -> int:
    """Return the bytes of this many elements of a tensor's type; elements of 4 and 2 bits share bytes."""
    dtype = tensor.dtype
    return -(-elements // _PER_BYTE[dtype]) if dtype in _PER_BYTE else elements * dtype.itemsize


def nbytes_of(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's elements; of the values and indices of a sparse one."""
    if tensor.layout is _STRIDED and tensor.dtype not in _PER_BYTE:
        return tensor.nbytes  # the same as below, faster: there may be hundreds of tensors
    parts = sparse_parts(tensor) if is_sparse(tensor) else [tensor]
    return sum(packed_bytes(part.numel(), part) for part in parts)


class Lifetimes:
    """Numbers storages in order of appearance.

    Meta outputs live and die with the same Python references as in an eager run, so the bytes alive here are the bytes
    alive there. Weights and inputs are registered, and are not part of `live_bytes`.
    """

    def __init__(self) -> None:
        self.numbers: dict[int, int] = {}
        self.live_bytes = 0
        self.time = 0
        self.roles: list[Role] = []
        self._born: list[int | None] = []
        self._nbytes: list[int] = []
        self._died: dict[int, int] = {}
        self._refs: dict[int, _StorageRef] = {}
        self._kept: list[torch.Tensor] = []
        self._stand_ins: list[_StorageRef] = []

    def register(self, tensor: torch.Tensor, role: Role) -> int:
        """Number a tensor that exists before the run and outlives it."""
        storage = storage_of(tensor)
        self._kept.append(tensor)
        nbytes = packed_bytes(storage.nbytes(), tensor) if tensor.dtype in _PER_BYTE else storage.nbytes()
        self.numbers[storage._cdata] = number = len(self.roles)
        self.roles.append(role)
        self._nbytes.append(nbytes)
        self._born.append(None)
        if role == "input":
            self.note_stand_in(storage, number)
        return number

    def alias(self, twin: torch.Tensor, original: torch.Tensor, number: int) -> None:
        """Register a meta tensor as the twin of a real one, which lives as long as the twin does."""
        storage: Any = twin.untyped_storage()
        storage.original = storage_of(original)
        self.numbers[storage._cdata] = number
        self.note_stand_in(storage, number, self._forget)

    def note_stand_in(self, storage: Any, number: int, when_gone: Callable[[Any], None] | None = None) -> None:
        """Remember the twin of one of the caller's storages: it must not outlive the trace either."""
        ref = _StorageRef(storage, when_gone)
        ref.address, ref.nbytes, ref.number = storage._cdata, storage.nbytes(), number
        self._stand_ins.append(ref)

    def born(self, tensor: torch.Tensor) -> int | None:
        """Number the storage of an operator's output; None when it is not new."""
        storage = storage_of(tensor)
        address = storage._cdata
        if address in self.numbers:
            return None
        nbytes: int = storage.nbytes()
        roles = self.roles
        self.numbers[address] = number = len(roles)
        roles.append("activation")
        self._nbytes.append(nbytes)
        self._born.append(self.time)
        ref = _StorageRef(storage, self._gone)
        ref.address, ref.nbytes, ref.number = address, nbytes, number
        self._refs[number] = ref
        self.live_bytes += nbytes
        return number

    def number_of(self, tensor: torch.Tensor) -> int:
        """Return the number of a tensor's storage; -1 where it has none."""
        return self.numbers.get(storage_of(tensor)._cdata, -1)

    def finish(self) -> tuple[StorageInfo, ...]:
        """Return every storage seen; what is still alive now has no end."""
        ends = map(self._died.get, range(len(self.roles)))
        return tuple(map(StorageInfo, self._nbytes, self.roles, self._born, ends))

    def survivors(self, may_stay: Callable[[int], bool]) -> set[int]:
        """Return the addresses of storages that an operator made and that something still holds.

        `may_stay` says by number which ones: an eager run would have left the same values there.
        """
        # The registered tensors are the model's and the caller's; holding them here would look like a leak.
        self._kept.clear()
        refs = [ref for number, ref in list(self._refs.items()) if not may_stay(number)]
        return {ref.address for ref in (*refs, *self._stand_ins) if ref() is not None}

    def _forget(self, ref: Any) -> None:
        self.numbers.pop(ref.address, None)

    def _gone(self, ref: Any) -> None:
        self.live_bytes -= ref.nbytes
        self._died[ref.number] = self.time
        del self.numbers[ref.address]
        del self._refs[ref.number]
