"""One ONNX export of any model, behind flat tensors."""

from __future__ import annotations

import copy
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.utils._pytree import TreeSpec, tree_flatten_with_path, tree_leaves, tree_unflatten

from edge_opt import units
from edge_opt._support.checks import check_whole
from edge_opt._support.extras import optional
from edge_opt._support.files import publish, staging
from edge_opt._support.output_tensors import flat_tensors
from edge_opt._support.unchanged import unchanged, without_fast_path
from edge_opt._support.waiting import quiet
from edge_opt.compress.exporter_start import translations_kept
from edge_opt.errors import ExportFailed, InvalidInput, message_of
from edge_opt.measuring.machine import CPU
from edge_opt.measuring.session import call_on, on_device
from edge_opt.records.conversions import Exported
from edge_opt.trace.module_calls import module_paths


def with_data(path: Path) -> list[Path]:
    """An ONNX file and the weights beside it, weights first: the file must never name data that is not there yet."""
    data = path.with_name(f"{path.name}.data")
    return [data, path] if data.exists() else [path]


def size_of(path: Path) -> int:
    """Bytes on disk, weights beside the file included."""
    return sum(file.stat().st_size for file in with_data(path))


Tensors = tuple[torch.Tensor, ...]


class Flat(nn.Module):
    """A model that takes its tensors one after the other and returns a tuple of tensors, whatever its own structures.

    With a `dtype` floating inputs are cast to it and outputs back to float32, so that all precisions look alike.
    """

    def __init__(self, model: nn.Module, spec: TreeSpec, leaves: list[Any], dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.model = model
        self._spec, self._leaves, self._dtype = spec, leaves, dtype

    def forward(self, *tensors: torch.Tensor) -> Tensors:
        waiting = iter(tensors)
        leaves = [self._cast(next(waiting), self._dtype) if leaf is _TENSOR else leaf for leaf in self._leaves]
        args, kwargs = tree_unflatten(leaves, self._spec)
        back = None if self._dtype is None else torch.float32
        return tuple(self._cast(tensor, back) for tensor in flat_tensors(self.model(*args, **kwargs)))

    @staticmethod
    def _cast(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
        return tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)


_TENSOR = object()


@dataclass(frozen=True, slots=True)
class Subject:
    """A model with the arguments of one call, taken apart into tensors with names."""

    model: nn.Module
    names: tuple[str, ...]
    tensors: Tensors
    spec: TreeSpec
    leaves: tuple[Any, ...]

    @property
    def name(self) -> str:
        return type(self.model).__name__

    def flat(self, dtype: torch.dtype | None = None, model: nn.Module | None = None) -> Flat:
        """The model, or a copy of it, behind flat tensors."""
        return Flat(self.model if model is None else model, self.spec, list(self.leaves), dtype)

    def read(self, batch: Any, what: str = "the batch") -> Tensors:
        """The model's tensors from one batch of a loader: a tensor, a mapping, or a tuple with labels behind."""
        if isinstance(batch, (tuple, list)) and batch and isinstance(batch[0], Mapping):
            batch = batch[0]
        if isinstance(batch, Mapping):
            missing = [name for name in self.names if name not in batch]
            if missing:
                raise InvalidInput(f"{what} has no {missing[0]!r}; it has {', '.join(map(str, batch))}")
            found = [batch[name] for name in self.names]
        else:
            found = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, (torch.Tensor, np.ndarray))]
        if len(found) < len(self.names):
            raise InvalidInput(
                f"{what} has {len(found)} tensors; the model takes {len(self.names)}: {', '.join(self.names)}"
            )
        # What stands behind the inputs are labels.
        return tuple(
            self._fitting(torch.as_tensor(value), name, example, what)
            for value, name, example in zip(found, self.names, self.tensors, strict=False)
        )

    def _fitting(self, value: torch.Tensor, name: str, example: torch.Tensor, what: str) -> torch.Tensor:
        fits = value.dim() == example.dim() and value.shape[1:] == example.shape[1:]
        if not fits or value.is_floating_point() != example.is_floating_point():
            expected = f"N{units.TIMES}{units.shape(example.shape[1:])}" if example.dim() > 1 else "N"
            raise InvalidInput(
                f"{what}: input {name!r} is {units.shape(value.shape)} of {_dtype(value)}; "
                f"the model takes {expected} of {_dtype(example)}"
            )
        return value.detach().to("cpu", example.dtype)

    def outputs(self, tensors: Tensors) -> Tensors:
        """What the original returns, as flat tensors."""
        with undisturbed(self.model):
            found = tuple(tensor.detach().cpu().clone() for tensor in self.flat()(*(t.clone() for t in tensors)))
        if not found:
            raise InvalidInput(f"{self.name} answers with no tensor; return tensors, or structures that hold some")
        return found


