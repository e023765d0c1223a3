"""Decoding on this machine: what it streams, multiplies and spends per operator, and the real loop."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from edge_opt.errors import InvalidInput, MeasurementFailed, MissingExtra, first_line
from edge_opt.measuring.machine import read_environment
from edge_opt.records.devices import Bandwidth, DeviceSpec, Figure, Peak
from edge_opt.records.serving import MeasuredServing
from edge_opt.serving.model_source import find_config, find_language_model, import_transformers, quiet
from edge_opt.serving.token_trace import cache_argument, filled_cache, handed_out, traced_model

if TYPE_CHECKING:
    from edge_opt.serving.serving_costs import Serving

# Larger than any cache, small enough for a machine that is nearly full.
STREAMED_BYTES = 1 << 28
_WIDTH = 4096
_PROBE_S = 2.0


@cache
def host_spec(dtype: str = "float32", is_torch: bool = True) -> DeviceSpec:
    """This machine with what was measured now, once per process and type: reads, products and overhead.

    Decoding multiplies matrices by one row each, so that is what is timed, on matrices that no cache holds.

    Args:
        dtype: the type that weights are held in; some machines have no fast kernels for 16 bits.
        is_torch: whether operators are called from Python one by one, which takes its time; other runtimes do not.
    """
    check_multiplies(dtype)
    kind: torch.dtype = getattr(torch, dtype)
    machine = read_environment()
    source = f"measured now with torch {torch.__version__}, threads: {torch.get_num_threads()}, {dtype}"

    def figure(value: float) -> Figure:
        return Figure(value, source, "measured")

    with torch.inference_mode():
        streamed, product = _streamed(kind), _product(kind)
    overhead = _overhead() if is_torch else 0.0
    return DeviceSpec(
        name="host",
        title=f"this machine ({machine.cpu})",
        engine="cpu",
        aliases=(),
        cores=figure(machine.cores),
        clock_hz=None,
        ram_bytes=(figure(machine.memory_bytes),),
        flash_bytes=None,
        bandwidths=(Bandwidth("read", "cpu", figure(streamed)),),
        bandwidth_unknown=None,
        # A rate that was reached; the share of a peak is taken off elsewhere.
        peaks=(Peak("cpu", "fp64", figure(product / 2)),),
        powers=(),
        overhead_s=figure(overhead),
        latencies=(),
        note="Measured for a few seconds, as it was loaded then.",
        origin="host",
    )


@cache
def check_multiplies(dtype: str) -> None:
    """Refuse a type that this machine's kernels cannot multiply; on some a 16-bit product ends the whole process."""
    if dtype == "float32":
        return
    code = f"import torch; x = torch.ones(64, 512, dtype=torch.{dtype}); torch.nn.functional.linear(x, x); x[:1] @ x.T"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    if done.returncode:
        raise MeasurementFailed(
            f"torch {torch.__version__} cannot multiply {dtype} on this machine (its process ended with "
            f"{done.returncode}); measure weights in fp32"
        )


def _streamed(kind: torch.dtype) -> float:
    """Bytes per second of products of one row with matrices that are read from memory."""
    count = max(1, STREAMED_BYTES // (_WIDTH * _WIDTH * kind.itemsize))
    matrices = [torch.full((_WIDTH, _WIDTH), 0.01, dtype=kind) for _ in range(count)]
    row = torch.ones(1, _WIDTH, dtype=kind)

    def pass_over() -> None:
        for matrix in matrices:
            torch.nn.functional.linear(row, matrix)

    return count * _WIDTH * _WIDTH * kind.itemsize / _median_s(pass_over)


def _product(kind: torch.dtype) -> float:
    """Operations per second of a product of many rows."""
    rows, width = 256, 1024
    left, right = torch.ones(rows, width, dtype=kind), torch.full((width, width), 0.01, dtype=kind)
    return 2 * rows * width * width / _median_s(lambda: torch.nn.functional.linear(left, right))


def _overhead() -> float:
    """Seconds per operator of a decoding step that has next to nothing to compute."""
    config = import_transformers().LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=4, num_attention_heads=2, vocab_size=32
    )
    model = find_language_model(config, torch.float32)
    operators = traced_model(model, 8, 4, 1, absorbs=False).decode.operators
    real = model.module.to_empty(device="cpu")
    for parameter in real.parameters():
        torch.nn.init.ones_(parameter)
    ids = torch.zeros(1, 1, dtype=torch.int64)
    with torch.inference_mode(), quiet():
        return _median_s(lambda: real(input_ids=ids, use_cache=True)) / operators


