"""The devices torch can run on: whether one is here, what it is called, and how to wait until its work is done."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from edge_opt.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class Device:
    """A device that is here. Work on an asynchronous one goes on after a call has returned."""

    torch_name: str
    name: str
    is_asynchronous: bool
    synchronize: Callable[[], None]


class Backend(Protocol):
    """What one kind of device must be able to say; the only place that calls torch about it."""

    is_asynchronous: bool

    def count(self) -> int: ...

    def name(self, index: int) -> str: ...

    def synchronize(self, index: int) -> None: ...


class _Cpu:
    is_asynchronous = False

    def count(self) -> int:
        return 1

    def name(self, index: int) -> str:
        return "cpu"

    def synchronize(self, index: int) -> None:
        """A call on the CPU returns when its work is done."""


class _Cuda:
    is_asynchronous = True

    def count(self) -> int:
        return torch.cuda.device_count() if torch.cuda.is_available() else 0

    def name(self, index: int) -> str:
        return torch.cuda.get_device_name(index)

    def synchronize(self, index: int) -> None:
        torch.cuda.synchronize(index)


class _Mps:
    is_asynchronous = True

    def count(self) -> int:
        return int(torch.backends.mps.is_available())

    def name(self, index: int) -> str:
        return "Apple GPU (Metal)"

    def synchronize(self, index: int) -> None:
        torch.mps.synchronize()


BACKENDS: Mapping[str, Backend] = {"cpu": _Cpu(), "cuda": _Cuda(), "mps": _Mps()}


def find_device(asked: str | torch.device, backends: Mapping[str, Backend] = BACKENDS) -> Device:
    """The device named `cpu`, `cuda`, `cuda:1` or `mps`.

    >>> find_device("cpu").name
    'cpu'
    """
    kind, _, number = str(asked).partition(":")
    backend = backends.get(kind)
    if backend is None or (number and not number.isdecimal()):
        raise InvalidInput(
            f"unknown device {str(asked)!r}; write one of {', '.join(backends)}, or a number as in cuda:1"
        )
    index, count = int(number or 0), backend.count()
    if count == 0:
        raise InvalidInput(
            f"device {str(asked)!r} was asked for, and torch {torch.__version__} finds no {kind} here; use device='cpu'"
        )
    if index >= count:
        raise InvalidInput(f"device {str(asked)!r} was asked for, and there is only {kind}:0 to {kind}:{count - 1}")
    torch_name = kind if kind != "cuda" else f"cuda:{index}"
    return Device(torch_name, backend.name(index), backend.is_asynchronous, lambda: backend.synchronize(index))


CPU = find_device("cpu")
