"""A model's file as a torch module: a trace of it is a reading of the file, without weights, which runs nothing.

What is measured of a file is `measuring.session.FileSession`: the file in its own runtime, never this module.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from edge_opt import units
from edge_opt.errors import InvalidInput
from edge_opt.model_files.execution_plan import ExecutionPlan
from edge_opt.model_files.file_graph import ModelFile, read_errors
from edge_opt.model_files.graph_interpreter import GraphInterpreter, Reading
from edge_opt.model_files.node_call import torch_dtype
from edge_opt.model_files.onnx_reader import read_onnx
from edge_opt.model_files.tflite_arena import Arena, plan_arena
from edge_opt.model_files.tflite_reader import read_tflite
from edge_opt.records.costs import Trace
from edge_opt.trace.inputs import MOST_ELEMENTS, ShapeOnlyModule
from edge_opt.trace.tape import current_tape
from edge_opt.trace.tracer import trace

_MOST_FUSED = 4
# Operators of ONNX that are only in a file whose products are computed in int8.
_QUANTIZING = frozenset(("QuantizeLinear", "QLinearConv", "QLinearMatMul", "ConvInteger", "MatMulInteger"))


class FileModel(ShapeOnlyModule):
    """A model read from a file: its weights have shapes and no values, and a call of it is a reading.

    Attributes:
        file: The file that it was read from.
    """

    def __init__(self, file: ModelFile) -> None:
        super().__init__()
        self.file = file.path
        with read_errors(file.path):
            self.plan = ExecutionPlan(file)
        # Modules of the exported model hold its weights, each under its whole path; they are never called.
        owners = {path: nn.Module() for path in self.plan.modules}
        self._modules.update(owners)
        owners[""] = self
        for name, tensor in self.plan.tensors.items():
            role = self.plan.roles[name]
            owner = owners[self.plan.owners.get(name, "")]
            table: Any = owner._parameters if role == "parameter" else owner._buffers
            if role != "constant":
                table[_free_key(name, owner)] = tensor

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        outputs, reading = self.interpret(args, kwargs)
        tape = current_tape()
        if tape is not None and tape.stack.current is not None:
            tape.notes += self.notes(reading)
            if self.plan.kind:
                tape.stack.current.show_as(self.plan.kind)
        return outputs

    def interpret(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Reading]:
        """Read the graph with these tensors: return its outputs, and what was noted on the way."""
        interpreter = GraphInterpreter(self.plan, self.plan.arguments(args, kwargs))
        return interpreter.whole(), interpreter.reading

    def read(self, inputs: Any, kwargs: Mapping[str, Any] | None = None) -> tuple[Trace, Reading]:
        """Trace the file, and return what was noted of its nodes and values as well.

        Args:
            inputs: As in `profile`; the shape of one call.
            kwargs: Arguments of the model by name.
        """
        readings: list[Reading] = []
        return trace(_TracedReading(self), inputs, kwargs, results=readings), readings[0]

    def notes(self, reading: Reading) -> list[str]:
        """Return what readers of a profile should know beside its figures."""
        return []

    def module_of(self, name: str, op: str = "") -> str | None:
        """Return the path of the module behind a kernel of a runtime; None where no node has that name.

        Args:
            name: Name of a node of the file, or of a value that it makes.
            op: What the kernel computes, such as "Conv". A fused one is named after the last of its nodes, so the
                nearest node of that type in front of it is meant.
        """
        plan = self.plan
        index = plan.indices.get(name)
        if index is None:
            return None
        family = re.sub(r"^(QLinear|Fused|Q)|Integer$", "", op)
        candidate = index
        for _ in range(_MOST_FUSED):
            if not family or plan.nodes[candidate].op == family:
                return plan.paths[candidate]
            sources = (plan.indices[name] for name in plan.nodes[candidate].inputs if name in plan.indices)
            maker = next(sources, None)
            if maker is None:
                break
            candidate = maker
        return plan.paths[index]

    @property
    def input_dtype(self) -> torch.dtype | None:
        """The type of an input that is given by its shape alone: that of the file's inputs, floats first."""
        dtypes = [torch_dtype(value.dtype) for value in self.plan.file.graph.inputs if value.dtype]
        return next((dtype for dtype in dtypes if dtype.is_floating_point), dtypes[0] if dtypes else None)

    @property
    def computes_in(self) -> Literal["fp32", "int8"]:
        """The type that most of the file's values have: int8 where they are bytes, or nodes quantize them."""
        graph = self.plan.file.graph
        if any(node.op in _QUANTIZING for node in graph.nodes):
            return "int8"
        sizes: Counter[str] = Counter()
        for name in {name for node in graph.nodes for name in node.outputs}:
            value = graph.values.get(name)
            if value is not None and value.dtype and value.shape is not None:
                sizes[value.dtype] += prod(dim for dim in value.shape if isinstance(dim, int))
        return "int8" if sizes and sizes.most_common(1)[0][0] in ("int8", "uint8") else "fp32"

    def example(self) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Return inputs of the file's shapes, an open first dimension taken as 1; None where more is open."""
        tensors = []
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
            tensors.append(torch.empty(sizes, dtype=torch_dtype(value.dtype), device="meta"))
        return tuple(tensors), {}


