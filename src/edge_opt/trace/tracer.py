"""The tracer: a model and its inputs in, a Trace out. Nothing is computed unless the model looks at values."""

from __future__ import annotations

import contextvars
import gc
import inspect
import multiprocessing
import os
import re
import signal
import sys
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, nullcontext, suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from edge_opt._support.unchanged import gc_paused, unchanged
from edge_opt.errors import EdgeOptError, InvalidInput, TraceFailed, message_of
from edge_opt.records.costs import Role, StorageInfo, Trace
from edge_opt.trace.escapes import NeedsData, forget_frames, release_trace_tensors
from edge_opt.trace.inputs import (
    CallArguments,
    InputSpec,
    ShapeOnlyModule,
    call_arguments,
    copied_with,
    default_dtype,
    map_arguments,
    meta_tensor,
    real_tensor,
)
from edge_opt.trace.lifetimes import Lifetimes, empty_meta_like, is_sparse, nbytes_of
from edge_opt.trace.module_calls import Frame, ModuleStack, module_paths, owned_parameters
from edge_opt.trace.probes import Probe
from edge_opt.trace.tape import Tape


class TracedModel(NamedTuple):
    """A model with what the trace needs to know of it."""

    model: nn.Module
    paths: dict[nn.Module, str]
    tensors: list[tuple[torch.Tensor, Role]]
    training: bool
    results: list[Any] | None


# A model, caches and random numbers belong to the process: one trace at a time may restore them.
_lock = threading.RLock()


def _new_lock() -> None:
    global _lock
    _lock = threading.RLock()


def one_at_a_time() -> threading.RLock:  # type: ignore[valid-type]
    """Return the lock that a trace holds: what it restores belongs to the process."""
    return _lock


if hasattr(os, "register_at_fork"):
    # A child forked while another thread traces would wait for that thread, which it does not have.
    os.register_at_fork(after_in_child=_new_lock)


def trace(
    model: nn.Module,
    inputs: Any,
    kwargs: Mapping[str, Any] | None = None,
    training: bool = False,
    results: list[Any] | None = None,
) -> Trace:
    """Record what `model` calls on these inputs, on meta tensors; on real ones where the model looks at values.

    Forward runs on the model itself, and then everything that can be reached from it is restored; see
    `edge_opt._support.unchanged`. Two traces in two threads take turns. What forward returns is added to `results`,
    with tensors that have a shape and no values.
    """
    model = unwrap_compiled(model)
    paths = module_paths(model)
    tensors = _own_tensors(paths)
    _check(model, paths, tensors)
    traced = TracedModel(model, paths, tensors, training, results)
    arguments = call_arguments(model, inputs, kwargs)
    with _lock:
        return trace_with_fallback(traced, arguments)


def trace_in_separate_process(*args: Any, **options: Any) -> Trace:
    """Return what `trace` returns, from a forked process: a crash there is refused with its signal.

    Forked rather than started afresh, because a model need not be picklable. Only this thread is copied, so that torch
    must not wait for its other threads there: it computes with one.
    """
    if "fork" not in multiprocessing.get_all_start_methods():
        raise InvalidInput("isolate=True needs a system that can fork a process: Linux, macOS or WSL")
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def work() -> None:
        torch.set_num_threads(1)
        try:
            sender.send(trace(*args, **options))
        except EdgeOptError as error:
            error.__cause__ = error.__context__ = None  # they may hold what cannot be pickled
            sender.send(error)
        except KeyboardInterrupt:  # Ctrl-C reaches both processes; this one would print a traceback
            raise SystemExit(130) from None

    process = context.Process(target=work)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork among threads: see above
        process.start()
    sender.close()
    try:
        outcome = receiver.recv()
    except EOFError:
        process.join()
        code = process.exitcode or 0
        if code >= 0:
            raise TraceFailed(f"forward ended the process that traced it, with exit code {code}") from None
        raise TraceFailed(
            f"the process that traced the model was ended by {signal.Signals(-code).name}. Tensors of a trace have no "
            "memory: code in C that reads data_ptr() must not run in forward when x.is_meta"
        ) from None
    finally:
        process.kill()
        process.join()
    if isinstance(outcome, EdgeOptError):
        raise outcome
    return outcome  # type: ignore[no-any-return]


