"""An `.onnx` file to be quantized: run as it is by ONNX Runtime, and copied with the paths of its modules."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn

from edge_opt._support.files import own_folder
from edge_opt._support.progress import quiet
from edge_opt.errors import ConversionFailed, InvalidInput, first_line
from edge_opt.measuring.file_session import open_file_session
from edge_opt.model_files.execution_plan import identifier
from edge_opt.model_files.file_model import FileModel, OnnxModel
from edge_opt.profiling import profile
from edge_opt.quantization.onnx_files import EXTERNAL_DATA_BYTES, PATH_KEY, require, size_of
from edge_opt.records.conversions import Exported
from edge_opt.runtimes.model_call import ModelCall, flat_call
from edge_opt.runtimes.protocol import Runtime
from edge_opt.runtimes.registry import all_runtimes
from edge_opt.trace.inputs import call_on

# Per-channel scales and quantised operators that runtimes fuse came with this opset.
_QUANTIZABLE_OPSET = 13
_QUANTIZED = frozenset(
    "QuantizeLinear DequantizeLinear DynamicQuantizeLinear QLinearConv QLinearMatMul MatMulInteger ConvInteger "
    "MatMulNBits".split()
)
_RECURRENT = frozenset(("LSTM", "GRU", "RNN"))
_ATTENTION = frozenset(("Attention", "MultiHeadAttention", "GroupQueryAttention"))


class _SourceFile(nn.Module):
    """The file as ONNX Runtime runs it, with its inputs one after the other: what a quantized one is compared with."""

    def __init__(self, model: OnnxModel) -> None:
        super().__init__()
        self._source = [model]  # in a list, so that its modules are not modules of this one
        self._session = [open_file_session(model, 1)]

    def forward(self, *tensors: torch.Tensor) -> Any:
        return self._session[0](*tensors)

    def flops(self, tensors: tuple[torch.Tensor, ...]) -> float:
        """What a call of these shapes costs, by the file."""
        return float(profile(self._source[0], list(tensors)).totals.flops)


def is_file(model: nn.Module) -> bool:
    return isinstance(model, FileModel)


def file_call(
    model: nn.Module, inputs: Any, kwargs: Mapping[str, Any] | None, precision: str, runtime: Runtime
) -> tuple[ModelCall, Exported]:
    """Return the call of a file as ONNX Runtime runs it, and a copy of the file that quantizers can work on."""
    if not isinstance(model, OnnxModel):
        raise InvalidInput("only .onnx files are quantized; give the model that the other file was made of")
    if precision not in ("int8", "int4") or not runtime.runs_onnx:
        names = " or ".join(other.name for other in all_runtimes() if other.runs_onnx)
        raise InvalidInput(
            f"an .onnx file becomes int8 or int4 for {names}, not {precision} for {runtime.name}; "
            "give the model's source for others"
        )
    quantized = next((node.op for node in model.plan.nodes if node.op in _QUANTIZED), None)
    if quantized is not None:
        raise InvalidInput(f"{str(model.file)!r} is quantized already: it has {quantized}; give the float file")
    original = _SourceFile(model)
    original.__class__ = type(identifier(model.file.stem), (_SourceFile,), {})
    arguments = call_on(original, inputs, kwargs, "cpu")
    tensors = tuple(model.plan.arguments(arguments.args, arguments.kwargs).values())
    # It has no state to copy, and a session cannot be copied.
    call = flat_call(original, tensors, tuple(model.plan.names))
    return call, _labelled(model, own_folder())


def _file_scheme(model: OnnxModel) -> str:
    """Return how a file is quantized unless asked: dynamic where it is recurrent or mostly attention, else static."""
    nodes = model.plan.nodes
    if any(node.op in _RECURRENT for node in nodes):
        return "dynamic"
    weighted = {name for node in nodes if node.op == "Softmax" for name in node.outputs}
    attends = any(
        node.op in _ATTENTION or (node.op == "MatMul" and weighted.intersection(node.inputs)) for node in nodes
    )
    sizes = [(len(tensor.shape), prod(tensor.shape)) for tensor in model.parameters()]
    matrices = sum(size for rank, size in sizes if rank == 2)
    return "dynamic" if attends and matrices > sum(size for rank, size in sizes if rank > 2) else "static"


def _labelled(model: OnnxModel, folder: Path) -> Exported:
    """Write a copy of the file in which each node has a name and says whose it is."""
    onnx = require("onnx")
    graph = model.plan.file.graph
    target = folder / f"source-{model.file.name}"
    try:
        with quiet():
            copy = onnx.load(str(model.file))
            owners: dict[str, str] = {}
            for place, node in enumerate(copy.graph.node):
                node.name = node.name if node.name and node.name not in owners else f"{node.op_type}_{place}"
                owners[node.name] = model.plan.paths[place]
            if model.plan.file.opset < _QUANTIZABLE_OPSET:
                copy = onnx.version_converter.convert_version(copy, _QUANTIZABLE_OPSET)
            for node in copy.graph.node:
                del node.metadata_props[:]
                node.metadata_props.add(key=PATH_KEY, value=owners.get(node.name, ""))
            is_big = size_of(model.file) > EXTERNAL_DATA_BYTES or copy.ByteSize() > EXTERNAL_DATA_BYTES
            onnx.save(copy, str(target), save_as_external_data=is_big, location=f"{target.name}.data")
    except OSError:
        raise
    except Exception as error:  # whatever onnx raises of a file that runtimes may still take
        raise ConversionFailed(f"{str(model.file)!r} cannot be prepared: {first_line(error)}") from error
    first = graph.inputs[0].shape or () if graph.inputs else ()
    batch = first[0] if first and isinstance(first[0], int) and first[0] > 0 else None
    outputs = tuple(value.name for value in graph.outputs)
    return Exported(str(target), tuple(model.plan.names), outputs, batch, size_of(model.file))


SCHEMES = ("auto", "static", "dynamic", "weights")
_RECURRENT_LAYERS = (nn.LSTM, nn.GRU, nn.RNN)


def chosen_scheme(model: nn.Module, precision: str, runtime: Runtime, scheme: str) -> str:
    """Return how weights and activations become integers; "auto" goes by what the model is made of.

    Static needs ranges and pays off in convolutions. Recurrent layers have no static kernels, and activations of
    transformers have outliers that one range for all inputs serves badly: both are quantized as values come.
    """
    if scheme not in SCHEMES:
        raise InvalidInput(f"unknown scheme {scheme!r}; it is one of {', '.join(SCHEMES)}")
    if precision == "int4":
        if scheme in ("static", "dynamic"):
            raise InvalidInput("int4 is of weights only; leave scheme out, or use int8")
        return "weights"
    scheme = runtime.int8_scheme if scheme == "auto" else scheme
    if scheme != "auto":
        return scheme
    if isinstance(model, OnnxModel):
        return _file_scheme(model)
    if any(isinstance(module, _RECURRENT_LAYERS) for module in model.modules()):
        return "dynamic"
    has_attention = any("attention" in type(module).__name__.lower() for module in model.modules())
    matrices = sum(p.numel() for p in model.parameters() if p.dim() == 2)
    kernels = sum(p.numel() for p in model.parameters() if p.dim() > 2)
    return "dynamic" if has_attention and matrices > kernels else "static"
