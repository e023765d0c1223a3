"""Targets as tables: several side by side for one model, the catalog, and one device with every figure's source."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from edge_opt import units
from edge_opt.records.devices import BatchFit, DeviceSpec, Figure, KnownLatency
from edge_opt.records.predictions import MemoryNeed, TargetComparison, TargetFit
from edge_opt.report.sheets import OPTIONAL, Note, Sheet, Table, column, sheet, text_column
from edge_opt.text import printable

if TYPE_CHECKING:
    import pandas as pd

_UNKNOWN = "unknown"


def _in(unit: str) -> Callable[[float], str]:
    """Return a function that writes a number with a unit."""
    return lambda value: f"{units.count(value)}{unit}"


_frequency, _rate, _operations = _in("Hz"), _in("B/s"), _in("OP/s")


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
    precisions = {fit.prediction.precision for fit in comparison.targets}
    in_what = f"in {comparison.precision}"
    if len(precisions) > 1:
        in_what = f"in the precision that each name ends with; memory {in_what}"
    return f"{comparison.model} on {', '.join(map(units.shape, comparison.inputs))} {in_what}"


def _target_table(fits: Sequence[TargetFit]) -> Table:
    cpu_layers = [fit.prediction.cpu_layers for fit in fits]
    energies = (next((energy.joules for energy in fit.prediction.energies), None) for fit in fits)
    return (
        text_column("Target", (fit.prediction.target for fit in fits), min_width=22),
        column("Fits", map(_fits, fits)),
        column("Time", (_known(fit.prediction.seconds, units.duration) for fit in fits)),
        column("90 % interval", (_ends(fit.prediction.low, fit.prediction.high) for fit in fits), 1),
        column("Computes in", (fit.prediction.computes_in or fit.prediction.precision for fit in fits), OPTIONAL),
        column("Bound by", (fit.prediction.bound for fit in fits), 4),
        *(
            (column("CPU layers", (_known(count, "{:g}".format) for count in cpu_layers), 1),)
            if any(cpu_layers)
            else ()
        ),
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


def _ends(low: float | None, high: float | None) -> str:
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


_GROUPS = {
    "microcontrollers": "Microcontrollers",
    "cpu": "CPUs: boards, phones and computers",
    "gpu": "GPUs, and chips whose GPU runs models",
    "npu": "NPUs: phones, cars, boards and accelerators",
}


def device_groups(specs: Sequence[DeviceSpec], timed: Mapping[str, str]) -> Iterator[tuple[str, list[str]]]:
    """Yield the heading of each group of devices, and their names with RAM; * marks devices with published times.

    Args:
        specs: The catalog.
        timed: Engine of each device with published times, in the catalog or not.
    """
    groups: dict[str, dict[str, str]] = {group: {} for group in _GROUPS}
    for spec in specs:
        group: str = "microcontrollers" if spec.microcontroller else spec.engine
        # A module whose engines compute together is listed with the GPUs.
        groups[group if group in groups else "gpu"][spec.name] = f" {_ram(spec)}" if spec.ram_bytes else ""
    for name in timed.keys() - {spec.name for spec in specs}:
        groups[timed[name]][name] = ""
    for group, names in groups.items():
        marked = (f"{name}{'*' * (name in timed)}{ram}" for name, ram in sorted(names.items()))
        yield f"{_GROUPS[group]} ({len(names)})", list(marked)


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
    notes: list[Note] = [("Device", spec.note), ("Also called", ", ".join(spec.aliases))]
    title = f"{spec.title} ({spec.name}), runs models on its {spec.engine}; from {spec.origin}"
    cited = tuple((mark, source) for source, mark in marks.items())
    known = (note for note in notes if note[1])
    return Sheet(title, (columns,), (*cited, *known, ("Roofline", _bandwidth_sentence(spec))))


def published_times_sheet(spec: DeviceSpec) -> Sheet:
    """Return the published times of a device, each with its run and with what we predict for it."""
    from edge_opt.boards.platforms import compared_times

    times = compared_times(spec)
    runs = [item.published for item in times]
    predictions = [item.predicted for item in times]
    sources = dict.fromkeys(run.figure.source for run in runs)
    marks = {source: f"[{number}]" for number, source in enumerate(sources, start=1)}
    columns = (
        text_column("Model", (run.model for run in runs)),
        text_column("Runtime", map(_runtime, runs), 2),
        column("Threads", (str(run.threads or _UNKNOWN) for run in runs), 3),
        column("Clock", (_known(run.clock_hz, _frequency) for run in runs)),
        column("Published", (units.duration(run.figure.value) for run in runs)),
        column("Predicted", (units.DASH if time is None else units.duration(time.seconds) for time in predictions)),
        column("90 % interval", (units.DASH if time is None else _ends(time.low, time.high) for time in predictions)),
        column("Ratio", (units.DASH if item.ratio is None else f"{item.ratio:.2f}" for item in times)),
        column("Inside", (_INSIDE[item.is_inside] for item in times)),
        column("Source", (marks[run.figure.source] for run in runs), 1),
    )
    notes: list[Note] = [(mark, source) for source, mark in marks.items()]
    compared = [item for item in times if item.is_inside is not None]
    for platform in dict.fromkeys(item.platform for item in compared):
        own = [item for item in compared if item.platform is platform]
        inside = sum(item.is_inside is True for item in own)
        at = "" if platform is None or platform.ghz is None else f" at {platform.ghz:g} GHz"
        what = "" if platform is None else f"{platform.name}, {platform.runtime} of {platform.day}{at}"
        notes.append(("Predicted", f"by {what}: {inside} of {len(own)} published times lie in the 90 % interval"))
    if any(item.is_inside is False for item in compared):
        why = "another clock or runtime version than the prediction's; `edge-opt board` corrects for both by one time"
        notes.append(("Outside", why))
    return Sheet("Published times, and what we predict. Ratio: published over predicted", (columns,), tuple(notes))


_INSIDE = {True: "yes", False: "no", None: units.DASH}


def _runtime(run: KnownLatency) -> str:
    """Return the runtime with its version, or with the day of the publication."""
    when = run.version or run.day or "version unknown"
    return f"{run.runtime} {when}" if run.runtime else _UNKNOWN


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
        ("clock", spec.clock_hz, _frequency),
        *(("RAM", figure, units.size) for figure in spec.ram_bytes),
        ("flash", spec.flash_bytes, units.size),
        *((_where("bandwidth", item.method, item.engine), item.figure, _rate) for item in spec.bandwidths),
        *((_where("peak", item.precision, item.engine), item.figure, _operations) for item in spec.peaks),
        *((f"power, {power.state}", power.figure, lambda value: f"{value:g} W") for power in spec.powers),
        ("overhead per operator", spec.overhead_s, lambda value: f"{value * 1e6:g} µs"),
    ):
        if figure is not None:
            yield row(label, figure, text)


def _ram(spec: DeviceSpec) -> str:
    return units.sizes(list(dict.fromkeys((spec.ram_bytes[0].value, spec.ram_bytes[-1].value))), units.DASH)


def _where(what: str, how: str, engine: str | None) -> str:
    return f"{what}, {how}" + (f" ({engine})" if engine else "")
