"""The classes of all records."""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import is_dataclass

from edge_opt import records


def record_kinds() -> list[type]:
    """Return every class of a record, file by file."""
    modules = [
        importlib.import_module(f"{records.__name__}.{item.name}") for item in pkgutil.iter_modules(records.__path__)
    ]
    return [
        kind
        for module in modules
        for kind in vars(module).values()
        if isinstance(kind, type) and is_dataclass(kind) and kind.__module__ == module.__name__
    ]