def trace_with_fallback(traced: TracedModel, arguments: CallArguments) -> Trace:
    """Return the trace on meta tensors, or on real ones where those do not do."""
    if any(isinstance(module, torch.jit.ScriptModule) for module in traced.paths):
        return _real_trace(traced, arguments, "a script module runs inside TorchScript", None)
    if _has_sparse(traced, arguments):
        return _real_trace(traced, arguments, "the work of a sparse tensor follows from what it stores", None)
    with ExitStack() as settings:
        had_compiler = _without_compiler(settings)
        for _ in range(2):
            try:
                return _run(traced, arguments, is_real=False)
            except NeedsData as signal:
                why, refused = str(signal), None
                break
            except _Refused as error:
                if not had_compiler and _without_compiler(settings):
                    had_compiler = True
                    continue
                if error.is_certain:
                    raise _explained(error, arguments) from error.__cause__
                why, refused = f"{type(error.__cause__).__name__} on meta tensors", error
                break
        return _real_trace(traced, arguments, why, refused)


def _without_compiler(settings: ExitStack) -> bool:
    """Run functions as they are that torch would compile first: `torch.cond` and its like do so on their own.

    False where the compiler is not even imported, which takes seconds: a model that needs it imports it.
    """
    if "torch._dynamo" not in sys.modules:
        return False
    settings.enter_context(torch.compiler.set_stance("force_eager"))  # type: ignore[no-untyped-call]
    return True


def _has_sparse(traced: TracedModel, arguments: CallArguments) -> bool:
    """Return whether a tensor of the model or of its inputs is sparse; on the meta device it would store nothing."""
    inputs = [value for value in tree_leaves((arguments.args, arguments.kwargs)) if isinstance(value, torch.Tensor)]
    unusual = [tensor for tensor, _ in traced.tensors if tensor.layout is not torch.strided]
    return any(is_sparse(tensor) for tensor in inputs + unusual)


class _Refused(Exception):
    """Forward raised. `is_certain`: an operator refused its shapes, which real tensors would not change."""

    def __init__(self, is_certain: bool, frame: Frame | None) -> None:
        super().__init__()
        self.is_certain = is_certain
        self.call = None if frame is None else (frame.path, frame.kind, frame.inputs)


def unwrap_compiled(model: Any) -> nn.Module:
    """Return the module behind `torch.compile`; refuse anything that is not a module."""
    if not isinstance(model, nn.Module):
        what = f"the class {model.__name__}; call it first" if isinstance(model, type) else f"a {type(model).__name__}"
        raise InvalidInput(f"the model must be a torch.nn.Module, and this is {what}")
    eval_frame = sys.modules.get("torch._dynamo.eval_frame")
    if eval_frame is not None and isinstance(model, eval_frame.OptimizedModule):
        return unwrap_compiled(model._orig_mod)
    return model


def _own_tensors(modules: Iterable[nn.Module]) -> list[tuple[torch.Tensor, Role]]:
    """Return the model's parameters and buffers; a shared tensor once for each holder."""
    tensors: list[tuple[torch.Tensor, Role]] = []
    for module in modules:
        tensors += [(tensor, "parameter") for tensor in module._parameters.values() if tensor is not None]
        tensors += [(tensor, "buffer") for tensor in module._buffers.values() if tensor is not None]
    return tensors


def _check(model: nn.Module, paths: dict[nn.Module, str], tensors: list[tuple[torch.Tensor, Role]]) -> None:
    if len(paths) == 1 and type(model) in (nn.Module, nn.Sequential, nn.ModuleList, nn.ModuleDict):
        raise InvalidInput(f"the model is empty: a {type(model).__name__} with no layers")
    check_initialized(tensor for tensor, _ in tensors)


def check_initialized(tensors: Iterable[torch.Tensor]) -> None:
    """Refuse parameters and buffers of lazy modules that have no shape yet."""
    if any(map(nn.parameter.is_lazy, tensors)):
        raise InvalidInput("the model has lazy parameters without a shape; run it once on real inputs first")


def _real_trace(traced: TracedModel, arguments: CallArguments, why: str, refused: _Refused | None) -> Trace:
    """Record a real forward, because shapes alone were not enough."""
    if any(tensor.is_meta for tensor, _ in traced.tensors):
        if refused is not None:
            raise _explained(refused, arguments) from refused.__cause__
        raise TraceFailed(f"{why}, and its weights are on the meta device; build it with real weights to profile it")
    for has_gradients in (False, True):
        try:
            note = f"traced with real tensors: {why}"
            return _run(traced, arguments, is_real=True, note=note, has_gradients=has_gradients)
        except _Refused as again:
            if has_gradients or not any(words in str(again.__cause__) for words in _NO_GRADIENTS):
                raise _explained(again, arguments) from again.__cause__
            why = "forward computes gradients"
    raise AssertionError("the second attempt returns or raises")


# What torch says where a trace skipped autograd, in reverse mode and in forward mode.
_NO_GRADIENTS = ("does not require grad", "Expected this function to only be reached in inference mode")


