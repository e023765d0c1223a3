"""What a PyTorch model costs on limited hardware, layer by layer, before and after it is shrunk."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edge_opt.cost.conventions import reconcile
    from edge_opt.cost.registry import Work, cost_rule, free_operators
    from edge_opt.errors import EdgeOptError
    from edge_opt.measure.api import measure
    from edge_opt.profiling import clear_caches, profile
    from edge_opt.records import ModelProfile, OpCost, TensorInfo
    from edge_opt.report.writers import load
    from edge_opt.trace.inputs import InputSpec

__version__ = "0.1.0"

__all__ = [
    "EdgeOptError",
    "InputSpec",
    "ModelProfile",
    "OpCost",
    "TensorInfo",
    "Work",
    "clear_caches",
    "cost_rule",
    "free_operators",
    "load",
    "measure",
    "profile",
    "reconcile",
]

# Where each public name lives. Nothing is imported until it is asked for, so that `import edge_opt` costs nothing.
_HOMES = {
    "EdgeOptError": "errors",
    "InputSpec": "trace.inputs",
    "ModelProfile": "records",
    "OpCost": "records",
    "TensorInfo": "records",
    "Work": "cost.registry",
    "clear_caches": "profiling",
    "cost_rule": "cost",
    "free_operators": "cost",
    "load": "report.writers",
    "measure": "measure.api",
    "profile": "profiling",
    "reconcile": "cost.conventions",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'edge_opt' has no attribute {name!r}")
    value = getattr(import_module(f"edge_opt.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
