"""The protocol of runtimes: conversion requests, built models, and runners, which are opened and timed here."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import nn
from typing_extensions import Self

from edge_opt._support.checks import check_threads
from edge_opt.errors import InvalidInput, translated
from edge_opt.measuring.latency import TimedCall, interleaved
from edge_opt.measuring.machine import read_environment
from edge_opt.quantization.onnx_files import Tensors
from edge_opt.records.conversions import Converted, Exported, Kernel, LayerPrecision
from edge_opt.records.fields import field, record
from edge_opt.records.measurements import Latency
from edge_opt.runtimes.model_call import ModelCall, in_batches_of
from edge_opt.runtimes.registry import find_runtime, runtimes_by_ending

_NOT_GIVEN = "it is given fp32 and int8 only; use runtime='onnxruntime'"
# The precisions of runtimes whose own converters and quantizers are used.
FP32_AND_INT8 = MappingProxyType({"fp32": "", "int8": "", "fp16": _NOT_GIVEN, "bf16": _NOT_GIVEN, "int4": _NOT_GIVEN})


@record
class ConversionRequest:
    """One conversion, as `convert` was asked for it."""

    call: ModelCall = field("The model with the arguments of one call.")
    precision: str = field("Type of the numbers.")
    folder: Path = field("Folder in which files are written before they are verified.")
    filename: str = field("Name of the file.")
    calibration: list[Tensors] | None = field("Batches to find ranges on; None where none were given.", default=None)
    keep_float: tuple[str, ...] = field("Paths of layers that stay in float.", default=())
    reduce_range: bool | None = field("Whether weights get 7 bits; None where the CPU decides.", default=None)
    exported: Exported | None = field("An ONNX file of the model that is there already.", default=None)
    scheme: str = field('How int8 is made: "static", "dynamic" or "weights".', default="static")
    group_size: int = field("Weights that share a scale where only weights are quantized.", default=32)
    fixed_batch: bool = field("Whether the file is to take the example's batch only.", default=False)
    holds_out: bool = field(
        "Whether static int8 is also compared on samples that its ranges were found without.", default=False
    )

    @property
    def path(self) -> Path:
        return self.folder / self.filename


@record
class BuiltModel:
    """The model that a runtime built."""

    path: Path = field("The file; for torch it holds the weights of `model`.")
    outputs: tuple[str, ...] | None = field(
        "Names of the outputs; None for those that `output_names` gives.", default=None
    )
    remarks: tuple[str, ...] = field("What a reader should know.", default=())
    model: nn.Module | None = field("The module to run, in torch.", default=None)
    reference: Path | None = field("The float file beside it whose nodes have the same names.", default=None)
    batch: int | None = field("The only batch size that it takes; None where it takes any.", default=None)
    layers: tuple[LayerPrecision, ...] = field(
        "What its layers run in, where the builder knows that better than the file.", default=()
    )
    held_out: tuple[Tensors, ...] = field("Batches that the ranges of `twin` were found without.", default=())
    twin: Callable[[], Path] | None = field(
        "Writes a file like this one with ranges of the other batches.", default=None
    )


@dataclass(frozen=True, slots=True)
class Inspection:
    """The kernels that ran, if the runtime reports them, and the precision of each layer."""

    kernels: tuple[Kernel, ...]
    layers: tuple[LayerPrecision, ...]


@record
class Program:
    """The part of a program to ship that depends on the runtime."""

    package: str = field("What pip installs.")
    imports: str = field("Its import lines.")
    body: str = field("Reads the model in FOLDER and sets `scores` from the list `inputs`.")


class Runner:
    """A loaded model: call it with tensors or arrays in the model's order, get a tuple of tensors in its order.

    Args:
        source: The file to load, or a module.
        threads: Threads of the runtime.
        precision: Precision hint for a runtime that takes one.
        effective_precision: Precision that was verified; None for a runner of a bare file or module.
    """

    runtime: str

    def __init__(
        self, source: Any, threads: int, precision: str = "fp32", effective_precision: str | None = None
    ) -> None:
        self.path: Path = source
        self.threads, self.precision, self.effective_precision = threads, precision, effective_precision
        self._loaded: Any = None

    def __call__(self, *inputs: Any) -> tuple[torch.Tensor, ...]:
        raise NotImplementedError

    def bind(self, *inputs: Any) -> Callable[[], object]:
        """Return a call with these inputs in the runtime's own form: what is timed.

        Args:
            inputs: Tensors or arrays in the model's order.
        """
        raise NotImplementedError

    @property
    def loaded(self) -> Any:
        """The object that the runtime loaded, set by the subclass; a closed runner raises."""
        if self._loaded is None:
            raise InvalidInput("this runner is closed; open it again")
        return self._loaded

    def close(self) -> None:
        """Release what the runtime holds."""
        self._loaded = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Runtime(Protocol):
    """A runtime: how it builds a file from a model, and how it runs one. See CONTRIBUTING.md for adding one.

    Attributes:
        name: As users write it.
        suffix: Ending of its files.
        package: The module that Python imports to run them.
        runner: The class of its runners.
        extra: The extra of edge-opt that installs it; "" where nothing more is needed.
        requires: The packages that building and running its files need, as Python imports them.
        is_automatic: Whether `auto` tries it where it is installed.
        precisions: Each precision with "" where it is supported, else the reason why it is not.
        runs_onnx: Whether its files are ONNX files, so that one export serves several runtimes.
        runs_modules: Whether it runs torch modules, and its files hold weights only.
        may_fix_batch: Whether its files may take one batch size only, which should then be the deployed one.
        kernels: The library that computes, where runtimes share one; "" where not.
        keeps_float: Whether single layers can be kept in float.
        int8_scheme: How int8 is made unless asked; "auto" goes by what the model is made of.
    """

    name: str
    suffix: str
    package: str
    runner: type[Any]
    extra: str = ""
    requires: tuple[str, ...] = ()
    is_automatic: bool = True
    precisions: Mapping[str, str]
    runs_onnx: bool = False
    runs_modules: bool = False
    may_fix_batch: bool = False
    kernels: str = ""
    keeps_float: bool = False
    int8_scheme: str = "auto"

    def build(self, request: ConversionRequest) -> BuiltModel:
        """Write the model in the precision that is asked for.

        Args:
            request: What is asked for, and the folder to write into.
        """
        ...

    def open(
        self, source: Path | nn.Module, threads: int, precision: str, effective_precision: str | None = None
    ) -> Runner:
        """Load a file, or a module where it runs modules.

        Args:
            source: The file or the module.
            threads: Threads that it uses.
            precision: What it is asked to compute in, where the file leaves that open.
            effective_precision: Precision that was verified; None if it was not.
        """
        runner: Runner = self.runner(source, threads, precision, effective_precision)
        return runner

    def inspect(self, built: BuiltModel, runner: Any, request: ConversionRequest, batch: Tensors) -> Inspection:
        """Return what really runs: kernels by one run on the batch where the runtime tells them, and layers.

        Args:
            built: What `build` returned.
            runner: What `open` returned for it.
            request: What was asked for.
            batch: Inputs of one call.
        """
        ...

    def program(self, precision: str) -> Program:
        """Return what a shipped program installs, imports and does.

        Args:
            precision: The precision of the shipped file.
        """
        ...


class PiecewiseRunner(Runner):
    """A runner of a file that may take one batch size only: several times as many samples take several calls."""

    title: str

    def input_shapes(self) -> Sequence[Sequence[int]]:
        """Return the shapes that the file takes, with less than 1 for a free batch."""
        raise NotImplementedError

    def bind_piece(self, inputs: tuple[Any, ...]) -> Callable[[], Any]:
        """Return a call with inputs of a size that the file takes."""
        raise NotImplementedError

    def outputs_of(self, result: Any) -> tuple[torch.Tensor, ...]:
        """Return the outputs of the last call, which returned `result`, as tensors of their own."""
        raise NotImplementedError

    def __call__(self, *inputs: Any) -> tuple[torch.Tensor, ...]:
        calls = self._calls(inputs)
        with translated(f"{self.title} refused the inputs", InvalidInput):
            outputs = [self.outputs_of(call()) for call in calls]
        return outputs[0] if len(outputs) == 1 else tuple(torch.cat(parts) for parts in zip(*outputs, strict=True))

    def bind(self, *inputs: Any) -> Callable[[], object]:
        calls = self._calls(inputs)
        return calls[0] if len(calls) == 1 else lambda: [call() for call in calls]

    def _calls(self, inputs: tuple[Any, ...]) -> list[Callable[[], Any]]:
        pieces = in_pieces(inputs, self.input_shapes())
        with translated(f"{self.title} refused the inputs", InvalidInput):
            return [self.bind_piece(piece) for piece in pieces]


def in_pieces(inputs: Sequence[Any], shapes: Sequence[Sequence[int]]) -> list[tuple[Any, ...]]:
    """Return the inputs in batches of the only size that a file takes; as they are where it takes any, or none fits.

    >>> [[tuple(value.shape) for value in piece] for piece in in_pieces([torch.zeros(4, 3)], [(2, 3)])]
    [[(2, 3)], [(2, 3)]]
    """
    tensors = tuple(torch.as_tensor(value) for value in inputs)
    sizes = {int(shape[0]) for shape in shapes if len(shape)}
    counts = {len(tensor) for tensor in tensors if tensor.dim()}
    if len(sizes) != 1 or len(counts) != 1 or len(tensors) != len(shapes):
        return [tuple(inputs)]
    size, count = min(sizes), min(counts)
    return [tuple(inputs)] if size < 1 or count <= size or count % size else in_batches_of([tensors], size)


def as_arrays(inputs: Sequence[Any], count: int) -> list[Any]:
    """Return the inputs as numpy arrays, and refuse another number of them."""
    arrays = [torch.as_tensor(value).detach().cpu().contiguous().numpy() for value in inputs]
    if len(arrays) != count:
        raise InvalidInput(f"{len(arrays)} inputs given; the model takes {count}")
    return arrays


def open_runner(
    source: Converted | str | os.PathLike[str] | nn.Module,
    runtime: str | None = None,
    *,
    threads: int = 1,
    precision: str = "fp32",
) -> Runner:
    """Load a conversion, a file or a module into a runtime.

    Args:
        source: The result of `convert`, the path of a file, or a torch module.
        runtime: Runtime; None: that of the conversion, torch for a module, else by the suffix of the file.
        threads: Threads of the runtime; measurements with one vary least.
        precision: Precision hint for a file in OpenVINO; a conversion has its own.

    >>> from torch import nn
    >>> with open_runner(nn.Linear(4, 2)) as runner:
    ...     [output] = runner(torch.zeros(3, 4))
    >>> runner.runtime, tuple(output.shape)
    ('torch', (3, 2))
    """
    check_threads(threads)
    effective = None
    if isinstance(source, Converted):
        effective = source.effective_precision if runtime in (None, source.runtime) else None
        runtime, precision = runtime or source.runtime, source.precision
        source = source.path if source.model is None else source.model
    elif isinstance(source, nn.Module):
        runtime = runtime or "torch"
        if find_runtime(runtime).runs_modules:
            source = copy.deepcopy(source).eval()
    if runtime is None:
        runtime = runtimes_by_ending().get(Path(str(source)).suffix, "onnxruntime")
    chosen = find_runtime(runtime)
    if isinstance(source, nn.Module):
        if not chosen.runs_modules:
            remedy = "convert it first: compress.convert(model, inputs)"
            raise InvalidInput(f"{runtime} cannot run a module; {remedy}")
        return chosen.open(source, threads, precision, effective)
    if chosen.runs_modules:
        raise InvalidInput(f"{runtime} cannot run {str(source)!r}; torch runs modules, not files")
    path = Path(source)
    if not path.is_file():
        raise InvalidInput(f"no file {str(path)!r}; compress.convert or compress.export_onnx writes one")
    return chosen.open(path, threads, precision, effective)


def measure_runner(runner: Runner, *inputs: Any, **options: Any) -> Latency:
    """Return the latency of one runner on these inputs, wall and CPU.

    Args:
        runner: The runner to time.
        inputs: The tensors of one call.
        options: Those of `edge_opt.measuring.interleaved`.
    """
    return measure_runners({"": runner}, *inputs, **options)[""]


def measure_runners(
    runners: Mapping[str, Runner], *inputs: Any, rehearses: bool = False, **options: Any
) -> dict[str, Latency]:
    """Return interleaved latencies of several runners on the same inputs, so that they can be compared.

    Args:
        runners: The runners to time, by name.
        inputs: The tensors of one call.
        rehearses: Whether each runs once, untimed, before its turn, so that none begins with what others left in the
            cache.
        options: Those of `edge_opt.measuring.interleaved`.
    """
    if not inputs:
        raise InvalidInput("no inputs given; pass the tensors of one call")
    first = torch.as_tensor(inputs[0])
    facts = {"batch_size": first.shape[0] if first.dim() else 1, "environment": read_environment(), **options}
    return interleaved({name: timed_call(runner, inputs, rehearses) for name, runner in runners.items()}, **facts)


def timed_call(runner: Runner, inputs: tuple[Any, ...], rehearses: bool = False) -> TimedCall:
    """Return a runner's call to be timed. Torch's thread count is the process's: it is set around each block."""
    run = runner.bind(*inputs)
    ready = getattr(runner, "ready", nullcontext)
    state = ExitStack()

    def prepare(_: int) -> None:
        state.enter_context(ready())
        if rehearses:
            run()

    return TimedCall(run, prepare, lambda _: state.close())
