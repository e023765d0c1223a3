"""One ONNX export of any model, behind flat tensors."""

from __future__ import annotations

import copy
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from edge_opt._support.files import publish, staging
from edge_opt._support.progress import quiet
from edge_opt._support.unchanged import without_fast_path
from edge_opt.errors import ExportFailed, InvalidInput, message_of
from edge_opt.quantization.onnx_files import EXTERNAL_DATA_BYTES, PATH_KEY, Tensors, require, size_of, with_data
from edge_opt.records.conversions import Exported
from edge_opt.runtimes.exporter_start import translations_kept
from edge_opt.runtimes.model_call import Flat, Subject, example_batches, subject_of, undisturbed

_SCOPES = "pkg.torch.onnx.name_scopes"


def export_onnx(
    model: nn.Module,
    example_inputs: Any,
    path: str | os.PathLike[str],
    *,
    kwargs: Mapping[str, Any] | None = None,
) -> Exported:
    """Write the model as ONNX in its own precision, for any batch size where the model allows it.

    Each node carries its module's path. Weights beyond 1.5 GB stand beside the file as `NAME.onnx.data`.

    Args:
        model: The model; it is left as it was.
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
    subject = subject_of(model, example_inputs, kwargs)
    folder = Path(path).parent
    with staging(folder) as aside:
        exported = export(subject, aside / Path(path).name)
        publish(with_data(Path(exported.path)), folder)
    return Exported(str(path), exported.inputs, exported.outputs, exported.batch, exported.size_bytes, exported.remarks)


def export(subject: Subject, path: Path, dtype: torch.dtype | None = None, model: nn.Module | None = None) -> Exported:
    """Export into a file that nobody reads yet. With a `dtype`, `model` is a copy of the subject's in that type.

    Every attempt has a copy of the model for itself. torch.export is the first way. Where it fails, the older tracer
    is the second, unless values decide over the path through forward: a trace would freeze one of the paths.
    """
    require("onnx")
    require("onnxscript")
    source = subject.model if model is None else model
    remarks: list[str] = []

    made: list[Flat] = []

    def adapter() -> Flat:
        made.append(subject.flat(dtype, export_copy(source, subject, dtype)))
        return made[-1]

    with quiet():
        try:
            batch = _by_torch_export(adapter, subject, path)
        except Exception as error:
            failure = _failure(error, made[-1])
            if _depends_on_values(error):
                raise failure from error
            try:
                batch = _by_tracing(adapter, subject, path)
            except OSError:
                raise
            except Exception:
                raise failure from error
            remarks.append("exported by tracing, for torch.export refused it")
        outputs = tuple(value.name for value in require("onnx").load(str(path), load_external_data=False).graph.output)
    if batch is not None:
        remarks.append(f"the batch is fixed at {batch}: the model's code depends on it")
    return Exported(str(path), subject.names, outputs, batch, size_of(path), tuple(remarks))


def export_quickly(subject: Subject, path: Path) -> Exported:
    """Export by the older tracer, which takes a twentieth of the time; as `export` does where it fails.

    Kernels are the same, so it does for timing. A path that values choose would be frozen, so it does for no more.
    """
    with quiet():
        try:
            batch = _by_tracing(lambda: subject.flat(None, export_copy(subject.model, subject)), subject, path)
        except Exception:  # whatever the tracer meets: there is another way
            return export(subject, path)
        outputs = tuple(value.name for value in require("onnx").load(str(path), load_external_data=False).graph.output)
    return Exported(str(path), subject.names, outputs, batch, size_of(path))


def export_copy(model: nn.Module, subject: Subject, dtype: torch.dtype | None = None) -> nn.Module:
    """A copy to be exported: fused where the model offers it, and run once, so that what it caches is real.

    An exporter runs a model on tensors without data, and a cache would keep those. A model that cannot be copied is
    exported itself.
    """
    try:
        copied = copy.deepcopy(model).eval()
    except Exception:  # tensors with a history, locks, open files
        return model
    fused = _fused(copied)
    with torch.no_grad(), without_fast_path():
        expected = _run(subject.flat(dtype, copied), subject.tensors)
        if fused is None or expected is None:
            return copied
        found = _run(subject.flat(dtype, fused), subject.tensors)
    is_same = found is not None and all(
        torch.allclose(a.float(), b.float(), rtol=1e-3, atol=1e-3 * float(a.float().abs().mean()) + 1e-6)
        for a, b in zip(expected, found, strict=True)
    )
    return fused if is_same else copied


def _run(adapter: Flat, tensors: Tensors) -> Tensors | None:
    """What it returns; None where it refuses, which the exporter will say better."""
    try:
        return tuple(adapter(*(tensor.clone() for tensor in tensors)))
    except Exception:
        return None


def _fused(model: nn.Module) -> nn.Module | None:
    """A copy with re-parameterisable modules (RepVGG, MobileOne, LeViT) in the form they are meant to run in."""
    methods = ("fuse", "reparameterize", "switch_to_deploy")
    # A model's own method of such a name may mean anything; those of its parts have no arguments and fold weights.
    if not any(
        callable(getattr(part, name, None)) for part in model.modules() if part is not model for name in methods
    ):
        return None
    try:
        fused = copy.deepcopy(model)
        _fuse_parts(fused, methods)
    except Exception:  # another method of the same name, with arguments of its own
        return None
    return fused


def _fuse_parts(parent: nn.Module, methods: tuple[str, ...]) -> None:
    for name, part in list(parent.named_children()):
        method = next((getattr(part, found) for found in methods if callable(getattr(part, found, None))), None)
        if method is not None:
            _recount(part)
        replacement = method() if method is not None else None
        if isinstance(replacement, nn.Module) and replacement is not part:
            setattr(parent, name, replacement.eval())
            part = replacement
        _fuse_parts(part, methods)


_COUNTS = {
    "in_chs": "in_channels", "in_channels": "in_channels", "out_chs": "out_channels", "out_channels": "out_channels",
    "groups": "groups",
}  # fmt: skip


def _recount(block: nn.Module) -> None:
    """Bring a block's own numbers of channels up to date, which pruning has outdated; its convolutions know them.

    Where a guess is wrong the fused form gives other outputs, and the block is exported as it is.
    """
    inner = [part for part in block.modules() if part is not block and isinstance(part, _ConvNd)]
    for name, counted in _COUNTS.items():
        known = Counter(getattr(part, counted) for part in inner)
        value = getattr(block, name, None)
        if known and type(value) is int and value not in known:
            setattr(block, name, known.most_common(1)[0][0])


def _by_torch_export(adapter: Callable[[], Flat], subject: Subject, path: Path) -> int | None:
    """Write the file by torch.export; returns its fixed batch, None where any will do."""
    doubled, batched, count = example_batches(subject)
    free = tuple({0: torch.export.Dim.AUTO} if is_batched else None for is_batched in batched)
    batch: int | None = None
    try:
        program = _exported(adapter(), doubled, subject.names, (free,))
    except Exception:
        # The model may not take two samples, or its code may look at the batch: then the example's own is the batch.
        program = None
    else:
        shape = program.model.graph.inputs[0].shape
        if any(batched) and isinstance(shape[0], int):
            batch = count
    if program is None or (batch is not None and count == 1):
        program, batch = _exported(adapter(), subject.tensors, subject.names, None), count
    graph = program.model.graph
    for value, name in zip(graph.outputs, _output_names(len(graph.outputs)), strict=True):
        value.name = name
    _part_names(graph)
    _label_nodes(graph)
    program.save(str(path), external_data=_weight_bytes(subject.model) > EXTERNAL_DATA_BYTES)
    return batch


def _exported(adapter: Flat, tensors: tuple[torch.Tensor, ...], names: tuple[str, ...], shapes: Any) -> Any:
    with undisturbed(adapter), translations_kept():
        return torch.onnx.export(
            adapter, tensors, dynamo=True, dynamic_shapes=shapes, input_names=list(names), verbose=False
        )


def _by_tracing(adapter: Callable[[], Flat], subject: Subject, path: Path) -> int | None:
    """Write the file by the older exporter, which records the operators of one forward."""
    doubled, batched, count = example_batches(subject)
    try:
        _traced(adapter(), doubled, subject.names, batched, path)
    except OSError:
        raise
    except Exception:
        _traced(adapter(), subject.tensors, subject.names, [False] * len(batched), path)
        return count
    return None


def _traced(adapter: Flat, tensors: Tensors, names: tuple[str, ...], batched: list[bool], path: Path) -> None:
    onnx = require("onnx")
    with undisturbed(adapter):
        outputs = _output_names(len(adapter(*(tensor.clone() for tensor in tensors))))
        axes = {name: {0: "batch"} for name, is_batched in zip(names, batched, strict=True) if is_batched}
        torch.onnx.export(
            adapter, tensors, str(path), dynamo=False, input_names=list(names), output_names=list(outputs),
            dynamic_axes={**axes, **{name: {0: "batch"} for name in outputs}} if axes else None, opset_version=18,
        )  # fmt: skip
    model = onnx.load(str(path), load_external_data=False)
    paths = {name for name, _ in adapter.named_modules()}
    for node in model.graph.node:
        # Scopes are part of the name: /model/layer1/conv/Conv.
        parts = node.name.strip("/").split("/")[:-1]
        found = next((".".join(parts[:n]) for n in range(len(parts), 0, -1) if ".".join(parts[:n]) in paths), "")
        del node.metadata_props[:]
        node.metadata_props.add(key=PATH_KEY, value=found.removeprefix("model").removeprefix("."))
    path.write_bytes(model.SerializeToString())


def _weight_bytes(model: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])


def _output_names(count: int) -> tuple[str, ...]:
    return ("output",) if count == 1 else tuple(f"output_{number}" for number in range(count))


def _part_names(graph: Any) -> None:
    """Rename what an operator makes where an input or an output has that name: a forward may call its input `cat`."""
    ports = {id(value) for value in (*graph.inputs, *graph.outputs)}
    taken = {value.name for value in (*graph.inputs, *graph.outputs)}
    for value in (value for node in graph.all_nodes() for value in node.outputs):
        if value.name in taken and id(value) not in ports:
            value.name = f"{value.name}_made"


def _label_nodes(graph: Any) -> None:
    """Give each node the path of its module, and take away stack traces, which name the author's folders."""
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


