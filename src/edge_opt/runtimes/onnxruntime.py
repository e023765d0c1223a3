"""ONNX Runtime: ONNX files on the CPU, also files that were given instead of a model."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from edge_opt._support.files import own_folder
from edge_opt._support.progress import quiet
from edge_opt.errors import InvalidInput, translated
from edge_opt.measuring.runtime_profile import ProfileEntry, read_onnxruntime
from edge_opt.measuring.session import FileSession, open_session, reason
from edge_opt.model_files.execution_plan import identifier
from edge_opt.model_files.file_model import OnnxModel
from edge_opt.quantization.onnx_files import EXTERNAL_DATA_BYTES, PATH_KEY, Tensors, require, size_of
from edge_opt.records.conversions import Exported
from edge_opt.runtimes.export import QuantizableModel, build_float
from edge_opt.runtimes.kernels import inspect_kernels
from edge_opt.runtimes.model_call import ModelCall, flat_call
from edge_opt.runtimes.protocol import BuiltModel, ConversionRequest, Inspection, Program, Runner, Runtime, as_arrays
from edge_opt.runtimes.registry import all_runtimes
from edge_opt.trace.inputs import call_on


class OnnxRuntimeRunner(Runner):
    """An ONNX file in ONNX Runtime on the CPU."""

    runtime = "onnxruntime"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._loaded = open_session(self.path, self.threads)

    def feeds(self, inputs: Sequence[Any]) -> dict[str, Any]:
        """Return the inputs by their names in the file."""
        names = [entry.name for entry in self.loaded.get_inputs()]
        return dict(zip(names, as_arrays(inputs, len(names)), strict=True))

    def __call__(self, *inputs: Any) -> tuple[torch.Tensor, ...]:
        feeds = self.feeds(inputs)
        with translated("ONNX Runtime refused the inputs", InvalidInput, describe=reason):
            return tuple(torch.from_numpy(array) for array in self.loaded.run(None, feeds))

    def bind(self, *inputs: Any) -> Callable[[], object]:
        session, feeds = self.loaded, self.feeds(inputs)
        return lambda: session.run(None, feeds)

    def kernel_times(self, inputs: Sequence[Any], repeats: int) -> Sequence[ProfileEntry]:
        """Profile runs in a session of its own; the first, which allocates, does not count."""
        with tempfile.TemporaryDirectory(prefix="edge-opt-") as folder:
            session = open_session(self.path, self.threads, str(Path(folder) / "run"))
            feeds = self.feeds(inputs)
            with translated(f"ONNX Runtime cannot run {self.path.name}", describe=reason):
                for _ in range(1 + repeats):
                    session.run(None, feeds)
            return read_onnxruntime(json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))).kernels


_BODY = """
session = onnxruntime.InferenceSession(str(FOLDER / "model.onnx"), providers=["CPUExecutionProvider"])
names = [entry.name for entry in session.get_inputs()]
scores = session.run(None, dict(zip(names, inputs)))[0]
"""


class OnnxRuntime(Runtime):
    """ONNX Runtime on the CPU."""

    name = "onnxruntime"
    suffix = "onnx"
    package = "onnxruntime"
    runner = OnnxRuntimeRunner
    extra = "onnx"
    requires = ("onnxruntime", "onnx", "onnxscript")
    precisions = MappingProxyType(dict.fromkeys(("fp32", "fp16", "bf16", "int8", "int4"), ""))
    runs_onnx = True
    keeps_float = True

    def build(self, request: ConversionRequest) -> BuiltModel:
        """Write an ONNX file in the precision."""
        if request.precision in ("int8", "int4"):
            return QuantizableModel(request).build(request)
        return build_float(request, request.precision)

    def inspect(self, built: BuiltModel, runner: Any, request: ConversionRequest, batch: Tensors) -> Inspection:
        """Read kernels from its profiler."""
        return inspect_kernels(runner, request.precision, batch)

    def program(self, precision: str) -> Program:
        """Open the file and run it."""
        return Program("onnxruntime", "import onnxruntime", _BODY)


# Per-channel scales and quantized operators that runtimes fuse came with this opset.
_QUANTIZABLE_OPSET = 13
_QUANTIZED = frozenset(
    "QuantizeLinear DequantizeLinear DynamicQuantizeLinear QLinearConv QLinearMatMul MatMulInteger ConvInteger "
    "MatMulNBits".split()
)


class _SourceFile(nn.Module):
    """The file as ONNX Runtime runs it, with its inputs one after the other: what a quantized one is compared with."""

    def __init__(self, model: OnnxModel) -> None:
        super().__init__()
        # In lists, so that their modules are not modules of this one.
        self.source, self._session = [model], [FileSession(model, 1)]

    def forward(self, *tensors: torch.Tensor) -> Any:
        return self._session[0](*tensors)


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
    return flat_call(original, tensors, tuple(model.plan.names)), _labelled(model, own_folder())


def _labelled(model: OnnxModel, folder: Path) -> Exported:
    """Write a copy of the file in which each node has a name and says whose it is."""
    onnx = require("onnx")
    graph = model.plan.file.graph
    target = folder / f"source-{model.file.name}"
    with quiet(), translated(f"{str(model.file)!r} cannot be prepared"):
        copy = onnx.load(str(model.file))
        owners: dict[str, str] = {}
        for number, node in enumerate(copy.graph.node):
            node.name = node.name if node.name and node.name not in owners else f"{node.op_type}_{number}"
            owners[node.name] = model.plan.paths[number]
        if model.plan.file.opset < _QUANTIZABLE_OPSET:
            copy = onnx.version_converter.convert_version(copy, _QUANTIZABLE_OPSET)
        for node in copy.graph.node:
            del node.metadata_props[:]
            node.metadata_props.add(key=PATH_KEY, value=owners.get(node.name, ""))
        is_big = size_of(model.file) > EXTERNAL_DATA_BYTES or copy.ByteSize() > EXTERNAL_DATA_BYTES
        onnx.save(copy, str(target), save_as_external_data=is_big, location=f"{target.name}.data")
    first = graph.inputs[0].shape or () if graph.inputs else ()
    batch = first[0] if first and isinstance(first[0], int) and first[0] > 0 else None
    outputs = tuple(value.name for value in graph.outputs)
    return Exported(str(target), tuple(model.plan.names), outputs, batch, size_of(model.file))


SCHEMES = ("auto", "static", "dynamic", "weights")
_ATTENTION = ("Attention", "MultiHeadAttention", "GroupQueryAttention")
_RECURRENT = ("LSTM", "GRU", "RNN")


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
        nodes = model.plan.nodes
        is_recurrent = any(node.op in _RECURRENT for node in nodes)
        weighted = {name for node in nodes if node.op == "Softmax" for name in node.outputs}
        # Its products are written out in most files: weights of a softmax, times values.
        has_attention = any(
            node.op in _ATTENTION or (node.op == "MatMul" and weighted.intersection(node.inputs)) for node in nodes
        )
    else:
        is_recurrent = any(isinstance(module, (nn.LSTM, nn.GRU, nn.RNN)) for module in model.modules())
        has_attention = any("attention" in type(module).__name__.lower() for module in model.modules())
    if is_recurrent:
        return "dynamic"
    matrices = sum(p.numel() for p in model.parameters() if p.dim() == 2)
    kernels = sum(p.numel() for p in model.parameters() if p.dim() > 2)
    return "dynamic" if has_attention and matrices > kernels else "static"
