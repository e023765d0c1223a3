"""Exported programs: a .pt2 file turned into a module with the tree it was exported from."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge_opt.errors import ModelNotFound, first_line

if TYPE_CHECKING:
    from torch import nn

Example = tuple[tuple[Any, ...], dict[str, Any]]


def load_exported(path: Path) -> tuple[nn.Module, Example | None]:
    """The module of an exported program, and the arguments it was exported with if the file holds them."""
    if not path.is_file():
        raise ModelNotFound(f"no file {str(path)!r}; torch.export.save(program, path) writes one")
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's own, about its own reader
        try:
            program = torch.export.load(path)
        except Exception as error:  # zip, JSON and torch errors alike: none of them is documented
            raise ModelNotFound(
                f"{str(path)!r} cannot be read by torch {torch.__version__}: {first_line(error)}; export it again"
            ) from error
        try:
            model: nn.Module = torch.export.unflatten(program)
        except Exception:  # whatever it stumbles over: the flat graph is the same model without the tree
            model = program.module()
    for module in model.modules():
        _show_original_type(module)
    return model, program.example_inputs


def _show_original_type(module: nn.Module) -> None:
    """Give a restored module the name of the class it was exported from; all are InterpreterModule otherwise."""
    type_name = getattr(module, "type_name", None)
    original = type_name() if callable(type_name) else None
    if original:
        cls = type(module)
        module.__class__ = type(original.rpartition(".")[2], (cls,), {"__module__": cls.__module__})
