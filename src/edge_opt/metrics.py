"""collect_metrics(): accuracy, latency, memory and an energy proxy of a classifier on a loader."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

import edge_opt as eo
from edge_opt._support.checks import check_one_of, check_positive, check_whole
from edge_opt._support.unchanged import unchanged
from edge_opt.errors import InvalidInput, MeasurementFailed, message_of
from edge_opt.measuring.latency import Clock, Stopwatch, TimedCall
from edge_opt.measuring.machine import CPU, DEVICE_TYPES, Device, find_device
from edge_opt.records.fields import Record, described, field
from edge_opt.records.sweeps import LABELS
from edge_opt.tasks.batches import Batch, task_of
from edge_opt.trace.inputs import CallArguments, accepts_keywords, map_arguments, on_device
from edge_opt.units import MIB

# A quantized model takes whatever type its first layer takes, so int8 has no type of input.
PRECISIONS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "int8": None}
EIGHT_BITS = (torch.int8, torch.uint8, torch.qint8, torch.quint8)
BOOTSTRAP_SEED = 0
BOOTSTRAP_SAMPLES = 10_000


# Not frozen and without slots: the published one can be changed, and taken apart with vars().
@described
@dataclass
class Metrics(Record):
    """Accuracy over a loader; latency, memory and energy of one forward on its first batch.

    Latencies are statistics of the trials taken, times the multiplier; throughput and energy follow from their mean.
    The interval of the accuracy is a percentile bootstrap; it has no width where all answers are right, or none.
    """

    accuracy: float = field("Share of right answers, from 0 to 1.")
    accuracy_ci95_low: float = field("Lower end of its 95 % interval.")
    accuracy_ci95_high: float = field("Upper end of that interval.")
    latency_ms: float = field("Mean of the trials, in milliseconds per forward.")
    latency_median_ms: float = field("Their median.")
    latency_std_ms: float = field("Their standard deviation.")
    latency_p95_ms: float = field("Their 95th percentile.")
    throughput_sps: float = field("Samples per second.")
    model_memory_mb: float = field("MiB of parameters, buffers and packed weights.")
    memory_mb: float = field("The same: what memory budgets are held against.")
    estimated_runtime_memory_mb: float = field("MiB of that, the inputs and the peak of activations: an estimate.")
    energy_proxy_j: float = field("Joules per forward: the given power times the mean latency; not a measurement.")
    energy_proxy_note: str = field("A sentence that says so, with the figures.")


def collect_metrics(
    model: nn.Module,
    loader: Iterable[Any],
    device: torch.device | str,
    power_watts: float,
    precision: str,
    latency_multiplier: float = 1.0,
    benchmark_repeats: int = 5,
    benchmark_trials: int = 3,
    benchmark_warmup: int = 3,
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> Metrics:
    """Return accuracy with a seeded bootstrap interval, latency, memory and an energy proxy of a classifier.

    Args:
        model: The classifier, whose outputs are (samples, classes), bare or as `logits`; it is not modified.
        loader: Batches of (inputs…, labels), or mappings with "labels", "label", "y", "targets" or "target"; the first
            one is timed.
        device: Where it runs, such as "cpu" or "cuda"; a GPU that is not there is replaced by the CPU, with a warning.
        power_watts: What the device draws, in watts; the energy proxy is this times the latency.
        precision: What the model is in already: "fp32", "fp16", "bf16" or "int8". Floating inputs are cast to it,
            except for int8.
        latency_multiplier: Latencies are multiplied by this, for a slower or faster device; 1 leaves them as measured.
        benchmark_repeats: Forwards that are timed together as one trial; 5, as published.
        benchmark_trials: Trials whose latencies give the statistics; 3, as published.
        benchmark_warmup: Forwards before them that are not timed, as the first ones are slow; 3, as published.
        clock: Returns the time in seconds.

    >>> from edge_opt.model import SmallCNN
    >>> batch = torch.zeros(4, 1, 28, 28), torch.zeros(4, dtype=torch.int64)
    >>> metrics = collect_metrics(SmallCNN(), [batch], "cpu", power_watts=2.0, precision="fp32")
    >>> round(metrics.model_memory_mb * 2**20) == 4 * (16 * 10 + 32 * (16 * 9 + 1) + 10 * 1569)
    True
    """
    for name, number in {"power_watts": power_watts, "latency_multiplier": latency_multiplier}.items():
        check_positive(name, number)
    check_whole("benchmark_repeats", benchmark_repeats)
    check_whole("benchmark_trials", benchmark_trials)
    check_whole("benchmark_warmup", benchmark_warmup, least=0)
    available = _available_device(device)
    dtype = _input_dtype(model, precision)
    subject = on_device(model, available.torch_name)
    with _restored(subject, available), torch.no_grad():
        accuracy, samples, first = _evaluate(subject, loader, dtype)
        runner = TimedCall(lambda: first.answer(subject))
        runner.times(benchmark_warmup)
        stopwatch = Stopwatch(Clock(wall=clock), available)
        trials_s = [stopwatch.block(runner, benchmark_repeats)[0] for _ in range(benchmark_trials)]
    low, high = _bootstrap_interval(accuracy, samples)
    trials_ms = np.array(trials_s) * latency_multiplier * 1000
    latency_s = float(trials_ms.mean()) / 1000
    if latency_s <= 0:
        raise MeasurementFailed(f"the clock did not move in {benchmark_repeats} forwards; raise benchmark_repeats")
    model_bytes = sum(tensor.numel() * tensor.element_size() for tensor in stored_tensors(model))
    memory = eo.peak_memory(eo.profile(subject, CallArguments(first.args, first.kwargs)))
    return Metrics(
        accuracy=accuracy,
        accuracy_ci95_low=low,
        accuracy_ci95_high=high,
        latency_ms=float(trials_ms.mean()),
        latency_median_ms=float(np.median(trials_ms)),
        latency_std_ms=float(trials_ms.std()),
        latency_p95_ms=float(np.quantile(trials_ms, 0.95)),
        throughput_sps=len(first.labels) / latency_s,
        model_memory_mb=model_bytes / MIB,
        memory_mb=model_bytes / MIB,
        estimated_runtime_memory_mb=(model_bytes + memory.input_bytes + memory.activation_bytes) / MIB,
        energy_proxy_j=power_watts * latency_s,
        energy_proxy_note=f"a proxy, not a measurement: {power_watts:g} W given × mean latency of {latency_s:.4g} s",
    )


def _available_device(device: torch.device | str) -> Device:
    """Return the device, or with a warning the CPU where this machine has no such GPU."""
    if str(device).partition(":")[0] not in DEVICE_TYPES:
        raise InvalidInput(f"device is {str(device)!r}; it must be 'cpu', 'cuda', 'cuda:1' or 'mps'")
    try:
        return find_device(device)
    except InvalidInput:
        warnings.warn(f"{device} is not available here; the CPU is measured instead", UserWarning, stacklevel=3)
        return CPU


def stored_tensors(model: nn.Module) -> list[torch.Tensor]:
    """Return each parameter, each buffer, and what quantized layers pack into their state, once."""
    values: list[Any] = [*model.parameters(), *model.buffers()]
    for value in model.state_dict(keep_vars=True).values():
        values.extend(value if isinstance(value, (tuple, list)) else [value])
    tensors = [part for tensor in values if isinstance(tensor, torch.Tensor) for part in _parts(tensor)]
    return list({id(tensor): tensor for tensor in tensors}.values())


def _parts(tensor: Any) -> list[torch.Tensor]:
    """Return the tensors inside a wrapper such as torchao's, which claims a floating type and stores int8."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    return [part for name in tensor.__tensor_flatten__()[0] for part in _parts(getattr(tensor, name))]