_PLACE = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\w+)\n\s+(?P<code>[^\n]+)')
_OPERATOR = re.compile(r"No ONNX function found for <OpOverload\(op='(?P<op>[\w.:]+)")


def _depends_on_values(error: BaseException) -> bool:
    return any(words in str(error) for words in ("data-dependent", "Dynamic control flow"))


def _failure(error: BaseException, adapter: Flat) -> ExportFailed:
    """What stopped the export, where, and what to do about it."""
    text = str(error)
    operator = _OPERATOR.search(text)
    if operator is not None:
        return ExportFailed(
            f"the model cannot be exported: ONNX has no form of the operator {operator['op']}; replace it in forward, "
            "or run the model with runtime='torch'"
        )
    place = _place(error, adapter)
    places = [found for found in _PLACE.finditer(text) if f"{os.sep}torch{os.sep}" not in found["file"]]
    if places:
        line = places[-1]
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


def _place(error: BaseException, adapter: Flat) -> str:
    """The innermost of the model's own modules that was running."""
    paths = {id(module): path for path, module in adapter.named_modules()}
    found = ""
    cause: BaseException | None = error
    while cause is not None:
        step = cause.__traceback__
        while step is not None:
            module = step.tb_frame.f_locals.get("self")
            if isinstance(module, nn.Module) and id(module) in paths and module is not adapter:
                path = paths[id(module)].removeprefix("model").removeprefix(".")
                found = f"module {path!r} ({type(module).__name__})" if path else f"{type(module).__name__}.forward"
            step = step.tb_next
        cause = cause.__cause__
    return found
