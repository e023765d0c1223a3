"""collect_metrics(): accuracy, latency, memory and energy of a classifier, as one record."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

import edge_opt as eo
from edge_opt.errors import InvalidInput, MeasurementFailed
from edge_opt.metrics.batches import Batch, read
from edge_opt.metrics.scores import check_fit, logits_of
from edge_opt.metrics.subject import as_found, input_dtype, stored_tensors, usable_device

MIB = 1024 * 1024
BOOTSTRAP_SEED = 0
BOOTSTRAP_SAMPLES = 10_000


@dataclass(frozen=True, slots=True)
class Metrics:
    """Accuracy over a loader; latency, memory and energy of one forward on its first batch.

    Latencies are statistics of the trials taken, times the multiplier; throughput and energy follow from their mean.
    The interval is a percentile bootstrap: it has no width where all answers are right, or none.
    `model_memory_mb` is parameters, buffers and packed weights. `memory_mb` adds the inputs and the peak of activations
    in an eager run. `estimated_runtime_memory_mb` is the same for a runtime that plans its memory: each activation is
    dropped after its last use and results are kept; it is lower where eager code holds tensors longer, else equal.
    Both are estimates without operator scratch, allocator and libraries. All are MiB.
    """

    accuracy: float
    accuracy_ci95_low: float
    accuracy_ci95_high: float
    latency_ms: float
    latency_median_ms: float
    latency_std_ms: float
    latency_p95_ms: float
    throughput_sps: float
    model_memory_mb: float
    memory_mb: float
    estimated_runtime_memory_mb: float
    energy_proxy_j: float
    energy_proxy_note: str


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
    """Accuracy with a seeded bootstrap interval, latency, memory and an energy proxy of a classifier.

    Batches are (inputs…, labels) or mappings with "labels", "label" or "y"; outputs are (samples, classes), bare or as
    `logits`. A trial is `benchmark_repeats` forwards timed as one. `precision` must be what the model is in already;
    floating inputs are cast to it. A GPU that is not there is replaced by the CPU, with a warning.

    >>> from edge_opt.model import SmallCNN
    >>> batch = torch.zeros(4, 1, 28, 28), torch.zeros(4, dtype=torch.int64)
    >>> metrics = collect_metrics(SmallCNN(), [batch], "cpu", power_watts=2.0, precision="fp32")
    >>> round(metrics.model_memory_mb * 2**20) == 4 * (16 * 10 + 32 * (16 * 9 + 1) + 10 * 1569)
    True
    """
    _check_numbers(power_watts, latency_multiplier, benchmark_repeats, benchmark_trials, benchmark_warmup)
    place = usable_device(device)
    dtype = input_dtype(model, precision)
    stored = stored_tensors(model)
    subject = model if all(tensor.device == place for tensor in stored) else copy.deepcopy(model).to(place)
    with as_found(subject, place), torch.no_grad():
        correct, samples, first = _evaluated(subject, loader, place, dtype)
        trials_s = _timed(subject, first, place, benchmark_repeats, benchmark_trials, benchmark_warmup, clock)
    low, high = _bootstrap_interval(correct, samples)
    trials_ms = np.array(trials_s) * latency_multiplier * 1000
    latency_s = float(trials_ms.mean()) / 1000
    if latency_s <= 0:
        raise MeasurementFailed(f"the clock did not move in {benchmark_repeats} forwards; raise benchmark_repeats")
    model_bytes = sum(tensor.numel() * tensor.element_size() for tensor in stored)
    profile = eo.profile(subject, list(first.args) or None, kwargs=first.kwargs)
    resident_bytes = model_bytes + profile.totals.input_bytes
    return Metrics(
        accuracy=correct / samples,
        accuracy_ci95_low=low,
        accuracy_ci95_high=high,
        latency_ms=float(trials_ms.mean()),
        latency_median_ms=float(np.median(trials_ms)),
        latency_std_ms=float(trials_ms.std()),
        latency_p95_ms=float(np.quantile(trials_ms, 0.95)),
        throughput_sps=len(first.labels) / latency_s,
        model_memory_mb=model_bytes / MIB,
        memory_mb=(resident_bytes + profile.peak.live_bytes) / MIB,
        estimated_runtime_memory_mb=(resident_bytes + profile.peak.planner_bytes) / MIB,
        energy_proxy_j=power_watts * latency_s,
        energy_proxy_note=f"a proxy, not a measurement: {power_watts:g} W given × mean latency of {latency_s:.4g} s",
    )


def _check_numbers(watts: float, multiplier: float, repeats: int, trials: int, warmup: int) -> None:
    for name, value in {"power_watts": watts, "latency_multiplier": multiplier}.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise InvalidInput(f"{name} is {value!r}; it must be a number above 0")
    counts = {"benchmark_repeats": (repeats, 1), "benchmark_trials": (trials, 1), "benchmark_warmup": (warmup, 0)}
    for name, (count, least) in counts.items():
        if isinstance(count, bool) or not isinstance(count, int) or count < least:
            raise InvalidInput(f"{name} is {count!r}; it must be a whole number of at least {least}")


def _evaluated(
    model: nn.Module, loader: Iterable[Any], device: torch.device, dtype: torch.dtype | None
) -> tuple[int, int, Batch]:
    """Right answers, all answers, and the first batch."""
    correct = samples = 0
    first: Batch | None = None
    for number, raw in enumerate(loader):
        batch = read(model, raw, number, device, dtype)
        try:
            output = model(*batch.args, **batch.kwargs)
        except Exception as error:
            raise MeasurementFailed(f"the model failed on batch {number}: {_first_line(error)}") from error
        logits = logits_of(output)
        check_fit(logits, batch.labels, number)
        correct += int((logits.argmax(dim=1) == batch.labels).sum())
        samples += len(batch.labels)
        first = first or batch
    if first is None:
        raise InvalidInput("the loader has no batches; accuracy and latency need at least one")
    return correct, samples, first


def _timed(
    model: nn.Module,
    batch: Batch,
    device: torch.device,
    repeats: int,
    trials: int,
    warmup: int,
    clock: Callable[[], float],
) -> list[float]:
    """Seconds per forward, one figure for each trial."""
    synchronize = {"cuda": torch.cuda.synchronize, "mps": torch.mps.synchronize}.get(device.type, lambda: None)
    done, seconds = 0, []
    try:
        for count in [warmup, *[repeats] * trials]:
            synchronize()
            start_s = clock()
            for _ in range(count):
                model(*batch.args, **batch.kwargs)
                done += 1
            synchronize()
            seconds.append((clock() - start_s) / max(count, 1))
    except Exception as error:
        total = warmup + repeats * trials
        raise MeasurementFailed(f"forward {done + 1} of {total} failed: {_first_line(error)}") from error
    return seconds[1:]


def _bootstrap_interval(correct: int, samples: int) -> tuple[float, float]:
    # Right answers among n drawn with replacement are a binomial number: no need to draw them one by one.
    drawn = np.random.default_rng(BOOTSTRAP_SEED).binomial(samples, correct / samples, BOOTSTRAP_SAMPLES)
    low, high = np.quantile(drawn / samples, [0.025, 0.975])
    return float(low), float(high)


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
