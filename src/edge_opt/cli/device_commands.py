"""edge-opt devices, board, calibrate, measure-on and doctor: known devices, boards of your own, this machine."""

from __future__ import annotations

import textwrap
import warnings
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from typer import Argument

from edge_opt import units
from edge_opt._support.checks import check_threads, check_whole
from edge_opt._support.json import to_plain
from edge_opt._support.progress import report_progress
from edge_opt.cli.arguments import Inputs, MinTime, ModelArgument, loaded_call, option, read_arguments
from edge_opt.cli.shell import (
    print_json,
    print_record,
    print_status,
    refuse_unused,
    result_console,
    result_width,
    tagged,
    wants_json,
)
from edge_opt.errors import InvalidInput
from edge_opt.loading import MODEL_FILES

if TYPE_CHECKING:
    from edge_opt.boards.class_costs import ModelWork
    from edge_opt.boards.platform_file import Platform
    from edge_opt.boards.platforms import Suggestion
    from edge_opt.records.devices import DeviceSpec, Precision
    from edge_opt.records.predictions import Calibration, SelfCheck
    from edge_opt.records.profiles import ModelProfile
    from edge_opt.report.sheets import Sheet

    Net = ModelProfile | ModelWork


def targets(
    model: ModelArgument,
    inputs: Inputs = None,
    budget: list[str] | None = option(
        None, "BUDGET", "'target_latency_ms <= 20', 'target_ram_kib <= 512'; keeps what holds or may; repeatable."
    ),
    top: int = option(20, "N", "Rows to print; --json has all."),
) -> None:
    """Rank all known platforms for a model: whether it fits, latency with its interval, energy, and their basis.

    \b
    edge-opt targets net.py:Net -i 1x3x224x224 --budget "target_latency_ms <= 20"
    """
    import edge_opt as eo
    from edge_opt.report.sheets import print_sheet, sheet_of

    check_whole("top", top)
    with loaded_call(model, inputs, None) as call:
        comparison = eo.compare_targets(
            call.model, call.inputs, kwargs=call.kwargs, name=call.name, budgets=budget or ()
        )
    if wants_json():
        print_json(tagged("targets", to_plain(comparison)))
        return
    count = len(comparison.targets)
    print_sheet(result_console(), sheet_of(replace(comparison, targets=comparison.targets[:top]), is_brief=True))
    print_status(f"{min(top, count)} of {count} platforms shown; --top N shows more")


def devices(
    name: Annotated[
        str | None, Argument(metavar="[NAME]", help="A name, an alias, or a .toml or .json file of your own.")
    ] = None,
) -> None:
    """List the names of devices, or show everything known about one, with sources.

    \b
    edge-opt devices
    edge-opt devices raspberry-pi-4
    edge-opt devices my-board.toml --json
    """
    import edge_opt as eo
    from edge_opt.boards.catalog import user_folder
    from edge_opt.boards.platform_file import timed_engines
    from edge_opt.boards.targets import find_spec
    from edge_opt.report.sheets import sheet_text
    from edge_opt.report.target_tables import device_groups, published_times_sheet

    if name is not None:
        if name.lower().endswith(MODEL_FILES):
            raise InvalidInput(f"{name!r} is a model; `edge-opt profile {name} -t NAME` predicts it on a device")
        spec = find_spec(name)
        print_record(spec, "device")
        if not wants_json():
            typer.echo(sheet_text(_platforms(spec), result_width()))
            if spec.latencies:
                typer.echo(sheet_text(published_times_sheet(spec), result_width()))
        return
    specs, timed = eo.devices(), timed_engines()
    if wants_json():
        others = timed.keys() - {spec.name for spec in specs}
        print_json([tagged("device", to_plain(spec)) for spec in (*specs, *map(find_spec, sorted(others)))])
        return
    for heading, names in device_groups(specs, timed):
        unbroken = ", ".join(name.replace(" ", "\xa0") for name in names)
        lines = textwrap.wrap(unbroken, result_width() - 2, break_on_hyphens=False, break_long_words=False)
        typer.echo("\n  ".join([heading, *lines]).replace("\xa0", " "))
    typer.echo("*: predicted from published times of whole models, its own or of the same chip or core. Sizes: RAM")
    print_status(f"`edge-opt devices NAME` shows aliases, platforms and sources; your own files go to {user_folder()}")


