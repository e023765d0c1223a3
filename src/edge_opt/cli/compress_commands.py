"""edge-opt prune, quantize and export."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

from typer import Option

from edge_opt.cli import arguments as shared
from edge_opt.cli.arguments import FORM, load_batches, loaded_call, random_batches
from edge_opt.cli.shell import Trust, not_satisfied, print_record, print_status
from edge_opt.errors import InvalidInput
from edge_opt.loading import MODEL_FILES
from edge_opt.runtimes.registry import runtime_names
from edge_opt.units import percent

if TYPE_CHECKING:
    from edge_opt.records.compression import Importance


def _source(model: str, taken: tuple[str, ...] = ()) -> str:
    """Return the reference unless it names a file: pruning and export need the model that the file was made from."""
    if model.lower().endswith(MODEL_FILES) and not model.lower().endswith(taken):
        raise InvalidInput(
            f"{model!r} is a file of a finished graph, which is not changed here; give the model's source"
        )
    return model


def _convert(
    model: str,
    inputs: list[str] | None,
    kwarg: list[str] | None,
    precision: str,
    runtime: str,
    *,
    json: bool,
    min_agreement: float | None,
    verify: str | None,
    calibration: str | None = None,
    noise_batches: int = 0,
    **options: Any,
) -> None:
    """Convert the model that a reference names, print its verification, and exit with 1 where it is not good enough."""
    from edge_opt.report.record_sheets import conversion_document
    from edge_opt.runtimes.convert import convert

    if min_agreement is not None and not 0 <= min_agreement <= 1:
        raise InvalidInput(f"--min-agreement is {min_agreement}; it is a share from 0 to 1, such as 0.99")
    source = _source(model, (".onnx", ".pt2") if precision == "int8" else (".pt2",))
    with loaded_call(source, inputs, kwarg) as call:
        noise = random_batches(call.inputs or [], call.kwargs, noise_batches) if noise_batches else None
        done = convert(
            call.model,
            call.inputs,
            precision,
            runtime,
            kwargs=call.kwargs,
            calibration=noise if calibration is None else load_batches(calibration),
            verify_on=None if verify is None else load_batches(verify),
            **options,
        )
    print_record(done, json, conversion_document)
    print_status(f"saved to {done.path}")
    if min_agreement is None:
        return
    top1 = done.agreement.top1
    if top1 is None:
        raise InvalidInput("--min-agreement needs a model whose first output is one row of scores per sample")
    if top1 < min_agreement:
        raise not_satisfied(f"top-1 agreement is {percent(top1)}, below the {percent(min_agreement)} asked for")


def prune(
    model: shared.ModelArgument,
    inputs: shared.Inputs = None,
    ratio: Annotated[float | None, Option("--ratio", "-r", help="Share of every layer's channels to remove.")] = None,
    macs_target: Annotated[float | None, Option(help="Share of the MACs to remain.")] = None,
    latency_target: Annotated[float | None, Option(help="Share of the latency to remain, on --target.")] = None,
    target: Annotated[
        str | None, Option(metavar="DEVICE", help="Device, calibration or host: predicted on, and rounded for.")
    ] = None,
    runtime: shared.Runtime = None,
    threads: Annotated[int | None, Option(help="Of the runtime on the target.")] = None,
    layer: Annotated[
        list[str] | None, Option("--layer", "-l", metavar="NAME=RATIO", help="A ratio for one layer or module.")
    ] = None,
    importance: Annotated[str, Option(help="group or random; others need data, in Python.")] = "auto",
    ignore: Annotated[list[str] | None, Option(metavar="NAME", help="A layer or module to leave alone.")] = None,
    round_to: Annotated[str, Option(help="Kept channels are a multiple; auto is fast.")] = "auto",
    weights: Annotated[
        Path | None, Option("--weights", "-w", help="Weights to load: .safetensors, or .pt with tensors only.")
    ] = None,
    seed: Annotated[int, Option(help="For --importance random.")] = 0,
    output: Annotated[Path | None, Option("--output", "-o", metavar="DIR", help="Save the pruned model.")] = None,
    json: shared.Json = False,
    fail_on_shortfall: Annotated[
        bool, Option("--fail-on-shortfall", help="Exit with 1 if a target is missed by more than a tenth.")
    ] = False,
    trust: Trust = False,
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
    saved = None if output is None else compress.save_pruned(pruned, output)
    print_record(pruned, json, lambda record: record.to_dict() | {"saved": None if saved is None else str(saved)})
    if saved is not None:
        print_status(f"saved to {saved}; compress.load_pruned({str(saved)!r}, factory) builds it again")
    if fail_on_shortfall and (macs_target or latency_target) and pruned.shortfalls:
        raise not_satisfied("the target is missed by more than a tenth")


def _layer_ratio(text: str) -> tuple[str, float]:
    name, equals, value = text.rpartition("=")
    try:
        if equals and name:
            return name, float(value)
    except ValueError:
        pass
    raise InvalidInput(f"--layer {text!r} cannot be read; write NAME=RATIO, such as layer1.0.conv1=0.3")


MaxDifference = Annotated[
    float | None, Option(metavar="SHARE", help="Largest difference accepted, over the mean output.")
]
MinAgreement = Annotated[float | None, Option(metavar="SHARE", help="Exit with 1 below this top-1 agreement.")]


def quantize(
    model: shared.ModelArgument,
    inputs: shared.Inputs = None,
    kwarg: shared.Keywords = None,
    calibration: Annotated[
        str | None, Option("--calibration", "-c", metavar="REF", help=f"Real inputs: {FORM}.")
    ] = None,
    random_calibration: Annotated[
        bool, Option("--random-calibration", help="Noise instead of real inputs: accuracy then means nothing.")
    ] = False,
    batches: Annotated[int, Option(help="Calibration batches to use at most.")] = 32,
    runtime: Annotated[str, Option(help=f"One of {', '.join(runtime_names())}.")] = "onnxruntime",
    scheme: Annotated[str, Option(help="auto, static, dynamic or weights.")] = "auto",
    keep_float: Annotated[
        list[str] | None, Option(metavar="LAYER", help="Keep a layer in float; auto finds them.")
    ] = None,
    verify: Annotated[str | None, Option(metavar="REF", help="Compare on these batches.")] = None,
    max_difference: MaxDifference = None,
    min_agreement: MinAgreement = None,
    output: Annotated[Path, Option("--output", "-o", metavar="DIR", help="Where the file goes.")] = Path(),
    json: shared.Json = False,
    trust: Trust = False,
) -> None:
    """Quantise a model to int8 and say what came of it: what runs in int8, agreement, size.

    \b
    edge-opt quantize net.py:Net -i 1x1x28x28 --calibration data.py:loader -o out/
    edge-opt quantize torchvision:resnet18 -i 1x3x224x224 --random-calibration --keep-float conv1
    edge-opt quantize model.onnx --calibration data.py:loader -o out/
    """
    needs_none = scheme in ("dynamic", "weights") and calibration is None
    if (calibration is None) != random_calibration and not needs_none:
        raise InvalidInput(
            "int8 needs real inputs: give --calibration file.py:loader, or --random-calibration to try without"
            if calibration is None
            else "--calibration and --random-calibration exclude each other; keep one of them"
        )

    if random_calibration:
        print_status("calibrated on noise: agreement and accuracy of this file say nothing about real inputs")
    _convert(
        model, inputs, kwarg, "int8", runtime, json=json, min_agreement=min_agreement, verify=verify,
        calibration=calibration, noise_batches=min(batches, 4) if random_calibration else 0,
        calibration_batches=batches, keep_float="auto" if keep_float == ["auto"] else keep_float or (),
        output=output, max_difference=max_difference, scheme=scheme,
    )  # fmt: skip


def export(
    model: shared.ModelArgument,
    output: Annotated[Path, Option("--output", "-o", metavar="FILE", help="A .onnx, .tflite or .pte file.")],
    inputs: shared.Inputs = None,
    kwarg: shared.Keywords = None,
    precision: Annotated[str, Option(help="fp32 or fp16; `edge-opt quantize` is for int8.")] = "fp32",
    verify: Annotated[str | None, Option(metavar="REF", help=f"Compare on: {FORM}.")] = None,
    max_difference: MaxDifference = None,
    min_agreement: MinAgreement = None,
    json: shared.Json = False,
    trust: Trust = False,
) -> None:
    """Write a model as ONNX for any batch size, run it, and say how far it agrees with the original.

    \b
    edge-opt export net.py:Net -i 1x3x32x32 -o net.onnx
    edge-opt export torchvision:resnet18 -i 1x3x224x224 -o resnet18.onnx --precision fp16
    """
    from edge_opt.runtimes.registry import runtimes_by_ending

    endings = runtimes_by_ending()
    if output.suffix not in endings:
        raise InvalidInput(f"{str(output)!r} must end in {', '.join(endings)}")
    if precision == "int8":
        raise InvalidInput("int8 needs calibration; use `edge-opt quantize`")
    # The file may be for another machine; what it runs in on this one is said, not demanded.
    _convert(
        model, inputs, kwarg, precision, endings[output.suffix], json=json, min_agreement=min_agreement,
        verify=verify, output=output.parent, filename=output.name, require_precision=False,
        max_difference=max_difference,
    )  # fmt: skip