def subject_of(model: nn.Module, inputs: Any, kwargs: Mapping[str, Any] | None = None) -> Subject:
    """The model on the CPU with example tensors: the caller's, or for shapes random ones."""
    model = on_device(model, CPU)
    arguments = call_on(model, inputs, kwargs, CPU)
    found, spec = tree_flatten_with_path((arguments.args, arguments.kwargs))
    tensors = [(path, leaf) for path, leaf in found if isinstance(leaf, torch.Tensor)]
    if not tensors:
        raise InvalidInput("the example inputs hold no tensor; pass a shape such as (1, 3, 224, 224), or tensors")
    leaves = tuple(_TENSOR if isinstance(leaf, torch.Tensor) else leaf for _, leaf in found)
    names = _names(model, [path for path, _ in tensors])
    return Subject(model, names, tuple(tensor for _, tensor in tensors), spec, leaves)


def _names(model: nn.Module, paths: list[Any]) -> tuple[str, ...]:
    """Input names as forward calls them; inside a structure the key is appended."""
    try:
        parameters = list(signature(model.forward).parameters)
    except (TypeError, ValueError):
        parameters = []
    names: list[str] = []
    for kind, *keys in paths:
        words = [str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in keys]
        if kind.idx == 0:
            position = int(words[0])
            words[0] = parameters[position] if position < len(parameters) else f"input_{position}"
        name = re.sub(r"\W", "_", "_".join(words))
        names.append(f"{name}_{len(names)}" if name in names else name)
    return tuple(names)


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Run the model in eval without gradients; then it is as it was, weights and statistics included."""
    kept = [*model.parameters(), *model.buffers()]
    with torch.no_grad():
        copies = [tensor.detach().clone() for tensor in kept]
        try:
            with unchanged(list(module_paths(model)), training=False):
                yield
        finally:
            for tensor, before in zip(kept, copies, strict=True):
                if not torch.equal(tensor, before):
                    tensor.copy_(before)


def read_batches(subject: Subject, batches: Iterable[Any], most: int | None, what: str) -> list[Tensors]:
    """The first `most` batches, checked against the model's inputs."""
    if isinstance(batches, (torch.Tensor, np.ndarray, Mapping)):
        batches = [batches]
    if most is not None:
        check_whole("calibration_batches", most)
    read: list[Tensors] = []
    for number, batch in enumerate(batches):
        if most is not None and number >= most:
            break
        read.append(subject.read(batch, f"{what} batch {number + 1}"))
    if not read:
        raise InvalidInput(f"the {what} loader is empty; give at least one batch of inputs")
    return read


def in_batches_of(batches: list[Tensors], size: int | None) -> list[Tensors]:
    """The same samples in batches of the only size that a file takes; as they are where it takes any."""
    if size is None:
        return batches
    pieces = [
        tuple(t[start : start + size] if t.dim() and len(t) == len(batch[0]) else t for t in batch)
        for batch in batches
        for start in range(0, len(batch[0]) - size + 1, size)
    ]
    return pieces or batches


def labels_of(subject: Subject, batches: Iterable[Any], labels: list[torch.Tensor | None]) -> Iterable[Any]:
    """The batches as they are; what stands behind their inputs, if it is one class per sample, is put into `labels`."""
    if isinstance(batches, (torch.Tensor, np.ndarray, Mapping)):
        batches = [batches]
    for batch in batches:
        leaves = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, (torch.Tensor, np.ndarray))]
        behind = [torch.as_tensor(leaf) for leaf in leaves[len(subject.names) :]]
        one = behind[0] if isinstance(batch, (tuple, list)) and len(behind) == 1 else None
        is_class = one is not None and one.dim() == 1 and not one.is_floating_point() and len(leaves[0]) == len(one)
        labels.append(one.detach().cpu() if one is not None and is_class else None)
        yield batch


# protobuf refuses 2 GiB; weights of larger models stand in a file of their own, with room for the rest of the graph.
EXTERNAL_DATA_BYTES = 1_500_000_000
# Where each node keeps the path of its module, so that every tool behind the export can name it.
PATH_KEY = "edge_opt.module"
_SCOPES = "pkg.torch.onnx.name_scopes"


def require(package: str, extra: str = "onnx") -> Any:
    """An optional package, or one sentence with the command that installs it."""
    return optional(package, "this needs", extra)


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


def example_batches(subject: Subject) -> tuple[Tensors, list[bool], int]:
    """The example with a batch of at least two, for one of one is taken for a constant; which inputs have a batch."""
    count = subject.tensors[0].shape[0] if subject.tensors[0].dim() else 1
    batched = [tensor.dim() > 0 and tensor.shape[0] == count for tensor in subject.tensors]
    doubled = tuple(
        torch.cat([tensor, tensor]) if is_batched and count == 1 else tensor
        for tensor, is_batched in zip(subject.tensors, batched, strict=True)
    )
    return doubled, batched, count


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