def _platforms(spec: DeviceSpec) -> Sheet:
    """Return a table of the device's platforms: basis, held-out error, rows and source."""
    from edge_opt.boards.platforms import platforms as known_platforms
    from edge_opt.report.sheets import Sheet, column, text_column

    platforms = known_platforms(spec)
    sources = dict.fromkeys(platform.source for platform in platforms)
    marks = {source: f"[{number}]" for number, source in enumerate(sources, start=1)}
    columns = (
        text_column("Platform", (item.name for item in platforms)),
        column("Basis", (item.basis or "no time" for item in platforms)),
        column("Computes in", (item.computes_in or item.precision or "" for item in platforms), 2),
        column("Off", ("" if item.error is None else units.percent(item.error) for item in platforms)),
        column("Times", (str(item.rows or "") for item in platforms), 3),
        column("Day", ((item.day or "") if item.rows else "" for item in platforms), 4),
        column("Source", (marks[item.source] for item in platforms)),
    )
    how = "Platforms: an estimate takes the first one that answers. Off: median error on nets left out of the fit"
    return Sheet(how, (columns,), tuple((mark, source) for source, mark in marks.items()))


_SHAPE = "1x3x224x224"
_FORM = "write NET=MS or NET@SHAPE=MS, such as squeezenet1_1=21.4 or net.py:Net@1x3x32x32=3.2"


def board(
    name: Annotated[str, Argument(metavar="NAME", help="Name of the board.")],
    time: list[str] | None = option(
        None, "NET=MS", f"Latency of a net there in ms; NET@SHAPE=MS unless {_SHAPE}; repeatable."
    ),
    like: str | None = option(None, "NAME", "Device or platform with the same core."),
    threads: int | None = option(None, "N", "Threads that the nets were timed with."),
    precision: str = option("fp32", "NAME", "Precision of the nets: fp32 or int8."),
    runtime: str = option("typed", "NAME", "Runtime that ran them, for the record."),
    output: Path | None = option(None, "-o, --output FILE", "File to write. Default: NAME.toml."),
    export: Path | None = option(None, "DIR", "Write the nets to time next as ONNX, and how to time them."),
) -> None:
    """Fit a board of your own to a few times: three to eight nets, timed there with any runtime by any tool.

    \b
    edge-opt board my-board --like raspberry-pi-5 --time squeezenet1_1=21.4 --time resnet18=55
    edge-opt profile net.py:Net -i 1x3x32x32 --target my-board.toml
    edge-opt board my-board --like raspberry-pi-5 --export nets/

    A net is bundled, such as squeezenet1_1 or resnet18 of torchvision, or a reference as in `edge-opt profile`.
    """
    from edge_opt.boards.platform_file import save_platform
    from edge_opt.boards.platforms import bundled_nets, fit_platform, suggest_next

    if not name.strip():
        raise InvalidInput("the board has no name; write one, such as my-board")
    if not set(name).isdisjoint("/\\\0"):
        raise InvalidInput(f"the board's name {name!r} has a slash in it; -o says where its file goes")
    times = [_time(text) for text in time or []]
    nets = [(_net(net), milliseconds / 1000) for net, milliseconds in times]
    platform = fit_platform(name, nets, like=like, threads=threads, precision=precision, runtime=runtime)
    path = save_platform(platform, output or Path(f"{name}.toml"))
    timed = {net.rpartition(":")[2].partition("@")[0] for net, _ in times}
    untimed = [net for bundled, net in bundled_nets().items() if bundled not in timed]
    next_nets = suggest_next(platform, untimed)[:3] if untimed else ()
    files = [] if export is None else [_exported(item.name, export) for item in next_nets]
    if wants_json():
        print_json(tagged("board", _plain(platform, path, next_nets, files)))
    else:
        for line in _board_lines(platform, nets, next_nets, files):
            typer.echo(line)
    print_status(f"saved to {path}")
    print_status(f"use it: edge-opt profile MODEL --target {path}")


def _time(text: str) -> tuple[str, float]:
    net, _, value = text.rpartition("=")
    try:
        if net:
            return net, float(value.removesuffix("ms"))
    except ValueError:
        pass
    raise InvalidInput(f"--time {text!r} cannot be read; {_FORM}")


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
            f"no net named {reference!r} is bundled for {shape or _SHAPE}; {'closest' if near else 'some of them'}: "
            f"{', '.join(near or list(bundled)[:6])}; others by reference: torchvision:NAME or net.py:Net@1x3x32x32"
        )
    with loaded_call(reference, [shape] if shape else None, usual_input=_SHAPE) as call:
        report_progress(f"fitting: tracing {reference}")
        return eo.profile(call.model, call.inputs, kwargs=call.kwargs, name=call.name)


