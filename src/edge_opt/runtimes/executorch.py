"""ExecuTorch: .pte files with XNNPACK's kernels, int8 by its quantiser, run by its own runtime."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch

from edge_opt import units
from edge_opt._support.extras import import_optional
from edge_opt._support.progress import quiet
from edge_opt.errors import ConversionFailed, EdgeOptError, ExportFailed, InvalidInput, first_line
from edge_opt.quantization.onnx_files import Tensors
from edge_opt.records.conversions import LayerPrecision
from edge_opt.runtimes.export import export_copy
from edge_opt.runtimes.model_call import Subject, example_batches, in_batches_of
from edge_opt.runtimes.protocol import Job, Made, precision
from edge_opt.runtimes.runners import Closing, in_pieces

# Memory is planned for the largest batch, so that it must have an end.
MOST_SAMPLES = 512
_PRODUCTS = ("linear", "conv", "addmm", "mm", "bmm", "lstm", "gru")


def _part(module: str) -> Any:
    with quiet():
        return import_optional(module, "ExecuTorch needs", "executorch", module.partition(".")[0])


_opened: WeakSet[ExecuTorchRunner] = WeakSet()


def _threads(wanted: int) -> int:
    """Set the threads of XNNPACK, and return those it has.

    They are the process's, and programs keep a pointer to them: they are only changed while no other runner is open.
    """
    with quiet():
        library = _part("executorch.extension.pybindings.portable_lib")
        try:
            if not _opened and library._threadpool_get_thread_count() != wanted:
                library._unsafe_reset_threadpool(wanted)
            return int(library._threadpool_get_thread_count())
        except AttributeError:  # a build without these
            return wanted


class ExecuTorchRunner(Closing):
    """A .pte file in ExecuTorch. Its threads are the process's: those of the first of several open at a time.

    Where the file's batch is fixed, a batch of several times as many samples takes several calls.
    """

    runtime = "executorch"

    def __init__(self, path: Path, threads: int, effective_precision: str | None = None) -> None:
        self.path, self.threads, self.effective_precision = path, _threads(threads), effective_precision
        _opened.add(self)
        try:
            self._program: Any = _part("executorch.runtime").Runtime.get().load_program(path)
            self._method: Any = self._program.load_method("forward")
        except EdgeOptError:
            raise
        except Exception as error:  # RuntimeError with a status code
            raise ConversionFailed(f"ExecuTorch cannot load {path.name}: {first_line(error)}") from error

    def __call__(self, *inputs: Any) -> tuple[torch.Tensor, ...]:
        pieces = self._pieces(inputs)
        if len(pieces) > 1:
            found = [self(*piece) for piece in pieces]
            return tuple(torch.cat(parts) for parts in zip(*found, strict=True))
        try:
            return tuple(output.clone() for output in self.bind(*inputs)())  # type: ignore[attr-defined]
        except RuntimeError as error:
            raise InvalidInput(f"ExecuTorch refused the inputs: {first_line(error)}") from error

    def _pieces(self, inputs: Sequence[Any]) -> list[tuple[Any, ...]]:
        if self._method is None:
            raise InvalidInput("this runner is closed; open it again")
        # Where the batch is free, the largest stands here.
        meta = self._method.metadata
        return in_pieces(inputs, [meta.input_tensor_meta(index).sizes() for index in range(meta.num_inputs())])

    def bind(self, *inputs: Any) -> Callable[[], object]:
        pieces = self._pieces(inputs)
        if len(pieces) > 1:
            calls = [self.bind(*piece) for piece in pieces]
            return lambda: [call() for call in calls]
        method, tensors = self._method, [torch.as_tensor(value).detach().cpu().contiguous() for value in inputs]
        return lambda: method.execute(tensors)

    def close(self) -> None:
        self._method = self._program = None
        _opened.discard(self)


@precision("fp32", "executorch")
def _fp32(job: Job) -> Made:
    return _made(job, None)


@precision("int8", "executorch")
def _int8(job: Job) -> Made:
    """static: ranges from calibration; dynamic: of each input to a linear layer."""
    if job.spare:
        raise InvalidInput("ExecuTorch is not asked to spare layers here; use onnxruntime or openvino for that")
    if job.scheme == "weights":
        raise InvalidInput("ExecuTorch's int8 is static or dynamic here; use onnxruntime for weights alone")
    return _made(job, job.scheme)


def _made(job: Job, scheme: str | None) -> Made:
    path, asked = job.folder / job.filename, "fp32" if scheme is None else "int8"
    doubled, batched, count = example_batches(job.subject)
    dim = torch.export.Dim("batch", min=1, max=MOST_SAMPLES)
    free = (tuple({0: dim} if has_batch else None for has_batch in batched),)
    attempts: tuple[tuple[Tensors, Any, int | None], ...] = ((doubled, free, None), (job.subject.tensors, None, count))
    problem: Exception | None = None
    for tensors, shapes, batch in attempts:
        try:
            with quiet():
                layers, planned = _write(job, path, tensors, shapes, scheme, asked)
        except (OSError, EdgeOptError):
            raise
        except Exception as error:  # torch.export, the quantiser and the partitioner each have classes of their own
            problem = problem or error
            continue
        remarks = [] if batch is None else [f"the batch is fixed at {batch}: ExecuTorch could not leave it open"]
        with ExecuTorchRunner(path, 1) as runner:
            outputs = len(runner(*tensors))
        most = MOST_SAMPLES if batch is None else batch
        remarks.append(
            f"planned memory: {units.size(planned)} for tensors between its parts, batches of {most}; XNNPACK's own "
            "comes on top"
        )
        names = ("output",) if outputs == 1 else tuple(f"output_{number}" for number in range(outputs))
        return Made(path, names, tuple(remarks), batch=batch, layers=layers)
    assert problem is not None
    raise ExportFailed(
        f"the model cannot be written for ExecuTorch: {first_line(problem)}; use runtime='onnxruntime', or change that "
        "part of forward"
    ) from problem


def _write(
    job: Job, path: Path, tensors: Tensors, shapes: Any, scheme: str | None, asked: str
) -> tuple[tuple[LayerPrecision, ...], int]:
    """Write the file; returns what its layers run in, and the bytes of the arena that was planned."""
    exir = _part("executorch.exir")
    partitioner = _part("executorch.backends.xnnpack.partition.xnnpack_partitioner").XnnpackPartitioner
    subject: Subject = job.subject
    adapter = subject.flat(None, export_copy(subject.model, subject)).eval()
    with torch.no_grad():
        program = torch.export.export(adapter, tensors, dynamic_shapes=shapes)
        if scheme is not None:
            module = _quantized(program.module(), job, tensors, scheme, shapes is not None)
            program = torch.export.export(module, tensors, dynamic_shapes=shapes)
        layers = _layers(program, asked)
        lowered = exir.to_edge_transform_and_lower(program, partitioner=[partitioner()]).to_executorch()
    path.write_bytes(lowered.buffer)
    return layers, sum(lowered.executorch_program.execution_plan[0].non_const_buffer_sizes)


def _quantized(module: Any, job: Job, tensors: Tensors, scheme: str, is_free: bool) -> Any:
    quantizers = _part("executorch.backends.xnnpack.quantizer.xnnpack_quantizer")
    steps = _part("torchao.quantization.pt2e.quantize_pt2e")
    config = quantizers.get_symmetric_quantization_config(is_per_channel=True, is_dynamic=scheme == "dynamic")
    prepared = steps.prepare_pt2e(module, quantizers.XNNPACKQuantizer().set_global(config))
    fixed = None if is_free else len(tensors[0])
    for batch in in_batches_of(job.calibration or [tensors], fixed):
        prepared(*batch)
    return steps.convert_pt2e(prepared)


def _layers(program: Any, asked: str) -> tuple[LayerPrecision, ...]:
    """Each product of the program that is lowered: int8 where its factors come from dequantisers."""
    found = []
    for node in program.graph.nodes:
        name = str(getattr(node.target, "__name__", node.target)).partition(".")[0]
        if node.op != "call_function" or not name.startswith(_PRODUCTS):
            continue
        factors = [argument for argument in node.args[:2] if isinstance(argument, torch.fx.Node)]
        is_int8 = bool(factors) and all("dequantize" in str(argument.target) for argument in factors)
        kind = "int8" if is_int8 else "fp32"
        scopes = [str(entry[0]) for entry in (node.meta.get("nn_module_stack") or {}).values()]
        path = (scopes[-1] if scopes else "").removeprefix("L['self'].").removeprefix("model").removeprefix(".")
        reason = "" if kind == asked else f"XNNPACK's quantiser left this {name} in {kind}"
        found.append(LayerPrecision(path, name, kind, reason, node.name))
    return tuple(found)
