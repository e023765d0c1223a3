"""What was measured, in sentences: latency, memory and energy, each with how sure it is and where it comes from."""

from __future__ import annotations

from edge_opt import units
from edge_opt.records import Energy, Latency, LayerLatencies, MeasuredMemory, Measurement


def measured_lines(found: Measurement) -> list[tuple[str, str]]:
    """Labels with one sentence each."""
    lines = [("Latency", _latency(found.latency))]
    if found.layers is not None:
        lines.append(("Layers", _layers(found.layers)))
    if found.memory is not None:
        lines.append(("Measured", _memory(found.memory)))
    if found.energy is not None:
        lines.append(("Energy", energy_sentence(found.energy)))
    elif found.energy_refusals:
        reasons = "; ".join(f"{refusal.meter}: {refusal.reason}" for refusal in found.energy_refusals)
        lines.append(("Energy", f"not known ({reasons})"))
    return lines + [("Note", remark) for remark in found.latency.remarks]


def _latency(latency: Latency) -> str:
    low, high = units.duration(latency.median_interval_s.low), units.duration(latency.median_interval_s.high)
    return (
        f"{units.duration(latency.median_s)} measured here (median, 95 % interval {low} to {high}; "
        f"minimum {units.duration(latency.minimum_s)}, p95 {units.duration(latency.p95_s)}); "
        f"{latency.throughput:.4g} samples per second"
    )


def _layers(layers: LayerLatencies) -> str:
    inside = layers.whole_s - layers.between_layers_s
    return (
        f"{units.duration(inside)} in layers, {units.duration(layers.between_layers_s)} between them; "
        f"recording added {units.duration(max(layers.overhead_s, 0.0))}, which is taken out"
    )


def _memory(memory: MeasuredMemory) -> str:
    where = memory.peak_module or "the model's own forward"
    return (
        f"{units.size(memory.peak_bytes)} at the allocator's peak, in {memory.peak_op} of {where} "
        f"({units.size(memory.scratch_bytes)} of it operators' scratch); {units.size(memory.tensor_peak_bytes)} "
        "at the peak of tensors alone"
    )


def energy_sentence(energy: Energy) -> str:
    """Joules with their provenance."""
    kind = {"proxy": "a proxy", "model": "a model"}.get(energy.source, f"measured by {energy.source}")
    return f"{energy.joules:.3g} J per forward, {kind}: {energy.note}"
