"""Time the operators of one model, which narrows the interval of its prediction in seconds."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from edge_opt._support.progress import report_progress
from edge_opt.calibration.operator_bench import seconds_alone
from edge_opt.calibration.operator_draws import DrawnOperator
from edge_opt.calibration.predict import Array, describe, scales_of, timed_forward, timing_key
from edge_opt.calibration.quiet_clock import ReferenceKernel, SampleClock
from edge_opt.calibration.self_check import STUDENT, now
from edge_opt.measuring.machine import memory_bytes, retain_freed_memory
from edge_opt.records.costs import OpSignature, TensorInfo, Trace
from edge_opt.records.predictions import Calibration, OperatorSample, TimedOperators

_ROUNDS = 5
# Operators are timed until those that are left make less than this share of the model's uncertainty.
_REST = 0.05
# Reference models whose operators are timed beside, and how many of each: the costliest ones.
_ANCHORS, _ANCHOR_OPERATORS = 6, 8
# A round runs each operator twice, the first time to rehearse.
_RUNS_EACH = 2 * (_ROUNDS + 1)
_LEAST_DEVIATION = 0.02
_MEMORY_SHARE = 8  # of the memory, tensors of operators that are timed together may take one part of so many
_NORMAL_MEDIAN = 0.6745  # of the absolute value, in standard deviations


def time_operators(recorded: Trace, name: str, calibration: Calibration, seconds: float) -> TimedOperators:
    """Time the operators that make most of a model's uncertainty, and return them in seconds of the calibration.

    Operators are timed alone. What they take inside a model follows from operators of reference models, whose times
    there the calibration has, and which are timed alone beside: they tell the speed of the machine now as well.

    Args:
        recorded: The model's trace.
        name: The model's name.
        calibration: The machine; torch has its threads already.
        seconds: CPU seconds at most, roughly.
    """
    wanted, shares = _most_uncertain(recorded, calibration, seconds / 2)
    clock = SampleClock()
    kernel = ReferenceKernel(clock)
    with retain_freed_memory():
        own = _alone(wanted, name, clock, kernel)
        anchors = [_alone(items, title, clock, kernel) for title, items in _anchors(shares, calibration).items()]
    known = [pairs for pairs in anchors if pairs]
    factors = np.log([sum(item.seconds for item, _ in pairs) / sum(alone for _, alone in pairs) for pairs in known])
    common = float(np.median(factors)) if known else 0.0
    errors = [abs(math.log(item.seconds / alone_s) - common) for pairs in known for item, alone_s in pairs]
    return TimedOperators(
        name=name,
        created=now(),
        deviation=_deviation_of_sums(factors),
        operator_deviation=max(_LEAST_DEVIATION, float(np.median(errors)) / _NORMAL_MEDIAN) if errors else 1.0,
        samples=tuple(replace(item, seconds=alone_s * math.exp(common), origin=name) for item, alone_s in own),
    )


def _deviation_of_sums(factors: Array) -> float:
    """Return the standard deviation of the error of a sum of operators: that of one more reference model."""
    count = len(factors)
    if count < 2:
        return 1.0
    student = STUDENT.get(count - 1, 1.7) / 1.645
    return max(_LEAST_DEVIATION, student * float(np.std(factors, ddof=1)) * math.sqrt(1 + 1 / count))


def _most_uncertain(
    recorded: Trace, calibration: Calibration, seconds: float
) -> tuple[list[OperatorSample], dict[str, float]]:
    """Return the operators that make most of the uncertainty, as many as can be timed, and seconds by group."""
    forward = timed_forward(recorded, calibration)
    alike: dict[object, list[int]] = defaultdict(list)
    shares: dict[str, float] = defaultdict(float)
    for call, item, distances in zip(recorded.ops, forward.described, forward.distances, strict=True):
        if item.group != "view":
            alike[timing_key(recorded.signatures[call.signature], distances)].append(call.index)
            shares[item.group] += float(forward.seconds[call.index])
    errors_s = {key: forward.error_s(indices) for key, indices in alike.items()}
    total_s = left_s = math.fsum(errors_s.values())
    wanted: list[OperatorSample] = []
    for key in sorted(alike, key=lambda key: -errors_s[key]):
        first = alike[key][0]
        predicted_s = float(forward.seconds[first])
        seconds -= _RUNS_EACH * predicted_s
        if left_s <= _REST * total_s or (wanted and seconds < 0):
            break
        left_s -= errors_s[key]
        signature = recorded.signatures[recorded.ops[first].signature]
        wanted.append(OperatorSample(signature, forward.distances[first], predicted_s))
    return wanted, shares


def _anchors(shares: dict[str, float], calibration: Calibration) -> dict[str, list[OperatorSample]]:
    """Return the costliest operators, as timed in place, of the reference models that are most like a model."""
    scales = scales_of(calibration)
    inside: dict[str, dict[str, list[OperatorSample]]] = defaultdict(lambda: defaultdict(list))
    for sample in calibration.samples:
        if sample.origin:
            inside[sample.origin][describe(sample.signature, sample.distances, scales).group].append(sample)

    def likeness(origin: str) -> float:
        parts = {group: sum(item.seconds for item in items) for group, items in inside[origin].items()}
        whole, own_whole = sum(shares.values()), sum(parts.values())
        return sum(min(shares.get(group, 0.0) / whole, part / own_whole) for group, part in parts.items())

    # One batch of a model only: both would err alike.
    likest: dict[str, str] = {}
    for origin in sorted(inside, key=likeness, reverse=True):
        likest.setdefault(origin.rpartition(",")[0], origin)
    anchors = {}
    for origin in list(likest.values())[:_ANCHORS]:
        items = [item for group, some in inside[origin].items() if group in shares for item in some]
        anchors[origin] = sorted(items, key=lambda item: -item.seconds)[:_ANCHOR_OPERATORS]
    return anchors


def _alone(
    samples: Sequence[OperatorSample], title: str, clock: SampleClock, kernel: ReferenceKernel
) -> list[tuple[OperatorSample, float]]:
    """Return operators with their seconds alone: those that can be called again, and fit into memory together."""
    report_progress(f"timing {len(samples)} operators of {title}")
    left_bytes = memory_bytes() // _MEMORY_SHARE
    known: list[tuple[OperatorSample, DrawnOperator]] = []
    for sample in samples:
        nbytes = sum(tensor.nbytes for tensor in sample.signature.inputs)
        operator = callable_again(sample.signature) if nbytes <= left_bytes else None
        if operator is not None:
            known.append((sample, operator))
            left_bytes -= nbytes
    times, _ = seconds_alone([operator for _, operator in known], _ROUNDS, clock, kernel)
    return [(sample, alone_s) for (sample, _), alone_s in zip(known, times, strict=True)]


def callable_again(signature: OpSignature) -> DrawnOperator | None:
    """Return a recorded operator with tensors without data; None where its record does not say all of the call.

    >>> import edge_opt as eo
    >>> recorded = eo.profile(torch.nn.Linear(8, 4), (2, 8)).trace
    >>> callable_again(recorded.signatures[recorded.ops[0].signature]).args[1].shape
    torch.Size([4, 8])
    """
    namespace, _, name = signature.op.partition(".")
    strides = iter(signature.strides or [None] * len(signature.inputs))

    def rebuilt(value: Any) -> Any:
        if isinstance(value, TensorInfo):
            laid_out, dtype = next(strides), getattr(torch, value.dtype)
            if laid_out is None:
                return torch.empty(value.shape, dtype=dtype, device="meta")
            return torch.empty_strided(value.shape, laid_out, dtype=dtype, device="meta")
        if isinstance(value, tuple):
            return [rebuilt(item) for item in value]
        return getattr(torch, value, value) if isinstance(value, str) else value

    try:
        function = getattr(getattr(torch.ops, namespace), name)
        args = tuple(rebuilt(value) for value in signature.args)
        kwargs = {key: torch.device("meta") if key == "device" else rebuilt(value) for key, value in signature.kwargs}
        outputs = function(*args, **kwargs)
    except (AttributeError, RuntimeError, TypeError, ValueError, NotImplementedError):
        return None
    given = outputs if isinstance(outputs, (tuple, list)) else [outputs]
    shapes = [tuple(item.shape) for item in given if isinstance(item, torch.Tensor)]
    is_same = shapes == [tensor.shape for tensor in signature.outputs]
    return DrawnOperator(signature, function, args, kwargs) if is_same else None
