"""`edge-opt devices`: what is known about devices, and who says so."""

from __future__ import annotations

import json as json_format
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from edge_opt import units
from edge_opt.cli.shell import Debug, result_console, talk
from edge_opt.report.grid import Cell, Strip, grid
from edge_opt.report.text import printable

if TYPE_CHECKING:
    from edge_opt.records import DeviceSpec, Figure

_UNKNOWN = units.DASH


def devices(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="A name, an alias, or a .toml or .json file of your own.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the records as JSON.")] = False,
    debug: Debug = False,
) -> None:
    """The devices there are, or everything known about one, with sources.

    \b
    edge-opt devices
    edge-opt devices raspberry-pi-4
    edge-opt devices my-board.toml --json
    """
    import edge_opt as eo
    from edge_opt.devices.catalog import user_folder
    from edge_opt.report.codec import to_plain

    found = eo.devices() if name is None else (eo.device(name),)
    if json:
        plain = [to_plain(spec) for spec in found]
        typer.echo(json_format.dumps(plain if name is None else plain[0], indent=1, allow_nan=False))
    elif name is None:
        _show_table(found)
        talk(f"`edge-opt devices NAME` shows one with its sources; your own files go to {user_folder()}")
    else:
        for line in _details(found[0]):
            _echo(line)


def _show_table(specs: Sequence[DeviceSpec]) -> None:
    console = result_console(highlight=False)
    for line in grid(list(_strips(specs)), console.width):
        if console.options.ascii_only:
            _echo(line.plain)
        else:
            console.print(line, soft_wrap=True)


def _echo(line: str) -> None:
    """Print a line, with a question mark for what the terminal cannot show."""
    encoding = sys.stdout.encoding or "utf-8"
    typer.echo(line.encode(encoding, "replace").decode(encoding))


def _strips(specs: Sequence[DeviceSpec]) -> Iterator[Strip]:
    from edge_opt.devices.roofline import used_bandwidth

    def column(header: str, text: Callable[[DeviceSpec], str], rank: int = 0) -> Strip:
        return Strip(header, tuple(Cell(text(spec)) for spec in specs), rank=rank)

    def peak(precision: str) -> Callable[[DeviceSpec], str]:
        return lambda spec: _text(spec.peak(spec.engine, precision), _operations)

    def used(spec: DeviceSpec) -> str:
        bandwidth = used_bandwidth(spec, spec.engine)
        return _UNKNOWN if bandwidth is None else _rate(bandwidth.bytes_per_s)

    yield Strip("Device", tuple(Cell(printable(spec.name)) for spec in specs), "left")
    yield column("Runs on", lambda spec: spec.engine)
    yield column("RAM", _ram)
    yield column("On paper", lambda spec: _text(spec.bandwidth("datasheet"), _rate), rank=1)
    yield column("Used", used)
    yield column("fp32", peak("fp32"))
    yield column("fp16", peak("fp16"), rank=3)
    yield column("int8", peak("int8"))
    yield column("Power", _power, rank=2)


def _ram(spec: DeviceSpec) -> str:
    sizes = list(dict.fromkeys((spec.ram_bytes[0].value, spec.ram_bytes[-1].value))) if spec.ram_bytes else []
    return units.DASH.join(map(units.size, sizes)) or _UNKNOWN


def _power(spec: DeviceSpec) -> str:
    watts = [power.figure.value for power in spec.powers]
    ends = list(dict.fromkeys((min(watts), max(watts)))) if watts else []
    return f"{units.DASH.join(f'{value:g}' for value in ends)} W" if ends else _UNKNOWN


def _details(spec: DeviceSpec) -> Iterator[str]:
    """One line per figure: what, how much, how its source knows, and the source."""
    from edge_opt.devices.roofline import used_bandwidth

    yield printable(f"{spec.title} ({spec.name}), runs models on its {spec.engine}; from {spec.origin}")
    if spec.note:
        yield printable(spec.note)
    yield ""
    rows = list(_figures(spec))
    label_width = max((len(label) for label, _, _ in rows), default=0)
    text_width = max((len(text) for _, text, _ in rows), default=0)
    for label, text, figure in rows:
        yield f"{label:<{label_width}}  {text:>{text_width}}  {figure.kind:<9}  {printable(figure.source)}"
    bandwidth = used_bandwidth(spec, spec.engine)
    yield ""
    if bandwidth is None:
        why = spec.bandwidth_unknown or f"no figure for the {spec.engine}, and none on paper"
        yield printable(f"A roofline uses no bandwidth, for it is unknown: {why}")
    else:
        yield f"A roofline uses {_rate(bandwidth.bytes_per_s)}: {bandwidth.reading}"


def _figures(spec: DeviceSpec) -> Iterator[tuple[str, str, Figure]]:
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


def _where(what: str, how: str, engine: str | None) -> str:
    return f"{what}, {how}" + (f" ({engine})" if engine else "")


def _text(figure: Figure | None, text: Callable[[float], str]) -> str:
    return _UNKNOWN if figure is None else text(figure.value)


def _rate(bytes_per_s: float) -> str:
    return f"{units.count(bytes_per_s)}B/s"


def _operations(ops_per_s: float) -> str:
    return f"{units.count(ops_per_s)}OP/s"
