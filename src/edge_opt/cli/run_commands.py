"""edge-opt run, sweep, status, init and report."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option
from typer.core import TyperCommand

from edge_opt._support.files import write_whole
from edge_opt._support.progress import report_progress
from edge_opt.cli.arguments import GRAMMAR, Json, read_arguments
from edge_opt.cli.shell import Trust, not_satisfied, print_json, print_record, result_width
from edge_opt.errors import InvalidInput
from edge_opt.loading import FORMS, MODEL_FILES, load_model
from edge_opt.runtimes.registry import runtime_names

if TYPE_CHECKING:
    from edge_opt.records.profiles import ModelProfile
    from edge_opt.records.sweeps import SweepResult
    from edge_opt.run.config import RunConfig
    from edge_opt.run.pipeline import RunResult


Workers = Annotated[int, Option(metavar="N", help="Processes that build side by side.")]
Scheduler = Annotated[str | None, Option(metavar="tls://…", help="Build on the workers of a Dask scheduler.")]
Fresh = Annotated[bool, Option("--fresh", help="Start over; the earlier table is kept aside.")]
MetricName = Annotated[str | None, Option(metavar="NAME", help="Quality metric: mae, miou, file.py:f, ...")]
Insecure = Annotated[bool, Option("--insecure", help="Allow a scheduler without encryption (tcp://).")]
MeasureOn = Annotated[
    str | None, Option(metavar="USER@HOST", help="Measure on a board, over ssh; USER@HOST:PYTHON names a Python there.")
]
RetryFailed = Annotated[bool, Option("--retry-failed", help="Try candidates again that failed before.")]


def init(
    file: Annotated[Path, Argument(metavar="[FILE]", help="Where to write it.")] = Path("edge-opt.yaml"),
    force: Annotated[bool, Option("--force", help="Replace a file that is there.")] = False,
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
        Path | None, Argument(metavar="[CONFIG]", help="A YAML file of `edge-opt init`; the default without.")
    ] = None,
    settings: Annotated[
        list[str] | None, Option("--set", metavar="KEY=VALUE", help="One key: epochs=3, model.conv1_channels=8.")
    ] = None,
    metric: MetricName = None,
    output: Annotated[Path | None, Option("--output", "-o", metavar="DIR", help="Instead of output_dir.")] = None,
    seeds: Annotated[list[int] | None, Option(metavar="N…", help="One run per seed, and means with intervals.")] = None,
    workers: Workers = 0,
    scheduler: Scheduler = None,
    insecure: Insecure = False,
    measure_on: MeasureOn = None,
    retry_failed: RetryFailed = False,
    fresh: Fresh = False,
    trust: Trust = False,
    as_json: Annotated[bool, Option("--json", help="Print the summary as JSON, progress as JSON lines.")] = False,
) -> None:
    """Train, sweep, judge and write everything; run again to go on.

    \b
    edge-opt run
    edge-opt run configs/default.yaml --set epochs=3 -o out/
    edge-opt run configs/default.yaml --seeds 1 2 3

    Exit code 0: something is accepted; 1: nothing satisfies the constraints; 2: wrong use.
    """
    from edge_opt.run.config import read_config
    from edge_opt.run.pipeline import run as run_once
    from edge_opt.run.seeds import run_seeds
    from edge_opt.search.sweep_progress import progress

    loaded = read_config(config, [*(settings or []), *([f"metric={metric}"] if metric else [])])
    root = output or Path(loaded.output_dir)

    def run_into(config: RunConfig, folder: Path) -> RunResult:
        with progress("json" if as_json else "auto") as listener:
            return run_once(
                config, folder, on_event=listener, workers=workers, scheduler=scheduler, insecure=insecure,
                measure_on=measure_on, retry_failed=retry_failed, fresh=fresh,
            )  # fmt: skip

    # What the user's own code prints goes to stderr: stdout holds results only.
    with redirect_stdout(sys.stderr):
        runs = list(run_seeds(loaded, seeds, root, run_into).values()) if seeds else [run_into(loaded, root)]
    if as_json:
        print_json([dict(item.summary) for item in runs] if seeds else dict(runs[0].summary))
    else:
        for item in runs:
            if len(runs) > 1:
                typer.echo(f"{item.folder}:")
            _print_conclusion(item.result, item.folder)
        if len(runs) > 1:
            typer.echo(f"together  {root / 'aggregate.csv'}")
    _check_accepted(item.result for item in runs)


def _print_conclusion(result: SweepResult, folder: Path, tables: Path | None = None) -> None:
    """Print the end of a sweep: what was chosen and why, and where its files are."""
    from edge_opt.report.sheets import wrapped
    from edge_opt.run.artifacts import conclusion
    from edge_opt.run.export_best import shipped_file

    for line in conclusion(result):
        label, sentence = line[:10], line[10:]
        # A sentence that is wider than the terminal continues beside its label.
        typer.echo(label + f"\n{' ' * 10}".join(wrapped(sentence, result_width() - 10)))
    if tables is not None:
        typer.echo(f"tables    {tables}")
    typer.echo(f"report    {folder / 'report.html'}")
    if result.best is not None:
        typer.echo(f"ships     {shipped_file(folder / 'best')}")


def _check_accepted(results: Iterable[SweepResult]) -> None:
    if not all(result.accepted for result in results):
        raise not_satisfied("nothing satisfies the constraints; loosen one, or widen the space")


def sweep(
    model: Annotated[str, Argument(metavar="MODEL", help=f"{FORMS}; the factory loads the trained weights.")],
    data: Annotated[str, Option(metavar="FILE.py:LOADERS", help="A function that returns loaders.")],
    inputs: Annotated[
        list[str] | None, Option("--input", "-i", metavar="SHAPE", help=f"Batch to time: {GRAMMAR}.")
    ] = None,
    prune: Annotated[
        str | None, Option(metavar="A,B", help="Shares of channels to remove; by default auto, which finds one.")
    ] = None,
    precision: Annotated[str, Option(metavar="A,B", help="fp32, fp16, bf16, int8.")] = "fp32,int8",
    runtime: Annotated[
        str | None, Option(metavar="A,B", help=f"{', '.join(runtime_names())}; torch,onnxruntime unless given.")
    ] = None,
    keep: Annotated[list[str] | None, Option(metavar="BUDGET", help="A constraint: 'latency_ms <= 20'.")] = None,
    metric: MetricName = None,
    fine_tune_epochs: Annotated[int | None, Option(help="Passes after pruning; 3 unless given.")] = None,
    seed: Annotated[int, Option(help="Decides the order of training samples and what is drawn.")] = 0,
    settings: Annotated[
        list[str] | None, Option("--set", metavar="KEY=VALUE", help="Any other key of a configuration.")
    ] = None,
    workers: Workers = 0,
    scheduler: Scheduler = None,
    insecure: Insecure = False,
    measure_on: MeasureOn = None,
    retry_failed: RetryFailed = False,
    fresh: Fresh = False,
    trust: Trust = False,
    output: Annotated[Path, Option("--output", "-o", metavar="DIR", help="Where to write.")] = Path("sweep"),
    json: Json = False,
) -> None:
    """Try pruning, precisions and runtimes on a trained model, and say which variant to ship.

    \b
    edge-opt sweep net.py:trained -i 32x1x28x28 --data net.py:loaders --keep "latency_ms <= 20" -o out/
    edge-opt sweep net.py:trained --data net.py:loaders --prune 0,0.5 --precision int8 --keep "accuracy_drop <= 1%"
    edge-opt sweep net.py:trained --data net.py:loaders --metric mae --keep "mae_drop <= 0.1"

    Exit code 0: something is accepted; 1: nothing satisfies the constraints; 2: wrong use.
    """
    from edge_opt.report.sweep_files import sweep_document
    from edge_opt.run.config import read_settings
    from edge_opt.run.pipeline import sweep as run_sweep
    from edge_opt.search.sweep_progress import progress

    chosen = {
        "pruning_levels": None if prune is None else _levels(prune),
        "precisions": _words(precision),
        "runtimes": None if runtime is None else _words(runtime),
        "seed": seed,
        "budgets": keep or None,
        "metric": metric,
        "fine_tune_epochs": fine_tune_epochs,
    }
    chosen = {key: value for key, value in chosen.items() if value is not None}
    with redirect_stdout(sys.stderr), progress("json" if json else "auto") as listener:
        result = run_sweep(
            model,
            data,
            output=output,
            inputs=_shape(inputs or []),
            workers=workers,
            scheduler=scheduler,
            insecure=insecure,
            measure_on=measure_on,
            retry_failed=retry_failed,
            fresh=fresh,
            on_event=listener,
            **chosen | read_settings(settings or ()),
        )
    if json:
        typer.echo(sweep_document(result), nl=False)
    else:
        _print_conclusion(result, output, tables=output)
    _check_accepted([result])


def _shape(inputs: list[str]) -> tuple[int, ...] | None:
    arguments = read_arguments(inputs, [], None)
    if arguments.named or len(arguments.positional) > 1:
        raise InvalidInput("--input is the batch that is timed, one shape; further inputs follow from the data")
    return tuple(arguments.positional[0].shape) if arguments.positional else None


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _levels(prune: str) -> list[float] | str:
    try:
        return prune if prune == "auto" else [float(text) for text in _words(prune)]
    except ValueError as error:
        raise InvalidInput(f"--prune is {prune!r}; write shares such as 0,0.25,0.5, or auto") from error


def status(
    folder: Annotated[Path, Argument(metavar="DIR", help="The output folder of `edge-opt run`.")],
    json: Json = False,
) -> None:
    """Show how far the sweep in a folder is, who runs it, and the best candidate so far.

    \b
    edge-opt status outputs
    """
    from edge_opt.search.sweep_progress import status as status_of

    print_record(status_of(folder), json, lambda now: {**asdict(now), "left": now.left, "is_running": now.is_running})


def report(
    sources: Annotated[
        list[Path],
        Argument(metavar="DIR...", help="Runs, folders of runs, a profile or sweep as .json, or a model's file."),
    ],
    output: Annotated[
        Path | None,
        Option("--output", "-o", metavar="FILE", help="DIR/report.html unless given; runs.html of several."),
    ] = None,
    device: Annotated[
        list[str] | None, Option("--device", "-d", metavar="NAME", help="A device to show rooflines of; several.")
    ] = None,
    title: Annotated[str | None, Option(help="The page's heading.")] = None,
    trust: Trust = False,
) -> None:
    """Write one HTML page of a run, or of several runs side by side; it needs no network and no server.

    \b
    edge-opt report runs/mnist
    edge-opt report runs/before runs/after
    edge-opt report runs
    edge-opt report profile.json -o report.html --device raspberry-pi-5 --device jetson-nano
    edge-opt report model.onnx
    """
    from edge_opt.report.page import runs_in, write_page, write_report, write_runs

    if len(sources) == 1 and sources[0].suffix.lower() in MODEL_FILES:
        profiled = _profile_of_file(str(sources[0]))
        typer.echo(write_page(output or sources[0].with_suffix(".html"), profile=profiled, devices=device, title=title))
    elif len(sources) == 1 and not runs_in(sources[0]):
        typer.echo(write_report(sources[0], output, devices=device, title=title))
    else:
        typer.echo(write_runs(sources, output, devices=device, title=title))


def _profile_of_file(model: str) -> ModelProfile:
    """Return the costs of a file's model with the inputs that the file itself describes."""
    import edge_opt as eo

    with redirect_stdout(sys.stderr):
        loaded = load_model(model)
    if loaded.example is None:
        raise InvalidInput(
            f"{model!r} leaves the shapes of its inputs open; `edge-opt profile {model} -i SHAPE -o report.html` "
            "writes its page"
        )
    positional, named = loaded.example
    report_progress(f"tracing {loaded.name}")
    return eo.profile(loaded.model, list(positional) or None, kwargs=named, name=loaded.name)
