"""A model's file as a torch module: read without weights, which runs nothing, or run by the file's own runtime.

A trace of the reading module is a reading of the file. What is measured of a file is the session of its runtime, never
the module that reads it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn

from edge_opt import units
from edge_opt._support.extras import import_optional
from edge_opt.errors import InvalidInput, MeasurementFailed, UnreadableModel, first_line
from edge_opt.model_files.execution_plan import ExecutionPlan, identifier
from edge_opt.model_files.file_graph import ModelFile
from edge_opt.model_files.graph_interpreter import GraphInterpreter
from edge_opt.model_files.module_scopes import Span, root_kind
from edge_opt.model_files.node_call import MOST_ELEMENTS, torch_dtype
from edge_opt.model_files.onnx_reader import read_onnx
from edge_opt.model_files.tflite_arena import Arena, plan_arena
from edge_opt.model_files.tflite_reader import read_tflite
from edge_opt.trace.inputs import FileModule

Arguments = Callable[[tuple[Any, ...], Mapping[str, Any]], dict[str, torch.Tensor]]


class FileSession(nn.Module):
    """A file that a runtime has loaded. It is called as the model is, and returns tensors.

    Attributes:
        version: The runtime with its version, for remarks.
    """

    def __init__(self, arguments: Arguments, version: str) -> None:
        super().__init__()
        self.version = version
        self._arguments = arguments

    def arrays(self, arrays: dict[str, Any]) -> list[Any]:
        """What the runtime makes of arrays by the names of the file's inputs, in the file's order."""
        raise NotImplementedError

    def forward(self, *given: Any, **named: Any) -> tuple[torch.Tensor, ...]:
        tensors = self._arguments(given, named)
        made = self.arrays({name: tensor.detach().numpy() for name, tensor in tensors.items()})
        # Texts, sequences and maps are no tensors.
        return tuple(
            torch.from_numpy(value) for value in made if hasattr(value, "dtype") and value.dtype.kind in "fiub"
        )


def thread_count(threads: int | None) -> int:
    """As many as torch uses unless given."""
    return torch.get_num_threads() if threads is None else threads


class OnnxSession(FileSession):
    """A file that ONNX Runtime has loaded."""

    def __init__(self, path: Path, arguments: Arguments, threads: int | None = None) -> None:
        runtime = import_optional("onnxruntime", "running an ONNX file needs", "onnx")
        super().__init__(arguments, f"ONNX Runtime {runtime.__version__}")
        options = runtime.SessionOptions()
        options.intra_op_num_threads = thread_count(threads)
        options.log_severity_level = 4
        try:
            self.runtime = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # the runtime's own classes, which differ by version
            raise MeasurementFailed(f"ONNX Runtime cannot load {str(path)!r}: {first_line(error)}") from error

    def arrays(self, arrays: dict[str, Any]) -> list[Any]:
        return list(self.runtime.run(None, arrays))


class _Interpreter:
    """Holds the interpreter: it runs only while nobody else holds its parts, so a copy of the session must not."""

    __slots__ = ("loaded",)

    def __init__(self, path: Path, threads: int) -> None:
        package = import_optional(
            "ai_edge_litert.interpreter", "running a .tflite file needs", "litert", "ai-edge-litert"
        )
        try:
            self.loaded = package.Interpreter(model_path=str(path), num_threads=threads)
            self.loaded.allocate_tensors()
        except (ValueError, RuntimeError) as error:
            raise MeasurementFailed(f"LiteRT cannot load {str(path)!r}: {first_line(error)}") from error


class TfliteSession(FileSession):
    """A file that LiteRT's interpreter has loaded."""

    def __init__(self, path: Path, arguments: Arguments, threads: int | None = None) -> None:
        super().__init__(arguments, "LiteRT")
        self._holder = _Interpreter(path, thread_count(threads))
        self._inputs = self._holder.loaded.get_input_details()
        self._shapes = [tuple(one["shape"]) for one in self._inputs]

    def arrays(self, arrays: dict[str, Any]) -> list[Any]:
        runtime = self._holder.loaded
        # The interpreter and the file list the inputs in one order.
        given = list(arrays.values())
        if [array.shape for array in given] != self._shapes:
            for port, array in zip(self._inputs, given, strict=True):
                runtime.resize_tensor_input(port["index"], array.shape)
            runtime.allocate_tensors()
            self._shapes = [array.shape for array in given]
        for port, array in zip(self._inputs, given, strict=True):
            runtime.set_tensor(port["index"], array)
        runtime.invoke()
        return [runtime.get_tensor(port["index"]) for port in runtime.get_output_details()]


