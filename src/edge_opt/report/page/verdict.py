"""The verdict: what a reader should take away first, in sentences with figures, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from edge_opt import units
from edge_opt.records.profiles import ModelProfile
from edge_opt.records.sweeps import SweepResult, Trial
from edge_opt.report.figures import DeviceRoofs, Sensitivities, layer_name
from edge_opt.report.sweep_tables import bought, conditions, headline, per_call
from edge_opt.report.table import leaf_rows
from edge_opt.text import shorten

Advice = tuple[str, str]
_NAMED = 3
_WORTH_SAYING = 0.05
_STANDS_OUT = 0.1
_CURES = {
    "memory": "Prune channels, move fewer bytes with fp16 or int8, and fuse layers so that data is used more often.",
    "compute": "Prune channels where MACs are, or use a precision or an engine that computes faster.",
    "overhead": "Fuse layers and use fewer, larger operators; a larger batch helps too.",
}


def verdict(profile: ModelProfile | None, sweep: SweepResult | None, roofs: Sequence[DeviceRoofs]) -> list[str]:
    """The whole page in a few sentences: a paragraph about the model, one about the sweep."""
    paragraphs = [" ".join(_of_profile(profile, roofs))] if profile else []
    return [*paragraphs, _of_sweep(sweep)] if sweep else paragraphs


def _of_profile(profile: ModelProfile, roofs: Sequence[DeviceRoofs]) -> Iterable[str]:
    totals = profile.totals
    bound = "at least " if totals.is_lower_bound else ""
    shapes = ", ".join(units.shape(shape) for shape in profile.trace.modules[0].input_shapes)
    yield (
        f"{shorten(profile.name, 80)} does {bound}{units.count(totals.macs)} MACs"
        f"{f' on {shapes}' if shapes else ''} with {units.count(totals.params)} parameters "
        f"({units.size(totals.param_bytes)}), and its activations need {units.size(profile.peak.live_bytes)} "
        "at their peak."
    )
    if profile.measurement is not None:
        latency = profile.measurement.latency
        noisy = ", on a noisy machine" if latency.is_noisy or latency.is_contended else ""
        yield f"Measured here it takes {units.duration(latency.median_s)}{noisy}."
    prediction = profile.prediction
    if prediction is not None and prediction.seconds is not None:
        yield (
            f"On {prediction.target} it is predicted to take {units.duration(prediction.seconds)} "
            f"in {prediction.precision}, bound by {prediction.bound}."
        )
    elif roofs:
        roof = roofs[0].main
        if roof.total.seconds is not None:
            yield (
                f"On {roofs[0].spec.title} it is {roof.total.bound}-bound: {units.duration(roof.total.seconds)} "
                f"at best in {roof.precision}."
            )


def _of_sweep(sweep: SweepResult) -> str:
    tried, failed, accepted = len(sweep.trials), len(sweep.failed), len(sweep.accepted)
    limits = " and ".join(sweep.constraints) or "no constraint"
    if not tried:
        return "The sweep is empty: no candidate was tried."
    if failed == tried:
        return f"All {tried} candidates failed; the first because of: {shorten(sweep.trials[0].reason, 200)}."
    if not accepted:
        return f"None of the {tried} candidates meets {limits}{f'; {failed} failed' if failed else ''}."
    lost = f", {failed} failed" if failed else ""
    if sweep.slower:
        count = len(sweep.slower)
        lost += f", {count} {'is' if count == 1 else 'are'} pruned and not faster than unpruned"
    best = f" {_best(sweep, sweep.trial(sweep.best))}" if sweep.best else ""
    return f"{accepted} of {tried} candidates meet{'s' * (accepted == 1)} {limits}{lost}.{best}"


def _best(sweep: SweepResult, trial: Trial) -> str:
    if trial.metrics is None:
        return f"The best is {trial.candidate.label}."
    metrics = trial.metrics
    is_share = metrics.metric == "accuracy"
    score = f"{units.percent(metrics.accuracy)} accurate" if is_share else f"{metrics.metric} {metrics.accuracy:.4g}"
    figures = f"{score}, {per_call(metrics)}"
    told = f"The best is {trial.candidate.label}: {figures}."
    found = sweep.speedup
    if found is None:
        return told
    parts = bought(found)
    return f"{told} Against the baseline it is {headline(found)}{f' ({parts})' if parts else ''}; {conditions(found)}."


def advice(
    profile: ModelProfile | None,
    sweep: SweepResult | None,
    roofs: Sequence[DeviceRoofs],
    sensitivities: Sensitivities | None,
) -> list[Advice]:
    """What to do, each with its reason; most useful first."""
    found: list[Advice] = []
    if sweep is not None and sweep.recommendation:
        found.append(("Recommendation", sweep.recommendation))
    if profile is not None:
        found += [*_largest(profile), *_on_device(profile, roofs), *_memory(profile)]
    if sensitivities is not None and sensitivities.layers:
        found.append(("Spare what hurts", sensitivities.caption))
    return [*found, *_mind(profile)] if profile else found


def _mind(profile: ModelProfile) -> Iterable[Advice]:
    if profile.unpriced:
        ops = sorted({item.op for item in profile.unpriced})
        named = ", ".join(ops[:_NAMED]) + (" …" if len(ops) > _NAMED else "")
        yield "Totals are lower bounds", f"No price for {named}; edge_opt.cost_rule adds one."
    if profile.measurement is not None:
        remarks = "; ".join(profile.measurement.latency.remarks)
        if remarks:
            yield "About the measurement", f"{remarks[0].upper()}{remarks[1:]}."


def _largest(profile: ModelProfile) -> Iterable[Advice]:
    if not profile.totals.macs:
        return
    rows = sorted(leaf_rows(profile), key=lambda row: -(row.cost.macs if row.cost else 0))[:_NAMED]
    share = sum(row.cost.macs for row in rows if row.cost) / profile.totals.macs
    named = ", ".join(shorten(layer_name(row, profile), 48) for row in rows if row.cost and row.cost.macs)
    if share < _STANDS_OUT:
        yield "No layer stands out", f"The largest ({named}) have {units.percent(share)} of all MACs together."
        return
    yield "Largest layers", f"{named}: {units.percent(share)} of all MACs. Pruning and precision pay there first."


def _on_device(profile: ModelProfile, roofs: Sequence[DeviceRoofs]) -> Iterable[Advice]:
    if not roofs:
        return
    device, roof = roofs[0], roofs[0].main
    whole, fused = roof.total.seconds, roof.fused_total.seconds
    # The page names what bounds the prediction, so the advice follows it; the roofline answers where there is none.
    told = next((item for item in profile.predictions if item.target == device.spec.name and item.seconds), None)
    bound, seconds, layers = (
        (roof.total.bound, whole, [(item.bound, item.seconds) for item in roof.layers])
        if told is None
        else (told.bound, told.seconds, [(item.bound, item.seconds) for item in told.layers])
    )
    if seconds and bound in _CURES:
        share = sum(part or 0.0 for kind, part in layers if kind == bound) / seconds
        spent = "time at best" if told is None or told.basis == "roofline" else "predicted time"
        yield (
            f"On {device.spec.title}",
            f"{units.percent(share)} of the {spent} goes to {bound}-bound layers. {_CURES[bound]}",
        )
    if whole and fused is not None and 1 - fused / whole > _WORTH_SAYING:
        yield (
            "Fuse",
            "Batch norms and activations in the same pass as their convolution save "
            f"{units.percent(1 - fused / whole)} of the time at best there; runtimes such as ONNX Runtime do so.",
        )
    # A page has one time for a precision: beside a prediction, the roofline's best would contradict it.
    if told is not None and (told.bound == "overhead" or told.basis != "roofline"):
        return
    for other in device.roofs[1:]:
        if whole and other.total.seconds:
            yield (
                f"Try {other.precision}",
                f"{units.duration(other.total.seconds)} at best on {device.spec.title}, against "
                f"{units.duration(whole)} in {roof.precision}.",
            )


def _memory(profile: ModelProfile) -> Iterable[Advice]:
    peak = profile.peak
    if peak.live_bytes and 1 - peak.planner_bytes / peak.live_bytes > _WORTH_SAYING:
        yield (
            "Plan memory",
            f"The peak of {units.size(peak.live_bytes)} stands at {shorten(peak.module or profile.name, 48)}; "
            f"a runtime that drops each tensor after its last use needs {units.size(peak.planner_bytes)}.",
        )
