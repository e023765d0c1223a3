"""LiteRT: .tflite files by litert-torch, int8 by its quantiser, run by its interpreter."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from edge_opt._support.extras import import_optional
from edge_opt._support.progress import quiet
from edge_opt.errors import ConversionFailed, ExportFailed, InvalidInput, first_line
from edge_opt.quantization.onnx_files import Tensors
from edge_opt.records.conversions import LayerPrecision
from edge_opt.runtimes.export import export_copy
from edge_opt.runtimes.model_call import Subject, example_batches, in_batches_of
from edge_opt.runtimes.protocol import Job, Made, precision
from edge_opt.runtimes.runners import Closing, in_pieces

_LAYERS = {
    "CONV_2D", "DEPTHWISE_CONV_2D", "TRANSPOSE_CONV", "CONV_3D", "FULLY_CONNECTED", "BATCH_MATMUL",
    "UNIDIRECTIONAL_SEQUENCE_LSTM",
}  # fmt: skip
_RECIPES = {"static": "static_wi8_ai8", "dynamic": "dynamic_wi8_afp32", "weights": "weight_only_wi8_afp32"}
_NAMES = {np.int8: "int8", np.uint8: "int8", np.float32: "fp32", np.float16: "fp16"}


def _part(module: str) -> Any:
    return import_optional(module, "LiteRT needs", "litert", module.partition(".")[0].replace("_", "-"))


class LiteRtRunner(Closing):
    """A .tflite file in LiteRT's interpreter, with XNNPACK where it applies.

    Where the file's batch is fixed, a batch of several times as many samples takes several calls.
    """

    runtime = "litert"

    def __init__(self, path: Path, threads: int, effective_precision: str | None = None) -> None:
        self.path, self.threads, self.effective_precision = path, threads, effective_precision
        kind = _part("ai_edge_litert.interpreter").Interpreter
        try:
            with quiet():
                self._interpreter: Any = kind(model_path=str(path), num_threads=threads)
                self._interpreter.allocate_tensors()
        except (ValueError, RuntimeError) as error:
            raise ConversionFailed(f"LiteRT cannot load {path.name}: {first_line(error)}") from error

    def details(self) -> list[dict[str, Any]]:
        """Its operators with the types they compute in, by the interpreter itself."""
        return [entry for entry in self._interpreter._get_ops_details() if entry["op_name"] != "DELEGATE"]

    def tensor_names(self) -> Mapping[int, str]:
        """Names of the tensors, which carry the modules they come from."""
        return {entry["index"]: entry["name"] for entry in self._interpreter.get_tensor_details()}

    def _ports(self, what: str) -> list[dict[str, Any]]:
        """Inputs or outputs in the model's order; the interpreter keeps an order of its own."""
        if self._interpreter is None:
            raise InvalidInput("this runner is closed; open it again")
        signature = self._interpreter.get_signature_runner()
        found = signature.get_input_details() if what == "input" else signature.get_output_details()
        return [found[name] for name in sorted(found, key=lambda name: int(name.rpartition("_")[2]))]

    def __call__(self, *inputs: Any) -> tuple[torch.Tensor, ...]:
        pieces = self._pieces(inputs)
        if len(pieces) > 1:
            found = [self(*piece) for piece in pieces]
            return tuple(torch.cat(parts) for parts in zip(*found, strict=True))
        run = self.bind(*inputs)
        try:
            run()
        except (ValueError, RuntimeError) as error:
            raise InvalidInput(f"LiteRT refused the inputs: {first_line(error)}") from error
        return tuple(torch.from_numpy(self._read(port)) for port in self._ports("output"))

    def _read(self, port: dict[str, Any]) -> Any:
        scale, zero = port["quantization"]
        value = self._interpreter.get_tensor(port["index"])
        return ((value.astype(np.float32) - zero) * np.float32(scale)) if scale else value.copy()

    def _pieces(self, inputs: Sequence[Any]) -> list[tuple[Any, ...]]:
        return in_pieces(inputs, [port["shape_signature"] for port in self._ports("input")])

    def bind(self, *inputs: Any) -> Callable[[], object]:
        pieces = self._pieces(inputs)
        if len(pieces) > 1:
            calls = [self.bind(*piece) for piece in pieces]
            return lambda: [call() for call in calls]
        ports = self._ports("input")
        if len(inputs) != len(ports):
            raise InvalidInput(f"{len(inputs)} inputs given; the model takes {len(ports)}")
        arrays = [torch.as_tensor(value).detach().cpu().contiguous().numpy() for value in inputs]
        interpreter = self._interpreter
        try:
            for port, array in zip(ports, arrays, strict=True):
                if tuple(interpreter._get_tensor_details(port["index"], 0)["shape"]) != array.shape:
                    interpreter.resize_tensor_input(port["index"], array.shape, strict=True)
            interpreter.allocate_tensors()
        except (ValueError, RuntimeError) as error:
            raise InvalidInput(f"LiteRT refused the inputs: {first_line(error)}") from error
        fed = [(port["index"], _quantized(array, port)) for port, array in zip(ports, arrays, strict=True)]

        def call() -> None:
            for index, array in fed:
                interpreter.set_tensor(index, array)
            interpreter.invoke()

        return call

    def close(self) -> None:
        self._interpreter = None


