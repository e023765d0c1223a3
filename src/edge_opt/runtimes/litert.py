"""LiteRT: .tflite files by litert-torch, int8 by its quantizer, run by its interpreter."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from edge_opt._support.extras import import_optional
from edge_opt._support.progress import quiet
from edge_opt.errors import translated
from edge_opt.quantization.onnx_files import Tensors
from edge_opt.records.conversions import Exported, LayerPrecision
from edge_opt.runtimes.export import first_success
from edge_opt.runtimes.model_call import BatchAttempt, FlatModel, ModelCall, in_batches_of
from edge_opt.runtimes.protocol import (
    FP32_AND_INT8,
    BuiltModel,
    ConversionRequest,
    Inspection,
    PiecewiseRunner,
    Program,
    Runtime,
    as_arrays,
)

_LAYERS = {
    "CONV_2D", "DEPTHWISE_CONV_2D", "TRANSPOSE_CONV", "CONV_3D", "FULLY_CONNECTED", "BATCH_MATMUL",
    "UNIDIRECTIONAL_SEQUENCE_LSTM",
}  # fmt: skip
_RECIPES = {"static": "static_wi8_ai8", "dynamic": "dynamic_wi8_afp32", "weights": "weight_only_wi8_afp32"}
_NAMES = {np.int8: "int8", np.uint8: "int8", np.float32: "fp32", np.float16: "fp16"}


def _part(module: str) -> Any:
    return import_optional(module, "LiteRT needs", "litert", module.partition(".")[0].replace("_", "-"))


class LiteRtRunner(PiecewiseRunner):
    """A .tflite file in LiteRT's interpreter, with XNNPACK where it applies."""

    runtime = "litert"
    title = "LiteRT"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        kind = _part("ai_edge_litert.interpreter").Interpreter
        with quiet(), translated(f"LiteRT cannot load {self.path.name}"):
            self._loaded = kind(model_path=str(self.path), num_threads=self.threads)
            self._loaded.allocate_tensors()

    def operators(self) -> list[dict[str, Any]]:
        """Return its operators with the types they compute in.

        The method is private, and the only one that tells the types of operands; the public `get_tensor_details` does
        not say which operator reads a tensor. To check when LiteRT changes: the keys `op_name`, `operand_types`,
        `inputs` and `outputs`.
        """
        return [entry for entry in self.loaded._get_ops_details() if entry["op_name"] != "DELEGATE"]

    def _ports(self, what: str) -> list[dict[str, Any]]:
        """Return inputs or outputs in the model's order; the interpreter keeps an order of its own."""
        signature = self.loaded.get_signature_runner()
        ports = signature.get_input_details() if what == "input" else signature.get_output_details()
        return [ports[name] for name in sorted(ports, key=lambda name: int(name.rpartition("_")[2]))]

    def input_shapes(self) -> Sequence[Sequence[int]]:
        return [port["shape_signature"] for port in self._ports("input")]

    def bind_piece(self, inputs: tuple[Any, ...]) -> Callable[[], Any]:
        ports = self._ports("input")
        arrays = as_arrays(inputs, len(ports))
        interpreter = self.loaded
        for port, array in zip(ports, arrays, strict=True):
            if tuple(interpreter._get_tensor_details(port["index"], 0)["shape"]) != array.shape:
                interpreter.resize_tensor_input(port["index"], array.shape, strict=True)
        interpreter.allocate_tensors()
        feeds = [(port["index"], _quantized(array, port)) for port, array in zip(ports, arrays, strict=True)]

        def call() -> None:
            for index, array in feeds:
                interpreter.set_tensor(index, array)
            interpreter.invoke()

        return call

    def outputs_of(self, result: Any) -> tuple[torch.Tensor, ...]:
        return tuple(torch.from_numpy(self._read(port)) for port in self._ports("output"))

    def _read(self, port: dict[str, Any]) -> Any:
        scale, zero = port["quantization"]
        value = self.loaded.get_tensor(port["index"])
        return ((value.astype(np.float32) - zero) * np.float32(scale)) if scale else value.copy()


def _quantized(array: Any, port: dict[str, Any]) -> Any:
    """Return the input in the type that the file takes."""
    scale, zero = port["quantization"]
    if not scale:
        return array.astype(port["dtype"])
    limits = np.iinfo(port["dtype"])
    return np.clip(np.round(array / scale) + zero, limits.min, limits.max).astype(port["dtype"])


_BODY = """
interpreter = Interpreter(model_path=str(FOLDER / "model.tflite"))


def ordered(results):
    return [results[name] for name in sorted(results, key=lambda name: int(name.rpartition("_")[2]))]


# The runner of the signature is not kept: nothing is allocated while somebody holds it.
ports = ordered(interpreter.get_signature_runner().get_input_details())
first = ordered(interpreter.get_signature_runner().get_output_details())[0]
# A file that takes one batch only is called for one after the other.
size = max(int(ports[0]["shape_signature"][0]), 0) or len(inputs[0])
for port, value in zip(ports, inputs):
    interpreter.resize_tensor_input(port["index"], value[:size].shape)
interpreter.allocate_tensors()
results = []
for start in range(0, len(inputs[0]) - size + 1, size):
    batch = [value[start : start + size] for value in inputs]
    for port, value in zip(ports, batch):
        scale, zero = port["quantization"]
        limits = np.iinfo(port["dtype"]) if scale else None
        rounded = np.clip(np.round(value / scale) + zero, limits.min, limits.max) if scale else value
        interpreter.set_tensor(port["index"], rounded.astype(port["dtype"]))
    interpreter.invoke()
    scale, zero = first["quantization"]
    answer = interpreter.get_tensor(first["index"]).copy()
    results.append((answer.astype(np.float32) - zero) * scale if scale else answer)
scores = np.concatenate(results)
"""