def _exported(net: str, folder: Path) -> Path:
    """Write a net of torchvision as ONNX, for one image; its weights do not matter for its time."""
    from edge_opt.runtimes.export import export_onnx

    path = folder / f"{net}.onnx"
    folder.mkdir(parents=True, exist_ok=True)
    with loaded_call(f"torchvision:{net}", [_SHAPE]) as call:
        export_onnx(call.model, tuple(call.inputs or ()), path)
    return path


def _board_lines(
    platform: Platform, nets: Sequence[tuple[Net, float]], next_nets: Sequence[Suggestion], files: Sequence[Path]
) -> Iterator[str]:
    """Describe the fit net by net, what contradicts it, which net to time next, and how to time the exported files."""
    from edge_opt.boards.platforms import evidence, fitted_time, work_of

    yield f"{platform.name}: {evidence(platform)}"
    for net, seconds in nets:
        again = fitted_time(work_of(net), platform)
        interval = f"90 % interval {units.duration(again.low)} to {units.duration(again.high)}"
        yield f"  {net.name}: typed {units.duration(seconds)}, fitted {units.duration(again.seconds)} ({interval})"
    yield from (f"  contradiction: {text}" for text in platform.contradictions)
    yield from (f"  {note}" for note in platform.notes)
    for item in next_nets[:1]:
        factors = f"from a factor of {item.factor_now:.2f} to {item.factor_then:.2f}"
        yield f"time {item.name} next ({_SHAPE}): the usual interval goes {factors}"
    yield from (f"wrote {path}" for path in files)
    if files:
        named = " ".join(f"--time {path.stem}=MS" for path in files)
        added = f"{named} --runtime NAME --threads {platform.threads or 1}"
        how = "time them on the board with one runtime (docs/own_device.md has the commands)"
        yield f"{how}, then add to this command: {added}"


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


def calibrate(
    output: Path | None = option(None, "-o, --output FILE", "File to write (.json). Default: this host's own."),
    threads: str | None = option(None, "N,...", "Threads to measure with. Default: torch.get_num_threads()."),
    seconds: float = option(110.0, "S", "CPU seconds for each platform, at most 120."),
    runtime: str = option("torch", "NAME,...", "Runtimes: torch (eager), onnxruntime, openvino."),
    precision: str = option("fp32", "NAME,...", "Precisions of runtimes other than torch: fp32, int8."),
    measure_on: str | None = option(None, "USER@HOST", "Calibrate this board over ssh. Default: this machine."),
    model: str | None = option(None, "--for MODEL", "Time only operators that make this model's interval narrower."),
    inputs: Inputs = None,
) -> None:
    """Measure this machine, or a board: bandwidth, peaks, overheads, and thousands of operators.

    \b
    edge-opt calibrate
    edge-opt calibrate --runtime onnxruntime,openvino --precision fp32,int8
    edge-opt calibrate --measure-on pi@raspberrypi -o board.json
    edge-opt calibrate --for net.py:Net -i 1x3x224x224

    The machine may be in use: disturbed rounds are repeated. The file can be copied to another machine and used there
    as --target. With --measure-on, edge-opt and torch must be installed on the board.
    """
    import edge_opt as eo
    from edge_opt.calibration.calibration_file import host_file

    if output is not None and output.suffix != ".json":
        raise InvalidInput(f"--output is {str(output)!r}; a calibration is a .json file")
    counts = [_whole("--threads", text) for text in _listed(threads or "")]
    runtimes, precisions = _listed(runtime), _listed(precision)
    if model is None:
        refuse_unused("without --for", "inputs")
    elif measure_on is not None:
        raise InvalidInput("--for times operators on this machine; run the command on the board")
    if measure_on is not None:
        if len(counts) > 1 or runtimes != ["torch"]:
            raise InvalidInput("--measure-on calibrates torch with one number of threads; run the command on the board")
        done = _calibrate_board(measure_on, output, counts[0] if counts else None, seconds)
    else:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_, **__: print_status(f"warning: {message}")
            chosen = cast("list[Precision]", precisions)
            options: dict[str, Any] = {"threads": counts or None, "seconds": seconds, "path": output}
            with nullcontext() if model is None else loaded_call(model, inputs) as call:
                if call is not None:
                    options |= {"for_model": call.model, "inputs": call.inputs, "kwargs": call.kwargs}
                done = eo.calibrate(runtimes=runtimes, precisions=chosen, **options)
    if model is not None:
        before, after = (
            " to ".join(map(units.duration, ends)) for ends in (done.timed[-1].before, done.timed[-1].after)
        )
        print_status(f"timed {len(done.timed[-1].samples)} operators; interval {before} -> {after}")
    print_record(done, "calibrated", _calibrated_figures)
    print_status(f"saved to {output or host_file()}")
    print_status(f"use it: edge-opt profile MODEL --target {output or 'host'}")


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _whole(name: str, text: str) -> int:
    if not text.isdecimal():
        raise InvalidInput(f"{name} is {text!r}; expected whole numbers such as 1 or 1,2")
    return int(text)


