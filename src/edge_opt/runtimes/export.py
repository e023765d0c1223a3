"""ONNX files of any model, behind flat tensors: exported in a floating precision, or quantized from one export."""

from __future__ import annotations

import copy
import importlib
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from edge_opt._support.files import publish, staging
from edge_opt._support.progress import quiet, report_progress
from edge_opt._support.unchanged import gc_paused
from edge_opt.errors import EdgeOptError, ExportFailed, InvalidInput, first_line, message_of
from edge_opt.quantization.onnx_files import (
    EXTERNAL_DATA_BYTES,
    PATH_KEY,
    Ranges,
    collect_ranges,
    prepare,
    quantize_dynamic,
    quantize_static,
    quantize_weights,
    range_remarks,
    require,
    sample_remarks,
    size_of,
    with_data,
)
from edge_opt.records.conversions import Exported
from edge_opt.runtimes.agreement import split
from edge_opt.runtimes.model_call import BatchAttempt, FlatModel, ModelCall, batch_attempts, model_call, output_names
from edge_opt.runtimes.protocol import BuiltModel, ConversionRequest
from edge_opt.runtimes.torch_runtime import cast_copy, is_float32

T = TypeVar("T")
_SCOPES = "pkg.torch.onnx.name_scopes"


def export_onnx(
    model: nn.Module,
    example_inputs: Any,
    path: str | os.PathLike[str],
    *,
    kwargs: Mapping[str, Any] | None = None,
) -> Exported:
    """Write the model as ONNX in its own precision, for any batch size where the model allows it.

    Each node carries its module's path. Weights beyond 1.5 GB are in `NAME.onnx.data` beside the file.

    Args:
        model: The model; it is unchanged.
        example_inputs: As in `profile`; the shape of one call.
        path: The file to write, ending in .onnx.
        kwargs: Arguments of the model by name.

    >>> import tempfile
    >>> from torch import nn
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     done = export_onnx(nn.Linear(4, 2), (1, 4), f"{folder}/linear.onnx")
    >>> done.inputs, done.outputs, done.batch
    (('input',), ('output',), None)
    """
    if Path(path).suffix != ".onnx":
        raise InvalidInput(f"{str(path)!r} must end in .onnx")
    call = model_call(model, example_inputs, kwargs)
    folder = Path(path).parent
    with staging(folder) as aside:
        exported = export(call, aside / Path(path).name)
        publish(with_data(Path(exported.path)), folder)
    return replace(exported, path=str(path))


def export(call: ModelCall, path: Path, dtype: torch.dtype | None = None, model: nn.Module | None = None) -> Exported:
    """Export into a file that is not yet verified. With a `dtype`, `model` is a copy of the call's in that type.

    Every attempt has a copy of the model for itself. torch.export is the first way. Where it fails, the older tracer
    is the second, unless values decide over the path through forward: a trace would freeze one of the paths.
    """
    require("onnx")
    require("onnxscript")
    remarks: list[str] = []
    adapters: list[FlatModel] = []

    def adapter() -> FlatModel:
        adapters.append(export_copy(call, dtype, model))
        return adapters[-1]

    with quiet():
        try:
            outputs, batch = _by_torch_export(adapter, call, path)
        except Exception as error:
            failure = _failure(error, adapters[-1])
            if _depends_on_values(error):
                raise failure from error
            try:
                outputs, batch = _by_tracing(adapter, call, path)
            except OSError:
                raise
            except Exception:
                raise failure from error
            remarks.append("exported by tracing, for torch.export refused it")
    if batch is not None:
        remarks.append(f"the batch is fixed at {batch}: the model's code depends on it")
    return Exported(str(path), call.names, outputs, batch, size_of(path), tuple(remarks))


def export_quickly(call: ModelCall, path: Path) -> Exported:
    """Export by the older tracer, which takes a twentieth of the time; as `export` does where it fails.

    Kernels are the same, so it does for timing. A path that values choose would be frozen, so it does for no more.
    """
    with quiet():
        try:
            outputs, batch = _by_tracing(lambda: export_copy(call), call, path)
        except Exception:  # whatever the tracer meets: there is another way
            return export(call, path)
    return Exported(str(path), call.names, outputs, batch, size_of(path))


