"""A model written as ONNX: one export with a dynamic batch, nodes that know their module."""

from __future__ import annotations

import io
import logging
import os
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from edge_opt.compress.staging import publish, size_of, staging, with_data
from edge_opt.compress.subject import Flat, Subject, subject_of, undisturbed
from edge_opt.errors import ExportFailed, InvalidInput, MissingExtra
from edge_opt.records import Exported

# protobuf refuses 2 GiB; weights of larger models stand in a file of their own, with room for the rest of the graph.
EXTERNAL_DATA_BYTES = 1_500_000_000
# Where each node keeps the path of its module, so that every tool behind the export can name it.
PATH_KEY = "edge_opt.module"
_SCOPES = "pkg.torch.onnx.name_scopes"


def require(package: str, extra: str = "onnx") -> ModuleType:
    """An optional package, or one sentence with the command that installs it."""
    from importlib import import_module

    try:
        return import_module(package)
    except ImportError as error:
        name = package.partition(".")[0]
        raise MissingExtra(
            f"this needs {name}, which is not installed; run `pip install 'edge-opt[{extra}]'`"
        ) from error


@contextmanager
def quiet() -> Iterator[None]:
    """Silence for exporters and quantisers, which talk to stdout, stderr, warnings and logs."""
    disabled = logging.root.manager.disable
    sink = io.StringIO()
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stdout(sink), redirect_stderr(sink):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


def export_onnx(
    model: nn.Module,
    example_inputs: Any,
    path: str | os.PathLike[str],
    *,
    kwargs: Mapping[str, Any] | None = None,
) -> Exported:
    """Write the model as ONNX in its own precision, for any batch size where the model allows it.

    Each node carries its module's path. Weights beyond 1.5 GB stand beside the file as `NAME.onnx.data`.

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
    """Export into a file that nobody reads yet. With a `dtype`, `model` is a copy of the subject's in that type."""
    require("onnx")
    require("onnxscript")
    adapter = subject.flat(dtype, model)
    with undisturbed(adapter), quiet():
        program, batch = _program(adapter, subject)
        outputs = _output_names(len(program.model.graph.outputs))
        for value, name in zip(program.model.graph.outputs, outputs, strict=True):
            value.name = name
        _label_nodes(program.model.graph)
        weights = sum(tensor.nbytes for tensor in [*adapter.parameters(), *adapter.buffers()])
        program.save(str(path), external_data=weights > EXTERNAL_DATA_BYTES)
    remarks = () if batch is None else (f"the batch is fixed at {batch}: the model's code depends on it",)
    return Exported(str(path), subject.names, outputs, batch, size_of(path), remarks)


def _program(adapter: Flat, subject: Subject) -> tuple[Any, int | None]:
    """The exported program and its fixed batch, None where any will do."""
    count = subject.tensors[0].shape[0] if subject.tensors[0].dim() else 1
    batched = [tensor.dim() > 0 and tensor.shape[0] == count for tensor in subject.tensors]
    # A batch of one is taken for a constant, so that the export is made with two.
    doubled = tuple(
        torch.cat([tensor, tensor]) if is_batched and count == 1 else tensor
        for tensor, is_batched in zip(subject.tensors, batched, strict=True)
    )
    free = tuple({0: torch.export.Dim.AUTO} if is_batched else None for is_batched in batched)
    try:
        program = _exported(adapter, doubled, subject.names, (free,))
    except Exception:
        # The model may not take two samples, or its code may look at the batch: then the example's own is the batch.
        program = None
    else:
        shape = program.model.graph.inputs[0].shape
        if not any(batched) or not isinstance(shape[0], int):
            return program, None
    if program is None or count == 1:
        try:
            program = _exported(adapter, subject.tensors, subject.names, None)
        except Exception as error:
            raise _failure(error, adapter) from error
    return program, count


def _exported(adapter: Flat, tensors: tuple[torch.Tensor, ...], names: tuple[str, ...], shapes: Any) -> Any:
    return torch.onnx.export(
        adapter, tensors, dynamo=True, dynamic_shapes=shapes, input_names=list(names), verbose=False
    )


def _output_names(count: int) -> tuple[str, ...]:
    return ("output",) if count == 1 else tuple(f"output_{number}" for number in range(count))


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
    if "data-dependent" in text or "Dynamic control flow" in text:
        return ExportFailed(
            f"the model cannot be exported: its control flow depends on values ({place.lstrip(', ')}); use torch.where "
            "or torch.cond there, or run the model with runtime='torch'"
        )
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    message = next((line.strip() for line in str(cause).splitlines() if line.strip()), type(cause).__name__)
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
