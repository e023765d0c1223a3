"""Accuracy, latency, memory and an energy proxy of a model on a loader."""

from __future__ import annotations

import copy
import inspect
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

import edge_opt as eo
from edge_opt._support.checks import check_positive, check_whole
from edge_opt._support.unchanged import unchanged
from edge_opt.errors import InvalidInput, MeasurementFailed, message_of
from edge_opt.records.display import Record
from edge_opt.records.sweeps import LABELS


def logits_of(output: Any) -> torch.Tensor:
    """The scores in whatever a model returns."""
    if isinstance(output, torch.Tensor):
        return output
    scores = getattr(output, "logits", None)
    if scores is None and isinstance(output, Mapping):
        tensors = [value for value in output.values() if isinstance(value, torch.Tensor)]
        scores = output.get("logits", tensors[0] if len(tensors) == 1 else None)
    if scores is None and isinstance(output, (tuple, list)) and output:
        scores = output[0]
    if not isinstance(scores, torch.Tensor):
        keys = f" of {', '.join(map(str, output))}" if isinstance(output, Mapping) else ""
        raise InvalidInput(f"the model returns a {type(output).__name__}{keys}, without a tensor `logits`")
    return scores


def check_fit(logits: torch.Tensor, labels: torch.Tensor, number: int) -> None:
    """Refuse scores and labels from which no accuracy follows."""
    shapes = f"outputs {tuple(logits.shape)} and labels {tuple(labels.shape)} of batch {number}"
    if logits.ndim != 2 or labels.ndim != 1 or len(logits) != len(labels):
        raise InvalidInput(f"{shapes} do not fit; expected (samples, classes) and (samples,)")
    if not len(labels) or logits.shape[1] < 2:
        raise InvalidInput(f"{shapes}: there must be a sample, and a column for each of two or more classes")
    if labels.is_floating_point() or labels.is_complex():
        raise InvalidInput(
            f"labels of batch {number} are {labels.dtype}; they must be numbers of classes, in an integer type"
        )
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= logits.shape[1]:
        worst = low if low < 0 else high
        raise InvalidInput(f"label {worst} of batch {number} is none of the {logits.shape[1]} classes of the outputs")
    if bool(logits.isnan().any()):
        bad = int(logits.isnan().sum())
        raise MeasurementFailed(f"{bad} of {logits.numel()} outputs of batch {number} are NaN; accuracy has no meaning")


