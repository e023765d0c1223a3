"""edge-opt compare and check."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from typer import Argument, Option

from edge_opt.budgets.budget_metrics import PROFILE_METRICS, TABLE, configured_budgets, parse_budget, parse_increase
from edge_opt.cli import arguments as shared
from edge_opt.cli.arguments import is_profile, loaded_call, measuring, read_profile, split_threads
from edge_opt.cli.shell import NOT_SATISFIED, Trust, print_status, result_console, result_width
from edge_opt.errors import InvalidInput
from edge_opt.loading import FORMS, load_model
from edge_opt.report.comparison import SORT_KEYS, check_choice

if TYPE_CHECKING:
    from edge_opt.records.devices import Precision
    from edge_opt.records.profiles import Budget, Increase, ModelComparison


FORM = "RUN#CANDIDATE"


def _is_candidate(reference: str) -> bool:
    """Return whether it names a candidate of a run; a file may have a # in its own name."""
    return "#" in reference and not Path(reference.partition(":")[0]).exists()


def _compare_candidates(references: Sequence[str]) -> ModelComparison:
    """Compare candidates with the first of them; names of several runs include the run."""
    import edge_opt as eo
    from edge_opt.model_comparison import find_trial
    from edge_opt.report.sweep_files import load_sweep

    other = next((reference for reference in references if not _is_candidate(reference)), None)
    if other is not None:
        raise InvalidInput(f"{other!r} is no candidate of a sweep, and those have no layers; write {FORM} for each")
    pairs = [reference.rpartition("#")[::2] for reference in references]
    trials = {(run, name): find_trial(load_sweep(run), name) for run, name in pairs}
    several = len({run for run, _ in pairs}) > 1
    names = [f"{pair[0]}#{trials[pair].candidate.label}" if several else trials[pair].candidate.label for pair in pairs]
    return eo.compare(*(trials[pair] for pair in pairs), names=names)


def compare(
    models: Annotated[
        list[str],
        Argument(
            metavar="A B [C...]",
            help=f"Saved profiles (.json), models ({FORMS}), or candidates of sweeps, each {FORM}.",
        ),
    ],
    inputs: shared.Inputs = None,
    inputs_ref: shared.InputsRef = None,
    batch: shared.Batch = None,
    kwarg: shared.Keywords = None,
    measure: Annotated[bool, Option("--measure", help="Run the models too, and compare their latency.")] = False,
    min_time: shared.MinTime = 1.0,
    threads: Annotated[int | None, Option(help="Threads to measure with.")] = None,
    sort: Annotated[
        str | None, Option("--sort", "-s", metavar="KEY", help=f"By difference in {', '.join(SORT_KEYS)}.")
    ] = None,
    top: Annotated[int | None, Option("--top", "-n", help="Only the N layers that differ most.")] = None,
    everything: Annotated[bool, Option("--all", help="Layers that are the same, too.")] = False,
    output: Annotated[
        list[Path] | None, Option("--output", "-o", metavar="FILE", help="Save as .json, .csv, .md, .html or .txt.")
    ] = None,
    json: shared.Json = False,
    trust: Trust = False,
) -> None:
    """Show what differs between models, layer by layer; the first is the baseline.

    \b
    edge-opt compare before.json after.json
    edge-opt compare torchvision:resnet18 torchvision:resnet34 -i 1x3x224x224 --sort params --top 10
    edge-opt compare main.json branch.json -o comparison.md -o comparison.html
    edge-opt compare runs/mnist#baseline runs/mnist#best 'runs/mnist#prune 0.5 int8 onnxruntime'
    """
    import edge_opt as eo
    from edge_opt.records.profiles import ModelComparison
    from edge_opt.report.comparison import shown_comparison
    from edge_opt.report.save import writer_for
    from edge_opt.report.sheets import print_sheet, record_document

    if len(models) < 2:
        raise InvalidInput(f"only {models[0]!r} was given; name at least two profiles or models to compare")
    if json and (sort is not None or top is not None or everything):
        raise InvalidInput("--json prints the whole comparison; drop it, or drop --sort, --top and --all")
    check_choice(sort, top)
    for path in output or []:
        writer_for(ModelComparison, path)
    if any(map(_is_candidate, models)):
        if measure or inputs or inputs_ref or kwarg or batch is not None:
            raise InvalidInput("candidates were measured in their sweep; drop --measure, --input, --kwarg and --batch")
        comparison = _compare_candidates(models)
    else:
        with measuring(measure, min_time, threads, None) as options:
            profiles = [read_profile(model, options, inputs, kwarg, batch, inputs_ref) for model in models]
        # A saved profile is shown by its own name and its file, a model as it was named.
        names = [
            f"{profile.name} ({model})" if is_profile(model) else model
            for model, profile in zip(models, profiles, strict=True)
        ]
        comparison = eo.compare(*profiles, names=names)
    if json:
        typer.echo(record_document(comparison), nl=False)
    else:
        shown = shown_comparison(comparison, sort, top, everything=everything)
        print_sheet(result_console(highlight=False), shown)
    for path in output or []:
        print_status(f"saved to {comparison.save(path)}")


