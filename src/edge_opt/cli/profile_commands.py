"""edge-opt profile, train-cost and llm: what a model, its training step and its decoding cost."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import typer

from edge_opt._support.json import to_plain
from edge_opt._support.progress import report_progress
from edge_opt.boards.battery import battery_joules, interval_seconds
from edge_opt.budgets.budget_metrics import PROFILE_METRICS, parse_budget
from edge_opt.cli import arguments as shared
from edge_opt.cli.arguments import LoadedCall, argument, loaded_call, measuring, named_object, option, split_threads
from edge_opt.cli.shell import (
    NOT_SATISFIED,
    not_satisfied,
    print_and_save,
    print_json,
    print_record,
    print_status,
    refuse_unused,
    result_console,
    tagged,
    wants_json,
)
from edge_opt.errors import InvalidInput, ModelNotFound
from edge_opt.loading import MODEL_FILES, find_object, open_program, parse_reference
from edge_opt.report.profile_text import check_view
from edge_opt.report.save import writer_for
from edge_opt.report.sheets import print_sheet, sheet_of
from edge_opt.report.table import LEVELS, SORT_COLUMNS
from edge_opt.units import MIB, size

if TYPE_CHECKING:
    from edge_opt.records.devices import BatchFit, Engine
    from edge_opt.records.profiles import Budget, Level, ModelProfile


def profile(
    model: shared.ModelArgument,
    inputs: shared.Inputs = None,
    batch: shared.Batch = None,
    mode: str = option("eval", "NAME", "eval or train."),
    target: shared.Targets = None,
    precision: shared.TargetPrecision = None,
    runtime: shared.Runtime = None,
    measure: bool = option(False, "--measure", "Run the model here: latency, memory and energy."),
    min_time: shared.MinTime = 1.0,
    threads: shared.Threads = None,
    runtime_profile: Path | None = option(None, "FILE", "Profile of a runtime (JSON or CSV) to map onto the layers."),
    level: str | None = option(None, "NAME", f"Rows: {', '.join(LEVELS)}. Default: modules as a tree."),
    depth: int | None = option(None, "-d, --depth N", "Fold modules below this depth."),
    sort: str | None = option(None, "-s, --sort KEY", f"{', '.join(SORT_COLUMNS)}."),
    top: int | None = option(None, "-n, --top N", "Only the N largest rows."),
    convention: str = option("edge_opt", "NAME", "Count as fvcore, thop, ptflops, torchinfo, torch, rasp."),
    output: list[Path] | None = option(
        None, "-o, --output FILE", "Save as .json, .csv, .md, .txt, .html, .trace.json, .nodes.json, .onnx."
    ),
    battery: str | None = option(None, "CAPACITY", "Say how long a battery lasts, such as 220mAh@3V; with --every."),
    every: str | None = option(None, "TIME", "Time from one run to the next, such as 10s; with --battery."),
    idle_uw: float | None = option(None, "UW", "Power between two runs in µW. Default: the device's data sheet."),
    strict: bool = option(False, "--strict", "Exit with 1 if an operator has no cost rule."),
    isolate: bool = option(False, "--isolate", "Trace in a separate process; a crash is reported as an error."),
) -> None:
    """Show what each layer of a model costs, from shapes alone.

    \b
    edge-opt profile torchvision:resnet50 -i 1x3x224x224 --depth 1
    edge-opt profile net.py:Net -i 1x3x32x32 --target raspberry-pi-4 --runtime ncnn --threads 1
    """
    import edge_opt as eo
    from edge_opt.records.profiles import ModelProfile
    from edge_opt.report.profile_text import profile_sheet

    if wants_json() and (level, depth, sort, top) != (None, None, None, None):
        raise InvalidInput("--json prints the whole profile; drop it, or drop --level, --depth, --sort and --top")
    _check_battery(battery, every, target)
    refuse_unused("without --measure", "min_time", when=not measure)
    refuse_unused("without --battery", "idle_uw", when=battery is None)
    refuse_unused("on a file, whose mode is fixed", "mode", when=model.lower().endswith(MODEL_FILES))
    check_view(shown := cast("Level", level or "modules"), depth, sort, top)
    for path in output or []:
        _ = _is_view_of_file(path, model) or writer_for(ModelProfile, path)
    call_texts = (model, inputs, batch)
    if len(target or []) > 1:
        needs_layers = {
            "--measure": measure,
            "--output": output, "--convention": convention != "edge_opt", "--mode": mode != "eval",
            "--strict": strict, "--runtime-profile": runtime_profile, "--isolate": isolate,
        }  # fmt: skip
        prediction = {"precision": precision, "runtime": runtime, "threads": threads}
        view = None if (level, depth, sort, top) == (None, None, None, None) else (depth, sort, top, shown)
        _compare_targets(call_texts, target or [], prediction, needs_layers, view)
        return
    here, there = split_threads(threads, measure, target[0] if target else None)
    with measuring(measure, min_time, here, "--measure or --target") as measured, loaded_call(*call_texts) as call:
        report_progress(f"tracing {call.name}")
        options: dict[str, Any] = {"mode": mode, "convention": convention, "measure": measured, "isolate": isolate}
        options |= {"target": target or None, "precision": precision, "runtime": runtime, "threads": there}
        result = eo.profile(call.model, call.inputs, kwargs=call.kwargs, name=call.name, **options)
        result = _with_runtime_times(result, call, runtime_profile, measure)
    print_and_save(result, profile_sheet(result, depth, sort, top, shown), None)
    if battery is not None and every is not None and result.prediction is not None:
        idle_w = None if idle_uw is None else idle_uw * 1e-6
        life = eo.battery_life(result.prediction, battery, every, idle_w=idle_w)
        typer.echo(f"Battery      {life.text}; {life.notes[-1]}", err=wants_json())
    for path in output or []:
        print_status(f"saved to {_save(path, result, call, cast('Level', level or 'leaves'), model)}")
    if strict and result.unpriced:
        count = sum(item.count for item in result.unpriced)
        raise not_satisfied(f"unpriced operators: {count}; the totals are lower bounds; edge_opt.cost_rule adds a rule")


def _check_battery(battery: str | None, every: str | None, targets: list[str] | None) -> None:
    if (battery is None) != (every is None):
        raise InvalidInput("--battery and --every go together, such as --battery 220mAh@3V --every 10s")
    if battery is not None and len(targets or []) != 1:
        raise InvalidInput("--battery needs one --target, such as -t nrf52840")
    if battery is not None and every is not None:
        battery_joules(battery), interval_seconds(every)  # before anything is printed


def _compare_targets(
    call_texts: tuple[Any, ...],
    targets: list[str],
    prediction: dict[str, Any],
    needs_one: Mapping[str, object],
    view: tuple[Any, ...] | None,
) -> None:
    """Predict a model on several targets, and print one row for each, below the layers where a view of them is asked.

    `needs_one` are options that go with one target only.
    """
    import edge_opt as eo
    from edge_opt.report.profile_text import profile_sheet

    conflicting = [option for option, value in needs_one.items() if value]
    if conflicting:
        raise InvalidInput(f"{conflicting[0]} works with one --target only; drop it, or keep one target")
    with loaded_call(*call_texts) as call:
        comparison = eo.compare_targets(
            call.model, call.inputs, targets, kwargs=call.kwargs, name=call.name, **prediction
        )
        layers = eo.profile(call.model, call.inputs, kwargs=call.kwargs, name=call.name) if view else None
    if layers is not None and view is not None:
        print_sheet(result_console(), profile_sheet(layers, *view))
    if wants_json():
        print_json(tagged("targets", to_plain(comparison)))
    else:
        print_sheet(result_console(), sheet_of(comparison, is_brief=True))


def _with_runtime_times(result: ModelProfile, call: LoadedCall, path: Path | None, is_measured: bool) -> ModelProfile:
    """Map a runtime's profile onto the layers, if a file of it is given."""
    from edge_opt.measuring.runtime_profile import map_runtime_profile, read_runtime_profile

    if path is None:
        return result
    if is_measured:
        raise InvalidInput("--measure and --runtime-profile exclude each other; drop one of them")
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


