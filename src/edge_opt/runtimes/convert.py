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
from edge_opt.loading import ModelLike, resolve_call
from edge_opt.measuring.machine import is_fast, retain_freed_memory
from edge_opt.model_files.file_model import FileModel
from edge_opt.pruning.layer_kinds import state_tensors
from edge_opt.quantization.fake_quantization import AUTO_BOUND, keep_float_until_it_agrees, ranked_layers
from edge_opt.quantization.onnx_files import is_below, size_of, with_data
from edge_opt.records.conversions import Agreement, Converted, Exported, KeptFloatTrial, LayerPrecision
from edge_opt.records.devices import Precision
from edge_opt.runtimes.agreement import (
    SINGLE_ALLOWED,
    ReferenceModel,
    Unseen,
    agreement,
    bound_of,
    compare_unseen,
    disagreement,
    first_violation,
    sized,
)
from edge_opt.runtimes.export import QuantizableModel
from edge_opt.runtimes.kernels import first_difference
from edge_opt.runtimes.model_call import LabeledBatches, model_call, output_names
from edge_opt.runtimes.onnxruntime import chosen_scheme, file_call
from edge_opt.runtimes.protocol import BuiltModel, ConversionRequest, Inspection, Runner, Runtime
from edge_opt.runtimes.registry import all_runtimes, check_precision, find_runtime

_VERIFIED_BATCHES = 8
_CALIBRATION = "calibration batches"


@accept_former_parameters
def convert(
    model: ModelLike,
    inputs: Any = None,
    precision: str = "int8",
    runtime: str = "onnxruntime",
    *,
    kwargs: Mapping[str, Any] | None = None,
    calibration: Iterable[Any] | None = None,
    calibration_batches: int = 32,
    output: str | os.PathLike[str] | None = None,
    keep_float: Iterable[str] = (),
    verify_on: Iterable[Any] | None = None,
    reduce_range: bool | None = None,
    exported: Exported | None = None,
    filename: str | None = None,
    require_precision: bool = True,
    max_difference: float | None = None,
    scheme: str = "auto",
    group_size: int = 32,
    fixed_batch: bool = False,
    trust: bool = False,
) -> Converted:
    """Convert a model to a precision for a runtime, and verify the precision of each layer and the outputs.

    Args:
        model: As in `profile`; a module is not modified. An `.onnx` file becomes int8 or int4.
        inputs: As in `profile`; the shape of one call.
        precision: fp32, fp16, bf16, int8, or int4 for weights.
        runtime: Runtime; `edge_opt.runtimes.registry.runtime_names()` lists them.
        kwargs: Arguments of the model by name.
        calibration: A loader or batches of real inputs, which int8 needs; labels, if any, are used to compare.
        calibration_batches: Number of batches to use.
        output: Folder for the file; without it, a temporary folder that is removed with the process.
        keep_float: Paths of layers that stay in float, with everything inside them. "auto" keeps the most sensitive
            ones, as few as bring the difference below `max_difference`, 0.1 unless given.
        verify_on: Batches to compare on; those of the calibration unless given, else the example. Without it static
            int8 is also compared on a quarter of the calibration that ranges were found without, and on rolled tokens.
        reduce_range: Whether weights get 7 bits; None: only if this CPU would saturate with 8.
        exported: The result of `export_onnx`, so that the model is not exported again.
        filename: Name of the file; default: made from the model and the precision.
        require_precision: Whether to raise where no layer runs in `precision`; turn it off for another machine's file.
        max_difference: Largest mean difference of an output, as a share of its mean, before `Disagrees` is raised (2.5
            times it for one sample); None: fp32 0.01, fp16 0.05, bf16 0.1, int8 0.2, int4 0.5. True accepts any.
        scheme: How ONNX Runtime's int8 is made: "static" with ranges from calibration, "dynamic" with ranges of each
            input, "weights" of products only; "auto" is dynamic for recurrent layers and transformers, else static.
        group_size: Weights that share a scale if only weights are quantized: 32 is more accurate, 128 is smaller.
        fixed_batch: Whether files of LiteRT and ExecuTorch take the example's batch only, which is written faster.
        trust: Whether a .pt2 file may be opened, which can execute code from it.

    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))
    >>> done = convert(model, (1, 16), "int8", calibration=[torch.randn(32, 16)])
    >>> done.effective_precision, [layer.path for layer in done.layers], done.agreement.samples
    ('int8', ['0', '2'], 32)
    """
    module, inputs, kwargs, _ = resolve_call(model, inputs, kwargs, trust)
    chosen = find_runtime(runtime)
    check_precision(chosen, precision)
    layers = _checked_layers(module, keep_float, precision, chosen)
    if isinstance(module, FileModel):
        call, exported = file_call(module, inputs, kwargs, precision, chosen)
    else:
        call = model_call(module, inputs, kwargs)
    name = filename or f"{call.name}.{precision}.{chosen.suffix}"
    scheme = chosen_scheme(module, precision, chosen, scheme)
    request = ConversionRequest(
        call=call, precision=precision, folder=Path(own_folder() if output is None else output), filename=name,
        keep_float=layers, reduce_range=reduce_range, exported=exported, scheme=scheme, group_size=group_size,
        fixed_batch=fixed_batch,
    )  # fmt: skip
    bound = bound_of(precision, max_difference)
    auto_bound = (AUTO_BOUND if max_difference is None else bound) if keep_float == "auto" else None
    request, batches = _with_batches(request, calibration, calibration_batches, verify_on, bound)
    conversion = _Conversion(request, chosen, ReferenceModel(call), batches, bound)
    with show_progress(), retain_freed_memory():
        return conversion.run(auto_bound, require_precision)


