"""edge-opt devices, calibrate and doctor."""

from __future__ import annotations

import json as json_format
import json as json_text
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edge_opt import units
from edge_opt.cli.shell import Debug, result_console, result_width, say, talk
from edge_opt.errors import InvalidInput
from edge_opt.loading import MODEL_FILES
from edge_opt.report.terminal import Cell, Strip, print_sentences, print_table
from edge_opt.text import printable

if TYPE_CHECKING:
    from edge_opt.boards.known_platforms import KnownPlatform
    from edge_opt.records.devices import DeviceSpec
    from edge_opt.records.measurements import Diagnosis, Facility
    from edge_opt.records.predictions import Calibration
    from edge_opt.report.sheets import Sheet


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
    from edge_opt.report.sheets import record_text, sheet_text
    from edge_opt.report.target_tables import device_strips

    if name is not None and name.lower().endswith(MODEL_FILES):
        raise InvalidInput(f"{name!r} is a model; `edge-opt profile {name} -t NAME` says what it takes on a device")
    found = eo.devices() if name is None else (find_spec(name),)
    if json:
        plain = [to_plain(spec) for spec in found]
        typer.echo(json_format.dumps(plain if name is None else plain[0], indent=1, allow_nan=False))
    elif name is None:
        console = result_console(highlight=False)
        print_table(console, list(device_strips(found)))
        talk(f"`edge-opt devices NAME` shows one with its sources; your own files go to {user_folder()}")
    else:
        say(record_text(found[0], result_width()))
        say(sheet_text(_platforms(found[0]), result_width()))


def _platforms(spec: DeviceSpec) -> Sheet:
    """What is known of the device's platforms: basis, held-out error, rows and source."""
    from edge_opt.boards.known_platforms import by_figures, fitted_known
    from edge_opt.report.sheets import Sheet

    found = [*fitted_known(spec), *by_figures(spec)]
    marks = {source: f"[{place}]" for place, source in enumerate(dict.fromkeys(item.source for item in found), start=1)}

    def column(header: str, text: Callable[[KnownPlatform], str], rank: int = 0, *, is_name: bool = False) -> Strip:
        cells = tuple(Cell(printable(text(item))) for item in found)
        return Strip(header, cells, "left" if is_name else "right", 12 if is_name else None, rank)

    strips = (
        column("Platform", lambda item: item.name, is_name=True),
        column("Basis", lambda item: item.basis or "no time"),
        column("Off", lambda item: "" if item.error is None else units.percent(item.error)),
        column("Times", lambda item: str(item.rows or ""), 3),
        column("Day", lambda item: (item.day or "") if item.rows else "", 4),
        column("Source", lambda item: marks[item.source]),
    )
    how = "Platforms: an estimate takes the first one that answers. Off: median error on nets left out of the fit"
    return Sheet(how, (strips,) if found else (), tuple((mark, source) for source, mark in marks.items()))


def calibrate(
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Where to save it; without, as this host's own.")
    ] = None,
    threads: Annotated[
        int | None, typer.Option("--threads", help="Threads to measure with; torch's own number.")
    ] = None,
    seconds: Annotated[float, typer.Option("--seconds", help="CPU seconds it may take, at most 120.")] = 110.0,
    on: Annotated[
        str | None, typer.Option("--on", metavar="USER@HOST", help="Calibrate this board, over ssh, instead.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
    debug: Debug = False,
) -> None:
    """Measure this machine, or a board: bandwidth, peaks, overheads, and thousands of operators.

    \b
    edge-opt calibrate
    edge-opt calibrate --threads 1 -o board.json
    edge-opt calibrate --on pi@raspberrypi -o board.json

    Let nothing else run meanwhile. The file can be carried to another machine and named there as a target. With --on,
    edge-opt and torch must be installed on the board.
    """
    import edge_opt as eo
    from edge_opt.calibration.calibration_file import host_file

    if on is not None:
        done = _calibrate_board(on, output, threads, seconds)
    else:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_, **__: talk(f"warning: {message}")
            done = eo.calibrate(threads=threads, seconds=seconds, path=output)
    if json:
        typer.echo(json_format.dumps(_calibrated_figures(done), indent=1, allow_nan=False))
    else:
        for line in _lines(done):
            typer.echo(line)
    talk(f"saved to {output or host_file()}")
    talk(f"use it: edge-opt profile MODEL --target {output or 'host'}")


def _calibrate_board(address: str, output: Path | None, threads: int | None, seconds: float) -> Calibration:
    """Calibrate a board over ssh, and write its file here."""
    from edge_opt._support.checks import check_whole
    from edge_opt._support.files import check_writable, write_whole
    from edge_opt.calibration.calibration_file import load_calibration
    from edge_opt.measuring.ssh_board import parse_board

    if output is None:
        raise InvalidInput("a board's calibration is not this host's own; name its file, as in -o board.json")
    if threads is not None:
        check_whole("--threads", threads)
    check_writable(output)
    board = parse_board(address)
    talk(f"calibrating {board.host}; it takes about {seconds:g} s, and nothing else should run there")
    write_whole(output, board.calibrate(threads, seconds).decode("utf-8"))
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
        **({"remarks": list(done.remarks)} if done.remarks else {}),
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
    for remark in done.remarks:
        yield f"disturbed            {remark}"


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
    console = result_console(highlight=False)
    for title, rows in (
        ("Machine", machine_rows(found)),
        ("Versions", [(name, number or "not installed") for name, number in found.versions]),
        ("Devices", facility_rows(found.devices)),
        ("Energy meters", facility_rows(found.meters)),
        ("Noise", noise_rows(found)),
    ):
        console.print(title, style="bold")
        print_sentences(console, rows)
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
