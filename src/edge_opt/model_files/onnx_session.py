"""An ONNX file run by ONNX Runtime: what is measured of a file is this, never the module that reads it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from edge_opt._support.extras import optional
from edge_opt.errors import MeasurementFailed, first_line


class Session(nn.Module):
    """A file that ONNX Runtime has loaded. It is called as the model is, and returns tensors.

    Attributes:
        version: The runtime with its version, for remarks.
    """

    def __init__(
        self, path: Path, arguments: Callable[[tuple[Any, ...], Mapping[str, Any]], dict[str, torch.Tensor]],
        threads: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        runtime = optional("onnxruntime", "running an ONNX file needs", "onnx")
        options = runtime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads() if threads is None else threads
        options.log_severity_level = 4
        try:
            self.runtime = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # the runtime's own classes, which differ by version
            raise MeasurementFailed(f"ONNX Runtime cannot load {str(path)!r}: {first_line(error)}") from error
        self.version = f"ONNX Runtime {runtime.__version__}"
        self._arguments = arguments

    def forward(self, *given: Any, **named: Any) -> tuple[torch.Tensor, ...]:
        tensors = self._arguments(given, named)
        made = self.runtime.run(None, {name: tensor.detach().numpy() for name, tensor in tensors.items()})
        return tuple(
            torch.from_numpy(value) for value in made if hasattr(value, "dtype") and value.dtype.kind in "fiub"
        )
