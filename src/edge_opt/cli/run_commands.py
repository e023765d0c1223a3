"""edge-opt run, sweep, status, init and report."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from edge_opt._support.files import write_whole
from edge_opt._support.progress import report_progress
from edge_opt.cli.arguments import argument, option, read_arguments
from edge_opt.cli.shell import (
    Command,
    not_satisfied,
    print_json,
    print_record,
    refuse_unused,
    result_console,
    tagged,
    wants_json,
)
from edge_opt.errors import InvalidInput
from edge_opt.loading import MODEL_FILES, load_model
from edge_opt.runtimes.registry import runtime_names

if TYPE_CHECKING:
    from edge_opt.records.profiles import ModelProfile
    from edge_opt.records.sweeps import SweepResult
    from edge_opt.run.config import RunConfig
    from edge_opt.run.pipeline import RunResult


Workers = Annotated[int, Option(metavar="N", help="Processes that build candidates in parallel.")]
Scheduler = Annotated[str | None, Option(metavar="tls://…", help="Dask scheduler whose workers build candidates.")]
Fresh = Annotated[bool, Option("--fresh", help="Start over; the earlier table is renamed.")]
Insecure = Annotated[bool, Option("--insecure", help="Allow a scheduler without encryption (tcp://).")]
MeasureOn = Annotated[
    str | None, Option(metavar="USER@HOST", help="Measure on a board over ssh; USER@HOST:PYTHON names a Python there.")
]
Fair = Annotated[bool, Option("--fair", help="Train the baseline as long as variants are fine-tuned.")]
RetryFailed = Annotated[bool, Option("--retry-failed", help="Try failed candidates again.")]


def init(
    path: Path = argument("[FILE]", "File to write.", Path("edge-opt.yaml")),
    force: bool = option(False, "--force", "Replace a file that exists."),
) -> None:
    """Write a configuration with every key, its default and what it is for.

    \b
    edge-opt init
    edge-opt init configs/mine.yaml
    """
    from edge_opt.run.config import template

    if path.exists() and not force:
        raise InvalidInput(f"{path} exists; choose another name, or add --force to replace it")
    _print_written("init", write_whole(path, template()))


def _print_written(command: str, path: Path) -> None:
    """Print the file that a command wrote."""
    if wants_json():
        print_json(tagged(command, {"file": str(path)}))
    else:
        typer.echo(path)


class SweepCommand(Command):
    """A command whose builds are forked from a process that imports torch while this one does."""

    def invoke(self, ctx: Any) -> Any:
        import edge_opt.search.locks  # noqa: F401  # refuses systems that cannot fork
        from edge_opt.search.isolation import keep_fork_servers

        with keep_fork_servers("edge_opt.run.job"):
            return super().invoke(ctx)


class SeveralSeeds(SweepCommand):
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
    config: Path | None = argument("[CONFIG]", "YAML file of `edge-opt init`. Default: the bundled demo.", None),
    settings: list[str] | None = option(
        None, "--set KEY=VALUE", "Set one key: epochs=3, model.conv1_channels=8; repeatable."
    ),
    seeds: list[int] | None = option(None, "N…", "One run per seed, then means with intervals."),
    target: list[str] | None = option(
        None, "-t, --target NAME", "Device that decides, such as raspberry-pi-4; repeatable. Default: the key target."
    ),
    no_host_timing: bool = option(False, "--no-host-timing", "Time nothing on this machine; needs a target."),
    measure_on: MeasureOn = None,
    workers: Workers = 0,
    scheduler: Scheduler = None,
    insecure: Insecure = False,
    retry_failed: RetryFailed = False,
    fresh: Fresh = False,
    output: Path | None = option(None, "-o, --output DIR", "Folder to write. Default: the key output_dir."),
) -> None:
    """Train, sweep and export the best variant; an interrupted run continues.

    \b
    edge-opt run
    edge-opt run configs/default.yaml --set epochs=3 -o out/
    edge-opt run configs/default.yaml --seeds 1 2 3

    Exit code 0: a candidate is accepted; 1: no candidate keeps the budgets; 2: wrong use.
    """
    _check_scheduler(scheduler)
    from edge_opt.run.config import read_config
    from edge_opt.run.pipeline import run as run_once
    from edge_opt.run.seeds import run_seeds
    from edge_opt.search.sweep_progress import progress

    chosen = [f"target={json.dumps(_one_or_all(target))}"] if target else []
    chosen += ["host_timing=false"] if no_host_timing else []
    loaded = read_config(config, [*(settings or []), *chosen])
    root = output or Path(loaded.output_dir)

    def run_into(config: RunConfig, folder: Path) -> RunResult:
        with progress("json" if wants_json() else "auto") as listener:
            return run_once(
                config, folder, on_event=listener, workers=workers, scheduler=scheduler, insecure=insecure,
                measure_on=measure_on, retry_failed=retry_failed, fresh=fresh,
            )  # fmt: skip

    # What the user's own code prints goes to stderr: stdout holds results only.
    with redirect_stdout(sys.stderr):
        runs = list(run_seeds(loaded, seeds, root, run_into).values()) if seeds else [run_into(loaded, root)]
    if wants_json():
        documents = [tagged("run", item.summary) for item in runs]
        print_json(documents if seeds else documents[0])
    else:
        for item in runs:
            if len(runs) > 1:
                typer.echo(f"\n{item.folder}")
            _print_conclusion(item.result, item.folder)
        if len(runs) > 1:
            typer.echo(f"\nAll seeds    {root / 'aggregate.csv'}")
    _check_accepted(item.result for item in runs)


def _check_scheduler(scheduler: str | None) -> None:
    refuse_unused("without --scheduler", "insecure", when=scheduler is None)
    refuse_unused("with --scheduler, which has workers of its own", "workers", when=scheduler is not None)


def _print_conclusion(result: SweepResult, folder: Path) -> None:
    """Print the end of a sweep: the candidates, what to ship and why, and the report."""
    from edge_opt.report.page import shipped_file
    from edge_opt.report.sheets import print_sheet
    from edge_opt.report.sweep_files import conclusion

    print_sheet(result_console(), conclusion(result, shipped_file(folder), folder / "report.html"))


def _check_accepted(results: Iterable[SweepResult]) -> None:
    if not all(result.best is not None for result in results):
        raise not_satisfied("nothing satisfies the constraints; loosen one, or widen the space")


def sweep(
    model: str = argument("MODEL", "Trained: net.py:trained, torchvision:NAME, timm:NAME."),
    data: str = option(..., "FILE.py:LOADERS", "Function that returns loaders by name (required)."),
    inputs: list[str] | None = option(
        None, "-i, --inputs SHAPE", "Batch to time. Default: the first validation batch."
    ),
    budget: list[str] | None = option(
        None, "BUDGET", "'latency_ms <= 20'; repeatable. Default: 'accuracy_drop <= 1%'."
    ),
    prune: str | None = option(None, "A,B", "Shares of channels to remove. Default: auto, found by search."),
    precision: str = option("fp32,int8", "A,B", "fp32, fp16, bf16, int8."),
    target: list[str] | None = option(
        None, "-t, --target NAME", "Device that decides, such as raspberry-pi-4; repeatable."
    ),
    no_host_timing: bool = option(False, "--no-host-timing", "Time nothing on this machine."),
    no_skip: bool = option(False, "--no-skip", "Build candidates that are predicted to miss a latency budget."),
    runtime: str | None = option(None, "A,B", f"{', '.join(runtime_names())}, auto."),
    metric: str | None = option(None, "NAME", "Quality metric: mae, miou, file.py:f, ... Default: accuracy."),
    metric_direction: str | None = option(None, "WAY", "higher or lower is better; for a metric of an unknown name."),
    loss: str | None = option(None, "NAME", "Loss: mse, bce_with_logits, file.py:f, ... Default: by the metric."),
    fair: Fair = False,
    settings: list[str] | None = option(
        None, "--set KEY=VALUE", "Any other key of a configuration: seed=1, fine_tune_epochs=5."
    ),
    measure_on: MeasureOn = None,
    workers: Workers = 0,
    scheduler: Scheduler = None,
    insecure: Insecure = False,
    retry_failed: RetryFailed = False,
    fresh: Fresh = False,
    output: Path = option(Path("sweep"), "-o, --output DIR", "Folder to write."),
) -> None:
    """Try pruning, precisions and runtimes on a trained model, and recommend a variant.
    Exit code 0: a candidate is accepted; 1: no candidate keeps the budgets; 2: wrong use.

    \b
    edge-opt sweep net.py:trained --data net.py:loaders --prune 0,0.5 --budget "latency_ms <= 20"
    """
    _check_scheduler(scheduler)
    from edge_opt.report.sweep_files import sweep_document
    from edge_opt.run.config import read_settings
    from edge_opt.run.pipeline import sweep as run_sweep
    from edge_opt.search.sweep_progress import progress

    chosen = {
        "pruning_levels": None if prune is None else _levels(prune),
        "precisions": _words(precision),
        "runtimes": runtime if runtime in (None, "auto") else _words(runtime),
        "budgets": budget or None,
        "metric": metric,
        "target": _one_or_all(target),
        "host_timing": False if no_host_timing else None,
        "skip": False if no_skip else None,
        "metric_direction": metric_direction,
        "loss": loss,
        "fair": fair or None,
    }
    chosen = {key: value for key, value in chosen.items() if value is not None}
    with redirect_stdout(sys.stderr), progress("json" if wants_json() else "auto") as listener:
        result = run_sweep(
            model, data, output=output, inputs=_shape(inputs or []), workers=workers, scheduler=scheduler,
            insecure=insecure, measure_on=measure_on, retry_failed=retry_failed, fresh=fresh, on_event=listener,
            **chosen | read_settings(settings or ()),
        )  # fmt: skip
    if wants_json():
        typer.echo(sweep_document(result), nl=False)
    else:
        _print_conclusion(result, output)
    _check_accepted([result])


def _one_or_all(names: list[str] | None) -> str | list[str] | None:
    return names[0] if names and len(names) == 1 else names or None


def _shape(inputs: list[str]) -> tuple[int, ...] | None:
    arguments = read_arguments(inputs)
    if arguments.named or len(arguments.positional) > 1:
        raise InvalidInput("--inputs is the shape of the batch to time, such as 32x1x28x28; data brings other inputs")
    return tuple(arguments.positional[0].shape) if arguments.positional else None


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _levels(prune: str) -> list[float] | str:
    try:
        return prune if prune == "auto" else [float(text) for text in _words(prune)]
    except ValueError as error:
        raise InvalidInput(f"--prune is {prune!r}; write shares such as 0,0.25,0.5, or auto") from error


def status(folder: Path = argument("DIR", "Output folder of `edge-opt run` or `sweep`.")) -> None:
    """Show how far the sweep in a folder is, who runs it, and the best candidate so far.

    \b
    edge-opt status outputs
    """
    from edge_opt.search.sweep_progress import status as status_of

    print_record(
        status_of(folder), "status", lambda now: {**asdict(now), "left": now.left, "is_running": now.is_running}
    )


def report(
    sources: list[Path] = argument("DIR...", "Runs, folders of runs, a profile or sweep (.json), or a model file."),
    target: list[str] | None = option(None, "-t, --target NAME", "Device to show rooflines of; repeatable."),
    title: str | None = option(None, "TEXT", "Heading of the page. Default: the model."),
    output: Path | None = option(
        None, "-o, --output FILE", "File to write. Default: DIR/report.html; runs.html of several."
    ),
) -> None:
    """Write one HTML page of a run, or of several runs side by side; it needs no network and no server.

    \b
    edge-opt report runs/mnist
    edge-opt report runs/before runs/after
    edge-opt report runs
    edge-opt report profile.json -o report.html -t raspberry-pi-5 -t jetson-nano
    edge-opt report model.onnx
    """
    from edge_opt.report.page import runs_in, write_page, write_report, write_runs

    shown: dict[str, Any] = {"devices": target, "title": title}
    if len(sources) == 1 and sources[0].suffix.lower() in MODEL_FILES:
        profiled = _profile_of_file(str(sources[0]))
        written = write_page(output or sources[0].with_suffix(".html"), profile=profiled, **shown)
    elif len(sources) == 1 and not runs_in(sources[0]):
        written = write_report(sources[0], output, **shown)
    else:
        written = write_runs(sources, output, **shown)
    _print_written("report", Path(written))


def _profile_of_file(model: str) -> ModelProfile:
    """Return the costs of a file's model with the inputs that the file itself describes."""
    import edge_opt as eo

    with redirect_stdout(sys.stderr):
        loaded = load_model(model)
    if loaded.example is None:
        raise InvalidInput(f"{model!r} has open input shapes; write `edge-opt profile {model} -i SHAPE -o report.html`")
    positional, named = loaded.example
    report_progress(f"tracing {loaded.name}")
    return eo.profile(loaded.model, list(positional) or None, kwargs=named, name=loaded.name)
