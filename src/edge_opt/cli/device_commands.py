"""edge-opt devices, calibrate and doctor."""

from __future__ import annotations

import json as json_format
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edge_opt import units
from edge_opt.cli.shell import Debug, print_result, print_status, result_console, result_width
from edge_opt.errors import InvalidInput
from edge_opt.loading import MODEL_FILES
from edge_opt.report.terminal import Cell, Strip, print_table
from edge_opt.text import printable

if TYPE_CHECKING:
    from edge_opt.boards.platforms import KnownPlatform
    from edge_opt.records.devices import DeviceSpec
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
    specs = eo.devices() if name is None else (find_spec(name),)
    if json:
        plain = [to_plain(spec) for spec in specs]
        typer.echo(json_format.dumps(plain if name is None else plain[0], indent=1, allow_nan=False))
    elif name is None:
        console = result_console(highlight=False)
        print_table(console, list(device_strips(specs)))
        print_status(f"`edge-opt devices NAME` shows one with its sources; your own files go to {user_folder()}")
    else:
        print_result(record_text(specs[0], result_width()))
        print_result(sheet_text(_platforms(specs[0]), result_width()))


def _platforms(spec: DeviceSpec) -> Sheet:
    """Return a table of the device's platforms: basis, held-out error, rows and source."""
    from edge_opt.boards.platforms import platforms as known_platforms
    from edge_opt.report.sheets import Sheet

    platforms = known_platforms(spec)
    sources = dict.fromkeys(platform.source for platform in platforms)
    marks = {source: f"[{number}]" for number, source in enumerate(sources, start=1)}

    def column(header: str, text: Callable[[KnownPlatform], str], rank: int = 0, *, is_name: bool = False) -> Strip:
        cells = tuple(Cell(printable(text(platform))) for platform in platforms)
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
    return Sheet(how, (strips,) if platforms else (), tuple((mark, source) for source, mark in marks.items()))


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
    from edge_opt.report.sheets import record_text

    if on is not None:
        done = _calibrate_board(on, output, threads, seconds)
    else:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_, **__: print_status(f"warning: {message}")
            done = eo.calibrate(threads=threads, seconds=seconds, path=output)
    if json:
        typer.echo(json_format.dumps(_calibrated_figures(done), indent=1, allow_nan=False))
    else:
        print_result(record_text(done, result_width()))
    print_status(f"saved to {output or host_file()}")
    print_status(f"use it: edge-opt profile MODEL --target {output or 'host'}")


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
    print_status(f"calibrating {board.host}; it takes about {seconds:g} s, and nothing else should run there")
    write_whole(output, board.calibrate(threads, seconds).decode("utf-8"))
    return load_calibration(output)


def _calibrated_figures(done: Calibration) -> dict[str, object]:
    """Return the figures of a calibration for `--json`, without its thousands of samples."""
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


def doctor(
    seconds: Annotated[float, typer.Option("--seconds", help="Longest time to measure the noise.")] = 5.0,
    json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
    debug: Debug = False,
) -> None:
    """This machine: versions, threads, governor, energy meters and why each is or isn't usable, and its noise."""
    from edge_opt.measuring.diagnosis import diagnose
    from edge_opt.report.sheets import record_text

    diagnosis = diagnose(seconds)
    if json:
        typer.echo(json_format.dumps(asdict(diagnosis), indent=2))
    else:
        print_result(record_text(diagnosis, result_width()))
