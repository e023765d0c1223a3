"""convert(): a model in another precision or runtime, proved to be what was asked."""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from edge_opt.compress.agreement import agreement
from edge_opt.compress.cpu import is_fast
from edge_opt.compress.exporting import export
from edge_opt.compress.graphs import layer_precisions, read_graph
from edge_opt.compress.kernels import executed_kernels
from edge_opt.compress.quantizing import check_method, check_spared, is_below, quantize
from edge_opt.compress.registry import Job, Made, maker_of, precision
from edge_opt.compress.runtimes import OnnxRuntimeRunner, OpenVinoRunner, Runner, TorchRunner
from edge_opt.compress.staging import own_folder, publish, size_of, staging, with_data
from edge_opt.compress.subject import Subject, read_batches, subject_of
from edge_opt.errors import ConversionFailed, InvalidInput
from edge_opt.records import Converted, Exported, Kernel, LayerPrecision, Precision, Runtime

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_VERIFIED_BATCHES = 8


def convert(
    model: nn.Module,
    example_inputs: Any,
    precision: str = "int8",
    runtime: str = "onnxruntime",
    *,
    kwargs: Mapping[str, Any] | None = None,
    calibration: Iterable[Any] | None = None,
    calibration_batches: int = 32,
    method: str = "minmax",
    folder: str | os.PathLike[str] | None = None,
    spare: Iterable[str] = (),
    verify_on: Iterable[Any] | None = None,
    reduce_range: bool | None = None,
    exported: Exported | None = None,
    filename: str | None = None,
    must_run: bool = True,
) -> Converted:
    """The model in `precision` for `runtime`, verified: what each layer really runs in, and how far it agrees.

    int8 needs `calibration`: a loader or batches of real inputs, labels behind them are ignored. `spare` keeps layers,
    and what is inside them, in float. `verify_on` are batches to compare on; the calibration's unless given, else the
    example. The file goes to `folder`, else to one that is gone with the process, as `filename` if that is given.
    `exported` spares exporting again. `reduce_range` gives weights 7 bits; by itself that is done where this CPU would
    saturate. A conversion after which no layer runs in what was asked raises, unless `must_run` is off: the file may be
    meant for another machine.

    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))
    >>> done = convert(model, (1, 16), "int8", calibration=[torch.randn(32, 16)])
    >>> done.effective_precision, [layer.path for layer in done.layers], done.agreement.samples
    ('int8', ['0', '2'], 32)
    """
    maker = maker_of(precision, runtime)
    check_method(method)
    spared = check_spared(model, spare)
    if spared and precision != "int8":
        raise InvalidInput(f"layers can be spared from int8 only; {precision} is of the whole model")
    subject = subject_of(model, example_inputs, kwargs)
    if precision == "int8" and runtime != "torch" and calibration is None:
        raise InvalidInput(
            "int8 needs calibration=: a loader or batches of real inputs, to find the range of each tensor"
        )
    # A loader that shuffles draws from torch's random numbers, which are the caller's.
    with torch.random.fork_rng(devices=[]):
        ranges = None if calibration is None else read_batches(subject, calibration, calibration_batches, "calibration")
        checks, source = _checks(subject, verify_on, ranges)
    place = Path(own_folder() if folder is None else folder)
    with staging(place) as aside:
        name = filename or f"{subject.name}.{precision}.{'pt' if runtime == 'torch' else 'onnx'}"
        made = maker(Job(subject, aside, ranges, method, spared, reduce_range, exported, name))
        with _runner(made, runtime, precision) as runner:
            kernels = () if runtime == "torch" else executed_kernels(runner, checks[0])
            layers = _torch_layers(made.model) if made.model else _layers(made.path, kernels, precision, runtime)
            if must_run:
                _check_effective(layers, precision, runtime, spared)
            found = agreement(subject, runner, checks, source)
        files = publish(with_data(made.path), place)
    return Converted(
        precision=cast(Precision, precision),
        runtime=cast(Runtime, runtime),
        effective_precision=effective(layers, precision),
        layers=layers,
        kernels=kernels,
        agreement=found,
        size_bytes=size_of(files[-1]),
        original_bytes=sum(tensor.nbytes for tensor in model.state_dict().values()),
        path=str(files[-1]),
        inputs=subject.names,
        outputs=made.outputs,
        remarks=(*made.remarks, *_remarks(layers, kernels, precision, runtime)),
        model=made.model,
    )


def _checks(subject: Subject, verify_on: Iterable[Any] | None, ranges: Any) -> tuple[list[Any], str]:
    if verify_on is not None:
        return read_batches(subject, verify_on, None, "verification"), "verify_on"
    if ranges is not None:
        return ranges[:_VERIFIED_BATCHES], "calibration batches"
    return [subject.tensors], "example inputs"


def _runner(made: Made, runtime: str, precision: str) -> Runner:
    if made.model is not None:
        return TorchRunner(made.model, 1)
    return OpenVinoRunner(made.path, 1, precision) if runtime == "openvino" else OnnxRuntimeRunner(made.path, 1)


def _layers(path: Path, kernels: tuple[Kernel, ...], precision: str, runtime: str) -> tuple[LayerPrecision, ...]:
    return layer_precisions(read_graph(path), kernels, precision, runtime)


