"""open_runner(): a conversion, a file or a module in a runtime; measure_runner(s): its latency."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from edge_opt._support.checks import check_whole
from edge_opt.errors import InvalidInput
from edge_opt.measuring.latency import TimedCall, interleaved
from edge_opt.measuring.machine import read_environment
from edge_opt.records.conversions import Converted
from edge_opt.records.measurements import Latency
from edge_opt.runtimes.protocol import Runner
from edge_opt.runtimes.registry import find_runtime, runtimes_by_ending
from edge_opt.runtimes.torch_runtime import TorchRunner


def open_runner(
    source: Converted | str | os.PathLike[str] | nn.Module,
    runtime: str | None = None,
    *,
    threads: int = 1,
    precision: str = "fp32",
) -> Runner:
    """Load a conversion, a file or a module into a runtime.

    Args:
        source: What `convert` returned, the path of a file, or a torch module.
        runtime: Who runs it; None takes the conversion's own, torch for a module, and goes by the ending of a file.
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
        runner: What to time.
        inputs: The tensors of one call.
        options: Those of `edge_opt.measuring.interleaved`.
    """
    return measure_runners({"": runner}, *inputs, **options)[""]


def measure_runners(
    runners: Mapping[str, Runner], *inputs: Any, rehearses: bool = False, **options: Any
) -> dict[str, Latency]:
    """Return latencies of several runners on the same inputs, a block of each in turn, so that they can be compared.

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
    return interleaved({name: _timed_call(runner, inputs, rehearses) for name, runner in runners.items()}, **facts)


def _timed_call(runner: Runner, inputs: tuple[Any, ...], rehearses: bool) -> TimedCall:
    """Return a runner's call to be timed. Torch's thread count is the process's: it is set around each block."""
    run = runner.bind(*inputs)

    def rehearse(_: int) -> None:
        run()

    if not isinstance(runner, TorchRunner):
        return TimedCall(run, rehearse if rehearses else None)
    callers_threads: list[int] = []

    def prepare(_: int) -> None:
        callers_threads.append(torch.get_num_threads())
        torch.set_num_threads(runner.threads)
        if rehearses:
            run()

    def collect(_: int) -> None:
        torch.set_num_threads(callers_threads.pop())

    return TimedCall(run, prepare, collect)
