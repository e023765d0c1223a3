"""Operators made runnable again: real tensors, filled and laid out as a signature says, and the call on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import torch

from edge_opt.records import OpSignature, Shape, TensorInfo

_INDEXED = {"aten.embedding": 0, "aten.embedding_bag": 0}
_SETTINGS = (torch.dtype, torch.memory_format, torch.layout)


class Unrunnable(Exception):
    """An operator that cannot be called on made-up tensors; the message says why."""


class Runnable:
    """One operator with tensors of its own. `touch` brings what would be warm into the cache; `run` is the call."""

    def __init__(self, signature: OpSignature, is_warm: Sequence[bool]) -> None:
        self.signature = signature
        self.function = overload(signature)
        made = _Operands(signature, is_warm)
        self.args = tuple(made.value(argument) for argument in signature.args)
        self.kwargs = {name: made.value(argument) for name, argument in signature.kwargs}
        self.nbytes = sum(base.numel() * base.itemsize for base, _ in made.bases)
        self._warm = [base for base, is_wanted in made.bases if is_wanted and base.dtype is not torch.bool]
        # An operator that writes its operand would drift away from ordinary values, and denormal ones are slow.
        is_writing = signature.op.endswith("_") and made.bases
        self._written = (made.bases[0][0], made.bases[0][0].clone()) if is_writing else None

    def touch(self) -> None:
        """Write the warm operands, as the operators before this one would just have done."""
        if self._written is not None:
            self._written[0].copy_(self._written[1])
        for base in self._warm:
            base.mul_(1)

    def run(self) -> Any:
        return self.function(*self.args, **self.kwargs)


class _Operands:
    """Makes the tensors of one call, in the order of `OpSignature.inputs`."""

    def __init__(self, signature: OpSignature, is_warm: Sequence[bool]) -> None:
        self.bases: list[tuple[torch.Tensor, bool]] = []
        self._layouts: Iterator[Shape | None] = iter(signature.strides or (None,) * len(signature.inputs))
        self._is_warm = iter(is_warm)
        self._rows = _index_limit(signature)

    def value(self, argument: Any) -> Any:
        if isinstance(argument, TensorInfo):
            base, tensor = _tensor(argument, next(self._layouts), self._rows)
            self.bases.append((base, next(self._is_warm)))
            return tensor
        if isinstance(argument, tuple):
            return [self.value(item) for item in argument]
        if isinstance(argument, str):
            found = getattr(torch, argument, None)
            if isinstance(found, _SETTINGS):
                return found
            return torch.device("cpu") if argument in ("cpu", "meta") or argument.startswith("cuda") else argument
        return argument


def _index_limit(signature: OpSignature) -> int:
    """Integers stay below this: rows of a table, or the shortest side that an index may run along."""
    tables = [tensor for tensor in signature.inputs if "int" not in tensor.dtype and tensor.dtype != "bool"]
    if signature.op in _INDEXED and tables:
        return tables[0].shape[0]
    return max(1, min(tables[0].shape, default=1)) if tables else 2


def _tensor(info: TensorInfo, strides: Shape | None, limit: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory with ordinary values, and the tensor as a view of it."""
    dtype = getattr(torch, info.dtype, None)
    if not isinstance(dtype, torch.dtype) or dtype.is_complex or "q" in info.dtype:
        raise Unrunnable(f"tensors of {info.dtype} cannot be made up")
    if strides is None:
        base = _filled(info.elements, dtype, limit)
        return base, base.view(info.shape)
    span = 1 + sum((size - 1) * step for size, step in zip(info.shape, strides, strict=True)) if info.elements else 0
    base = _filled(span, dtype, limit)
    return base, base.as_strided(info.shape, strides)


def _filled(count: int, dtype: torch.dtype, limit: int) -> torch.Tensor:
    base = torch.empty(count, dtype=dtype)
    if not dtype.is_floating_point:
        return base.random_(0, 2 if dtype is torch.bool else limit)
    # Copying random numbers is several times as fast as drawing them.
    pool = _pool()
    for start in range(0, count, len(pool)):
        part = base[start : start + len(pool)]
        part.copy_(pool[: len(part)])
    return base


@cache
def _pool() -> torch.Tensor:
    return torch.randn(1 << 20, generator=torch.Generator().manual_seed(0))


def overload(signature: OpSignature) -> Callable[..., Any]:
    """The operator itself: of those that share its name, the one with its parameters and types."""
    library, _, name = signature.op.partition(".")
    packet = getattr(getattr(torch.ops, library, None), name, None)
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        raise Unrunnable(f"{signature.op} is not an operator of torch")
    named = [
        candidate
        for candidate in (getattr(packet, key) for key in packet.overloads())  # type: ignore[no-untyped-call]
        if tuple(argument.name for argument in _positional(candidate)) == signature.names
        and {name for name, _ in signature.kwargs} <= {argument.name for argument in candidate._schema.arguments}
    ]
    if not named:
        raise Unrunnable(f"no form of {signature.op} takes {', '.join(signature.names)}")
    # A number may stand for a tensor, so a form that does not fit to the letter is still better than none.
    found: Callable[..., Any] = max(named, key=lambda candidate: _fitting(signature, candidate))
    return found


def _positional(candidate: Any) -> list[Any]:
    return [argument for argument in candidate._schema.arguments if not argument.kwarg_only]


def _fitting(signature: OpSignature, candidate: Any) -> int:
    return sum(
        _fits(value, str(argument.type))
        for value, argument in zip(signature.args, _positional(candidate), strict=False)
    )


def _fits(value: Any, kind: str) -> bool:
    """Whether a recorded argument may be of a schema's type; what a tensor is decides between most forms."""
    if value is None:
        return kind.startswith("Optional")
    if isinstance(value, TensorInfo):
        return "Tensor" in kind and "List" not in kind
    if isinstance(value, tuple):
        return "List" in kind
    return "Tensor" not in kind and "List" not in kind