def _input_dtype(model: nn.Module, precision: str) -> torch.dtype | None:
    """Return the type of floating-point inputs; refuse a model that is not in this precision."""
    if not isinstance(model, nn.Module):
        raise InvalidInput(f"the model must be a torch.nn.Module, and this is a {type(model).__name__}")
    check_one_of("precision", precision, PRECISIONS)
    stored, dtype = stored_tensors(model), PRECISIONS[precision]
    if dtype is None:
        # A table of bytes or a mask is not a weight; a model without any tensor keeps its weights elsewhere.
        if stored and not any(tensor.dtype in EIGHT_BITS and tensor.ndim > 1 for tensor in stored):
            raise InvalidInput("precision is 'int8', and no weight is stored in 8 bits; quantize the model first")
        return None
    weights = [(name, part) for name, parameter in model.named_parameters() for part in _parts(parameter)]
    weights += [("a packed weight", tensor) for tensor in stored if tensor.is_quantized]
    types = [
        (name, weight.dtype) for name, weight in weights if weight.is_floating_point() or weight.dtype in EIGHT_BITS
    ]
    others = [f"{name} is {str(stored_as).removeprefix('torch.')}" for name, stored_as in types if stored_as != dtype]
    if others:
        raise InvalidInput(
            f"precision is {precision!r}, and {len(others)} of {len(types)} weights are not: {others[0]}; "
            "convert the model first, or name the precision it is in"
        )
    return dtype


@contextmanager
def _restored(model: nn.Module, device: Device) -> Iterator[None]:
    """Run the model in eval mode; then restore it, its buffers' values and random numbers, also after an error."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    with (
        torch.random.fork_rng([device.torch_name] if device.torch_name.startswith("cuda") else []),
        unchanged(list(model.modules()), training=False, fast_path=True),
    ):
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, before in buffers:
                    if not torch.equal(buffer, before):
                        buffer.copy_(before)


def _evaluate(model: nn.Module, loader: Iterable[Any], dtype: torch.dtype | None) -> tuple[float, int, Batch]:
    """Return the accuracy, the number of samples, and the first batch as the model is called with it."""
    task = task_of("accuracy")
    first: list[Batch] = []

    def answers() -> Iterator[tuple[Any, Any]]:
        for number, batch in enumerate(task.batches(model, (_without_its_name(model, raw) for raw in loader))):
            call = CallArguments(batch.args, batch.kwargs)
            if dtype is not None:
                call = map_arguments(call, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)
            cast = Batch(call.args, call.kwargs, batch.labels)
            first[:] = first or [cast]
            try:
                outputs = cast.answer(model)
            except Exception as error:
                raise MeasurementFailed(f"the model failed on batch {number}: {message_of(error)}") from error
            yield outputs, batch.labels

    score = task.metric.scored(answers(), resamples=0)
    return score.value, score.samples, first[0]


def _without_its_name(model: nn.Module, raw: Any) -> Any:
    """Return (input, labels) for a mapping with one input, if its name is none of the model's parameters."""
    if isinstance(raw, Mapping) and len(raw) == 2:
        for key in LABELS:
            others = [name for name in raw if name != key]
            if key in raw and not accepts_keywords(model, others):
                return raw[others[0]], raw[key]
    return raw


def _bootstrap_interval(accuracy: float, samples: int) -> tuple[float, float]:
    # Right answers among n drawn with replacement are a binomial number: no need to draw them one by one.
    right = np.random.default_rng(BOOTSTRAP_SEED).binomial(samples, accuracy, BOOTSTRAP_SAMPLES)
    low, high = np.quantile(right / samples, [0.025, 0.975])
    return float(low), float(high)
