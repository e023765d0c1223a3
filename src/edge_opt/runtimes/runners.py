"""Runtimes behind one Runner, and what this CPU computes fast."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from typing_extensions import Self

from edge_opt._support.checks import check_whole
from edge_opt._support.output_tensors import flat_tensors
from edge_opt.errors import ConversionFailed, InvalidInput, first_line
from edge_opt.measuring.file_session import open_session, reason
from edge_opt.measuring.latency import TimedCall as Repeats
from edge_opt.measuring.latency import interleaved
from edge_opt.measuring.machine import cpu_flags, crash_of, read_environment
from edge_opt.quantization.onnx_files import require
from edge_opt.records.conversions import Converted
from edge_opt.records.measurements import Latency

# What OpenVINO is asked to compute in. int8 is in the file; what is not quantised stays in float32, unless told so.
HINTS = MappingProxyType({"fp32": "f32", "fp16": "f16", "bf16": "bf16", "int8": "f32"})


# Every runtime with the ending of its files; those of torch hold weights only.
SUFFIXES = MappingProxyType(
    {
        "torch": "pt",
        "onnxruntime": "onnx",
        "openvino": "onnx",
        "torch-compile": "pt",
        "litert": "tflite",
        "executorch": "pte",
    }
)
IN_TORCH = ("torch", "torch-compile")


def check_instructions(precision: str, runtime: str) -> None:
    """Refuse a precision that would end this process, because the machine refuses instructions that it announces.

    Torch computes 16-bit floats with them, OpenVINO whole numbers, too. It is tried in another process, by torch; for
    OpenVINO only where a CPU announces matrix units (AMX), which virtual machines are known to refuse.
    """
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(precision)
    if runtime == "openvino":
        dtype = torch.bfloat16 if precision != "fp32" and "amx_tile" in cpu_flags() else None
    found = None if dtype is None else crash_of(dtype)
    if found is not None:
        raise ConversionFailed(
            f"{runtime} computes {precision} here with instructions that the machine refuses ({found}); "
            "start Python with ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16, or choose another runtime"
        )


# They take a file of ONNX, so that one export does for all.
BY_ONNX_FILE = ("onnxruntime", "openvino")
# What Python imports to run each.
PACKAGES = MappingProxyType(
    {
        "torch": "torch",
        "onnxruntime": "onnxruntime",
        "openvino": "openvino",
        "torch-compile": "torch",
        "litert": "ai_edge_litert.interpreter",
        "executorch": "executorch.runtime",
    }
)


@runtime_checkable
class Runner(Protocol):
    """A loaded model: call it with tensors or arrays in the model's order, get a tuple of tensors in its order.

    Attributes:
        runtime: Who runs it, such as torch or onnxruntime.
        threads: Threads that it uses.
        effective_precision: What it runs in; None where nobody has verified it: a runner of a bare file or module.
    """

    runtime: str
    threads: int
    effective_precision: str | None

    def __call__(self, *inputs: Any) -> tuple[torch.Tensor, ...]: ...

    def bind(self, *inputs: Any) -> Callable[[], object]:
        """A call with these inputs in the runtime's own form: what is timed.

        Args:
            inputs: Tensors or arrays in the model's order.
        """
        ...

    def close(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


class Closing:
    """Runners close themselves at the end of a `with`."""

    def close(self) -> None:
        """Give back what the runtime holds."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def in_pieces(inputs: Sequence[Any], shapes: Sequence[Sequence[int]]) -> list[tuple[Any, ...]]:
    """The inputs in batches of the only size that a file takes; as they are where it takes any, or none fits.

    >>> [[tuple(value.shape) for value in piece] for piece in in_pieces([torch.zeros(4, 3)], [(2, 3)])]
    [[(2, 3)], [(2, 3)]]
    """
    tensors = [torch.as_tensor(value) for value in inputs]
    fixed = {int(shape[0]) for shape in shapes if len(shape)}
    counts = {len(tensor) for tensor in tensors if tensor.dim()}
    if len(fixed) != 1 or len(counts) != 1 or min(fixed) < 1 or len(tensors) != len(shapes):
        return [tuple(inputs)]
    size, count = min(fixed), min(counts)
    if count <= size or count % size:
        return [tuple(inputs)]
    return [tuple(tensor[start : start + size] for tensor in tensors) for start in range(0, count, size)]


class TorchRunner(Closing):
    """A torch module in eval; threads are set around each call and put back."""

    runtime = "torch"

    def __init__(self, model: nn.Module, threads: int, effective_precision: str | None = None) -> None:
        self._model: nn.Module | None = model
        self.threads, self.effective_precision = threads, effective_precision

    def __call__(self, *inputs: Any) -> tuple[torch.Tensor, ...]:
        with self.ready():
            return tuple(flat_tensors(self.bind(*inputs)()))

    def bind(self, *inputs: Any) -> Callable[[], object]:
        if self._model is None:
            raise InvalidInput("this runner is closed; open it again")
        model, tensors = self._model, [torch.as_tensor(value) for value in inputs]

        def call() -> object:
            with torch.inference_mode():
                return model(*tensors)

        return call

    @contextmanager
    def ready(self) -> Iterator[None]:
        """This many threads inside, the caller's number outside."""
        found = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        try:
            yield
        finally:
            torch.set_num_threads(found)

    def close(self) -> None:
        self._model = None