@dataclass(frozen=True, slots=True)
class Batch(Record):
    """The arguments of one forward and the labels of its results."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    labels: torch.Tensor


def read(model: nn.Module, raw: Any, number: int, device: torch.device, dtype: torch.dtype | None) -> Batch:
    """A batch as arguments and labels, on the device and in the type of the model.

    Inputs by name go as keywords where `forward` knows all of them; else one alone goes as it is, several as a mapping.
    """
    inputs, labels = _parted(raw, number)
    try:
        found = torch.as_tensor(labels, device=device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidInput(f"labels of batch {number} are not numbers of classes: {error}") from error
    found = found.reshape(-1) if found.ndim == 2 and found.shape[1] == 1 else found
    moved = [_moved(value, device, dtype) for value in inputs]
    if len(moved) == 1 and isinstance(moved[0], dict):
        if _knows(model, moved[0]):
            return Batch((), moved[0], found)
        if len(moved[0]) == 1:
            moved = list(moved[0].values())
    return Batch(tuple(moved), {}, found)


def _parted(raw: Any, number: int) -> tuple[list[Any], Any]:
    """Inputs and labels of a batch as the loader gave it."""
    if isinstance(raw, (tuple, list)) and len(raw) > 1:
        return list(raw[:-1]), raw[-1]
    is_named = isinstance(raw, Mapping)
    for key in LABELS if is_named else ():
        if key in raw:
            return [{name: value for name, value in raw.items() if name != key}], raw[key]
    what = f"a mapping of {', '.join(map(str, raw))}" if is_named else f"a {type(raw).__name__}"
    raise InvalidInput(f"batch {number} is {what}, without labels; use (inputs, labels), or a key of {LABELS}")


def _knows(model: nn.Module, names: Iterable[str]) -> bool:
    try:
        parameters = inspect.signature(model.forward).parameters.values()
    except (TypeError, ValueError):
        return False
    by_name = {each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)}
    return set(names) <= by_name or any(each.kind is each.VAR_KEYWORD for each in parameters)


def _moved(value: Any, device: torch.device, dtype: torch.dtype | None) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device, dtype) if dtype and value.is_floating_point() else value.to(device)
    if isinstance(value, Mapping):
        return {key: _moved(item, device, dtype) for key, item in value.items()}
    if isinstance(value, PackedSequence):
        packed: Any = value  # its stubs know neither of the two
        return packed.to(device=device, dtype=dtype or value.data.dtype)
    if isinstance(value, (tuple, list)):
        items = [_moved(item, device, dtype) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


# int8 has no one type of input: a quantised model takes what it takes.
PRECISIONS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "int8": None}
EIGHT_BITS = (torch.int8, torch.uint8, torch.qint8, torch.quint8)


def usable_device(device: torch.device | str) -> torch.device:
    """The device asked for, or with a warning the CPU where there is no such GPU."""
    try:
        wanted = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise InvalidInput(f"device is {device!r}; it must be 'cpu', 'cuda', 'cuda:1' or 'mps'") from error
    if wanted.type not in ("cpu", "cuda", "mps"):
        raise InvalidInput(f"device is {device!r}; it must be 'cpu', 'cuda', 'cuda:1' or 'mps'")
    if wanted.type == "cuda" and torch.cuda.is_available() and (wanted.index or 0) < torch.cuda.device_count():
        return torch.device("cuda", torch.cuda.current_device() if wanted.index is None else wanted.index)
    if wanted.type == "mps" and torch.backends.mps.is_available():
        return torch.device("mps", 0)
    if wanted.type != "cpu":
        warnings.warn(f"{wanted} is not available here; the CPU is measured instead", UserWarning, stacklevel=3)
    return torch.device("cpu")


def stored_tensors(model: nn.Module) -> list[torch.Tensor]:
    """Every tensor the model keeps, once: parameters, buffers, and what quantised layers pack into their state."""
    found: list[Any] = [*model.parameters(), *model.buffers()]
    for value in model.state_dict(keep_vars=True).values():
        found.extend(value if isinstance(value, (tuple, list)) else [value])
    parts = [part for tensor in found if isinstance(tensor, torch.Tensor) for part in _parts(tensor)]
    return list({id(tensor): tensor for tensor in parts}.values())


def _parts(tensor: Any) -> list[torch.Tensor]:
    """The tensors inside a wrapper such as torchao's, which shows a floating type and holds int8; else itself."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    return [part for name in tensor.__tensor_flatten__()[0] for part in _parts(getattr(tensor, name))]


def input_dtype(model: nn.Module, precision: str) -> torch.dtype | None:
    """The type of floating inputs, after making sure that the model is what `precision` says."""
    if not isinstance(model, nn.Module):
        raise InvalidInput(f"the model must be a torch.nn.Module, and this is a {type(model).__name__}")
    if precision not in PRECISIONS:
        raise InvalidInput(f"precision is {precision!r}; it must be one of {', '.join(PRECISIONS)}")
    stored, wanted = stored_tensors(model), PRECISIONS[precision]
    if any(tensor.is_meta for tensor in stored):
        raise InvalidInput("the model's weights are on the meta device; it cannot be run without real ones")
    if wanted is None:
        # A table of bytes or a mask is not a weight; a model without any tensor keeps its weights elsewhere.
        if stored and not any(tensor.dtype in EIGHT_BITS and tensor.ndim > 1 for tensor in stored):
            raise InvalidInput("precision is 'int8', and no weight is stored in 8 bits; quantise the model first")
        return None
    weights = [(name, part) for name, parameter in model.named_parameters() for part in _parts(parameter)]
    weights += [("a packed weight", tensor) for tensor in stored if tensor.is_quantized]
    named = [
        (name, tensor.dtype) for name, tensor in weights if tensor.is_floating_point() or tensor.dtype in EIGHT_BITS
    ]
    odd = [f"{name} is {str(dtype).removeprefix('torch.')}" for name, dtype in named if dtype != wanted]
    if odd:
        raise InvalidInput(
            f"precision is {precision!r}, and {len(odd)} of {len(named)} weights are not: {odd[0]}; "
            "convert the model first, or name the precision it is in"
        )
    return wanted


@contextmanager
def _left_as_found(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Run the model in eval mode; then restore it, its buffers' values and random numbers, also after an error."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    with (
        torch.random.fork_rng([device] if device.type == "cuda" else []),
        unchanged(list(model.modules()), training=False, fast_path=True),
    ):
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, before in buffers:
                    if not torch.equal(buffer, before):
                        buffer.copy_(before)


