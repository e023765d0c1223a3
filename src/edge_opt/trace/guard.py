"""The guard: whatever happens in between, the model and the process are left as they were found."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def as_found(modules: list[nn.Module], training: bool) -> Iterator[None]:
    """Run the modules in the given mode; then restore attributes, flags, random numbers and backend switches.

    Modes are set on each module directly: a model's own `train()` may fuse or merge weights.
    """
    tables = [table for module in modules for table in _attribute_tables(module)]
    copies = [table.copy() if table else None for table in tables]
    scripts = [(module, module.training) for module in modules if isinstance(module, torch.jit.ScriptModule)]
    numbers = _random_states()
    fast_path = torch.backends.mha.get_fastpath_enabled()
    # Fused into one opaque operator, an encoder layer would hide its own layers.
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        for module in modules:
            module.__dict__["training"] = training
        for module, _ in scripts:
            module.training = training
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)
        for module, was_training in scripts:
            module.training = was_training
        for table, copy in zip(tables, copies, strict=True):
            if table or copy:
                table.clear()
                table.update(copy or {})
        _set_random_states(numbers)


def _attribute_tables(module: nn.Module) -> list[dict[str, Any]]:
    """The module's attributes, parameters, buffers, children and hooks; all but the first of a script module's hide."""
    attributes = module.__dict__
    if isinstance(module, torch.jit.ScriptModule):
        return [attributes]
    return [*(attributes[name] for name in _TABLES), attributes]


# Hooks too: transformers adds its own in the first forward, and again if only its note of that is taken back.
_TABLES = (
    "_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called", "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs",
)  # fmt: skip


def _random_states() -> tuple[Any, Any, Any]:
    numpy = sys.modules.get("numpy")
    return torch.get_rng_state(), random.getstate(), numpy.random.get_state() if numpy else None


def _set_random_states(states: tuple[Any, Any, Any]) -> None:
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    if states[2] is not None:
        sys.modules["numpy"].random.set_state(states[2])
