"""A model's file as its own runtime runs it: ONNX Runtime for `.onnx`, LiteRT's interpreter for `.tflite`.

The module that `model_files` reads from a file computes nothing; what is measured of a file is one of these.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from edge_opt._support.extras import import_optional
from edge_opt.errors import ConversionFailed, MeasurementFailed, first_line
from edge_opt.model_files.file_model import FileModel, OnnxModel


def open_session(path: Path, threads: int, profile_prefix: str | None = None) -> Any:
    """Open an ONNX file on the CPU; with a prefix, the session writes a profile."""
    runtime = onnxruntime()
    options = runtime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    # Fatal only: an error is raised as well, and warnings are about its own optimisations.
    options.log_severity_level = 4
    if profile_prefix is not None:
        options.enable_profiling = True
        options.profile_file_prefix = profile_prefix
    try:
        return runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # its own classes, one per status code, with no common base of theirs
        raise ConversionFailed(f"ONNX Runtime cannot load {path.name}: {reason(error)}") from error


def onnxruntime() -> Any:
    """Import ONNX Runtime, or say how to install it."""
    return import_optional("onnxruntime", "ONNX files need", "onnx")


def reason(error: BaseException) -> str:
    """Return the last line of an error, without status codes and folder names."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return re.sub(r"^\[ONNXRuntimeError\] : \d+ : \w+ : (Load model from \S+ failed:)?", "", lines[-1]) if lines else ""


class FileSession(nn.Module):
    """A file that a runtime has loaded. It is called as the model is, and returns tensors.

    Attributes:
        version: The runtime with its version, for remarks.
    """

    def __init__(self, model: FileModel, version: str) -> None:
        super().__init__()
        self.version = version
        self._plan = model.plan

    def arrays(self, arrays: dict[str, Any]) -> list[Any]:
        """Run the file on arrays by the names of its inputs, in the file's order."""
        raise NotImplementedError

    def forward(self, *given: Any, **named: Any) -> tuple[torch.Tensor, ...]:
        tensors = self._plan.arguments(given, named)
        outputs = self.arrays({name: tensor.detach().numpy() for name, tensor in tensors.items()})
        # Texts, sequences and maps are not tensors.
        return tuple(
            torch.from_numpy(value) for value in outputs if hasattr(value, "dtype") and value.dtype.kind in "fiub"
        )


class OnnxSession(FileSession):
    """A file that ONNX Runtime has loaded."""

    def __init__(self, model: FileModel, threads: int) -> None:
        super().__init__(model, f"ONNX Runtime {onnxruntime().__version__}")
        try:
            self.runtime = open_session(model.file, threads)
        except ConversionFailed as error:
            raise MeasurementFailed(str(error)) from error

    def arrays(self, arrays: dict[str, Any]) -> list[Any]:
        return list(self.runtime.run(None, arrays))


# Beside the sessions, because LiteRT's interpreter refuses to run while anybody else refers to its parts, and what can
# be reached from a module is recorded while it is measured.
_interpreters: WeakKeyDictionary[TfliteSession, Any] = WeakKeyDictionary()


class TfliteSession(FileSession):
    """A file that LiteRT's interpreter has loaded."""

    def __init__(self, model: FileModel, threads: int) -> None:
        super().__init__(model, "LiteRT")
        package = import_optional(
            "ai_edge_litert.interpreter", "running a .tflite file needs", "litert", "ai-edge-litert"
        )
        try:
            interpreter = package.Interpreter(model_path=str(model.file), num_threads=threads)
            interpreter.allocate_tensors()
        except (ValueError, RuntimeError) as error:
            raise MeasurementFailed(f"LiteRT cannot load {str(model.file)!r}: {first_line(error)}") from error
        _interpreters[self] = interpreter
        self._inputs = interpreter.get_input_details()
        self._shapes = [tuple(details["shape"]) for details in self._inputs]

    def arrays(self, arrays: dict[str, Any]) -> list[Any]:
        interpreter = _interpreters[self]
        # The interpreter and the file list the inputs in one order.
        values = list(arrays.values())
        if [array.shape for array in values] != self._shapes:
            for details, array in zip(self._inputs, values, strict=True):
                interpreter.resize_tensor_input(details["index"], array.shape)
            interpreter.allocate_tensors()
            self._shapes = [array.shape for array in values]
        for details, array in zip(self._inputs, values, strict=True):
            interpreter.set_tensor(details["index"], array)
        interpreter.invoke()
        return [interpreter.get_tensor(details["index"]) for details in interpreter.get_output_details()]


def open_file_session(model: FileModel, threads: int | None = None) -> FileSession:
    """Load a file in its own runtime.

    Args:
        model: The model that was read from the file.
        threads: Threads of the runtime; as many as torch uses unless given.
    """
    count = torch.get_num_threads() if threads is None else threads
    return (OnnxSession if isinstance(model, OnnxModel) else TfliteSession)(model, count)
