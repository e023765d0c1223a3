"""OpenVINO: ONNX files on the CPU, in the precision that it is asked to compute in."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from edge_opt._support.extras import import_optional
from edge_opt.errors import InvalidInput, translated
from edge_opt.measuring.machine import cpu_flags
from edge_opt.measuring.runtime_profile import ProfileEntry
from edge_opt.measuring.session import reason
from edge_opt.quantization.onnx_files import Tensors
from edge_opt.runtimes.export import QuantizableModel, build_float
from edge_opt.runtimes.kernels import inspect_kernels
from edge_opt.runtimes.protocol import BuiltModel, ConversionRequest, Inspection, Program, Runner, Runtime, as_arrays
from edge_opt.runtimes.torch_runtime import check_instructions

# The precision hint. int8 is in the file; layers that are not quantized there stay in float32.
_HINTS = MappingProxyType({"fp32": "f32", "fp16": "f16", "bf16": "bf16", "int8": "f32"})
_FACTS = ("layerType", "runtimePrecision", "originalLayersNames")
_NOT_RUN = ("Const", "Input", "Output")


class OpenVinoRunner(Runner):
    """An ONNX file in OpenVINO on the CPU, asked to compute in `precision`."""

    runtime = "openvino"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        if self.precision not in _HINTS:
            raise InvalidInput(f"unknown precision {self.precision!r}; it is one of {', '.join(_HINTS)}")
        # Whole numbers and 16-bit floats run on matrix units (AMX), which virtual machines are known to refuse.
        check_instructions(self.precision, self.runtime, ("fp16", "bf16", "int8") if "amx_tile" in cpu_flags() else ())
        self._loaded = self.compiled().create_infer_request()

    def compiled(self, more: Mapping[str, Any] | None = None) -> Any:
        """Return the file compiled for this CPU."""
        core = import_optional("openvino", "OpenVINO needs", "openvino").Core()
        # Without the hint OpenVINO turns float32 into bf16 wherever the CPU has it.
        wanted = {
            "INFERENCE_PRECISION_HINT": _HINTS[self.precision],
            "INFERENCE_NUM_THREADS": self.threads,
            "NUM_STREAMS": "1",
            **(more or {}),
        }
        with translated(f"OpenVINO cannot load {self.path.name}", describe=reason):
            return core.compile_model(core.read_model(str(self.path)), "CPU", wanted)

    def feeds(self, inputs: Sequence[Any]) -> dict[int, Any]:
        """Return the inputs by position."""
        return dict(enumerate(as_arrays(inputs, len(self.loaded.model_inputs))))

    def __call__(self, *inputs: Any) -> tuple[torch.Tensor, ...]:
        feeds = self.feeds(inputs)
        with translated("OpenVINO refused the inputs", InvalidInput, describe=reason):
            outputs = self.loaded.infer(feeds)
        return tuple(torch.tensor(outputs[port]) for port in self.loaded.model_outputs)

    def bind(self, *inputs: Any) -> Callable[[], object]:
        request, feeds = self.loaded, self.feeds(inputs)
        return lambda: request.infer(feeds, share_inputs=True, share_outputs=True)

    def kernel_times(self, inputs: Sequence[Any], repeats: int) -> Sequence[ProfileEntry]:
        """Read its counters; the precision is what the compiled model says of itself, not what was asked."""
        compiled = self.compiled({"PERF_COUNT": True})
        request = compiled.create_infer_request()
        feeds = self.feeds(inputs)
        samples: dict[str, list[float]] = defaultdict(list)
        for _ in range(1 + repeats):
            request.infer(feeds)
            for entry in request.get_profiling_info():
                if str(entry.status).endswith("EXECUTED"):
                    samples[entry.node_name].append(entry.real_time.total_seconds())
        kernels = []
        for node in compiled.get_runtime_model().get_ordered_ops():
            name = node.get_friendly_name()
            facts = {key: str(value.astype(str)) for key, value in node.get_rt_info().items() if key in _FACTS}
            if facts.get("layerType") not in _NOT_RUN and name in samples:
                names = facts.get("originalLayersNames", "").split(",")
                kernels.append(
                    ProfileEntry(
                        name,
                        tuple(samples[name][-repeats:]),
                        op=facts.get("layerType", ""),
                        kind=facts["runtimePrecision"],
                        aliases=tuple(alias.partition("/")[0] for alias in names if alias),
                    )
                )
        return kernels


_BODY = """
core = openvino.Core()
hints = {{"INFERENCE_PRECISION_HINT": "{hint}"}}
compiled = core.compile_model(core.read_model(str(FOLDER / "model.onnx")), "CPU", hints)
scores = compiled(dict(enumerate(inputs)))[0]
"""


class OpenVino(Runtime):
    """OpenVINO."""

    name = "openvino"
    suffix = "onnx"
    package = "openvino"
    runner = OpenVinoRunner
    extra = "openvino"
    requires = ("openvino", "onnxruntime", "onnx", "onnxscript")
    precisions = MappingProxyType(
        {**dict.fromkeys(_HINTS, ""), "int4": "its weights alone are for onnxruntime; use runtime='onnxruntime'"}
    )
    runs_onnx = True
    keeps_float = True
    int8_scheme = "static"

    def build(self, request: ConversionRequest) -> BuiltModel:
        """Write a float32 file, which it computes in what it is asked for, or an int8 one."""
        return QuantizableModel(request).build(request) if request.precision == "int8" else build_float(request, "fp32")

    def inspect(self, built: BuiltModel, runner: Any, request: ConversionRequest, batch: Tensors) -> Inspection:
        """Read kernels from its counters."""
        return inspect_kernels(runner, request.precision, batch)

    def program(self, precision: str) -> Program:
        """Compile the file with the hint of the precision, and call it."""
        return Program("openvino", "import openvino", _BODY.format(hint=_HINTS[precision]))
