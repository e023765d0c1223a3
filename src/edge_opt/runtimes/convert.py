"""convert(): a model in a precision for a runtime, run, and compared with the original."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from edge_opt._support.deprecation import accept_former_parameters
from edge_opt._support.files import own_folder, publish, staging
from edge_opt._support.progress import report_progress, show_progress
from edge_opt.errors import ConversionFailed, InvalidInput
from edge_opt.measuring.machine import is_fast
from edge_opt.quantization.fake_quantization import AUTO_BOUND, keep_float_until_it_agrees, ranked_layers
from edge_opt.quantization.onnx_files import Tensors, is_below, size_of, with_data
from edge_opt.records.conversions import Agreement, Converted, Exported, KeptFloatTrial, LayerPrecision
from edge_opt.records.devices import Precision
from edge_opt.runtimes.agreement import (
    SINGLE_ALLOWED,
    ReferenceModel,
    agreement,
    bound_of,
    disagreement,
    first_difference,
    first_violation,
    sized,
)
from edge_opt.runtimes.model_call import (
    ModelCall,
    collect_labels,
    in_batches_of,
    model_call,
    output_names,
    read_batches,
)
from edge_opt.runtimes.onnx_builds import QuantizableModel
from edge_opt.runtimes.onnx_source import chosen_scheme, file_call, is_file
from edge_opt.runtimes.protocol import BuiltModel, ConversionRequest, Inspection, Runner, Runtime
from edge_opt.runtimes.registry import all_runtimes, check_precision, find_runtime
from edge_opt.runtimes.unseen_inputs import Unseen, compare_unseen

_VERIFIED_BATCHES = 8
_FIXED_BATCHES = 64
_CALIBRATION = "calibration batches"


@accept_former_parameters
def convert(
    model: nn.Module,
    example_inputs: Any,
    precision: str = "int8",
    runtime: str = "onnxruntime",
    *,
    kwargs: Mapping[str, Any] | None = None,
    calibration: Iterable[Any] | None = None,
    calibration_batches: int = 32,
    folder: str | os.PathLike[str] | None = None,
    keep_float: Iterable[str] = (),
    verify_on: Iterable[Any] | None = None,
    reduce_range: bool | None = None,
    exported: Exported | None = None,
    filename: str | None = None,
    require_precision: bool = True,
    max_difference: float | None = None,
    scheme: str = "auto",
    group_size: int = 32,
) -> Converted:
    """Return the model in a precision for a runtime, verified: what each layer runs in, and how far it agrees.

    Args:
        model: The model; it is unchanged. An `.onnx` file that `load_model` read becomes int8 or int4.
        example_inputs: As in `profile`; the shape of one call.
        precision: fp32, fp16, bf16, int8, or int4 for weights.
        runtime: Who runs it; `edge_opt.runtimes.registry.runtime_names()` lists them.
        kwargs: Arguments of the model by name.
        calibration: A loader or batches of real inputs, which int8 needs; labels behind them are used to compare.
        calibration_batches: How many of them to use.
        folder: Where the file goes; without it, to a folder that is gone with the process.
        keep_float: Paths of layers that stay in float, with everything inside them. "auto" keeps those that hurt most,
            as few as bring the difference below `max_difference`, 0.1 unless given.
        verify_on: Batches to compare on; those of the calibration unless given, else the example. Without it static
            int8 is also compared on a quarter of the calibration that ranges were found without, and on rolled tokens.
        reduce_range: Whether weights get 7 bits; None gives them where this CPU would saturate.
        exported: The result of `export_onnx`, so that the model is not exported again.
        filename: Name of the file; made from the model and the precision unless given.
        require_precision: Whether to raise where no layer runs in `precision`; turn it off for another machine's file.
        max_difference: Largest mean difference of an output, as a share of its mean, before `Disagrees` is raised (2.5
            times it for one sample); None: fp32 0.01, fp16 0.05, bf16 0.1, int8 0.2, int4 0.5. True takes anything.
        scheme: How ONNX Runtime's int8 is made: "static" with ranges from calibration, "dynamic" with ranges of each
            input, "weights" of products only; "auto" is dynamic for recurrent layers and transformers, else static.
        group_size: Weights that share a scale where only weights are quantized: 32 is closer, 128 is smaller.

    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))
    >>> done = convert(model, (1, 16), "int8", calibration=[torch.randn(32, 16)])
    >>> done.effective_precision, [layer.path for layer in done.layers], done.agreement.samples
    ('int8', ['0', '2'], 32)
    """
    chosen = find_runtime(runtime)
    check_precision(chosen, precision)
    layers = _checked_layers(model, keep_float, precision, chosen)
    if is_file(model):
        call, exported = file_call(model, example_inputs, kwargs, precision, chosen)
    else:
        call = model_call(model, example_inputs, kwargs)
    name = filename or f"{call.name}.{precision}.{chosen.suffix}"
    scheme = chosen_scheme(model, precision, chosen, scheme)
    request = ConversionRequest(
        call=call,
        precision=precision,
        folder=Path(own_folder() if folder is None else folder),
        filename=name,
        keep_float=layers,
        reduce_range=reduce_range,
        exported=exported,
        scheme=scheme,
        group_size=group_size,
    )
    bound = bound_of(precision, max_difference)
    auto_bound = (AUTO_BOUND if max_difference is None else bound) if keep_float == "auto" else None
    request, batches = _with_batches(request, calibration, calibration_batches, verify_on, bound)
    return _converted(request, chosen, _Verification(batches, bound, auto_bound, require_precision))


@dataclass(frozen=True, slots=True)
class _Batches:
    """Batches to compare on, the class of each sample where they have labels, and where they come from."""

    tensors: list[Tensors]
    labels: list[torch.Tensor | None]
    source: str

    @classmethod
    def read(
        cls, call: ModelCall, batches: Iterable[Any], max_batches: int | None, what: str = "calibration"
    ) -> _Batches:
        labels: list[torch.Tensor | None] = []
        tensors = read_batches(call, collect_labels(call, batches, labels), max_batches, what)
        return cls(tensors, labels[: len(tensors)], _CALIBRATION)

    def of_size(self, size: int | None) -> _Batches:
        """Return the same samples, with their labels, in batches of the only size that a file takes."""
        if size is None or all(len(batch[0]) == size for batch in self.tensors if batch[0].dim()):
            return self
        # Labels go through the same cuts as one input more; batches without labels get numbers that none can have.
        marked = [
            (*batch, torch.full((len(batch[0]),), -1) if classes is None else classes)
            for batch, classes in zip(self.tensors, self.labels, strict=True)
        ]
        pieces = in_batches_of(marked, size)[:_FIXED_BATCHES]
        labels = [None if bool((piece[-1] < 0).all()) else piece[-1] for piece in pieces]
        return _Batches([piece[:-1] for piece in pieces], labels, self.source)


@dataclass(frozen=True, slots=True)
class _Verification:
    """What a conversion is compared on, and how far it may differ.

    Attributes:
        batches: The batches.
        bound: How far outputs may differ.
        auto_bound: The bound up to which layers are kept in float; None where none are chosen.
        require_precision: Whether a layer must run in the precision that was asked for.
    """

    batches: _Batches
    bound: float
    auto_bound: float | None
    require_precision: bool


def _with_batches(
    request: ConversionRequest,
    calibration: Iterable[Any] | None,
    calibration_batches: int,
    verify_on: Iterable[Any] | None,
    bound: float,
) -> tuple[ConversionRequest, _Batches]:
    """Return the request with its calibration, and the batches to compare on."""
    is_static = request.precision == "int8" and request.scheme == "static"
    if is_static and calibration is None:
        raise InvalidInput(
            "int8 needs calibration=: a loader or batches of real inputs, to find the range of each tensor"
        )
    # A loader that shuffles draws from torch's random numbers, which are the caller's.
    with torch.random.fork_rng(devices=[]):
        calibrated = None if calibration is None else _Batches.read(request.call, calibration, calibration_batches)
        if verify_on is not None:
            own = _Batches.read(request.call, verify_on, None, "verification")
            batches = replace(own, source="verify_on")
        elif calibrated is not None:
            batches = _Batches(
                calibrated.tensors[:_VERIFIED_BATCHES], calibrated.labels[:_VERIFIED_BATCHES], _CALIBRATION
            )
        else:
            batches = _Batches([request.call.tensors], [None], "example inputs")
    # The caller's own batches tell more of unseen inputs than a part of the calibration.
    holds_out = is_static and batches.source == _CALIBRATION and not math.isinf(bound)
    tensors = None if calibrated is None else calibrated.tensors
    return replace(request, calibration=tensors, holds_out=holds_out), batches


def _converted(request: ConversionRequest, runtime: Runtime, verification: _Verification) -> Converted:
    """Build the file aside, run it, compare it with the original, and then put it in place."""
    folder, original = request.folder, ReferenceModel(request.call)
    with show_progress(), staging(folder) as aside:
        report_progress(f"converting to {request.precision} for {runtime.name}")
        request = replace(request, folder=aside)
        curve: tuple[KeptFloatTrial, ...] = ()
        if verification.auto_bound is None:
            built = runtime.build(request)
        else:
            built, request, curve = _build_within_bound(request, runtime, original, verification)
        verification = replace(verification, batches=verification.batches.of_size(built.batch))
        report_progress(f"comparing {request.precision} on {runtime.name} with the original")
        with _opened(built, runtime, request.precision) as runner:
            inspection = runtime.inspect(built, runner, request, verification.batches.tensors[0])
            compared, unseen = _compared(built, runner, runtime, original, request, verification, verification.bound)
        if verification.require_precision:
            _check_effective(inspection.layers, request.precision, runtime.name, request.keep_float)
        _check_agreement(compared, unseen, verification, built, request.precision, runtime)
        files = publish(with_data(built.path), folder)
    outputs = built.outputs
    if outputs is None:
        outputs = output_names(len(original.outputs(verification.batches.tensors[0])))
    return Converted(
        precision=cast(Precision, request.precision),
        runtime=runtime.name,
        effective_precision=effective(inspection.layers, request.precision),
        layers=inspection.layers,
        kernels=inspection.kernels,
        agreement=compared,
        size_bytes=size_of(files[-1]),
        original_bytes=_original_bytes(request),
        path=str(files[-1]),
        inputs=request.call.names,
        outputs=outputs,
        remarks=(*built.remarks, *_remarks(inspection, request.precision, runtime), *_refusals(compared, runtime.name)),
        model=built.model,
        curve=curve,
    )


def _original_bytes(request: ConversionRequest) -> int:
    """Return the bytes of the weights; of a file that was given, the file's."""
    state = request.call.model.state_dict()
    if not state and request.exported is not None:
        return request.exported.size_bytes
    return sum(tensor.nbytes for tensor in state.values())