def _with_batches(
    request: ConversionRequest,
    calibration: Iterable[Any] | None,
    calibration_batches: int,
    verify_on: Iterable[Any] | None,
    bound: float,
) -> tuple[ConversionRequest, LabeledBatches]:
    """Return the request with its calibration, and the batches to compare on."""
    is_static = request.precision == "int8" and request.scheme == "static"
    if is_static and calibration is None:
        raise InvalidInput(
            "int8 needs calibration=: a loader or batches of real inputs, to find the range of each tensor"
        )
    call = request.call
    # A loader that shuffles draws from torch's random numbers, which are the caller's.
    with torch.random.fork_rng(devices=[]):
        calibrated = None
        if calibration is not None:
            calibrated = LabeledBatches.read(call, calibration, calibration_batches, "calibration", _CALIBRATION)
        if verify_on is not None:
            batches = LabeledBatches.read(call, verify_on, None, "verification", "verify_on")
        elif calibrated is not None:
            first = slice(_VERIFIED_BATCHES)
            batches = LabeledBatches(calibrated.tensors[first], calibrated.labels[first], _CALIBRATION)
        else:
            batches = LabeledBatches([call.tensors], [None], "example inputs")
    # The caller's own batches tell more of unseen inputs than a part of the calibration.
    holds_out = is_static and batches.source == _CALIBRATION and not math.isinf(bound)
    tensors = None if calibrated is None else calibrated.tensors
    return replace(request, calibration=tensors, holds_out=holds_out), batches


