"""torch, eager and compiled: modules in fp32, fp16 and bf16."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from edge_opt.errors import ConversionFailed, translated
from edge_opt.measuring.machine import crash_of
from edge_opt.quantization.onnx_files import Tensors
from edge_opt.records.conversions import LayerPrecision
from edge_opt.runtimes.protocol import BuiltModel, ConversionRequest, Inspection, Program, Runner, Runtime
from edge_opt.trace.inputs import flat_tensors

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class TorchRunner(Runner):
    """A torch module in eval; threads are set around each call and put back."""

    runtime = "torch"

    def __init__(self, model: nn.Module, *options: Any) -> None:
        super().__init__(model, *options)
        self._loaded = model

    def __call__(self, *inputs: Any) -> tuple[torch.Tensor, ...]:
        with self.ready():
            return tuple(flat_tensors(self.bind(*inputs)()))

    def bind(self, *inputs: Any) -> Callable[[], object]:
        model, tensors = self.loaded, [torch.as_tensor(value) for value in inputs]

        def call() -> object:
            with torch.inference_mode():
                return model(*tensors)

        return call

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Set the number of threads inside, and restore the caller's number."""
        threads = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        try:
            yield
        finally:
            torch.set_num_threads(threads)


class CompiledRunner(TorchRunner):
    """A torch module compiled by torch.compile when a shape first occurs."""

    runtime = "torch-compile"

    def __init__(self, model: nn.Module, *options: Any) -> None:
        super().__init__(torch.compile(model), *options)  # type: ignore[arg-type]

    def __call__(self, *inputs: Any) -> tuple[torch.Tensor, ...]:
        remedy = "; it needs a C++ compiler (g++); or use runtime='torch'"
        with translated("torch.compile failed", remedy=remedy, passed=()):
            return super().__call__(*inputs)


_BODY = """
model = {model}
with torch.inference_mode():
    results = model(*(torch.from_numpy(value) for value in inputs))
scores = (results[0] if isinstance(results, (tuple, list)) else results).float().numpy()
"""
_LOADED = 'torch.export.load(FOLDER / "model.pt2").module()'
_NO_INTEGERS = (
    "torch's own quantization of modules is deprecated and gone from its recent versions; use runtime='onnxruntime'"
)


class Torch(Runtime):
    """Eager torch."""

    name = "torch"
    suffix = "pt"
    package = "torch"
    runner = TorchRunner
    precisions = MappingProxyType({"fp32": "", "fp16": "", "bf16": "", "int8": _NO_INTEGERS, "int4": _NO_INTEGERS})
    runs_modules = True

    def build(self, request: ConversionRequest) -> BuiltModel:
        """Write the weights in the precision; what runs is the module with them, behind flat tensors."""
        check_instructions(request.precision, self.name, ("fp16", "bf16"))
        model, dtype = cast_copy(request.call.model, request.precision)
        torch.save(model.state_dict(), request.path)
        return BuiltModel(request.path, (), model=request.call.flat(dtype, model).eval())

    def inspect(self, built: BuiltModel, runner: Any, request: ConversionRequest, batch: Tensors) -> Inspection:
        """Return the precision of each layer: eager kernels run in the type of their weights."""
        assert built.model is not None
        layers = tuple(
            LayerPrecision(path.removeprefix("model").removeprefix("."), type(module).__name__, kinds.pop())
            for path, module in built.model.named_modules()
            for kinds in [{_NAMES.get(p.dtype, str(p.dtype)) for p in module.parameters(recurse=False)}]
            if len(kinds) == 1
        )
        return Inspection((), layers)

    def program(self, precision: str) -> Program:
        """Load the exported program and call it."""
        return Program("torch", "import torch", _BODY.format(model=_LOADED))


class CompiledTorch(Torch):
    """torch.compile."""

    name = "torch-compile"
    runner = CompiledRunner
    # It compiles each variant for a minute, and ships no file.
    is_automatic = False

    def program(self, precision: str) -> Program:
        """Load the exported program, compile it, and call it."""
        return Program("torch", "import torch", _BODY.format(model=f"torch.compile({_LOADED})"))


def cast_copy(model: nn.Module, precision: str) -> tuple[nn.Module, torch.dtype | None]:
    """Return a copy of the model in the precision, and the type to cast inputs to: None where it had float32."""
    dtype = DTYPES[precision]
    model = copy.deepcopy(model).eval()
    return (model, None) if precision == "fp32" and is_float32(model) else (model.to(dtype), dtype)


def is_float32(model: nn.Module) -> bool:
    """Return whether all floating weights and buffers are float32."""
    tensors = [tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.is_floating_point()]
    return all(tensor.dtype is torch.float32 for tensor in tensors)


def check_instructions(precision: str, runtime: str, affected: tuple[str, ...]) -> None:
    """Refuse a precision that would end this process, because the machine refuses instructions that it announces.

    A refused instruction ends the process by a signal that Python cannot catch, so that it is tried in another
    process, by torch, for the precisions that the runtime computes with such instructions.
    """
    crash = crash_of(DTYPES.get(precision, torch.bfloat16)) if precision in affected else None
    if crash is not None:
        raise ConversionFailed(
            f"{runtime} computes {precision} here with instructions that the machine refuses ({crash}); "
            "start Python with ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16, or choose another runtime"
        )
