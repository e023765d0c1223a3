"""The largest batch that fits a memory limit, and one model on several targets."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal, cast

import torch
from torch import nn

from edge_opt import units
from edge_opt._support.checks import check_one_of, check_positive, check_whole
from edge_opt._support.deprecation import accept_former_parameters
from edge_opt._support.progress import report_progress, show_progress
from edge_opt.boards.capacity import SCRATCH_IS_APART, Lifetimes, largest_batch, peak_memory
from edge_opt.boards.device_memory import AllocatorSettings, OutOfDeviceMemory, device_memory
from edge_opt.boards.estimate import predictions
from edge_opt.boards.fused_layers import ITEMSIZE
from edge_opt.boards.mcu_memory import MEMORY_UNKNOWN
from edge_opt.boards.platform_file import fitted_platforms
from edge_opt.boards.platforms import platforms
from edge_opt.boards.targets import ResolvedTarget, Target, find_spec, resolve_target, resolve_targets
from edge_opt.budgets.budget_metrics import TRIAL_METRICS, parse_budgets
from edge_opt.budgets.check import violations
from edge_opt.errors import InvalidInput, TraceFailed
from edge_opt.loading import ModelLike, resolve_call
from edge_opt.profiling import profile
from edge_opt.records.costs import OUTSIDE
from edge_opt.records.devices import BatchFit, Precision
from edge_opt.records.predictions import MemoryNeed, Prediction, TargetComparison, TargetFit
from edge_opt.records.profiles import Budget, ModelProfile
from edge_opt.records.sweeps import TrialMetrics
from edge_opt.trace.inputs import CallArguments, InputSpec, call_arguments, map_arguments
from edge_opt.training_steps.step_report import training_step

MAX_BATCH = 1 << 16


@accept_former_parameters
@show_progress()
def fit_batch(
    model: ModelLike,
    inputs: Any = None,
    *,
    memory_limit_mb: float | None = None,
    target: Target | None = None,
    kwargs: Mapping[str, Any] | None = None,
    max_batch: int = MAX_BATCH,
    precision: Precision | None = None,
    lifetimes: Lifetimes = "eager",
    allocator: Literal["cuda"] | None = None,
    step: Literal["forward", "train"] = "forward",
    training: Mapping[str, Any] | None = None,
) -> BatchFit:
    """Find the largest batch whose weights, buffers, inputs and peak activations fit a limit, without running it.

    The whole limit counts as free; subtract what the operating system and the runtime need.

    Args:
        model: As in `profile`.
        inputs: As in `profile`, without the batch; it is put in front of every input.
        memory_limit_mb: The limit in MiB; give this or `target`.
        target: A device whose RAM is the limit; of several sizes the smallest.
        kwargs: Arguments of the model by name, also without the batch.
        max_batch: The largest batch to try.
        precision: Type that floating-point tensors are stored in; None keeps the model's own.
        lifetimes: When tensors are freed: "eager" as torch does, or "planner", as in `peak_memory`.
        allocator: "cuda" counts what a GPU's caching allocator would reserve, blocks and segments included (see
            `ModelProfile.device_memory`); None counts the bytes of the tensors themselves.
        step: "forward", or "train" for a whole training step: gradients and optimizer state then count as activations.
        training: Arguments of `training_step`, such as `{"optimizer": "sgd"}`, where `step` is "train".

    >>> from torch import nn
    >>> fit = fit_batch(nn.Linear(1024, 1024, bias=False), (1024,), memory_limit_mb=5)
    >>> fit.batch, fit.weight_bytes, fit.input_bytes, fit.activation_bytes, fit.shortfall_bytes
    (128, 4194304, 524288, 524288, 8192)
    """
    check_whole("max_batch", max_batch)
    check_one_of("lifetimes", lifetimes, ("eager", "planner"))
    if precision is not None:
        check_one_of("precision", precision, ITEMSIZE)
    limit_bytes, limit_source = _limit(memory_limit_mb, target)
    module, inputs, kwargs, _ = resolve_call(model, inputs, kwargs)
    arguments = call_arguments(module, inputs, kwargs)
    check_one_of("step", step, ("forward", "train"))
    if step == "train":
        if allocator is not None or precision is not None or lifetimes != "eager":
            raise InvalidInput('step="train" counts an eager step as it is; drop allocator, precision and lifetimes')
        return largest_fit(
            _training_needs(module, arguments, dict(training or {})), limit_bytes, limit_source, max_batch
        )
    if training is not None:
        raise InvalidInput('training= goes with step="train"')
    if allocator is not None:
        return _allocated_fit(module, arguments, allocator, precision, limit_bytes, limit_source, max_batch)
    needs = needs_by_batch(module, arguments, precision, lifetimes)
    return largest_fit(needs, limit_bytes, limit_source, max_batch)


def _training_needs(model: nn.Module, arguments: CallArguments, options: dict[str, Any]) -> Callable[[int], MemoryNeed]:
    """Return a function from a batch to the memory of its training step, each step traced once.

    What is neither weight, buffer nor input counts as activations.
    """

    @cache
    def need(batch: int) -> MemoryNeed:
        report_progress(f"fitting: a training step with a batch of {batch}")
        traced = training_step(model, _with_batch(arguments, batch), **options)
        memory = traced.peak.memory
        outside = tuple(name for name in traced.unpriced if name.startswith(OUTSIDE))
        activation_bytes = memory.total - memory.weights - memory.buffers - memory.inputs
        return MemoryNeed(memory.weights, memory.buffers, memory.inputs, activation_bytes, "static eager", outside)

    return need


def _allocated_fit(
    model: nn.Module, arguments: CallArguments, allocator: str, precision: Precision | None, limit_bytes: int,
    limit_source: str, most: int,
) -> BatchFit:  # fmt: skip
    """Find the largest batch for an allocator with this much memory; it releases free segments before it fails."""
    if precision is not None:
        raise InvalidInput(f"precision is {precision!r}; with an allocator leave it out, and pass model.half() instead")
    settings = AllocatorSettings(capacity_bytes=limit_bytes)

    @cache
    def profiled(batch: int) -> ModelProfile:
        report_progress(f"fitting: a batch of {batch}")
        return profile(model, _with_batch(arguments, batch))

    def reserved_bytes(batch: int) -> int:
        try:
            return device_memory(profiled(batch), allocator, settings).reserved_bytes
        except OutOfDeviceMemory as error:
            return limit_bytes + error.missing_bytes

    fit = largest_fit(
        lambda batch: peak_memory(profiled(batch)), limit_bytes, limit_source, most, bytes_at=cache(reserved_bytes)
    )
    return replace(fit, allocator=allocator, reserved_bytes=reserved_bytes(max(fit.batch, 1)))


def needs_by_batch(
    model: nn.Module, arguments: CallArguments, precision: Precision | None, lifetimes: Lifetimes
) -> Callable[[int], MemoryNeed]:
    """Return a function from a batch to the memory it needs, each batch profiled once for all limits."""

    @cache
    def need(batch: int) -> MemoryNeed:
        report_progress(f"fitting: a batch of {batch}")
        return peak_memory(profile(model, _with_batch(arguments, batch)), precision, lifetimes=lifetimes)

    return need


def largest_fit(
    need: Callable[[int], MemoryNeed], limit_bytes: int, limit_source: str, most: int,
    bytes_at: Callable[[int], int] | None = None,
) -> BatchFit:  # fmt: skip
    """Find the largest batch that needs no more than the limit, by its tensors or by `bytes_at`."""
    bytes_at = bytes_at or (lambda size: need(size).total_bytes)
    batch = largest_batch(bytes_at, limit_bytes, most)
    memory = need(max(batch, 1))
    return BatchFit(
        batch=batch,
        limit_bytes=limit_bytes,
        limit_source=limit_source,
        weight_bytes=memory.weight_bytes,
        buffer_bytes=memory.buffer_bytes,
        input_bytes=memory.input_bytes,
        activation_bytes=memory.activation_bytes,
        shortfall_bytes=None if batch == most else bytes_at(batch + 1) - limit_bytes,
        most=most,
        outside=memory.outside,
    )


def _limit(memory_limit_mb: float | None, target: Target | None) -> tuple[int, str]:
    """Return the limit in bytes, and where it comes from."""
    if (memory_limit_mb is None) == (target is None):
        what = "neither is given" if target is None else "both are given"
        raise InvalidInput(f"the limit is memory_limit_mb= (MiB) or target= (a device), and {what}; give one of them")
    if memory_limit_mb is not None:
        check_positive("memory_limit_mb", memory_limit_mb, "a number of MiB")
        return int(memory_limit_mb * units.MIB), "memory_limit_mb"
    assert target is not None
    spec = find_spec(target)
    if not spec.ram_bytes:
        raise InvalidInput(f"the RAM of {spec.name} is not known; pass memory_limit_mb= instead of target=")
    sizes = tuple(int(figure.value) for figure in spec.ram_bytes)
    return sizes[0], ram_of(spec.name, sizes)


def ram_of(name: str, sizes: Sequence[int]) -> str:
    """Describe the limit: the RAM of a device, with every size that it is sold with."""
    all_sizes = f", the smallest of {', '.join(map(units.size, sizes))}" if len(sizes) > 1 else ""
    return f"RAM of {name}{all_sizes}"


def _with_batch(arguments: CallArguments, batch: int) -> CallArguments:
    """Put the batch in front of every input."""

    def prepend(value: Any) -> InputSpec:
        if isinstance(value, torch.Tensor):
            raise InvalidInput(f"an input is a tensor of shape {tuple(value.shape)}; give its shape without the batch")
        return InputSpec((batch, *value.shape), value.dtype)

    return map_arguments(arguments, prepend)


@accept_former_parameters
@show_progress()
def compare_targets(
    model: ModelLike,
    inputs: Any = None,
    targets: Target | Sequence[Target] = (),
    *,
    precision: Precision | None = None,
    runtime: str | None = None,
    threads: int | None = None,
    kwargs: Mapping[str, Any] | None = None,
    name: str | None = None,
    max_batch: int = MAX_BATCH,
    lifetimes: Lifetimes = "eager",
    budgets: Sequence[str] = (),
) -> TargetComparison:
    """Compare a model on several targets: whether it fits the RAM, latency, bound, energy, and the largest batch.

    Without targets, all known platforms are ranked: those that fit first, then by latency, without the largest batch.
    All of a device's RAM counts as free; subtract what the operating system and the runtime need.

    Args:
        model: As in `profile`.
        inputs: As in `profile`; the first dimension of every input is the batch.
        targets: One target or several, each as in `profile`; default: all known platforms.
        precision: Type of the numbers on the targets; default: int8 for a file that computes in int8, else fp32; if all
            platforms are ranked, that of each.
        runtime: Runtime on each target, such as "ncnn"; by default the one with the most accurate data.
        threads: Threads of the runtime there, as in `estimate`.
        kwargs: Arguments of the model by name.
        name: Name of the model in tables; default: its class.
        max_batch: The largest batch to try.
        lifetimes: When tensors are freed: "eager" as torch does, or "planner", as in `peak_memory`.
        budgets: Limits such as "target_latency_ms <= 20" or "target_ram_kib <= 512"; targets that break one are left
            out.

    >>> from edge_opt.model import SmallCNN
    >>> comparison = compare_targets(SmallCNN(), (1, 1, 28, 28), ["raspberry-pi-4", "rp2040"])
    >>> [(fit.prediction.target, fit.fits, fit.prediction.bound) for fit in comparison.targets]
    [('raspberry-pi-4', True, 'overhead'), ('rp2040', True, 'unknown')]
    """
    limits = parse_budgets(budgets, _TARGET_METRICS)
    if isinstance(targets, (list, tuple)) and not targets:
        module, inputs, kwargs, own_name = resolve_call(model, inputs, kwargs)
        profiled = profile(module, inputs, kwargs=kwargs, name=name or own_name)
        return _ranked(profiled, precision, runtime, threads, lifetimes, limits)
    if precision is not None:  # what cannot be asked of a target is refused before a model is loaded
        resolve_targets(targets, precision, runtime=runtime, threads=threads)
    module, inputs, kwargs, own_name = resolve_call(model, inputs, kwargs)
    own: Precision = getattr(module, "computes_in", "fp32")
    precision = precision or own
    resolved = resolve_targets(targets, precision, runtime=runtime, threads=threads, model=module)
    name = name or own_name
    profiled = profile(
        module, inputs, kwargs=kwargs, name=name, target=resolved, precision=precision, runtime=runtime, threads=threads
    )
    memory = peak_memory(profiled, precision, lifetimes=lifetimes)
    one_sample = map_arguments(call_arguments(module, inputs, kwargs), _without_batch)
    needs = needs_by_batch(module, one_sample, precision, lifetimes)
    fits = (
        _target_fit(prediction, memory, _ram_sizes(prediction, target), needs, max_batch)
        for prediction, target in zip(profiled.predictions, resolved, strict=True)
    )
    shapes = profiled.trace.modules[0].input_shapes
    kept = tuple(fit for fit in fits if _keeps(fit, limits))
    return TargetComparison(profiled.name, shapes, precision, memory, kept)


@dataclass(frozen=True)
class _TargetRow:
    """The figures of one target under the names that budgets of sweeps have."""

    target_latency_s: float | None
    target_low_s: float | None
    target_high_s: float | None
    target_ram_bytes: int
    target_energy_j: float | None
    target_flash_bytes: None = None
    metric: str = "accuracy"


_TARGET_METRICS = {name: metric for name, metric in TRIAL_METRICS.items() if name.startswith("target_")}


def _keeps(fit: TargetFit, limits: Sequence[Budget]) -> bool:
    """Return whether no budget is broken on a target; one that its interval leaves open is kept."""
    predicted = fit.prediction
    joules = predicted.energies[0].joules if predicted.energies else None
    row = _TargetRow(predicted.seconds, predicted.low, predicted.high, fit.needed_bytes, joules)
    return not violations(cast(TrialMetrics, row), limits)


def _ranked(
    profiled: ModelProfile,
    precision: Precision | None,
    runtime: str | None,
    threads: int | None,
    lifetimes: Lifetimes,
    limits: Sequence[Budget],
) -> TargetComparison:
    """Return every known platform that is what is asked for: those that fit first, then by latency."""
    by_precision: dict[Precision, list[tuple[str, ResolvedTarget]]] = {}
    for platform in fitted_platforms():
        if runtime in (None, platform.runtime) and threads in (None, platform.threads):
            resolved = resolve_target(platform, platform.precision)
            by_precision.setdefault(cast(Precision, platform.precision), []).append((platform.name, resolved))
    if runtime is None and threads is None:
        for known in platforms():
            if known.basis == "roofline" and known.precision is not None:
                named = ResolvedTarget(known.device, find_spec(known.device))
                by_precision.setdefault(cast(Precision, known.precision), []).append((known.name, named))
    fits: list[TargetFit] = []
    for own, targets in by_precision.items():
        if precision in (None, own):
            memory = peak_memory(profiled, own, lifetimes=lifetimes)
            predicted = predictions(profiled, [target for _, target in targets], own, threads)
            for prediction, (name, target) in zip(predicted, targets, strict=True):
                # What a microcontroller needs is not the peak of the tensors; `eo.mcu_memory` tells for a file.
                sizes = _ram_sizes(prediction, target)
                is_fitting = memory.total_bytes <= sizes[0] if sizes else None
                named_one = replace(prediction, target=name)
                fits.append(TargetFit(named_one, is_fitting, memory.total_bytes, sizes, None, ()))
    kept = [fit for fit in fits if _keeps(fit, limits)]
    # A time whose interval has no upper end is a lower bound, which beats nothing.
    kept.sort(key=lambda fit: (fit.fits is False, fit.prediction.high is None, fit.prediction.seconds or math.inf))
    shapes, wanted = profiled.trace.modules[0].input_shapes, precision or "fp32"
    return TargetComparison(
        profiled.name, shapes, wanted, peak_memory(profiled, wanted, lifetimes=lifetimes), tuple(kept)
    )


def _ram_sizes(prediction: Prediction, target: ResolvedTarget) -> tuple[int, ...]:
    """Return the sizes of RAM that a model is held against; none where a microcontroller's need is not known."""
    is_unknown = target.spec.microcontroller is not None and prediction.mcu is None
    return () if is_unknown else tuple(int(size.value) for size in target.spec.ram_bytes)


