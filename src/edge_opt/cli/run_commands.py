"""edge-opt run, sweep, status, init and report."""

from __future__ import annotations

import json as json_format
import sys
from collections.abc import Iterable, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from edge_opt._support.files import write_whole
from edge_opt.cli.arguments import GRAMMAR, read_arguments
from edge_opt.cli.profile_commands import profile_of_file
from edge_opt.cli.shell import NOT_SATISFIED, Debug, Trust, print_result, print_status, result_width
from edge_opt.errors import InvalidInput
from edge_opt.loading import FORMS, MODEL_FILES
from edge_opt.runtimes.registry import runtime_names

if TYPE_CHECKING:
    from edge_opt.records.sweeps import SweepResult
    from edge_opt.run.config import RunConfig
    from edge_opt.run.pipeline import RunResult


Workers = Annotated[int, typer.Option("--workers", metavar="N", help="Processes that build side by side.")]
Scheduler = Annotated[
    str | None, typer.Option("--scheduler", metavar="tls://…", help="Build on the workers of a Dask scheduler.")
]
Fresh = Annotated[bool, typer.Option("--fresh", help="Start over; the earlier table is kept aside.")]
MetricName = Annotated[
    str | None, typer.Option("--metric", metavar="NAME", help="What answers are worth: mae, miou, file.py:f, ...")
]
Insecure = Annotated[bool, typer.Option("--insecure", help="Allow a scheduler without encryption (tcp://).")]
MeasureOn = Annotated[
    str | None,
    typer.Option(
        "--measure-on",
        metavar="USER@HOST",
        help="Measure on this board, over ssh. USER@HOST:PYTHON names a Python there.",
    ),
]
RetryFailed = Annotated[bool, typer.Option("--retry-failed", help="Try candidates again that failed before.")]


def init(
    file: Annotated[Path, typer.Argument(metavar="[FILE]", help="Where to write it.")] = Path("edge-opt.yaml"),
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
    debug: Debug = False,
) -> None:
    """Write a configuration with every key, its default and what it is for.

    \b
    edge-opt init
    edge-opt init configs/mine.yaml
    """
    from edge_opt.run.config import template

    if file.exists() and not force:
        raise InvalidInput(f"{file} is there already; choose another name, or --force to replace it")
    typer.echo(write_whole(file, template()))


