"""`edge-opt check`: whether a model keeps within its budgets, as an exit code."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from edge_opt.budget.configured import TABLE, configured_budgets
from edge_opt.budget.metrics import PROFILE_METRICS
from edge_opt.budget.parsing import parse_budget, parse_increase
from edge_opt.cli.inputs import GRAMMAR
from edge_opt.cli.measuring import measuring
from edge_opt.cli.models import FORMS
from edge_opt.cli.shell import NOT_SATISFIED, Debug, talk
from edge_opt.cli.subjects import is_profile, read_profile
from edge_opt.errors import InvalidInput

if TYPE_CHECKING:
    from edge_opt.records import Precision


def check(
    subject: Annotated[
        str, typer.Argument(metavar="PROFILE|MODEL", help=f"A profile saved as .json, or a model: {FORMS}.")
    ],
    budget: Annotated[
        list[str] | None,
        typer.Option("--budget", metavar="BUDGET", help=f"Such as 'macs <= 600M'; without any, those of {TABLE}."),
    ] = None,
    baseline: Annotated[
        Path | None, typer.Option("--baseline", metavar="FILE", help="An earlier profile, saved as .json.")
    ] = None,
    max_increase: Annotated[
        list[str] | None,
        typer.Option("--max-increase", metavar="METRIC=SHARE", help="Over the baseline, such as peak_memory=5%."),
    ] = None,
    inputs: Annotated[list[str] | None, typer.Option("--input", "-i", metavar="SHAPE", help=f"{GRAMMAR}.")] = None,
    batch: Annotated[int | None, typer.Option("--batch", "-b", help="First dimension of every input.")] = None,
    kwarg: Annotated[
        list[str] | None, typer.Option("--kwarg", metavar="NAME=VALUE", help="An argument that is not a tensor.")
    ] = None,
    min_time: Annotated[float, typer.Option("--min-time", metavar="S", help="Least seconds to measure.")] = 1.0,
    threads: Annotated[int | None, typer.Option("--threads", help="Threads to measure with.")] = None,
    target: Annotated[
        str | None, typer.Option("--target", "-t", metavar="NAME", help="Predict for a device, a calibration or host.")
    ] = None,
    precision: Annotated[str, typer.Option("--precision", help="On the target: fp32, fp16, bf16 or int8.")] = "fp32",
    fail_on_undecided: Annotated[
        bool, typer.Option("--fail-on-undecided", help="Exit with 1 where noise hides whether a budget is kept.")
    ] = False,
    markdown: Annotated[
        Path | None, typer.Option("--markdown", metavar="FILE", help="Save for a pull request.")
    ] = None,
    junit: Annotated[Path | None, typer.Option("--junit", metavar="FILE", help="Save as JUnit XML.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    debug: Debug = False,
) -> None:
    """Whether a model keeps within its budgets: exit code 0 if it does, 1 if not, 2 for wrong use.

    \b
    edge-opt check profile.json --budget "macs <= 600M" --budget "peak_memory_mb <= 64"
    edge-opt check net.py:Net -i 1x3x32x32 --baseline main.json --max-increase peak_memory=5%
    edge-opt check net.py:Net -i 1x3x32x32 --target raspberry-pi-4 --budget "predicted_ms <= 50"
    edge-opt check net.py:Net -i 1x3x32x32 --markdown budget.md --junit budget.xml
    """
    import edge_opt as eo
    from edge_opt.report.checked import as_junit, as_markdown, document, render, write

    budgets = [parse_budget(text, PROFILE_METRICS) for text in budget or []]
    increases = [parse_increase(text) for text in max_increase or []]
    if not budgets:
        budgets = list(configured_budgets(Path.cwd()))
    if not budgets and not increases:
        raise InvalidInput(f"there is no budget: give --budget 'macs <= 600M', or write {TABLE} in pyproject.toml")
    if increases and baseline is None:
        raise InvalidInput("--max-increase needs a profile to increase from; give --baseline FILE")
    before = None if baseline is None else eo.load(baseline)
    names = [*(limit.metric for limit in budgets), *(increase.metric for increase in increases)]
    needs_run = any(PROFILE_METRICS[name].is_measured for name in names) and not is_profile(subject)
    options: bool | dict[str, Any]
    with measuring(needs_run, min_time, threads, None) as options:
        profile = read_profile(subject, inputs or [], kwarg or [], batch, options)
    result = eo.check(
        profile,
        *budgets,
        baseline=before,
        max_increase=[increase.text for increase in increases],
        on_undecided="fail" if fail_on_undecided else "pass",
        target=target,
        precision=cast("Precision", precision),
    )
    typer.echo(document(result) if json else f"{render(result)}\n", nl=False)
    for path, content in ((markdown, as_markdown), (junit, as_junit)):
        if path is not None:
            talk(f"saved to {write(path, content(result))}")
    if not result.passed:
        raise typer.Exit(NOT_SATISFIED)
