"""edge-opt prune, quantize and export."""

from __future__ import annotations

import json as json_format
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from edge_opt.cli.arguments import (
    FORM,
    Inputs,
    Keywords,
    ModelArgument,
    Runtime,
    load_batches,
    loaded_call,
    random_batches,
)
from edge_opt.cli.shell import NOT_SATISFIED, Debug, Trust, print_result, print_status, result_width
from edge_opt.errors import InvalidInput
from edge_opt.loading import MODEL_FILES
from edge_opt.runtimes.registry import runtime_names
from edge_opt.units import percent

if TYPE_CHECKING:
    from edge_opt.records.compression import Importance, Pruned
    from edge_opt.records.conversions import Converted


def _source(model: str, taken: tuple[str, ...] = ()) -> str:
    """Return the reference unless it names a file: pruning and export need the model that the file was made from."""
    if model.lower().endswith(MODEL_FILES) and not model.lower().endswith(taken):
        raise InvalidInput(
            f"{model!r} is a file of a finished graph, which is not changed here; give the model's source"
        )
    return model


def converted(
    model: str,
    inputs: list[str] | None,
    kwarg: list[str] | None,
    precision: str,
    runtime: str,
    *,
    verify: str | None,
    calibration: Any = None,
    **options: Any,
) -> Converted:
    """Convert the model that a reference names."""
    from edge_opt.runtimes.convert import convert

    source = _source(model, (".onnx", ".pt2") if precision == "int8" else (".pt2",))
    with loaded_call(source, inputs, kwarg) as call:
        return convert(
            call.model,
            call.inputs,
            precision,
            runtime,
            kwargs=call.kwargs,
            calibration=calibration(call.inputs or [], call.kwargs) if callable(calibration) else calibration,
            verify_on=None if verify is None else load_batches(verify),
            **options,
        )


def check_share(value: float | None) -> None:
    """Refuse a --min-agreement outside 0 to 1."""
    if value is not None and not 0 <= value <= 1:
        raise InvalidInput(f"--min-agreement is {value}; it is a share from 0 to 1, such as 0.99")


def show(done: Converted, json: bool, min_agreement: float | None) -> None:
    """Print the verification, and exit with 1 where it is not good enough."""
    from edge_opt.report.results import conversion_document
    from edge_opt.report.sheets import record_text

    if json:
        typer.echo(json_format.dumps(conversion_document(done), indent=1))
    else:
        print_result(record_text(done, result_width()))
    print_status(f"saved to {done.path}")
    if min_agreement is None:
        return
    if done.agreement.top1 is None:
        raise InvalidInput("--min-agreement needs a model whose first output is one row of scores per sample")
    if done.agreement.top1 < min_agreement:
        print_status(f"top-1 agreement is {percent(done.agreement.top1)}, below the {percent(min_agreement)} asked for")
        raise typer.Exit(NOT_SATISFIED)


PruneTarget = Annotated[
    str | None,
    typer.Option("--target", metavar="DEVICE", help="Device, calibration or host: predicted on, and rounded for."),
]