def _opened(built: BuiltModel, runtime: Runtime, precision: str) -> Runner:
    return runtime.open(built.path if built.model is None else built.model, 1, precision)


def _compared(
    built: BuiltModel,
    runner: Runner,
    runtime: Runtime,
    original: ReferenceModel,
    request: ConversionRequest,
    verification: _Verification,
    bound: float,
) -> tuple[Agreement, list[Unseen]]:
    """Compare on the batches and, where that is within the bound, on inputs that ranges never saw."""
    batches = verification.batches
    compared = agreement(original, runner, batches.tensors, batches.source, batches.labels, built.batch)
    if not request.holds_out or first_violation(compared, bound) is not None:
        return compared, []

    def reopen(path: Path) -> Runner:
        return runtime.open(path, 1, request.precision)

    unseen = list(compare_unseen(original, built, runner, reopen, request.calibration or [], batches.tensors))
    return replace(compared, unseen=tuple(entry.agreement for entry in unseen)), unseen


def _build_within_bound(
    request: ConversionRequest, runtime: Runtime, original: ReferenceModel, verification: _Verification
) -> tuple[BuiltModel, ConversionRequest, tuple[KeptFloatTrial, ...]]:
    """Build int8 with as few layers in float as bring it within the bound; the file tried last is not shipped.

    Every attempt is built as the final file is, from one float file and one set of ranges.
    """
    assert verification.auto_bound is not None
    bound, single = verification.auto_bound, SINGLE_ALLOWED * verification.bound
    source = QuantizableModel(request)

    def attempt(layers: tuple[str, ...]) -> tuple[KeptFloatTrial, str | None]:
        report_progress(f"trying int8 with {len(layers)} layers in float")
        built = source.build(replace(request, keep_float=layers, filename=f"try-{request.filename}"))
        sized_verification = replace(verification, batches=verification.batches.of_size(built.batch))
        with _opened(built, runtime, request.precision) as runner:
            compared, _ = _compared(built, runner, runtime, original, request, sized_verification, bound)
        point = KeptFloatTrial(layers, compared.relative_difference or 0.0, compared.top1, compared.accuracy)
        violation = first_violation(compared, bound, single)
        return point, None if violation is None else violation.text

    call, batch = request.call, verification.batches.tensors[0]
    with call.running():
        ranked = ranked_layers(call.model, lambda: call.flat()(*(tensor.clone() for tensor in batch)))
    layers, curve = keep_float_until_it_agrees(ranked, attempt, bound)
    request = replace(request, keep_float=layers)
    return source.build(request), request, curve


