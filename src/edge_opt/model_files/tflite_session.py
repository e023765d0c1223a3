"""A `.tflite` file run by LiteRT: what is measured of a file is this, never the module that reads it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from edge_opt._support.extras import optional
from edge_opt.errors import MeasurementFailed, first_line


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


class TfliteSession(nn.Module):
    """A file that LiteRT's interpreter has loaded. It is called as the model is, and returns tensors.

    Attributes:
        version: The runtime with its version, for remarks.
    """

    def __init__(
        self, path: Path, arguments: Callable[[tuple[Any, ...], Mapping[str, Any]], dict[str, torch.Tensor]],
        threads: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self._holder = _Interpreter(path, torch.get_num_threads() if threads is None else threads)
        self.version = "LiteRT"
        self._arguments = arguments
        self._inputs = self._holder.loaded.get_input_details()
        self._shapes = [tuple(one["shape"]) for one in self._inputs]

    def forward(self, *given: Any, **named: Any) -> tuple[torch.Tensor, ...]:
        runtime = self._holder.loaded
        # The interpreter and the file list the inputs in one order.
        arrays = [tensor.detach().numpy() for tensor in self._arguments(given, named).values()]
        if [array.shape for array in arrays] != self._shapes:
            for port, array in zip(self._inputs, arrays, strict=True):
                runtime.resize_tensor_input(port["index"], array.shape)
            runtime.allocate_tensors()
            self._shapes = [array.shape for array in arrays]
        for port, array in zip(self._inputs, arrays, strict=True):
            runtime.set_tensor(port["index"], array)
        runtime.invoke()
        made = [runtime.get_tensor(port["index"]) for port in runtime.get_output_details()]
        return tuple(torch.from_numpy(value) for value in made if value.dtype.kind in "fiub")
