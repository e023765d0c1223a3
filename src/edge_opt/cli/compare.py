"""`edge-opt compare`: models side by side, layer by layer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from edge_opt.cli.candidates import FORM, compare_candidates, is_candidate
from edge_opt.cli.inputs import GRAMMAR
from edge_opt.cli.measuring import measuring
from edge_opt.cli.models import FORMS
from edge_opt.cli.shell import Debug, result_console, talk
from edge_opt.cli.subjects import read_profile
from edge_opt.errors import InvalidInput
from edge_opt.report.differences import SORT_KEYS, check_choice


def compare(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="A B [C...]",
            help=f"Each a profile saved as .json, or a model: {FORMS}; or candidates of sweeps, each {FORM}.",
        ),
    ],
    inputs: Annotated[list[str] | None, typer.Option("--input", "-i", metavar="SHAPE", help=f"{GRAMMAR}.")] = None,
    batch: Annotated[int | None, typer.Option("--batch", "-b", help="First dimension of every input.")] = None,
    kwarg: Annotated[
        list[str] | None, typer.Option("--kwarg", metavar="NAME=VALUE", help="An argument that is not a tensor.")
    ] = None,
    measure: Annotated[bool, typer.Option("--measure", help="Run the models too, and compare their latency.")] = False,
    min_time: Annotated[float, typer.Option("--min-time", metavar="S", help="Least seconds to measure.")] = 1.0,
    threads: Annotated[int | None, typer.Option("--threads", help="Threads to measure with.")] = None,
    sort: Annotated[
        str | None, typer.Option("--sort", "-s", metavar="KEY", help=f"By difference in {', '.join(SORT_KEYS)}.")
    ] = None,
    top: Annotated[int | None, typer.Option("--top", "-n", help="Only the N layers that differ most.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Layers that are the same, too.")] = False,
    output: Annotated[
        list[Path] | None,
        typer.Option("--output", "-o", metavar="FILE", help="Save as .json, .csv, .md, .html or .txt."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the whole comparison as JSON.")] = False,
    debug: Debug = False,
) -> None:
    """What differs between models, layer by layer; the first is the baseline.

    \b
    edge-opt compare before.json after.json
    edge-opt compare torchvision:resnet18 torchvision:resnet34 -i 1x3x224x224 --sort params --top 10
    edge-opt compare main.json branch.json -o comparison.md -o comparison.html
    edge-opt compare runs/mnist#baseline runs/mnist#best 'runs/mnist#prune 0.5 int8 onnxruntime'
    """
    import edge_opt as eo
    from edge_opt.report.compared import document, show, writer_for

    if len(models) < 2:
        raise InvalidInput(f"only {models[0]!r} was given; name at least two profiles or models to compare")
    if json and (sort is not None or top is not None or everything):
        raise InvalidInput("--json prints the whole comparison; drop it, or drop --sort, --top and --all")
    check_choice(sort, top)
    for path in output or []:
        writer_for(path)
    if any(is_candidate(model) for model in models):
        if measure or inputs or kwarg or batch is not None:
            raise InvalidInput("candidates were measured in their sweep; drop --measure, --input, --kwarg and --batch")
        found = compare_candidates(models)
    else:
        with measuring(measure, min_time, threads, None) as options:
            profiles = [read_profile(model, inputs or [], kwarg or [], batch, options) for model in models]
        found = eo.compare(*profiles)
    if json:
        typer.echo(document(found), nl=False)
    else:
        show(found, result_console(highlight=False), sort=sort, top=top, everything=everything)
    for path in output or []:
        talk(f"saved to {found.save(path)}")