def _run(
    traced: TracedModel, arguments: CallArguments, is_real: bool, note: str | None = None, has_gradients: bool = False,
    second: Probe | None = None,
) -> Trace:  # fmt: skip
    """Run forward under the tape; then nothing of it is left. A second time where it reads values: see `Probe`."""
    modules = list(traced.paths)
    stack, lifetimes = ModuleStack(traced.paths), Lifetimes()
    tape = Tape(stack, lifetimes, traced.tensors, is_real)
    probe = tape.outside.probe = second or tape.outside.probe
    owned = owned_parameters(traced.paths)
    has_failed = False
    with gc_paused():
        # While the collector is paused, objects of the two younger generations are those that the trace makes.
        gc.collect(1)
        try:
            with unchanged(modules, traced.training) as snapshot:
                tape.constants = snapshot.tensors
                if not isinstance(traced.model, ShapeOnlyModule):
                    tape.outside.arrays = snapshot.arrays
                    probe.watch(snapshot.arrays)
                storages, input_bytes, invented = _forward(traced, arguments, tape, has_gradients)
            calls = stack.calls(owned)
        except BaseException as error:
            forget_frames(error)
            has_failed = True
            raise
        finally:
            stack.end()
            tape.end()
            torch.clear_autocast_cache()  # type: ignore[no-untyped-call]
            release_trace_tensors(partial(lifetimes.survivors, tape.is_input_independent), has_failed)
    sizes = {id(tensor): nbytes_of(tensor) for tensor, _ in traced.tensors}
    buffers = {id(tensor) for tensor, role in traced.tensors if role == "buffer"}
    notes = (note, _INVENTED if tape.has_read_values and invented else None, *tape.notes)
    if probe.is_watching and second is None:
        again = probe.second()
        with suppress(NeedsData, _Refused, EdgeOptError):  # changed values may well be refused
            _run(traced._replace(results=None), arguments, is_real, None, has_gradients, again)
        tape.record_computed_numbers(again)
    return Trace(
        calls,
        tuple(tape.signatures),
        tuple(tape.ops),
        storages,
        params=sum(part.params for part in owned.values()),
        param_bytes=sum(part.param_bytes for part in owned.values()),
        trainable_params=sum(part.trainable_params for part in owned.values()),
        buffer_bytes=sum(sizes[address] for address in buffers),
        input_bytes=input_bytes,
        used_real_tensors=is_real,
        notes=tuple(text for text in notes if text),
        moved_tensor_bytes=_moved_tensor_bytes(traced.model, sizes),
    )


def _forward(
    traced: TracedModel, arguments: CallArguments, tape: Tape, has_gradients: bool
) -> tuple[tuple[StorageInfo, ...], int, bool]:
    """Run forward under the tape: the storages it made, the bytes it was given, and whether values were invented."""
    is_real, lifetimes, stack = tape.is_real, tape.lifetimes, tape.stack
    # torch runs a mode below autograd's layers of the dispatcher, where composite operators have come apart already.
    # This private guard skips these layers, so that `linear` or `layer_norm` reach the tape whole. A second mode above
    # autograd is no alternative: torch has none, and a TorchFunctionMode misses what C++ calls. If it disappears, the
    # tests of exact MACs fail with operators such as `addmm` in the place of `linear`.
    # Where forward itself asks autograd for gradients, composite operators do come apart.
    whole_operators = nullcontext() if has_gradients else torch._C._AutoDispatchBelowADInplaceOrView()
    with torch.set_grad_enabled(has_gradients), whole_operators:
        if not has_gradients:
            tape.outside.expect_no_versions()
        call, inputs, invented = _build_inputs(traced, arguments, is_real)
        for tensor in inputs:
            lifetimes.register(tensor, "input")
        buffers = [(tensor, tensor.clone()) for tensor, role in traced.tensors if is_real and role == "buffer"]
        if isinstance(traced.model, ShapeOnlyModule):
            stack.on_enter = None  # a file says itself what it casts
            tape.watches_values = False
        stack.watch(list(traced.paths))
        try:
            with tape:
                # In a copy of the context: what forward puts into a ContextVar is gone with it.
                context = contextvars.copy_context()
                result = context.run(traced.model, *call.args, **call.kwargs)
                context.run(_finish, result)
            if not isinstance(traced.model, ShapeOnlyModule):  # a file makes tensors of its own and computes nothing
                tape.record_outside_work(result)
        except (NeedsData, EdgeOptError):
            raise
        except Exception as error:
            raise _Refused(error is tape.shape_error, stack.refused) from error
        finally:
            stack.unwatch()
            for tensor, before in [*tape.saved, *buffers]:
                tensor.copy_(before)
        storages = lifetimes.finish()
        if traced.results is not None:
            traced.results.append(copied_with(empty_meta_like, result))
        del result
    return storages, sum(map(nbytes_of, inputs)), bool(invented)