@dataclass(frozen=True, slots=True)
class _Conversion:
    """One conversion for a runtime: the original, the batches to compare on, and how far outputs may differ."""

    request: ConversionRequest
    runtime: Runtime
    original: ReferenceModel
    batches: LabeledBatches
    bound: float

    def run(self, auto_bound: float | None, require_precision: bool) -> Converted:
        """Build the file aside, run it, compare it with the original, and then put it in place.

        Layers are kept in float up to `auto_bound`, unless that is None.
        """
        folder, precision, runtime = self.request.folder, self.request.precision, self.runtime
        with staging(folder) as aside:
            report_progress(f"converting to {precision} for {runtime.name}")
            conversion = replace(self, request=replace(self.request, folder=aside))
            curve: tuple[KeptFloatTrial, ...] = ()
            if auto_bound is None:
                built = runtime.build(conversion.request)
            else:
                built, conversion, curve = conversion._built_within(auto_bound)
            request, batches = conversion.request, self.batches.of_size(built.batch)
            report_progress(f"comparing {precision} on {runtime.name} with the original")
            with self._open(built.path if built.model is None else built.model) as runner:
                inspection = runtime.inspect(built, runner, request, batches.tensors[0])
                compared, unseen = conversion._compared(built, runner, self.bound)
            if require_precision:
                _check_effective(inspection.layers, precision, runtime.name, request.keep_float)
            conversion._check_agreement(compared, unseen, built)
            files = publish(with_data(built.path), folder)
        outputs = built.outputs
        if outputs is None:
            outputs = output_names(len(self.original.outputs(batches.tensors[0])))
        weight_bytes = sum(tensor.nbytes for tensor in state_tensors(request.call.model).values())
        return Converted(
            precision=cast(Precision, precision),
            runtime=runtime.name,
            effective_precision=effective(inspection.layers, precision),
            layers=inspection.layers,
            kernels=inspection.kernels,
            agreement=compared,
            size_bytes=size_of(files[-1]),
            # A file that was given has no state here; its own size counts.
            original_bytes=weight_bytes or (0 if request.exported is None else request.exported.size_bytes),
            path=str(files[-1]),
            inputs=request.call.names,
            outputs=outputs,
            remarks=(*built.remarks, *_remarks(inspection, precision, runtime, compared)),
            model=built.model,
            curve=curve,
        )

    def _open(self, source: Path | nn.Module) -> Runner:
        return self.runtime.open(source, 1, self.request.precision)

    def _compared(self, built: BuiltModel, runner: Runner, bound: float) -> tuple[Agreement, list[Unseen]]:
        """Compare on the batches and, where that is within the bound, on inputs that ranges never saw."""
        batches = self.batches.of_size(built.batch)
        compared = agreement(self.original, runner, batches, built.batch)
        if not self.request.holds_out or first_violation(compared, bound) is not None:
            return compared, []
        calibration = self.request.calibration or []
        entries = compare_unseen(self.original, built, runner, self._open, calibration, batches.tensors)
        unseen = [entry for entry in entries if entry is not None]
        return replace(compared, unseen=tuple(entry.agreement for entry in unseen)), unseen

    def _built_within(self, auto_bound: float) -> tuple[BuiltModel, _Conversion, tuple[KeptFloatTrial, ...]]:
        """Build int8 with as few layers in float as bring it within the bound; the file tried last is not shipped.

        Every attempt is built as the final file is, from one float file and one set of ranges.
        """
        request, call, batch = self.request, self.request.call, self.batches.tensors[0]
        source = QuantizableModel(request)

        def attempt(layers: tuple[str, ...]) -> tuple[KeptFloatTrial, str | None]:
            report_progress(f"trying int8 with {len(layers)} layers in float")
            built = source.build(replace(request, keep_float=layers, filename=f"try-{request.filename}"))
            with self._open(built.path) as runner:
                compared, _ = self._compared(built, runner, auto_bound)
            trial = KeptFloatTrial(layers, compared.relative_difference or 0.0, compared.top1, compared.accuracy)
            violation = first_violation(compared, auto_bound, SINGLE_ALLOWED * self.bound)
            return trial, None if violation is None else violation.text

        with call.running():
            ranked = ranked_layers(call.model, lambda: call.flat()(*(tensor.clone() for tensor in batch)))
        layers, curve = keep_float_until_it_agrees(ranked, attempt, auto_bound)
        conversion = replace(self, request=replace(request, keep_float=layers))
        return source.build(conversion.request), conversion, curve

    def _check_agreement(self, compared: Agreement, unseen: list[Unseen], built: BuiltModel) -> None:
        """Refuse a conversion that ruined the model, with the layer where the difference begins."""
        violation = first_violation(compared, self.bound)
        if violation is None:
            return
        begins = None
        if built.reference is not None:
            beyond = next((entry for entry in unseen if entry.agreement is violation.entry), None)
            tensors = self.batches.of_size(built.batch).tensors
            file, batch = (built.path, tensors[0]) if beyond is None else (beyond.file, beyond.worst)
            if beyond is None and violation.entry is not None:
                batch = sized(tensors, violation.entry.samples)
            reference = (built.reference, lambda path: find_runtime("onnxruntime").open(path, 1, "fp32"))
            begins = first_difference(reference, (file, self._open), batch, self.bound)
        raise disagreement(f"{self.request.precision} on {self.runtime.name}", compared, violation, begins)


def _checked_layers(model: nn.Module, keep_float: Iterable[str], precision: str, runtime: Runtime) -> tuple[str, ...]:
    """Return the layers to keep in float; every one must be a module, and the runtime must be able to."""
    names = " and ".join(other.name for other in all_runtimes() if other.keeps_float)
    if keep_float == "auto":
        if isinstance(model, FileModel):
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


def _remarks(inspection: Inspection, precision: str, runtime: Runtime, compared: Agreement) -> list[str]:
    """Return what a user should know before believing that smaller is faster, and batches that are refused."""
    remarks = []
    if runtime.runs_modules and precision != "fp32" and not is_fast(precision):
        remarks.append(f"this CPU has no fast {precision}: eager {precision} is often several times slower than fp32")
    ran = effective(inspection.layers, precision)
    if precision != "int8" and ran not in (precision, "none"):
        remarks.append(f"stored in {precision}, but {runtime.name} computes it in {ran} on this CPU")
    added = [kernel for kernel in inspection.kernels if kernel.only_converts]
    if precision == "int8" and added:
        remarks.append(f"{len(added)} of {len(inspection.kernels)} kernels only convert or reorder tensors")
    refusals = [entry for entry in compared.by_batch if entry.refused]
    return [*remarks, *(f"{runtime.name} takes no batch of {entry.samples}: {entry.refused}" for entry in refusals)]