_PEAK_MEMORY = {name: metric for name, metric in PROFILE_METRICS.items() if metric.family == "train_peak_memory"}


def train_cost(
    model: shared.ModelArgument,
    inputs: shared.Inputs = None,
    batch: shared.Batch = None,
    loss: str | None = option(None, "REF", "file.py:NAME, a function of the output. Default: the output's sum."),
    optimizer: str = option("adamw", "NAME", "sgd, momentum, adam, adamw, adafactor or adamw-8bit."),
    frozen: str = option("", "PATHS", "Modules without gradients, separated by commas."),
    checkpoint: str = option("", "PATHS", "Modules to recompute in the backward pass, separated by commas."),
    autocast: str | None = option(None, "NAME", "bf16 or fp16 for matrix products."),
    accumulate: int = option(1, "N", "Batches per optimizer step."),
    suggest: bool = option(False, "--suggest", "Show what would reduce the memory of the step."),
    budget: str | None = option(None, "BUDGET", "Exit with 1 above it, such as 'train_peak_memory_mb <= 512'."),
    largest_batch: bool = option(False, "--largest-batch", "Find the largest batch for --budget or a --target's RAM."),
    target: shared.Targets = None,
    top: int | None = option(None, "-n, --top N", "Only the N layers with most FLOPs."),
    output: shared.RecordFiles = None,
) -> None:
    """Show what a training step costs before it is run: FLOPs, and memory by kind.

    \b
    edge-opt train-cost torchvision:resnet18 -i 8x3x224x224 --optimizer sgd
    edge-opt train-cost net.py:Net -i 32x3x32x32 --frozen stem,layer1 --checkpoint layer2,layer3
    edge-opt train-cost net.py:Net -i 32x3x32x32 --budget "train_peak_memory_mb <= 512" --suggest
    edge-opt train-cost net.py:Net -i 1x3x32x32 --budget "train_peak_memory_gb <= 8" --largest-batch
    """
    import edge_opt as eo
    from edge_opt.records.training_steps import TrainingStep
    from edge_opt.report.training_tables import training_sheet

    limit = None if budget is None else parse_budget(budget, _PEAK_MEMORY)
    refuse_unused("with --largest-batch", "suggest", "top", "output", when=largest_batch)
    for path in output or []:
        writer_for(TrainingStep, path)
    with loaded_call(model, inputs, batch) as call:
        options: dict[str, Any] = {
            "loss": None if loss is None else _loss(loss), "optimizer": optimizer, "frozen": frozen,
            "autocast": autocast, "accumulate": accumulate,
        }  # fmt: skip
        if largest_batch:
            fit = _largest_batch(call, limit, target or [], options | {"checkpoint": checkpoint})
        else:
            step = eo.training_step(
                call.model, call.inputs, kwargs=call.kwargs, checkpoint=checkpoint, name=call.name,
                target=target or None, remedies=suggest, **options,
            )  # fmt: skip
    if largest_batch:
        print_record(fit, "batch_fit")
        return
    print_and_save(step, training_sheet(step, top) if top else sheet_of(step, is_brief=True), output)
    scale = 1.0 if limit is None else _PEAK_MEMORY[limit.metric].scale
    if limit is not None and not limit.holds(step.peak_bytes / scale):
        from edge_opt.training_steps.step_report import fewest_checkpoints

        limit_mb = limit.limit * scale / MIB
        choice = fewest_checkpoints(call.model, call.inputs, kwargs=call.kwargs, budget_mb=limit_mb, **options)
        hint = f"--checkpoint {','.join(choice.paths)} keeps it" if choice.fits else "no set of checkpoints keeps it"
        raise not_satisfied(f"the peak is {size(step.peak_bytes)}, and the budget is {limit.text}; {hint}")