class CompiledRunner(TorchRunner):
    """A torch module compiled by torch.compile, for each shape when it first comes."""

    runtime = "torch-compile"

    def __init__(self, model: nn.Module, threads: int, effective_precision: str | None = None) -> None:
        super().__init__(torch.compile(model), threads, effective_precision)  # type: ignore[arg-type]

    def __call__(self, *inputs: Any) -> tuple[torch.Tensor, ...]:
        try:
            return super().__call__(*inputs)
        except InvalidInput:
            raise
        except Exception as error:  # a compiler that is missing, or code that it cannot take
            raise ConversionFailed(
                f"torch.compile failed: {first_line(error)}; it needs a C++ compiler (g++); or use runtime='torch'"
            ) from error


class OnnxRuntimeRunner(Closing):
    """An ONNX file in ONNX Runtime on the CPU."""

    runtime = "onnxruntime"

    def __init__(self, path: Path, threads: int, effective_precision: str | None = None) -> None:
        self.path, self.threads, self.effective_precision = path, threads, effective_precision
        self._session = self.session()

    def session(self, profile_prefix: str | None = None) -> Any:
        """A session of this file; with a prefix it writes a profile."""
        require("onnxruntime")
        return open_session(self.path, self.threads, profile_prefix)

    def feeds(self, inputs: Iterable[Any]) -> dict[str, Any]:
        """The inputs by their names in the file."""
        if self._session is None:
            raise InvalidInput("this runner is closed; open it again")
        names = [entry.name for entry in self._session.get_inputs()]
        return dict(zip(names, _arrays(inputs, len(names)), strict=True))

    def __call__(self, *inputs: Any) -> tuple[torch.Tensor, ...]:
        feeds = self.feeds(inputs)
        try:
            return tuple(torch.from_numpy(array) for array in self._session.run(None, feeds))
        except Exception as error:  # as above
            raise InvalidInput(f"ONNX Runtime refused the inputs: {reason(error)}") from error

    def bind(self, *inputs: Any) -> Callable[[], object]:
        session, feeds = self._session, self.feeds(inputs)
        return lambda: session.run(None, feeds)

    def close(self) -> None:
        self._session = None


class OpenVinoRunner(Closing):
    """An ONNX file in OpenVINO on the CPU, asked to compute in `precision`."""

    runtime = "openvino"

    def __init__(self, path: Path, threads: int, precision: str, effective_precision: str | None = None) -> None:
        self.path, self.threads, self.precision = path, threads, precision
        self.effective_precision = effective_precision
        check_instructions(precision, self.runtime)
        self._request = self.compiled().create_infer_request()

    def compiled(self, more: Mapping[str, Any] | None = None) -> Any:
        """The file compiled for this CPU."""
        core = require("openvino", "openvino").Core()
        # Without the hint OpenVINO turns float32 into bf16 wherever the CPU has it.
        wanted = {
            "INFERENCE_PRECISION_HINT": HINTS[self.precision],
            "INFERENCE_NUM_THREADS": self.threads,
            "NUM_STREAMS": "1",
            **(more or {}),
        }
        try:
            return core.compile_model(core.read_model(str(self.path)), "CPU", wanted)
        except Exception as error:  # RuntimeError of several modules of its own
            raise ConversionFailed(f"OpenVINO cannot load {self.path.name}: {reason(error)}") from error

    def feeds(self, inputs: Iterable[Any]) -> dict[int, Any]:
        """The inputs by position."""
        if self._request is None:
            raise InvalidInput("this runner is closed; open it again")
        return dict(enumerate(_arrays(inputs, len(self._request.model_inputs))))

    def __call__(self, *inputs: Any) -> tuple[torch.Tensor, ...]:
        feeds = self.feeds(inputs)
        try:
            found = self._request.infer(feeds)
        except Exception as error:  # as above
            raise InvalidInput(f"OpenVINO refused the inputs: {reason(error)}") from error
        return tuple(torch.tensor(found[port]) for port in self._request.model_outputs)

    def bind(self, *inputs: Any) -> Callable[[], object]:
        request, feeds = self._request, self.feeds(inputs)
        return lambda: request.infer(feeds, share_inputs=True, share_outputs=True)

    def close(self) -> None:
        self._request = None