def _median_s(run: Callable[[], object]) -> float:
    """The median of repeated runs, after one that warms up."""
    run()
    times: list[float] = []
    begin = time.perf_counter()
    while len(times) < 3 or time.perf_counter() - begin < _PROBE_S:
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2]


_PLAIN = ("fp32", "fp16", "bf16")
_MOST_TOKENS = 64
_LOOP_S = 5.0
_FEWEST = 5


def measured_serving(source: Any, serving: Serving, measure: bool | str) -> MeasuredServing:
    """The loop in torch, or of a GGUF file in llama-cpp-python where `measure` names one."""
    if isinstance(measure, str):
        return _in_llama_cpp(Path(measure), serving)
    if serving.form.name not in _PLAIN:
        raise InvalidInput(
            f"torch runs no weights in {serving.form.name}; measure with weights in {', '.join(_PLAIN)}, or name a "
            "GGUF file for llama-cpp-python"
        )
    _refuse_large(serving)
    check_multiplies(serving.form.computes_in)
    model = _real_model(source, getattr(torch, serving.form.computes_in))
    return measured_torch(model, serving)


def _refuse_large(serving: Serving) -> None:
    needed, there = serving.memory(()).total_bytes, read_environment().memory_bytes
    if needed > 0.8 * there:
        raise InvalidInput(
            f"the loop needs {needed / 2**30:.1f} GiB, and this machine has {there / 2**30:.1f} GiB; measure a smaller "
            "model or a shorter context"
        )


def _real_model(source: Any, dtype: torch.dtype) -> nn.Module:
    """A module with its own weights, or one built with random ones."""
    if isinstance(source, nn.Module) and not any(item.is_meta for item in source.parameters()):
        return source.eval()
    config = source.config if isinstance(source, nn.Module) else find_config(source)
    transformers = import_transformers()
    with quiet():
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.eval()


