"""convert(): made, run, and compared with the original."""

from __future__ import annotations

import copy
import math
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from edge_opt._support.checks import is_number
from edge_opt._support.files import own_folder, publish, staging
from edge_opt._support.progress import report_progress, show_progress
from edge_opt.errors import ConversionFailed, InvalidInput
from edge_opt.measuring.machine import is_fast
from edge_opt.quantization.activation_ranges import Calibrated
from edge_opt.quantization.dynamic_int8 import quantize_dynamic, quantize_weights
from edge_opt.quantization.mixed_precision import AUTO_BOUND, keep_float_until_it_agrees, ranked_layers
from edge_opt.quantization.onnx_files import EXTERNAL_DATA_BYTES, PATH_KEY, Tensors, size_of, with_data
from edge_opt.quantization.static_int8 import (
    check_method,
    is_below,
    is_reduced,
    quantize,
    range_remarks,
    sample_remarks,
)
from edge_opt.records.conversions import Agreement, Converted, Exported, KeptFloatTrial, Kernel, LayerPrecision, Runtime
from edge_opt.records.devices import Precision
from edge_opt.runtimes.agreement import (
    SINGLE_ALLOWED,
    Original,
    agreement,
    bound_of,
    disagreement,
    first_difference,
    sized,
    trouble_of,
)
from edge_opt.runtimes.export import export
from edge_opt.runtimes.kernels import executed_kernels, layer_precisions, read_graph
from edge_opt.runtimes.model_call import Subject, in_batches_of, labels_of, read_batches, subject_of, undisturbed
from edge_opt.runtimes.onnx_source import chosen_scheme, file_subject, is_file
from edge_opt.runtimes.protocol import Job, Made, Maker, check_spared, maker_of, precision
from edge_opt.runtimes.runners import (
    IN_TORCH,
    SUFFIXES,
    CompiledRunner,
    Runner,
    TorchRunner,
    check_instructions,
    open_file,
)
from edge_opt.runtimes.unseen_inputs import Unseen, compare_unseen, split

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
Labels = list[torch.Tensor | None]
_VERIFIED_BATCHES = 8
_FIXED_BATCHES = 64
_CALIBRATION = "calibration batches"


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
    allow: float | None = None,
    scheme: str = "auto",
    group_size: int = 32,
    balance: float = 0.0,
    correct_bias: bool = False,
) -> Converted:
    """The model in a precision for a runtime, verified: what each layer really runs in, and how far it agrees.

    Args:
        model: The model; it is left as it was. An `.onnx` file that `load_model` read becomes int8 or int4.
        example_inputs: As in `profile`; the shape of one call.
        precision: fp32, fp16, bf16, int8, or int4 for weights.
        runtime: Who runs it: torch, onnxruntime, openvino, torch-compile, litert or executorch.
        kwargs: Arguments of the model by name.
        calibration: A loader or batches of real inputs, which int8 needs; labels behind them are ignored.
        calibration_batches: How many of them to use.
        method: How int8 finds ranges: "minmax", "entropy" or "percentile".
        folder: Where the file goes; without it, to a folder that is gone with the process.
        spare: Paths of layers that stay in float, with everything inside them. "auto" spares those that hurt most,
            as few as bring the difference below `allow`, 0.1 unless given.
        verify_on: Batches to compare on; those of the calibration unless given, else the example. Without it static
            int8 is also compared on a quarter of the calibration that ranges were found without, and on rolled tokens.
        reduce_range: Whether weights get 7 bits; None gives them where this CPU would saturate.
        exported: The result of `export_onnx`, so that the model is not exported again.
        filename: Name of the file; made from the model and the precision unless given.
        must_run: Whether to raise where no layer runs in what was asked; turn it off for a file of another machine.
        allow: Largest mean difference of an output, as a share of its mean, before `Disagrees` is raised (2.5 times it
            for one sample); None: fp32 0.01, fp16 0.05, bf16 0.1, int8 0.2, int4 0.5. True takes anything.
        scheme: How ONNX Runtime's int8 is made: "static" with ranges from calibration, "dynamic" with ranges of each
            input, "weights" of products only; "auto" is dynamic for recurrent layers and transformers, else static.
        group_size: Weights that share a scale where only weights are quantised: 32 is closer, 128 is smaller.
        balance: How far the ranges of channels are evened out before static int8 in ONNX Runtime and OpenVINO, by
            moving large activations into weights: 0 is not at all, 0.5 halfway, 1 altogether.
        correct_bias: Whether biases there take out what rounded weights shift on average.

    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))
    >>> done = convert(model, (1, 16), "int8", calibration=[torch.randn(32, 16)])
    >>> done.effective_precision, [layer.path for layer in done.layers], done.agreement.samples
    ('int8', ['0', '2'], 32)
    """
    maker = maker_of(precision, runtime)
    bound = bound_of(precision, allow)
    spared = _checked_spared(model, spare, precision, runtime, method)
    if is_file(model):
        if spare == "auto":
            raise InvalidInput("spare='auto' tries layers of a module, and this is a file; name the layers to spare")
        subject, exported = file_subject(model, example_inputs, kwargs, precision, runtime)
    else:
        subject = subject_of(model, example_inputs, kwargs)
    scheme = chosen_scheme(model, precision, runtime, scheme)
    _check_calibrated(calibration, precision, runtime, scheme)
    _check_static_options(precision, runtime, scheme, balance, correct_bias)
    # A loader that shuffles draws from torch's random numbers, which are the caller's.
    with torch.random.fork_rng(devices=[]):
        ranges, labels = _read(subject, calibration, calibration_batches, "calibration")
        checks, answers, source = _checks(subject, verify_on, ranges, labels)
    place = Path(own_folder() if folder is None else folder)
    name = filename or f"{subject.name}.{precision}.{SUFFIXES[runtime]}"
    how = (scheme, group_size, balance, correct_bias, _holds_out(precision, scheme, source, bound))
    job = Job(subject, place, ranges, method, spared, reduce_range, exported, name, *how)
    budget = (AUTO_BOUND if allow is None else bound) if spare == "auto" else None
    return _converted(job, maker, precision, runtime, _Verification(checks, answers, source, bound, budget, must_run))


