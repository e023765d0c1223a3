"""Models side by side: aligned layers, totals, and what stands in the way of comparing them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from edge_opt import units
from edge_opt.compare.alignment import align
from edge_opt.compare.layers import layer_figures
from edge_opt.errors import InvalidInput
from edge_opt.records import (
    ComparedFigure,
    ComparedLayer,
    Comparison,
    FigureUnit,
    LayerFigures,
    ModelComparison,
    ModelProfile,
)

Read = Callable[[ModelProfile], float | None]


def _measured(read: Read) -> Read:
    return lambda profile: None if profile.measurement is None else read(profile)


def _memory(profile: ModelProfile) -> float | None:
    found = profile.measurement and profile.measurement.memory
    return found.peak_bytes if found else None


def _energy(profile: ModelProfile) -> float | None:
    found = profile.measurement and profile.measurement.energy
    return found.joules if found else None


def _resident(profile: ModelProfile) -> int:
    return profile.totals.param_bytes + profile.totals.buffer_bytes + profile.totals.input_bytes


_TOTALS: tuple[tuple[str, str, FigureUnit, bool, Read], ...] = (
    ("params", "Parameters", "count", False, lambda profile: profile.totals.params),
    ("macs", "MACs", "count", False, lambda profile: profile.totals.macs),
    ("flops", "FLOPs", "count", False, lambda profile: profile.totals.flops),
    ("param_bytes", "Weights", "bytes", False, lambda profile: profile.totals.param_bytes),
    ("bytes_moved", "Bytes moved", "bytes", False, lambda p: p.totals.bytes_read + p.totals.bytes_written),
    ("activation_bytes", "Activations", "bytes", False, lambda profile: profile.totals.activation_bytes),
    ("peak_activation_bytes", "Peak activations", "bytes", False, lambda profile: profile.peak.live_bytes),
    ("peak_memory_bytes", "Peak memory", "bytes", False, lambda profile: _resident(profile) + profile.peak.live_bytes),
    ("latency_s", "Latency, measured", "time", True, _measured(lambda p: p.measurement.latency.median_s)),  # type: ignore[union-attr]
    ("measured_memory_bytes", "Memory, measured", "bytes", True, _memory),
    ("energy_j", "Energy", "energy", True, _energy),
)


def compare_profiles(
    profiles: Sequence[ModelProfile], latencies: Sequence[Comparison | None] | None = None
) -> ModelComparison:
    """Profiles against the first of them; `latencies` are the verdicts on the others, None where there are none.

    >>> from edge_opt.records import ModelProfile
    >>> compare_profiles([])
    Traceback (most recent call last):
    edge_opt.errors.InvalidInput: 0 models cannot be compared; give at least two
    """
    if len(profiles) < 2:
        raise InvalidInput(f"{len(profiles)} model{'s' * (len(profiles) != 1)} cannot be compared; give at least two")
    totals = (
        ComparedFigure(name, title, unit, is_measured, tuple(read(profile) for profile in profiles))
        for name, title, unit, is_measured, read in _TOTALS
    )
    rows = _aligned([layer_figures(profile) for profile in profiles])
    return ModelComparison(
        names=_distinct([profile.name for profile in profiles]),
        layers=rows,
        totals=tuple(figure for figure in totals if any(value is not None for value in figure.values)),
        latencies=tuple(latencies or (None,) * (len(profiles) - 1)),
        is_lower_bound=tuple(profile.totals.is_lower_bound for profile in profiles),
        remarks=profiled_differently(profiles),
    )


def _aligned(models: Sequence[Sequence[LayerFigures]]) -> tuple[ComparedLayer, ...]:
    """Rows over all models: each model is aligned with the rows found so far, so that two may share an added layer."""
    rows: list[tuple[LayerFigures | None, ...]] = [(layer,) for layer in models[0]]
    for width, layers in enumerate(models[1:], start=1):
        known = [next(layer for layer in row if layer is not None) for row in rows]
        rows = [
            (*((None,) * width if i is None else rows[i]), None if j is None else layers[j])
            for i, j in align(known, layers)
        ]
    return tuple(map(ComparedLayer, rows))


def _distinct(names: Sequence[str]) -> tuple[str, ...]:
    """The names; where several are alike, with their place."""
    return tuple(name if names.count(name) == 1 else f"{name} ({place})" for place, name in enumerate(names, start=1))


def profiled_differently(profiles: Sequence[ModelProfile]) -> tuple[str, ...]:
    """Where the profiles were not made alike, so that a difference may not be the model's."""
    first, remarks = profiles[0], []
    for other in profiles[1:]:
        for what, old, new in (
            ("inputs", _inputs(first), _inputs(other)),
            ("mode", first.mode, other.mode),
            ("convention", first.convention, other.convention),
            ("machine", _machine(first), _machine(other)),
        ):
            if old and new and old != new:
                remarks.append(f"{other.name} was profiled differently: {what} {new} instead of {old}")
    return tuple(dict.fromkeys(remarks))


def _inputs(profile: ModelProfile) -> str:
    return ", ".join(units.shape(shape) for shape in profile.trace.modules[0].input_shapes)


def _machine(profile: ModelProfile) -> str:
    if profile.measurement is None:
        return ""
    environment = profile.measurement.environment
    return f"{environment.cpu} on {environment.device} with {environment.threads} threads"
