"""The clock: a dispatch mode that times every operator that a trace would record."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from edge_opt.trace.operators import Behavior, behavior, operator_name

_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


class OperatorClock(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Times each operator that a trace would record, in the same order; views included."""

    def __init__(self, now: Callable[[], int] = time.perf_counter_ns) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._now = now
        self.names: list[str] = []
        self.nanoseconds: list[int] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if behavior(func) is Behavior.DECOMPOSE:
            with self:
                return func._op_dk(_COMPOSITE, *args, **kwargs)
        start = self._now()
        result = func(*args, **kwargs)
        self.nanoseconds.append(self._now() - start)
        self.names.append(operator_name(func))
        return result