def _holds_out(precision: str, scheme: str, source: str, bound: float) -> bool:
    """Whether inputs that ranges never saw are compared, too; the caller's own batches say it better than ours."""
    return precision == "int8" and scheme == "static" and source == _CALIBRATION and not math.isinf(bound)


@dataclass(frozen=True, slots=True)
class _Verification:
    """What a conversion is held against; `budget` is the bound up to which layers are spared, None where none are."""

    checks: list[Tensors]
    answers: Labels
    source: str
    bound: float
    budget: float | None
    must_run: bool


def _converted(job: Job, maker: Maker, precision: str, runtime: str, held: _Verification) -> Converted:
    """Made aside, tried, verified, and then put in place."""
    subject, place, original = job.subject, job.folder, Original(job.subject)
    with show_progress(), staging(place) as aside:
        report_progress(f"converting to {precision} for {runtime}")
        job = replace(job, folder=aside)
        curve: tuple[KeptFloatTrial, ...] = ()
        if held.budget is not None:
            spared, curve = _auto_spared(job, runtime, original, held)
            job = replace(job, spare=spared)
        made = maker(job)
        if made.batch is not None and any(made.batch != len(check[0]) for check in held.checks if check[0].dim()):
            checks = in_batches_of(held.checks, made.batch)[:_FIXED_BATCHES]
            held = replace(held, checks=checks, answers=[None] * len(checks))
        report_progress(f"comparing {precision} on {runtime} with the original")
        kernels, layers, found, unseen = _tried(made, runtime, precision, original, job, held)
        if held.must_run:
            _check_effective(layers, precision, runtime, job.spare)
        _check_agreement(found, unseen, held, made, precision, runtime)
        files = publish(with_data(made.path), place)
    return Converted(
        precision=cast(Precision, precision),
        runtime=cast(Runtime, runtime),
        effective_precision=effective(layers, precision),
        layers=layers,
        kernels=kernels,
        agreement=found,
        size_bytes=size_of(files[-1]),
        original_bytes=_original_bytes(job),
        path=str(files[-1]),
        inputs=subject.names,
        outputs=made.outputs,
        remarks=(*made.remarks, *_remarks(layers, kernels, precision, runtime), *_refusals(found, runtime)),
        model=made.model,
        curve=curve,
    )


