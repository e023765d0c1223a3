"""The lines below a table: compute, memory, what was measured and predicted."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from edge_opt import units
from edge_opt.boards.capacity import peak_memory
from edge_opt.records.devices import Bound
from edge_opt.records.measurements import Energy, Latency, LayerLatencies, MeasuredMemory, Measurement
from edge_opt.records.predictions import Prediction
from edge_opt.records.profiles import ModelProfile


def measured_lines(found: Measurement) -> list[tuple[str, str]]:
    """Labels with one sentence each."""
    lines = [("Latency", _latency(found.latency))]
    if found.layers is not None:
        lines.append(("Layers", _layers(found.layers)))
    if found.is_slower_fresh and found.fresh_latency_s is not None:
        fresh = units.duration(found.fresh_latency_s)
        lines.append(
            ("New memory", f"{fresh} where a forward must map its memory first; the latency is of kept memory")
        )
    if found.training is not None:
        step = found.training
        backward, forward = units.duration(step.backward_s), units.duration(step.forward_s)
        lines.append(("Step", f"{units.duration(step.whole_s)}: forward {forward}, backward {backward}; no optimizer"))
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


def energy_sentence(energy: Energy, *, is_short: bool = False) -> str:
    """Joules with what kind of figure they are, and where it comes from unless it is to be short."""
    kind = {"proxy": "a proxy", "model": "a model"}.get(energy.source, f"measured by {energy.source}")
    if is_short and energy.source in ("proxy", "model"):
        return f"{units.energy(energy.joules)} per forward, {kind}, not measured"
    # Many notes say themselves what kind they are of.
    how = f"a {energy.note}" if energy.note.startswith(energy.source) else f"{kind}: {energy.note}"
    return f"{units.energy(energy.joules)} per forward, {how}"


BASES = {
    "calibrated": "from operators sampled there",
    "timed": "each of its operators timed there once",
    "fitted": "from costs fitted to times of whole models there",
    "roofline": "an uncalibrated estimate",
}


@dataclass(frozen=True, slots=True)
class Predicted:
    """What one row of a table would take; None is not known. `spent` is its time by what it goes to."""

    seconds: float | None
    low: float | None
    high: float | None
    energy_j: float | None
    spent: tuple[tuple[Bound, float], ...]

    @property
    def bound(self) -> Bound:
        return max(self.spent, key=lambda part: part[1])[0] if self.spent and self.seconds is not None else "unknown"


NO_WORK = Predicted(0.0, 0.0, 0.0, 0.0, ())


def predicted_by_call(profile: ModelProfile) -> dict[int, Predicted]:
    """What each module call would take itself on the first target, by its index; calls that do no work are absent."""
    if profile.prediction is None:
        return {}
    return {
        layer.module: Predicted(
            layer.seconds, layer.low, layer.high, layer.energy_j, ((layer.bound, layer.seconds or 0.0),)
        )
        for layer in profile.prediction.layers
    }


def predicted_whole(found: Prediction) -> Predicted:
    joules = found.energies[0].joules if found.energies else None
    return Predicted(found.seconds, found.low, found.high, joules, ((found.bound, found.seconds or 0.0),))


def together(parts: Sequence[Predicted | None]) -> Predicted | None:
    """Several rows as one; what is unknown in one of them is unknown. Ends add up: layers err in the same direction."""
    known = [part for part in parts if part is not None]
    if not known or len(known) < len(parts):
        return None
    spent: dict[Bound, float] = {}
    for part in known:
        for bound, seconds in part.spent:
            spent[bound] = spent.get(bound, 0.0) + seconds
    return Predicted(
        _sum([part.seconds for part in known]),
        _sum([part.low for part in known]),
        _sum([part.high for part in known]),
        _sum([part.energy_j for part in known]),
        tuple(spent.items()),
    )


def _sum(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) if len(known) == len(values) else None


def predicted_lines(predictions: Sequence[Prediction], *, is_verbose: bool = True) -> list[tuple[str, str]]:
    """Labels with one sentence each; with several targets each sentence names its own.

    Where it is to be short: one line about energy, the platform whose times it rests on, and remarks only where they
    say why there is no time.
    """
    lines: list[tuple[str, str]] = []
    hidden = 0
    for found in predictions:
        of = f"{found.target}: " if len(predictions) > 1 else ""
        lines.append(("Predicted", prediction_sentence(found)))
        energies = found.energies if is_verbose else found.energies[:1]
        remarks = found.remarks if is_verbose else found.remarks[: int(found.seconds is None)]
        lines += [("Energy", f"{of}{energy_sentence(energy, is_short=not is_verbose)}") for energy in energies]
        if found.basis == "fitted" and not is_verbose:  # board, runtime with its date, threads: what it is a time of
            lines += [("Note", f"{of}{remark.partition(';')[0]}") for remark in found.remarks[:1]]
        lines += [("Note", f"{of}{remark}") for remark in remarks]
        hidden += len(found.energies) - len(energies) + len(found.remarks) - len(remarks)
    if hidden:
        what = "remark" if hidden == 1 else "remarks"
        lines.append(("More", f"{hidden} {what} and sources: -v, or .prediction.remarks in Python"))
    return lines


def fits_lines(profile: ModelProfile) -> list[tuple[str, str]]:
    """Whether each device that was predicted for holds the model; nothing where its RAM is not known."""
    lines = []
    for found in profile.predictions:
        if found.ram_bytes:
            need = peak_memory(profile, found.precision)
            lines.append(("Fits", _fits_sentence(found, need.total_bytes, found.ram_bytes)))
    return lines


def _fits_sentence(found: Prediction, needed: int, sizes: Sequence[int]) -> str:
    holding = [size for size in sizes if needed <= size]
    answer = "yes" if len(holding) == len(sizes) else f"only in {units.size(holding[0])}" if holding else "no"
    return (
        f"{answer}: {units.size(needed)} in {found.precision} (weights, input, activations), and {found.target} has "
        f"{units.sizes(sizes)}"
    )


def prediction_sentence(found: Prediction) -> str:
    """The whole in one sentence: target, time with its interval, bound and basis."""
    what = f"on {found.target} in {found.precision}"
    if found.seconds is None:
        return f"not known {what}: a figure of the device is missing"
    beyond = {"roofline": "without a price", "fitted": "outside the fit"}.get(found.basis, "outside what was sampled")
    outside = f"; {beyond}: {', '.join(found.outside)}" if found.outside else ""
    basis = BASES[found.basis] + outside
    return f"{units.duration(found.seconds)} {what} ({interval(found)}), bound by {found.bound}; {basis}"


def interval(found: Prediction) -> str:
    """The interval in words; an upper end that is not known is said to be open."""
    if found.low is None:
        return "no interval"
    if found.high is None:
        return f"90 % interval from {units.duration(found.low)}, open above"
    return f"90 % interval {units.duration(found.low)} to {units.duration(found.high)}"


_NAMED_AT_MOST = 5
_NOTES_AT_MOST = 2


def short_first(lines: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """The lines with one about energy and the first notes only; the last one says how many more there are."""
    seen: Counter[str] = Counter()
    kept = []
    for label, sentence in lines:
        seen[label] += 1
        if seen[label] <= {"Note": _NOTES_AT_MOST, "Energy": 1}.get(label, len(lines)):
            kept.append((label, sentence))
    hidden = len(lines) - len(kept)
    return [*kept, ("More", f"{hidden} remark{'s' * (hidden != 1)}: -v shows them")] if hidden else kept


def summary_lines(profile: ModelProfile, *, is_verbose: bool = True) -> list[tuple[str, str]]:
    """Labels with one sentence each. With unpriced operators every total says that it is a lower bound."""
    totals = profile.totals
    bound = "≥ " if totals.is_lower_bound else ""
    read, written = units.size(totals.bytes_read), units.size(totals.bytes_written)
    is_known = totals.intensity is not None and not totals.is_lower_bound
    intensity = f"; {units.ratio(totals.intensity)} FLOPs per byte" if is_known else ""
    lines = [
        (
            "Compute",
            f"{bound}{units.count(totals.macs)} MACs, {bound}{units.count(totals.flops)} FLOPs "
            f"({bound}{units.count(totals.other_ops)} of them outside MACs)",
        ),
        ("Parameters", _parameters(profile)),
        ("Traffic", f"{bound}{read} read, {bound}{written} written{intensity}"),
        ("Peak memory", _peak(profile)),
        ("Coverage", _coverage(profile)),
    ]
    if profile.measurement is not None:
        lines += measured_lines(profile.measurement)
    lines += fits_lines(profile)
    lines += predicted_lines(profile.predictions, is_verbose=is_verbose)
    if profile.unpriced:
        lines.append(("Unpriced", _unpriced(profile)))
    if profile.convention != "edge_opt":
        lines.append(("Convention", f"counted as {profile.convention} counts"))
    if profile.mode == "train":
        lines.append(("Mode", "train: dropout and batch statistics as in training; the backward pass is not included"))
    return lines + [("Note", note) for note in profile.trace.notes]


def _parameters(profile: ModelProfile) -> str:
    totals = profile.totals
    buffers = f"; buffers {units.size(totals.buffer_bytes)}" if totals.buffer_bytes else ""
    if not totals.params:
        return f"none{buffers}"
    trainable = "all" if totals.trainable_params == totals.params else units.count(totals.trainable_params)
    return f"{units.count(totals.params)} ({units.size(totals.param_bytes)}), {trainable} trainable{buffers}"


def _peak(profile: ModelProfile) -> str:
    peak = profile.peak
    if peak.op_index is None:
        return "no operator ran"
    where = peak.module or "the model's own forward"
    return (
        f"{units.size(peak.live_bytes)} of activations, at {where} (planner bound {units.size(peak.planner_bytes)}); "
        f"inputs {units.size(profile.totals.input_bytes)}"
    )


def _coverage(profile: ModelProfile) -> str:
    total, missing = len(profile.trace.ops), sum(item.count for item in profile.unpriced)
    if not missing:
        return f"100% of {total} operators"
    return f"{units.percent(profile.coverage)}: {total - missing} of {total} operators"


def _unpriced(profile: ModelProfile) -> str:
    counts: Counter[str] = Counter()
    for item in profile.unpriced:
        counts[item.op] += item.count
    named = [op if count == 1 else f"{op} {units.TIMES}{count}" for op, count in counts.most_common(_NAMED_AT_MOST)]
    if len(counts) > len(named):
        named.append(f"and {len(counts) - len(named)} more")
    total = sum(counts.values())
    return f"{total} operator{'s' * (total != 1)} unpriced: {', '.join(named)} — totals are lower bounds"
