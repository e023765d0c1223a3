"""edge-opt llm."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from edge_opt.cli.shell import NOT_SATISFIED, Debug, Legend, Verbose, result_console, talk
from edge_opt.errors import InvalidInput

if TYPE_CHECKING:
    from edge_opt.records import Engine, ServingReport

_MODEL = "hf:ORG/NAME, a folder or config.json, or file.py:NAME for a model or configuration of your own."
_WEIGHTS = "Format of the weights: q4_k_m, q8_0, fp16, int4 and others; several with commas: side by side."


_Targets = Annotated[
    list[str] | None,
    typer.Option("--target", "-t", metavar="NAME", help="A device, its file, or host; several: side by side."),
]
_Outputs = Annotated[
    list[Path] | None, typer.Option("--output", "-o", metavar="FILE", help="Save as .json, .html, .md or .txt.")
]
_Threads = Annotated[
    int | None, typer.Option("--threads", metavar="N", help="Threads of a CPU; all of its cores unless given.")
]
_Gguf = Annotated[Path | None, typer.Option("--gguf", metavar="FILE", help="Run this file here with llama-cpp-python.")]
_FailOnUnfit = Annotated[
    bool, typer.Option("--fail-on-unfit", help="Exit with 1 unless everything fits the smallest RAM.")
]


def llm(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=_MODEL)],
    target: _Targets = None,
    weights: Annotated[str, typer.Option("--weights", "-w", metavar="FORMATS", help=_WEIGHTS)] = "fp16",
    context: Annotated[
        int | None, typer.Option("--context", "-c", metavar="N", help="Positions in the cache at the end.")
    ] = None,
    prompt: Annotated[int | None, typer.Option("--prompt", "-p", metavar="N", help="Tokens read first.")] = None,
    batch: Annotated[int, typer.Option("--batch", "-b", metavar="N", help="Sequences served at once.")] = 1,
    kv: Annotated[
        str | None, typer.Option("--kv", metavar="FORMAT", help="Format of the key-value cache: fp16, q8_0, q4_0.")
    ] = None,
    runtime: Annotated[
        str | None, typer.Option("--runtime", metavar="NAME", help="llama.cpp, torch or mlx; by format unless given.")
    ] = None,
    engine: Annotated[str | None, typer.Option("--engine", help="cpu, gpu or npu.")] = None,
    threads: _Threads = None,
    ram: Annotated[
        float | None, typer.Option("--ram", metavar="GIB", help="RAM of your board; else every size it is sold with.")
    ] = None,
    draft: Annotated[
        str | None, typer.Option("--draft", metavar="MODEL", help="A smaller model that proposes tokens.")
    ] = None,
    draft_tokens: Annotated[int, typer.Option("--draft-tokens", metavar="N", help="How many it proposes.")] = 4,
    acceptance: Annotated[
        float, typer.Option("--acceptance", metavar="SHARE", help="Share of its proposals that are kept.")
    ] = 0.7,
    measure: Annotated[bool, typer.Option("--measure", help="Run the real loop here as well, in torch.")] = False,
    gguf: _Gguf = None,
    output: _Outputs = None,
    json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    fail_on_unfit: _FailOnUnfit = False,
    verbose: Verbose = False,
    legend: Legend = False,
    debug: Debug = False,
) -> None:
    """Whether a language model fits a device, how many tokens a second it writes there, and why.

    \b
    edge-opt llm hf:Qwen/Qwen3-4B --target raspberry-pi-5 --weights q4_k_m --context 4096
    edge-opt llm config.json -t raspberry-pi-5 -t apple-m1 -w q4_0,q8_0,fp16
    edge-opt llm models/llama/ -t host -w fp32 --measure
    """
    import edge_opt as eo
    from edge_opt.records import ServingComparison
    from edge_opt.report.serving_tables import save_serving, serving_document, serving_writer

    for path in output or []:
        serving_writer(path)
    if measure and gguf is not None:
        raise InvalidInput("--measure runs torch and --gguf llama-cpp-python; keep one of them")
    # Whatever the user's own code prints goes to stderr, so that stdout holds results only.
    with redirect_stdout(sys.stderr):
        found = eo.llm(
            _source(model),
            target=target if len(target or []) > 1 else next(iter(target or []), None),
            weights=weights,
            context=context,
            prompt=prompt,
            batch=batch,
            kv=kv,
            runtime=runtime,
            engine=cast("Engine | None", engine),
            threads=threads,
            ram_gib=ram,
            draft=None if draft is None else _source(draft),
            draft_tokens=draft_tokens,
            acceptance=acceptance,
            measure=str(gguf) if gguf is not None else measure,
        )
    reports: tuple[ServingReport, ...] = found.reports if isinstance(found, ServingComparison) else (found,)
    if json:
        typer.echo(serving_document(reports), nl=False)
    else:
        _show(reports, verbose, legend)
    for path in output or []:
        talk(f"saved to {save_serving(reports, path)}")
    if fail_on_unfit and not all(report.memory.fits for report in reports):
        raise typer.Exit(NOT_SATISFIED)


def _show(reports: tuple[ServingReport, ...], is_verbose: bool, has_legend: bool) -> None:
    from edge_opt.report.legends import SERVING, print_legend
    from edge_opt.report.serving_tables import show_serving

    console = result_console()
    show_serving(reports, console, is_verbose=is_verbose)
    if has_legend:
        print_legend(console, SERVING)


def _source(text: str) -> Any:
    """A name of the Hub or a path as it is; `file.py:NAME` as the model or configuration that it names."""
    if text.startswith("hf:") or Path(text).exists() or ".py:" not in text:
        return text
    from edge_opt.loading import find_object, parse_reference

    reference = parse_reference(text)
    assert reference is not None
    value = find_object(reference)
    is_factory = callable(value) and not hasattr(value, "parameters") and not hasattr(value, "model_type")
    return value(**reference.arguments) if is_factory or isinstance(value, type) else value
