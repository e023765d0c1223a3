"""A model made smaller or put into another precision, and proved: pruned, converted, run, explained."""

from __future__ import annotations

from importlib import import_module
from typing import Any

# Where each public name lives. Nothing is imported until it is asked for.
_HOMES = {
    "Runner": "runtimes",
    "convert": "precision",
    "export_onnx": "exporting",
    "measure_runner": "runtimes",
    "measure_runners": "runtimes",
    "open_runner": "runtimes",
    "precision": "registry",
    "precisions": "registry",
    "profile_runner": "kernels",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'edge_opt.compress' has no attribute {name!r}")
    return getattr(import_module(f"edge_opt.compress.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return list(__all__)
