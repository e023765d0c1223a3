"""edge-opt profile, train-cost and llm: what a model, its training step and its decoding cost."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from typer import Argument, Option

from edge_opt._support.json import to_plain
from edge_opt._support.progress import report_progress
from edge_opt.cli import arguments as shared
from edge_opt.cli.arguments import LoadedCall, loaded_call, measuring, named_object, split_threads
from edge_opt.cli.shell import (
    NOT_SATISFIED,
    Trust,
    Verbose,
    not_satisfied,
    print_json,
    print_status,
    result_console,
)
from edge_opt.errors import InvalidInput
from edge_opt.loading import MODEL_FILES, find_object, open_program, parse_reference
from edge_opt.report.profile_text import check_view
from edge_opt.report.save import writer_for
from edge_opt.report.sheets import Sheet, print_sheet, record_document, sheet_of
from edge_opt.report.table import LEVELS, SORT_COLUMNS

if TYPE_CHECKING:
    from edge_opt.records.devices import Engine
    from edge_opt.records.profiles import Level, ModelProfile


Output = Annotated[
    list[Path] | None,
    Option(
        "--output", "-o", metavar="FILE", help="Save as .json, .csv, .md, .txt, .html, .trace.json, .nodes.json, .onnx."
    ),
]


def profile(
    model: shared.ModelArgument,
    inputs: shared.Inputs = None,
    inputs_ref: shared.InputsRef = None,
    batch: shared.Batch = None,
    kwarg: shared.Keywords = None,
    mode: Annotated[str, Option(help="eval or train.")] = "eval",
    convention: Annotated[
        str, Option(metavar="NAME", help="Count as fvcore, thop, ptflops, torch or rasp does.")
    ] = "edge_opt",
    measure: Annotated[bool, Option("--measure", help="Run it too: latency, memory, energy here.")] = False,
    min_time: shared.MinTime = 1.0,
    threads: shared.Threads = None,
    power_watts: Annotated[float | None, Option(help="Power for an energy proxy where no meter is usable.")] = None,
    target: shared.Targets = None,
    precision: Annotated[str, Option(help="fp32, fp16, bf16, int8, int4.")] = "fp32",
    runtime: shared.Runtime = None,
    level: Annotated[str | None, Option(help=f"{', '.join(LEVELS)}; else a tree.")] = None,
    depth: Annotated[int | None, Option("--depth", "-d", help="Fold modules below this depth.")] = None,
    sort: Annotated[
        str | None, Option("--sort", "-s", metavar="KEY", help=f"A list by {', '.join(SORT_COLUMNS)}.")
    ] = None,
    top: Annotated[int | None, Option("--top", "-n", help="Only the N largest.")] = None,
    output: Output = None,
    json: shared.Json = False,
    fail_on_unpriced: Annotated[
        bool, Option("--fail-on-unpriced", help="Exit with 1 if an operator has no price.")
    ] = False,
    runtime_profile: Annotated[
        Path | None, Option(metavar="FILE", help="Map a runtime's profile, JSON or CSV, onto the layers.")
    ] = None,
    verbose: Verbose = False,
    trust: Trust = False,
) -> None:
    """Show what each layer of a model costs, from shapes alone.

    \b
    edge-opt profile torchvision:resnet50 -i 1x3x224x224 --depth 1
    edge-opt profile 'net.py:Net(width=2)' -i 1x3x32x32 --sort bytes --top 10
    edge-opt profile net.py:Net -i 8x3x32x32 --measure --threads 1
    edge-opt profile net.py:Net -i 1x3x32x32 --target raspberry-pi-4 --runtime ncnn --threads 1
    edge-opt profile my.pkg:bert -i ids:1x128:int64 --kwarg use_cache=false -o bert.json
    """
    import edge_opt as eo
    from edge_opt.records.profiles import ModelProfile
    from edge_opt.report.profile_text import profile_sheet

    if json and (level, depth, sort, top) != (None, None, None, None):
        raise InvalidInput("--json prints the whole profile; drop it, or drop --level, --depth, --sort and --top")
    check_view(shown := cast("Level", level or "modules"), depth, sort, top)
    for path in output or []:
        _ = _is_view_of_file(path, model) or writer_for(ModelProfile, path)
    call_texts = (model, inputs, kwarg, batch, inputs_ref)
    if len(target or []) > 1:
        needs_layers = {
            "--measure": measure, "--level": level, "--depth": depth is not None, "--sort": sort, "--top": top,
            "--output": output, "--convention": convention != "edge_opt", "--mode": mode != "eval",
            "--fail-on-unpriced": fail_on_unpriced, "--runtime-profile": runtime_profile,
        }  # fmt: skip
        prediction = {"precision": precision, "runtime": runtime, "threads": threads}
        _compare_targets(call_texts, target or [], prediction, needs_layers, json, verbose)
        return
    here, there = split_threads(threads, measure, target[0] if target else None)
    with measuring(measure, min_time, here, power_watts) as measurement, loaded_call(*call_texts) as call:
        report_progress(f"tracing {call.name}")
        options: dict[str, Any] = {"mode": mode, "convention": convention, "measure": measurement}
        options |= {"target": target or None, "precision": precision, "runtime": runtime, "threads": there}
        result = eo.profile(call.model, call.inputs, kwargs=call.kwargs, name=call.name, **options)
        result = _with_runtime_times(result, call, runtime_profile, measure)
    if json:
        typer.echo(record_document(result), nl=False)
    else:
        print_sheet(result_console(), profile_sheet(result, depth, sort, top, shown, verbose))
    for path in output or []:
        print_status(f"saved to {_save(path, result, call, cast('Level', level or 'leaves'), model)}")
    if fail_on_unpriced and result.unpriced:
        count = sum(item.count for item in result.unpriced)
        raise not_satisfied(f"unpriced operators: {count}; the totals are lower bounds; edge_opt.cost_rule adds a rule")


def _compare_targets(
    call_texts: tuple[Any, ...], targets: list[str], prediction: dict[str, Any], needs_layers: Mapping[str, object],
    json: bool, verbose: bool,
) -> None:  # fmt: skip
    """Predict a model on several targets, and print one row for each; options that need layers are refused."""
    import edge_opt as eo

    conflicting = [option for option, value in needs_layers.items() if value]
    if conflicting:
        raise InvalidInput(f"{conflicting[0]} works with one --target only; drop it, or keep one target")
    with loaded_call(*call_texts) as call:
        comparison = eo.compare_targets(
            call.model, call.inputs, targets, kwargs=call.kwargs, name=call.name, **prediction
        )
    if json:
        print_json({"format": "edge_opt.targets", **to_plain(comparison)})
    else:
        print_sheet(result_console(), sheet_of(comparison, is_brief=not verbose))


def _with_runtime_times(result: ModelProfile, call: LoadedCall, path: Path | None, is_measured: bool) -> ModelProfile:
    """Map a runtime's profile onto the layers, if a file of it is given."""
    from edge_opt.measuring.runtime_profile import map_runtime_profile, read_runtime_profile

    if path is None:
        return result
    if is_measured:
        raise InvalidInput("--measure and --runtime-profile both say what was measured; drop one of them")
    return map_runtime_profile(result, read_runtime_profile(path), getattr(call.model, "module_of", None), path.name)


