"""Decoding on this machine: the real loop in torch, timed, and the memory that it takes."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from edge_opt._support.progress import quiet
from edge_opt._support.unchanged import unchanged
from edge_opt.errors import InvalidInput, MeasurementFailed, first_line
from edge_opt.measuring.machine import read_environment
from edge_opt.measuring.memory import record_events, replay
from edge_opt.records.serving import MeasuredServing
from edge_opt.serving.model_source import find_config, import_transformers
from edge_opt.serving.token_trace import filled_cache, output_cache, run_step

if TYPE_CHECKING:
    from edge_opt.serving.serving_costs import Serving

_TORCH_FORMATS = ("fp32", "fp16", "bf16")
_MAX_TOKENS = 64
_MIN_TOKENS = 5
_LOOP_S = 5.0


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
