"""predict(): a model's time from a calibration, operator by operator."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from edge_opt import units
from edge_opt.calibration.operator_bench import Overheads, reuse_distances
from edge_opt.calibration.operator_times import FRESH_BYTES, Array, OperatorFeatures, describe, operator_times
from edge_opt.errors import InvalidInput
from edge_opt.measuring.machine import read_environment
from edge_opt.records.costs import Trace
from edge_opt.records.devices import Bound, Precision
from edge_opt.records.predictions import Basis, Calibration, LayerPrediction, Prediction
from edge_opt.records.profiles import ModelProfile

_NINE_IN_TEN = 1.645  # standard deviations of a normal error


@dataclass(frozen=True, slots=True)
class Parts:
    """The operators of a trace in order: seconds, the standard deviation of their logarithm, what they are."""

    seconds: Array
    deviations: Array
    described: Sequence[OperatorFeatures]
    is_outside: Sequence[bool]


def prediction(
    trace: Trace, parts: Parts, overheads: Overheads, whole_deviation: float, target: str, basis: Basis,
    precision: Precision, remarks: tuple[str, ...],
) -> Prediction:  # fmt: skip
    """Layers that add up to the whole. `whole_deviation` is how far wholes are off where nothing is outside."""
    own: list[list[int]] = [[] for _ in trace.modules]
    for call in trace.ops:
        own[call.module].append(call.index)
    layers = tuple(
        _layer(module.index, module.path, module.kind, indices, parts, overheads)
        for module, indices in zip(trace.modules, own, strict=True)
    )
    seconds = math.fsum(layer.seconds or 0.0 for layer in layers)
    outside = [index for index in range(len(trace.ops)) if parts.is_outside[index]]
    deviation = math.hypot(whole_deviation, _together(outside, parts) / seconds if seconds else 0.0)
    factor = math.exp(_NINE_IN_TEN * deviation)
    names = (trace.signatures[call.signature].op for call in trace.ops if parts.is_outside[call.index])
    return Prediction(
        target=target,
        basis=basis,
        precision=precision,
        seconds=seconds,
        low=seconds / factor,
        high=seconds * factor,
        bound=_bound(range(len(trace.ops)), parts, overheads, len(trace.modules)),
        layers=layers,
        outside=tuple(dict.fromkeys(names)),
        energies=(),
        remarks=remarks,
    )


def _layer(
    module: int, path: str, kind: str, indices: Sequence[int], parts: Parts, overheads: Overheads
) -> LayerPrediction:
    seconds = overheads.module_s + math.fsum(float(parts.seconds[index]) + overheads.operator_s for index in indices)
    # Operators of one layer are of one kind, and err together.
    factor = math.exp(_NINE_IN_TEN * _together(indices, parts) / seconds) if seconds else 1.0
    return LayerPrediction(
        module=module,
        path=path,
        kind=kind,
        seconds=seconds,
        low=seconds / factor,
        high=seconds * factor,
        bound=_bound(indices, parts, overheads, 1),
        is_outside=any(parts.is_outside[index] for index in indices),
    )


def _together(indices: Sequence[int], parts: Parts) -> float:
    """Seconds by which operators err if all err the same way."""
    return math.fsum(float(parts.seconds[index] * parts.deviations[index]) for index in indices)


def _bound(indices: Sequence[int], parts: Parts, overheads: Overheads, modules: int) -> Bound:
    """What takes most of the time."""
    compute_s = sum(parts.described[index].compute_s for index in indices)
    memory_s = sum(parts.described[index].memory_s for index in indices)
    overhead_s = overheads.module_s * modules + overheads.operator_s * len(indices)
    shares: dict[Bound, float] = {"compute": compute_s, "memory": memory_s, "overhead": overhead_s}
    return max(shares, key=lambda name: shares[name])


_NEGLIGIBLE = 1e-3
_OUTSIDE = 3.0  # how much wider an operator's interval is where nothing like it was sampled
_UNKNOWN = 0.3


def predict(profile: ModelProfile, calibration: Calibration, precision: Precision = "fp32") -> Prediction:
    """What the profiled model would take on the calibrated machine, with a 90 % interval; nothing is run.

    Operators unlike anything that was sampled are named in `outside`, and make the interval wider.

    Args:
        profile: The model and its inputs.
        calibration: The machine.
        precision: Only fp32, for a calibration has no operator times at others.
    """
    if precision != "fp32":
        raise InvalidInput(
            f"precision is {precision!r}, and a calibration has operator times at fp32 only; "
            "eo.calibrated_device(calibration) gives a roofline at the others"
        )
    times = operator_times(calibration)
    trace = profile.trace
    distances = reuse_distances(trace)
    described = [describe(trace.signatures[call.signature], distances[call.index], times.scales) for call in trace.ops]
    seconds = times.seconds(described)
    # An operator that takes next to nothing is no reason to doubt the rest.
    floor_s = _NEGLIGIBLE * float(seconds.sum())
    is_outside = [value > floor_s and times.is_outside(item) for value, item in zip(seconds, described, strict=True)]
    usual = {item.group: item.deviation for item in calibration.deviations}
    deviations = [
        usual.get(item.group, _UNKNOWN) * (_OUTSIDE if outside else 1.0)
        for item, outside in zip(described, is_outside, strict=True)
    ]
    parts = Parts(seconds, np.array(deviations), described, is_outside)
    overheads = Overheads(calibration.overhead_per_operator_s, calibration.overhead_per_module_s)
    disturbed = (f"the calibration was disturbed: {remark}" for remark in calibration.remarks)
    remarks = (*differences(calibration), *disturbed, *_fresh_memory(trace, calibration))
    return prediction(
        trace, parts, overheads, calibration.whole_deviation, calibration.name, "calibrated", precision, remarks
    )


def _fresh_memory(trace: Trace, calibration: Calibration) -> Iterator[str]:
    """What the C library may add where it maps large outputs anew in each forward."""
    large = sum(
        storage.nbytes
        for storage in trace.storages
        if storage.role == "activation" and storage.born is not None and storage.nbytes >= FRESH_BYTES
    )
    if large and calibration.fresh_outputs:
        item = max(calibration.fresh_outputs, key=lambda item: item.nbytes)
        extra_s = max(0.0, item.fresh_s - item.reused_s) / item.nbytes * large
        yield (
            f"{units.size(large)} of outputs are so large that the C library may map them anew in each forward, which "
            f"would take up to {units.duration(extra_s)} more; the figures are for memory that is kept"
        )


def differences(calibration: Calibration) -> Iterator[str]:
    """What the calibration was made with that is different here, one sentence each; none on the machine itself."""
    here, there = read_environment(), calibration.machine
    if (here.cpu, here.cores, here.system.split()[0]) != (there.cpu, there.cores, there.system.split()[0]):
        yield (
            f"the calibration is of another machine: {there.cpu}, {there.cores} core(s), {there.system}; "
            f"the figures are for that one, not for {here.cpu}"
        )
        return
    if here.torch != there.torch:
        yield f"the calibration was made with torch {there.torch}, and this is {here.torch}; calibrate again"
    if here.threads != there.threads:
        yield (
            f"the calibration was made with {there.threads} thread(s), and torch now uses {here.threads}; "
            f"the figures are for {there.threads}"
        )
