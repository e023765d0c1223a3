"""ExecuTorch: .pte files with XNNPACK's kernels, int8 by its quantizer, run by its own runtime."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from weakref import WeakSet

import torch

from edge_opt import units
from edge_opt._support.extras import import_optional
from edge_opt._support.progress import quiet
from edge_opt.errors import InvalidInput, translated
from edge_opt.quantization.onnx_files import Tensors
from edge_opt.records.conversions import LayerPrecision
from edge_opt.runtimes.export import first_success
from edge_opt.runtimes.model_call import BatchAttempt, FlatModel, in_batches_of
from edge_opt.runtimes.protocol import (
    FP32_AND_INT8,
    BuiltModel,
    ConversionRequest,
    Inspection,
    PiecewiseRunner,
    Program,
    Runtime,
)

# Memory is planned for the largest batch, so that it must have an end.
_MAX_SAMPLES = 512
_PRODUCTS = ("linear", "conv", "addmm", "mm", "bmm", "lstm", "gru")


def _part(module: str) -> Any:
    with quiet():
        return import_optional(module, "ExecuTorch needs", "executorch", module.partition(".")[0])


_opened: WeakSet[ExecuTorchRunner] = WeakSet()


def _threads(wanted: int) -> int:
    """Set the threads of XNNPACK, and return those it has.

    Why only while no runner is open: the pool is the process's, and programs that are loaded keep a pointer to it.
    Resetting the pool frees it, and their next call would crash the process. To check when ExecuTorch changes: whether
    the two private functions are still there, and whether a runner can be given a pool of its own.
    """
    with quiet():
        library = _part("executorch.extension.pybindings.portable_lib")
        try:
            if not _opened and library._threadpool_get_thread_count() != wanted:
                library._unsafe_reset_threadpool(wanted)
            return int(library._threadpool_get_thread_count())
        except AttributeError:  # a build without these
            return wanted


class ExecuTorchRunner(PiecewiseRunner):
    """A .pte file in ExecuTorch. Its threads are the process's: those of the first of several open at a time."""

    runtime = "executorch"
    title = "ExecuTorch"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.threads = _threads(self.threads)
        _opened.add(self)
        with translated(f"ExecuTorch cannot load {self.path.name}"):
            self._program: Any = _part("executorch.runtime").Runtime.get().load_program(self.path)
            self._loaded = self._program.load_method("forward")

    def input_shapes(self) -> Sequence[Sequence[int]]:
        # If the batch is dynamic, this is its maximum.
        meta = self.loaded.metadata
        return [meta.input_tensor_meta(index).sizes() for index in range(meta.num_inputs())]

    def bind_piece(self, inputs: tuple[Any, ...]) -> Callable[[], Any]:
        method, tensors = self.loaded, [torch.as_tensor(value).detach().cpu().contiguous() for value in inputs]
        return lambda: method.execute(tensors)

    def outputs_of(self, result: Any) -> tuple[torch.Tensor, ...]:
        return tuple(output.clone() for output in result)

    def close(self) -> None:
        super().close()
        self._program = None
        _opened.discard(self)


_BODY = """
method = Runtime.get().load_program(FOLDER / "model.pte").load_method("forward")
# A file that takes one batch only is called for one after the other.
size = min(method.metadata.input_tensor_meta(0).sizes()[0], len(inputs[0]))
results = []
for start in range(0, len(inputs[0]) - size + 1, size):
    batch = [torch.from_numpy(value[start : start + size]) for value in inputs]
    results.append(method.execute(batch)[0].float().numpy().copy())
scores = np.concatenate(results)
"""