def _torch_layers(model: nn.Module) -> tuple[LayerPrecision, ...]:
    """Eager kernels run in the type of their weights."""
    return tuple(
        LayerPrecision(path.removeprefix("model").removeprefix("."), type(module).__name__, kinds.pop())
        for path, module in model.named_modules()
        for kinds in [{_NAMES.get(p.dtype, str(p.dtype)) for p in module.parameters(recurse=False)}]
        if len(kinds) == 1
    )


def effective(layers: Iterable[LayerPrecision], asked: str) -> str:
    """What layers run in, what was asked first: "int8", "int8+fp32"; "none" where no layer has weights."""
    found = {layer.precision for layer in layers} - {"unknown"}
    return "+".join(sorted(found, key=lambda name: (name != asked, name))) or "none"


def _check_effective(layers: tuple[LayerPrecision, ...], asked: str, runtime: str, spare: tuple[str, ...]) -> None:
    found = effective(layers, asked)
    taken = [layer.path for layer in layers if is_below(layer.path, spare) and layer.precision == asked]
    if taken:
        raise ConversionFailed(f"{runtime} runs spared layers in {asked} nevertheless: {', '.join(taken)}")
    if asked in found.split("+") and (asked == "int8" or found == asked):
        return
    if asked == "fp32" and found == "none":
        return
    missing = [layer for layer in layers if layer.precision != asked]
    reasons = "; ".join(dict.fromkeys(layer.reason for layer in missing if layer.reason)) or "no layer has weights"
    what = f"all {len(missing)} layers" if len(missing) == len(layers) else f"{len(missing)} of {len(layers)} layers"
    raise ConversionFailed(f"{asked} on {runtime} did not take: {what} run in {found}: {reasons}")


def _remarks(layers: Any, kernels: tuple[Kernel, ...], precision: str, runtime: str) -> list[str]:
    """What a user should know before believing that smaller is faster."""
    remarks = []
    if runtime == "torch" and precision != "fp32" and not is_fast(precision):
        remarks.append(f"this CPU has no fast {precision}: eager {precision} is often several times slower than fp32")
    ran = effective(layers, precision)
    if precision != "int8" and ran not in (precision, "none"):
        remarks.append(f"stored in {precision}, but {runtime} computes it in {ran} on this CPU")
    added = [kernel for kernel in kernels if kernel.only_converts]
    if precision == "int8" and added:
        remarks.append(f"{len(added)} of {len(kernels)} kernels only convert or reorder tensors")
    return remarks


def _cast(model: nn.Module, name: str) -> tuple[nn.Module, torch.dtype | None]:
    """A copy of the model in the precision, and the type to cast inputs to: None where float32 is what it had."""
    dtype = _DTYPES[name]
    model = copy.deepcopy(model).eval()
    return (model, None) if name == "fp32" and _is_float32(model) else (model.to(dtype), dtype)


def _is_float32(model: nn.Module) -> bool:
    tensors = [tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.is_floating_point()]
    return all(tensor.dtype is torch.float32 for tensor in tensors)


def _in_torch(name: str) -> Any:
    def make(job: Job) -> Made:
        model, dtype = _cast(job.subject.model, name)
        adapter = job.subject.flat(dtype, model).eval()
        path = job.folder / job.filename
        torch.save(model.state_dict(), path)
        return Made(path, (), model=adapter)

    return make


def _in_onnx(name: str) -> Any:
    def make(job: Job) -> Made:
        if name == "fp32" and job.exported is not None:
            return _copied(job.exported, job.folder)
        path = job.folder / job.filename
        if name == "fp32" and _is_float32(job.subject.model):
            done = export(job.subject, path)
        else:
            model, dtype = _cast(job.subject.model, name)
            done = export(job.subject, path, dtype, model)
        return Made(path, done.outputs, done.remarks)

    return make


def _copied(exported: Exported, folder: Path) -> Made:
    """The export that the caller brings; it keeps its name, which weights beside it go by."""
    copies = [Path(shutil.copyfile(file, folder / file.name)) for file in with_data(Path(exported.path))]
    return Made(copies[-1], exported.outputs, exported.remarks)


for _name in _DTYPES:
    precision(_name, "torch")(_in_torch(_name))
    precision(_name, "onnxruntime")(_in_onnx(_name))
    # OpenVINO takes float32 and computes in what it is asked for, if it can.
    precision(_name, "openvino")(_in_onnx("fp32"))


@precision("int8", "onnxruntime", "openvino")
def _int8(job: Job) -> Made:
    """Both runtimes take the same file: u8 activations, s8 weights, quantise and dequantise nodes between."""
    assert job.calibration is not None
    source = _in_onnx("fp32")(replace(job, filename=f"float-{job.filename}"))
    path = job.folder / job.filename
    remarks = quantize(
        source.path,
        path,
        job.subject.names,
        job.calibration,
        method=job.method,
        spare=job.spare,
        reduce_range=job.reduce_range,
    )
    return Made(path, source.outputs, (*source.remarks, *remarks))


@precision("int8", "torch")
def _refused(job: Job) -> Made:
    """Nothing in torch itself is left that quantises a module and is not on its way out."""
    raise ConversionFailed(
        "torch's own quantisation of modules is deprecated and gone from its recent versions; "
        "use runtime='onnxruntime' or 'openvino' for int8"
    )