class _TracedReading(ShapeOnlyModule):
    """Reads a file under a trace, and returns what was noted in the place of the file's outputs.

    A trace restores every object that it can reach, so notes on the model or its plan would be lost with it.
    """

    def __init__(self, model: FileModel) -> None:
        super().__init__()
        self.model = model

    @property
    def input_dtype(self) -> torch.dtype | None:
        return self.model.input_dtype

    def forward(self, *args: Any, **kwargs: Any) -> Reading:
        return self.model.interpret(args, kwargs)[1]


def _free_key(name: str, owner: nn.Module) -> str:
    key = name.rpartition(".")[2] or "value"
    tables: tuple[Any, ...] = (owner._parameters, owner._buffers, owner._modules)
    return key if not any(key in table for table in tables) else f"{key}_{sum(map(len, tables))}"


class OnnxModel(FileModel):
    """A model read from an `.onnx` file."""


def load_onnx(path: str | Path) -> OnnxModel:
    """Load the model of an `.onnx` file, to be profiled, compared and checked like any other; nothing in it is run.

    Args:
        path: The file.
    """
    return OnnxModel(read_onnx(path))


class TfliteModel(FileModel):
    """A model read from a `.tflite` file."""

    def arena(self, inputs: Any = None, kwargs: Mapping[str, Any] | None = None) -> Arena:
        """Return where the interpreter's planner places the tensors, without a delegate.

        Args:
            inputs: As in `profile`; None for the shapes that the file gives.
            kwargs: Arguments of the model by name.
        """
        if inputs is None and not kwargs:
            example = self.example()
            if example is None:
                raise InvalidInput("the file leaves the shapes of its inputs open; pass them, such as arena((1, 64))")
            inputs = list(example[0])
        return self._arena(self.read(inputs, kwargs)[1])

    def _arena(self, reading: Reading) -> Arena:
        plan, nbytes = self.plan, reading.value_bytes
        run = [node for index, node in enumerate(plan.nodes) if index not in plan.folded]
        widened = {node.outputs[0] for index, node in enumerate(plan.nodes)
                   if index in plan.folded and node.op == "DEQUANTIZE"}  # fmt: skip
        in_arena = {*plan.names, *(name for node in run for name in node.outputs)}
        ordered = [name for name in plan.file.graph.values if name in nbytes]
        outputs = [value.name for value in plan.file.graph.outputs]
        return plan_arena(
            run, plan.names, outputs, {name: nbytes[name] for name in ordered if name in in_arena},
            {name: nbytes[name] for name in ordered if name in widened},
        )  # fmt: skip

    def notes(self, reading: Reading) -> list[str]:
        """Return the size of the arena, as a sentence."""
        arena = self._arena(reading)
        kept = f", and {units.size(arena.persistent_bytes)} for weights widened once" if arena.persistent_bytes else ""
        return [f"TFLite's planner places the tensors in an arena of {units.size(arena.nbytes)}{kept}, without a "
                "delegate; scratch of kernels comes on top"]  # fmt: skip


def load_tflite(path: str | Path) -> TfliteModel:
    """Load the model of a `.tflite` file, to be profiled, compared and checked like any other; nothing in it is run.

    Args:
        path: The file.
    """
    return TfliteModel(read_tflite(path))
