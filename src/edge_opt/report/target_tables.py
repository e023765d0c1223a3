"""Targets as tables: several side by side for one model, the catalogue, and one device with every figure's source."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from edge_opt import units
from edge_opt.records.devices import DeviceSpec, Figure
from edge_opt.records.predictions import TargetComparison, TargetFit
from edge_opt.report.sheets import Fact, Sheet
from edge_opt.report.terminal import Cell, Strip
from edge_opt.text import printable

if TYPE_CHECKING:
    import pandas as pd

_UNKNOWN = "unknown"


def target_sheet(found: TargetComparison) -> Sheet:
    """Return one row per target, then what the model needs, with every remark and source."""
    return Sheet("", (tuple(target_strips(found)),), tuple(target_facts(found)))


def brief_target_sheet(found: TargetComparison) -> Sheet:
    """Return the same in few lines: how many remarks there are instead of each."""
    return Sheet("", (tuple(target_strips(found)),), tuple(_first_facts(found)))


def target_strips(found: TargetComparison) -> Iterator[Strip]:
    """One row per target."""

    def column(header: str, text: Callable[[TargetFit], str], rank: int = 0) -> Strip:
        return Strip(header, tuple(Cell(text(fit)) for fit in found.targets), rank=rank)

    yield Strip("Target", tuple(Cell(printable(fit.prediction.target)) for fit in found.targets), "left", floor=22)
    yield column("Fits", _fits)
    yield column("Time", _time)
    yield column("90 % interval", _interval, rank=1)
    yield column("Bound by", lambda fit: fit.prediction.bound, rank=4)
    yield column("Est. energy", _energy, rank=3)
    yield column("Batch", _batch, rank=2)
    yield column("Basis", lambda fit: fit.prediction.basis, rank=5)


def target_facts(found: TargetComparison) -> Iterator[tuple[str, str]]:
    """Everything there is to know about the figures, a sentence each."""
    yield "Model", model_sentence(found)
    need = found.memory
    buffers = f"buffers {units.size(need.buffer_bytes)}, " if need.buffer_bytes else ""
    yield (
        "Memory",
        f"{units.size(need.total_bytes)}: weights {units.size(need.weight_bytes)}, {buffers}"
        f"inputs {units.size(need.input_bytes)}, peak of activations {units.size(need.activation_bytes)}; "
        "an operating system and a runtime come on top",
    )
    yield from (("Note", note) for note in found.notes)


def _fits(fit: TargetFit) -> str:
    if fit.fits is None:
        return _UNKNOWN
    if fit.fits:
        return "yes"
    sizes = fit.fitting_ram_bytes
    return f"from {units.size(sizes[0])} on" if sizes else "no"


def _time(fit: TargetFit) -> str:
    return _UNKNOWN if fit.prediction.seconds is None else units.duration(fit.prediction.seconds)


def _interval(fit: TargetFit) -> str:
    low, high = fit.prediction.low, fit.prediction.high
    if low is None:
        return units.DASH
    return f"{units.duration(low)} {units.DASH} {'?' if high is None else units.duration(high)}"


def _energy(fit: TargetFit) -> str:
    energies = fit.prediction.energies
    return units.energy(energies[0].joules) if energies else _UNKNOWN


def _batch(fit: TargetFit) -> str:
    if fit.batch is None:
        return _UNKNOWN
    if not fit.batch.fits:
        return f"none: {units.size(fit.batch.shortfall_bytes or 0)} short"
    return f"≥ {fit.batch.batch}" if fit.batch.shortfall_bytes is None else str(fit.batch.batch)


def model_sentence(found: TargetComparison) -> str:
    """What was asked about."""
    return f"{found.model} on {', '.join(map(units.shape, found.inputs))} in {found.precision}"


def _first_facts(found: TargetComparison) -> Iterator[tuple[str, str]]:
    """Three lines: the model, its memory, and how much more there is to know; before that, why a time is missing."""
    yield "Model", model_sentence(found)
    need = found.memory
    yield (
        "Memory",
        f"{units.size(need.total_bytes)}, {units.size(need.weight_bytes)} of it weights; kernels' scratch on top",
    )
    count = len(found.notes)
    if not count:
        return
    unknown = next((fit.prediction for fit in found.targets if fit.prediction.seconds is None), None)
    if unknown is None or not unknown.remarks:
        yield "Note", f"{count} remark{'s' * (count != 1)} and sources: -v, or .notes in Python"
        return
    why = unknown.remarks[0].partition(" (")[0].partition(", so ")[0].replace(f" of {unknown.target}", "")
    yield "Note", f"{unknown.target}: {why}; {count} remarks: -v, or .notes"


def dataframe(found: TargetComparison) -> pd.DataFrame:
    """One row per target; exact numbers, None where a figure is not known."""
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
        for fit in found.targets
    )


def device_strips(specs: Sequence[DeviceSpec]) -> Iterator[Strip]:
    """The catalogue, one row per device."""
    from edge_opt.boards.roofline import used_bandwidth

    def column(header: str, text: Callable[[DeviceSpec], str], rank: int = 0) -> Strip:
        return Strip(header, tuple(Cell(text(spec)) for spec in specs), rank=rank)

    def peak(precision: str) -> Callable[[DeviceSpec], str]:
        return lambda spec: _text(spec.peak(spec.engine, precision), _operations)

    def used(spec: DeviceSpec) -> str:
        bandwidth = used_bandwidth(spec, spec.engine)
        return units.DASH if bandwidth is None else _rate(bandwidth.bytes_per_s)

    yield Strip("Device", tuple(Cell(printable(spec.name)) for spec in specs), "left", floor=22)
    yield column("Runs on", lambda spec: spec.engine, rank=4)
    yield column("RAM", _ram)
    yield column("On paper", lambda spec: _text(spec.bandwidth("datasheet"), _rate), rank=5)
    yield column("Used", used, rank=1)
    yield column("fp32", peak("fp32"))
    yield column("fp16", peak("fp16"), rank=6)
    yield column("int8", peak("int8"), rank=2)
    yield column("Power", _power, rank=3)


def device_sheet(spec: DeviceSpec) -> Sheet:
    """One device: a row per figure with how its source knows it, and the source."""
    rows = list(figures(spec))
    sources = list(dict.fromkeys(figure.source for _, _, figure in rows))
    marks = {source: f"[{number}]" for number, source in enumerate(sources, start=1)}
    strips = (
        Strip("Figure", tuple(map(Cell, _numbered([label for label, _, _ in rows]))), "left", floor=14),
        Strip("Value", tuple(Cell(text) for _, text, _ in rows)),
        Strip("Known", tuple(Cell(figure.kind) for _, _, figure in rows), "left", rank=1),
        Strip("Source", tuple(Cell(marks[figure.source]) for _, _, figure in rows)),
    )
    facts: list[Fact] = [("Device", spec.note)] if spec.note else []
    title = f"{spec.title} ({spec.name}), runs models on its {spec.engine}; from {spec.origin}"
    cited = tuple((mark, source) for source, mark in marks.items())
    return Sheet(title, (strips,) if rows else (), (*cited, *facts, ("Roofline", bandwidth_sentence(spec))))


def _numbered(labels: Sequence[str]) -> Iterator[str]:
    """The labels; where several are alike, such as sizes of RAM, with their number."""
    for place, label in enumerate(labels):
        yield label if labels.count(label) == 1 else f"{label} ({labels[: place + 1].count(label)})"


def bandwidth_sentence(spec: DeviceSpec) -> str:
    """The bandwidth that a roofline stands on, or why there is none."""
    from edge_opt.boards.roofline import used_bandwidth

    bandwidth = used_bandwidth(spec, spec.engine)
    if bandwidth is None:
        why = spec.bandwidth_unknown or f"no figure for the {spec.engine}, and none on paper"
        return f"A roofline uses no bandwidth, for it is unknown: {why}"
    return f"A roofline uses {_rate(bandwidth.bytes_per_s)}: {bandwidth.reading}"


def figures(spec: DeviceSpec) -> Iterator[tuple[str, str, Figure]]:
    """Every figure of a device: what it is, the value for people, and the record."""

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