def _quantized(array: Any, port: dict[str, Any]) -> Any:
    """The input in the type that the file takes."""
    scale, zero = port["quantization"]
    if not scale:
        return array.astype(port["dtype"])
    limits = np.iinfo(port["dtype"])
    return np.clip(np.round(array / scale) + zero, limits.min, limits.max).astype(port["dtype"])


@precision("fp32", "litert")
def _fp32(job: Job) -> Made:
    path = job.folder / job.filename
    batch, paths = _write(job.subject, path)
    return _described(job, path, batch, paths, "fp32")


@precision("int8", "litert")
def _int8(job: Job) -> Made:
    """static: ranges from calibration; dynamic: of each input; weights: computed in float."""
    if job.spare:
        raise InvalidInput("LiteRT's quantiser is not asked to spare layers here; use onnxruntime or openvino for that")
    source, path = job.folder / f"float-{job.filename}", job.folder / job.filename
    batch, paths = _write(job.subject, source)
    package, recipes = _part("ai_edge_quantizer"), _part("ai_edge_quantizer.recipe")
    try:
        with quiet():
            quantizer = package.quantizer.Quantizer(str(source))
            quantizer.load_quantization_recipe(getattr(recipes, _RECIPES[job.scheme])())
            ranges = None
            if job.scheme == "static":
                feeds = [
                    {f"args_{place}": tensor.numpy() for place, tensor in enumerate(tensors)}
                    for tensors in in_batches_of(job.calibration or [], batch)
                ]
                ranges = quantizer.calibrate({"serving_default": feeds})
            quantizer.quantize(ranges).export_model(str(path), overwrite=True)
    except (OSError, InvalidInput):
        raise
    except Exception as error:  # the quantiser raises whatever its parts do
        raise ConversionFailed(f"LiteRT could not quantise the model: {first_line(error)}") from error
    return _described(job, path, batch, paths, "int8")


def _write(subject: Subject, path: Path) -> tuple[int | None, tuple[str, ...]]:
    """Write the float model, for any batch where that goes; returns the fixed batch, and the paths of its modules."""
    convert = _part("litert_torch").convert
    _part("ai_edge_litert.interpreter")
    doubled, batched, count = example_batches(subject)
    free = (tuple({0: torch.export.Dim("batch", min=1)} if has_batch else None for has_batch in batched),)
    attempts: tuple[tuple[Tensors, Any, int | None], ...] = ((doubled, free, None), (subject.tensors, None, count))
    problem: Exception | None = None
    for tensors, shapes, batch in attempts:
        adapter = subject.flat(None, export_copy(subject.model, subject)).eval()
        try:
            with quiet():
                convert(adapter, tensors, dynamic_shapes=shapes).export(str(path))
        except OSError:
            raise
        except Exception as error:  # torch.export, MLIR and the converter each have classes of their own
            problem = problem or error
        else:
            return batch, tuple(name.removeprefix("model").removeprefix(".") for name, _ in adapter.named_modules())
    assert problem is not None
    raise ExportFailed(
        f"the model cannot be written for LiteRT: {first_line(problem)}; use runtime='onnxruntime', or change that part"
    ) from problem


def _described(job: Job, path: Path, batch: int | None, paths: Iterable[str], asked: str) -> Made:
    remarks = () if batch is None else (f"the batch is fixed at {batch}: LiteRT could not leave it open",)
    with LiteRtRunner(path, 1) as runner:
        layers, count = _layers(runner, tuple(paths), asked), len(runner._ports("output"))
    outputs = ("output",) if count == 1 else tuple(f"output_{number}" for number in range(count))
    return Made(path, outputs, remarks, batch=batch, layers=layers)


def _layers(runner: LiteRtRunner, paths: tuple[str, ...], asked: str) -> tuple[LayerPrecision, ...]:
    """Each layer with weights or a product: int8 where its weights or both factors are."""
    names, found = runner.tensor_names(), []
    for entry in runner.details():
        if entry["op_name"] not in _LAYERS:
            continue
        # Weights stand second; a product of activations has none, and both factors must be whole numbers.
        kinds = [_NAMES.get(kind, np.dtype(kind).name) for kind in entry["operand_types"][:2]]
        kind = kinds[-1] if entry["op_name"] != "BATCH_MATMUL" else max(kinds)
        reason = "" if kind == asked else f"LiteRT's quantiser left this {entry['op_name']} in {kind}"
        tensors = [names.get(int(index), "") for index in (*entry["inputs"][1:2], *entry["outputs"][:1])]
        path = next((found for found in (_path(name, paths) for name in tensors) if found), "")
        found.append(LayerPrecision(path, entry["op_name"], kind, reason, f"{entry['index']}"))
    return tuple(found)


def _path(name: str, paths: tuple[str, ...]) -> str:
    """The module that a tensor's name speaks of, such as `pkg.Net/torch.nn.modules.linear.Linear_head;1`."""
    for chunk in reversed([chunk for chunk in name.split(";") if "/" in chunk]):
        attributes = [piece.rpartition(".")[2].partition("_")[2] for piece in chunk.split("/")]
        for start in range(len(attributes)):
            path = ".".join(attribute for attribute in attributes[start:] if attribute)
            if path and path in paths:
                return path
    return ""
