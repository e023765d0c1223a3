"""The tracer: a model and its inputs in, a Trace out. Nothing is computed unless the model looks at values."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from edge_opt.errors import EdgeOptError, InvalidInput, TraceFailed
from edge_opt.records import Role, Trace
from edge_opt.trace.guard import as_found
from edge_opt.trace.inputs import CallArguments, InputSpec, call_arguments, materialize, meta_tensor, real_tensor
from edge_opt.trace.lifetimes import Lifetimes
from edge_opt.trace.modules import Frame, ModuleStack, module_paths, owned_parameters
from edge_opt.trace.tape import NeedsData, Tape


class _Subject(NamedTuple):
    """A model with what the trace needs to know of it."""

    model: nn.Module
    paths: dict[nn.Module, str]
    tensors: list[tuple[torch.Tensor, Role]]
    training: bool


def trace(model: nn.Module, inputs: Any, kwargs: Mapping[str, Any] | None = None, training: bool = False) -> Trace:
    """What `model` calls on these inputs, recorded on meta tensors; on real ones where the model looks at values."""
    model = _original(model)
    paths = module_paths(model)
    tensors = _own_tensors(paths)
    _check(model, paths, tensors)
    subject = _Subject(model, paths, tensors, training)
    arguments = call_arguments(model, inputs, kwargs)
    if any(isinstance(module, torch.jit.ScriptModule) for module in paths):
        return _real_trace(subject, arguments, "a script module runs inside TorchScript", None)
    try:
        return _run(subject, arguments, is_real=False)
    except NeedsData as signal:
        return _real_trace(subject, arguments, f"the model looks at values ({signal})", None)
    except _Refused as refused:
        if refused.is_certain:
            raise _explained(refused) from refused.__cause__
        return _real_trace(subject, arguments, f"{type(refused.__cause__).__name__} on meta tensors", refused)


class _Refused(Exception):
    """Forward raised. `is_certain`: an operator refused its shapes, which real tensors would not change."""

    def __init__(self, is_certain: bool, frame: Frame | None) -> None:
        super().__init__()
        self.is_certain = is_certain
        self.frame = frame


def _original(model: Any) -> nn.Module:
    """The module behind `torch.compile`; a clear refusal of anything that is not a module."""
    if not isinstance(model, nn.Module):
        what = f"the class {model.__name__}; call it first" if isinstance(model, type) else f"a {type(model).__name__}"
        raise InvalidInput(f"the model must be a torch.nn.Module, and this is {what}")
    eval_frame = sys.modules.get("torch._dynamo.eval_frame")
    if eval_frame is not None and isinstance(model, eval_frame.OptimizedModule):
        return _original(model._orig_mod)
    return model


def _own_tensors(modules: Iterable[nn.Module]) -> list[tuple[torch.Tensor, Role]]:
    """The model's parameters and buffers; a shared one once for each holder."""
    found: list[tuple[torch.Tensor, Role]] = []
    for module in modules:
        found += [(tensor, "parameter") for tensor in module._parameters.values() if tensor is not None]
        found += [(tensor, "buffer") for tensor in module._buffers.values() if tensor is not None]
    return found


def _check(model: nn.Module, paths: dict[nn.Module, str], tensors: list[tuple[torch.Tensor, Role]]) -> None:
    if len(paths) == 1 and type(model) in (nn.Module, nn.Sequential, nn.ModuleList, nn.ModuleDict):
        raise InvalidInput(f"the model is empty: a {type(model).__name__} with no layers")
    if any(nn.parameter.is_lazy(tensor) for tensor, _ in tensors):
        raise InvalidInput("the model has lazy parameters without a shape; run it once on real inputs first")