class LiteRt(Runtime):
    """LiteRT, formerly TensorFlow Lite."""

    name = "litert"
    suffix = "tflite"
    package = "ai_edge_litert.interpreter"
    runner = LiteRtRunner
    extra = "litert"
    requires = ("litert_torch", "ai_edge_litert", "ai_edge_quantizer")
    precisions = FP32_AND_INT8
    may_fix_batch = True
    kernels = "XNNPACK"

    def build(self, request: ConversionRequest) -> BuiltModel:
        """Write a .tflite file; int8 by the recipe of the scheme."""
        path = request.path if request.precision == "fp32" else request.folder / f"float-{request.filename}"
        exported = request.exported
        if exported is None:
            exported = export_tflite(request.call, path, request.fixed_batch)
        else:
            shutil.copyfile(exported.path, path)
        source = BuiltModel(path, remarks=exported.remarks, batch=exported.batch)
        if request.precision == "fp32":
            return source
        _quantize(request, source)
        return replace(source, path=request.path)

    def inspect(self, built: BuiltModel, runner: Any, request: ConversionRequest, batch: Tensors) -> Inspection:
        """Read the types of operands from the interpreter; it tells no kernels."""
        paths = tuple(name for name, _ in request.call.model.named_modules())
        return Inspection((), _layers(runner, paths, request.precision))

    def program(self, precision: str) -> Program:
        """Feed the interpreter piece by piece, rounding inputs as the file takes them."""
        return Program("ai-edge-litert", "from ai_edge_litert.interpreter import Interpreter", _BODY)


def _quantize(request: ConversionRequest, source: BuiltModel) -> None:
    """Quantize the file by its scheme: ranges from calibration, of each input, or weights computed in float."""
    package, recipes = _part("ai_edge_quantizer"), _part("ai_edge_quantizer.recipe")
    with quiet(), translated("LiteRT could not quantize the model"):
        quantizer = package.quantizer.Quantizer(str(source.path))
        recipe = getattr(recipes, _RECIPES[request.scheme])()
        quantizer.load_quantization_recipe(recipe)
        ranges = None
        if request.scheme == "static":
            feeds = [
                {f"args_{index}": tensor.numpy() for index, tensor in enumerate(tensors)}
                for tensors in in_batches_of(request.calibration or [], source.batch)
            ]
            ranges = _ranges(source.path, recipe, feeds)
        quantizer.quantize(ranges).export_model(str(request.path), overwrite=True)


def _ranges(path: Path, recipe: Any, feeds: list[dict[str, Any]]) -> Any:
    """Return the smallest and the largest value of each tensor.

    `Quantizer.calibrate` averages the ranges of the feeds. A file of batch 1 is fed sample by sample, and the average
    range of single samples clips: of one output value per sample it left a single point.
    """
    calibrator = _part("ai_edge_quantizer.calibrator")
    manager = _part("ai_edge_quantizer.recipe_manager").RecipeManager()
    manager.load_quantization_recipe(recipe)
    widened = _part("ai_edge_quantizer.utils.qsv_utils").min_max_update
    calibration = calibrator.Calibrator(str(path), qsv_update_func=widened)
    calibration.calibrate({"serving_default": feeds}, manager)
    return calibration.get_model_qsvs()


def export_tflite(call: ModelCall, path: Path, fixed_batch: bool = False) -> Exported:
    """Write the float model, for any batch where that goes, unless the batch is to be fixed."""
    convert = _part("litert_torch").convert
    _part("ai_edge_litert.interpreter")

    def write(adapter: FlatModel, attempt: BatchAttempt) -> None:
        shapes = attempt.dynamic_shapes(torch.export.Dim("batch", min=1))
        convert(adapter, attempt.tensors, dynamic_shapes=shapes).export(str(path))

    _, batch, remarks = first_success(call, write, "LiteRT", fixed_batch)
    return Exported(str(path), call.names, (), batch, path.stat().st_size, tuple(remarks))


def _layers(runner: LiteRtRunner, paths: tuple[str, ...], asked: str) -> tuple[LayerPrecision, ...]:
    """Return each layer with weights or a product: int8 where its weights or both factors are."""
    # Names of tensors carry the modules they come from.
    names, layers = {entry["index"]: entry["name"] for entry in runner.loaded.get_tensor_details()}, []
    for entry in runner.operators():
        if entry["op_name"] not in _LAYERS:
            continue
        # Weights stand second; a product of activations has none, and both factors must be whole numbers.
        kinds = [_NAMES.get(kind, np.dtype(kind).name) for kind in entry["operand_types"][:2]]
        kind = kinds[-1] if entry["op_name"] != "BATCH_MATMUL" else max(kinds)
        reason = "" if kind == asked else f"LiteRT's quantizer left this {entry['op_name']} in {kind}"
        tensors = [names.get(int(index), "") for index in (*entry["inputs"][1:2], *entry["outputs"][:1])]
        path = next((path for path in (_path(name, paths) for name in tensors) if path), "")
        layers.append(LayerPrecision(path, entry["op_name"], kind, reason, f"{entry['index']}"))
    return tuple(layers)


def _path(name: str, paths: tuple[str, ...]) -> str:
    """Return the module that a tensor's name speaks of, such as `pkg.Net/torch.nn.modules.linear.Linear_head;1`."""
    for chunk in reversed([chunk for chunk in name.split(";") if "/" in chunk]):
        attributes = [piece.rpartition(".")[2].partition("_")[2] for piece in chunk.split("/")]
        for start in range(len(attributes)):
            path = ".".join(attribute for attribute in attributes[start:] if attribute)
            if path and path in paths:
                return path
    return ""
