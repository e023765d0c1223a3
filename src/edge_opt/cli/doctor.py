"""`edge-opt doctor`: what a measurement on this machine would rest on."""

from __future__ import annotations

import json as json_text
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from edge_opt import units

if TYPE_CHECKING:
    from collections.abc import Iterator

    from edge_opt.records import Diagnosis, Facility

Row = tuple[str, str]


def doctor(
    seconds: Annotated[float, typer.Option("--seconds", help="Longest time to measure the noise.")] = 5.0,
    json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """This machine: versions, threads, governor, energy meters and why each is or isn't usable, and its noise."""
    from edge_opt.measure.diagnosis import diagnose

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