def _calibrate_board(address: str, output: Path | None, threads: int | None, seconds: float) -> Calibration:
    """Calibrate a board over ssh, and write its file here."""
    from edge_opt._support.files import check_writable, write_whole
    from edge_opt.calibration.calibration_file import load_calibration
    from edge_opt.measuring.ssh_board import parse_board

    if output is None:
        raise InvalidInput("--measure-on requires --output: the file of the board's calibration, such as -o board.json")
    check_threads(threads)
    check_writable(output)
    board = parse_board(address)
    print_status(f"calibrating {board.host}; it takes about {seconds:g} s, and nothing else should run there")
    write_whole(output, board.calibrate(threads, seconds).decode("utf-8"))
    return load_calibration(output)


def _check_figures(check: SelfCheck) -> dict[str, float]:
    return {
        "factor": check.factor,
        "factor_low": check.low,
        "factor_high": check.high,
        "expected_error": check.expected_error,
        "nets": len(check.nets),
    }


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
        "self_check": None if done.check is None else _check_figures(done.check),
        "runtimes": {item.name: _check_figures(item.check) for item in done.runtimes},
        **({"remarks": list(done.remarks)} if done.remarks else {}),
    }


def measure_on(
    host: Annotated[str, Argument(metavar="USER@HOST", help="The board, as ssh knows it; HOST:PYTHON names a Python.")],
    file: Annotated[Path, Argument(metavar="FILE", help="What to time: .onnx or .tflite.")],
    inputs: Inputs = None,
    batch: int = option(1, "-b, --batch N", "Samples per call."),
    threads: int = option(1, "N", "Threads of the runtime on the board; 0: all cores."),
    min_time: MinTime = 1.0,
) -> None:
    """Time an .onnx or .tflite file on a board over ssh. The board needs Python, numpy and the runtime.

    \b
    edge-opt measure-on pi@raspberrypi net.onnx --threads 4
    edge-opt measure-on pi@raspberrypi:venv/bin/python bert.onnx -i ids:1x128:int64
    """
    from edge_opt.measuring.ssh_board import MODEL_SUFFIXES, TimingOrder, parse_board

    check_whole("--threads", threads, 0)
    check_whole("--batch", batch)
    if not file.is_file() or file.suffix not in MODEL_SUFFIXES:
        state = "does not exist" if not file.exists() else "is not an .onnx or .tflite file"
        raise InvalidInput(f"{file} {state}; `edge-opt convert MODEL -i SHAPE -o net.onnx` writes such a file")
    arguments = read_arguments(inputs or [])
    if arguments.positional:
        raise InvalidInput("--inputs must name each input, such as ids:1x128:int64")
    shapes = {name: tuple(spec.shape) for name, spec in arguments.named.items()}
    order = TimingOrder((file.name,), (batch,), shapes, threads, min_time, 5 * min_time)
    result = parse_board(host).time(order, {file.name: file.read_bytes()})
    latency = result.timings[0].latency
    if wants_json():
        print_json(tagged("board_timing", {"file": str(file), "threads": threads, **to_plain(result)}))
        return
    ends = latency.median_interval_s
    each = "" if batch == 1 else f" per batch of {batch}"
    interval = f"95 % CI {units.duration(ends.low)}–{units.duration(ends.high)}"
    machine = f"{result.machine}, {threads or 'all'} thread{'s' * (threads != 1)}"
    typer.echo(f"{file.name}: {units.duration(latency.median_s)}{each} ({interval}) on {machine}")
    for remark in latency.remarks:
        typer.echo(remark)


def doctor(seconds: float = option(5.0, "S", "Longest measurement of the noise in seconds.")) -> None:
    """Describe this machine: versions, threads, governor, energy meters and why each is or is not usable, noise.

    \b
    edge-opt doctor
    """
    from edge_opt.measuring.session import diagnose

    print_record(diagnose(seconds), "diagnosis")
