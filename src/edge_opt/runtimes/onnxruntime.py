"""ONNX Runtime: ONNX files on the CPU."""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from edge_opt.errors import InvalidInput, translated
from edge_opt.measuring.file_session import open_session, reason
from edge_opt.quantization.onnx_files import Tensors
from edge_opt.runtimes.kernels import KernelTime, inspect_kernels
from edge_opt.runtimes.onnx_builds import build_float, build_int4, build_int8
from edge_opt.runtimes.protocol import (
    BuiltModel,
    ClosingRunner,
    ConversionRequest,
    Inspection,
    Program,
    Runner,
    Runtime,
    as_arrays,
    closed,
)


class OnnxRuntimeRunner(ClosingRunner):
    """An ONNX file in ONNX Runtime on the CPU."""

    runtime = "onnxruntime"

    def __init__(self, path: Path, threads: int, effective_precision: str | None = None) -> None:
        self.path, self.threads, self.effective_precision = path, threads, effective_precision
        self._session = self.session()

    def session(self, profile_prefix: str | None = None) -> Any:
        """Return a session of this file; with a prefix it writes a profile."""
        return open_session(self.path, self.threads, profile_prefix)

    def feeds(self, inputs: Sequence[Any]) -> dict[str, Any]:
        """Return the inputs by their names in the file."""
        if self._session is None:
            raise closed()
        names = [entry.name for entry in self._session.get_inputs()]
        return dict(zip(names, as_arrays(inputs, len(names)), strict=True))

    def __call__(self, *inputs: Any) -> tuple[torch.Tensor, ...]:
        feeds = self.feeds(inputs)
        with translated("ONNX Runtime refused the inputs", InvalidInput, describe=reason):
            return tuple(torch.from_numpy(array) for array in self._session.run(None, feeds))

    def bind(self, *inputs: Any) -> Callable[[], object]:
        session, feeds = self._session, self.feeds(inputs)
        return lambda: session.run(None, feeds)

    def kernel_times(self, inputs: Sequence[Any], repeats: int) -> list[KernelTime]:
        """Profile runs in a session of its own; the first, which allocates, does not count."""
        with tempfile.TemporaryDirectory(prefix="edge-opt-") as folder:
            session = self.session(profile_prefix=str(Path(folder) / "run"))
            feeds = self.feeds(inputs)
            for _ in range(1 + repeats):
                session.run(None, feeds)
            events = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
        samples: dict[tuple[str, str, str], list[float]] = defaultdict(list)
        for event in events:
            if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
                arguments = event["args"]
                types = [next(iter(entry)) for entry in arguments.get("input_type_shape") or [{"": []}]]
                op = arguments["op_name"]
                # The first input has the type that a kernel runs in, unless the kernel itself rounds it.
                kind = "int8" if op.startswith("DynamicQuantize") else next(iter(types), "")
                samples[event["name"].removesuffix("_kernel_time"), op, kind].append(event["dur"] * 1e-6)
        return [KernelTime(name, op, kind, seconds[-repeats:]) for (name, op, kind), seconds in samples.items()]

    def close(self) -> None:
        self._session = None


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
    extra = "onnx"
    precisions = MappingProxyType(dict.fromkeys(("fp32", "fp16", "bf16", "int8", "int4"), ""))
    runs_onnx = True
    keeps_float = True

    def build(self, request: ConversionRequest) -> BuiltModel:
        """Write an ONNX file in the precision."""
        if request.precision == "int8":
            return build_int8(request)
        return build_int4(request) if request.precision == "int4" else build_float(request, request.precision)

    def open(
        self, source: Path | nn.Module, threads: int, precision: str, effective_precision: str | None = None
    ) -> Runner:
        """Load an ONNX file."""
        assert isinstance(source, Path)
        return OnnxRuntimeRunner(source, threads, effective_precision)

    def inspect(self, built: BuiltModel, runner: Any, request: ConversionRequest, batch: Tensors) -> Inspection:
        """Read kernels from its profiler."""
        return inspect_kernels(runner, request.precision, batch)

    def program(self, precision: str) -> Program:
        """Open the file and run it."""
        return Program("onnxruntime", "import onnxruntime", _BODY)