def _to_check(
    subject: str, baseline: str | None, call_texts: tuple[Any, ...], options: bool | dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Return the arguments of `check`: a profile and an earlier one, or two models that are timed in turn."""
    import edge_opt as eo

    if baseline is None or is_profile(baseline):
        profile = read_profile(subject, options, *call_texts)
        return profile, {"baseline": None if baseline is None else eo.load(baseline)}
    if is_profile(subject):
        raise InvalidInput(f"the baseline {baseline!r} is a model, and {subject!r} is a profile; give two of a kind")
    with loaded_call(subject, *call_texts) as call:
        before = load_model(baseline).model
    return call.model, {"inputs": call.inputs, "kwargs": call.kwargs, "baseline": before, "measure": options or None}


def check(
    subject: Annotated[str, Argument(metavar="PROFILE|MODEL", help=f"A profile saved as .json, or a model: {FORMS}.")],
    budget: Annotated[
        list[str] | None, Option(metavar="BUDGET", help=f"Such as 'macs <= 600M'; without any, those of {TABLE}.")
    ] = None,
    baseline: Annotated[
        str | None, Option(metavar="FILE|MODEL", help="An earlier profile, saved as .json, or a model.")
    ] = None,
    max_increase: Annotated[
        list[str] | None, Option(metavar="METRIC=SHARE", help="Over the baseline, such as peak_memory=5%.")
    ] = None,
    inputs: shared.Inputs = None,
    inputs_ref: shared.InputsRef = None,
    batch: shared.Batch = None,
    kwarg: shared.Keywords = None,
    min_time: shared.MinTime = 1.0,
    threads: shared.Threads = None,
    target: shared.Target = None,
    precision: Annotated[str, Option(help="On the target: fp32, fp16, bf16 or int8.")] = "fp32",
    runtime: shared.Runtime = None,
    optimizer: Annotated[
        str, Option(metavar="NAME", help="Of the step in train_flops and train_peak_memory_mb.")
    ] = "adamw",
    fail_on_undecided: Annotated[
        bool, Option("--fail-on-undecided", help="Exit with 1 where noise hides whether a budget is kept.")
    ] = False,
    markdown: Annotated[Path | None, Option(metavar="FILE", help="Save for a pull request.")] = None,
    junit: Annotated[Path | None, Option(metavar="FILE", help="Save as JUnit XML.")] = None,
    json: shared.Json = False,
    trust: Trust = False,
) -> None:
    """Check whether a model keeps within its budgets: exit code 0 if it does, 1 if not, 2 for wrong use.

    \b
    edge-opt check profile.json --budget "macs <= 600M" --budget "peak_memory_mb <= 64"
    edge-opt check net.py:Net -i 1x3x32x32 --baseline main.json --max-increase peak_memory=5%
    edge-opt check net.py:Net -i 1x3x32x32 --target raspberry-pi-4 --threads 1 --budget "predicted_ms <= 50"
    edge-opt check net.py:Net -i 1x3x32x32 --baseline old.py:Net --max-increase latency=2%
    edge-opt check net.py:Net -i 1x3x32x32 --markdown budget.md --junit budget.xml
    """
    import edge_opt as eo
    from edge_opt._support.files import write_named
    from edge_opt.report.checks import as_junit
    from edge_opt.report.sheets import record_document, record_text, sheet_markdown, sheet_of

    budgets, increases = _limits(budget or [], max_increase or [], baseline is not None)
    names = [*(limit.metric for limit in budgets), *(increase.metric for increase in increases)]
    needs_run = any(PROFILE_METRICS[name].is_measured for name in names) and not is_profile(subject)
    here, there = split_threads(threads, needs_run, target)
    with measuring(needs_run, min_time, here, None) as measurement:
        checked, options = _to_check(subject, baseline, (inputs, kwarg, batch, inputs_ref), measurement)
        result = eo.check(
            checked,
            *budgets,
            **options,
            max_increase=[increase.text for increase in increases],
            on_undecided="fail" if fail_on_undecided else "pass",
            target=target,
            precision=cast("Precision", precision),
            runtime=runtime,
            threads=there,
            optimizer=optimizer,
        )
    if json:
        typer.echo(record_document(result), nl=False)
    else:
        typer.echo(record_text(result, result_width()))
    if markdown is not None:
        print_status(f"saved to {write_named(markdown, sheet_markdown(sheet_of(result)))}")
    if junit is not None:
        print_status(f"saved to {write_named(junit, as_junit(result))}")
    if not result.passed:
        raise typer.Exit(NOT_SATISFIED)


def _limits(
    budget: Sequence[str], max_increase: Sequence[str], has_baseline: bool
) -> tuple[list[Budget], list[Increase]]:
    """Return the limits of the command line, or else those of pyproject.toml."""
    budgets = [parse_budget(text, PROFILE_METRICS) for text in budget] or list(configured_budgets(Path.cwd()))
    increases = [parse_increase(text) for text in max_increase]
    if not budgets and not increases:
        raise InvalidInput(
            f"there is no budget: give --budget 'macs <= 600M', with --baseline also --max-increase macs=5%, "
            f"or write {TABLE} in pyproject.toml"
        )
    if increases and not has_baseline:
        raise InvalidInput("--max-increase needs a profile to increase from; give --baseline FILE")
    return budgets, increases