_MOST_FUSED = 4


class ScopeModule(nn.Module):
    """A module of the model that was exported. It is called with stand-ins for what it reads, to show their shapes."""

    def forward(self, run: GraphInterpreter, span: Span, *shown: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return run.inside(span)


class FileModel(FileModule):
    """A model read from a file: its weights have shapes and no values, and a call of it is a reading.

    Attributes:
        file: The file that it was read from.
    """

    def __init__(self, file: ModelFile) -> None:
        super().__init__()
        self.file = file.path
        self.plan = ExecutionPlan(file)
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
        run = GraphInterpreter(self.plan, dict(self.named_modules()), inputs)
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


class OnnxModel(FileModel):
    """A model read from an `.onnx` file."""

    def session(self, threads: int | None = None) -> nn.Module:
        """The file as ONNX Runtime runs it, to be measured.

        Args:
            threads: Threads of the runtime; as many as torch uses unless given.
        """
        return OnnxSession(self.file, self.plan.arguments, threads)


def load_onnx(path: str | Path) -> OnnxModel:
    """The model of an `.onnx` file, to be profiled, compared and checked like any other; nothing in it is run.

    Args:
        path: The file.
    """
    try:
        return OnnxModel(read_onnx(path))
    except RecursionError as error:
        raise UnreadableModel(f"{str(path)!r} cannot be read: its graphs are nested too deep") from error


class TfliteModel(FileModel):
    """A model read from a `.tflite` file."""

    def session(self, threads: int | None = None) -> nn.Module:
        """The file as LiteRT's interpreter runs it, to be measured.

        Args:
            threads: Threads of the interpreter; as many as torch uses unless given.
        """
        return TfliteSession(self.file, self.plan.arguments, threads)

    def arena(self) -> Arena:
        """Where the interpreter's planner places the tensors of the run that was profiled last, without a delegate."""
        plan = self.plan
        if not plan.made_bytes:
            raise InvalidInput("the file was not profiled yet, so its shapes are not known; profile it first")
        run = [node for place, node in enumerate(plan.nodes) if place not in plan.folded]
        kept = {node.outputs[0] for place, node in enumerate(plan.nodes)
                if place in plan.folded and node.op == "DEQUANTIZE"}  # fmt: skip
        made = {*plan.names, *(name for node in run for name in node.outputs)}
        ordered = [name for name in plan.file.graph.values if name in plan.made_bytes]
        outputs = [value.name for value in plan.file.graph.outputs]
        return plan_arena(
            run, plan.names, outputs, {name: plan.made_bytes[name] for name in ordered if name in made},
            {name: plan.made_bytes[name] for name in ordered if name in kept},
        )  # fmt: skip

    def trace_notes(self) -> tuple[str, ...]:
        """What a reader of a profile should know beside its figures: the arena."""
        found = self.arena()
        kept = f", and {units.size(found.persistent_bytes)} for weights widened once" if found.persistent_bytes else ""
        return (f"TFLite's planner places the tensors in an arena of {units.size(found.nbytes)}{kept}, without a "
                "delegate; scratch of kernels comes on top",)  # fmt: skip


def load_tflite(path: str | Path) -> TfliteModel:
    """The model of a `.tflite` file, to be profiled, compared and checked like any other; nothing in it is run.

    Args:
        path: The file.
    """
    return TfliteModel(read_tflite(path))