class SeveralSeeds(TyperCommand):
    """A command whose `--seeds 1 2 3` is `--seeds 1 --seeds 2 --seeds 3`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, spread(args, "--seeds"))


def spread(arguments: Sequence[str], option: str) -> list[str]:
    """Repeat an option before each number that follows it.

    >>> spread(["a.yaml", "--seeds", "1", "2", "-o", "3"], "--seeds")
    ['a.yaml', '--seeds', '1', '--seeds', '2', '-o', '3']
    """
    spread_words: list[str] = []
    is_open = False
    for word in arguments:
        if is_open and word.isdecimal() and spread_words[-1] != option:
            spread_words.append(option)
        is_open = word == option or (is_open and word.isdecimal())
        spread_words.append(word)
    return spread_words


def run(
    config: Annotated[
        Path | None, typer.Argument(metavar="[CONFIG]", help="A YAML file of `edge-opt init`; the default without.")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="One key: epochs=3, model.conv1_channels=8.")
    ] = None,
    metric: MetricName = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", metavar="DIR", help="Instead of output_dir.")] = None,
    seeds: Annotated[
        list[int] | None, typer.Option("--seeds", metavar="N…", help="One run per seed, and means with intervals.")
    ] = None,
    workers: Workers = 0,
    scheduler: Scheduler = None,
    insecure: Insecure = False,
    measure_on: MeasureOn = None,
    retry_failed: RetryFailed = False,
    fresh: Fresh = False,
    trust: Trust = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON, progress as JSON lines.")] = False,
    debug: Debug = False,
) -> None:
    """Train, sweep, judge and write everything; run again to go on.

    \b
    edge-opt run
    edge-opt run configs/default.yaml --set epochs=3 -o out/
    edge-opt run configs/default.yaml --seeds 1 2 3

    Exit code 0: something is accepted; 1: nothing satisfies the constraints; 2: wrong use.
    """
    from edge_opt.run.config_file import read_config

    seeds = seeds or []
    loaded = read_config(config, [*(settings or []), *([f"metric={metric}"] if metric else [])])
    root = output or Path(loaded.output_dir)
    # What the user's own code prints goes to stderr: stdout holds results only.
    with redirect_stdout(sys.stderr):
        options = {"workers": workers, "scheduler": scheduler, "insecure": insecure, "measure_on": measure_on}
        done = _all(loaded, root, seeds, {**options, "retry_failed": retry_failed, "fresh": fresh}, as_json)
    if as_json:
        typer.echo(
            json_format.dumps([dict(item.summary) for item in done] if seeds else dict(done[0].summary), indent=1)
        )
    else:
        _conclude(done, root)
    if not all(item.result.accepted for item in done):
        raise typer.Exit(NOT_SATISFIED)


def _all(config: RunConfig, root: Path, seeds: list[int], options: dict[str, Any], as_json: bool) -> list[RunResult]:
    from edge_opt.run.pipeline import run as run_once
    from edge_opt.run.seeds import run_seeds
    from edge_opt.search.sweep_progress import progress

    def one(config: RunConfig, folder: Path) -> RunResult:
        with progress("json" if as_json else "auto") as listener:
            return run_once(config, folder, on_event=listener, **options)

    return list(run_seeds(config, seeds, root, one).values()) if seeds else [one(config, root)]


def _conclude(done: list[RunResult], root: Path) -> None:
    from edge_opt.run.artifacts import conclusion

    for item in done:
        if len(done) > 1:
            typer.echo(f"{item.folder}:")
        _print_lines(conclusion(item.result), behind=10)
        typer.echo(f"report    {item.report}")
        _print_best_file(item.folder, item.result)
    if len(done) > 1:
        typer.echo(f"together  {root / 'aggregate.csv'}")
    if not all(item.result.accepted for item in done):
        print_status("nothing satisfies the constraints; loosen one, or widen the space")


def _print_lines(lines: Iterable[str], behind: int) -> None:
    """Print lines as wide as the terminal; longer ones continue below, behind this many blanks."""
    from edge_opt.report.terminal import wrapped

    for line in lines:
        head, rest = line[:behind], line[behind:]
        for number, part in enumerate(wrapped(rest, result_width() - behind) or [""]):
            print_result(f"{head if number == 0 else ' ' * behind}{part}".rstrip())


def _print_best_file(folder: Path, result: SweepResult) -> None:
    """Print the file of the best candidate."""
    from edge_opt.run.export_best import shipped_file

    if result.best is not None:
        typer.echo(f"ships     {shipped_file(folder / 'best')}")


Runtimes = Annotated[
    str | None,
    typer.Option(
        "--runtime",
        metavar="A,B",
        help=f"{', '.join(runtime_names())}; torch,onnxruntime unless given.",
    ),
]


def sweep(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=f"{FORMS}; the factory loads the trained weights.")],
    data: Annotated[str, typer.Option("--data", metavar="FILE.py:LOADERS", help="A function that returns loaders.")],
    inputs: Annotated[
        list[str] | None, typer.Option("--input", "-i", metavar="SHAPE", help=f"Batch to time: {GRAMMAR}.")
    ] = None,
    prune: Annotated[
        str | None,
        typer.Option("--prune", metavar="A,B", help="Shares of channels to remove; by default auto, which finds one."),
    ] = None,
    precision: Annotated[str, typer.Option("--precision", metavar="A,B", help="fp32, fp16, bf16, int8.")] = "fp32,int8",
    runtime: Runtimes = None,
    keep: Annotated[
        list[str] | None, typer.Option("--keep", metavar="BUDGET", help="A constraint: 'latency_ms <= 20'.")
    ] = None,
    metric: MetricName = None,
    fine_tune_epochs: Annotated[
        int | None, typer.Option("--fine-tune-epochs", help="Passes after pruning; 3 unless given.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Decides the order of training samples and what is drawn.")] = 0,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any other key of a configuration.")
    ] = None,
    workers: Workers = 0,
    scheduler: Scheduler = None,
    insecure: Insecure = False,
    measure_on: MeasureOn = None,
    retry_failed: RetryFailed = False,
    fresh: Fresh = False,
    trust: Trust = False,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="Where to write.")] = Path("sweep"),
    json: Annotated[bool, typer.Option("--json", help="Print the whole sweep as JSON.")] = False,
    debug: Debug = False,
) -> None:
    """Try pruning, precisions and runtimes on a trained model, and say which variant to ship.

    \b
    edge-opt sweep net.py:trained -i 32x1x28x28 --data net.py:loaders --keep "latency_ms <= 20" -o out/
    edge-opt sweep net.py:trained --data net.py:loaders --prune 0,0.5 --precision int8 --keep "accuracy_drop <= 1%"
    edge-opt sweep net.py:trained --data net.py:loaders --metric mae --keep "mae_drop <= 0.1"

    Exit code 0: something is accepted; 1: nothing satisfies the constraints; 2: wrong use.
    """
    from edge_opt.run.config_file import read_settings
    from edge_opt.run.pipeline import sweep as run_sweep
    from edge_opt.search.sweep_progress import progress

    chosen = {
        **({} if prune is None else {"pruning_levels": _levels(prune)}),
        "precisions": _words(precision),
        **({} if runtime is None else {"runtimes": _words(runtime)}),
        "seed": seed,
        **({"constraints": keep} if keep else {}) | ({} if metric is None else {"metric": metric}),
        **({} if fine_tune_epochs is None else {"fine_tune_epochs": fine_tune_epochs}),
        **read_settings(settings or ()),
    }
    with redirect_stdout(sys.stderr), progress("json" if json else "auto") as listener:
        result = run_sweep(
            model,
            data,
            folder=output,
            example_inputs=_shape(inputs or []),
            workers=workers,
            scheduler=scheduler,
            insecure=insecure,
            measure_on=measure_on,
            retry_failed=retry_failed,
            fresh=fresh,
            on_event=listener,
            **chosen,
        )
    _print_sweep(result, output, json)
    _end(bool(result.accepted))


def _print_sweep(result: SweepResult, output: Path, json: bool) -> None:
    from edge_opt.report.sweep_files import sweep_document
    from edge_opt.run.artifacts import conclusion

    if json:
        typer.echo(sweep_document(result), nl=False)
        return
    _print_lines(conclusion(result), behind=10)
    typer.echo(f"tables    {output}")
    typer.echo(f"report    {output / 'report.html'}")
    _print_best_file(output, result)


def _end(is_accepted: bool) -> None:
    if not is_accepted:
        print_status("nothing satisfies the constraints; loosen one, or widen the space")
        raise typer.Exit(NOT_SATISFIED)


def _shape(inputs: list[str]) -> tuple[int, ...] | None:
    arguments = read_arguments(inputs, [], None)
    if arguments.named or len(arguments.positional) > 1:
        raise InvalidInput("--input is the batch that is timed, one shape; further inputs follow from the data")
    return tuple(arguments.positional[0].shape) if arguments.positional else None


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _levels(prune: str) -> list[float] | str:
    return prune if prune == "auto" else [_share(text) for text in _words(prune)]


def _share(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InvalidInput(f"--prune: {text!r} is not a number; write shares such as 0,0.25,0.5, or auto") from None


def status(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The output folder of `edge-opt run`.")],
    json: Annotated[bool, typer.Option("--json", help="Print the record as JSON.")] = False,
    debug: Debug = False,
) -> None:
    """How far the sweep in a folder is, who runs it, and the best candidate so far.

    \b
    edge-opt status outputs
    """
    from edge_opt.report.record_sheets import status_lines
    from edge_opt.search.sweep_progress import status as status_of

    progress = status_of(folder)
    if json:
        typer.echo(
            json_format.dumps({**asdict(progress), "left": progress.left, "is_running": progress.is_running}, indent=1)
        )
        return
    _print_lines(status_lines(progress), behind=0)


def report(
    sources: Annotated[
        list[Path],
        typer.Argument(
            metavar="DIR...",
            help="A run's folder, a folder of runs, a profile or a sweep saved as .json, or a model's file.",
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="DIR/report.html unless given; runs.html of several."),
    ] = None,
    device: Annotated[
        list[str] | None, typer.Option("--device", "-d", metavar="NAME", help="A device to show rooflines of; several.")
    ] = None,
    title: Annotated[str | None, typer.Option("--title", help="The page's heading.")] = None,
    trust: Trust = False,
    debug: Debug = False,
) -> None:
    """One HTML page of everything a run found out, or of several runs side by side; it needs no network and no server.

    \b
    edge-opt report runs/mnist
    edge-opt report runs/before runs/after
    edge-opt report runs
    edge-opt report profile.json -o report.html --device raspberry-pi-5 --device jetson-nano
    edge-opt report model.onnx
    """
    from edge_opt.report.page import runs_in, write_page, write_report, write_runs

    if len(sources) == 1 and sources[0].suffix.lower() in MODEL_FILES:
        profiled = profile_of_file(str(sources[0]))
        typer.echo(write_page(output or sources[0].with_suffix(".html"), profile=profiled, devices=device, title=title))
    elif len(sources) == 1 and not runs_in(sources[0]):
        typer.echo(write_report(sources[0], output, devices=device, title=title))
    else:
        typer.echo(write_runs(sources, output, devices=device, title=title))