MIB = 1024 * 1024
BOOTSTRAP_SEED = 0
BOOTSTRAP_SAMPLES = 10_000


# Not frozen and without slots: the published one can be changed, and taken apart with vars().
@dataclass
class Metrics(Record):
    """Accuracy over a loader; latency, memory and energy of one forward on its first batch.

    Latencies are statistics of the trials taken, times the multiplier; throughput and energy follow from their mean.

    Attributes:
        accuracy: Share of right answers, from 0 to 1.
        accuracy_ci95_low: Lower end of its interval of 95 %, a percentile bootstrap; it has no width where all answers
            are right, or none.
        accuracy_ci95_high: Upper end of that interval.
        latency_ms: Mean of the trials, in milliseconds per forward.
        latency_median_ms: Their median.
        latency_std_ms: Their standard deviation.
        latency_p95_ms: Their 95th percentile.
        throughput_sps: Samples per second.
        model_memory_mb: MiB of parameters, buffers and packed weights.
        memory_mb: The same: what memory budgets are held against.
        estimated_runtime_memory_mb: That plus the inputs and the peak of activations in an eager run, in MiB: an
            estimate without allocator and libraries.
        energy_proxy_j: Joules per forward: the power that was given times the mean latency; not a measurement.
        energy_proxy_note: A sentence that says so, with the figures.
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

    Args:
        model: The classifier, whose outputs are (samples, classes), bare or as `logits`; it is left as it was.
        loader: Batches of (inputs…, labels), or mappings with "labels", "label", "y", "targets" or
            "target"; the first one is timed.
        device: Where it runs, such as "cpu" or "cuda"; a GPU that is not there is replaced by the CPU, with a warning.
        power_watts: What the device draws, in watts; the energy proxy is this times the latency.
        precision: What the model is in already: "fp32", "fp16", "bf16" or "int8". Floating inputs are cast to it,
            except for int8.
        latency_multiplier: Latencies are multiplied by this, for a slower or faster device; 1 leaves them as measured.
        benchmark_repeats: Forwards that are timed together as one trial; 5, as published.
        benchmark_trials: Trials, of which latencies are the statistics; 3, as published.
        benchmark_warmup: Forwards before them that are not timed, as the first ones are slow; 3, as published.
        clock: What tells the seconds; the default is the finest clock that Python has.

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
    with _left_as_found(subject, place), torch.no_grad():
        correct, samples, first = _evaluated(subject, loader, place, dtype)
        trials_s = _timed(subject, first, place, benchmark_repeats, benchmark_trials, benchmark_warmup, clock)
    low, high = _bootstrap_interval(correct, samples)
    trials_ms = np.array(trials_s) * latency_multiplier * 1000
    latency_s = float(trials_ms.mean()) / 1000
    if latency_s <= 0:
        raise MeasurementFailed(f"the clock did not move in {benchmark_repeats} forwards; raise benchmark_repeats")
    model_bytes = sum(tensor.numel() * tensor.element_size() for tensor in stored)
    profile = eo.profile(subject, list(first.args) or None, kwargs=first.kwargs)
    needed = eo.peak_memory(profile)
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
        memory_mb=model_bytes / MIB,
        estimated_runtime_memory_mb=(model_bytes + needed.input_bytes + needed.activation_bytes) / MIB,
        energy_proxy_j=power_watts * latency_s,
        energy_proxy_note=f"a proxy, not a measurement: {power_watts:g} W given × mean latency of {latency_s:.4g} s",
    )


def _check_numbers(watts: float, multiplier: float, repeats: int, trials: int, warmup: int) -> None:
    for name, value in {"power_watts": watts, "latency_multiplier": multiplier}.items():
        check_positive(name, value)
    counts = {"benchmark_repeats": (repeats, 1), "benchmark_trials": (trials, 1), "benchmark_warmup": (warmup, 0)}
    for name, (count, least) in counts.items():
        check_whole(name, count, least)


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
            raise MeasurementFailed(f"the model failed on batch {number}: {message_of(error)}") from error
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
        raise MeasurementFailed(f"forward {done + 1} of {total} failed: {message_of(error)}") from error
    return seconds[1:]


def _bootstrap_interval(correct: int, samples: int) -> tuple[float, float]:
    # Right answers among n drawn with replacement are a binomial number: no need to draw them one by one.
    drawn = np.random.default_rng(BOOTSTRAP_SEED).binomial(samples, correct / samples, BOOTSTRAP_SAMPLES)
    low, high = np.quantile(drawn / samples, [0.025, 0.975])
    return float(low), float(high)