def _save(path: Path, result: ModelProfile, call: LoadedCall, level: Level, model: str) -> Path:
    """Save the profile, or a view of the model's file with costs on its nodes."""
    if not _is_view_of_file(path, model):
        return result.save(path, level)
    from edge_opt.model_files.node_costs import save_program_view, save_view

    if model.lower().endswith(".pt2"):
        return save_program_view(open_program(Path(model)), call.inputs, call.kwargs, path)
    return save_view(call.model, result, call.inputs, call.kwargs, path)


# Views that show costs on the nodes of a file, and the files that have such nodes.
_VIEWS = {".onnx": (".onnx",), ".nodes.json": MODEL_FILES}


def _is_view_of_file(path: Path, model: str) -> bool:
    """Return whether the output shows costs on the nodes of a model's file, which only such a file has."""
    files = next((files for suffix, files in _VIEWS.items() if path.name.lower().endswith(suffix)), None)
    if files is not None and not model.lower().endswith(files):
        raise InvalidInput(f"{str(path)!r} shows costs on the nodes of a file; give {' or '.join(files)} as the model")
    return files is not None


def train_cost(
    model: shared.ModelArgument,
    inputs: shared.Inputs = None,
    inputs_ref: shared.InputsRef = None,
    batch: shared.Batch = None,
    kwarg: shared.Keywords = None,
    loss: Annotated[
        str | None, Option(metavar="REF", help="file.py:NAME, a function of the output; else its sum.")
    ] = None,
    optimizer: Annotated[
        str, Option(metavar="NAME", help="sgd, momentum, adam, adamw, adafactor, adamw-8bit.")
    ] = "adamw",
    frozen: Annotated[str, Option(metavar="PATHS", help="Modules without gradients, by commas.")] = "",
    checkpoint: Annotated[
        str, Option(metavar="PATHS", help="Modules to compute again in the backward, by commas.")
    ] = "",
    autocast: Annotated[str | None, Option(help="bf16 or fp16: products run in it.")] = None,
    accumulate: Annotated[int, Option(metavar="N", help="Batches per optimizer step.")] = 1,
    target: shared.Targets = None,
    help_me: Annotated[bool, Option("--what-helps", help="Try what would make the step smaller.")] = False,
    budget: Annotated[
        float | None,
        Option("--budget-mb", metavar="MIB", help="Exit with 1 above this peak; names layers to checkpoint."),
    ] = None,
    top: Annotated[int | None, Option("--top", "-n", help="Only the N layers with most FLOPs.")] = None,
    output: shared.RecordFiles = None,
    json: shared.Json = False,
    trust: Trust = False,
) -> None:
    """Show what a training step costs before it is run: FLOPs, and memory by kind.

    \b
    edge-opt train-cost torchvision:resnet18 -i 8x3x224x224 --optimizer sgd
    edge-opt train-cost net.py:Net -i 32x3x32x32 --frozen stem,layer1 --checkpoint layer2,layer3
    edge-opt train-cost net.py:Net -i 32x3x32x32 --budget-mb 512 --what-helps
    """
    import edge_opt as eo
    from edge_opt.records.training_steps import TrainingStep
    from edge_opt.report.training_tables import training_sheet

    for path in output or []:
        writer_for(TrainingStep, path)
    with loaded_call(model, inputs, kwarg, batch, inputs_ref) as call:
        options: dict[str, Any] = {
            "loss": None if loss is None else _loss(loss), "optimizer": optimizer, "frozen": frozen,
            "autocast": autocast, "accumulate": accumulate,
        }  # fmt: skip
        step = eo.training_step(
            call.model, call.inputs, kwargs=call.kwargs, checkpoint=checkpoint, name=call.name,
            target=target or None, remedies=help_me, **options,
        )  # fmt: skip
    _print_and_save(step, json, training_sheet(step, top) if top else sheet_of(step, is_brief=True), output)
    if budget is not None and step.peak_bytes > budget * 2**20:
        from edge_opt.training_steps.step_report import fewest_checkpoints

        choice = fewest_checkpoints(call.model, call.inputs, kwargs=call.kwargs, budget_mb=budget, **options)
        hint = f"--checkpoint {','.join(choice.paths)} keeps it" if choice.fits else "no set of checkpoints keeps it"
        raise not_satisfied(f"the peak is above {budget:g} MiB; {hint}")


