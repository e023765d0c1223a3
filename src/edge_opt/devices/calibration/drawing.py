"""Drawing: random sizes as people choose them, and what a call on such tensors consists of."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from edge_opt.records import OpSignature
from edge_opt.trace.operators import Behavior, behavior
from edge_opt.trace.signatures import signature_of

_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
MOST_MACS = 500_000_000
MOST_BYTES = 48 << 20


T = TypeVar("T")


class Draw:
    """Random sizes, mostly round ones, as people choose them."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def log(self, low: int, high: int) -> int:
        return round(math.exp(self.random.uniform(math.log(low), math.log(high))))

    def width(self, low: int = 8, high: int = 2048) -> int:
        step = self.random.choice((1, 4, 8, 8, 8, 16, 16, 32))
        return max(low, round(self.log(low, high) / step) * step)

    def batch(self) -> int:
        return self.random.choice((1, 1, 1, 2, 4, 8, 8))

    def side(self) -> int:
        return self.random.choice((7, 7, 14, 14, 28, 28, 56, 56, 112, self.log(4, 120)))

    def chance(self, share: float) -> bool:
        return self.random.random() < share

    def of(self, *values: T) -> T:
        return self.random.choice(values)

    def image(self, low: int = 8, high: int = 1024) -> torch.Tensor:
        """A feature map of at most the largest size, with its channels last now and then."""
        while True:
            batch, width, side = self.batch(), self.width(low, high), self.side()
            if batch * width * side * side * 4 <= MOST_BYTES:
                image = tensor(batch, width, side, side)
                return image.to(memory_format=torch.channels_last) if self.chance(0.12) else image

    def rows(self) -> torch.Tensor:
        """Tokens: batch, length, width."""
        while True:
            batch, length, width = self.batch(), self.of(49, 64, 128, 196, 197, self.log(8, 512)), self.width(32, 3072)
            if batch * length * width * 4 <= MOST_BYTES:
                return tensor(batch, length, width)


def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


class _Catch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps the signatures of operators called on meta tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[OpSignature] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if behavior(func) is Behavior.DECOMPOSE:
            with self:
                return func._op_dk(_COMPOSITE, *args, **kwargs)
        result = func(*args, **kwargs)
        outputs = list(result) if isinstance(result, (tuple, list)) else [result]
        self.found.append(signature_of(func, args, kwargs, outputs, False, 0))
        return result


def signatures(call: Callable[[], object]) -> list[OpSignature]:
    """What a call on meta tensors consists of, as a trace would record it."""
    catch = _Catch()
    with torch.inference_mode(), catch:
        call()
    return catch.found