def export_copy(call: ModelCall, dtype: torch.dtype | None = None, model: nn.Module | None = None) -> FlatModel:
    """Return a copy to be exported, behind flat tensors, which was run once, so that what it caches is real.

    An exporter runs a model on tensors without data, and a cache would keep those. A model that cannot be copied is
    exported itself. With a `dtype`, `model` is a copy of the call's in that type.
    """
    source = call.model if model is None else model
    try:
        adapter = call.flat(dtype, copy.deepcopy(source).eval())
    except Exception:  # tensors with a history, locks, open files
        return call.flat(dtype, source)
    # A model that refuses the example fails in the exporter again, which says better where.
    with call.running(), suppress(Exception):
        adapter(*(tensor.clone() for tensor in call.tensors))
    return adapter


def first_success(
    call: ModelCall, write: Callable[[FlatModel, BatchAttempt], T], title: str, fixed_batch: bool = False
) -> tuple[T, int | None, list[str]]:
    """Write a file for any batch, or for the example's where that fails, or where `fixed_batch` asks for it.

    Returns what `write` returns for a copy of the model, the batch, and a remark where it is fixed. The first failure
    is raised where both fail: the one of a fixed batch is often a consequence.
    """
    problem: Exception | None = None
    for attempt in batch_attempts(call)[1 if fixed_batch else 0 :]:
        batch = attempt.batch
        why = "as asked for" if fixed_batch else f"{title} could not leave it open"
        remarks = [] if batch is None else [f"the batch is fixed at {batch}: {why}"]
        try:
            with quiet():
                return write(export_copy(call).eval(), attempt), batch, remarks
        except (OSError, EdgeOptError):
            raise
        except Exception as error:  # torch.export and the converters each have classes of their own
            problem = problem or error
    assert problem is not None
    raise ExportFailed(
        f"the model cannot be written for {title}: {first_line(problem)}; use runtime='onnxruntime', or change that "
        "part of forward"
    ) from problem


def _by_torch_export(
    adapter: Callable[[], FlatModel], call: ModelCall, path: Path
) -> tuple[tuple[str, ...], int | None]:
    """Write the file by torch.export; returns the names of its outputs, and its fixed batch: None where any will do."""
    free, fixed = batch_attempts(call)

    def exported(attempt: BatchAttempt) -> Any:
        shapes = attempt.dynamic_shapes(torch.export.Dim.AUTO)
        model, names = adapter(), list(call.names)
        _share_translations()
        # Graphs of torch are many small objects: searching them for cycles would be a quarter of the time.
        with call.running(), gc_paused():
            return torch.onnx.export(
                model, attempt.tensors, dynamo=True, dynamic_shapes=shapes, input_names=names, verbose=False
            )

    batch: int | None = None
    try:
        program = exported(free)
    except Exception:
        # The model may not take two samples, or its code may look at the batch: then the example's own is the batch.
        program = None
    else:
        shape = program.model.graph.inputs[0].shape
        if any(free.is_free) and isinstance(shape[0], int):
            batch = fixed.batch
    if program is None or (batch is not None and fixed.batch == 1):
        program, batch = exported(fixed), fixed.batch
    graph = program.model.graph
    outputs = output_names(len(graph.outputs))
    for value, name in zip(graph.outputs, outputs, strict=True):
        value.name = name
    _label_nodes(graph)
    if batch is None:
        _name_batch(graph)
    weight_bytes = sum(tensor.nbytes for tensor in [*call.model.parameters(), *call.model.buffers()])
    program.save(str(path), external_data=weight_bytes > EXTERNAL_DATA_BYTES)
    return outputs, batch


def _name_batch(graph: Any) -> None:
    """Call the free first dimension of the inputs `batch`, also where other tensors have it; torch calls it s77."""
    shapes = [value.shape for value in (*graph.inputs, *graph.outputs) if value.shape is not None]
    free = {str(shape[0]) for shape in shapes[: len(graph.inputs)] if len(shape) and not isinstance(shape[0], int)}
    for value in (*graph.inputs, *(output for node in graph for output in node.outputs)):
        if value.shape is not None and any(str(size) in free for size in value.shape):
            names = ["batch" if str(size) in free else size for size in value.shape]
            value.shape = type(value.shape)(names)


@cache
def _share_translations() -> None:
    """Let the exports of this process share the table of translations, which each would build in half a second.

    Nearly all of that is parsing the source of 500 functions for their domain, which is that of their opset. The names
    are private to torch and onnxscript; the table is a list that exports only read. Where a version has other names,
    exports do what they always do.
    """
    with suppress(ImportError, AttributeError):
        library = importlib.import_module("torch.onnx._internal.exporter._registration").onnxscript_apis
        function = importlib.import_module("onnxscript._internal.values").TracedOnnxFunction
        parsed, function.function_ir = function.function_ir, function.opset
        try:
            table = library.get_torchlib_ops()
        finally:
            function.function_ir = parsed
        library.get_torchlib_ops = lambda: table