def _largest_batch(call: LoadedCall, limit: Budget | None, targets: list[str], options: dict[str, Any]) -> BatchFit:
    """Return the largest batch of a training step within a budget or the RAM of a device."""
    import edge_opt as eo
    from edge_opt.trace.inputs import InputSpec

    if (limit is None) == (len(targets) != 1):
        raise InvalidInput("--largest-batch needs one limit: --budget 'train_peak_memory_mb <= 4096' or one --target")

    def one_sample(spec: Any) -> Any:
        return InputSpec(spec.shape[1:], spec.dtype) if isinstance(spec, InputSpec) else spec

    return eo.fit_batch(
        call.model,
        [one_sample(spec) for spec in call.inputs or []],
        kwargs={name: one_sample(spec) for name, spec in call.kwargs.items()},
        memory_limit_mb=None if limit is None else limit.limit * _PEAK_MEMORY[limit.metric].scale / MIB,
        target=targets[0] if targets else None,
        step="train",
        training=options,
    )


def _loss(reference: str) -> Any:
    """Return the loss that a reference names."""
    problem = f"--loss {reference!r} is not a function; write file.py:NAME or package.module:NAME"
    loss = named_object(reference, problem)
    if isinstance(loss, type):
        loss = loss()
    if not callable(loss):
        raise InvalidInput(problem)
    return loss


