"""A model's file as a torch module without weights: a trace of it is a reading of the file, and runs nothing."""

from __future__ import annotations

import re
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import nn

from edge_opt.model_files.file_records import ModelFile
from edge_opt.model_files.graph_call import MOST_ELEMENTS, torch_dtype
from edge_opt.model_files.graph_plan import Plan, identifier
from edge_opt.model_files.graph_reading import Run
from edge_opt.model_files.graph_scopes import Span, root_kind
from edge_opt.trace.inputs import FileModule

_MOST_FUSED = 4


class ScopeModule(nn.Module):
    """A module of the model that was exported. It is called with stand-ins for what it reads, to show their shapes."""

    def forward(self, run: Run, span: Span, *shown: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return run.inside(span)


class FileModel(FileModule):
    """A model read from a file: its weights have shapes and no values, and a call of it is a reading.

    Attributes:
        file: The file that it was read from.
    """

    def __init__(self, file: ModelFile) -> None:
        super().__init__()
        self.file = file.path
        self.plan = Plan(file)
        known: dict[str, nn.Module] = {"": self}
        for path, kind in self.plan.modules.items():
            _attach(known, path, kind)
        owners = dict(self.named_modules(remove_duplicate=False))
        for name, tensor in self.plan.tensors.items():
            role = self.plan.roles[name]
            owner = owners[self.plan.owners.get(name, "")]
            table: Any = owner._parameters if role == "parameter" else owner._buffers
            if role != "constant":
                table[_free_key(name, owner)] = tensor
        kind = root_kind(file.graph.nodes)
        if kind:
            _show_class(self, kind)

    def forward(self, *given: Any, **named: Any) -> Any:
        inputs = self.plan.arguments(given, named)
        run = Run(self.plan, dict(self.named_modules()), inputs)
        return run.whole()

    def session(self, threads: int | None = None) -> nn.Module:
        """The file as its own runtime runs it, to be measured.

        Args:
            threads: Threads of the runtime; as many as torch uses unless given.
        """
        raise NotImplementedError

    def module_of(self, name: str, op: str = "") -> str | None:
        """Path of the module behind a kernel of a runtime; None where no node has that name.

        Args:
            name: Name of a node of the file, or of a value that it makes.
            op: What the kernel computes, such as "Conv". A fused one is named after the last of its nodes, so the
                nearest node of that type in front of it is meant.
        """
        plan = self.plan
        place = plan.places.get(name)
        if place is None:
            return None
        family = re.sub(r"^(QLinear|Fused|Q)|Integer$", "", op)
        seen = place
        for _ in range(_MOST_FUSED):
            if not family or plan.nodes[seen].op == family:
                return plan.paths[seen]
            before = plan.places.get(next((one for one in plan.nodes[seen].inputs if one in plan.places), ""))
            if before is None:
                break
            seen = before
        return plan.paths[place]

    @property
    def input_dtype(self) -> torch.dtype | None:
        """What an input is of that is given by its shape alone: the type of the file's inputs, of floats first."""
        return self.plan.input_dtype

    def example(self) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Inputs of the shapes that the file gives, an open first dimension taken as 1; None where more is open."""
        found = []
        for value in self.plan.file.graph.inputs:
            if value.shape is None or value.dtype is None:
                return None
            first, *others = value.shape or (1,)
            if not all(isinstance(dim, int) and dim > 0 for dim in others):
                return None
            batch = first if isinstance(first, int) and first > 0 else 1
            sizes = (batch, *(int(dim) for dim in others)) if value.shape else ()
            if prod(sizes) > MOST_ELEMENTS:
                return None
            found.append(torch.empty(sizes, dtype=torch_dtype(value.dtype), device="meta"))
        return tuple(found), {}


def _free_key(name: str, owner: nn.Module) -> str:
    key = name.rpartition(".")[2] or "value"
    taken = {*owner._parameters, *owner._buffers, *owner._modules}
    return key if key not in taken else f"{key}_{len(taken)}"


def _attach(known: dict[str, nn.Module], path: str, kind: str) -> None:
    """Hang a module into the tree under the nearest one that is there, and note it by its path."""
    parent = path
    while parent and (parent == path or parent not in known):
        parent = parent.rpartition(".")[0]
    module = ScopeModule()
    _show_class(module, kind)
    known[parent]._modules[path.removeprefix(parent).removeprefix(".")] = known[path] = module


def _show_class(module: nn.Module, kind: str) -> None:
    """Give a module the name of the class it was exported from, as tables and other tools' conventions show it."""
    defined_in, _, name = kind.rpartition(".")
    if type(module) is ScopeModule:
        module.__class__ = _class(identifier(name), defined_in)
    else:
        cls = type(module)
        module.__class__ = type(identifier(name), (cls,), {"__module__": defined_in or cls.__module__})


@lru_cache(maxsize=1024)
def _class(name: str, defined_in: str) -> type[ScopeModule]:
    """One class for all modules of a kind: making a class is slow."""
    return type(name, (ScopeModule,), {"__module__": defined_in or ScopeModule.__module__})
