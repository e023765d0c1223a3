"""Branches, loops and scans that are operators over Python functions: run step by step, as eager torch does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_EAGER = torch._C.DispatchKey.CompositeExplicitAutograd


def steps_of(func: Any) -> Callable[..., Any] | None:
    """What to call in place of a higher-order operator; None where torch has no eager implementation of it.

    A branch follows its condition and a loop runs as often as its condition says, so both need to know its value: where
    it depends on an input, the model is traced with real tensors. A scan is unrolled.
    """
    return _OWN.get(func.name()) or func.py_kernels.get(_EAGER)


def _branch(condition: Any, true_function: Any, false_function: Any, operands: Any = ()) -> Any:
    return (true_function if condition else false_function)(*operands)


def _scan(combine: Any, init: Any, xs: Any, additional_inputs: Any = ()) -> Any:
    from torch._higher_order_ops.scan import generic_scan

    return generic_scan(combine, init, xs, additional_inputs=additional_inputs)  # type: ignore[no-untyped-call]


def _subgraph(subgraph: Any, identifier: Any, *operands: Any) -> Any:
    return subgraph(*operands)


# Those of torch insist that no mode is active.
_OWN: dict[str, Callable[..., Any]] = {"cond": _branch, "scan": _scan, "invoke_subgraph": _subgraph}