def _real_trace(subject: _Subject, arguments: CallArguments, why: str, refused: _Refused | None) -> Trace:
    """Record a real forward, because shapes alone were not enough."""
    if any(tensor.is_meta for tensor, _ in subject.tensors):
        if refused is not None:
            raise _explained(refused) from refused.__cause__
        raise TraceFailed(f"{why}, and its weights are on the meta device; build it with real weights to profile it")
    try:
        return _run(subject, arguments, is_real=True, note=f"traced with real tensors: {why}")
    except _Refused as again:
        raise _explained(again) from again.__cause__


def _run(subject: _Subject, arguments: CallArguments, is_real: bool, note: str | None = None) -> Trace:
    modules = list(subject.paths)
    stack = ModuleStack(subject.paths)
    lifetimes = Lifetimes()
    tape = Tape(stack, lifetimes, {id(tensor): role for tensor, role in subject.tensors}, is_real)
    # Below autograd's layers of the dispatcher, composite operators reach the tape before they come apart.
    whole_operators = torch._C._AutoDispatchBelowADInplaceOrView()
    with as_found(modules, subject.training), torch.no_grad(), whole_operators:
        call, inputs, invented = _made(subject, arguments, is_real)
        for tensor in inputs:
            lifetimes.register(tensor, "input")
        buffers = [(tensor, tensor.clone()) for tensor, role in subject.tensors if is_real and role == "buffer"]
        stack.watch(modules)
        try:
            with tape:
                result = subject.model(*call.args, **call.kwargs)
        except NeedsData:
            raise
        except Exception as error:
            is_certain = error is tape.shape_error
            raise _Refused(is_certain, stack.refused) from error
        finally:
            for tensor, before in [*tape.saved, *buffers]:
                tensor.copy_(before)
        storages = lifetimes.finish()
        del result
    owned = owned_parameters(modules)
    buffer_sizes = {id(t): t.numel() * t.itemsize for t, role in subject.tensors if role == "buffer"}
    return Trace(
        stack.calls(owned),
        tuple(tape.signatures),
        tuple(tape.ops),
        storages,
        params=sum(mine.params for mine in owned.values()),
        param_bytes=sum(mine.param_bytes for mine in owned.values()),
        trainable_params=sum(mine.trainable_params for mine in owned.values()),
        buffer_bytes=sum(buffer_sizes.values()),
        input_bytes=sum(tensor.numel() * tensor.itemsize for tensor in inputs),
        used_real_tensors=is_real,
        notes=tuple(text for text in (note, _INVENTED if tape.has_read_values and invented else None) if text),
    )


_INVENTED = "the model looks at values, and an input given by its shape alone was taken as zeros; pass real tensors"


def _made(
    subject: _Subject, arguments: CallArguments, is_real: bool
) -> tuple[CallArguments, list[torch.Tensor], list[InputSpec]]:
    """The call's arguments with tensors of their own; those tensors; and the descriptions whose values are invented."""
    made: list[torch.Tensor] = []
    invented: list[InputSpec] = []
    device = next((tensor.device for tensor, _ in subject.tensors), torch.device("cpu"))
    floating = (tensor.dtype for tensor, role in subject.tensors if role == "parameter" and tensor.is_floating_point())
    dtype = next(floating, torch.get_default_dtype())

    def make(value: Any) -> torch.Tensor:
        made.append(real_tensor(value, dtype, device) if is_real else meta_tensor(value, dtype))
        if isinstance(value, InputSpec) and not made[-1].is_meta:
            invented.append(value)
        return made[-1]

    return materialize(arguments, make), made, invented


def _explained(refused: _Refused) -> EdgeOptError:
    """The refusal as one sentence: which module, what it got, what it said."""
    error, frame = refused.__cause__, refused.frame
    first_line = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    if frame is None:
        return TraceFailed(f"the model could not be called: {first_line}")
    where = f"module {frame.path!r} ({type(frame.module).__name__})" if frame.path else "the model's own forward"
    shapes = ", ".join(str(tuple(shape)) for shape in frame.inputs) or "no tensors"
    return TraceFailed(f"{where} refused its input {shapes}: {first_line}")