def open_runner(
    source: Converted | str | os.PathLike[str] | nn.Module,
    runtime: str | None = None,
    *,
    threads: int = 1,
    precision: str = "fp32",
) -> Runner:
    """Load a conversion, an ONNX file or a module into a runtime.

    Args:
        source: What `convert` returned, the path of an ONNX file, or a torch module.
        runtime: Who runs it; None takes the conversion's own, torch for a module, onnxruntime for a file.
        threads: Threads that the runtime uses; one is the quietest to measure.
        precision: What OpenVINO is asked to compute a file in; a conversion knows its own.

    >>> from torch import nn
    >>> with open_runner(nn.Linear(4, 2)) as runner:
    ...     [output] = runner(torch.zeros(3, 4))
    >>> runner.runtime, tuple(output.shape)
    ('torch', (3, 2))
    """
    check_whole("threads", threads)
    effective = None
    if isinstance(source, Converted):
        effective = source.effective_precision if runtime in (None, source.runtime) else None
        runtime, precision = runtime or source.runtime, source.precision
        source = source.model if source.runtime in IN_TORCH else source.path
    elif isinstance(source, nn.Module):
        runtime = runtime or "torch"
        if runtime in IN_TORCH:
            source = copy.deepcopy(source).eval()
    if runtime is None:
        ending = Path(str(source)).suffix.lstrip(".")
        runtime = {"tflite": "litert", "pte": "executorch"}.get(ending, "onnxruntime")
    if runtime not in SUFFIXES:
        raise InvalidInput(f"unknown runtime {runtime!r}; it is one of {', '.join(SUFFIXES)}")
    if isinstance(source, nn.Module) != (runtime in IN_TORCH):
        is_module = isinstance(source, nn.Module)
        cure = (
            "convert it first: compress.convert(model, inputs)" if is_module else "torch runs modules, not ONNX files"
        )
        raise InvalidInput(f"{runtime} cannot run {'a module' if is_module else repr(str(source))}; {cure}")
    if isinstance(source, nn.Module):
        return (CompiledRunner if runtime == "torch-compile" else TorchRunner)(source, threads, effective)
    path = Path(source)
    if not path.is_file():
        raise InvalidInput(f"no file {str(path)!r}; compress.convert or compress.export_onnx writes one")
    return open_file(path, runtime, threads, precision, effective)


def open_file(path: Path, runtime: str, threads: int, precision: str, effective: str | None = None) -> Runner:
    """A file in the runtime that it is for."""
    if runtime == "litert":
        from edge_opt.runtimes.litert import LiteRtRunner

        return LiteRtRunner(path, threads, effective)
    if runtime == "executorch":
        from edge_opt.runtimes.executorch import ExecuTorchRunner

        return ExecuTorchRunner(path, threads, effective)
    if runtime == "onnxruntime":
        return OnnxRuntimeRunner(path, threads, effective)
    if precision not in HINTS:
        raise InvalidInput(f"unknown precision {precision!r}; it is one of {', '.join(HINTS)}")
    return OpenVinoRunner(path, threads, precision, effective)


def measure_runner(runner: Runner, *inputs: Any, **options: Any) -> Latency:
    """Latency of one runner on these inputs, wall and CPU.

    Args:
        runner: What to time.
        inputs: The tensors of one call.
        options: Those of `edge_opt.measuring.interleaved`.
    """
    return measure_runners({"": runner}, *inputs, **options)[""]


def measure_runners(
    runners: Mapping[str, Runner], *inputs: Any, rehearses: bool = False, **options: Any
) -> dict[str, Latency]:
    """Latencies of several runners on the same inputs, a block of each in turn, so that they can be compared.

    Args:
        runners: What to time, by name.
        inputs: The tensors of one call.
        rehearses: Whether each runs once, untimed, before its turn, so that none begins with what others left in the
            cache.
        options: Those of `edge_opt.measuring.interleaved`.
    """
    if not inputs:
        raise InvalidInput("no inputs given; pass the tensors of one call")
    first = torch.as_tensor(inputs[0])
    facts = {"batch_size": first.shape[0] if first.dim() else 1, "environment": read_environment(), **options}
    return interleaved({name: _repeats(runner, inputs, rehearses) for name, runner in runners.items()}, **facts)


def _repeats(runner: Runner, inputs: tuple[Any, ...], rehearses: bool) -> Repeats:
    """Torch's thread count is the process's, so that it is set before each block and put back behind it."""
    run = runner.bind(*inputs)

    def rehearse(_: int) -> None:
        run()

    if not isinstance(runner, TorchRunner):
        return Repeats(run, rehearse if rehearses else None)
    found: list[int] = []

    def prepare(_: int) -> None:
        found.append(torch.get_num_threads())
        torch.set_num_threads(runner.threads)
        if rehearses:
            run()

    def collect(_: int) -> None:
        torch.set_num_threads(found.pop())

    return Repeats(run, prepare, collect)


def _arrays(inputs: Iterable[Any], count: int) -> list[Any]:
    given = [torch.as_tensor(value).detach().cpu().contiguous().numpy() for value in inputs]
    if len(given) != count:
        raise InvalidInput(f"{len(given)} inputs given; the model takes {count}")
    return given