def _original_bytes(job: Job) -> int:
    """Bytes of the weights; of a file that was given, the file's."""
    state = job.subject.model.state_dict()
    is_bare = not state and job.exported is not None
    return job.exported.size_bytes if is_bare and job.exported else sum(tensor.nbytes for tensor in state.values())


def _tried(
    made: Made, runtime: str, precision: str, original: Original, job: Job, held: _Verification
) -> tuple[tuple[Kernel, ...], tuple[LayerPrecision, ...], Agreement, list[Unseen]]:
    """What was made, run once: its kernels, what its layers run in, and how far it agrees."""
    with _runner(made, runtime, precision) as runner:
        has_kernels = made.model is None and made.layers is None
        kernels = executed_kernels(runner, held.checks[0]) if has_kernels else ()
        layers = _torch_layers(made.model) if made.model else made.layers
        if layers is None:
            layers = _layers(made.path, kernels, precision, runtime)
        return kernels, layers, *_compared(made, runner, original, job, held, held.bound)


def _compared(
    made: Made, runner: Runner, original: Original, job: Job, held: _Verification, bound: float
) -> tuple[Agreement, list[Unseen]]:
    """How far it agrees on the batches given and, where that is within the bound, on inputs that ranges never saw."""
    found = agreement(original, runner, held.checks, held.source, held.answers, made.batch)
    if not job.hold_out or trouble_of(found, bound) is not None:
        return found, []
    reopen = partial(_open, runtime=runner.runtime, precision="int8")
    unseen = list(compare_unseen(original, made, runner, reopen, job.calibration or [], held.checks))
    return replace(found, unseen=tuple(entry.found for entry in unseen)), unseen


def _auto_spared(
    job: Job, runtime: str, original: Original, held: _Verification
) -> tuple[tuple[str, ...], tuple[KeptFloatTrial, ...]]:
    """The layers that int8 must leave in float, by trying; ranges are found once."""
    known: list[Calibrated] = []
    first = replace(job, filename=f"try-{job.filename}", spare=())
    source = _in_onnx("fp32")(replace(first, filename=f"float-{first.filename}"))
    path = job.folder / first.filename
    assert held.budget is not None
    bound, single = held.budget, SINGLE_ALLOWED * held.bound

    def attempt(spared: tuple[str, ...]) -> tuple[KeptFloatTrial, str | None]:
        report_progress(f"trying int8 with {len(spared)} layers in float")
        if job.scheme == "static":
            made, ranges = _static(replace(first, spare=spared), source, path, known[0] if known else None)
            known[:] = [ranges]
        else:
            is_big = size_of(source.path) > EXTERNAL_DATA_BYTES
            quantize_dynamic(source.path, path, spared, is_reduced(job.reduce_range), is_big)
            made = replace(source, path=path)
        with _open(path, runtime, "int8") as runner:
            found = _compared(made, runner, original, job, held, bound)[0]
        point = KeptFloatTrial(spared, found.relative_difference or 0.0, found.top1, found.accuracy)
        trouble = trouble_of(found, bound, single)
        return point, None if trouble is None else trouble[1]

    subject, batch = job.subject, held.checks[0]
    with undisturbed(subject.model):
        ranked = ranked_layers(subject.model, lambda: subject.flat()(*(tensor.clone() for tensor in batch)))
    return keep_float_until_it_agrees(ranked, attempt, bound)


