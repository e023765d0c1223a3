"""edge-opt compare, check, prune and convert: variants of a model, and whether they keep within budgets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import typer

from edge_opt._support.files import own_folder
from edge_opt.budgets.budget_metrics import PROFILE_METRICS, TABLE, configured_budgets, parse_budgets, parse_increase
from edge_opt.cli import arguments as shared
from edge_opt.cli.arguments import argument, option
from edge_opt.cli.shell import (
    NOT_SATISFIED,
    not_satisfied,
    print_and_save,
    print_record,
    print_status,
    refuse_unused,
    result_width,
    wants_json,
)
from edge_opt.errors import ExportFailed, InvalidInput
from edge_opt.loading import MODEL_FILES, Loaded
from edge_opt.report.comparison import SORT_KEYS
from edge_opt.report.table import check_choice
from edge_opt.runtimes.registry import find_runtime, runtime_names, runtimes_by_ending
from edge_opt.units import percent

if TYPE_CHECKING:
    from edge_opt.records.compression import Importance
    from edge_opt.records.devices import Precision
    from edge_opt.records.profiles import Budget, Increase, ModelComparison


_CANDIDATE = "RUN#CANDIDATE"


def _compare_candidates(references: Sequence[str]) -> ModelComparison:
    """Compare candidates with the first of them; names of several runs include the run."""
    import edge_opt as eo
    from edge_opt.model_comparison import find_trial
    from edge_opt.report.sweep_files import load_sweep

    other = next((reference for reference in references if not shared.is_candidate(reference)), None)
    if other is not None:
        raise InvalidInput(f"{other!r} is not a candidate of a sweep; write {_CANDIDATE} for each")
    pairs = [reference.rpartition("#")[::2] for reference in references]
    trials = {(run, name): find_trial(load_sweep(run), name) for run, name in pairs}
    several = len({run for run, _ in pairs}) > 1
    names = [f"{pair[0]}#{trials[pair].candidate.label}" if several else trials[pair].candidate.label for pair in pairs]
    return eo.compare(*(trials[pair] for pair in pairs), names=names)


def compare(
    models: list[str] = argument(
        "A B [C...]", f"Saved profiles (.json), candidates of sweeps ({_CANDIDATE}), or models: {shared.MODEL_FORMS}."
    ),
    inputs: shared.Inputs = None,
    batch: shared.Batch = None,
    measure: bool = option(False, "--measure", "Run the models too, and compare their latency."),
    min_time: shared.MinTime = 1.0,
    threads: int | None = option(None, "N", "Threads to measure with."),
    sort: str | None = option(
        None, "-s, --sort KEY", f"Sort by difference in {', '.join(SORT_KEYS)}. Default: the order of the layers."
    ),
    top: int | None = option(None, "-n, --top N", "Only the N layers that differ most."),
    everything: bool = option(False, "--all", "Show the layers that are the same too."),
    output: list[Path] | None = option(None, "-o, --output FILE", "Save as .json, .csv, .md, .html or .txt."),
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

    if len(models) < 2:
        raise InvalidInput(f"only {models[0]!r} was given; name at least two profiles or models to compare")
    if wants_json() and (sort is not None or top is not None or everything):
        raise InvalidInput("--json prints the whole comparison; drop it, or drop --sort, --top and --all")
    check_choice(SORT_KEYS, sort, top)
    for path in output or []:
        writer_for(ModelComparison, path)
    if any(map(shared.is_candidate, models)):
        if measure or inputs or batch is not None:
            raise InvalidInput("candidates were measured in their sweep; drop --measure, --inputs and --batch")
        comparison = _compare_candidates(models)
    else:
        refuse_unused("on saved profiles", "inputs", "batch", "measure", when=all(map(shared.is_profile, models)))
        refuse_unused("without --measure", "min_time", when=not measure)
        with shared.measuring(measure, min_time, threads) as options:
            profiles = [shared.read_profile(model, options, inputs, batch) for model in models]
        # A saved profile is shown by its own name and its file, a model as it was named.
        names = [
            f"{profile.name} ({model})" if shared.is_profile(model) else model
            for model, profile in zip(models, profiles, strict=True)
        ]
        comparison = eo.compare(*profiles, names=names)
    print_and_save(comparison, shown_comparison(comparison, sort, top, everything=everything), output)


def check(
    subject: str = argument("PROFILE|MODEL", f"Saved profile (.json), or {shared.MODEL_FORMS}."),
    inputs: shared.Inputs = None,
    batch: shared.Batch = None,
    budget: list[str] | None = option(
        None, "BUDGET", f"'macs <= 600M'; repeatable. Default: {TABLE} in pyproject.toml."
    ),
    baseline: str | None = option(None, "FILE|MODEL", "Earlier profile (.json) or model."),
    max_increase: list[str] | None = option(
        None, "METRIC=SHARE", "Largest increase over the baseline, such as peak_memory=5%."
    ),
    optimizer: str = option("adamw", "NAME", "Optimizer for train_flops and train_peak_memory_mb."),
    strict: bool = option(False, "--strict", "Exit with 1 also where noise hides whether a budget is kept."),
    target: shared.Target = None,
    precision: shared.TargetPrecision = None,
    runtime: shared.Runtime = None,
    threads: shared.Threads = None,
    min_time: shared.MinTime = 1.0,
    output: list[Path] | None = option(
        None, "-o, --output FILE", "Save as .md (also without a suffix), .xml (JUnit), .json, .html or .txt."
    ),
) -> None:
    """Check whether a model keeps its budgets. Exit code 0: it does; 1: it does not; 2: wrong use.

    \b
    edge-opt check profile.json --budget "macs <= 600M" --budget "peak_memory_mb <= 64"
    edge-opt check net.py:Net -i 1x3x32x32 -t raspberry-pi-4 --threads 1 --budget "predicted_ms <= 50"
    edge-opt check net.py:Net -i 1x3x32x32 --baseline old.py:Net --max-increase latency=2%
    edge-opt check net.py:Net -i 1x3x32x32 -o budget.md -o budget.xml
    """
    import edge_opt as eo
    from edge_opt._support.files import write_named
    from edge_opt.records.profiles import CheckResult
    from edge_opt.report.save import writer_for
    from edge_opt.report.sheets import record_document, record_text

    # GitHub's step summary is a file without a suffix, for Markdown.
    writers = {path: writer_for(CheckResult, path if path.suffix else f"{path}.md") for path in output or []}
    budgets, increases = _limits(budget or [], max_increase or [], baseline is not None)
    if shared.is_profile(subject) and baseline is not None and not shared.is_profile(baseline):
        raise InvalidInput(f"--baseline {baseline} is a model, and {subject} is a profile; give two of a kind")
    limited = [PROFILE_METRICS[it.metric] for it in budgets] + [PROFILE_METRICS[it.metric] for it in increases]
    is_trained, is_predicted = any(it.is_trained for it in limited), any(it.is_predicted for it in limited)
    needs_run = any(it.is_measured for it in limited) and not shared.is_profile(subject)
    refuse_unused("on a saved profile", "inputs", "batch", when=shared.is_profile(subject))
    refuse_unused("without a budget on a measured figure of a model", "min_time", when=not needs_run)
    refuse_unused("without a budget on a training step", "optimizer", when=not is_trained)
    refuse_unused("without a budget on a figure of it, such as predicted_ms", "target", when=not is_predicted)
    here, there = shared.split_threads(threads, needs_run, target)
    options: dict[str, Any] = {
        "baseline": baseline,
        "max_increase": [increase.text for increase in increases],
        "on_undecided": "fail" if strict else "pass",
        "target": target,
        "precision": cast("Precision | None", precision),
        "runtime": runtime,
        "threads": there,
        "optimizer": optimizer,
    }
    with shared.measuring(needs_run, min_time, here, "--target or a budget on latency") as measure:
        if shared.is_profile(subject):
            result = eo.check(subject, *budgets, **options)
        else:
            with shared.loaded_call(subject, inputs, batch) as call:
                loaded = Loaded(call.model, call.name)
                result = eo.check(loaded, *budgets, inputs=call.inputs, kwargs=call.kwargs, measure=measure, **options)
    if wants_json():
        typer.echo(record_document(result), nl=False)
    else:
        typer.echo(record_text(result, result_width()))
    for path in output or []:
        print_status(f"saved to {write_named(path, writers[path](result))}")
    if not result.passed:
        raise typer.Exit(NOT_SATISFIED)


def _limits(
    budget: Sequence[str], max_increase: Sequence[str], has_baseline: bool
) -> tuple[list[Budget], list[Increase]]:
    """Return the limits of the command line, or else those of pyproject.toml."""
    budgets = list(parse_budgets(budget or configured_budgets(Path.cwd()), PROFILE_METRICS))
    increases = [parse_increase(text) for text in max_increase]
    if not budgets and not increases:
        options = "--budget 'macs <= 600M', --baseline FILE --max-increase macs=5%"
        raise InvalidInput(f"no budget to check; add {options}, or {TABLE} in pyproject.toml")
    if increases and not has_baseline:
        raise InvalidInput("--max-increase requires --baseline: an earlier profile (.json) or model")
    return budgets, increases


def _source(model: str, taken: tuple[str, ...] = ()) -> str:
    """Return the reference; a file is refused, because pruning and conversion need the model that it was made from."""
    if model.lower().endswith(MODEL_FILES) and not model.lower().endswith(taken):
        raise InvalidInput(f"{model!r} is a file, which cannot be changed; give the model's source: net.py:Net")
    return model


def prune(
    model: shared.ModelArgument,
    inputs: shared.Inputs = None,
    weights: Path | None = option(
        None, "-w, --weights FILE", "Weights to load: .safetensors, or .pt with tensors only."
    ),
    ratio: list[str] | None = option(
        None, "-r, --ratio [NAME=]RATIO", "Share of the channels to remove, of all layers or of one."
    ),
    macs_target: float | None = option(None, "SHARE", "Share of the MACs to keep."),
    latency_target: float | None = option(None, "SHARE", "Share of the latency to keep, on --target."),
    importance: str = option("auto", "NAME", "Which channels go: by weights (group) or random. Default: group."),
    ignore: list[str] | None = option(None, "NAME", "Layer or module that is not pruned; repeatable."),
    round_to: str = option("auto", "N", "Keep a multiple of N channels. Default: auto, fast on the target."),
    seed: int = option(0, "N", "Seed of --importance random."),
    target: shared.Target = None,
    runtime: shared.Runtime = None,
    threads: int | None = option(None, "N", "Threads of the runtime on the target."),
    output: Path | None = option(None, "-o, --output DIR", "Save the pruned model, without pickles."),
    strict: bool = option(False, "--strict", "Exit with 1 if a target is missed by more than 10 %."),
) -> None:
    """Remove the least important channels and heads, verify the result, and save it.

    \b
    edge-opt prune torchvision:resnet18 -i 1x3x224x224 --ratio 0.5 -o pruned
    edge-opt prune net.py:Net -i 1x3x32x32 --macs-target 0.5 --ignore stem
    edge-opt prune net.py:Net -i 1x3x32x32 --ratio block.conv1=0.3 --json
    """
    if importance in ("taylor", "reconstruction"):
        raise InvalidInput(f"--importance {importance} needs data; use group or random, or loader= of eo.prune")
    if not (ratio or macs_target or latency_target):
        raise InvalidInput("nothing says how much to prune; add --ratio 0.5, --macs-target 0.5 or --latency-target 0.5")
    if latency_target is not None and target is None:
        raise InvalidInput("--latency-target requires --target: a device, a calibration file or host")
    refuse_unused("without --importance random", "seed", when=importance != "random")
    refuse_unused("without --macs-target or --latency-target", "strict", when=not (macs_target or latency_target))
    from edge_opt import compress

    ratios: dict[str, float] = {}
    for text in ratio or []:
        layer, share = _layer_ratio(text)
        if layer in ratios:
            raise InvalidInput(f"--ratio gives {layer or 'all layers'} two ratios, {ratios[layer]:g} and {share:g}")
        ratios[layer] = share
    with shared.loaded_call(_source(model), inputs) as call:
        if weights is not None:
            compress.load_weights(call.model, weights)
        pruned = compress.prune(
            call.model,
            call.inputs,
            ratios.pop("", None),
            kwargs=call.kwargs,
            layers=ratios,
            macs_target=macs_target,
            latency_target=latency_target,
            target=target,
            runtime=runtime,
            threads=threads,
            importance=cast("Importance", importance),
            round_to=int(round_to) if round_to.isdecimal() else cast("Any", round_to),
            ignored=ignore or (),
            seed=seed,
        )
    saved = None if output is None else compress.save_pruned(pruned, output)
    print_record(pruned, "pruned", lambda record: record.to_dict() | {"saved": None if saved is None else str(saved)})
    if saved is not None:
        print_status(f"saved to {saved}; load it with edge_opt.compress.load_pruned({str(saved)!r}, Net)")
    if strict and (macs_target or latency_target) and pruned.shortfalls:
        raise not_satisfied("the target is missed by more than 10 %")


def _layer_ratio(text: str) -> tuple[str, float]:
    """Return a layer and its ratio; a ratio of every layer has an empty name."""
    name, equals, value = text.rpartition("=")
    try:
        return (name, float(value)) if name or not equals else (name, float(text))
    except ValueError:
        raise InvalidInput(f"--ratio {text!r} cannot be read; write a share such as 0.5, or LAYER=RATIO") from None


def convert(
    model: shared.ModelArgument,
    inputs: shared.Inputs = None,
    precision: str | None = option(
        None, "NAME", "fp32, fp16, bf16, int8, or int4 (weights only). Default: int8 with --calibration, else fp32."
    ),
    runtime: str | None = option(
        None, "NAME", f"{', '.join(runtime_names())} or tflm. Default: by the suffix of --output, else onnxruntime."
    ),
    scheme: str = option(
        "auto", "NAME", "How int8 is made: static (ranges from calibration), dynamic, weights (weight-only) or auto."
    ),
    keep_float: list[str] | None = option(None, "LAYER", "Layer to keep in float; repeatable. auto: as few as needed."),
    calibration: str | None = option(
        None, "-c, --calibration REF", "Real inputs for int8: file.py:NAME, a loader or batches; random: noise."
    ),
    calibration_batches: int = option(32, "N", "Most calibration batches to use."),
    verify_on: str | None = option(None, "REF", "Batches to compare on. Default: the calibration, else --inputs."),
    max_difference: float | None = option(
        None, "SHARE", "Largest difference of outputs over their mean. Default: fp32 0.01, fp16 0.05, int8 0.2."
    ),
    min_agreement: float | None = option(None, "SHARE", "Exit with 1 below this top-1 agreement."),
    output: Path = option(
        Path(),
        "-o, --output FILE|DIR",
        "File (.onnx, .tflite, .pte), or folder for MODEL.PRECISION.SUFFIX. Default: this folder.",
    ),
    core: str = option("cortex-m4", "NAME", "For tflm: core or board of the arena."),
) -> None:
    """Convert a model to a precision and a runtime, run it, and show how far its outputs agree.

    \b
    edge-opt convert net.py:Net -i 1x3x32x32 -o net.onnx
    edge-opt convert net.py:Net -i 1x3x32x32 --precision int8 --calibration data.py:loader -o out/
    edge-opt convert model.onnx --precision int8 --scheme dynamic -o model.int8.onnx
    edge-opt convert net.py:Net -i 1x1x28x28 -c data.py:loader --runtime tflm --core rp2040 -o out/
    """
    import edge_opt as eo
    from edge_opt.report.record_sheets import conversion_document
    from edge_opt.runtimes.convert import convert as convert_model

    is_firmware = runtime == "tflm"
    is_written = is_firmware and Path(model).suffix.lower() == ".tflite"
    precision = precision or ("fp32" if calibration is None else "int8")
    _check_convert(is_written, is_firmware, precision, calibration, min_agreement)
    if is_written:
        _write_firmware(model, output, core)
        return
    is_quantized = precision in ("int8", "int4")
    runtime, folder, filename = _destination(output, runtime, model)
    source = _source(model, (".onnx", ".pt2") if is_quantized else (".pt2",))
    with shared.loaded_call(source, inputs) as call:
        try:
            converted = convert_model(
                call.model,
                call.inputs,
                precision,
                runtime,
                kwargs=call.kwargs,
                calibration=_calibration(calibration, call, calibration_batches),
                calibration_batches=calibration_batches,
                output=folder,
                filename=filename,
                keep_float="auto" if keep_float == ["auto"] else keep_float or (),
                verify_on=None if verify_on is None else shared.load_batches(verify_on),
                # A file in float may be for another machine: what it runs in on this one is shown, not required.
                require_precision=is_quantized,
                max_difference=max_difference,
                scheme=scheme,
                fixed_batch=is_firmware,  # TFLM has no dynamic shapes.
            )
        except ExportFailed:
            # Inputs of a wrong shape are the usual reason, and the trace names them better than an exporter does.
            eo.profile(call.model, call.inputs, kwargs=call.kwargs)
            raise
    if is_firmware:
        converted = replace(converted, path=_write_firmware(converted.path, output, core))
    print_record(converted, "converted", conversion_document)
    print_status(f"saved to {converted.path}")
    _check_agreement(converted.agreement.top1, min_agreement)


def _check_convert(
    is_written: bool, is_firmware: bool, precision: str, calibration: str | None, min_agreement: float | None
) -> None:
    if min_agreement is not None and not 0 <= min_agreement <= 1:
        raise InvalidInput(f"--min-agreement is {min_agreement}; it is a share from 0 to 1, such as 0.99")
    unused = "inputs precision scheme keep_float calibration calibration_batches verify_on max_difference min_agreement"
    refuse_unused("on a .tflite file, which is not converted again", *unused.split(), when=is_written)
    refuse_unused("without --runtime tflm", "core", when=not is_firmware)
    refuse_unused("without --precision int8", "scheme", when=precision != "int8")
    refuse_unused("without --calibration", "calibration_batches", when=calibration is None)


def _write_firmware(model: str, output: Path, core: str) -> str:
    """Write a .tflite file as files of a firmware project, and return the file of the model."""
    from edge_opt.runtimes.tflm_firmware import write_firmware

    paths = write_firmware(model, output, core=core, kernels="auto")
    for path in paths:
        print_status(f"saved to {path}")
    return str(paths[0])


def _destination(output: Path, runtime: str | None, model: str) -> tuple[str, Path, str | None]:
    """Return the runtime, the folder, and the name of the file unless it follows from the model."""
    if runtime == "tflm":
        # TFLM runs the file that LiteRT's converter writes.
        return "litert", own_folder(), None
    if output.is_file() and Path(model).resolve() == output.resolve():
        raise InvalidInput(f"--output {output} is the model itself; choose another name")
    endings = runtimes_by_ending()
    if output.suffix not in endings:
        if output.suffix and not output.is_dir():
            raise InvalidInput(f"--output {output} must end in {', '.join(endings)}, or be a folder that exists")
        return runtime or "onnxruntime", output, None
    if runtime is not None and f".{find_runtime(runtime).suffix}" != output.suffix:
        raise InvalidInput(f"--runtime {runtime} writes .{find_runtime(runtime).suffix} files, not {output}")
    return runtime or endings[output.suffix], output.parent, output.name


def _calibration(reference: str | None, call: shared.LoadedCall, count: int) -> Iterable[Any] | None:
    """Return the batches that a reference names, or noise."""
    if reference is None:
        return None
    if reference != "random":
        return shared.load_batches(reference)
    print_status("calibrated on noise: agreement and accuracy of this file say nothing about real inputs")
    return shared.random_batches(call.inputs or [], call.kwargs, min(count, 4))


def _check_agreement(top1: float | None, min_agreement: float | None) -> None:
    if min_agreement is None:
        return
    if top1 is None:
        raise InvalidInput("--min-agreement needs a model whose first output is one row of scores per sample")
    if top1 < min_agreement:
        raise not_satisfied(f"top-1 agreement is {percent(top1)}, below the {percent(min_agreement)} asked for")
