"""Devices as tables: the catalogue, and one device with every figure and its source."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from edge_opt import units
from edge_opt.records import DeviceSpec, Figure
from edge_opt.report.sheets import Fact, Sheet
from edge_opt.report.terminal import Cell, Strip
from edge_opt.text import printable

_UNKNOWN = units.DASH


def device_strips(specs: Sequence[DeviceSpec]) -> Iterator[Strip]:
    """The catalogue, one row per device."""
    from edge_opt.boards.roofline import used_bandwidth

    def column(header: str, text: Callable[[DeviceSpec], str], rank: int = 0) -> Strip:
        return Strip(header, tuple(Cell(text(spec)) for spec in specs), rank=rank)

    def peak(precision: str) -> Callable[[DeviceSpec], str]:
        return lambda spec: _text(spec.peak(spec.engine, precision), _operations)

    def used(spec: DeviceSpec) -> str:
        bandwidth = used_bandwidth(spec, spec.engine)
        return _UNKNOWN if bandwidth is None else _rate(bandwidth.bytes_per_s)

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
    return units.sizes(sizes, units.DASH) or _UNKNOWN


def _power(spec: DeviceSpec) -> str:
    watts = [power.figure.value for power in spec.powers]
    ends = list(dict.fromkeys((min(watts), max(watts)))) if watts else []
    return f"{units.DASH.join(f'{value:g}' for value in ends)} W" if ends else _UNKNOWN


def _where(what: str, how: str, engine: str | None) -> str:
    return f"{what}, {how}" + (f" ({engine})" if engine else "")


def _text(figure: Figure | None, text: Callable[[float], str]) -> str:
    return _UNKNOWN if figure is None else text(figure.value)


def _rate(bytes_per_s: float) -> str:
    return f"{units.count(bytes_per_s)}B/s"


def _operations(ops_per_s: float) -> str:
    return f"{units.count(ops_per_s)}OP/s"