def _print_and_save(record: Any, json: bool, sheet: Sheet, output: Sequence[Path] | None) -> None:
    """Print a record as JSON or as a sheet, and save it."""
    if json:
        typer.echo(record_document(record), nl=False)
    else:
        print_sheet(result_console(), sheet)
    for path in output or []:
        print_status(f"saved to {record.save(path)}")


def _loss(reference: str) -> Any:
    """Return the loss that a reference names."""
    problem = f"--loss {reference!r} names no function; write file.py:NAME or package.module:NAME"
    loss = named_object(reference, problem)
    if isinstance(loss, type):
        loss = loss()
    if not callable(loss):
        raise InvalidInput(problem)
    return loss


_MODEL = "hf:ORG/NAME, a folder or config.json, or file.py:NAME for a model or configuration of your own."
_WEIGHTS = "Format of the weights: q4_k_m, q8_0, fp16, int4 and others; several with commas: side by side."


def llm(
    model: Annotated[str, Argument(metavar="MODEL", help=_MODEL)],
    target: shared.Targets = None,
    weights: Annotated[str, Option("--weights", "-w", metavar="FORMATS", help=_WEIGHTS)] = "fp16",
    context: Annotated[
        int | None, Option("--context", "-c", metavar="N", help="Positions in the cache at the end.")
    ] = None,
    prompt: Annotated[int | None, Option("--prompt", "-p", metavar="N", help="Tokens read first.")] = None,
    batch: Annotated[int, Option("--batch", "-b", metavar="N", help="Sequences served at once.")] = 1,
    kv: Annotated[str | None, Option(metavar="FORMAT", help="Format of the key-value cache: fp16, q8_0, q4_0.")] = None,
    runtime: Annotated[
        str | None, Option(metavar="NAME", help="llama.cpp, torch or mlx; by format unless given.")
    ] = None,
    engine: Annotated[str | None, Option(help="cpu, gpu or npu.")] = None,
    threads: Annotated[int | None, Option(metavar="N", help="Threads of a CPU; all of its cores unless given.")] = None,
    ram: Annotated[
        float | None, Option(metavar="GIB", help="RAM of your board; else every size it is sold with.")
    ] = None,
    measure: Annotated[bool, Option("--measure", help="Run the real loop here as well, in torch.")] = False,
    output: shared.RecordFiles = None,
    json: shared.Json = False,
    fail_on_unfit: Annotated[
        bool, Option("--fail-on-unfit", help="Exit with 1 unless everything fits the smallest RAM.")
    ] = False,
    verbose: Verbose = False,
) -> None:
    """Predict whether a language model fits a device, how many tokens per second it writes there, and why.

    \b
    edge-opt llm hf:Qwen/Qwen3-4B --target raspberry-pi-5 --weights q4_k_m --context 4096
    edge-opt llm config.json -t raspberry-pi-5 -t apple-m1 -w q4_0,q8_0,fp16
    edge-opt llm models/llama/ -t host -w fp32 --measure
    """
    import edge_opt as eo
    from edge_opt.records.serving import ServingComparison

    for path in output or []:
        writer_for(ServingComparison, path)
    # What the user's own code prints goes to stderr: stdout holds results only.
    with redirect_stdout(sys.stderr):
        result = eo.llm(
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
            measure=measure,
        )
    _print_and_save(result, json, sheet_of(result, is_brief=not verbose), output)
    reports = result.reports if isinstance(result, ServingComparison) else (result,)
    if fail_on_unfit and not all(report.memory.fits for report in reports):
        raise typer.Exit(NOT_SATISFIED)


def _source(text: str) -> Any:
    """Return a name of the Hub or a path as it is, and the model or configuration that `file.py:NAME` names."""
    if text.startswith("hf:") or Path(text).exists() or ".py:" not in text:
        return text
    reference = parse_reference(text)
    assert reference is not None
    value = find_object(reference)
    is_factory = callable(value) and not hasattr(value, "parameters") and not hasattr(value, "model_type")
    return value(**reference.arguments) if is_factory or isinstance(value, type) else value
