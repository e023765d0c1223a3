"""Targets as tables: several side by side for one model, the catalog, and one device with every figure's source."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from edge_opt import units
from edge_opt.records.devices import BatchFit, DeviceSpec, Figure
from edge_opt.records.predictions import MemoryNeed, TargetComparison, TargetFit
from edge_opt.report.sheets import Note, Sheet, Table, column, sheet, text_column
from edge_opt.text import printable

if TYPE_CHECKING:
    import pandas as pd

_UNKNOWN = "unknown"


def brief_target_sheet(comparison: TargetComparison) -> Sheet:
    """Return one row per target, the model and its memory, and how many remarks there are or why a time is missing."""
    need = comparison.memory
    memory = f"{units.size(need.total_bytes)}, {units.size(need.weight_bytes)} of it weights; kernels' scratch on top"
    notes = [("Model", _model_sentence(comparison)), ("Memory", memory)]
    count = len(comparison.notes)
    unknown = next((fit.prediction for fit in comparison.targets if fit.prediction.seconds is None), None)
    if count and unknown is not None and unknown.remarks:
        why = unknown.remarks[0].partition(" (")[0].partition(", so ")[0].replace(f" of {unknown.target}", "")
        notes.append(("Note", f"{unknown.target}: {why}; {count} remarks: --json, or .notes"))
    elif count:
        notes.append(("Note", f"{count} remark{'s' * (count != 1)} and sources: --json, or .notes in Python"))
    return Sheet("", (_target_table(comparison.targets),), tuple(notes))


@sheet(TargetComparison, brief=brief_target_sheet)
def target_sheet(comparison: TargetComparison) -> Sheet:
    """Return one row per target, then what the model needs, with every remark and source."""
    need = comparison.memory
    memory = f"{units.size(need.total_bytes)}: {memory_parts(need)}; an operating system and a runtime come on top"
    notes = (("Model", _model_sentence(comparison)), ("Memory", memory), *(("Note", note) for note in comparison.notes))
    return Sheet("", (_target_table(comparison.targets),), notes)


def memory_parts(need: MemoryNeed | BatchFit) -> str:
    """Return what the memory of a model consists of, in words."""
    buffers = f"buffers {units.size(need.buffer_bytes)}, " if need.buffer_bytes else ""
    resident = f"weights {units.size(need.weight_bytes)}, {buffers}inputs {units.size(need.input_bytes)}"
    return f"{resident}, peak of activations {units.size(need.activation_bytes)}"


def _model_sentence(comparison: TargetComparison) -> str:
    return f"{comparison.model} on {', '.join(map(units.shape, comparison.inputs))} in {comparison.precision}"


def _target_table(fits: Sequence[TargetFit]) -> Table:
    energies = (next((energy.joules for energy in fit.prediction.energies), None) for fit in fits)
    return (
        text_column("Target", (fit.prediction.target for fit in fits), min_width=22),
        column("Fits", map(_fits, fits)),
        column("Time", (_known(fit.prediction.seconds, units.duration) for fit in fits)),
        column("90 % interval", map(_interval, fits), 1),
        column("Bound by", (fit.prediction.bound for fit in fits), 4),
        column("Est. energy", (_known(joules, units.energy) for joules in energies), 3),
        column("Batch", map(_batch, fits), 2),
        column("Basis", (fit.prediction.basis for fit in fits), 5),
    )


def _fits(fit: TargetFit) -> str:
    if fit.fits is None:
        return _UNKNOWN
    if fit.fits:
        return "yes"
    sizes = fit.fitting_ram_bytes
    return f"from {units.size(sizes[0])} on" if sizes else "no"


def _known(value: float | None, text: Callable[[float], str]) -> str:
    return _UNKNOWN if value is None else text(value)


def _interval(fit: TargetFit) -> str:
    low, high = fit.prediction.low, fit.prediction.high
    if low is None:
        return units.DASH
    return f"{units.duration(low)} {units.DASH} {'?' if high is None else units.duration(high)}"


def _batch(fit: TargetFit) -> str:
    if fit.prediction.mcu is not None:
        return units.DASH  # a file for TFLM has one batch
    if fit.batch is None:
        return _UNKNOWN
    if not fit.batch.fits:
        return f"none: {units.size(fit.batch.shortfall_bytes or 0)} short"
    return f"≥ {fit.batch.batch}" if fit.batch.shortfall_bytes is None else str(fit.batch.batch)


def dataframe(comparison: TargetComparison) -> pd.DataFrame:
    """Return one row per target; exact numbers, None where a figure is not known."""
    import pandas as pd

    return pd.DataFrame(
        {
            "target": fit.prediction.target,
            "precision": fit.prediction.precision,
            "fits": fit.fits,
            "needed_bytes": fit.needed_bytes,
            "smallest_ram_bytes": fit.ram_bytes[0] if fit.ram_bytes else None,
            "predicted_s": fit.prediction.seconds,
            "predicted_low_s": fit.prediction.low,
            "predicted_high_s": fit.prediction.high,
            "predicted_bound": fit.prediction.bound,
            "basis": fit.prediction.basis,
            "energy_j": fit.prediction.energies[0].joules if fit.prediction.energies else None,
            "energy_source": fit.prediction.energies[0].source if fit.prediction.energies else None,
            "largest_batch": fit.batch.batch if fit.batch else None,
        }
        for fit in comparison.targets
    )


def device_table(specs: Sequence[DeviceSpec]) -> Table:
    """Return the catalog, one row per device."""
    from edge_opt.boards.roofline import used_bandwidth

    def peaks(precision: str) -> Iterator[str]:
        return (_text(spec.peak(spec.engine, precision), _operations) for spec in specs)

    used = (used_bandwidth(spec, spec.engine) for spec in specs)
    return (
        text_column("Device", (spec.name for spec in specs), min_width=22),
        column("Runs on", (spec.engine for spec in specs), 4),
        column("RAM", map(_ram, specs)),
        column("On paper", (_text(spec.bandwidth("datasheet"), _rate) for spec in specs), 5),
        column("Used", (units.DASH if it is None else _rate(it.bytes_per_s) for it in used), 1),
        column("fp32", peaks("fp32")),
        column("fp16", peaks("fp16"), 6),
        column("int8", peaks("int8"), 2),
        column("Power", map(_power, specs), 3),
    )


@sheet(DeviceSpec)
def device_sheet(spec: DeviceSpec) -> Sheet:
    """Return one device: a row per figure with how its source knows it, and the source."""
    rows = list(figures(spec))
    labels = [label for label, _, _ in rows]
    # Where several are alike, such as sizes of RAM, they have their number.
    numbered = (
        label if labels.count(label) == 1 else f"{label} ({labels[: place + 1].count(label)})"
        for place, label in enumerate(labels)
    )
    sources = list(dict.fromkeys(figure.source for _, _, figure in rows))
    marks = {source: f"[{number}]" for number, source in enumerate(sources, start=1)}
    columns = (
        text_column("Figure", numbered, min_width=14),
        column("Value", (text for _, text, _ in rows)),
        text_column("Known", (figure.kind for _, _, figure in rows), 1, None),
        column("Source", (marks[figure.source] for _, _, figure in rows)),
    )
    notes: list[Note] = [("Device", spec.note)] if spec.note else []
    title = f"{spec.title} ({spec.name}), runs models on its {spec.engine}; from {spec.origin}"
    cited = tuple((mark, source) for source, mark in marks.items())
    return Sheet(title, (columns,), (*cited, *notes, ("Roofline", _bandwidth_sentence(spec))))


def _bandwidth_sentence(spec: DeviceSpec) -> str:
    """Return the bandwidth that a roofline stands on, or why there is none."""
    from edge_opt.boards.roofline import used_bandwidth

    bandwidth = used_bandwidth(spec, spec.engine)
    if bandwidth is None:
        why = spec.bandwidth_unknown or f"no figure for the {spec.engine}, and none in a data sheet"
        return f"The bandwidth is unknown, so the roofline does not use it: {why}"
    return f"A roofline uses {_rate(bandwidth.bytes_per_s)}: {bandwidth.reading}"


def figures(spec: DeviceSpec) -> Iterator[tuple[str, str, Figure]]:
    """Yield every figure of a device: what it is, the value for people, and the record."""

    def row(label: str, figure: Figure, text: Callable[[float], str]) -> tuple[str, str, Figure]:
        ends = [] if figure.low is None or figure.high is None else [figure.low, figure.high]
        spread = f" ({units.DASH.join(map(text, ends))})" if ends else ""
        return printable(label), text(figure.value) + spread, figure

    for label, figure, text in (
        ("cores", spec.cores, units.count),
        ("clock", spec.clock_hz, lambda value: f"{units.count(value)}Hz"),
        *(("RAM", figure, units.size) for figure in spec.ram_bytes),
        ("flash", spec.flash_bytes, units.size),
        *((_where("bandwidth", item.method, item.engine), item.figure, _rate) for item in spec.bandwidths),
        *((_where("peak", item.precision, item.engine), item.figure, _operations) for item in spec.peaks),
        *((f"power, {power.state}", power.figure, lambda value: f"{value:g} W") for power in spec.powers),
        ("overhead per operator", spec.overhead_s, lambda value: f"{value * 1e6:g} µs"),
        *((item.model, item.figure, lambda value: f"{value * 1e3:g} ms") for item in spec.latencies),
    ):
        if figure is not None:
            yield row(label, figure, text)


def _ram(spec: DeviceSpec) -> str:
    sizes = list(dict.fromkeys((spec.ram_bytes[0].value, spec.ram_bytes[-1].value))) if spec.ram_bytes else []
    return units.sizes(sizes, units.DASH) or units.DASH


def _power(spec: DeviceSpec) -> str:
    watts = [power.figure.value for power in spec.powers]
    ends = list(dict.fromkeys((min(watts), max(watts)))) if watts else []
    return f"{units.DASH.join(f'{value:g}' for value in ends)} W" if ends else units.DASH


def _where(what: str, how: str, engine: str | None) -> str:
    return f"{what}, {how}" + (f" ({engine})" if engine else "")


def _text(figure: Figure | None, text: Callable[[float], str]) -> str:
    return units.DASH if figure is None else text(figure.value)


def _rate(bytes_per_s: float) -> str:
    return f"{units.count(bytes_per_s)}B/s"


def _operations(ops_per_s: float) -> str:
    return f"{units.count(ops_per_s)}OP/s"