def start_exporter() -> None:
    """Export the smallest model in a process that later exports are forked from, so that they find its imports loaded.

    An error is left to the export that meets it again.
    """
    with suppress(Exception), quiet():
        _share_translations()
        torch.onnx.export(nn.Identity().eval(), (torch.zeros(1),), dynamo=True, verbose=False)
    with suppress(ImportError):
        importlib.import_module("onnxruntime.quantization")


def _by_tracing(adapter: Callable[[], FlatModel], call: ModelCall, path: Path) -> tuple[tuple[str, ...], int | None]:
    """Write the file by the older exporter, which records the operators of one forward."""
    free, fixed = batch_attempts(call)
    try:
        return _traced(call, adapter(), free, path), None
    except OSError:
        raise
    except Exception:
        return _traced(call, adapter(), fixed, path), fixed.batch


def _traced(call: ModelCall, adapter: FlatModel, attempt: BatchAttempt, path: Path) -> tuple[str, ...]:
    onnx = require("onnx")
    with call.running():
        outputs = output_names(len(adapter(*(tensor.clone() for tensor in attempt.tensors))))
        axes = {name: {0: "batch"} for name, is_free in zip(call.names, attempt.is_free, strict=True) if is_free}
        torch.onnx.export(
            adapter, attempt.tensors, str(path), dynamo=False, input_names=list(call.names),
            output_names=list(outputs), opset_version=18,
            dynamic_axes={**axes, **{name: {0: "batch"} for name in outputs}} if axes else None,
        )  # fmt: skip
    model = onnx.load(str(path), load_external_data=False)
    paths = {name for name, _ in adapter.named_modules()}
    for node in model.graph.node:
        # Scopes are part of the name: /model/layer1/conv/Conv.
        parts = node.name.strip("/").split("/")[:-1]
        prefixes = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
        owner = next((prefix for prefix in prefixes if prefix in paths), "")
        del node.metadata_props[:]
        node.metadata_props.add(key=PATH_KEY, value=owner.removeprefix("model").removeprefix("."))
    path.write_bytes(model.SerializeToString())
    return outputs


def _label_nodes(graph: Any) -> None:
    """Give each node the path of its module, and take away stack traces, which name the author's folders.

    What an operator makes is renamed where an input or an output has its name: a forward may call its input `cat`.
    """
    ports = {id(value): value.name for value in (*graph.inputs, *graph.outputs)}
    for value in (value for node in graph.all_nodes() for value in node.outputs):
        if value.name in ports.values() and id(value) not in ports:
            value.name = f"{value.name}_made"
    users = Counter(value.name for node in graph.all_nodes() for value in node.inputs if value is not None)
    for node in graph.all_nodes():
        scopes = node.metadata_props.get(_SCOPES, [])
        scopes = re.findall(r"'([^']*)'", scopes) if isinstance(scopes, str) else list(scopes)
        weights = [value.name for value in node.inputs if value is not None and value.name in graph.initializers]
        # A folded batch norm leaves its own scope on the convolution; the weight still says whose it is, unless it is
        # used elsewhere too: equal weights of several modules are stored once.
        owners = (name.rpartition(".")[0] for name in weights if name.startswith("model.") and users[name] == 1)
        owner = next(owners, None)
        path = owner if owner is not None else next((s for s in reversed(scopes[:-1]) if s), "")
        node.metadata_props.clear()
        node.metadata_props[PATH_KEY] = path.removeprefix("model").removeprefix(".")


_CODE_LINE = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\w+)\n\s+(?P<code>[^\n]+)')
_OPERATOR = re.compile(r"No ONNX function found for <OpOverload\(op='(?P<op>[\w.:]+)")


def _depends_on_values(error: BaseException) -> bool:
    return any(words in str(error) for words in ("data-dependent", "Dynamic control flow"))


