"""A file as its own runtime runs it: what is measured of a file is this, never the module that reads it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from edge_opt._support.extras import optional
from edge_opt.errors import MeasurementFailed, first_line

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
        runtime = optional("onnxruntime", "running an ONNX file needs", "onnx")
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
        package = optional("ai_edge_litert.interpreter", "running a .tflite file needs", "litert", "ai-edge-litert")
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
