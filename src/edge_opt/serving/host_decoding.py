"""Decoding on this machine: its bandwidth, products and overhead per operator, and the real loop."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from edge_opt._support.unchanged import unchanged
from edge_opt.errors import InvalidInput, MeasurementFailed, first_line
from edge_opt.measuring.machine import read_environment
from edge_opt.measuring.memory import record_events, replay
from edge_opt.records.devices import Bandwidth, DeviceSpec, Figure, Peak
from edge_opt.records.serving import MeasuredServing
from edge_opt.serving.model_source import find_config, find_language_model, import_transformers, quiet
from edge_opt.serving.token_trace import filled_cache, output_cache, run_step, traced_model

if TYPE_CHECKING:
    from edge_opt.serving.serving_costs import Serving

# Larger than any cache, small enough for a machine that is nearly full.
STREAMED_BYTES = 1 << 28
_WIDTH = 4096
_PROBE_S = 2.0


@cache
def host_spec(dtype: str = "float32", is_torch: bool = True) -> DeviceSpec:
    """Measure this machine now, once per process and type: reads, products and overhead.

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
    """Refuse a type that this machine's kernels cannot multiply.

    Some virtual machines announce an instruction set that they do not have. oneDNN then ends the process at the first
    16-bit product, which no `except` catches: so the product is tried in a process of its own.
    """
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
    """Return bytes per second of products of one row with matrices that are read from memory."""
    count = max(1, STREAMED_BYTES // (_WIDTH * _WIDTH * kind.itemsize))
    matrices = [torch.full((_WIDTH, _WIDTH), 0.01, dtype=kind) for _ in range(count)]
    row = torch.ones(1, _WIDTH, dtype=kind)

    def pass_over() -> None:
        for matrix in matrices:
            torch.nn.functional.linear(row, matrix)

    return count * _WIDTH * _WIDTH * kind.itemsize / _median_s(pass_over)


def _product(kind: torch.dtype) -> float:
    """Return operations per second of a product of many rows."""
    rows, width = 256, 1024
    left, right = torch.ones(rows, width, dtype=kind), torch.full((width, width), 0.01, dtype=kind)
    return 2 * rows * width * width / _median_s(lambda: torch.nn.functional.linear(left, right))


def _overhead() -> float:
    """Return seconds per operator of a decoding step that has next to nothing to compute."""
    config = import_transformers().LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=4, num_attention_heads=2, vocab_size=32
    )
    model = find_language_model(config, torch.float32)
    operators = traced_model(model, 8, 4, 1, absorbs_mla=False).decode.operators
    real = model.module.to_empty(device="cpu")
    for parameter in real.parameters():
        torch.nn.init.ones_(parameter)
    ids = torch.zeros(1, 1, dtype=torch.int64)
    with torch.inference_mode(), quiet():
        return _median_s(lambda: real(input_ids=ids, use_cache=True)) / operators


def _median_s(run: Callable[[], object]) -> float:
    """Return the median time of repeated runs, after one that warms up."""
    run()
    times: list[float] = []
    begin = time.perf_counter()
    while len(times) < 3 or time.perf_counter() - begin < _PROBE_S:
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2]


_TORCH_FORMATS = ("fp32", "fp16", "bf16")
_MAX_TOKENS = 64
_MIN_TOKENS = 5
_LOOP_S = 5.0


def measured_serving(source: Any, serving: Serving) -> MeasuredServing:
    """Time the prefill once after a warm-up, then the median of steps with one token each, in torch.

    Refuse formats that torch does not run, and models that do not fit this machine.
    """
    if serving.form.name not in _TORCH_FORMATS:
        raise InvalidInput(
            f"torch runs no weights in {serving.form.name}; measure with weights in {', '.join(_TORCH_FORMATS)}, and "
            "time a GGUF file with llama.cpp's llama-bench"
        )
    needed_bytes, ram_bytes = serving.memory(()).total_bytes, read_environment().memory_bytes
    if needed_bytes > 0.8 * ram_bytes:
        raise InvalidInput(
            f"the loop needs {needed_bytes / 2**30:.1f} GiB, and this machine has {ram_bytes / 2**30:.1f} GiB; measure "
            "a smaller model or a shorter context"
        )
    check_multiplies(serving.form.computes_in)
    model = _real_model(source, getattr(torch, serving.form.computes_in))
    ids = torch.zeros(serving.batch, serving.prompt, dtype=torch.int64)
    next_ids = torch.zeros(serving.batch, 1, dtype=torch.int64)
    with torch.inference_mode(), quiet(), unchanged(list(model.modules()), training=False):
        _call(model, ids[:, :1], None)
        start = time.perf_counter()
        cache = output_cache(_call(model, ids, None))
        prefill_s = time.perf_counter() - start
        steps: list[float] = []
        begin = time.perf_counter()
        while len(steps) < _MIN_TOKENS or (len(steps) < _MAX_TOKENS and time.perf_counter() - begin < _LOOP_S):
            start = time.perf_counter()
            cache = output_cache(_call(model, next_ids, cache))
            steps.append(time.perf_counter() - start)
        peak = None
        if hasattr(cache, "layers"):  # else it cannot be made as long as the context
            full = partial(filled_cache, cache, max(serving.context - 1, 1))
            peak = max(peak_bytes(model, next_ids, full), peak_bytes(model, ids))
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


def _real_model(source: Any, dtype: torch.dtype) -> nn.Module:
    """Return the module if it has weights, or one built with random weights."""
    if isinstance(source, nn.Module) and not any(item.is_meta for item in source.parameters()):
        return source
    config = source.config if isinstance(source, nn.Module) else find_config(source)
    transformers = import_transformers()
    with quiet():
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model


def _call(model: nn.Module, ids: torch.Tensor, cache: Any) -> Any:
    try:
        return run_step(model, cache, input_ids=ids)
    except Exception as error:  # whatever a model's own forward raises
        raise MeasurementFailed(f"the loop stopped in {type(model).__name__}: {first_line(error)}") from error


def peak_bytes(model: nn.Module, ids: torch.Tensor, make_cache: Callable[[], Any] | None = None) -> int:
    """Return the most bytes of tensors alive at once in a call: weights, inputs, cache and activations.

    The cache is made while the allocator is watched, because the model replaces it layer by layer: memory that was
    taken before would not be seen to go.
    """
    tensors = (*model.parameters(), *model.buffers(), ids)
    resident = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    with torch.no_grad():
        events = record_events(lambda: _call(model, ids, make_cache and make_cache()), torch.device("cpu"))
    return sum(resident.values()) + replay(events).tensor_peak_bytes
