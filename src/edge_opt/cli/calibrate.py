"""`edge-opt calibrate`: this machine measured, so that predictions for it have something to stand on."""

from __future__ import annotations

import json as json_format
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edge_opt import units
from edge_opt.cli.shell import Debug, talk

if TYPE_CHECKING:
    from edge_opt.records import Calibration


def calibrate(
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Where to save it; without, as this host's own.")
    ] = None,
    threads: Annotated[
        int | None, typer.Option("--threads", help="Threads to measure with; torch's own number.")
    ] = None,
    seconds: Annotated[float, typer.Option("--seconds", help="CPU seconds it may take, at most 120.")] = 110.0,
    json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
    debug: Debug = False,
) -> None:
    """Measure this machine: bandwidth, peaks, overheads, and thousands of operators.

    \b
    edge-opt calibrate
    edge-opt calibrate --threads 1 -o board.json

    Let nothing else run meanwhile. The file can be carried to another machine and named there as a target.
    """
    import edge_opt as eo
    from edge_opt.devices.calibration_files import host_file

    done = eo.calibrate(threads=threads, seconds=seconds, path=output)
    if json:
        typer.echo(json_format.dumps(_figures(done), indent=1, allow_nan=False))
    else:
        for line in _lines(done):
            typer.echo(line)
    talk(f"saved to {output or host_file()}")
    talk(f"use it: edge-opt profile MODEL --target {output or 'host'}")


def _figures(done: Calibration) -> dict[str, object]:
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
