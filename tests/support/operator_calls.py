"""One operator as a model, for tests of what it costs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import edge_opt as eo
from edge_opt.cost.rules import price
from edge_opt.records.costs import OpCost, OpSignature, TensorInfo
from edge_opt.records.profiles import ModelProfile


class Call(nn.Module):
    """A model that is one function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *tensors: torch.Tensor) -> Any:
        return self.function(*tensors)


def profiled(function: Callable[..., Any], *inputs: Any) -> ModelProfile:
    """The profile of one call, all of it priced."""
    profile = eo.profile(Call(function), inputs=inputs)
    assert profile.coverage == 1.0, profile.unpriced
    return profile


def other_ops(function: Callable[..., Any], *inputs: Any) -> int:
    return profiled(function, *inputs).totals.other_ops


def tensor(*shape: int, dtype: str = "float32") -> TensorInfo:
    info = TensorInfo(shape, dtype, 0)
    return TensorInfo(shape, dtype, info.elements * getattr(torch, dtype).itemsize)


def priced(op: str, args: tuple[Any, ...], *outputs: TensorInfo) -> OpCost:
    """The cost of an operator that this process need not have: by its rule alone."""
    verdict = price(OpSignature(op, (), args, (), outputs, is_view=False))
    assert verdict.status == "priced"
    return verdict.cost