def _checked_spared(
    model: nn.Module, spare: Iterable[str], precision: str, runtime: str, method: str
) -> tuple[str, ...]:
    """The layers to spare, once the precision can run here and the method is known."""
    if runtime in IN_TORCH:
        check_instructions(precision, runtime)
    check_method(method)
    if spare == "auto":
        if precision != "int8" or runtime not in ("onnxruntime", "openvino"):
            raise InvalidInput("spare='auto' is for int8 in onnxruntime and openvino; name layers, or leave it out")
        return ()
    spared = check_spared(model, spare)
    if spared and precision not in ("int8", "int4"):
        raise InvalidInput(f"layers can be spared from int8 only; {precision} is of the whole model")
    return spared


def _check_calibrated(calibration: object, precision: str, runtime: str, scheme: str) -> None:
    if precision == "int8" and runtime not in IN_TORCH and scheme == "static" and calibration is None:
        raise InvalidInput(
            "int8 needs calibration=: a loader or batches of real inputs, to find the range of each tensor"
        )


def _check_static_options(precision: str, runtime: str, scheme: str, balance: float, correct_bias: bool) -> None:
    if not (is_number(balance) and 0 <= balance <= 1):
        raise InvalidInput(f"balance is {balance!r}; it is from 0, not at all, to 1, and 0.5 is usual")
    is_static = precision == "int8" and runtime in ("onnxruntime", "openvino") and scheme == "static"
    if (balance or correct_bias) and not is_static:
        raise InvalidInput(
            "balance= and correct_bias= are for static int8 in onnxruntime and openvino; give scheme='static', or "
            "leave them out"
        )


def _read(subject: Subject, batches: Any, most: int | None, what: str) -> tuple[list[Tensors] | None, Labels]:
    """Batches of inputs with the labels behind them, where there are any."""
    if batches is None:
        return None, []
    labels: Labels = []
    return read_batches(subject, labels_of(subject, batches, labels), most, what), labels


def _checks(
    subject: Subject, verify_on: Iterable[Any] | None, ranges: list[Tensors] | None, labels: Labels
) -> tuple[list[Tensors], Labels, str]:
    if verify_on is not None:
        read, answers = _read(subject, verify_on, None, "verification")
        assert read is not None
        return read, answers, "verify_on"
    if ranges is not None:
        return ranges[:_VERIFIED_BATCHES], labels[: len(ranges)][:_VERIFIED_BATCHES], _CALIBRATION
    return [subject.tensors], [None], "example inputs"


def _check_agreement(
    found: Agreement, unseen: list[Unseen], held: _Verification, made: Made, precision: str, runtime: str
) -> None:
    """Refuse a conversion that ruined the model, with the layer where the difference begins."""
    trouble = trouble_of(found, held.bound)
    if trouble is None:
        return
    entry, problem = trouble
    begins = None
    if made.reference is not None:
        beyond = next((each for each in unseen if each.found is entry), None)
        file, batch = (made.path, held.checks[0]) if beyond is None else (beyond.file, beyond.worst)
        if beyond is None and entry is not None:
            batch = sized(held.checks, entry.samples)
        begins = first_difference(
            made.reference, file, lambda path: _open(path, runtime, precision), PATH_KEY, batch, held.bound
        )
    raise disagreement(f"{precision} on {runtime}", found, problem, begins)


def _refusals(found: Agreement, runtime: str) -> list[str]:
    return [
        f"{runtime} takes no batch of {entry.samples}: {entry.refused}" for entry in found.by_batch if entry.refused
    ]


def _runner(made: Made, runtime: str, precision: str) -> Runner:
    if made.model is not None:
        return (CompiledRunner if runtime == "torch-compile" else TorchRunner)(made.model, 1)
    return _open(made.path, runtime, precision)


def _open(path: Path, runtime: str, precision: str) -> Runner:
    return open_file(path, runtime, 1, precision)


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
    if asked in found.split("+") and (asked in ("int8", "int4") or found == asked):
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
    if runtime in IN_TORCH and precision != "fp32" and not is_fast(precision):
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
        report_progress(f"exporting to ONNX in {name}")
        if name == "fp32" and _is_float32(job.subject.model):
            done = export(job.subject, path)
        else:
            model, dtype = _cast(job.subject.model, name)
            done = export(job.subject, path, dtype, model)
        return Made(path, done.outputs, done.remarks, reference=path, batch=done.batch)

    return make