def _checked_layers(model: nn.Module, keep_float: Iterable[str], precision: str, runtime: Runtime) -> tuple[str, ...]:
    """Return the layers to keep in float; every one must be a module, and the runtime must be able to."""
    names = " and ".join(other.name for other in all_runtimes() if other.keeps_float)
    if keep_float == "auto":
        if is_file(model):
            raise InvalidInput("keep_float='auto' tries layers of a module, and this is a file; name the layers")
        if precision != "int8" or not runtime.keeps_float:
            raise InvalidInput(f"keep_float='auto' is for int8 in {names}; name layers, or leave it out")
        return ()
    layers = (keep_float,) if isinstance(keep_float, str) else tuple(keep_float)
    paths = [path for path, _ in model.named_modules() if path]
    for path in layers:
        if path not in paths:
            close = get_close_matches(path, paths, n=3, cutoff=0.4) or paths[:3]
            raise InvalidInput(f"there is no layer {path!r} to keep in float; closest: {', '.join(close)}")
    if layers and precision not in ("int8", "int4"):
        raise InvalidInput(f"layers can be kept in float in int8 only; {precision} is of the whole model")
    if layers and not runtime.keeps_float:
        raise InvalidInput(f"{runtime.name} cannot keep single layers in float; use {names} for that")
    return layers