def _target_fit(
    prediction: Prediction, memory: MemoryNeed, sizes: tuple[int, ...], needs: Callable[[int], MemoryNeed], most: int
) -> TargetFit:
    """Return what is known about the memory of one target; a model that refuses other batches gets a remark."""
    batch: BatchFit | None = None
    remarks: tuple[str, ...] = ()
    if prediction.mcu is not None:
        mcu = prediction.mcu
        remarks = tuple(f"{verdict.memory}: {verdict.text}" for verdict in mcu.verdicts)
        return TargetFit(prediction, mcu.fits, mcu.arena_bytes, sizes, None, remarks)
    if not sizes and not any(remark.startswith(MEMORY_UNKNOWN) for remark in prediction.remarks):
        remarks = (f"the RAM of {prediction.target} is unknown, so whether the model fits is too",)
    elif sizes:
        try:
            batch = largest_fit(needs, sizes[0], ram_of(prediction.target, sizes), most)
            remarks = (SCRATCH_IS_APART,)
        except (TraceFailed, InvalidInput) as error:
            unknown = f"the largest batch is unknown, because the model refuses another batch: {error}"
            remarks = (unknown, SCRATCH_IS_APART)
    total_bytes = memory.total_bytes
    return TargetFit(prediction, total_bytes <= sizes[0] if sizes else None, total_bytes, sizes, batch, remarks)


def _without_batch(value: Any) -> InputSpec:
    """Return an input's spec without its first dimension."""
    is_tensor = isinstance(value, torch.Tensor)
    dtype = str(value.dtype).removeprefix("torch.") if is_tensor else value.dtype
    return InputSpec(tuple(value.shape[1:]), dtype)
