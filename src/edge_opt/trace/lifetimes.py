"""Lifetimes: which storages exist, when each is born and dies, and how many bytes are alive."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from edge_opt.records import Role, StorageInfo


class _StorageRef(weakref.ref):  # type: ignore[type-arg]
    """A weak reference to a storage that knows its address, number and size."""

    __slots__ = ("address", "nbytes", "number")
    address: int
    nbytes: int
    number: int


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

    def register(self, tensor: torch.Tensor, role: Role) -> int:
        """Number a tensor that exists before the run and outlives it."""
        storage = tensor.untyped_storage()
        self._kept.append(tensor)
        self.numbers[storage._cdata] = number = self.number(storage.nbytes(), role, None)
        return number

    def alias(self, twin: torch.Tensor, number: int) -> None:
        """Let a meta twin stand for a registered tensor."""
        self.numbers[twin.untyped_storage()._cdata] = number

    def number(self, nbytes: int, role: Role, born: int | None) -> int:
        """The next free number, given to a storage of this size."""
        self.roles.append(role)
        self._nbytes.append(nbytes)
        self._born.append(born)
        return len(self.roles) - 1

    def born(self, tensor: torch.Tensor) -> int | None:
        """Number the storage of an operator's output; None when it is not new."""
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address in self.numbers:
            return None
        nbytes: int = storage.nbytes()
        self.numbers[address] = number = self.number(nbytes, "activation", self.time)
        ref = _StorageRef(storage, self._gone)
        ref.address, ref.nbytes, ref.number = address, nbytes, number
        self._refs[number] = ref
        self.live_bytes += nbytes
        return number

    def finish(self) -> tuple[StorageInfo, ...]:
        """Every storage seen; what is still alive now has no end."""
        self._refs.clear()
        return tuple(
            StorageInfo(nbytes, role, born, self._died.get(number))
            for number, (nbytes, role, born) in enumerate(zip(self._nbytes, self.roles, self._born, strict=True))
        )

    def _gone(self, ref: Any) -> None:
        self.live_bytes -= ref.nbytes
        self._died[ref.number] = self.time
        del self.numbers[ref.address]
        del self._refs[ref.number]