def _check_agreement(
    compared: Agreement,
    unseen: list[Unseen],
    verification: _Verification,
    built: BuiltModel,
    precision: str,
    runtime: Runtime,
) -> None:
    """Refuse a conversion that ruined the model, with the layer where the difference begins."""
    violation = first_violation(compared, verification.bound)
    if violation is None:
        return
    begins = None
    if built.reference is not None:
        beyond = next((entry for entry in unseen if entry.agreement is violation.entry), None)
        tensors = verification.batches.tensors
        file, batch = (built.path, tensors[0]) if beyond is None else (beyond.file, beyond.worst)
        if beyond is None and violation.entry is not None:
            batch = sized(tensors, violation.entry.samples)
        begins = first_difference(
            (built.reference, lambda path: find_runtime("onnxruntime").open(path, 1, "fp32")),
            (file, lambda path: runtime.open(path, 1, precision)),
            batch,
            verification.bound,
        )
    raise disagreement(f"{precision} on {runtime.name}", compared, violation, begins)


def _refusals(compared: Agreement, runtime: str) -> list[str]:
    return [
        f"{runtime} takes no batch of {entry.samples}: {entry.refused}" for entry in compared.by_batch if entry.refused
    ]


def effective(layers: Iterable[LayerPrecision], asked: str) -> str:
    """Return what layers run in, what was asked first: "int8", "int8+fp32"; "none" where no layer has weights."""
    precisions = {layer.precision for layer in layers} - {"unknown"}
    return "+".join(sorted(precisions, key=lambda name: (name != asked, name))) or "none"


def _check_effective(layers: tuple[LayerPrecision, ...], asked: str, runtime: str, keep_float: tuple[str, ...]) -> None:
    ran = effective(layers, asked)
    quantized = [layer.path for layer in layers if is_below(layer.path, keep_float) and layer.precision == asked]
    if quantized:
        raise ConversionFailed(f"{runtime} runs layers of keep_float in {asked} nevertheless: {', '.join(quantized)}")
    if asked in ran.split("+") and (asked in ("int8", "int4") or ran == asked):
        return
    if asked == "fp32" and ran == "none":
        return
    missing = [layer for layer in layers if layer.precision != asked]
    reasons = "; ".join(dict.fromkeys(layer.reason for layer in missing if layer.reason)) or "no layer has weights"
    what = f"all {len(missing)} layers" if len(missing) == len(layers) else f"{len(missing)} of {len(layers)} layers"
    raise ConversionFailed(f"{asked} on {runtime} did not take: {what} run in {ran}: {reasons}")


def _remarks(inspection: Inspection, precision: str, runtime: Runtime) -> list[str]:
    """Return what a user should know before believing that smaller is faster."""
    remarks = []
    if runtime.runs_modules and precision != "fp32" and not is_fast(precision):
        remarks.append(f"this CPU has no fast {precision}: eager {precision} is often several times slower than fp32")
    ran = effective(inspection.layers, precision)
    if precision != "int8" and ran not in (precision, "none"):
        remarks.append(f"stored in {precision}, but {runtime.name} computes it in {ran} on this CPU")
    added = [kernel for kernel in inspection.kernels if kernel.only_converts]
    if precision == "int8" and added:
        remarks.append(f"{len(added)} of {len(inspection.kernels)} kernels only convert or reorder tensors")
    return remarks
