"""edge-opt devices, calibrate and doctor."""

from __future__ import annotations

import json as json_format
import json as json_text
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edge_opt import units
from edge_opt.cli.run_commands import Insecure, TlsDir
from edge_opt.cli.shell import Debug, result_console, talk
from edge_opt.errors import InvalidInput
from edge_opt.report.terminal import Cell, Strip, grid
from edge_opt.text import printable

if TYPE_CHECKING:
    from edge_opt.records import Calibration, DeviceSpec, Diagnosis, Facility, Figure


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
    from edge_opt._support.json import to_plain
    from edge_opt.boards.catalog import user_folder
    from edge_opt.boards.targets import find_spec

    found = eo.devices() if name is None else (find_spec(name),)
    if json:
        plain = [to_plain(spec) for spec in found]
        typer.echo(json_format.dumps(plain if name is None else plain[0], indent=1, allow_nan=False))
    elif name is None:
        _show_table(found)
        talk(f"`edge-opt devices NAME` shows one with its sources; your own files go to {user_folder()}")
    else:
        for line in (*_details(found[0]), *_platforms(found[0])):
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
    from edge_opt.boards.roofline import used_bandwidth

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
    from edge_opt.boards.roofline import used_bandwidth

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


def _platforms(spec: DeviceSpec) -> Iterator[str]:
    """What is known of the device's platforms, one line each: basis, held-out error, rows and source."""
    from edge_opt.boards.known_platforms import by_figures, fitted_known

    found = [*fitted_known(spec), *by_figures(spec)]
    width = max((len(item.name) for item in found), default=0)
    yield ""
    yield "Platforms; estimates take the first that fits what is asked for:"
    for item in found:
        error = "" if item.error is None else f"{units.percent(item.error)} off when held out, "
        rows = f"{error}{item.rows} times, {item.day}, " if item.rows else ""
        yield printable(f"{item.name:<{width}}  {item.basis or 'no time'}: {rows}{item.source}")


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


def calibrate(
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Where to save it; without, as this host's own.")
    ] = None,
    threads: Annotated[
        int | None, typer.Option("--threads", help="Threads to measure with; torch's own number.")
    ] = None,
    seconds: Annotated[float, typer.Option("--seconds", help="CPU seconds it may take, at most 120.")] = 110.0,
    on: Annotated[
        str | None, typer.Option("--on", metavar="tls://…", help="Measure the board that has joined this scheduler.")
    ] = None,
    tls_dir: TlsDir = None,
    insecure: Insecure = False,
    json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
    debug: Debug = False,
) -> None:
    """Measure this machine, or a board: bandwidth, peaks, overheads, and thousands of operators.

    \b
    edge-opt calibrate
    edge-opt calibrate --threads 1 -o board.json
    edge-opt calibrate --on tls://localhost:8786 --tls-dir certificates -o board.json

    Let nothing else run meanwhile. The file can be carried to another machine and named there as a target. With --on,
    torch must be installed on the board, which runs `edge-opt worker`.
    """
    import edge_opt as eo
    from edge_opt.boards.calibration_file import host_file

    if on is not None:
        done = _calibrated_there(on, tls_dir, insecure, output, threads, seconds)
    else:
        done = eo.calibrate(threads=threads, seconds=seconds, path=output)
    if json:
        typer.echo(json_format.dumps(_calibrated_figures(done), indent=1, allow_nan=False))
    else:
        for line in _lines(done):
            typer.echo(line)
    talk(f"saved to {output or host_file()}")
    talk(f"use it: edge-opt profile MODEL --target {output or 'host'}")


def _calibrated_there(
    address: str, tls_dir: Path | None, insecure: bool, output: Path | None, threads: int | None, seconds: float
) -> Calibration:
    """A board's calibration, written here."""
    from edge_opt._support.checks import check_whole
    from edge_opt._support.files import write_whole
    from edge_opt.boards.calibration_file import load_calibration
    from edge_opt.search.board_worker import find_board

    if output is None:
        raise InvalidInput("a board's calibration is not this host's own; name its file, as in -o board.json")
    if threads is not None:
        check_whole("--threads", threads)
    board = find_board(address, tls_dir, insecure)
    talk(f"calibrating {board.machine}; it takes about {seconds:g} s, and nothing else should run there")
    found = board.calibrate(threads, seconds, tell=lambda event: talk(str(getattr(event, "text", ""))))
    write_whole(output, found.decode("utf-8"))
    return load_calibration(output)