class ExecuTorch(Runtime):
    """ExecuTorch with XNNPACK."""

    name = "executorch"
    suffix = "pte"
    package = "executorch.runtime"
    runner = ExecuTorchRunner
    extra = "executorch"
    requires = ("executorch", "torchao")
    precisions = FP32_AND_INT8
    may_fix_batch = True
    kernels = "XNNPACK"

    def build(self, request: ConversionRequest) -> BuiltModel:
        """Write a .pte file. static: ranges from calibration; dynamic: of each input to a linear layer."""
        if request.precision == "int8" and request.scheme == "weights":
            raise InvalidInput("ExecuTorch's int8 is static or dynamic here; use onnxruntime for weights alone")
        write = partial(_write, request)
        (layers, arena_bytes), batch, remarks = first_success(request.call, write, "ExecuTorch", request.fixed_batch)
        remarks.append(
            f"planned memory: {units.size(arena_bytes)} for tensors between its parts, batches of "
            f"{batch or _MAX_SAMPLES}; XNNPACK's own comes on top"
        )
        return BuiltModel(request.path, remarks=tuple(remarks), batch=batch, layers=layers)

    def inspect(self, built: BuiltModel, runner: Any, request: ConversionRequest, batch: Tensors) -> Inspection:
        """Return the layers of the program that was lowered; the runtime tells nothing of them."""
        return Inspection((), built.layers)

    def program(self, precision: str) -> Program:
        """Execute the method piece by piece."""
        return Program("executorch", "import torch\nfrom executorch.runtime import Runtime", _BODY)


def _write(
    request: ConversionRequest, adapter: FlatModel, attempt: BatchAttempt
) -> tuple[tuple[LayerPrecision, ...], int]:
    """Write the file; returns what its layers run in, and the bytes of the arena that was planned."""
    exir = _part("executorch.exir")
    partitioner = _part("executorch.backends.xnnpack.partition.xnnpack_partitioner").XnnpackPartitioner
    shapes = attempt.dynamic_shapes(torch.export.Dim("batch", min=1, max=_MAX_SAMPLES))
    with torch.no_grad():
        program = torch.export.export(adapter, attempt.tensors, dynamic_shapes=shapes)
        if request.precision == "int8":
            module = _quantized(program.module(), request, attempt)
            program = torch.export.export(module, attempt.tensors, dynamic_shapes=shapes)
        layers = _layers(program, request.precision)
        lowered = exir.to_edge_transform_and_lower(program, partitioner=[partitioner()]).to_executorch()
    request.path.write_bytes(lowered.buffer)
    return layers, sum(lowered.executorch_program.execution_plan[0].non_const_buffer_sizes)


def _quantized(module: Any, request: ConversionRequest, attempt: BatchAttempt) -> Any:
    quantizers = _part("executorch.backends.xnnpack.quantizer.xnnpack_quantizer")
    steps = _part("torchao.quantization.pt2e.quantize_pt2e")
    config = quantizers.get_symmetric_quantization_config(is_per_channel=True, is_dynamic=request.scheme == "dynamic")
    prepared = steps.prepare_pt2e(module, quantizers.XNNPACKQuantizer().set_global(config))
    for batch in in_batches_of(request.calibration or [attempt.tensors], attempt.batch):
        prepared(*batch)
    return steps.convert_pt2e(prepared)


def _layers(program: Any, asked: str) -> tuple[LayerPrecision, ...]:
    """Return each product of the program that is lowered: int8 where its factors come from dequantizers."""
    layers = []
    for node in program.graph.nodes:
        name = str(getattr(node.target, "__name__", node.target)).partition(".")[0]
        if node.op != "call_function" or not name.startswith(_PRODUCTS):
            continue
        factors = [argument for argument in node.args[:2] if isinstance(argument, torch.fx.Node)]
        is_int8 = bool(factors) and all("dequantize" in str(argument.target) for argument in factors)
        kind = "int8" if is_int8 else "fp32"
        scopes = [str(entry[0]) for entry in (node.meta.get("nn_module_stack") or {}).values()]
        path = (scopes[-1] if scopes else "").removeprefix("L['self'].").removeprefix("model").removeprefix(".")
        reason = "" if kind == asked else f"XNNPACK's quantizer left this {name} in {kind}"
        layers.append(LayerPrecision(path, name, kind, reason, node.name))
    return tuple(layers)