_MODEL = "model.gguf, a folder with safetensors or a config.json, hf:ORG/NAME, or file.py:NAME."
_WEIGHTS = "Format: q4_k_m, q8_0, fp16, int4, ...; repeatable, or with commas. Default: the file's own, or fp16."


def llm(
    model: str = argument("MODEL", _MODEL),
    weights: list[str] | None = option(None, "-w, --weights FORMATS", _WEIGHTS),
    context: int | None = option(None, "-c, --context N", "Positions in the key-value cache at the end."),
    prompt: int | None = option(None, "-p, --prompt N", "Tokens of the prompt."),
    batch: int = option(1, "-b, --batch N", "Sequences served at once."),
    kv: str | None = option(None, "FORMAT", "Format of the key-value cache: fp16, q8_0 or q4_0."),
    target: shared.Targets = None,
    runtime: str | None = option(None, "NAME", "llama.cpp, torch, mlx or vllm. Default: by the format."),
    split: str | None = option(None, "DEVICES", "Divide it: gpu:24GiB,cpu:64GiB or tensor:2*gpu:24GiB."),
    no_flash: bool = option(False, "--no-flash", "Without flash attention."),
    engine: str | None = option(None, "NAME", "cpu, gpu or npu."),
    threads: int | None = option(None, "N", "Threads of a CPU. Default: all of its cores."),
    ram: float | None = option(None, "GIB", "RAM of your board. Default: every size it is sold with."),
    measure: bool = option(False, "--measure", "Also run the decoding loop here, in torch."),
    output: shared.RecordFiles = None,
    strict: bool = option(False, "--strict", "Exit with 1 unless it fits the smallest RAM."),
) -> None:
    """Predict whether a language model fits a device, how many tokens per second it writes there, and why.

    \b
    edge-opt llm Qwen3-4B-Q4_K_M.gguf --target raspberry-pi-5 --context 4096
    edge-opt llm hf:Qwen/Qwen3-4B -t raspberry-pi-5 -w q4_k_m
    edge-opt llm config.json -t raspberry-pi-5 -t apple-m1 -w q4_0,q8_0,fp16
    edge-opt llm models/llama/ -t host -w fp32 --measure
    """
    import edge_opt as eo
    from edge_opt.records.serving import ServingComparison

    is_anywhere = not target and split is None
    refuse_unused("without --target", "engine", "threads", when=is_anywhere)
    refuse_unused("without --target or --ram", "strict", when=is_anywhere and ram is None)
    for path in output or []:
        writer_for(ServingComparison, path)
    # What the user's own code prints goes to stderr: stdout holds results only.
    with redirect_stdout(sys.stderr):
        result = eo.llm(
            _source(model),
            target=target if len(target or []) > 1 else next(iter(target or []), None),
            weights=",".join(weights) if weights else None,
            context=context,
            prompt=prompt,
            batch=batch,
            kv=kv,
            runtime=runtime,
            engine=cast("Engine | None", engine),
            threads=threads,
            ram_gib=ram,
            flash_attention=not no_flash,
            split=split,
            measure=measure,
        )
    print_and_save(result, sheet_of(result, is_brief=True), output)
    reports = result.reports if isinstance(result, ServingComparison) else (result,)
    if strict and not all(report.memory.fits for report in reports):
        raise typer.Exit(NOT_SATISFIED)


def _source(text: str) -> Any:
    """Return a name of the Hub or a path as it is, and the model or configuration that `file.py:NAME` names."""
    if text.startswith("hf:") or Path(text).exists():
        return text
    reference = parse_reference(text)
    if reference is None or ".py:" not in text:
        raise ModelNotFound(f"no folder or file {text!r}; a language model is {_MODEL.removesuffix('.')}")
    value = find_object(reference)
    is_factory = callable(value) and not hasattr(value, "parameters") and not hasattr(value, "model_type")
    return value(**reference.arguments) if is_factory or isinstance(value, type) else value
