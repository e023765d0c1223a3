"""calibrate(): time operators on this machine and write them to a file."""

from __future__ import annotations

import os
import platform
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from edge_opt._support.checks import check_threads, is_number
from edge_opt._support.files import check_writable
from edge_opt._support.progress import report_progress, show_progress
from edge_opt.calibration.calibration_file import host_file, load_calibration, save_calibration
from edge_opt.calibration.model_timing import time_operators
from edge_opt.calibration.operator_bench import (
    ReferenceMeasurement,
    closed,
    kept_heap,
    measured_overheads,
    operator_samples,
    seconds_alone,
    undisturbed,
    visit_reference,
)
from edge_opt.calibration.operator_draws import is_warm, plan
from edge_opt.calibration.predict import GROUPS, OperatorTimes, describe, forward_interval, scales_of, timing_key
from edge_opt.calibration.quiet_clock import ReferenceKernel, SampleClock
from edge_opt.calibration.reference_networks import REFERENCES
from edge_opt.calibration.self_check import checked
from edge_opt.errors import InvalidInput
from edge_opt.measuring.latency import busy_remark
from edge_opt.measuring.machine import best_seconds, copy_bandwidth, crash_of, read_environment, retain_freed_memory
from edge_opt.records.costs import Trace
from edge_opt.records.devices import Precision
from edge_opt.records.predictions import (
    Calibration,
    FreshOutput,
    GroupDeviation,
    MeasuredBandwidth,
    MeasuredPeak,
    OperatorSample,
    PeakClass,
)
from edge_opt.trace import trace

