"""edge-opt board and measure-on: a board of your own, and one that measures."""

from __future__ import annotations

import json as json_format
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edge_opt import units
from edge_opt._support.progress import report_progress
from edge_opt.cli.arguments import Inputs, read_arguments, with_example
from edge_opt.cli.shell import Debug, Trust, print_status
from edge_opt.errors import InvalidInput
from edge_opt.loading import load_model

if TYPE_CHECKING:
    from edge_opt.boards.class_costs import ModelWork
    from edge_opt.boards.platform_file import Platform
    from edge_opt.boards.platforms import Suggestion
    from edge_opt.records.profiles import ModelProfile

    Net = ModelProfile | ModelWork


_SHAPE = "1x3x224x224"
_FORM = "write NET=MS or NET@SHAPE=MS, such as squeezenet1_1=21.4 or net.py:Net@1x3x32x32=3.2"


def board(
    name: Annotated[str, typer.Argument(metavar="NAME", help="What to call the board.")],
    time: Annotated[
        list[str] | None,
        typer.Option("--time", metavar="NET=MS", help=f"What a net took there, in ms; NET@SHAPE unless {_SHAPE}."),
    ] = None,
    like: Annotated[
        str | None, typer.Option("--like", metavar="DEVICE", help="A device, or a platform, with the same core.")
    ] = None,
    threads: Annotated[int | None, typer.Option("--threads", help="Threads that the nets were timed with.")] = None,
    precision: Annotated[str, typer.Option("--precision", help="That the nets ran in: fp32 or int8.")] = "fp32",
    runtime: Annotated[str, typer.Option("--runtime", metavar="NAME", help="What ran them, for the record.")] = "typed",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Where to save it; NAME.toml unless given.")
    ] = None,
    export: Annotated[
        Path | None,
        typer.Option("--export", metavar="DIR", help="Write the nets to time next as ONNX, and how to time them."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the platform as JSON.")] = False,
    trust: Trust = False,
    debug: Debug = False,
) -> None:
    """A board of your own from a few times: three to eight nets, timed there with any runtime by any tool.

    \b
    edge-opt board my-board --like raspberry-pi-5 --time squeezenet1_1=21.4 --time resnet18=55 --threads 4
    edge-opt profile net.py:Net -i 1x3x32x32 --target my-board.toml
    edge-opt board my-board --like raspberry-pi-5 --export nets/

    A net is bundled, such as squeezenet1_1 or resnet18 of torchvision, or a reference as in `edge-opt profile`.
    """
    from edge_opt.boards.platform_file import save_platform
    from edge_opt.boards.platforms import fit_platform

    if not name.strip():
        raise InvalidInput("the board has no name; write one, such as my-board")
    if not set(name).isdisjoint("/\\\0"):
        raise InvalidInput(f"the board's name {name!r} has a slash in it; -o says where its file goes")
    texts = [_time(text) for text in time or []]
    with redirect_stdout(sys.stderr):
        times = [(_net(net), milliseconds / 1000) for net, milliseconds in texts]
    platform = fit_platform(name, times, like=like, threads=threads, precision=precision, runtime=runtime)
    path = save_platform(platform, output or Path(f"{name}.toml"))
    timed = {net.rpartition(":")[2].partition("@")[0] for net, _ in texts}
    next_nets = _suggested(platform, timed)
    files = [] if export is None else [_exported(item.name, export) for item in next_nets]
    if json:
        typer.echo(json_format.dumps(_plain(platform, path, next_nets, files), indent=1))
    else:
        for line in (*_lines(platform, times, next_nets), *_next_steps(files, threads)):
            typer.echo(line)
    print_status(f"saved to {path}")
    print_status(f"use it: edge-opt profile MODEL --target {path}")


def _time(text: str) -> tuple[str, float]:
    net, equals, value = text.rpartition("=")
    try:
        milliseconds = float(value.removesuffix("ms"))
    except ValueError:
        milliseconds = math.nan
    if not equals or not net or math.isnan(milliseconds):
        raise InvalidInput(f"--time {text!r} cannot be read; {_FORM}")
    if not (math.isfinite(milliseconds) and milliseconds > 0):
        raise InvalidInput(f"the time of {net} is {milliseconds:g} ms; it must be finite and more than zero")
    return net, milliseconds


def _net(text: str) -> Net:
    """Return a bundled net by its name, or the profile of a reference."""
    import edge_opt as eo
    from edge_opt.boards.platforms import bundled_nets

    reference, _, shape = text.partition("@")
    bundled = bundled_nets()
    if reference in bundled and not shape:
        return bundled[reference]
    if ":" not in reference and not reference.endswith(".pt2"):
        near = get_close_matches(reference, bundled, n=1)
        raise InvalidInput(
            f"no net named {reference!r} is bundled for {shape or _SHAPE}; {f'closest: {near[0]}; ' if near else ''}"
            f"there are {', '.join(bundled)}; others by reference, such as torchvision:NAME or net.py:Net@1x3x32x32"
        )
    loaded = load_model(reference)
    report_progress(f"fitting: tracing {reference}")
    has_example = loaded.example is not None and not shape
    arguments = read_arguments([] if has_example else [shape or _SHAPE], [], None)
    positional, named = with_example(arguments, loaded.example, loaded.name)
    return eo.profile(loaded.model, positional or None, kwargs=named, name=loaded.name)


def _suggested(platform: Platform, timed: set[str]) -> tuple[Suggestion, ...]:
    """Return bundled nets that are not timed yet, the most informative first."""
    from edge_opt.boards.platforms import bundled_nets, suggest_next

    candidates = [net for name, net in bundled_nets().items() if name not in timed]
    return suggest_next(platform, candidates)[:3] if candidates else ()


def _exported(net: str, folder: Path) -> Path:
    """Write a net of torchvision as ONNX, for one image; its weights do not matter for its time."""
    from edge_opt.runtimes.export import export_onnx

    path = folder / f"{net}.onnx"
    folder.mkdir(parents=True, exist_ok=True)
    with redirect_stdout(sys.stderr):
        arguments = read_arguments([_SHAPE], [], None)
        export_onnx(load_model(f"torchvision:{net}").model, tuple(arguments.positional), path)
    return path


def _next_steps(files: Sequence[Path], threads: int | None) -> Iterator[str]:
    """Say which files were written, and how to add the times they take on the board."""
    for path in files:
        yield f"wrote {path}"
    if files:
        named = " ".join(f"--time {path.stem}=MS" for path in files)
        yield (
            "time them on the board with one runtime (docs/own_device.md has the commands), then add to this command: "
            f"{named} --runtime NAME --threads {threads or 1}"
        )


def _lines(platform: Platform, times: Sequence[tuple[Net, float]], next_nets: Sequence[Suggestion]) -> Iterator[str]:
    from edge_opt.boards.platforms import evidence, fitted_time, work_of

    yield f"{platform.name}: {evidence(platform)}"
    for profile, seconds in times:
        again = fitted_time(work_of(profile), platform)
        yield (
            f"  {profile.name}: typed {units.duration(seconds)}, fitted {units.duration(again.seconds)} "
            f"({units.duration(again.low)} to {units.duration(again.high)} nine times in ten)"
        )
    for text in platform.contradictions:
        yield f"  contradiction: {text}"
    for note in platform.notes:
        yield f"  {note}"
    for item in next_nets[:1]:
        yield (
            f"time {item.name} next ({_SHAPE}): the usual interval goes from a factor of {item.factor_now:.2f} to "
            f"{item.factor_then:.2f}"
        )


def _plain(platform: Platform, path: Path, next_nets: Sequence[Suggestion], files: Sequence[Path]) -> dict[str, object]:
    return {
        "name": platform.name,
        "file": str(path),
        "rows": platform.rows,
        "precision": platform.precision,
        "threads": platform.threads,
        "contradictions": list(platform.contradictions),
        "notes": list(platform.notes),
        "time_next": [
            {"net": item.name, "factor_now": item.factor_now, "factor_then": item.factor_then} for item in next_nets
        ],
        "exported": [str(path) for path in files],
    }


def measure_on(
    host: Annotated[
        str, typer.Argument(metavar="USER@HOST", help="The board, as ssh knows it; HOST:PYTHON names a Python.")
    ],
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What to time: .onnx or .tflite.")],
    inputs: Inputs = None,
    batch: Annotated[int, typer.Option("--batch", "-b", help="Samples per call.")] = 1,
    threads: Annotated[int, typer.Option("--threads", help="Threads of the runtime there; 0 is all cores.")] = 1,
    min_time: Annotated[float, typer.Option("--min-time", metavar="S", help="Shortest time to measure.")] = 1.0,
    json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
    debug: Debug = False,
) -> None:
    """Time an .onnx or .tflite file on a board over ssh. The board needs Python, numpy and the runtime.

    \b
    edge-opt measure-on pi@raspberrypi net.onnx --threads 4
    edge-opt measure-on pi@raspberrypi:venv/bin/python bert.onnx -i ids:1x128:int64 -i mask:1x128:int64
    """
    from edge_opt._support.checks import check_whole
    from edge_opt._support.json import to_plain
    from edge_opt.measuring.ssh_board import MODEL_SUFFIXES, TimingOrder, parse_board

    check_whole("--threads", threads, 0)
    check_whole("--batch", batch)
    if not file.is_file() or file.suffix not in MODEL_SUFFIXES:
        raise InvalidInput(f"{str(file)!r} is not an .onnx or .tflite file; `edge-opt export` writes one")
    arguments = read_arguments(inputs or [], [], None)
    if arguments.positional:
        raise InvalidInput("--input must name its input, as in ids:1x128:int64")
    shapes = tuple((name, tuple(spec.shape)) for name, spec in arguments.named.items())
    order = TimingOrder((file.name,), (batch,), shapes, threads, min_time, 5 * min_time)
    result = parse_board(host).time(order, {file.name: file.read_bytes()})
    latency = result.latency(file.name, batch)
    if json:
        typer.echo(json_format.dumps({"file": str(file), "threads": threads, **to_plain(result)}, indent=1))
        return
    ends = latency.median_interval_s
    each = "" if batch == 1 else f" per batch of {batch}"
    typer.echo(
        f"{file.name}: {units.duration(latency.median_s)}{each} (95 % CI {units.duration(ends.low)}–"
        f"{units.duration(ends.high)}) on {result.machine}, {threads or 'all'} thread{'s' * (threads != 1)}"
    )
    for remark in latency.remarks:
        typer.echo(remark)