def _calibrated_figures(done: Calibration) -> dict[str, object]:
    return {
        "name": done.name,
        "created": done.created,
        "cpu": done.machine.cpu,
        "threads": done.machine.threads,
        "torch": done.machine.torch,
        "load_1min": done.machine.load_1min,
        "cpu_seconds": done.cpu_seconds,
        "samples": len(done.samples),
        "references": len(done.references),
        "peaks_ops_per_s": {f"{item.work} {item.precision}": item.ops_per_s for item in done.peaks},
        "bandwidths_bytes_per_s": {str(item.working_set_bytes): item.bytes_per_s for item in done.bandwidths},
        "overhead_per_operator_s": done.overhead_per_operator_s,
        "overhead_per_module_s": done.overhead_per_module_s,
        "error_of_held_out_models": done.whole_deviation,
    }


def _lines(done: Calibration) -> Iterator[str]:
    machine = done.machine
    yield f"{machine.cpu}, {machine.threads} thread(s), torch {machine.torch}"
    load = "unknown" if machine.load_1min is None else f"{machine.load_1min:.2f}"
    yield f"load at the start    {load}"
    for precision in dict.fromkeys(item.precision for item in done.peaks):
        figures = (
            f"{item.work} {units.count(item.ops_per_s)}OP/s" for item in done.peaks if item.precision == precision
        )
        yield f"{precision:<20} {', '.join(figures)}"
    for item in done.bandwidths[::3]:
        yield f"copy within {units.size(item.working_set_bytes):<8} {units.count(item.bytes_per_s)}B/s"
    yield (
        f"overhead             {units.duration(done.overhead_per_operator_s)} per operator, "
        f"{units.duration(done.overhead_per_module_s)} per module call"
    )
    largest = max(done.fresh_outputs, key=lambda item: item.nbytes)
    yield (
        f"fresh {units.size(largest.nbytes):<14} {units.duration(largest.fresh_s)} to write, "
        f"{units.duration(largest.reused_s)} where the memory was in use before"
    )
    in_place = sum(sample.origin is not None for sample in done.samples)
    yield (
        f"operators sampled    {len(done.samples)}, {in_place} of them inside {len(done.references)} runs of reference "
        f"models, in {done.cpu_seconds:.0f} s of CPU time"
    )


Row = tuple[str, str]


def doctor(
    seconds: Annotated[float, typer.Option("--seconds", help="Longest time to measure the noise.")] = 5.0,
    json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """This machine: versions, threads, governor, energy meters and why each is or isn't usable, and its noise."""
    from edge_opt.measuring.diagnosis import diagnose

    found = diagnose(seconds)
    if json:
        typer.echo(json_text.dumps(asdict(found), indent=2))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    for title, rows in (
        ("Machine", machine_rows(found)),
        ("Versions", [(name, number or "not installed") for name, number in found.versions]),
        ("Devices", facility_rows(found.devices)),
        ("Energy meters", facility_rows(found.meters)),
        ("Noise", noise_rows(found)),
    ):
        table = Table(title=title, title_justify="left", title_style="bold", show_header=False, box=None)
        for name, value in rows:
            table.add_row(Text(name), Text(value))
        console.print(table)
        console.print()


def machine_rows(found: Diagnosis) -> list[Row]:
    """The machine and the process."""
    environment = found.environment
    load = "not known" if environment.load_1min is None else f"{environment.load_1min:.2f}"
    return [
        ("cpu", f"{environment.cpu} ({found.cpu_capability})"),
        ("cores", str(environment.cores)),
        ("threads", f"{environment.threads} inside an operator, {found.interop_threads} between operators"),
        ("governor", environment.governor or "not known: this kernel does not show it"),
        ("load", f"{load} in the last minute"),
        ("memory", units.size(environment.memory_bytes)),
        ("system", environment.system),
        ("python", environment.python),
    ]


def facility_rows(facilities: tuple[Facility, ...]) -> list[Row]:
    """Each device or meter with `usable`, or the reason why it is not."""
    return [(item.name, "usable" if item.refusal is None else f"no: {item.refusal}") for item in facilities]


def noise_rows(found: Diagnosis) -> list[Row]:
    """How far a latency measured now could be trusted, and why not further."""
    return list(_noise_rows(found))


def _noise_rows(found: Diagnosis) -> Iterator[Row]:
    noise, ratio = found.noise, found.repetition.ratio_interval
    half_width = (noise.median_interval_s.high - noise.median_interval_s.low) / 2 / noise.median_s
    yield "verdict", _verdict(noise.is_noisy, noise.is_contended)
    yield "median", f"known to ±{units.percent(half_width)} after {len(noise.samples_s)} blocks"
    yield "slow tail", f"p99 is {noise.p99_s / noise.median_s:.2f} × the median"
    yield "again", f"the same work took {ratio.low:.3f} to {ratio.high:.3f} × as long ({found.repetition.clock} time)"
    for remark in noise.remarks:
        yield "remark", remark


def _verdict(is_noisy: bool, is_contended: bool) -> str:
    if is_contended:
        return "busy: other programs run here, and latencies measured now are those of a shared machine"
    return "noisy: expect wide intervals" if is_noisy else "quiet: good to measure on"
