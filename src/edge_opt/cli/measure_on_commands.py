"""edge-opt worker and measure-on: a board that times."""

from __future__ import annotations

import json as json_text
from pathlib import Path
from typing import Annotated

import typer

from edge_opt import units
from edge_opt.cli.arguments import Inputs, read_arguments
from edge_opt.cli.run_commands import Insecure, TlsDir
from edge_opt.cli.shell import Debug, talk
from edge_opt.errors import InvalidInput

Address = Annotated[str, typer.Argument(metavar="ADDRESS", help="The Dask scheduler: tls://HOST:PORT.")]


def worker(
    address: Address,
    tls_dir: TlsDir = None,
    insecure: Insecure = False,
    name: Annotated[str | None, typer.Option("--name", help="What this board is called there.")] = None,
    debug: Debug = False,
) -> None:
    """On a board: time what is sent here, with the ONNX Runtime of this machine, until Ctrl-C. It needs no torch.

    \b
    edge-opt worker tls://workstation:8786 --tls-dir certificates
    """
    from edge_opt.search.board_worker import serve

    serve(address, tls_dir=tls_dir, insecure=insecure, name=name, say=talk)


def measure_on(
    address: Address,
    file: Annotated[Path, typer.Argument(metavar="FILE.onnx", help="What to time.")],
    inputs: Inputs = None,
    batch: Annotated[int, typer.Option("--batch", "-b", help="Samples in one call.")] = 1,
    threads: Annotated[int, typer.Option("--threads", help="Of ONNX Runtime there; 0 is all cores.")] = 1,
    min_time: Annotated[float, typer.Option("--min-time", metavar="S", help="Least seconds to measure.")] = 1.0,
    tls_dir: TlsDir = None,
    insecure: Insecure = False,
    json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
    debug: Debug = False,
) -> None:
    """Time an ONNX file on a board that runs `edge-opt worker`, and say how long it takes there.

    \b
    edge-opt measure-on tls://localhost:8786 net.onnx --tls-dir certificates --threads 4
    edge-opt measure-on tls://localhost:8786 bert.onnx -i ids:1x128:int64 -i mask:1x128:int64
    """
    from edge_opt._support.checks import check_whole
    from edge_opt._support.json import to_plain
    from edge_opt.measuring.onnx_timing import TimingOrder
    from edge_opt.search.board_worker import find_board

    check_whole("--threads", threads, 0)
    check_whole("--batch", batch)
    if not file.is_file():
        raise InvalidInput(f"there is no file {str(file)!r}; `edge-opt export` writes one")
    given = read_arguments(inputs or [], [], None)
    if given.positional:
        raise InvalidInput("--input must name its input, as in ids:1x128:int64; the file has several")
    shapes = tuple((name, tuple(spec.shape)) for name, spec in given.named.items())
    order = TimingOrder((file.name,), (batch,), shapes, threads, min_time, 5 * min_time)
    board = find_board(address, tls_dir, insecure)
    talk(f"timed on {board.machine}")
    found = board.time(order, {file.name: file.read_bytes()}, tell=lambda event: talk(str(getattr(event, "text", ""))))
    latency = found.latency(file.name, batch)
    if json:
        typer.echo(json_text.dumps({"file": str(file), "threads": threads, **to_plain(found)}, indent=1))
        return
    ends = latency.median_interval_s
    each = "" if batch == 1 else f" per batch of {batch}"
    typer.echo(
        f"{file.name}: {units.duration(latency.median_s)}{each} (95 %: {units.duration(ends.low)} to "
        f"{units.duration(ends.high)}) on {found.machine}, {threads or 'all'} thread{'s' * (threads != 1)}"
    )
    for remark in latency.remarks:
        typer.echo(remark)