def prune(
    model: ModelArgument,
    inputs: Inputs = None,
    ratio: Annotated[
        float | None, typer.Option("--ratio", "-r", help="Share of every layer's channels to remove.")
    ] = None,
    macs_target: Annotated[float | None, typer.Option("--macs-target", help="Share of the MACs to remain.")] = None,
    latency_target: Annotated[
        float | None, typer.Option("--latency-target", help="Share of the latency to remain, on --target.")
    ] = None,
    target: PruneTarget = None,
    runtime: Runtime = None,
    threads: Annotated[int | None, typer.Option("--threads", help="Of the runtime on the target.")] = None,
    layer: Annotated[
        list[str] | None, typer.Option("--layer", "-l", metavar="NAME=RATIO", help="A ratio for one layer or module.")
    ] = None,
    importance: Annotated[
        str, typer.Option("--importance", help="group or random; others need data, in Python.")
    ] = "auto",
    ignore: Annotated[
        list[str] | None, typer.Option("--ignore", metavar="NAME", help="A layer or module to leave alone.")
    ] = None,
    round_to: Annotated[str, typer.Option("--round-to", help="Kept channels are a multiple; auto is fast.")] = "auto",
    weights: Annotated[
        Path | None, typer.Option("--weights", "-w", help="Weights to load: .safetensors, or .pt with tensors only.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="For --importance random.")] = 0,
    output: Annotated[Path | None, typer.Option("--output", "-o", metavar="DIR", help="Save the pruned model.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    fail_on_shortfall: Annotated[
        bool, typer.Option("--fail-on-shortfall", help="Exit with 1 if a target is missed by more than a tenth.")
    ] = False,
    trust: Trust = False,
    debug: Debug = False,
) -> None:
    """Remove the least important channels and heads, prove the result, and save it without pickles.

    \b
    edge-opt prune torchvision:resnet18 -i 1x3x224x224 --ratio 0.5 -o pruned
    edge-opt prune net.py:Net -i 1x3x32x32 --macs-target 0.5 --ignore stem
    edge-opt prune net.py:Net -i 1x3x32x32 --layer block.conv1=0.3 --json
    """
    if importance in ("taylor", "reconstruction"):
        raise InvalidInput(
            f'importance "{importance}" needs data, which the command line does not have; '
            f"call edge_opt.compress.prune(..., importance='{importance}', loader=...) in Python"
        )
    from edge_opt import compress

    with loaded_call(_source(model), inputs) as call:
        if weights is not None:
            compress.load_weights(call.model, weights)
        pruned = compress.prune(
            call.model,
            call.inputs,
            ratio,
            kwargs=call.kwargs,
            layers=dict(_layer_ratio(text) for text in layer or []),
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
    _print_pruned(pruned, None if output is None else compress.save_pruned(pruned, output), json)
    if fail_on_shortfall and (macs_target or latency_target) and pruned.shortfalls:
        print_status("the target is missed by more than a tenth")
        raise typer.Exit(NOT_SATISFIED)


def _print_pruned(pruned: Pruned, saved: Path | None, as_json: bool) -> None:
    if as_json:
        plain = pruned.to_dict() | {"saved": None if saved is None else str(saved)}
        typer.echo(json_format.dumps(plain, indent=1, allow_nan=False))
    else:
        from edge_opt.report.sheets import record_text

        print_result(record_text(pruned, result_width()))
    if saved is not None:
        print_status(f"saved to {saved}; compress.load_pruned({str(saved)!r}, factory) builds it again")


def _layer_ratio(text: str) -> tuple[str, float]:
    name, equals, value = text.rpartition("=")
    try:
        if equals and name:
            return name, float(value)
    except ValueError:
        pass
    raise InvalidInput(f"--layer {text!r} cannot be read; write NAME=RATIO, such as layer1.0.conv1=0.3")


MaxDifference = Annotated[
    float | None,
    typer.Option("--max-difference", metavar="SHARE", help="Largest difference accepted, over the mean output."),
]
MinAgreement = Annotated[
    float | None, typer.Option("--min-agreement", metavar="SHARE", help="Exit with 1 below this top-1 agreement.")
]


def quantize(
    model: ModelArgument,
    inputs: Inputs = None,
    kwarg: Keywords = None,
    calibration: Annotated[
        str | None, typer.Option("--calibration", "-c", metavar="REF", help=f"Real inputs: {FORM}.")
    ] = None,
    random_calibration: Annotated[
        bool, typer.Option("--random-calibration", help="Noise instead of real inputs: accuracy then means nothing.")
    ] = False,
    batches: Annotated[int, typer.Option("--batches", help="Calibration batches to use at most.")] = 32,
    runtime: Annotated[str, typer.Option("--runtime", help=f"One of {', '.join(runtime_names())}.")] = "onnxruntime",
    scheme: Annotated[str, typer.Option("--scheme", help="auto, static, dynamic or weights.")] = "auto",
    keep_float: Annotated[
        list[str] | None,
        typer.Option("--keep-float", metavar="LAYER", help="Keep a layer in float; auto finds them."),
    ] = None,
    verify: Annotated[str | None, typer.Option("--verify", metavar="REF", help="Compare on these batches.")] = None,
    max_difference: MaxDifference = None,
    min_agreement: MinAgreement = None,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="Where the file goes.")] = Path(),
    json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
    trust: Trust = False,
    debug: Debug = False,
) -> None:
    """Quantise a model to int8 and say what came of it: what runs in int8, agreement, size.

    \b
    edge-opt quantize net.py:Net -i 1x1x28x28 --calibration data.py:loader -o out/
    edge-opt quantize torchvision:resnet18 -i 1x3x224x224 --random-calibration --keep-float conv1
    edge-opt quantize model.onnx --calibration data.py:loader -o out/
    """
    check_share(min_agreement)
    needs_none = scheme in ("dynamic", "weights") and calibration is None
    if (calibration is None) != random_calibration and not needs_none:
        raise InvalidInput(
            "int8 needs real inputs: give --calibration file.py:loader, or --random-calibration to try without"
            if calibration is None
            else "--calibration and --random-calibration exclude each other; keep one of them"
        )

    def ranges(positional: list[Any], named: dict[str, Any]) -> Any:
        if calibration is not None:
            return load_batches(calibration)
        return random_batches(positional, named, min(batches, 4)) if random_calibration else None

    if random_calibration:
        print_status("calibrated on noise: agreement and accuracy of this file say nothing about real inputs")
    done = converted(
        model, inputs, kwarg, "int8", runtime, verify=verify, calibration=ranges, calibration_batches=batches,
        keep_float="auto" if keep_float == ["auto"] else keep_float or (), folder=output,
        max_difference=max_difference, scheme=scheme,
    )  # fmt: skip
    show(done, json, min_agreement)


def export(
    model: ModelArgument,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="A .onnx, .tflite or .pte file.")],
    inputs: Inputs = None,
    kwarg: Keywords = None,
    precision: Annotated[
        str, typer.Option("--precision", help="fp32 or fp16; `edge-opt quantize` is for int8.")
    ] = "fp32",
    verify: Annotated[str | None, typer.Option("--verify", metavar="REF", help=f"Compare on: {FORM}.")] = None,
    max_difference: MaxDifference = None,
    min_agreement: MinAgreement = None,
    json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
    trust: Trust = False,
    debug: Debug = False,
) -> None:
    """Write a model as ONNX for any batch size, run it, and say how far it agrees with the original.

    \b
    edge-opt export net.py:Net -i 1x3x32x32 -o net.onnx
    edge-opt export torchvision:resnet18 -i 1x3x224x224 -o resnet18.onnx --precision fp16
    """
    check_share(min_agreement)
    from edge_opt.runtimes.registry import runtimes_by_ending

    endings = runtimes_by_ending()
    if output.suffix not in endings:
        raise InvalidInput(f"{str(output)!r} must end in {', '.join(endings)}")
    if precision == "int8":
        raise InvalidInput("int8 needs calibration; use `edge-opt quantize`")
    # The file may be for another machine; what it runs in on this one is said, not demanded.
    done = converted(
        model, inputs, kwarg, precision, endings[output.suffix], verify=verify, folder=output.parent,
        filename=output.name, require_precision=False, max_difference=max_difference,
    )  # fmt: skip
    show(done, json, min_agreement)