def _finish(result: Any, most: int = 100_000) -> None:
    """Draw everything from a result that is computed step by step, such as a generator: it is work of forward."""
    if inspect.iscoroutine(result) or inspect.isasyncgen(result):
        if inspect.iscoroutine(result):
            result.close()
        raise TraceFailed("forward is asynchronous (async def), and nothing of it runs until it is awaited; wrap it")
    if isinstance(result, Iterator):
        for count, _ in enumerate(result):
            if count >= most:
                raise TraceFailed(f"forward returns a generator of more than {most:,} values; bound it to profile")
    elif isinstance(result, (Mapping, tuple, list)):
        for item in result.values() if isinstance(result, Mapping) else result:
            _finish(item)


def _moved_tensor_bytes(model: nn.Module, sizes: dict[int, int]) -> tuple[int, ...]:
    """Return the bytes of the model's tensors as `model.to(device)` moves them: children, parameters, then buffers."""
    moved: list[int] = []

    def visit(module: nn.Module) -> None:
        for child in module._modules.values():
            if child is not None:
                visit(child)
        moved.extend(map(id, module._parameters.values()))
        moved.extend(map(id, module._buffers.values()))

    visit(model)
    return tuple([sizes[address] for address in dict.fromkeys(moved) if address in sizes])


_INVENTED = "the model looks at values, and an input given by its shape alone was taken as zeros; pass real tensors"


def _build_inputs(
    traced: TracedModel, arguments: CallArguments, is_real: bool
) -> tuple[CallArguments, list[torch.Tensor], list[InputSpec]]:
    """Return the arguments with tensors of their own, those tensors, and the descriptions whose values are invented."""
    tensors: list[torch.Tensor] = []
    invented: list[InputSpec] = []
    device = next((tensor.device for tensor, _ in traced.tensors), torch.device("cpu"))
    dtype = default_dtype(traced.model)
    keeps_small = not isinstance(traced.model, ShapeOnlyModule)

    def make(value: Any) -> torch.Tensor:
        tensors.append(real_tensor(value, dtype, device) if is_real else meta_tensor(value, dtype, keeps_small))
        if isinstance(value, InputSpec) and not tensors[-1].is_meta:
            invented.append(value)
        return tensors[-1]

    return map_arguments(arguments, make), tensors, invented


def _explained(refused: _Refused, arguments: CallArguments) -> EdgeOptError:
    """Return the refusal as a sentence: which module, what it got, what it said."""
    call = refused.call
    complaint = message_of(refused.__cause__ or refused)
    if call is None:
        return TraceFailed(f"the model could not be called: {complaint}")
    path, kind, inputs = call
    where = f"module {path!r} ({kind})" if path else "the model's own forward"
    shapes = ", ".join(str(tuple(shape)) for shape in inputs) or "no tensors"
    return TraceFailed(f"{where} refused its input {shapes}: {complaint}{_hint(complaint, arguments)}")


_ABOUT_DTYPES = ("scalar type", "dtype", "LongTensor", "IntTensor", "must be long", "data type")


_TOO_FEW = re.compile(r"expected (\d)D.* \(got (\d)D input\)")


def _hint(complaint: str, arguments: CallArguments) -> str:
    """Return what to write instead of a shape without its batch, a tuple as a tensor, or integers without a dtype."""
    values = [*(("", value) for value in arguments.args), *arguments.kwargs.items()]
    shapes = [value.shape for _, value in values if isinstance(value, InputSpec)]
    sizes = _TOO_FEW.search(complaint)
    if sizes is not None and len(shapes) == 1 and int(sizes[1]) == int(sizes[2]) + 1 == len(shapes[0]) + 1:
        return f". The first number of a shape is the batch: {'x'.join(map(str, (1, *shapes[0])))}"
    # A tensor that is indexed by a name, such as batch["x"], stands where a dict should.
    if shapes and ("to unpack" in complaint or "invalid data type 'str'" in complaint):
        return ". A tuple or a dict of tensors comes from Python: def inputs(): return [{'x': ...}], -i file.py:inputs"
    if not any(words in complaint for words in _ABOUT_DTYPES):
        return ""
    for name, value in values:
        if isinstance(value, InputSpec) and value.dtype is None:
            wanted = "int64" if any(word in complaint for word in ("Long", "Int", "long", "indices")) else "DTYPE"
            shape = "x".join(map(str, value.shape))
            pair = (value.shape, wanted)
            text = f"{name or 'ids'}:{shape}:{wanted}"
            return f". An input given by its shape alone is floating; name its dtype: {text}, in Python {pair}"
    return ""
