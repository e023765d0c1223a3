"""Assembling: operator times into layers and a whole, each with the interval that holds the truth nine times in ten."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from edge_opt.devices.boosting import Array
from edge_opt.devices.calibration.overheads import Overheads
from edge_opt.devices.features import Described
from edge_opt.records import Basis, Bound, LayerPrediction, Precision, Prediction, Trace

_NINE_IN_TEN = 1.645  # standard deviations of a normal error


@dataclass(frozen=True, slots=True)
class Parts:
    """The operators of a trace in order: seconds, the standard deviation of their logarithm, what they are."""

    seconds: Array
    deviations: Array
    described: Sequence[Described]
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