def _failure(error: BaseException, adapter: FlatModel) -> ExportFailed:
    """Return what stopped the export, where, and what to do about it."""
    text = str(error)
    operator = _OPERATOR.search(text)
    if operator is not None:
        return ExportFailed(
            f"the model cannot be exported: ONNX has no form of the operator {operator['op']}; replace it in forward, "
            "or run the model with runtime='torch'"
        )
    place = _running_module(error, adapter)
    lines = [line for line in _CODE_LINE.finditer(text) if f"{os.sep}torch{os.sep}" not in line["file"]]
    if lines:
        line = lines[-1]
        place = f"{place}, {Path(line['file']).name} line {line['line']}: `{line['code'].strip()}`"
    if _depends_on_values(error):
        return ExportFailed(
            f"the model cannot be exported: its control flow depends on values ({place.lstrip(', ')}); use torch.where "
            "or torch.cond there, or run the model with runtime='torch'"
        )
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    message = message_of(cause)
    return ExportFailed(
        f"the model cannot be exported: {type(cause).__name__}: {message} ({place.lstrip(', ') or 'place unknown'}); "
        "change that part of forward, or run the model with runtime='torch'"
    )


def _running_module(error: BaseException, adapter: FlatModel) -> str:
    """Return the innermost of the model's own modules that was running."""
    paths = {id(module): path for path, module in adapter.named_modules()}
    running = ""
    cause: BaseException | None = error
    while cause is not None:
        step = cause.__traceback__
        while step is not None:
            module = step.tb_frame.f_locals.get("self")
            if isinstance(module, nn.Module) and id(module) in paths and module is not adapter:
                path = paths[id(module)].removeprefix("model").removeprefix(".")
                running = f"module {path!r} ({type(module).__name__})" if path else f"{type(module).__name__}.forward"
            step = step.tb_next
        cause = cause.__cause__
    return running


def build_float(request: ConversionRequest, precision: str) -> BuiltModel:
    """Write the model as ONNX in a floating precision; an export that the caller brings is copied."""
    if precision == "fp32" and request.exported is not None:
        # The export that the caller brings keeps its name, which weights beside it go by.
        exported = request.exported
        files = [Path(shutil.copyfile(file, request.folder / file.name)) for file in with_data(Path(exported.path))]
        return BuiltModel(files[-1], exported.outputs, exported.remarks, reference=files[-1], batch=exported.batch)
    report_progress(f"exporting to ONNX in {precision}")
    if precision == "fp32" and is_float32(request.call.model):
        exported = export(request.call, request.path)
    else:
        model, dtype = cast_copy(request.call.model, precision)
        exported = export(request.call, request.path, dtype, model)
    return BuiltModel(request.path, exported.outputs, exported.remarks, reference=request.path, batch=exported.batch)


class QuantizableModel:
    """A float file, prepared once, with the ranges found once, for as many quantized files as are tried.

    Static int8 is one file for all runtimes. int4 is of the weights of products; everything else stays in float.
    """

    def __init__(self, request: ConversionRequest) -> None:
        self._float = build_float(replace(request, filename=f"float-{request.filename}"), "fp32")
        with quiet(), gc_paused():
            self._source = prepare(self._float.path, request.folder / f"prepared-{request.filename}")
        self._ranges: tuple[Ranges, Ranges] | None = None

    def build(self, request: ConversionRequest) -> BuiltModel:
        """Write one quantized file, by the scheme of the request."""
        report_progress(f"quantizing to {request.precision}, {request.scheme}")
        built = replace(self._float, path=request.path, reference=self._source.path)
        if request.scheme == "static":
            return self._static(request, built)
        if request.scheme == "dynamic":
            quantize_dynamic(self._source, request.path, request.keep_float, request.reduce_range)
            return replace(built, remarks=(*built.remarks, *range_remarks(request.reduce_range)))
        bits = 4 if request.precision == "int4" else 8
        quantize_weights(self._source, request.path, request.keep_float, bits, request.group_size)
        return built

    def _static(self, request: ConversionRequest, built: BuiltModel) -> BuiltModel:
        assert request.calibration is not None
        batches, held_out = split(request.calibration, built.batch) if request.holds_out else (request.calibration, [])
        source = self._source
        if self._ranges is None:
            with quiet():
                self._ranges = collect_ranges(source, request.call.names, batches, held_out)
        ranges, ranges_without_held_out = self._ranges
        quantize_static(source, request.path, ranges, request.keep_float, request.reduce_range)

        def twin() -> Path:
            beside = request.path.with_name(f"twin-{request.filename}")
            quantize_static(source, beside, ranges_without_held_out, request.keep_float, request.reduce_range)
            return beside

        return replace(
            built,
            remarks=(*built.remarks, *range_remarks(request.reduce_range), *sample_remarks(request.calibration)),
            held_out=tuple(held_out),
            twin=twin if held_out else None,
        )
