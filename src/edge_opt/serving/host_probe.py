"""This machine as a target for decoding: what it streams, multiplies and spends per operator, in a few seconds."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache

import torch

from edge_opt.errors import MeasurementFailed
from edge_opt.measuring.machine import read_environment
from edge_opt.records import Bandwidth, DeviceSpec, Figure, Peak
from edge_opt.serving.model_source import find_language_model, import_transformers, quiet
from edge_opt.serving.token_trace import traced_model

# Larger than any cache, small enough for a machine that is nearly full.
STREAMED_BYTES = 1 << 28
_WIDTH = 4096
_SECONDS = 2.0


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
    while len(times) < 3 or time.perf_counter() - begin < _SECONDS:
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2]