def measured_torch(model: nn.Module, serving: Serving) -> MeasuredServing:
    """Prefill once after a warm-up, then tokens one by one; the median step is what counts."""
    ids = torch.zeros(serving.batch, serving.prompt, dtype=torch.int64)
    one = torch.zeros(serving.batch, 1, dtype=torch.int64)
    with torch.inference_mode(), quiet():
        _called(model, ids[:, :1], None)
        start = time.perf_counter()
        cache = handed_out(_called(model, ids, None))
        prefill_s = time.perf_counter() - start
        steps: list[float] = []
        begin = time.perf_counter()
        while len(steps) < _FEWEST or (len(steps) < _MOST_TOKENS and time.perf_counter() - begin < _LOOP_S):
            start = time.perf_counter()
            cache = handed_out(_called(model, one, cache))
            steps.append(time.perf_counter() - start)
        peak = decode_peak_bytes(model, cache, one, serving.context)
        if peak is not None:
            del cache
            peak = max(peak, prompt_peak_bytes(model, ids))
    return MeasuredServing(
        runtime=f"torch {torch.__version__}",
        weights=serving.form.name,
        threads=torch.get_num_threads(),
        prompt=serving.prompt,
        tokens=len(steps),
        prefill_s=prefill_s,
        decode_tokens_per_s=serving.batch / sorted(steps)[len(steps) // 2],
        peak_bytes=peak,
    )


def _called(model: nn.Module, ids: torch.Tensor, cache: Any) -> Any:
    extra: dict[str, Any] = {cache_argument(model): cache} if cache is not None else {}
    if "logits_to_keep" in _parameters(model):
        extra["logits_to_keep"] = 1
    try:
        return model(input_ids=ids, use_cache=True, **extra)
    except Exception as error:  # whatever a model's own forward raises
        raise MeasurementFailed(f"the loop stopped in {type(model).__name__}: {first_line(error)}") from error


def _parameters(model: nn.Module) -> Any:
    return inspect.signature(type(model).forward).parameters


def prompt_peak_bytes(model: nn.Module, ids: torch.Tensor) -> int:
    """Most bytes of tensors alive at once while a prompt is read, the cache that it fills included."""
    with torch.inference_mode(False), torch.no_grad():
        watch = TensorWatch()
        watch.add_all([*model.parameters(), *model.buffers(), ids])
        with watch:
            _called(model, ids, None)
    return watch.peak_bytes


def decode_peak_bytes(model: nn.Module, template: Any, ids: torch.Tensor, context: int) -> int | None:
    """Most bytes of tensors alive at once in a real step at full context: weights, inputs, cache and activations.

    None where the model hands out no cache that can be made at that length.
    """
    if template is None or not hasattr(template, "layers"):
        return None
    with torch.inference_mode(False), torch.no_grad():
        cache = filled_cache(template, max(context - 1, 1))
        watch = TensorWatch()
        watch.add_all([*model.parameters(), *model.buffers(), ids, *_tensors(cache)])
        extra: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in _parameters(model) else {}
        extra[cache_argument(model)] = cache
        with watch:
            model(input_ids=ids, use_cache=True, **extra)
    return watch.peak_bytes


def _tensors(cache: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for layer in cache.layers:
        for value in vars(layer).values():
            held = value.values() if isinstance(value, dict) else (value,)
            found += [item for item in held if isinstance(item, torch.Tensor) and item.dim() > 1]
    return found


class TensorWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows the storages of real tensors: each is added when an operator returns it, and taken off when it dies."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes = 0
        self.peak_bytes = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def add_all(self, tensors: list[torch.Tensor]) -> None:
        """Add what is there already; nothing here may keep it alive afterwards."""
        while tensors:
            self.add(tensors.pop())

    def add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        address, nbytes = storage._cdata, storage.nbytes()
        if address in self._known:
            return
        self._known[address] = weakref.ref(storage, self._gone(address, nbytes))
        self.live_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _gone(self, address: int, nbytes: int) -> Callable[[Any], None]:
        def forget(_: Any) -> None:
            self.live_bytes -= nbytes
            self._known.pop(address, None)

        return forget

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for item in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(item, torch.Tensor):
                self.add(item)
        return result


def _in_llama_cpp(path: Path, serving: Serving) -> MeasuredServing:
    """A GGUF file in llama-cpp-python, on its CPU."""
    if not path.is_file():
        raise InvalidInput(f"no GGUF file {str(path)!r}; measure=True runs the loop in torch")
    try:
        package = importlib.import_module("llama_cpp")
    except ImportError as error:
        raise MissingExtra(
            "a GGUF file is run by llama-cpp-python, which is not installed; run `pip install llama-cpp-python`, or "
            "measure in torch"
        ) from error
    if serving.context <= serving.prompt:
        raise InvalidInput(f"the context of {serving.context} has no room after a prompt of {serving.prompt}")
    threads = torch.get_num_threads()
    try:
        # Prompts have threads of their own there, all that there are unless told.
        model = package.Llama(
            model_path=str(path), n_ctx=serving.context, n_threads=threads, n_threads_batch=threads, verbose=False
        )
        prefill_s, steps = _llama_cpp_loop(model, serving)
    except Exception as error:  # whatever its bindings raise for a file that they cannot load or run
        raise MeasurementFailed(f"llama-cpp-python cannot run {str(path)!r}: {first_line(error)}") from error
    return MeasuredServing(
        runtime=f"llama-cpp-python {package.__version__}",
        weights=path.name,
        threads=threads,
        prompt=serving.prompt,
        tokens=len(steps),
        prefill_s=prefill_s,
        decode_tokens_per_s=1 / sorted(steps)[len(steps) // 2],
        peak_bytes=None,
    )


def _llama_cpp_loop(model: Any, serving: Serving) -> tuple[float, list[float]]:
    """Seconds of the prompt, and of each token after it; the file's pages are read before either."""
    model.eval([1])
    model.reset()
    start = time.perf_counter()
    model.eval([1] * serving.prompt)
    prefill_s = time.perf_counter() - start
    steps: list[float] = []
    begin = time.perf_counter()
    most = min(_MOST_TOKENS, serving.context - serving.prompt)
    while len(steps) < most and (len(steps) < _FEWEST or time.perf_counter() - begin < _LOOP_S):
        start = time.perf_counter()
        model.eval([1])
        steps.append(time.perf_counter() - start)
    return prefill_s, steps
