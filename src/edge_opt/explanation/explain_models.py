"""Explain two models by running them: modules, files and conversions, timed interleaved, with their kernels."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn

from edge_opt.errors import InvalidInput
from edge_opt.explanation.explain import ModelVariant, explain
from edge_opt.measuring.latency import interleaved
from edge_opt.measuring.machine import read_environment
from edge_opt.profiling import profile
from edge_opt.records.compression import Explanation
from edge_opt.records.measurements import Latency
from edge_opt.runtimes.convert import convert
from edge_opt.runtimes.kernels import profile_runner
from edge_opt.runtimes.model_call import model_call
from edge_opt.runtimes.protocol import Runner, open_runner, timed_call
from edge_opt.runtimes.registry import find_runtime

_CALIBRATION_BATCHES = 4


@dataclass(frozen=True, slots=True)
class ModelToRun:
    """A model to time: a module as torch runs it, a conversion of it if a precision is given, or a file.

    Attributes:
        model: The module, or that of the file.
        inputs: As in `profile`.
        tensors: The values of one call, in the model's order.
        kwargs: Arguments of the model by name.
        path: The file; None for a module.
        precision: What to convert the module to; None runs it as it is.
        runtime: Runtime of the file or of the conversion; None is the usual one.
    """

    model: nn.Module
    inputs: Any
    tensors: Sequence[Any]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    path: Path | None = None
    precision: str | None = None
    runtime: str | None = None


def explain_models(before: ModelToRun, after: ModelToRun, *, min_time_s: float = 0.5, threads: int = 1) -> Explanation:
    """Run two models on this machine, and explain why the second is faster or is not.

    A conversion to int8 is calibrated on noise: it shows time, not accuracy.

    Args:
        before: The first model.
        after: The second model.
        min_time_s: Least seconds to measure each of them.
        threads: Threads of both runtimes.
    """
    batches = [len(side.tensors[0]) if side.tensors[0].dim() else 1 for side in (before, after)]
    if batches[0] != batches[1]:
        raise InvalidInput(f"one model takes {batches[0]} samples and the other {batches[1]}; set both with --batch")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        sides = []
        for name, side in (("before", before), ("after", after)):
            variant, runner = _opened(side, folder / name, min_time_s, threads)
            sides.append((side, variant, stack.enter_context(runner)))
        calls = {str(place): timed_call(runner, tuple(side.tensors)) for place, (side, _, runner) in enumerate(sides)}
        options: dict[str, Any] = {"batch_size": batches[0], "environment": read_environment()}
        times = interleaved(calls, min_time_s=min_time_s, **options)
        variants = [_timed(*side, times[str(place)]) for place, side in enumerate(sides)]
    return explain(*variants, paired=True)


def _opened(side: ModelToRun, folder: Path, min_time_s: float, threads: int) -> tuple[ModelVariant, Runner]:
    """Return the variant without its times, and what runs it."""
    if side.path is not None:
        counted = profile(side.model, side.inputs, kwargs=side.kwargs)
        return ModelVariant(counted), open_runner(side.path, side.runtime, threads=threads)
    if side.precision is None:
        # Torch has no profiler of kernels that is read here: layers are timed one by one.
        measure = {"min_time_s": min_time_s, "threads": threads}
        counted = profile(side.model, side.inputs, kwargs=side.kwargs, measure=measure)
        flat = model_call(side.model, side.inputs, side.kwargs).flat()
        return ModelVariant(counted), find_runtime("torch").open(flat, threads, "fp32")
    converted = convert(
        side.model,
        side.inputs,
        side.precision,
        side.runtime or "onnxruntime",
        kwargs=side.kwargs,
        calibration=[tuple(side.tensors)] * _CALIBRATION_BATCHES if side.precision == "int8" else None,
        output=folder,
        require_precision=False,
        max_difference=True,
    )
    counted = profile(side.model, side.inputs, kwargs=side.kwargs)
    return ModelVariant(counted, converted), open_runner(converted, threads=threads)


def _timed(side: ModelToRun, variant: ModelVariant, runner: Runner, latency: Latency) -> ModelVariant:
    has_profiler = hasattr(runner, "kernel_times")
    return replace(
        variant,
        latency=latency,
        kernels=profile_runner(runner, *side.tensors) if has_profiler else None,
        runtime=runner.runtime,
    )