_WORKING_SETS = tuple(1 << power for power in range(15, 28))  # 32 KiB to 128 MiB
_FRESH = tuple(1 << power for power in range(18, 27, 2))  # 256 KiB to 64 MiB
_DTYPES: dict[Precision, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_SIDE, _WIDTH = 28, 128


def bandwidths() -> tuple[MeasuredBandwidth, ...]:
    """Measure what a copy reaches, from working sets that fit the smallest cache to those that fit none."""
    return tuple(MeasuredBandwidth(size, copy_bandwidth(size)) for size in _WORKING_SETS)


def fresh_outputs() -> tuple[FreshOutput, ...]:
    """Time writing new memory, whose pages must be mapped first, beside memory that was written before."""

    def timed(size: int) -> FreshOutput:
        reused = torch.empty(size // 4)
        fresh_s = best_seconds(lambda: torch.empty(size // 4).fill_(1.0), 4)
        return FreshOutput(size, fresh_s, best_seconds(lambda: reused.fill_(1.0), 4))

    return tuple(map(timed, _FRESH))


def peaks() -> tuple[MeasuredPeak, ...]:
    """Measure operations per second of each class of work at each precision that torch has a kernel for, slow or not.

    A precision whose kernels end the process is left out, as one without kernels is.
    """
    floating = [
        MeasuredPeak(work, precision, 2 * macs / best_seconds(run, 3))
        for precision, dtype in _DTYPES.items()
        if crash_of(dtype) is None
        for work, macs, run in _work(dtype)
    ]
    return (*floating, *_integer_peak())


def _work(dtype: torch.dtype) -> Iterator[tuple[PeakClass, int, Callable[[], object]]]:
    # Half the size at 16 bits: where only a reference kernel exists, it may be fifty times as slow.
    size = 512 if dtype is torch.float32 else 256
    a, b = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
    yield "gemm", size**3, lambda: torch.mm(a, b)
    image = torch.randn(1, _WIDTH, _SIDE, _SIDE).to(dtype)
    places = _SIDE * _SIDE
    three, one, deep = (
        torch.randn(shape).to(dtype) for shape in ((_WIDTH, _WIDTH, 3, 3), (_WIDTH, _WIDTH, 1, 1), (_WIDTH, 1, 3, 3))
    )
    yield "conv3x3", places * _WIDTH * _WIDTH * 9, lambda: F.conv2d(image, three, padding=1)
    yield "conv1x1", places * _WIDTH * _WIDTH, lambda: F.conv2d(image, one)
    yield "depthwise", places * _WIDTH * 9, lambda: F.conv2d(image, deep, padding=1, groups=_WIDTH)
    yield "strided", places // 4 * _WIDTH * _WIDTH * 9, lambda: F.conv2d(image, three, stride=2, padding=1)


def _integer_peak() -> Iterator[MeasuredPeak]:
    """Measure products of int8 matrices, the only class that torch has an integer kernel for without quantizing."""
    a, b = (torch.randint(-8, 8, (256, 256), dtype=torch.int8) for _ in range(2))
    try:
        seconds = best_seconds(lambda: torch._int_mm(a, b), 3)
    except RuntimeError:  # not every build and processor has it
        return
    yield MeasuredPeak("gemm", "int8", 2 * 256**3 / seconds)


_FOLDS = 6
_NINE_IN_TEN = 1.645
_UNKNOWN_DEVIATION = 0.3  # where there was nothing to hold out
_FEWEST = 8


def validated(calibration: Calibration) -> Calibration:
    """Return the calibration with its own errors: each part of the reference models predicted from all the others."""
    wholes: list[float] = []
    parts: dict[str, list[float]] = {group: [] for group in GROUPS}
    # Both batches of a model are held out together, or one would tell about the other.
    model_of = {run.name: run.name.rpartition(",")[0] for run in calibration.references}
    models = list(dict.fromkeys(model_of.values()))
    for fold in range(min(_FOLDS, len(models) if len(models) > 1 else 0)):
        held_out = {name for name, model in model_of.items() if models.index(model) % _FOLDS == fold}
        learned = OperatorTimes([item for item in calibration.samples if item.origin not in held_out], calibration)
        for name in sorted(held_out):
            own = [item for item in calibration.samples if item.origin == name]
            described = [describe(item.signature, item.distances, learned.scales) for item in own]
            measured, predicted = np.array([item.seconds for item in own]), learned.seconds(described)
            wholes.append(float(np.log(predicted.sum() / measured.sum())))
            for item, error in zip(described, np.log(predicted / measured), strict=True):
                parts[item.group].append(float(error))
    return replace(
        calibration,
        whole_deviation=_deviation(wholes),
        deviations=tuple(GroupDeviation(group, _deviation(errors)) for group, errors in parts.items()),
    )


def _deviation(errors: list[float]) -> float:
    """Return the standard deviation of a normal error that would have nine in ten within the same bounds."""
    if len(errors) < _FEWEST:
        return _UNKNOWN_DEVIATION
    return float(np.quantile(np.abs(errors), 0.9)) / _NINE_IN_TEN


MOST_SECONDS = 120.0
MODEL_SECONDS = 10.0  # for operators of one model
_ROUNDS = 5
_PASSES = 2
_VISITS = 2
_GROUP = 40
_HOLE_BYTES = 1 << 30
_PLANNED = 1400
_PLANNED_PER_SECOND = 20
# Shares of the time after which no reference model is started, no operators alone are timed, no net is checked.
_REFERENCE_SHARE = 0.66
_ALONE_SHARE = 0.82
_CHECK_SHARE = 0.97


def calibrate(
    *,
    threads: int | Sequence[int] | None = None,
    seconds: float = 110.0,
    path: str | os.PathLike[str] | None = None,
    progress: bool = True,
    runtimes: Sequence[str] = ("torch",),
    precisions: Sequence[Precision] = ("fp32",),
    for_model: nn.Module | None = None,
    inputs: Any = None,
    kwargs: Mapping[str, Any] | None = None,
) -> Calibration:
    """Measure this machine for predictions, and save the calibration.

    Operators are timed alone and inside reference models. Beside each of them a reference kernel is timed: samples are
    normalized by it, and disturbed rounds are repeated. At the end whole nets that no sample is of are timed; the
    factor that is common to them is taken out, and what is left is the expected error.

    Args:
        threads: Threads of torch; default: its own number. Predictions hold for that number. Of several, torch has the
            first, and other runtimes are calibrated with each.
        seconds: Seconds of CPU time at most, for each platform; more time measures more operators.
        path: The file to write; without it, it becomes the host's own, which `target="host"` finds.
        progress: Whether to show on a terminal what is measured.
        runtimes: "torch" for eager torch, "onnxruntime", "openvino". Without "torch" they are added to the calibration
            that the file has; where it has none, torch comes first. Small nets are converted and profiled.
        precisions: Of the other runtimes: fp32, int8.
        for_model: Time just the operators of this model that make its prediction uncertain, and add them to the
            calibration that the file has. It takes seconds; the model is not run. `timed[-1]` of the result has the
            interval before and after. Eager torch only.
        inputs: Inputs of that model or their shapes, as for `profile`.
        kwargs: Inputs by name.
    """
    if not is_number(seconds) or not 1 <= seconds <= MOST_SECONDS:
        raise InvalidInput(f"seconds is {seconds!r}; it must be a number from 1 to {MOST_SECONDS:g}")
    counts = [threads] if threads is None or isinstance(threads, int) else list(threads)
    for count in counts:
        check_threads(count)
    others = [name for name in runtimes if name != "torch"]
    if for_model is not None and others:
        raise InvalidInput(
            f"for_model times operators of eager torch; kernels of {', '.join(others)} depend on the graph around "
            "them: time the converted model (`edge-opt convert`)"
        )
    if others:
        from edge_opt.runtimes.calibrate_runtimes import calibrate_runtimes, check_platforms

        check_platforms(others, precisions)
    target = Path(path) if path is not None else host_file()
    check_writable(target)
    if for_model is not None:
        recorded = trace(for_model, inputs, kwargs)
        with show_progress() if progress else nullcontext():
            return _calibrated_for(recorded, type(for_model).__name__, target, counts[0] if counts else None, seconds)
    busy = busy_remark()
    if busy is not None:
        warnings.warn(f"{busy}; disturbed rounds are repeated, and the file says so", stacklevel=2)
    eager_threads = counts[0] if counts else None
    with undisturbed(eager_threads), show_progress() if progress else nullcontext():
        if "torch" in runtimes or not target.is_file():
            calibration = replace(_measured(seconds), remarks=() if busy is None else (busy,))
            # What was measured is kept, whatever becomes of the other runtimes.
            save_calibration(calibration, target)
        else:
            calibration = load_calibration(target)
        if others:
            wanted = [count or torch.get_num_threads() for count in counts]
            added = calibrate_runtimes(scales_of(calibration), others, precisions, wanted, seconds)
            names = {item.name for item in added}
            kept = (item for item in calibration.runtimes if item.name not in names)
            calibration = replace(calibration, runtimes=(*kept, *added))
            save_calibration(calibration, target)
    return calibration


def _calibrated_for(recorded: Trace, name: str, path: Path, threads: int | None, seconds: float) -> Calibration:
    """Add operators of one model to the calibration in a file."""
    calibration = load_calibration(path)
    if threads not in (None, calibration.machine.threads):
        raise InvalidInput(f"{path} is calibrated with {calibration.machine.threads} thread(s), not with {threads}")
    # A model whose shapes changed is another one, as is one of other sizes: operators are known by their shapes.
    before = forward_interval(recorded, calibration)
    with undisturbed(calibration.machine.threads):
        timed = time_operators(recorded, name, calibration, min(seconds, MODEL_SECONDS))
    known = {timing_key(sample.signature, sample.distances) for sample in timed.samples}
    kept = []
    for item in calibration.timed:
        samples = tuple(it for it in item.samples if timing_key(it.signature, it.distances) not in known)
        kept += [replace(item, samples=samples)] if samples else []
    result = replace(calibration, timed=(*kept, timed))
    timed = replace(timed, before=before, after=forward_interval(recorded, result))
    result = replace(calibration, timed=(*kept, timed))
    save_calibration(result, path)
    return result


def _measured(seconds: float) -> Calibration:
    start = time.process_time()

    def spent() -> float:
        return (time.process_time() - start) / seconds

    machine = read_environment()
    clock = SampleClock()
    kernel = ReferenceKernel(clock)
    report_progress("calibrating: memory and peaks")
    overheads = measured_overheads()
    copies, rates, fresh = bandwidths(), peaks(), fresh_outputs()
    # Models first: timing hundreds of operators alone leaves the heap in pieces, some of them cold.
    with kept_heap(min(_HOLE_BYTES, machine.memory_bytes // 8)):
        visits = _visited_references(spent, kernel, clock)
    with retain_freed_memory():
        alone = _timed_alone(seconds, spent, kernel, clock)
    runs = [visit.run for visit in visits]
    in_place = [sample for visit in visits for sample in operator_samples(visit)]
    report_progress("calibrating: cross-validation")
    measured = Calibration(
        name=platform.node() or "host",
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        machine=machine,
        versions=(("torch", str(torch.__version__)), ("python", platform.python_version())),
        cpu_seconds=0.0,
        bandwidths=copies,
        peaks=rates,
        overhead_per_operator_s=overheads.operator_s,
        overhead_per_module_s=overheads.module_s,
        fresh_outputs=fresh,
        references=tuple(runs),
        samples=(*alone, *closed(in_place, runs, overheads)),
        whole_deviation=0.0,
        deviations=(),
    )
    known = checked(validated(measured), lambda: spent() > _CHECK_SHARE, kernel, clock)
    return replace(known, cpu_seconds=time.process_time() - start)


def _timed_alone(
    seconds: float, spent: Callable[[], float], kernel: ReferenceKernel, clock: SampleClock
) -> list[OperatorSample]:
    planned = plan(count=min(_PLANNED, round(seconds * _PLANNED_PER_SECOND)))
    samples: list[OperatorSample] = []
    for first in range(0, len(planned), _GROUP):
        if samples and spent() > _ALONE_SHARE:
            break
        report_progress(f"calibrating, {spent():.0%}: operators alone, {len(samples)}")
        group = planned[first : first + _GROUP]
        # The bytes that a round moves lie between two uses of the same weights.
        times, distance = seconds_alone(group, _ROUNDS, clock, kernel)
        for operator, least_s in zip(group, times, strict=True):
            distances = tuple(0 if warm else distance for warm in is_warm(operator.signature))
            samples.append(OperatorSample(operator.signature, distances, least_s))
    return samples


def _visited_references(
    spent: Callable[[], float], kernel: ReferenceKernel, clock: SampleClock
) -> list[ReferenceMeasurement]:
    """Visit every reference model twice, with all the others in between: few disturbances last that long."""
    visits: dict[tuple[str, int], ReferenceMeasurement] = {}
    for turn in range(_VISITS):
        # Small batches first: a slow machine, or a short calibration, then still sees every family.
        for size in (0, 1):
            for reference in REFERENCES:
                if visits and spent() > _REFERENCE_SHARE:
                    return list(visits.values())
                report_progress(f"calibrating, {spent():.0%}: inside models, round {turn + 1}, {reference.name}")
                batch = reference.batches[size]
                # People train on batches, and norms cannot on a single value.
                visit = visit_reference(reference, batch, _PASSES, turn == 0 and batch > 1, kernel, clock)
                key = (reference.name, batch)
                visits[key] = visits[key] | visit if key in visits else visit
    return list(visits.values())