def _copied(exported: Exported, folder: Path) -> Made:
    """The export that the caller brings; it keeps its name, which weights beside it go by."""
    copies = [Path(shutil.copyfile(file, folder / file.name)) for file in with_data(Path(exported.path))]
    return Made(copies[-1], exported.outputs, exported.remarks, reference=copies[-1], batch=exported.batch)


for _name in _DTYPES:
    precision(_name, "torch", "torch-compile")(_in_torch(_name))
    precision(_name, "onnxruntime")(_in_onnx(_name))
    # OpenVINO takes float32 and computes in what it is asked for, if it can.
    precision(_name, "openvino")(_in_onnx("fp32"))


@precision("int8", "onnxruntime", "openvino")
def _int8(job: Job) -> Made:
    """Static, both runtimes take the same file: u8 activations, s8 weights, quantise and dequantise nodes between."""
    source = _in_onnx("fp32")(replace(job, filename=f"float-{job.filename}"))
    path = job.folder / job.filename
    is_big = size_of(source.path) > EXTERNAL_DATA_BYTES
    report_progress(f"quantising to int8, {job.scheme}")
    remarks: tuple[str, ...] = ()
    if job.scheme == "dynamic":
        quantize_dynamic(source.path, path, job.spare, is_reduced(job.reduce_range), is_big)
        remarks = range_remarks(job.reduce_range)
    elif job.scheme == "weights":
        quantize_weights(source.path, path, job.spare, 8, job.group_size, is_big)
    else:
        made, _ = _static(job, source, path)
        remarks = (*range_remarks(job.reduce_range), *sample_remarks(job.calibration or []))
        return replace(made, remarks=(*source.remarks, *remarks))
    prepared = path.with_name(f"prepared-{path.name}")
    return Made(path, source.outputs, (*source.remarks, *remarks), reference=prepared, batch=source.batch)


def _static(job: Job, source: Made, path: Path, known: Calibrated | None = None) -> tuple[Made, Calibrated]:
    """The file in static int8, and its ranges, so that another one need not find them."""
    assert job.calibration is not None
    batches, held_out = split(job.calibration, source.batch) if job.hold_out else (job.calibration, [])
    prepared = path.with_name(f"prepared-{path.name}")
    write = partial(
        quantize,
        source.path,
        prepared,
        names=job.subject.names,
        batches=batches,
        method=job.method,
        spare=job.spare,
        reduce_range=job.reduce_range,
        strength=job.balance,
        correct_bias=job.correct_bias,
    )
    found = write(path, held_out=held_out, known=known)

    def twin() -> Path:
        beside = path.with_name(f"twin-{path.name}")
        write(beside, known=Calibrated(found.fewer or {}))
        return beside

    made = Made(
        path, source.outputs, reference=prepared, batch=source.batch, held_out=tuple(held_out),
        twin=twin if held_out else None,
    )  # fmt: skip
    return made, found


@precision("int4", "onnxruntime")
def _int4(job: Job) -> Made:
    """Weights of products in 4 bits, in groups; everything else stays in float."""
    source = _in_onnx("fp32")(replace(job, filename=f"float-{job.filename}"))
    path = job.folder / job.filename
    is_big = size_of(source.path) > EXTERNAL_DATA_BYTES
    quantize_weights(source.path, path, job.spare, 4, job.group_size, is_big)
    prepared = path.with_name(f"prepared-{path.name}")
    return Made(path, source.outputs, source.remarks, reference=prepared, batch=source.batch)


@precision("int8", "torch", "torch-compile")
def _refused(job: Job) -> Made:
    """Nothing in torch itself is left that quantises a module and is not on its way out."""
    raise ConversionFailed(
        "torch's own quantisation of modules is deprecated and gone from its recent versions; "
        "use runtime='onnxruntime' or 'openvino' for int8"
    )


# Makers for other runtimes register themselves; their packages are imported when they are used.
import edge_opt.runtimes.executorch  # noqa: E402
import edge_opt.runtimes.litert  # noqa: E402, F401
