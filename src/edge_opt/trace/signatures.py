"""Signatures: one record per operator and set of shapes, remembered across traces."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod
from typing import Any

import torch

from edge_opt.records import OpSignature, Shape, TensorInfo
from edge_opt.trace.operators import argument_names, operator_name
from edge_opt.trace.shapes import Spec

_LIMIT = 100_000


class Entry:
    """What is remembered of an operator: its signature, and how to make its outputs (None: run it again)."""

    __slots__ = ("is_list", "signature", "specs")

    def __init__(self, signature: OpSignature, specs: tuple[Spec, ...] | None, is_list: bool) -> None:
        self.signature = signature
        self.specs = specs
        self.is_list = is_list


_memo: dict[tuple[Any, ...], Entry] = {}
recall = _memo.get


def remember(key: tuple[Any, ...], entry: Entry) -> None:
    """Keep an entry; a memory that has grown out of bounds starts afresh."""
    if len(_memo) >= _LIMIT:
        _memo.clear()
    _memo[key] = entry


def clear_memo() -> None:
    """Forget every remembered operator."""
    _memo.clear()


def signature_of(
    func: Any, args: Any, kwargs: dict[str, Any], outputs: list[torch.Tensor], is_view: bool, scratch_bytes: int
) -> OpSignature:
    """The record of one call."""
    return OpSignature(
        operator_name(func),
        argument_names(func),
        tuple(plain(value) for value in args),
        tuple((name, plain(value)) for name, value in kwargs.items() if value is not None),
        tuple(tensor_info(tensor) for tensor in outputs),
        is_view,
        scratch_bytes,
        _strides((*args, *kwargs.values())),
    )


def _strides(values: Iterable[Any]) -> tuple[Shape | None, ...]:
    """How each tensor lies in memory, None for a row-major one; nothing where all are."""
    found = [None if tensor.is_contiguous() else tuple(tensor.stride()) for tensor in _tensors(values)]
    return tuple(found) if any(found) else ()


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def tensor_info(tensor: torch.Tensor) -> TensorInfo:
    """Shape, dtype and distinct bytes; a dimension with stride 0 is stored, and counted, once."""
    shape, strides = tuple(tensor.shape), tensor.stride()
    distinct = shape if 0 not in strides else [size for size, step in zip(shape, strides, strict=True) if step]
    return TensorInfo(shape, str(tensor.dtype).removeprefix("torch."), prod(distinct) * tensor.itemsize)


def plain(value: Any) -> Any:
    """An operator's argument as a plain value: tensors described, dtypes and devices by name."""
    if isinstance(value, torch.Tensor):
        return tensor_info(value)
    if isinstance(value, (list, tuple)):
        return tuple(plain(item) for item in value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return str(value).removeprefix("torch.")
