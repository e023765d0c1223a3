"""What torch's exporter imports and builds anew each time, once: half the time that a small model's export takes."""

from __future__ import annotations

import copy
import importlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, NamedTuple

import torch

from edge_opt._support.progress import quiet

_lock = threading.RLock()


class _Registry(NamedTuple):
    """Torch's class of the table from its operators to ONNX's, with the method that builds one."""

    owner: Any
    build: Callable[..., Any]


def start_exporter() -> None:
    """Export the smallest model, for a process that many exports are forked from: what that imports and builds stays.

    An error is left to the export that meets it again.
    """
    with suppress(Exception), translations_kept(), quiet():
        torch.onnx.export(torch.nn.Identity().eval(), (torch.zeros(1),), dynamo=True, verbose=False)
    with suppress(ImportError):
        importlib.import_module("onnxruntime.quantization")


@contextmanager
def translations_kept() -> Iterator[None]:
    """Let exports inside share the table, which each would build for itself.

    Where this version of torch has no such table, they do what they always do.
    """
    found = _registry()
    if found is None:
        yield
        return
    with _lock:
        original = found.owner.__dict__["from_torchlib"]
        found.owner.from_torchlib = staticmethod(_table_to_add_to)
        try:
            yield
        finally:
            found.owner.from_torchlib = original


@cache
def _registry() -> _Registry | None:
    try:
        owner = importlib.import_module("torch.onnx._internal.exporter._registration").ONNXRegistry
        return _Registry(owner, owner.from_torchlib) if "from_torchlib" in owner.__dict__ else None
    except (ImportError, AttributeError):
        return None


def _table_to_add_to(**options: Any) -> Any:
    found = copy.copy(_table(**options))
    found.functions = {target: list(functions) for target, functions in found.functions.items()}
    return found


@cache
def _table(**options: Any) -> Any:
    found = _registry()
    assert found is not None
    return found.build(**options)
